//! A pool whose worker takes its turns when the program says so.

mod common;

use common::{Host, Queue, config};
use shadowbell_backend::{Disk, DiskInfo, Request, Submitted};
use shadowbell_controller::{
    Carrier, Config, Controller, NamespaceConfig, Polling, Pool, PoolOptions, Turns,
};
use shadowbell_memory::{DmaError, DmaTable, Mapping, Segments, SharedBytes};
use shadowbell_spec::regs::{self, cq_doorbell_offset, sq_doorbell_offset};
use shadowbell_spec::{Sqe, Status};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A host with one queue of `entries` entries, attached while the worker takes its turns.
fn attached(controller: Controller, turns: &mut Turns, entries: u32) -> (Host, Queue) {
    // Creating a queue needs a turn, and whoever creates it waits: so somebody else does.
    let host = std::thread::spawn(move || {
        let mut host = Host::attach(controller);
        host.enable();
        let queue = host.create(1, entries, true);
        (host, queue)
    });
    while !host.is_finished() {
        if !turns.turn() {
            std::thread::yield_now();
        }
    }
    let attached = host.join().unwrap();
    while turns.turn() {}
    attached
}

#[test]
fn nothing_happens_between_turns() {
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let controller = Controller::new(config(&["null:1GiB"]), pool, Carrier::default()).unwrap();
    let (mut host, mut queue) = attached(controller, &mut turns, 8);

    let buffer = host.alloc(4096);
    let read = Sqe::read(1, 0, 7, 7).with_prps(buffer, 0);
    host.submit(&mut queue, &read);
    assert!(host.reap(&mut queue).is_none(), "nobody has taken a turn");
    assert!(turns.turn());
    let done = host.reap(&mut queue).expect("a turn is all that a null disk needs");
    assert_eq!(done, (7, Status::SUCCESS, 0));
    assert!(!turns.turn());

    // With something to do there is no sleep; the doorbell that ends one is a trapped write.
    host.submit(&mut queue, &read.with_cid(8));
    assert!(!turns.sleep());
    assert!(turns.turn());
    assert_eq!(host.reap(&mut queue).map(|done| done.0), Some(8));
    // A pool that is gone ends the turns.
    drop(host);
    while turns.turn() {}
    assert!(!turns.turn());
}

/// Whoever visits a worker learns that it takes its turns, and not before it does.
#[test]
fn a_visit_ends_when_the_worker_comes_to_it() {
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let (came, comes) = std::sync::mpsc::channel();
    pool.visit(move || came.send(()).unwrap());
    assert!(comes.try_recv().is_err(), "nobody has taken a turn");
    while turns.turn() {}
    comes.try_recv().unwrap();

    // All of several, and one that serves nobody else does not count.
    let options = PoolOptions { workers: 3, ..PoolOptions::default() };
    let pool = Pool::start(&options).unwrap();
    let (came, comes) = std::sync::mpsc::channel();
    pool.visit(move || came.send(()).unwrap());
    comes.recv_timeout(common::LIMIT).unwrap();
    assert!(comes.recv().is_err(), "once");
}

/// Submits `depth` reads with a turn of the worker after each, as a host does whose processor is
/// slower than the disk, and takes completions whenever there is an interrupt. How many there were.
fn burst(host: &mut Host, queue: &mut Queue, turns: &mut Turns, depth: u32, read: &Sqe) -> u32 {
    let irq = queue.irq.as_ref().unwrap().try_clone().unwrap();
    let (mut submitted, mut taken, mut interrupts) = (0, 0, 0);
    while taken < depth {
        if irq.drain() != 0 {
            interrupts += 1;
            while host.reap(queue).is_some() {
                taken += 1;
            }
        }
        if submitted < depth {
            host.submit(queue, &read.with_cid(submitted as u16));
            submitted += 1;
        }
        turns.turn();
    }
    interrupts
}

#[test]
fn completions_that_come_together_share_an_interrupt() {
    // A busy machine that keeps this thread from a processor for longer costs one more interrupt,
    // and 150 of them are allowed.
    const GRACE: Duration = Duration::from_millis(100);
    let (pool, mut turns) = Pool::driven(Polling::Adaptive(GRACE * 10)).unwrap();
    let controller = Controller::new(config(&["null:1GiB"]), pool, Carrier::default()).unwrap();
    let (mut host, mut queue) = attached(controller, &mut turns, 64);
    let read = Sqe::read(1, 0, 7, 0).with_prps(host.alloc(4096), 0);
    for _ in 0..100 {
        burst(&mut host, &mut queue, &mut turns, 16, &read);
    }
    let mut run = |depth, times| -> u32 {
        (0..times).map(|_| burst(&mut host, &mut queue, &mut turns, depth, &read)).sum()
    };
    let raised = run(16, 50);
    // About one for each sixteen; more only where this machine stood still for a grace.
    assert!(raised <= 200, "{raised} interrupts for 800 completions");
    // One after the other, there is one for each.
    assert_eq!(run(1, 7), 7);
}

/// A disk of which block 0 takes for ever. What the host writes at the end of a batch, and how
/// often its memory was said to have changed.
#[derive(Clone, Debug, Default)]
struct Meanwhile(Arc<Mutex<Option<(SharedBytes, usize, u32)>>>, Arc<AtomicUsize>);

impl Disk for Meanwhile {
    fn info(&self) -> DiskInfo {
        DiskInfo::new(512, 1 << 10)
    }

    fn queue(&self) -> std::io::Result<Box<dyn shadowbell_backend::Queue>> {
        Ok(Box::new(MeanwhileQueue(self.clone(), Vec::new())))
    }

    fn name(&self) -> String {
        "meanwhile".into()
    }
}

struct MeanwhileQueue(Meanwhile, Vec<Segments>);

impl shadowbell_backend::Queue for MeanwhileQueue {
    fn submit(&mut self, _: u32, request: &Request, data: &mut Segments) -> Submitted {
        if request.offset != 0 {
            return Submitted::Done(Ok(()));
        }
        self.1.push(data.take());
        Submitted::Pending
    }

    fn commit(&mut self) {
        if let Some((memory, at, value)) = self.0.0.lock().unwrap().take() {
            memory.write(at, &value).unwrap();
        }
    }

    fn memory_changed(&mut self, _: &DmaTable) {
        self.0.1.fetch_add(1, Ordering::Relaxed);
    }

    fn pending(&self) -> usize {
        self.1.len()
    }
}

fn over(disk: &Meanwhile, pool: Pool) -> Controller {
    let namespaces = vec![NamespaceConfig { disk: Arc::new(disk.clone()), uuid: [7; 16] }];
    let config = Config { namespaces, ..Config::default() };
    Controller::new(config, pool, Carrier::default()).unwrap()
}

/// Of room in a completion queue that was seen on another occasion nobody learns any more: the host
/// has made it, and waits.
#[test]
fn a_queue_does_not_sleep_over_room_that_was_seen_in_passing() {
    let disk = Meanwhile::default();
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let (mut host, mut queue) = attached(over(&disk, pool), &mut turns, 4);
    let buffer = host.alloc(4096);
    let read = |lba, cid| Sqe::read(1, lba, 0, cid).with_prps(buffer, 0);
    // One is pending, one is announced, and one suppressed for that: the completion queue is full.
    host.put(&mut queue, &read(0, 1));
    host.submit(&mut queue, &read(8, 2));
    turns.turn();
    host.submit(&mut queue, &read(8, 3));
    turns.turn();
    host.submit(&mut queue, &read(8, 4));
    // After the look for room for the next, and before that for the interrupt, the host takes both.
    let doorbells = host.controller.doorbells().clone();
    let head = (cq_doorbell_offset(1, 0) - regs::DOORBELLS) as usize;
    *disk.0.lock().unwrap() = Some((doorbells, head, 2));
    assert!(!turns.turn(), "there was room for it at the first look");
    assert!(disk.0.lock().unwrap().is_none());
    host.controller.write_doorbell(cq_doorbell_offset(1, 0), 2);
    (queue.head, queue.phase) = (2, true);
    let (answered, hold_limit) = std::sync::mpsc::channel::<()>();
    let controller = host.controller.clone();
    let rescuer = std::thread::spawn(move || {
        if hold_limit.recv_timeout(common::LIMIT).is_err() {
            controller.write_doorbell(sq_doorbell_offset(1, 0), 0);
        }
    });
    assert!(!turns.sleep(), "no doorbell would have rung");
    answered.send(()).unwrap();
    rescuer.join().unwrap();
    turns.turn();
    assert_eq!(host.reap(&mut queue), Some((4, Status::SUCCESS, 0)));
}

/// However much memory there is, the host lets the controller use all of it or none, again and
/// again (bus mastering): the map is not made anew.
#[test]
fn memory_is_taken_away_and_given_back_as_it_was() {
    let disk = Meanwhile::default();
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let (mut host, mut queue) = attached(over(&disk, pool), &mut turns, 4);
    let table = host.controller.dma_table();
    let (gone, is_gone) = std::sync::mpsc::channel();
    host.controller.disable_dma(move || gone.send(()).unwrap());
    while turns.turn() {}
    is_gone.recv_timeout(common::LIMIT).unwrap();
    // What is shared meanwhile counts from then on.
    let page = Mapping::anonymous(4096).unwrap().bytes();
    host.controller.add_dma(1 << 40, 4096, &page).unwrap();
    assert_eq!(host.controller.dma_table().len(), table.len() + 1);
    host.submit(&mut queue, &Sqe::read(1, 8, 0, 9).with_prps(1 << 40, 0));
    while turns.turn() {}
    assert_eq!(host.reap(&mut queue), None, "it has no memory");
    host.controller.enable_dma();
    while turns.turn() {}
    assert_eq!(host.reap(&mut queue), Some((9, Status::SUCCESS, 0)));
}

/// With an IOMMU in between there are tens of thousands, and whoever shares a worker waits for
/// each.
#[test]
fn ranges_that_come_together_are_one_change() {
    let disk = Meanwhile::default();
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let (mut host, mut queue) = attached(over(&disk, pool), &mut turns, 4);
    let before = disk.1.load(Ordering::Relaxed);
    let page = Mapping::anonymous(4096).unwrap().bytes();
    let ranges = (0..1000u64).map(|n| ((1 << 40) + (n * 4096), 4096, &page));
    let mut refused = Vec::new();
    let odd = [(common::BASE, 4096, &page), (1 << 50, 8192, &page)];
    for (iova, len, memory) in ranges.chain(odd) {
        if let Err(error) = host.controller.add_dma(iova, len, memory) {
            refused.push((iova, error));
        }
    }
    host.controller.settle_dma();
    assert!(matches!(
        refused[..],
        [(common::BASE, DmaError::Overlap { .. }), (_, DmaError::Short { .. })]
    ));
    while turns.turn() {}
    assert_eq!(disk.1.load(Ordering::Relaxed), before + 1);
    host.submit(&mut queue, &Sqe::read(1, 8, 0, 9).with_prps((1 << 40) + 999 * 4096, 0));
    turns.turn();
    assert_eq!(host.reap(&mut queue), Some((9, Status::SUCCESS, 0)));
}
