//! What a dead process has under way is waited for before anything is carried out again.

use crate::harness::{Server, program, until};
use crate::keeper::{has_ended, signal, worker};
use crate::upgrade::Client;
use rustix::process::Signal;
use shadowbell_testing::late::{LateDevice, be_the_daemon};

#[test]
fn late_daemon() {
    be_the_daemon();
}

/// A server whose process is killed while it has a write under way, which arrives late.
struct Late {
    device: LateDevice,
    server: Server,
    writing: std::thread::JoinHandle<Client>,
}

impl Late {
    fn start(variables: &[(&str, &str)]) -> Option<Self> {
        let device = LateDevice::new("fence::late_daemon")?;
        let directory = tempfile::tempdir().unwrap();
        let mut command = program();
        let disk = format!("{}?direct=on&aio=io_uring", device.path().display());
        command.args(["serve", "--keeper", &disk, "--socket", "vm.sock"]);
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
        let pid = worker(&server);
        signal(pid, Signal::KILL);
        until("its end", || has_ended(pid));
        Some(Self { device, server, writing })
    }
}

#[test]
fn a_late_write_of_a_dead_process_does_not_overwrite_a_newer_one() {
    let Some(Late { device, server, writing }) = Late::start(&[]) else { return };
    server.says("waits for what the dead process has under way");
    assert!(!writing.is_finished(), "it is carried out again too early");
    device.release();
    let mut client = writing.join().unwrap();
    client.write(1, 0, 0xbb);
    assert_eq!(client.read(1, 0), 0xbb);
    drop(client);
}

/// The same without the fence: the guest's newer write is lost.
#[test]
fn without_a_fence_a_late_write_of_a_dead_process_overwrites_a_newer_one() {
    let order = [("SHADOWBELL_WRONG_ORDER", "no-fence")];
    let Some(Late { device, server, writing }) = Late::start(&order) else { return };
    // It was carried out again, and is completed.
    let mut client = writing.join().unwrap();
    client.write(1, 0, 0xbb);
    assert_eq!(client.read(1, 0), 0xbb);
    device.release();
    assert_eq!(client.read(1, 0), 0xaa, "the fence is not what this test is about");
    drop(client);
    drop(server);
}
