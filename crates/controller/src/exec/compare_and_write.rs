//! Fused Compare and Write as one atomic disk request.
//!
//! With respect to commands of this server, a fused operation is atomic because it is executed
//! [exclusively](super::exclusive_state). If the storage has other users, such as an image that
//! several machines share, another machine may write between the Compare and the Write. So on a
//! disk with atomic compare-and-write ([`Queue::compares_and_writes`]), the Write is replaced by
//! that request once the Compare was equal. Namespaces with metadata, zones or uncorrectable blocks
//! are excluded, because the request does not support these: there a plain Write follows the
//! Compare.
//!
//! If the atomic request finds different blocks, another user has written in between: the Compare
//! ends with Compare Failure and the Write with Command Aborted due to Failed Fused Command. If it
//! fails in another way, the Write gets the error and the Compare ends with Command Aborted due to
//! Failed Fused Command, because it is unknown whether the blocks were equal.
//!
//! # Crash recovery
//!
//! [`Decision::Try`] is written to the journal before the request is submitted. The process that
//! recovers the controller submits the request again, before any other command of the controller.
//! At that time, I/O of the dead process is fenced. The blocks were equal just before the crash and
//! no other command of this server was in flight. So the result means:
//!
//! * Equal: the data are written now, possibly a second time, as with any write in flight.
//! * Equal to the data of the Write: the dead process has written them, and the operation has
//!   succeeded. A write of identical data by another user at the same moment looks the same; hosts
//!   that have to tell the two apart write unique data, such as a name beside a counter.
//! * Different from both: another user has written, either before the operation or after it has
//!   succeeded. Compare Failure could be wrong, and the host would then repeat an operation that
//!   has succeeded. So the Compare ends with Internal Error and Do Not Retry. This does not happen
//!   if the storage has no other user.
//!
//! If the dead process had not submitted the request, the operation is executed from its start.
//!
//! [`Queue::compares_and_writes`]: shadowbell_backend::Queue::compares_and_writes
//! [`Decision::Try`]: crate::journal::Decision::Try

use super::engine::{Engine, MAX_PLACES};
use super::exclusive_state::{Asked, Held, Parked, Running, Step};
use super::in_flight::{InFlight, Kind, Owner};
use super::resolve::resolve_flagged;
use super::status::status_of;
use crate::journal::Decision;
use crate::queue::Permit;
use shadowbell_backend::{Op, Request, Submitted};
use shadowbell_spec::Sqe;
use shadowbell_spec::nvm::RwFields;
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::status::Status;
use shadowbell_state::{AbortPoint, abort_point};

/// Statuses of the first and the second command.
pub(super) type Ends = (Status, Status);

/// Statuses if the Compare has failed.
fn by_compare(status: Status) -> Ends {
    (status, Status::FUSED_FAILED)
}

/// Statuses if the Write has failed.
fn by_write(status: Status) -> Ends {
    (Status::FUSED_FAILED, status)
}

impl Engine {
    /// True if the disk of a fused operation can execute it as one request.
    pub(super) fn can_compare_and_write(&self, sqe: &Sqe) -> bool {
        let at = (sqe.nsid as usize).checked_sub(1);
        let Some(namespace) = at.and_then(|at| self.namespaces.get(at)) else { return false };
        namespace.queue.compares_and_writes()
            && namespace.metadata().is_none()
            && !namespace.is_zoned()
            && !namespace.is_marked()
    }

    /// Parks the fused operation in execution again, as the next command, for one more step: the
    /// atomic disk request (after the journal has its [`Decision::Try`]) or the look.
    pub(super) fn park_again(&mut self, asked: Asked, (sq, cid): (usize, u16), permit: Permit) {
        let Some(Running { parked, waiting, .. }) = self.exclusive.running.take() else { return };
        abort_point(AbortPoint::AloneEnded);
        let mut entry = InFlight::new(Owner::Command { sq, cid, permit }, 0, Kind::Other);
        entry.waiting = waiting;
        let entry = entry.at(parked.sqe.nsid, parked.sqe.cdw10_11());
        let tag = self.in_flight.next_tag();
        debug_assert_eq!(tag, parked.tag, "the entry freed last is reused first");
        self.in_flight.insert(tag, entry.of_requests());
        if asked == Asked::Now {
            self.exclusive.decided.push((tag, Decision::Try));
        }
        self.exclusive.parked.push_front(Parked { asked, ..parked });
    }

    /// Starts the atomic request or the look of a fused operation. Returns the parked command if it
    /// is not fused or if neither of these steps applies.
    pub(super) fn begin_fused_step(&mut self, parked: Parked) -> Option<Parked> {
        let step = match parked.asked {
            Asked::Differs => Step::Look,
            Asked::Now | Asked::Before if self.can_compare_and_write(&parked.sqe) => {
                Step::CompareAndWrite
            }
            _ => return Some(parked),
        };
        let Some((_, write)) = parked.second else { return Some(parked) };
        let entry = self.in_flight.remove(parked.tag)?;
        let Owner::Command { sq, cid, permit } = entry.owner else { return None };
        let (waiting, can_compare_and_write) = (entry.waiting, true);
        self.exclusive.running = Some(Running { parked, waiting, step, can_compare_and_write });
        (self.exclusive.written, self.exclusive.dw0) = (None, 0);
        let prepared = match step {
            Step::Look => self.prepare_look(&write),
            _ => self.prepare_compare_and_write(&parked.sqe, &write),
        };
        match prepared {
            Ok(request) => self.submit_step(&request, (sq, cid), permit),
            Err(ends) => {
                self.count_error(ends.0);
                self.fused_ended((sq, cid), permit, ends);
            }
        }
        None
    }

    /// Builds the compare-and-write request; resolves the data of both commands into `scratch`.
    fn prepare_compare_and_write(&mut self, compare: &Sqe, write: &Sqe) -> Result<Request, Ends> {
        self.touch(2 * MAX_PLACES);
        if let Some(status) = self.refusal(NvmOpcode::Compare, compare) {
            return Err(by_compare(status));
        }
        if let Some(status) = self.refusal(NvmOpcode::Write, write) {
            return Err(by_write(status));
        }
        let Self { namespaces, view, limits, scratch, spare, .. } = self;
        let namespace = &namespaces[compare.nsid as usize - 1];
        let (offset, len) = namespace.range(&RwFields::decode(compare)).map_err(by_compare)?;
        if namespace.is_read_only() {
            return Err(by_write(Status::NAMESPACE_WRITE_PROTECTED.with_dnr()));
        }
        let (bytes, page) = (len as usize, limits.page_size);
        resolve_flagged(view, compare, bytes, page, false, scratch).map_err(by_compare)?;
        scratch.truncate(bytes);
        let mut new = spare.pop().unwrap_or_default();
        let resolved = resolve_flagged(view, write, bytes, page, false, &mut new);
        resolved.map_err(by_write)?;
        new.truncate(bytes);
        scratch.append(&new).ok_or_else(|| by_write(Status::INTERNAL))?;
        let fua = RwFields::decode(write).fua || self.write_through;
        Ok(Request { op: Op::CompareAndWrite { fua }, offset, len })
    }

    /// Builds the Compare request with the data of the Write, to find out if they were written.
    fn prepare_look(&mut self, write: &Sqe) -> Result<Request, Ends> {
        let Self { namespaces, view, limits, scratch, .. } = self;
        let at = (write.nsid as usize).checked_sub(1);
        let gone = by_compare(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr());
        let namespace = at.and_then(|at| namespaces.get(at)).ok_or(gone)?;
        let (offset, len) = namespace.range(&RwFields::decode(write)).map_err(by_compare)?;
        let page = limits.page_size;
        resolve_flagged(view, write, len as usize, page, false, scratch).map_err(by_compare)?;
        Ok(Request { op: Op::Compare, offset, len })
    }

    /// Submits a step of the operation in execution, with the data in `scratch`.
    fn submit_step(&mut self, request: &Request, (sq, cid): (usize, u16), permit: Permit) {
        let Some(Running { parked: Parked { tag, sqe, .. }, .. }) = self.exclusive.running else {
            return;
        };
        let (index, pieces) = (sqe.nsid as usize - 1, self.scratch.pieces().len());
        let kind = match request.op {
            Op::Compare => Kind::Read(request.len),
            _ => Kind::Write(request.len),
        };
        debug_assert_eq!(self.in_flight.next_tag(), tag, "the entry freed last is reused first");
        let tag = self.in_flight.next_tag();
        match self.namespaces[index].queue.submit(tag, request, &mut self.scratch) {
            Submitted::Done(outcome) => {
                self.scratch.rewind();
                let status = match outcome {
                    Ok(()) => Status::SUCCESS,
                    Err(error) => status_of(error, kind.is_reading()),
                };
                self.count_step(kind, status);
                self.step_ended((sq, cid), permit, status);
            }
            Submitted::Pending => {
                let owner = Owner::Exclusive { sq, cid, permit };
                let entry = InFlight::new(owner, index, kind).at(sqe.nsid, sqe.cdw10_11());
                self.keep(tag, request.len, entry.in_pieces(pieces));
            }
        }
    }

    fn count_step(&mut self, kind: Kind, status: Status) {
        if status.is_success() {
            self.count(kind);
        } else {
            self.count_error(status);
        }
    }

    /// Handles the end of a step of the operation in execution.
    pub(super) fn step_ended(&mut self, (sq, cid): (usize, u16), permit: Permit, status: Status) {
        let Some(Running { parked, step, .. }) = &self.exclusive.running else { return };
        let is_different = status.code() == Status::COMPARE_FAILURE;
        let ends = match (step, parked.asked) {
            _ if status.is_success() => (status, status),
            // It is unknown whether the dead process's request has succeeded.
            (Step::Look, _) if is_different => by_compare(Status::INTERNAL.with_dnr()),
            (_, Asked::Before) if is_different => {
                return self.park_again(Asked::Differs, (sq, cid), permit);
            }
            (Step::CompareAndWrite, _)
                if !is_different && status.code() != Status::ABORT_REQUESTED =>
            {
                by_write(status)
            }
            _ => by_compare(status),
        };
        self.fused_ended((sq, cid), permit, ends);
    }

    /// Ends the two commands of an operation that was one disk request, with these statuses.
    fn fused_ended(&mut self, (sq, cid): (usize, u16), permit: Permit, (first, other): Ends) {
        let Some(Running { parked, waiting, .. }) = self.exclusive.running.take() else { return };
        abort_point(AbortPoint::AloneEnded);
        let Parked { tag, sqe, second, .. } = parked;
        let mut entry = InFlight::new(Owner::Command { sq, cid, permit }, 0, Kind::Other);
        (entry.status, entry.waiting) = (first, waiting);
        let at = self.hold(tag, entry.at(sqe.nsid, sqe.cdw10_11()), 0);
        if let Some((second, _)) = second {
            if !other.is_success() {
                self.count_error(Status::FUSED_FAILED);
            }
            self.in_flight.fail(second, other);
            self.exclusive.held.push(Held { tag: second, dw0: 0 });
            // This decision also contains the status of the first command, in case that the process
            // dies between the two journal writes.
            let dw0 = u32::from(first.bits());
            self.exclusive.decided.push((second, Decision::End { status: other, dw0 }));
        }
        self.exclusive.decided.push((at, Decision::End { status: first, dw0: 0 }));
    }
}
