//! Driver and emulated controller in one process.

#[path = "common/direct.rs"]
mod direct;

use direct::Direct;
use shadowbell_controller::{Carrier, Config, Controller as Emulated, NamespaceConfig};
use shadowbell_controller::{Polling, Pool, PoolOptions};
use shadowbell_disk::{Disk, DiskError, DiskInfo, Op, Request, Submitted};
use shadowbell_disk_file::{MemDisk, NullDisk};
use shadowbell_driver::{
    AsyncQueue, AttachOptions, Controller, Doorbells, IoErrorKind, QueuePair, RequestError,
    SpinPolicy,
};
use shadowbell_spec::feature::{Select, fid};
use shadowbell_spec::nvm::{CopyRange, DsmRange};
use shadowbell_spec::{Sqe, Status, identify::cns};
use shadowbell_testing::wait::{self, LIMIT};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Instant;

fn emulated(disk: Arc<dyn Disk>, polling: Polling, mapped_doorbells: bool) -> Emulated {
    let pool = Pool::start(&PoolOptions { workers: 1, polling, pin: Vec::new() }).unwrap();
    let namespace =
        NamespaceConfig { disk, uuid: shadowbell_controller::config::uuid_from("a test") };
    let config = Config { namespaces: vec![namespace], io_queues: 4, ..Config::default() };
    let carrier = Carrier { mapped_doorbells, ..Carrier::default() };
    Emulated::new(config, pool, carrier).unwrap()
}

fn mem() -> Arc<dyn Disk> {
    Arc::new(MemDisk::new(16384, 512).unwrap())
}

fn attach(emulated: &Emulated, options: &AttachOptions) -> Controller {
    Controller::attach(Arc::new(Direct(emulated.clone())), options).unwrap()
}

/// Minimal executor.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    let began = Instant::now();
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        assert!(began.elapsed() < LIMIT, "a lost wakeup");
        std::thread::park_timeout(LIMIT);
    }
}

/// Waits until a completion is available.
#[track_caller]
fn wait_for_one(queue: &mut QueuePair) {
    wait::until("a completion", || queue.wait(Some(wait::deadline())).unwrap());
}

/// Creates the content of a block from its number and its version. Version 0 means that the block
/// was never written.
fn fill(block: u64, version: u64) -> Vec<u8> {
    if version == 0 {
        return vec![0; 512];
    }
    let seed = (block << 20 ^ version).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..64u64).flat_map(|i| (seed.rotate_left(i as u32) ^ i).to_le_bytes()).collect()
}

/// Writes to the whole namespace with `depth` commands in flight, and reads the data back.
fn exercise(controller: &Controller, queue: &mut QueuePair, depth: usize, ops: usize) {
    let namespace = controller.namespace(1).unwrap();
    let pool = controller.buffers(depth, 300 * 1024).unwrap();
    let mut versions = vec![0u64; namespace.blocks() as usize];
    // For each slot with a read in flight: its first block, and the expected data.
    let mut expected: Vec<Option<(u64, Vec<u8>)>> = vec![None; queue.capacity()];
    let mut busy = vec![false; versions.len()];
    let (mut submitted, mut completed, mut random) = (0, 0, 0x1234_5678_9abc_def1u64);
    while completed < ops {
        while submitted < ops
            && let Some(mut buffer) = pool.take()
        {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let blocks = [1, 1, 8, 8, 17, 64, 513][(random >> 8) as usize % 7];
            let lba = (random >> 16) % (namespace.blocks() - blocks);
            let range = lba as usize..(lba + blocks) as usize;
            if busy[range.clone()].contains(&true) {
                break;
            }
            busy[range.clone()].fill(true);
            let offset = (random >> 60 & 3) as u32 * 4;
            let write = random & 1 == 0;
            let data: Vec<u8> = range
                .clone()
                .flat_map(|block| {
                    versions[block] += u64::from(write);
                    fill(block as u64, versions[block])
                })
                .collect();
            let command = if write {
                assert!(buffer.copy_from(offset as usize, &data));
                namespace.write(lba, blocks as u32).unwrap()
            } else {
                buffer.fill(0x11);
                namespace.read(lba, blocks as u32).unwrap()
            };
            let token = queue.submit(command.at(offset), Some(buffer)).unwrap();
            let check = if write { Vec::new() } else { data };
            expected[token.index()] = Some((lba | blocks << 32 | u64::from(offset) << 48, check));
            submitted += 1;
        }
        wait_for_one(queue);
        while let Some(completion) = queue.pop() {
            assert!(completion.status.is_success(), "{}", completion.status);
            let (request, check) = expected[completion.token.index()].take().unwrap();
            let (lba, blocks) = (request & 0xffff_ffff, request >> 32 & 0xffff);
            busy[lba as usize..(lba + blocks) as usize].fill(false);
            let mut read = vec![0; check.len()];
            let buffer = completion.buffer.unwrap();
            assert!(buffer.copy_to((request >> 48) as usize, &mut read));
            assert!(read == check, "{blocks} blocks at {lba}");
            completed += 1;
        }
    }
    queue.ring_cq_doorbell_if_needed().unwrap();
}

#[test]
fn data_is_correct_with_every_doorbell_and_wait_mode() {
    for (doorbells, mapped) in
        [(Doorbells::Shadow, false), (Doorbells::Mmio, false), (Doorbells::Mapped, true)]
    {
        for polling in [Polling::default(), Polling::Never] {
            for (interrupts, spin) in [
                (true, SpinPolicy::SLEEP),
                (true, SpinPolicy::default()),
                (false, SpinPolicy::SLEEP),
            ] {
                let emulated = emulated(mem(), polling, mapped);
                let options = AttachOptions {
                    doorbells,
                    interrupts,
                    spin,
                    queue_depth: 33,
                    ..AttachOptions::default()
                };
                let mut controller = attach(&emulated, &options);
                assert_eq!(controller.doorbells(), doorbells);
                let mut queue = controller.take_queue_pair().unwrap();
                assert_eq!(queue.has_interrupt(), interrupts);
                exercise(&controller, &mut queue, 16, 800);
                let stats = queue.stats();
                assert_eq!((stats.submitted, stats.completed), (800, 800));
                assert_eq!((stats.unknown_completions, stats.bad_sq_heads), (0, 0), "{stats:?}");
                drop(queue);
                controller.detach().unwrap();
            }
        }
    }
}

#[test]
fn a_controller_can_be_attached_repeatedly() {
    let emulated = emulated(mem(), Polling::default(), false);
    for round in 1..=20u16 {
        let options = AttachOptions { queue_pairs: round % 6 + 1, ..AttachOptions::default() };
        let mut controller = attach(&emulated, &options);
        assert_eq!(controller.queue_pairs(), (round % 6 + 1).min(4));
        let mut queues: Vec<_> = std::iter::from_fn(|| controller.take_queue_pair()).collect();
        for queue in &mut queues {
            queue.submit(controller.namespace(1).unwrap().flush(), None).unwrap();
            wait_for_one(queue);
            assert!(queue.pop().unwrap().status.is_success());
        }
        if round % 2 == 0 {
            // The queue pair is dropped with a command in flight.
            let _ = queues[0].submit(controller.namespace(1).unwrap().flush(), None);
            let _ = queues[0].ring();
        }
        drop(queues);
        controller.detach().unwrap();
    }
}

#[test]
fn queue_pairs_are_created_and_deleted_under_load() {
    let emulated = emulated(mem(), Polling::default(), false);
    let mut controller = attach(&emulated, &AttachOptions::default());
    let pool = controller.buffers(64, 4096).unwrap();
    drop(controller.take_queue_pair());
    for round in 0..100u32 {
        let mut queue = controller.create_queue_pair(64).unwrap();
        for lba in 0..u64::from(round % 40) {
            let command = controller.namespace(1).unwrap().read(lba * 8, 8).unwrap();
            queue.submit(command, pool.take()).unwrap();
        }
        queue.ring().unwrap();
        // The queue is dropped with any number of commands outstanding.
        let _ = queue.pop();
        drop(queue);
        assert_eq!(pool.available(), 64, "a deleted queue has given every buffer back");
    }
}

#[test]
fn shadow_doorbells_save_nearly_all_mmio_writes() {
    let null: Arc<dyn Disk> = Arc::new(NullDisk::new(1 << 20, 512));
    let emulated = emulated(null, Polling::Always, false);
    let options = AttachOptions { interrupts: false, ..AttachOptions::default() };
    let mut controller = attach(&emulated, &options);
    let mut queue = controller.take_queue_pair().unwrap();
    let pool = controller.buffers(32, 4096).unwrap();
    let namespace = controller.namespace(1).unwrap();
    let mut completed = 0u64;
    while let Some(buffer) = pool.take() {
        queue.submit(namespace.read(0, 8).unwrap(), Some(buffer)).unwrap();
    }
    while completed < 60_000 {
        wait_for_one(&mut queue);
        while let Some(completion) = queue.pop() {
            completed += 1;
            let command = namespace.read(completed % 1000, 8).unwrap();
            queue.submit(command, completion.buffer).unwrap();
        }
    }
    let stats = queue.stats();
    assert!(stats.doorbell_mmio_writes() * 100 < completed, "{stats:?}");
}

#[test]
fn admin_commands_on_the_emulated_controller() {
    let emulated = emulated(mem(), Polling::default(), false);
    let controller = attach(&emulated, &AttachOptions::default());
    let admin = controller.admin();
    let identity = controller.identity();
    assert_eq!(shadowbell_spec::identify::Text::new(&identity.sn).to_string(), "SHADOWBELL0");
    assert_eq!(controller.version().mjr(), 2);
    let namespace = controller.namespace(1).unwrap();
    assert_eq!((namespace.blocks(), namespace.block_size()), (16384, 512));
    assert_eq!(namespace.uuid(), Some(shadowbell_controller::config::uuid_from("a test")));
    assert!(controller.max_transfer_bytes() >= 1 << 20);
    assert!(admin.registers().unwrap().csts.rdy());
    assert!(admin.smart_log().unwrap().temperature.get() > 200, "kelvins");
    // A failed command adds an entry to the error log.
    let fields =
        shadowbell_spec::admin::Identify { cns: cns::PRIMARY_CONTROLLER, ..Default::default() };
    let error = admin.identify(0, fields).unwrap_err();
    assert_eq!(error.status().map(Status::code), Some(Status::INVALID_FIELD));
    assert_eq!(admin.error_log(8).unwrap().len(), 1);
    let coalescing = admin.get_feature(fid::INTERRUPT_COALESCING, 0, Select::Current).unwrap();
    admin.set_feature(fid::INTERRUPT_COALESCING, 0, 0x0102).unwrap();
    assert_eq!(admin.get_feature(fid::INTERRUPT_COALESCING, 0, Select::Current).unwrap(), 0x0102);
    assert_eq!(
        admin.get_feature(fid::INTERRUPT_COALESCING, 0, Select::Default).unwrap(),
        coalescing
    );
    let queues =
        shadowbell_spec::admin::CreateIoCq { qid: 9, qsize0: 7, pc: true, ..Default::default() };
    let sqe = Sqe::create_io_cq(queues, 0, 0);
    let data = shadowbell_driver::AdminData::None;
    let result = admin.execute(sqe, data, LIMIT).unwrap();
    assert!(!result.status.is_success());
    controller.detach().unwrap();
}

#[test]
fn futures_on_the_emulated_controller() {
    for spin in [SpinPolicy::SLEEP, SpinPolicy::default()] {
        let emulated = emulated(mem(), Polling::default(), false);
        let options = AttachOptions { queue_depth: 16, spin, ..AttachOptions::default() };
        let mut controller = attach(&emulated, &options);
        let queue = AsyncQueue::start(controller.take_queue_pair().unwrap()).unwrap();
        let disk = queue.open(controller.namespace(1).unwrap());
        drop(queue);
        let pool = controller.buffers(32, 4096).unwrap();
        // There are more tasks than the queue has slots.
        std::thread::scope(|scope| {
            for task in 0..24u64 {
                let (disk, pool) = (disk.clone(), pool.clone());
                scope.spawn(move || {
                    block_on(async {
                        let mut buffer = pool.take().unwrap();
                        for round in 1..40 {
                            let data: Vec<u8> =
                                (0..8).flat_map(|b| fill(task * 8 + b, round)).collect();
                            assert!(buffer.copy_from(0, &data));
                            buffer = disk.write(task * 8, buffer).await.unwrap();
                            buffer = disk.compare(task * 8, buffer).await.unwrap();
                            buffer.fill(0);
                            buffer = disk.read(task * 8, buffer).await.unwrap();
                            assert!(buffer.to_vec(4096) == data);
                            if round % 10 == 0 {
                                disk.flush().await.unwrap();
                            }
                        }
                    });
                });
            }
        });
        block_on(async {
            disk.verify(0, 4096).await.unwrap();
            disk.write_zeroes(0, 16, true).await.unwrap();
            let range = DsmRange { attributes: 0, blocks: 16, slba: 16 };
            disk.discard(&[range, DsmRange { slba: 64, ..range }]).await.unwrap();
            let mut buffer = pool.take().unwrap();
            buffer.fill(0x33);
            let buffer = disk.read(0, buffer).await.unwrap();
            assert_eq!(buffer.to_vec(4096), vec![0; 4096]);
            let mut buffer = buffer;
            buffer.fill(1);
            let error = disk.compare(0, buffer).await.unwrap_err();
            assert!(matches!(
                error.kind,
                IoErrorKind::Status { status, .. } if status.code() == Status::COMPARE_FAILURE
            ));
        });
        drop(disk);
        controller.detach().unwrap();
    }
}

/// Memory disk whose writes to block 102 fail.
#[derive(Debug)]
struct FailingDisk(MemDisk);

struct FailingQueue(Box<dyn shadowbell_disk::Queue>);

impl Disk for FailingDisk {
    fn info(&self) -> DiskInfo {
        self.0.info()
    }

    fn queue(&self) -> std::io::Result<Box<dyn shadowbell_disk::Queue>> {
        Ok(Box::new(FailingQueue(self.0.queue()?)))
    }

    fn name(&self) -> String {
        "worn".into()
    }
}

impl shadowbell_disk::Queue for FailingQueue {
    fn submit(
        &mut self,
        tag: u32,
        request: &Request,
        data: &mut shadowbell_memory::Segments,
    ) -> Submitted {
        if request.op != Op::Read && request.offset == 102 * 512 {
            return Submitted::Done(Err(DiskError::Io(5)));
        }
        self.0.submit(tag, request, data)
    }
}

#[test]
fn copies_on_the_emulated_controller() {
    let disk = MemDisk::new(16384, 512).unwrap();
    for block in 0..2048u64 {
        disk.bytes().write(block as usize * 512, &(block + 1)).unwrap();
    }
    let mark = |block: usize| disk.bytes().read::<u64>(block * 512).unwrap();
    let emulated = emulated(Arc::new(FailingDisk(disk.clone())), Polling::default(), false);
    let mut controller = attach(&emulated, &AttachOptions::default());
    let queue = AsyncQueue::start(controller.take_queue_pair().unwrap()).unwrap();
    let namespace = controller.namespace(1).unwrap();
    let limits = namespace.copy_limits().unwrap();
    assert_eq!((limits.ranges, limits.range_blocks, limits.blocks), (128, 2048, 2048));
    let on = queue.open(namespace);
    drop(queue);
    let range =
        |slba, blocks: u32| CopyRange { slba, nlb0: (blocks - 1) as u16, ..Default::default() };
    block_on(async {
        // A discard uses a buffer from the same pool as copies, whose range descriptors are longer.
        on.discard(&[DsmRange { attributes: 0, blocks: 1, slba: 9000 }]).await.unwrap();
        let all: Vec<_> = limits.split(0, limits.max()).collect();
        on.copy(4096, &all).await.unwrap();
        on.copy(8000, &[range(7, 1); 128]).await.unwrap();
        on.copy(1, &[range(0, 100)]).await.unwrap();
        let error = on.copy(5000, &[range(0, 1); 129]).await.unwrap_err();
        let kind = IoErrorKind::Request(RequestError::CopyTooLong {
            ranges: 129,
            longest: 1,
            blocks: 129,
            limits,
        });
        assert_eq!(error.kind.to_string(), kind.to_string());
        // The completion contains the number of the failed range.
        let error = on.copy(100, &[range(500, 1); 4]).await.unwrap_err();
        let status = Status::WRITE_FAULT;
        assert!(
            matches!(error.kind, IoErrorKind::Status { status: s, dw0: 2, opcode: 0x19 } if s.code() == status),
            "{error}"
        );
    });
    assert!((0..2048).all(|block| mark(4096 + block) == block as u64 + 1));
    assert!((0..128).all(|block| mark(8000 + block) == 8));
    assert!(
        (0..100).all(|block| mark(1 + block) == [block as u64 + 1, 501][usize::from(block == 99)])
    );
    drop(on);
    controller.detach().unwrap();
}

#[test]
fn memory_stays_mapped_until_a_reset_ends() {
    let emulated = emulated(mem(), Polling::default(), false);
    let mut controller = attach(&emulated, &AttachOptions::default());
    let mut queue = controller.take_queue_pair().unwrap();
    let pool = controller.buffers(64, 65536).unwrap();
    for i in 0..64 {
        let command = controller.namespace(1).unwrap().read(i * 128, 128).unwrap();
        queue.submit(command, pool.take()).unwrap();
    }
    queue.ring().unwrap();
    // The controller is detached before any completion is taken.
    controller.detach().unwrap();
    drop(queue);
    assert_eq!(pool.available(), 64);
    drop(pool);
    // All resources were released, so the next attach gets the same resources.
    attach(&emulated, &AttachOptions::default()).detach().unwrap();
}

#[test]
fn two_controllers_share_a_pool() {
    let pool = Pool::start(&PoolOptions { workers: 1, ..PoolOptions::default() }).unwrap();
    let controllers: Vec<_> = (0..2)
        .map(|i| {
            let uuid = shadowbell_controller::config::uuid_from(&format!("disk {i}"));
            let namespaces = vec![NamespaceConfig { disk: mem(), uuid }];
            let config = Config { namespaces, ..Config::default() };
            Emulated::new(config, pool.clone(), Carrier::default()).unwrap()
        })
        .collect();
    std::thread::scope(|scope| {
        for emulated in &controllers {
            scope.spawn(|| {
                let mut controller = attach(emulated, &AttachOptions::default());
                let mut queue = controller.take_queue_pair().unwrap();
                exercise(&controller, &mut queue, 24, 3000);
            });
        }
    });
}
