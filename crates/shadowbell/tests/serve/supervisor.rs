//! `serve --keeper`: a process that starts the one that serves, and starts it again.

use crate::harness::{Server, attach, finish, image, program, run, until};
use rustix::process::{Pid, Signal, kill_process};
use shadowbell_driver::AttachOptions;
use shadowbell_spec::Status;
use shadowbell_testing::wait::{moment, pause};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

fn start(disks: &[&str], options: &[&str]) -> Server {
    Server::start(disks, &[&["--keeper"], options].concat())
}

/// The process that serves.
pub(crate) fn worker(server: &Server) -> u32 {
    children(server.pid()).first().copied().expect("it has a worker")
}

pub(crate) fn children(pid: u32) -> Vec<u32> {
    let path = format!("/proc/{pid}/task/{pid}/children");
    let list = std::fs::read_to_string(path).unwrap_or_default();
    list.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

pub(crate) fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// Whether a process has ended, and nobody has asked how if it is not our child.
pub(crate) fn has_ended(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    !status.lines().any(|line| line.starts_with("State:") && !line.contains('Z'))
}

#[test]
fn signals_reach_the_worker_and_its_exit_status_comes_back() {
    for end in [Signal::TERM, Signal::INT] {
        let directory = tempfile::tempdir().unwrap();
        image(directory.path(), "disk.img", 1 << 20);
        let mut command = Command::new("env");
        command.arg("--default-signal=INT,HUP").arg(env!("CARGO_BIN_EXE_shadowbell"));
        command.args(["serve", "--keeper", "disk.img", "--socket", "vm.sock"]);
        command.args(["--stats-json", "stats.json"]);
        let mut server = Server::spawn(command, directory, &["vm.sock"]);
        let worker = worker(&server);
        let report = server.directory().join("stats.json");
        server.signal(Signal::USR1);
        until("the counters", || report.exists());
        server.signal(end);
        assert!(server.wait().success(), "{}", server.stderr());
        assert!(has_ended(worker) && !server.socket().exists());
        server.says("ended");
    }
}

/// As systemd does it: the signal goes to the worker as well. That is one signal, and not two, of
/// which the second would not wait for the disks.
#[test]
fn a_signal_to_all_processes_of_the_service_is_one() {
    for _ in 0..5 {
        let mut server = start(&["mem:1MiB"], &[]);
        let worker = worker(&server);
        server.signal(Signal::TERM);
        // It may have ended already.
        let _ = kill_process(Pid::from_raw(worker as i32).unwrap(), Signal::TERM);
        assert_eq!(server.wait().code(), Some(0), "{}", server.stderr());
        server.says("ended");
    }
}

#[test]
fn what_is_wrong_with_the_command_line_is_the_worker_s_to_say() {
    let mut command = program();
    command.args(["serve", "--keeper", "/nonexistent.img", "--socket", "/tmp/never.sock"]);
    let (status, _, errors) = finish(command);
    assert_eq!(status, Some(2), "{errors}");
    assert_eq!(errors.matches("there is no such file").count(), 1, "{errors}");
    let mut command = program();
    command.args(["serve", "--help"]);
    let (status, output, _) = finish(command);
    assert!(status == Some(0) && output.contains("--no-keeper"), "{output}");
    assert!(!output.contains("as-worker"), "{output}");
    let mut command = program();
    command.args(["serve", "--as-worker", "start", "mem:1MiB", "--socket", "x"]);
    let (status, _, errors) = finish(command);
    assert_eq!(status, Some(2), "{errors}");
    assert!(errors.contains("leave it out"), "{errors}");
}

#[test]
fn a_worker_that_dies_is_started_again() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path(), "disk.img", 4 << 20);
    let mut server = Server::start_in(directory, &["disk.img"], &["--keeper"]);
    for end in [Signal::KILL, Signal::ABORT] {
        let before = worker(&server);
        let mut controller = server.attach();
        let mut queue = controller.take_queue_pair().unwrap();
        let pool = controller.buffers(1, 4096).unwrap();
        let read = controller.namespace(1).unwrap().read(0, 8).unwrap();
        assert_eq!(run(&mut queue, read, pool.take()).status, Status::SUCCESS);
        signal(before, end);
        server.says(&format!("process {before}, which served, was ended by signal"));
        until("another worker", || children(server.pid()).iter().any(|pid| *pid != before));
        assert_ne!(worker(&server), before);
        drop((queue, pool, controller));
        until("its socket", || std::os::unix::net::UnixStream::connect(server.socket()).is_ok());
        attach(&server.socket(), &AttachOptions::default());
    }
    assert!(server.stop().success(), "{}", server.stderr());
}

#[test]
fn a_worker_that_dies_again_and_again_is_given_up() {
    let mut server = start(&["mem:1MiB"], &[]);
    let mut killed = Vec::new();
    // The waits in between grow to some seconds.
    while server.is_alive() {
        let worker = children(server.pid()).first().copied();
        if let Some(worker) = worker.filter(|worker| !killed.contains(worker)) {
            // When it serves.
            let socket = server.socket();
            until("its socket", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
            attach(&socket, &AttachOptions::default());
            killed.push(worker);
            signal(worker, Signal::ABORT);
        }
        assert!(killed.len() <= 8);
        pause();
    }
    assert_eq!(killed.len(), 8);
    assert_eq!(server.wait().code(), Some(1));
    server.says("after 8 deaths within a minute it is not restarted");
    // At first it goes on with what it has left, which may be the reason; then no more.
    server.says("has recovered the clients");
    server.says("have lost their controllers");
}

#[test]
fn without_its_supervisor_a_worker_ends() {
    let mut server = start(&["mem:1MiB"], &[]);
    // Its socket, which the supervisor makes, is there before it serves.
    drop(server.attach());
    let worker = worker(&server);
    server.signal(Signal::KILL);
    assert_eq!(server.wait().signal(), Some(9));
    until("the worker's end", || has_ended(worker));
    server.says("the supervisor has ended, so this process ends too");
    // In good order. Who could remove the socket is gone; whoever comes next replaces it.
    let error = std::os::unix::net::UnixStream::connect(server.socket()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    server.says("ended");
}

#[test]
fn a_second_signal_does_not_wait() {
    let mut server = start(&["mem:1MiB"], &[]);
    let worker = worker(&server);
    // It can not end.
    signal(worker, Signal::STOP);
    server.signal(Signal::TERM);
    moment();
    assert!(server.is_alive());
    server.signal(Signal::TERM);
    assert_eq!(server.wait().code(), Some(1));
    assert!(has_ended(worker));
}

#[test]
fn a_supervisor_is_small_and_does_nothing() {
    let server = start(&["mem:1MiB"], &[]);
    let status = |key: &str| crate::idle::status_of(server.pid(), "shadowbell", key);
    let threads = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap().count();
    // One of them waits to be asked for images, and one for sockets. If something was replaced
    // since it began, one closes descriptors.
    assert!((3..=4).contains(&threads), "{threads}");
    // Who looks for another supervisor asks this one, too, as other tests do.
    until("a second without a wakeup", || {
        let before = status("voluntary_ctxt_switches");
        // The time in which a thread with a timer, or one that polls, would wake up.
        std::thread::sleep(std::time::Duration::from_secs(1));
        status("voluntary_ctxt_switches") == before
    });
    let kib = |key: &str| status(key).split(' ').next().unwrap().parse::<u64>().unwrap();
    // No thread of theirs has to wait for the system to make room for more files.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    let limit = limit.unwrap_or(1 << 16).min(1 << 16);
    let its = |pid| crate::idle::status_of(pid, "shadowbell", "FDSize").parse::<u64>().unwrap();
    assert!(its(server.pid()) >= limit && its(worker(&server)) >= limit);
    println!("resident: {} KiB of its own, {} KiB of files", kib("RssAnon"), kib("RssFile"));
    // Pages of the program's file belong to the page cache and depend on the build.
    assert!(kib("RssAnon") < 2048, "{} KiB", kib("RssAnon"));
    // The same after it had something to do.
    drop(server.attach());
    until("the supervisor is small", || kib("RssAnon") < 2048);
}

#[test]
fn who_asks_for_an_upgrade_of_nothing_is_told() {
    let server = Server::start(&["mem:1MiB"], &["--no-keeper"]);
    for target in [server.pid().to_string(), server.socket().display().to_string()] {
        let mut command = program();
        command.arg("upgrade").arg(&target);
        let (status, _, errors) = finish(command);
        assert_eq!(status, Some(2), "{errors}");
        assert!(errors.contains("no server with a supervisor found"), "{errors}");
    }
    let mut command = program();
    command.args(["upgrade", "1", "--binary", "/nonexistent"]);
    let (status, _, errors) = finish(command);
    assert!(status == Some(2) && errors.contains("--binary /nonexistent"), "{errors}");
}
