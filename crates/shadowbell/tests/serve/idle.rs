//! Idle servers: no wakeups, and few threads.

use crate::harness::{Server, run, until};
use crate::supervisor::{children, worker};
use shadowbell_driver::{AttachOptions, SpinPolicy};
use shadowbell_spec::Status;
use shadowbell_testing::wait::deadline;
use std::time::{Duration, Instant};

/// Number of context switches of each thread of a process, by thread id. Threads that the kernel
/// creates for io_uring are left out, because they wake up every five seconds until they end.
fn switches(pid: u32) -> Vec<(u32, String, u64)> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let of = |thread: std::fs::DirEntry| {
        let status = std::fs::read_to_string(thread.path().join("status")).ok()?;
        let name = status.lines().next()?.strip_prefix("Name:\t")?.to_owned();
        let counts = status.lines().filter(|line| line.contains("voluntary_ctxt_switches"));
        let count = counts.filter_map(|line| line.split('\t').nth(1)?.parse::<u64>().ok()).sum();
        let tid = thread.file_name().to_str()?.parse().ok()?;
        (!name.starts_with("iou-wrk-")).then_some((tid, name, count))
    };
    threads.filter_map(|thread| of(thread.ok()?)).collect()
}

/// Number of context switches of each thread of the supervisor and of the server process.
fn all_switches(server: &Server) -> Vec<(u32, String, u64)> {
    let all = [vec![server.pid()], children(server.pid())].concat();
    all.into_iter().flat_map(switches).collect()
}

#[track_caller]
fn is_idle(server: &Server) {
    // The condition is repeated, because earlier work may take a while on a busy machine. It never
    // holds if a thread polls or has a periodic timer.
    until("2 s without a context switch", || {
        let before = all_switches(server);
        // Interval in which no thread may run.
        std::thread::sleep(Duration::from_secs(2));
        before == all_switches(server)
    });
}

#[test]
fn a_server_without_a_client_does_not_wake() {
    is_idle(&Server::start(&["mem:4MiB"], &[]));
}

#[test]
fn an_attached_idle_controller_does_not_wake() {
    for doorbells in ["shadow", "mmio"] {
        let server = Server::start(&["mem:4MiB", "null:1GiB"], &["--doorbells", doorbells]);
        let mut controller = server.attach();
        let namespace = controller.namespace(1).unwrap().clone();
        let mut queues =
            [controller.take_queue_pair().unwrap(), controller.take_queue_pair().unwrap()];
        let pool = controller.buffers(1, 4096).unwrap();
        for _ in 0..3 {
            for queue in &mut queues {
                let done = run(queue, namespace.read(0, 8).unwrap(), pool.take());
                assert_eq!(done.status, Status::SUCCESS);
            }
            is_idle(&server);
        }
    }
}

#[test]
fn many_controllers_share_few_threads() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("vms.toml");
    let controllers: String = (0..64)
        .map(|n| format!("[[controller]]\nsocket = \"vm{n}.sock\"\ndisks = [\"mem:1MiB\"]\n"))
        .collect();
    std::fs::write(&file, format!("workers = 2\n{controllers}")).unwrap();
    let mut command = crate::harness::program();
    command.args(["serve", "--no-supervisor", "--config"]).arg(&file);
    let server = Server::spawn(command, directory, &["vm0.sock", "vm63.sock"]);
    let options = shadowbell_driver::AttachOptions::default();
    let attached: Vec<_> = (0..64)
        .map(|n| crate::harness::attach(&server.directory().join(format!("vm{n}.sock")), &options))
        .collect();
    let threads = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
    let names = threads.map(|t| std::fs::read_to_string(t.unwrap().path().join("comm")).unwrap());
    let (control, others): (Vec<_>, Vec<_>) = names.partition(|name| name == "sb-control\n");
    // Two I/O threads, the reactor, the event log, the log, the control socket, the watches for
    // resized and for stalled disks, and the signal thread.
    assert_eq!(others.len(), 9, "{others:?}");
    // The control thread and its standby thread. A second standby thread exists if the first has
    // just taken over.
    assert!((2..=3).contains(&control.len()), "{}", control.len());
    is_idle(&server);
    drop(attached);
}

/// Returns a field of the status file in procfs, for the only thread with this name.
pub(crate) fn status_of(pid: u32, name: &str, key: &str) -> String {
    let mut threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let thread = threads.find_map(|thread| {
        let path = thread.unwrap().path();
        // A thread that has ended since the listing is skipped.
        let comm = std::fs::read_to_string(path.join("comm")).ok()?;
        (comm.trim_end() == name).then_some(path)
    });
    let status = std::fs::read_to_string(thread.unwrap().join("status")).unwrap();
    let value = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    value.unwrap().trim().to_owned()
}

/// Number of voluntary context switches of a thread.
pub(crate) fn sleeps_of(pid: u32, name: &str) -> u64 {
    status_of(pid, name, "voluntary_ctxt_switches").parse().unwrap()
}

#[test]
fn shadow_doorbells_wake_the_io_thread_without_the_reactor() {
    // With shadow doorbells, a doorbell write that wakes a sleeping I/O thread signals the thread's
    // eventfd directly. The reactor thread is not involved.
    let server = Server::start(&["mem:4MiB"], &["--poll", "never", "--workers", "1"]);
    let options = AttachOptions { queue_pairs: 1, spin: SpinPolicy::SLEEP, ..Default::default() };
    let mut controller = server.attach_with(&options);
    let namespace = controller.namespace(1).unwrap().clone();
    let mut queue = controller.take_queue_pair().unwrap();
    let pool = controller.buffers(1, 4096).unwrap();
    let (reactor, slept) =
        (sleeps_of(worker(&server), "sb-reactor"), sleeps_of(worker(&server), "sb-worker0"));
    const COMMANDS: u64 = 200;
    for _ in 0..COMMANDS {
        // The test waits, because on a busy CPU the driver may submit before the I/O thread sleeps.
        until("the worker's sleep", || {
            status_of(worker(&server), "sb-worker0", "State").starts_with('S')
        });
        let token = queue.submit(namespace.read(0, 8).unwrap(), pool.take()).unwrap();
        let deadline = deadline();
        let completion = loop {
            if queue.wait(Some(deadline)).unwrap()
                && let Some(completion) = queue.pop()
            {
                break completion;
            }
            assert!(Instant::now() < deadline, "a lost wakeup");
        };
        assert_eq!((completion.token, completion.status), (token, Status::SUCCESS));
    }
    let slept = sleeps_of(worker(&server), "sb-worker0") - slept;
    assert!(slept >= COMMANDS - 1, "the I/O thread sleeps before each command: {slept}");
    let reactor = sleeps_of(worker(&server), "sb-reactor") - reactor;
    assert!(reactor <= 10, "{reactor} wakeups of the reactor for {COMMANDS} commands");
}
