//! The files that a client's memory is in, mapped.
//!
//! A range is mapped by itself, as long as there are few. But a process can have 65530 mappings,
//! for all of its clients, and a guest with an IOMMU in between shares its memory page by page.
//! Beyond [`SINGLE`] of them, the whole file is mapped at once and the pages are parts of that; so
//! is a file of huge pages, of which the kernel does not map parts. A client has [`MAX_MAPPINGS`]
//! in all, and no more of the address space than its [`Account`] has.
//!
//! A successor of this process needs the files once more. So one descriptor of each is kept for as
//! long as any range of it is shared: one for the memory of a virtual machine, however many pages
//! an IOMMU makes of it, and one for each huge page of DPDK's. A client has as many mappings as
//! files at least, so there are no more than [`MAX_MAPPINGS`], and no more than its [`Account`]
//! has. A client with more files than that is served all the same, and can not be handed over.

use super::budget::{Account, Budget, OverBudget, Reservation};
use shadowbell_memory::{End, FileStatus, MapError, Mapping, Protection, SharedBytes};
use shadowbell_vfio_user::Errno;
use shadowbell_vfio_user::descriptor::{Closer, PeerFd};
use std::collections::HashMap;
use std::sync::{Arc, Weak};

/// Ranges of a client that are mapped one by one.
const SINGLE: usize = 256;

/// The most mappings of a client. DPDK's memory is in as many files as it has huge pages.
const MAX_MAPPINGS: usize = 4096;

/// Mappings whose descriptors are kept, for a disk that is another controller: it may be given the
/// memory, too. So many descriptors a client can make us hold.
const MAX_KEPT: usize = 64;

/// The largest file that is mapped as a whole, in bytes: an address space has 128 TiB, for all.
const MAX_WHOLE: u64 = 4 << 40;

/// How a mapping ends, and what it counts for until it has.
struct MappingEnd {
    closer: Arc<Closer>,
    /// Given back when it is unmapped, and not before.
    reservation: Arc<Reservation>,
    /// Held by each range that is mapped by itself.
    single: Option<Arc<()>>,
}

impl End for MappingEnd {
    fn drop_later(self: Box<Self>, what: Box<dyn Send>) {
        let Self { closer, reservation, single } = *self;
        // In this order.
        closer.drop_later(Box::new(Remains { _mapping: what, _counts_for: (reservation, single) }));
    }
}

struct Remains {
    _mapping: Box<dyn Send>,
    _counts_for: (Arc<Reservation>, Option<Arc<()>>),
}

/// Why memory can not be had.
#[derive(Debug, thiserror::Error)]
pub(super) enum FileError {
    #[error(transparent)]
    Map(#[from] MapError),
    #[error("it is in more files than the {MAX_MAPPINGS} that are taken of one client")]
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

/// Which file it is, and for what. The file of a mapping can not become another.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    device: u64,
    inode: u64,
    protection: Protection,
}

/// A file of which a range is shared.
pub(super) struct Kept {
    pub(super) fd: Arc<PeerFd>,
    _counts_for: Reservation,
}

/// A client's files.
pub(super) struct Files {
    /// Those whose descriptors are kept, while any range of them is there.
    kept: HashMap<Key, Weak<Kept>>,
    /// As `sweep_at`, of `kept`.
    sweep_kept_at: usize,
    /// Those that are mapped as a whole, while any range of them is there.
    whole: HashMap<Key, Weak<Mapping>>,
    /// So many entries of `whole` there are before those that are not there are taken out.
    sweep_at: usize,
    /// Counts the ranges that are mapped by themselves.
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
            kept: HashMap::new(),
            sweep_kept_at: 64,
            whole: HashMap::new(),
            sweep_at: 64,
            singles: Arc::new(()),
            account: Account::new(budget),
        }
    }

    /// The descriptor to use for that file, kept for as long as what is returned; if there is room
    /// for one.
    pub(super) fn keep(&mut self, fd: &Arc<PeerFd>, protection: Protection) -> Option<Arc<Kept>> {
        let status = FileStatus::of(fd).ok()?;
        let key = Key { device: status.device, inode: status.inode, protection };
        if let Some(known) = self.kept.get(&key).and_then(Weak::upgrade) {
            return Some(known);
        }
        if self.kept.len() >= self.sweep_kept_at {
            self.kept.retain(|_, kept| kept.strong_count() > 0);
            self.sweep_kept_at = self.kept.len() * 2 + 64;
        }
        let counts_for = self.account.take_descriptor().ok()?;
        let kept = Arc::new(Kept { fd: Arc::clone(fd), _counts_for: counts_for });
        self.kept.insert(key, Arc::downgrade(&kept));
        Some(kept)
    }

    /// Maps `len` bytes at `offset` of a file that waits for nobody.
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
                // It may be part of a huge page.
                Err(FileError::Map(MapError::System { .. })) => {}
                outcome => return outcome,
            }
        }
        let shape = || usize::try_from(offset).ok().zip(usize::try_from(len).ok());
        if let Some((offset, len)) = shape()
            && let Some(mapping) = self.whole(fd, offset as u64, len as u64, protection)?
            && let Some(shared) = mapping.bytes().slice(offset, len)
        {
            return Ok(shared);
        }
        // Part of it is beyond the end of the file, or the file is too large.
        if singles + self.whole.len() >= MAX_MAPPINGS {
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
        let is_kept = Arc::strong_count(&self.singles) <= MAX_KEPT;
        let single = Some(Arc::clone(&self.singles));
        let reservation = self.account.take(len)?;
        let shape = (offset, len, protection);
        Ok(new_mapping(fd, is_kept, shape, reservation, single)?.bytes())
    }

    /// All of the file, if it reaches that far and can be mapped.
    fn whole(
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
        // The file may have grown since, or have been cut off and then grown again.
        let serves = |mapping: &Arc<Mapping>| end <= mapping.len() as u64 && !mapping.is_poisoned();
        if let Some(known) = self.whole.get(&key).and_then(Weak::upgrade).filter(serves) {
            return Ok(Some(known));
        }
        if self.whole.len() >= self.sweep_at {
            self.whole.retain(|_, mapping| mapping.strong_count() > 0);
            self.sweep_at = self.whole.len() * 2 + 64;
        }
        if self.whole.len() + Arc::strong_count(&self.singles) > MAX_MAPPINGS {
            self.whole.retain(|_, mapping| mapping.strong_count() > 0);
            if self.whole.len() + Arc::strong_count(&self.singles) > MAX_MAPPINGS {
                return Err(FileError::TooMany);
            }
        }
        // There may be room for the part of it that was asked for.
        let Ok(reservation) = self.account.take(size) else { return Ok(None) };
        let is_kept = self.whole.len() < MAX_KEPT;
        let mapping = new_mapping(fd, is_kept, (0, size, protection), reservation, None)?;
        self.whole.insert(key, Arc::downgrade(&mapping));
        Ok(Some(mapping))
    }
}

/// Maps part of a file; its descriptor is kept with it if it `is_kept`.
fn new_mapping(
    fd: &Arc<PeerFd>,
    is_kept: bool,
    (offset, len, protection): (u64, u64, Protection),
    mut reservation: Reservation,
    single: Option<Arc<()>>,
) -> Result<Arc<Mapping>, FileError> {
    let mut mapping = if is_kept {
        Mapping::from_peer(Arc::clone(fd) as _, offset, len, protection)
    } else {
        Mapping::from_fd(&**fd, offset, len, protection)
    }?;
    // However little is asked for of a huge page, it is mapped as a whole.
    let grown = reservation.grow(mapping.taken() as u64);
    let closer = Arc::clone(fd.closer());
    mapping.end_by(MappingEnd { closer, reservation: Arc::new(reservation), single });
    grown?;
    shadowbell_memory::page_tables::watch(&mapping);
    Ok(mapping)
}

#[cfg(test)]
mod tests {
    use super::super::budget::Amount;
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    const PAGE: u64 = 4096;

    fn file(flags: MemfdFlags, len: u64) -> Arc<PeerFd> {
        named("client", flags, len)
    }

    fn named(name: &str, flags: MemfdFlags, len: u64) -> Arc<PeerFd> {
        let fd = memfd_create(name, flags | MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, len).unwrap();
        Arc::new(PeerFd::new(fd, &Arc::default()))
    }

    fn map(files: &mut Files, fd: &Arc<PeerFd>, offset: u64) -> Result<SharedBytes, FileError> {
        files.map(fd, offset, PAGE, Protection::ReadWrite)
    }

    /// What is let go of is unmapped by another thread.
    fn eventually(is_so: impl FnMut() -> bool) {
        shadowbell_testing::wait::until("an unmap by another thread", is_so);
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
        // Each is the page that it ought to be, whichever way it is mapped.
        for (n, page) in pages.iter().enumerate() {
            page.write_from(8, &n.to_ne_bytes()).unwrap();
        }
        let all = Mapping::from_fd(&memory, 0, 1000 * PAGE, Protection::Read).unwrap();
        for n in 0..1000 {
            assert_eq!(all.bytes().read::<u64>(n * PAGE as usize + 8), Some(n as u64));
        }
        assert!(pages.iter().all(|page| page.len() as u64 == PAGE));
        // What may only be read is not part of what may be written.
        let read = files.map(&memory, 0, PAGE, Protection::Read).unwrap();
        assert!(!read.is_writable());
        // Another file is another file, and one that has grown is mapped anew.
        let other = file(MemfdFlags::empty(), PAGE);
        let there = map(&mut files, &other, 0).unwrap();
        assert_eq!(there.read::<u64>(8), Some(0));
        ftruncate(&other, 2 * PAGE).unwrap();
        map(&mut files, &other, PAGE).unwrap();
        // Beyond the end it is the client's affair, as ever.
        map(&mut files, &other, 5 * PAGE).unwrap();
        drop((pages, read, there));
        map(&mut files, &memory, 0).unwrap();
        eventually(|| Arc::strong_count(&files.singles) == 1);
        assert!(files.whole.values().all(|mapping| mapping.strong_count() == 0));
    }

    /// By whoever lets go of it last, and not on that thread.
    #[test]
    fn what_is_released_is_unmapped_sooner_or_later() {
        let fd = named("released-by-its-client", MemfdFlags::empty(), 3 * PAGE);
        let mut files = Files::default();
        let parts = [(0, 3 * PAGE), (0, PAGE)]
            .map(|(offset, len)| files.map(&fd, offset, len, Protection::ReadWrite).unwrap());
        let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(maps().contains("/memfd:released-by-its-client"));
        // The thread that does it is busy.
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
    fn a_file_is_kept_once_while_it_is_in_use_and_if_there_is_room() {
        let budget = Budget::new(Amount { bytes: 1 << 30, mappings: 1 << 20, descriptors: 6 });
        let mut files = Files::new(budget);
        let rw = Protection::ReadWrite;
        let [one, two, three] = [(); 3].map(|()| file(MemfdFlags::empty(), PAGE));
        let first = files.keep(&one, rw).unwrap();
        let again = rustix::io::fcntl_dupfd_cloexec(&*one, 0).unwrap();
        let again = Arc::new(PeerFd::new(again, &Arc::default()));
        let second = files.keep(&again, rw).unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        // What may only be read may be another descriptor.
        let read = files.keep(&one, Protection::Read).unwrap();
        assert!(!Arc::ptr_eq(&first, &read));
        let other = files.keep(&two, rw).unwrap();
        assert!(files.keep(&three, rw).is_none());
        drop((first, other));
        let third = files.keep(&three, rw).unwrap();
        assert!(files.keep(&two, rw).is_none());
        drop((second, third, read));
        for _ in 0..1000 {
            files.keep(&file(MemfdFlags::empty(), PAGE), rw).unwrap();
        }
        assert!(files.kept.len() < 200, "{}", files.kept.len());
    }

    #[test]
    fn mappings_do_not_pile_up() {
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
    fn parts_of_a_mapping_take_its_address_space_once_until_the_last_of_them_goes() {
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
    fn what_was_lost_is_mapped_anew() {
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
    fn what_can_not_be_mapped_is_said() {
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
