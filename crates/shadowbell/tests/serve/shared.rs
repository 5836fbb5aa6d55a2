//! Reservations of two controllers that share a disk. They survive a crash and an upgrade, and
//! those that persist through power loss also a restart.

use crate::harness::{Server, finish, image, program, run, until};
use crate::recover::{assert_no_loss, kill};
use crate::supervisor::children;
use crate::upgrade::{Client, socket, upgrade};
use rustix::process::Signal;
use shadowbell_spec::Status;
use std::path::Path;

pub(crate) const CONFIG: &str = r#"
    workers = 2
    control-socket = "ctl.sock"
    [[subsystem]]
    name = "pair"
    state = "state"
    [[controller]]
    socket = "vm0.sock"
    disks = [{ disk = "disk.img", uuid = "0190163d-8694-739b-aea5-966c26f8ad91" }, "mem:16MiB"]
    subsystem = "pair"
    [[controller]]
    socket = "vm1.sock"
    disks = [{ disk = "disk.img", uuid = "0190163d-8694-739b-aea5-966c26f8ad91" }, "mem:16MiB"]
    subsystem = "pair"
"#;

fn serve(directory: tempfile::TempDir) -> Server {
    serve_config(directory, CONFIG)
}

/// Serves `config`, with two controllers.
pub(crate) fn serve_config(directory: tempfile::TempDir, config: &str) -> Server {
    std::fs::write(directory.path().join("pair.toml"), config).unwrap();
    let mut command = program();
    command.args(["serve", "--config", "pair.toml"]);
    Server::spawn(command, directory, &["vm0.sock", "vm1.sock"])
}

pub(crate) fn start() -> Server {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path(), "disk.img", 16 << 20);
    serve(directory)
}

fn hosts(server: &Server) -> [Client; 2] {
    [0, 1].map(|n| {
        let client = Client::attach(&socket(server, n));
        client.set_feature(0x81, 1, &[n as u8 + 1; 16]);
        client
    })
}

/// Registers key 1 of the host `one` and key 2 of the host `other`, and reserves the namespace for
/// `one`.
fn register(one: &mut Client, other: &mut Client, nsid: u32, persists: bool) {
    let cptpl = if persists { 3 << 30 } else { 0 };
    assert_eq!(one.reserve(0x0d, nsid, cptpl, (0, 1)), Status::SUCCESS);
    assert_eq!(other.reserve(0x0d, nsid, 0, (0, 2)), Status::SUCCESS);
    assert_eq!(one.reserve(0x11, nsid, 1 << 8, (1, 0)), Status::SUCCESS);
}

#[track_caller]
fn assert_conflict(client: &mut Client, nsid: u32, byte: u8) {
    let status = client.try_write(nsid, 0, byte);
    assert_eq!(status.code(), Status::RESERVATION_CONFLICT);
}

#[test]
fn reservations_survive_crashes_and_upgrades() {
    let mut server = start();
    let [mut one, mut other] = hosts(&server);
    register(&mut one, &mut other, 1, false);
    register(&mut one, &mut other, 2, false);
    for round in 0..4_u8 {
        for nsid in [1, 2] {
            one.write(nsid, 0, 10 + round);
            assert_conflict(&mut other, nsid, 99);
            assert_eq!(other.read(nsid, 0), 10 + round);
        }
        if round % 2 == 0 {
            kill(&server, Signal::KILL);
        } else {
            let (status, _, errors) = upgrade(&server.pid().to_string(), None);
            assert_eq!(status, Some(0), "{errors}");
            until("the old one's end", || children(server.pid()).len() == 1);
        }
    }
    // A reservation can be preempted. Then the host that held it is excluded.
    assert_eq!(other.reserve(0x11, 1, 1 << 8 | 2, (2, 1)), Status::SUCCESS);
    assert_conflict(&mut one, 1, 99);
    other.write(1, 0, 50);
    assert_eq!(one.read(1, 0), 50);
    assert_no_loss(&server);
    assert!(server.stop().success(), "{}", server.stderr());
}

#[test]
fn only_persistent_reservations_survive_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path(), "disk.img", 16 << 20);
    let copy = tempfile::tempdir().unwrap();
    let mut server = serve(directory);
    let [mut one, mut other] = hosts(&server);
    register(&mut one, &mut other, 1, true);
    register(&mut one, &mut other, 2, false);
    drop((one, other));
    assert!(server.stop().success(), "{}", server.stderr());
    for file in ["disk.img", "state"] {
        std::fs::copy(server.directory().join(file), copy.path().join(file)).unwrap();
    }
    let mut server = serve(copy);
    let [mut one, mut other] = hosts(&server);
    assert_conflict(&mut other, 1, 1);
    one.write(1, 0, 7);
    // A memory disk never persists reservations.
    other.write(2, 0, 8);
    assert!(server.stop().success(), "{}", server.stderr());
}

#[test]
fn an_invalid_reservations_file_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path(), "disk.img", 16 << 20);
    std::fs::write(directory.path().join("state"), "something else").unwrap();
    std::fs::write(directory.path().join("pair.toml"), CONFIG).unwrap();
    let mut command = program();
    command.current_dir(&directory).args(["serve", "--config", "pair.toml"]);
    let (status, _, errors) = finish(command);
    assert!(status == Some(2) && errors.contains("reservations"), "{status:?} {errors}");
    std::fs::write(directory.path().join("state"), "").unwrap();
    let mut server = serve(directory);
    let ctl = |words: &[&str]| {
        let mut command = program();
        let socket = server.directory().join("ctl.sock");
        command.args(["ctl", "-s"]).arg(socket).args(words);
        finish(command)
    };
    let one: &Path = &server.directory().join("vm0.sock");
    let (status, _, errors) = ctl(&["namespace", "detach", &one.display().to_string(), "2"]);
    assert!(status != Some(0) && errors.contains("belongs to the subsystem pair"), "{errors}");
    assert!(server.stop().success(), "{}", server.stderr());
}

/// Methods for reservation commands.
impl Client {
    fn reserve(&mut self, opcode: u8, nsid: u32, cdw10: u32, keys: (u64, u64)) -> Status {
        let mut data = keys.0.to_le_bytes().to_vec();
        data.extend_from_slice(&keys.1.to_le_bytes());
        let (queue, controller) = self.parts();
        let pool = controller.buffers(1, 4096).unwrap();
        let mut buffer = pool.take().unwrap();
        assert!(buffer.copy_from(0, &data));
        let command = shadowbell_driver::Command::raw(opcode, nsid, [cdw10, 0, 0, 0], 16);
        run(queue, command, Some(buffer)).status
    }
}
