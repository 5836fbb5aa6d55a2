//! The disk of a process that has died, in the next one.

mod common;

use common::{ALL, Fake};
use shadowbell_backend::Disk;
use shadowbell_backend_nbd::{NbdDisk, NbdSpec, OpenError};
use shadowbell_nbd::wire::{NbdError, command, transmission};
use shadowbell_state::Descriptors;
use shadowbell_testing::disks::{flush, write};
use shadowbell_testing::wait;
use std::time::{Duration, Instant};

/// What another process goes on with, as it reads it.
fn kept(disk: &NbdDisk) -> serde_json::Value {
    disk.keep(&mut Descriptors::default()).unwrap()
}

fn recover(fake: &Fake, options: &str, state: &serde_json::Value) -> Result<NbdDisk, OpenError> {
    let spec = format!("nbd+unix:///x?socket={}&{options}", fake.socket().display());
    let deadline = wait::deadline();
    NbdDisk::recover(&NbdSpec::parse(&spec)?, state, &|| {
        wait::pause();
        Instant::now() < deadline
    })
}

#[test]
fn a_disk_is_gone_on_with_if_somebody_says_when_writes_have_settled() {
    let fake = Fake::new(1 << 20, ALL);
    let error = fake.open("").keep(&mut Descriptors::default()).unwrap_err().to_string();
    assert!(error.contains("`settle=SECONDS` says how long"), "{error}");
    let disk = fake.open("settle=200ms");
    let mut queue = disk.queue().unwrap();
    write(&mut *queue, 0, &[7; 4096]).unwrap();
    let state = kept(&disk);
    let flushes = fake.count(command::FLUSH);
    let since = Instant::now();
    let next = recover(&fake, "settle=200ms", &state).unwrap();
    // Lower bound: the limit does not expire early.
    assert!(since.elapsed() >= Duration::from_millis(200));
    assert_eq!(
        fake.count(command::FLUSH),
        flushes + 1,
        "what was answered is durable from here on"
    );
    assert_eq!(next.info(), disk.info());
    assert!(!next.has_lost());
    // Who had not said it says it no more in time.
    let error = recover(&fake, "replay=off", &state).unwrap_err().to_string();
    assert!(error.contains("can not be taken over"), "{error}");
}

#[test]
fn a_server_that_is_not_what_it_was_is_refused_and_a_loss_is_remembered() {
    let fake = Fake::new(1 << 20, ALL);
    let state = kept(&fake.open("settle=0"));
    for (flags, words) in [
        (ALL & !transmission::SEND_FLUSH, "without flushes"),
        (ALL & !transmission::SEND_WRITE_ZEROES, "without write zeroes"),
        (ALL | transmission::READ_ONLY, "no writes any more"),
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
    // A flush that fails has lost what was not flushed; so has one that failed before.
    let fails = (command::FLUSH, NbdError::Io as u32);
    fake.change(|manner| manner.errors.extend([fails]));
    let lost = recover(&fake, "settle=0", &state).unwrap();
    assert!(lost.has_lost());
    fake.change(|manner| manner.errors.clear());
    let next = recover(&fake, "settle=0", &kept(&lost)).unwrap();
    assert!(next.has_lost());
    let mut queue = next.queue().unwrap();
    assert!(flush(&mut *queue).is_err());
}

/// Nobody waits for writes that there are not, and a server may be away for a while.
#[test]
fn a_disk_that_is_only_read_needs_no_time_and_its_server_is_waited_for() {
    let mut fake = Fake::new(1 << 20, ALL | transmission::READ_ONLY);
    let state = kept(&fake.open(""));
    fake.kill();
    std::thread::scope(|scope| {
        let next = scope.spawn(|| {
            let spec = format!("nbd+unix:///x?socket={}", fake.socket().display());
            NbdDisk::recover(&NbdSpec::parse(&spec).unwrap(), &state, &|| {
                wait::pause();
                !fake.socket().with_extension("given-up").exists()
            })
        });
        wait::moment();
        assert!(!next.is_finished());
        std::fs::write(fake.socket().with_extension("given-up"), "").unwrap();
        let error = next.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("not waited for any longer"), "{error}");
    });
    fake.start();
    assert!(recover(&fake, "replay=off", &state).unwrap().info().read_only);
}
