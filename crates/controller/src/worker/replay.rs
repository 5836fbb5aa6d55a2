//! What a process begins with that goes on for a dead one.

use crate::journal::{Decision, RecoveredCommand};
use shadowbell_spec::sqe::Fuse;
use shadowbell_spec::status::Status;
use std::sync::atomic::{AtomicBool, Ordering};

/// A command with which so many processes have died is not carried out any more.
pub(crate) const DEADLY: u8 = 3;
/// If so many have died with one, it and all others are carried out one at a time.
const SUSPECT: u8 = 2;
/// Whether that is so in this process, of whichever controller.
static ONE_AT_A_TIME: AtomicBool = AtomicBool::new(false);

/// A command that was under way in a process that is dead.
pub(crate) struct Replay {
    /// Index of its submission queue.
    pub(crate) sq: usize,
    pub(crate) command: RecoveredCommand,
    /// Its record in the journal, until it has another.
    pub(crate) spare: u32,
    /// The second of a fused operation of which it is the first, with its record.
    pub(crate) second: Option<(RecoveredCommand, u32)>,
}

impl Replay {
    pub(crate) fn new(sq: usize, command: RecoveredCommand, spare: u32) -> Self {
        Self { sq, command, spare, second: None }
    }

    /// Adds one of a submission queue to those that were fetched before it, which begin at `from`.
    /// The two of a fused operation are one as long as nothing was decided of the first: it is
    /// the last of which something is.
    pub(crate) fn add(all: &mut Vec<Self>, from: usize, mut replay: Self) {
        // How the first has ended of an operation that was one step.
        let mut told = None;
        if let Some(Decision::End { dw0, .. }) = &mut replay.command.decision
            && replay.command.sqe.fuse() == Fuse::Second
        {
            told = Some(Status::from_bits(std::mem::take(dw0) as u16));
        }
        let is_first = |first: &&mut Self| {
            first.second.is_none()
                && first.is_undecided(Fuse::First)
                && replay.command.sqe.fuse() == Fuse::Second
                && first.command.count.wrapping_add(1) == replay.command.count
        };
        match all.get_mut(from..).and_then(|of_queue| of_queue.last_mut()).filter(is_first) {
            Some(Self { command: RecoveredCommand { decision, .. }, .. })
                if *decision == Some(Decision::Try) && told.is_some() =>
            {
                *decision = told.map(|status| Decision::End { status, dw0: 0 });
                all.push(replay);
            }
            Some(first) => {
                first.command.deaths = first.command.deaths.max(replay.command.deaths);
                first.second =
                    Some((RecoveredCommand { decision: None, ..replay.command }, replay.spare));
            }
            None => all.push(replay),
        }
    }

    fn is_undecided(&self, fuse: Fuse) -> bool {
        matches!(self.command.decision, None | Some(Decision::Try))
            && self.command.sqe.fuse() == fuse
    }

    /// Whether nothing else may be begun before it has ended.
    pub(crate) fn has_to_be_alone(&self) -> bool {
        self.command.decision == Some(Decision::Begin) || self.second.is_some()
    }

    /// Has all go alone if there is a reason. To be called for each before any is carried out.
    pub(crate) fn suspect_others(&self) {
        if self.command.deaths >= SUSPECT {
            ONE_AT_A_TIME.store(true, Ordering::Relaxed);
        }
    }

    /// Whether it is to be carried out alone.
    pub(crate) fn goes_alone(&self) -> bool {
        ONE_AT_A_TIME.load(Ordering::Relaxed) && !self.is_deadly()
    }

    /// Whether it is not to be carried out again.
    pub(crate) fn is_deadly(&self) -> bool {
        self.command.deaths >= DEADLY
    }
}

/// A submission queue whose next commands are to be started one at a time: those with one of which
/// the process may have died.
pub(crate) struct SuspectQueue {
    /// Its index.
    pub(crate) sq: usize,
    /// The first of them.
    pub(crate) begin: u32,
    /// How many processes have died that were starting that one.
    pub(crate) deaths: u8,
    /// The last process has died by a fault, so it may have been any of them.
    pub(crate) is_of_a_fault: bool,
}

/// What a process begins with.
#[derive(Default)]
pub(crate) struct Inheritance {
    pub(crate) replays: Vec<Replay>,
    pub(crate) suspects: Vec<SuspectQueue>,
}

impl Inheritance {
    /// The same for queues that have other indices now; without those that have none.
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
