//! How many completions an interrupt is worth.
//!
//! A host that keeps many commands in flight takes many completions with one interrupt, if they are
//! there; a host that waits for one command wants to hear of it at once. Which of both it is shows
//! in how many completions come close together, and that is learnt for each completion queue: an
//! interrupt is raised as soon as there are as many completions as there lately were, and held back
//! for a short *grace* while there are fewer and more keep coming. Now and then twice as many are
//! waited for, to find out whether there would be more; as long as that is in vain, it is tried ever
//! more rarely, so that a host that waits for each command is made to wait a little longer once in a
//! thousand times.
//!
//! This is the controller's own choice, where the host has not made one: Interrupt Coalescing
//! (feature 08h), if the host sets it, is obeyed as it is.

use std::time::{Duration, Instant};

/// The most completions that are waited for.
const MOST: u32 = 64;
/// Interrupts between two attempts at more, at first and at most.
const PROBE_AFTER: (u32, u32) = (8, 1024);

/// How long interrupts may be held back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Patience {
    /// After the last completion.
    pub(crate) grace: Duration,
    /// After the first.
    pub(crate) most: Duration,
}

impl Patience {
    /// Every completion is announced at once.
    pub(crate) const NONE: Self = Self { grace: Duration::ZERO, most: Duration::ZERO };

    /// A tenth of the time, `window`, that a worker spends on looking for the next command, and all
    /// of it for the sum: a worker that is willing to wait so long for a host takes it for awake.
    pub(crate) fn of(window: Duration) -> Self {
        Self { grace: window / 10, most: window }
    }
}

/// The interrupts of one completion queue.
#[derive(Debug)]
pub(crate) struct Moderation {
    patience: Patience,
    /// Completions that are worth an interrupt.
    target: u32,
    /// Interrupts until twice as many are waited for.
    until_probe: u32,
    /// Interrupts between two such attempts.
    probe_after: u32,
    held: Option<Held>,
}

/// An interrupt that is held back.
#[derive(Clone, Copy, Debug)]
struct Held {
    since: Instant,
    /// When the last completion was added to it.
    grown: Instant,
}

impl Moderation {
    pub(crate) fn new(patience: Patience) -> Self {
        let probe_after = PROBE_AFTER.0;
        Self { patience, target: 1, until_probe: probe_after, probe_after, held: None }
    }

    pub(crate) fn patience(&self) -> Patience {
        self.patience
    }

    /// Whether an interrupt is held back.
    #[inline]
    pub(crate) fn is_holding(&self) -> bool {
        self.held.is_some()
    }

    /// How many completions are waited for now.
    fn wanted(&self) -> u32 {
        if self.until_probe == 0 { (self.target * 2).min(MOST) } else { self.target }
    }

    /// There are `count` completions to announce, some of them new. Whether that is to be done now;
    /// if not, ask [`is_due`](Self::is_due) again soon.
    #[inline]
    pub(crate) fn add(&mut self, count: u32) -> bool {
        if self.patience.grace.is_zero() {
            return true;
        }
        if count >= self.wanted() {
            self.reached();
            return true;
        }
        let now = Instant::now();
        self.held.get_or_insert(Held { since: now, grown: now }).grown = now;
        self.is_due(count, now)
    }

    /// Whether `count` completions, held back so far, are to be announced at `now` after all.
    pub(crate) fn is_due(&mut self, count: u32, now: Instant) -> bool {
        let Some(held) = self.held else { return false };
        let due = now.duration_since(held.grown) >= self.patience.grace
            || now.duration_since(held.since) >= self.patience.most;
        if due {
            self.late(count);
        }
        due
    }

    /// What was held back is announced, or of no interest any more.
    pub(crate) fn let_go(&mut self) {
        self.held = None;
    }

    fn reached(&mut self) {
        if self.until_probe == 0 {
            // There were more, so there may be still more.
            self.target = self.wanted();
            self.probe_after = PROBE_AFTER.0;
            self.until_probe = self.probe_after;
        } else {
            self.until_probe -= 1;
        }
    }

    /// There were only `count`.
    fn late(&mut self, count: u32) {
        if self.until_probe == 0 && count <= self.target {
            // The attempt was in vain.
            self.probe_after = (self.probe_after * 2).min(PROBE_AFTER.1);
        } else if count > self.target {
            self.probe_after = PROBE_AFTER.0;
        }
        self.target = count.clamp(1, MOST);
        self.until_probe = self.probe_after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(1000);

    /// A host that has `depth` completions come close together, for `interrupts` of them: how many
    /// it got with each, and how often it had to wait for the end of the grace.
    fn bursts(moderation: &mut Moderation, depth: u32, interrupts: usize) -> (Vec<u32>, usize) {
        let (mut sizes, mut waits) = (Vec::new(), 0);
        while sizes.len() < interrupts {
            let raised = (1..=depth).find(|count| moderation.add(*count));
            let size = raised.unwrap_or_else(|| {
                waits += 1;
                assert!(moderation.is_due(depth, Instant::now() + GRACE));
                depth
            });
            moderation.let_go();
            sizes.push(size);
        }
        (sizes, waits)
    }

    fn moderation() -> Moderation {
        Moderation::new(Patience { grace: GRACE, most: GRACE * 10 })
    }

    #[test]
    fn one_at_a_time_is_announced_at_once() {
        let mut moderation = moderation();
        let (sizes, waits) = bursts(&mut moderation, 1, 100_000);
        assert!(sizes.iter().all(|size| *size == 1));
        // Eight attempts until there are a thousand interrupts between two of them.
        assert!(waits <= 8 + 100_000 / 1024, "{waits}");
        assert!(bursts(&mut moderation, 1, 1000).1 <= 1, "and that is how it stays");
    }

    #[test]
    fn a_deep_queue_gets_few_interrupts() {
        let mut moderation = moderation();
        let (sizes, _) = bursts(&mut moderation, 32, 100);
        assert_eq!(sizes.last(), Some(&32));
        let (sizes, waits) = bursts(&mut moderation, 32, 1000);
        assert!(sizes.iter().all(|size| *size == 32));
        assert!(waits < 20, "{waits}");
        // As soon as it is not deep any more, one wait is enough to see that.
        let (sizes, waits) = bursts(&mut moderation, 1, 8);
        assert_eq!((sizes, waits), (vec![1; 8], 1));
    }

    #[test]
    fn nothing_is_held_for_ever() {
        let mut moderation = Moderation::new(Patience { grace: GRACE, most: GRACE * 2 });
        bursts(&mut moderation, 32, 100);
        assert!(!moderation.add(1));
        let start = Instant::now();
        assert!(!moderation.is_due(1, start));
        assert!(moderation.is_due(1, start + GRACE + Duration::from_secs(1)));
        moderation.let_go();
        assert!(!moderation.is_holding());
        // Not even if completions keep coming, one in each grace.
        bursts(&mut moderation, 32, 100);
        assert!(!moderation.add(1));
        moderation.held =
            moderation.held.map(|held| Held { since: held.since - GRACE * 2, ..held });
        assert!(moderation.add(2));
    }

    #[test]
    fn without_patience_every_completion_is_announced() {
        let mut moderation = Moderation::new(Patience::NONE);
        assert!((0..10_000).all(|_| moderation.add(1)));
        assert!(!moderation.is_holding());
    }
}
