//! Mappings of the files that contain a client's memory.
//!
//! If a client has few ranges, each range has its own mapping. But all clients together can have
//! only 65530 mappings, and a guest with an IOMMU shares its memory page by page. So beyond
//! [`SINGLE`] ranges, the whole file is mapped once, and the ranges are parts of that mapping. If a
//! file consists of huge pages, the whole file is mapped too, because the kernel does not map parts
//! of huge pages. A client has at most [`MAX_MAPPINGS`] mappings, and at most the address space
//! that its [`Account`] permits.
//!
//! The next server process (upgrade or recovery) needs the files too. So this process keeps one
//! descriptor of each file while a range of the file is shared. A virtual machine usually has one
//! file, even if an IOMMU splits it into many pages; DPDK has one file per huge page. A client has
//! no more files than mappings, so it has at most [`MAX_MAPPINGS`] descriptors, and at most the
//! number that its [`Account`] permits. A client with more files is served, but cannot be
//! transferred to the next server process.

use super::budget::{Account, Budget, OverBudget, Reservation};
use shadowbell_memory::{DeferredRelease, FileStatus, MapError, Mapping, Protection, SharedBytes};
use shadowbell_vfio_user::Errno;
use shadowbell_vfio_user::descriptor::{Closer, PeerFd};
use std::collections::HashMap;
use std::sync::{Arc, Weak};

/// Maximum number of a client's ranges that have their own mapping.
const SINGLE: usize = 256;

/// Maximum number of a client's mappings. The limit is high because DPDK uses one file for each
/// huge page.
const MAX_MAPPINGS: usize = 4096;

/// Maximum number of mappings that hold a descriptor of their file. A disk that is a namespace of
/// another controller needs the descriptor, to share the client's memory with that controller. So
/// one client can make this process hold at most this number of descriptors for mappings.
const MAX_RETAINED: usize = 64;

/// Maximum size in bytes of a file that is mapped as a whole. The address space has 128 TiB.
const MAX_WHOLE: u64 = 4 << 40;

/// Cleanup of a mapping: the closer's thread unmaps it, and then its resources are returned to the
/// account.
struct MappingRelease {
    closer: Arc<Closer>,
    /// Address space of the mapping. It is returned only after the memory is unmapped.
    reservation: Arc<Reservation>,
    /// Counter of the ranges that have a mapping of their own: each of these mappings holds a
    /// reference to it.
    single: Option<Arc<()>>,
}

impl DeferredRelease for MappingRelease {
    fn drop_later(self: Box<Self>, object: Box<dyn Send>) {
        let Self { closer, reservation, single } = *self;
        // Fields are dropped in their order, so the memory is unmapped before its reservation is
        // returned.
        closer
            .drop_later(Box::new(Remains { _mapping: object, _counts_for: (reservation, single) }));
    }
}

struct Remains {
    _mapping: Box<dyn Send>,
    _counts_for: (Arc<Reservation>, Option<Arc<()>>),
}

/// Error in mapping a client's memory.
#[derive(Debug, thiserror::Error)]
pub(super) enum FileError {
    #[error(transparent)]
    Map(#[from] MapError),
    #[error("it is in more than {MAX_MAPPINGS} files, the limit of one client")]
    TooMany,
    #[error(transparent)]
    OverBudget(#[from] OverBudget),
}

impl FileError {
    pub(super) fn errno(&self) -> Errno {
        match self {
            Self::Map(_) => Errno::INVAL,
            Self::TooMany | Self::OverBudget(_) => Errno::NOSPC,
        }
    }
}

/// Key of a mapped file: its identity, and the protection of its mapping. The identity stays unique
/// while the file is mapped.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    device: u64,
    inode: u64,
    protection: Protection,
}

/// Open descriptor of a file, while at least one range of the file is shared.
pub(super) struct RetainedFile {
    pub(super) fd: Arc<PeerFd>,
    _counts_for: Reservation,
}

/// Files of one client.
pub(super) struct Files {
    /// Kept descriptors by file. An entry is dead when no range of its file is shared.
    retained: HashMap<Key, Weak<RetainedFile>>,
    /// Number of entries in `retained` at which dead entries are removed.
    sweep_retained_at: usize,
    /// Mappings of whole files. An entry is dead when no range of its file is shared.
    whole_files: HashMap<Key, Weak<Mapping>>,
    /// Number of entries in `whole_files` at which dead entries are removed.
    sweep_at: usize,
    /// Object whose reference count is the number of mappings of single ranges, plus one.
    singles: Arc<()>,
    account: Account,
}

impl Default for Files {
    fn default() -> Self {
        Self::new(Budget::of_process())
    }
}

impl Files {
    pub(super) fn new(budget: Arc<Budget>) -> Self {
        Self {
            retained: HashMap::new(),
            sweep_retained_at: 64,
            whole_files: HashMap::new(),
            sweep_at: 64,
            singles: Arc::new(()),
            account: Account::new(budget),
        }
    }

    /// Descriptor to use for the file of `fd`. It stays open while the returned value exists.
    /// Returns `None` if the account has no descriptor left.
    pub(super) fn retain_file(
        &mut self,
        fd: &Arc<PeerFd>,
        protection: Protection,
    ) -> Option<Arc<RetainedFile>> {
        let status = FileStatus::of(fd).ok()?;
        let key = Key { device: status.device, inode: status.inode, protection };
        if let Some(known) = self.retained.get(&key).and_then(Weak::upgrade) {
            return Some(known);
        }
        if self.retained.len() >= self.sweep_retained_at {
            self.retained.retain(|_, retained| retained.strong_count() > 0);
            self.sweep_retained_at = self.retained.len() * 2 + 64;
        }
        let counts_for = self.account.take_descriptor().ok()?;
        let retained = Arc::new(RetainedFile { fd: Arc::clone(fd), _counts_for: counts_for });
        self.retained.insert(key, Arc::downgrade(&retained));
        Some(retained)
    }

    /// Maps `len` bytes at `offset` of a file. Mapping never waits for another thread or process.
    pub(super) fn map(
        &mut self,
        fd: &Arc<PeerFd>,
        offset: u64,
        len: u64,
        protection: Protection,
    ) -> Result<SharedBytes, FileError> {
        let singles = Arc::strong_count(&self.singles) - 1;
        if singles < SINGLE {
            match self.map_single(fd, offset, len, protection) {
                // The range may be only a part of a huge page, and the kernel maps only whole huge
                // pages. So the whole file is mapped.
                Err(FileError::Map(MapError::System { .. })) => {}
                outcome => return outcome,
            }
        }
        let shape = || usize::try_from(offset).ok().zip(usize::try_from(len).ok());
        if let Some((offset, len)) = shape()
            && let Some(mapping) = self.whole_files(fd, offset as u64, len as u64, protection)?
            && let Some(shared) = mapping.bytes().slice(offset, len)
        {
            return Ok(shared);
        }
        // The whole file cannot be mapped: the range exceeds the file, or the file is too large. So
        // the range gets its own mapping.
        if singles + self.whole_files.len() >= MAX_MAPPINGS {
            return Err(FileError::TooMany);
        }
        self.map_single(fd, offset, len, protection)
    }

    fn map_single(
        &self,
        fd: &Arc<PeerFd>,
        offset: u64,
        len: u64,
        protection: Protection,
    ) -> Result<SharedBytes, FileError> {
        let is_retained = Arc::strong_count(&self.singles) <= MAX_RETAINED;
        let single = Some(Arc::clone(&self.singles));
        let reservation = self.account.take(len)?;
        let shape = (offset, len, protection);
        Ok(new_mapping(fd, is_retained, shape, reservation, single)?.bytes())
    }

    /// Maps the whole file. `None` if the range exceeds the file, or if the file is too large.
    fn whole_files(
        &mut self,
        fd: &Arc<PeerFd>,
        offset: u64,
        len: u64,
        protection: Protection,
    ) -> Result<Option<Arc<Mapping>>, FileError> {
        let Ok(FileStatus { device, inode, len: size, .. }) = FileStatus::of(fd) else {
            return Ok(None);
        };
        let end = offset.saturating_add(len);
        if end > size || size > MAX_WHOLE {
            return Ok(None);
        }
        let key = Key { device, inode, protection };
        // If the file has grown, the existing mapping is too short. If the file was truncated, the
        // mapping is poisoned.
        let is_usable =
            |mapping: &Arc<Mapping>| end <= mapping.len() as u64 && !mapping.is_poisoned();
        if let Some(known) = self.whole_files.get(&key).and_then(Weak::upgrade).filter(is_usable) {
            return Ok(Some(known));
        }
        if self.whole_files.len() >= self.sweep_at {
            self.whole_files.retain(|_, mapping| mapping.strong_count() > 0);
            self.sweep_at = self.whole_files.len() * 2 + 64;
        }
        if self.whole_files.len() + Arc::strong_count(&self.singles) > MAX_MAPPINGS {
            self.whole_files.retain(|_, mapping| mapping.strong_count() > 0);
            if self.whole_files.len() + Arc::strong_count(&self.singles) > MAX_MAPPINGS {
                return Err(FileError::TooMany);
            }
        }
        // If the account has no room for the whole file, it may still have room for the requested
        // range.
        let Ok(reservation) = self.account.take(size) else { return Ok(None) };
        let is_retained = self.whole_files.len() < MAX_RETAINED;
        let mapping = new_mapping(fd, is_retained, (0, size, protection), reservation, None)?;
        self.whole_files.insert(key, Arc::downgrade(&mapping));
        Ok(Some(mapping))
    }
}

/// Maps a part of a file. If `is_retained` is true, the mapping holds the descriptor.
fn new_mapping(
    fd: &Arc<PeerFd>,
    is_retained: bool,
    (offset, len, protection): (u64, u64, Protection),
    mut reservation: Reservation,
    single: Option<Arc<()>>,
) -> Result<Arc<Mapping>, FileError> {
    let mut mapping = if is_retained {
        Mapping::from_peer(Arc::clone(fd) as _, offset, len, protection)
    } else {
        Mapping::from_fd(&**fd, offset, len, protection)
    }?;
    // The kernel maps whole huge pages, even for a small range, so the mapping may be larger than
    // requested.
    let grown = reservation.grow(mapping.reserved() as u64);
    let closer = Arc::clone(fd.closer());
    mapping.release_by(MappingRelease { closer, reservation: Arc::new(reservation), single });
    grown?;
    shadowbell_memory::page_tables::watch(&mapping);
    Ok(mapping)
}

#[cfg(test)]
mod tests {
    use super::super::budget::Amount;
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use shadowbell_vfio_user::descriptor::Closer;
    use std::sync::LazyLock;

    const PAGE: u64 = 4096;

    /// One closer for all descriptors: a closer has threads, and one test has 4096 descriptors.
    static CLOSER: LazyLock<Arc<Closer>> = LazyLock::new(Arc::default);

    fn file(flags: MemfdFlags, len: u64) -> Arc<PeerFd> {
        named("client", flags, len)
    }

    fn named(name: &str, flags: MemfdFlags, len: u64) -> Arc<PeerFd> {
        let fd = memfd_create(name, flags | MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, len).unwrap();
        Arc::new(PeerFd::new(fd, &CLOSER))
    }

    fn map(files: &mut Files, fd: &Arc<PeerFd>, offset: u64) -> Result<SharedBytes, FileError> {
        files.map(fd, offset, PAGE, Protection::ReadWrite)
    }

    /// Waits for a condition. Released memory is unmapped on another thread, so the condition may
    /// become true later.
    fn eventually(is_reached: impl FnMut() -> bool) {
        shadowbell_testing::wait::until("an unmap by another thread", is_reached);
    }

    #[test]
    fn many_ranges_of_a_file_are_parts_of_one_mapping() {
        let mut files = Files::default();
        let memory = file(MemfdFlags::empty(), 1000 * PAGE);
        let pages: Vec<_> =
            (0..1000).map(|n| map(&mut files, &memory, n * PAGE).unwrap()).collect();
        let mappings = |pages: &[SharedBytes]| {
            let mut all: Vec<_> = pages.iter().map(|page| page.mapping().address()).collect();
            all.sort_unstable();
            all.dedup();
            all.len()
        };
        assert_eq!(mappings(&pages), SINGLE + 1);
        // Each page has its own contents of the file, whether it has its own mapping or is a part
        // of the whole file's mapping.
        for (n, page) in pages.iter().enumerate() {
            page.write_from(8, &n.to_ne_bytes()).unwrap();
        }
        let all = Mapping::from_fd(&memory, 0, 1000 * PAGE, Protection::Read).unwrap();
        for n in 0..1000 {
            assert_eq!(all.bytes().read::<u64>(n * PAGE as usize + 8), Some(n as u64));
        }
        assert!(pages.iter().all(|page| page.len() as u64 == PAGE));
        // A read-only range does not become a part of a writable mapping.
        let read = files.map(&memory, 0, PAGE, Protection::Read).unwrap();
        assert!(!read.is_writable());
        // Another file gets its own mapping. A file that has grown is mapped again.
        let other = file(MemfdFlags::empty(), PAGE);
        let there = map(&mut files, &other, 0).unwrap();
        assert_eq!(there.read::<u64>(8), Some(0));
        ftruncate(&other, 2 * PAGE).unwrap();
        map(&mut files, &other, PAGE).unwrap();
        // A range beyond the end of the file can be mapped: only an access to it would find the
        // memory missing.
        map(&mut files, &other, 5 * PAGE).unwrap();
        drop((pages, read, there));
        map(&mut files, &memory, 0).unwrap();
        eventually(|| Arc::strong_count(&files.singles) == 1);
        assert!(files.whole_files.values().all(|mapping| mapping.strong_count() == 0));
    }

    /// The closer's thread unmaps released memory; the thread that released it does not.
    #[test]
    fn released_mappings_are_unmapped_asynchronously() {
        let fd = named("released-by-its-client", MemfdFlags::empty(), 3 * PAGE);
        let mut files = Files::default();
        let parts = [(0, 3 * PAGE), (0, PAGE)]
            .map(|(offset, len)| files.map(&fd, offset, len, Protection::ReadWrite).unwrap());
        let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(maps().contains("/memfd:released-by-its-client"));
        // A blocking object keeps the closer's thread busy.
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        fd.closer().drop_later(Box::new(OnDrop(wait)));
        drop(parts);
        assert!(maps().contains("/memfd:released-by-its-client"));
        go_on.send(()).unwrap();
        eventually(|| !maps().contains("/memfd:released-by-its-client"));
    }

    struct OnDrop(std::sync::mpsc::Receiver<()>);

    impl Drop for OnDrop {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    #[test]
    fn a_file_in_use_has_one_descriptor_within_the_budget() {
        let budget = Budget::new(Amount { bytes: 1 << 30, mappings: 1 << 20, descriptors: 6 });
        let mut files = Files::new(budget);
        let rw = Protection::ReadWrite;
        let [one, two, three] = [(); 3].map(|()| file(MemfdFlags::empty(), PAGE));
        let first = files.retain_file(&one, rw).unwrap();
        let again = rustix::io::fcntl_dupfd_cloexec(&*one, 0).unwrap();
        let again = Arc::new(PeerFd::new(again, &Arc::default()));
        let second = files.retain_file(&again, rw).unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        // A read-only mapping needs its own descriptor, because descriptors of a file may have
        // different access rights.
        let read = files.retain_file(&one, Protection::Read).unwrap();
        assert!(!Arc::ptr_eq(&first, &read));
        let other = files.retain_file(&two, rw).unwrap();
        assert!(files.retain_file(&three, rw).is_none());
        drop((first, other));
        let third = files.retain_file(&three, rw).unwrap();
        assert!(files.retain_file(&two, rw).is_none());
        drop((second, third, read));
        for _ in 0..1000 {
            files.retain_file(&file(MemfdFlags::empty(), PAGE), rw).unwrap();
        }
        assert!(files.retained.len() < 200, "{}", files.retained.len());
    }

    #[test]
    fn the_number_of_mappings_is_limited() {
        let mut files = Files::default();
        let mut held = Vec::new();
        let error = loop {
            match map(&mut files, &file(MemfdFlags::empty(), PAGE), 0) {
                Ok(page) => held.push(page),
                Err(error) => break error,
            }
        };
        assert_eq!((held.len(), error.errno()), (MAX_MAPPINGS, Errno::NOSPC), "{error}");
        let beyond = map(&mut files, &file(MemfdFlags::empty(), 0), 0);
        assert!(matches!(beyond, Err(FileError::TooMany)));
        drop(held);
        eventually(|| map(&mut files, &file(MemfdFlags::empty(), PAGE), 0).is_ok());
    }

    #[test]
    fn a_client_that_fills_the_address_space_leaves_room_for_others() {
        let budget = Budget::new(Amount { bytes: 1024 * PAGE, mappings: 1 << 20, descriptors: 0 });
        let [mut one, mut two] = [(); 2].map(|()| Files::new(Arc::clone(&budget)));
        let large = file(MemfdFlags::empty(), 1 << 60);
        let take = |files: &mut Files, pages: u64| {
            files.map(&large, 0, pages * PAGE, Protection::ReadWrite)
        };
        let held = take(&mut one, 512).unwrap();
        let error = take(&mut one, 1).err().unwrap();
        assert_eq!(error.errno(), Errno::NOSPC);
        assert!(error.to_string().contains("half of what the others leave"), "{error}");
        let other = take(&mut two, 256).unwrap();
        assert!(take(&mut two, 1).is_err());
        drop((held, other));
    }

    #[test]
    fn parts_of_a_mapping_count_its_address_space_once() {
        let budget = Budget::new(Amount { bytes: 2048 * PAGE, mappings: 1 << 20, descriptors: 0 });
        let mut files = Files::new(budget);
        let small = file(MemfdFlags::empty(), 400 * PAGE);
        let mut pages: Vec<_> =
            (0..400).map(|n| map(&mut files, &small, n * PAGE).unwrap()).collect();
        let other = file(MemfdFlags::empty(), 1 << 60);
        let mut take = |pages: u64| files.map(&other, 0, pages * PAGE, Protection::ReadWrite);
        let most = take(1024 - SINGLE as u64 - 400).unwrap();
        pages.truncate(SINGLE + 1);
        assert!(take(1).is_err());
        pages.truncate(SINGLE);
        let mut more = None;
        eventually(|| {
            more = take(400).ok();
            more.is_some()
        });
        assert!(take(1).is_err());
        drop((most, more, pages));
        eventually(|| take(1024).is_ok());
    }

    #[test]
    fn a_page_of_a_file_of_huge_pages_is_part_of_it() {
        let mut files = Files::default();
        let huge = file(MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB, 4 << 20);
        let page = map(&mut files, &huge, (2 << 20) + 3 * PAGE).unwrap();
        assert_eq!(page.len() as u64, PAGE);
        assert_eq!(page.offset_in_mapping() as u64, (2 << 20) + 3 * PAGE);
    }

    #[test]
    fn a_page_of_a_huge_page_takes_the_address_space_of_all_of_it() {
        let budget = Budget::new(Amount { bytes: 16 << 20, mappings: 1 << 20, descriptors: 0 });
        let mut files = Files::new(budget);
        let huge = file(MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB, 64 << 20);
        let held: Vec<_> =
            std::iter::from_fn(|| map(&mut files, &huge, (2 << 20) * 3).ok()).take(100).collect();
        assert_eq!(held.len(), 4, "half of 16 MiB");
        drop(held);
        eventually(|| map(&mut files, &huge, 0).is_ok());
    }

    #[test]
    fn lost_memory_is_mapped_again() {
        let mut files = Files::default();
        let memory = file(MemfdFlags::empty(), 1000 * PAGE);
        let mut pages: Vec<_> =
            (0..SINGLE as u64 + 2).map(|n| map(&mut files, &memory, n * PAGE).unwrap()).collect();
        let last = pages.last().unwrap().clone();
        ftruncate(&memory, 0).unwrap();
        assert_eq!(last.read::<u64>(0), Some(0));
        assert!(last.mapping().is_poisoned());
        ftruncate(&memory, 1000 * PAGE).unwrap();
        pages.push(map(&mut files, &memory, 300 * PAGE).unwrap());
        assert!(!pages.last().unwrap().mapping().is_poisoned());
    }

    #[test]
    fn invalid_mappings_are_refused() {
        let mut files = Files::default();
        let memory = file(MemfdFlags::empty(), PAGE);
        for offset in [1, u64::MAX - PAGE + 1] {
            let error = map(&mut files, &memory, offset).err().unwrap();
            assert_eq!(error.errno(), Errno::INVAL, "{error}");
        }
        let event = shadowbell_memory::EventFd::new().unwrap().try_into().unwrap();
        let event = Arc::new(PeerFd::new(event, &Arc::default()));
        assert!(files.map(&event, 0, PAGE, Protection::Read).is_err());
    }
}
