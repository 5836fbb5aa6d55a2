//! Queue-depth estimate of a client, from which the thread that serves it is chosen.
//!
//! An I/O thread that serves the queue and the client executes a batch of requests and sends the
//! batch of replies without another thread in between. That is less work per request, and the
//! gain grows with the batch. A client with one request in flight gains nothing if the disk is
//! memory: two threads that poll for each other's next step are faster, because no processor has
//! to be woken. If a request takes longer than the threads poll, the two threads would wake each
//! other for each step, and the single I/O thread is faster again. An I/O thread serves at most
//! one client, so this last rule holds only for the only client of a server.

use std::time::{Duration, Instant};

/// Requests per decision.
const PERIOD: u32 = 1024;
/// Mean requests in flight from which the I/O thread serves the client. Below [`SHALLOW`], the
/// client returns to its own thread.
const DEEP: u64 = 4;
const SHALLOW: u64 = 2;
/// Depth that counts for a request if the client has already sent more data behind it.
///
/// Few long writes are in flight at a time, because each completes before the next one is
/// received in full. Now and then such a client waits for all replies, which must not lower the
/// estimate.
const MORE: u64 = 2 * DEEP;
/// Time per request from which a request takes longer than the two threads poll.
const SLOW: Duration = Duration::from_micros(35);
/// Time per request below which a client on the I/O thread returns to its own thread.
const QUICK: Duration = Duration::from_micros(28);
/// Periods between two requests for the I/O thread after a refusal.
const PAUSE: u32 = 64;

/// Queue-depth estimate of a client.
#[derive(Debug, Default)]
pub(crate) struct Depth {
    requests: u32,
    /// Sum over `requests` of the number in flight when each began.
    in_flight: u64,
    /// Start of the first of `requests`.
    since: Option<Instant>,
    /// True while the I/O thread serves the client.
    is_lent: bool,
    /// Remaining periods in which the I/O thread is not requested.
    pause: u32,
}

impl Depth {
    /// Records the start of a request with `in_flight` in flight, the request included. `more` is
    /// set if the client has already sent more data.
    pub(crate) fn begun(&mut self, in_flight: usize, more: bool) {
        if self.requests == 0 {
            self.since = Some(Instant::now());
        }
        self.requests += 1;
        self.in_flight += (in_flight as u64).max(if more { MORE } else { 0 });
    }

    /// True if the other kind of thread suits the client better. `is_alone` returns true if the
    /// server has no other client.
    pub(crate) fn wants_to_move(&mut self, is_alone: impl FnOnce() -> bool) -> bool {
        if self.requests < PERIOD {
            return false;
        }
        let each = self.since.map_or(Duration::ZERO, |since| since.elapsed() / PERIOD);
        self.decide(each, is_alone())
    }

    /// Decision of [`wants_to_move`](Self::wants_to_move) for a period of `each` per request.
    fn decide(&mut self, each: Duration, is_alone: bool) -> bool {
        let mean = self.in_flight / u64::from(self.requests.max(1));
        (self.requests, self.in_flight) = (0, 0);
        if self.is_lent {
            return mean < SHALLOW && !(is_alone && each >= QUICK);
        }
        self.pause = self.pause.saturating_sub(1);
        self.pause == 0 && (mean >= DEEP || is_alone && each >= SLOW)
    }

    /// Records that the I/O thread serves the client from now on.
    pub(crate) fn lent(&mut self) {
        self.is_lent = true;
    }

    /// Records that the client's own thread serves the client again.
    pub(crate) fn back(&mut self) {
        self.is_lent = false;
    }

    /// Records that the I/O thread was not available.
    pub(crate) fn refused(&mut self) {
        self.pause = PAUSE;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Result after a period with `in_flight` in flight. Asserts no earlier move.
    fn period_of(depth: &mut Depth, in_flight: usize, each: u64, is_alone: bool) -> bool {
        for _ in 0..PERIOD {
            assert!(!depth.wants_to_move(|| is_alone));
            depth.begun(in_flight, false);
        }
        depth.decide(Duration::from_micros(each), is_alone)
    }

    /// Period of a client that is not the server's only one.
    fn period(depth: &mut Depth, in_flight: usize) -> bool {
        period_of(depth, in_flight, 100, false)
    }

    #[test]
    fn a_deep_client_moves_and_a_shallow_one_comes_back() {
        let mut depth = Depth::default();
        assert!(!period(&mut depth, 1) && !period(&mut depth, 3) && period(&mut depth, 4));
        depth.lent();
        // Between the two bounds, the client stays on its thread.
        assert!(!period(&mut depth, 32) && !period(&mut depth, 2) && period(&mut depth, 1));
        depth.back();
        assert!(!period(&mut depth, 1) && !period(&mut depth, 3) && period(&mut depth, 32));
        // Long writes: the client waits for all replies after every third one.
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
        // Another client may need the I/O thread more.
        assert!(period_of(&mut depth, 1, 60, false));
        // The disk is fast; only the machine was slow.
        assert!(period_of(&mut depth, 1, 22, true));
        // The time per request is measured.
        depth.back();
        for _ in 0..PERIOD {
            depth.begun(1, false);
        }
        depth.since = depth.since.and_then(|since| since.checked_sub(SLOW * PERIOD));
        assert!(depth.wants_to_move(|| true));
    }
}
