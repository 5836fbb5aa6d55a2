//! Exclusive commands: executed while no other command of the controller is in flight on any I/O
//! thread.
//!
//! Three kinds of commands need exclusive execution. A fused Compare and Write is atomic with
//! respect to all other commands (NVM 1.1, "Compare and Write"). Write Uncorrectable changes the
//! list of uncorrectable blocks, and so does a write to uncorrectable blocks; every I/O thread has
//! a copy of this list. All three are rare, so they may be slow. An I/O thread parks a command of
//! these kinds and notifies the control plane. The control plane stops fetching on all I/O threads
//! and waits until nothing is in flight. Then one thread after the other executes its parked
//! commands, one command at a time (module `control`). The I/O threads hold the completions until
//! the control plane has recorded the changes.
//!
//! # Crash recovery
//!
//! A parked command has an entry in the journal, like any command in flight. Each outcome is
//! written to that entry as a [`Decision`] before it takes effect. There are two outcomes: a
//! successful Compare, recorded before its Write begins, and the end of a command, recorded before
//! other commands continue. Thus the process that recovers the controller does not repeat a Compare
//! that would find the data of the Write of the same operation, and does not repeat a write over
//! newer data. A command that changes the uncorrectable blocks is an exception: first the control
//! plane records the change, then the command's end is written to the journal, then other commands
//! continue.

use super::in_flight::InFlightTable;
use super::namespace::NamespaceQueue;
use crate::journal::Decision;
use crate::notice::{ControlHandle, Latch, Notice};
use crate::shared::ControllerShared;
use crate::uncorrectable::{BlockRange, Uncorrectable};
use shadowbell_spec::Sqe;
use shadowbell_spec::nvm::RwFields;
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::sqe::Fuse;
use shadowbell_spec::status::Status;
use std::collections::VecDeque;
use std::sync::Arc;

/// FUSE bits of the command flags.
pub(super) const FUSE: u8 = 0b11;

/// Progress of a fused operation on a disk with atomic compare-and-write
/// (`exec/exclusive.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FusedProgress {
    NotSubmitted,
    /// Submitted by this process, or about to be: the journal has [`Decision::Try`].
    Submitted,
    /// Possibly submitted by a dead process.
    MaybeSubmitted,
    /// A dead process may have submitted the request. This process has submitted it again, and the
    /// disk has found that the blocks differ from the Compare data.
    Differs,
}

/// Parked command, or fused pair, by its in-flight entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parked {
    pub(super) tag: u32,
    pub(super) sq: usize,
    pub(super) sqe: Sqe,
    /// Entry and SQE of the Write that follows if the first command, a Compare, succeeds.
    pub(super) second: Option<(u32, Sqe)>,
    pub(super) progress: FusedProgress,
    pub(super) cancelled: bool,
}

impl Parked {
    pub(super) fn new(tag: u32, sq: usize, sqe: Sqe) -> Self {
        Self { tag, sq, sqe, second: None, progress: FusedProgress::NotSubmitted, cancelled: false }
    }
}

/// Kind of request that an exclusive command submits next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Request of the command itself.
    Plain,
    /// Compare and Write of a fused operation as one disk request.
    CompareAndWrite,
    /// Compare with the data of the Write, to detect if a dead process has written them.
    CompareAgain,
}

/// Exclusive command in execution.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) parked: Parked,
    pub(super) waiting: Option<Latch>,
    pub(super) step: Step,
    /// True for the Compare of a fused operation on a disk that has atomic compare-and-write.
    pub(super) can_compare_and_write: bool,
}

/// Ended command whose completion is held back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    pub(super) tag: u32,
    pub(super) dw0: u32,
}

/// Decision about the command of an entry, to be written to the journal.
pub(super) type Decided = (u32, Decision);

/// Exclusive commands of one engine.
#[derive(Default)]
pub(super) struct Exclusive {
    /// Control plane, and the state that all I/O threads of the controller share; `None` until set.
    pub(super) with: Option<(ControlHandle, Arc<ControllerShared>)>,
    /// True if exclusive execution was requested from the control plane.
    pub(super) is_requested: bool,
    pub(super) parked: VecDeque<Parked>,
    /// Grant of exclusive execution: nothing else is in flight until this latch is released.
    pub(super) granted: Option<Latch>,
    pub(super) running: Option<Running>,
    pub(super) held: Vec<Held>,
    /// True if held completions may be posted.
    pub(super) is_released: bool,
    /// True during a controller reset: held completions are posted at once.
    pub(super) is_reset: bool,
    /// Tags of parked commands that were aborted before they began. They are still to be completed.
    pub(super) ended: Vec<u32>,
    pub(super) decided: Vec<Decided>,
    /// Decisions to be written after the uncorrectable blocks are recorded.
    pub(super) pending_decisions: Vec<Decided>,
    /// Latch that is released when the decisions of `pending_decisions` are written.
    pub(super) settling: Option<Latch>,
    /// Uncorrectable blocks that the command in execution overwrites.
    pub(super) written: Option<BlockRange>,
    /// Completion dword 0 of the command in execution.
    pub(super) dw0: u32,
    /// This I/O thread's copy of the uncorrectable blocks.
    pub(super) marks: Arc<Uncorrectable>,
}

impl Exclusive {
    /// Number of in-flight entries of parked, held and aborted commands.
    pub(super) fn entries(&self) -> usize {
        let halves = self.parked.iter().filter(|parked| parked.second.is_some()).count();
        self.parked.len() + halves + self.held.len() + self.ended.len()
    }

    /// Number of commands that are parked, held, aborted or in execution.
    pub(super) fn len(&self) -> usize {
        self.parked.len() + self.held.len() + self.ended.len() + usize::from(self.running.is_some())
    }

    /// True if an exclusive command is in execution.
    pub(super) fn is_at_work(&self) -> bool {
        self.running.is_some()
    }

    /// True if a step is possible without waiting for a disk or another thread.
    pub(super) fn can_advance(&self) -> bool {
        !self.ended.is_empty()
            || !self.decided.is_empty()
            || self.settling.is_some()
            || (self.is_released || self.is_reset) && !self.held.is_empty()
            || self.granted.is_some() && self.running.is_none()
    }

    /// Appends a parked command.
    pub(super) fn park(&mut self, parked: Parked) {
        self.parked.push_back(parked);
        self.request();
    }

    /// Inserts a command before all others, because a dead process had begun it. The dead process
    /// executed it exclusively, so it has to end before any other command.
    pub(super) fn park_started(&mut self, parked: Parked) {
        self.parked.push_front(parked);
        self.request();
    }

    fn request(&mut self) {
        if let Some((control, _)) = &self.with
            && !std::mem::replace(&mut self.is_requested, true)
        {
            control.notify(Notice::ExclusiveRequested);
        }
    }

    /// Aborts those parked commands for which `which` is true. A command in execution is aborted
    /// through its disk request instead.
    pub(super) fn cancel(
        &mut self,
        which: impl Fn(u32, usize) -> bool,
        in_flight: &mut InFlightTable,
    ) {
        for parked in &mut self.parked {
            let second = parked.second.map(|(tag, _)| tag);
            let is_second = second.is_some_and(|tag| which(tag, parked.sq));
            if parked.cancelled || !which(parked.tag, parked.sq) && !is_second {
                continue;
            }
            parked.cancelled = true;
            // A fused pair is aborted as a whole, even if the host aborts only one of the two
            // commands.
            let (first, other) = match (which(parked.tag, parked.sq), is_second) {
                (true, false) => (Status::ABORT_REQUESTED, Status::FUSED_FAILED),
                (false, true) => (Status::FUSED_FAILED, Status::ABORT_REQUESTED),
                _ => (Status::ABORT_REQUESTED, Status::ABORT_REQUESTED),
            };
            in_flight.fail(parked.tag, first);
            self.ended.push(parked.tag);
            if let Some(tag) = second {
                in_flight.fail(tag, other);
                self.ended.push(tag);
            }
        }
        self.parked.retain(|parked| !parked.cancelled);
    }
}

/// Consequence of uncorrectable blocks for a command.
pub(super) enum Marked {
    /// No consequence: the command affects no uncorrectable blocks, or is in exclusive execution.
    No,
    /// The command requires exclusive execution.
    Park,
    /// The command fails because it reads uncorrectable blocks.
    Fails,
}

/// Checks that two commands are a supported fused operation, Compare and Write of one block.
pub(super) fn check_fused(first: &Sqe, second: &Sqe) -> Result<(), (Status, Status)> {
    let invalid = Status::INVALID_FIELD.with_dnr();
    let (compare, write) = (RwFields::decode(first), RwFields::decode(second));
    let is_compare_and_write = first.opcode == u8::from(NvmOpcode::Compare)
        && second.opcode == u8::from(NvmOpcode::Write)
        && (first.fuse(), second.fuse()) == (Fuse::First, Fuse::Second);
    let is_of_the_same =
        first.nsid == second.nsid && (compare.slba, compare.nlb0) == (write.slba, write.nlb0);
    if !is_compare_and_write || !is_of_the_same {
        return Err((invalid, invalid));
    }
    // The Atomic Compare and Write Unit (ACWU) is one block.
    if compare.nlb0 != 0 {
        return Err((Status::ATOMIC_WRITE_UNIT_EXCEEDED.with_dnr(), Status::FUSED_FAILED));
    }
    Ok(())
}

/// Namespace index and block range of a command, if the range lies within the namespace.
pub(super) fn blocks_of(namespaces: &[NamespaceQueue], sqe: &Sqe) -> Option<(usize, (u64, u64))> {
    let index = (sqe.nsid as usize).checked_sub(1)?;
    let rw = RwFields::decode(sqe);
    let blocks = namespaces.get(index)?.blocks;
    let end = rw.end().filter(|end| *end <= blocks)?;
    Some((index, (rw.slba, end)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_that_a_dead_process_had_started_run_first() {
        let mut exclusive = Exclusive::default();
        for tag in [1, 2] {
            exclusive.park(Parked::new(tag, 0, Sqe::read(1, 0, 0, 0)));
        }
        exclusive.park_started(Parked::new(3, 0, Sqe::write(1, 0, 0, 0)));
        let order: Vec<_> = exclusive.parked.iter().map(|parked| parked.tag).collect();
        assert_eq!(order, [3, 1, 2]);
    }
}
