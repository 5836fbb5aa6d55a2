//! Controllers whose turns take too long.
//!
//! Most of what a turn does is bounded (see `share` and `exec::quota`), but some of it is in a
//! peer's hands: a page fault on memory that it shares waits for as long as it punches holes there,
//! and a disk may do inline what takes long. Whoever takes that long again and again is found here,
//! and served by a thread of its own from then on.
//!
//! A turn also takes long if the system gives the processor to somebody else meanwhile, which is
//! nobody's fault. So the first long turn only has the controller watched; a second one, in which
//! the thread has itself worked that long, or has waited for something, is one too many.

use shadowbell_memory::ThreadUsage;
use std::time::{Duration, Instant};

/// A turn of one controller that is too long.
pub(super) const LONG: Duration = Duration::from_millis(1);
/// How long a controller is watched after one.
const WATCHED: Duration = Duration::from_secs(10);

/// Whether a controller's turns are too long.
#[derive(Debug, Default)]
pub(super) struct SlowTurns {
    watched_until: Option<Instant>,
    reported: bool,
}

impl SlowTurns {
    /// A turn begins: what the thread has used so far, if the controller is watched.
    #[inline]
    pub(super) fn begin(&self) -> Option<ThreadUsage> {
        if self.watched_until.is_none() { None } else { self.measure() }
    }

    #[cold]
    fn measure(&self) -> Option<ThreadUsage> {
        (!self.reported).then(ThreadUsage::now)
    }

    /// A turn has ended at `now`, after `took`. Whether the controller is too slow for company;
    /// said once.
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

    /// A turn in which `work` is done.
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
        // A turn is long by its work, or by a sleep.
        for work in [compute as fn(), || std::thread::sleep(2 * LONG)] {
            let mut slow = SlowTurns::default();
            assert!(!turn(&mut slow, work));
            assert!(turn(&mut slow, work));
            // It is said once.
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
            // Time has passed, and the thread has neither worked nor waited.
            let mut before = slow.begin();
            if let Some(before) = &mut before {
                *before = ThreadUsage::now();
            }
            assert!(!slow.end(before, now, 5 * LONG));
        }
    }
}
