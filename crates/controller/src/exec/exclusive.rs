//! Execution of [exclusive](super::exclusive_state) commands by an engine.

use super::engine::{Closed, Engine, Started};
use super::exclusive_state::{Asked, FUSE, Held, Marked, Parked, Running, Step, check_fused};
use super::in_flight::{CompletedCommand, InFlight, Kind, Owner};
use super::namespace::index_of;
use crate::journal::Decision;
use crate::notice::{ControlHandle, Latch};
use crate::queue::Permit;
use crate::shared::ControllerShared;
use crate::uncorrectable::{BlockRange, COMMAND_BYTES, Uncorrectable};
use shadowbell_spec::Sqe;
use shadowbell_spec::nvm::RwFields;
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::status::Status;
use shadowbell_state::{AbortPoint, abort_point};
use std::sync::Arc;

/// Permits and statuses of the two commands of a fused operation that failed before it began.
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

    /// Routes all commands of a namespace with uncorrectable blocks through the slow path.
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

    /// True if nothing is in flight except commands that are parked for exclusive execution.
    pub(crate) fn is_drained(&self) -> bool {
        self.in_flight.len() == self.exclusive.entries()
    }

    /// Grants exclusive execution until the latch is released.
    pub(crate) fn grant_exclusive(&mut self, latch: Latch) {
        self.exclusive.is_asked_for = false;
        if self.exclusive.parked.is_empty() {
            return drop(latch);
        }
        self.exclusive.granted = Some(latch);
    }

    /// Writes the postponed decisions, because the uncorrectable blocks are recorded now. The latch
    /// is released when the journal has them, so that a recovery does not repeat the changes.
    pub(crate) fn settle(&mut self, latch: Latch) {
        self.exclusive.decided.append(&mut self.exclusive.late);
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

    /// Takes the decisions, which the caller writes to the journal before they have an effect.
    pub(crate) fn take_decided(&mut self) -> Vec<(u32, Decision)> {
        std::mem::take(&mut self.exclusive.decided)
    }

    /// True if fetching is stopped for an exclusive command.
    pub(crate) fn is_paused(&self) -> bool {
        self.is_closed(Closed::Exclusive)
    }

    /// Consequence of uncorrectable blocks for a command on blocks `from..to` of namespace `index`.
    pub(super) fn look_at_marks(
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

    /// Parks the two commands of a fused operation and returns their entries. `was_asked` is true
    /// if a dead process may have submitted the atomic disk request.
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
        was_asked: bool,
    ) -> Result<(u32, u32), FusedFailed> {
        if let Err(statuses) = check_fused(first, second) {
            return Err((permits, statuses));
        }
        let tags = (self.park_entry(first, sq, permits.0), self.park_entry(second, sq, permits.1));
        let plain = |sqe: &Sqe| Sqe { flags: sqe.flags & !FUSE, ..*sqe };
        let second = Some((tags.1, plain(second)));
        let parked = Parked { second, ..Parked::new(tags.0, sq, plain(first)) };
        if was_asked {
            self.exclusive.park_begun(Parked { asked: Asked::Before, ..parked });
        } else {
            self.exclusive.park(parked);
        }
        self.review_quota();
        Ok(tags)
    }

    /// Parks the Write of a fused operation whose Compare was equal before a crash.
    pub(crate) fn park_second(&mut self, second: &Sqe, sq: usize, permit: Permit) -> Started {
        let sqe = Sqe { flags: second.flags & !FUSE, ..*second };
        let tag = self.park_entry(&sqe, sq, permit);
        self.exclusive.park_begun(Parked::new(tag, sq, sqe));
        self.review_quota();
        Started::Pending
    }

    /// Advances exclusive commands: posts ended ones, starts the next parked one.
    pub(super) fn advance_exclusive(&mut self, ended: &mut impl FnMut(CompletedCommand)) {
        for tag in std::mem::take(&mut self.exclusive.ended) {
            if let Some(end) = self.end(tag) {
                ended(end);
            }
        }
        // The journal must have the decisions before the next step.
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
            // The FUSE bits of parked commands are cleared.
            Started::Fused(permit) => (permit, Status::INTERNAL),
            Started::Pending => {
                debug_assert_eq!(self.last_tag, tag, "the entry freed last is reused first");
                return self.in_flight.set_exclusive(self.last_tag);
            }
        };
        self.exclusive_ended((sq, cid), permit, status);
    }

    /// Handles the end of the command in execution: holds its completion, continues a fused pair.
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
        if *step != Step::Plain || parked.asked != Asked::No && !status.is_success() {
            return self.step_ended((sq, cid), permit, status);
        }
        if *can_compare_and_write && status.is_success() {
            return self.park_again(Asked::Now, (sq, cid), permit);
        }
        let Some(Running { parked, waiting, .. }) = self.exclusive.running.take() else { return };
        abort_point(AbortPoint::AloneEnded);
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
            // Until the change is recorded, a recovery has to repeat the command.
            self.exclusive.late.push(end);
        } else {
            // The first command of a pair is decided last: its decision implies the second's.
            self.exclusive.decided.push(end);
        }
    }

    /// Holds the completion of a command that was in entry `tag`; returns the entry.
    pub(super) fn hold(&mut self, tag: u32, entry: InFlight, dw0: u32) -> u32 {
        let at = self.in_flight.next_tag();
        debug_assert_eq!(at, tag, "the entry freed last is reused first");
        self.in_flight.insert(at, entry.of_requests());
        self.exclusive.held.push(Held { tag: at, dw0 });
        at
    }

    /// Executes Write Uncorrectable, or parks it for exclusive execution.
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
