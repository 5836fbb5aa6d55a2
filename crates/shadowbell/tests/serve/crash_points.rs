//! Crash points: the server process dies at each step of recovery and upgrade.

use crate::harness::{Server, until};
use crate::recover::kill;
use crate::supervisor::{signal, worker};
use crate::upgrade::{Client, Load, server_with, socket, upgrade};
use rustix::event::{EventfdFlags, eventfd};
use rustix::process::Signal;
use shadowbell_state::AbortPoint;
use shadowbell_testing::wait::LIMIT;
use shadowbell_vfio_user::client::{Client as Peer, Options};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Server whose processes die at crash points. It has three clients: two loads that verify their
/// data, and a client that checks that each request is answered once.
struct CrashingServer {
    server: Server,
    file: std::path::PathBuf,
    loads: [Load; 2],
    client: Client,
    peer: std::thread::JoinHandle<u32>,
    over: Arc<AtomicBool>,
}

impl CrashingServer {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.keep().join("abort");
        let variable = ("SHADOWBELL_ABORT_FILE", file.to_str().unwrap());
        let server = server_with(4, &[], &[variable]);
        let loads = [(0, 1), (1, 2)];
        let loads = loads.map(|(controller, nsid)| Load::start(&server, controller, nsid));
        let mut client = Client::attach(&socket(&server, 2));
        client.write(1, 0, 1);
        let over = Arc::new(AtomicBool::new(false));
        let peer = {
            let (path, over) = (socket(&server, 3), Arc::clone(&over));
            std::thread::spawn(move || access_registers(&path, &over))
        };
        until("the clients", || server.stderr().matches("a client is attached").count() >= 4);
        until("their queues", || server.stderr().matches("I/O queue").count() >= 3);
        Self { server, file, loads, client, peer, over }
    }

    /// Makes the next process die when it reaches `point` for the `nth` time.
    fn arm(&self, point: AbortPoint, nth: u32) {
        std::fs::write(&self.file, format!("{}:{nth}", point.name())).unwrap();
    }

    /// Requests upgrades until a process has died. The result of an upgrade is ignored, because it
    /// depends on which process dies, and on how fast a disk quiesces.
    fn upgrade_until_crash(&self, before: impl Fn(&Self)) {
        let died = self.file.with_extension("died");
        until("a death", || {
            before(self);
            let _ = upgrade(&self.server.pid().to_string(), None);
            died.exists()
        });
    }

    /// Waits until a process has died at the crash point and another one serves, and checks that no
    /// write of the client is lost.
    fn wait_and_check(&mut self, what: &str, byte: u8) {
        let died = self.file.with_extension("died");
        println!("{what}");
        until(what, || died.exists());
        std::fs::remove_file(died).unwrap();
        let Self { server, client, .. } = self;
        assert_eq!(server.with_hang_report(|| client.read(1, 0)), byte, "{what}");
        server.with_hang_report(|| client.write(1, 0, byte + 1));
        // The process serves for a while, so that its death is not part of a crash loop.
        std::thread::sleep(Duration::from_millis(80));
    }

    fn end(mut self) {
        self.over.store(true, Ordering::Relaxed);
        assert!(self.peer.join().expect("an answer to each request") > 5);
        self.loads.into_iter().for_each(Load::assert_no_loss);
        let log = self.server.stderr();
        assert!(!log.contains("have lost"), "{log}");
        drop(self.client);
        assert!(self.server.stop().success(), "{log}");
        std::fs::remove_dir_all(self.file.parent().unwrap()).unwrap();
    }
}

/// Writes and reads a register in a loop until `over` is set. Returns the number of accesses.
fn access_registers(path: &Path, over: &AtomicBool) -> u32 {
    const AQA: u64 = 0x24;
    const MSIX: u32 = 2;
    let peer = Peer::connect(path, Options { timeout: Some(LIMIT) }).unwrap();
    let mut accesses = 0_u32;
    while !over.load(Ordering::Relaxed) {
        let value = accesses & 0xfff;
        peer.region_write(0, AQA, &value.to_le_bytes()).unwrap();
        let mut read = [0; 4];
        peer.region_read(0, AQA, &mut read).unwrap();
        assert_eq!(u32::from_le_bytes(read), value);
        // A new eventfd changes the client's state, which the server records in the checkpoint.
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        peer.set_irq_eventfds(MSIX, 0, &[event.as_fd()]).unwrap();
        accesses += 1;
    }
    accesses
}

#[test]
fn a_process_may_die_at_each_step_of_a_message() {
    for point in [
        AbortPoint::MessageRead,
        AbortPoint::MessageHandled,
        AbortPoint::MessageRecorded,
        AbortPoint::MessageAnswered,
    ] {
        let mut dying = CrashingServer::start();
        for (byte, nth) in (1..).zip([1, 2, 7, 40]) {
            dying.arm(point, nth);
            signal(worker(&dying.server), Signal::KILL);
            dying.wait_and_check(&format!("{}, time {nth}", point.name()), byte);
        }
        dying.end();
    }
}

#[test]
fn a_process_may_die_at_each_step_of_recovery() {
    for point in [AbortPoint::Rebuilt, AbortPoint::Kept, AbortPoint::Taken] {
        let mut dying = CrashingServer::start();
        for byte in 1..4 {
            dying.arm(point, 1);
            signal(worker(&dying.server), Signal::KILL);
            dying.wait_and_check(point.name(), byte);
        }
        dying.end();
    }
}

#[test]
fn the_old_process_may_die_when_it_has_quiesced_for_an_upgrade() {
    let mut dying = CrashingServer::start();
    for byte in 1..4 {
        dying.arm(AbortPoint::Quiesced, 1);
        kill(&dying.server, Signal::KILL);
        dying.upgrade_until_crash(|_| {});
        dying.wait_and_check(AbortPoint::Quiesced.name(), byte);
    }
    dying.end();
}

#[test]
fn the_next_process_may_die_at_each_step_of_an_upgrade() {
    for point in [AbortPoint::Checked, AbortPoint::Rebuilt, AbortPoint::Kept, AbortPoint::Taken] {
        let mut dying = CrashingServer::start();
        for byte in 1..3 {
            dying.upgrade_until_crash(|dying| dying.arm(point, 1));
            dying.wait_and_check(&format!("{} of the new one", point.name()), byte);
        }
        dying.end();
    }
}
