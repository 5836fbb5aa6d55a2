//! A server that does wrong on purpose, and a driver that copes with it. Only in a build that can:
//! `cargo test -p shadowbell --features faults`.

use crate::harness::{PATIENCE, Server};
use driver::{AttachOptions, Timeouts};
use spec::Status;
use std::time::{Duration, Instant};

#[test]
fn a_driver_copes_with_a_server_that_does_wrong() {
    let faults = "hang:every=7,drop-after:every=11,duplicate:every=3";
    let server = Server::start(&["mem:4MiB"], &["--faults", faults]);
    let timeouts = Timeouts { io: Duration::from_millis(20), ..Timeouts::default() };
    let mut controller = server.attach_with(&AttachOptions { timeouts, ..Default::default() });
    let namespace = controller.namespace(1).unwrap().clone();
    let mut queue = controller.take_queue_pair().unwrap();
    let pool = controller.buffers(8, 4096).unwrap();
    let deadline = Instant::now() + PATIENCE;
    for round in 0..20 {
        for lba in 0..8 {
            queue.submit(namespace.read(lba * 8, 8).unwrap(), pool.take()).unwrap();
        }
        while queue.outstanding() != 0 {
            let _ = queue.wait(Some(deadline)).unwrap();
            while let Some(completion) = queue.pop() {
                assert_eq!(completion.status, Status::SUCCESS, "round {round}");
            }
            assert!(Instant::now() < deadline);
        }
    }
    let stats = controller.recovery_stats();
    assert!(stats.queues_recreated > 0 && stats.aborts > 0, "{stats:?}");
    assert!(queue.stats().unknown_completions > 0);
    drop(queue);
    controller.detach().unwrap();
}

#[test]
fn faults_that_there_are_not_are_refused() {
    let mut command = crate::harness::program();
    let output = command.args(["serve", "mem:1MiB", "--socket", "x", "--faults", "hang:often"]);
    let output = output.output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("no condition"), "{text}");
}
