//! Statistics of a controller.
//!
//! The thread that serves a queue increments its counters without locks, and readers load them
//! directly. A counter is incremented before the host can observe the event that it counts.

use crate::latency_stats::NamespaceLatency;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shadowbell_doorbell::{ControllerCounters, ControllerStats, Counter};
use shadowbell_memory::EventFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

/// Doorbell statistics of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DoorbellCounts {
    /// Doorbell writes (MMIO) that trapped. Writes to a mapped doorbell do not trap and are not
    /// counted.
    pub mmio_writes: u64,
    /// Reads of the doorbell value while polling.
    pub polls: u64,
    /// Reads that found a new value.
    pub found_new: u64,
    /// EventIdx updates while polling, after which the host need not write the doorbell register.
    pub event_idx_moved: u64,
    /// EventIdx updates after which the host's next update writes the doorbell register.
    pub event_idx_armed: u64,
    /// Rechecks of the doorbell value after EventIdx was armed, behind a full fence.
    pub rechecks: u64,
    /// Rechecks that found a new value. Without the recheck, each would have been a lost wakeup.
    pub rechecks_found: u64,
    /// Invalid doorbell values.
    pub invalid: u64,
}

impl DoorbellCounts {
    fn of(mmio_writes: u64, s: ControllerStats) -> Self {
        Self {
            mmio_writes,
            polls: s.polls,
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
        self.polls += o.polls;
        self.found_new += o.found_new;
        self.event_idx_moved += o.event_idx_moved;
        self.event_idx_armed += o.event_idx_armed;
        self.rechecks += o.rechecks;
        self.rechecks_found += o.rechecks_found;
        self.invalid += o.invalid;
    }
}

/// Statistics of a submission queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SqStats {
    /// Queue identifier; 0 is the admin queue.
    pub qid: u16,
    /// Commands fetched.
    pub commands: u64,
    /// Batches of fetched commands.
    pub batches: u64,
    /// Size of the largest batch.
    pub largest_batch: u64,
    /// Fetches that stopped because the completion queue was full.
    pub blocked: u64,
    /// Statistics of the tail doorbell.
    pub doorbell: DoorbellCounts,
}

/// Statistics of a completion queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CqStats {
    /// Queue identifier; 0 is the admin queue.
    pub qid: u16,
    /// Completions posted.
    pub completions: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// Batches of completions for which no interrupt was raised, because of coalescing or because
    /// the host had not yet consumed the entries of the last interrupt.
    pub interrupts_suppressed: u64,
    /// Statistics of the head doorbell.
    pub doorbell: DoorbellCounts,
}

/// I/O statistics of a controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoStats {
    /// Read and Compare commands completed.
    pub reads: u64,
    /// Write commands completed.
    pub writes: u64,
    /// Copy commands completed.
    pub copies: u64,
    /// Other I/O commands completed, including Verify.
    pub others: u64,
    /// Bytes read from disks by Read, Compare and Verify.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Bytes copied by Copy commands. They are not part of `bytes_read` and `bytes_written`.
    pub bytes_copied: u64,
    /// Commands that ended in an error.
    pub errors: u64,
    /// Commands that ended in a media error. They are also counted in `errors`.
    pub media_errors: u64,
}

impl IoStats {
    /// Number of completed commands.
    #[must_use]
    pub fn commands(&self) -> u64 {
        [self.reads, self.writes, self.copies, self.others].iter().sum()
    }
}

/// Counters of a submission queue.
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

    /// Returns the current values. `mmio_writes` is the number of trapped doorbell writes, from
    /// another counter.
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

/// Counters of a completion queue.
#[derive(Debug)]
pub(crate) struct CqCounters {
    qid: u16,
    pub(crate) completions: Counter,
    pub(crate) interrupts: Counter,
    pub(crate) interrupts_suppressed: Counter,
    /// Invalid heads that were refused when their writes were trapped.
    pub(crate) invalid_traps: Counter,
    doorbell: ControllerCounters,
}

impl CqCounters {
    pub(crate) fn new(qid: u16) -> Self {
        Self {
            qid,
            completions: Counter::default(),
            interrupts: Counter::default(),
            interrupts_suppressed: Counter::default(),
            invalid_traps: Counter::default(),
            doorbell: ControllerCounters::default(),
        }
    }

    pub(crate) fn qid(&self) -> u16 {
        self.qid
    }

    /// Returns the current values. `mmio_writes` is the number of trapped doorbell writes, from
    /// another counter.
    pub(crate) fn read(&self, mmio_writes: u64) -> CqStats {
        let mut doorbell = DoorbellCounts::of(mmio_writes, self.doorbell.read());
        doorbell.invalid += self.invalid_traps.get();
        CqStats {
            qid: self.qid,
            completions: self.completions.get(),
            interrupts: self.interrupts.get(),
            interrupts_suppressed: self.interrupts_suppressed.get(),
            doorbell,
        }
    }
}

/// Adapter that gives a doorbell access to the doorbell counters of its queue.
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

/// Read and write counts of one controller that its I/O thread updates in private memory, because
/// that is faster. They are published ([`IoCounters::publish`]) before completions are posted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TransferStats {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) bytes_read: u64,
    pub(crate) bytes_written: u64,
}

/// I/O counters of one controller on one I/O thread, readable by any thread.
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
    /// Private counts that start with the published values.
    pub(crate) fn transfers(&self) -> TransferStats {
        TransferStats {
            reads: self.reads.get(),
            writes: self.writes.get(),
            bytes_read: self.bytes_read.get(),
            bytes_written: self.bytes_written.get(),
        }
    }

    /// Publishes the counts.
    #[inline]
    pub(crate) fn publish(&self, transfers: &TransferStats) {
        self.reads.set(transfers.reads);
        self.writes.set(transfers.writes);
        self.bytes_read.set(transfers.bytes_read);
        self.bytes_written.set(transfers.bytes_written);
    }

    /// Reads the current values.
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

/// Counters of one controller on one I/O thread, readable by any thread.
#[derive(Debug)]
pub(crate) struct PartCounters {
    pub(crate) io: IoCounters,
    worker: AtomicUsize,
    /// True if the controller is parked: the I/O thread does not poll it until a doorbell write
    /// arrives.
    skipped: AtomicBool,
    /// Eventfds that signal doorbell writes. The kernel counts the signals of each.
    doorbell_eventfds: Mutex<Vec<Arc<EventFd>>>,
}

impl PartCounters {
    /// Counters for I/O thread `worker`.
    pub(crate) fn new(worker: usize) -> Self {
        Self {
            io: IoCounters::default(),
            worker: AtomicUsize::new(worker),
            skipped: AtomicBool::new(false),
            doorbell_eventfds: Mutex::default(),
        }
    }

    /// Assigns the counters to I/O thread `worker`.
    pub(crate) fn set_worker(&self, worker: usize) {
        self.worker.store(worker, Relaxed);
    }

    pub(crate) fn worker(&self) -> usize {
        self.worker.load(Relaxed)
    }

    pub(crate) fn set_skipped(&self, skipped: bool) {
        self.skipped.store(skipped, Relaxed);
    }

    pub(crate) fn is_skipped(&self) -> bool {
        self.skipped.load(Relaxed)
    }

    pub(crate) fn add_doorbell_eventfd(&self, event: Arc<EventFd>) {
        self.doorbell_eventfds.lock().push(event);
    }

    /// Number of doorbell eventfd signals. The count is queried from the kernel without a read of
    /// the eventfds: the host has the eventfds too, and could make a read block.
    pub(crate) fn doorbell_events(&self) -> u64 {
        let events = self.doorbell_eventfds.lock();
        events.iter().map(|event| event.count()).fold(0, u64::saturating_add)
    }

    /// Moves the doorbell eventfds of `other` to these counters, after the queues of `other` have
    /// moved to this I/O thread.
    pub(crate) fn absorb(&self, other: &Self) {
        let events = std::mem::take(&mut *other.doorbell_eventfds.lock());
        self.doorbell_eventfds.lock().extend(events);
    }
}

/// Sleep statistics of an I/O thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SleepStats {
    /// Number of times that the thread prepared to sleep.
    pub rounds: u64,
    /// Preparations to sleep after which a recheck found work, so the thread stayed awake.
    pub stayed_awake: u64,
    /// Number of times that the thread slept.
    pub sleeps: u64,
    /// Sleeps after which the thread found no work.
    pub spurious_wakes: u64,
    /// Nanoseconds spent awake.
    pub awake_ns: u64,
    /// Number of the I/O thread, from 0.
    pub worker: usize,
    /// True if the controller is parked on this I/O thread: the thread does not poll it until a
    /// doorbell write arrives.
    pub parked: bool,
}

/// Sleep counters of an I/O thread.
#[derive(Debug, Default)]
pub(crate) struct SleepCounters {
    pub(crate) rounds: Counter,
    pub(crate) stayed_awake: Counter,
    pub(crate) sleeps: Counter,
    pub(crate) spurious_wakes: Counter,
}

impl SleepCounters {
    /// Current values. `awake` is the time that I/O thread `worker` has been awake.
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

/// Snapshot of a controller's statistics.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// Existing submission queues, the admin queue first.
    pub submission_queues: Vec<SqStats>,
    /// Existing completion queues, the admin queue first.
    pub completion_queues: Vec<CqStats>,
    /// Sums over deleted submission queues.
    pub retired_sq: SqStats,
    /// Sums over deleted completion queues.
    pub retired_cq: CqStats,
    /// Number of doorbell signals by eventfd instead of an MMIO write
    /// ([`Controller::doorbell_eventfds`](crate::Controller::doorbell_eventfds)).
    pub doorbell_events: u64,
    /// I/O statistics.
    pub io: IoStats,
    /// Latencies by namespace, of commands that started and ended while
    /// [`Pool::measure`](crate::Pool::measure) was on. Empty if it was never on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measured: Vec<NamespaceLatency>,
    /// Number of recoveries after a crash of the server process.
    pub recoveries: u64,
    /// I/O threads that serve this controller. They may serve other controllers too.
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
    /// Sums over all I/O queues, existing and deleted: (submission queues, completion queues).
    #[must_use]
    pub fn io_queues(&self) -> (SqStats, CqStats) {
        let mut sq = self.retired_sq.clone();
        let mut cq = self.retired_cq.clone();
        self.submission_queues.iter().filter(|q| q.qid != 0).for_each(|q| sq.merge(q));
        self.completion_queues.iter().filter(|q| q.qid != 0).for_each(|q| cq.merge(q));
        (sq, cq)
    }
}
