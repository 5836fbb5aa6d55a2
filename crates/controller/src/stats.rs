//! What happened, counted where it happened.
//!
//! Whoever serves a queue counts, without locks; whoever wants to know reads the numbers where they
//! are counted, and asks nobody. What a host can see is counted before it can see it.

use crate::measured::MeasuredNamespace;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shadowbell_doorbell::{ControllerCounters, ControllerStats, Counter};
use shadowbell_memory::EventFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

/// One end of a queue as the controller saw its doorbell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DoorbellCounts {
    /// MMIO writes received (trapped; a mapped doorbell is not counted by anybody).
    pub mmio_writes: u64,
    /// Times that the value was looked at while polling.
    pub looks: u64,
    /// Looks that found a new value.
    pub found_new: u64,
    /// EventIdx moved out of the host's way while polling.
    pub event_idx_moved: u64,
    /// EventIdx set so that the host's next update rings.
    pub event_idx_armed: u64,
    /// Second looks, after arming and the fence.
    pub rechecks: u64,
    /// Second looks that found a new value: each would have been a lost wakeup.
    pub rechecks_found: u64,
    /// Values refused.
    pub invalid: u64,
}

impl DoorbellCounts {
    fn of(mmio_writes: u64, s: ControllerStats) -> Self {
        Self {
            mmio_writes,
            looks: s.looks,
            found_new: s.found_new,
            event_idx_moved: s.event_idx_moved,
            event_idx_armed: s.event_idx_armed,
            rechecks: s.rechecks,
            rechecks_found: s.rechecks_found,
            invalid: s.invalid,
        }
    }

    fn merge(&mut self, o: &Self) {
        self.mmio_writes += o.mmio_writes;
        self.looks += o.looks;
        self.found_new += o.found_new;
        self.event_idx_moved += o.event_idx_moved;
        self.event_idx_armed += o.event_idx_armed;
        self.rechecks += o.rechecks;
        self.rechecks_found += o.rechecks_found;
        self.invalid += o.invalid;
    }
}

/// A submission queue with its share of the work.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SqStats {
    /// Queue identifier; 0 is the admin queue.
    pub qid: u16,
    /// Commands fetched.
    pub commands: u64,
    /// Times that at least one command was fetched.
    pub batches: u64,
    /// The largest batch.
    pub largest_batch: u64,
    /// Times that fetching stopped for want of completion queue space.
    pub blocked: u64,
    /// Its tail doorbell.
    pub doorbell: DoorbellCounts,
}

/// A completion queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CqStats {
    /// Queue identifier; 0 is the admin queue.
    pub qid: u16,
    /// Completions posted.
    pub completions: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// Batches of completions that raised none, because the host had not consumed what the last
    /// one announced, or because they were coalesced.
    pub interrupts_suppressed: u64,
    /// Its head doorbell.
    pub doorbell: DoorbellCounts,
}

/// What the commands did to the namespaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoStats {
    /// Read and Compare commands completed.
    pub reads: u64,
    /// Write commands completed.
    pub writes: u64,
    /// Copy commands completed.
    pub copies: u64,
    /// Other I/O commands completed (Verify among them, with which a host reads nothing).
    pub others: u64,
    /// Bytes read (Compare and Verify included).
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Bytes that Copy commands copied, which are neither of the above.
    pub bytes_copied: u64,
    /// Commands that ended in an error.
    pub errors: u64,
    /// Those of them that the medium is to blame for.
    pub media_errors: u64,
}

/// Where a submission queue counts.
#[derive(Debug)]
pub(crate) struct SqCounters {
    qid: u16,
    pub(crate) commands: Counter,
    pub(crate) batches: Counter,
    pub(crate) largest_batch: Counter,
    pub(crate) blocked: Counter,
    doorbell: ControllerCounters,
}

impl SqCounters {
    pub(crate) fn new(qid: u16) -> Self {
        Self {
            qid,
            commands: Counter::default(),
            batches: Counter::default(),
            largest_batch: Counter::default(),
            blocked: Counter::default(),
            doorbell: ControllerCounters::default(),
        }
    }

    pub(crate) fn qid(&self) -> u16 {
        self.qid
    }

    /// As of now, with so many MMIO writes.
    pub(crate) fn read(&self, mmio_writes: u64) -> SqStats {
        SqStats {
            qid: self.qid,
            commands: self.commands.get(),
            batches: self.batches.get(),
            largest_batch: self.largest_batch.get(),
            blocked: self.blocked.get(),
            doorbell: DoorbellCounts::of(mmio_writes, self.doorbell.read()),
        }
    }
}

/// Where a completion queue counts.
#[derive(Debug)]
pub(crate) struct CqCounters {
    qid: u16,
    pub(crate) completions: Counter,
    pub(crate) interrupts: Counter,
    pub(crate) interrupts_suppressed: Counter,
    doorbell: ControllerCounters,
}

impl CqCounters {
    pub(crate) fn new(qid: u16) -> Self {
        Self {
            qid,
            completions: Counter::default(),
            interrupts: Counter::default(),
            interrupts_suppressed: Counter::default(),
            doorbell: ControllerCounters::default(),
        }
    }

    pub(crate) fn qid(&self) -> u16 {
        self.qid
    }

    /// As of now, with so many MMIO writes.
    pub(crate) fn read(&self, mmio_writes: u64) -> CqStats {
        CqStats {
            qid: self.qid,
            completions: self.completions.get(),
            interrupts: self.interrupts.get(),
            interrupts_suppressed: self.interrupts_suppressed.get(),
            doorbell: DoorbellCounts::of(mmio_writes, self.doorbell.read()),
        }
    }
}

/// A queue's counters, as its doorbell counts in them.
#[derive(Debug)]
pub(crate) struct CountedBy<T>(pub(crate) Arc<T>);

impl AsRef<ControllerCounters> for CountedBy<SqCounters> {
    #[inline]
    fn as_ref(&self) -> &ControllerCounters {
        &self.0.doorbell
    }
}

impl AsRef<ControllerCounters> for CountedBy<CqCounters> {
    #[inline]
    fn as_ref(&self) -> &ControllerCounters {
        &self.0.doorbell
    }
}

/// What a worker counts of every read and write. It has these to itself, and shows them to others
/// ([`IoCounters::publish`]) before it posts completions.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TransferStats {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) bytes_read: u64,
    pub(crate) bytes_written: u64,
}

/// What a worker counts of [`IoStats`], for others to read at any time.
#[derive(Debug, Default)]
pub(crate) struct IoCounters {
    reads: Counter,
    writes: Counter,
    pub(crate) copies: Counter,
    pub(crate) others: Counter,
    bytes_read: Counter,
    bytes_written: Counter,
    pub(crate) bytes_copied: Counter,
    pub(crate) errors: Counter,
    pub(crate) media_errors: Counter,
}

impl IoCounters {
    /// What the one who counts has to himself, as far as `self` goes.
    pub(crate) fn transfers(&self) -> TransferStats {
        TransferStats {
            reads: self.reads.get(),
            writes: self.writes.get(),
            bytes_read: self.bytes_read.get(),
            bytes_written: self.bytes_written.get(),
        }
    }

    /// Shows what was counted.
    #[inline]
    pub(crate) fn publish(&self, transfers: &TransferStats) {
        self.reads.set(transfers.reads);
        self.writes.set(transfers.writes);
        self.bytes_read.set(transfers.bytes_read);
        self.bytes_written.set(transfers.bytes_written);
    }

    /// As of now.
    pub(crate) fn read(&self) -> IoStats {
        IoStats {
            reads: self.reads.get(),
            writes: self.writes.get(),
            copies: self.copies.get(),
            others: self.others.get(),
            bytes_read: self.bytes_read.get(),
            bytes_written: self.bytes_written.get(),
            bytes_copied: self.bytes_copied.get(),
            errors: self.errors.get(),
            media_errors: self.media_errors.get(),
        }
    }
}

/// What one worker counts of one controller, for others to read at any time.
#[derive(Debug)]
pub(crate) struct PartCounters {
    pub(crate) io: IoCounters,
    worker: AtomicUsize,
    /// The worker leaves the controller out of its passes until that rings.
    left_out: AtomicBool,
    /// Descriptors that stand for doorbells, and count by themselves how often they are signalled.
    doorbell_eventfds: Mutex<Vec<Arc<EventFd>>>,
}

impl PartCounters {
    /// For `worker`.
    pub(crate) fn new(worker: usize) -> Self {
        Self {
            io: IoCounters::default(),
            worker: AtomicUsize::new(worker),
            left_out: AtomicBool::new(false),
            doorbell_eventfds: Mutex::default(),
        }
    }

    /// It is `worker`'s from here on.
    pub(crate) fn set_worker(&self, worker: usize) {
        self.worker.store(worker, Relaxed);
    }

    pub(crate) fn worker(&self) -> usize {
        self.worker.load(Relaxed)
    }

    pub(crate) fn set_left_out(&self, left_out: bool) {
        self.left_out.store(left_out, Relaxed);
    }

    pub(crate) fn is_left_out(&self) -> bool {
        self.left_out.load(Relaxed)
    }

    pub(crate) fn add_doorbell_eventfd(&self, event: Arc<EventFd>) {
        self.doorbell_eventfds.lock().push(event);
    }

    /// How often the host has signalled one of the descriptors. They are not read, because the host
    /// shares them and could have a read block.
    pub(crate) fn doorbell_events(&self) -> u64 {
        let events = self.doorbell_eventfds.lock();
        events.iter().map(|event| event.count()).fold(0, u64::saturating_add)
    }

    /// Counts for queues that were another part's, with their descriptors.
    pub(crate) fn absorb(&self, other: &Self) {
        let events = std::mem::take(&mut *other.doorbell_eventfds.lock());
        self.doorbell_eventfds.lock().extend(events);
    }
}

/// A worker's sleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SleepStats {
    /// Times that it set out to sleep.
    pub rounds: u64,
    /// Rounds that a second look cut short.
    pub stayed_awake: u64,
    /// Times that it slept.
    pub sleeps: u64,
    /// Sleeps after which nothing was found to do.
    pub spurious_wakes: u64,
    /// Nanoseconds spent awake.
    pub awake_ns: u64,
    /// Which worker it is, from 0.
    pub worker: usize,
    /// Whether it leaves the controller that was asked for out of its passes until that rings.
    pub parked: bool,
}

/// Where a worker counts its sleeps.
#[derive(Debug, Default)]
pub(crate) struct SleepCounters {
    pub(crate) rounds: Counter,
    pub(crate) stayed_awake: Counter,
    pub(crate) sleeps: Counter,
    pub(crate) spurious_wakes: Counter,
}

impl SleepCounters {
    /// Those of `worker`, which has been awake for so long, as of now.
    pub(crate) fn read(&self, worker: usize, awake: Duration) -> SleepStats {
        SleepStats {
            rounds: self.rounds.get(),
            stayed_awake: self.stayed_awake.get(),
            sleeps: self.sleeps.get(),
            spurious_wakes: self.spurious_wakes.get(),
            awake_ns: awake.as_nanos().min(u64::MAX.into()) as u64,
            worker,
            parked: false,
        }
    }
}

/// A controller's counters at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// Submission queues that exist, the admin queue first.
    pub submission_queues: Vec<SqStats>,
    /// Completion queues that exist, the admin queue first.
    pub completion_queues: Vec<CqStats>,
    /// Sums over the I/O queues that were deleted, by a reset or by the host.
    pub retired_sq: SqStats,
    /// As above.
    pub retired_cq: CqStats,
    /// Doorbells rung by a descriptor instead of an MMIO write
    /// ([`Controller::doorbell_eventfds`](crate::Controller::doorbell_eventfds)).
    pub doorbell_events: u64,
    /// What the commands did.
    pub io: IoStats,
    /// How long they took, by namespace: what has begun and ended while
    /// [`Pool::measure`](crate::Pool::measure) was on. Nothing if it never was.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measured: Vec<MeasuredNamespace>,
    /// Times that it went on after the death of the process that had served it.
    pub recoveries: u64,
    /// The workers that serve this controller (each may serve others too).
    pub workers: Vec<SleepStats>,
}

impl SqStats {
    pub(crate) fn merge(&mut self, o: &Self) {
        self.commands += o.commands;
        self.batches += o.batches;
        self.largest_batch = self.largest_batch.max(o.largest_batch);
        self.blocked += o.blocked;
        self.doorbell.merge(&o.doorbell);
    }
}

impl CqStats {
    pub(crate) fn merge(&mut self, o: &Self) {
        self.completions += o.completions;
        self.interrupts += o.interrupts;
        self.interrupts_suppressed += o.interrupts_suppressed;
        self.doorbell.merge(&o.doorbell);
    }
}

impl IoStats {
    pub(crate) fn merge(&mut self, o: &Self) {
        self.reads += o.reads;
        self.writes += o.writes;
        self.copies += o.copies;
        self.others += o.others;
        self.bytes_read += o.bytes_read;
        self.bytes_written += o.bytes_written;
        self.bytes_copied += o.bytes_copied;
        self.errors += o.errors;
        self.media_errors += o.media_errors;
    }
}

impl Stats {
    /// Sums over all I/O queues, present and past: (submission side, completion side).
    #[must_use]
    pub fn io_queues(&self) -> (SqStats, CqStats) {
        let mut sq = self.retired_sq.clone();
        let mut cq = self.retired_cq.clone();
        self.submission_queues.iter().filter(|q| q.qid != 0).for_each(|q| sq.merge(q));
        self.completion_queues.iter().filter(|q| q.qid != 0).for_each(|q| cq.merge(q));
        (sq, cq)
    }
}
