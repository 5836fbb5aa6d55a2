//! Keep Alive: whether the host is still there. Base 2.1, 3.9 "Keep Alive".
//!
//! A PCIe controller need not have it, and no host that we know switches it on by itself. One that
//! does gives a Keep Alive command now and then; a controller that has heard none for as long as
//! the host has said takes it for dead: it writes that down, has a fatal status, and stops.

use std::time::{Duration, Instant};

/// KAS of Identify Controller in milliseconds: what a host asks for is rounded up to its multiples.
pub(crate) const GRANULARITY_MS: u32 = 1000;

/// When the host is taken for dead.
#[derive(Debug, Default)]
pub(crate) struct KeepAlive {
    /// How long it may be silent, and until when.
    until: Option<(Duration, Instant)>,
    /// When somebody is going to look.
    look: Option<Instant>,
}

impl KeepAlive {
    /// The host has said for how long it may be silent; 0 for ever.
    pub(crate) fn set(&mut self, milliseconds: u32, now: Instant) {
        let timeout = Duration::from_millis(milliseconds.into());
        self.until = (milliseconds != 0).then(|| (timeout, now + timeout));
    }

    /// The host is there, or was not listened to.
    pub(crate) fn restart(&mut self, now: Instant) {
        if let Some((timeout, until)) = &mut self.until {
            *until = now + *timeout;
        }
    }

    /// Whether the host has been silent for too long. It is taken for dead once.
    pub(crate) fn expires(&mut self, now: Instant) -> bool {
        self.until.take_if(|(_, until)| *until <= now).is_some()
    }

    /// When to look next, if nobody is going to before.
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
