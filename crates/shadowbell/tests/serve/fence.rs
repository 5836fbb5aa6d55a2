//! The fence: recovery executes commands again only after the writes of the dead process have
//! ended.

use crate::disk_recovery::Export;
use crate::harness::{Server, program, until};
use crate::supervisor::{has_ended, signal, worker};
use crate::upgrade::{Client, upgrade};
use rustix::process::Signal;
use shadowbell_testing::late::{LateDevice, run_daemon_if_requested};
use shadowbell_testing::wait::short_pause;
use std::io::Write;

#[test]
fn late_daemon() {
    run_daemon_if_requested();
}

/// Server whose process was killed while a write was in flight. The device holds this write, and
/// executes it later.
struct Late {
    device: LateDevice,
    server: Server,
    writing: std::thread::JoinHandle<Client>,
}

impl Late {
    fn start(variables: &[(&str, &str)]) -> Option<Self> {
        let device = LateDevice::new("fence::late_daemon")?;
        let disk = raw(&device);
        let (late, pid) = Self::start_on(device, &[&disk], variables);
        until("its end", || has_ended(pid));
        Some(late)
    }

    /// Like `start`, with `arguments` of the server and a disk on `device`. Returns the id of the
    /// killed process. This process may not have ended yet.
    fn start_on(device: LateDevice, arguments: &[&str], variables: &[(&str, &str)]) -> (Self, u32) {
        let late = Self::begin_on(device, arguments, variables);
        let pid = worker(&late.server);
        signal(pid, Signal::KILL);
        (late, pid)
    }

    /// Starts a server with `arguments` whose disk is on this device, and submits a write that the
    /// device holds.
    fn begin_on(device: LateDevice, arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut command = program();
        command.args(["serve", "--supervisor"]).args(arguments).args(["--socket", "vm.sock"]);
        command.envs(variables.iter().copied());
        let server = Server::spawn(command, directory, &["vm.sock"]);
        let mut client = Client::attach(&server.socket());
        client.write(1, 0, 1);
        device.hold_next();
        let writing = std::thread::spawn(move || {
            client.write(1, 0, 0xaa);
            client
        });
        device.until_held();
        Self { device, server, writing }
    }

    /// Lets the late write reach the device, and checks that it does not overwrite a newer write.
    fn release(self) -> (Server, LateDevice) {
        self.device.release();
        let mut client = self.writing.join().unwrap();
        client.write(1, 0, 0xbb);
        assert_eq!(client.read(1, 0), 0xbb);
        drop(client);
        (self.server, self.device)
    }
}

fn raw(device: &LateDevice) -> String {
    format!("{}?direct=on&aio=io_uring", device.path().display())
}

#[test]
fn a_late_write_of_a_dead_process_does_not_overwrite_a_newer_one() {
    let Some(late) = Late::start(&[]) else { return };
    late.server.wait_for_log("I/O of the dead process may be in flight");
    assert!(!late.writing.is_finished(), "the write is executed again too early");
    late.release();
}

/// A write that does not end does not prevent an upgrade. The old process is killed, and the next
/// process waits for the fence.
#[test]
fn a_late_write_does_not_refuse_an_upgrade() {
    let Some(device) = LateDevice::new("fence::late_daemon") else { return };
    let disk = raw(&device);
    let late = Late::begin_on(device, &[&disk], &[]);
    let before = worker(&late.server);
    let target = late.server.pid().to_string();
    let asker = std::thread::spawn(move || upgrade(&target, None));
    late.server.wait_for_log("vm.sock did not quiesce within 200 ms");
    until("its end", || has_ended(before));
    late.server.wait_for_log("I/O of the dead process may be in flight");
    assert!(!late.writing.is_finished(), "the write is executed again too early");
    let (server, _device) = late.release();
    let (status, output, errors) = asker.join().unwrap();
    assert_eq!(status, Some(0), "{errors}");
    assert!(output.contains("warning: vm.sock did not quiesce within 200 ms"), "{output}");
    assert_ne!(worker(&server), before);
}

/// A thread of the killed process is in a system call that writes to a qcow2 image. So the process
/// ends only after this write.
#[test]
fn a_killed_process_ends_after_its_write_to_a_qcow2_image() {
    let Some(device) = LateDevice::new("fence::late_daemon") else { return };
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk.qcow2");
    shadowbell_disk_qcow2::create(&image, 8 << 20).unwrap();
    let bytes = std::fs::read(&image).unwrap();
    let mut whole = std::fs::OpenOptions::new().write(true).open(device.path()).unwrap();
    whole.write_all(&bytes).unwrap();
    whole.sync_all().unwrap();
    drop(whole);
    let disk = format!("{}?direct=on&format=qcow2", device.path().display());
    let (late, pid) = Late::start_on(device, &[&disk], &[]);
    short_pause();
    assert!(!has_ended(pid) || !late.writing.is_finished());
    assert!(
        !late.server.stderr().contains("recovered from the checkpoint of a dead process"),
        "too early"
    );
    let (server, _device) = late.release();
    server.wait_for_log("recovered from the checkpoint of a dead process");
}

/// The disk is a namespace of another server. That server executes the late write, and accepts no
/// new client until the write has ended.
#[test]
fn a_late_write_at_another_server_does_not_overwrite_a_newer_one() {
    let Some(device) = LateDevice::new("fence::late_daemon") else { return };
    let below = Server::start(&[&raw(&device)], &[]);
    let disk = format!("vfio-user:{}/1", below.socket().display());
    let (late, pid) = Late::start_on(device, &[&disk, "--sandbox", "off"], &[]);
    until("its end", || has_ended(pid));
    late.server.wait_for_log("I/O of the dead process may be in flight at vfio-user:");
    short_pause();
    assert!(!late.writing.is_finished(), "the write is executed again too early");
    late.release();
}

/// Without the fence, the guest's newer write is lost. This shows that the tests of the fence can
/// fail.
#[test]
fn without_a_fence_a_late_write_of_a_dead_process_overwrites_a_newer_one() {
    let order = [("SHADOWBELL_WRONG_ORDER", "no-fence")];
    let Some(Late { device, server, writing }) = Late::start(&order) else { return };
    // The write has completed, because the next process has executed it again.
    let mut client = writing.join().unwrap();
    client.write(1, 0, 0xbb);
    assert_eq!(client.read(1, 0), 0xbb);
    device.release();
    assert_eq!(client.read(1, 0), 0xaa, "the newer write is not overwritten without the fence");
    drop(client);
    drop(server);
}

/// An NBD server accepts a new client while it still executes a write of a disconnected one. So
/// recovery waits for the settle time before it executes the write again.
#[test]
fn a_late_write_at_an_nbd_server_has_settled_before_it_is_repeated() {
    let Some(device) = LateDevice::new("fence::late_daemon") else { return };
    let below = Export::start(&raw(&device));
    let disk = below.uri("&settle=2s");
    let (late, pid) = Late::start_on(device, &[&disk, "--sandbox", "off"], &[]);
    until("its end", || has_ended(pid));
    late.server.wait_for_log("I/O of the dead process may be in flight at nbd+unix:");
    short_pause();
    assert!(!late.writing.is_finished(), "the write is executed again too early");
    late.release();
}

/// Without a settle time, the guest's newer write is lost. This shows that the test with a settle
/// time can fail.
#[test]
fn a_late_write_at_an_nbd_server_overwrites_a_newer_one_if_it_has_not_settled() {
    let Some(device) = LateDevice::new("fence::late_daemon") else { return };
    let below = Export::start(&raw(&device));
    let disk = below.uri("&settle=0");
    let (late, _) = Late::start_on(device, &[&disk, "--sandbox", "off"], &[]);
    let mut client = late.writing.join().unwrap();
    client.write(1, 0, 0xbb);
    assert_eq!(client.read(1, 0), 0xbb);
    late.device.release();
    assert_eq!(client.read(1, 0), 0xaa, "the newer write is not overwritten without a settle time");
    drop(client);
    drop(late.server);
}
