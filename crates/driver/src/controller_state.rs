//! Results of Identify, state of an attached controller, and the epoch word that notifies its
//! queues of changes.

use crate::error::QueueError;
use crate::options::Doorbells;
use crate::queue::{QueueMemory, ShadowPages};
use shadowbell_doorbell::RingSize;
use shadowbell_spec::identify::IdentifyController;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Life-cycle phase of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Phase {
    /// Enabled and usable.
    Live,
    /// Being shut down.
    Closing,
    /// Disabled: the controller does not access memory of this process.
    Disabled,
    /// Not disabled, because disabling failed: the controller may access shared memory until this
    /// process ends.
    Lost,
    /// Being reset, by the thread that holds the lock of the I/O queues.
    Resetting,
    /// Removed or unreachable.
    Removed,
}

impl Phase {
    fn of(epoch: u32) -> Self {
        match epoch & PHASE {
            0 => Self::Live,
            1 => Self::Closing,
            2 => Self::Disabled,
            4 => Self::Resetting,
            5 => Self::Removed,
            _ => Self::Lost,
        }
    }
}

/// The bits of the epoch word that encode a [`Phase`].
const PHASE: u32 = 7;
/// Increment of the epoch word that makes every queue check the state.
const EPOCH: u32 = 8;

/// State of a controller from the view of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    /// The controller is usable.
    Live,
    /// A thread resets the controller, and holds the lock of the I/O queues until the reset has
    /// ended.
    Resetting,
    /// The program detached the controller.
    Detached,
    /// The controller failed or was removed. If `quiet` is true, the controller no longer accesses
    /// shared memory.
    Failed { quiet: bool },
}

/// State of a controller that is enabled or about to be enabled.
pub(crate) struct ControllerState {
    /// The [`Phase`], and a counter of the events that every queue has to handle, in one word. Once
    /// for each batch, a queue pair compares the word with the value that it read before.
    epoch: AtomicU32,
    /// Number of completed controller resets.
    generation: AtomicU32,
    /// Cause of a failure; unset if the program detached the controller.
    failure: OnceLock<Arc<str>>,
}

impl ControllerState {
    pub(crate) fn new() -> Self {
        let (epoch, generation) = (AtomicU32::new(Phase::Live as u32), AtomicU32::new(0));
        Self { epoch, generation, failure: OnceLock::new() }
    }

    /// The epoch word. It changes when the state changes or a timeout tick passes. The call costs
    /// one load from a cache line that is written a few times per second at most.
    #[inline]
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Decodes the state. The load has acquire ordering: everything that another thread wrote
    /// before it changed the state is visible afterwards.
    pub(crate) fn condition(&self) -> Condition {
        match (self.phase(), self.failure.get()) {
            (Phase::Live, _) => Condition::Live,
            (Phase::Resetting, _) => Condition::Resetting,
            (phase, Some(_)) => Condition::Failed { quiet: phase == Phase::Disabled },
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

    /// Advances the epoch, so that every queue counts a timeout tick for its commands.
    pub(crate) fn tick(&self) {
        self.epoch.fetch_add(EPOCH, Ordering::AcqRel);
    }

    /// The number of completed controller resets.
    pub(crate) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// Marks the beginning of a reset. Called with the lock of the I/O queues held.
    pub(crate) fn begin_reset(&self) {
        self.set_phase(Phase::Resetting);
    }

    /// Marks the end of a successful reset.
    pub(crate) fn end_reset(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.set_phase(Phase::Live);
    }

    /// Marks the controller as failed; `quiet` is true if the controller could be disabled.
    pub(crate) fn set_unusable(&self, why: &str, quiet: bool) {
        self.failure.get_or_init(|| why.into());
        self.set_phase(if quiet { Phase::Disabled } else { Phase::Lost });
    }

    /// Marks the controller as removed, if its phase is `from` ([`Live`](Phase::Live) or
    /// [`Resetting`](Phase::Resetting)). Memory remains shared with the controller. Returns true if
    /// this call changed the phase.
    pub(crate) fn set_removed(&self, from: Phase, why: &str) -> bool {
        if self.phase() != from {
            return false;
        }
        self.failure.get_or_init(|| why.into());
        let removed = |epoch: u32| {
            let removed = (epoch & !PHASE | Phase::Removed as u32).wrapping_add(EPOCH);
            (Phase::of(epoch) == from).then_some(removed)
        };
        self.epoch.fetch_update(Ordering::AcqRel, Ordering::Acquire, removed).is_ok()
    }

    /// Cause of the failure; `None` if the controller works or the program detached it.
    pub(crate) fn failure(&self) -> Option<&Arc<str>> {
        self.failure.get()
    }

    /// Checks that queue `qid` is usable. A caller that holds the lock of the I/O queues sees no
    /// reset; without the lock, a reset in progress is reported as [`QueueError::Detached`].
    pub(crate) fn usable(&self, qid: u16) -> Result<(), QueueError> {
        match self.condition() {
            Condition::Live => Ok(()),
            Condition::Failed { .. } => Err(QueueError::Failed { qid, why: self.failure_reason() }),
            Condition::Resetting | Condition::Detached => Err(QueueError::Detached { qid }),
        }
    }

    /// Cause of the failure, with a default text if none was recorded.
    pub(crate) fn failure_reason(&self) -> Arc<str> {
        self.failure.get().cloned().unwrap_or_else(|| "it was closed".into())
    }
}

/// Results of Identify Controller, Number of Queues and Doorbell Buffer Config.
pub(crate) struct ControllerInfo {
    pub(crate) identity: Box<IdentifyController>,
    /// Doorbell mode in use, never [`Doorbells::Auto`].
    pub(crate) doorbells: Doorbells,
    /// Shadow Doorbell and EventIdx buffers, if Doorbell Buffer Config succeeded.
    pub(crate) shadow: Option<ShadowPages>,
    /// Maximum number of bytes that one I/O command transfers.
    pub(crate) max_transfer: u64,
    /// Memory for all granted I/O queue pairs.
    pub(crate) io_memory: QueueMemory,
    /// Number of granted queue pairs; their identifiers are 1 to `granted`.
    pub(crate) granted: u16,
    /// Maximum number of entries of an I/O submission queue.
    pub(crate) largest: RingSize,
    /// True if the controller raises interrupts.
    pub(crate) interrupts: bool,
}

impl ControllerInfo {
    /// Timeout of a shutdown: RTD3E of the controller, at least `least`.
    pub(crate) fn shutdown_limit(&self, least: Duration) -> Duration {
        // RTD3E is capped at one minute: a larger value is not trusted.
        let asked = Duration::from_micros(self.identity.rtd3e.into());
        least.max(asked.min(Duration::from_secs(60)))
    }
}
