//! Fused Compare and Write.

use crate::{common, held};
use common::{Host, Queue};
use held::Held;
use shadowbell_controller::{
    Carrier, Config, Controller, NamespaceConfig, Polling, Pool, PoolOptions,
};
use shadowbell_disk::Op;
use shadowbell_spec::admin::Abort;
use shadowbell_spec::identify::IdentifyController;
use shadowbell_spec::{Sqe, Status};
use shadowbell_testing::wait;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::FromBytes;

const ADAPTIVE: Polling = Polling::Adaptive(Duration::from_micros(50));
const FIRST: u8 = 0b01;
const SECOND: u8 = 0b10;

fn compare(slba: u64, cid: u16) -> Sqe {
    let read = Sqe::read(1, slba, 0, cid);
    Sqe { opcode: 0x05, flags: FIRST, ..read }
}

fn write(slba: u64, cid: u16) -> Sqe {
    Sqe { flags: SECOND, ..Sqe::write(1, slba, 0, cid) }
}

/// Fills a block at `at` in the host's memory with zeroes, and writes the number at its start.
fn block(host: &Host, at: u64, value: u64) -> u64 {
    host.poke(at, &[0; 512]);
    host.poke(at, &value.to_le_bytes());
    at
}

/// Stores both commands in the queue, then rings its doorbell once.
fn submit_both(host: &mut Host, queue: &mut Queue, first: &Sqe, second: &Sqe) {
    let old = queue.tail;
    host.put(queue, first);
    host.put(queue, second);
    host.ring(queue, old);
}

/// Waits for commands 1 and 2, and returns their statuses.
fn wait_statuses(host: &mut Host, queue: &mut Queue) -> [Status; 2] {
    let mut both = [host.wait(queue), host.wait(queue)];
    both.sort_by_key(|done| done.0);
    assert_eq!(both.map(|done| done.0), [1, 2]);
    both.map(|done| done.1)
}

fn run(host: &mut Host, queue: &mut Queue, first: &Sqe, second: &Sqe) -> [Status; 2] {
    submit_both(host, queue, first, second);
    wait_statuses(host, queue)
}

fn read(host: &mut Host, queue: &mut Queue, slba: u64, at: u64) -> u64 {
    let (status, _) = host.run(queue, Sqe::read(1, slba, 0, 0).with_prps(at, 0));
    assert_eq!(status, Status::SUCCESS);
    u64::from_le_bytes(host.peek(at, 8).try_into().unwrap())
}

fn host_with_held_disk(held: &Held) -> Host {
    let disk = Arc::new(held.clone());
    let namespaces = vec![NamespaceConfig { disk, uuid: [7; 16] }];
    Host::with(Config { namespaces, ..Config::default() }, ADAPTIVE)
}

#[test]
fn a_fused_write_follows_only_an_equal_compare() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    for disk in ["mem:1MiB", file.path().to_str().unwrap()] {
        let mut host = Host::new(&[disk], ADAPTIVE);
        let page = host.page(Sqe { cdw10: 1, ..Sqe::new(0x06, 0, 0) }).unwrap();
        let identify = IdentifyController::read_from_bytes(&page).unwrap();
        assert_eq!((identify.fuses, identify.acwu), (1, 0));
        let mut queue = host.create(1, 8, true);
        let (a, b, c) = (host.alloc(4096), host.alloc(4096), host.alloc(4096));
        // There are more rounds than queue entries, so a pair also wraps around the end of the
        // queue.
        for round in 0..20 {
            let (old, new) = (block(&host, a, round), block(&host, b, round + 1));
            let first = compare(9, 1).with_prps(old, 0);
            let second = write(9, 2).with_prps(new, 0);
            assert_eq!(run(&mut host, &mut queue, &first, &second), [Status::SUCCESS; 2]);
            assert_eq!(read(&mut host, &mut queue, 9, c), round + 1);
            let [compared, written] = run(&mut host, &mut queue, &first, &second);
            assert_eq!(compared.code(), Status::COMPARE_FAILURE);
            assert_eq!(written.code(), Status::FUSED_FAILED);
            assert_eq!(read(&mut host, &mut queue, 9, c), round + 1);
        }
    }
}

/// Test with a disk that has other users. Another user may write between the Compare and the Write
/// of a fused operation, so the disk gets an atomic compare-and-write request.
#[test]
fn an_atomic_disk_gets_one_compare_and_write_request() {
    let mut held = Held::new(64);
    (held.one_step, held.volatile) = (true, true);
    let mut host = host_with_held_disk(&held);
    let mut queue = host.create(1, 8, true);
    let (a, b) = (host.alloc(8192), host.alloc(4096));
    // The data buffer of the Compare extends over two pages.
    let a = a + 4096 - 8;
    let first = compare(9, 1).with_prps(block(&host, a, 0), a + 8);
    let second = write(9, 2).with_prps(block(&host, b, 1), 0);
    let ops = |from: usize| held.seen()[from..].iter().map(|seen| seen.op).collect::<Vec<_>>();
    let both = Op::CompareAndWrite { fua: false };
    assert_eq!(run(&mut host, &mut queue, &first, &second), [Status::SUCCESS; 2]);
    assert_eq!((ops(0), held.marks(9, 1)), (vec![Op::Compare, both], vec![1]));
    // If the Compare finds different data, the disk gets no compare-and-write request after it.
    let failed = [Status::COMPARE_FAILURE, Status::FUSED_FAILED];
    assert_eq!(run(&mut host, &mut queue, &first, &second).map(Status::code), failed);
    assert_eq!((ops(2), held.marks(9, 1)), (vec![Op::Compare], vec![1]));
    // Another user writes after the Compare. The atomic request finds this, and does not overwrite
    // the new data.
    held.instruct(|instructions| instructions.after_compare = Some((9, 77)));
    let first = first.with_prps(block(&host, a, 1), a + 8);
    assert_eq!(run(&mut host, &mut queue, &first, &second).map(Status::code), failed);
    assert_eq!((ops(3), held.marks(9, 1)), (vec![Op::Compare, both], vec![77]));
    // A compare-and-write request with FUA fails because the disk is full. Whether the data were
    // equal remains unknown.
    held.instruct(|instructions| instructions.fail_both = true);
    let first = first.with_prps(block(&host, a, 77), a + 8);
    let forced = Sqe { cdw12: 1 << 30, ..second };
    let full = [Status::FUSED_FAILED, Status::CAPACITY_EXCEEDED];
    assert_eq!(run(&mut host, &mut queue, &first, &forced).map(Status::code), full);
    let both = Op::CompareAndWrite { fua: true };
    assert_eq!((ops(5), held.marks(9, 1)), (vec![Op::Compare, both], vec![77]));
    // The data pointer of the Write is invalid. The controller detects this before it submits the
    // compare-and-write request.
    let nowhere = second.with_prps(8 << 30, 0);
    let faulty = [Status::FUSED_FAILED, Status::DATA_XFER_ERROR];
    assert_eq!(run(&mut host, &mut queue, &first, &nowhere).map(Status::code), faulty);
    assert_eq!(ops(7), [Op::Compare]);
    let stats = host.controller.stats().io;
    // A successful fused operation counts as one read and one write.
    assert_eq!((stats.reads, stats.writes, stats.errors), (4, 1, 8));
}

/// An abort or a reset while the disk executes a compare-and-write request: the request still ends,
/// and later commands succeed.
#[test]
fn an_abort_or_a_reset_during_compare_and_write() {
    let mut held = Held::new(64);
    held.one_step = true;
    let mut host = host_with_held_disk(&held);
    let mut queue = host.create(1, 8, false);
    let (a, b) = (host.alloc(4096), host.alloc(4096));
    let first = compare(9, 1).with_prps(block(&host, a, 0), 0);
    let second = write(9, 2).with_prps(block(&host, b, 1), 0);
    for cid in [1, 2] {
        held.set(9, 0);
        held.instruct(|instructions| (instructions.hold_both, instructions.cancelled) = (true, 0));
        let seen = held.seen().len();
        submit_both(&mut host, &mut queue, &first, &second);
        host.until("the disk is asked", || held.seen().len() == seen + 2);
        let mut admin = std::mem::replace(&mut host.admin, Queue::none());
        host.submit(&mut admin, &Sqe::abort(Abort { sqid: 1, cid }, 99));
        wait::short_pause();
        held.instruct(|instructions| instructions.hold_both = false);
        // The Abort fails, because the disk already executes the request.
        let (_, status, dw0) = host.wait(&mut admin);
        assert_eq!((status, dw0), (Status::SUCCESS, 1));
        host.admin = admin;
        assert_eq!(wait_statuses(&mut host, &mut queue), [Status::SUCCESS; 2]);
        assert_eq!(held.marks(9, 1), [1]);
    }
    held.set(9, 0);
    held.instruct(|instructions| instructions.hold_both = true);
    let seen = held.seen().len();
    submit_both(&mut host, &mut queue, &first, &second);
    host.until("the disk is asked", || held.seen().len() == seen + 2);
    let cc = host.read32(0x14);
    host.write32(0x14, cc & !1);
    held.instruct(|instructions| instructions.hold_both = false);
    host.until("the reset", || !host.csts().rdy());
    assert_eq!(held.marks(9, 1), [1]);
    host.enable();
    let mut queue = host.create(1, 8, false);
    let failed = [Status::COMPARE_FAILURE, Status::FUSED_FAILED];
    assert_eq!(run(&mut host, &mut queue, &first, &second).map(Status::code), failed);
}

#[test]
fn a_half_without_the_other_is_aborted() {
    let mut host = Host::new(&["mem:1MiB"], ADAPTIVE);
    let mut queue = host.create(1, 8, false);
    let at = host.alloc(4096);
    let (first, second) = (compare(0, 1).with_prps(at, 0), write(0, 2).with_prps(at, 0));
    // Each of the two commands fails if it is submitted alone. The Compare does not wait for a
    // Write that a later doorbell write could announce.
    for sqe in [first, second] {
        let (status, _) = host.run(&mut queue, sqe);
        assert_eq!(status.code(), Status::FUSED_MISSING);
    }
    // The pair fails if another command is between the two, or if their order is wrong.
    let between = Sqe { flags: 0, ..Sqe::write(1, 5, 0, 2) }.with_prps(at, 0);
    let [one, other] = run(&mut host, &mut queue, &first, &between);
    assert_eq!((one.code(), other), (Status::FUSED_MISSING, Status::SUCCESS));
    let both = run(&mut host, &mut queue, &second.with_cid(1), &first.with_cid(2));
    assert_eq!(both.map(Status::code), [Status::FUSED_MISSING; 2]);
    let both = run(&mut host, &mut queue, &first, &first.with_cid(2));
    assert_eq!(both.map(Status::code), [Status::FUSED_MISSING; 2]);
    // FUSE 11b is reserved.
    let (status, _) = host.run(&mut queue, Sqe { flags: 0b11, ..first });
    assert_eq!(status.code(), Status::INVALID_FIELD);
    assert_eq!(read(&mut host, &mut queue, 0, at), 0);
    // All errors are counted. No command remains in flight, so the queue can be deleted.
    assert_eq!(host.controller.stats().io.errors, 8);
    host.must(Sqe::delete_io_sq(1, 0));
}

#[test]
fn fused_operations_of_more_than_one_block_are_refused() {
    let mut host = Host::new(&["mem:1MiB", "mem:1MiB"], ADAPTIVE);
    let mut queue = host.create(1, 16, false);
    let at = host.alloc(4096);
    let (first, second) = (compare(4, 1).with_prps(at, 0), write(4, 2).with_prps(at, 0));
    let invalid = [Status::INVALID_FIELD; 2];
    let mut codes =
        |first: Sqe, second: Sqe| run(&mut host, &mut queue, &first, &second).map(Status::code);
    assert_eq!(codes(Sqe { opcode: 2, ..first }, second), invalid);
    assert_eq!(codes(Sqe { opcode: 1, ..first }, Sqe { opcode: 5, ..second }), invalid);
    assert_eq!(codes(first, Sqe { opcode: 8, ..second }), invalid);
    assert_eq!(codes(first, Sqe { cdw10: 5, ..second }), invalid);
    assert_eq!(codes(first, Sqe { nsid: 2, ..second }), invalid);
    let two = |sqe: Sqe| Sqe { cdw12: 1, ..sqe };
    let exceeded = [Status::ATOMIC_WRITE_UNIT_EXCEEDED, Status::FUSED_FAILED];
    assert_eq!(codes(two(first), two(second)), exceeded);
    // An error of the Compare command is its own status.
    let far = |sqe: Sqe| Sqe { cdw10: 4096, ..sqe };
    assert_eq!(codes(far(first), far(second)), [Status::LBA_OUT_OF_RANGE, Status::FUSED_FAILED]);
    // An error of the Write command is its own status.
    let nowhere = second.with_prps(8 << 30, 0);
    assert_eq!(codes(first, nowhere), [Status::SUCCESS, Status::DATA_XFER_ERROR]);
}

#[test]
fn a_fused_pair_waits_for_two_completion_slots() {
    let mut host = Host::new(&["mem:1MiB"], ADAPTIVE);
    let mut queue = host.create(1, 4, false);
    let at = host.alloc(4096);
    let (first, second) = (compare(0, 1).with_prps(at, 0), write(0, 2).with_prps(at, 0));
    // The completion queue has room for three completions. Two of them are posted, and the host
    // does not consume them.
    for _ in 0..2 {
        host.submit(&mut queue, &Sqe::read(1, 0, 0, 7).with_prps(at, 0));
    }
    let posted = |host: &Host| host.controller.stats().completion_queues[1].completions;
    host.until("two completions", || posted(&host) == 2);
    // The I/O thread reads both commands, but does not execute them, because there is no room for
    // their two completions.
    submit_both(&mut host, &mut queue, &first, &second);
    wait::short_pause();
    assert_eq!(posted(&host), 2);
    let _ = (host.wait(&mut queue), host.wait(&mut queue));
    assert_eq!(wait_statuses(&mut host, &mut queue), [Status::SUCCESS; 2]);
    // A completion queue of two entries never has room for two completions.
    let mut small = host.create(2, 2, false);
    let (status, _) = host.run(&mut small, first);
    assert_eq!(status.code(), Status::FUSED_MISSING);
}

/// Four queues on four I/O threads increment the same block by fused operations, while plain
/// writes go to other blocks.
#[test]
fn fused_operations_are_atomic_across_queues_and_io_threads() {
    const ROUNDS: u64 = 40;
    let options = PoolOptions { workers: 4, polling: ADAPTIVE, pin: Vec::new() };
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    for disk in ["mem:1MiB", file.path().to_str().unwrap()] {
        let pool = Pool::start(&options).unwrap();
        let controller =
            Controller::new(common::config(&[disk]), pool, Carrier::default()).unwrap();
        let mut host = Host::attach(controller);
        host.enable();
        let mut queues: Vec<Queue> = (1..=4).map(|qid| host.create(qid, 8, false)).collect();
        let at: Vec<u64> = (0..12).map(|_| host.alloc(4096)).collect();
        let mut added = [0; 4];
        let mut guess = [0; 4];
        while added.iter().sum::<u64>() < ROUNDS {
            for (n, queue) in queues.iter_mut().enumerate() {
                let (old, new) =
                    (block(&host, at[n], guess[n]), block(&host, at[4 + n], guess[n] + 1));
                let first = compare(3, 1).with_prps(old, 0);
                let second = write(3, 2).with_prps(new, 0);
                submit_both(&mut host, queue, &first, &second);
                let beside = Sqe::write(1, 4 + n as u64, 0, 3).with_prps(at[8 + n], 0);
                host.submit(queue, &beside);
            }
            for (n, queue) in queues.iter_mut().enumerate() {
                let mut done = [host.wait(queue), host.wait(queue), host.wait(queue)];
                done.sort_by_key(|done| done.0);
                assert_eq!(done[2].1, Status::SUCCESS);
                match (done[0].1.code(), done[1].1.code()) {
                    (Status::SUCCESS, Status::SUCCESS) => added[n] += 1,
                    (Status::COMPARE_FAILURE, Status::FUSED_FAILED) => {}
                    other => panic!("{other:?}"),
                }
            }
            let now = read(&mut host, &mut queues[0], 3, at[8]);
            // The counter in the block equals the number of successful fused operations.
            assert_eq!(now, added.iter().sum::<u64>());
            guess = [now; 4];
        }
        // In each round exactly one operation succeeds.
        assert_eq!(added.iter().sum::<u64>(), ROUNDS);
    }
}

/// A fused operation starts only after earlier writes in flight have ended. A write that is
/// submitted during the fused operation starts only after it.
#[test]
fn no_other_command_is_in_flight_during_a_fused_pair() {
    let held = Held::new(64);
    held.mark();
    let mut host = host_with_held_disk(&held);
    let mut queue = host.create(1, 16, false);
    let mut other = host.create(2, 16, false);
    let (a, b) = (host.alloc(4096), host.alloc(4096));
    held.instruct(|instructions| instructions.hold = true);
    host.submit(&mut other, &Sqe::write(1, 30, 0, 9).with_prps(a, 0));
    host.until("the write", || held.seen().len() == 1);
    let expected = host.alloc(4096);
    for word in 0..64 {
        host.poke(expected + word * 8, &7u64.to_le_bytes());
    }
    let (first, second) = (compare(7, 1).with_prps(expected, 0), write(7, 2).with_prps(b, 0));
    submit_both(&mut host, &mut queue, &first, &second);
    wait::short_pause();
    assert_eq!(held.seen().len(), 1, "the write has not ended");
    held.instruct(|instructions| instructions.hold = false);
    assert_eq!(wait_statuses(&mut host, &mut queue), [Status::SUCCESS; 2]);
    assert_eq!(host.wait(&mut other).0, 9);
    // The Compare is held at the disk while the host submits a write.
    block(&host, expected, 0);
    held.instruct(|instructions| instructions.hold = true);
    submit_both(&mut host, &mut queue, &first, &second);
    host.until("the Compare", || held.seen().len() == 4);
    host.submit(&mut other, &Sqe::write(1, 31, 0, 8).with_prps(a, 0));
    wait::short_pause();
    let is_compare = held.seen().last().is_some_and(|request| request.op == Op::Compare);
    assert!(is_compare && held.seen().len() == 4);
    held.instruct(|instructions| instructions.hold = false);
    assert_eq!(wait_statuses(&mut host, &mut queue), [Status::SUCCESS; 2]);
    assert_eq!(host.wait(&mut other).0, 8);
}

#[test]
fn an_abort_a_deletion_or_a_reset_ends_both_halves() {
    let held = Held::new(64);
    let mut host = host_with_held_disk(&held);
    let mut queue = host.create(1, 16, false);
    let mut other = host.create(2, 16, false);
    let at = host.alloc(4096);
    let (first, second) = (compare(0, 1).with_prps(at, 0), write(0, 2).with_prps(at, 0));
    held.instruct(|instructions| instructions.hold = true);
    let wait_behind_a_read = |host: &mut Host, queue: &mut Queue, other: &mut Queue, seen| {
        host.submit(other, &Sqe::read(1, 0, 0, 9).with_prps(at, 0));
        host.until("the read", || held.seen().len() == seen);
        let fetched = |host: &Host| {
            let queues = host.controller.stats().submission_queues;
            queues.iter().find(|queue| queue.qid == 1).expect("the queue").commands
        };
        let before = fetched(host);
        submit_both(host, queue, &first, &second);
        // Both commands are fetched, and wait for the end of the read.
        host.until("both to be fetched", || fetched(host) == before + 2);
    };
    for (cid, expected, seen) in [
        (1, [Status::ABORT_REQUESTED, Status::FUSED_FAILED], 1),
        (2, [Status::FUSED_FAILED, Status::ABORT_REQUESTED], 2),
    ] {
        held.instruct(|instructions| instructions.hold = true);
        wait_behind_a_read(&mut host, &mut queue, &mut other, seen);
        assert_eq!(host.must(Sqe::abort(Abort { sqid: 1, cid }, 0)), 0, "the pair was aborted");
        assert_eq!(wait_statuses(&mut host, &mut queue).map(Status::code), expected);
        held.instruct(|instructions| instructions.hold = false);
        assert_eq!(host.wait(&mut other).0, 9);
    }
    held.instruct(|instructions| instructions.hold = true);
    wait_behind_a_read(&mut host, &mut queue, &mut other, 3);
    host.must(Sqe::delete_io_sq(1, 0));
    let both = wait_statuses(&mut host, &mut queue).map(Status::code);
    assert!(both.contains(&Status::ABORTED_SQ_DELETION), "{both:?}");
    held.instruct(|instructions| instructions.hold = false);
    assert_eq!(host.wait(&mut other).0, 9);
    held.instruct(|instructions| instructions.hold = true);
    host.must(Sqe::delete_io_cq(1, 0));
    let mut queue = host.create(1, 16, false);
    wait_behind_a_read(&mut host, &mut queue, &mut other, 4);
    let cc = host.read32(0x14);
    host.write32(0x14, cc & !1);
    held.instruct(|instructions| instructions.hold = false);
    host.until("the reset", || !host.csts().rdy());
    host.enable();
    let mut queue = host.create(1, 16, false);
    assert_eq!(run(&mut host, &mut queue, &first, &second), [Status::SUCCESS; 2]);
}

/// A reset that comes after the Compare, while the disk executes the Write: neither command gets a
/// completion.
#[test]
fn a_reset_between_fused_halves_does_not_wait() {
    let (mut host, gate) = common::slow_host(ADAPTIVE);
    let at = host.alloc(4096);
    let (first, second) = (compare(0, 1).with_prps(at, 0), write(0, 2).with_prps(at, 0));
    for _ in 0..2 {
        let mut queue = host.create(1, 16, false);
        submit_both(&mut host, &mut queue, &first, &second);
        host.until("the Compare", || gate.waiting() == 1);
        let compare = gate.pending.lock().unwrap()[0];
        gate.end(Ok(()));
        let is_write = |tags: &Vec<u32>| tags.first().is_some_and(|tag| *tag != compare);
        host.until("the Write", || is_write(&gate.pending.lock().unwrap()));
        let cc = host.read32(0x14);
        host.write32(0x14, cc & !1);
        gate.end(Ok(()));
        host.until("the reset", || !host.csts().rdy());
        assert!(host.peek(queue.cq, 256).iter().all(|byte| *byte == 0));
        host.enable();
    }
    // Commands after the reset succeed.
    let mut queue = host.create(1, 16, false);
    gate.end(Ok(()));
    let (status, _) = host.run(&mut queue, Sqe::read(1, 0, 0, 0).with_prps(at, 0));
    assert_eq!(status, Status::SUCCESS);
}

/// Quiesce, a move to another I/O thread and resume, with fused operations in flight.
#[test]
fn quiesce_and_move_do_not_split_fused_operations() {
    let options = PoolOptions { workers: 2, polling: ADAPTIVE, pin: Vec::new() };
    let pool = Pool::start(&options).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let config = common::config(&[file.path().to_str().unwrap()]);
    let controller = Controller::new(config, pool, Carrier::default()).unwrap();
    let mut host = Host::attach(controller);
    host.enable();
    let mut queues = [host.create(1, 32, false), host.create(2, 32, false)];
    let (at, new) = (host.alloc(4096), host.alloc(4096));
    for round in 0..30 {
        for queue in &mut queues {
            let (first, second) = (compare(0, 1).with_prps(at, 0), write(0, 2).with_prps(new, 0));
            submit_both(&mut host, queue, &first, &second);
        }
        if round == 17 {
            host.controller.isolate().unwrap();
            for queue in &mut queues {
                assert_eq!(wait_statuses(&mut host, queue), [Status::SUCCESS; 2]);
            }
            continue;
        }
        let (sent, rested) = std::sync::mpsc::channel();
        host.controller.freeze(move || sent.send(()).unwrap_or_default());
        if round % 3 == 0 {
            rested.recv_timeout(common::LIMIT).unwrap();
        }
        host.controller.resume();
        for queue in &mut queues {
            assert_eq!(wait_statuses(&mut host, queue), [Status::SUCCESS; 2]);
        }
    }
}
