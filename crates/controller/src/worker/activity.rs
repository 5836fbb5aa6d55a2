//! Activity of the I/O threads, for a scanner of commands in flight that sleeps while the process
//! is idle.
//!
//! While all I/O threads sleep, no new command can be in flight, so the scanner may sleep until an
//! I/O thread wakes. The cost for an I/O thread is one flag that it reads on each wake-up, and
//! nothing per command.

use parking_lot::{Condvar, Mutex};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, fence};
use std::time::Duration;

/// True while a scanner waits for an I/O thread to wake.
static WAITS: AtomicBool = AtomicBool::new(false);
static LOCK: Mutex<()> = Mutex::new(());
static WOKEN: Condvar = Condvar::new();

/// Waits until an I/O thread wakes or [`notify_activity`] is called, for at most `limit`. Returns
/// at once if `is_active` returns true. `is_active` is called after `WAITS` was set, so no
/// wake-up is missed.
pub fn wait_for_activity(limit: Duration, is_active: impl FnOnce() -> bool) {
    WAITS.store(true, SeqCst);
    // The fences here and in `note_wake` order each side's store before its load: either the
    // thread sees the flag, or `is_active` sees that the thread is awake.
    fence(SeqCst);
    // `is_active` is called without the lock, because it may drop the last reference to the I/O
    // threads, and these take the lock when they end.
    let is_active = is_active();
    let mut lock = LOCK.lock();
    if !is_active && WAITS.load(SeqCst) {
        let _ = WOKEN.wait_for(&mut lock, limit);
    }
    WAITS.store(false, Relaxed);
}

/// Wakes the waiting scanner.
pub fn notify_activity() {
    let _lock = LOCK.lock();
    WAITS.store(false, SeqCst);
    WOKEN.notify_all();
}

/// Called by an I/O thread that has slept, after it has stored that it is awake.
#[inline]
pub(super) fn note_wake() {
    fence(SeqCst);
    if WAITS.load(Relaxed) {
        notify_activity();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_wakes_ends_the_wait() {
        let (begun, begins) = std::sync::mpsc::channel();
        let waiter = std::thread::spawn(move || {
            wait_for_activity(Duration::from_secs(3600), || {
                begun.send(()).unwrap();
                false
            });
        });
        begins.recv().unwrap();
        note_wake();
        waiter.join().unwrap();
        note_wake();
        wait_for_activity(Duration::from_secs(3600), || true);
    }
}
