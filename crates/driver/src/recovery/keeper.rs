//! The thread that watches a controller with or without commands in flight.

use crate::shared::Shared;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{JoinHandle, ThreadId, current};
use std::time::{Duration, Instant};

#[derive(Default)]
struct Stop {
    stopped: Mutex<bool>,
    changed: Condvar,
    /// Held while the thread has more than a weak reference.
    looking: Mutex<()>,
}

/// Watches a controller for as long as it lives. It keeps the controller from nothing: it only has a
/// weak reference while it sleeps.
pub(crate) struct Keeper {
    stop: Arc<Stop>,
    thread: Mutex<Option<JoinHandle<()>>>,
    id: ThreadId,
}

impl Keeper {
    /// Watches `shared` every `tick`.
    pub(crate) fn spawn(shared: &Arc<Shared>, tick: Duration) -> std::io::Result<Self> {
        let stop = Arc::new(Stop::default());
        let (watched, stopped) = (Arc::downgrade(shared), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name("shadowbell-keeper".into())
            .spawn(move || keep(&watched, &stopped, tick))?;
        let id = thread.thread().id();
        Ok(Self { stop, thread: Mutex::new(Some(thread)), id })
    }

    /// Keeps the thread from having a reference as long as the guard lives; nothing on the thread
    /// itself, which has one.
    pub(crate) fn hold(&self) -> Option<MutexGuard<'_, ()>> {
        let is_itself = current().id() == self.id;
        (!is_itself).then(|| self.stop.looking.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Has the thread end, and waits for it unless this is it.
    pub(crate) fn stop(&self) {
        *self.stop.stopped.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stop.changed.notify_all();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && current().id() != self.id
        {
            let _ = thread.join();
        }
    }
}

fn keep(watched: &Weak<Shared>, stop: &Stop, tick: Duration) {
    let mut looked = Instant::now();
    loop {
        let stopped = stop.stopped.lock().unwrap_or_else(PoisonError::into_inner);
        let slept = stop.changed.wait_timeout_while(stopped, tick, |stopped| !*stopped);
        let (stopped, _) = slept.unwrap_or_else(PoisonError::into_inner);
        let over = *stopped;
        drop(stopped);
        if over {
            return;
        }
        // Whoever holds this is about to let the controller go, perhaps; then there is no hurry. It
        // outlives the reference.
        let Ok(_looking) = stop.looking.try_lock() else { continue };
        let Some(shared) = watched.upgrade() else { return };
        shared.tick();
        shared.wake_sleepers();
        let waits = shared.was_waiting();
        shared.hear();
        if waits || looked.elapsed() >= shared.recovery.watch {
            looked = Instant::now();
            let goes_on = shared.watch();
            // Whatever was found, nobody sleeps through it.
            shared.wake_sleepers();
            if !goes_on {
                return;
            }
        }
    }
}
