//! Tests with three layers in one process: the driver of a guest uses a controller. The
//! controller's disk is the namespace of a second controller (the SSD). The disk of the second
//! controller records its requests.

use shadowbell_disk::{Disk, DiskError, DiskInfo, Op, Queue, ReportExtent, Request, Submitted};
use shadowbell_disk_file::{MemDisk, NullDisk};
use shadowbell_disk_nvme::{NvmeDisk, OpenError, Options};
use shadowbell_driver::{
    AttachOptions, Command, Completion, Controller, Namespace, QueuePair, Transport,
};
use shadowbell_frontend::InProcess;
use shadowbell_memory::Segments;
use shadowbell_spec::Status;
use shadowbell_spec::nvm::DsmRange;
use shadowbell_testing::wait;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use zerocopy::IntoBytes;

/// Record of the requests that have reached the disk of the SSD, and the error that the test
/// injects into them.
#[derive(Debug, Default)]
struct Recorded {
    /// Requests, each with the addresses of its data in the memory of this process.
    requests: Vec<(Request, Vec<(usize, usize)>)>,
    fail: Option<DiskError>,
}

#[derive(Clone, Debug)]
struct Spy {
    mem: MemDisk,
    recorded: Arc<Mutex<Recorded>>,
}

impl Spy {
    fn new(blocks: u64, block_size: u32) -> Self {
        Self { mem: MemDisk::new(blocks, block_size).unwrap(), recorded: Arc::default() }
    }

    fn take(&self) -> Vec<(Request, Vec<(usize, usize)>)> {
        std::mem::take(&mut self.recorded.lock().unwrap().requests)
    }
}

impl Disk for Spy {
    fn info(&self) -> DiskInfo {
        let mut info = self.mem.info();
        info.volatile_cache = true;
        info
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(SpyQueue { queue: self.mem.queue()?, recorded: Arc::clone(&self.recorded) }))
    }

    fn name(&self) -> String {
        "spy".into()
    }

    fn extents(&self, offset: u64, len: u64, tell: &mut ReportExtent<'_>) {
        self.mem.extents(offset, len, tell);
    }
}

struct SpyQueue {
    queue: Box<dyn Queue>,
    recorded: Arc<Mutex<Recorded>>,
}

impl Queue for SpyQueue {
    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        let mut recorded = self.recorded.lock().unwrap();
        let pieces = data.pieces().iter().map(|piece| (piece.address(), piece.len())).collect();
        recorded.requests.push((*request, pieces));
        match recorded.fail {
            Some(error) => Submitted::Done(Err(error)),
            None => self.queue.submit(tag, request, data),
        }
    }
}

struct Rig {
    spy: Spy,
    disk: NvmeDisk,
    controller: Controller,
    namespace: Namespace,
    queue: QueuePair,
}

fn rig_over(spy: Spy, options: &Options) -> Rig {
    let ssd = Arc::new(InProcess::over(Arc::new(spy.clone())).unwrap());
    let disk = NvmeDisk::open(ssd, 1, "an SSD", options).unwrap();
    let virtual_one = Arc::new(InProcess::over(Arc::new(disk.clone())).unwrap());
    let mut controller = Controller::attach(virtual_one, &AttachOptions::default()).unwrap();
    let namespace = controller.namespace(1).unwrap().clone();
    let queue = controller.take_queue_pair().unwrap();
    Rig { spy, disk, controller, namespace, queue }
}

fn options(zero_copy: bool) -> Options {
    // The queues are short, so that requests have to wait for slots.
    let mut options = Options::default();
    options.zero_copy = zero_copy;
    options.queue_pairs = 2;
    options.queue_depth = 16;
    options
}

fn next(queue: &mut QueuePair) -> Completion {
    let deadline = wait::deadline();
    while !queue.wait(Some(deadline)).unwrap() {
        assert!(Instant::now() < deadline, "nothing completes");
    }
    let completion = queue.pop().unwrap();
    queue.ring_cq_doorbell_if_needed().unwrap();
    completion
}

impl Rig {
    fn run(&mut self, command: Command, buffer: Option<shadowbell_driver::Buffer>) -> Completion {
        self.queue.submit(command, buffer).unwrap();
        next(&mut self.queue)
    }
}

/// Deterministic random numbers.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

#[test]
fn data_matches_a_model_for_any_command_and_length() {
    for (zero_copy, block) in [(true, 512u32), (false, 512), (true, 4096), (false, 4096)] {
        let bytes = 4u64 << 20;
        let blocks = bytes / u64::from(block);
        let mut rig = rig_over(Spy::new(blocks, block), &options(zero_copy));
        assert_eq!((rig.namespace.blocks(), rig.namespace.block_size()), (blocks, block));
        let mut model = vec![0u8; bytes as usize];
        let longest = rig.namespace.max_transfer_bytes();
        let pool = rig.controller.buffers(2, longest as usize).unwrap();
        let mut dice = Dice(7);
        for round in 0..300u32 {
            // Most requests are short, and some have the maximum length.
            let most = if dice.below(4) == 0 { longest } else { 32 << 10 } / u64::from(block);
            let lba = dice.below(blocks);
            let count = (1 + dice.below(most)).min(blocks - lba);
            let range =
                (lba * u64::from(block)) as usize..((lba + count) * u64::from(block)) as usize;
            let len = range.len();
            let mut buffer = pool.take().unwrap();
            let namespace = rig.namespace.clone();
            match dice.below(7) {
                0 | 1 => {
                    let data: Vec<u8> =
                        (0..len).map(|at| (at as u32 ^ round.wrapping_mul(0x9e37)) as u8).collect();
                    assert!(buffer.copy_from(0, &data));
                    let write = namespace.write(lba, count as u32).unwrap();
                    let write = if round % 2 == 0 { write.with_fua() } else { write };
                    rig.run(write, Some(buffer)).status.into_result().unwrap();
                    model[range].copy_from_slice(&data);
                }
                2 | 3 => {
                    buffer.fill(0xaa);
                    let read = namespace.read(lba, count as u32).unwrap();
                    let done = rig.run(read, Some(buffer));
                    done.status.into_result().unwrap();
                    assert!(done.buffer.unwrap().to_vec(len) == model[range], "round {round}");
                }
                4 => {
                    let how = dice.below(2) == 0;
                    let zeroes = namespace.write_zeroes(lba, count as u32, how).unwrap();
                    rig.run(zeroes, None).status.into_result().unwrap();
                    model[range].fill(0);
                }
                5 => {
                    assert!(buffer.copy_from(0, &model[range.clone()]));
                    let differs = dice.below(2) == 0;
                    if differs {
                        let at = dice.below(len as u64) as usize;
                        assert!(buffer.copy_from(at, &[!model[range.start + at]]));
                    }
                    let compare = namespace.compare(lba, count as u32).unwrap();
                    let status = rig.run(compare, Some(buffer)).status.code();
                    let expected = if differs { Status::COMPARE_FAILURE } else { Status::SUCCESS };
                    assert_eq!(status, expected);
                }
                _ => {
                    let part = DsmRange { attributes: 0, blocks: count as u32, slba: lba };
                    assert!(buffer.copy_from(0, part.as_bytes()));
                    let discard = namespace.deallocate(1).unwrap();
                    rig.run(discard, Some(buffer)).status.into_result().unwrap();
                    model[range].fill(0);
                    let verify = namespace.verify(lba, count as u32).unwrap();
                    rig.run(verify, None).status.into_result().unwrap();
                    rig.run(namespace.flush(), None).status.into_result().unwrap();
                }
            }
        }
        assert_eq!(pool.available(), 2);
    }
}

#[test]
fn excess_requests_wait_and_none_is_lost() {
    for zero_copy in [true, false] {
        let mut rig = rig_over(Spy::new(8 << 10, 512), &options(zero_copy));
        let pool = rig.controller.buffers(100, 16 << 10).unwrap();
        let (mut submitted, mut done) = (0u64, 0u64);
        let mut slots = vec![0u64; rig.queue.capacity()];
        while done < 4000 {
            while submitted < 4000
                && let Some(mut buffer) = pool.take()
            {
                buffer.fill(0);
                assert!(buffer.copy_from(0, &submitted.to_le_bytes()));
                let lba = submitted % 256 * 32;
                let command = match submitted / 256 % 2 {
                    0 => rig.namespace.write(lba, 32),
                    _ => rig.namespace.read(lba, 32),
                };
                let token = rig.queue.submit(command.unwrap(), Some(buffer)).unwrap();
                slots[token.index()] = submitted;
                submitted += 1;
                // Groups of 256 writes and of 256 reads of the same blocks alternate. A group is
                // submitted after the previous group has completed.
                if submitted.is_multiple_of(256) {
                    break;
                }
            }
            let wait = if submitted.is_multiple_of(256) || submitted == 4000 {
                submitted
            } else {
                done + 1
            };
            while done < wait {
                let completion = next(&mut rig.queue);
                completion.status.into_result().unwrap();
                let number = slots[completion.token.index()];
                if number / 256 % 2 == 1 {
                    let first = completion.buffer.unwrap().to_vec(8);
                    assert_eq!(u64::from_le_bytes(first.try_into().unwrap()), number - 256);
                }
                done += 1;
            }
        }
        assert_eq!(pool.available(), 100);
    }
}

#[test]
fn zero_copy_data_is_not_copied() {
    for zero_copy in [true, false] {
        let mut rig = rig_over(Spy::new(4096, 512), &options(zero_copy));
        let pool = rig.controller.buffers(1, 64 << 10).unwrap();
        for command in [rig.namespace.write(8, 128).unwrap(), rig.namespace.read(8, 128).unwrap()] {
            rig.spy.take();
            let buffer = pool.take().unwrap();
            let address = buffer.bytes().address();
            rig.run(command, Some(buffer)).status.into_result().unwrap();
            let recorded = rig.spy.take();
            assert_eq!(recorded.len(), 1, "one command for one command: {recorded:?}");
            assert_eq!(recorded[0].0.len, 64 << 10);
            assert_eq!(recorded[0].1 == [(address, 64 << 10)], zero_copy, "{recorded:?}");
        }
        let counters = rig.disk.counters();
        let counted = |name| counters.iter().find(|(n, _)| *n == name).map(|(_, count)| *count);
        let (in_place, copied) = if zero_copy { (2, 0) } else { (0, 2) };
        assert_eq!(counted("commands_in_place"), Some(in_place), "{counters:?}");
        assert_eq!(counted("commands_copied"), Some(copied), "{counters:?}");
    }
}

#[test]
fn memory_unmapped_by_the_guest_is_released_by_the_ssd() {
    let mut rig = rig_over(Spy::new(4096, 512), &options(true));
    let pool = rig.controller.buffers(1, 4096).unwrap();
    let buffer = pool.take().unwrap();
    let mapping = Arc::downgrade(buffer.bytes().mapping());
    rig.run(rig.namespace.read(0, 8).unwrap(), Some(buffer)).status.into_result().unwrap();
    drop(pool);
    // After an unmap, nothing may access the memory any more, including the I/O threads of the SSD.
    wait::until("the end of the mapping", || mapping.upgrade().is_none());
    let pool = rig.controller.buffers(1, 4096).unwrap();
    rig.run(rig.namespace.read(0, 8).unwrap(), pool.take()).status.into_result().unwrap();
}

#[test]
fn the_guest_gets_the_ssds_status() {
    for (error, read, write) in [
        (DiskError::Io(5), Status::UNRECOVERED_READ, Status::WRITE_FAULT),
        (DiskError::NoSpace, Status::CAPACITY_EXCEEDED, Status::CAPACITY_EXCEEDED),
        (DiskError::Device(Status::INTERNAL.bits()), Status::INTERNAL, Status::INTERNAL),
    ] {
        for zero_copy in [true, false] {
            let mut rig = rig_over(Spy::new(4096, 512), &options(zero_copy));
            let pool = rig.controller.buffers(1, 1 << 20).unwrap();
            rig.spy.recorded.lock().unwrap().fail = Some(error);
            let namespace = rig.namespace.clone();
            // The request is longer than a buffer of the queue, so it takes several commands. It
            // ends with one status.
            let status = rig.run(namespace.read(0, 1024).unwrap(), pool.take()).status;
            assert_eq!(status.code(), read);
            let status = rig.run(namespace.write(0, 1024).unwrap(), pool.take()).status;
            assert_eq!(status.code(), write);
            assert!(!rig.run(namespace.flush(), None).status.is_success());
            assert!(
                !rig.run(namespace.write_zeroes(0, 8, true).unwrap(), None).status.is_success()
            );
            rig.spy.recorded.lock().unwrap().fail = None;
            rig.run(namespace.read(0, 8).unwrap(), pool.take()).status.into_result().unwrap();
        }
    }
}

#[test]
fn a_shrunken_namespace_returns_lba_out_of_range() {
    let null = |blocks| Arc::new(NullDisk::new(blocks, 512));
    let ssd = Arc::new(InProcess::over(null(100)).unwrap());
    let disk = NvmeDisk::open(Arc::clone(&ssd) as Arc<dyn Transport>, 1, "an SSD", &options(true))
        .unwrap();
    let virtual_one = Arc::new(InProcess::over(Arc::new(disk.clone())).unwrap());
    let mut controller = Controller::attach(virtual_one, &AttachOptions::default()).unwrap();
    let namespace = controller.namespace(1).unwrap().clone();
    let pool = controller.buffers(1, 8 * 512).unwrap();
    let mut queue = controller.take_queue_pair().unwrap();
    let mut status = |command: Command, has_data: bool| {
        queue.submit(command, has_data.then(|| pool.take().unwrap())).unwrap();
        next(&mut queue).status.code()
    };
    assert_eq!(status(namespace.read(92, 8).unwrap(), true), Status::SUCCESS);
    let (told, is_told) = std::sync::mpsc::channel();
    let done = move |outcome: Result<(), _>| told.send(outcome.is_ok()).unwrap();
    ssd.controller().change_disk(1, null(50), done).unwrap();
    assert_eq!(is_told.recv_timeout(wait::LIMIT), Ok(true));
    // The SSD was shrunk. The last block of the last read is beyond the new end.
    for lba in [92, 50, 43] {
        assert_eq!(status(namespace.read(lba, 8).unwrap(), true), Status::LBA_OUT_OF_RANGE);
        assert_eq!(status(namespace.write(lba, 8).unwrap(), true), Status::LBA_OUT_OF_RANGE);
        let zeroes = namespace.write_zeroes(lba, 8, true).unwrap();
        assert_eq!(status(zeroes, false), Status::LBA_OUT_OF_RANGE);
    }
    assert_eq!(status(namespace.read(42, 8).unwrap(), true), Status::SUCCESS);
    assert_eq!(status(namespace.write(42, 8).unwrap(), true), Status::SUCCESS);
    // The disk of the guest keeps its size as long as it is open.
    assert_eq!(disk.info().blocks, 100);
    let refused = disk.resized(None).unwrap_err().to_string();
    assert!(
        refused.contains("remove the namespace, change its disk, and add it again"),
        "{refused}"
    );
}

#[test]
fn the_disk_has_the_properties_of_the_ssd() {
    let ssd = || Arc::new(InProcess::over(Arc::new(Spy::new(100, 4096))).unwrap());
    let disk = NvmeDisk::open(ssd(), 1, "nvme://0000:01:00.0/1", &Options::default()).unwrap();
    let info = disk.info();
    assert_eq!((info.blocks, info.block_size), (100, 4096));
    assert!(info.volatile_cache && info.discard && !info.read_only);
    assert_eq!(disk.name(), "nvme://0000:01:00.0/1");
    let mut read_only = Options::default();
    read_only.read_only = true;
    assert!(NvmeDisk::open(ssd(), 1, "x", &read_only).unwrap().info().read_only);
    let error = NvmeDisk::open(ssd(), 7, "x", &Options::default()).unwrap_err();
    assert!(matches!(error, OpenError::NoNamespace { nsid: 7, .. }));
    assert!(error.to_string().contains("active are: 1"), "{error}");
}

#[test]
fn queues_are_limited_by_queue_pairs_and_reused() {
    let ssd: Arc<dyn Transport> = Arc::new(InProcess::over(Arc::new(Spy::new(100, 512))).unwrap());
    let disk = NvmeDisk::open(ssd, 1, "an SSD", &options(true)).unwrap();
    let queues = [disk.queue().unwrap(), disk.queue().unwrap()];
    assert!(disk.queue().is_err());
    drop(queues);
    for _ in 0..5 {
        disk.queue().unwrap();
    }
}

#[test]
fn a_waiting_request_can_be_cancelled() {
    let ssd: Arc<dyn Transport> = Arc::new(InProcess::over(Arc::new(Spy::new(4096, 512))).unwrap());
    let disk = NvmeDisk::open(ssd, 1, "an SSD", &options(true)).unwrap();
    let mut queue = disk.queue().unwrap();
    let request = Request { op: Op::Verify, offset: 0, len: 512 };
    for tag in 0..40 {
        assert_eq!(queue.submit(tag, &request, &mut Segments::new()), Submitted::Pending);
    }
    queue.cancel(39);
    queue.cancel(0);
    let mut ended = Vec::new();
    let deadline = wait::deadline();
    while queue.pending() > 0 {
        queue.commit();
        queue.reap(&mut |tag, outcome, _| ended.push((tag, outcome)));
        assert!(Instant::now() < deadline);
    }
    ended.sort_by_key(|(tag, _)| *tag);
    assert_eq!(ended.len(), 40);
    assert_eq!(ended[39], (39, Err(DiskError::Cancelled)));
    // The SSD received these requests before the cancellation, so they succeed.
    assert!(ended[..39].iter().all(|(_, outcome)| outcome.is_ok()), "{ended:?}");
}

/// Cancelling a request takes constant time. If it took time proportional to the number of
/// requests, this test would take minutes.
#[test]
fn a_hundred_thousand_waiting_requests_are_cancelled_at_once() {
    const MANY: u32 = 200_000;
    let ssd: Arc<dyn Transport> = Arc::new(InProcess::over(Arc::new(Spy::new(4096, 512))).unwrap());
    let disk = NvmeDisk::open(ssd, 1, "an SSD", &options(true)).unwrap();
    let mut queue = disk.queue().unwrap();
    let request = Request { op: Op::Verify, offset: 0, len: 512 };
    for tag in 0..MANY {
        assert_eq!(queue.submit(tag, &request, &mut Segments::new()), Submitted::Pending);
    }
    // The last request is cancelled first: the worst order for a search from the front.
    (0..MANY).rev().for_each(|tag| queue.cancel(tag));
    let mut ended = Vec::new();
    let deadline = wait::deadline();
    while queue.pending() > 0 {
        queue.commit();
        queue.reap(&mut |tag, outcome, _| ended.push((tag, outcome)));
        assert!(Instant::now() < deadline);
    }
    ended.sort_by_key(|(tag, _)| *tag);
    assert!(ended.iter().map(|(tag, _)| *tag).eq(0..MANY), "each ends once");
    // The SSD received some of the first hundred requests before the cancellation, so these may
    // have succeeded.
    assert!(ended[100..].iter().all(|(_, outcome)| *outcome == Err(DiskError::Cancelled)));
}

/// Get LBA Status of the SSD and of the guest's controller report the same allocated blocks.
#[test]
fn allocated_blocks_of_the_ssd_are_reported_to_the_guest() {
    let mut spy = Spy::new(1, 512);
    spy.mem = MemDisk::recoverable(1 << 20, 512).unwrap();
    let mut written = vec![false; 256];
    let mut dice = Dice(7);
    // Each piece has 2 MiB, the size of a huge page, because memory is allocated in such pages.
    for _ in 0..100 {
        let piece = dice.below(256);
        spy.mem.bytes().write((piece << 21) as usize, &1u8).unwrap();
        written[piece as usize] = true;
    }
    let rig = rig_over(spy, &options(true));
    let admin = rig.controller.admin();
    assert!(admin.reports_allocated().unwrap());
    let (mut at, end) = (0, 1 << 20);
    let mut allocated = vec![false; 256];
    while at < end {
        let found = admin.allocated_blocks(1, at..end, 5).unwrap();
        for range in found.ranges {
            for piece in range.start / 4096..range.end.div_ceil(4096) {
                allocated[piece as usize] = true;
            }
        }
        assert!(found.until > at);
        at = found.until;
    }
    assert_eq!(allocated, written);
    // The reported extents cover the range without gaps.
    let mut told = Vec::new();
    rig.disk.extents(1 << 20, 1 << 20, &mut |extent| {
        told.push(extent);
        true
    });
    assert_eq!(told.iter().map(|extent| extent.len).sum::<u64>(), 1 << 20);
}
