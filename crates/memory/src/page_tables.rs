//! What the kernel keeps for memory of peers that was touched.
//!
//! A peer may share a terabyte of which nothing is there, and have one byte of every 2 MiB touched:
//! each costs a page table, of 4 KiB, for as long as the memory is mapped. An honest peer's memory
//! is there, and its page tables are a 512th of it. Nothing that can be seen when memory is shared
//! tells the one from the other (an honest machine's comes while it boots), so it is not refused.
//! Instead the page tables are thrown away when there are more than belong to what is there: the
//! memory stays as it is, and what is touched again is found again, a microsecond later.
//!
//! A thread does that while so much is shared that it could matter (`MATTERS`); without a peer that
//! shares as much, there is no such thread. Two things have it look:
//!
//! * *Whoever touches a peer's memory*. To touch a place makes two page tables at most, and only if
//!   it is a page fault. So who works for a peer with enough memory for that
//!   ([`DmaTable::is_sparse`](crate::DmaTable::is_sparse)) counts the places, and after [`SPEND`] of
//!   them it asks ([`ask`]). If the process has had page faults since the last look, it waits for
//!   another look, and for what is thrown away then. So it can make no more page tables between two
//!   looks than it has places to spend.
//! * *Time*, for what is not counted (admin commands and queues, which a controller has few of): 100
//!   to 200 times a second, as long as any thread is [`Awake`] that touches such memory.

use crate::file_status::FileStatus;
use crate::losses::{self, SMALL};
use crate::mapping::Mapping;
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;

/// What page tables of peers' memory may take, in bytes, apart from those that belong to what is
/// there.
const ALLOWED: u64 = 16 << 20;

/// Memory that one page table is for, in bytes.
pub const SPAN: u64 = 2 << 20;
/// The size of a page table, in bytes.
const TABLE: u64 = 4096;

/// Mappings of this many bytes in all can have more page tables than are allowed.
pub(crate) const MATTERS: u64 = ALLOWED / TABLE * SPAN;

/// Places of a peer's memory that may be touched before somebody asks whether that was too much.
pub const SPEND: u64 = 2048;
/// Page faults of the process since the last look that are no reason for another one.
const FEW_FAULTS: u64 = 1024;

/// The shortest and the longest time between two looks. What a worker touches comes without notice,
/// and with 50 ms a peer got to 117 MiB before the first look.
const SOON: Duration = Duration::from_millis(5);
const LATE: Duration = Duration::from_millis(10);

/// So much more since the last look is a reason to look again soon, in bytes.
const GROWS: u64 = 1 << 20;

/// Threads that may touch peers' memory now.
static AWAKE: AtomicUsize = AtomicUsize::new(0);
/// The thread that looks waits until one of them is awake.
static WAITS: AtomicBool = AtomicBool::new(false);
/// How many looks were begun, and how many of them are over.
static BEGUN: AtomicU64 = AtomicU64::new(0);
static OVER: AtomicU64 = AtomicU64::new(0);
/// The page faults that the process had had when the last look was begun.
static FAULTS: AtomicU64 = AtomicU64::new(0);
/// There is a thread that looks.
static RUNS: AtomicBool = AtomicBool::new(false);
/// Somebody wants a look. For the thread that looks, while it waits.
static GATE: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

/// A look at the page tables that somebody waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look(u64);

impl Look {
    /// Whether it is over, and what was too much is gone.
    #[must_use]
    pub fn is_over(self) -> bool {
        OVER.load(SeqCst) >= self.0 || !RUNS.load(SeqCst)
    }
}

/// Whether the page tables of ranges of a peer's memory of these lengths could be too many: who
/// touches them counts that.
#[must_use]
pub fn could_be_too_many(ranges: impl IntoIterator<Item = u64>) -> bool {
    ranges.into_iter().map(reach).fold(0, u64::saturating_add) > MATTERS
}

/// What the page tables of a range of this length can map at most, in bytes.
pub(crate) fn reach(len: u64) -> u64 {
    len.saturating_add(2 * SPAN)
}

/// The caller has touched [`SPEND`] places of a peer's memory, and all that it has touched before
/// now is done: what it has to wait for before it touches more, if there is any such thing.
///
/// A system call, and a wakeup if it is to wait.
#[must_use]
pub fn ask() -> Option<Look> {
    if !RUNS.load(SeqCst) || faults().saturating_sub(FAULTS.load(SeqCst)) < FEW_FAULTS {
        return None;
    }
    let look = Look(BEGUN.load(SeqCst) + 1);
    *GATE.0.lock() = true;
    GATE.1.notify_all();
    Some(look)
}

/// A number that changes when page tables of a peer's memory are thrown away, or go with their
/// mapping: what was touched before that is not known to have one any more.
#[must_use]
pub fn epoch() -> u64 {
    losses::count()
}

/// Page faults of this process that no disk was read for, ever: those of the kernel's own accesses
/// on its behalf included.
fn faults() -> u64 {
    crate::thread_usage::process_faults()
}

/// A thread that may touch peers' memory is awake. While there is none, nobody looks at page tables,
/// so an idle process stays idle.
#[derive(Debug)]
pub struct Awake(());

impl Awake {
    /// From now until it is dropped.
    #[must_use]
    pub fn new() -> Self {
        AWAKE.fetch_add(1, SeqCst);
        // Either this sees that the other waits, or the other sees that it must not.
        if WAITS.load(SeqCst) {
            let _gate = GATE.0.lock();
            GATE.1.notify_all();
        }
        Self(())
    }
}

impl Default for Awake {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        AWAKE.fetch_sub(1, SeqCst);
    }
}

/// Returns after that time, or when a look is wanted; and not before a thread is awake that touches
/// peers' memory.
fn wait_for_somebody(time: Duration) {
    let mut wanted = GATE.0.lock();
    if !*wanted {
        GATE.1.wait_for(&mut wanted, time);
    }
    if AWAKE.load(SeqCst) == 0 {
        WAITS.store(true, SeqCst);
        while AWAKE.load(SeqCst) == 0 && !*wanted {
            GATE.1.wait(&mut wanted);
        }
        WAITS.store(false, SeqCst);
    }
    *wanted = false;
}

#[derive(Default)]
struct Registry {
    mappings: Vec<Weak<Mapping>>,
    /// What they have in all, when it was last counted, and what came since.
    bytes: u64,
}

static REGISTRY: LazyLock<Mutex<Registry>> = LazyLock::new(Mutex::default);

/// Keeps the page tables of a peer's mapping within bounds from now on.
pub fn watch(mapping: &Arc<Mapping>) {
    let len = mapping.len() as u64;
    if len < SMALL {
        return;
    }
    let mut registry = REGISTRY.lock();
    registry.mappings.push(Arc::downgrade(mapping));
    registry.bytes = registry.bytes.saturating_add(len);
    if registry.bytes > MATTERS && !RUNS.load(SeqCst) {
        registry.count();
        if registry.bytes > MATTERS {
            let thread = std::thread::Builder::new().name("page-tables".into());
            // Before it is there, because it may be over before this goes on.
            RUNS.store(true, SeqCst);
            if thread.spawn(run).is_err() {
                RUNS.store(false, SeqCst);
            }
        }
    }
}

impl Registry {
    /// Counts those that are there, and forgets the others.
    fn count(&mut self) {
        self.bytes = 0;
        let bytes = &mut self.bytes;
        self.mappings.retain(|mapping| {
            let len = mapping.upgrade().map(|mapping| mapping.len() as u64);
            *bytes = bytes.saturating_add(len.unwrap_or(0));
            len.is_some()
        });
    }
}

fn run() {
    let _guard = crate::AbortOnPanic::new();
    let (mut wait, mut before, mut floor, mut looks) = (SOON, 0, 0, 0u32);
    loop {
        wait_for_somebody(wait);
        let look = BEGUN.fetch_add(1, SeqCst) + 1;
        FAULTS.store(faults(), SeqCst);
        looks = looks.wrapping_add(1);
        if looks.is_multiple_of(64) {
            let mut registry = REGISTRY.lock();
            registry.count();
            if registry.bytes <= MATTERS {
                RUNS.store(false, SeqCst);
                return;
            }
        }
        let now = in_use();
        if now > ALLOWED.max(floor) {
            // What is left afterwards is not theirs.
            floor = trim(now).saturating_add(ALLOWED);
        }
        wait = if now > before + GROWS { SOON } else { (wait * 2).min(LATE) };
        before = now;
        OVER.store(look, SeqCst);
    }
}

/// Throws page tables away, if there are more than belong to what is there. What can not be thrown
/// away, in bytes: by what is there, or by whose it is.
fn trim(now: u64) -> u64 {
    let mappings: Vec<_> = REGISTRY.lock().mappings.iter().filter_map(Weak::upgrade).collect();
    let mut there = HashMap::new();
    for fd in mappings.iter().filter_map(|mapping| mapping.fd()) {
        if let Ok(status) = FileStatus::of(fd) {
            there.insert((status.device, status.inode), status.allocated);
        }
    }
    let honest = there.into_values().fold(0u64, u64::saturating_add) / SPAN * TABLE;
    if now <= honest.saturating_add(ALLOWED) {
        return honest;
    }
    losses::tables_gone();
    for mapping in &mappings {
        mapping.drop_page_tables();
    }
    drop(mappings);
    in_use()
}

/// The size of this process's page tables, in bytes.
pub(crate) fn in_use() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Protection;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use shadowbell_testing::wait::{self, LIMIT};

    /// What a process has is what all of its tests have.
    static ALONE: Mutex<()> = Mutex::new(());

    fn sparse(len: u64) -> Arc<Mapping> {
        let fd = memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, len).unwrap();
        Mapping::from_fd(&fd, 0, len, Protection::ReadWrite).unwrap()
    }

    #[test]
    fn page_tables_go_and_the_memory_stays() {
        let _alone = ALONE.lock();
        let places = || (0..8usize << 30).step_by(SPAN as usize);
        let lines = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        // Other tests may add and free page tables and mappings of theirs meanwhile.
        wait::until("page tables that come and go", || {
            let mapping = sparse(8 << 30);
            let before = in_use();
            for place in places() {
                mapping.bytes().write_from(place + 8, &place.to_ne_bytes()).unwrap();
            }
            let touched = in_use();
            let maps = lines();
            mapping.drop_page_tables();
            let after = in_use();
            let more = lines();
            assert!(places().all(|place| mapping.bytes().read::<usize>(place + 8) == Some(place)));
            // Of 16 MiB.
            let (come, go) = (touched.saturating_sub(before), touched.saturating_sub(after));
            come >= 12 << 20 && go > 8 << 20 && more < maps + 50
        });
    }

    /// Who asks in time has no more than is allowed and what is touched between two looks, however
    /// slowly the thread looks.
    #[test]
    fn who_waits_for_the_look_has_a_bound() {
        let _alone = ALONE.lock();
        let _awake = Awake::new();
        let fd = memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 16 << 30).unwrap();
        let before = in_use();
        let map = |_| Mapping::from_fd(&fd, 0, 16 << 30, Protection::ReadWrite).unwrap();
        let mappings: Vec<_> = (0..16).map(map).collect();
        mappings.iter().for_each(watch);
        let places =
            |mapping: usize| (0..16usize << 30).step_by(SPAN as usize).map(move |p| (mapping, p));
        let (mut most, mut waits) = (0, 0);
        for (n, (mapping, place)) in (0..16).flat_map(places).enumerate() {
            assert_eq!(mappings[mapping].bytes().read::<u8>(place), Some(0));
            if (n as u64 + 1).is_multiple_of(SPEND) {
                most = most.max(in_use().saturating_sub(before));
                let until = std::time::Instant::now() + LIMIT;
                if let Some(look) = ask() {
                    waits += 1;
                    while !look.is_over() {
                        assert!(std::time::Instant::now() < until, "nobody looks");
                        std::thread::yield_now();
                    }
                }
            }
        }
        // All of them would be 512 MiB. Other tests have some of their own.
        assert!(most <= ALLOWED + 2 * SPEND * TABLE + (4 << 20), "{most}");
        assert!(waits > 8, "{waits}");
        // What was touched before is found without a fault, and is no reason to wait.
        let look = ask();
        while look.is_some_and(|look| !look.is_over()) {
            std::thread::yield_now();
        }
        for _ in 0..SPEND {
            assert_eq!(mappings[15].bytes().read::<u8>((16 << 30) - 1), Some(0));
        }
        assert_eq!(ask(), None);
    }

    /// As many ranges as a client likes, of the same memory.
    #[test]
    fn a_client_that_touches_here_and_there_has_no_more_than_is_allowed() {
        let _alone = ALONE.lock();
        let awake = Awake::new();
        let fd = memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 16 << 30).unwrap();
        let before = in_use();
        let map = |_| Mapping::from_fd(&fd, 0, 16 << 30, Protection::ReadWrite).unwrap();
        let mappings: Vec<_> = (0..16).map(map).collect();
        mappings.iter().for_each(watch);
        let mut most = 0;
        for mapping in &mappings {
            for place in (0..16usize << 30).step_by(SPAN as usize) {
                assert_eq!(mapping.bytes().read::<u8>(place), Some(0));
            }
            most = most.max(in_use());
        }
        // All of them would be 512 MiB. How far it gets in between depends on the machine.
        let until = std::time::Instant::now() + LIMIT;
        while in_use() > before + 2 * ALLOWED {
            assert!(std::time::Instant::now() < until, "{} of at most {most}", in_use());
            wait::pause();
        }
        // Nobody looks while nobody touches anything, and then somebody does again.
        drop(awake);
        while !WAITS.load(SeqCst) {
            assert!(std::time::Instant::now() < until, "it goes on looking");
            wait::pause();
        }
        let _awake = Awake::new();
        while WAITS.load(SeqCst) {
            assert!(std::time::Instant::now() < until, "it does not come back");
            wait::pause();
        }
        drop(mappings);
    }
}
