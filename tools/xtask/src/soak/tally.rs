//! What was done and seen so far, by all threads together.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How many errors are kept with their words.
const KEPT: usize = 20;

/// Counters that only grow, but for the longest command since the last look.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Commands of honest controllers that came back with success.
    pub(crate) commands: AtomicU64,
    /// Blocks that were read and looked at, and those of them that were wrong.
    pub(crate) blocks: AtomicU64,
    pub(crate) bad_blocks: AtomicU64,
    /// How often an honest one went away and came back.
    pub(crate) attached: AtomicU64,
    pub(crate) errors: AtomicU64,
    longest: AtomicU64,
    longest_lately: AtomicU64,
    words: Mutex<Vec<String>>,
    /// Attacks that were made, and those that ended before their time.
    pub(crate) attacks: AtomicU64,
    pub(crate) cut_short: AtomicU64,
    longest_reset: AtomicU64,
    last_cut: Mutex<Option<String>>,
}

impl Tally {
    /// A command of an honest controller took so long, or its going and coming back.
    pub(crate) fn took(&self, time: Duration) {
        let nanos = time.as_nanos() as u64;
        self.longest.fetch_max(nanos, Ordering::Relaxed);
        self.longest_lately.fetch_max(nanos, Ordering::Relaxed);
    }

    /// The longest command of all.
    pub(crate) fn longest(&self) -> Duration {
        Duration::from_nanos(self.longest.load(Ordering::Relaxed))
    }

    /// The longest command since this was asked last.
    pub(crate) fn longest_lately(&self) -> Duration {
        Duration::from_nanos(self.longest_lately.swap(0, Ordering::Relaxed))
    }

    /// An attacker's own reset took so long.
    pub(crate) fn reset_took(&self, time: Duration) {
        self.longest_reset.fetch_max(time.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(crate) fn longest_reset(&self) -> Duration {
        Duration::from_nanos(self.longest_reset.load(Ordering::Relaxed))
    }

    /// Something went wrong for somebody who is honest.
    pub(crate) fn error(&self, what: String) {
        self.errors.fetch_add(1, Ordering::Relaxed);
        self.say(what);
    }

    /// Keeps the words for the end, if there are not too many already.
    pub(crate) fn say(&self, what: String) {
        let mut words = lock(&self.words);
        if words.len() < KEPT {
            words.push(what);
        }
    }

    pub(crate) fn words(&self) -> Vec<String> {
        lock(&self.words).clone()
    }

    /// An attack ended before its time.
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
