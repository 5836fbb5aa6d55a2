//! Execution of [exclusive](super::exclusive_state) commands by an engine, with fused Compare and
//! Write.
//!
//! # Compare and Write as one atomic disk request
//!
//! A fused operation is executed [exclusively](super::exclusive_state), so it is atomic with
//! respect to commands of this server. If the storage has other users, such as an image that
//! several machines share, another machine may write between the Compare and the Write. A disk with
//! an atomic compare-and-write request ([`Queue::compares_and_writes`]) prevents this: after a
//! successful Compare, the controller submits the atomic request instead of the Write. The request
//! does not support metadata, zones and uncorrectable blocks. On a namespace with any of these
//! features, a plain Write follows the Compare.
//!
//! If the atomic request finds different blocks, another user has written in between. Then the
//! Compare ends with Compare Failure and the Write with Command Aborted due to Failed Fused
//! Command. If the request fails for another reason, the Write gets the error and the Compare ends
//! with Command Aborted due to Failed Fused Command, because the result of the comparison is
//! unknown.
//!
//! ## Crash recovery
//!
//! [`Decision::Try`] is written to the journal before the request is submitted. The process that
//! recovers the controller submits the request again, before any other command of the controller.
//! By then, all I/O of the dead process has ended. The Compare had found equal blocks just before
//! the crash, and no other command of this server was in flight. Therefore the result of the second
//! request means:
//!
//! * Equal to the data of the Compare: the request has written the data of the Write. The dead
//!   process may have written them before, as with any write in flight.
//! * Equal to the data of the Write: the dead process has written them, and the operation has
//!   succeeded. If another user has written identical data at the same time, the result is the
//!   same. Hosts that must distinguish these cases write unique data, such as a host name and a
//!   counter.
//! * Different from both: another user has written, either before the operation or after its
//!   success. In the second case, Compare Failure would be wrong, and the host would repeat an
//!   operation that has succeeded. Therefore the Compare ends with Internal Error and Do Not Retry.
//!   This happens only on storage with other users.
//!
//! If the dead process had not submitted the request, the operation is executed from its start.
//!
//! [`Queue::compares_and_writes`]: shadowbell_disk::Queue::compares_and_writes
//! [`Decision::Try`]: crate::journal::Decision::Try

use super::data_pointer::resolve_flagged;
use super::engine::{Closed, Engine, MAX_LOCATIONS, Started};
use super::exclusive_state::{
    FUSE, FusedProgress, Held, Marked, Parked, Running, Step, check_fused,
};
use super::in_flight::{CompletedCommand, InFlight, Kind, Owner};
use super::namespace::{index_of, status_of};
use crate::journal::Decision;
use crate::notice::{ControlHandle, Latch};
use crate::queue::Permit;
use crate::shared::ControllerShared;
use crate::uncorrectable::{BlockRange, COMMAND_BYTES, Uncorrectable};
use shadowbell_disk::{Op, Request, Submitted};
use shadowbell_spec::Sqe;
use shadowbell_spec::nvm::RwFields;
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::status::Status;
use shadowbell_state::{AbortPoint, abort_point};
use std::sync::Arc;

/// Permits and statuses of the two commands of a fused operation that failed before its execution.
pub(crate) type FusedFailed = ((Permit, Permit), (Status, Status));

impl Engine {
    /// Sets the control plane to which requests for exclusive execution are sent.
    pub(crate) fn set_control(&mut self, control: &ControlHandle, shared: &Arc<ControllerShared>) {
        self.exclusive.with = Some((control.clone(), Arc::clone(shared)));
        self.review_marks();
        if shared.is_exclusive() {
            self.close(Closed::Exclusive);
        }
    }

    /// Refreshes the copy of the uncorrectable blocks.
    pub(super) fn review_marks(&mut self) {
        if let Some((_, shared)) = &self.exclusive.with {
            self.exclusive.marks = shared.uncorrectable();
            self.flag_namespaces();
        }
    }

    /// Makes all commands of namespaces with uncorrectable blocks take the slow path.
    fn flag_namespaces(&mut self) {
        let Self { namespaces, exclusive, .. } = self;
        for (nsid, namespace) in (1..).zip(namespaces) {
            namespace.set_marked(exclusive.marks.has_any_of(nsid));
        }
    }

    /// Stops fetching, because a command requires exclusive execution.
    pub(crate) fn pause(&mut self) {
        self.close(Closed::Exclusive);
    }

    /// True if each command in flight is parked for exclusive execution, or has ended and only its
    /// completion is not posted yet.
    pub(crate) fn is_drained(&self) -> bool {
        self.in_flight.len() == self.exclusive.entries()
    }

    /// Grants exclusive execution to this I/O thread. It ends when the latch is released.
    pub(crate) fn grant_exclusive(&mut self, latch: Latch) {
        self.exclusive.is_requested = false;
        if self.exclusive.parked.is_empty() {
            return drop(latch);
        }
        self.exclusive.granted = Some(latch);
    }

    /// Queues the postponed decisions for the journal: the control plane has recorded the
    /// uncorrectable blocks. The latch is released when the journal contains the decisions. From
    /// then on, a recovery does not repeat the commands.
    pub(crate) fn journal_decisions(&mut self, latch: Latch) {
        self.exclusive.decided.append(&mut self.exclusive.pending_decisions);
        if !self.exclusive.decided.is_empty() {
            self.exclusive.settling = Some(latch);
        }
    }

    /// Ends exclusive execution: fetching continues and held completions are posted.
    pub(crate) fn end_exclusive(&mut self) {
        self.exclusive.is_released = !self.exclusive.held.is_empty();
        self.review_marks();
        self.open(Closed::Exclusive);
    }

    /// Takes the new decisions. The caller writes them to the journal before they take effect.
    pub(crate) fn take_decided(&mut self) -> Vec<(u32, Decision)> {
        std::mem::take(&mut self.exclusive.decided)
    }

    /// True if fetching is stopped for an exclusive command.
    pub(crate) fn is_paused(&self) -> bool {
        self.is_closed(Closed::Exclusive)
    }

    /// Consequence of uncorrectable blocks for a command on blocks `from..to` of namespace `index`.
    pub(super) fn check_marks(
        &mut self,
        op: NvmOpcode,
        index: usize,
        (from, to): (u64, u64),
    ) -> Marked {
        let nsid = index as u32 + 1;
        if !self.exclusive.marks.touches(nsid, from, to) {
            return Marked::No;
        }
        match op {
            NvmOpcode::Read | NvmOpcode::Compare | NvmOpcode::Verify => Marked::Fails,
            _ if self.exclusive.is_at_work() => {
                self.exclusive.written = Some(BlockRange { nsid, from, to });
                Marked::No
            }
            _ => Marked::Park,
        }
    }

    /// Parks a command for exclusive execution.
    #[cold]
    #[inline(never)]
    pub(super) fn park(&mut self, sqe: &Sqe, sq: usize, permit: Permit) -> Started {
        let tag = self.park_entry(sqe, sq, permit);
        self.exclusive.park(Parked::new(tag, sq, *sqe));
        self.review_quota();
        Started::Pending
    }

    fn park_entry(&mut self, sqe: &Sqe, sq: usize, permit: Permit) -> u32 {
        let tag = self.in_flight.next_tag();
        let owner = Owner::Command { sq, cid: sqe.cid, permit };
        let entry = InFlight::new(owner, 0, Kind::Other).at(sqe.nsid, sqe.cdw10_11());
        self.in_flight.insert(tag, entry.of_requests());
        self.last_tag = tag;
        tag
    }

    /// Parks the two commands of a fused operation and returns their entries. `maybe_submitted` is
    /// true if a dead process may have submitted the atomic disk request for them.
    ///
    /// # Errors
    /// The statuses of the commands, if they are not a supported fused operation.
    #[cold]
    #[inline(never)]
    pub(crate) fn park_fused(
        &mut self,
        (first, second): (&Sqe, &Sqe),
        sq: usize,
        permits: (Permit, Permit),
        maybe_submitted: bool,
    ) -> Result<(u32, u32), FusedFailed> {
        if let Err(statuses) = check_fused(first, second) {
            return Err((permits, statuses));
        }
        let tags = (self.park_entry(first, sq, permits.0), self.park_entry(second, sq, permits.1));
        let plain = |sqe: &Sqe| Sqe { flags: sqe.flags & !FUSE, ..*sqe };
        let second = Some((tags.1, plain(second)));
        let parked = Parked { second, ..Parked::new(tags.0, sq, plain(first)) };
        if maybe_submitted {
            self.exclusive
                .park_started(Parked { progress: FusedProgress::MaybeSubmitted, ..parked });
        } else {
            self.exclusive.park(parked);
        }
        self.review_quota();
        Ok(tags)
    }

    /// Parks the Write of a fused operation whose Compare succeeded before a crash.
    pub(crate) fn park_second(&mut self, second: &Sqe, sq: usize, permit: Permit) -> Started {
        let sqe = Sqe { flags: second.flags & !FUSE, ..*second };
        let tag = self.park_entry(&sqe, sq, permit);
        self.exclusive.park_started(Parked::new(tag, sq, sqe));
        self.review_quota();
        Started::Pending
    }

    /// Advances exclusive commands: posts the ended commands, and starts the next parked command.
    pub(super) fn advance_exclusive(&mut self, ended: &mut impl FnMut(CompletedCommand)) {
        for tag in std::mem::take(&mut self.exclusive.ended) {
            if let Some(end) = self.end(tag) {
                ended(end);
            }
        }
        // The caller must write the decisions to the journal before the next step.
        if !self.exclusive.decided.is_empty() {
            return;
        }
        drop(self.exclusive.settling.take());
        if std::mem::take(&mut self.exclusive.is_released) || self.exclusive.is_reset {
            for Held { tag, dw0 } in std::mem::take(&mut self.exclusive.held) {
                let Some(entry) = self.in_flight.remove(tag) else { continue };
                let InFlight { owner, status, nsid, lba, .. } = entry;
                if let Owner::Command { sq, cid, permit } = owner {
                    ended(CompletedCommand {
                        sq,
                        cid,
                        tag,
                        permit,
                        status,
                        nsid,
                        lba,
                        dw0,
                        dw1: 0,
                    });
                }
            }
        }
        if self.exclusive.granted.is_none() || self.exclusive.running.is_some() {
            return;
        }
        match self.exclusive.parked.pop_front() {
            Some(parked) => self.run(parked),
            None => drop(self.exclusive.granted.take()),
        }
    }

    /// Starts a parked command exclusively.
    fn run(&mut self, parked: Parked) {
        let Some(parked) = self.begin_fused_step(parked) else { return };
        let Parked { tag, sq, sqe, .. } = parked;
        let can_compare_and_write = parked.second.is_some() && self.can_compare_and_write(&sqe);
        let Some(InFlight { owner: Owner::Command { cid, permit, .. }, waiting, .. }) =
            self.in_flight.remove(tag)
        else {
            return;
        };
        self.exclusive.running =
            Some(Running { parked, waiting, step: Step::Plain, can_compare_and_write });
        (self.exclusive.written, self.exclusive.dw0) = (None, 0);
        let (permit, status) = match self.start(&sqe, sq, permit) {
            Started::Done(permit) | Started::DoneLong(permit) => (permit, Status::SUCCESS),
            Started::Failed(permit, status) => {
                self.count_error(status);
                (permit, status)
            }
            // Unreachable: the FUSE bits of parked commands are cleared.
            Started::Fused(permit) => (permit, Status::INTERNAL),
            Started::Pending => {
                debug_assert_eq!(self.last_tag, tag, "the entry freed last is reused first");
                return self.in_flight.set_exclusive(self.last_tag);
            }
        };
        self.exclusive_ended((sq, cid), permit, status);
    }

    /// Handles the end of the exclusive command in execution: holds its completion, and continues
    /// with the second command of a fused pair.
    pub(super) fn exclusive_ended(
        &mut self,
        (sq, cid): (usize, u16),
        permit: Permit,
        status: Status,
    ) {
        let Some(Running { parked, step, can_compare_and_write, .. }) = &self.exclusive.running
        else {
            return;
        };
        if *step != Step::Plain
            || parked.progress != FusedProgress::NotSubmitted && !status.is_success()
        {
            return self.step_ended((sq, cid), permit, status);
        }
        if *can_compare_and_write && status.is_success() {
            return self.repark(FusedProgress::Submitted, (sq, cid), permit);
        }
        let Some(Running { parked, waiting, .. }) = self.exclusive.running.take() else { return };
        abort_point(AbortPoint::ExclusiveEnded);
        let Parked { tag, sqe, second, .. } = parked;
        let dw0 = std::mem::take(&mut self.exclusive.dw0);
        let written = self.exclusive.written.take().filter(|_| status.is_success());
        let changes_marks =
            written.is_some() || sqe.opcode == u8::from(NvmOpcode::WriteUncorrectable);
        if let Some(written) = written {
            self.change_marks(|marks| marks.clear(written.nsid, written.from, written.to));
        }
        let mut entry = InFlight::new(Owner::Command { sq, cid, permit }, 0, Kind::Other);
        (entry.status, entry.waiting) = (status, waiting);
        let at = self.hold(tag, entry.at(sqe.nsid, sqe.cdw10_11()), dw0);
        match second {
            None => {}
            Some((second, sqe)) if status.is_success() => {
                self.exclusive.decided.push((second, Decision::Begin));
                self.exclusive.parked.push_front(Parked::new(second, sq, sqe));
            }
            Some((second, _)) => {
                let status = Status::FUSED_FAILED;
                self.count_error(status);
                self.in_flight.fail(second, status);
                self.exclusive.held.push(Held { tag: second, dw0: 0 });
                self.exclusive.decided.push((second, Decision::End { status, dw0: 0 }));
            }
        }
        let end = (at, Decision::End { status, dw0 });
        if changes_marks {
            // This decision is postponed, because a recovery has to repeat the command until the
            // control plane has recorded the changed blocks.
            self.exclusive.pending_decisions.push(end);
        } else {
            // The decision about the first command of a pair comes last, because it implies the
            // decision about the second command.
            self.exclusive.decided.push(end);
        }
    }

    /// Creates an entry that holds the completion of the command that was in entry `tag`. Returns
    /// the tag of the new entry.
    pub(super) fn hold(&mut self, tag: u32, entry: InFlight, dw0: u32) -> u32 {
        let at = self.in_flight.next_tag();
        debug_assert_eq!(at, tag, "the entry freed last is reused first");
        self.in_flight.insert(at, entry.of_requests());
        self.exclusive.held.push(Held { tag: at, dw0 });
        at
    }

    /// Executes Write Uncorrectable if execution is exclusive already; otherwise parks the command.
    #[cold]
    pub(super) fn write_uncorrectable(&mut self, sqe: &Sqe, sq: usize, permit: Permit) -> Started {
        match self.check_uncorrectable(sqe) {
            Err(status) => Started::Failed(permit, status),
            Ok(_) if !self.exclusive.is_at_work() => self.park(sqe, sq, permit),
            Ok(BlockRange { nsid, from, to }) => {
                let mut outcome = Ok(());
                self.change_marks(|marks| outcome = marks.mark(nsid, from, to));
                match outcome {
                    Ok(()) => {
                        self.count(Kind::Other);
                        Started::DoneLong(permit)
                    }
                    Err(status) => Started::Failed(permit, status),
                }
            }
        }
    }

    fn check_uncorrectable(&self, sqe: &Sqe) -> Result<BlockRange, Status> {
        let namespace = &self.namespaces[index_of(&self.namespaces, sqe.nsid)?];
        let rw = RwFields::decode(sqe);
        let (_, len) = namespace.range(&rw)?;
        if namespace.is_read_only() {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
        }
        if len > COMMAND_BYTES {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let to = rw.slba + u64::from(rw.blocks());
        Ok(BlockRange { nsid: sqe.nsid, from: rw.slba, to })
    }

    fn change_marks(&mut self, change: impl FnOnce(&mut Uncorrectable)) {
        if let Some((_, shared)) = &self.exclusive.with {
            shared.change_uncorrectable(change);
        }
        self.review_marks();
    }
}

/// Statuses of the two commands of a fused operation: of the Compare and of the Write.
pub(super) type PairStatus = (Status, Status);

/// Statuses of the two commands if the Compare has failed with `status`.
fn by_compare(status: Status) -> PairStatus {
    (status, Status::FUSED_FAILED)
}

/// Statuses of the two commands if the Write has failed with `status`.
fn by_write(status: Status) -> PairStatus {
    (Status::FUSED_FAILED, status)
}

/// Fused Compare and Write as one atomic disk request.
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

    /// Parks the running fused operation again, as the next command, for one more step: the atomic
    /// disk request (after [`Decision::Try`] is in the journal) or [`Step::CompareAgain`].
    fn repark(&mut self, progress: FusedProgress, (sq, cid): (usize, u16), permit: Permit) {
        let Some(Running { parked, waiting, .. }) = self.exclusive.running.take() else { return };
        abort_point(AbortPoint::ExclusiveEnded);
        let mut entry = InFlight::new(Owner::Command { sq, cid, permit }, 0, Kind::Other);
        entry.waiting = waiting;
        let entry = entry.at(parked.sqe.nsid, parked.sqe.cdw10_11());
        let tag = self.in_flight.next_tag();
        debug_assert_eq!(tag, parked.tag, "the entry freed last is reused first");
        self.in_flight.insert(tag, entry.of_requests());
        if progress == FusedProgress::Submitted {
            self.exclusive.decided.push((tag, Decision::Try));
        }
        self.exclusive.parked.push_front(Parked { progress, ..parked });
    }

    /// Starts the next step of a fused operation, the atomic request or [`Step::CompareAgain`].
    /// Returns the parked command if it is not fused or if neither step applies.
    fn begin_fused_step(&mut self, parked: Parked) -> Option<Parked> {
        let step = match parked.progress {
            FusedProgress::Differs => Step::CompareAgain,
            FusedProgress::Submitted | FusedProgress::MaybeSubmitted
                if self.can_compare_and_write(&parked.sqe) =>
            {
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
            Step::CompareAgain => self.prepare_compare(&write),
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
    fn prepare_compare_and_write(
        &mut self,
        compare: &Sqe,
        write: &Sqe,
    ) -> Result<Request, PairStatus> {
        self.touch(2 * MAX_LOCATIONS);
        if let Some(status) = self.refusal(NvmOpcode::Compare, compare) {
            return Err(by_compare(status));
        }
        if let Some(status) = self.refusal(NvmOpcode::Write, write) {
            return Err(by_write(status));
        }
        let Self { namespaces, view, limits, scratch, pooled_lists, .. } = self;
        let namespace = &namespaces[compare.nsid as usize - 1];
        let (offset, len) = namespace.range(&RwFields::decode(compare)).map_err(by_compare)?;
        if namespace.is_read_only() {
            return Err(by_write(Status::NAMESPACE_WRITE_PROTECTED.with_dnr()));
        }
        let (bytes, page) = (len as usize, limits.page_size);
        resolve_flagged(view, compare, bytes, page, false, scratch).map_err(by_compare)?;
        scratch.truncate(bytes);
        let mut new = pooled_lists.pop().unwrap_or_default();
        let resolved = resolve_flagged(view, write, bytes, page, false, &mut new);
        resolved.map_err(by_write)?;
        new.truncate(bytes);
        scratch.append(&new).ok_or_else(|| by_write(Status::INTERNAL))?;
        let fua = RwFields::decode(write).fua || self.write_through;
        Ok(Request { op: Op::CompareAndWrite { fua }, offset, len })
    }

    /// Builds the request for [`Step::CompareAgain`]: a Compare with the data of the Write.
    fn prepare_compare(&mut self, write: &Sqe) -> Result<Request, PairStatus> {
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
                self.register_in_flight(tag, request.len, entry.in_pieces(pieces));
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
    fn step_ended(&mut self, (sq, cid): (usize, u16), permit: Permit, status: Status) {
        let Some(Running { parked, step, .. }) = &self.exclusive.running else { return };
        let is_different = status.code() == Status::COMPARE_FAILURE;
        let ends = match (step, parked.progress) {
            _ if status.is_success() => (status, status),
            // The request of the dead process may have succeeded before another user wrote. The
            // result is not known, so Compare Failure could be wrong.
            (Step::CompareAgain, _) if is_different => by_compare(Status::INTERNAL.with_dnr()),
            (_, FusedProgress::MaybeSubmitted) if is_different => {
                return self.repark(FusedProgress::Differs, (sq, cid), permit);
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
    fn fused_ended(&mut self, (sq, cid): (usize, u16), permit: Permit, (first, other): PairStatus) {
        let Some(Running { parked, waiting, .. }) = self.exclusive.running.take() else { return };
        abort_point(AbortPoint::ExclusiveEnded);
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
            // This decision also contains the status of the first command, for the case that the
            // process dies before it writes the first command's decision.
            let dw0 = u32::from(first.bits());
            self.exclusive.decided.push((second, Decision::End { status: other, dw0 }));
        }
        self.exclusive.decided.push((at, Decision::End { status: first, dw0: 0 }));
    }
}
