//! Overrides that inject faults into queues, registers and admin commands.
//!
//! [`FaultyQueues`] serves the queues one command at a time. [`FaultyControl`] returns wrong
//! register values and fails admin commands.

use super::injector::{FaultState, Injector};
use super::rules::Fault;
use crate::control::registers::{ControlOverride, Response};
use crate::control::{Executed, Outcome, RegisterImage};
use crate::exec::{CompletedCommand, Engine, Started};
use crate::interrupt::Coalescing;
use crate::notice::{Condition, Notice};
use crate::queue::{Cq, Permit, Sq};
use crate::trace::Kind;
use crate::worker::observer::{Observer, record, report_error, report_failure, trace_posted};
use crate::worker::queue_set::{BURST, QueueOverride, QueueSet};
use shadowbell_spec::regs::{self, Cc, Csts};
use shadowbell_spec::status::Status;
use shadowbell_spec::{Cqe, Sqe};
use std::sync::Arc;
use std::time::Instant;

/// Delayed completion.
struct Delayed {
    due: Instant,
    /// Index of the submission queue.
    sq: usize,
    permit: Permit,
    cqe: Cqe,
}

/// Hanging command. `until` is the time of its end; `None` if it hangs forever.
struct Hung {
    until: Option<Instant>,
    sq: usize,
    permit: Permit,
    cid: u16,
}

/// Command whose execution is delayed.
struct Stalled {
    due: Instant,
    sq: usize,
    permit: Permit,
    sqe: Sqe,
}

/// Queue override that injects faults into the queues of one controller on one I/O thread.
pub(super) struct FaultyQueues {
    state: Arc<FaultState>,
    delayed: Vec<Delayed>,
    hung: Vec<Hung>,
    stalled: Vec<Stalled>,
    /// Commands in flight whose completions will be faulty: queue index, identifier, fault.
    marked: Vec<(usize, u16, Fault)>,
}

/// Submission queue and its completion queue.
struct Pair<'a> {
    index: usize,
    sq: &'a mut Sq,
    cq: &'a mut Cq,
}

/// The submission queue `index` with its completion queue.
fn pair<'a>(
    sqs: &'a mut [Option<Sq>],
    cqs: &'a mut [Option<Cq>],
    index: usize,
) -> Option<Pair<'a>> {
    let sq = sqs.get_mut(index)?.as_mut()?;
    let cq = cqs.get_mut(sq.cq)?.as_mut()?;
    Some(Pair { index, sq, cq })
}

/// Removes and returns the matching items of `list`.
fn take<T>(list: &mut Vec<T>, which: impl Fn(&T) -> bool) -> Vec<T> {
    list.extract_if(.., |item| which(item)).collect()
}

/// Completes a command that was in flight, and raises the interrupt.
fn complete_now(
    pair: Pair<'_>,
    permit: Permit,
    cqe: Cqe,
    (engine, coalescing): (&Engine, &Coalescing),
) {
    let Pair { sq, cq, .. } = pair;
    sq.in_flight -= 1;
    cq.complete(permit, cqe);
    cq.check_memory(|| engine.view().table());
    if cq.post() {
        cq.notify_host(coalescing);
    }
}

impl FaultyQueues {
    pub(super) fn new(state: Arc<FaultState>) -> Self {
        Self {
            state,
            delayed: Vec::new(),
            hung: Vec::new(),
            stalled: Vec::new(),
            marked: Vec::new(),
        }
    }

    fn mark_of(&mut self, sq: usize, cid: u16) -> Option<Fault> {
        let at = self.marked.iter().position(|(s, c, _)| (*s, *c) == (sq, cid))?;
        Some(self.marked.swap_remove(at).2)
    }

    /// Completes a command. If it is marked with a fault, its completion is faulty.
    fn finish(
        &mut self,
        injector: &Injector,
        pair: Pair<'_>,
        permit: Permit,
        mut cqe: Cqe,
        fault: Option<Fault>,
    ) {
        let Pair { index, sq, cq } = pair;
        match fault {
            Some(Fault::DropAfter) => return cq.release(permit),
            Some(Fault::Delay(time)) => {
                sq.in_flight += 1;
                let due = Instant::now() + time;
                return self.delayed.push(Delayed { due, sq: index, permit, cqe });
            }
            Some(Fault::Duplicate) => {
                if let Some(second) = cq.try_reserve() {
                    cq.complete(second, cqe);
                }
            }
            Some(Fault::Corrupt) => {
                let noise = injector.noise();
                match noise % 5 {
                    0 => cqe.dw0 ^= (noise >> 32) as u32,
                    1 => cqe.dw1 ^= (noise >> 32) as u32,
                    2 => cqe.sq_head ^= (noise >> 32) as u16 | 1,
                    3 => cqe.sq_id ^= (noise >> 32) as u16 | 1,
                    _ => cqe.status ^= ((noise >> 32) as u16 & 0x0fff | 1) << 1,
                }
            }
            // The changed identifier is free: a host that numbers its commands from 0 never uses so
            // high a number.
            Some(Fault::WrongCid) => cqe.cid ^= 0x8000,
            Some(Fault::WrongHead) => cqe.sq_head = u16::MAX,
            Some(Fault::WrongSqId) => cqe.sq_id ^= 0x40,
            Some(Fault::WrongPhase) => {
                cq.post();
                if !cq.has_staged()
                    && let Some(ring) = &cq.ring
                {
                    let words: [u64; 2] = zerocopy::transmute!(cqe);
                    let inverted = u64::from(!cq.phase) << 48;
                    ring.publish_run(u32::from(cq.tail), &[words], inverted);
                    cq.tail = cq.layout.size.next(cq.tail);
                    cq.phase ^= cq.tail == 0;
                    return cq.release(permit);
                }
            }
            _ => {}
        }
        cq.complete(permit, cqe);
    }

    /// Posts delayed completions that are due.
    fn post_delayed(&mut self, set: &mut QueueSet, now: Instant) {
        let QueueSet { sqs, cqs, engine, shared, .. } = set;
        let is_stopped =
            |sq: usize| sqs.get(sq).and_then(Option::as_ref).is_none_or(|sq| sq.stopped);
        for Delayed { sq, permit, cqe, .. } in
            take(&mut self.delayed, |delayed| now >= delayed.due || is_stopped(delayed.sq))
        {
            if let Some(pair) = pair(sqs, cqs, sq) {
                complete_now(pair, permit, cqe, (engine, &shared.coalescing));
            }
        }
    }

    /// Ends hanging commands whose time is over, without executing them.
    fn end_hung(&mut self, set: &mut QueueSet, now: Instant) {
        let QueueSet { sqs, cqs, engine, shared, .. } = set;
        let is_over = |hung: &Hung| hung.until.is_some_and(|until| now >= until);
        for Hung { sq, permit, cid, .. } in take(&mut self.hung, is_over) {
            if let Some(pair) = pair(sqs, cqs, sq) {
                let cqe = Cqe::new(cid, pair.sq.layout.qid, pair.sq.head, Status::INTERNAL, 0);
                complete_now(pair, permit, cqe, (engine, &shared.coalescing));
            }
        }
    }

    /// Executes delayed commands that are due, like newly fetched ones.
    fn start_stalled(&mut self, set: &mut QueueSet, now: Instant) {
        let QueueSet { sqs, cqs, engine, shared, .. } = set;
        for Stalled { sq, permit, sqe, .. } in take(&mut self.stalled, |stalled| now >= stalled.due)
        {
            let Some(pair) = pair(sqs, cqs, sq) else { continue };
            let (permit, status) = match engine.start(&sqe, sq, permit) {
                Started::Done(permit) | Started::DoneLong(permit) => (permit, Status::SUCCESS),
                Started::Pending => continue,
                Started::Failed(permit, status) => (permit, status),
                Started::Fused(permit) => (permit, Status::INVALID_FIELD.with_dnr()),
            };
            engine.publish();
            let cqe = Cqe::new(sqe.cid, pair.sq.layout.qid, pair.sq.head, status, 0);
            complete_now(pair, permit, cqe, (engine, &shared.coalescing));
        }
    }

    /// Fetches one command and starts it. Returns false if no more commands can be fetched.
    fn fetch_one(
        &mut self,
        injector: &Injector,
        engine: &mut Engine,
        control: &crate::notice::ControlHandle,
        pair: Pair<'_>,
    ) -> bool {
        let Pair { index, sq, cq } = pair;
        let Some(permit) = cq.try_reserve() else { return false };
        let Some(sqe) = sq.fetch() else {
            cq.release(permit);
            return false;
        };
        let qid = sq.layout.qid;
        let fault = injector.command(qid);
        let success = Cqe::new(sqe.cid, qid, sq.head, Status::SUCCESS, 0);
        match fault {
            Some(Fault::DropBefore) => {
                cq.release(permit);
                return true;
            }
            Some(Fault::Hang(time)) => {
                sq.in_flight += 1;
                let until = time.map(|time| Instant::now() + time);
                self.hung.push(Hung { until, sq: index, permit, cid: sqe.cid });
                return true;
            }
            Some(Fault::Stall(time)) => {
                sq.in_flight += 1;
                let due = Instant::now() + time;
                self.stalled.push(Stalled { due, sq: index, permit, sqe });
                return true;
            }
            Some(Fault::Status(status)) => {
                cq.complete(permit, success.with_status(status));
                return true;
            }
            Some(fault @ (Fault::Fatal | Fault::SubsystemReset | Fault::Removal)) => {
                // The command is not executed, because the fault happens first.
                cq.release(permit);
                control.notify(Notice::Condition(match fault {
                    Fault::Fatal => Condition::Fatal,
                    Fault::SubsystemReset => Condition::SubsystemReset,
                    _ => Condition::Removed,
                }));
                return false;
            }
            _ => {}
        }
        match engine.start(&sqe, index, permit) {
            Started::Done(permit) | Started::DoneLong(permit) => {
                self.finish(injector, Pair { index, sq, cq }, permit, success, fault);
            }
            Started::Pending => {
                sq.in_flight += 1;
                self.marked.extend(fault.map(|fault| (index, sqe.cid, fault)));
            }
            Started::Failed(permit, status) => {
                engine.count_error(status);
                report_error(control, qid, &sqe, status);
                cq.complete(permit, success.with_status(status));
            }
            // Faults are injected into single commands, so fused operations are not supported here.
            Started::Fused(permit) => {
                let status = Status::INVALID_FIELD.with_dnr();
                engine.count_error(status);
                report_error(control, qid, &sqe, status);
                cq.complete(permit, success.with_status(status));
            }
        }
        true
    }
}

impl QueueOverride for FaultyQueues {
    fn fetch(
        &mut self,
        set: &mut QueueSet,
        index: usize,
        tail: u16,
        trace: &mut Option<Observer>,
    ) -> u32 {
        let injector = self.state.injector();
        let QueueSet { sqs, cqs, engine, shared, control, .. } = set;
        let Some(Pair { sq, cq, .. }) = pair(sqs, cqs, index) else { return 0 };
        if cq.ring.is_none() {
            return 0;
        }
        cq.poll_head();
        if cq.take_invalid().is_some() || cq.free() == 0 {
            // While faults are injected, an invalid head only blocks the queue and is not reported.
            sq.blocked = true;
            return 0;
        }
        sq.blocked = false;
        engine.set_write_through(shared.is_write_through());
        let mut fetched = 0;
        while sq.head != tail && fetched < BURST && engine.has_budget() && !self.state.has_failed()
        {
            let before = sq.head;
            let pair = Pair { index, sq: &mut *sq, cq: &mut *cq };
            let more = self.fetch_one(&injector, engine, control, pair);
            fetched += u32::from(sq.head != before);
            if !more {
                break;
            }
        }
        sq.counters.batches.add(1);
        let largest = sq.counters.largest_batch.get();
        sq.counters.largest_batch.set(largest.max(fetched.into()));
        engine.charge(fetched);
        engine.publish();
        cq.check_memory(|| engine.view().table());
        if cq.has_staged() && cq.post() {
            cq.notify_host(&shared.coalescing);
        }
        if trace.is_some() {
            record(trace, Kind::Batch, shared, sq.layout.qid, tail.into(), fetched);
            trace_posted(trace, shared, cq);
        }
        fetched
    }

    fn reap(&mut self, set: &mut QueueSet) -> bool {
        let injector = self.state.injector();
        let mut busy = false;
        let QueueSet { engine, sqs, cqs, control, .. } = set;
        let more = engine.reap(|ended| {
            busy = true;
            let Some(pair) = pair(sqs, cqs, ended.sq) else { return };
            let cqe = pair.sq.complete(ended.cid, ended.status, ended.dw0);
            if !cqe.status().is_success() {
                report_failure(control, pair.sq.layout.qid, &ended);
            }
            let fault = self.mark_of(ended.sq, ended.cid);
            let CompletedCommand { permit, .. } = ended;
            self.finish(&injector, pair, permit, cqe, fault);
        });
        busy | more
    }

    fn tick(&mut self, set: &mut QueueSet) {
        let now = Instant::now();
        self.post_delayed(set, now);
        self.start_stalled(set, now);
        self.end_hung(set, now);
    }

    fn is_waiting(&self) -> bool {
        let hangs_for_a_time = self.hung.iter().any(|hung| hung.until.is_some());
        hangs_for_a_time || !(self.delayed.is_empty() && self.stalled.is_empty())
    }

    fn abort(&mut self, set: &mut QueueSet, sq: usize, cid: u16) -> bool {
        let QueueSet { sqs, cqs, engine, shared, .. } = set;
        let hung = take(&mut self.hung, |hung| (hung.sq, hung.cid) == (sq, cid));
        let stalled = take(&mut self.stalled, |at| (at.sq, at.sqe.cid) == (sq, cid));
        let permits = hung.into_iter().map(|hung| hung.permit);
        let mut aborted = false;
        for permit in permits.chain(stalled.into_iter().map(|stalled| stalled.permit)) {
            let Some(pair) = pair(sqs, cqs, sq) else { continue };
            let (qid, head) = (pair.sq.layout.qid, pair.sq.head);
            let cqe = Cqe::new(cid, qid, head, Status::ABORT_REQUESTED, 0);
            complete_now(pair, permit, cqe, (engine, &shared.coalescing));
            aborted = true;
        }
        aborted
    }

    fn delete_sq(&mut self, set: &mut QueueSet, sq: usize) {
        let hung = take(&mut self.hung, |hung| hung.sq == sq);
        let stalled = take(&mut self.stalled, |stalled| stalled.sq == sq);
        let permits = hung.into_iter().map(|hung| hung.permit);
        for permit in permits.chain(stalled.into_iter().map(|stalled| stalled.permit)) {
            if let Some(pair) = pair(&mut set.sqs, &mut set.cqs, sq) {
                pair.sq.in_flight -= 1;
                pair.cq.release(permit);
            }
        }
    }

    fn reset(&mut self) {
        self.delayed.clear();
        self.hung.clear();
        self.stalled.clear();
        self.marked.clear();
    }
}

/// Control plane override that injects register and admin command faults.
#[derive(Debug)]
pub(super) struct FaultyControl {
    state: Arc<FaultState>,
    removed: bool,
    nssro: bool,
    /// Forced value of CSTS.RDY.
    ready: Option<bool>,
}

impl FaultyControl {
    pub(super) fn new(injector: &Arc<Injector>) -> Self {
        let state = Arc::new(FaultState::new(injector));
        Self { state, removed: false, nssro: false, ready: None }
    }

    /// Replaces the fault rules.
    pub(super) fn arm(&self, injector: Arc<Injector>) {
        self.state.arm(injector);
    }

    /// Handles a write of CC by the host.
    fn write_cc(&mut self, old: Cc, new: Cc) {
        let fault = match (old.en(), new.en()) {
            (false, true) => Fault::NeverReady,
            (true, false) => Fault::NeverDisabled,
            _ => return,
        };
        let happens = self.state.injector().ready(fault);
        self.ready = happens.then_some(fault == Fault::NeverDisabled);
    }
}

impl ControlOverride for FaultyControl {
    fn read(&self, image: &mut RegisterImage) {
        if self.removed {
            return image.fill(0xff);
        }
        let at = regs::CSTS as usize;
        let Some(bytes) = image.get_mut(at..at + 4) else { return };
        let Ok(csts) = <[u8; 4]>::try_from(&*bytes) else { return };
        let mut csts = Csts::from_bits(u32::from_le_bytes(csts));
        csts.set_nssro(self.nssro);
        if let Some(ready) = self.ready {
            csts.set_rdy(ready);
        }
        bytes.copy_from_slice(&csts.into_bits().to_le_bytes());
    }

    fn write(&mut self, offset: u64, value: u32, cc: Cc) -> bool {
        match offset {
            _ if self.removed => return true,
            regs::CSTS => self.nssro &= !Csts::from_bits(value).nssro(),
            regs::CC => self.write_cc(cc, Cc::from_bits(value)),
            _ => {}
        }
        false
    }

    fn admin(&mut self, sqe: &Sqe) -> Option<Executed> {
        match self.state.injector().admin(sqe.opcode)? {
            Fault::Refuse(_) => Some(Err(Status::INTERNAL)),
            _ => Some(Ok(Outcome::Unplaced)),
        }
    }

    fn queues(&self) -> Box<dyn QueueOverride> {
        Box::new(FaultyQueues::new(Arc::clone(&self.state)))
    }

    fn condition(&mut self, condition: Condition, ready: bool) -> Response {
        match condition {
            Condition::Fatal if ready => {
                self.state.set_failed(true);
                Response::Fail("a fault was injected")
            }
            Condition::SubsystemReset if ready => {
                self.nssro = true;
                Response::Reset
            }
            Condition::Removed => {
                self.state.set_failed(true);
                self.removed = true;
                Response::Nothing
            }
            Condition::Fatal | Condition::SubsystemReset => Response::Nothing,
        }
    }

    fn function_reset(&mut self) {
        self.ready = None;
    }

    fn reset_ended(&mut self) {
        // A reset ends the fatal state.
        self.state.set_failed(self.removed);
    }
}
