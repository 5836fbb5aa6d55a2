//! Commands and queues that a recovering process inherits from a dead process.

use crate::journal::{Decision, RecoveredCommand};
use shadowbell_spec::sqe::Fuse;
use shadowbell_spec::status::Status;
use std::sync::atomic::{AtomicBool, Ordering};

/// Number of crashes after which a command is not executed any more.
pub(crate) const DEADLY: u8 = 3;
/// Number of crashes of one command after which this process executes all recovered commands one at
/// a time.
const SUSPECT: u8 = 2;
/// True if this process executes the recovered commands of all controllers one at a time.
static ONE_AT_A_TIME: AtomicBool = AtomicBool::new(false);

/// Command that was in flight in a dead process.
pub(crate) struct Replay {
    /// Index of the submission queue.
    pub(crate) sq: usize,
    pub(crate) command: RecoveredCommand,
    /// Index of the journal record that protects the command until it is started again and gets a
    /// new record.
    pub(crate) reserved_slot: u32,
    /// Second command of a fused operation, with the index of its journal record.
    pub(crate) second: Option<(RecoveredCommand, u32)>,
}

impl Replay {
    pub(crate) fn new(sq: usize, command: RecoveredCommand, reserved_slot: u32) -> Self {
        Self { sq, command, reserved_slot, second: None }
    }

    /// Adds a command of a submission queue. The commands of this queue that were added before
    /// begin at index `from` of `all`. The two commands of a fused operation become one replay,
    /// unless the journal contains the outcome of the first one. (The outcome of the first is
    /// always written after that of the second.)
    pub(crate) fn add(all: &mut Vec<Self>, from: usize, mut replay: Self) {
        // Status of the first command. If the operation was a single disk request, it is stored in
        // the outcome of the second command.
        let mut step_status = None;
        if let Some(Decision::End { dw0, .. }) = &mut replay.command.decision
            && replay.command.sqe.fuse() == Fuse::Second
        {
            step_status = Some(Status::from_bits(std::mem::take(dw0) as u16));
        }
        let is_first = |first: &&mut Self| {
            first.second.is_none()
                && first.is_undecided(Fuse::First)
                && replay.command.sqe.fuse() == Fuse::Second
                && first.command.count.wrapping_add(1) == replay.command.count
        };
        match all.get_mut(from..).and_then(|of_queue| of_queue.last_mut()).filter(is_first) {
            Some(Self { command: RecoveredCommand { decision, .. }, .. })
                if *decision == Some(Decision::Try) && step_status.is_some() =>
            {
                *decision = step_status.map(|status| Decision::End { status, dw0: 0 });
                all.push(replay);
            }
            Some(first) => {
                first.command.crashes = first.command.crashes.max(replay.command.crashes);
                first.second = Some((
                    RecoveredCommand { decision: None, ..replay.command },
                    replay.reserved_slot,
                ));
            }
            None => all.push(replay),
        }
    }

    fn is_undecided(&self, fuse: Fuse) -> bool {
        matches!(self.command.decision, None | Some(Decision::Try))
            && self.command.sqe.fuse() == fuse
    }

    /// True if no other command may be in flight during the execution of this one.
    pub(crate) fn needs_exclusive(&self) -> bool {
        self.command.decision == Some(Decision::Begin) || self.second.is_some()
    }

    /// If this command may have caused several crashes, makes this process execute all recovered
    /// commands one at a time. Called for all commands before the first one is started.
    pub(crate) fn isolate_suspects(&self) {
        if self.command.crashes >= SUSPECT {
            ONE_AT_A_TIME.store(true, Ordering::Relaxed);
        }
    }

    /// True if the command may only be executed while no other recovered command is in flight.
    pub(crate) fn needs_turn(&self) -> bool {
        ONE_AT_A_TIME.load(Ordering::Relaxed) && !self.is_deadly()
    }

    /// True if the command is not to be executed again.
    pub(crate) fn is_deadly(&self) -> bool {
        self.command.crashes >= DEADLY
    }
}

/// Submission queue whose next commands are started one at a time, because one of these commands
/// may have crashed the dead process.
pub(crate) struct SuspectQueue {
    /// Index of the queue.
    pub(crate) sq: usize,
    /// Position of the first suspected command.
    pub(crate) begin: u32,
    /// Number of processes that have crashed while starting that command.
    pub(crate) crashes: u8,
    /// True if the last process crashed by a fault, so that any of the queue's next commands may be
    /// the cause.
    pub(crate) is_of_a_fault: bool,
}

/// Recovered commands and suspected queues.
#[derive(Default)]
pub(crate) struct Inheritance {
    pub(crate) replays: Vec<Replay>,
    pub(crate) suspects: Vec<SuspectQueue>,
}

impl Inheritance {
    /// Replaces each queue index by the result of `index`, after a move of the queues. Commands and
    /// queues for which the result is `None` are dropped.
    pub(crate) fn moved(self, index: impl Fn(usize) -> Option<usize>) -> Self {
        let replays = self.replays.into_iter().filter_map(|replay| {
            let sq = index(replay.sq)?;
            Some(Replay { sq, ..replay })
        });
        let suspects = self.suspects.into_iter().filter_map(|suspect| {
            let sq = index(suspect.sq)?;
            Some(SuspectQueue { sq, ..suspect })
        });
        Self { replays: replays.collect(), suspects: suspects.collect() }
    }
}
