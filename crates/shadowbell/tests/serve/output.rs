//! Output of a server: log lines, example commands, counters, traces.

use crate::control::ctl_json;
use crate::harness::{Server, finish, program, run, until};
use rustix::process::Signal;
use serde_json::Value;
use shadowbell_driver::{AttachOptions, Controller};
use shadowbell_spec::Status;

/// Reads one block `count` times, at depth 1.
fn read_blocks(controller: &mut Controller, count: u64) {
    let namespace = controller.namespace(1).unwrap().clone();
    let pool = controller.buffers(1, 4096).unwrap();
    let mut queue = controller.create_or_take();
    for n in 0..count {
        let done = run(&mut queue, namespace.read(n % 8 * 8, 8).unwrap(), pool.take());
        assert_eq!(done.status, Status::SUCCESS);
    }
}

trait Queues {
    fn create_or_take(&mut self) -> shadowbell_driver::QueuePair;
}

impl Queues for Controller {
    fn create_or_take(&mut self) -> shadowbell_driver::QueuePair {
        self.take_queue_pair().unwrap_or_else(|| self.create_queue_pair(64).unwrap())
    }
}

#[test]
fn each_step_of_a_guest_is_logged() {
    let mut server = Server::start(&["mem:4MiB", "null:1TiB?read-only=on"], &[]);
    let name = server.socket().display().to_string();
    server.wait_for_log(&format!(
        "{name}: serving mem:4MiB (4.0 MiB), null:1TiB (1.0 TiB, read-only)"
    ));
    let mut controller = server.attach();
    read_blocks(&mut controller, 10);
    server.wait_for_log("the guest has 2 I/O queues");
    controller.detach().unwrap();
    server.wait_for_log("has left");
    assert!(server.stop().success());
    let printed = server.stderr();
    let mut rest = printed.as_str();
    for words in [
        "a client is attached",
        "the guest has enabled the controller",
        "shadow doorbells",
        "the guest has shut the controller down",
        "the client has left, after 10 I/O commands with",
        "ended",
    ] {
        let at =
            rest.find(words).unwrap_or_else(|| panic!("no {words:?} in its place:\n{printed}"));
        rest = &rest[at + words.len()..];
    }
    for line in printed.lines().filter(|line| line.contains("the guest") || line.contains("client"))
    {
        // The line begins with a time, for example 2026-11-23T16:18:13.123456Z.
        let (time, printed) = line.split_once(' ').unwrap();
        assert!(time.len() == 27 && time.ends_with('Z') && time.contains('T'), "{line}");
        assert!(printed.starts_with(&format!("{name}: ")), "{line}");
    }
}

#[test]
fn the_arguments_to_paste_are_on_standard_output() {
    let server = Server::start(&["mem:4MiB"], &[]);
    until("the arguments", || server.stdout().contains("--user-device"));
    let socket = server.socket().canonicalize().unwrap().display().to_string();
    let printed = server.stdout();
    let device = format!(
        "-device '{{\"driver\":\"vfio-user-pci\",\"socket\":{{\"path\":\"{socket}\",\"type\":\"unix\"}}}}'"
    );
    assert!(printed.contains(&device), "{printed}");
    assert!(
        printed.contains("-object memory-backend-memfd,id=mem,size=SIZE,share=on"),
        "{printed}"
    );
    assert!(printed.contains(&format!("--user-device socket={socket}\n")), "{printed}");

    let mut quiet = Server::start(&["mem:4MiB"], &["-q"]);
    drop(quiet.attach());
    assert!(quiet.stop().success());
    assert_eq!((quiet.stdout(), quiet.stderr()), (String::new(), String::new()));
}

fn counters(server: &Server) -> Value {
    ctl_json(server, &["stats"])
}

#[test]
fn counters_add_up() {
    let mut server = Server::start(&["mem:4MiB"], &[]);
    assert_eq!(counters(&server)["commands"], 0);
    let mut controller = server.attach();
    read_blocks(&mut controller, 100);
    let now = counters(&server);
    assert_eq!((&now["commands"], &now["completions"]), (&Value::from(100), &Value::from(100)));
    let one = &now["controllers"][0];
    assert_eq!(one["socket"], server.socket().display().to_string());
    assert!(one["submission_queues"][0]["commands"].as_u64().unwrap() > 5, "admin commands: {one}");
    assert_eq!(one["io"]["reads"], 100);
    assert_eq!(one["io"]["bytes_read"], 100 * 4096);
    controller.detach().unwrap();
    // The totals also count commands of deleted queues and of disconnected clients.
    until("the client to leave", || counters(&server)["commands"] == 100);
    let mut controller = server.attach();
    read_blocks(&mut controller, 11);
    drop(controller);
    assert_eq!(counters(&server)["commands"], 111);
    assert!(server.stop().success());
    server.wait_for_log("111 I/O commands, ");
}

#[test]
fn trapped_doorbells_are_counted() {
    let server = Server::start(&["mem:4MiB"], &["--doorbells", "mmio"]);
    let mut controller = server.attach();
    read_blocks(&mut controller, 50);
    let now = counters(&server);
    let writes = now["doorbell_mmio_writes"].as_u64().unwrap();
    assert!((50..=101).contains(&writes), "{writes} for 50 commands");
}

#[test]
fn counters_are_logged_on_sigusr1() {
    let mut server = Server::start(&["mem:4MiB"], &[]);
    server.signal(Signal::USR1);
    server.wait_for_log("0 I/O commands, 0 doorbell writes (0 trapped, 0 by eventfd)");
    assert!(server.is_alive());
}

#[test]
fn a_trace_shows_every_decision() {
    let mut server = Server::start(
        &["mem:4MiB"],
        &["--trace", "trace", "--trace-records", "4096", "--poll", "never"],
    );
    let options = AttachOptions { queue_pairs: 1, ..AttachOptions::default() };
    let mut controller = server.attach_with(&options);
    read_blocks(&mut controller, 20);
    let file = server.directory().join("trace");
    let trace = |options: &[&str]| {
        let mut command = program();
        command.arg("trace").arg(&file).args(options);
        let (status, out, errors) = finish(command);
        assert_eq!(status, Some(0), "{errors}");
        out
    };
    // The trace file is readable while the server writes it.
    let all = trace(&[]);
    for words in ["EventIdx armed", "sleep", "wake after", "batch fetched", "SQ 1", "interrupt"] {
        assert!(all.contains(words), "{words:?} is not in\n{all}");
    }
    let batches = trace(&["--kind", "batch-fetched", "--queue", "1"]);
    let lines: Vec<_> = batches.lines().take_while(|line| !line.is_empty()).collect();
    assert!(lines.len() >= 10, "{batches}");
    assert!(lines.iter().all(|line| line.contains("SQ 1") && line.contains("batch fetched")));
    assert!(batches.contains(&format!("{} records in", lines.len())));
    assert_eq!(
        trace(&["--kind", "batch-fetched", "--last", "3", "--queue", "1"])
            .lines()
            .take_while(|l| !l.is_empty())
            .count(),
        3
    );
    assert!(trace(&["--summary", "--queue", "9"]).contains("No matching records"));
    controller.detach().unwrap();
    assert!(server.stop().success());
    assert!(trace(&["--summary"]).contains("records in"), "and when it is over");
}

#[test]
fn a_file_that_is_no_trace_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    std::fs::write(at.join("text"), "x".repeat(10_000)).unwrap();
    std::fs::write(at.join("empty"), "").unwrap();
    for (name, words) in [
        ("text", "this is not a trace"),
        ("empty", "this is not a trace"),
        (".", "this is not a trace"),
        ("missing", "cannot read missing"),
    ] {
        let mut command = program();
        command.args(["trace", name]).current_dir(at);
        let (status, _, errors) = finish(command);
        assert_eq!(status, Some(2), "{errors}");
        assert!(errors.contains(words), "{errors}");
    }
}
