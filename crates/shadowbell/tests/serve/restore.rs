//! What it takes to go on with a controller that has many queues.

use crate::harness::{Server, run, until};
use crate::recover::kill;
use rustix::process::Signal;
use shadowbell_driver::{AttachOptions, QueuePair};
use shadowbell_spec::Status;
use shadowbell_testing::process_group::ProcessGroup;
use std::process::{Command, Stdio};

/// What the next process says to its supervisor before it goes on, as strace writes it.
const TAKEN: &str = "iov_base=\"A\"";

/// Follows the processes that a supervisor starts, and counts their system calls.
struct Strace(ProcessGroup);

impl Strace {
    /// Nothing where there is no strace, or it may not look.
    fn attach(server: &Server) -> Option<Self> {
        let mut command = Command::new("strace");
        command.args(["-f", "-qq", "-o"]).arg(server.directory().join("calls"));
        command.args(["-p", &server.pid().to_string()]).stdin(Stdio::null());
        let mut strace = Self(ProcessGroup::spawn(&mut command).ok()?);
        let status = format!("/proc/{}/status", server.pid());
        let is_traced = || {
            let status = std::fs::read_to_string(&status).unwrap();
            status.lines().any(|line| line.starts_with("TracerPid:") && !line.ends_with("\t0"))
        };
        let mut has_ended = false;
        until("a tracer", || {
            has_ended = strace.0.try_wait().unwrap().is_some();
            has_ended || is_traced()
        });
        (!has_ended).then_some(strace)
    }

    /// Leaves them alone again. How many calls the next process has made until it says that it has
    /// taken everything, and goes on.
    fn end(mut self, server: &Server) -> usize {
        self.0.signal(Signal::INT);
        self.0.wait();
        let calls = std::fs::read_to_string(server.directory().join("calls")).unwrap();
        let (before, _) = calls.split_once(TAKEN).expect("it says so");
        // The call by which it says so, of the thread that does all this.
        let thread = before.lines().last().and_then(|line| line.split_once(' ')).unwrap().0;
        let is_call = |line: &&str| {
            let whole = line.contains('(') && !line.contains(" resumed>");
            whole && line.split_once(' ').is_some_and(|(of, _)| of == thread)
        };
        before.lines().filter(is_call).count()
    }
}

/// A server whose one client has so many queues, each of which was used.
fn serving(queues: u16) -> (Server, shadowbell_driver::Controller, Vec<QueuePair>) {
    let server = Server::start(&["mem:16MiB"], &["--keeper", "-v", "--queues", "64"]);
    let options = AttachOptions { queue_pairs: queues, ..AttachOptions::default() };
    let mut client = server.attach_with(&options);
    let mut pairs: Vec<_> = std::iter::from_fn(|| client.take_queue_pair()).collect();
    assert_eq!(pairs.len(), usize::from(queues));
    use_each(&client, &mut pairs);
    (server, client, pairs)
}

fn use_each(client: &shadowbell_driver::Controller, pairs: &mut [QueuePair]) {
    let pool = client.buffers(1, 4096).unwrap();
    for (nth, pair) in pairs.iter_mut().enumerate() {
        let command = client.namespace(1).unwrap().write(nth as u64 * 8, 8).unwrap();
        assert_eq!(run(pair, command, pool.take()).status, Status::SUCCESS);
    }
}

/// The system calls of the process that goes on, until it does.
fn calls(queues: u16) -> Option<usize> {
    let (server, client, mut pairs) = serving(queues);
    let strace = Strace::attach(&server)?;
    kill(&server, Signal::KILL);
    use_each(&client, &mut pairs);
    let calls = strace.end(&server);
    drop((pairs, client));
    Some(calls)
}

/// A queue costs the next process few system calls before it goes on: its eventfd travels, and is
/// looked at. To raise interrupts takes as many again, and comes afterwards.
#[test]
fn a_queue_costs_the_next_process_few_calls() {
    let (Some(one), Some(many)) = (calls(1), calls(64)) else {
        return println!("skipped: it takes strace");
    };
    println!("{one} system calls with one queue, {many} with 64");
    assert!(many.saturating_sub(one) <= 63 * MOST_CALLS, "{one} with one queue, {many} with 64");
}

/// Of one queue. There are 5, and 12 if the interrupts come before.
const MOST_CALLS: usize = 7;

/// Measures it: `cargo test -p shadowbell --test serve restore:: -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement, of a machine that does nothing else"]
fn how_long_the_next_process_takes_with_64_queues() {
    let (server, client, mut pairs) = serving(64);
    for _ in 0..20 {
        // It has served for a while, so this is no crash loop.
        std::thread::sleep(std::time::Duration::from_millis(100));
        kill(&server, Signal::KILL);
        use_each(&client, &mut pairs);
    }
    let log = server.stderr();
    log.lines().filter(|line| line.contains("it took: ")).for_each(|line| println!("{line}"));
}
