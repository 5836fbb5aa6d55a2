//! Queues of one controller on one I/O thread: from the doorbell to the completion.
//!
//! # Queue override
//!
//! An override is another implementation that serves a controller's queues; fault injection uses
//! it. Without an override, the cost is one test of an empty `Option` per batch of commands.

pub(crate) use crate::journal::BURST;

use super::fused::{self, Burst, Fetcher, Paired};
use super::observer::{
    Observer, interrupts, record, report_error, report_failure, trace_interrupts, trace_poll,
    trace_posted,
};
use super::replay::Replay;
use crate::exec::prefetch::{self, Prefetch};
use crate::exec::{Engine, Started};
use crate::journal::{Decision, JournalPart, RecoveredCommand};
use crate::notice::{ControlHandle, Notice};
use crate::queue::{Cq, Sq};
use crate::shared::ControllerShared;
use crate::trace::{COMPLETION_QUEUE, Kind};
use shadowbell_doorbell::{Arming, Fenced, InvalidDoorbell, Sleeper};
use shadowbell_spec::status::Status;
use shadowbell_spec::{Cqe, Sqe};
use shadowbell_state::{AbortPoint, CommandStep, WrongOrder, abort_command, abort_point, is_wrong};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Instant;

/// Prefetch distance of submission queue entries, in commands. It is long enough for a cache line
/// to arrive before it is read, and short enough that few lines are prefetched in vain.
const AHEAD: u32 = 4;

/// Maximum number of completions to post at once while more commands wait: four cache lines. The
/// host can process them while this thread executes the next commands.
const POST_AFTER: u32 = 16;

/// State cell of an I/O thread's sleeper.
pub(crate) type SleepCell = Arc<AtomicU32>;

/// Queues of one controller that one I/O thread serves.
pub(crate) struct QueueSet {
    pub(crate) shared: Arc<ControllerShared>,
    pub(crate) control: ControlHandle,
    pub(crate) engine: Engine,
    /// Submission queues. The index of a queue is constant for its lifetime.
    pub(crate) sqs: Vec<Option<Sq>>,
    /// Completion queues. The index is constant for the queue's lifetime; [`Sq`] refers to it.
    pub(crate) cqs: Vec<Option<Cq>>,
    /// Journal for crash recovery, if the controller has one.
    pub(crate) journal: Option<JournalPart>,
}

impl QueueSet {
    pub(crate) fn new(
        shared: Arc<ControllerShared>,
        control: ControlHandle,
        mut engine: Engine,
        journal: Option<JournalPart>,
    ) -> Self {
        engine.set_copy_formats(shared.copy_formats());
        engine.set_control(&control, &shared);
        Self { shared, control, engine, sqs: Vec::new(), cqs: Vec::new(), journal }
    }

    pub(crate) fn find_sq(&self, qid: u16) -> Option<usize> {
        self.sqs.iter().position(|q| q.as_ref().is_some_and(|q| q.layout.qid == qid))
    }

    pub(crate) fn find_cq(&self, qid: u16) -> Option<usize> {
        self.cqs.iter().position(|q| q.as_ref().is_some_and(|q| q.layout.qid == qid))
    }

    /// Reads the tail of a queue. Returns `Some` if there are commands to fetch.
    #[inline]
    pub(crate) fn poll_tail(&mut self, index: usize, trace: &mut Option<Observer>) -> Option<u16> {
        let sq = self.sqs[index].as_mut()?;
        if sq.stopped || sq.careful || sq.ring.is_none() {
            return None;
        }
        let before = trace.is_some().then(|| (sq.tail.last(), sq.tail.stats()));
        let tail = match sq.poll_tail() {
            Ok(tail) => {
                if let Some(before) = before {
                    trace_poll(trace, &self.shared, sq, before);
                }
                tail
            }
            Err(error) => {
                let qid = sq.layout.qid;
                self.invalid(qid, error, trace);
                return None;
            }
        };
        self.sqs[index].as_ref().is_some_and(|sq| sq.head != tail).then_some(tail)
    }

    /// Variant of [`poll_tail`](Self::poll_tail) for a queue whose commands are fetched one at a
    /// time (`careful`), because a command may have crashed an earlier process.
    pub(crate) fn poll_tail_of_one(
        &mut self,
        index: usize,
        trace: &mut Option<Observer>,
    ) -> Option<u16> {
        self.sqs.get_mut(index)?.as_mut()?.careful = false;
        let tail = self.poll_tail(index, trace);
        self.sqs.get_mut(index)?.as_mut()?.careful = true;
        tail
    }

    /// Fetches and starts a single command of a queue that contains at least one. Before that,
    /// writes to the journal that the command is being started, and that `crashes` processes have
    /// crashed with this command in flight. Returns 0 if there was no room for the command's
    /// completion.
    pub(crate) fn serve_one(
        &mut self,
        index: usize,
        crashes: u8,
        trace: &mut Option<Observer>,
    ) -> u32 {
        let Some(sq) = self.sqs.get(index).and_then(Option::as_ref) else { return 0 };
        let (qid, next) = (sq.layout.qid, sq.layout.size.forward(sq.head, 1));
        if let Some(journal) = &self.journal {
            journal.store_trying(qid, sq.fetched, crashes);
        }
        let fetched = self.serve(index, next, trace);
        if let Some(journal) = &self.journal {
            journal.clear_trying(qid);
        }
        fetched
    }

    /// Fetches a burst of commands, starts them and posts completions. Returns the number of
    /// commands.
    #[inline]
    pub(crate) fn serve(&mut self, index: usize, tail: u16, trace: &mut Option<Observer>) -> u32 {
        if self.engine.schedules_sources() {
            self.engine.begin_turn(index);
        }
        if self.engine.uses_prefetch_hints() {
            self.fetch::<true>(index, tail, trace)
        } else {
            self.fetch::<false>(index, tail, trace)
        }
    }

    // Not inlined: in one function with its callers, the loop would run out of registers.
    #[inline(never)]
    fn fetch<const HINT: bool>(
        &mut self,
        index: usize,
        tail: u16,
        trace: &mut Option<Observer>,
    ) -> u32 {
        let Some(sq) = &mut self.sqs[index] else { return 0 };
        let Some(cq) = self.cqs.get_mut(sq.cq).and_then(Option::as_mut) else { return 0 };
        if cq.ring.is_none() {
            return 0;
        }
        let mut room = cq.free().min(BURST);
        if room == 0 || room < BURST && room < sq.layout.size.distance(sq.head, tail) {
            cq.poll_head();
            if let Some(error) = cq.take_invalid() {
                let qid = cq.layout.qid | COMPLETION_QUEUE;
                self.invalid(qid, error, trace);
                return 0;
            }
            room = cq.free().min(BURST);
        }
        if room == 0 {
            sq.waits_for_two = false;
            if !std::mem::replace(&mut sq.blocked, true) {
                sq.counters.blocked.add(1);
                let (qid, tail) = (cq.layout.qid, u32::from(cq.tail));
                record(trace, Kind::CqFull, &self.shared, qid, tail, 0);
            }
            return 0;
        }
        sq.blocked = false;
        self.engine.set_write_through(self.shared.is_write_through());
        let Some(ring) = &sq.ring else { return 0 };
        let (mut head, mut pending, mut posted) = (sq.head, 0, false);
        let mut fetched = room.min(sq.layout.size.distance(head, tail));
        // Entries beyond the host's tail are not prefetched. The host will write them, and would
        // have to fetch their cache lines back.
        (0..fetched.min(AHEAD)).for_each(|ahead| ring.prefetch(u32::from(head) + ahead));
        cq.prefetch(fetched);
        cq.submitted();
        let mut permits = cq.reserve(fetched);
        let mut hints = Prefetch::of(fetched, sq.prefetch);
        let mut done = 0;
        while done < fetched && self.engine.has_budget() {
            let began = done;
            let mut stop = fetched.min(done + if HINT { prefetch::POST_AFTER } else { POST_AFTER });
            while done < stop {
                if done + AHEAD < fetched {
                    ring.prefetch(u32::from(head) + AHEAD);
                }
                if HINT {
                    let waiting = || sq.layout.size.distance(head, sq.tail.peek());
                    hints.hint(self.engine.namespaces(), ring, head, done, waiting);
                }
                done += 1;
                let sqe: Sqe = ring.read(u32::from(head));
                head = sq.layout.size.next(head);
                abort_point(AbortPoint::Fetched);
                abort_command(CommandStep::Start, sqe.cdw10_11());
                let (permit, status) = match self.engine.start(&sqe, index, permits.take()) {
                    Started::Done(permit) => (permit, Status::SUCCESS),
                    Started::DoneLong(permit) => {
                        stop = done;
                        (permit, Status::SUCCESS)
                    }
                    Started::Pending => {
                        pending += 1;
                        abort_point(AbortPoint::Started);
                        if let Some(journal) = &mut self.journal {
                            // The entry is read from the ring again, so that the compiler can hold
                            // the first copy in registers. The host may have changed the entry in
                            // between. This is harmless, because recovery validates the entry.
                            let slot = sq.layout.size.back(head, 1);
                            let count = sq.fetched.wrapping_add(done - 1);
                            let tag = self.engine.last_tag();
                            let sqe: Sqe = ring.read(u32::from(slot));
                            journal.record(tag, sq.layout.qid, count, &sqe);
                            abort_point(AbortPoint::Recorded);
                        }
                        if !self.engine.has_budget() {
                            stop = done;
                        }
                        continue;
                    }
                    Started::Failed(permit, status) => {
                        self.engine.count_error(status);
                        stop = done;
                        report_error(&self.control, sq.layout.qid, &sqe, status);
                        (permit, status)
                    }
                    Started::Fused(permit) => {
                        let Self { engine, journal, control, .. } = self;
                        let with = Fetcher { engine, journal, control, index, sq, cq };
                        let burst = Burst { head, done, fetched, pending, permits };
                        let (burst, paired) = fused::pair(with, &sqe, permit, burst);
                        Burst { head, done, fetched, pending, permits } = burst;
                        stop = done;
                        match paired {
                            Paired::Both => continue,
                            Paired::NoRoom => {
                                (sq.blocked, sq.waits_for_two) = (true, true);
                                continue;
                            }
                            Paired::Failed(permit, status) => {
                                self.engine.count_error(status);
                                report_error(&self.control, sq.layout.qid, &sqe, status);
                                (permit, status)
                            }
                        }
                    }
                };
                cq.complete(permit, Cqe::new(sqe.cid, sq.layout.qid, head, status, 0));
            }
            self.engine.charge(done - began);
            sq.counters.commands.add(u64::from(done - began));
            if cq.has_staged() {
                self.engine.publish();
                posted |= post_staged(cq, &self.engine, &mut self.journal);
            }
        }
        cq.return_permits(permits, fetched - done);
        let fetched = done;
        sq.head = head;
        sq.fetched = sq.fetched.wrapping_add(fetched);
        if let Some(journal) = &mut self.journal {
            write_down(journal, cq, Some(sq));
        }
        if HINT {
            sq.prefetch = hints.end(fetched);
        }
        sq.in_flight += pending;
        let counters = &sq.counters;
        counters.batches.add(1);
        counters.largest_batch.set(counters.largest_batch.get().max(u64::from(fetched)));
        if trace.is_some() {
            record(trace, Kind::Batch, &self.shared, sq.layout.qid, u32::from(tail), fetched);
            trace_posted(trace, &self.shared, cq);
        }
        if posted {
            if trace.is_some() {
                notify_traced(trace, &self.shared, cq);
            } else {
                cq.notify_host(&self.shared.coalescing);
            }
            abort_point(AbortPoint::Notified);
        }
        fetched
    }

    /// Executes a recovered command again, which was in flight in a dead process. Returns false if
    /// the completion queue has no room for the completion.
    pub(crate) fn replay(&mut self, replay: &Replay) -> bool {
        let Self { engine, sqs, cqs, control, journal, .. } = self;
        let Replay { sq: index, command, reserved_slot, second } = replay;
        let Some(sq) = sqs.get_mut(*index).and_then(Option::as_mut) else { return true };
        let Some(cq) = cqs.get_mut(sq.cq).and_then(Option::as_mut) else { return true };
        if cq.free() == 0 {
            cq.poll_head();
        }
        (sq.blocked, sq.waits_for_two) =
            (cq.free() <= u32::from(second.is_some()), second.is_some());
        if sq.blocked || cq.ring.is_none() {
            return false;
        }
        let (permit, sqe, qid) = (cq.reserve(1).take(), &command.sqe, sq.layout.qid);
        engine.set_write_through(self.shared.is_write_through());
        if let Some(second) = second {
            let permits = (permit, cq.reserve(1).take());
            if replay.is_deadly() {
                log_abandoned(&self.shared, qid, command);
            }
            let both = [(command, *reserved_slot), (&second.0, second.1)];
            let with = Fetcher { engine, journal, control, index: *index, sq: &*sq, cq };
            sq.in_flight += fused::replay(with, both, permits, replay.is_deadly());
            return true;
        }
        if let Some(Decision::End { status, dw0 }) = command.decision {
            if journal.is_some() {
                cq.complete_record(*reserved_slot);
            }
            cq.complete(permit, Cqe::new(sqe.cid, qid, sq.head, status, dw0));
            return true;
        }
        let started = if replay.is_deadly() {
            log_abandoned(&self.shared, qid, command);
            Started::Failed(permit, Status::INTERNAL.with_dnr())
        } else {
            if let Some(journal) = journal {
                journal.start_recovered(*reserved_slot, command);
            }
            abort_command(CommandStep::Start, sqe.cdw10_11());
            match command.decision {
                Some(Decision::Begin) => engine.park_second(sqe, *index, permit),
                _ => engine.restart(sqe, *index, permit),
            }
        };
        let (permit, status) = match started {
            Started::Done(permit) | Started::DoneLong(permit) => (permit, Status::SUCCESS),
            Started::Pending => {
                sq.in_flight += 1;
                abort_point(AbortPoint::ReplayStarted);
                if let Some(journal) = journal {
                    journal.record_recovered(engine.last_tag(), command);
                    abort_point(AbortPoint::ReplayRecorded);
                    journal.free(*reserved_slot);
                }
                return true;
            }
            Started::Failed(permit, status) => {
                engine.count_error(status);
                report_error(control, qid, sqe, status);
                (permit, status)
            }
            // The command is the first of a fused operation, and the journal has no record of the
            // second one.
            Started::Fused(permit) => (permit, Status::FUSED_MISSING.with_dnr()),
        };
        if journal.is_some() {
            cq.complete_record(*reserved_slot);
        }
        cq.complete(permit, Cqe::new(sqe.cid, qid, sq.head, status, 0));
        true
    }

    /// Stages the completions of commands that have ended. Returns true if there were any, or if
    /// the engine can continue other work without waiting.
    pub(crate) fn reap(&mut self) -> bool {
        let mut busy = false;
        let Self { engine, sqs, cqs, control, journal, .. } = self;
        let more = engine.reap(|ended| {
            busy = true;
            let Some(sq) = sqs.get_mut(ended.sq).and_then(Option::as_mut) else { return };
            let Some(cq) = cqs.get_mut(sq.cq).and_then(Option::as_mut) else { return };
            abort_command(CommandStep::End, ended.lba);
            let mut cqe = sq.complete(ended.cid, ended.status, ended.dw0);
            cqe.dw1 = ended.dw1;
            if !cqe.status().is_success() {
                report_failure(control, sq.layout.qid, &ended);
            }
            if let Some(journal) = journal {
                cq.complete_record(journal.slot_of(ended.tag));
            }
            cq.complete(ended.permit, cqe);
        });
        if more {
            self.write_decisions();
        }
        busy | more
    }

    /// Writes the outcomes of exclusive commands to the journal (see [`Decision`]).
    #[cold]
    pub(crate) fn write_decisions(&mut self) {
        for (tag, decision) in self.engine.take_decided() {
            if let Some(journal) = &self.journal {
                journal.decide(tag, decision);
                abort_point(AbortPoint::Decided);
            }
        }
    }

    /// Posts staged completions, and raises held interrupts that are due.
    #[inline]
    pub(crate) fn post(&mut self, trace: &mut Option<Observer>) {
        for cq in self.cqs.iter_mut().flatten() {
            if cq.has_staged() {
                self.engine.publish();
            }
            if cq.has_staged() && post_staged(cq, &self.engine, &mut self.journal) {
                if let Some(journal) = &mut self.journal {
                    write_down(journal, cq, None);
                }
                if trace.is_some() {
                    trace_posted(trace, &self.shared, cq);
                    notify_traced(trace, &self.shared, cq);
                } else {
                    cq.notify_host(&self.shared.coalescing);
                }
                abort_point(AbortPoint::Notified);
            } else if cq.is_holding() {
                let before = interrupts(cq);
                cq.raise_due();
                if trace.is_some() {
                    trace_interrupts(trace, &self.shared, cq, before);
                }
            }
        }
    }

    /// Starts a trace. Commands and completions that are in the queues at this time are not
    /// recorded.
    pub(crate) fn begin_trace(&mut self) {
        self.sqs.iter_mut().flatten().for_each(|sq| sq.traced = sq.tail.last());
        self.cqs.iter_mut().flatten().for_each(|cq| cq.traced = cq.tail);
    }

    /// Reports an invalid doorbell value. [`COMPLETION_QUEUE`] in `qid` marks a head doorbell.
    #[cold]
    pub(super) fn invalid(&self, qid: u16, error: InvalidDoorbell, trace: &mut Option<Observer>) {
        record(trace, Kind::Invalid, &self.shared, qid, error.value, 0);
        if let Some(journal) = &self.journal
            && let Some(sq) = self.find_sq(qid).and_then(|index| self.sqs[index].as_ref())
        {
            // The stopped state of the queue is written to the journal, so that the next process
            // does not fetch from the queue either.
            let cq = self.cqs.get(sq.cq).and_then(Option::as_ref);
            sq.write_down(journal, cq.map_or(0, Cq::posted));
        }
        self.control.notify(Notice::InvalidDoorbell { qid: qid & !COMPLETION_QUEUE });
    }

    /// Reads the heads of all completion queues, and reports invalid ones.
    #[cold]
    pub(crate) fn check_heads(&mut self, trace: &mut Option<Observer>) {
        let mut invalid = Vec::new();
        poll_heads(&mut self.cqs, &self.shared, &mut invalid);
        for (qid, error) in invalid {
            self.invalid(qid, error, trace);
        }
    }

    /// Arms the doorbells before a sleep (first phase).
    pub(crate) fn arm(&mut self, arming: &mut Arming<'_, SleepCell>, trace: &mut Option<Observer>) {
        let Self { sqs, cqs, shared, .. } = self;
        for sq in sqs.iter_mut().flatten().filter(|sq| !sq.stopped) {
            if !sq.blocked {
                let before = sq.tail.stats().event_idx_armed;
                sq.tail.arm(arming);
                if trace.is_some() && sq.tail.stats().event_idx_armed != before {
                    let at = u32::from(sq.tail.last());
                    record(trace, Kind::EventIdxArmed, shared, sq.layout.qid, at, 0);
                }
            } else if let Some(cq) = cqs.get_mut(sq.cq).and_then(Option::as_mut) {
                shared.request_head_wakeup(cq.layout.qid, true);
                cq.head.arm(arming);
            }
        }
    }

    /// Rechecks the doorbells before a sleep (second phase, after [`arm`](Self::arm) and a full
    /// fence). Work that is found here prevents the sleep. Returns the earliest time at which an
    /// interrupt that Interrupt Coalescing holds back is due.
    pub(crate) fn recheck(
        &mut self,
        fenced: &mut Fenced<'_, SleepCell>,
        trace: &mut Option<Observer>,
    ) -> Option<Instant> {
        let mut invalid = Vec::new();
        let mut deadline: Option<Instant> = None;
        let Self { sqs, cqs, engine, shared, .. } = self;
        fenced.note(engine.can_advance());
        // Commands that wait because an in-flight limit is reached do not keep the thread awake:
        // the end of a command wakes it.
        let is_full = engine.is_full();
        poll_heads(cqs, shared, &mut invalid);
        for sq in sqs.iter_mut().flatten().filter(|sq| !sq.stopped) {
            if !sq.blocked {
                let before = trace.is_some().then(|| (sq.tail.last(), sq.tail.stats()));
                if let Err(error) = sq.recheck_tail(fenced) {
                    invalid.push((sq.layout.qid, error));
                }
                if let Some(before) = before {
                    trace_poll(trace, shared, sq, before);
                }
                // The queue may also have commands that an earlier burst has not fetched.
                let reachable =
                    cqs.get(sq.cq).and_then(Option::as_ref).is_some_and(|cq| cq.ring.is_some());
                let waits = sq.ring.is_some() && sq.head != sq.tail.last();
                fenced.note(reachable && waits && !is_full);
            } else if let Some(cq) = cqs.get_mut(sq.cq).and_then(Option::as_mut) {
                let before = cq.head.last();
                if let Err(error) = cq.head.recheck(fenced, cq.tail) {
                    invalid.push((cq.layout.qid | COMPLETION_QUEUE, error));
                }
                cq.moved_from(before);
                // The free entries are checked even if this recheck has found no new head: the new
                // head may have been read before, for the interrupt decision.
                let reachable = sq.ring.is_some() && cq.ring.is_some();
                let room = 1 + u32::from(sq.waits_for_two);
                let waits = cq.free() >= room && sq.head != sq.tail.last();
                fenced.note(reachable && waits && !is_full);
            }
        }
        for cq in cqs.iter_mut().flatten() {
            let before = interrupts(cq);
            deadline = match (deadline, cq.flush_interrupts()) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
            if trace.is_some() {
                trace_interrupts(trace, shared, cq, before);
            }
        }
        for (qid, error) in invalid {
            self.invalid(qid, error, trace);
        }
        deadline
    }

    /// Disarms the doorbells after a sleep.
    pub(crate) fn disarm(&mut self, sleeper: &Sleeper<SleepCell>) {
        self.sqs.iter_mut().flatten().for_each(|sq| sq.tail.disarm(sleeper));
        for cq in self.cqs.iter_mut().flatten() {
            self.shared.request_head_wakeup(cq.layout.qid, false);
            cq.head.disarm(sleeper);
        }
    }

    /// True if a completion is staged or an interrupt is held.
    pub(crate) fn has_held_completions(&self) -> bool {
        self.cqs.iter().flatten().any(|cq| cq.is_holding() || cq.has_staged())
    }

    /// Progress counter, which changes with every fetched command and posted completion.
    pub(crate) fn progress(&self) -> u64 {
        let fetched = self.sqs.iter().flatten().map(|sq| sq.counters.commands.get());
        let posted = self.cqs.iter().flatten().map(Cq::posted);
        fetched.chain(posted).fold(0, u64::wrapping_add)
    }
}

/// Reads the heads of completion queues for which no submission queue waits. A fetch reads a head
/// only if the queue is nearly full. So without this function, most invalid heads would not be
/// found. The heads of queues for which a submission queue waits are skipped, because they are
/// armed, and only a recheck may read an armed head.
fn poll_heads(
    cqs: &mut [Option<Cq>],
    shared: &ControllerShared,
    invalid: &mut Vec<(u16, InvalidDoorbell)>,
) {
    for cq in cqs.iter_mut().flatten() {
        let qid = cq.layout.qid;
        if !shared.needs_head_wakeup(qid) {
            cq.poll_head();
        }
        invalid.extend(cq.take_invalid().map(|error| (qid | COMPLETION_QUEUE, error)));
    }
}

/// [`Cq::notify_host`] with a trace record of the decision.
#[cold]
fn notify_traced(trace: &mut Option<Observer>, shared: &ControllerShared, cq: &mut Cq) {
    let before = interrupts(cq);
    cq.notify_host(&shared.coalescing);
    trace_interrupts(trace, shared, cq, before);
}

/// Logs a command that is not executed again, because processes have crashed with it.
#[cold]
fn log_abandoned(shared: &ControllerShared, qid: u16, command: &RecoveredCommand) {
    let RecoveredCommand { crashes, sqe, .. } = command;
    let (controller, cid, opcode, nsid, lba) =
        (shared.id, sqe.cid, sqe.opcode, sqe.nsid, sqe.cdw10_11());
    tracing::error!(
        controller,
        qid,
        cid,
        opcode,
        nsid,
        lba,
        "{crashes} server processes in a row crashed with this command in flight: it is completed \
         with Internal Error and not executed again; please report this, with the last log lines \
         of these processes"
    );
}

/// Posts the staged completions. Returns true if at least one was posted.
#[inline]
fn post_staged(cq: &mut Cq, engine: &Engine, journal: &mut Option<JournalPart>) -> bool {
    cq.check_memory(|| engine.view().table());
    if is_wrong(WrongOrder::FreedBeforePosted)
        && let Some(journal) = journal
    {
        cq.free_records(journal);
    }
    abort_point(AbortPoint::Staged);
    let posted = cq.post();
    abort_point(AbortPoint::Posted);
    posted
}

/// Writes the positions of the completion queue and of the submission queue `sq` to the journal,
/// and frees the records of commands whose completions were posted. The order is that which the
/// [journal](crate::journal) requires.
#[inline]
fn write_down(journal: &mut JournalPart, cq: &mut Cq, sq: Option<&Sq>) {
    let is_wrong = is_wrong(WrongOrder::StoredBeforeFreed);
    if is_wrong {
        journal.store_cq(cq.layout.qid, cq.position());
        abort_point(AbortPoint::CqStored);
    }
    cq.free_records(journal);
    abort_point(AbortPoint::Freed);
    if let Some(sq) = sq {
        journal.store_sq(sq.layout.qid, sq.position(), cq.posted());
        abort_point(AbortPoint::SqStored);
    }
    if !is_wrong {
        journal.store_cq(cq.layout.qid, cq.position());
        abort_point(AbortPoint::CqStored);
    }
}

/// Replacement of the command processing of a controller's queues on one I/O thread, for fault
/// injection. `sq` is the index of a submission queue.
pub(crate) trait QueueOverride: Send {
    /// Fetches and starts commands of `sq`, whose tail is `tail`. Returns their number.
    fn fetch(
        &mut self,
        set: &mut QueueSet,
        sq: usize,
        tail: u16,
        trace: &mut Option<Observer>,
    ) -> u32;

    /// Completes commands that have ended. Returns true if there were any, or if more work can be
    /// done at once.
    fn reap(&mut self, set: &mut QueueSet) -> bool;

    /// Executes delayed work that is due. Called in every pass while
    /// [`is_waiting`](Self::is_waiting).
    fn tick(&mut self, set: &mut QueueSet);

    /// True if delayed work exists.
    fn is_waiting(&self) -> bool;

    /// Handles an Abort. Returns true if the override held the command and has aborted it.
    fn abort(&mut self, set: &mut QueueSet, sq: usize, cid: u16) -> bool;

    /// Deletes a submission queue: its held commands end without a completion.
    fn delete_sq(&mut self, set: &mut QueueSet, sq: usize);

    /// Resets the controller.
    fn reset(&mut self);
}
