//! Exclusive commands, and crashes of the process during their execution.

use crate::SERIAL;
use crate::host::Host;
use crate::memory;
use crate::process::{BASE, BLOCKS, DATA, Instructions};
use shadowbell_disk::Disk;
use shadowbell_spec::status::Status;
use shadowbell_spec::{Cqe, Sqe};
use shadowbell_state::AbortPoint;
use shadowbell_testing::wait;
use std::sync::Arc;
use std::time::Instant;

/// Crash points: a step of the process, and the occurrence of this step at which the process dies.
const STEPS: &[(AbortPoint, u32)] = &[
    (AbortPoint::Fetched, 2),
    (AbortPoint::Recorded, 1),
    (AbortPoint::SqStored, 1),
    // The n-th end of an exclusive command: of the Compare, of the Write, of the next command.
    (AbortPoint::ExclusiveEnded, 1),
    (AbortPoint::ExclusiveEnded, 2),
    (AbortPoint::ExclusiveEnded, 3),
    // The n-th decision that is written to the journal: the Write starts, the Compare ends, the
    // Write ends.
    (AbortPoint::Decided, 1),
    (AbortPoint::Decided, 2),
    (AbortPoint::Decided, 3),
    (AbortPoint::Decided, 5),
    (AbortPoint::Staged, 1),
    (AbortPoint::Posted, 1),
    (AbortPoint::Freed, 1),
];

/// Waits for `wanted` completions, across crashes. Returns them.
fn completions(host: &mut Host, wanted: usize) -> Vec<Cqe> {
    let (began, mut all) = (Instant::now(), Vec::new());
    while all.len() < wanted {
        assert!(began.elapsed() < host.timeout, "{} of {wanted} have ended", all.len());
        if host.has_died() {
            println!("it has died, with {} of {wanted} ended", all.len());
            host.instructions.abort_at = None;
            host.kill();
        }
        for at in 0..host.queues.len() {
            all.extend(host.reap(Some(at)));
        }
    }
    all
}

/// Waits until the process has died at its crash point.
fn wait_for_crash(host: &mut Host) {
    let began = Instant::now();
    while host.instructions.abort_at.is_some() {
        assert!(began.elapsed() < host.timeout, "the crash point is not reached");
        if host.has_died() {
            host.instructions.abort_at = None;
            host.kill();
        }
        wait::pause();
    }
}

/// Submits both commands of a fused operation with one doorbell write. Returns their identifiers.
fn submit_both(host: &mut Host, at: usize, first: Sqe, second: Sqe) -> (u16, u16) {
    let old = host.queues[at].tail;
    let mut put = |sqe: Sqe| {
        host.next_cid += 1;
        let (cid, queue) = (host.next_cid, &mut host.queues[at]);
        let place = queue.sq + u64::from(queue.tail) * 64;
        host.memory.write(place as usize, &Sqe { cid, ..sqe }).unwrap();
        queue.tail = (queue.tail + 1) % queue.entries;
        cid
    };
    let cids = (put(first), put(second));
    let (qid, new) = (host.queues[at].qid, host.queues[at].tail);
    host.doorbell(u64::from(qid) * 2, old, new);
    cids
}

/// Reads the counter in block 0.
fn counter(host: &mut Host) -> u64 {
    let page = DATA + 64 * 1024;
    host.submit(Some(0), Sqe::read(1, 0, 0, 0).with_prps(BASE + page, 0));
    assert!(completions(host, 1)[0].status().is_success());
    host.memory.read(page as usize).unwrap()
}

/// Both queues increment the counter in block 0 by fused operations, across crashes.
fn count(disk: Result<String, Arc<dyn Disk>>, mapped: bool, instructions: Instructions) {
    let _alone = SERIAL.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut host = Host::with_instructions(disk, mapped, false, instructions);
    host.begin();
    host.until_taken();
    let mut added = 0;
    // Each crash point is tested twice, so that each of the two queues once submits first.
    for (step, first) in STEPS.iter().flat_map(|step| [(step, 0), (step, 1)]) {
        println!("{step:?} {first}");
        host.instructions.abort_at = Some(*step);
        host.kill();
        host.until_taken();
        let now = counter(&mut host);
        assert_eq!(now, added, "before {step:?}");
        let mut pairs = Vec::new();
        for at in [first, 1 - first] {
            let (old, new) = (DATA + at * 4096, DATA + (2 + at) * 4096);
            for (page, value) in [(old, now), (new, now + 1)] {
                host.poke(page, &[0; 512]);
                host.poke(page, &value.to_le_bytes());
            }
            let compare = Sqe { opcode: 5, flags: 1, ..Sqe::read(1, 0, 0, 0) };
            let write = Sqe { flags: 2, ..Sqe::write(1, 0, 0, 0) };
            pairs.push(submit_both(
                &mut host,
                at as usize,
                compare.with_prps(BASE + old, 0),
                write.with_prps(BASE + new, 0),
            ));
        }
        let all = completions(&mut host, 4);
        wait_for_crash(&mut host);
        let status = |cid| {
            let mut of = all.iter().filter(|cqe| cqe.cid == cid);
            let status = of.next().map(|cqe| cqe.status().code());
            assert!(of.next().is_none(), "each ends once");
            status.unwrap()
        };
        let mut succeeded = 0;
        for (first, second) in pairs {
            match (status(first), status(second)) {
                (Status::SUCCESS, Status::SUCCESS) => succeeded += 1,
                (Status::COMPARE_FAILURE, Status::FUSED_FAILED) => {}
                other => panic!("{step:?}: {other:?}"),
            }
        }
        assert_eq!(succeeded, 1, "{step:?}");
        added += succeeded;
        assert_eq!(counter(&mut host), added, "{step:?}");
    }
}

#[test]
fn a_fused_operation_is_atomic_across_crashes() {
    count(memory(), false, Instructions::default());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(BLOCKS * 512).unwrap();
    count(Ok(path.display().to_string()), true, Instructions::default());
}

#[test]
fn atomic_compare_and_write_is_atomic_across_crashes() {
    count(memory(), false, Instructions { one_step: true, ..Instructions::default() });
}

/// Statuses of a fused operation if another user writes to the storage between the crash and the
/// recovery.
#[test]
fn recovery_detects_writes_of_other_users() {
    let _alone = SERIAL.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let disk = memory();
    let blocks = disk.as_ref().unwrap_err().map(512).unwrap();
    let instructions = Instructions { one_step: true, ..Instructions::default() };
    let mut host = Host::with_instructions(disk, false, false, instructions);
    host.begin();
    host.until_taken();
    let failed = (Status::COMPARE_FAILURE, Status::FUSED_FAILED);
    let unknown = (Status::INTERNAL, Status::FUSED_FAILED);
    let success = (Status::SUCCESS, Status::SUCCESS);
    for (step, other, expected, left) in [
        // The disk has not received the request yet.
        ((AbortPoint::ExclusiveEnded, 1), 9, failed, 9),
        ((AbortPoint::ExclusiveEnded, 1), 2, failed, 2),
        ((AbortPoint::ExclusiveEnded, 1), 1, success, 2),
        // The request is in the journal and was executed, but the host has no completion.
        ((AbortPoint::Decided, 1), 1, success, 2),
        ((AbortPoint::Decided, 1), 9, unknown, 9),
        ((AbortPoint::ExclusiveEnded, 2), 2, success, 2),
        ((AbortPoint::ExclusiveEnded, 2), 9, unknown, 9),
        // The journal already contains the results: after the second decision the result of the
        // Write, after the third also the result of the Compare. So recovery does not read the
        // block.
        ((AbortPoint::Decided, 2), 9, success, 9),
        ((AbortPoint::Decided, 3), 9, success, 9),
    ] {
        println!("{step:?} {other}");
        host.instructions.abort_at = Some(step);
        host.kill();
        host.until_taken();
        blocks.write(0, &1u64).unwrap();
        for (page, value) in [(DATA, 1u64), (DATA + 4096, 2)] {
            host.poke(page, &[0; 512]);
            host.poke(page, &value.to_le_bytes());
        }
        let compare = Sqe { opcode: 5, flags: 1, ..Sqe::read(1, 0, 0, 0) };
        let write = Sqe { flags: 2, ..Sqe::write(1, 0, 0, 0) };
        let pages = [DATA, DATA + 4096].map(|page| BASE + page);
        let (first, second) = (compare.with_prps(pages[0], 0), write.with_prps(pages[1], 0));
        let cids = submit_both(&mut host, 0, first, second);
        let began = Instant::now();
        while !host.has_died() {
            assert!(began.elapsed() < host.timeout, "the crash point is not reached");
            wait::pause();
        }
        blocks.write(0, &other).unwrap();
        host.kill();
        let all = completions(&mut host, 2);
        let status = |cid| all.iter().find(|cqe| cqe.cid == cid).unwrap().status();
        let both = (status(cids.0), status(cids.1));
        assert_eq!((both.0.code(), both.1.code()), expected, "{step:?} {other}");
        // A failed Compare has Do Not Retry, because a retry could execute the operation a second
        // time.
        assert_eq!(both.0.dnr(), !both.0.is_success());
        assert!(all.iter().all(|cqe| cqe.dw0 == 0));
        assert_eq!(counter(&mut host), left, "{step:?} {other}");
    }
}

/// Test across crashes: blocks that are marked uncorrectable stay marked, and blocks that were
/// written stay readable.
#[test]
fn uncorrectable_marks_survive_crashes() {
    let _alone = SERIAL.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut host = Host::new(memory(), false, false);
    host.begin();
    host.until_taken();
    let page = BASE + DATA;
    let run = |host: &mut Host, sqe: Sqe| {
        host.submit(Some(0), sqe.with_prps(page, 0));
        completions(host, 1)[0].status().code()
    };
    let mark = Sqe { opcode: 4, ..Sqe::write(1, 9, 0, 0) };
    for step in [
        None,
        Some((AbortPoint::ExclusiveEnded, 1)),
        Some((AbortPoint::Decided, 1)),
        Some((AbortPoint::Posted, 1)),
    ] {
        for (sqe, read) in
            [(mark, Status::UNRECOVERED_READ), (Sqe::write(1, 8, 2, 0), Status::SUCCESS)]
        {
            host.instructions.abort_at = step;
            host.kill();
            host.until_taken();
            assert_eq!(run(&mut host, sqe), Status::SUCCESS);
            wait_for_crash(&mut host);
            assert_eq!(run(&mut host, Sqe::read(1, 9, 0, 0)), read, "{step:?}");
            host.kill();
            host.until_taken();
            assert_eq!(run(&mut host, Sqe::read(1, 9, 0, 0)), read, "{step:?}");
        }
    }
}
