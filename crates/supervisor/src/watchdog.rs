//! Watchdog of the service manager, and liveness checks of the server process for it.

use shadowbell_process::notify;
use std::time::{Duration, Instant};

/// Timers of the watchdog.
pub(super) struct Watchdog {
    /// Interval of the notifications.
    every: Duration,
    /// Time of the next liveness check.
    next: Instant,
    /// Server process of the check in flight, and its deadline.
    pending: Option<(u32, Instant)>,
    /// Server process that missed a deadline and was aborted.
    given_up: Option<u32>,
}

/// Action that the supervisor has to take for the watchdog now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    Nothing,
    /// Send a liveness check to the server process.
    Check,
    /// Notify the service manager without a check: the supervisor runs, and no server process can
    /// be checked.
    Alive,
    /// Abort the server process, which missed the deadline. Another one recovers.
    Hangs,
    /// The server process missed the deadline again after its abort. Without notifications the
    /// service manager restarts the service.
    Lost,
}

impl Watchdog {
    /// Creates the watchdog that the environment (`WATCHDOG_USEC`) requests. The first check is due
    /// at once, because after an exec the last notification, which the previous program sent, may
    /// have been long ago.
    pub(super) fn wanted() -> Option<Self> {
        notify::watchdog().map(|every| Self::new(every, Instant::now()))
    }

    fn new(every: Duration, next: Instant) -> Self {
        Self { every, next, pending: None, given_up: None }
    }

    /// Time of the next action.
    pub(super) fn deadline(&self) -> Instant {
        self.pending.map_or(self.next, |(_, until)| until)
    }

    /// Returns the action that is due at `now`. `worker`: the server process that can be checked.
    pub(super) fn due(&mut self, now: Instant, worker: Option<u32>) -> Due {
        match self.pending {
            // The checked process has ended, or quiesces. A quiesce has its own time limit.
            Some((pid, _)) if Some(pid) != worker => {
                self.pending = None;
                return Due::Alive;
            }
            Some((pid, until)) if until <= now => {
                // The supervisor itself noticed the deadline late, perhaps for lack of CPU time.
                // The server process may have lacked it too, and gets more time to answer.
                if now - until > self.every / 4 {
                    self.pending = Some((pid, now + self.every / 4));
                    return Due::Nothing;
                }
                self.pending = None;
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
        self.pending = worker.map(|pid| (pid, now + self.every / 2));
        if worker.is_some() { Due::Check } else { Due::Alive }
    }

    /// Records an answer. Returns true if a check of this server process was in flight.
    pub(super) fn answered(&mut self, worker: u32) -> bool {
        self.pending.take_if(|(pid, _)| *pid == worker).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // The tests pass times to the watchdog and never wait.
    const EVERY: Duration = Duration::from_secs(8);

    #[test]
    fn a_responsive_worker_is_checked_periodically() {
        let mut now = Instant::now();
        let mut watchdog = Watchdog::new(EVERY, now + EVERY);
        assert_eq!(watchdog.due(now, Some(1)), Due::Nothing);
        for _ in 0..3 {
            assert_eq!(watchdog.deadline(), now + EVERY);
            now += EVERY;
            assert_eq!(watchdog.due(now, Some(1)), Due::Check);
            assert_eq!(watchdog.due(now, Some(1)), Due::Nothing);
            assert!(!watchdog.answered(2) && watchdog.answered(1) && !watchdog.answered(1));
            assert_eq!(watchdog.due(now, Some(1)), Due::Nothing);
        }
        // No process can be checked during a start or an upgrade, which have time limits of their
        // own.
        now += EVERY;
        assert_eq!(watchdog.due(now, None), Due::Alive);
        assert_eq!(watchdog.deadline(), now + EVERY);
    }

    #[test]
    fn a_worker_that_does_not_answer_is_ended_before_the_service_manager_acts() {
        let began = Instant::now();
        let mut watchdog = Watchdog::new(EVERY, began + EVERY);
        assert_eq!(watchdog.due(began + EVERY, Some(1)), Due::Check);
        let late = watchdog.deadline();
        assert!(late < began + 2 * EVERY, "else the service manager is the first");
        assert_eq!(watchdog.due(late, Some(1)), Due::Hangs);
        // The aborted process does not end, and misses the next check too.
        assert_eq!(watchdog.due(began + 2 * EVERY, Some(1)), Due::Check);
        assert_eq!(watchdog.due(watchdog.deadline(), Some(1)), Due::Lost);
        // The next server process answers.
        let now = watchdog.deadline();
        assert_eq!(watchdog.due(now, Some(2)), Due::Check);
        assert!(watchdog.answered(2));
    }

    #[test]
    fn an_ended_or_unscheduled_worker_is_not_killed() {
        let began = Instant::now();
        let mut watchdog = Watchdog::new(EVERY, began + EVERY);
        assert_eq!(watchdog.due(began + EVERY, Some(1)), Due::Check);
        assert_eq!(watchdog.due(began + EVERY, None), Due::Alive);
        assert_eq!(watchdog.due(began + 2 * EVERY, Some(2)), Due::Check);
        // The whole machine was suspended for eight intervals, so the late answer is excused once.
        let now = began + 10 * EVERY;
        assert_eq!(watchdog.due(now, Some(2)), Due::Nothing);
        assert_eq!(watchdog.due(now, Some(2)), Due::Nothing);
        assert_eq!(watchdog.due(watchdog.deadline(), Some(2)), Due::Hangs);
    }
}
