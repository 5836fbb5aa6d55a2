//! Attached controller: the state that all handles and queue pairs share.

use crate::admin::{AdminCommands, AdminData, AdminPlane, AdminResult};
use crate::controller_state::{Condition, ControllerInfo, ControllerState, Phase};
use crate::dma::{BufferPool, DmaError};
use crate::enabled_controller::EnabledController;
use crate::error::{CommandError, DetachError, QueueError};
use crate::namespace::Namespace;
use crate::recovery::{Counters, Recovery, TimeoutTicks, Watchdog};
use parking_lot::Mutex;
use shadowbell_memory::{EventFd, sigbus};
use shadowbell_spec::Sqe;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// An attached controller. Every handle holds a reference. The drop of the last reference shuts the
/// controller down.
pub(crate) struct AttachedController {
    pub(crate) enabled: EnabledController,
    pub(crate) info: ControllerInfo,
    pub(crate) recovery: Recovery,
    pub(crate) ticks: TimeoutTicks,
    pub(crate) counters: Counters,
    /// Queues that sleep on an event of their own. A set flag requests a wakeup from the watchdog.
    sleepers: Mutex<Vec<(Arc<AtomicBool>, EventFd)>>,
    /// True if a queue had a long-running command at its last timeout check.
    has_long_running: AtomicBool,
    /// Process-wide count of SIGBUS faults (lost memory pages) at the last check.
    faults: AtomicU64,
    /// Namespaces that were identified again after an event, and that the program has not taken
    /// yet.
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
            has_long_running: AtomicBool::new(false),
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

    /// Checks that queue `qid` is usable. Waits for the end of a reset that is in progress.
    pub(crate) fn check(&self, qid: u16) -> Result<(), QueueError> {
        if self.state().condition() == Condition::Resetting {
            // The thread that resets the controller holds the lock until the reset has ended.
            drop(self.enabled.io_queues());
        }
        self.state().usable(qid)
    }

    /// Allocates memory for `count` buffers of `size` bytes and shares it with the controller.
    pub(crate) fn buffers(&self, count: usize, size: usize) -> Result<BufferPool, DmaError> {
        let device = &self.enabled.admin.device;
        BufferPool::new(&device.transport, count, size, device.page as usize)
    }

    /// Stores the watchdog, which is stopped when the controller is shut down.
    pub(crate) fn set_watchdog(&self, watchdog: Watchdog) {
        // The cell is empty, because `attach` calls this function only once.
        let _ = self.watchdog.set(watchdog);
    }

    /// Registers a queue that sleeps on `event`. While the returned flag is set, the next watchdog
    /// tick signals the event and clears the flag.
    pub(crate) fn add_sleeper(&self, event: EventFd) -> Arc<AtomicBool> {
        let wants_wakeup = Arc::new(AtomicBool::new(false));
        self.sleepers.lock().push((Arc::clone(&wants_wakeup), event));
        wants_wakeup
    }

    /// Unregisters a queue that is being dropped, by its flag.
    pub(crate) fn remove_sleeper(&self, wants_wakeup: &Arc<AtomicBool>) {
        self.sleepers.lock().retain(|(sleeper, _)| !Arc::ptr_eq(sleeper, wants_wakeup));
    }

    /// Wakes the sleeping queues that have commands outstanding. They then check for timeouts.
    pub(crate) fn wake_sleepers(&self) {
        for (wants_wakeup, event) in &*self.sleepers.lock() {
            if wants_wakeup.swap(false, Ordering::Relaxed) {
                event.signal();
            }
        }
    }

    /// Records that a queue has a long-running command.
    pub(crate) fn note_long_running(&self) {
        self.has_long_running.store(true, Ordering::Relaxed);
    }

    /// True if a queue had a long-running command since the last call.
    pub(crate) fn take_long_running(&self) -> bool {
        self.has_long_running.swap(false, Ordering::Relaxed)
    }

    /// True if memory pages of this process were lost since the last call. Shared DMA memory may be
    /// among them.
    pub(crate) fn take_faults(&self) -> bool {
        let now = sigbus::faults();
        self.faults.swap(now, Ordering::Relaxed) != now
    }

    /// Stores namespaces that were identified again, until the program takes them.
    pub(crate) fn set_changed_namespaces(&self, namespaces: Vec<Namespace>) {
        *self.changed_namespaces.lock() = Some(namespaces);
    }

    /// Takes the namespaces that were identified again since the last call.
    pub(crate) fn take_changed_namespaces(&self) -> Option<Vec<Namespace>> {
        self.changed_namespaces.lock().take()
    }

    /// Shuts the controller down: see [`EnabledController::shut_down`].
    pub(crate) fn shut_down(&self) -> Result<(), DetachError> {
        if let Some(watchdog) = self.watchdog.get() {
            watchdog.stop();
        }
        let least = self.enabled.admin.device.timeouts.shutdown;
        self.enabled.shut_down(self.info.shutdown_limit(least))
    }

    /// Shuts the controller down if the dropped handle is the last one. The watchdog is paused,
    /// because otherwise its temporary reference could be the last one, and the watchdog's thread
    /// would shut the controller down later.
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
        // If the controller had failed, the failure is in the log already.
        let had_failed = self.state().failure().is_some();
        match self.shut_down() {
            Ok(()) => {}
            Err(error) if had_failed => tracing::debug!("{error}"),
            Err(error) => tracing::warn!("{error}"),
        }
        if self.state().phase() == Phase::Lost {
            let bytes = self.info.io_memory.leak();
            tracing::warn!(
                "{} may still use its I/O queues, so their memory ({bytes} bytes) is kept",
                self.name()
            );
        }
    }
}
