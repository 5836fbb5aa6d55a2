//! Controllers that move between I/O threads under load.

use crate::{common, held};
use common::{BASE, Host, MEMORY, Queue, config};
use held::Held;
use shadowbell_controller::trace::{Kind, TraceFile, read_trace};
use shadowbell_controller::{
    Carrier, Config, Controller, Event, NamespaceConfig, Polling, Pool, PoolOptions, RelocateError,
};
use shadowbell_disk::{Disk, DiskError, DiskInfo, Request, Submitted};
use shadowbell_memory::{Segments, View};
use shadowbell_spec::{Sqe, Status};
use shadowbell_testing::wait;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const ADAPTIVE: Polling = Polling::Adaptive(Duration::from_micros(50));

fn pool(workers: usize, polling: Polling) -> Pool {
    Pool::start(&PoolOptions { workers, polling, pin: Vec::new() }).unwrap()
}

fn attach(config: Config, pool: &Pool) -> Host {
    let controller = Controller::new(config, pool.clone(), Carrier::default()).unwrap();
    let mut host = Host::attach(controller);
    host.enable();
    host
}

/// Two pages for data, at the end of the host's memory.
const DATA: u64 = BASE + MEMORY - 2 * 4096;

/// Index of the I/O thread that serves the controller. Fails if there are several.
fn worker(host: &Host) -> usize {
    let workers = host.controller.stats().workers;
    assert_eq!(workers.len(), 1, "{workers:?}");
    workers[0].worker
}

/// Writes and reads blocks on all queues, each with its own data.
fn work(host: &mut Host, queues: &mut [Queue], round: u64) {
    let page = DATA;
    for (queue, slot) in queues.iter_mut().zip(0u64..) {
        for n in 0..8 {
            let (lba, cid) = (slot * 64 + n, host.next_cid());
            host.poke(page, &(round << 32 | lba).to_le_bytes().repeat(64));
            let (status, _) = host.run(queue, Sqe::write(1, lba, 0, cid).with_prps(page, 0));
            assert!(status.is_success());
            let cid = host.next_cid();
            let (status, _) = host.run(queue, Sqe::read(1, lba, 0, cid).with_prps(page + 4096, 0));
            assert!(status.is_success());
            assert_eq!(host.peek(page, 512), host.peek(page + 4096, 512));
        }
    }
}

#[test]
fn an_isolated_controller_continues_on_its_own_thread() {
    for polling in [Polling::Never, ADAPTIVE] {
        let pool = pool(1, polling);
        let mut neighbour = attach(config(&["mem:1MiB"]), &pool);
        let mut host = attach(config(&["mem:4MiB"]), &pool);
        let mut queues = vec![host.create(1, 16, false), host.create(2, 16, true)];
        let mut others = vec![neighbour.create(1, 16, false)];
        work(&mut host, &mut queues, 1);
        assert_eq!(worker(&host), 0);
        let before = host.controller.stats();
        host.controller.isolate().unwrap();
        work(&mut host, &mut queues, 2);
        assert_eq!(worker(&host), 1);
        // The controller keeps its counters when it moves, and counts no command twice.
        let after = host.controller.stats();
        assert_eq!(after.io.writes, before.io.writes * 2);
        assert_eq!(after.submission_queues.len(), before.submission_queues.len());
        work(&mut neighbour, &mut others, 1);
        assert_eq!(worker(&neighbour), 0);
        // Queues that are created later, also after a reset, are on the same thread as the others.
        queues.push(host.create(3, 16, false));
        work(&mut host, &mut queues, 3);
        assert_eq!(worker(&host), 1);
        host.disable();
        host.enable();
        let mut queues = vec![host.create(1, 16, false)];
        work(&mut host, &mut queues, 4);
        assert_eq!(worker(&host), 1);
        assert!(matches!(host.controller.isolate(), Err(RelocateError::Placed)));
        // The I/O thread of the dropped controller is free, and can serve another isolated
        // controller.
        drop((host, queues));
        neighbour.controller.isolate().unwrap();
        work(&mut neighbour, &mut others, 2);
        assert!(worker(&neighbour) >= 1);
    }
}

#[test]
fn a_thread_of_its_own_is_in_the_trace() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace");
    let pool = pool(1, ADAPTIVE);
    let trace = TraceFile::create_with_spare(&path, 1, 4, 1024).unwrap();
    pool.trace(&trace);
    let mut host = attach(config(&["mem:4MiB"]), &pool);
    let mut queues = vec![host.create(1, 16, false)];
    work(&mut host, &mut queues, 1);
    host.controller.isolate().unwrap();
    work(&mut host, &mut queues, 2);
    assert_eq!(worker(&host), 1);
    let records: Vec<_> = read_trace(&path).unwrap().collect();
    let batches_of = |worker| {
        records.iter().filter(|r| r.kind == Kind::Batch && r.worker == Some(worker)).count()
    };
    assert!(batches_of(0) > 0 && batches_of(1) > 0);
}

#[test]
fn pinning_gathers_queues_on_one_io_thread() {
    let pool = pool(3, Polling::Never);
    let mut host = attach(config(&["mem:4MiB"]), &pool);
    let mut queues: Vec<_> = (1..=6).map(|qid| host.create(qid, 16, qid % 2 == 0)).collect();
    work(&mut host, &mut queues, 1);
    assert_eq!(host.controller.stats().workers.len(), 3);
    assert!(matches!(host.controller.pin_to(3), Err(RelocateError::NoSuchWorker(3, 3))));
    host.controller.pin_to(1).unwrap();
    work(&mut host, &mut queues, 2);
    let workers = host.controller.stats().workers;
    assert!(workers.iter().all(|sleep| sleep.worker == 1), "{workers:?}");
    work(&mut host, &mut queues, 3);
    let io = host.controller.stats().io;
    assert_eq!((io.reads, io.writes), (3 * 48, 3 * 48));
    host.disable();
    host.enable();
    let mut queues: Vec<_> = (1..=6).map(|qid| host.create(qid, 16, false)).collect();
    work(&mut host, &mut queues, 4);
}

#[test]
fn a_move_waits_for_commands_in_flight() {
    let held = Held::new(1024);
    held.mark();
    let disk: Arc<dyn Disk> = Arc::new(held.clone());
    let namespaces = vec![NamespaceConfig { disk, uuid: [7; 16] }];
    let mut host = attach(Config { namespaces, ..Config::default() }, &pool(1, Polling::Never));
    let mut queue = host.create(1, 64, false);
    let page = host.alloc(4096);
    held.instruct(|instructions| instructions.hold = true);
    host.submit(&mut queue, &Sqe::read(1, 1, 0, 1).with_prps(page, 0));
    host.until("the first", || held.seen().len() == 1);
    host.controller.isolate().unwrap();
    for cid in 2..20 {
        host.submit(&mut queue, &Sqe::read(1, u64::from(cid), 0, cid).with_prps(page, 0));
    }
    // The old I/O thread is about to give up the controller. It passes messages to the new thread.
    // Memory that is unmapped meanwhile is released when the move has ended.
    let memory = shadowbell_memory::Mapping::anonymous(4096).unwrap().bytes();
    host.controller.map_dma(1 << 40, 4096, &memory).unwrap();
    let unmapped = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&unmapped);
    host.controller.unmap_dma(1 << 40, 4096, move || flag.store(true, Ordering::SeqCst)).unwrap();
    wait::short_pause();
    assert!(!unmapped.load(Ordering::SeqCst));
    assert_eq!(held.seen().len(), 1);
    held.instruct(|instructions| instructions.hold = false);
    for _ in 1..20 {
        assert!(host.wait(&mut queue).1.is_success());
    }
    host.until("the memory", || unmapped.load(Ordering::SeqCst));
    assert_eq!(worker(&host), 1);
}

#[test]
fn a_reset_during_a_move_does_not_wait() {
    let held = Held::new(1024);
    let disk: Arc<dyn Disk> = Arc::new(held.clone());
    let namespaces = vec![NamespaceConfig { disk, uuid: [7; 16] }];
    let mut host = attach(Config { namespaces, ..Config::default() }, &pool(1, Polling::Never));
    let mut queue = host.create(1, 64, false);
    let page = host.alloc(4096);
    held.instruct(|instructions| instructions.hold = true);
    for cid in 0..4 {
        host.submit(&mut queue, &Sqe::read(1, 1, 0, cid).with_prps(page, 0));
    }
    host.until("the reads", || held.seen().len() == 4);
    host.controller.isolate().unwrap();
    let disk = held.clone();
    let release = std::thread::spawn(move || {
        // The reset cancels the commands in flight.
        while disk.cancelled() < 4 {
            std::thread::yield_now();
        }
        disk.instruct(|instructions| instructions.hold = false);
    });
    host.disable();
    release.join().unwrap();
    host.enable();
    let mut queues = vec![host.create(1, 16, false)];
    work(&mut host, &mut queues, 1);
    assert_eq!(worker(&host), 1);
}

/// Moves controllers at random moments of all operations of their hosts.
#[test]
fn any_operation_may_come_during_a_move() {
    // Linear congruential generator (Knuth).
    let mut state = 1u64;
    let mut random = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    for round in 0..60 {
        let workers = 1 + round % 3;
        let pool = pool(workers, if round % 2 == 0 { Polling::Never } else { ADAPTIVE });
        let mut host = attach(config(&["mem:4MiB"]), &pool);
        if round % 4 < 2 {
            assert!(host.configure_shadow(|_, _| 0).is_success());
        }
        let mut queues: Vec<_> = (1..=4).map(|qid| host.create(qid, 16, qid % 2 == 0)).collect();
        let when = random() % 400;
        let controller = host.controller.clone();
        let mover = std::thread::spawn(move || {
            // Random moment of the host's operations.
            std::thread::sleep(Duration::from_micros(u64::from(when)));
            if workers > 1 && when % 2 == 0 {
                controller.pin_to(workers - 1).unwrap();
            } else {
                controller.isolate().unwrap();
            }
        });
        let memory = shadowbell_memory::Mapping::anonymous(4096).unwrap().bytes();
        let unmapped = Arc::new(Mutex::new(0));
        for n in 0..6u64 {
            work(&mut host, &mut queues, n);
            host.controller.map_dma((1 << 40) + n * 4096, 4096, &memory).unwrap();
            match random() % 4 {
                0 => {
                    let count = Arc::clone(&unmapped);
                    let done = move || *count.lock().unwrap() += 1;
                    host.controller.unmap_dma((1 << 40) + n * 4096, 4096, done).unwrap();
                    host.until("the unmap", || *unmapped.lock().unwrap() == 1);
                    *unmapped.lock().unwrap() = 0;
                }
                1 => {
                    let queue = queues.pop().unwrap();
                    host.must(Sqe::delete_io_sq(queue.qid, 0));
                    host.must(Sqe::delete_io_cq(queue.qid, 0));
                    queues.push(host.create(queue.qid, 16, false));
                }
                2 => {
                    host.disable();
                    host.enable();
                    queues = (1..=4).map(|qid| host.create(qid, 16, false)).collect();
                }
                _ => {}
            }
        }
        mover.join().unwrap();
        work(&mut host, &mut queues, 9);
        let used = host.controller.stats().workers;
        let expected = if workers > 1 && when % 2 == 0 { workers - 1 } else { workers };
        assert!(used.iter().all(|sleep| sleep.worker == expected), "{used:?}");
        host.disable();
    }
}

/// Memory disk whose submissions take long.
#[derive(Debug)]
struct SlowSubmitDisk(Arc<dyn Disk>);

struct SlowSubmitQueue(Box<dyn shadowbell_disk::Queue>);

impl Disk for SlowSubmitDisk {
    fn info(&self) -> DiskInfo {
        self.0.info()
    }

    fn queue(&self) -> std::io::Result<Box<dyn shadowbell_disk::Queue>> {
        Ok(Box::new(SlowSubmitQueue(self.0.queue()?)))
    }

    fn name(&self) -> String {
        "sluggish".into()
    }
}

impl shadowbell_disk::Queue for SlowSubmitQueue {
    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        // Time that a slow disk needs for a submission.
        std::thread::sleep(Duration::from_millis(5));
        self.0.submit(tag, request, data)
    }

    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        self.0.reap(done);
    }

    fn memory_changed(&mut self, view: &View) {
        self.0.memory_changed(view);
    }
}

#[test]
fn a_slow_controller_is_isolated_from_its_neighbour() {
    let pool = pool(1, Polling::Never);
    let disk: Arc<dyn Disk> =
        Arc::new(SlowSubmitDisk(shadowbell_disk_file::open("mem:4MiB").unwrap()));
    let namespaces = vec![NamespaceConfig { disk, uuid: [7; 16] }];
    let events: Arc<Mutex<Vec<Event>>> = Arc::default();
    let heard = Arc::clone(&events);
    let carrier = Carrier {
        listener: Some(Box::new(move |event| heard.lock().unwrap().push(*event))),
        ..Carrier::default()
    };
    let config_of_slow = Config { namespaces, ..Config::default() };
    let controller = Controller::new(config_of_slow, pool.clone(), carrier).unwrap();
    let mut slow = Host::attach(controller);
    slow.enable();
    let mut queues = vec![slow.create(1, 16, false)];
    // A controller that is alone on its I/O thread is not isolated, even if it is slow, because it
    // delays no other.
    work(&mut slow, &mut queues, 1);
    assert_eq!(worker(&slow), 0);
    let mut neighbour = attach(config(&["mem:4MiB"]), &pool);
    let mut others = vec![neighbour.create(1, 16, false)];
    let isolated =
        || events.lock().unwrap().iter().any(|event| matches!(event, Event::Isolated(_)));
    let mut rounds = 0;
    while !isolated() {
        work(&mut neighbour, &mut others, rounds);
        work(&mut slow, &mut queues, rounds);
        rounds += 1;
        assert!(rounds < 100, "the controller was not isolated");
    }
    work(&mut slow, &mut queues, 1000);
    assert_eq!((worker(&slow), worker(&neighbour)), (1, 0));
    work(&mut neighbour, &mut others, 1000);
    assert_eq!(
        events.lock().unwrap().iter().filter(|e| matches!(e, Event::Isolated(_))).count(),
        1
    );
    assert_eq!(
        slow.admin(Sqe::abort(shadowbell_spec::admin::Abort { sqid: 1, cid: 7 }, 0)).0,
        Status::SUCCESS
    );
}
