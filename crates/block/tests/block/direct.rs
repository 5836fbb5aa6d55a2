//! Whole blocks to and from buffers of the caller's own.

use shadowbell_backend::{DiskError, MemDisk, Op};
use shadowbell_block::{BlockDevice, BlockError, BlockOptions, block_on};
use shadowbell_driver::AttachOptions;
use shadowbell_testing::block_device::{TestDisk, attach};
use shadowbell_testing::wait;
use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

fn open(backing: &TestDisk) -> (shadowbell_driver::Controller, BlockDevice) {
    let mut controller = attach(Arc::new(backing.clone()), &AttachOptions::default());
    let disk = BlockDevice::open(&mut controller, 1, &BlockOptions::default()).unwrap();
    (controller, disk)
}

#[test]
fn what_is_written_from_a_buffer_is_read_into_another() {
    let backing = TestDisk::new(4096, 512);
    let (_controller, disk) = open(&backing);
    let buffers = disk.buffers(2, 64 << 10).unwrap();
    for (offset, len) in [(0, 512), (512, 4096), (1536, 64 << 10)] {
        assert!(disk.is_direct(offset, len));
        let mut buffer = buffers.take().unwrap();
        let data: Vec<u8> = (0..len).map(|i| (i / 100) as u8 | 1).collect();
        assert!(buffer.copy_from(0, &data));
        let buffer = block_on(disk.write_direct(offset, len, buffer, true)).unwrap();
        let mut back = vec![0; len];
        block_on(disk.read(offset, &mut back)).unwrap();
        assert!(back == data);
        drop(buffer);
        let buffer = block_on(disk.read_direct(offset, len, buffers.take().unwrap())).unwrap();
        assert!(buffer.to_vec(len) == data);
    }
    let seen = backing.seen();
    let forced = |op: Op| matches!(op, Op::Write { fua: true });
    assert_eq!(seen.iter().filter(|seen| forced(seen.op)).count(), 3);
    assert_eq!(buffers.available(), 2);
}

#[test]
fn what_is_no_whole_blocks_or_too_much_is_refused_and_the_buffer_comes_back() {
    let (_controller, disk) = open(&TestDisk::new(4096, 512));
    let buffers = disk.buffers(1, 4096).unwrap();
    for (offset, len) in [(0, 0), (1, 512), (0, 511), (512, 513), (0, 4 << 20)] {
        assert!(!disk.is_direct(offset, len));
        let read = block_on(disk.read_direct(offset, len, buffers.take().unwrap()));
        assert!(read.is_err(), "{offset} {len}");
        let write = block_on(disk.write_direct(offset, len, buffers.take().unwrap(), false));
        assert!(write.is_err(), "{offset} {len}");
    }
    // Longer than the buffer, and past the end.
    for (offset, len) in [(0, 8192), (4096 * 512, 512), (u64::MAX - 511, 512)] {
        let read = block_on(disk.read_direct(offset, len, buffers.take().unwrap()));
        assert!(read.is_err(), "{offset} {len}");
    }
    assert_eq!(buffers.available(), 1);
}

#[test]
fn a_disk_that_fails_or_takes_no_writes_says_so_and_the_buffer_comes_back() {
    let backing = TestDisk::new(4096, 512);
    let (_controller, disk) = open(&backing);
    let buffers = disk.buffers(1, 4096).unwrap();
    backing.order(|orders| orders.fail = Some(DiskError::NoSpace));
    let write = block_on(disk.write_direct(0, 4096, buffers.take().unwrap(), false));
    assert!(write.unwrap_err().status().is_some());
    assert_eq!(buffers.available(), 1);

    let read_only = MemDisk::new(64, 512).unwrap().with_read_only(true);
    let mut controller = attach(Arc::new(read_only), &AttachOptions::default());
    let disk = BlockDevice::open(&mut controller, 1, &BlockOptions::default()).unwrap();
    let buffers = disk.buffers(1, 4096).unwrap();
    let write = block_on(disk.write_direct(0, 512, buffers.take().unwrap(), false));
    assert!(matches!(write, Err(BlockError::ReadOnly)));
    assert_eq!(buffers.available(), 1);
}

/// Who changes a part of a block reads it first, and so waits for who writes it.
#[test]
fn a_write_of_a_part_waits_for_a_direct_one() {
    let backing = TestDisk::new(4096, 512);
    let (_controller, disk) = open(&backing);
    let buffers = disk.buffers(1, 4096).unwrap();
    backing.order(|orders| orders.hold = true);
    let mut buffer = buffers.take().unwrap();
    buffer.fill(1);
    let mut whole = Box::pin(disk.write_direct(0, 4096, buffer, false));
    let mut part = Box::pin(disk.write(10, &[2; 5], false));
    let mut context = Context::from_waker(Waker::noop());
    assert!(whole.as_mut().poll(&mut context).is_pending());
    assert!(part.as_mut().poll(&mut context).is_pending());
    backing.expect(1);
    backing.order(|orders| orders.hold = false);
    block_on(async {
        whole.await.unwrap();
        part.await.unwrap();
    });
    let mut back = [0; 20];
    block_on(disk.read(0, &mut back)).unwrap();
    assert_eq!(back[..10], [1; 10]);
    assert_eq!(back[10..15], [2; 5]);
    assert_eq!(back[15..], [1; 5]);
}

/// The device may have the buffer until the command ends, and then its pool has it again.
#[test]
fn the_buffer_of_a_future_that_is_dropped_comes_back_with_the_completion() {
    let backing = TestDisk::new(4096, 512);
    let (_controller, disk) = open(&backing);
    let buffers = disk.buffers(1, 4096).unwrap();
    backing.order(|orders| orders.hold = true);
    let mut read = Box::pin(disk.read_direct(0, 4096, buffers.take().unwrap()));
    let poll = read.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(poll, Poll::Pending));
    backing.expect(1);
    drop(read);
    assert_eq!(buffers.available(), 0);
    backing.order(|orders| orders.hold = false);
    wait::until("the buffer", || buffers.available() != 0);
}
