//! Whether an attached controller works, and the one word by which its queues learn of a change.

use crate::error::QueueError;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

/// What the driver has made of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Phase {
    /// It works for us.
    Live,
    /// It is being shut down.
    Closing,
    /// It is disabled: it touches no memory of ours.
    Disabled,
    /// It could not be disabled: it may touch whatever it was given, for ever.
    Lost,
    /// It is being reset, by the thread that has the lock of the I/O queues.
    Resetting,
    /// It went away.
    Gone,
}

impl Phase {
    fn of(epoch: u32) -> Self {
        match epoch & PHASE {
            0 => Self::Live,
            1 => Self::Closing,
            2 => Self::Disabled,
            4 => Self::Resetting,
            5 => Self::Gone,
            _ => Self::Lost,
        }
    }
}

/// The bits of the state epoch that are a [`Phase`].
const PHASE: u32 = 7;
/// What the state epoch grows by when there is something for every queue to look at.
const EPOCH: u32 = 8;

/// The state of a controller, as far as a queue pair is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    /// The controller works for us.
    Live,
    /// It will, when the lock of the I/O queues is free.
    Resetting,
    /// The program detached it.
    Detached,
    /// It went away or was given up. If it is quiet, it touches no memory of ours.
    Over { quiet: bool },
}

/// The state of a controller that is, or is about to be, enabled.
pub(crate) struct ControllerState {
    /// The [`Phase`], and a count of the times that there was something for every queue to look at:
    /// what a queue pair compares with what it saw last, once for each batch.
    epoch: AtomicU32,
    /// How often the controller was reset.
    generation: AtomicU32,
    /// Why the controller is no more, if that is not the program's doing.
    over: OnceLock<Arc<str>>,
}

impl ControllerState {
    pub(crate) fn new() -> Self {
        let (epoch, generation) = (AtomicU32::new(Phase::Live as u32), AtomicU32::new(0));
        Self { epoch, generation, over: OnceLock::new() }
    }

    /// A word that changes when there is something to look at. One load from a line that is written
    /// some times a second at most.
    #[inline]
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// What the epoch means, and everything that was done before it was set.
    pub(crate) fn condition(&self) -> Condition {
        match (self.phase(), self.over.get()) {
            (Phase::Live, _) => Condition::Live,
            (Phase::Resetting, _) => Condition::Resetting,
            (phase, Some(_)) => Condition::Over { quiet: phase == Phase::Disabled },
            (_, None) => Condition::Detached,
        }
    }

    pub(crate) fn phase(&self) -> Phase {
        Phase::of(self.epoch.load(Ordering::Acquire))
    }

    pub(crate) fn set_phase(&self, phase: Phase) {
        let change = |epoch: u32| Some((epoch & !PHASE | phase as u32).wrapping_add(EPOCH));
        let _ = self.epoch.fetch_update(Ordering::AcqRel, Ordering::Acquire, change);
    }

    /// Has every queue count a tick for its commands.
    pub(crate) fn tick(&self) {
        self.epoch.fetch_add(EPOCH, Ordering::AcqRel);
    }

    /// How often the controller was reset.
    pub(crate) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// A reset begins. Called with the lock of the I/O queues held.
    pub(crate) fn begin_reset(&self) {
        self.set_phase(Phase::Resetting);
    }

    /// It is over, and the controller works.
    pub(crate) fn end_reset(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.set_phase(Phase::Live);
    }

    /// The controller is given up, disabled if `quiet`.
    pub(crate) fn give_up(&self, why: &str, quiet: bool) {
        self.over.get_or_init(|| why.into());
        self.set_phase(if quiet { Phase::Disabled } else { Phase::Lost });
    }

    /// The controller went away in this phase, [`Live`](Phase::Live) or
    /// [`Resetting`](Phase::Resetting). What it was given stays given. Whether this call is the one
    /// that changed the phase.
    pub(crate) fn set_gone(&self, from: Phase, why: &str) -> bool {
        if self.phase() != from {
            return false;
        }
        self.over.get_or_init(|| why.into());
        let gone = |epoch: u32| {
            let gone = (epoch & !PHASE | Phase::Gone as u32).wrapping_add(EPOCH);
            (Phase::of(epoch) == from).then_some(gone)
        };
        self.epoch.fetch_update(Ordering::AcqRel, Ordering::Acquire, gone).is_ok()
    }

    /// Why the controller is no more, if that is not the program's doing.
    pub(crate) fn over(&self) -> Option<&Arc<str>> {
        self.over.get()
    }

    /// Whether queue `qid` can be used now. Who holds the lock of the I/O queues sees no reset.
    pub(crate) fn usable(&self, qid: u16) -> Result<(), QueueError> {
        match self.condition() {
            Condition::Live => Ok(()),
            Condition::Over { .. } => Err(QueueError::Failed { qid, why: self.why_over() }),
            Condition::Resetting | Condition::Detached => Err(QueueError::Detached { qid }),
        }
    }

    /// Why the controller is no more, in any case a sentence.
    pub(crate) fn why_over(&self) -> Arc<str> {
        self.over.get().cloned().unwrap_or_else(|| "it was closed".into())
    }
}
