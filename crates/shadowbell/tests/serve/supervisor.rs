//! `serve --supervisor`: a supervisor starts and restarts the server process.

use crate::harness::{Server, attach, finish, image, program, program_with_sighup, run, until};
use crate::recover::kill;
use crate::upgrade::Client;
use rustix::process::{Pid, Signal, kill_process};
use shadowbell_driver::AttachOptions;
use shadowbell_spec::Status;
use shadowbell_state::AbortPoint;
use shadowbell_testing::stalled::Mount;
use shadowbell_testing::wait::short_pause;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

fn start(disks: &[&str], options: &[&str]) -> Server {
    Server::start(disks, &[&["--supervisor"], options].concat())
}

/// Process id of the server process.
pub(crate) fn worker(server: &Server) -> u32 {
    children(server.pid()).first().copied().expect("the supervisor has a server process")
}

pub(crate) fn children(pid: u32) -> Vec<u32> {
    let path = format!("/proc/{pid}/task/{pid}/children");
    let list = std::fs::read_to_string(path).unwrap_or_default();
    list.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

pub(crate) fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// Returns true if a process has ended or is a zombie.
pub(crate) fn has_ended(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    !status.lines().any(|line| line.starts_with("State:") && !line.contains('Z'))
}

#[test]
fn signals_are_forwarded_and_the_exit_status_returned() {
    for end in [Signal::TERM, Signal::INT] {
        let directory = tempfile::tempdir().unwrap();
        image(directory.path(), "disk.img", 1 << 20);
        let mut command = Command::new("env");
        command.arg("--default-signal=INT,HUP").arg(env!("CARGO_BIN_EXE_shadowbell"));
        command.args(["serve", "--supervisor", "disk.img", "--socket", "vm.sock"]);
        let mut server = Server::spawn(command, directory, &["vm.sock"]);
        let worker = worker(&server);
        server.signal(Signal::USR1);
        server.wait_for_log("0 I/O commands, 0 doorbell writes (0 trapped, 0 by eventfd)");
        server.signal(end);
        assert!(server.wait().success(), "{}", server.stderr());
        assert!(has_ended(worker) && !server.socket().exists());
        server.wait_for_log("ended");
    }
}

/// If supervisor and server process both receive the same signal, for example from systemd, the
/// server counts it once. A second signal would end the server without waiting for its disks.
#[test]
fn a_signal_to_all_processes_counts_once() {
    for _ in 0..5 {
        let mut server = start(&["mem:1MiB"], &[]);
        let worker = worker(&server);
        server.signal(Signal::TERM);
        // An error is ignored, because the server process may have ended already.
        let _ = kill_process(Pid::from_raw(worker as i32).unwrap(), Signal::TERM);
        assert_eq!(server.wait().code(), Some(0), "{}", server.stderr());
        server.wait_for_log("ended");
    }
}

#[test]
fn command_line_errors_are_reported_once() {
    let mut command = program();
    command.args(["serve", "--supervisor", "/nonexistent.img", "--socket", "/tmp/never.sock"]);
    let (status, _, errors) = finish(command);
    assert_eq!(status, Some(1), "{errors}");
    assert_eq!(errors.matches("there is no such file").count(), 1, "{errors}");
    let mut command = program();
    command.args(["serve", "--help"]);
    let (status, output, _) = finish(command);
    assert!(status == Some(0) && output.contains("--no-supervisor"), "{output}");
    assert!(!output.contains("as-worker"), "{output}");
    let mut command = program();
    command.args(["serve", "--as-worker", "start", "mem:1MiB", "--socket", "x"]);
    let (status, _, errors) = finish(command);
    assert_eq!(status, Some(2), "{errors}");
    assert!(errors.contains("leave it out"), "{errors}");
}

#[test]
fn a_dead_server_process_is_restarted() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path(), "disk.img", 4 << 20);
    let mut server = Server::start_in(directory, &["disk.img"], &["--supervisor"]);
    for end in [Signal::KILL, Signal::ABORT] {
        let before = worker(&server);
        let mut controller = server.attach();
        let mut queue = controller.take_queue_pair().unwrap();
        let pool = controller.buffers(1, 4096).unwrap();
        let read = controller.namespace(1).unwrap().read(0, 8).unwrap();
        assert_eq!(run(&mut queue, read, pool.take()).status, Status::SUCCESS);
        signal(before, end);
        server.wait_for_log(&format!("process {before}, which served, was ended by signal"));
        until("another worker", || children(server.pid()).iter().any(|pid| *pid != before));
        assert_ne!(worker(&server), before);
        drop((queue, pool, controller));
        until("its socket", || std::os::unix::net::UnixStream::connect(server.socket()).is_ok());
        attach(&server.socket(), &AttachOptions::default());
    }
    assert!(server.stop().success(), "{}", server.stderr());
}

/// A server process that recovers the clients and crashes afterwards is replaced each time, without
/// a limit. So no client loses its controller.
#[test]
fn a_crash_loop_in_service_costs_no_client_its_controller() {
    let mut server = start(&["mem:1MiB"], &[]);
    let mut client = Client::attach(&server.socket());
    client.write(1, 0, 7);
    for _ in 0..9 {
        let before = worker(&server);
        signal(before, Signal::ABORT);
        until("another process", || children(server.pid()).iter().any(|pid| *pid != before));
        assert_eq!(server.with_hang_report(|| client.read(1, 0)), 7);
    }
    let log = server.stderr();
    assert!(!log.contains("have lost their controllers"), "{log}");
    drop(client);
    assert!(server.stop().success(), "{log}");
}

/// If server processes crash repeatedly before they have recovered the clients, the supervisor
/// discards the checkpoint. If the crashes continue, the supervisor ends.
#[test]
fn a_crash_loop_ends_the_supervisor() {
    let directory = tempfile::tempdir().unwrap();
    let mut command = program();
    command.args(["serve", "--supervisor", "mem:1MiB", "--socket", "vm.sock"]);
    // Each process that recovers the clients crashes.
    command.env("SHADOWBELL_ABORT_AT", AbortPoint::Rebuilt.name());
    let mut server = Server::spawn(command, directory, &["vm.sock"]);
    let first = worker(&server);
    attach(&server.socket(), &AttachOptions::default());
    signal(first, Signal::ABORT);
    server.wait_for_log("have lost their controllers");
    let socket = server.socket();
    until("its socket", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
    attach(&socket, &AttachOptions::default());
    signal(worker(&server), Signal::ABORT);
    assert_eq!(server.wait().code(), Some(1));
    server.wait_for_log("after 8 deaths within a minute it is not restarted");
}

/// The supervisor answers, although a read of the configuration file hangs.
#[test]
fn a_hung_configuration_file_does_not_block_the_supervisor() {
    let directory = tempfile::tempdir().unwrap();
    let behind = directory.path().join("vms.toml");
    let text = "[[controller]]\nsocket = \"vm0.sock\"\ndisks = [\"mem:1MiB\"]\n";
    std::fs::write(&behind, text).unwrap();
    let Some(mount) = Mount::over("hung_storage::fuse_daemon", &behind) else { return };
    let mut command = program_with_sighup();
    command.args(["serve", "--config"]).arg(mount.path());
    let mut server = Server::spawn(command, directory, &["vm0.sock"]);
    let hold = Mount::hold_opens(&behind);
    signal(server.pid(), Signal::HUP);
    until("a read that hangs", || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
        let names = tasks.flatten().map(|task| std::fs::read_to_string(task.path().join("comm")));
        names.flatten().any(|name| name == "sb-config\n")
    });
    kill(&server, Signal::KILL);
    attach(&server.directory().join("vm0.sock"), &AttachOptions::default());
    std::fs::remove_file(hold).unwrap();
    server.wait_for_log("the configuration");
    assert!(server.stop().success(), "{}", server.stderr());
}

#[test]
fn a_server_process_ends_with_its_supervisor() {
    let mut server = start(&["mem:1MiB"], &[]);
    // The socket exists before the server process serves, because the supervisor creates it. So the
    // test attaches to wait for the server process.
    drop(server.attach());
    let worker = worker(&server);
    server.signal(Signal::KILL);
    assert_eq!(server.wait().signal(), Some(9));
    until("the worker's end", || has_ended(worker));
    server.wait_for_log("the supervisor has ended, so this process ends too");
    // The server process ends in good order, but cannot remove the socket file. The next server
    // replaces the file.
    let error = std::os::unix::net::UnixStream::connect(server.socket()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    server.wait_for_log("ended");
}

#[test]
fn a_second_signal_ends_the_server_at_once() {
    let mut server = start(&["mem:1MiB"], &[]);
    let worker = worker(&server);
    // The stopped server process cannot end, so the supervisor waits for it.
    signal(worker, Signal::STOP);
    server.signal(Signal::TERM);
    // Two signals that are pending at the same time count as one.
    let pending = || crate::idle::status_of(server.pid(), "shadowbell-serv", "ShdPnd");
    until("the delivery of the signal", || pending().chars().all(|digit| digit == '0'));
    short_pause();
    assert!(server.is_alive());
    server.signal(Signal::TERM);
    assert_eq!(server.wait().code(), Some(1));
    until("the end of the server process", || has_ended(worker));
}

#[test]
fn a_supervisor_is_small_and_idle() {
    let server = start(&["mem:1MiB"], &[]);
    let status = |key: &str| crate::idle::status_of(server.pid(), "shadowbell-serv", key);
    let threads = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap().count();
    // Threads of the supervisor: the main thread, a broker for images, and one for sockets. After
    // an upgrade, a fourth thread closes descriptors.
    assert!((3..=4).contains(&threads), "{threads}");
    // The check is repeated: tests that run in parallel and search for their supervisor also send
    // requests to this test's supervisor, and these requests wake it.
    until("a second without a wakeup", || {
        let before = status("voluntary_ctxt_switches");
        // Interval in which the supervisor must not wake up. A periodic timer or polling would wake
        // it.
        std::thread::sleep(std::time::Duration::from_secs(1));
        status("voluntary_ctxt_switches") == before
    });
    let kib = |key: &str| status(key).split(' ').next().unwrap().parse::<u64>().unwrap();
    // The descriptor tables have their maximum size from the start. Otherwise a thread could wait
    // while the kernel enlarges a table.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    let limit = limit.unwrap_or(1 << 16).min(1 << 16);
    let its =
        |pid| crate::idle::status_of(pid, "shadowbell-serv", "FDSize").parse::<u64>().unwrap();
    assert!(its(server.pid()) >= limit && its(worker(&server)) >= limit);
    println!("resident: {} KiB of its own, {} KiB of files", kib("RssAnon"), kib("RssFile"));
    // The limit is for anonymous memory only. Pages of the program's file belong to the page cache,
    // and their number depends on the build. Most of the anonymous memory remains from parsing the
    // command line and the configuration.
    assert!(kib("RssAnon") < 3072, "{} KiB", kib("RssAnon"));
    // After the supervisor has handled a client, its anonymous memory is still small.
    drop(server.attach());
    until("the supervisor is small", || kib("RssAnon") < 3072);
}

#[test]
fn an_upgrade_without_a_supervisor_is_refused() {
    let server = Server::start(&["mem:1MiB"], &["--no-supervisor"]);
    for target in [server.pid().to_string(), server.socket().display().to_string()] {
        let mut command = program();
        command.arg("upgrade").arg(&target);
        let (status, _, errors) = finish(command);
        assert_eq!(status, Some(3), "{errors}");
        assert!(errors.contains("no server with a supervisor found"), "{errors}");
    }
    // An unknown name gives the message of the other commands.
    let errors = ["ctl status --server no", "upgrade no"].map(|words| {
        let mut command = program();
        command.env("SHADOWBELL_RUN_DIR", server.directory().join("run"));
        command.args(words.split(' '));
        finish(command).2
    });
    assert!(errors[0].contains("there is no server `no`") && errors[0] == errors[1], "{errors:?}");
    let mut command = program();
    command.args(["upgrade", "1", "--binary", "/nonexistent"]);
    let (status, _, errors) = finish(command);
    assert!(status == Some(2) && errors.contains("--binary /nonexistent"), "{errors}");
}
