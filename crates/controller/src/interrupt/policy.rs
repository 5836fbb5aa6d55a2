//! Interrupt policy: decides when a completion queue raises its interrupt.
//!
//! Three mechanisms hold an interrupt, in this order:
//!
//! 1. *Coalescing*: if the host has set feature 08h, or has disabled coalescing of the vector by
//!    feature 09h, only these settings decide.
//! 2. *Suppression*: the host has not consumed all completions of the last interrupt yet, so the
//!    host will find later completions without another interrupt. The interrupt is raised when the
//!    host has consumed the announced completions, after a time limit, or before the I/O thread
//!    sleeps. The interrupt is never lost.
//! 3. *Moderation*: further completions are expected soon ([`Moderation`]).

use super::moderation::{HoldLimit, Moderation};
use super::table::IrqLine;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time limit of suppression if the I/O thread stays awake and the host consumes nothing. If the
/// hold limit is longer, it applies instead.
const MAX_SUPPRESSION: Duration = Duration::from_micros(100);

/// Decision about completions that were just posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Raise the interrupt now.
    Raise,
    /// Hold the interrupt. Until it is raised, [`InterruptPolicy::is_holding`] is true.
    Hold,
}

/// Interrupt of one completion queue: its vector and the completions to announce.
#[derive(Debug)]
pub(crate) struct InterruptPolicy {
    /// Interrupt vector of the queue; `None` if the queue was created without interrupts.
    line: Option<IrqLine>,
    /// Number of completions posted since the last interrupt.
    unannounced: u32,
    /// Number of announced entries that the host has not consumed yet.
    unconsumed: u32,
    /// Start of the current suppression.
    suppressed: Option<Instant>,
    /// Deadline of the current coalescing.
    coalesced: Option<Instant>,
    moderation: Moderation,
}

impl InterruptPolicy {
    pub(crate) fn new(line: Option<IrqLine>, limit: HoldLimit) -> Self {
        Self {
            line,
            unannounced: 0,
            unconsumed: 0,
            suppressed: None,
            coalesced: None,
            moderation: Moderation::new(limit),
        }
    }

    /// Interrupt vector, if there is one.
    pub(crate) fn vector(&self) -> Option<u16> {
        self.line.as_ref().map(IrqLine::vector)
    }

    /// Records that the host has submitted commands which complete in this queue.
    #[inline]
    pub(crate) fn submitted(&mut self) {
        self.moderation.submitted();
    }

    /// Records `count` posted completions.
    #[inline]
    pub(crate) fn posted(&mut self, count: u32) {
        self.unannounced += count;
    }

    /// Records `count` entries consumed by the host.
    #[inline]
    pub(crate) fn consumed(&mut self, count: u32) {
        self.unconsumed = self.unconsumed.saturating_sub(count);
    }

    /// True if there are completions to announce by an interrupt.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.line.is_some() && self.unannounced != 0
    }

    /// True if the host has not consumed all entries that the last interrupt announced.
    #[inline]
    pub(crate) fn is_unconsumed(&self) -> bool {
        self.unconsumed != 0
    }

    /// Decision by the host's coalescing settings; `None` if the host has set none.
    pub(crate) fn coalesce(&mut self, coalescing: &Coalescing) -> Option<Decision> {
        let line = self.line.as_ref()?;
        match coalescing.of(line.vector()) {
            VectorCoalescing::None => None,
            VectorCoalescing::AtOnce => Some(Decision::Raise),
            VectorCoalescing::Aggregate(wish) if self.unannounced >= wish.threshold => {
                Some(Decision::Raise)
            }
            VectorCoalescing::Aggregate(wish) => {
                let until = *self.coalesced.get_or_insert_with(|| Instant::now() + wish.time);
                let is_over = Instant::now() >= until;
                Some(if is_over { Decision::Raise } else { Decision::Hold })
            }
        }
    }

    /// Decides whether posted completions raise the interrupt, if the host has set no coalescing.
    /// The caller has just read the host's completion queue head.
    pub(crate) fn decide(&mut self) -> Decision {
        if self.is_unconsumed() {
            self.suppressed.get_or_insert_with(Instant::now);
            return Decision::Hold;
        }
        if self.moderation.add(self.unannounced, Instant::now()) {
            Decision::Raise
        } else {
            Decision::Hold
        }
    }

    /// True if an interrupt is held for any reason.
    #[inline]
    pub(crate) fn is_holding(&self) -> bool {
        self.suppressed.is_some() || self.coalesced.is_some() || self.moderation.is_holding()
    }

    /// True if an interrupt is held by moderation, so briefly that a sleep is not worthwhile.
    pub(crate) fn is_moderating(&self) -> bool {
        self.moderation.is_holding()
    }

    /// True if the coalescing time is over.
    pub(crate) fn is_coalescing_expired(&self, now: Instant) -> bool {
        self.coalesced.is_some_and(|until| now >= until)
    }

    /// True if an interrupt is held by suppression or moderation.
    pub(crate) fn is_suppressed_or_moderated(&self) -> bool {
        self.suppressed.is_some() || self.moderation.is_holding()
    }

    /// Decides about a held interrupt. The caller has just read the host's head: `unread` entries
    /// are posted and not consumed. Completions that the host has already consumed need no
    /// interrupt.
    pub(crate) fn decide_held(&mut self, unread: u32, now: Instant) -> Decision {
        self.unannounced = self.unannounced.min(unread);
        if self.unannounced == 0 {
            self.suppressed = None;
            self.moderation.release();
            return Decision::Hold;
        }
        let due = match self.suppressed {
            Some(_) if self.unconsumed == 0 => {
                self.suppressed = None;
                self.moderation.add(self.unannounced, now)
            }
            Some(since) => {
                now.duration_since(since) >= self.moderation.limit().max_hold.max(MAX_SUPPRESSION)
            }
            None => self.moderation.is_due(now),
        };
        if due { Decision::Raise } else { Decision::Hold }
    }

    /// Deadline of coalescing, at which a sleep of the thread must end.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.coalesced
    }

    /// True if the queue has an interrupt.
    #[inline]
    pub(crate) fn has_line(&self) -> bool {
        self.line.is_some()
    }

    /// Raises the queue's interrupt, if there is one. It announces `unread` entries: those that are
    /// posted and not consumed.
    pub(crate) fn raise(&mut self, unread: u32) {
        self.suppressed = None;
        self.coalesced = None;
        self.moderation.release();
        self.unannounced = 0;
        self.unconsumed = unread;
        if let Some(line) = &mut self.line {
            line.raise();
        }
    }
}

/// Settings of Interrupt Coalescing (feature 08h) and Interrupt Vector Configuration (09h), read by
/// I/O threads. Base 2.1, "Interrupt Coalescing".
#[derive(Debug, Default)]
pub(crate) struct Coalescing {
    /// Aggregation Threshold in bits 7:0 (0's based) and Aggregation Time in bits 15:8 (units of
    /// 100 µs). Bit 16 is set if the host has set Interrupt Coalescing.
    setting: AtomicU32,
    /// One bit per vector: set if coalescing is disabled.
    disabled: [AtomicU64; 2],
}

/// Coalescing setting of a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VectorCoalescing {
    /// The host has set nothing: the controller chooses when to raise interrupts.
    None,
    /// Interrupts are raised at once.
    AtOnce,
    /// Interrupts are aggregated within these limits.
    Aggregate(Aggregation),
}

/// Aggregation limits of a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Aggregation {
    /// Number of completions at which the interrupt is raised.
    pub(crate) threshold: u32,
    /// Maximum time for which a completion waits for others.
    pub(crate) time: Duration,
}

impl Coalescing {
    pub(crate) fn set(&self, threshold: u8, time: u8) {
        let setting = u32::from(threshold) | u32::from(time) << 8 | CHOSEN;
        self.setting.store(setting, Ordering::Relaxed);
    }

    pub(crate) fn disable(&self, vector: u16, disabled: bool) {
        let Some(word) = self.disabled.get(usize::from(vector / 64)) else { return };
        let bit = 1 << (vector % 64);
        if disabled {
            word.fetch_or(bit, Ordering::Relaxed);
        } else {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    pub(crate) fn reset(&self) {
        self.setting.store(0, Ordering::Relaxed);
        self.disabled.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    /// Coalescing setting of `vector`. A threshold or a time of 0 disables coalescing, and feature
    /// 09h can disable it for a single vector. Interrupts of vector 0, which the admin queue uses,
    /// are never aggregated, because Interrupt Coalescing applies to I/O queues only.
    pub(crate) fn of(&self, vector: u16) -> VectorCoalescing {
        let setting = self.setting.load(Ordering::Relaxed);
        let disabled = &self.disabled.get(usize::from(vector / 64));
        let disabled = disabled.map_or(0, |word| word.load(Ordering::Relaxed));
        if disabled >> (vector % 64) & 1 != 0 {
            return VectorCoalescing::AtOnce;
        }
        if setting & CHOSEN == 0 {
            return VectorCoalescing::None;
        }
        let (threshold, time) = (setting & 0xff, setting >> 8 & 0xff);
        if threshold == 0 || time == 0 || vector == 0 {
            return VectorCoalescing::AtOnce;
        }
        VectorCoalescing::Aggregate(Aggregation {
            threshold: threshold + 1,
            time: Duration::from_micros(u64::from(time) * 100),
        })
    }
}

/// Flag: the host has set Interrupt Coalescing.
const CHOSEN: u32 = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interrupt::IrqTable;
    use std::sync::Arc;

    fn policy(limit: HoldLimit) -> InterruptPolicy {
        let table = Arc::new(IrqTable::new(2));
        InterruptPolicy::new(Some(IrqLine::new(table, 1)), limit)
    }

    #[test]
    fn no_second_interrupt_before_the_host_has_consumed_the_first() {
        let mut policy = policy(HoldLimit::NONE);
        policy.posted(3);
        assert!(policy.is_due());
        assert_eq!(policy.decide(), Decision::Raise);
        policy.raise(3);
        assert!(!policy.is_due());
        policy.posted(1);
        assert_eq!(policy.decide(), Decision::Hold);
        assert!(policy.is_holding() && !policy.is_moderating());
        policy.consumed(2);
        assert_eq!(policy.decide_held(2, Instant::now()), Decision::Hold);
        policy.consumed(1);
        assert_eq!(policy.decide_held(1, Instant::now()), Decision::Raise);
    }

    #[test]
    fn suppression_ends_after_its_limit_or_when_the_host_polls() {
        let mut policy = policy(HoldLimit::NONE);
        policy.raise(5);
        policy.posted(1);
        assert_eq!(policy.decide(), Decision::Hold);
        let later = Instant::now() + MAX_SUPPRESSION;
        assert_eq!(policy.decide_held(6, later), Decision::Raise);
        assert_eq!(policy.decide_held(0, later), Decision::Hold);
        assert!(!policy.is_holding());
    }

    #[test]
    fn coalescing_of_zero_disables_moderation() {
        let coalescing = Coalescing::default();
        let mut policy = policy(HoldLimit::of(Duration::from_secs(10)));
        let post = |policy: &mut InterruptPolicy, count, coalescing| {
            policy.posted(count);
            let decision = policy.coalesce(coalescing).unwrap_or_else(|| policy.decide());
            if decision == Decision::Raise {
                policy.raise(0);
            }
            decision
        };
        // After bursts of 32 completions, moderation holds the interrupt of a single completion.
        for _ in 0..100 {
            post(&mut policy, 32, &coalescing);
        }
        assert_eq!(post(&mut policy, 1, &coalescing), Decision::Hold);
        coalescing.set(0, 0);
        (0..10).for_each(|_| assert_eq!(post(&mut policy, 1, &coalescing), Decision::Raise));
        // Moderation is also disabled if coalescing is disabled for a single vector.
        coalescing.reset();
        for _ in 0..100 {
            post(&mut policy, 32, &coalescing);
        }
        assert_eq!(post(&mut policy, 1, &coalescing), Decision::Hold);
        coalescing.disable(1, true);
        assert_eq!(post(&mut policy, 1, &coalescing), Decision::Raise);
    }

    #[test]
    fn coalescing_holds_interrupts_up_to_threshold_and_time() {
        let coalescing = Coalescing::default();
        let mut policy = policy(HoldLimit::NONE);
        policy.posted(1);
        assert_eq!(policy.coalesce(&coalescing), None);
        coalescing.set(2, 255);
        assert_eq!(policy.coalesce(&coalescing), Some(Decision::Hold));
        let until = policy.deadline().expect("a deadline");
        assert!(
            !policy.is_coalescing_expired(Instant::now()) && policy.is_coalescing_expired(until)
        );
        policy.posted(2);
        let three_are_the_threshold = policy.coalesce(&coalescing);
        assert_eq!(three_are_the_threshold, Some(Decision::Raise));
    }

    #[test]
    fn coalescing_is_per_vector_and_off_at_zero() {
        let c = Coalescing::default();
        assert_eq!(c.of(1), VectorCoalescing::None);
        c.set(7, 3);
        let aggregation = Aggregation { threshold: 8, time: Duration::from_micros(300) };
        assert_eq!(c.of(1), VectorCoalescing::Aggregate(aggregation));
        assert_eq!(c.of(0), VectorCoalescing::AtOnce);
        c.disable(1, true);
        assert_eq!(c.of(1), VectorCoalescing::AtOnce);
        assert_eq!(c.of(65), VectorCoalescing::Aggregate(aggregation));
        c.disable(1, false);
        assert_eq!(c.of(1), VectorCoalescing::Aggregate(aggregation));
        c.disable(1000, true);
        c.set(7, 0);
        assert_eq!(c.of(1), VectorCoalescing::AtOnce);
        c.reset();
        assert_eq!(c.of(1), VectorCoalescing::None);
    }
}
