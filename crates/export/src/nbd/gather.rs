//! Which answers wait for one another, so that a client takes several of them at once.
//!
//! A thread that serves the queue too has carried out a write to memory before the client has sent
//! the next one. Answered one by one, each costs the client a wait of its own, and us a call. A
//! client that keeps many in flight has the next ones on their way meanwhile: its answers wait for
//! those, a few at a time. So that nobody waits for what does not come, it is found out again and
//! again how many a client sends without an answer: a few answers are held back until no more
//! requests come.

/// The most answers that wait for one another.
const MOST: usize = 4;
/// How many it is found out of a client that it has in flight, at most.
const PROBE: usize = 2 * MOST;
/// Requests from one time that it is found out to the next.
const PERIOD: u32 = 1024;
/// And to the first.
const FIRST: u32 = 64;
/// Attempts to receive more after which none come: while it is found out, and else. An attempt
/// takes half a microsecond, and a client some microseconds for a request.
const PROBE_TRIES: u32 = 32;
const TRIES: u32 = 4;
/// So many times in a period answers have waited for nothing: the client has changed.
const MISSES: u32 = 16;

/// Which answers wait for one another.
#[derive(Debug)]
pub(super) struct Gather {
    /// So many are sent together.
    most: usize,
    is_probing: bool,
    /// Until the next time that it is found out.
    left: u32,
    /// So many answers waited before, and so often in vain.
    waiting: usize,
    tries: u32,
    misses: u32,
}

impl Default for Gather {
    fn default() -> Self {
        Self { most: 1, is_probing: false, left: FIRST, waiting: 0, tries: 0, misses: 0 }
    }
}

impl Gather {
    /// Whether answers that are to be sent, so many, wait for more requests: they are asked for now.
    pub(super) fn holds(&mut self, answers: usize) -> bool {
        if answers == 0 {
            return false;
        }
        if self.waiting != answers {
            // One that sends a byte now and then has sent no request.
            (self.waiting, self.tries) = (answers, 0);
        }
        let (most, tries) = if self.is_probing { (PROBE, PROBE_TRIES) } else { (self.most, TRIES) };
        if answers < most && self.tries < tries {
            self.tries += 1;
            return true;
        }
        if self.is_probing {
            // Half of them are on their way while the other half is answered.
            self.most = (answers / 2).clamp(1, MOST);
            (self.is_probing, self.left, self.misses) = (false, PERIOD, 0);
        } else if answers < most {
            self.misses += 1;
        }
        (self.waiting, self.tries) = (0, 0);
        self.left = self.left.saturating_sub(answers as u32);
        if self.left == 0 || self.misses == MISSES {
            self.is_probing = true;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Serves a client that keeps `depth` writes in flight, and sends one every `tries` attempts:
    /// the answers that were sent together, for so many requests.
    fn serve(gather: &mut Gather, depth: usize, tries: u32, requests: usize) -> Vec<usize> {
        let (mut sent, mut total, mut waiting, mut since) = (Vec::new(), 0, 0, 0);
        while total < requests {
            if waiting < depth && since >= tries {
                (waiting, since) = (waiting + 1, 0);
            }
            since += 1;
            if waiting != 0 && !gather.holds(waiting) {
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
        for (depth, most) in [(1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (8, 4), (32, 4), (1000, 4)] {
            let mut gather = Gather::default();
            serve(&mut gather, depth, 2, 200);
            assert_eq!(gather.most, most, "{depth}");
            let sent = serve(&mut gather, depth, 2, 700);
            assert!(sent.iter().all(|count| *count == most), "{depth}: {sent:?}");
        }
    }

    #[test]
    fn a_client_that_changes_is_seen() {
        let mut gather = Gather::default();
        serve(&mut gather, 32, 2, 2000);
        assert_eq!(gather.most, 4);
        // Now it waits for each: that is seen long before the period is over.
        serve(&mut gather, 1, 2, 64);
        assert_eq!(gather.most, 1);
        serve(&mut gather, 32, 2, 2 * PERIOD as usize);
        assert_eq!(gather.most, 4);
    }

    #[test]
    fn a_client_that_is_slow_is_not_waited_for() {
        let mut gather = Gather::default();
        serve(&mut gather, 32, 1000, 4 * PERIOD as usize);
        assert_eq!(gather.most, 1);
    }
}
