//! What happened, counted where it happened.

use serde::{Deserialize, Serialize};
use shadowbell_doorbell::{ControllerStats, SleeperStats};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

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
    pub(crate) fn add(&mut self, mmio_writes: u64, s: ControllerStats) {
        self.mmio_writes += mmio_writes;
        self.looks += s.looks;
        self.found_new += s.found_new;
        self.event_idx_moved += s.event_idx_moved;
        self.event_idx_armed += s.event_idx_armed;
        self.rechecks += s.rechecks;
        self.rechecks_found += s.rechecks_found;
        self.invalid += s.invalid;
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

/// A number that one thread counts, and others read.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    /// Counts on. By one thread only: it neither locks nor waits.
    #[inline]
    pub(crate) fn add(&self, count: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(count), Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    #[inline]
    fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
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

impl SleepStats {
    pub(crate) fn of(s: SleeperStats, spurious_wakes: u64, awake_ns: u64) -> Self {
        Self {
            rounds: s.rounds,
            stayed_awake: s.stayed_awake,
            sleeps: s.slept,
            spurious_wakes,
            awake_ns,
            ..Self::default()
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
