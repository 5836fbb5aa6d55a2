//! Counters and errors of all threads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Maximum number of stored error messages.
const MAX_MESSAGES: usize = 20;

/// Counters, which only grow, and the duration of the longest command.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Number of successful commands of honest guests.
    pub(crate) commands: AtomicU64,
    /// Number of blocks that were read and verified, and number of those with wrong data.
    pub(crate) blocks: AtomicU64,
    pub(crate) bad_blocks: AtomicU64,
    /// Number of reconnects of honest guests.
    pub(crate) attached: AtomicU64,
    pub(crate) errors: AtomicU64,
    longest: AtomicU64,
    longest_since_last_call: AtomicU64,
    messages: Mutex<Vec<String>>,
    /// Number of attacks, and number of those that ended early with an error.
    pub(crate) attacks: AtomicU64,
    pub(crate) aborted: AtomicU64,
    longest_reset: AtomicU64,
    last_aborted: Mutex<Option<String>>,
}

impl Counters {
    /// Records the duration of a command or a reconnect of an honest guest.
    pub(crate) fn record_duration(&self, time: Duration) {
        let nanos = time.as_nanos() as u64;
        self.longest.fetch_max(nanos, Ordering::Relaxed);
        self.longest_since_last_call.fetch_max(nanos, Ordering::Relaxed);
    }

    /// Duration of the longest command of the whole run.
    pub(crate) fn longest(&self) -> Duration {
        Duration::from_nanos(self.longest.load(Ordering::Relaxed))
    }

    /// Duration of the longest command that has ended since the last call of this function.
    pub(crate) fn longest_since_last_call(&self) -> Duration {
        Duration::from_nanos(self.longest_since_last_call.swap(0, Ordering::Relaxed))
    }

    /// Records the duration of an attacker's reset.
    pub(crate) fn record_reset(&self, time: Duration) {
        self.longest_reset.fetch_max(time.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(crate) fn longest_reset(&self) -> Duration {
        Duration::from_nanos(self.longest_reset.load(Ordering::Relaxed))
    }

    /// Records an error of an honest guest.
    pub(crate) fn error(&self, what: String) {
        self.errors.fetch_add(1, Ordering::Relaxed);
        self.add_message(what);
    }

    /// Stores a message for the report at the end, up to a maximum number of messages.
    pub(crate) fn add_message(&self, what: String) {
        let mut messages = lock(&self.messages);
        if messages.len() < MAX_MESSAGES {
            messages.push(what);
        }
    }

    pub(crate) fn messages(&self) -> Vec<String> {
        lock(&self.messages).clone()
    }

    /// Records an attack that ended early.
    pub(crate) fn record_aborted(&self, why: String) {
        self.aborted.fetch_add(1, Ordering::Relaxed);
        *lock(&self.last_aborted) = Some(why);
    }

    pub(crate) fn last_aborted(&self) -> Option<String> {
        lock(&self.last_aborted).clone()
    }
}

/// The value of a counter.
pub(crate) fn value(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
