//! How many requests a client keeps in flight, and which thread suits that best.
//!
//! A thread that serves the queue too carries out what came together, and answers it together, with
//! no other thread in between: that is less work for each request, and the more of them come at a
//! time the more it counts. A client that waits for each request has nothing of it if the disk is
//! memory: it is served by two threads that wait for each other's next step awake, which is quicker
//! by the time that it takes to wake up its own processor. Where a request takes longer than
//! somebody waits awake, those two would wake each other for each step, and one thread is quicker
//! again. Only one client at a time can have it, so that is for one that is the only client.

use std::time::{Duration, Instant};

/// Requests by which it is decided.
const PERIOD: u32 = 1024;
/// Requests in flight, on average, from which on a thread that serves the queue is worth it, and
/// below which it is not any more.
const DEEP: u64 = 4;
const SHALLOW: u64 = 2;
/// What one counts for that came with more behind it: of long writes few are in flight at a time,
/// because each is over when the next one has been received, and now and then the client waits for
/// all that it has sent.
const MORE: u64 = 2 * DEEP;
/// A request every so often, or less often, is one at a time that takes too long for threads to
/// wait awake.
const SLOW: Duration = Duration::from_micros(35);
/// And so often it is quick enough for that, on a thread that serves the queue too.
const QUICK: Duration = Duration::from_micros(28);
/// Periods until one that was refused is asked for again.
const PAUSE: u32 = 64;

/// How many requests a client keeps in flight.
#[derive(Debug, Default)]
pub(crate) struct Depth {
    requests: u32,
    /// The sum, over these, of those that were in flight with each.
    in_flight: u64,
    /// When the first of them began.
    since: Option<Instant>,
    /// The thread serves the queue too.
    is_lent: bool,
    /// Periods in which no other thread is asked for.
    pause: u32,
}

impl Depth {
    /// A request has begun, and so many are in flight with it. With `more`, the client has sent
    /// more already.
    pub(crate) fn begun(&mut self, in_flight: usize, more: bool) {
        if self.requests == 0 {
            self.since = Some(Instant::now());
        }
        self.requests += 1;
        self.in_flight += (in_flight as u64).max(if more { MORE } else { 0 });
    }

    /// Whether a thread of the other kind would suit the client better. `is_alone` says whether the
    /// server has no other client.
    pub(crate) fn wants_to_move(&mut self, is_alone: impl FnOnce() -> bool) -> bool {
        if self.requests < PERIOD {
            return false;
        }
        let each = self.since.map_or(Duration::ZERO, |since| since.elapsed() / PERIOD);
        self.decide(each, is_alone())
    }

    /// The same, after a period in which a request began every `each`.
    fn decide(&mut self, each: Duration, is_alone: bool) -> bool {
        let mean = self.in_flight / u64::from(self.requests.max(1));
        (self.requests, self.in_flight) = (0, 0);
        if self.is_lent {
            return mean < SHALLOW && !(is_alone && each >= QUICK);
        }
        self.pause = self.pause.saturating_sub(1);
        self.pause == 0 && (mean >= DEEP || is_alone && each >= SLOW)
    }

    /// From here on the client is served by a thread that serves the queue too.
    pub(crate) fn lent(&mut self) {
        self.is_lent = true;
    }

    /// From here on it is served by its own again.
    pub(crate) fn back(&mut self) {
        self.is_lent = false;
    }

    /// The thread that was asked for is not to be had.
    pub(crate) fn refused(&mut self) {
        self.pause = PAUSE;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether it wants to move after a period of so many in flight, and at no time before.
    fn period_of(depth: &mut Depth, in_flight: usize, each: u64, is_alone: bool) -> bool {
        for _ in 0..PERIOD {
            assert!(!depth.wants_to_move(|| is_alone));
            depth.begun(in_flight, false);
        }
        depth.decide(Duration::from_micros(each), is_alone)
    }

    /// The same, of a client that others keep from what is for one alone.
    fn period(depth: &mut Depth, in_flight: usize) -> bool {
        period_of(depth, in_flight, 100, false)
    }

    #[test]
    fn a_deep_client_moves_and_a_shallow_one_comes_back() {
        let mut depth = Depth::default();
        assert!(!period(&mut depth, 1) && !period(&mut depth, 3) && period(&mut depth, 4));
        depth.lent();
        // In between it stays where it is.
        assert!(!period(&mut depth, 32) && !period(&mut depth, 2) && period(&mut depth, 1));
        depth.back();
        assert!(!period(&mut depth, 1) && !period(&mut depth, 3) && period(&mut depth, 32));
        // Long writes. After some of them the client waits for what it has sent.
        for at in 0..PERIOD {
            depth.begun(1, at % 3 != 0);
        }
        assert!(depth.wants_to_move(|| false));
        depth.refused();
        let asked = (0..).take_while(|_| !period(&mut depth, 32)).count();
        assert_eq!(asked, PAUSE as usize - 1);
    }

    #[test]
    fn a_slow_client_moves_while_it_is_alone() {
        let mut depth = Depth::default();
        assert!(!period_of(&mut depth, 1, 13, true) && !period_of(&mut depth, 1, 80, false));
        assert!(period_of(&mut depth, 1, 80, true));
        depth.lent();
        assert!(!period_of(&mut depth, 1, 60, true) && !period_of(&mut depth, 1, 30, true));
        // Another client may need the thread more.
        assert!(period_of(&mut depth, 1, 60, false));
        // And it was the machine that was slow, not the disk.
        assert!(period_of(&mut depth, 1, 22, true));
        // What is measured is the time.
        depth.back();
        for _ in 0..PERIOD {
            depth.begun(1, false);
        }
        depth.since = depth.since.and_then(|since| since.checked_sub(SLOW * PERIOD));
        assert!(depth.wants_to_move(|| true));
    }
}
