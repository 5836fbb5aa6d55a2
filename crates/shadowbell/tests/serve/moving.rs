//! Controllers go to another process one by one, and a disk becomes slow meanwhile.

use crate::harness::{Server, program, until};
use crate::supervisor::{children, signal, worker};
use crate::upgrade::{Client, socket, upgrade};
use rustix::process::Signal;
use shadowbell_testing::late::{LateDevice, be_the_daemon};
use std::thread::JoinHandle;

#[test]
fn late_daemon() {
    be_the_daemon();
}

/// How many controllers there are; the last one has the device.
const COUNT: usize = 40;

/// An upgrade that waits for the last controller, while another process serves all others.
struct Halfway {
    device: LateDevice,
    server: Server,
    old: u32,
    client: Client,
    writing: JoinHandle<Client>,
    asking: JoinHandle<(Option<i32>, String, String)>,
}

impl Halfway {
    fn start() -> Option<Self> {
        let device = LateDevice::new("moving::late_daemon")?;
        let directory = tempfile::tempdir().unwrap();
        let mut file = String::from("workers = 2\n");
        for n in 0..COUNT {
            let disk = match n + 1 {
                COUNT => format!("{}?direct=on&aio=io_uring", device.path().display()),
                _ => "mem:1MiB".to_owned(),
            };
            file += &format!("[[controller]]\nsocket = \"vm{n}.sock\"\ndisks = [\"{disk}\"]\n");
        }
        std::fs::write(directory.path().join("vms.toml"), file).unwrap();
        let mut command = program();
        command.args(["serve", "--keeper", "-v", "--config", "vms.toml"]);
        let last = format!("vm{}.sock", COUNT - 1);
        let server = Server::spawn(command, directory, &["vm0.sock", &last]);
        let mut client = Client::attach(&socket(&server, 0));
        client.write(1, 0, 1);
        let mut other = Client::attach(&socket(&server, COUNT - 1));
        other.write(1, 0, 1);
        let old = worker(&server);
        let pid = server.pid().to_string();
        let asking = std::thread::spawn(move || upgrade(&pid, None));
        // Now it is too late for the old process to go on with all.
        server.says("served by another process after");
        device.hold_next();
        let writing = std::thread::spawn(move || {
            other.write(1, 0, 2);
            other
        });
        device.until_held();
        server.says("this process serves it until then");
        until("all others", || {
            server.stderr().matches("served by another process after").count() == COUNT - 1
        });
        Some(Self { device, server, old, client, writing, asking })
    }
}

#[test]
fn a_disk_that_becomes_slow_holds_up_nobody_else() {
    let Some(halfway) = Halfway::start() else { return };
    let Halfway { device, mut server, old, mut client, writing, asking } = halfway;
    for byte in 2..100 {
        client.write(1, 0, byte);
        assert_eq!(client.read(1, 0), byte);
    }
    assert_eq!(children(server.pid()).len(), 2);
    assert!(!writing.is_finished() && !asking.is_finished());
    device.release();
    let (status, _, errors) = asking.join().unwrap();
    assert_eq!(status, Some(0), "{errors}");
    until("the old one's end", || children(server.pid()).len() == 1);
    assert_ne!(worker(&server), old);
    let mut other = writing.join().unwrap();
    assert_eq!((client.read(1, 0), other.read(1, 0)), (99, 2));
    drop((client, other));
    assert!(server.stop().success(), "{}", server.stderr());
}

/// Each process serves a part, and one of them dies: a third one serves both parts.
#[test]
fn either_process_may_die_while_both_serve() {
    for dies in ["the old one", "the new one"] {
        let Some(halfway) = Halfway::start() else { return };
        let Halfway { device, mut server, old, mut client, writing, asking } = halfway;
        // The old process does not know of these.
        for byte in 2..50 {
            client.write(1, u64::from(byte) * 8, byte);
        }
        let both = children(server.pid());
        let new = both.iter().copied().find(|pid| *pid != old).unwrap();
        signal(if dies == "the old one" { old } else { new }, Signal::KILL);
        let (status, _, errors) = asking.join().unwrap();
        assert_eq!(status, Some(1), "{dies}: {errors}");
        // What the old one has under way at the device is waited for.
        server.says("waiting for I/O of the dead process");
        device.release();
        let mut other = writing.join().unwrap();
        assert_eq!(other.read(1, 0), 2, "{dies}");
        for byte in 2..50 {
            assert_eq!(client.read(1, u64::from(byte) * 8), byte, "{dies}");
        }
        client.write(1, 0, 100);
        assert_eq!(client.read(1, 0), 100);
        let serves = worker(&server);
        assert!(serves != old && serves != new);
        assert!(!server.stderr().contains("have lost"), "{dies}: {}", server.stderr());
        // And the next upgrade goes all the way.
        let (status, _, errors) = upgrade(&server.pid().to_string(), None);
        assert_eq!(status, Some(0), "{dies}: {errors}");
        until("one process", || children(server.pid()).len() == 1);
        assert_eq!((client.read(1, 0), other.read(1, 0)), (100, 2), "{dies}");
        drop((client, other));
        assert!(server.stop().success(), "{}", server.stderr());
    }
}
