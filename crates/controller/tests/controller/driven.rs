//! Driven pool: the test thread acts as its I/O thread.

use crate::common;
use common::{Host, Queue, config};
use shadowbell_controller::{
    Carrier, Config, Controller, NamespaceConfig, Polling, Pool, PoolOptions, Turns,
};
use shadowbell_disk::{Disk, DiskInfo, Request, Submitted};
use shadowbell_memory::{DmaError, Mapping, Segments, SharedBytes, View};
use shadowbell_spec::regs::{self, cq_doorbell_offset, sq_doorbell_offset};
use shadowbell_spec::{Sqe, Status};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Creates a host with one queue of `entries` entries, while this thread acts as the I/O thread.
fn attached(controller: Controller, turns: &mut Turns, entries: u32) -> (Host, Queue) {
    // The host runs on another thread, because it blocks until its queue is created. This thread
    // acts as the I/O thread, which creates it.
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
fn commands_are_executed_only_in_turns() {
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let controller = Controller::new(config(&["null:1GiB"]), pool, Carrier::default()).unwrap();
    let (mut host, mut queue) = attached(controller, &mut turns, 8);

    let buffer = host.alloc(4096);
    let read = Sqe::read(1, 0, 7, 7).with_prps(buffer, 0);
    host.submit(&mut queue, &read);
    assert!(host.reap(&mut queue).is_none(), "no turn was taken");
    assert!(turns.turn());
    let done = host.reap(&mut queue).expect("a turn is all that a null disk needs");
    assert_eq!(done, (7, Status::SUCCESS, 0));
    assert!(!turns.turn());

    // The thread does not sleep while there is work. A trapped doorbell write ends a sleep.
    host.submit(&mut queue, &read.with_cid(8));
    assert!(!turns.sleep());
    assert!(turns.turn());
    assert_eq!(host.reap(&mut queue).map(|done| done.0), Some(8));
    // After the pool was dropped, `turn` finds no work.
    drop(host);
    while turns.turn() {}
    assert!(!turns.turn());
}

/// A sample has the commands of each place: not fetched, and in flight at the disk.
#[test]
fn a_sample_shows_where_commands_are() {
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let controller =
        Controller::new(config(&["null:1GiB"]), pool.clone(), Carrier::default()).unwrap();
    let number = controller.number();
    let (mut host, mut queue) = attached(controller, &mut turns, 8);
    let buffer = host.alloc(4096);
    let (answer, answers) = std::sync::mpsc::channel();
    let sample = |turns: &mut Turns| {
        assert_eq!(pool.sample(|worker| worker == 0, &answer), [0]);
        assert!(answers.try_recv().is_err(), "no turn was taken");
        assert!(turns.turn());
        let sample = answers.try_recv().unwrap();
        assert!(sample.worker == 0 && sample.answered >= sample.requested);
        sample.controllers
    };
    let idle = sample(&mut turns);
    assert_eq!((idle[0].controller, idle[0].queued, idle[0].in_flight), (number, 0, 0));
    assert_eq!((idle[0].capacity, &idle[0].requests[..]), (7, &[][..]));
    // The message is handled before the commands are fetched.
    (0..3).for_each(|cid| host.submit(&mut queue, &Sqe::read(1, 0, 7, cid).with_prps(buffer, 0)));
    let busy = sample(&mut turns);
    assert_eq!((busy[0].queued, busy[0].held_back, busy[0].in_flight), (3, 0, 0));
    assert_eq!(sample(&mut turns)[0].queued, 0);
    // No thread is wanted, so none is asked.
    assert!(pool.sample(|_| false, &answer).is_empty());
}

/// A liveness check completes in the next turn of the I/O thread, and not before.
#[test]
fn a_liveness_check_ends_at_the_io_threads_next_turn() {
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let (came, comes) = std::sync::mpsc::channel();
    pool.check_liveness(move || came.send(()).unwrap());
    assert!(comes.try_recv().is_err(), "no turn was taken");
    while turns.turn() {}
    comes.try_recv().unwrap();

    // All shared I/O threads have to respond. The check does not wait for the thread of an isolated
    // controller.
    let options = PoolOptions { workers: 3, ..PoolOptions::default() };
    let pool = Pool::start(&options).unwrap();
    let (came, comes) = std::sync::mpsc::channel();
    pool.check_liveness(move || came.send(()).unwrap());
    comes.recv_timeout(common::LIMIT).unwrap();
    assert!(comes.recv().is_err(), "once");
}

/// Submits `depth` reads, with a turn of the I/O thread after each, as if the host had a slow CPU.
/// Takes completions only at interrupts. Returns the number of interrupts.
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
    // After each completion, the controller delays the interrupt for up to `GRACE`, in case another
    // completion follows. If a busy machine stops this thread for longer, there is one more
    // interrupt. The limit of 200 interrupts allows for 150 of these.
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
    // At best, sixteen completions share one interrupt, which would be 50 interrupts.
    assert!(raised <= 200, "{raised} interrupts for 800 completions");
    // At depth 1, each completion has its own interrupt.
    assert_eq!(run(1, 7), 7);
}

/// Disk on which requests for block 0 never complete. The first field is a write to the host's
/// memory, which the disk executes once at the end of a batch. The second is the number of
/// `memory_changed` calls.
#[derive(Clone, Debug, Default)]
struct WritingDisk(Arc<Mutex<Option<(SharedBytes, usize, u32)>>>, Arc<AtomicUsize>);

impl Disk for WritingDisk {
    fn info(&self) -> DiskInfo {
        DiskInfo::new(512, 1 << 10)
    }

    fn queue(&self) -> std::io::Result<Box<dyn shadowbell_disk::Queue>> {
        Ok(Box::new(WritingQueue(self.clone(), Vec::new())))
    }

    fn name(&self) -> String {
        "meanwhile".into()
    }
}

struct WritingQueue(WritingDisk, Vec<Segments>);

impl shadowbell_disk::Queue for WritingQueue {
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

    fn memory_changed(&mut self, _: &View) {
        self.0.1.fetch_add(1, Ordering::Relaxed);
    }

    fn pending(&self) -> usize {
        self.1.len()
    }
}

fn over(disk: &WritingDisk, pool: Pool) -> Controller {
    let namespaces = vec![NamespaceConfig { disk: Arc::new(disk.clone()), uuid: [7; 16] }];
    let config = Config { namespaces, ..Config::default() };
    Controller::new(config, pool, Carrier::default()).unwrap()
}

/// The I/O thread notices new room in a completion queue in a pass and not in the check before a
/// sleep. The host does not signal this room again and waits, so the thread must not sleep.
#[test]
fn completion_room_seen_in_a_pass_prevents_sleep() {
    let disk = WritingDisk::default();
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let (mut host, mut queue) = attached(over(&disk, pool), &mut turns, 4);
    let buffer = host.alloc(4096);
    let read = |lba, cid| Sqe::read(1, lba, 0, cid).with_prps(buffer, 0);
    // State of the three commands: the first is in flight at the disk. The second has a completion
    // with an interrupt. The third has a completion without one, because the host has not consumed
    // the completion before it. The completion queue is full.
    host.put(&mut queue, &read(0, 1));
    host.submit(&mut queue, &read(8, 2));
    turns.turn();
    host.submit(&mut queue, &read(8, 3));
    turns.turn();
    host.submit(&mut queue, &read(8, 4));
    // The host consumes both completions between two checks of a pass: the check for room, and the
    // check for the interrupt.
    let doorbells = host.controller.doorbells().clone();
    let head = (cq_doorbell_offset(1, 0) - regs::DOORBELLS) as usize;
    *disk.0.lock().unwrap() = Some((doorbells, head, 2));
    assert!(!turns.turn(), "the first check found room");
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

/// Disabling bus mastering removes all DMA access. Enabling restores the same map, and does not map
/// each range again. For a large memory, that would take long.
#[test]
fn dma_is_disabled_and_restored_with_the_same_map() {
    let disk = WritingDisk::default();
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let (mut host, mut queue) = attached(over(&disk, pool), &mut turns, 4);
    let table = host.controller.dma_table();
    let (gone, is_gone) = std::sync::mpsc::channel();
    host.controller.disable_dma(move || gone.send(()).unwrap());
    while turns.turn() {}
    is_gone.recv_timeout(common::LIMIT).unwrap();
    // Memory that the VMM shares while bus mastering is disabled becomes usable when bus mastering
    // is enabled.
    let page = Mapping::anonymous(4096).unwrap().bytes();
    host.controller.add_dma(1 << 40, 4096, &page).unwrap();
    assert_eq!(host.controller.dma_table().len(), table.len() + 1);
    host.submit(&mut queue, &Sqe::read(1, 8, 0, 9).with_prps(1 << 40, 0));
    while turns.turn() {}
    assert_eq!(host.reap(&mut queue), None, "DMA is disabled");
    host.controller.enable_dma();
    while turns.turn() {}
    assert_eq!(host.reap(&mut queue), Some((9, Status::SUCCESS, 0)));
}

/// A guest with an IOMMU shares tens of thousands of ranges. They are added in one change of the
/// map: a change for each range would delay the other controllers of the I/O thread.
#[test]
fn ranges_added_together_are_one_change() {
    let disk = WritingDisk::default();
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
    host.controller.publish_dma();
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
