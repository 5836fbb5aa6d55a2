//! Deficit round robin: share of an I/O thread's time for each controller.
//!
//! In each turn of the thread, each active controller gets the same time quantum, and commands are
//! fetched while some of it is left. The last command may overdraw the quantum; the deficit is
//! taken from the following turns. So fewer commands are fetched of a controller with long
//! commands, and no controller can prolong a turn by more than its quantum and one command.
//!
//! The cost of a command is estimated before its execution (`exec::quota::cost`), and the time of
//! a pass is measured afterwards. A thread with only one controller measures no time.

use std::time::Duration;

/// Time quantum per turn, in nanoseconds: about ten reads of 4 KiB.
const QUANTUM: i64 = 5_000;
/// Maximum deficit.
const DEBT: i64 = 40 * QUANTUM;
/// Budget of a pass of the only active controller of a thread, in nanoseconds. It bounds the delay
/// of a controller that becomes active.
pub(crate) const SOLE: i64 = 100_000;

/// Remaining share of a controller.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Share {
    left: i64,
}

impl Share {
    /// Begins a turn. Returns the budget, which may be 0 or negative.
    pub(super) fn begin(&mut self) -> i64 {
        self.left = (self.left + QUANTUM).min(QUANTUM);
        self.left
    }

    /// Deducts the time of a pass.
    pub(super) fn spend(&mut self, time: Duration) {
        let time = time.as_nanos().min(DEBT as u128) as i64;
        self.left = (self.left - time).max(-DEBT);
    }

    /// Clears the deficit.
    pub(super) fn forgive(&mut self) {
        self.left = self.left.max(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_takes_more_waits_for_as_long() {
        let mut share = Share::default();
        let mut turns = 0;
        for _ in 0..1000 {
            if share.begin() > 0 {
                turns += 1;
                share.spend(Duration::from_nanos(4 * QUANTUM as u64));
            }
        }
        assert!((249..=251).contains(&turns), "{turns}");
    }

    #[test]
    fn nothing_is_saved_up_and_no_debt_lasts() {
        let mut share = Share::default();
        (0..1000).for_each(|_| {
            share.begin();
        });
        assert_eq!(share.begin(), QUANTUM);
        share.spend(Duration::from_secs(1000));
        share.spend(Duration::from_secs(1000));
        let turns = (0..).take_while(|_| share.begin() <= 0).count();
        assert_eq!(turns as i64, DEBT / QUANTUM);
    }
}
