//! A tenant's part in a sleep, its worker's or its own.

use super::{SleepCell, Tenant, note};
use crate::trace::{COMPLETION_QUEUE, Kind, TraceRing};
use crate::worker::queue::Cq;
use shadowbell_doorbell::{Arming, Fenced, Sleeper};
use std::time::Instant;

impl Tenant {
    /// The first half of going to sleep: arms what should wake us.
    pub(crate) fn arm(
        &mut self,
        arming: &mut Arming<'_, SleepCell>,
        trace: &mut Option<TraceRing>,
    ) {
        let Self { sqs, cqs, shared, .. } = self;
        for sq in sqs.iter_mut().flatten().filter(|sq| !sq.stopped) {
            if !sq.blocked {
                let before = sq.tail.stats().event_idx_armed;
                sq.tail.arm(arming);
                if trace.is_some() && sq.tail.stats().event_idx_armed != before {
                    let at = u32::from(sq.tail.last());
                    note(trace, Kind::EventIdxArmed, shared, sq.place.qid, at, 0);
                }
            } else if let Some(cq) = cqs.get_mut(sq.cq).and_then(Option::as_mut) {
                shared.want_head(cq.place.qid, true);
                cq.head.arm(arming);
            }
        }
    }

    /// The second half: looks once more. When the sleep has to end, for an interrupt's sake.
    pub(crate) fn recheck(
        &mut self,
        fenced: &mut Fenced<'_, SleepCell>,
        trace: &mut Option<TraceRing>,
    ) -> Option<Instant> {
        let mut invalid = Vec::new();
        let mut deadline: Option<Instant> = None;
        let Self { sqs, cqs, engine, .. } = self;
        fenced.note(engine.can_advance_copies());
        for sq in sqs.iter_mut().flatten().filter(|sq| !sq.stopped) {
            if !sq.blocked {
                if let Err(error) = sq.tail.recheck(fenced) {
                    invalid.push((sq.place.qid, error));
                }
                // More than a burst may be left.
                let reachable =
                    cqs.get(sq.cq).and_then(Option::as_ref).is_some_and(|cq| cq.ring.is_some());
                fenced.note(reachable && sq.ring.is_some() && sq.head != sq.tail.last());
            } else if let Some(cq) = cqs.get_mut(sq.cq).and_then(Option::as_mut) {
                let before = cq.head.last();
                if let Err(error) = cq.head.recheck(fenced, cq.tail) {
                    invalid.push((cq.place.qid | COMPLETION_QUEUE, error));
                }
                cq.moved_from(before);
                // The head may have been seen to move on another occasion: for an interrupt's sake.
                let reachable = sq.ring.is_some() && cq.ring.is_some();
                fenced.note(reachable && cq.free() != 0 && sq.head != sq.tail.last());
            }
        }
        for cq in cqs.iter_mut().flatten() {
            deadline = match (deadline, cq.settle()) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
        }
        for (qid, error) in invalid {
            self.invalid(qid, error, trace);
        }
        deadline
    }

    /// Awake again: takes back what was asked for while asleep.
    pub(crate) fn awake(&mut self, sleeper: &Sleeper<SleepCell>) {
        self.sqs.iter_mut().flatten().for_each(|sq| sq.tail.disarm(sleeper));
        for cq in self.cqs.iter_mut().flatten() {
            self.shared.want_head(cq.place.qid, false);
            cq.head.disarm(sleeper);
        }
    }

    /// Whether somebody waits for something that no bell announces.
    pub(crate) fn is_restless(&self) -> bool {
        #[cfg(feature = "faults")]
        if self.parked.is_waiting() {
            return true;
        }
        let idle = self.engine.pending() == 0;
        idle && !(self.draining.is_empty() && self.deleting.is_empty())
    }

    /// Whether the host writes its doorbells itself: nothing tells a worker that it has.
    pub(crate) fn is_mapped(&self) -> bool {
        self.shared.mapped
    }

    /// Whether all that it could have to do would begin with a ring or a message: nothing is in
    /// flight, nothing held back, and nobody waits.
    pub(crate) fn is_at_rest(&self) -> bool {
        #[cfg(feature = "faults")]
        if self.parked.is_waiting() {
            return false;
        }
        let held = |cq: &Cq| cq.is_holding() || cq.has_staged();
        self.engine.pending() == 0
            && self.draining.is_empty()
            && self.deleting.is_empty()
            && self.detaching.is_none()
            && !self.cqs.iter().flatten().any(held)
    }

    /// How much has been done for it: a number that changes with every command.
    pub(crate) fn progress(&self) -> u64 {
        let fetched = self.sqs.iter().flatten().map(|sq| sq.stats.commands);
        let posted = self.cqs.iter().flatten().map(|cq| cq.stats.completions);
        fetched.chain(posted).fold(0, u64::wrapping_add)
    }
}
