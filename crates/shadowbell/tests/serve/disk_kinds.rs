//! Disks of other kinds than files, under a server whose process is killed.

use crate::harness::{Server, image, program, until};
use crate::keeper::{children, has_ended, worker};
use crate::recover::{kill, lost_nothing};
use crate::upgrade::{Client, Load};
use rustix::process::Signal;
use shadowbell_backend_qcow2::create;
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::wait::moment;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// An NBD server in a process of its own. Dropping it kills it.
pub(crate) struct Export {
    child: ProcessGroup,
    directory: TempDir,
}

impl Export {
    pub(crate) fn start(disk: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("nbd");
        let mut command = program();
        command.args(["export", disk, "--nbd"]).arg(format!("unix:{}", socket.display()));
        command.env("SHADOWBELL_RUN_DIR", directory.path().join("run"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = ProcessGroup::spawn(&mut command).unwrap();
        until("the export", || UnixStream::connect(&socket).is_ok());
        Self { child, directory }
    }

    /// What it exports, with options as `&settle=1s`.
    pub(crate) fn uri(&self, options: &str) -> String {
        format!("nbd+unix:///?socket={}{options}", self.directory.path().join("nbd").display())
    }
}

/// Under a keeper, and free to open what it likes.
pub(crate) fn keeper(disk: &str) -> Server {
    Server::start(&[disk], &["--keeper", "--sandbox", "off"])
}

/// Kills the server's process so often, under a load that verifies what it reads.
pub(crate) fn survive(server: &mut Server, kills: u64) {
    let load = Load::at(&server.socket(), 1);
    until("the load's queue", || server.stderr().contains("I/O queue"));
    for n in 0..kills {
        // Random moment, late enough that the death does not count towards a crash loop.
        std::thread::sleep(Duration::from_millis(60 + n * 37 % 90));
        kill(server, Signal::KILL);
    }
    load.lost_nothing();
    lost_nothing(server);
    assert!(server.stop().success(), "{}", server.stderr());
}

fn qemu_img(arguments: &[&str]) -> Option<i32> {
    match Command::new("qemu-img").args(arguments).output() {
        Ok(output) => output.status.code(),
        Err(error) => {
            eprintln!("skipped: `qemu-img` is not here ({error}); it is in Debian's qemu-utils");
            None
        }
    }
}

/// Clusters that are counted and used by nothing are all that is wrong with the image.
pub(crate) fn is_consistent(path: &Path) {
    let code = qemu_img(&["check", "-q", "-f", "qcow2", path.to_str().unwrap()]);
    assert!(matches!(code, None | Some(0 | 3)), "{code:?}");
}

#[test]
fn a_qcow2_image_under_a_verifying_load_goes_on_through_kills() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.qcow2");
    create(&path, 16 << 20).unwrap();
    // In its sandbox, and found by its first bytes. What a guest writes there later is no format.
    let mut server = Server::start(&[path.to_str().unwrap()], &["--keeper"]);
    survive(&mut server, 10);
    is_consistent(&path);
}

#[test]
fn what_a_qcow2_image_is_the_difference_to_is_opened_anew() {
    let directory = tempfile::tempdir().unwrap();
    let base = image(directory.path(), "base.img", 16 << 20);
    let path = directory.path().join("disk.qcow2");
    let (path, base) = (path.to_str().unwrap(), base.to_str().unwrap());
    if qemu_img(&["create", "-q", "-f", "qcow2", "-b", base, "-F", "raw", path]) != Some(0) {
        return;
    }
    let mut server = keeper(&format!("{path}?allow-backing=on"));
    survive(&mut server, 5);
    is_consistent(path.as_ref());
}

#[test]
fn a_controller_of_another_server_goes_on_through_kills() {
    for options in ["", "?zero-copy=off"] {
        let directory = tempfile::tempdir().unwrap();
        let file = image(directory.path(), "disk.img", 16 << 20);
        let below = Server::start(&[file.to_str().unwrap()], &[]);
        let mut server = keeper(&format!("vfio-user:{}/1{options}", below.socket().display()));
        survive(&mut server, 10);
    }
}

/// An NBD server that takes connections and says nothing is waited for, and not for ever.
#[test]
fn who_can_not_go_on_yet_ends_with_its_keeper() {
    let export = Export::start("mem:4MiB");
    let server = keeper(&export.uri("&settle=0"));
    let socket = export.directory.path().join("nbd");
    let before = worker(&server);
    let Export { child, directory } = &export;
    crate::keeper::signal(child.id(), Signal::KILL);
    let _ = std::fs::remove_file(&socket);
    let _mute = UnixListener::bind(directory.path().join("nbd")).unwrap();
    crate::keeper::signal(before, Signal::KILL);
    until("another worker", || matches!(children(server.pid())[..], [pid] if pid != before));
    moment();
    let next = worker(&server);
    crate::keeper::signal(server.pid(), Signal::KILL);
    until("the worker's end", || has_ended(next));
}

/// The same of one that begins.
#[test]
fn who_can_not_begin_yet_ends_with_its_keeper() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nbd");
    let _mute = UnixListener::bind(&socket).unwrap();
    let mut command = program();
    command.args(["serve", &format!("nbd+unix:///?socket={}", socket.display())]);
    command.args(["--socket", "vm.sock", "--sandbox", "off"]);
    let server = Server::spawn(command, tempfile::tempdir().unwrap(), &[]);
    until("the worker", || !children(server.pid()).is_empty());
    let its = worker(&server);
    moment();
    crate::keeper::signal(server.pid(), Signal::KILL);
    until("the worker's end", || has_ended(its));
}

#[test]
fn an_export_of_an_nbd_server_goes_on_through_kills() {
    let directory = tempfile::tempdir().unwrap();
    let file = image(directory.path(), "disk.img", 16 << 20);
    let below = Export::start(file.to_str().unwrap());
    let mut server = keeper(&below.uri("&settle=100ms"));
    survive(&mut server, 10);
}

/// Nobody has to say how long to wait for writes of which there are none.
#[test]
fn an_export_that_is_only_read_goes_on_at_once() {
    let below = Export::start("mem:4MiB");
    let server = keeper(&below.uri("&read-only=on"));
    let mut client = Client::attach(&server.socket());
    for _ in 0..3 {
        assert_eq!(client.read(1, 0), 0);
        kill(&server, Signal::KILL);
    }
    assert_eq!(client.read(1, 0), 0);
    lost_nothing(&server);
}

/// Both servers may be killed, at the same time or one after the other.
#[test]
fn the_other_server_may_be_killed_as_well() {
    let directory = tempfile::tempdir().unwrap();
    let file = image(directory.path(), "disk.img", 16 << 20);
    let below = Server::start(&[file.to_str().unwrap()], &["--keeper"]);
    let mut server = keeper(&format!("vfio-user:{}/1", below.socket().display()));
    let load = Load::at(&server.socket(), 1);
    until("the load's queue", || server.stderr().contains("I/O queue"));
    for _ in 0..4 {
        // Both have served for a while, so this is no crash loop.
        std::thread::sleep(Duration::from_millis(80));
        crate::keeper::signal(worker(&below), Signal::KILL);
        kill(&server, Signal::KILL);
        until("the other one", || below.stderr().contains("goes on for the process"));
    }
    load.lost_nothing();
    lost_nothing(&server);
    lost_nothing(&below);
    assert!(server.stop().success(), "{}", server.stderr());
}

#[test]
fn another_disk_is_not_taken_for_the_one_that_it_was() {
    let socket = tempfile::tempdir().unwrap();
    let path = socket.path().join("ssd.sock");
    let below = |disk: &str| {
        let mut command = program();
        command.args(["serve", disk, "--serial", "A", "--socket"]).arg(&path);
        Server::spawn(command, tempfile::tempdir().unwrap(), &[path.to_str().unwrap()])
    };
    let first = below("mem:4MiB?uuid=0190163d-8694-739b-aea5-966c26f8ad91");
    let server = keeper(&format!("vfio-user:{}/1", path.display()));
    let client = Client::attach(&server.socket());
    drop(first);
    let _second = below("mem:4MiB?uuid=0190163d-8694-739b-aea5-966c26f8ad92");
    crate::keeper::signal(worker(&server), Signal::KILL);
    server.says("it is another disk than before");
    server.says("have lost their controllers");
    drop(client);
    until("another one's socket", || UnixStream::connect(server.socket()).is_ok());
    Client::attach(&server.socket()).write(1, 0, 1);
}
