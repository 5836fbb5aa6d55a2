//! What a disk does when something is out of the ordinary.

use rustix::io::Errno;
use shadowbell_backend::{DiskError, MemDisk, Op};
use shadowbell_block::{
    BlockDevice, BlockError, BlockOptions, Blocking, OpenError, Zeroes, block_on, block_on_for,
};
use shadowbell_driver::{AsyncQueue, AttachOptions};
use shadowbell_spec::Status;
use shadowbell_testing::block_device::{TestDisk, attach};
use shadowbell_testing::wait;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

fn open(
    backing: &TestDisk,
    options: &BlockOptions,
) -> (shadowbell_driver::Controller, BlockDevice) {
    let attached = AttachOptions { queue_pairs: 2, queue_depth: 8, ..AttachOptions::default() };
    let mut controller = attach(Arc::new(backing.clone()), &attached);
    let disk = BlockDevice::open(&mut controller, 1, options).unwrap();
    (controller, disk)
}

fn begin<F: Future>(future: &mut Pin<Box<F>>) {
    let mut context = Context::from_waker(Waker::noop());
    assert!(future.as_mut().poll(&mut context).is_pending());
}

#[test]
fn requests_past_the_end_are_refused() {
    let (_controller, disk) = open(&TestDisk::new(64, 512), &BlockOptions::default());
    let disk = Blocking::new(disk);
    let size = disk.geometry().bytes;
    for (offset, len) in [(size, 1), (size - 1, 2), (u64::MAX, 1), (u64::MAX, 2), (0, size + 1)] {
        let mut bytes = vec![0; len as usize];
        for error in [
            disk.read_at(offset, &mut bytes).unwrap_err(),
            disk.write_at(offset, &bytes, false).unwrap_err(),
            disk.write_zeroes(offset, len, Zeroes::default()).unwrap_err(),
            disk.discard(offset, len).unwrap_err(),
            disk.compare(offset, &bytes).unwrap_err(),
        ] {
            assert_eq!(error.errno(), Errno::INVAL, "{error}");
        }
    }
    // Nothing, right at the end.
    disk.read_at(size, &mut []).unwrap();
    disk.write_at(size, &[], true).unwrap();
    disk.write_zeroes(size, 0, Zeroes::default()).unwrap();
    disk.discard(size, 0).unwrap();
    assert!(disk.compare(size, &[]).unwrap());
}

#[test]
fn a_disk_that_takes_no_writes_says_so() {
    let read_only = MemDisk::new(64, 512).unwrap().with_read_only(true);
    let mut controller = attach(Arc::new(read_only), &AttachOptions::default());
    let protected = BlockDevice::open(&mut controller, 1, &BlockOptions::default()).unwrap();
    let mut options = BlockOptions::default();
    options.read_only = true;
    let (_controller, by_choice) = open(&TestDisk::new(64, 512), &options);
    for disk in [protected, by_choice].map(Blocking::new) {
        assert!(disk.geometry().read_only);
        for error in [
            disk.write_at(0, &[1], false).unwrap_err(),
            disk.write_zeroes(0, 512, Zeroes::default()).unwrap_err(),
            disk.discard(0, 512).unwrap_err(),
        ] {
            assert_eq!(error.errno(), Errno::PERM, "{error}");
        }
        disk.read_at(3, &mut [0; 5]).unwrap();
        disk.flush().unwrap();
    }
}

#[test]
fn what_can_not_be_opened_is_refused_with_the_reason() {
    let mut controller = attach(Arc::new(TestDisk::new(64, 512)), &AttachOptions::default());
    let error = BlockDevice::over(&controller, &[], 1, &BlockOptions::default()).unwrap_err();
    assert!(matches!(error, OpenError::NoQueue { .. }), "{error}");
    let error = BlockDevice::open(&mut controller, 7, &BlockOptions::default()).unwrap_err();
    assert!(matches!(error, OpenError::NoNamespace { nsid: 7, .. }), "{error}");
}

#[test]
fn a_write_of_a_part_waits_for_those_it_shares_a_block_with() {
    let backing = TestDisk::new(64, 512);
    let (_controller, disk) = open(&backing, &BlockOptions::default());
    backing.order(|orders| orders.hold = true);
    // Nothing is to end in this time.
    assert!(block_on_for(disk.flush(), Duration::from_millis(5)).is_none());
    backing.order(|orders| orders.hold = false);
    assert!(matches!(block_on_for(disk.flush(), wait::LIMIT), Some(Ok(()))));
    backing.order(|orders| {
        orders.hold = true;
        orders.seen.clear();
    });
    let whole_data = [7; 1024];
    let mut whole = Box::pin(disk.write(0, &whole_data, false));
    begin(&mut whole);
    backing.expect(1);
    // On the other queue, in the second block.
    let other = disk.on_queue(1);
    let mut part = Box::pin(other.write(600, &[9], false));
    begin(&mut part);
    let mut beside = Box::pin(other.write(2000, &[8], false));
    begin(&mut beside);
    backing.expect(2);
    wait::moment();
    let seen = backing.seen();
    assert_eq!(seen.len(), 2, "{seen:?}");
    assert_eq!((seen[1].op, seen[1].offset), (Op::Read, 1536));
    backing.order(|orders| orders.hold = false);
    block_on(async {
        whole.await.unwrap();
        part.await.unwrap();
        beside.await.unwrap();
        let mut back = [0; 1024];
        disk.read(0, &mut back).await.unwrap();
        assert_eq!((back[599], back[600], back[601]), (7, 9, 7));
    });
}

#[test]
fn a_write_whose_future_is_dropped_keeps_its_range_and_its_buffer() {
    let backing = TestDisk::new(64, 512);
    let mut options = BlockOptions::default();
    options.small_buffers = 1;
    let (controller, disk) = open(&backing, &options);
    backing.order(|orders| orders.hold = true);
    let data = [7; 512];
    let mut whole = Box::pin(disk.write(0, &data, false));
    begin(&mut whole);
    backing.expect(1);
    drop(whole);
    let other = disk.on_queue(1);
    let mut part = Box::pin(other.write(5, &[9], false));
    begin(&mut part);
    wait::moment();
    assert_eq!(backing.seen().len(), 1, "the part waits for what was dropped");
    let mut buffer = Box::pin(disk.write(1024, &data, false));
    begin(&mut buffer);
    wait::moment();
    assert_eq!(backing.seen().len(), 1, "there is but one buffer");
    backing.order(|orders| orders.hold = false);
    block_on(async {
        part.await.unwrap();
        buffer.await.unwrap();
        let mut back = [0; 512];
        disk.read(0, &mut back).await.unwrap();
        assert_eq!((back[4], back[5], back[6]), (7, 9, 7));
    });
    drop((disk, other));
    controller.detach().unwrap();
}

#[test]
fn a_long_write_that_is_dropped_is_forgotten_in_order() {
    let backing = TestDisk::new(4096, 512);
    let mut options = BlockOptions::default();
    options.chunk_bytes = 4096;
    options.chunks = 4;
    let (controller, disk) = open(&backing, &options);
    let long = vec![7; 1 << 20];
    for round in 0..20 {
        backing.order(|orders| orders.hold = true);
        let mut write = Box::pin(disk.write(1, &long, false));
        begin(&mut write);
        backing.expect(1);
        drop(write);
        backing.order(|orders| {
            orders.hold = false;
            orders.seen.clear();
        });
        let mark = [round; 2000];
        block_on(disk.write(100, &mark, false)).unwrap();
        let mut back = [0; 2000];
        block_on(disk.read(100, &mut back)).unwrap();
        assert_eq!(back, mark);
        backing.order(|orders| orders.seen.clear());
    }
    drop(disk);
    controller.detach().unwrap();
}

#[test]
fn more_requests_than_places_are_served_in_turn() {
    const REQUESTS: usize = 300;
    let backing = TestDisk::new(4096, 512);
    let mut options = BlockOptions::default();
    options.small_buffers = 3;
    let (_controller, disk) = open(&backing, &options);
    backing.order(|orders| orders.hold = true);
    let data = [1; 512];
    let mut requests: Vec<_> =
        (0..REQUESTS).map(|i| Box::pin(disk.write(i as u64 * 512, &data, false))).collect();
    requests.iter_mut().for_each(begin);
    backing.order(|orders| orders.hold = false);
    block_on(async {
        for request in requests {
            request.await.unwrap();
        }
    });
    let order: Vec<_> = backing.seen().iter().map(|request| request.offset / 512).collect();
    assert_eq!(order, (0..REQUESTS as u64).collect::<Vec<_>>());
}

#[test]
fn a_queue_full_of_commands_is_served() {
    for depth in [8, 64, 100, 128] {
        let backing = TestDisk::new(4096, 512);
        let attached = AttachOptions { queue_depth: depth, ..AttachOptions::default() };
        let mut controller = attach(Arc::new(backing.clone()), &attached);
        let disk = BlockDevice::open(&mut controller, 1, &BlockOptions::default()).unwrap();
        backing.order(|orders| orders.hold = true);
        let data = [1; 512];
        let mut requests: Vec<_> =
            (0..1000).map(|i| Box::pin(disk.write(i * 512, &data, false))).collect();
        requests.iter_mut().for_each(begin);
        backing.expect(depth as usize - 1);
        backing.order(|orders| orders.hold = false);
        block_on(async {
            for request in requests {
                request.await.unwrap();
            }
        });
    }
}

#[test]
fn a_device_that_fails_is_an_error_and_nothing_is_lost() {
    let backing = TestDisk::new(4096, 512);
    let mut options = BlockOptions::default();
    options.chunk_bytes = 4096;
    options.chunks = 4;
    let (controller, disk) = open(&backing, &options);
    for (error, errno) in [
        (DiskError::Io(5), Errno::IO),
        (DiskError::NoSpace, Errno::NOSPC),
        (DiskError::ReadOnly, Errno::PERM),
    ] {
        backing.order(|orders| orders.fail = Some(error));
        for _ in 0..20 {
            let error = block_on(disk.write(100, &[1; 100_000], false)).unwrap_err();
            assert_eq!(error.errno(), errno, "{error}");
            assert!(block_on(disk.write(1, &[1], true)).is_err());
            assert!(block_on(disk.write_zeroes(1, 100_000, Zeroes::default())).is_err());
            block_on(disk.read(100, &mut [0; 100_000])).unwrap();
        }
        backing.order(|orders| orders.fail = None);
        block_on(disk.write(100, &[1; 100_000], false)).unwrap();
    }
    controller.detach().unwrap();
    let error = block_on(disk.write(100, &[1; 100_000], false)).unwrap_err();
    assert_eq!(error.errno(), Errno::IO, "{error}");
    assert!(matches!(block_on(disk.flush()), Err(BlockError::Command(_))));
}

#[test]
fn what_may_succeed_the_next_time_is_tried_again_and_not_for_ever() {
    let backing = TestDisk::new(64, 512);
    let (_controller, disk) = open(&backing, &BlockOptions::default());
    let (internal, is_final) = (Status::INTERNAL.bits(), Status::INTERNAL.with_dnr().bits());
    let (invalid, path) = (Status::INVALID_FIELD.bits(), Status::new(3, 0x60).bits());
    for (error, failures, attempts) in [
        (DiskError::Io(5), 1, 2),
        (DiskError::Io(5), 3, 4),
        // Up to here it succeeds.
        (DiskError::Io(5), 4, 4),
        (DiskError::Device(internal), 2, 3),
        (DiskError::Device(path), 1, 2),
        (DiskError::Device(is_final), 1, 1),
        (DiskError::Device(invalid), 1, 1),
        (DiskError::Cancelled, 1, 1),
        (DiskError::NoSpace, 1, 1),
    ] {
        backing.order(|orders| {
            orders.seen.clear();
            (orders.fail, orders.failures) = (Some(error), Some(failures));
        });
        let outcome = block_on(disk.write(512, &[failures as u8; 512], false));
        assert_eq!(outcome.is_ok(), attempts > failures, "{error:?} {failures} times: {outcome:?}");
        assert_eq!(backing.seen().len() as u32, attempts, "{error:?} {failures} times");
        backing.order(|orders| (orders.fail, orders.failures) = (None, None));
        if outcome.is_ok() {
            let mut data = [0; 512];
            block_on(disk.read(512, &mut data)).unwrap();
            assert_eq!(data, [failures as u8; 512]);
        }
    }
}

#[test]
fn forced_writes_and_flushes_reach_the_device() {
    let backing = TestDisk::new(64, 512);
    let (_controller, disk) = open(&backing, &BlockOptions::default());
    let saw = |op: fn(&Op) -> bool| backing.seen().iter().filter(|seen| op(&seen.op)).count();
    block_on(async {
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
fn zeroes_are_written_where_the_controller_has_no_command_for_them() {
    let backing = TestDisk::new(4096, 512);
    let (_controller, disk) = open(&backing, &BlockOptions::default());
    let disk = Blocking::new(disk);
    disk.write_at(0, &[7; 1 << 20], false).unwrap();
    backing.order(|orders| orders.fail = Some(DiskError::Unsupported));
    let fast = Zeroes { fast_only: true, ..Zeroes::default() };
    let error = disk.write_zeroes(0, 1 << 20, fast).unwrap_err();
    assert_eq!(error.errno(), Errno::NOTSUP, "{error}");
    backing.order(|orders| orders.fail = None);
    assert_eq!(disk.write_zeroes(0, 4096, fast).unwrap_err().errno(), Errno::NOTSUP);
    backing.order(|orders| orders.seen.clear());
    disk.write_zeroes(10, 1_000_000, Zeroes::default()).unwrap();
    assert!(backing.seen().iter().all(|seen| matches!(seen.op, Op::Read | Op::Write { .. })));
    let mut back = vec![1; 1 << 20];
    disk.read_at(0, &mut back).unwrap();
    assert!(back[..10].iter().all(|byte| *byte == 7));
    assert!(back[10..1_000_010].iter().all(|byte| *byte == 0));
    assert!(back[1_000_010..].iter().all(|byte| *byte == 7));
}

#[test]
fn users_of_one_queue_that_know_nothing_of_each_other() {
    let backing = TestDisk::new(4096, 512);
    let mut controller =
        attach(Arc::new(backing), &AttachOptions { queue_depth: 8, ..Default::default() });
    let queue = AsyncQueue::start(controller.take_queue_pair().unwrap()).unwrap();
    let open = || {
        let queues = [queue.clone()];
        BlockDevice::over(&controller, &queues, 1, &BlockOptions::default()).unwrap()
    };
    std::thread::scope(|scope| {
        for user in 0..4u64 {
            let disk = Blocking::new(open());
            scope.spawn(move || {
                for round in 0..50u8 {
                    let at = user * 300_000 + 7 * 512;
                    let data = vec![round ^ user as u8; 9000];
                    disk.write_at(at, &data, false).unwrap();
                    assert!(disk.compare(at, &data).unwrap());
                }
            });
        }
    });
}

#[test]
fn the_write_cache_can_be_turned_off_where_there_is_one() {
    let (_controller, disk) = open(&TestDisk::new(64, 512), &BlockOptions::default());
    // Memory has none.
    assert_eq!(disk.write_cache().unwrap(), None);
    assert_eq!(disk.set_write_cache(false).unwrap_err().errno(), Errno::NOTSUP);
    let path = std::env::temp_dir().join(format!("shadowbell-block-{}", std::process::id()));
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let file = shadowbell_backend::open(path.to_str().unwrap()).unwrap();
    let mut controller = attach(file, &AttachOptions::default());
    std::fs::remove_file(&path).unwrap();
    let disk = BlockDevice::open(&mut controller, 1, &BlockOptions::default()).unwrap();
    assert_eq!(disk.write_cache().unwrap(), Some(true));
    disk.set_write_cache(false).unwrap();
    assert_eq!(disk.write_cache().unwrap(), Some(false));
    block_on(disk.write(3, &[1; 5000], false)).unwrap();
    disk.set_write_cache(true).unwrap();
    assert_eq!(disk.write_cache().unwrap(), Some(true));
}

#[test]
fn a_request_is_woken_when_it_is_done_and_not_before() {
    static WOKEN: AtomicUsize = AtomicUsize::new(0);
    let (_controller, disk) = open(&TestDisk::new(64, 512), &BlockOptions::default());
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
    let mut polls = 0;
    while matches!(read.as_mut().poll(&mut context), Poll::Pending) {
        polls += 1;
        while WOKEN.load(Ordering::SeqCst) < polls {
            std::hint::spin_loop();
        }
    }
    assert_eq!(polls, 1, "woken once, when it was done");
}
