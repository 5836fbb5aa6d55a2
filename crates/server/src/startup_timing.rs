//! Durations of the phases of a start or a recovery, during which clients wait.

use std::fmt;
use std::time::{Duration, Instant};

/// Durations of the phases that have ended, in order.
#[derive(Debug)]
pub(super) struct Phases {
    last: Instant,
    ended: Vec<(&'static str, Duration)>,
}

impl Phases {
    pub(super) fn begin() -> Self {
        Self { last: Instant::now(), ended: Vec::new() }
    }

    /// Ends a phase and begins the next one.
    pub(super) fn ended(&mut self, name: &'static str) {
        let now = Instant::now();
        self.ended.push((name, now - self.last));
        self.last = now;
    }
}

impl fmt::Display for Phases {
    /// Formats the durations: `threads 120, checkpoint 800 us`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (nth, (name, took)) in self.ended.iter().enumerate() {
            let comma = if nth == 0 { "" } else { ", " };
            write!(f, "{comma}{name} {}", took.as_micros())?;
        }
        f.write_str(" us")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_listed_in_their_order() {
        let mut phases = Phases::begin();
        phases.ended("first");
        phases.ended("second");
        let text = phases.to_string();
        assert!(text.starts_with("first ") && text.contains(", second "), "{text}");
        assert!(text.ends_with(" us"), "{text}");
    }
}
