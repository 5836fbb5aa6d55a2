//! Restart policy: delay and limits for restarts of a server process that died.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Sliding window in which deaths are counted.
const DEATH_WINDOW: Duration = Duration::from_secs(60);
/// Number of deaths in the window at which the supervisor ends the service.
const MAX_DEATHS: usize = 8;
/// Maximum number of consecutive deaths of processes that did not serve after which the next
/// process still recovers from the checkpoint. After one more death, the next process starts
/// without the checkpoint, because the checkpoint may cause the deaths.
const MAX_RECOVERIES: usize = 6;
/// Shortest delay of a restart that is not immediate. The delay doubles with each further counted
/// death.
const FIRST_DELAY: Duration = Duration::from_millis(100);
/// Minimum time of service of a process that is then killed from outside. If the process served for
/// at least this time and left a complete checkpoint, its death is not counted.
const MIN_SERVICE: Duration = Duration::from_millis(50);
/// Minimum time of service of a process that then ends by a fault. If the process served for at
/// least this time and left a complete checkpoint, its death is not counted, because it hardly has
/// the same cause as the death before.
const STABLE_SERVICE: Duration = Duration::from_secs(10);

/// Deaths of server processes that count.
#[derive(Default)]
pub(super) struct RestartPolicy {
    /// Times of the deaths in the window, oldest first. At [`MAX_DEATHS`] the service ends.
    pub(super) times: VecDeque<Instant>,
    /// Number of consecutive deaths of processes that did not serve. Above [`MAX_RECOVERIES`] the
    /// checkpoint is discarded, and from then on deaths of processes that served are added too.
    pub(super) failed: usize,
}

/// Reaction to a death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Recover from the dead process's checkpoint after this delay.
    Recover(Duration),
    /// Start without a checkpoint after this delay.
    Start(Duration),
    /// Too many deaths: end the service.
    GiveUp,
}

impl RestartPolicy {
    /// Records a death at `now` and returns the reaction.
    ///
    /// `served` is the time of service, if the process served. `is_killed` is true if the process
    /// was killed from outside ([`is_killed`](super::worker::is_killed)). `is_left` is true if
    /// there is a complete checkpoint.
    pub(super) fn add(
        &mut self,
        now: Instant,
        served: Option<Duration>,
        is_killed: bool,
        is_left: bool,
    ) -> Next {
        let Self { times, failed } = self;
        while times.front().is_some_and(|then| now.duration_since(*then) >= DEATH_WINDOW) {
            times.pop_front();
        }
        *failed = match served {
            _ if times.is_empty() => usize::from(served.is_none()),
            Some(_) if *failed <= MAX_RECOVERIES => 0,
            _ => *failed + 1,
        };
        let enough = if is_killed { MIN_SERVICE } else { STABLE_SERVICE };
        if is_left && served.is_some_and(|served| served >= enough) {
            // The process recovered and served for long enough, so the checkpoint did not prevent
            // service. This death is not counted, and the oldest counted death is removed.
            times.pop_front();
            return Next::Recover(Duration::ZERO);
        }
        times.push_back(now);
        let wait = |before: usize| FIRST_DELAY * (1 << before);
        if is_left && *failed <= MAX_RECOVERIES {
            // Older deaths are removed from the count. So the delay has a maximum, and the count
            // never ends the service while recovery is possible.
            times.drain(..times.len().saturating_sub(MAX_RECOVERIES));
            return Next::Recover(times.len().checked_sub(2).map_or(Duration::ZERO, wait));
        }
        match times.len() {
            count if count >= MAX_DEATHS => Next::GiveUp,
            count => Next::Start(wait(count - 1)),
        }
    }

    /// Records that a process serves: the deaths before it were no deaths in a row without service.
    pub(super) fn serves(&mut self) {
        if self.failed <= MAX_RECOVERIES {
            self.failed = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_restart_delay_grows_ends_and_is_reset() {
        let begin = Instant::now();
        let mut deaths = RestartPolicy::default();
        let mut now = begin;
        let mut waits = Vec::new();
        while let Next::Start(wait) = deaths.add(now, Some(DEATH_WINDOW), true, false) {
            waits.push(wait.as_millis());
            now += wait;
        }
        assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 6400]);
        assert!(now - begin < DEATH_WINDOW, "else nothing would ever be too much");
        assert_eq!(deaths.add(now + DEATH_WINDOW, None, false, false), Next::Start(FIRST_DELAY));
        assert_eq!(deaths.times.len(), 1);
    }

    #[test]
    fn recovery_is_retried_with_delays_and_then_abandoned() {
        let now = Instant::now();
        let mut deaths = RestartPolicy::default();
        let mut waits = Vec::new();
        while let Next::Recover(wait) = deaths.add(now, None, false, true) {
            waits.push(wait.as_millis());
        }
        assert_eq!(waits, [0, 100, 200, 400, 800, 1600]);
        // The next process started without the old checkpoint, served, and left a complete
        // checkpoint of its own. Its death still counts.
        assert_eq!(deaths.add(now, Some(FIRST_DELAY), false, true), Next::GiveUp);
        // After `DEATH_WINDOW` all earlier deaths are forgotten.
        let later = now + DEATH_WINDOW;
        assert_eq!(deaths.add(later, None, false, true), Next::Recover(Duration::ZERO));
        assert_eq!((deaths.times.len(), deaths.failed), (1, 1));
    }

    /// The checkpoint of a process that has served is never discarded, whatever ends the process.
    #[test]
    fn a_process_that_serves_can_be_recovered() {
        let now = Instant::now();
        let mut deaths = RestartPolicy::default();
        for _ in 0..3 {
            let mut waits = Vec::new();
            for _ in 0..100 {
                let Next::Recover(wait) = deaths.add(now, Some(FIRST_DELAY), false, true) else {
                    panic!("it is not recovered");
                };
                waits.push(wait.as_millis());
                assert_eq!(deaths.failed, 0);
            }
            assert_eq!(waits.last(), Some(&1600));
            // Processes that do not serve die between those that serve.
            for failed in 1..=MAX_RECOVERIES {
                assert!(matches!(deaths.add(now, None, false, true), Next::Recover(_)));
                assert_eq!(deaths.failed, failed);
            }
        }
        // Without a checkpoint, further deaths reach `MAX_DEATHS`, and the service ends.
        assert!(matches!(deaths.add(now, Some(FIRST_DELAY), false, false), Next::Start(_)));
        assert_eq!(deaths.add(now, Some(FIRST_DELAY), false, false), Next::GiveUp);
    }

    #[test]
    fn kills_from_outside_have_no_limit() {
        let now = Instant::now();
        // Recovery after kills from outside has no limit, if the processes served for
        // `MIN_SERVICE`.
        let mut deaths = RestartPolicy::default();
        for _ in 0..1000 {
            let next = deaths.add(now, Some(MIN_SERVICE), true, true);
            assert_eq!(next, Next::Recover(Duration::ZERO));
        }
        assert_eq!(deaths.times.len(), 0);
        for _ in 0..20 {
            assert_eq!(deaths.add(now, None, true, true), Next::Recover(Duration::ZERO));
            assert_eq!(deaths.add(now, None, true, true), Next::Recover(FIRST_DELAY));
            // Each process that served removes one death from the count.
            for _ in 0..2 {
                let next = deaths.add(now, Some(MIN_SERVICE), true, true);
                assert_eq!(next, Next::Recover(Duration::ZERO));
            }
        }
    }
}
