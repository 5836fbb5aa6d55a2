//! Command timeouts in watchdog ticks.

use super::policy::Recovery;
use crate::options::Timeouts;
use std::time::Duration;

/// Maximum length of a tick.
const LONGEST_TICK: Duration = Duration::from_secs(1);
/// Minimum length of a tick.
const SHORTEST_TICK: Duration = Duration::from_millis(1);

/// Tick length, and timeouts in ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TimeoutTicks {
    pub(crate) tick: Duration,
    /// Number of ticks after which a command is late.
    pub(crate) limit: u8,
    /// Number of further ticks after which a late command is overdue.
    pub(crate) grace: u8,
    /// Longest time from the submission of a command until its result: the controller completes the
    /// command, or the driver fails or ends it.
    pub(crate) longest: Duration,
}

impl TimeoutTicks {
    pub(crate) fn new(recovery: Recovery, timeouts: &Timeouts) -> Self {
        let io = timeouts.io;
        // Ticks are counted in a `u8`, so a long timeout needs longer ticks.
        let least = SHORTEST_TICK.max(io / 240);
        let tick = (io / 8).clamp(least, LONGEST_TICK.max(least));
        let in_ticks = |time: Duration| {
            let ticks = time.as_nanos().div_ceil(tick.as_nanos().max(1));
            u8::try_from(ticks).unwrap_or(u8::MAX).clamp(1, 245)
        };
        let (limit, grace) = (in_ticks(io), in_ticks(io / 4));
        let submissions = u32::from(recovery.repeats).saturating_add(1);
        // The longest time that one submission can take: the timeout, an Abort, four admin commands
        // and a reset.
        let each = (io * 2).saturating_add(tick * 4).saturating_add(timeouts.admin * 4);
        let longest = if recovery.enabled { each.saturating_mul(submissions) } else { io };
        Self { tick, limit, grace, longest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_fit_their_byte_and_the_deadline() {
        let ticks = |millis| {
            // The test computes ticks and does not wait for the timeout.
            let timeouts = Timeouts { io: Duration::from_millis(millis), ..Timeouts::default() };
            TimeoutTicks::new(Recovery::default(), &timeouts)
        };
        let ms = Duration::from_millis;
        assert_eq!(
            (ticks(30_000).tick, ticks(30_000).limit, ticks(30_000).grace),
            (ms(1000), 30, 8)
        );
        assert_eq!((ticks(80).tick, ticks(80).limit, ticks(80).grace), (ms(10), 8, 2));
        assert_eq!((ticks(1).tick, ticks(1).limit, ticks(1).grace), (ms(1), 1, 1));
        let hour = ticks(3_600_000);
        assert_eq!((hour.tick, hour.limit), (ms(15_000), 240));
        assert_eq!(ticks(0).limit, 1);
        for millis in [1, 10, 77, 999, 8001, 123_456, 1 << 40] {
            let ticks = ticks(millis);
            assert!(
                ticks.tick * ticks.limit.into() >= ms(millis) || millis == 1 << 40,
                "{ticks:?}"
            );
            assert!(ticks.limit < 250 && ticks.grace <= ticks.limit);
            assert!(ticks.longest > ms(millis));
        }
    }
}
