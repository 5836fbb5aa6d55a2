//! What the control plane and the workers of one controller both touch.

use crate::interrupt::{Coalescing, IrqTable};
use crate::journal::{self, Journal, JournalPart};
use crate::measured::{MeasuredCounters, MeasuredNamespace};
use crate::saved::SavedCounters;
use crate::stats::{
    CqCounters, CqStats, IoStats, PartCounters, SleepStats, SqCounters, SqStats, Stats,
};
use crate::uncorrectable::Uncorrectable;
use parking_lot::Mutex;
use shadowbell_memory::{Mapping, Protection, SharedBytes, SharedU32};
use shadowbell_spec::regs::{DoorbellKind, cq_doorbell_offset, sq_doorbell_offset};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

/// Doorbell stride (CAP.DSTRD): doorbells are 4 bytes apart, as on every PCIe controller.
pub(crate) const DSTRD: u8 = 0;
/// Bytes of doorbell registers: one page, which can be mapped.
pub(crate) const DOORBELL_BYTES: u64 = 4096;
/// Queue pairs with the admin queue's, at most.
pub(crate) const MAX_QUEUES: usize = 65;
const _: () = assert!(MAX_QUEUES <= journal::QUEUES);

/// What was counted of queues that are gone, and where it is counted of those that are there.
#[derive(Debug, Default)]
struct Counted {
    retired_sq: SqStats,
    retired_cq: CqStats,
    retired_io: IoStats,
    /// Doorbells rung by a descriptor, of those that are gone.
    retired_events: u64,
    /// Processes that have died with the controller.
    recoveries: u64,
    /// What is counted now, by one worker each.
    parts: Vec<Arc<PartCounters>>,
    /// What is measured, or was, by namespace; each by one thread.
    measured: Vec<(u32, Arc<MeasuredCounters>)>,
    sqs: Vec<Weak<SqCounters>>,
    cqs: Vec<Weak<CqCounters>>,
}

/// Takes one out; those that nobody counts in any more with it.
fn take_out<T>(all: &mut Vec<Weak<T>>, one: &Arc<T>) {
    all.retain(|other| {
        other.strong_count() != 0 && !std::ptr::eq(other.as_ptr(), Arc::as_ptr(one))
    });
}

/// What the control plane and the workers of one controller both touch. Nothing in it is touched
/// once per I/O but the doorbell registers.
pub(crate) struct ControllerShared {
    pub(crate) id: u32,
    doorbells: SharedBytes,
    /// Doorbell writes received, by register index.
    traps: Vec<AtomicU64>,
    /// Which worker serves a queue: its index + 1, by register index; 0 for nobody.
    owners: Vec<AtomicU8>,
    /// By worker: whether the controller is parked there, for whoever delivers a doorbell write.
    park_states: Vec<Arc<AtomicU32>>,
    /// Whether a sleeping worker waits for this completion queue's head, by queue identifier.
    head_wanted: Vec<AtomicBool>,
    /// The volatile write cache is switched off (feature 06h): every write is forced to the
    /// medium.
    write_through: AtomicBool,
    /// The descriptor formats of Copy that the host has enabled (feature 16h): bit n for format n.
    copy_formats: Arc<AtomicU16>,
    /// A command is alone, or is to be: queues that arrive at a worker fetch nothing.
    one_alone: AtomicBool,
    /// Logical blocks that the host has marked. A worker has its own copy, which it renews when
    /// nothing is under way.
    uncorrectable: Mutex<Arc<Uncorrectable>>,
    /// Whether the host writes the doorbell page itself: nothing traps, so somebody has to look.
    pub(crate) mapped: bool,
    pub(crate) irqs: Arc<IrqTable>,
    pub(crate) coalescing: Coalescing,
    counted: Mutex<Counted>,
    /// It has been said that there was as much under way as may be.
    excess_reported: AtomicBool,
    /// What has to survive this process, if anything has.
    journal: OnceLock<Journal>,
}

/// The page of doorbells, where it is in BAR0: a client that maps it takes its place in the file to
/// be the same as its place in the region.
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
    /// `doorbells` is the file of the doorbells that another process has served; without one, they
    /// are new.
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
            head_wanted: (0..MAX_QUEUES).map(|_| AtomicBool::new(false)).collect(),
            write_through: AtomicBool::new(false),
            copy_formats: Arc::default(),
            one_alone: AtomicBool::new(false),
            uncorrectable: Mutex::default(),
            mapped,
            irqs: Arc::new(IrqTable::new(MAX_QUEUES)),
            coalescing: Coalescing::default(),
            counted: Mutex::default(),
            excess_reported: AtomicBool::new(false),
            journal: OnceLock::new(),
        })
    }

    /// From now on it is written down what has to survive this process; no queue was created yet.
    pub(crate) fn keep_journal(&self, requests: usize) -> io::Result<()> {
        let _ = self.journal.set(Journal::new(self.park_states.len(), requests)?);
        Ok(())
    }

    /// What survives this process.
    pub(crate) fn journal(&self) -> Option<&Journal> {
        self.journal.get()
    }

    /// The part of the journal that `worker` writes, after so many resets.
    pub(crate) fn journal_part(
        &self,
        worker: usize,
        generation: u64,
    ) -> io::Result<Option<JournalPart>> {
        let part = self.journal.get().map(|journal| journal.part(worker, generation));
        part.transpose()
    }

    /// The file of the doorbell registers, for another process.
    pub(crate) fn doorbell_file(&self) -> io::Result<OwnedFd> {
        let file = self.doorbells.mapping().fd().ok_or(io::ErrorKind::NotFound)?;
        file.try_clone_to_owned()
    }

    /// The page of doorbell registers.
    pub(crate) fn doorbells(&self) -> &SharedBytes {
        &self.doorbells
    }

    /// A queue's doorbell register.
    pub(crate) fn register(&self, qid: u16, kind: DoorbellKind) -> SharedU32 {
        let offset = match kind {
            DoorbellKind::Sq => sq_doorbell_offset(qid, DSTRD),
            DoorbellKind::Cq => cq_doorbell_offset(qid, DSTRD),
        };
        let offset = (offset - shadowbell_spec::regs::DOORBELLS) as usize;
        self.doorbells.cell(offset).expect("queue identifiers are at most 64")
    }

    /// Counts a trapped write; which worker serves the queue, if any does.
    pub(crate) fn trap(&self, qid: u16, kind: DoorbellKind) -> Option<usize> {
        let index = index(qid, kind);
        self.traps.get(index)?.fetch_add(1, Ordering::Relaxed);
        self.owner(qid, kind)
    }

    /// Which worker serves the queue, if any does.
    pub(crate) fn owner(&self, qid: u16, kind: DoorbellKind) -> Option<usize> {
        let owner = self.owners.get(index(qid, kind))?.load(Ordering::Acquire);
        usize::from(owner).checked_sub(1)
    }

    /// How many writes were trapped on this doorbell since [`take_traps`](Self::take_traps).
    pub(crate) fn traps(&self, qid: u16, kind: DoorbellKind) -> u64 {
        self.traps.get(index(qid, kind)).map_or(0, |c| c.load(Ordering::Relaxed))
    }

    /// How many writes were trapped on this doorbell, starting over: the queue is deleted.
    pub(crate) fn take_traps(&self, qid: u16, kind: DoorbellKind) -> u64 {
        self.traps.get(index(qid, kind)).map_or(0, |c| c.swap(0, Ordering::Relaxed))
    }

    /// The state cell of the controller's part of `worker`.
    pub(crate) fn park_state(&self, worker: usize) -> Option<&Arc<AtomicU32>> {
        self.park_states.get(worker)
    }

    pub(crate) fn set_owner(&self, qid: u16, kind: DoorbellKind, worker: Option<usize>) {
        if let Some(owner) = self.owners.get(index(qid, kind)) {
            owner.store(worker.map_or(0, |w| w as u8 + 1), Ordering::Release);
        }
    }

    /// All queues that worker `from` serves are `to`'s from here on.
    pub(crate) fn change_owner(&self, from: usize, to: usize) {
        let (from, to) = (from as u8 + 1, to as u8 + 1);
        for owner in &self.owners {
            let _ = owner.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Says that a worker which is about to sleep waits for the head of `qid`, or no longer. To be
    /// called before the sleeper's fence.
    pub(crate) fn want_head(&self, qid: u16, wanted: bool) {
        if let Some(flag) = self.head_wanted.get(usize::from(qid)) {
            flag.store(wanted, Ordering::Release);
        }
    }

    /// Whether a trapped head of `qid` has to wake the worker. To be called after the register was
    /// stored and a full fence was passed.
    pub(crate) fn is_head_wanted(&self, qid: u16) -> bool {
        self.head_wanted.get(usize::from(qid)).is_some_and(|flag| flag.load(Ordering::Acquire))
    }

    /// Whether nothing was said yet of a quota that was met, as if something is now: a guest could
    /// fill a log with it.
    pub(crate) fn is_first_excess(&self) -> bool {
        !self.excess_reported.swap(true, Ordering::Relaxed)
    }

    pub(crate) fn set_write_through(&self, on: bool) {
        self.write_through.store(on, Ordering::Relaxed);
    }

    pub(crate) fn set_copy_formats(&self, formats: u16) {
        self.copy_formats.store(formats, Ordering::Relaxed);
    }

    /// The descriptor formats of Copy that the host has enabled.
    pub(crate) fn copy_formats(&self) -> &Arc<AtomicU16> {
        &self.copy_formats
    }

    pub(crate) fn set_one_alone(&self, is_one: bool) {
        self.one_alone.store(is_one, Ordering::Release);
    }

    /// Whether a command is alone, or is to be.
    pub(crate) fn is_one_alone(&self) -> bool {
        self.one_alone.load(Ordering::Acquire)
    }

    /// Logical blocks that the host has marked as uncorrectable.
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

    /// Counters for `worker`'s part of the controller.
    pub(crate) fn count_part(&self, worker: usize) -> Arc<PartCounters> {
        let counters = Arc::new(PartCounters::new(worker));
        self.counted.lock().parts.push(Arc::clone(&counters));
        counters
    }

    /// That part is gone.
    pub(crate) fn retire_part(&self, counters: &Arc<PartCounters>) {
        let mut counted = self.counted.lock();
        counted.retire_part(counters);
    }

    /// That part, `from`, is one with `to` from here on.
    pub(crate) fn join_parts(&self, from: &Arc<PartCounters>, to: &PartCounters) {
        let mut counted = self.counted.lock();
        to.absorb(from);
        counted.retire_part(from);
    }

    /// Counters of what is measured of a namespace, for one thread: new ones, or those of a thread
    /// that has given them up.
    pub(crate) fn measured(&self, nsid: u32) -> Arc<MeasuredCounters> {
        let mut counted = self.counted.lock();
        let given_up = |(of, counters): &&(u32, Arc<MeasuredCounters>)| {
            *of == nsid && Arc::strong_count(counters) == 1
        };
        if let Some((_, counters)) = counted.measured.iter().find(given_up) {
            // What the other one has counted is seen here.
            std::sync::atomic::fence(Ordering::Acquire);
            return Arc::clone(counters);
        }
        let counters = Arc::new(MeasuredCounters::default());
        counted.measured.push((nsid, Arc::clone(&counters)));
        counters
    }

    /// Counters for a submission queue.
    pub(crate) fn count_sq(&self, qid: u16) -> Arc<SqCounters> {
        let counters = Arc::new(SqCounters::new(qid));
        self.counted.lock().sqs.push(Arc::downgrade(&counters));
        counters
    }

    /// Counters for a completion queue.
    pub(crate) fn count_cq(&self, qid: u16) -> Arc<CqCounters> {
        let counters = Arc::new(CqCounters::new(qid));
        self.counted.lock().cqs.push(Arc::downgrade(&counters));
        counters
    }

    /// That queue is gone.
    pub(crate) fn retire_sq(&self, counters: &Arc<SqCounters>) {
        let mut counted = self.counted.lock();
        take_out(&mut counted.sqs, counters);
        let traps = self.take_traps(counters.qid(), DoorbellKind::Sq);
        counted.retired_sq.merge(&counters.read(traps));
    }

    /// That queue is gone.
    pub(crate) fn retire_cq(&self, counters: &Arc<CqCounters>) {
        let mut counted = self.counted.lock();
        take_out(&mut counted.cqs, counters);
        let traps = self.take_traps(counters.qid(), DoorbellKind::Cq);
        counted.retired_cq.merge(&counters.read(traps));
    }

    /// All that is counted, as of now. `sleep` says how a worker sleeps.
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
            let parked = part.is_left_out();
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

    /// What the commands did, up to now.
    pub(crate) fn io(&self) -> IoStats {
        self.counted.lock().io()
    }

    /// What was counted of queues that are gone.
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

    /// Goes on counting from there.
    pub(crate) fn restore_counters(&self, saved: &SavedCounters) {
        let mut counted = self.counted.lock();
        counted.retired_io = saved.io;
        (counted.retired_sq, counted.retired_cq) = (saved.sq.clone(), saved.cq.clone());
        counted.retired_events = saved.eventfd_doorbells;
        counted.recoveries = saved.recoveries;
    }

    /// It goes on after the death of another process.
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

    /// By namespace, in order.
    fn measured(&self) -> Vec<MeasuredNamespace> {
        let mut all = BTreeMap::new();
        for (nsid, counters) in &self.measured {
            let empty = || MeasuredNamespace { nsid: *nsid, ..MeasuredNamespace::default() };
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
