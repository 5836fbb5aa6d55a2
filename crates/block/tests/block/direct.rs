//! Zero-copy transfers of whole blocks to and from buffers and memory of the caller.

use shadowbell_block::{BlockDevice, BlockError, BlockOptions, BlockQueue};
use shadowbell_disk::{DiskError, Op};
use shadowbell_disk_file::MemDisk;
use shadowbell_memory::{Mapping, Segments};
use shadowbell_testing::test_disk::TestDisk;
use shadowbell_testing::wait;
use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

fn open(backing: &TestDisk) -> BlockQueue {
    let device = BlockDevice::new(Arc::new(backing.clone()), &BlockOptions::default()).unwrap();
    device.queue().unwrap()
}

#[test]
fn direct_writes_are_read_back() {
    let backing = TestDisk::new(4096, 512);
    let disk = open(&backing);
    let buffers = disk.buffers(2, 64 << 10).unwrap();
    for (offset, len) in [(0, 512), (512, 4096), (1536, 64 << 10)] {
        assert!(disk.is_direct(offset, len));
        let mut buffer = buffers.take().unwrap();
        let data: Vec<u8> = (0..len).map(|i| (i / 100) as u8 | 1).collect();
        assert!(buffer.copy_from(0, &data));
        let buffer = disk.block_on(disk.write_direct(offset, len, buffer, true)).unwrap();
        let mut back = vec![0; len];
        disk.block_on(disk.read(offset, &mut back)).unwrap();
        assert!(back == data);
        drop(buffer);
        let buffer = disk.block_on(disk.read_direct(offset, len, buffers.take().unwrap())).unwrap();
        assert!(buffer.to_vec(len) == data);
    }
    let seen = backing.seen();
    let forced = |op: Op| matches!(op, Op::Write { fua: true });
    assert_eq!(seen.iter().filter(|seen| forced(seen.op)).count(), 3);
    assert_eq!(buffers.available(), 2);
}

#[test]
fn invalid_direct_requests_are_refused_and_return_the_buffer() {
    let disk = open(&TestDisk::new(4096, 512));
    let buffers = disk.buffers(1, 4096).unwrap();
    for (offset, len) in [(0, 0), (1, 512), (0, 511), (512, 513), (0, 4 << 20)] {
        assert!(!disk.is_direct(offset, len));
        let read = disk.block_on(disk.read_direct(offset, len, buffers.take().unwrap()));
        assert!(read.is_err(), "{offset} {len}");
        let write = disk.block_on(disk.write_direct(offset, len, buffers.take().unwrap(), false));
        assert!(write.is_err(), "{offset} {len}");
    }
    // Three invalid requests: longer than the buffer, beyond the end of the disk, and beyond the
    // largest offset.
    for (offset, len) in [(0, 8192), (4096 * 512, 512), (u64::MAX - 511, 512)] {
        let read = disk.block_on(disk.read_direct(offset, len, buffers.take().unwrap()));
        assert!(read.is_err(), "{offset} {len}");
    }
    assert_eq!(buffers.available(), 1);
}

#[test]
fn failed_and_refused_direct_writes_return_the_buffer() {
    let backing = TestDisk::new(4096, 512);
    let disk = open(&backing);
    let buffers = disk.buffers(1, 4096).unwrap();
    backing.instruct(|instructions| instructions.fail = Some(DiskError::NoSpace));
    let write = disk.block_on(disk.write_direct(0, 4096, buffers.take().unwrap(), false));
    assert_eq!(write.unwrap_err().disk(), Some(DiskError::NoSpace));
    assert_eq!(buffers.available(), 1);

    let read_only = MemDisk::new(64, 512).unwrap().with_read_only(true);
    let device = BlockDevice::new(Arc::new(read_only), &BlockOptions::default()).unwrap();
    let disk = device.queue().unwrap();
    let buffers = disk.buffers(1, 4096).unwrap();
    let write = disk.block_on(disk.write_direct(0, 512, buffers.take().unwrap(), false));
    assert!(matches!(write, Err(BlockError::ReadOnly)));
    assert_eq!(buffers.available(), 1);
}

/// A read-modify-write of a partial block waits for a direct write of the same block.
#[test]
fn a_write_of_a_part_waits_for_a_direct_one() {
    let backing = TestDisk::new(4096, 512);
    let disk = open(&backing);
    let buffers = disk.buffers(1, 4096).unwrap();
    backing.instruct(|instructions| instructions.hold = true);
    let mut buffer = buffers.take().unwrap();
    buffer.fill(1);
    let mut whole = Box::pin(disk.write_direct(0, 4096, buffer, false));
    let mut part = Box::pin(disk.write(10, &[2; 5], false));
    let mut context = Context::from_waker(Waker::noop());
    assert!(whole.as_mut().poll(&mut context).is_pending());
    assert!(part.as_mut().poll(&mut context).is_pending());
    backing.expect(1);
    backing.instruct(|instructions| instructions.hold = false);
    disk.block_on(async {
        whole.await.unwrap();
        part.await.unwrap();
    });
    let mut back = [0; 20];
    disk.block_on(disk.read(0, &mut back)).unwrap();
    assert_eq!(back[..10], [1; 10]);
    assert_eq!(back[10..15], [2; 5]);
    assert_eq!(back[15..], [1; 5]);
}

/// The buffer of a dropped future returns to its pool when the disk completes the request.
#[test]
fn the_buffer_of_a_dropped_future_is_returned_on_completion() {
    let backing = TestDisk::new(4096, 512);
    let disk = open(&backing);
    let buffers = disk.buffers(1, 4096).unwrap();
    backing.instruct(|instructions| instructions.hold = true);
    let mut read = Box::pin(disk.read_direct(0, 4096, buffers.take().unwrap()));
    let poll = read.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(poll, Poll::Pending));
    backing.expect(1);
    drop(read);
    assert_eq!(buffers.available(), 0);
    backing.instruct(|instructions| instructions.hold = false);
    wait::until("the return of the buffer", || {
        disk.turn();
        buffers.available() != 0
    });
}

/// The caller describes memory by segments, like a guest's memory. Whole blocks are transferred
/// directly, partial blocks through a buffer.
#[test]
fn segments_of_any_alignment_are_transferred() {
    for block in [512, 4096] {
        let backing = TestDisk::new((8 << 20) / u64::from(block), block);
        let disk = open(&backing);
        let memory = Mapping::anonymous(4 << 20).unwrap().bytes();
        let mut model = vec![0; 8 << 20];
        for (turn, (offset, len)) in
            [(0, 512), (512, 1024), (4096, 8192), (512, 3 << 20), (1, 5000), (1 << 20, 3 << 20)]
                .into_iter()
                .enumerate()
        {
            let data: Vec<u8> = (0..len).map(|i| (i / 7 + turn) as u8 | 1).collect();
            memory.write_from(0, &data).unwrap();
            let segments = || Segments::from_bytes(&memory.slice(0, len).unwrap());
            disk.block_on(disk.write_from(offset, segments(), turn % 2 == 0)).unwrap();
            model[offset as usize..][..len].copy_from_slice(&data);
            memory.fill(0, len, 0).unwrap();
            let back = disk.block_on(disk.read_to(offset, segments())).unwrap();
            let mut bytes = vec![0; len];
            back.read_into(0, &mut bytes).unwrap();
            assert!(bytes == data, "{block} {offset} {len}");
            let mut all = vec![0; 8 << 20];
            disk.block_on(disk.read(0, &mut all)).unwrap();
            assert!(all == model, "{block} {offset} {len}");
        }
        assert!(backing.seen().iter().all(|seen| seen.len <= 1 << 20));
    }
}
