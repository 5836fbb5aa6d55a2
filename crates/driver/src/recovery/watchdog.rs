//! The thread that watches a controller with or without commands in flight.

use parking_lot::{Condvar, Mutex, MutexGuard};
use shadowbell_memory::AbortOnPanic;
use std::io;
use std::sync::{Arc, Weak};
use std::thread::{JoinHandle, ThreadId, current};
use std::time::{Duration, Instant};

/// What is watched.
pub(crate) trait Watched: Send + Sync {
    /// Called for every tick. Whether a command was outstanding for long or memory was lost, so
    /// that the status is to be checked.
    fn tick(&self) -> bool;

    /// Checks the status, and does about it what has to be done. Whether to go on watching.
    fn check_status(&self) -> bool;
}

/// How often the watchdog looks.
#[derive(Clone, Copy)]
pub(crate) struct WatchIntervals {
    pub(crate) tick: Duration,
    /// Between two checks of the status, unless a tick wants one.
    pub(crate) status: Duration,
}

#[derive(Default)]
struct WatchdogControl {
    stopped: Mutex<bool>,
    changed: Condvar,
    /// Held while the thread has more than a weak reference.
    watching: Mutex<()>,
}

/// Watches for as long as it lives. It has only a weak reference while it sleeps, so that it does
/// not keep what it watches.
pub(crate) struct Watchdog {
    control: Arc<WatchdogControl>,
    thread: Mutex<Option<JoinHandle<()>>>,
    id: ThreadId,
}

impl Watchdog {
    pub(crate) fn spawn(watched: Weak<dyn Watched>, intervals: WatchIntervals) -> io::Result<Self> {
        let control = Arc::new(WatchdogControl::default());
        let thread = std::thread::Builder::new().name("shadowbell-watchdog".into()).spawn({
            let control = Arc::clone(&control);
            move || {
                let _guard = AbortOnPanic::new();
                watch(&watched, &control, intervals);
            }
        })?;
        let id = thread.thread().id();
        Ok(Self { control, thread: Mutex::new(Some(thread)), id })
    }

    /// Keeps the thread from having a reference as long as the guard lives; nothing on the thread
    /// itself, which has one.
    pub(crate) fn pause(&self) -> Option<MutexGuard<'_, ()>> {
        (current().id() != self.id).then(|| self.control.watching.lock())
    }

    /// Has the thread end, and waits for it unless this is it.
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

fn watch(watched: &Weak<dyn Watched>, control: &WatchdogControl, intervals: WatchIntervals) {
    let mut checked = Instant::now();
    loop {
        let mut stopped = control.stopped.lock();
        control.changed.wait_while_for(&mut stopped, |stopped| !*stopped, intervals.tick);
        if *stopped {
            return;
        }
        drop(stopped);
        // Whoever holds this may be about to drop the last handle; the next tick is soon enough.
        // The guard outlives the reference.
        let Some(_watching) = control.watching.try_lock() else { continue };
        let Some(watched) = watched.upgrade() else { return };
        let is_due = watched.tick();
        if is_due || checked.elapsed() >= intervals.status {
            checked = Instant::now();
            if !watched.check_status() {
                return;
            }
        }
    }
}
