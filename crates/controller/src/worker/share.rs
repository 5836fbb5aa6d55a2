//! A controller's share of a worker: deficit round robin.
//!
//! In each turn of the worker, each active controller is given the same amount of time, and has
//! commands fetched while it has some left. The last command may take more than there was; what is
//! missing is taken from the turns to come. So a controller with long commands has fewer of them
//! fetched, and none can make a turn longer than its part of it and one command.
//!
//! What a command will cost is estimated before (`exec::quota::cost`), and what the pass has really
//! taken is measured afterwards. A worker that has one controller only does neither.

use std::time::Duration;

/// What a controller gets in each turn, in nanoseconds: about ten reads of 4 KiB.
const QUANTUM: i64 = 5_000;
/// The most that it can owe.
const DEBT: i64 = 40 * QUANTUM;
/// What a pass of a worker's only active controller may take. It bounds how long somebody waits
/// who has not been active.
pub(crate) const ALONE: i64 = 100_000;

/// What a controller has left of its share.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Share {
    left: i64,
}

impl Share {
    /// A turn begins: what may be spent in it, which may be nothing.
    pub(super) fn begin(&mut self) -> i64 {
        self.left = (self.left + QUANTUM).min(QUANTUM);
        self.left
    }

    /// So much was spent.
    pub(super) fn spend(&mut self, time: Duration) {
        let time = time.as_nanos().min(DEBT as u128) as i64;
        self.left = (self.left - time).max(-DEBT);
    }

    /// Nothing is owed.
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
