//! Floods of admin commands: messages and work of the I/O thread, and memory use of the controller.

use crate::{common, held};
use common::{Host, Queue, config, create_cq, create_sq, run_beside};
use held::Held;
use shadowbell_controller::{Carrier, Config, Controller, NamespaceConfig, Polling, Pool, Turns};
use shadowbell_spec::admin::DoorbellBufferConfig;
use shadowbell_spec::regs::{self, Cc};
use shadowbell_spec::{Sqe, Status};
use std::sync::Arc;

const IDENTIFY: u8 = 0x06;
const GET_LOG_PAGE: u8 = 0x02;

/// Host with an I/O queue pair. The I/O thread's work is done only when the test calls
/// `turns.turn()`.
fn attached(config: Config) -> (Host, Queue, Turns) {
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let controller = Controller::new(config, pool, Carrier::default()).unwrap();
    let (host, queue) = run_beside(&mut turns, move || {
        let mut host = Host::attach(controller);
        host.enable();
        let queue = host.create(1, 16, false);
        (host, queue)
    });
    (host, queue, turns)
}

fn identify(at: u64) -> Sqe {
    Sqe { cdw10: 1, ..Sqe::new(IDENTIFY, 0, 0) }.with_prps(at, 0)
}

fn smart(at: u64) -> Sqe {
    Sqe { cdw10: 127 << 16 | 2, ..Sqe::new(GET_LOG_PAGE, 0, 0) }.with_prps(at, 0)
}

/// Identify and Get Log Page are executed without a message to an I/O thread.
#[test]
fn admin_commands_need_no_turn_of_an_io_thread() {
    let (mut host, mut queue, mut turns) = attached(config(&["mem:1MiB"]));
    let page = host.alloc(4096);
    let read = Sqe::read(1, 0, 7, 77).with_prps(page, 0);
    for n in 0..3200u16 {
        let mut admin = std::mem::replace(&mut host.admin, Queue::none());
        let old = admin.tail;
        for cid in 0..31 {
            let sqe = if cid % 2 == 0 { identify(page) } else { smart(page) };
            host.put(&mut admin, &sqe.with_cid(cid));
        }
        host.ring(&admin, old);
        // The commands complete before the test calls `turns.turn()`, so without the I/O thread.
        for cid in 0..31 {
            assert_eq!(host.reap(&mut admin), Some((cid, Status::SUCCESS, 0)), "round {n}");
        }
        host.admin = admin;
        if n % 800 == 0 {
            assert!(!turns.turn(), "the worker has a message");
            host.submit(&mut queue, &read);
            assert!(turns.turn());
            assert_eq!(host.reap(&mut queue), Some((77, Status::SUCCESS, 0)));
        }
    }
    assert!(!turns.turn(), "the worker has a message");
    // A read that has completed is in the SMART log at once.
    host.must(smart(page));
    assert_eq!(host.peek(page + 64, 2), [4, 0]);
}

/// The I/O thread's mailbox contains at most one message, whatever the number of commands.
#[test]
fn doorbell_buffer_configs_are_executed_one_by_one() {
    let (mut host, _queue, mut turns) = attached(config(&["mem:1MiB"]));
    let (shadow, event_idx) = (host.alloc(4096), host.alloc(4096));
    let page = host.alloc(4096);
    let configure = Sqe::dbbuf_config(DoorbellBufferConfig { shadow, event_idx }, 0);
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    let old = admin.tail;
    for cid in 0..30 {
        host.put(&mut admin, &configure.with_cid(cid));
    }
    host.put(&mut admin, &identify(page).with_cid(30));
    host.ring(&admin, old);
    host.shadow = Some((shadow, event_idx));
    for cid in 0..30 {
        // Before the I/O thread's turn, no Doorbell Buffer Config has completed. After the last
        // Doorbell Buffer Config (29) has started, Identify (30) is executed, and completes before
        // it.
        assert_eq!(host.reap(&mut admin).map(|done| done.0), (cid == 29).then_some(30));
        // The I/O thread has one message. When it has handled this message, the next message is
        // sent.
        assert!(turns.turn());
        assert_eq!(host.reap(&mut admin), Some((cid, Status::SUCCESS, 0)));
    }
    assert!(!turns.turn());
}

/// A command in flight has a reserved entry in the completion queue.
#[test]
fn no_more_is_fetched_than_can_be_completed() {
    let (mut host, _queue, mut turns) = attached(config(&["mem:1MiB"]));
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    let at = host.alloc(1 << 20);
    let stats = |host: &Host, turns: &mut Turns| {
        let controller = host.controller.clone();
        let stats = run_beside(turns, move || controller.stats());
        (stats.submission_queues[0].commands, stats.completion_queues[0].completions)
    };
    let before = stats(&host, &mut turns);
    assert_eq!(before.0, before.1);
    let mut cid = 0;
    let mut fill = |host: &mut Host, admin: &mut Queue| {
        let old = admin.tail;
        for _ in 0..31 {
            host.put(admin, &identify(at).with_cid(cid));
            cid += 1;
        }
        host.ring(admin, old);
    };
    // The host submits Asynchronous Event Requests first: while they wait for events, no entry is
    // reserved for them.
    for event in 0..4 {
        let sqe = Sqe::new(0x0c, 1000 + event, 0);
        host.submit(&mut admin, &sqe);
    }
    assert_eq!(stats(&host, &mut turns), (before.0 + 4, before.1));
    // The host submits twice as many commands as there are entries, and consumes no completion.
    fill(&mut host, &mut admin);
    fill(&mut host, &mut admin);
    assert_eq!(stats(&host, &mut turns), (before.0 + 4 + 31, before.1 + 31));
    // The completion of an event request waits for a free entry.
    host.controller.write_doorbell(regs::DOORBELLS + 8 * 9, 1);
    assert_eq!(stats(&host, &mut turns), (before.0 + 4 + 31, before.1 + 31));
    let mut done: Vec<u16> = Vec::new();
    while let Some((cid, status, _)) = host.reap(&mut admin) {
        assert!(status.is_success());
        done.push(cid);
    }
    let events = done.iter().filter(|cid| **cid >= 1000).count();
    assert_eq!((events, done.len()), (1, 63));
    done.retain(|cid| *cid < 1000);
    assert_eq!(done, (0..62).collect::<Vec<_>>());
    // The queue works as before, for any number of commands.
    host.admin = admin;
    for _ in 0..100 {
        host.must(identify(at));
    }
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    host.submit(&mut admin, &create_cq(2, 15, None, at).with_cid(1));
    host.submit(&mut admin, &create_sq(2, 15, 2, at + 4096).with_cid(2));
    assert_eq!(
        host.reap(&mut admin).map(|done| (done.0, done.1.code())),
        Some((2, Status::CQ_INVALID))
    );
    assert!(turns.turn());
    assert_eq!(host.reap(&mut admin), Some((1, Status::SUCCESS, 0)));
}

/// Repeated writes of CC.SHN do not accumulate messages and flushes.
#[test]
fn repeated_shutdowns_have_one_flush_in_flight() {
    let disk = Held::new(8);
    let namespaces = vec![NamespaceConfig { disk: Arc::new(disk.clone()), uuid: [7; 16] }];
    let (host, _queue, mut turns) = attached(Config { namespaces, ..Config::default() });
    disk.instruct(|instructions| instructions.hold = true);
    let cc = Cc::from_bits(host.read32(regs::CC));
    // The first shutdowns begin while commands in flight end, the others during the flush.
    for _ in 0..2 {
        for _ in 0..5000 {
            host.write32(regs::CC, cc.with_shn(regs::SHN_NORMAL).into_bits());
            host.write32(regs::CC, cc.with_shn(regs::SHN_NONE).into_bits());
        }
        while turns.turn() && disk.seen().len() < 10 {}
        assert_eq!(disk.seen().len(), 1, "one flush is in flight");
        assert_eq!(host.csts().shst(), regs::SHST_OCCURRING);
    }
    disk.instruct(|instructions| instructions.hold = false);
    let mut left = 1000;
    while host.csts().shst() != regs::SHST_COMPLETE {
        turns.turn();
        left -= 1;
        assert_ne!(left, 0, "the flush does not end");
    }
    // All shutdowns during the first flush together cause one second flush.
    assert_eq!(disk.seen().len(), 2);
}

/// The error count also includes errors whose log entries were overwritten by newer ones.
#[test]
fn every_error_is_counted() {
    let mut host = Host::new(&["mem:1MiB"], Polling::Never);
    let mut queue = host.create(1, 64, false);
    let (page, log) = (host.alloc(4096), host.alloc(4096));
    let beyond = Sqe::read(1, 1 << 40, 7, 0).with_prps(page, 0);
    let mut cid = 0u16;
    for _ in 0..200 {
        let old = queue.tail;
        for _ in 0..60 {
            host.put(&mut queue, &beyond.with_cid(cid));
            cid = cid.wrapping_add(1);
        }
        host.ring(&queue, old);
        for _ in 0..60 {
            assert_eq!(host.wait(&mut queue).1.code(), Status::LBA_OUT_OF_RANGE);
        }
    }
    host.must(smart(page));
    assert_eq!(host.peek(page + 176, 8), 12_000u64.to_le_bytes());
    host.must(Sqe { cdw10: 1023 << 16 | 1, ..Sqe::new(GET_LOG_PAGE, 0, 0) }.with_prps(log, 0));
    let newest = host.peek(log, 64);
    assert_eq!(newest[..8], 12_000u64.to_le_bytes());
    assert_eq!(newest[10..12], (cid - 1).to_le_bytes());
}
