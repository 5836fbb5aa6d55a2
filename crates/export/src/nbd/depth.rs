//! How many requests a client keeps in flight, and which thread suits that best.
//!
//! A thread that serves the queue too carries out what came together, and answers it together, with
//! no other thread in between: that is less work for each request, and the more of them come at a
//! time the more it counts. A client that waits for each request has nothing of it: it is served by
//! two threads that wait for each other's next step awake, which is quicker by the time that it
//! takes to wake up its own processor.

/// Requests by which it is decided.
const PERIOD: u32 = 1024;
/// Requests in flight, on average, from which on a thread that serves the queue is worth it, and
/// below which it is not any more.
const DEEP: u64 = 4;
const SHALLOW: u64 = 2;
/// Periods until one that was refused is asked for again.
const PAUSE: u32 = 64;

/// How many requests a client keeps in flight.
#[derive(Debug, Default)]
pub(super) struct Depth {
    requests: u32,
    /// The sum, over these, of those that were in flight with each.
    in_flight: u64,
    /// The thread serves the queue too.
    is_lent: bool,
    /// Periods in which no other thread is asked for.
    pause: u32,
}

impl Depth {
    /// A request has begun, and so many are in flight with it. With `more`, the client has sent
    /// more already: of long writes few are in flight at a time, because each is over when the next
    /// one has been received.
    pub(super) fn begun(&mut self, in_flight: usize, more: bool) {
        self.requests += 1;
        self.in_flight += (in_flight as u64).max(if more { DEEP } else { 0 });
    }

    /// Whether a thread of the other kind would suit the client better.
    pub(super) fn wants_to_move(&mut self) -> bool {
        if self.requests < PERIOD {
            return false;
        }
        let mean = self.in_flight / u64::from(self.requests);
        (self.requests, self.in_flight) = (0, 0);
        if self.is_lent {
            return mean < SHALLOW;
        }
        self.pause = self.pause.saturating_sub(1);
        self.pause == 0 && mean >= DEEP
    }

    /// From here on the client is served by a thread that serves the queue too.
    pub(super) fn lent(&mut self) {
        self.is_lent = true;
    }

    /// From here on it is served by its own again.
    pub(super) fn back(&mut self) {
        self.is_lent = false;
    }

    /// The thread that was asked for is not to be had.
    pub(super) fn refused(&mut self) {
        self.pause = PAUSE;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether it wants to move after a period of so many in flight, and at no time before.
    fn period(depth: &mut Depth, in_flight: usize) -> bool {
        for _ in 0..PERIOD {
            assert!(!depth.wants_to_move());
            depth.begun(in_flight, false);
        }
        depth.wants_to_move()
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
        // Long writes.
        for _ in 0..PERIOD {
            depth.begun(1, true);
        }
        assert!(depth.wants_to_move());
        depth.refused();
        let asked = (0..).take_while(|_| !period(&mut depth, 32)).count();
        assert_eq!(asked, PAUSE as usize - 1);
    }
}
