//! Fetch of fused operations: the two commands start together or not at all.
//! Base 2.1, 3.4.2 "Fused Operations".

use super::observer::report_error;
use crate::exec::Engine;
use crate::journal::{Decision, JournalPart, RecoveredCommand};
use crate::notice::ControlHandle;
use crate::queue::{Cq, Permit, Permits, Sq};
use shadowbell_spec::sqe::Fuse;
use shadowbell_spec::status::Status;
use shadowbell_spec::{Cqe, Sqe};
use shadowbell_state::{AbortPoint, abort_point};

/// Progress of a burst of fetched commands.
pub(super) struct Burst {
    /// Index of the entry that is fetched next.
    pub(super) head: u16,
    /// Number of commands of this burst that were taken from the ring so far; `fetched` is the
    /// number of all commands of the burst.
    pub(super) done: u32,
    pub(super) fetched: u32,
    /// Number of commands in flight or parked.
    pub(super) pending: u32,
    pub(super) permits: Permits,
}

/// Context of the fetched commands.
pub(super) struct Fetcher<'a> {
    pub(super) engine: &'a mut Engine,
    pub(super) journal: &'a mut Option<JournalPart>,
    pub(super) control: &'a ControlHandle,
    /// Index of the submission queue.
    pub(super) index: usize,
    pub(super) sq: &'a Sq,
    pub(super) cq: &'a mut Cq,
}

/// Outcome of fetching a command with FUSE bits.
pub(super) enum Paired {
    /// Failed with this status.
    Failed(Permit, Status),
    /// Fetched together with the second command.
    Both,
    /// Not fetched yet: the completion queue needs room for two entries.
    NoRoom,
}

/// Fetches the second command of a fused operation, after a fetched command with FUSE bits.
#[cold]
#[inline(never)]
pub(super) fn pair(
    with: Fetcher<'_>,
    first: &Sqe,
    permit: Permit,
    mut burst: Burst,
) -> (Burst, Paired) {
    let missing = Status::FUSED_MISSING.with_dnr();
    let Fetcher { engine, journal, control, index, sq, cq } = with;
    let (size, qid) = (sq.layout.size, sq.layout.qid);
    let second = match (first.fuse(), &sq.ring) {
        (Fuse::First, Some(ring)) if size.distance(burst.head, sq.tail.last()) != 0 => {
            let second: Sqe = ring.read(u32::from(burst.head));
            Some(second).filter(|second| second.fuse() == Fuse::Second)
        }
        (Fuse::Reserved, _) => {
            return (burst, Paired::Failed(permit, Status::INVALID_FIELD.with_dnr()));
        }
        _ => None,
    };
    // A completion queue with room for only one entry cannot support fused operations.
    let Some(second) = second.filter(|_| cq.layout.size.entries() > 2) else {
        return (burst, Paired::Failed(permit, missing));
    };
    let other = if burst.done < burst.fetched {
        burst.permits.take()
    } else if cq.free() != 0 {
        burst.fetched += 1;
        cq.reserve(1).take()
    } else {
        cq.release(permit);
        burst.done -= 1;
        burst.head = size.back(burst.head, 1);
        burst.fetched = burst.done;
        return (burst, Paired::NoRoom);
    };
    let count = sq.fetched.wrapping_add(burst.done - 1);
    burst.head = size.next(burst.head);
    burst.done += 1;
    match engine.park_fused((first, &second), index, (permit, other), false) {
        Ok(tags) => {
            burst.pending += 2;
            if let Some(journal) = journal {
                journal.record(tags.0, qid, count, first);
                journal.record(tags.1, qid, count.wrapping_add(1), &second);
                abort_point(AbortPoint::Recorded);
            }
        }
        Err((permits, statuses)) => {
            for (sqe, permit, status) in
                [(first, permits.0, statuses.0), (&second, permits.1, statuses.1)]
            {
                engine.count_error(status);
                report_error(control, qid, sqe, status);
                cq.complete(permit, Cqe::new(sqe.cid, qid, burst.head, status, 0));
            }
        }
    }
    (burst, Paired::Both)
}

/// Executes the two commands of a fused operation again, after the process in which they were in
/// flight has died. Each command has the index of a reserved journal record. If `gives_up` is true,
/// completes both with an error instead. Returns the number of commands in flight.
#[cold]
pub(super) fn replay(
    with: Fetcher<'_>,
    both: [(&RecoveredCommand, u32); 2],
    permits: (Permit, Permit),
    gives_up: bool,
) -> u32 {
    let Fetcher { engine, journal, control, index, sq, cq } = with;
    let [(first, _), (second, _)] = both;
    let parked = if gives_up {
        Err((permits, (Status::INTERNAL.with_dnr(), Status::FUSED_FAILED)))
    } else {
        let maybe_submitted = first.decision == Some(Decision::Try);
        engine.park_fused((&first.sqe, &second.sqe), index, permits, maybe_submitted)
    };
    match parked {
        Ok(tags) => {
            if let Some(journal) = journal {
                journal.record_recovered(tags.0, first);
                journal.record_recovered(tags.1, second);
                both.iter().for_each(|(_, reserved_slot)| journal.free(*reserved_slot));
            }
            2
        }
        Err((permits, statuses)) => {
            let ends = [(permits.0, statuses.0), (permits.1, statuses.1)];
            for ((command, reserved_slot), (permit, status)) in both.into_iter().zip(ends) {
                let (sqe, qid) = (&command.sqe, sq.layout.qid);
                engine.count_error(status);
                report_error(control, qid, sqe, status);
                if journal.is_some() {
                    cq.complete_record(reserved_slot);
                }
                cq.complete(permit, Cqe::new(sqe.cid, qid, sq.head, status, 0));
            }
            0
        }
    }
}
