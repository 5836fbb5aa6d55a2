//! State that the control plane and the I/O threads of one controller share.

use crate::interrupt::{Coalescing, IrqTable};
use crate::journal::{self, Journal, JournalPart};
use crate::latency_stats::{LatencyCounters, NamespaceLatency};
use crate::saved::SavedCounters;
use crate::stats::{
    CqCounters, CqStats, IoStats, PartCounters, SleepStats, SqCounters, SqStats, Stats,
};
use crate::uncorrectable::Uncorrectable;
use parking_lot::Mutex;
use shadowbell_doorbell::{Cell, InvalidDoorbell, RingSize};
use shadowbell_memory::{Mapping, Protection, SharedBytes, SharedU32};
use shadowbell_spec::regs::{DoorbellKind, cq_doorbell_offset, sq_doorbell_offset};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

/// Doorbell stride (CAP.DSTRD): doorbells are 4 bytes apart, as on every PCIe controller.
pub(crate) const DSTRD: u8 = 0;
/// Size of the doorbell registers in bytes: one page, which a host can map.
pub(crate) const DOORBELL_BYTES: u64 = 4096;
/// Maximum number of queue pairs, including the admin queue pair.
pub(crate) const MAX_QUEUES: usize = 65;
const _: () = assert!(MAX_QUEUES <= journal::QUEUES);

/// Counters of existing queues, and the sums of the counters of deleted queues.
#[derive(Debug, Default)]
struct Counted {
    retired_sq: SqStats,
    retired_cq: CqStats,
    retired_io: IoStats,
    /// Number of doorbell signals by eventfd to deleted queues.
    retired_events: u64,
    /// Number of recoveries after a crash.
    recoveries: u64,
    /// Current counters, each written by one I/O thread.
    parts: Vec<Arc<PartCounters>>,
    /// Latency counters with their NSID, each written by one thread.
    measured: Vec<(u32, Arc<LatencyCounters>)>,
    sqs: Vec<Weak<SqCounters>>,
    cqs: Vec<Weak<CqCounters>>,
}

/// Removes `one` from the list, and all entries whose counters no longer exist.
fn remove_dead<T>(all: &mut Vec<Weak<T>>, one: &Arc<T>) {
    all.retain(|other| {
        other.strong_count() != 0 && !std::ptr::eq(other.as_ptr(), Arc::as_ptr(one))
    });
}

/// State that the control plane and the I/O threads of one controller share. Only the doorbell
/// registers are accessed for each I/O command.
pub(crate) struct ControllerShared {
    pub(crate) id: u32,
    doorbells: SharedBytes,
    /// Numbers of trapped doorbell writes, by register index.
    traps: Vec<AtomicU64>,
    /// I/O thread that serves a queue, by register index: the number of the thread plus 1, or 0 if
    /// there is none.
    owners: Vec<AtomicU8>,
    /// Park state of the controller on each I/O thread: tells if the thread polls the controller,
    /// or if a trapped doorbell write has to wake the thread. Each trapped write reads the state.
    park_states: Vec<Arc<AtomicU32>>,
    /// Flags by completion queue identifier. True if a sleeping I/O thread has to be woken when the
    /// host writes the head doorbell of that queue.
    head_wakeups: Vec<AtomicBool>,
    /// Sizes of submission queues in entries, by queue identifier; 0 for an identifier that no
    /// queue has had yet.
    sq_sizes: Vec<AtomicU32>,
    /// Bounds for the heads of completion queues, by queue identifier.
    heads: Vec<Mutex<Option<Heads>>>,
    /// True if Doorbell Buffer Config was executed: trapped doorbell writes are wakeups only.
    shadowed: AtomicBool,
    /// True if the volatile write cache is disabled (feature 06h). Every write is then forced to
    /// the medium.
    write_through: AtomicBool,
    /// Enabled descriptor formats of Copy (feature 16h): bit n for format n.
    copy_formats: Arc<AtomicU16>,
    /// True while a command runs exclusively or waits for exclusive execution. During that time,
    /// queues that have moved to another I/O thread must not fetch commands on that thread.
    exclusive: AtomicBool,
    /// Logical blocks that the host marked as uncorrectable. Each I/O thread has its own copy,
    /// which it updates while no command is in flight.
    uncorrectable: Mutex<Arc<Uncorrectable>>,
    /// True if the doorbell page is mapped into the guest. Writes then do not trap, so the
    /// doorbells are polled.
    pub(crate) mapped: bool,
    pub(crate) irqs: Arc<IrqTable>,
    pub(crate) coalescing: Coalescing,
    counted: Mutex<Counted>,
    /// True if a message that the in-flight limit is reached was already logged.
    excess_reported: AtomicBool,
    /// Journal for crash recovery, if enabled.
    journal: OnceLock<Journal>,
}

/// Bounds for the validation of trapped writes of a completion queue head.
#[derive(Debug)]
pub(crate) struct Heads {
    size: RingSize,
    /// Tail of the queue at the time when the completion count of `counters` was `posted`. The
    /// current tail follows from the current count.
    tail: u16,
    posted: u64,
    counters: Arc<CqCounters>,
    /// Last invalid value that was reported. The same value is reported again only after the host
    /// has written a valid one.
    refused: Option<u32>,
}

impl Heads {
    /// Creates the bounds for a queue whose next completion is posted at `tail`.
    pub(crate) fn new(size: RingSize, tail: u16, counters: &Arc<CqCounters>) -> Self {
        let posted = counters.completions.get();
        Self { size, tail, posted, counters: Arc::clone(counters), refused: None }
    }

    /// Validates a head that the host has written, and returns the value for the register. The
    /// register now holds the last valid head, `stored`. A valid head is never refused: each
    /// completion is counted before the host can see it, so the limit computed here includes it.
    fn validate(&mut self, stored: u32, value: u32) -> Result<u32, InvalidDoorbell> {
        let posted = self.counters.completions.get().wrapping_sub(self.posted);
        let ahead = (posted % u64::from(self.size.entries())) as u32;
        let last = self.size.position(stored).unwrap_or_default();
        let limit = self.size.distance(last, self.size.forward(self.tail, ahead));
        match self.size.validate(last, value, limit) {
            Ok(_) => {
                self.refused = None;
                Ok(value)
            }
            Err(_) if self.refused == Some(value) => Ok(stored),
            Err(error) => {
                self.refused = Some(value);
                self.counters.invalid_traps.add(1);
                Err(error)
            }
        }
    }
}

/// Maps the doorbell page. Its offset in the file equals its offset in BAR0, because a client that
/// maps the page uses the region offset as file offset.
fn doorbell_page(file: Option<OwnedFd>) -> Result<SharedBytes, shadowbell_memory::MapError> {
    let len = shadowbell_spec::regs::DOORBELLS + DOORBELL_BYTES;
    let bar = match file {
        Some(file) => Mapping::from_own_fd(file, 0, len, Protection::ReadWrite)?,
        None => Mapping::shared("shadowbell-doorbells", len)?,
    };
    let page =
        bar.bytes().slice(shadowbell_spec::regs::DOORBELLS as usize, DOORBELL_BYTES as usize);
    Ok(page.unwrap_or_else(|| bar.bytes()))
}

fn index(qid: u16, kind: DoorbellKind) -> usize {
    usize::from(qid) * 2 + usize::from(kind == DoorbellKind::Cq)
}

impl ControllerShared {
    /// Shared state of a new controller. `doorbells` is the doorbell file of the previous process,
    /// or `None` to create a new file.
    pub(crate) fn new(
        id: u32,
        mapped: bool,
        workers: usize,
        doorbells: Option<OwnedFd>,
    ) -> Result<Self, shadowbell_memory::MapError> {
        Ok(Self {
            id,
            doorbells: doorbell_page(doorbells)?,
            traps: (0..MAX_QUEUES * 2).map(|_| AtomicU64::new(0)).collect(),
            owners: (0..MAX_QUEUES * 2).map(|_| AtomicU8::new(0)).collect(),
            park_states: (0..workers).map(|_| Arc::default()).collect(),
            head_wakeups: (0..MAX_QUEUES).map(|_| AtomicBool::new(false)).collect(),
            sq_sizes: (0..MAX_QUEUES).map(|_| AtomicU32::new(0)).collect(),
            heads: (0..MAX_QUEUES).map(|_| Mutex::default()).collect(),
            shadowed: AtomicBool::new(false),
            write_through: AtomicBool::new(false),
            copy_formats: Arc::default(),
            exclusive: AtomicBool::new(false),
            uncorrectable: Mutex::default(),
            mapped,
            irqs: Arc::new(IrqTable::new(MAX_QUEUES)),
            coalescing: Coalescing::default(),
            counted: Mutex::default(),
            excess_reported: AtomicBool::new(false),
            journal: OnceLock::new(),
        })
    }

    /// Creates the journal for crash recovery. It must be called before any queue exists.
    pub(crate) fn create_journal(&self, requests: usize) -> io::Result<()> {
        let _ = self.journal.set(Journal::new(self.park_states.len(), requests)?);
        Ok(())
    }

    /// Journal for crash recovery, if enabled.
    pub(crate) fn journal(&self) -> Option<&Journal> {
        self.journal.get()
    }

    /// Part of the journal that I/O thread `worker` writes in reset generation `generation`.
    pub(crate) fn journal_part(
        &self,
        worker: usize,
        generation: u64,
    ) -> io::Result<Option<JournalPart>> {
        let part = self.journal.get().map(|journal| journal.part(worker, generation));
        part.transpose()
    }

    /// Duplicates the doorbell file for the next process.
    pub(crate) fn doorbell_file(&self) -> io::Result<OwnedFd> {
        let file = self.doorbells.mapping().fd().ok_or(io::ErrorKind::NotFound)?;
        file.try_clone_to_owned()
    }

    /// Doorbell page.
    pub(crate) fn doorbells(&self) -> &SharedBytes {
        &self.doorbells
    }

    /// Doorbell register of a queue.
    pub(crate) fn register(&self, qid: u16, kind: DoorbellKind) -> SharedU32 {
        let offset = match kind {
            DoorbellKind::Sq => sq_doorbell_offset(qid, DSTRD),
            DoorbellKind::Cq => cq_doorbell_offset(qid, DSTRD),
        };
        let offset = (offset - shadowbell_spec::regs::DOORBELLS) as usize;
        self.doorbells.cell(offset).expect("queue identifiers are at most 64")
    }

    /// Counts a trapped write. Returns the I/O thread that serves the queue, if any.
    pub(crate) fn trap(&self, qid: u16, kind: DoorbellKind) -> Option<usize> {
        let index = index(qid, kind);
        self.traps.get(index)?.fetch_add(1, Ordering::Relaxed);
        self.owner(qid, kind)
    }

    /// I/O thread that serves the queue, if any.
    pub(crate) fn owner(&self, qid: u16, kind: DoorbellKind) -> Option<usize> {
        let owner = self.owners.get(index(qid, kind))?.load(Ordering::Acquire);
        usize::from(owner).checked_sub(1)
    }

    /// Number of trapped writes of this doorbell since [`take_traps`](Self::take_traps).
    pub(crate) fn traps(&self, qid: u16, kind: DoorbellKind) -> u64 {
        self.traps.get(index(qid, kind)).map_or(0, |c| c.load(Ordering::Relaxed))
    }

    /// Returns and resets the number of trapped writes of this doorbell, when its queue is deleted.
    pub(crate) fn take_traps(&self, qid: u16, kind: DoorbellKind) -> u64 {
        self.traps.get(index(qid, kind)).map_or(0, |c| c.swap(0, Ordering::Relaxed))
    }

    /// Park state of the controller on I/O thread `worker`.
    pub(crate) fn park_state(&self, worker: usize) -> Option<&Arc<AtomicU32>> {
        self.park_states.get(worker)
    }

    pub(crate) fn set_owner(&self, qid: u16, kind: DoorbellKind, worker: Option<usize>) {
        if let Some(owner) = self.owners.get(index(qid, kind)) {
            owner.store(worker.map_or(0, |w| w as u8 + 1), Ordering::Release);
        }
    }

    /// Assigns all queues of I/O thread `from` to I/O thread `to`.
    pub(crate) fn change_owner(&self, from: usize, to: usize) {
        let (from, to) = (from as u8 + 1, to as u8 + 1);
        for owner in &self.owners {
            let _ = owner.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Sets whether a sleeping I/O thread waits for the head of completion queue `qid`. Before it
    /// sleeps, the thread calls this method and then executes a full fence. In the other order, a
    /// wakeup could be lost.
    pub(crate) fn request_head_wakeup(&self, qid: u16, wanted: bool) {
        if let Some(flag) = self.head_wakeups.get(usize::from(qid)) {
            flag.store(wanted, Ordering::Release);
        }
    }

    /// True if a trapped write of the head of `qid` has to wake the I/O thread. The caller must
    /// first store the head in the register, then execute a full fence, then call this method.
    pub(crate) fn needs_head_wakeup(&self, qid: u16) -> bool {
        self.head_wakeups.get(usize::from(qid)).is_some_and(|flag| flag.load(Ordering::Acquire))
    }

    /// Sets the size of submission queue `qid`.
    pub(crate) fn set_sq_size(&self, qid: u16, size: RingSize) {
        if let Some(entry) = self.sq_sizes.get(usize::from(qid)) {
            entry.store(size.entries(), Ordering::Release);
        }
    }

    /// Sets the bounds for the head of completion queue `qid`.
    pub(crate) fn set_heads(&self, qid: u16, heads: Heads) {
        if let Some(entry) = self.heads.get(usize::from(qid)) {
            *entry.lock() = Some(heads);
        }
    }

    /// Drops the bounds for the head of completion queue `qid`, which is deleted.
    pub(crate) fn drop_heads(&self, qid: u16) {
        if let Some(entry) = self.heads.get(usize::from(qid)) {
            *entry.lock() = None;
        }
    }

    /// Sets whether the queues have shadow doorbells.
    pub(crate) fn set_shadowed(&self, shadowed: bool) {
        self.shadowed.store(shadowed, Ordering::Release);
    }

    /// Validates a trapped doorbell write, and returns the value to store in the register. With
    /// shadow doorbells, the value is not validated: a trapped write is only a wakeup then, and its
    /// value may be older than that of the shadow doorbell. Values of mapped doorbells are
    /// validated when they are polled.
    ///
    /// An invalid tail is stored in the register, and later writes do not replace it. So the I/O
    /// thread finds and reports it, even if the host then writes a valid tail.
    ///
    /// # Errors
    /// An invalid completion queue head. The register then keeps its value.
    pub(crate) fn validate_trapped(
        &self,
        qid: u16,
        kind: DoorbellKind,
        register: &SharedU32,
        value: u32,
    ) -> Result<u32, InvalidDoorbell> {
        if self.mapped || self.shadowed.load(Ordering::Acquire) {
            return Ok(value);
        }
        let stored = register.load_acquire();
        match kind {
            DoorbellKind::Sq => {
                let size = self.sq_sizes.get(usize::from(qid));
                let size = size.and_then(|size| RingSize::new(size.load(Ordering::Acquire)));
                let is_invalid =
                    size.is_some_and(|size| size.validate(0, stored, RingSize::MAX).is_err());
                Ok(if is_invalid { stored } else { value })
            }
            DoorbellKind::Cq => {
                let mut heads = self.heads.get(usize::from(qid)).map(|heads| heads.lock());
                let heads = heads.as_mut().and_then(|heads| heads.as_mut());
                heads.map_or(Ok(value), |heads| heads.validate(stored, value))
            }
        }
    }

    /// Returns true only for the first call. So the message that the in-flight limit is reached is
    /// logged once, and a guest cannot fill the log.
    pub(crate) fn is_first_excess(&self) -> bool {
        !self.excess_reported.swap(true, Ordering::Relaxed)
    }

    pub(crate) fn set_write_through(&self, on: bool) {
        self.write_through.store(on, Ordering::Relaxed);
    }

    pub(crate) fn set_copy_formats(&self, formats: u16) {
        self.copy_formats.store(formats, Ordering::Relaxed);
    }

    /// Enabled descriptor formats of Copy.
    pub(crate) fn copy_formats(&self) -> &Arc<AtomicU16> {
        &self.copy_formats
    }

    pub(crate) fn set_exclusive(&self, exclusive: bool) {
        self.exclusive.store(exclusive, Ordering::Release);
    }

    /// True while a command runs exclusively or waits for exclusive execution.
    pub(crate) fn is_exclusive(&self) -> bool {
        self.exclusive.load(Ordering::Acquire)
    }

    /// Logical blocks that the host marked as uncorrectable.
    pub(crate) fn uncorrectable(&self) -> Arc<Uncorrectable> {
        Arc::clone(&self.uncorrectable.lock())
    }

    pub(crate) fn change_uncorrectable(&self, change: impl FnOnce(&mut Uncorrectable)) {
        change(Arc::make_mut(&mut self.uncorrectable.lock()));
    }

    #[inline]
    pub(crate) fn is_write_through(&self) -> bool {
        self.write_through.load(Ordering::Relaxed)
    }

    /// Creates counters for the queues of I/O thread `worker`.
    pub(crate) fn count_part(&self, worker: usize) -> Arc<PartCounters> {
        let counters = Arc::new(PartCounters::new(worker));
        self.counted.lock().parts.push(Arc::clone(&counters));
        counters
    }

    /// Removes an I/O thread's counters, and adds them to the sums of deleted queues.
    pub(crate) fn retire_part(&self, counters: &Arc<PartCounters>) {
        let mut counted = self.counted.lock();
        counted.retire_part(counters);
    }

    /// Merges the counters `from` of one I/O thread into the counters `to` of another, after a move
    /// of the queues.
    pub(crate) fn merge_parts(&self, from: &Arc<PartCounters>, to: &PartCounters) {
        let mut counted = self.counted.lock();
        to.absorb(from);
        counted.retire_part(from);
    }

    /// Latency counters of a namespace for one thread. Counters that another thread no longer uses
    /// are reused; if there are none, new ones are created.
    pub(crate) fn measured(&self, nsid: u32) -> Arc<LatencyCounters> {
        let mut counted = self.counted.lock();
        let given_up = |(of, counters): &&(u32, Arc<LatencyCounters>)| {
            *of == nsid && Arc::strong_count(counters) == 1
        };
        if let Some((_, counters)) = counted.measured.iter().find(given_up) {
            // Pairs with the drop of the `Arc` by the other thread, so that its counts are visible
            // here.
            std::sync::atomic::fence(Ordering::Acquire);
            return Arc::clone(counters);
        }
        let counters = Arc::new(LatencyCounters::default());
        counted.measured.push((nsid, Arc::clone(&counters)));
        counters
    }

    /// Creates counters for a submission queue.
    pub(crate) fn count_sq(&self, qid: u16) -> Arc<SqCounters> {
        let counters = Arc::new(SqCounters::new(qid));
        self.counted.lock().sqs.push(Arc::downgrade(&counters));
        counters
    }

    /// Creates counters for a completion queue.
    pub(crate) fn count_cq(&self, qid: u16) -> Arc<CqCounters> {
        let counters = Arc::new(CqCounters::new(qid));
        self.counted.lock().cqs.push(Arc::downgrade(&counters));
        counters
    }

    /// Adds a deleted submission queue's counters to the sums.
    pub(crate) fn retire_sq(&self, counters: &Arc<SqCounters>) {
        let mut counted = self.counted.lock();
        remove_dead(&mut counted.sqs, counters);
        let traps = self.take_traps(counters.qid(), DoorbellKind::Sq);
        counted.retired_sq.merge(&counters.read(traps));
    }

    /// Adds a deleted completion queue's counters to the sums.
    pub(crate) fn retire_cq(&self, counters: &Arc<CqCounters>) {
        self.drop_heads(counters.qid());
        let mut counted = self.counted.lock();
        remove_dead(&mut counted.cqs, counters);
        let traps = self.take_traps(counters.qid(), DoorbellKind::Cq);
        counted.retired_cq.merge(&counters.read(traps));
    }

    /// Statistics of the controller. `sleep` returns the sleep statistics of an I/O thread.
    pub(crate) fn stats(&self, sleep: impl Fn(usize) -> Option<SleepStats>) -> Stats {
        let counted = self.counted.lock();
        let traps = |qid, kind| self.traps(qid, kind);
        let sqs = counted.sqs.iter().filter_map(Weak::upgrade);
        let mut submission_queues: Vec<SqStats> =
            sqs.map(|sq| sq.read(traps(sq.qid(), DoorbellKind::Sq))).collect();
        submission_queues.sort_by_key(|sq| sq.qid);
        let cqs = counted.cqs.iter().filter_map(Weak::upgrade);
        let mut completion_queues: Vec<CqStats> =
            cqs.map(|cq| cq.read(traps(cq.qid(), DoorbellKind::Cq))).collect();
        completion_queues.sort_by_key(|cq| cq.qid);
        let parts = counted.parts.iter();
        let events = parts.clone().map(|part| part.doorbell_events());
        let doorbell_events = events.fold(counted.retired_events, u64::saturating_add);
        let sleep_of = |part: &Arc<PartCounters>| {
            let parked = part.is_skipped();
            sleep(part.worker()).map(|sleep| SleepStats { parked, ..sleep })
        };
        let mut workers: Vec<SleepStats> = parts.filter_map(sleep_of).collect();
        workers.sort_by_key(|sleep| sleep.worker);
        Stats {
            submission_queues,
            completion_queues,
            retired_sq: counted.retired_sq.clone(),
            retired_cq: counted.retired_cq.clone(),
            doorbell_events,
            io: counted.io(),
            measured: counted.measured(),
            recoveries: counted.recoveries,
            workers,
        }
    }

    /// I/O statistics.
    pub(crate) fn io(&self) -> IoStats {
        self.counted.lock().io()
    }

    /// Sums of the counters of deleted queues, for a snapshot. The I/O statistics are left at zero;
    /// the caller fills them in.
    pub(crate) fn counters(&self) -> SavedCounters {
        let counted = self.counted.lock();
        SavedCounters {
            io: IoStats::default(),
            sq: counted.retired_sq.clone(),
            cq: counted.retired_cq.clone(),
            eventfd_doorbells: counted.retired_events,
            recoveries: counted.recoveries,
        }
    }

    /// Restores the counters of a snapshot. Counting continues from these values.
    pub(crate) fn restore_counters(&self, saved: &SavedCounters) {
        let mut counted = self.counted.lock();
        counted.retired_io = saved.io;
        (counted.retired_sq, counted.retired_cq) = (saved.sq.clone(), saved.cq.clone());
        counted.retired_events = saved.eventfd_doorbells;
        counted.recoveries = saved.recoveries;
    }

    /// Counts a recovery after a crash.
    pub(crate) fn count_recovery(&self) {
        self.counted.lock().recoveries += 1;
    }
}

impl Counted {
    fn io(&self) -> IoStats {
        let mut io = self.retired_io;
        self.parts.iter().for_each(|part| io.merge(&part.io.read()));
        io
    }

    /// Latencies in ascending order of NSID.
    fn measured(&self) -> Vec<NamespaceLatency> {
        let mut all = BTreeMap::new();
        for (nsid, counters) in &self.measured {
            let empty = || NamespaceLatency { nsid: *nsid, ..NamespaceLatency::default() };
            counters.add_to(all.entry(*nsid).or_insert_with(empty));
        }
        all.into_values().collect()
    }

    fn retire_part(&mut self, counters: &Arc<PartCounters>) {
        if let Some(at) = self.parts.iter().position(|part| Arc::ptr_eq(part, counters)) {
            let part = self.parts.swap_remove(at);
            self.retired_io.merge(&part.io.read());
            self.retired_events = self.retired_events.saturating_add(part.doorbell_events());
        }
    }
}
