//! Server with injected faults, from which the driver recovers.

use crate::harness::{Server, run};
use shadowbell_driver::{AttachOptions, Recovery, Timeouts};
use shadowbell_spec::Status;
use shadowbell_testing::wait::deadline;
use std::time::{Duration, Instant};

#[test]
fn a_driver_recovers_from_injected_faults() {
    let faults = "hang:every=7,drop-after:every=11,duplicate:every=3";
    let server = Server::start(&["mem:4MiB"], &["--faults", faults]);
    // The timeout is short, so that the driver aborts hung commands soon. It may also abort
    // commands that are only slow.
    let timeouts = Timeouts { io: Duration::from_millis(20), ..Timeouts::default() };
    // The limit of repeats is high, because a command may time out several times on a busy machine.
    let recovery = Recovery { repeats: 100, ..Recovery::default() };
    let options = AttachOptions { timeouts, recovery, ..AttachOptions::default() };
    let mut controller = server.attach_with(&options);
    let namespace = controller.namespace(1).unwrap().clone();
    let mut queue = controller.take_queue_pair().unwrap();
    let pool = controller.buffers(8, 4096).unwrap();
    let deadline = deadline();
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

/// A command with an injected hang of limited time is not executed, and ends with an error after
/// this time. The driver need not abort it.
#[test]
fn a_timed_hang_ends_with_an_error() {
    let server = Server::start(&["mem:4MiB"], &["--faults", "hang=20ms:every=4"]);
    let mut controller = server.attach();
    let namespace = controller.namespace(1).unwrap().clone();
    let mut queue = controller.take_queue_pair().unwrap();
    let pool = controller.buffers(1, 4096).unwrap();
    for n in 1..=12u64 {
        let mut buffer = pool.take().unwrap();
        buffer.fill(n as u8);
        let status = run(&mut queue, namespace.write(n * 8, 8).unwrap(), Some(buffer)).status;
        let expected = if n % 4 == 0 { Status::INTERNAL } else { Status::SUCCESS };
        assert_eq!(status, expected, "{n}");
    }
    let stats = controller.recovery_stats();
    assert_eq!((stats.aborts, stats.queues_recreated), (0, 0), "{stats:?}");
    let read = run(&mut queue, namespace.read(4 * 8, 8).unwrap(), pool.take());
    assert_eq!(read.status, Status::SUCCESS);
    assert!(
        read.buffer.unwrap().to_vec(4096).iter().all(|b| *b == 0),
        "a hung command was not executed"
    );
    drop(queue);
    controller.detach().unwrap();
}

/// `bench --timeout` sets the timeout for commands that hang, instead of the default of 30 s.
#[test]
fn bench_recovers_after_its_timeout() {
    let server = Server::start(&["mem:4MiB"], &["--faults", "hang:every=50"]);
    let socket = format!("vfio-user:{}", server.socket().display());
    let mut command = crate::harness::program();
    command.args(["bench", &socket, "--number-ios", "1000", "--timeout", "50ms", "--json"]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let help = crate::harness::program().args(["serve", "--help"]).output().unwrap();
    let help = String::from_utf8_lossy(&help.stdout).into_owned();
    for words in ["drop-before", "hang=TIME", "status=STATUS", "`--timeout` of `bench`"] {
        assert!(help.contains(words), "{words}: {help}");
    }
}

#[test]
fn invalid_fault_conditions_are_refused() {
    let mut command = crate::harness::program();
    let output = command.args(["serve", "mem:1MiB", "--socket", "x", "--faults", "hang:often"]);
    let output = output.output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("invalid condition"), "{text}");
}
