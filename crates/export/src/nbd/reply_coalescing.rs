//! Reply coalescing: holding back replies so that a client receives several of them at once.
//!
//! A write to a memory disk completes before the client has sent its next request. If replies are
//! sent one by one, each costs the client a wakeup and this thread a system call. If a client keeps
//! many requests in flight, further requests arrive while a reply is held back. Therefore a few
//! replies are held back and sent together. To avoid useless waits, the server periodically probes
//! how many requests the client sends without a reply: it holds back some replies until no more
//! requests arrive.

/// Largest number of replies that are sent together.
const MAX_BATCH: usize = 4;
/// Largest number of replies that a probe holds back.
const PROBE: usize = 2 * MAX_BATCH;
/// Number of requests between two probes.
const PERIOD: u32 = 1024;
/// Number of requests before the first probe.
const FIRST: u32 = 64;
/// Number of attempts to receive more requests before held replies are sent, during a probe.
/// `TRIES` is the number at other times. An attempt takes half a microsecond, and a client needs
/// some microseconds to send a request.
const PROBE_TRIES: u32 = 32;
const TRIES: u32 = 4;
/// Number of useless waits in a period after which the client counts as changed, and is probed
/// again.
const MISSES: u32 = 16;

/// State of the reply coalescing of a client.
#[derive(Debug)]
pub(super) struct ReplyCoalescing {
    /// Number of replies that are sent together.
    max_batch: usize,
    is_probing: bool,
    /// Number of requests until the next probe.
    left: u32,
    /// Number of held replies at the last call. `tries` counts the attempts to receive further
    /// requests while they are held, and `misses` the useless waits in the current period.
    waiting: usize,
    tries: u32,
    misses: u32,
}

impl Default for ReplyCoalescing {
    fn default() -> Self {
        Self { max_batch: 1, is_probing: false, left: FIRST, waiting: 0, tries: 0, misses: 0 }
    }
}

impl ReplyCoalescing {
    /// True if `replies` pending replies should be held back while the caller tries to receive more
    /// requests.
    pub(super) fn holds(&mut self, replies: usize) -> bool {
        if replies == 0 {
            return false;
        }
        if self.waiting != replies {
            // Attempts are counted anew only when the number of replies changes. So a client that
            // sends single bytes, which are not a request, does not prolong the wait.
            (self.waiting, self.tries) = (replies, 0);
        }
        let (max_batch, tries) =
            if self.is_probing { (PROBE, PROBE_TRIES) } else { (self.max_batch, TRIES) };
        if replies < max_batch && self.tries < tries {
            self.tries += 1;
            return true;
        }
        if self.is_probing {
            // Half of the probed number is sent together, so that the client sends its next
            // requests while the other half is answered.
            self.max_batch = (replies / 2).clamp(1, MAX_BATCH);
            (self.is_probing, self.left, self.misses) = (false, PERIOD, 0);
        } else if replies < max_batch {
            self.misses += 1;
        }
        (self.waiting, self.tries) = (0, 0);
        self.left = self.left.saturating_sub(replies as u32);
        if self.left == 0 || self.misses == MISSES {
            self.is_probing = true;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Serves a client that keeps `depth` writes in flight and sends one every `tries` attempts.
    /// Returns the sizes of the reply batches for `requests` requests.
    fn serve(
        coalescing: &mut ReplyCoalescing,
        depth: usize,
        tries: u32,
        requests: usize,
    ) -> Vec<usize> {
        let (mut sent, mut total, mut waiting, mut since) = (Vec::new(), 0, 0, 0);
        while total < requests {
            if waiting < depth && since >= tries {
                (waiting, since) = (waiting + 1, 0);
            }
            since += 1;
            if waiting != 0 && !coalescing.holds(waiting) {
                sent.push(waiting);
                total += waiting;
                waiting = 0;
            }
            assert!(sent.len() <= requests);
        }
        sent
    }

    #[test]
    fn the_answers_of_a_deep_client_go_together_and_those_of_others_do_not_wait() {
        for (depth, max_batch) in
            [(1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (8, 4), (32, 4), (1000, 4)]
        {
            let mut coalescing = ReplyCoalescing::default();
            serve(&mut coalescing, depth, 2, 200);
            assert_eq!(coalescing.max_batch, max_batch, "{depth}");
            let sent = serve(&mut coalescing, depth, 2, 700);
            assert!(sent.iter().all(|count| *count == max_batch), "{depth}: {sent:?}");
        }
    }

    #[test]
    fn a_client_that_changes_is_seen() {
        let mut coalescing = ReplyCoalescing::default();
        serve(&mut coalescing, 32, 2, 2000);
        assert_eq!(coalescing.max_batch, 4);
        // The client now waits for each reply. This is detected long before the end of the period.
        serve(&mut coalescing, 1, 2, 64);
        assert_eq!(coalescing.max_batch, 1);
        serve(&mut coalescing, 32, 2, 2 * PERIOD as usize);
        assert_eq!(coalescing.max_batch, 4);
    }

    #[test]
    fn a_client_that_is_slow_is_not_waited_for() {
        let mut coalescing = ReplyCoalescing::default();
        serve(&mut coalescing, 32, 1000, 4 * PERIOD as usize);
        assert_eq!(coalescing.max_batch, 1);
    }
}
