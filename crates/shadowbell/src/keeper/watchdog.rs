//! When the service manager is told that the service is alive, and when a worker has to show that.

use super::clock::Clock;
use crate::notify;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// What the service manager waits for, if it does.
pub(super) struct Watchdog {
    /// How often it is told.
    every: Duration,
    /// When a worker is asked next.
    next: Instant,
    /// The worker that was asked, and by when it has to answer.
    asked: Option<(u32, Instant)>,
    /// A worker that did not answer, and was ended.
    given_up: Option<u32>,
}

/// What there is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    Nothing,
    /// The worker is to be asked.
    Visit,
    /// The service manager is to be told: nothing keeps this process from its work, and there is
    /// no worker that could answer.
    Alive,
    /// The worker has not answered in time: it is to be ended, and then another one goes on.
    Hangs,
    /// It has not, and can not be ended either. The service manager sees what it can do.
    Lost,
}

/// How far it is.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SavedWatchdog {
    next: u64,
    asked: Option<(u32, u64)>,
    given_up: Option<u32>,
}

impl Watchdog {
    /// How far it is.
    pub(super) fn save(&self, clock: &Clock) -> SavedWatchdog {
        let asked = self.asked.map(|(pid, until)| (pid, clock.write(until)));
        SavedWatchdog { next: clock.write(self.next), asked, given_up: self.given_up }
    }

    /// Goes on from there.
    pub(super) fn restore(&mut self, saved: &SavedWatchdog, clock: &Clock) {
        self.next = clock.read(saved.next).min(self.next);
        self.asked = saved.asked.map(|(pid, until)| (pid, clock.read(until)));
        self.given_up = saved.given_up;
    }

    /// What the service manager wants, by the environment.
    pub(super) fn wanted() -> Option<Self> {
        notify::watchdog().map(|every| Self::new(every, Instant::now()))
    }

    fn new(every: Duration, now: Instant) -> Self {
        Self { every, next: now + every, asked: None, given_up: None }
    }

    /// When there is something to do.
    pub(super) fn deadline(&self) -> Instant {
        self.asked.map_or(self.next, |(_, until)| until)
    }

    /// What there is to do `now`; `worker` is the one that can be asked, if there is one.
    pub(super) fn due(&mut self, now: Instant, worker: Option<u32>) -> Due {
        match self.asked {
            // It has ended, or is about to hand over, and that has limits of its own.
            Some((pid, _)) if Some(pid) != worker => {
                self.asked = None;
                return Due::Alive;
            }
            Some((pid, until)) if until <= now => {
                // Who has not had a processor itself does not know that the other one had.
                if now - until > self.every / 4 {
                    self.asked = Some((pid, now + self.every / 4));
                    return Due::Nothing;
                }
                self.asked = None;
                return match self.given_up.replace(pid) {
                    Some(before) if before == pid => Due::Lost,
                    _ => Due::Hangs,
                };
            }
            Some(_) => return Due::Nothing,
            None => {}
        }
        if now < self.next {
            return Due::Nothing;
        }
        self.next = now + self.every;
        self.asked = worker.map(|pid| (pid, now + self.every / 2));
        if worker.is_some() { Due::Visit } else { Due::Alive }
    }

    /// This worker has answered; whether it was asked.
    pub(super) fn answered(&mut self, worker: u32) -> bool {
        self.asked.take_if(|(pid, _)| *pid == worker).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Nothing waits: the tests say what time it is.
    const EVERY: Duration = Duration::from_secs(8);

    #[test]
    fn a_worker_that_answers_is_asked_once_in_a_while() {
        let mut now = Instant::now();
        let mut watchdog = Watchdog::new(EVERY, now);
        assert_eq!(watchdog.due(now, Some(1)), Due::Nothing);
        for _ in 0..3 {
            assert_eq!(watchdog.deadline(), now + EVERY);
            now += EVERY;
            assert_eq!(watchdog.due(now, Some(1)), Due::Visit);
            assert_eq!(watchdog.due(now, Some(1)), Due::Nothing);
            assert!(!watchdog.answered(2) && watchdog.answered(1) && !watchdog.answered(1));
            assert_eq!(watchdog.due(now, Some(1)), Due::Nothing);
        }
        // Nobody serves: whoever starts, or hands over, has limits of its own.
        now += EVERY;
        assert_eq!(watchdog.due(now, None), Due::Alive);
        assert_eq!(watchdog.deadline(), now + EVERY);
    }

    #[test]
    fn a_worker_that_does_not_answer_is_ended_before_the_service_manager_acts() {
        let began = Instant::now();
        let mut watchdog = Watchdog::new(EVERY, began);
        assert_eq!(watchdog.due(began + EVERY, Some(1)), Due::Visit);
        let late = watchdog.deadline();
        assert!(late < began + 2 * EVERY, "else the service manager is the first");
        assert_eq!(watchdog.due(late, Some(1)), Due::Hangs);
        // It did not even end.
        assert_eq!(watchdog.due(began + 2 * EVERY, Some(1)), Due::Visit);
        assert_eq!(watchdog.due(watchdog.deadline(), Some(1)), Due::Lost);
        // Another one answers.
        let now = watchdog.deadline();
        assert_eq!(watchdog.due(now, Some(2)), Due::Visit);
        assert!(watchdog.answered(2));
    }

    #[test]
    fn whoever_is_gone_or_had_no_processor_is_not_blamed() {
        let began = Instant::now();
        let mut watchdog = Watchdog::new(EVERY, began);
        assert_eq!(watchdog.due(began + EVERY, Some(1)), Due::Visit);
        assert_eq!(watchdog.due(began + EVERY, None), Due::Alive);
        assert_eq!(watchdog.due(began + 2 * EVERY, Some(2)), Due::Visit);
        // All of the machine stood still.
        let now = began + 10 * EVERY;
        assert_eq!(watchdog.due(now, Some(2)), Due::Nothing);
        assert_eq!(watchdog.due(now, Some(2)), Due::Nothing);
        assert_eq!(watchdog.due(watchdog.deadline(), Some(2)), Due::Hangs);
    }
}
