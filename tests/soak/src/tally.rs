//! Counters and errors of all threads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Maximum number of stored error messages.
const KEPT: usize = 20;

/// Counters, which only grow, and the duration of the longest command.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Number of successful commands of honest guests.
    pub(crate) commands: AtomicU64,
    /// Number of verified blocks, and of wrong ones.
    pub(crate) blocks: AtomicU64,
    pub(crate) bad_blocks: AtomicU64,
    /// Number of reconnects of honest guests.
    pub(crate) attached: AtomicU64,
    pub(crate) errors: AtomicU64,
    longest: AtomicU64,
    longest_lately: AtomicU64,
    words: Mutex<Vec<String>>,
    /// Number of attacks, and of those that ended early.
    pub(crate) attacks: AtomicU64,
    pub(crate) cut_short: AtomicU64,
    longest_reset: AtomicU64,
    last_cut: Mutex<Option<String>>,
}

impl Tally {
    /// Records the duration of a command or a reconnect of an honest guest.
    pub(crate) fn took(&self, time: Duration) {
        let nanos = time.as_nanos() as u64;
        self.longest.fetch_max(nanos, Ordering::Relaxed);
        self.longest_lately.fetch_max(nanos, Ordering::Relaxed);
    }

    /// Duration of the longest command of the whole run.
    pub(crate) fn longest(&self) -> Duration {
        Duration::from_nanos(self.longest.load(Ordering::Relaxed))
    }

    /// Duration of the longest command since the last call.
    pub(crate) fn longest_lately(&self) -> Duration {
        Duration::from_nanos(self.longest_lately.swap(0, Ordering::Relaxed))
    }

    /// Records the duration of an attacker's reset.
    pub(crate) fn reset_took(&self, time: Duration) {
        self.longest_reset.fetch_max(time.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(crate) fn longest_reset(&self) -> Duration {
        Duration::from_nanos(self.longest_reset.load(Ordering::Relaxed))
    }

    /// Records an error of an honest guest.
    pub(crate) fn error(&self, what: String) {
        self.errors.fetch_add(1, Ordering::Relaxed);
        self.say(what);
    }

    /// Stores a message for the report at the end, up to a maximum number of messages.
    pub(crate) fn say(&self, what: String) {
        let mut words = lock(&self.words);
        if words.len() < KEPT {
            words.push(what);
        }
    }

    pub(crate) fn words(&self) -> Vec<String> {
        lock(&self.words).clone()
    }

    /// Records an attack that ended early.
    pub(crate) fn cut(&self, why: String) {
        self.cut_short.fetch_add(1, Ordering::Relaxed);
        *lock(&self.last_cut) = Some(why);
    }

    pub(crate) fn last_cut(&self) -> Option<String> {
        lock(&self.last_cut).clone()
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
