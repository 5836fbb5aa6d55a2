//! Messages to a service manager such as systemd, over a datagram socket.

use crate::harness::{Server, attach, program, run, until};
use crate::supervisor::{children, has_ended, signal, worker};
use rustix::process::Signal;
use shadowbell_driver::AttachOptions;
use shadowbell_spec::Status;
use shadowbell_testing::wait::LIMIT;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;

// Time for which the test waits to check that no message arrives.
const QUIET: Duration = Duration::from_secs(1);

struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
    _directory: TempDir,
}

impl Manager {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        Self { socket, path, _directory: directory }
    }

    fn of(&self, mut command: Command, watchdog: Option<Duration>) -> Command {
        command.env("NOTIFY_SOCKET", &self.path);
        if let Some(watchdog) = watchdog {
            command.env("WATCHDOG_USEC", watchdog.as_micros().to_string());
        }
        command
    }

    /// Starts a server with these options and this watchdog time.
    fn serve(&self, options: &[&str], watchdog: Option<Duration>) -> Server {
        let mut command = program();
        command.args(["serve", "mem:1MiB", "--socket", "vm.sock"]).args(options);
        let command = self.of(command, watchdog);
        Server::spawn(command, tempfile::tempdir().unwrap(), &["vm.sock"])
    }

    /// Receives the next message, if it arrives within `time`.
    fn message_within(&self, time: Duration) -> Option<String> {
        self.socket.set_read_timeout(Some(time)).unwrap();
        let mut text = [0; 4096];
        let len = self.socket.recv(&mut text).ok()?;
        Some(String::from_utf8_lossy(&text[..len]).into_owned())
    }

    #[track_caller]
    fn next_message(&self) -> String {
        self.message_within(LIMIT).expect("a message to the service manager")
    }

    /// Receives the next message other than watchdog messages.
    #[track_caller]
    fn next_except_watchdog(&self) -> String {
        loop {
            let printed = self.next_message();
            if !printed.starts_with("WATCHDOG=1") {
                return printed;
            }
        }
    }
}

#[test]
fn the_service_manager_gets_ready_and_stopping() {
    let manager = Manager::new();
    for supervisor in [&["--supervisor"][..], &[]] {
        let mut server = manager.serve(supervisor, None);
        assert_eq!(manager.next_message(), "READY=1\nSTATUS=serves 1 controller, 0 with a client");
        assert!(server.stop().success());
        assert_eq!(manager.next_message(), "STOPPING=1");
    }
}

#[test]
fn the_watchdog_is_notified_at_half_of_its_interval() {
    let manager = Manager::new();
    // A supervised process is killed if it does not respond for a quarter of the watchdog time. So
    // this time has to be far longer than any delay on a busy machine.
    for (supervisor, watchdog) in [(&["--supervisor"][..], 8000), (&[], 600)] {
        let watchdog = Duration::from_millis(watchdog);
        let began = Instant::now();
        let mut server = manager.serve(supervisor, Some(watchdog));
        assert!(manager.next_except_watchdog().starts_with("READY=1"));
        assert_eq!(
            manager.next_message(),
            "WATCHDOG=1\nSTATUS=serves 1 controller, 0 with a client"
        );
        let controller = server.attach();
        let seen =
            |printed: &str| printed == "WATCHDOG=1\nSTATUS=serves 1 controller, 1 with a client";
        until("its client is seen", || seen(&manager.next_message()));
        assert!(seen(&manager.next_message()));
        // At least three watchdog messages have arrived, at intervals of half the watchdog time or
        // more. So at least the watchdog time has passed.
        assert!(began.elapsed() >= watchdog, "{:?}", began.elapsed());
        drop(controller);
        assert!(server.stop().success());
        assert_eq!(manager.next_except_watchdog(), "STOPPING=1");
    }
    // `WATCHDOG_PID` is the id of another process, so the server must send no watchdog message.
    let mut command = program();
    command.args(["serve", "mem:1MiB", "--socket", "vm.sock"]).env("WATCHDOG_PID", "1");
    // With this watchdog time, a message would arrive far sooner than `QUIET`.
    let command = manager.of(command, Some(Duration::from_millis(10)));
    let mut server = Server::spawn(command, tempfile::tempdir().unwrap(), &["vm.sock"]);
    assert!(manager.next_except_watchdog().starts_with("READY=1"));
    assert_eq!(manager.message_within(QUIET), None);
    assert!(server.stop().success());
}

/// A hung server process sends no watchdog message. So without a supervisor, the service manager
/// kills it.
#[test]
fn a_hung_process_sends_no_watchdog_message() {
    let manager = Manager::new();
    // With this watchdog time, a process that is not hung sends messages at intervals below
    // `QUIET`.
    let server = manager.serve(&[], Some(Duration::from_millis(400)));
    assert!(manager.next_except_watchdog().starts_with("READY=1"));
    assert!(manager.next_message().starts_with("WATCHDOG=1"));
    signal(server.pid(), Signal::STOP);
    until("the end of watchdog messages", || manager.message_within(QUIET).is_none());
}

/// The supervisor kills a hung server process, and another one recovers the clients. They see a
/// short pause, and the service manager continues to receive messages.
#[test]
fn a_hung_server_process_is_replaced() {
    let manager = Manager::new();
    // This watchdog time is long enough for a healthy process on a busy machine.
    let mut server = manager.serve(&["--supervisor"], Some(Duration::from_secs(8)));
    assert!(manager.next_except_watchdog().starts_with("READY=1"));
    let options = AttachOptions { queue_pairs: 1, ..AttachOptions::default() };
    let mut controller = attach(&server.socket(), &options);
    let mut queue = controller.take_queue_pair().unwrap();
    let pool = controller.buffers(1, 4096).unwrap();
    let namespace = controller.namespace(1).unwrap().clone();
    let before = worker(&server);
    signal(before, Signal::STOP);
    server.wait_for_log(&format!("error: process {before} hangs"));
    until("its end", || has_ended(before));
    let status = "STATUS=the server process has died; another one is about to recover";
    until("the status of the recovery", || manager.next_except_watchdog() == status);
    assert!(manager.next_except_watchdog().starts_with("STATUS=serves 1 controller"));
    assert!(children(server.pid()).iter().all(|pid| *pid != before));
    let done = run(&mut queue, namespace.read(0, 8).unwrap(), pool.take());
    assert_eq!(done.status, Status::SUCCESS);
    assert!(manager.next_message().starts_with("WATCHDOG=1"));
    drop((queue, pool, namespace, controller));
    assert!(server.stop().success(), "{}", server.stderr());
}

/// Writes a configuration of `controllers` controllers, each with a memory disk.
fn write_config(directory: &std::path::Path, controllers: u32) {
    let controllers: String = (0..controllers)
        .map(|n| {
            format!(
                "[[controller]]\nid = \"vm{n}\"\nsocket = \"vm{n}.sock\"\ndisks = [\"mem:1MiB\"]\n"
            )
        })
        .collect();
    std::fs::write(directory.join("vms.toml"), controllers).unwrap();
}

#[test]
fn sighup_reloads_the_configuration() {
    for supervisor in [&["--supervisor"][..], &[]] {
        let manager = Manager::new();
        let directory = tempfile::tempdir().unwrap();
        write_config(directory.path(), 1);
        let mut command = Command::new("env");
        command.arg("--default-signal=HUP").arg(env!("CARGO_BIN_EXE_shadowbell"));
        command.args(["serve", "--config", "vms.toml"]).args(supervisor);
        let mut server = Server::spawn(manager.of(command, None), directory, &["vm0.sock"]);
        assert!(manager.next_except_watchdog().starts_with("READY=1"));
        let reload = || {
            server.signal(Signal::HUP);
            let reloading = manager.next_message();
            assert!(reloading.starts_with("RELOADING=1\nMONOTONIC_USEC="), "{reloading}");
            manager.next_message()
        };
        let options = AttachOptions { queue_pairs: 1, ..AttachOptions::default() };
        let first = attach(&server.directory().join("vm0.sock"), &options);
        write_config(server.directory(), 3);
        let printed = "the configuration was reloaded; controllers: 2 added, 0 removed, 0 replaced, \
                    0 changed, 1 unchanged";
        assert_eq!(reload(), format!("READY=1\nSTATUS={printed}"));
        server.wait_for_log(printed);
        drop(attach(&server.directory().join("vm2.sock"), &options));

        // An invalid file is refused as a whole.
        let config = server.directory().join("vms.toml");
        let text = std::fs::read_to_string(&config).unwrap();
        std::fs::write(&config, format!("workres = 2\n{text}")).unwrap();
        let refused = reload();
        let words = "READY=1\nSTATUS=the configuration is refused, and nothing was changed: \
                     vms.toml:1: unknown field `workres`";
        assert!(refused.starts_with(words), "{refused}");
        server.wait_for_log("error: the configuration is refused, and nothing was changed");
        // A file is also refused if a client would lose its controller by it.
        std::fs::write(&config, text.replace("vm0.sock", "other.sock")).unwrap();
        assert!(
            reload().contains("nothing was changed: the client of vm0 would lose the controller")
        );
        drop(attach(&server.directory().join("vm1.sock"), &options));
        // A setting that cannot change at run time is reported.
        std::fs::write(&config, format!("workers = 2\n{text}")).unwrap();
        assert!(reload().contains("0 added, 0 removed, 0 replaced, 0 changed, 3 unchanged"));
        server.wait_for_log("they take effect at the next `shadowbell upgrade`");

        drop(first);
        assert!(server.stop().success());
        assert_eq!(manager.next_message(), "STOPPING=1");
    }
}

/// If the server process dies before it has handled a SIGHUP, the next process handles it.
#[test]
fn the_next_process_handles_a_missed_reload() {
    let manager = Manager::new();
    let directory = tempfile::tempdir().unwrap();
    write_config(directory.path(), 1);
    let mut command = Command::new("env");
    command.arg("--default-signal=HUP").arg(env!("CARGO_BIN_EXE_shadowbell"));
    command.args(["serve", "--config", "vms.toml", "--supervisor"]);
    let mut server = Server::spawn(manager.of(command, None), directory, &["vm0.sock"]);
    assert!(manager.next_except_watchdog().starts_with("READY=1"));
    write_config(server.directory(), 2);
    // The server process is stopped, so it cannot receive the supervisor's message.
    let before = worker(&server);
    signal(before, Signal::STOP);
    server.signal(Signal::HUP);
    assert!(manager.next_message().starts_with("RELOADING=1"));
    assert_eq!(manager.message_within(QUIET), None);
    signal(before, Signal::KILL);
    until("the reload", || {
        manager.next_message().starts_with("READY=1\nSTATUS=the configuration was")
    });
    let socket = server.directory().join("vm1.sock");
    drop(attach(&socket, &AttachOptions { queue_pairs: 1, ..AttachOptions::default() }));
    assert!(server.stop().success(), "{}", server.stderr());
}
