//! Isolation of slow controllers: detects controllers whose turns take too long.
//!
//! Most work of a turn is bounded (see `drr` and `exec::quota`), but some depends on a peer: a
//! page fault in memory shared by a client waits while the client punches holes, and a disk may
//! execute long requests inline. A controller that takes long repeatedly is detected here, and
//! moves to an I/O thread of its own.
//!
//! A turn also takes long if the kernel preempts the thread, which is not the controller's fault.
//! So the first long turn only starts to watch the controller. A second long turn in which the
//! thread itself used that much CPU time, or blocked, is reported.

use shadowbell_memory::ThreadUsage;
use std::time::{Duration, Instant};

/// Minimum duration of a long turn of one controller.
pub(super) const LONG: Duration = Duration::from_millis(1);
/// Duration of the watch after a long turn.
const WATCHED: Duration = Duration::from_secs(10);

/// Detection of long turns of one controller.
#[derive(Debug, Default)]
pub(super) struct SlowTurns {
    watched_until: Option<Instant>,
    reported: bool,
}

impl SlowTurns {
    /// Begins a turn. Returns the resource usage of the thread so far, if the controller is
    /// watched.
    #[inline]
    pub(super) fn begin(&self) -> Option<ThreadUsage> {
        if self.watched_until.is_none() { None } else { self.measure() }
    }

    #[cold]
    fn measure(&self) -> Option<ThreadUsage> {
        (!self.reported).then(ThreadUsage::now)
    }

    /// Ends a turn at `now`, after `took`. True, once, if the controller is too slow to share the
    /// thread.
    #[inline]
    pub(super) fn end(
        &mut self,
        before: Option<ThreadUsage>,
        now: Instant,
        took: Duration,
    ) -> bool {
        (took >= LONG || before.is_some()) && self.review(before, now, took)
    }

    #[cold]
    fn review(&mut self, before: Option<ThreadUsage>, now: Instant, took: Duration) -> bool {
        if self.reported {
            return false;
        }
        if took < LONG {
            self.watched_until = self.watched_until.filter(|until| now < *until);
            return false;
        }
        self.watched_until = Some(now + WATCHED);
        let Some(before) = before else { return false };
        let after = ThreadUsage::now();
        let worked = after.processor.saturating_sub(before.processor) >= LONG;
        self.reported = worked || after.waits != before.waits;
        self.reported
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a turn that executes `work`.
    fn turn(slow: &mut SlowTurns, work: impl FnOnce()) -> bool {
        let (before, began) = (slow.begin(), Instant::now());
        work();
        let now = Instant::now();
        slow.end(before, now, now.duration_since(began))
    }

    fn compute() {
        let began = ThreadUsage::now().processor;
        while ThreadUsage::now().processor - began < 3 * LONG {
            std::hint::spin_loop();
        }
    }

    #[test]
    fn the_second_long_turn_is_one_too_many() {
        for work in [compute as fn(), || std::thread::sleep(2 * LONG)] {
            let mut slow = SlowTurns::default();
            assert!(!turn(&mut slow, work));
            assert!(turn(&mut slow, work));
            // The controller is reported only once.
            assert!(!turn(&mut slow, work));
        }
    }

    #[test]
    fn short_turns_are_not_watched_for_ever() {
        let mut slow = SlowTurns::default();
        let (now, long) = (Instant::now(), 2 * LONG);
        assert!(!slow.end(None, now, long));
        let before = slow.begin();
        assert!(before.is_some());
        assert!(!slow.end(before, now + WATCHED, LONG / 2));
        assert!(slow.begin().is_none());
    }

    #[test]
    fn a_thread_without_a_processor_is_not_to_blame() {
        let mut slow = SlowTurns::default();
        let now = Instant::now();
        for _ in 0..10 {
            // Time has passed, but the thread has neither used CPU time nor blocked.
            let mut before = slow.begin();
            if let Some(before) = &mut before {
                *before = ThreadUsage::now();
            }
            assert!(!slow.end(before, now, 5 * LONG));
        }
    }
}
