//! SIGBUS handler for shared memory whose file a peer truncates.
//!
//! An access to a mapped page beyond the end of its file raises SIGBUS, which by default ends the
//! process and with it the disks of all guests. The handler has a registry of the ranges that peers
//! share. For a fault inside one of these ranges, the handler maps zeroes over the rest of the
//! range, marks the range as poisoned, and lets the access continue. The owner of the range then
//! fails the controller that uses it. A fault outside these ranges is passed to the previous SIGBUS
//! handler.
//!
//! The zeroes are those of an empty memfd. Private memory could not be used: if the system does not
//! overcommit memory (`vm.overcommit_memory` 2), or the process has a limit (`RLIMIT_DATA`), the
//! full size of private memory counts even if the memory is never touched. The peer chooses that
//! size, so the mapping could fail, and a fault without a replacement ends the process.

use parking_lot::Mutex;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

/// Largest number of guarded ranges: about the number of mappings that a process may have.
const SLOTS: usize = 65_536;
/// Largest number of mappings of peers' memory that can be guarded at a time.
pub const MAX_GUARDED: u64 = SLOTS as u64;

struct Slot {
    /// Sequence lock of the slot: odd during a change, and a new even number afterwards. Fields are
    /// consistent if the same even number was loaded before and after they were read.
    version: AtomicUsize,
    /// 0 if the slot is free, 1 while it is being cleared, otherwise the first address of the
    /// guarded range.
    start: AtomicUsize,
    len: AtomicUsize,
    /// Page size, a power of two. Only whole pages can be replaced.
    page: AtomicUsize,
    poisoned: AtomicBool,
    /// Owner: 0 for none, [`SHARED`] for several peers, otherwise the number of the peer plus
    /// one.
    owner: AtomicUsize,
}

/// Owner value of memory that several peers share.
const SHARED: usize = usize::MAX;
/// Number of loss counters: peers whose numbers are equal modulo `PEERS` share a counter.
const PEERS: usize = 1024;

static REGISTRY: [Slot; SLOTS] = [const {
    Slot {
        version: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        page: AtomicUsize::new(0),
        poisoned: AtomicBool::new(false),
        owner: AtomicUsize::new(0),
    }
}; SLOTS];
/// One more than the highest slot that was ever used. The handler searches only the slots below.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Slots that were used and are free again. The signal handler does not access this lock.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());
static FAULTS: AtomicU64 = AtomicU64::new(0);
/// Number of faults by peer, modulo [`PEERS`].
static LOSSES: [AtomicU64; PEERS] = [const { AtomicU64::new(0) }; PEERS];
static INSTALLED: OnceLock<Result<Previous, i32>> = OnceLock::new();

/// Range of memory that is guarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    start: usize,
    len: usize,
    page: usize,
}

impl Slot {
    /// Changes the range of the slot. Only the owner of the slot may call this.
    fn set(&self, Range { start, len, page }: Range) {
        self.version.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.page.store(page, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.start.store(start, Ordering::Relaxed);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Returns the range, or `None` during a change. The slot of a range with a faulting access
    /// does not change during the fault, because the access keeps its mapping alive.
    fn get(&self) -> Option<Range> {
        let version = self.version.load(Ordering::Acquire);
        let (start, len) = (self.start.load(Ordering::Relaxed), self.len.load(Ordering::Relaxed));
        let page = self.page.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let is_whole = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        (is_whole && start > 1).then_some(Range { start, len, page })
    }
}

struct Previous(libc::sigaction);
// SAFETY: a `sigaction` is plain data (a function address, a mask and flags).
unsafe impl Send for Previous {}
// SAFETY: as for `Send`; the value never changes after it was stored.
unsafe impl Sync for Previous {}

/// Registration of a range, removed on drop.
pub(crate) struct Guard(usize);

impl Guard {
    fn slot(&self) -> &'static Slot {
        &REGISTRY[self.0]
    }

    pub(crate) fn is_poisoned(&self) -> bool {
        self.slot().poisoned.load(Ordering::Relaxed)
    }

    /// Records `peer` as an owner of the memory, possibly among others.
    pub(crate) fn claim(&self, peer: u32) {
        let mine = peer as usize + 1;
        let relaxed = Ordering::Relaxed;
        let _ = self.slot().owner.fetch_update(relaxed, relaxed, |owner| match owner {
            0 => Some(mine),
            owner => (owner != mine).then_some(SHARED),
        });
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.slot().set(Range { start: 1, len: 0, page: 1 });
        self.slot().start.store(0, Ordering::Release);
        FREE.lock().push(self.0);
    }
}

/// Number of faults since the process started whose pages were replaced by zeroes. I/O threads
/// compare it, by a single load, to detect that a mapping may be poisoned.
#[inline]
#[must_use]
pub fn faults() -> u64 {
    FAULTS.load(Ordering::Acquire)
}

/// Upper bound of the number of faults in memory of `peer` (see
/// [`DmaSpace::of_peer`](crate::DmaSpace)). After a fault, only the maps of peers whose number has
/// changed must be searched.
#[must_use]
pub fn losses(peer: u32) -> u64 {
    LOSSES[peer as usize % PEERS].load(Ordering::Acquire)
}

/// Counts a fault in memory of `owner`.
fn count(owner: usize) {
    let lost = match owner {
        0 => &[],
        SHARED => &LOSSES[..],
        owner => &LOSSES[(owner - 1) % PEERS..][..1],
    };
    lost.iter().for_each(|losses| {
        losses.fetch_add(1, Ordering::Release);
    });
    // The total is incremented last, so that a thread that sees the new total also sees the peer's
    // counter.
    FAULTS.fetch_add(1, Ordering::Release);
}

/// Guards `len` bytes at `start`, in pages of `page` bytes.
pub(crate) fn guard(start: usize, len: usize, page: usize) -> io::Result<Guard> {
    if let Err(errno) = INSTALLED.get_or_init(install) {
        return Err(io::Error::from_raw_os_error(*errno));
    }
    let mut free = FREE.lock();
    let index = match free.pop() {
        Some(index) => index,
        // The lock on `FREE` is held, so no other thread takes this slot.
        None => USED.load(Ordering::Relaxed),
    };
    let Some(slot) = REGISTRY.get(index) else {
        return Err(io::Error::other(format!("more than {SLOTS} memory maps of peers at once")));
    };
    slot.poisoned.store(false, Ordering::Relaxed);
    slot.owner.store(0, Ordering::Relaxed);
    slot.set(Range { start, len, page });
    USED.fetch_max(index + 1, Ordering::AcqRel);
    Ok(Guard(index))
}

fn install() -> Result<Previous, i32> {
    let errno = || io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
    // SAFETY: both structures are valid for the calls, zero is a valid `sigaction`, and the
    // handler has the signature that SA_SIGINFO requires.
    unsafe {
        let mut new: libc::sigaction = std::mem::zeroed();
        let mut old: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = on_sigbus;
        new.sa_sigaction = handler as usize;
        new.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        libc::sigemptyset(&raw mut new.sa_mask);
        if libc::sigaction(libc::SIGBUS, &raw const new, &raw mut old) != 0 {
            return Err(errno());
        }
        Ok(Previous(old))
    }
}

/// Replaces `len` bytes at `start` by zeroes. Returns true on success.
///
/// # Safety
///
/// The range must consist of whole pages of a mapping that the caller owns.
unsafe fn replace(start: usize, len: usize) -> bool {
    let map = |flags, fd| {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = flags | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: MAP_FIXED replaces the caller's pages and no others.
        unsafe { libc::mmap(start as *mut libc::c_void, len, protection, flags, fd, 0) }
    };
    // SAFETY: the name ends with NUL. The descriptor that is opened here is also closed here.
    unsafe {
        let file = libc::memfd_create(c"lost".as_ptr(), libc::MFD_CLOEXEC);
        if file >= 0 {
            let is_long =
                libc::off64_t::try_from(len).is_ok_and(|len| libc::ftruncate64(file, len) == 0);
            let mapped = is_long && map(libc::MAP_SHARED, file) != libc::MAP_FAILED;
            libc::close(file);
            if mapped {
                return true;
            }
        }
    }
    // Fallback if the process has no free descriptor.
    map(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1) != libc::MAP_FAILED
}

/// Signal handler. It is async-signal-safe, because it uses only atomics and system calls.
extern "C" fn on_sigbus(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t` to an SA_SIGINFO handler, and for SIGBUS its
    // address field is set.
    let address = unsafe { (*info).si_addr() } as usize;
    let used = USED.load(Ordering::Acquire);
    for slot in &REGISTRY[..used] {
        let Some(Range { start, len, page: size }) = slot.get() else { continue };
        if address >= start && address - start < len {
            let page = address & !(size - 1);
            // The rest of the range is also replaced, since a truncation has removed it as well. A
            // replacement of single pages would create two mappings each, and a process may have
            // only 65530 mappings.
            let rest = (start + len - page).next_multiple_of(size);
            // SAFETY: the range consists of whole pages. Its owner has mapped it and still holds
            // it, because a guard leaves the registry before its range is unmapped.
            let is_replaced = unsafe { replace(page, rest) };
            if is_replaced {
                slot.poisoned.store(true, Ordering::Relaxed);
                count(slot.owner.load(Ordering::Relaxed));
                return;
            }
        }
    }
    // The fault is outside the guarded ranges, so the previous handler gets it. `OnceLock::get`
    // only loads, so it is async-signal-safe. If the fault occurs between `sigaction` and the store
    // of the previous handler, the default action is restored. SAFETY: the kernel returned the
    // previous action. For the default and ignore actions, the default action is restored, so that
    // the repeated access ends the process.
    unsafe {
        if let Some(Ok(previous)) = INSTALLED.get() {
            let action = previous.0.sa_sigaction;
            if action != libc::SIG_DFL && action != libc::SIG_IGN {
                if previous.0.sa_flags & libc::SA_SIGINFO != 0 {
                    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
                        std::mem::transmute(action);
                    handler(signal, info, context);
                } else {
                    let handler: extern "C" fn(i32) = std::mem::transmute(action);
                    handler(signal);
                }
                return;
            }
        }
        let mut default: libc::sigaction = std::mem::zeroed();
        default.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(libc::SIGBUS, &raw const default, std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::{Range, Slot, losses};
    use crate::{DmaSpace, Mapping, Protection};
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    #[test]
    fn truncated_memory_reads_as_zeroes_and_is_marked() {
        let fd = memfd_create("truncated", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 8192).unwrap();
        let mapping = Mapping::from_fd(&fd, 0, 8192, Protection::ReadWrite).unwrap();
        let untouched = Mapping::from_fd(&fd, 0, 4096, Protection::ReadWrite).unwrap();
        mapping.bytes().fill(0, 8192, 0xa5).unwrap();
        ftruncate(&fd, 4096).unwrap();
        assert!(!mapping.is_poisoned());
        let before = super::faults();
        assert_eq!(mapping.bytes().read::<u32>(4096 + 64), Some(0));
        assert_eq!(mapping.bytes().read::<u32>(0), Some(0xa5a5_a5a5));
        assert!(mapping.is_poisoned());
        assert!(!untouched.is_poisoned());
        assert!(super::faults() > before);
        mapping.bytes().fill(4096, 4096, 1).unwrap(); // The zeroes are writable.
    }

    /// After a fault, only the maps of peers that may be affected must be searched.
    #[test]
    fn losses_are_counted_by_peer() {
        let new_losses = |peers: &[u32]| {
            let fd = memfd_create("lost", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&fd, 4096).unwrap();
            let bytes = Mapping::from_fd(&fd, 0, 4096, Protection::ReadWrite).unwrap().bytes();
            for peer in peers {
                DmaSpace::of_peer(*peer).map(0, 4096, &bytes).unwrap();
            }
            ftruncate(&fd, 0).unwrap();
            let before = [700, 701, 702].map(losses);
            assert_eq!(bytes.read::<u32>(0), Some(0));
            let after = [700, 701, 702].map(losses);
            [0, 1, 2].map(|n| after[n] - before[n])
        };
        assert_eq!(new_losses(&[700]), [1, 0, 0]);
        assert_eq!(new_losses(&[701, 701]), [0, 1, 0]);
        assert_eq!(new_losses(&[702 + 1024]), [0, 0, 1], "as good as the same");
        assert_eq!(new_losses(&[]), [0, 0, 0]);
        assert_eq!(new_losses(&[700, 702]), [1, 1, 1], "of several: everybody looks");
    }

    /// While the handler looks up a fault, slots are reused for ranges of other peers. If the
    /// handler combined the start of one range with the length of another, it would replace memory
    /// of another peer.
    #[test]
    fn a_range_is_never_a_mixture_of_two() {
        use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
        let new = || AtomicUsize::new(0);
        let poisoned = AtomicBool::new(false);
        let slot =
            Slot { version: new(), start: new(), len: new(), page: new(), poisoned, owner: new() };
        let ranges = [4096, 1 << 30].map(|len| Range { start: len * 2, len, page: len });
        slot.set(ranges[0]);
        let (slot, over) = (&slot, &AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for turn in 0..2_000_000 {
                    slot.set(ranges[turn % 2]);
                }
                over.store(true, Ordering::Relaxed);
            });
            while !over.load(Ordering::Relaxed) {
                assert!(slot.get().is_none_or(|range| ranges.contains(&range)));
            }
        });
    }

    /// The size that a peer chooses for its memory is not charged to this process. The test uses
    /// the limit of the process, not the system-wide limit. Both would refuse private memory.
    #[test]
    fn lost_memory_is_replaced_within_the_data_limit() {
        use rustix::process::{Resource, getrlimit, setrlimit};
        const IN_CHILD: &str = "SIGBUS_WITHOUT_ROOM";
        if std::env::var_os(IN_CHILD).is_none() {
            let name = "sigbus::tests::lost_memory_is_replaced_within_the_data_limit";
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            child.args(["--exact", name, "--test-threads=1"]).env(IN_CHILD, "");
            let output = child.output().unwrap();
            return assert!(output.status.success(), "{output:?}");
        }
        let fd = memfd_create("huge", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 1 << 40).unwrap();
        let mapping = Mapping::from_fd(&fd, 0, 1 << 40, Protection::ReadWrite).unwrap();
        ftruncate(&fd, 0).unwrap();
        let limit = rustix::process::Rlimit { current: Some(1 << 30), ..getrlimit(Resource::Data) };
        setrlimit(Resource::Data, limit).unwrap();
        assert!(Mapping::anonymous(1 << 40).is_err(), "the limit does not hold");
        for at in [1 << 39, 0, (1 << 40) - 8] {
            mapping.bytes().write_from(at, &7u64.to_ne_bytes()).unwrap();
            assert_eq!(mapping.bytes().read::<u64>(at), Some(7));
        }
        assert!(mapping.is_poisoned());
    }

    /// The number of mappings of a process is limited, so a peer must not be able to exhaust it.
    #[test]
    fn lost_memory_takes_a_bounded_number_of_mappings() {
        const PAGES: usize = 4096;
        let fd = memfd_create("holes", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, PAGES as u64 * 4096).unwrap();
        let mapping = Mapping::from_fd(&fd, 0, PAGES as u64 * 4096, Protection::ReadWrite).unwrap();
        ftruncate(&fd, 0).unwrap();
        let maps = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        let before = maps();
        for page in (0..PAGES).step_by(2).chain((0..PAGES).rev().step_by(2)) {
            assert_eq!(mapping.bytes().read::<u32>(page * 4096), Some(0));
        }
        assert!(maps() < before + 100);
        drop(mapping);
        assert!(maps() < before + 100);
    }

    /// Small pages cannot replace a part of a huge page. A peer can create a file of huge pages
    /// even if none are reserved.
    #[test]
    fn missing_huge_pages_read_as_zeroes() {
        let fd = memfd_create("huge", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB).unwrap();
        ftruncate(&fd, 8 << 20).unwrap();
        let mapping = Mapping::from_fd(&fd, 0, 6 << 20, Protection::ReadWrite).unwrap();
        ftruncate(&fd, 0).unwrap();
        for at in [(4 << 20) + 8, 0, (6 << 20) - 8, 5] {
            assert_eq!(mapping.bytes().read::<u32>(at), Some(0));
        }
        assert!(mapping.is_poisoned());
        mapping.bytes().fill(0, 6 << 20, 7).unwrap();
        assert_eq!(mapping.bytes().read::<u32>(4096), Some(0x0707_0707));
    }

    /// A mapping always consists of whole huge pages, even for a shorter length.
    #[test]
    fn part_of_a_huge_page_is_unmapped_with_all_of_it() {
        let mapped = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.contains("/memfd:part-of-a-huge-page")
        };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB;
        let fd = memfd_create("part-of-a-huge-page", flags).unwrap();
        ftruncate(&fd, 4 << 20).unwrap();
        let mapping = Mapping::from_fd(&fd, 0, 4096, Protection::ReadWrite).unwrap();
        assert!(mapped());
        drop(mapping);
        assert!(!mapped());
    }
}
