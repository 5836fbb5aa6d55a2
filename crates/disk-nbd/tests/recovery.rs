//! Tests of recovering an NBD disk of a dead process.

mod common;

use common::{ALL, Fake};
use shadowbell_disk::Disk;
use shadowbell_disk_nbd::{NbdDisk, NbdSpec, OpenError};
use shadowbell_nbd::wire::{NbdError, command, transmission};
use shadowbell_state::Descriptors;
use shadowbell_testing::disks::{flush, write};
use shadowbell_testing::wait;
use std::time::{Duration, Instant};

/// Checkpoint of the disk for the next process.
fn saved(disk: &NbdDisk) -> serde_json::Value {
    disk.checkpoint(&mut Descriptors::default()).unwrap()
}

fn recover(fake: &Fake, options: &str, state: &serde_json::Value) -> Result<NbdDisk, OpenError> {
    let spec = format!("nbd+unix:///x?socket={}&{options}", fake.socket().display());
    let deadline = wait::deadline();
    NbdDisk::recover(&NbdSpec::parse(&spec)?, state, false, &|_| {
        wait::pause();
        Instant::now() < deadline
    })
}

#[test]
fn a_disk_with_settle_is_recovered() {
    let fake = Fake::new(1 << 20, ALL);
    let disk = fake.open("");
    assert!(disk.unfenced().unwrap().contains("add `settle=SECONDS`"));
    let error = recover(&fake, "replay=off", &saved(&disk)).unwrap_err().to_string();
    assert!(error.contains("add `settle=SECONDS`"), "{error}");
    // A process that has quiesced leaves no request at the server.
    let spec = NbdSpec::parse(&format!("nbd+unix:///x?socket={}", fake.socket().display()));
    NbdDisk::recover(&spec.unwrap(), &saved(&disk), true, &|_| true).unwrap();
    drop(disk);
    let disk = fake.open("settle=200ms");
    let mut queue = disk.queue().unwrap();
    write(&mut *queue, 0, &[7; 4096]).unwrap();
    let state = saved(&disk);
    let flushes = fake.count(command::FLUSH);
    let since = Instant::now();
    let next = recover(&fake, "settle=200ms", &state).unwrap();
    // This is only a lower bound: recovery must wait for the whole time of `settle`, and may wait
    // longer.
    assert!(since.elapsed() >= Duration::from_millis(200));
    assert_eq!(
        fake.count(command::FLUSH),
        flushes + 1,
        "what was answered is durable from here on"
    );
    assert_eq!(next.info(), disk.info());
    assert!(!next.has_lost_writes());
    // A disk that was opened without `settle` before the crash cannot be recovered.
    let error = recover(&fake, "replay=off", &state).unwrap_err().to_string();
    assert!(error.contains("cannot be recovered"), "{error}");
}

#[test]
fn recovery_refuses_a_changed_server_and_keeps_a_loss() {
    let fake = Fake::new(1 << 20, ALL);
    let state = saved(&fake.open("settle=0"));
    for (flags, words) in [
        (ALL & !transmission::SEND_FLUSH, "no longer supports flushes"),
        (ALL & !transmission::SEND_WRITE_ZEROES, "no longer supports write zeroes"),
        (ALL | transmission::READ_ONLY, "no longer writable"),
    ] {
        fake.change(|manner| manner.flags = flags);
        let error = recover(&fake, "settle=0", &state).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    fake.change(|manner| manner.flags = ALL);
    let mut larger = state.clone();
    larger["nbd"]["blocks"] = 4096.into();
    let error = recover(&fake, "settle=0", &larger).unwrap_err().to_string();
    assert!(error.contains("smaller than it was"), "{error}");
    // If recovery's flush fails, the server may have lost unflushed data, before or after the
    // crash.
    let fails = (command::FLUSH, NbdError::Io as u32);
    fake.change(|manner| manner.errors.extend([fails]));
    let lost = recover(&fake, "settle=0", &state).unwrap();
    assert!(lost.has_lost_writes());
    fake.change(|manner| manner.errors.clear());
    let next = recover(&fake, "settle=0", &saved(&lost)).unwrap();
    assert!(next.has_lost_writes());
    let mut queue = next.queue().unwrap();
    assert!(flush(&mut *queue).is_err());
}

/// A writable disk without `settle` is opened again after a crash, if it cannot be recovered. Its
/// clients may be those of the dead process, so flushes fail after a loss as before.
#[test]
fn a_disk_that_is_opened_again_keeps_a_loss() {
    let mut fake = Fake::new(1 << 20, ALL);
    let disk = fake.open("replay=off");
    let mut queue = disk.queue().unwrap();
    write(&mut *queue, 0, &[7; 4096]).unwrap();
    let spec = format!("nbd+unix:///x?socket={}", fake.socket().display());
    let spec = NbdSpec::parse(&spec).unwrap();
    let next = NbdDisk::reopen(&spec, &saved(&disk)).unwrap();
    assert!(!next.has_lost_writes() && next.may_have_late_writes());
    assert_eq!(fake.durable()[0], 7, "what was answered is durable from here on");
    write(&mut *queue, 0, &[8; 4096]).unwrap();
    fake.kill();
    fake.start();
    assert!(flush(&mut *queue).is_err() && disk.has_lost_writes());
    let next = NbdDisk::reopen(&spec, &saved(&disk)).unwrap();
    assert!(next.has_lost_writes());
    assert!(flush(&mut *next.queue().unwrap()).is_err());
}

/// A read-only disk has no late writes, so recovery only waits until the server is reachable again.
#[test]
fn a_read_only_disk_recovers_after_its_server_restarts() {
    let mut fake = Fake::new(1 << 20, ALL | transmission::READ_ONLY);
    let state = saved(&fake.open(""));
    fake.kill();
    std::thread::scope(|scope| {
        let next = scope.spawn(|| {
            let spec = format!("nbd+unix:///x?socket={}", fake.socket().display());
            NbdDisk::recover(&NbdSpec::parse(&spec).unwrap(), &state, false, &|_| {
                wait::pause();
                !fake.socket().with_extension("given-up").exists()
            })
        });
        wait::short_pause();
        assert!(!next.is_finished());
        std::fs::write(fake.socket().with_extension("given-up"), "").unwrap();
        let error = next.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("the wait was given up"), "{error}");
    });
    fake.start();
    assert!(recover(&fake, "replay=off", &state).unwrap().info().read_only);
}
