//! Tests of the atomicity of blocks. Each block is read and written atomically, as AWUN promises,
//! for any number of concurrent queues.

mod common;

use common::Host;
use shadowbell_disk::{Disk, Op, Request, Submitted};
use shadowbell_disk_file::{Aio, Direct, FileDisk, FileOptions, MemDisk};
use shadowbell_testing::wait;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
/// Number of blocks that all queues access. It is small, so that requests often overlap. It is not
/// 1, so that a request may overlap one request at its first block and another one at its second
/// block.
const BLOCKS: u64 = 2;
/// Number of requests in flight in each queue.
const DEPTH: usize = 4;

/// Keeps `DEPTH` requests in flight until `over` is true. They access the blocks one after the
/// other. `prepared` fills the buffer of a request before its submission, and `ended` examines the
/// buffer after its completion.
fn run(
    disk: &dyn Disk,
    op: Op,
    over: &AtomicBool,
    mut prepared: impl FnMut(u64) -> u8,
    mut ended: impl FnMut(&[u8]),
) {
    let host = Host::new((DEPTH * BLOCK) as u64);
    let mut queue = disk.queue().unwrap();
    let mut free: Vec<usize> = (0..DEPTH).collect();
    let mut number = 0;
    let mut look = |host: &Host, slot: usize| {
        let mut block = vec![0; BLOCK];
        host.bytes.read_into(slot * BLOCK, &mut block).unwrap();
        ended(&block);
    };
    while !over.load(Ordering::Relaxed) || queue.pending() != 0 {
        while let Some(slot) = free.pop_if(|_| !over.load(Ordering::Relaxed)) {
            number += 1;
            host.bytes.fill(slot * BLOCK, BLOCK, prepared(number)).unwrap();
            let mut data = host.buffer(&[(slot * BLOCK, BLOCK)], op == Op::Read);
            let request = Request { op, offset: number % BLOCKS * BLOCK as u64, len: BLOCK as u64 };
            match queue.submit(slot as u32, &request, &mut data) {
                Submitted::Done(result) => {
                    result.unwrap();
                    look(&host, slot);
                    free.push(slot);
                    break;
                }
                Submitted::Pending => {}
            }
        }
        queue.commit();
        if queue.pending() != 0 {
            let fd = queue.wake_fd().expect("what pends has a descriptor");
            wait::readable("a signal of the wake descriptor", fd);
            queue.reap(&mut |slot, result, _| {
                result.unwrap();
                look(&host, slot as usize);
                free.push(slot as usize);
            });
        }
    }
}

/// Two queues write blocks, each filled with one byte value. A third queue reads the blocks, and
/// must never see two values in one block.
fn stays_whole(disk: &dyn Disk) {
    let over = AtomicBool::new(false);
    // Time for which the load runs.
    let until = Instant::now() + Duration::from_millis(500);
    let write = Op::Write { fua: false };
    std::thread::scope(|scope| {
        for of in [0, 128] {
            let over = &over;
            scope.spawn(move || run(disk, write, over, |n| of | (n % 128) as u8, |_| {}));
        }
        let mut torn = 0;
        let look = |block: &[u8]| {
            torn += u32::from(block.iter().any(|byte| *byte != block[0]));
            over.fetch_or(Instant::now() > until || torn != 0, Ordering::Relaxed);
        };
        run(disk, Op::Read, &over, |_| 0, look);
        assert_eq!(torn, 0, "a torn block was read");
    });
}

#[test]
fn blocks_in_memory_are_atomic() {
    stays_whole(&MemDisk::new(BLOCKS, BLOCK as u32).unwrap());
}

#[test]
fn blocks_in_the_page_cache_are_atomic() {
    for aio in [Aio::Auto, Aio::Threads] {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = dir.path().join("disk");
        std::fs::write(&path, vec![0; BLOCKS as usize * BLOCK]).unwrap();
        let mut options = FileOptions::default();
        (options.aio, options.direct) = (aio, Direct::Off);
        options.block_size = Some(BLOCK as u32);
        stays_whole(&FileDisk::open(&path, &options).unwrap());
    }
}
