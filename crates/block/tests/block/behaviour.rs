//! Block device: bounds, order, read-only disks, failures, retries, timeouts and dropped queues.

use rustix::io::Errno;
use shadowbell_block::{
    BlockDevice, BlockError, BlockOptions, BlockQueue, OpenError, Zeroes, block_on,
};
use shadowbell_disk::{DiskError, Op, ZoneFormat};
use shadowbell_disk_file::MemDisk;
use shadowbell_disk_layers::ZonedDisk;
use shadowbell_spec::Status;
use shadowbell_testing::test_disk::TestDisk;
use shadowbell_testing::wait;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

fn device(backing: &TestDisk, options: &BlockOptions) -> BlockDevice {
    BlockDevice::new(Arc::new(backing.clone()), options).unwrap()
}

fn open(backing: &TestDisk, options: &BlockOptions) -> BlockQueue {
    device(backing, options).queue().unwrap()
}

fn begin<F: Future>(future: &mut Pin<Box<F>>) {
    let mut context = Context::from_waker(Waker::noop());
    assert!(future.as_mut().poll(&mut context).is_pending());
}

#[test]
fn requests_past_the_end_are_refused() {
    let disk = open(&TestDisk::new(64, 512), &BlockOptions::default());
    let size = disk.geometry().bytes;
    for (offset, len) in [(size, 1), (size - 1, 2), (u64::MAX, 1), (u64::MAX, 2), (0, size + 1)] {
        let mut bytes = vec![0; len as usize];
        for error in [
            disk.block_on(disk.read(offset, &mut bytes)).unwrap_err(),
            disk.block_on(disk.write(offset, &bytes, false)).unwrap_err(),
            disk.block_on(disk.write_zeroes(offset, len, Zeroes::default())).unwrap_err(),
            disk.block_on(disk.discard(offset, len)).unwrap_err(),
        ] {
            assert_eq!(error.errno(), Errno::INVAL, "{error}");
        }
    }
    // Empty requests at the end of the disk succeed.
    disk.block_on(disk.read(size, &mut [])).unwrap();
    disk.block_on(disk.write(size, &[], true)).unwrap();
    disk.block_on(disk.write_zeroes(size, 0, Zeroes::default())).unwrap();
    disk.block_on(disk.discard(size, 0)).unwrap();
}

#[test]
fn a_read_only_disk_refuses_writes() {
    let read_only = MemDisk::new(64, 512).unwrap().with_read_only(true);
    let protected = BlockDevice::new(Arc::new(read_only), &BlockOptions::default()).unwrap();
    let protected = protected.queue().unwrap();
    let mut options = BlockOptions::default();
    options.read_only = true;
    let by_choice = open(&TestDisk::new(64, 512), &options);
    for disk in [protected, by_choice] {
        assert!(disk.geometry().read_only);
        for error in [
            disk.block_on(disk.write(0, &[1], false)).unwrap_err(),
            disk.block_on(disk.write_zeroes(0, 512, Zeroes::default())).unwrap_err(),
            disk.block_on(disk.discard(0, 512)).unwrap_err(),
        ] {
            assert_eq!(error.errno(), Errno::PERM, "{error}");
        }
        disk.block_on(disk.read(3, &mut [0; 5])).unwrap();
        disk.block_on(disk.flush()).unwrap();
    }
}

#[test]
fn a_disk_of_zones_is_refused_with_the_reason() {
    let format = ZoneFormat::parse([("zoned", "1MiB")].into_iter()).unwrap().unwrap();
    let zoned =
        ZonedDisk::new(Arc::new(MemDisk::new(1 << 14, 512).unwrap()), format, false).unwrap();
    let error = BlockDevice::new(Arc::new(zoned), &BlockOptions::default()).unwrap_err();
    assert!(matches!(error, OpenError::Zoned { .. }), "{error}");
    assert!(error.to_string().contains("zoned"), "{error}");
}

#[test]
fn a_partial_write_waits_for_requests_on_the_same_block() {
    partial_write(|device| device.queue().unwrap());
}

#[test]
fn block_devices_of_one_disk_share_the_locks_of_ranges() {
    partial_write(|device| device.with_options(&BlockOptions::default()).queue().unwrap());
}

/// Tests that a write of a part of a block waits while another request writes the whole block.
/// `other` opens the queue for the partial write.
fn partial_write(other: impl Fn(&BlockDevice) -> BlockQueue) {
    let backing = TestDisk::new(64, 512);
    let device = device(&backing, &BlockOptions::default());
    let disk = device.queue().unwrap();
    backing.instruct(|instructions| instructions.hold = true);
    // The disk holds the flush, so the flush does not complete within 5 ms.
    assert!(disk.block_on_for(disk.flush(), Duration::from_millis(5)).is_none());
    backing.instruct(|instructions| instructions.hold = false);
    assert!(matches!(disk.block_on_for(disk.flush(), wait::LIMIT), Some(Ok(()))));
    backing.instruct(|instructions| {
        instructions.hold = true;
        instructions.seen.clear();
    });
    let whole_data = [7; 1024];
    let mut whole = Box::pin(disk.write(0, &whole_data, false));
    begin(&mut whole);
    backing.expect(1);
    // The write changes a part of the second block, on another queue.
    let other = other(&device);
    let mut part = Box::pin(other.write(600, &[9], false));
    begin(&mut part);
    let mut beside = Box::pin(other.write(2000, &[8], false));
    begin(&mut beside);
    backing.expect(2);
    let seen = backing.seen();
    assert_eq!(seen.len(), 2, "{seen:?}");
    assert_eq!((seen[1].op, seen[1].offset), (Op::Read, 1536));
    backing.instruct(|instructions| instructions.hold = false);
    block_on(&[&disk, &other], async {
        whole.await.unwrap();
        part.await.unwrap();
        beside.await.unwrap();
        let mut back = [0; 1024];
        disk.read(0, &mut back).await.unwrap();
        assert_eq!((back[599], back[600], back[601]), (7, 9, 7));
    })
    .unwrap();
}

#[test]
fn a_write_with_a_dropped_future_holds_its_range_and_buffer() {
    let backing = TestDisk::new(64, 512);
    let mut options = BlockOptions::default();
    options.small_buffers = 1;
    let device = device(&backing, &options);
    let disk = device.queue().unwrap();
    backing.instruct(|instructions| instructions.hold = true);
    let data = [7; 512];
    let mut whole = Box::pin(disk.write(0, &data, false));
    begin(&mut whole);
    backing.expect(1);
    drop(whole);
    let other = device.queue().unwrap();
    let mut part = Box::pin(other.write(5, &[9], false));
    begin(&mut part);
    disk.turn();
    assert_eq!(backing.seen().len(), 1, "the part waits for what was dropped");
    let mut buffer = Box::pin(disk.write(1024, &data, false));
    begin(&mut buffer);
    disk.turn();
    assert_eq!(backing.seen().len(), 1, "there is but one buffer");
    backing.instruct(|instructions| instructions.hold = false);
    block_on(&[&disk, &other], async {
        part.await.unwrap();
        buffer.await.unwrap();
        let mut back = [0; 512];
        disk.read(0, &mut back).await.unwrap();
        assert_eq!((back[4], back[5], back[6]), (7, 9, 7));
    })
    .unwrap();
}

#[test]
fn a_long_write_that_is_dropped_is_forgotten_in_order() {
    let backing = TestDisk::new(4096, 512);
    let mut options = BlockOptions::default();
    options.chunk_bytes = 4096;
    options.chunks = 4;
    let disk = open(&backing, &options);
    let long = vec![7; 1 << 20];
    for round in 0..20 {
        backing.instruct(|instructions| instructions.hold = true);
        let mut write = Box::pin(disk.write(1, &long, false));
        begin(&mut write);
        backing.expect(1);
        drop(write);
        backing.instruct(|instructions| {
            instructions.hold = false;
            instructions.seen.clear();
        });
        let mark = [round; 2000];
        disk.block_on(disk.write(100, &mark, false)).unwrap();
        let mut back = [0; 2000];
        disk.block_on(disk.read(100, &mut back)).unwrap();
        assert_eq!(back, mark);
        backing.instruct(|instructions| instructions.seen.clear());
    }
}

#[test]
fn more_requests_than_places_are_served_in_turn() {
    const REQUESTS: usize = 300;
    let backing = TestDisk::new(4096, 512);
    let mut options = BlockOptions::default();
    options.small_buffers = 3;
    let disk = open(&backing, &options);
    backing.instruct(|instructions| instructions.hold = true);
    let data = [1; 512];
    let mut requests: Vec<_> =
        (0..REQUESTS).map(|i| Box::pin(disk.write(i as u64 * 512, &data, false))).collect();
    requests.iter_mut().for_each(begin);
    backing.instruct(|instructions| instructions.hold = false);
    disk.block_on(async {
        for request in requests {
            request.await.unwrap();
        }
    });
    let order: Vec<_> = backing.seen().iter().map(|request| request.offset / 512).collect();
    assert_eq!(order, (0..REQUESTS as u64).collect::<Vec<_>>());
}

#[test]
fn disk_errors_are_returned_and_no_buffer_is_lost() {
    let backing = TestDisk::new(4096, 512);
    let mut options = BlockOptions::default();
    options.chunk_bytes = 4096;
    options.chunks = 4;
    let disk = open(&backing, &options);
    for (error, errno) in [
        (DiskError::Io(5), Errno::IO),
        (DiskError::NoSpace, Errno::NOSPC),
        (DiskError::ReadOnly, Errno::PERM),
    ] {
        backing.instruct(|instructions| instructions.fail = Some(error));
        for _ in 0..20 {
            let error = disk.block_on(disk.write(100, &[1; 100_000], false)).unwrap_err();
            assert_eq!(error.errno(), errno, "{error}");
            assert!(disk.block_on(disk.write(1, &[1], true)).is_err());
            assert!(disk.block_on(disk.write_zeroes(1, 100_000, Zeroes::default())).is_err());
            disk.block_on(disk.read(100, &mut [0; 100_000])).unwrap();
        }
        backing.instruct(|instructions| instructions.fail = None);
        disk.block_on(disk.write(100, &[1; 100_000], false)).unwrap();
    }
}

#[test]
fn retryable_errors_are_retried_a_limited_number_of_times() {
    let backing = TestDisk::new(64, 512);
    let disk = open(&backing, &BlockOptions::default());
    let (internal, is_final) = (Status::INTERNAL.bits(), Status::INTERNAL.with_dnr().bits());
    let (invalid, path) = (Status::INVALID_FIELD.bits(), Status::new(3, 0x60).bits());
    for (error, failures, attempts) in [
        (DiskError::Device(internal), 1, 2),
        (DiskError::Device(internal), 3, 4),
        // There are at most three retries, so the fourth failure is final.
        (DiskError::Device(internal), 4, 4),
        // A storage error is not retried, because the storage itself has retried.
        (DiskError::Io(5), 1, 1),
        (DiskError::Device(path), 1, 2),
        (DiskError::Device(is_final), 1, 1),
        (DiskError::Device(invalid), 1, 1),
        (DiskError::Cancelled, 1, 1),
        (DiskError::NoSpace, 1, 1),
    ] {
        backing.instruct(|instructions| {
            instructions.seen.clear();
            (instructions.fail, instructions.failures) = (Some(error), Some(failures));
        });
        let outcome = disk.block_on(disk.write(512, &[failures as u8; 512], false));
        assert_eq!(outcome.is_ok(), attempts > failures, "{error:?} {failures} times: {outcome:?}");
        assert_eq!(backing.seen().len() as u32, attempts, "{error:?} {failures} times");
        backing.instruct(|instructions| (instructions.fail, instructions.failures) = (None, None));
        if outcome.is_ok() {
            let mut data = [0; 512];
            disk.block_on(disk.read(512, &mut data)).unwrap();
            assert_eq!(data, [failures as u8; 512]);
        }
    }
}

#[test]
fn forced_writes_and_flushes_reach_the_device() {
    let backing = TestDisk::new(64, 512);
    let disk = open(&backing, &BlockOptions::default());
    let saw = |op: fn(&Op) -> bool| backing.seen().iter().filter(|seen| op(&seen.op)).count();
    disk.block_on(async {
        disk.write(0, &[1; 512], true).await.unwrap();
        disk.write(1000, &[1; 3], true).await.unwrap();
        assert_eq!(saw(|op| matches!(op, Op::Write { fua: true })), 2);
        disk.write_zeroes(0, 1024, Zeroes { fua: true, ..Zeroes::default() }).await.unwrap();
        disk.write_zeroes(0, 1024, Zeroes { deallocate: true, ..Zeroes::default() }).await.unwrap();
        assert_eq!(saw(|op| *op == Op::WriteZeroes { deallocate: false, fua: true }), 1);
        assert_eq!(saw(|op| *op == Op::WriteZeroes { deallocate: true, fua: false }), 1);
        disk.flush().await.unwrap();
        assert_eq!(saw(|op| *op == Op::Flush), 1);
        disk.discard(1, 1534).await.unwrap();
        assert_eq!(saw(|op| *op == Op::Discard), 1);
        let seen = backing.seen();
        let discard = seen.iter().find(|seen| seen.op == Op::Discard).unwrap();
        assert_eq!((discard.offset, discard.len), (512, 512), "whole blocks only");
    });
}

#[test]
fn zeroes_are_written_if_the_disk_does_not_support_write_zeroes() {
    let backing = TestDisk::new(4096, 512);
    let disk = open(&backing, &BlockOptions::default());
    disk.block_on(disk.write(0, &[7; 1 << 20], false)).unwrap();
    backing.instruct(|instructions| instructions.fail = Some(DiskError::Unsupported));
    let fast = Zeroes { fast_only: true, ..Zeroes::default() };
    let error = disk.block_on(disk.write_zeroes(0, 1 << 20, fast)).unwrap_err();
    assert_eq!(error.errno(), Errno::NOTSUP, "{error}");
    backing.instruct(|instructions| instructions.fail = None);
    assert_eq!(disk.block_on(disk.write_zeroes(0, 4096, fast)).unwrap_err().errno(), Errno::NOTSUP);
    backing.instruct(|instructions| instructions.seen.clear());
    disk.block_on(disk.write_zeroes(10, 1_000_000, Zeroes::default())).unwrap();
    assert!(backing.seen().iter().all(|seen| matches!(seen.op, Op::Read | Op::Write { .. })));
    let mut back = vec![1; 1 << 20];
    disk.block_on(disk.read(0, &mut back)).unwrap();
    assert!(back[..10].iter().all(|byte| *byte == 7));
    assert!(back[10..1_000_010].iter().all(|byte| *byte == 0));
    assert!(back[1_000_010..].iter().all(|byte| *byte == 7));
}

#[test]
fn a_waker_is_called_only_on_completion() {
    static WOKEN: AtomicUsize = AtomicUsize::new(0);
    let backing = TestDisk::new(64, 512);
    let disk = open(&backing, &BlockOptions::default());
    let mut bytes = [0; 512];
    let mut read = Box::pin(disk.read(0, &mut bytes));
    struct Count;
    impl std::task::Wake for Count {
        fn wake(self: Arc<Self>) {
            WOKEN.fetch_add(1, Ordering::SeqCst);
        }
    }
    let waker = Waker::from(Arc::new(Count));
    let mut context = Context::from_waker(&waker);
    backing.instruct(|instructions| instructions.hold = true);
    assert!(read.as_mut().poll(&mut context).is_pending());
    assert!(!disk.turn() && WOKEN.load(Ordering::SeqCst) == 0);
    backing.instruct(|instructions| instructions.hold = false);
    assert!(disk.turn());
    assert_eq!(WOKEN.load(Ordering::SeqCst), 1);
    assert!(matches!(read.as_mut().poll(&mut context), Poll::Ready(Ok(()))));
    assert!(!disk.turn() && WOKEN.load(Ordering::SeqCst) == 1);
}

/// A request that the disk neither completes nor cancels fails with a timeout. Its range stays
/// locked, because the disk may still write it.
#[test]
fn a_request_that_does_not_end_fails_and_keeps_its_range() {
    let backing = TestDisk::new(64, 512);
    let mut options = BlockOptions::default();
    // The timeout expires for the held request. All other requests complete immediately.
    options.timeout = Duration::from_secs(3);
    let device = device(&backing, &options);
    let (disk, other) = (device.queue().unwrap(), device.queue().unwrap());
    backing.instruct(|instructions| instructions.hold_at = Some(0));
    let error = disk.block_on(disk.write(0, &[1; 512], false)).unwrap_err();
    assert!(matches!(error, BlockError::TimedOut), "{error}");
    let mut part = Box::pin(other.write(3, &[2], false));
    begin(&mut part);
    other.block_on(other.write(600, &[2], false)).unwrap();
    backing.instruct(|instructions| instructions.hold_at = None);
    block_on(&[&disk, &other], part).unwrap().unwrap();
    let mut back = [0; 5];
    disk.block_on(disk.read(0, &mut back)).unwrap();
    assert_eq!(back, [1, 1, 1, 2, 1]);
}

/// The drop of a queue waits for its requests in flight.
#[test]
fn a_queue_that_is_dropped_waits_for_its_requests() {
    let backing = TestDisk::new(64, 512);
    let device = device(&backing, &BlockOptions::default());
    let disk = device.queue().unwrap();
    backing.instruct(|instructions| instructions.hold = true);
    let data = [5; 512];
    let mut write = Box::pin(disk.write(0, &data, false));
    begin(&mut write);
    drop(write);
    let order = {
        let backing = backing.clone();
        std::thread::spawn(move || {
            wait::short_pause();
            backing.instruct(|instructions| instructions.hold = false);
        })
    };
    drop(disk);
    assert_eq!(backing.mem.bytes().read::<u8>(511), Some(5));
    order.join().unwrap();
    let other = device.queue().unwrap();
    other.block_on(other.write(1, &[6], false)).unwrap();
}
