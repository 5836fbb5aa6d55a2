//! When a worker that has died is started again.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// For so long a death counts.
const COUNTS: Duration = Duration::from_secs(60);
/// So many deaths that count are too many.
const MOST: usize = 8;
/// So many are too many for another attempt with what the dead one has left: it may be the reason.
const MOST_RECOVERIES: usize = 6;
/// How long to wait after one of them; twice as long after each further one.
const FIRST: Duration = Duration::from_millis(100);
/// Who has served for so long, and was killed from outside, may die as often as it likes.
const SERVED: Duration = Duration::from_millis(50);
/// Who has served for so long has not died of what the one before it died of.
const SERVED_WELL: Duration = Duration::from_secs(10);

/// The deaths that count.
#[derive(Default)]
pub(super) struct Deaths(VecDeque<Instant>);

/// What to do after a death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Another one goes on with what the dead one has left, after so long.
    Recover(Duration),
    /// Another one begins anew, after so long.
    Start(Duration),
    /// They were too many.
    GiveUp,
}

impl FromIterator<Instant> for Deaths {
    fn from_iter<T: IntoIterator<Item = Instant>>(times: T) -> Self {
        Self(times.into_iter().collect())
    }
}

impl Deaths {
    /// Another one, `now`, of a worker that had served for so long, if it had. `is_killed`: it was
    /// from outside. `is_left`: what it leaves is good for another one.
    pub(super) fn add(
        &mut self,
        now: Instant,
        served: Option<Duration>,
        is_killed: bool,
        is_left: bool,
    ) -> Next {
        while self.0.front().is_some_and(|then| now.duration_since(*then) >= COUNTS) {
            self.0.pop_front();
        }
        let enough = if is_killed { SERVED } else { SERVED_WELL };
        if is_left && served.is_some_and(|served| served >= enough) {
            // It has shown that an earlier one was for another reason.
            self.0.pop_front();
            return Next::Recover(Duration::ZERO);
        }
        self.0.push_back(now);
        let wait = |before: usize| FIRST * (1 << before);
        match self.0.len() {
            1 if is_left => Next::Recover(Duration::ZERO),
            count if count >= MOST => Next::GiveUp,
            count if is_left && count <= MOST_RECOVERIES => Next::Recover(wait(count - 2)),
            count => Next::Start(wait(count - 1)),
        }
    }

    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// When they were.
    pub(super) fn times(&self) -> impl Iterator<Item = Instant> {
        self.0.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn back_off_grows_and_ends_and_is_forgotten() {
        let begin = Instant::now();
        let mut deaths = Deaths::default();
        let mut now = begin;
        let mut waits = Vec::new();
        while let Next::Start(wait) = deaths.add(now, Some(COUNTS), true, false) {
            waits.push(wait.as_millis());
            now += wait;
        }
        assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 6400]);
        assert!(now - begin < COUNTS, "else nothing would ever be too much");
        assert_eq!(deaths.add(now + COUNTS, None, false, false), Next::Start(FIRST));
        assert_eq!(deaths.count(), 1);
    }

    #[test]
    fn what_was_left_is_tried_at_once_and_then_later_and_then_not_any_more() {
        let now = Instant::now();
        let mut deaths = Deaths::default();
        let mut waits = Vec::new();
        while let Next::Recover(wait) = deaths.add(now, Some(FIRST), false, true) {
            waits.push(wait.as_millis());
        }
        assert_eq!(waits, [0, 100, 200, 400, 800, 1600]);
        assert_eq!(deaths.add(now, Some(FIRST), false, false), Next::GiveUp);
        // Whoever is killed from outside after it has served goes on, however often.
        let mut deaths = Deaths::default();
        for _ in 0..1000 {
            let next = deaths.add(now, Some(SERVED), true, true);
            assert_eq!(next, Next::Recover(Duration::ZERO));
        }
        assert_eq!(deaths.count(), 0);
        for _ in 0..20 {
            assert_eq!(deaths.add(now, None, true, true), Next::Recover(Duration::ZERO));
            assert_eq!(deaths.add(now, None, true, true), Next::Recover(FIRST));
            // Each that has served makes up for one.
            for _ in 0..2 {
                let next = deaths.add(now, Some(SERVED), true, true);
                assert_eq!(next, Next::Recover(Duration::ZERO));
            }
        }
    }
}
