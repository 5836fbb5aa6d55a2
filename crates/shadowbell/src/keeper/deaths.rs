//! When a worker that has died is started again.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// For so long a death counts.
const COUNTS: Duration = Duration::from_secs(60);
/// So many deaths that count are too many.
const MOST: usize = 8;
/// How long to wait after one of them; twice as long after each further one.
const FIRST: Duration = Duration::from_millis(100);

/// The deaths that count.
#[derive(Default)]
pub(super) struct Deaths(VecDeque<Instant>);

impl Deaths {
    /// Another one, `now`: after how long to start the next worker. `None`: they were too many.
    pub(super) fn add(&mut self, now: Instant) -> Option<Duration> {
        while self.0.front().is_some_and(|then| now.duration_since(*then) >= COUNTS) {
            self.0.pop_front();
        }
        self.0.push_back(now);
        let before = self.0.len() - 1;
        (before + 1 < MOST).then(|| FIRST * (1 << before))
    }

    pub(super) fn count(&self) -> usize {
        self.0.len()
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
        while let Some(wait) = deaths.add(now) {
            waits.push(wait.as_millis());
            now += wait;
        }
        assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 6400]);
        assert!(now - begin < COUNTS, "else nothing would ever be too much");
        assert_eq!(deaths.add(now + COUNTS), Some(FIRST));
        assert_eq!(deaths.count(), 1);
    }
}
