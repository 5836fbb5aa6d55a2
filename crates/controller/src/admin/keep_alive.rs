//! Keep Alive Timer: detects a dead host. Base 2.1, 3.9 "Keep Alive".
//!
//! The timer is optional for PCIe controllers, and no known host enables it by default. A host that
//! enables it sends Keep Alive commands periodically. If none arrives within the timeout, the
//! controller adds an error log entry, enters a fatal state (CSTS.CFS) and stops.

use std::time::{Duration, Instant};

/// KAS of Identify Controller in milliseconds: timeouts are rounded up to multiples of it.
pub(crate) const GRANULARITY_MS: u32 = 1000;

/// Keep Alive Timer.
#[derive(Debug, Default)]
pub(crate) struct KeepAlive {
    /// Timeout and expiry time.
    until: Option<(Duration, Instant)>,
    /// Time of the next scheduled check.
    look: Option<Instant>,
}

impl KeepAlive {
    /// Sets the timeout; 0 disables the timer.
    pub(crate) fn set(&mut self, milliseconds: u32, now: Instant) {
        let timeout = Duration::from_millis(milliseconds.into());
        self.until = (milliseconds != 0).then(|| (timeout, now + timeout));
    }

    /// Restarts the timer: the host has sent a command, or the controller could not process any.
    pub(crate) fn restart(&mut self, now: Instant) {
        if let Some((timeout, until)) = &mut self.until {
            *until = now + *timeout;
        }
    }

    /// Returns true once if the timer has expired.
    pub(crate) fn expires(&mut self, now: Instant) -> bool {
        self.until.take_if(|(_, until)| *until <= now).is_some()
    }

    /// Time for which the caller has to schedule a check; `None` if an earlier check suffices.
    pub(crate) fn next_look(&mut self, now: Instant) -> Option<Instant> {
        let (_, until) = self.until?;
        if self.look.is_some_and(|look| now < look && look <= until) {
            return None;
        }
        self.look = Some(until);
        self.look
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_look_at_a_time() {
        let (mut timer, now) = (KeepAlive::default(), Instant::now());
        let after = |ms| now + Duration::from_millis(ms);
        assert_eq!(timer.next_look(now), None, "it is off");
        assert!(!timer.expires(after(1 << 40)));
        timer.set(5000, now);
        assert_eq!(timer.next_look(now), Some(after(5000)));
        timer.restart(after(3000));
        assert_eq!(timer.next_look(after(3000)), None, "there will be one, early enough");
        assert!(!timer.expires(after(5000)));
        assert_eq!(timer.next_look(after(5000)), Some(after(8000)));
        timer.set(1000, after(6000));
        assert_eq!(timer.next_look(after(6000)), Some(after(7000)), "before the one there is");
        assert!(timer.expires(after(7000)));
        assert!(!timer.expires(after(7000)), "once");
        assert_eq!(timer.next_look(after(7000)), None);
        timer.set(1000, after(7000));
        timer.set(0, after(7000));
        assert!(!timer.expires(after(9000)));
    }
}
