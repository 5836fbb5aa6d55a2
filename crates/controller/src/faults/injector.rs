//! Fault injector: decides when each fault happens, and counts the faults.

use super::rules::{Fault, Faults, Rule, When};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Fault state shared by the queues and the registers of one controller.
#[derive(Debug)]
pub(super) struct FaultState {
    injector: Mutex<Arc<Injector>>,
    /// True if the controller is fatal or removed and therefore fetches no commands.
    failed: AtomicBool,
}

impl FaultState {
    pub(super) fn new(injector: &Arc<Injector>) -> Self {
        Self { injector: Mutex::new(Arc::clone(injector)), failed: AtomicBool::new(false) }
    }

    pub(super) fn arm(&self, injector: Arc<Injector>) {
        *self.injector.lock() = injector;
    }

    /// Current injector. Called once per batch.
    pub(super) fn injector(&self) -> Arc<Injector> {
        Arc::clone(&self.injector.lock())
    }

    pub(super) fn set_failed(&self, failed: bool) {
        self.failed.store(failed, Ordering::Release);
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }
}

/// Counters of the faults injected by [`Controller::inject`](crate::Controller::inject).
#[derive(Clone, Debug)]
pub struct Injected(Arc<Injector>);

impl Injected {
    pub(super) fn new(injector: Arc<Injector>) -> Self {
        Self(injector)
    }

    /// Number of faults injected by each rule.
    #[must_use]
    pub fn by_rule(&self) -> Vec<(Rule, u64)> {
        self.0.counts()
    }

    /// Number of injected faults of this type.
    #[must_use]
    pub fn of(&self, fault: Fault) -> u64 {
        self.0.counts().iter().filter(|(rule, _)| rule.fault == fault).map(|(_, n)| n).sum()
    }

    /// Total number of injected faults.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.counts().iter().map(|(_, n)| n).sum()
    }
}

#[derive(Debug)]
struct RuleState {
    rule: Rule,
    occasions: AtomicU64,
    injected: AtomicU64,
    lot: AtomicU64,
}

/// Fault rules with their counters.
#[derive(Debug)]
pub(super) struct Injector {
    rules: Vec<RuleState>,
    noise: AtomicU64,
}

/// Next number of a pseudo-random sequence (splitmix64).
fn draw(state: &AtomicU64) -> u64 {
    let step = 0x9e37_79b9_7f4a_7c15;
    let mut z = state.fetch_add(step, Ordering::Relaxed).wrapping_add(step);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

impl Injector {
    pub(super) fn new(faults: Faults) -> Self {
        let Faults { seed, rules } = faults;
        let rules = rules.into_iter().zip(1u64..).map(|(rule, n)| RuleState {
            rule,
            occasions: AtomicU64::new(0),
            injected: AtomicU64::new(0),
            lot: AtomicU64::new(seed ^ n << 48),
        });
        Self { rules: rules.collect(), noise: AtomicU64::new(!seed) }
    }

    pub(super) fn counts(&self) -> Vec<(Rule, u64)> {
        self.rules.iter().map(|w| (w.rule, w.injected.load(Ordering::Relaxed))).collect()
    }

    /// Returns the fault of the first rule that is due, among those for which `could` is true. Each
    /// of these rules counts the occasion.
    fn decide(&self, could: impl Fn(&Rule) -> bool) -> Option<Fault> {
        let mut chosen = None;
        for state in self.rules.iter().filter(|state| could(&state.rule)) {
            let occasion = state.occasions.fetch_add(1, Ordering::Relaxed) + 1;
            let now = match state.rule.when {
                When::Every(n) => occasion.is_multiple_of(n.max(1)),
                When::OneIn(n) => draw(&state.lot).is_multiple_of(n.max(1)),
                When::At(n) => occasion == n,
            };
            let done = state.injected.load(Ordering::Relaxed);
            if now && chosen.is_none() && state.rule.limit.is_none_or(|limit| done < limit) {
                state.injected.fetch_add(1, Ordering::Relaxed);
                chosen = Some(state.rule.fault);
            }
        }
        chosen
    }

    /// Fault of the next command of I/O queue `qid`.
    pub(super) fn command(&self, qid: u16) -> Option<Fault> {
        use Fault::{Ignore, NeverDisabled, NeverReady, Refuse};
        self.decide(|rule| {
            rule.queue.is_none_or(|queue| queue == qid)
                && !matches!(rule.fault, Refuse(_) | Ignore(_) | NeverReady | NeverDisabled)
        })
    }

    /// Fault of the next admin command with this opcode.
    pub(super) fn admin(&self, opcode: u8) -> Option<Fault> {
        self.decide(|rule| [Fault::Refuse(opcode), Fault::Ignore(opcode)].contains(&rule.fault))
    }

    /// True if `fault`, which affects CSTS.RDY, happens now.
    pub(super) fn ready(&self, fault: Fault) -> bool {
        self.decide(|rule| rule.fault == fault).is_some()
    }

    /// Pseudo-random bits.
    pub(super) fn noise(&self) -> u64 {
        draw(&self.noise)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_nth_once_by_lot_and_no_more_than_the_limit() {
        let count = |when, limit| {
            let rule = Rule { limit, ..Rule::new(Fault::Hang(None), when) };
            let injector = Injector::new(Faults::new(3, [rule]));
            let hits: Vec<u32> =
                (1..=1000).filter(|_| injector.command(1) == Some(Fault::Hang(None))).collect();
            assert_eq!(injector.counts()[0].1, hits.len() as u64);
            hits
        };
        assert_eq!(count(When::Every(300), None), [300, 600, 900]);
        assert_eq!(count(When::Every(300), Some(2)), [300, 600]);
        assert_eq!(count(When::At(17), None), [17]);
        let lot = count(When::OneIn(10), None);
        assert!((60..140).contains(&lot.len()), "{}", lot.len());
        assert_eq!(lot, count(When::OneIn(10), None), "the same seed, the same choices");
    }

    #[test]
    fn a_command_meets_one_fault_and_only_those_of_its_queue() {
        let elsewhere = Rule { queue: Some(2), ..Rule::new(Fault::Hang(None), When::Every(1)) };
        let rules = [
            elsewhere,
            Rule::new(Fault::Ignore(8), When::Every(1)),
            Rule::new(Fault::DropAfter, When::Every(2)),
            Rule::new(Fault::Duplicate, When::Every(1)),
        ];
        let injector = Injector::new(Faults::new(0, rules));
        let met: Vec<_> = (0..4).map(|_| injector.command(1)).collect();
        let [drop, twice] = [Some(Fault::DropAfter), Some(Fault::Duplicate)];
        assert_eq!(met, [twice, drop, twice, drop]);
        assert_eq!(injector.command(2), Some(Fault::Hang(None)));
        assert_eq!((injector.admin(8), injector.admin(9)), (Some(Fault::Ignore(8)), None));
        let counts: Vec<_> = injector.counts().into_iter().map(|(_, n)| n).collect();
        assert_eq!(counts, [1, 1, 2, 2]);
    }
}
