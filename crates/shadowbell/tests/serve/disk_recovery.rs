//! Disks other than raw files, of a server whose process is killed.

use crate::harness::{Server, finish, image, program, until};
use crate::recover::{assert_no_loss, kill};
use crate::supervisor::{children, has_ended, worker};
use crate::upgrade::{Client, Load};
use rustix::process::Signal;
use shadowbell_disk_qcow2::create;
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::programs::skipped;
use shadowbell_testing::wait::short_pause;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// An NBD server in a process of its own. The drop of this value kills the process.
pub(crate) struct Export {
    child: ProcessGroup,
    directory: TempDir,
}

impl Export {
    pub(crate) fn start(disk: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("nbd");
        let mut command = program();
        command
            .args(["export", "--no-supervisor", disk, "--nbd"])
            .arg(format!("unix:{}", socket.display()));
        command.env("SHADOWBELL_RUN_DIR", directory.path().join("run"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = ProcessGroup::spawn(&mut command).unwrap();
        until("the export", || UnixStream::connect(&socket).is_ok());
        Self { child, directory }
    }

    /// Sends a signal to the server.
    pub(crate) fn signal(&self, signal: Signal) {
        self.child.signal(signal);
    }

    /// Limits the size of the server's files, which simulates full storage: writes beyond it fail
    /// for lack of space.
    pub(crate) fn limit_files(&self, bytes: u64) {
        let mut command = Command::new("prlimit");
        command.args([
            "--pid",
            &self.child.id().to_string(),
            &format!("--fsize={bytes}:unlimited"),
        ]);
        let (status, _, errors) = finish(command);
        assert_eq!(status, Some(0), "{errors}");
    }

    /// Stops the server by SIGSTOP, and waits until all of its threads have stopped.
    pub(crate) fn stall(&self) {
        self.signal(Signal::STOP);
        until("the stop of all threads", || {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
            tasks.flatten().all(|task| {
                let status = std::fs::read_to_string(task.path().join("status"));
                status.is_ok_and(|status| status.contains("State:\tT"))
            })
        });
    }

    /// URI of the export, with options such as `&settle=1s`.
    pub(crate) fn uri(&self, options: &str) -> String {
        format!("nbd+unix:///?socket={}{options}", self.directory.path().join("nbd").display())
    }
}

/// Starts a server with a supervisor, and with a sandbox if the disk permits it.
pub(crate) fn supervisor(disk: &str) -> Server {
    Server::start(&[disk], &["--supervisor"])
}

/// Kills the server process `kills` times under a verifying load.
pub(crate) fn survive(server: &mut Server, kills: u64) {
    let load = Load::at(&server.socket(), 1);
    until("the load's queue", || server.stderr().contains("I/O queue"));
    for n in 0..kills {
        // The kill comes at an arbitrary time, but each process serves for at least 60 ms, so that
        // the supervisor does not detect a crash loop.
        std::thread::sleep(Duration::from_millis(60 + n * 37 % 90));
        kill(server, Signal::KILL);
    }
    load.assert_no_loss();
    assert_no_loss(server);
    assert!(server.stop().success(), "{}", server.stderr());
}

pub(crate) fn qemu_img(arguments: &[&str]) -> Option<i32> {
    match Command::new("qemu-img").args(arguments).output() {
        Ok(output) => output.status.code(),
        Err(error) => {
            skipped(format_args!("`qemu-img` is not here ({error}); it is in Debian's qemu-utils"));
            None
        }
    }
}

/// Checks a qcow2 image with qemu-img, if it is installed. Leaked clusters are the only permitted
/// defect.
pub(crate) fn is_consistent(path: &Path) {
    let code = qemu_img(&["check", "-q", "-f", "qcow2", path.to_str().unwrap()]);
    assert!(matches!(code, None | Some(0 | 3)), "{code:?}");
}

#[test]
fn a_qcow2_image_survives_kills_under_load() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.qcow2");
    create(&path, 16 << 20).unwrap();
    // The sandbox is on. The server detects the format once, from the first bytes of the file. It
    // must not detect it again after a kill, because a guest could have written these bytes.
    let mut server = Server::start(&[path.to_str().unwrap()], &["--supervisor"]);
    survive(&mut server, 10);
    is_consistent(&path);
}

#[test]
fn the_backing_file_of_a_qcow2_image_is_reopened_after_a_kill() {
    let directory = tempfile::tempdir().unwrap();
    let base = image(directory.path(), "base.img", 16 << 20);
    let path = directory.path().join("disk.qcow2");
    let (path, base) = (path.to_str().unwrap(), base.to_str().unwrap());
    if qemu_img(&["create", "-q", "-f", "qcow2", "-b", base, "-F", "raw", path]) != Some(0) {
        return;
    }
    let mut server = Server::start(
        &[&format!("{path}?allow-backing=on")],
        &["--supervisor", "--sandbox", "on", "--allow", base],
    );
    survive(&mut server, 5);
    is_consistent(path.as_ref());
}

#[test]
fn a_disk_on_another_server_survives_kills() {
    for options in ["", "?zero-copy=off"] {
        let directory = tempfile::tempdir().unwrap();
        let file = image(directory.path(), "disk.img", 16 << 20);
        let below = Server::start(&[file.to_str().unwrap()], &[]);
        let mut server = supervisor(&format!("vfio-user:{}/1{options}", below.socket().display()));
        survive(&mut server, 10);
    }
}

/// A recovering server process that waits for an NBD server's greeting ends with its supervisor.
#[test]
fn a_recovering_process_with_a_mute_disk_ends_with_its_supervisor() {
    let export = Export::start("mem:4MiB");
    let server = supervisor(&export.uri("&settle=0"));
    let socket = export.directory.path().join("nbd");
    let before = worker(&server);
    let Export { child, directory } = &export;
    crate::supervisor::signal(child.id(), Signal::KILL);
    let _ = std::fs::remove_file(&socket);
    let _mute = UnixListener::bind(directory.path().join("nbd")).unwrap();
    crate::supervisor::signal(before, Signal::KILL);
    until("another worker", || matches!(children(server.pid())[..], [pid] if pid != before));
    short_pause();
    let next = worker(&server);
    crate::supervisor::signal(server.pid(), Signal::KILL);
    until("the worker's end", || has_ended(next));
}

/// A server process whose disk does not answer ends soon after its supervisor, without the last
/// flush.
#[test]
fn a_serving_process_with_a_hung_disk_ends_with_its_supervisor() {
    let export = Export::start("mem:4MiB");
    let server = supervisor(&export.uri("&settle=0"));
    drop(server.attach());
    let process = worker(&server);
    crate::supervisor::signal(export.child.id(), Signal::STOP);
    crate::supervisor::signal(server.pid(), Signal::KILL);
    until("the server process's end", || has_ended(process));
    crate::supervisor::signal(export.child.id(), Signal::CONT);
}

/// A starting server process that waits for an NBD server's greeting ends with its supervisor.
#[test]
fn a_starting_process_with_a_mute_disk_ends_with_its_supervisor() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nbd");
    let _mute = UnixListener::bind(&socket).unwrap();
    let mut command = program();
    command.args(["serve", &format!("nbd+unix:///?socket={}", socket.display())]);
    command.args(["--socket", "vm.sock"]);
    let server = Server::spawn(command, tempfile::tempdir().unwrap(), &[]);
    until("the worker", || !children(server.pid()).is_empty());
    let its = worker(&server);
    short_pause();
    crate::supervisor::signal(server.pid(), Signal::KILL);
    until("the worker's end", || has_ended(its));
}

#[test]
fn an_nbd_disk_survives_kills_of_the_server_process() {
    let directory = tempfile::tempdir().unwrap();
    let file = image(directory.path(), "disk.img", 16 << 20);
    let below = Export::start(file.to_str().unwrap());
    let mut server = supervisor(&below.uri("&settle=100ms"));
    survive(&mut server, 10);
}

/// An NBD disk that allows writes and has no `settle` cannot be recovered, so the client is
/// disconnected. The other disks of its controller are recovered: memory keeps its content.
#[test]
fn other_disks_of_a_disconnected_client_are_recovered() {
    let below = Export::start("mem:4MiB");
    let server = Server::start(&[&below.uri(""), "mem:4MiB"], &["--supervisor"]);
    let mut client = Client::attach(&server.socket());
    client.write(1, 0, 6);
    client.write(2, 0, 7);
    crate::supervisor::signal(worker(&server), Signal::KILL);
    server.wait_for_log("its client cannot be recovered, and is disconnected");
    drop(client);
    until("another one's socket", || UnixStream::connect(server.socket()).is_ok());
    let mut client = Client::attach(&server.socket());
    assert_eq!((client.read(1, 0), client.read(2, 0)), (6, 7));
}

/// A controller whose state is unusable has the recovered disks: memory keeps its content, and an
/// NBD disk is used after its settle time.
#[test]
fn disks_of_a_controller_with_an_unusable_state_are_recovered() {
    let below = Export::start("mem:4MiB");
    let mut command = program();
    command.args(["serve", "--supervisor", "--sandbox", "off", "--socket", "vm.sock"]);
    command.args([&below.uri("&settle=500ms"), "mem:4MiB"]);
    command.env("SHADOWBELL_ITEM_FAULT", "undecodable:controller/0");
    let server = Server::spawn(command, tempfile::tempdir().unwrap(), &["vm.sock"]);
    let mut client = Client::attach(&server.socket());
    client.write(1, 0, 6);
    client.write(2, 0, 7);
    crate::supervisor::signal(worker(&server), Signal::KILL);
    server.wait_for_log("I/O of the dead process may be in flight at nbd+unix:");
    server.wait_for_log("its client cannot be recovered, and is disconnected");
    drop(client);
    until("another one's socket", || UnixStream::connect(server.socket()).is_ok());
    let mut client = Client::attach(&server.socket());
    assert_eq!((client.read(1, 0), client.read(2, 0)), (6, 7));
}

/// A read-only export receives no writes, so recovery need not wait for late writes, and the disk
/// needs no `settle` time.
#[test]
fn a_read_only_nbd_disk_recovers_without_settling() {
    let below = Export::start("mem:4MiB");
    let server = supervisor(&below.uri("&read-only=on"));
    let mut client = Client::attach(&server.socket());
    for _ in 0..3 {
        assert_eq!(client.read(1, 0), 0);
        kill(&server, Signal::KILL);
    }
    assert_eq!(client.read(1, 0), 0);
    assert_no_loss(&server);
}

/// A server uses a namespace of a second server as its disk. The server processes of both are
/// killed at the same time.
#[test]
fn both_stacked_servers_may_be_killed() {
    let directory = tempfile::tempdir().unwrap();
    let file = image(directory.path(), "disk.img", 16 << 20);
    let below = Server::start(&[file.to_str().unwrap()], &["--supervisor"]);
    let mut server = supervisor(&format!("vfio-user:{}/1", below.socket().display()));
    let load = Load::at(&server.socket(), 1);
    until("the load's queue", || server.stderr().contains("I/O queue"));
    for _ in 0..4 {
        // Both processes serve for a while, so that their deaths are not a crash loop.
        std::thread::sleep(Duration::from_millis(80));
        crate::supervisor::signal(worker(&below), Signal::KILL);
        kill(&server, Signal::KILL);
        until("the other one", || {
            below.stderr().contains("recovered from the checkpoint of a dead process")
        });
    }
    load.assert_no_loss();
    assert_no_loss(&server);
    assert_no_loss(&below);
    assert!(server.stop().success(), "{}", server.stderr());
}

#[test]
fn recovery_refuses_a_disk_with_another_uuid() {
    let socket = tempfile::tempdir().unwrap();
    let path = socket.path().join("ssd.sock");
    let below = |disk: &str| {
        let mut command = program();
        command.args(["serve", disk, "--serial", "A", "--socket"]).arg(&path);
        Server::spawn(command, tempfile::tempdir().unwrap(), &[path.to_str().unwrap()])
    };
    let first = below("mem:4MiB?uuid=0190163d-8694-739b-aea5-966c26f8ad91");
    let server = supervisor(&format!("vfio-user:{}/1", path.display()));
    let client = Client::attach(&server.socket());
    drop(first);
    // The server process of `first` ends after its supervisor.
    until("the end of the first server", || UnixStream::connect(&path).is_err());
    let _second = below("mem:4MiB?uuid=0190163d-8694-739b-aea5-966c26f8ad92");
    crate::supervisor::signal(worker(&server), Signal::KILL);
    server.wait_for_log("another disk than before");
    server.wait_for_log("its client cannot be recovered, and is disconnected");
    drop(client);
    until("another one's socket", || UnixStream::connect(server.socket()).is_ok());
    Client::attach(&server.socket()).write(1, 0, 1);
}
