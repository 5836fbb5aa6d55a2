//! Commands that are carried out alone: while nothing else of the controller is under way, on no
//! worker.
//!
//! Three kinds need that. A fused Compare and Write is one step for everybody else (NVM 1.1,
//! "Compare and Write"). Write Uncorrectable changes what all workers know of a namespace, and so
//! does a command that writes blocks which were marked so. None of them is common, so those that
//! are pay for nothing: one that has to be alone is parked here, and the control plane has all
//! workers fetch nothing more, waits until nothing is under way, and has each of those that have
//! asked carry out what they have parked, one command at a time (`control::alone`). What has ended
//! is held until the control plane has recorded what has changed.
//!
//! # Deaths
//!
//! A command that is parked has a record in the journal, as all that are under way. What becomes of
//! it is written there as a [`Decision`] before anything follows from that: that a Compare was
//! equal, before its Write begins; how a command has ended, before others go on. So who goes on for
//! a dead process does the Write without a look at what it has written itself, and does not write
//! once more over what others have written since. A command that changes which blocks are marked is
//! the exception: how it has ended is written down when that is recorded, and before others go on.

use super::in_flight::InFlightTable;
use super::namespace::NamespaceQueue;
use crate::journal::Decision;
use crate::latch::Latch;
use crate::notice::{ControlHandle, Notice};
use crate::shared::ControllerShared;
use crate::uncorrectable::{BlockRange, Uncorrectable};
use shadowbell_spec::nvm::RwFields;
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::status::Status;
use shadowbell_spec::{Sqe, sqe::Fuse};
use std::collections::VecDeque;
use std::sync::Arc;

/// The half of a fused operation that has to be FUSE.
pub(super) const FUSE: u8 = 0b11;

/// Whether a fused operation was asked of its disk as one step (`exec/both.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    No,
    /// By this process, or it is about to: that is written down.
    Now,
    /// By a process that is dead, perhaps.
    Before,
    /// As above, and the blocks are not equal any more.
    Differs,
}

/// A command, by its entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parked {
    pub(super) tag: u32,
    pub(super) sq: usize,
    pub(super) sqe: Sqe,
    /// The Write that follows if this one, a Compare, finds what it expects.
    pub(super) second: Option<(u32, Sqe)>,
    pub(super) asked: Asked,
    pub(super) cancelled: bool,
}

impl Parked {
    pub(super) fn new(tag: u32, sq: usize, sqe: Sqe) -> Self {
        Self { tag, sq, sqe, second: None, asked: Asked::No, cancelled: false }
    }
}

/// What is done of a command that is alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The command itself.
    Plain,
    /// The two commands of a fused operation at once.
    Both,
    /// A look whether a dead process has done that.
    Look,
}

/// The command that is carried out.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) parked: Parked,
    pub(super) waiting: Option<Latch>,
    pub(super) step: Step,
    /// It is the first of a fused operation, and the disk can do both as one step.
    pub(super) can_both: bool,
}

/// A command that has ended, and of which the host is not told yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    pub(super) tag: u32,
    pub(super) dw0: u32,
}

/// What is decided of the command of this entry, to be written down.
pub(super) type Decided = (u32, Decision);

/// Commands that have to be alone.
#[derive(Default)]
pub(super) struct Alone {
    /// The way to the control plane, and what all workers share.
    pub(super) with: Option<(ControlHandle, Arc<ControllerShared>)>,
    /// It was asked for.
    pub(super) is_asked_for: bool,
    pub(super) parked: VecDeque<Parked>,
    /// Nothing else is under way, until this is let go of.
    pub(super) granted: Option<Latch>,
    pub(super) running: Option<Running>,
    pub(super) held: Vec<Held>,
    /// What is held may go.
    pub(super) is_released: bool,
    /// Nobody wants any of it any more: what is held goes at once.
    pub(super) is_given_up: bool,
    /// Commands that were given up before they began.
    pub(super) ended: Vec<u32>,
    pub(super) decided: Vec<Decided>,
    /// What is to be written down when it is recorded which blocks are marked.
    pub(super) late: Vec<Decided>,
    /// Somebody waits for that.
    pub(super) settling: Option<Latch>,
    /// The blocks that the command which is carried out writes, of those that are marked.
    pub(super) written: Option<BlockRange>,
    /// Dword 0 of its completion.
    pub(super) dw0: u32,
    /// Marked blocks, as this worker knows them.
    pub(super) marks: Arc<Uncorrectable>,
}

impl Alone {
    /// Entries of commands that are here and not carried out.
    pub(super) fn entries(&self) -> usize {
        let halves = self.parked.iter().filter(|parked| parked.second.is_some()).count();
        self.parked.len() + halves + self.held.len() + self.ended.len()
    }

    /// Commands that wait.
    pub(super) fn len(&self) -> usize {
        self.parked.len() + self.held.len() + self.ended.len() + usize::from(self.running.is_some())
    }

    /// Whether a command is being carried out alone.
    pub(super) fn is_at_work(&self) -> bool {
        self.running.is_some()
    }

    /// Whether something can be done without waiting for anybody.
    pub(super) fn can_advance(&self) -> bool {
        !self.ended.is_empty()
            || !self.decided.is_empty()
            || self.settling.is_some()
            || (self.is_released || self.is_given_up) && !self.held.is_empty()
            || self.granted.is_some() && self.running.is_none()
    }

    /// One more command waits.
    pub(super) fn park(&mut self, parked: Parked) {
        self.parked.push_back(parked);
        self.ask();
    }

    /// One more command waits, which a process that is dead had begun: before all others, for it
    /// had none under way beside it.
    pub(super) fn park_begun(&mut self, parked: Parked) {
        self.parked.push_front(parked);
        self.ask();
    }

    fn ask(&mut self) {
        if let Some((control, _)) = &self.with
            && !std::mem::replace(&mut self.is_asked_for, true)
        {
            control.notify(Notice::WantsExclusive);
        }
    }

    /// What is parked of these is given up. What is carried out is a request of a disk like others.
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
            // Of a fused pair, one is given up, and the other with it.
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

/// What marked blocks have to do with a command.
pub(super) enum Marked {
    /// Nothing, or it is alone.
    No,
    /// It has to be alone.
    Park,
    /// It reads some.
    Fails,
}

/// Whether two commands are a fused operation that there is.
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
    // ACWU: one block.
    if compare.nlb0 != 0 {
        return Err((Status::ATOMIC_WRITE_UNIT_EXCEEDED.with_dnr(), Status::FUSED_FAILED));
    }
    Ok(())
}

/// The blocks of a command, if they are some of a namespace.
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
    fn what_a_dead_process_had_begun_comes_first() {
        let mut alone = Alone::default();
        for tag in [1, 2] {
            alone.park(Parked::new(tag, 0, Sqe::read(1, 0, 0, 0)));
        }
        alone.park_begun(Parked::new(3, 0, Sqe::write(1, 0, 0, 0)));
        let order: Vec<_> = alone.parked.iter().map(|parked| parked.tag).collect();
        assert_eq!(order, [3, 1, 2]);
    }
}
