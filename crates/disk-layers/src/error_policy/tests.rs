//! Tests of the error policy `stop`, which holds failed requests, on a disk whose errors the test
//! controls.

use super::*;
use crate::MetadataDisk;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shadowbell_disk::{Disk, DiskError, MetadataFormat, Op, Queue, Request, Submitted};
use shadowbell_memory::{DmaSpace, Mapping, Segments, SharedBytes, View};
use shadowbell_testing::test_disk::TestDisk;
use std::sync::Arc;

const BLOCK: u64 = 512;
const WRITE: Op = Op::Write { fua: false };
const EIO: DiskError = DiskError::Io(5);

/// Ended request: its tag and result.
type Ended = (u32, Result<(), DiskError>);

/// Queue of a disk with the error policy `stop`, above a test disk that fails or holds requests on
/// demand.
struct Fixture {
    storage: TestDisk,
    disk: Arc<dyn Disk>,
    queue: Box<dyn Queue>,
    /// Data of each write, and room for reads.
    memory: SharedBytes,
}

impl Fixture {
    fn new() -> Self {
        Self::with_policy(ErrorPolicy::Stop)
    }

    fn with_policy(policy: ErrorPolicy) -> Self {
        let storage = TestDisk::new(64, BLOCK as u32);
        let disk = HoldingDisk::wrap(Arc::new(storage.clone()), policy);
        let queue = disk.queue().unwrap();
        let memory = Mapping::anonymous(1 << 16).unwrap().bytes();
        let whole = Segments::from_bytes(&memory);
        assert!(whole.fill(0, whole.len(), 7).is_some());
        Self { storage, disk, queue, memory }
    }

    fn fail(&self, error: Option<DiskError>) {
        self.storage.instruct(|instructions| instructions.fail = error);
    }

    fn submit(&mut self, tag: u32, op: Op, mut data: Segments) -> Submitted {
        let len = if op == Op::Flush { 0 } else { BLOCK };
        let request = Request { op, offset: u64::from(tag) * BLOCK, len };
        let submitted = self.queue.submit(tag, &request, &mut data);
        self.queue.commit();
        submitted
    }

    /// Buffer of one block in memory of this process.
    fn block(&self) -> Segments {
        Segments::from_bytes(&self.memory.slice(0, BLOCK as usize).unwrap())
    }

    fn write(&mut self, tag: u32) -> Submitted {
        let data = self.block();
        self.submit(tag, WRITE, data)
    }

    fn reap(&mut self) -> Vec<Ended> {
        let mut all = Vec::new();
        self.queue.reap(&mut |tag, outcome, _| all.push((tag, outcome)));
        all
    }

    /// Returns true if the queue's timer descriptor is readable, which would wake the I/O thread.
    fn wakes(&self) -> bool {
        let fd = self.queue.timer_fd().unwrap();
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
    }

    /// First byte of the block that the write with this tag wrote to the storage.
    fn stored(&self, tag: u32) -> u8 {
        let bytes = self.storage.mem.map(64 * BLOCK).unwrap();
        let mut byte = [0];
        bytes.read_into((u64::from(tag) * BLOCK) as usize, &mut byte).unwrap();
        byte[0]
    }

    fn held(&self) -> u64 {
        self.disk.stopped().map_or(0, |stopped| stopped.held)
    }
}

#[test]
fn requests_that_fail_are_held_until_the_disk_is_resumed() {
    let mut fixture = Fixture::new();
    assert!(!fixture.disk.resume() && fixture.disk.stopped().is_none());
    fixture.fail(Some(DiskError::NoSpace));
    assert_eq!([1, 2].map(|tag| fixture.write(tag)), [Submitted::Pending; 2]);
    assert!(fixture.reap().is_empty() && !fixture.wakes() && fixture.queue.holds_requests());
    let stopped = fixture.disk.stopped().unwrap();
    assert_eq!((stopped.reason, stopped.held, stopped.times), (DiskError::NoSpace, 2, 1));
    assert_eq!(fixture.queue.pending(), 2);
    // New requests pass while the disk is stopped.
    let data = Segments::from_bytes(&fixture.memory.slice(4096, BLOCK as usize).unwrap());
    assert_eq!(fixture.submit(3, Op::Read, data), Submitted::Done(Ok(())));

    // A held request that fails again after `resume` is held again.
    assert!(fixture.disk.resume() && fixture.disk.stopped().is_none() && fixture.wakes());
    assert!(fixture.reap().is_empty() && !fixture.wakes());
    let stopped = fixture.disk.stopped().unwrap();
    assert_eq!((stopped.held, stopped.times), (2, 2));

    fixture.fail(None);
    assert_eq!((fixture.stored(1), fixture.stored(2)), (0, 0));
    assert!(fixture.disk.resume());
    assert_eq!(fixture.reap(), [(1, Ok(())), (2, Ok(()))]);
    assert_eq!((fixture.stored(1), fixture.stored(2)), (7, 7));
    assert!(fixture.disk.stopped().is_none() && !fixture.disk.resume());
    assert!(fixture.queue.pending() == 0 && !fixture.queue.holds_requests());
}

#[test]
fn a_request_that_fails_later_is_held() {
    let mut fixture = Fixture::new();
    fixture.storage.instruct(|instructions| instructions.hold = true);
    assert_eq!(fixture.write(1), Submitted::Pending);
    assert_eq!(fixture.held(), 0);
    fixture.storage.instruct(|instructions| {
        (instructions.hold, instructions.fail) = (false, Some(EIO));
    });
    assert!(fixture.reap().is_empty());
    assert_eq!(fixture.disk.stopped().unwrap().reason, EIO);
    fixture.storage.instruct(|instructions| {
        (instructions.hold, instructions.fail) = (true, None);
    });
    // After `resume`, the held request was submitted to the storage again, and is in flight there.
    assert!(fixture.disk.resume() && fixture.reap().is_empty());
    assert_eq!((fixture.held(), fixture.queue.pending()), (0, 1));
    fixture.storage.instruct(|instructions| instructions.hold = false);
    assert_eq!(fixture.reap(), [(1, Ok(()))]);
    assert_eq!(fixture.stored(1), 7);
}

#[test]
fn other_errors_and_flushes_are_reported() {
    let mut fixture = Fixture::new();
    for error in [DiskError::OutOfRange, DiskError::ReadOnly, DiskError::Io(22)] {
        fixture.fail(Some(error));
        assert_eq!(fixture.write(1), Submitted::Done(Err(error)));
    }
    fixture.storage.instruct(|instructions| instructions.unavailable = true);
    assert_eq!(
        fixture.submit(2, Op::Flush, Segments::new()),
        Submitted::Done(Err(DiskError::Io(19)))
    );
    assert!(fixture.disk.stopped().is_none());

    let mut fixture = Fixture::with_policy(ErrorPolicy::StopOnFull);
    fixture.fail(Some(EIO));
    assert_eq!(fixture.write(1), Submitted::Done(Err(EIO)));
    fixture.fail(Some(DiskError::NoSpace));
    assert_eq!((fixture.write(1), fixture.held()), (Submitted::Pending, 1));
}

#[test]
fn a_reporting_disk_has_no_layer() {
    let disk: Arc<dyn Disk> = Arc::new(TestDisk::new(64, 512));
    assert!(Arc::ptr_eq(&HoldingDisk::wrap(Arc::clone(&disk), ErrorPolicy::Report), &disk));
}

#[test]
fn a_cancellation_ends_held_requests() {
    let mut fixture = Fixture::new();
    fixture.fail(Some(EIO));
    assert_eq!([1, 2].map(|tag| fixture.write(tag)), [Submitted::Pending; 2]);
    fixture.queue.cancel(1);
    assert!(fixture.wakes());
    assert_eq!(fixture.reap(), [(1, Err(DiskError::Cancelled))]);
    assert_eq!(fixture.held(), 1);
    // A cancelled request that fails at the storage is not held.
    fixture.fail(None);
    fixture.storage.instruct(|instructions| instructions.hold = true);
    assert_eq!(fixture.write(3), Submitted::Pending);
    fixture.queue.cancel(3);
    fixture.storage.instruct(|instructions| {
        (instructions.hold, instructions.fail) = (false, Some(EIO));
    });
    assert_eq!(fixture.reap(), [(3, Err(EIO))]);
    fixture.queue.cancel(2);
    assert_eq!(fixture.reap(), [(2, Err(DiskError::Cancelled))]);
    assert!(fixture.disk.stopped().is_none());
}

/// If the disk is replaced, its queues drain. Its held requests could not be resumed then.
#[test]
fn a_suspended_error_policy_ends_held_requests_with_their_errors() {
    let mut fixture = Fixture::new();
    fixture.fail(Some(DiskError::NoSpace));
    assert_eq!(fixture.write(1), Submitted::Pending);
    // The requests are at the storage after a resume, and one of them before its first failure.
    fixture.storage.instruct(|instructions| instructions.hold = true);
    assert!(fixture.disk.resume() && fixture.reap().is_empty());
    assert_eq!(fixture.write(2), Submitted::Pending);
    assert_eq!(fixture.disk.stopped(), None);
    fixture.disk.suspend_error_policy(true);
    fixture.storage.instruct(|instructions| instructions.hold = false);
    assert_eq!(fixture.reap(), [1, 2].map(|tag| (tag, Err(DiskError::NoSpace))));
    assert_eq!(fixture.write(3), Submitted::Done(Err(DiskError::NoSpace)));

    // The replacement fails, so the disk holds requests again. The next one succeeds.
    fixture.disk.suspend_error_policy(false);
    assert_eq!([4, 5].map(|tag| fixture.write(tag)), [Submitted::Pending; 2]);
    assert_eq!((fixture.held(), fixture.wakes()), (2, false));
    fixture.disk.suspend_error_policy(true);
    assert!(fixture.disk.stopped().is_none() && fixture.wakes());
    assert!(!fixture.disk.resume(), "the held requests end");
    assert_eq!(fixture.reap(), [4, 5].map(|tag| (tag, Err(DiskError::NoSpace))));
    assert!(fixture.queue.pending() == 0 && !fixture.queue.holds_requests());

    // This replacement fails before the queue has ended its request, which is then repeated.
    fixture.disk.suspend_error_policy(false);
    assert_eq!(fixture.write(6), Submitted::Pending);
    fixture.disk.suspend_error_policy(true);
    fixture.disk.suspend_error_policy(false);
    assert!(fixture.reap().is_empty() && fixture.held() == 1);
    fixture.fail(None);
    assert!(fixture.disk.resume());
    assert_eq!(fixture.reap(), [(6, Ok(()))]);
}

#[test]
fn a_closed_queue_holds_nothing() {
    let mut fixture = Fixture::new();
    fixture.fail(Some(EIO));
    assert_eq!(fixture.write(1), Submitted::Pending);
    let mut other = fixture.disk.queue().unwrap();
    let request = Request { op: Op::Discard, offset: 0, len: BLOCK };
    assert_eq!(other.submit(9, &request, &mut Segments::new()), Submitted::Pending);
    assert_eq!(fixture.held(), 2);
    fixture.queue = fixture.disk.queue().unwrap();
    assert_eq!(fixture.held(), 1);
    // A resume reaches all queues.
    fixture.fail(None);
    assert!(fixture.disk.resume());
    let mut ended = Vec::new();
    other.reap(&mut |tag, outcome, _| ended.push((tag, outcome)));
    assert_eq!(ended, [(9, Ok(()))]);
}

#[test]
fn an_unmap_ends_requests_with_data_there() {
    let mut fixture = Fixture::new();
    let mut space = DmaSpace::default();
    space.map(0, BLOCK, &fixture.memory.slice(0, BLOCK as usize).unwrap()).unwrap();
    let view = View::new(Arc::clone(space.table()));
    let through = |view: &View| {
        let mut data = Segments::new();
        data.resolve_ranges(view, &[(0, BLOCK as usize)], false).unwrap();
        data
    };
    fixture.fail(Some(EIO));
    let data = through(&view);
    assert_eq!(fixture.submit(1, WRITE, data), Submitted::Pending);
    assert_eq!(fixture.submit(2, Op::Discard, Segments::new()), Submitted::Pending);
    assert_eq!(fixture.write(3), Submitted::Pending);
    fixture.storage.instruct(|instructions| instructions.hold_at = Some(4 * BLOCK));
    let data = through(&view);
    assert_eq!(fixture.submit(4, WRITE, data), Submitted::Pending);
    assert_eq!(fixture.held(), 3);

    space.map(BLOCK, BLOCK, &fixture.memory.slice(512, BLOCK as usize).unwrap()).unwrap();
    fixture.queue.memory_changed(&View::new(Arc::clone(space.table())));
    let watch = view.watch();
    drop(view);
    assert!(fixture.reap().is_empty() && fixture.held() == 3, "another range was mapped");
    space.unmap(0, BLOCK).unwrap();
    let view = View::new(Arc::clone(space.table()));
    fixture.queue.memory_changed(&view);
    assert!(fixture.wakes());
    assert_eq!(fixture.reap(), [(1, Err(DiskError::BadBuffer))]);
    assert_eq!(fixture.held(), 2);
    // A request that was in flight before the change of the DMA table fails: its buffer is not in
    // the current table, so it cannot be held.
    fixture.storage.instruct(|instructions| instructions.hold_at = None);
    assert_eq!(fixture.reap(), [(4, Err(EIO))]);
    assert!(watch.is_idle(), "no request uses the old table");
    // A failed request whose buffer uses the current DMA table is held.
    let mut data = Segments::new();
    data.resolve_ranges(&view, &[(BLOCK, BLOCK as usize)], false).unwrap();
    assert_eq!(fixture.submit(5, WRITE, data), Submitted::Pending);
    fixture.fail(None);
    assert!(fixture.disk.resume());
    assert_eq!(fixture.reap(), [(2, Ok(())), (3, Ok(())), (5, Ok(()))]);
}

/// A request that was in flight during changes of other memory is held when it fails. So is one
/// whose memory gets a log of written pages, as a migration requests it.
#[test]
fn changes_of_other_memory_do_not_matter() {
    let mut fixture = Fixture::new();
    let mut space = DmaSpace::default();
    for page in 0..2 {
        let memory = fixture.memory.slice(page as usize * 512, BLOCK as usize).unwrap();
        space.map(page * BLOCK, BLOCK, &memory).unwrap();
    }
    fixture.storage.instruct(|instructions| instructions.hold = true);
    let view = View::new(Arc::clone(space.table()));
    fixture.queue.memory_changed(&view);
    for (tag, op) in [(1, WRITE), (2, Op::Read)] {
        let mut data = Segments::new();
        data.resolve_ranges(&view, &[(0, BLOCK as usize)], op == Op::Read).unwrap();
        assert_eq!(fixture.submit(tag, op, data), Submitted::Pending);
    }
    let watch = view.watch();
    drop(view);
    space.unmap(BLOCK, BLOCK).unwrap();
    fixture.queue.memory_changed(&View::new(Arc::clone(space.table())));
    fixture.storage.instruct(|instructions| {
        (instructions.hold, instructions.fail, instructions.fail_beyond) =
            (false, Some(EIO), Some(0));
    });
    assert!(fixture.reap().is_empty());
    assert_eq!(fixture.held(), 2);
    assert!(watch.is_idle(), "a held request uses the old table");
    space.start_log();
    fixture.queue.memory_changed(&View::new(Arc::clone(space.table())));
    assert!(fixture.reap().is_empty() && fixture.held() == 2);
    // The held read is in the log, because it writes to guest memory when it is repeated.
    fixture.queue.memory_changed(&View::new(Arc::clone(space.table())));
    let mut written = [0];
    space.log().unwrap().take(0, BLOCK, 512, &mut written);
    assert_eq!(written, [1]);
    fixture.storage.instruct(|instructions| {
        (instructions.fail, instructions.fail_beyond) = (None, None);
    });
    assert!(fixture.disk.resume());
    assert_eq!(fixture.reap(), [(1, Ok(())), (2, Ok(()))]);
}

#[test]
fn a_resized_disk_has_the_same_held_requests() {
    let storage = shadowbell_disk_file::open("mem:64KiB").unwrap();
    let disk = HoldingDisk::wrap(storage, ErrorPolicy::Stop);
    let read_only = disk.with_writes(false).unwrap();
    assert!(read_only.info().read_only && disk.stopped().is_none());
    assert!(read_only.inner().is_some(), "the layer is still there");
}

/// The layer that holds requests is above the metadata layer. So no buffer that uses an old DMA
/// table remains in use in the metadata layer while a request is held.
#[test]
fn a_write_with_metadata_is_held_as_a_whole() {
    let storage = TestDisk::new(64, 512);
    let format = MetadataFormat::new(8).unwrap();
    let metadata = MetadataDisk::new(Arc::new(storage.clone()), format).unwrap();
    let disk = HoldingDisk::wrap(Arc::new(metadata), ErrorPolicy::Stop);
    let mut queue = disk.queue().unwrap();
    let memory = Mapping::anonymous(4096).unwrap().bytes();
    let data = || Segments::from_bytes(&memory.slice(0, 520).unwrap());
    let request = Request { op: WRITE, offset: 0, len: 512 };
    storage.instruct(|instructions| instructions.fail = Some(EIO));
    let metadata = shadowbell_disk::Metadata::default();
    let submitted = queue.submit_with_metadata(1, &request, &metadata, &mut data());
    assert_eq!(submitted, Submitted::Pending);
    assert_eq!(disk.stopped().unwrap().held, 1);
    storage.instruct(|instructions| instructions.fail = None);
    assert!(disk.resume());
    let mut ended = Vec::new();
    queue.reap(&mut |tag, outcome, data| ended.push((tag, outcome, data.len())));
    assert_eq!(ended, [(1, Ok(()), 520)]);
}
