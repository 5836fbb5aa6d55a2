//! Limit for the page tables of peers' memory.
//!
//! A peer may share a sparse terabyte, and make this process touch one byte of every 2 MiB. Each
//! touch allocates a page table of 4 KiB, which exists as long as the memory is mapped. In
//! contrast, the memory of an honest peer is allocated, and its page tables have a 512th of its
//! size. When memory is shared, the two cases cannot be distinguished, because an honest guest's
//! memory is allocated only while the guest boots. So sparse memory is not refused. Instead, page
//! tables are freed when there are more than the allocated memory needs. The memory keeps its
//! content, and the next access to a page costs a page fault of a microsecond.
//!
//! A thread checks the page tables. It exists only while enough memory is shared
//! (`MIN_BYTES_TO_CHECK`) for the page tables to exceed the limit. Two events trigger a check:
//!
//! * *Touches of a peer's memory.* A touch allocates at most two page tables, and only by a page
//!   fault. Therefore a thread that works for a peer with enough memory
//!   ([`DmaTable::is_sparse`](crate::DmaTable::is_sparse)) counts the touched places and calls
//!   [`request_check`] after [`TOUCHES_PER_CHECK`] of them. If the process had page faults since
//!   the last check, the thread waits for another check and for the removal of excess page tables.
//!   So between two checks it allocates at most two page tables for each of the
//!   [`TOUCHES_PER_CHECK`] places.
//! * *Time*, for touches that are not counted, by admin commands and queues. There are few of those
//!   per controller. Checks take place 100 to 200 times per second while a thread that touches such
//!   memory is [`Awake`].

use crate::file_status::FileStatus;
use crate::mapping::Mapping;
use crate::reclaim::{self, SMALL};
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;

/// Allowed bytes of page tables of peers' memory, in addition to the page tables of allocated
/// memory.
const ALLOWED: u64 = 16 << 20;

/// Bytes of memory that one page table maps.
pub const SPAN: u64 = 2 << 20;
/// Size of a page table in bytes.
const TABLE: u64 = 4096;

/// Total size of mappings in bytes from which on their page tables can exceed the limit.
pub(crate) const MIN_BYTES_TO_CHECK: u64 = ALLOWED / TABLE * SPAN;

/// Number of places of a peer's memory that a thread may touch before it has to call
/// [`request_check`].
pub const TOUCHES_PER_CHECK: u64 = 2048;
/// Number of page faults of the process since the last check below which no further check is
/// needed.
const FEW_FAULTS: u64 = 1024;

/// Shortest and longest time between two checks, apart from requested ones. The times are short,
/// because not all touches are counted: with 50 ms, the page tables of a peer grew to 117 MiB
/// before the first check.
const MIN_CHECK_INTERVAL: Duration = Duration::from_millis(5);
const MAX_CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// Growth of the page tables in bytes from one check to the next. After a larger growth, the next
/// check follows after the shortest time.
const FAST_GROWTH: u64 = 1 << 20;

/// Number of threads that may touch peers' memory now.
static AWAKE: AtomicUsize = AtomicUsize::new(0);
/// True while the checking thread waits until a thread that may touch peers' memory is awake.
static CHECKER_WAITS: AtomicBool = AtomicBool::new(false);
/// Number of started checks, and of finished checks.
static STARTED_CHECKS: AtomicU64 = AtomicU64::new(0);
static FINISHED_CHECKS: AtomicU64 = AtomicU64::new(0);
/// Page faults of the process at the start of the last check.
static FAULTS: AtomicU64 = AtomicU64::new(0);
/// True while the checking thread exists.
static CHECKER_RUNS: AtomicBool = AtomicBool::new(false);
/// Request for a check, which the checking thread waits for.
static GATE: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

/// Requested check of the page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Check(u64);

impl Check {
    /// True if the check is finished and the excess page tables are freed.
    #[must_use]
    pub fn is_over(self) -> bool {
        FINISHED_CHECKS.load(SeqCst) >= self.0 || !CHECKER_RUNS.load(SeqCst)
    }
}

/// True if the page tables of a peer's ranges of these lengths could exceed the limit. Then threads
/// that touch the memory have to count their touches.
#[must_use]
pub fn may_exceed_limit(ranges: impl IntoIterator<Item = u64>) -> bool {
    ranges.into_iter().map(reach).fold(0, u64::saturating_add) > MIN_BYTES_TO_CHECK
}

/// Upper bound of the bytes that the page tables of a range of `len` bytes can map.
pub(crate) fn reach(len: u64) -> u64 {
    len.saturating_add(2 * SPAN)
}

/// Requests a check. To be called when the caller has touched [`TOUCHES_PER_CHECK`] places of a
/// peer's memory.
///
/// All earlier accesses of the caller must have ended. Returns the check for which the caller has
/// to wait before it touches more, or `None` if no check is necessary. Costs a system call, and a
/// wakeup if a check is requested.
#[must_use]
pub fn request_check() -> Option<Check> {
    if !CHECKER_RUNS.load(SeqCst) || faults().saturating_sub(FAULTS.load(SeqCst)) < FEW_FAULTS {
        return None;
    }
    let check = Check(STARTED_CHECKS.load(SeqCst) + 1);
    *GATE.0.lock() = true;
    GATE.1.notify_all();
    Some(check)
}

/// Number that changes when page tables of a peer's memory are freed, whether the memory stays
/// mapped or not. Memory that was touched before the change may have no page table any more.
#[must_use]
pub fn epoch() -> u64 {
    reclaim::count()
}

/// Minor page faults of this process since its start, including those of accesses by the kernel for
/// this process.
fn faults() -> u64 {
    crate::thread_usage::process_faults()
}

/// Marks the calling thread as awake: it may touch peers' memory. While no thread is awake, no
/// checks run, so that the checks do not wake an idle process.
#[derive(Debug)]
pub struct Awake(());

impl Awake {
    /// Marks the thread as awake until the value is dropped.
    #[must_use]
    pub fn new() -> Self {
        AWAKE.fetch_add(1, SeqCst);
        // This thread and the checking thread first store and then load, so at least one of them
        // sees the other's store. Either this thread wakes the checking thread, or the checking
        // thread does not sleep.
        if CHECKER_WAITS.load(SeqCst) {
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

/// Waits for `time`, or until a check is requested. Then waits until a thread that touches peers'
/// memory is awake.
fn wait_for_awake_thread(time: Duration) {
    let mut wanted = GATE.0.lock();
    if !*wanted {
        GATE.1.wait_for(&mut wanted, time);
    }
    if AWAKE.load(SeqCst) == 0 {
        CHECKER_WAITS.store(true, SeqCst);
        while AWAKE.load(SeqCst) == 0 && !*wanted {
            GATE.1.wait(&mut wanted);
        }
        CHECKER_WAITS.store(false, SeqCst);
    }
    *wanted = false;
}

#[derive(Default)]
struct Registry {
    mappings: Vec<Weak<Mapping>>,
    /// Total size in bytes of the mappings at the last count and of those added since.
    bytes: u64,
}

static REGISTRY: LazyLock<Mutex<Registry>> = LazyLock::new(Mutex::default);

/// Adds a peer's mapping to those whose page tables are limited.
pub fn watch(mapping: &Arc<Mapping>) {
    let len = mapping.len() as u64;
    if len < SMALL {
        return;
    }
    let mut registry = REGISTRY.lock();
    registry.mappings.push(Arc::downgrade(mapping));
    registry.bytes = registry.bytes.saturating_add(len);
    if registry.bytes > MIN_BYTES_TO_CHECK && !CHECKER_RUNS.load(SeqCst) {
        registry.count();
        if registry.bytes > MIN_BYTES_TO_CHECK {
            let thread = std::thread::Builder::new().name("page-tables".into());
            // The flag is set before the start, because the thread may end before `spawn` returns.
            CHECKER_RUNS.store(true, SeqCst);
            if thread.spawn(run).is_err() {
                CHECKER_RUNS.store(false, SeqCst);
            }
        }
    }
}

impl Registry {
    /// Counts the bytes of existing mappings, and removes dropped mappings from the registry.
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
    let (mut wait, mut before, mut floor, mut looks) = (MIN_CHECK_INTERVAL, 0, 0, 0u32);
    loop {
        wait_for_awake_thread(wait);
        let check = STARTED_CHECKS.fetch_add(1, SeqCst) + 1;
        FAULTS.store(faults(), SeqCst);
        looks = looks.wrapping_add(1);
        if looks.is_multiple_of(64) {
            let mut registry = REGISTRY.lock();
            registry.count();
            if registry.bytes <= MIN_BYTES_TO_CHECK {
                CHECKER_RUNS.store(false, SeqCst);
                return;
            }
        }
        let now = in_use();
        if now > ALLOWED.max(floor) {
            // The page tables that remain do not belong to sparse memory of peers, so they raise
            // the threshold.
            floor = trim(now).saturating_add(ALLOWED);
        }
        wait = if now > before + FAST_GROWTH {
            MIN_CHECK_INTERVAL
        } else {
            (wait * 2).min(MAX_CHECK_INTERVAL)
        };
        before = now;
        FINISHED_CHECKS.store(check, SeqCst);
    }
}

/// Frees page tables if there are more than the allocated memory needs. Returns the size of the
/// remaining page tables: page tables of allocated memory, and of memory that does not belong to
/// peers.
fn trim(now: u64) -> u64 {
    let mappings: Vec<_> = REGISTRY.lock().mappings.iter().filter_map(Weak::upgrade).collect();
    let mut there = HashMap::new();
    for fd in mappings.iter().filter_map(|mapping| mapping.fd()) {
        if let Ok(status) = FileStatus::of(fd) {
            there.insert((status.device, status.inode), status.allocated);
        }
    }
    let resident = there.into_values().fold(0u64, u64::saturating_add) / SPAN * TABLE;
    if now <= resident.saturating_add(ALLOWED) {
        return resident;
    }
    reclaim::count_freed_tables();
    for mapping in &mappings {
        mapping.drop_page_tables();
    }
    drop(mappings);
    in_use()
}

/// Size of this process's page tables in bytes.
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

    /// Serializes the tests, because they all share the page tables of the process.
    static SERIAL: Mutex<()> = Mutex::new(());

    fn sparse(len: u64) -> Arc<Mapping> {
        let fd = memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, len).unwrap();
        Mapping::from_fd(&fd, 0, len, Protection::ReadWrite).unwrap()
    }

    #[test]
    fn dropped_page_tables_keep_the_memory() {
        let _serial = SERIAL.lock();
        let places = || (0..8usize << 30).step_by(SPAN as usize);
        let lines = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        // Other tests may add and free page tables and mappings at the same time, so the test is
        // repeated.
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
            // The test adds and frees 16 MiB of page tables.
            let (come, go) = (touched.saturating_sub(before), touched.saturating_sub(after));
            come >= 12 << 20 && go > 8 << 20 && more < maps + 50
        });
    }

    /// If a thread waits for the checks that it requests, the page tables exceed the limit at most
    /// by the page tables of the touches between two checks, however slow the checking thread is.
    #[test]
    fn page_tables_are_bounded_if_callers_wait_for_the_check() {
        let _serial = SERIAL.lock();
        let _awake = Awake::new();
        let fd = memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 16 << 30).unwrap();
        let before = in_use();
        let map = |_| Mapping::from_fd(&fd, 0, 16 << 30, Protection::ReadWrite).unwrap();
        let mappings: Vec<_> = (0..16).map(map).collect();
        mappings.iter().for_each(watch);
        let places =
            |mapping: usize| (0..16usize << 30).step_by(SPAN as usize).map(move |p| (mapping, p));
        let (mut max, mut waits) = (0, 0);
        for (n, (mapping, place)) in (0..16).flat_map(places).enumerate() {
            assert_eq!(mappings[mapping].bytes().read::<u8>(place), Some(0));
            if (n as u64 + 1).is_multiple_of(TOUCHES_PER_CHECK) {
                max = max.max(in_use().saturating_sub(before));
                let until = std::time::Instant::now() + LIMIT;
                if let Some(check) = request_check() {
                    waits += 1;
                    while !check.is_over() {
                        assert!(std::time::Instant::now() < until, "no checks run");
                        std::thread::yield_now();
                    }
                }
            }
        }
        // Without the limit, the page tables would have 512 MiB. The measured size includes the
        // page tables of other tests.
        assert!(max <= ALLOWED + 2 * TOUCHES_PER_CHECK * TABLE + (4 << 20), "{max}");
        assert!(waits > 8, "{waits}");
        // Memory that was touched before has page tables. So touching it causes no page fault, and
        // the thread does not wait.
        let check = request_check();
        while check.is_some_and(|check| !check.is_over()) {
            std::thread::yield_now();
        }
        for _ in 0..TOUCHES_PER_CHECK {
            assert_eq!(mappings[15].bytes().read::<u8>((16 << 30) - 1), Some(0));
        }
        assert_eq!(request_check(), None);
    }

    /// The client uses any number of ranges of the same memory.
    #[test]
    fn sparse_access_stays_within_the_page_table_quota() {
        let _serial = SERIAL.lock();
        let awake = Awake::new();
        let fd = memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 16 << 30).unwrap();
        let before = in_use();
        let map = |_| Mapping::from_fd(&fd, 0, 16 << 30, Protection::ReadWrite).unwrap();
        let mappings: Vec<_> = (0..16).map(map).collect();
        mappings.iter().for_each(watch);
        let mut max = 0;
        for mapping in &mappings {
            for place in (0..16usize << 30).step_by(SPAN as usize) {
                assert_eq!(mapping.bytes().read::<u8>(place), Some(0));
            }
            max = max.max(in_use());
        }
        // Without the limit, the page tables would have 512 MiB. Their maximum between two checks
        // depends on the machine.
        let until = std::time::Instant::now() + LIMIT;
        while in_use() > before + 2 * ALLOWED {
            assert!(std::time::Instant::now() < until, "{} of at most {max}", in_use());
            wait::pause();
        }
        // No checks run while no thread is awake. They continue when a thread is awake again.
        drop(awake);
        while !CHECKER_WAITS.load(SeqCst) {
            assert!(std::time::Instant::now() < until, "checks continue");
            wait::pause();
        }
        let _awake = Awake::new();
        while CHECKER_WAITS.load(SeqCst) {
            assert!(std::time::Instant::now() < until, "it does not come back");
            wait::pause();
        }
        drop(mappings);
    }
}
