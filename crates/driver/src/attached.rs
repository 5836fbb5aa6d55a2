//! A controller that was attached: what its handles and its queue pairs share.

use crate::admin::{AdminCommands, AdminData, AdminPlane, AdminResult};
use crate::controller_info::ControllerInfo;
use crate::controller_state::{Condition, ControllerState, Phase};
use crate::dma::{BufferPool, DmaError};
use crate::enabled::EnabledController;
use crate::error::{CommandError, DetachError, QueueError};
use crate::namespace::Namespace;
use crate::recovery::{Counters, Recovery, TimeoutTicks, Watchdog};
use parking_lot::Mutex;
use shadowbell_memory::{EventFd, sigbus};
use shadowbell_spec::Sqe;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// An attached controller. Kept by every handle; with the last of them it is shut down.
pub(crate) struct AttachedController {
    pub(crate) enabled: EnabledController,
    pub(crate) info: ControllerInfo,
    pub(crate) recovery: Recovery,
    pub(crate) ticks: TimeoutTicks,
    pub(crate) counters: Counters,
    /// Queues that sleep by themselves, and whether they want to be woken.
    sleepers: Mutex<Vec<(Arc<AtomicBool>, EventFd)>>,
    /// A queue had something outstanding for long when it looked last.
    has_lasting: AtomicBool,
    /// Pages that were lost in all of the process when that was looked at last.
    faults: AtomicU64,
    /// The namespaces, if they were read again and nobody has asked for them.
    changed_namespaces: Mutex<Option<Vec<Namespace>>>,
    watchdog: OnceLock<Watchdog>,
}

impl AttachedController {
    pub(crate) fn new(
        enabled: EnabledController,
        info: ControllerInfo,
        recovery: Recovery,
    ) -> Self {
        Self {
            ticks: TimeoutTicks::new(recovery, &enabled.admin.device.timeouts),
            enabled,
            info,
            recovery,
            counters: Counters::default(),
            sleepers: Mutex::default(),
            has_lasting: AtomicBool::new(false),
            faults: AtomicU64::new(sigbus::faults()),
            changed_namespaces: Mutex::default(),
            watchdog: OnceLock::new(),
        }
    }

    pub(crate) fn name(&self) -> &str {
        self.enabled.admin.name()
    }

    #[inline]
    pub(crate) fn state(&self) -> &ControllerState {
        &self.enabled.state
    }

    /// Whether queue `qid` can be used, after the reset that may be under way.
    pub(crate) fn check(&self, qid: u16) -> Result<(), QueueError> {
        if self.state().condition() == Condition::Resetting {
            // Whoever resets it holds the lock until it is done.
            drop(self.enabled.io_queues());
        }
        self.state().usable(qid)
    }

    /// Memory for `count` buffers of `size` bytes, shared with the controller.
    pub(crate) fn buffers(&self, count: usize, size: usize) -> Result<BufferPool, DmaError> {
        let device = &self.enabled.admin.device;
        BufferPool::new(&device.transport, count, size, device.page as usize)
    }

    /// Has `watchdog` stopped when the controller is shut down.
    pub(crate) fn set_watchdog(&self, watchdog: Watchdog) {
        // Set once, when attaching.
        let _ = self.watchdog.set(watchdog);
    }

    /// A queue that sleeps on `event` by itself: when the returned flag is set, the watchdog
    /// signals the event once.
    pub(crate) fn add_sleeper(&self, event: EventFd) -> Arc<AtomicBool> {
        let wants_wakeup = Arc::new(AtomicBool::new(false));
        self.sleepers.lock().push((Arc::clone(&wants_wakeup), event));
        wants_wakeup
    }

    /// The queue with this flag is dropped.
    pub(crate) fn remove_sleeper(&self, wants_wakeup: &Arc<AtomicBool>) {
        self.sleepers.lock().retain(|(sleeper, _)| !Arc::ptr_eq(sleeper, wants_wakeup));
    }

    /// Wakes the queues that sleep by themselves with something outstanding.
    pub(crate) fn wake_sleepers(&self) {
        for (wants_wakeup, event) in &*self.sleepers.lock() {
            if wants_wakeup.swap(false, Ordering::Relaxed) {
                event.signal();
            }
        }
    }

    /// A queue has something outstanding for long.
    pub(crate) fn note_lasting(&self) {
        self.has_lasting.store(true, Ordering::Relaxed);
    }

    /// Whether one had since this was asked last.
    pub(crate) fn take_lasting(&self) -> bool {
        self.has_lasting.swap(false, Ordering::Relaxed)
    }

    /// Whether memory was lost since this was asked last, perhaps some that the controller shares.
    pub(crate) fn take_faults(&self) -> bool {
        let now = sigbus::faults();
        self.faults.swap(now, Ordering::Relaxed) != now
    }

    /// Keeps the namespaces, which were read again, for the program.
    pub(crate) fn set_changed_namespaces(&self, namespaces: Vec<Namespace>) {
        *self.changed_namespaces.lock() = Some(namespaces);
    }

    /// The namespaces, if they were read again since this was called last.
    pub(crate) fn take_changed_namespaces(&self) -> Option<Vec<Namespace>> {
        self.changed_namespaces.lock().take()
    }

    /// Ends the controller's work: see [`EnabledController::shut_down`].
    pub(crate) fn shut_down(&self) -> Result<(), DetachError> {
        if let Some(watchdog) = self.watchdog.get() {
            watchdog.stop();
        }
        let least = self.enabled.admin.device.timeouts.shutdown;
        self.enabled.shut_down(self.info.shutdown_limit(least))
    }

    /// Called by a handle that is being dropped: if it is the last, the controller is shut down
    /// here and now, and not when the watchdog, which may have a reference, drops that.
    pub(crate) fn shut_down_if_last(this: &Arc<Self>) {
        let Some(watchdog) = this.watchdog.get() else { return };
        let Some(_paused) = watchdog.pause() else { return };
        if Arc::strong_count(this) == 1
            && let Err(error) = this.shut_down()
        {
            tracing::warn!("{error}");
        }
    }
}

impl AdminCommands for AttachedController {
    fn plane(&self) -> &AdminPlane {
        &self.enabled.admin
    }

    fn execute(
        &self,
        sqe: Sqe,
        data: AdminData<'_>,
        limit: Duration,
    ) -> Result<AdminResult, CommandError> {
        self.check(0).map_err(|source| CommandError::not_submitted(sqe.opcode, source))?;
        self.enabled.admin.execute(sqe, data, limit)
    }
}

impl Drop for AttachedController {
    fn drop(&mut self) {
        // A controller that was given up has been in the log.
        let was_over = self.state().over().is_some();
        match self.shut_down() {
            Ok(()) => {}
            Err(error) if was_over => tracing::debug!("{error}"),
            Err(error) => tracing::warn!("{error}"),
        }
        if self.state().phase() == Phase::Lost {
            let bytes = self.info.io_memory.keep();
            tracing::warn!(
                "{} may still use its I/O queues, so their memory ({bytes} bytes) is kept",
                self.name()
            );
        }
    }
}
