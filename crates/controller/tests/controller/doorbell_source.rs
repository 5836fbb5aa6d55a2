//! Doorbell sources: an I/O thread polls them, and they wake the thread while it sleeps.

use crate::common;
use common::wire::DoorbellChannel;
use common::{Host, Queue, config, pool, run_beside};
use shadowbell_controller::{Carrier, Controller, Polling, Pool, Turns};
use shadowbell_spec::regs::{self, cq_doorbell_offset, sq_doorbell_offset};
use shadowbell_spec::{Sqe, Status};

/// Creates a host with one queue, while this thread acts as the I/O thread.
fn attached(pool: &Pool, turns: &mut Turns) -> (Host, Queue) {
    let config = shadowbell_controller::Config { io_queues: 2, ..config(&["null:1GiB"]) };
    let controller = Controller::new(config, pool.clone(), Carrier::default()).unwrap();
    run_beside(turns, move || {
        let mut host = Host::attach(controller);
        host.enable();
        let queue = host.create(1, 8, false);
        (host, queue)
    })
}

/// Stores a command in the queue's memory. Returns the new tail; the caller has to write it to the
/// doorbell.
fn put(host: &mut Host, queue: &mut Queue) -> u32 {
    let buffer = host.alloc(4096);
    let cid = host.next_cid();
    host.put(queue, &Sqe::read(1, 0, 7, cid).with_prps(buffer, 0));
    queue.tail
}

#[test]
fn a_sleeping_worker_takes_doorbells_by_itself() {
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let (mut host, mut queue) = attached(&pool, &mut turns);
    let (wire, source) = DoorbellChannel::new();
    host.controller.add_doorbell_source(0, source);
    assert!(turns.turn());
    assert!(wire.is_watched());
    while turns.turn() {}
    for _ in 0..20 {
        let tail = put(&mut host, &mut queue);
        wire.write(sq_doorbell_offset(1, 0), tail);
        wire.write(cq_doorbell_offset(1, 0), queue.head);
        assert!(turns.sleep(), "there is nothing to do but what is on the wire");
        assert_eq!(wire.take(), []);
        assert!(turns.turn());
        let (_, status, _) = host.reap(&mut queue).expect("a completion after the wakeup");
        assert_eq!(status, Status::SUCCESS);
    }
    let controller = host.controller.clone();
    let stats = run_beside(&mut turns, move || controller.stats());
    let (sq, cq) = stats.io_queues();
    // The host has also written the completion queue's doorbell when it consumed completions.
    assert_eq!((sq.commands, sq.doorbell.mmio_writes, cq.doorbell.mmio_writes), (20, 20, 40));
    let spurious: u64 = stats.workers.iter().map(|worker| worker.spurious_wakes).sum();
    assert_eq!(spurious, 0);
}

/// An invalid doorbell value is reported even if the host writes a valid one before the I/O thread
/// reads the register.
#[test]
fn invalid_values_from_a_source_are_refused() {
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let (mut host, mut queue) = attached(&pool, &mut turns);
    let (wire, source) = DoorbellChannel::new();
    host.controller.add_doorbell_source(0, source);
    while turns.turn() {}
    let (head, tail) = (cq_doorbell_offset(1, 0), sq_doorbell_offset(1, 0));
    for value in [5, 0xffff] {
        let next = put(&mut host, &mut queue);
        wire.write(head, value);
        // The second of two equal invalid values is not reported.
        wire.write(head, value);
        wire.write(head, queue.head);
        wire.write(tail, next);
        assert!(turns.sleep());
        while turns.turn() {}
        let (_, status, _) = host.reap(&mut queue).expect("a completion");
        assert_eq!(status, Status::SUCCESS);
        wire.write(head, queue.head);
        assert!(turns.sleep());
        while turns.turn() {}
    }
    let next = put(&mut host, &mut queue);
    wire.write(tail, 999);
    wire.write(tail, next);
    assert!(turns.sleep());
    while turns.turn() {}
    assert!(host.reap(&mut queue).is_none(), "no command is taken after an invalid tail");
    let controller = host.controller.clone();
    let stats = run_beside(&mut turns, move || controller.stats());
    let (sq, cq) = stats.io_queues();
    assert_eq!((sq.doorbell.invalid, cq.doorbell.invalid), (1, 2));
}

#[test]
fn writes_to_other_registers_stay_in_the_source() {
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let (mut host, mut queue) = attached(&pool, &mut turns);
    let (wire, source) = DoorbellChannel::new();
    host.controller.add_doorbell_source(0, source);
    while turns.turn() {}
    for offset in [
        regs::CC,
        sq_doorbell_offset(0, 0),
        cq_doorbell_offset(0, 0),
        // Doorbells of a queue that does not exist and of a queue that cannot exist, an unaligned
        // offset, and an offset outside of BAR0.
        sq_doorbell_offset(2, 0),
        sq_doorbell_offset(65, 0),
        sq_doorbell_offset(1, 0) + 2,
        u64::MAX,
    ] {
        let tail = put(&mut host, &mut queue);
        wire.write(sq_doorbell_offset(1, 0), tail);
        wire.write(offset, 1);
        wire.write(sq_doorbell_offset(1, 0), 999);
        turns.sleep();
        assert_eq!(wire.take(), [(offset, 1), (sq_doorbell_offset(1, 0), 999)]);
        turns.turn();
        assert!(host.reap(&mut queue).is_some());
        while turns.turn() {}
    }
    assert!(host.csts().rdy() && !host.csts().cfs());
    // Writes that it cannot handle wake the I/O thread. After some of these wakeups, the thread
    // drops the source.
    for _ in 0..7 {
        wire.write(regs::CC, 0);
        turns.sleep();
        wire.take();
        turns.turn();
    }
    assert!(wire.is_watched());
    wire.write(regs::CC, 0);
    turns.sleep();
    assert!(!wire.is_watched());
}

#[test]
fn an_invalid_doorbell_value_from_a_source_is_counted() {
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let (host, _queue) = attached(&pool, &mut turns);
    let (wire, source) = DoorbellChannel::new();
    host.controller.add_doorbell_source(0, source);
    while turns.turn() {}
    wire.write(sq_doorbell_offset(1, 0), 4711);
    turns.sleep();
    while turns.turn() {}
    let controller = host.controller.clone();
    let stats = run_beside(&mut turns, move || controller.stats());
    assert_eq!(stats.io_queues().0.doorbell.invalid, 1);
}

#[test]
fn a_reset_or_a_new_source_ends_the_old_source() {
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let (host, _queue) = attached(&pool, &mut turns);
    let (first, source) = DoorbellChannel::new();
    host.controller.add_doorbell_source(0, source);
    while turns.turn() {}
    let (second, source) = DoorbellChannel::new();
    host.controller.add_doorbell_source(0, source);
    while turns.turn() {}
    assert!(!first.is_watched() && second.is_watched());
    let controller = host.controller.clone();
    run_beside(&mut turns, move || host.disable());
    assert!(!second.is_watched());
    // The I/O thread does not poll the dropped source, so this write remains in it.
    second.write(sq_doorbell_offset(1, 0), 1);
    let (third, source) = DoorbellChannel::new();
    controller.add_doorbell_source(0, source);
    while turns.turn() {}
    assert!(!third.is_watched());
    assert_eq!(second.take(), [(sq_doorbell_offset(1, 0), 1)]);
    // When the I/O thread ends, it drops its source.
    drop((pool, controller));
}

#[test]
fn the_source_is_dropped_with_its_io_thread() {
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let (host, _queue) = attached(&pool, &mut turns);
    let (wire, source) = DoorbellChannel::new();
    host.controller.add_doorbell_source(0, source);
    while turns.turn() {}
    drop(turns);
    assert!(!wire.is_watched());
}

#[test]
fn a_doorbell_write_returns_the_woken_io_thread() {
    let controller =
        Controller::new(config(&["null:1GiB"]), pool(Polling::Never), Carrier::default()).unwrap();
    let mut host = Host::attach(controller);
    host.enable();
    let mut queue = host.create(1, 8, false);
    let offset = sq_doorbell_offset(1, 0);
    host.until("the worker sleeps", || host.controller.write_doorbell(offset, 0) == Some(0));
    // Doorbells of the admin queue and of a queue that does not exist wake no I/O thread.
    assert!(host.run(&mut queue, Sqe::flush(1, 0)).0.is_success());
    assert_eq!(host.controller.write_doorbell(sq_doorbell_offset(0, 0), host.admin.tail), None);
    assert_eq!(host.controller.write_doorbell(sq_doorbell_offset(2, 0), 0), None);
}
