//! The files that a client's memory is in, mapped.
//!
//! A range is mapped by itself, as long as there are few. But a process can have 65530 mappings,
//! for all of its clients, and a guest with an IOMMU in between shares its memory page by page.
//! Beyond [`SINGLE`] of them, the whole file is mapped at once and the pages are parts of that; so
//! is a file of huge pages, of which the kernel does not map parts. A client has [`MAX_MAPPINGS`]
//! in all, and no more of the address space than its [`Account`] has.

use super::budget::{Account, Budget, OverBudget, Reservation};
use shadowbell_memory::{MapError, Mapping, Protection, SharedBytes};
use shadowbell_vfio_user::Errno;
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
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

/// The bytes of a range, and what they count for.
pub(super) struct Bytes {
    shared: SharedBytes,
    /// Held by each range that is mapped by itself.
    _single: Option<Arc<()>>,
    /// Of the mapping, by all of its parts. Given back when it is unmapped, and not before.
    _reservation: Arc<Reservation>,
}

impl Bytes {
    pub(super) fn shared(&self) -> &SharedBytes {
        &self.shared
    }
}

/// Memory that the client took back: it is unmapped when this is dropped.
///
/// Whoever closes a file last frees its pages, and when a machine has ended that is us: a tenth of
/// a second and more for each GiB. Nobody is to wait for that, so a thread of its own does it.
pub(super) struct Released(Vec<Bytes>);

/// What is unmapped in no time, in bytes.
const SMALL: usize = 16 << 20;

impl Released {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<Bytes> for Released {
    fn from_iter<T: IntoIterator<Item = Bytes>>(bytes: T) -> Self {
        Self(bytes.into_iter().collect())
    }
}

/// How many bytes are unmapped with these: of a mapping that nobody else has a part of, all of it,
/// however small the parts are.
fn unmapped_with(bytes: &[Bytes]) -> usize {
    let mut mappings = HashMap::new();
    for Bytes { shared, .. } in bytes {
        let of = mappings.entry(shared.mapping().address()).or_insert((shared.mapping(), 0, 0));
        *of = (of.0, of.1 + 1, of.2 + shared.len());
    }
    let unmapped = mappings.into_values().map(|(mapping, parts, len)| {
        if Arc::strong_count(mapping) == parts { mapping.len() } else { len }
    });
    unmapped.fold(0, usize::saturating_add)
}

impl Drop for Released {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.0);
        if unmapped_with(&bytes) > SMALL {
            // Without a thread it happens here.
            let thread = std::thread::Builder::new().name("unmap".into());
            let _ = thread.spawn(move || drop(bytes));
        }
    }
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
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key {
    device: u64,
    inode: u64,
    protection: Protection,
}

/// A file that is mapped as a whole.
type Whole = (Arc<Mapping>, Arc<Reservation>);

/// A client's files.
pub(super) struct Files {
    /// Those that are mapped as a whole, while any range of them is there.
    whole: Vec<(Key, Weak<Mapping>, Weak<Reservation>)>,
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
    fn new(budget: Arc<Budget>) -> Self {
        Self { whole: Vec::new(), singles: Arc::new(()), account: Account::new(budget) }
    }

    /// Maps `len` bytes at `offset` of a file that waits for nobody.
    pub(super) fn map(
        &mut self,
        fd: &OwnedFd,
        offset: u64,
        len: u64,
        protection: Protection,
    ) -> Result<Bytes, FileError> {
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
            && let Some((mapping, reservation)) =
                self.whole(fd, offset as u64, len as u64, protection)?
            && let Some(shared) = mapping.bytes().slice(offset, len)
        {
            return Ok(Bytes { shared, _single: None, _reservation: reservation });
        }
        // Part of it is beyond the end of the file, or the file is too large.
        if singles + self.whole.len() >= MAX_MAPPINGS {
            return Err(FileError::TooMany);
        }
        self.map_single(fd, offset, len, protection)
    }

    fn map_single(
        &self,
        fd: &OwnedFd,
        offset: u64,
        len: u64,
        protection: Protection,
    ) -> Result<Bytes, FileError> {
        let mut reservation = self.account.take(len)?;
        let kept = Arc::strong_count(&self.singles) <= MAX_KEPT;
        let own = kept.then(|| fd.try_clone().ok()).flatten();
        let mapping = match own {
            Some(fd) => Mapping::from_own_fd(fd, offset, len, protection),
            None => Mapping::from_fd(fd, offset, len, protection),
        }?;
        // However little is asked for of a huge page, it is mapped as a whole.
        reservation.grow(mapping.taken() as u64)?;
        let single = Some(Arc::clone(&self.singles));
        Ok(Bytes { shared: mapping.bytes(), _single: single, _reservation: Arc::new(reservation) })
    }

    /// All of the file, if it reaches that far and can be mapped.
    fn whole(
        &mut self,
        fd: &OwnedFd,
        offset: u64,
        len: u64,
        protection: Protection,
    ) -> Result<Option<Whole>, FileError> {
        let Ok(stat) = rustix::fs::fstat(fd) else { return Ok(None) };
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let end = offset.saturating_add(len);
        if end > size || size > MAX_WHOLE {
            return Ok(None);
        }
        self.whole.retain(|(_, mapping, _)| mapping.strong_count() > 0);
        let key = Key { device: stat.st_dev, inode: stat.st_ino, protection };
        let known = self.whole.iter().filter(|(other, ..)| *other == key);
        let mut known = known
            .filter_map(|(_, mapping, reservation)| mapping.upgrade().zip(reservation.upgrade()));
        // The file may have grown since, or have been cut off and then grown again.
        let serves = |mapping: &Mapping| end <= mapping.len() as u64 && !mapping.is_poisoned();
        if let Some(known) = known.find(|(mapping, _)| serves(mapping)) {
            return Ok(Some(known));
        }
        if self.whole.len() + Arc::strong_count(&self.singles) > MAX_MAPPINGS {
            return Err(FileError::TooMany);
        }
        // There may be room for the part of it that was asked for.
        let Ok(reservation) = self.account.take(size) else { return Ok(None) };
        let reservation = Arc::new(reservation);
        let own = (self.whole.len() < MAX_KEPT).then(|| fd.try_clone().ok()).flatten();
        let mapping = match own {
            Some(fd) => Mapping::from_own_fd(fd, 0, size, protection),
            None => Mapping::from_fd(fd.as_fd(), 0, size, protection),
        };
        let mapping = mapping?;
        self.whole.push((key, Arc::downgrade(&mapping), Arc::downgrade(&reservation)));
        Ok(Some((mapping, reservation)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::budget::AddressSpace;
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    const PAGE: u64 = 4096;

    fn file(flags: MemfdFlags, len: u64) -> OwnedFd {
        let fd = memfd_create("client", flags | MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, len).unwrap();
        fd
    }

    fn map(files: &mut Files, fd: &OwnedFd, offset: u64) -> Result<Bytes, FileError> {
        files.map(fd, offset, PAGE, Protection::ReadWrite)
    }

    #[test]
    fn many_ranges_of_a_file_are_parts_of_one_mapping() {
        let mut files = Files::default();
        let memory = file(MemfdFlags::empty(), 1000 * PAGE);
        let pages: Vec<_> =
            (0..1000).map(|n| map(&mut files, &memory, n * PAGE).unwrap()).collect();
        let mappings = |pages: &[Bytes]| {
            let mut all: Vec<_> =
                pages.iter().map(|page| page.shared().mapping().address()).collect();
            all.sort_unstable();
            all.dedup();
            all.len()
        };
        assert_eq!(mappings(&pages), SINGLE + 1);
        // Each is the page that it ought to be, whichever way it is mapped.
        for (n, page) in pages.iter().enumerate() {
            page.shared().write_from(8, &n.to_ne_bytes()).unwrap();
        }
        let all = Mapping::from_fd(&memory, 0, 1000 * PAGE, Protection::Read).unwrap();
        for n in 0..1000 {
            assert_eq!(all.bytes().read::<u64>(n * PAGE as usize + 8), Some(n as u64));
        }
        assert!(pages.iter().all(|page| page.shared().len() as u64 == PAGE));
        // What may only be read is not part of what may be written.
        let fd = memory.try_clone().unwrap();
        let read = files.map(&fd, 0, PAGE, Protection::Read).unwrap();
        assert!(!read.shared().is_writable());
        // Another file is another file, and one that has grown is mapped anew.
        let other = file(MemfdFlags::empty(), PAGE);
        let there = map(&mut files, &other, 0).unwrap();
        assert_eq!(there.shared().read::<u64>(8), Some(0));
        ftruncate(&other, 2 * PAGE).unwrap();
        map(&mut files, &other, PAGE).unwrap();
        // Beyond the end it is the client's affair, as ever.
        map(&mut files, &other, 5 * PAGE).unwrap();
        drop((pages, read, there));
        map(&mut files, &memory, 0).unwrap();
        assert_eq!(Arc::strong_count(&files.singles), 1);
        assert!(files.whole.iter().all(|(_, mapping, _)| mapping.strong_count() == 0));
    }

    #[test]
    fn what_is_released_is_unmapped_sooner_or_later() {
        let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
        for len in [PAGE, 3 * SMALL as u64] {
            let fd = memfd_create("released-by-its-client", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&fd, len).unwrap();
            let mut files = Files::default();
            let parts = [(0, len), (0, PAGE)]
                .map(|(offset, len)| files.map(&fd, offset, len, Protection::ReadWrite).unwrap());
            let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
            assert!(maps().contains("/memfd:released-by-its-client"));
            drop(parts.into_iter().collect::<Released>());
            while maps().contains("/memfd:released-by-its-client") {
                assert!(std::time::Instant::now() < until);
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn the_last_parts_of_a_file_count_as_all_of_it() {
        let len = 3 * SMALL;
        let fd = file(MemfdFlags::empty(), len as u64);
        let whole = Mapping::from_fd(&fd, 0, len as u64, Protection::ReadWrite).unwrap();
        let page = PAGE as usize;
        let account = Account::new(Budget::new(AddressSpace { bytes: u64::MAX, mappings: 2 }));
        let reservation = Arc::new(account.take(len as u64).unwrap());
        let part = |n: usize| Bytes {
            shared: whole.bytes().slice(n * page, page).unwrap(),
            _single: None,
            _reservation: Arc::clone(&reservation),
        };
        let (some, others) = (vec![part(0), part(7)], vec![part(100)]);
        drop(whole);
        assert_eq!(unmapped_with(&some), 2 * page, "another part is there still");
        drop(others);
        assert_eq!(unmapped_with(&some), len);
        assert_eq!(unmapped_with(&[]), 0);
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
        map(&mut files, &file(MemfdFlags::empty(), PAGE), 0).unwrap();
    }

    #[test]
    fn a_client_that_fills_the_address_space_leaves_room_for_others() {
        let budget = Budget::new(AddressSpace { bytes: 1024 * PAGE, mappings: 1 << 20 });
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
        let budget = Budget::new(AddressSpace { bytes: 2048 * PAGE, mappings: 1 << 20 });
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
        let more = take(400).unwrap();
        assert!(take(1).is_err());
        drop((most, more, pages));
        take(1024).unwrap();
    }

    #[test]
    fn a_page_of_a_file_of_huge_pages_is_part_of_it() {
        let mut files = Files::default();
        let huge = file(MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB, 4 << 20);
        let page = map(&mut files, &huge, (2 << 20) + 3 * PAGE).unwrap();
        assert_eq!(page.shared().len() as u64, PAGE);
        assert_eq!(page.shared().offset_in_mapping() as u64, (2 << 20) + 3 * PAGE);
    }

    #[test]
    fn a_page_of_a_huge_page_takes_the_address_space_of_all_of_it() {
        let budget = Budget::new(AddressSpace { bytes: 16 << 20, mappings: 1 << 20 });
        let mut files = Files::new(budget);
        let huge = file(MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB, 64 << 20);
        let held: Vec<_> =
            std::iter::from_fn(|| map(&mut files, &huge, (2 << 20) * 3).ok()).take(100).collect();
        assert_eq!(held.len(), 4, "half of 16 MiB");
        drop(held);
        map(&mut files, &huge, 0).unwrap();
    }

    #[test]
    fn what_was_lost_is_mapped_anew() {
        let mut files = Files::default();
        let memory = file(MemfdFlags::empty(), 1000 * PAGE);
        let mut pages: Vec<_> =
            (0..SINGLE as u64 + 2).map(|n| map(&mut files, &memory, n * PAGE).unwrap()).collect();
        let last = pages.last().unwrap().shared().clone();
        ftruncate(&memory, 0).unwrap();
        assert_eq!(last.read::<u64>(0), Some(0));
        assert!(last.mapping().is_poisoned());
        ftruncate(&memory, 1000 * PAGE).unwrap();
        pages.push(map(&mut files, &memory, 300 * PAGE).unwrap());
        assert!(!pages.last().unwrap().shared().mapping().is_poisoned());
    }

    #[test]
    fn what_can_not_be_mapped_is_said() {
        let mut files = Files::default();
        let memory = file(MemfdFlags::empty(), PAGE);
        for offset in [1, u64::MAX - PAGE + 1] {
            let error = map(&mut files, &memory, offset).err().unwrap();
            assert_eq!(error.errno(), Errno::INVAL, "{error}");
        }
        let event = shadowbell_memory::EventFd::new().unwrap();
        assert!(files.map(&event.into(), 0, PAGE, Protection::Read).is_err());
    }
}
