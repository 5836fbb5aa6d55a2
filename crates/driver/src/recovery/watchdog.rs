//! Watchdog thread: periodic ticks and status checks.

use parking_lot::{Condvar, Mutex, MutexGuard};
use shadowbell_memory::AbortOnPanic;
use std::io;
use std::sync::{Arc, Weak};
use std::thread::{JoinHandle, ThreadId, current};
use std::time::{Duration, Instant};

/// Controller that a [`Watchdog`] watches.
pub(crate) trait WatchedController: Send + Sync {
    /// Called for every tick. Returns true to request a status check, because a command takes long
    /// or memory pages were lost.
    fn tick(&self) -> bool;

    /// Checks the status and reacts to failures. Returns false to end the watchdog.
    fn check_status(&self) -> bool;
}

/// Intervals of the watchdog.
#[derive(Clone, Copy)]
pub(crate) struct WatchIntervals {
    pub(crate) tick: Duration,
    /// Interval between status checks, unless a tick requests one.
    pub(crate) status: Duration,
}

#[derive(Default)]
struct WatchdogControl {
    stopped: Mutex<bool>,
    changed: Condvar,
    /// Locked while the thread has a strong reference to the watched controller.
    watching: Mutex<()>,
}

/// Watches a controller until the watchdog is dropped. While the thread sleeps, it holds only a
/// weak reference, so it does not keep the controller alive.
pub(crate) struct Watchdog {
    control: Arc<WatchdogControl>,
    thread: Mutex<Option<JoinHandle<()>>>,
    id: ThreadId,
}

impl Watchdog {
    pub(crate) fn spawn(
        target: Weak<dyn WatchedController>,
        intervals: WatchIntervals,
    ) -> io::Result<Self> {
        let control = Arc::new(WatchdogControl::default());
        let thread = std::thread::Builder::new().name("shadowbell-watchdog".into()).spawn({
            let control = Arc::clone(&control);
            move || {
                let _guard = AbortOnPanic::new();
                watch(&target, &control, intervals);
            }
        })?;
        let id = thread.thread().id();
        Ok(Self { control, thread: Mutex::new(Some(thread)), id })
    }

    /// Prevents the thread from taking a strong reference while the guard lives. Returns `None` on
    /// the watchdog thread itself.
    pub(crate) fn pause(&self) -> Option<MutexGuard<'_, ()>> {
        (current().id() != self.id).then(|| self.control.watching.lock())
    }

    /// Stops the thread, and waits for its end unless called on the thread itself.
    pub(crate) fn stop(&self) {
        *self.control.stopped.lock() = true;
        self.control.changed.notify_all();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && current().id() != self.id
        {
            let _ = thread.join();
        }
    }
}

fn watch(
    target: &Weak<dyn WatchedController>,
    control: &WatchdogControl,
    intervals: WatchIntervals,
) {
    let mut checked = Instant::now();
    loop {
        let mut stopped = control.stopped.lock();
        control.changed.wait_while_for(&mut stopped, |stopped| !*stopped, intervals.tick);
        if *stopped {
            return;
        }
        drop(stopped);
        // A paused watchdog skips this tick: the thread that paused it may be about to drop the
        // last handle. `_watching` is declared before the strong reference `target`, so it is
        // dropped later.
        let Some(_watching) = control.watching.try_lock() else { continue };
        let Some(target) = target.upgrade() else { return };
        let is_due = target.tick();
        if is_due || checked.elapsed() >= intervals.status {
            checked = Instant::now();
            if !target.check_status() {
                return;
            }
        }
    }
}
