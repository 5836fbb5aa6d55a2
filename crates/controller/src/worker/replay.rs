//! What a process begins with that goes on for a dead one.

use crate::journal::RecoveredCommand;
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
}

impl Replay {
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
