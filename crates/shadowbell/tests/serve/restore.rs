//! Cost of recovering a controller with many queues, in system calls.

use crate::harness::{Server, run, until};
use crate::recover::kill;
use rustix::process::Signal;
use shadowbell_driver::{AttachOptions, QueuePair};
use shadowbell_spec::Status;
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::programs::skipped;
use std::process::{Command, Stdio};

/// Text in the output of strace for the message `RECOVERED`, which the next process sends to its
/// supervisor.
const TAKEN: &str = "iov_base=\"A\"";

/// strace of a supervisor and of the processes that it starts. It counts system calls.
struct Strace(ProcessGroup);

impl Strace {
    /// Attaches strace to the supervisor. `None` without strace, or without permission to trace.
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

    /// Ends strace. Returns the number of system calls that the recovering thread has made until it
    /// reports that it has recovered.
    fn end(mut self, server: &Server) -> usize {
        self.0.signal(Signal::INT);
        self.0.wait();
        let calls = std::fs::read_to_string(server.directory().join("calls")).unwrap();
        let (before, _) = calls.split_once(TAKEN).expect("the message that recovery is complete");
        // The thread that sends the report also makes all other system calls of the recovery.
        let thread = before.lines().last().and_then(|line| line.split_once(' ')).unwrap().0;
        let is_call = |line: &&str| {
            let whole = line.contains('(') && !line.contains(" resumed>");
            whole && line.split_once(' ').is_some_and(|(of, _)| of == thread)
        };
        before.lines().filter(is_call).count()
    }
}

/// Starts a server with one client of `queues` queues, and uses each queue.
fn serving(queues: u16) -> (Server, shadowbell_driver::Controller, Vec<QueuePair>) {
    let server = Server::start(&["mem:16MiB"], &["--supervisor", "-v", "--queues", "64"]);
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

/// Kills a server process whose client has `queues` queues. Returns the number of system calls of
/// the recovery.
fn calls(queues: u16) -> Option<usize> {
    let (server, client, mut pairs) = serving(queues);
    let strace = Strace::attach(&server)?;
    kill(&server, Signal::KILL);
    use_each(&client, &mut pairs);
    let calls = strace.end(&server);
    drop((pairs, client));
    Some(calls)
}

/// Before the next process reports that the clients' controllers are recovered, it makes only the
/// system calls that receive and check each queue's eventfd. It sets up interrupts later, because
/// this takes as many system calls again.
#[test]
fn recovery_of_a_queue_takes_few_system_calls() {
    let (Some(one), Some(many)) = (calls(1), calls(64)) else {
        return skipped("it takes strace");
    };
    println!("{one} system calls with one queue, {many} with 64");
    assert!(many.saturating_sub(one) <= 63 * MOST_CALLS, "{one} with one queue, {many} with 64");
}

/// Maximum number of system calls per queue. The next process needs 5, and would need 12 if it set
/// up interrupts before it reports [`TAKEN`].
const MOST_CALLS: usize = 7;

/// Measures the recovery time: `cargo test -p shadowbell --test serve restore:: -- --ignored
/// --nocapture`.
#[test]
#[ignore = "a measurement, of a machine that does nothing else"]
fn recovery_time_with_64_queues() {
    let (server, client, mut pairs) = serving(64);
    for _ in 0..20 {
        // The process serves for a while, so that its death is not part of a crash loop.
        std::thread::sleep(std::time::Duration::from_millis(100));
        kill(&server, Signal::KILL);
        use_each(&client, &mut pairs);
    }
    let log = server.stderr();
    log.lines().filter(|line| line.contains("it took: ")).for_each(|line| println!("{line}"));
}
