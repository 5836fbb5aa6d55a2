//! Tests of the checkpoints of disks, and of recovery by the next process.

use shadowbell_disk::{CheckpointError, Disk, Op, OpenError, Request, Submitted};
use shadowbell_disk_file::{open, open_recoverable, recover};
use shadowbell_memory::{Mapping, Segments};
use shadowbell_state::{Descriptors, Parcel};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

const LEN: usize = 4096;

/// Sends the checkpoint of a disk through a socket, as to another process, and returns what
/// arrives.
fn save_and_receive(disk: &dyn Disk) -> (serde_json::Value, Descriptors) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut parcel = Parcel::new();
    let state = disk.checkpoint(parcel.descriptors()).unwrap();
    parcel.add("disk", true, &state).unwrap();
    parcel.send(&ours).unwrap();
    drop(parcel);
    let mut parcel = Parcel::receive(&theirs).unwrap();
    let state = parcel.take("disk").unwrap().unwrap();
    (state, std::mem::take(parcel.descriptors()))
}

fn run(disk: &dyn Disk, op: Op, data: &mut Segments) -> bool {
    let mut queue = disk.queue().unwrap();
    let len = if op == Op::Flush { 0 } else { LEN as u64 };
    let mut outcome = match queue.submit(1, &Request { op, offset: 0, len }, data) {
        Submitted::Done(outcome) => Some(outcome),
        Submitted::Pending => None,
    };
    queue.commit();
    while outcome.is_none() {
        if let Some(fd) = queue.wake_fd() {
            let fds = &mut [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
            let _ = rustix::event::poll(fds, None);
        }
        queue.reap(&mut |_, result, _| outcome = Some(result));
    }
    outcome.unwrap().is_ok()
}

fn write(disk: &dyn Disk, byte: u8) {
    let bytes = Mapping::anonymous(LEN as u64).unwrap().bytes();
    bytes.fill(0, LEN, byte).unwrap();
    assert!(run(disk, Op::Write { fua: false }, &mut Segments::from_bytes(&bytes)));
}

/// Reads the first byte of the disk.
fn read(disk: &dyn Disk) -> u8 {
    let bytes = Mapping::anonymous(LEN as u64).unwrap().bytes();
    assert!(run(disk, Op::Read, &mut Segments::from_bytes(&bytes)));
    bytes.read(0).unwrap()
}

fn image(directory: &Path) -> String {
    let path = directory.join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    path.display().to_string()
}

fn is_locked(spec: &str) -> bool {
    match open(spec) {
        Ok(_) => false,
        Err(OpenError::Busy { .. }) => true,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_released_lock_lets_the_next_process_recover_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = image(directory.path());
    for options in ["", "?direct=off", "?aio=threads&direct=off"] {
        let spec = format!("{path}{options}");
        let old = open_recoverable(&spec).unwrap();
        write(&*old, 7);
        let (state, mut fds) = save_and_receive(&*old);
        assert!(is_locked(&spec));
        old.release_lock();
        let new = recover(&spec, &state, &mut fds, &|_| false).unwrap();
        assert_eq!((new.info(), new.name()), (old.info(), old.name()));
        drop(old);
        assert!(is_locked(&spec), "the new disk holds the lock");
        assert_eq!(read(&*new), 7);
        drop(new);
        assert!(!is_locked(&spec));
    }
}

#[test]
fn a_memory_disk_keeps_its_contents() {
    for spec in ["mem:1MiB", "mem:516KiB?block-size=4096", "mem:3KiB", "mem:128MiB"] {
        let old = open_recoverable(spec).unwrap();
        if old.info().bytes() >= LEN as u64 {
            write(&*old, 9);
        }
        let (state, mut fds) = save_and_receive(&*old);
        let new = recover(spec, &state, &mut fds, &|_| false).unwrap();
        drop(old);
        assert_eq!(new.info().bytes(), open(spec).unwrap().info().bytes());
        if new.info().bytes() >= LEN as u64 {
            assert_eq!(read(&*new), 9, "{spec}");
            assert!(run(&*new, Op::Discard, &mut Segments::default()));
            assert_eq!(read(&*new), 0, "{spec}");
        }
        let (state, mut fds) = save_and_receive(&*new);
        recover(spec, &state, &mut fds, &|_| false).unwrap();
    }
    let spec = "null:1TiB?read-zeroes=on";
    let (state, mut fds) = save_and_receive(&*open_recoverable(spec).unwrap());
    assert_eq!(read(&*recover(spec, &state, &mut fds, &|_| false).unwrap()), 0);
}

#[test]
fn another_disk_or_a_private_one_is_refused() {
    let disk: Arc<dyn Disk> = open("mem:1MiB").unwrap();
    let error = disk.checkpoint(&mut Descriptors::default()).unwrap_err();
    assert!(matches!(error, CheckpointError::Private { .. }), "{error}");
    let (state, mut fds) = save_and_receive(&*open_recoverable("mem:1MiB").unwrap());
    let error = recover("mem:2MiB", &state, &mut fds, &|_| false).unwrap_err().to_string();
    let why = "its size, block size or write protection has changed";
    assert_eq!(error, format!("mem:2MiB cannot be taken over: {why}"));
}
