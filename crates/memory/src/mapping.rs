//! Owned `mmap` of a file, of a memfd, or of anonymous memory.

use crate::eventfd_signal::PeerDescriptor;
use crate::sigbus;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, io, ptr};

/// Number of bytes that are unmapped, or whose page tables are freed, in one step. Other threads
/// that change the address space wait until the step ends.
const STEP: usize = 64 << 20;
/// Largest step. While steps are quicker than `QUICK_STEP`, as in memory that was hardly touched,
/// each step is twice as large as the one before.
const MAX_STEP: usize = 1 << 30;
const QUICK_STEP: Duration = Duration::from_micros(100);
/// Bytes per step for page tables that are already empty.
const EMPTY_STEP: usize = 4 << 30;

/// Page size of [`Mapping::shared_huge`] in bytes.
pub const HUGE_PAGE: u64 = 2 << 20;

/// Access that a mapping allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protection {
    /// Reads only: a write is refused before it reaches the memory.
    Read,
    /// Reads and writes.
    ReadWrite,
}

/// Reason for which memory could not be mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// A length of 0, a length that exceeds the address space, or an offset that is not a
    /// multiple of the page size.
    #[error("{len:#x} bytes at offset {offset:#x} cannot be mapped: {why}")]
    Shape {
        /// Requested length in bytes.
        len: u64,
        /// Offset into the file in bytes.
        offset: u64,
        /// Violated requirement.
        why: &'static str,
    },
    /// A system call failed.
    #[error("mapping {len:#x} bytes failed: {source}")]
    System {
        /// Requested length in bytes.
        len: u64,
        /// Error of the system call.
        source: io::Error,
    },
}

/// Range of this process's address space that stays mapped as long as the value lives.
///
/// The memory may be shared (by file descriptor) with a peer that can change it at any time. So no
/// `&[u8]` points into it, and all access is by [`SharedBytes`](crate::SharedBytes).
pub struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
    protection: Protection,
    fd_offset: u64,
    /// Resources of the mapping; `None` only during the drop.
    region: Option<Region>,
    end: Option<Box<dyn DeferredRelease>>,
}

/// Resources that are released at the end of a mapping.
struct Region {
    guard: Option<sigbus::Guard>,
    ptr: NonNull<u8>,
    /// Bytes of address space: whole pages of the file.
    reserved: usize,
    /// Page size in bytes.
    page: usize,
    fd: Option<File>,
}

/// Descriptor of a mapping.
enum File {
    Own(OwnedFd),
    Peer(PeerDescriptor),
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Own(fd) => fd.as_fd(),
            Self::Peer(fd) => fd.as_fd(),
        }
    }
}

/// Deferred release of a peer's memory.
///
/// The last release of a file frees its pages. The peer determines their number and location, so a
/// release can take long.
pub trait DeferredRelease: Send + Sync {
    /// Drops `object` later, on a thread that no other thread waits for.
    fn drop_later(self: Box<Self>, object: Box<dyn Send>);
}

// SAFETY: the mapping is plain memory without thread affinity. All access is by `SharedBytes`, by
// raw copies and atomics that tolerate concurrent changes.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`. A `&Mapping` gives no reference into the memory.
unsafe impl Sync for Mapping {}
// SAFETY: a range can be unmapped on any thread.
unsafe impl Send for Region {}

impl Mapping {
    /// Maps `len` bytes of the file `fd` from `offset` (a multiple of the page size), shared with
    /// the other users of the file. The mapping does not hold the descriptor.
    ///
    /// If the file is shorter than the range or is truncated later, an access to the missing part
    /// does not kill the process: see [`sigbus`] and [`Mapping::is_poisoned`].
    ///
    /// # Errors
    /// [`MapError`] for an invalid offset or length, or if the system call fails.
    pub fn from_fd(
        fd: impl AsFd,
        offset: u64,
        len: u64,
        protection: Protection,
    ) -> Result<Arc<Self>, MapError> {
        let size = shape(offset, len)?;
        let page = page_size_of(&fd);
        let prot = match protection {
            Protection::Read => ProtFlags::READ,
            Protection::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: the kernel chooses an unused range (the hint is null and MAP_FIXED is not set),
        // so no existing memory is affected.
        let ptr = unsafe {
            mmap(ptr::null_mut(), size, prot, MapFlags::SHARED | MapFlags::NORESERVE, fd, offset)
        };
        Self::adopt(ptr, size, protection, None, offset, Some(page))
    }

    /// Maps `len` bytes of the file `fd` from `offset` as [`from_fd`](Self::from_fd) does, and
    /// keeps the descriptor, so that the memory can be passed to another process
    /// ([`fd`](Self::fd)).
    ///
    /// # Errors
    /// As [`from_fd`](Self::from_fd).
    pub fn from_own_fd(
        fd: OwnedFd,
        offset: u64,
        len: u64,
        protection: Protection,
    ) -> Result<Arc<Self>, MapError> {
        let mut mapping = Self::from_fd(&fd, offset, len, protection)?;
        mapping.set_fd(File::Own(fd));
        Ok(mapping)
    }

    /// Maps a peer's descriptor as [`from_own_fd`](Self::from_own_fd) does.
    ///
    /// # Errors
    /// As [`from_fd`](Self::from_fd).
    pub fn from_peer(
        fd: PeerDescriptor,
        offset: u64,
        len: u64,
        protection: Protection,
    ) -> Result<Arc<Self>, MapError> {
        let mut mapping = Self::from_fd(&*fd, offset, len, protection)?;
        mapping.set_fd(File::Peer(fd));
        Ok(mapping)
    }

    fn set_fd(self: &mut Arc<Self>, fd: File) {
        // The mapping was just created, so this is the only reference.
        if let Some(region) = Arc::get_mut(self).and_then(|mapping| mapping.region.as_mut()) {
            region.fd = Some(fd);
        }
    }

    /// Releases the mapping by `end` when the last reference is dropped. Has an effect only while
    /// the caller holds the only reference.
    pub fn release_by(self: &mut Arc<Self>, end: impl DeferredRelease + 'static) {
        if let Some(mapping) = Arc::get_mut(self) {
            mapping.end = Some(Box::new(end));
        }
    }

    /// Creates a memfd of `len` bytes (rounded up to whole pages) and maps it, readable and
    /// writable. The memory can be passed to another process by its descriptor. A holder of the
    /// descriptor can neither shrink nor grow the memory, nor add seals.
    ///
    /// # Errors
    /// [`MapError`] for an invalid length, or if a system call fails.
    pub fn shared(name: &str, len: u64) -> Result<Arc<Self>, MapError> {
        let flags = MapFlags::NORESERVE;
        Self::memfd(name, round_to_page(len)?, MemfdFlags::empty(), FIXED, flags, None)
    }

    /// Creates memory like [`shared`](Self::shared) whose file can be grown by each holder of its
    /// descriptor. Never pass it to a peer, which could fill the system's memory through it.
    ///
    /// # Errors
    /// As [`shared`](Self::shared).
    pub fn growable(name: &str, len: u64) -> Result<Arc<Self>, MapError> {
        let flags = MapFlags::NORESERVE;
        Self::memfd(name, round_to_page(len)?, MemfdFlags::empty(), SealFlags::SHRINK, flags, None)
    }

    /// Creates a memfd of `len` bytes (rounded up) in pages of [`HUGE_PAGE`] bytes and maps it.
    ///
    /// The administrator has to reserve huge pages (`vm.nr_hugepages`). Huge pages need fewer
    /// entries in the tables of an IOMMU and of the processors. All pages are reserved by this
    /// call. A later access can fail only if a holder of the descriptor has punched a hole and no
    /// huge page is left for it. (No seal prevents holes and leaves the memory writable.) Therefore
    /// the memory is guarded like a peer's memory: see [`is_poisoned`](Self::is_poisoned).
    ///
    /// # Errors
    /// As [`shared`](Self::shared), and if too few huge pages are available.
    pub fn shared_huge(name: &str, len: u64) -> Result<Arc<Self>, MapError> {
        let rounded = len.checked_next_multiple_of(HUGE_PAGE);
        let len = rounded.filter(|len| *len != 0).ok_or(MapError::Shape {
            len,
            offset: 0,
            why: "the length is 0 or does not fit the address space",
        })?;
        let kind = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        Self::memfd(name, len, kind, FIXED, MapFlags::empty(), Some(HUGE_PAGE as usize))
    }

    fn memfd(
        name: &str,
        len: u64,
        kind: MemfdFlags,
        seals: SealFlags,
        flags: MapFlags,
        guarded: Option<usize>,
    ) -> Result<Arc<Self>, MapError> {
        let size = shape(0, len)?;
        let failed = |source: rustix::io::Errno| MapError::System { len, source: source.into() };
        let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | kind)
            .map_err(failed)?;
        ftruncate(&fd, len).map_err(failed)?;
        // No holder of the descriptor can truncate the memory that is mapped here.
        fcntl_add_seals(&fd, seals).map_err(failed)?;
        // SAFETY: the kernel chooses an unused range, so no existing memory is affected.
        let ptr = unsafe {
            mmap(
                ptr::null_mut(),
                size,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | flags,
                &fd,
                0,
            )
        };
        Self::adopt(ptr, size, Protection::ReadWrite, Some(fd), 0, guarded)
    }

    /// Maps `len` bytes (rounded up to whole pages) of private zeroed memory, which the system
    /// allocates when it is touched.
    ///
    /// # Errors
    /// [`MapError`] for an invalid length, or if the system call fails.
    pub fn anonymous(len: u64) -> Result<Arc<Self>, MapError> {
        let size = shape(0, round_to_page(len)?)?;
        // SAFETY: the kernel chooses an unused range, so no existing memory is affected.
        let ptr = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                size,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        Self::adopt(ptr, size, Protection::ReadWrite, None, 0, None)
    }

    /// Takes ownership of a mapped range. If a peer can remove pages of the memory, `peers` is the
    /// page size, and the memory is guarded against SIGBUS. Otherwise it is `None`.
    fn adopt(
        ptr: rustix::io::Result<*mut core::ffi::c_void>,
        len: usize,
        protection: Protection,
        fd: Option<OwnedFd>,
        fd_offset: u64,
        peers: Option<usize>,
    ) -> Result<Arc<Self>, MapError> {
        let system = |source: io::Error| MapError::System { len: len as u64, source };
        let ptr = ptr.map_err(|e| system(e.into()))?;
        let ptr = NonNull::new(ptr.cast::<u8>())
            .ok_or_else(|| system(io::Error::other("mapped at address 0")))?;
        let reserved = len.next_multiple_of(peers.unwrap_or(1));
        let page = peers.unwrap_or_else(page_size);
        let mut region = Region { guard: None, ptr, reserved, page, fd: fd.map(File::Own) };
        if let Some(page) = peers {
            let guard = sigbus::guard(ptr.as_ptr() as usize, len, page);
            region.guard = Some(guard.map_err(system)?);
        }
        Ok(Arc::new(Self { ptr, len, protection, fd_offset, region: Some(region), end: None }))
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes of address space that the mapping occupies. A mapping consists of whole pages of its
    /// file, possibly huge pages.
    #[must_use]
    pub fn reserved(&self) -> usize {
        self.region.as_ref().map_or(0, |region| region.reserved)
    }

    /// Always false: a mapping has at least one page. Complements [`len`](Self::len).
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True if the byte at `address` of this process belongs to the mapping.
    #[must_use]
    pub fn holds(&self, address: usize) -> bool {
        address.checked_sub(self.ptr.as_ptr() as usize).is_some_and(|offset| offset < self.len)
    }

    /// Access that the mapping allows.
    #[must_use]
    pub fn protection(&self) -> Protection {
        self.protection
    }

    /// Descriptor of the memory, to be passed to a peer, if the mapping keeps one
    /// ([`Mapping::shared`], [`Mapping::from_own_fd`]).
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.region.as_ref()?.fd.as_ref().map(AsFd::as_fd)
    }

    /// Offset in the file at which the mapping starts, in bytes.
    #[must_use]
    pub fn fd_offset(&self) -> u64 {
        self.fd_offset
    }

    /// True if a part of the memory was lost because its file was truncated. That part reads as
    /// zeroes.
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.guard().is_some_and(sigbus::Guard::is_poisoned)
    }

    /// Records `peer` as an owner of the memory: see [`sigbus::losses`].
    pub(crate) fn claim(&self, peer: u32) {
        if let Some(guard) = self.guard() {
            guard.claim(peer);
        }
    }

    fn guard(&self) -> Option<&sigbus::Guard> {
        self.region.as_ref()?.guard.as_ref()
    }

    /// Address of the first byte in this process. A driver over `vfio` or an in-process transport
    /// may use it as the IOVA.
    #[must_use]
    pub fn address(&self) -> usize {
        self.ptr.as_ptr() as usize
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Requests transparent huge pages for the mapping, for large memory with scattered accesses.
    ///
    /// In a virtual machine, an address translation walks two nested page tables, and an access to
    /// a new small page has to wait for that walk. The disadvantage of huge pages is that memory is
    /// allocated and freed in larger pieces than requested.
    pub fn prefer_huge_pages(&self) {
        // SAFETY: the range is this mapping, and the advice does not change its content.
        let advised = unsafe {
            rustix::mm::madvise(
                self.ptr.as_ptr().cast(),
                self.len,
                rustix::mm::Advice::LinuxHugepage,
            )
        };
        // An error is ignored: a kernel without transparent huge pages uses small pages.
        let _ = advised;
    }

    /// Frees the page tables of a shared file. The memory keeps its content. A thread that accesses
    /// the memory meanwhile waits for a short time.
    pub(crate) fn drop_page_tables(&self) {
        let Some(region) = &self.region else { return };
        // Huge pages need few page tables. In poisoned memory, lost pages were replaced by zeroes,
        // so the range is no longer one mapping of the file.
        if region.guard.is_none() || self.is_poisoned() || region.page != page_size() {
            return;
        }
        region.drop_page_entries();
        for start in (0..region.reserved).step_by(EMPTY_STEP) {
            let len = EMPTY_STEP.min(region.reserved - start);
            // SAFETY: the range lies inside this mapping of a shared file. The first call maps
            // the same part of the file a second time at another address. The second call moves
            // the new mapping to the old address atomically: the bytes are the same before and
            // after.
            unsafe {
                let at = self.ptr.as_ptr().add(start).cast::<libc::c_void>();
                let again = libc::mremap(at, 0, len, libc::MREMAP_MAYMOVE);
                if again == libc::MAP_FAILED {
                    return;
                }
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                if libc::mremap(again, len, len, flags, at) == libc::MAP_FAILED {
                    libc::munmap(again, len);
                    return;
                }
            }
        }
    }

    /// Returns the whole pages of a byte range to the system. Afterwards these pages read as
    /// zeroes. Bytes of the range that do not fill a page keep their content.
    pub fn discard(&self, offset: usize, len: usize) -> io::Result<()> {
        let page = page_size();
        let end = offset.saturating_add(len).min(self.len) / page * page;
        let start = match offset.checked_next_multiple_of(page) {
            Some(start) if start < end => start,
            _ => return Ok(()),
        };
        let advice = if self.fd().is_some() {
            rustix::mm::Advice::LinuxRemove
        } else {
            rustix::mm::Advice::LinuxDontNeed
        };
        // SAFETY: [start, end) lies inside this mapping, which has no Rust references into it.
        unsafe { rustix::mm::madvise(self.ptr.as_ptr().add(start).cast(), end - start, advice) }?;
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        crate::reclaim::count_unmapping(self.len);
        if let (Some(end), Some(region)) = (self.end.take(), self.region.take()) {
            end.drop_later(Box::new(region));
        }
    }
}

impl Region {
    /// Drops the page table entries of a shared file in steps.
    fn drop_page_entries(&self) {
        let least = STEP.next_multiple_of(self.page);
        let (mut start, mut piece) = (0, least);
        while start < self.reserved {
            let (len, began) = (piece.min(self.reserved - start), Instant::now());
            // SAFETY: the range lies inside this mapping. The pages belong to the file, so their
            // contents remain in the file.
            let _ = unsafe {
                let at = self.ptr.as_ptr().add(start).cast();
                rustix::mm::madvise(at, len, rustix::mm::Advice::LinuxDontNeed)
            };
            start += len;
            let is_quick = began.elapsed() < QUICK_STEP;
            piece = if is_quick { (2 * piece).min(MAX_STEP.max(least)) } else { least };
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // If a large range were unmapped in one step, other changes of the address space would wait
        // for it.
        if self.guard.is_some() && self.reserved > STEP {
            self.drop_page_entries();
        }
        // The range must leave the SIGBUS registry before another mapping can use its address.
        self.guard = None;
        // SAFETY: this object mapped the range, and every `SharedBytes` into it held an `Arc` of
        // its mapping, so no access is possible any more.
        let _ = unsafe { munmap(self.ptr.as_ptr().cast(), self.reserved) };
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping")
            .field("len", &self.len)
            .field("protection", &self.protection)
            .finish_non_exhaustive()
    }
}

/// Page size of this machine in bytes.
pub(crate) fn page_size() -> usize {
    rustix::param::page_size()
}

/// Page size in which a file is mapped, in bytes.
///
/// `fstatfs` is called only for files that support seals: those are memory of the kernel. The file
/// system of a peer could block that call.
fn page_size_of(fd: impl AsFd) -> usize {
    /// `HUGETLBFS_MAGIC`.
    const HUGETLBFS: u64 = 0x9584_58f6;
    if rustix::fs::fcntl_get_seals(&fd).is_err() {
        return page_size();
    }
    match rustix::fs::fstatfs(&fd) {
        Ok(found) if found.f_type as u64 & 0xffff_ffff == HUGETLBFS => {
            usize::try_from(found.f_bsize).ok().filter(|size| size.is_power_of_two())
        }
        _ => None,
    }
    .unwrap_or_else(page_size)
}

fn round_to_page(len: u64) -> Result<u64, MapError> {
    len.checked_next_multiple_of(page_size() as u64).ok_or(MapError::Shape {
        len,
        offset: 0,
        why: "the length does not fit the address space",
    })
}

/// Seals of memory that is passed to peers. The size is fixed, and no holder can add seals, for
/// example against writes.
const FIXED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

fn shape(offset: u64, len: u64) -> Result<usize, MapError> {
    let bad = |why| MapError::Shape { len, offset, why };
    if len == 0 {
        return Err(bad("the length is 0"));
    }
    if !offset.is_multiple_of(page_size() as u64) {
        return Err(bad("the offset is no multiple of the page size"));
    }
    if offset.checked_add(len).is_none() {
        return Err(bad("offset and length overflow"));
    }
    usize::try_from(len)
        .ok()
        .filter(|l| *l <= isize::MAX as usize)
        .ok_or(bad("the length does not fit the address space"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memfd_is_shared_by_its_mappings() {
        let ours = Mapping::shared("test", 8192).unwrap();
        let theirs =
            Mapping::from_fd(ours.fd().unwrap(), 4096, 4096, Protection::ReadWrite).unwrap();
        theirs.bytes().write_from(8, b"hello").unwrap();
        let mut seen = [0; 5];
        ours.bytes().read_into(4104, &mut seen).unwrap();
        assert_eq!(&seen, b"hello");
    }

    #[test]
    fn a_peer_cannot_change_the_size_or_the_seals() {
        use rustix::io::Errno;
        let mapping = Mapping::shared("test", 8192).unwrap();
        let fd = mapping.fd().unwrap();
        for len in [0, 4096, 12288, 2 << 30] {
            assert_eq!(ftruncate(fd, len), Err(Errno::PERM), "{len}");
        }
        let past_the_end = rustix::io::pwrite(fd, b"x", 8192);
        assert_eq!(past_the_end, Err(Errno::PERM));
        assert_eq!(fcntl_add_seals(fd, SealFlags::FUTURE_WRITE), Err(Errno::PERM));
        // The memory of a memory disk can grow, because it is never passed to a peer.
        let growable = Mapping::growable("test", 8192).unwrap();
        let fd = growable.fd().unwrap();
        assert_eq!((ftruncate(fd, 4096), ftruncate(fd, 12288)), (Err(Errno::PERM), Ok(())));
    }

    #[test]
    fn bad_shapes_are_refused_with_the_reason() {
        let fd = memfd_create("x", MemfdFlags::CLOEXEC).unwrap();
        for (offset, len, word) in [
            (0, 0, "length is 0"),
            (1, 4096, "no multiple"),
            (0, u64::MAX, "address space"),
            (u64::MAX - 4095, 8192, "overflow"),
        ] {
            let error = Mapping::from_fd(&fd, offset, len, Protection::Read).unwrap_err();
            assert!(error.to_string().contains(word), "{error}");
        }
        assert!(Mapping::anonymous(0).is_err());
        assert!(Mapping::anonymous(u64::MAX).is_err());
    }

    #[test]
    fn huge_pages_come_whole_or_not_at_all() {
        for len in [0, u64::MAX] {
            assert!(Mapping::shared_huge("none", len).is_err());
        }
        // More huge pages than any machine has reserved are refused by this call, not on access.
        assert!(Mapping::shared_huge("all", 1 << 46).is_err());
        // One huge page may or may not be available on the machine.
        if let Ok(mapping) = Mapping::shared_huge("one", 5) {
            assert_eq!(mapping.len() as u64, HUGE_PAGE);
            mapping.bytes().fill(0, mapping.len(), 7).unwrap();
        }
    }

    #[test]
    fn discarded_pages_read_as_zeroes_and_others_keep_their_bytes() {
        for mapping in [Mapping::anonymous(16384).unwrap(), Mapping::shared("d", 16384).unwrap()] {
            mapping.bytes().fill(0, 16384, 7).unwrap();
            mapping.discard(100, 9000).unwrap(); // whole pages inside: only [4096, 8192)
            let mut all = vec![0; 16384];
            mapping.bytes().read_into(0, &mut all).unwrap();
            assert!(all[..4096].iter().all(|b| *b == 7));
            assert!(all[4096..8192].iter().all(|b| *b == 0));
            assert!(all[8192..].iter().all(|b| *b == 7));
            mapping.discard(usize::MAX - 1, 4096).unwrap();
        }
    }
}
