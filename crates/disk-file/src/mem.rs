//! Memory disk.

use crate::extents::report_file_extents;
use crate::regions::Regions;
use serde::{Deserialize, Serialize};
use shadowbell_disk::{
    Bounds, CheckpointError, Disk, DiskError, DiskInfo, Extent, Op, OpenError, Queue, ReportExtent,
    Request, ResizeError, Submitted, compare, format_size,
};
use shadowbell_memory::{FileStatus, Mapping, Protection, Segments, SharedBytes};
use shadowbell_state::{Descriptors, FdRef};
use std::io;
use std::sync::Arc;

/// Disk in memory of this process. The kernel allocates pages at the first write, discards return
/// them, and dropping the disk frees all of them.
///
/// If huge pages are enabled (`/sys/kernel/mm/transparent_hugepage/enabled` is `madvise` or
/// `always`), the disk uses them: the first write to a range of 2 MiB then allocates the whole
/// range, and a random access causes fewer TLB misses.
///
/// Every operation completes inline. Blocks are read and written atomically, even if several
/// threads access the same block at the same time.
#[derive(Clone, Debug)]
pub struct MemDisk {
    info: DiskInfo,
    bytes: SharedBytes,
    regions: Arc<Regions>,
}

/// Serialized memory disk, for another process.
#[derive(Serialize, Deserialize)]
struct SavedMem {
    memory: FdRef,
    len: u64,
    info: DiskInfo,
}

/// Granularity, in bytes, at which memory is returned to the kernel.
const PAGE: usize = 4096;
/// Number of bytes that are returned to the kernel or zeroed in one step. A step takes some tens of
/// microseconds.
const STRIDE: u64 = 1 << 20;

impl MemDisk {
    /// Creates a zeroed disk of `blocks` logical blocks of `block_size` bytes (512 or 4096).
    ///
    /// # Errors
    /// [`OpenError::Memory`] if the system refuses that much address space.
    pub fn new(blocks: u64, block_size: u32) -> Result<Self, OpenError> {
        let info = Self::info_of(blocks, block_size);
        let mapping = Mapping::anonymous(info.bytes())
            .map_err(|source| OpenError::Memory { bytes: info.bytes(), source })?;
        Ok(Self::of(mapping, info, Arc::new(Regions::new())))
    }

    /// Creates a disk like [`new`](Self::new) in a memfd, which survives a crash of this process.
    /// The disk uses huge pages if `/sys/kernel/mm/transparent_hugepage/shmem_enabled` is `advise`
    /// or `always`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn recoverable(blocks: u64, block_size: u32) -> Result<Self, OpenError> {
        let info = Self::info_of(blocks, block_size);
        let mapping = Mapping::growable("shadowbell-disk", info.bytes());
        let mapping =
            mapping.map_err(|source| OpenError::Memory { bytes: info.bytes(), source })?;
        Ok(Self::of(mapping, info, Arc::new(Regions::new())))
    }

    /// Recovers the disk of a dead process from its [checkpoint](Disk::checkpoint).
    pub(crate) fn recover(
        state: &serde_json::Value,
        fds: &mut Descriptors,
        (blocks, block_size, read_only): (u64, u32, bool),
    ) -> Result<Self, String> {
        let saved = SavedMem::deserialize(state).map_err(|error| error.to_string())?;
        let mut info = Self::info_of(blocks, block_size);
        info.read_only = read_only;
        if saved.info != info {
            return Err("its size, block size or write protection has changed".to_owned());
        }
        let fd = fds.take(saved.memory).map_err(|error| error.to_string())?;
        let mapping = Mapping::from_own_fd(fd, 0, saved.len, Protection::ReadWrite);
        let mapping = mapping.map_err(|error| error.to_string())?;
        if mapping.len() as u64 / u64::from(block_size) < blocks {
            return Err("its memory is too short".to_owned());
        }
        Ok(Self::of(mapping, info, Arc::new(Regions::new())))
    }

    fn info_of(blocks: u64, block_size: u32) -> DiskInfo {
        DiskInfo {
            block_size,
            blocks,
            read_only: false,
            volatile_cache: false,
            discard: true,
            granularity: (PAGE as u32 / block_size).max(1),
            metadata: None,
            zoned: None,
        }
    }

    fn of(mapping: Arc<Mapping>, info: DiskInfo, regions: Arc<Regions>) -> Self {
        mapping.prefer_huge_pages();
        // The disk may be shorter than the mapping, which has whole pages.
        let len = usize::try_from(info.bytes()).unwrap_or(usize::MAX).min(mapping.len());
        let bytes = mapping.bytes().slice(0, len).unwrap_or_else(|| mapping.bytes());
        Self { info, bytes, regions }
    }

    /// Sets whether the disk refuses writes.
    #[must_use]
    pub fn with_read_only(mut self, read_only: bool) -> Self {
        self.info.read_only = read_only;
        self
    }

    /// Content of the disk, for direct access by this process.
    #[must_use]
    pub fn bytes(&self) -> &SharedBytes {
        &self.bytes
    }
}

impl Disk for MemDisk {
    fn info(&self) -> DiskInfo {
        self.info.clone()
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(MemQueue::new(self)))
    }

    fn name(&self) -> String {
        format!("mem:{}", format_size(self.info.bytes()))
    }

    fn extents(&self, offset: u64, len: u64, report: &mut ReportExtent<'_>) {
        if len == 0 {
            return;
        }
        match self.bytes.mapping().fd() {
            // Offsets in the memfd equal offsets on the disk.
            Some(fd) => {
                let to = offset.saturating_add(len);
                report_file_extents(fd, (offset, to), self.info.bytes(), report);
            }
            // Anonymous memory reports no holes, because a page that is not present may be swapped
            // out.
            None => {
                report(Extent::data(len));
            }
        }
    }

    fn with_writes(&self, accepted: bool) -> Result<Arc<dyn Disk>, ResizeError> {
        Ok(Arc::new(self.clone().with_read_only(!accepted)))
    }

    fn resized(&self, bytes: Option<u64>) -> Result<Arc<dyn Disk>, ResizeError> {
        let disk = || self.name();
        let bytes = bytes.unwrap_or(self.info.bytes());
        let block_size = self.info.block_size;
        let size = || ResizeError::Size { disk: disk(), bytes, block_size };
        let info = self.info.with_bytes(bytes).ok_or_else(size)?;
        let mapping = self.bytes.mapping();
        if bytes <= mapping.len() as u64 {
            let regions = Arc::clone(&self.regions);
            return Ok(Arc::new(Self::of(Arc::clone(mapping), info, regions)));
        }
        let fd = mapping.fd().ok_or_else(|| ResizeError::Private { disk: disk() })?;
        let system = |source| ResizeError::System { disk: disk(), source };
        // The new disk maps the same memfd, so that the old and the new disk share their bytes. The
        // memfd is never shrunk, because a disk of the larger size may still use it.
        let len_now = FileStatus::of(fd).map_err(|error| system(error.into()))?.len;
        let page = rustix::param::page_size() as u64;
        let len = bytes.checked_next_multiple_of(page).ok_or_else(size)?;
        if len_now < len {
            rustix::fs::ftruncate(fd, len).map_err(|error| system(error.into()))?;
        }
        let own = fd.try_clone_to_owned().map_err(system)?;
        let mapping = Mapping::from_own_fd(own, 0, len, Protection::ReadWrite);
        let mapping = mapping.map_err(|error| system(io::Error::other(error)))?;
        Ok(Arc::new(Self::of(mapping, info, Arc::clone(&self.regions))))
    }

    fn map(&self, len: u64) -> Option<SharedBytes> {
        self.bytes.slice(0, usize::try_from(len).ok()?)
    }

    fn checkpoint(&self, fds: &mut Descriptors) -> Result<serde_json::Value, CheckpointError> {
        // No fence is needed: requests are executed inline, so none outlives the process.
        let mapping = self.bytes.mapping();
        let Some(fd) = mapping.fd() else {
            return Err(CheckpointError::Private { disk: self.name() });
        };
        let system = |source| CheckpointError::System { disk: self.name(), source };
        let memory = fds.add(fd.try_clone_to_owned().map_err(system)?);
        let saved = SavedMem { memory, len: mapping.len() as u64, info: self.info.clone() };
        serde_json::to_value(saved).map_err(|error| system(error.into()))
    }
}

/// Size in bytes from which a disk is assumed to be larger than the CPU's caches. Long writes to a
/// disk of this size bypass the caches, because the data would be evicted before their next use.
/// Long reads are prefetched.
const LARGE: usize = 64 << 20;

/// One thread's queue on a memory disk.
struct MemQueue {
    bounds: Bounds,
    is_large: bool,
    read_only: bool,
    bytes: SharedBytes,
    regions: Arc<Regions>,
}

impl MemQueue {
    fn new(disk: &MemDisk) -> Self {
        let MemDisk { info, bytes, regions } = disk;
        let (is_large, regions) = (bytes.len() >= LARGE, Arc::clone(regions));
        let (bounds, read_only) = (info.bounds(), info.read_only);
        Self { bounds, is_large, read_only, bytes: bytes.clone(), regions }
    }

    #[inline]
    fn run(&self, request: &Request, data: &Segments) -> Result<(), DiskError> {
        request.check(&self.bounds, data)?;
        // The range is inside the disk, which fits the address space, so the casts lose nothing.
        let (at, len) = (request.offset as usize, request.len as usize);
        let (disk, regions, is_large) = (&self.bytes, &*self.regions, self.is_large);
        let missing = DiskError::BadBuffer;
        match request.op {
            Op::Read if is_large => regions.read(at, len, |done, at, len| {
                data.copy_from_large(done, disk, at, len).ok_or(missing)
            }),
            Op::Read => regions
                .read(at, len, |done, at, len| data.copy_from(done, disk, at, len).ok_or(missing)),
            Op::Write { .. } if is_large => regions.write(at, len, |done, at, len| {
                data.copy_to_large(done, disk, at, len).ok_or(missing)
            }),
            Op::Write { .. } => regions
                .write(at, len, |done, at, len| data.copy_to(done, disk, at, len).ok_or(missing)),
            Op::Flush | Op::Verify => Ok(()),
            Op::WriteZeroes { .. } | Op::Discard => self.zero(at, len),
            Op::CompareAndWrite { .. } | Op::Append { .. } | Op::Zone { .. } => {
                Err(DiskError::Unsupported)
            }
            Op::Compare => {
                regions.read(at, len, |done, at, len| compare(data, done, disk, at, len))
            }
        }
    }

    /// Zeroes the range in steps of [`STRIDE`].
    fn zero(&self, at: usize, len: usize) -> Result<(), DiskError> {
        let mut done = 0;
        while done < len {
            let at = at + done;
            let part = (len - done).min(STRIDE as usize);
            self.regions.change(at, part, || self.zero_range(at, part))?;
            done += part;
        }
        Ok(())
    }

    /// Returns the whole pages of the range to the kernel, and zeroes the rest of the range.
    fn zero_range(&self, at: usize, len: usize) -> Result<(), DiskError> {
        let end = at + len;
        let first = at.next_multiple_of(PAGE);
        let last = end / PAGE * PAGE;
        let fill = |from: usize, to: usize| {
            self.bytes.fill(from, to - from, 0).ok_or(DiskError::OutOfRange)
        };
        if first >= last {
            return fill(at, end);
        }
        fill(at, first)?;
        fill(last, end)?;
        // The kernel refuses to take back locked memory (`mlock`). It is zeroed instead.
        if PAGE.is_multiple_of(rustix::param::page_size())
            && self.bytes.mapping().discard(first, last - first).is_ok()
        {
            return Ok(());
        }
        fill(first, last)
    }
}

/// Number of bytes of a request to prefetch: one page. The rest of a longer request is left to the
/// prefetcher of the CPU.
const PREFETCH: usize = PAGE;
/// Number of bytes to prefetch at once. A CPU has a limited number of line-fill buffers. If a whole
/// page was prefetched at once, the CPU would drop the last prefetches, and the copy would stall on
/// the missing lines.
const PREFETCH_STEP: usize = PREFETCH / 2;

impl Queue for MemQueue {
    fn uses_prefetch_hints(&self) -> bool {
        true
    }

    #[inline]
    fn prefetch_hint(&self, op: Op, offset: u64, len: usize, distance: u32) {
        if op != Op::Read && self.is_large && shadowbell_memory::bypasses_caches(len) {
            return;
        }
        // An offset beyond the address space is also beyond the disk. There, prefetching has no
        // effect.
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        // A prefetch for reading is also sufficient for a write: usually no other CPU caches these
        // lines, so they arrive in exclusive state (PREFETCHW is not needed).
        if distance > 1 {
            self.bytes.prefetch_range(offset, len.min(PREFETCH_STEP));
        } else if len > PREFETCH_STEP {
            self.bytes.prefetch_range(
                offset.saturating_add(PREFETCH_STEP),
                len.min(PREFETCH) - PREFETCH_STEP,
            );
        }
    }

    fn longest_inline(&self) -> u64 {
        STRIDE
    }

    fn writes_bytes(&self) -> bool {
        true
    }

    fn write_bytes(&mut self, offset: u64, data: &[u8]) -> Option<Result<(), DiskError>> {
        if self.read_only {
            return Some(Err(DiskError::ReadOnly));
        }
        let out_of_range = DiskError::OutOfRange;
        let Ok(at) = usize::try_from(offset) else { return Some(Err(out_of_range)) };
        if data.is_empty() || at.checked_add(data.len()).is_none_or(|end| end > self.bytes.len()) {
            return Some(Err(out_of_range));
        }
        Some(self.regions.write(at, data.len(), |done, at, len| {
            let part = data.get(done..done + len).ok_or(out_of_range)?;
            self.bytes.write_from(at, part).ok_or(out_of_range)
        }))
    }

    #[inline]
    fn submit(&mut self, _tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        Submitted::Done(self.run(request, data))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn discarded_memory_is_returned_to_the_system() {
        let disk = MemDisk::new(64 * 8, 512).unwrap();
        disk.bytes().fill(0, 64 * PAGE, 1).unwrap();
        let resident = || {
            let address = disk.bytes().address();
            let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let mut lines = smaps.lines().skip_while(|l| {
                let range = l.split(' ').next().and_then(|r| r.split_once('-'));
                range.is_none_or(|(from, to)| {
                    let parse = |s| usize::from_str_radix(s, 16).unwrap_or(0);
                    address < parse(from) || address >= parse(to)
                })
            });
            let rss = lines.find(|l| l.starts_with("Rss:")).unwrap();
            rss.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() / 4
        };
        let before = resident();
        MemQueue::new(&disk).zero(512, 62 * PAGE).unwrap();
        assert_eq!(before - resident(), 61, "the whole pages inside");
        let mut all = vec![9; 64 * PAGE];
        disk.bytes().read_into(0, &mut all).unwrap();
        assert!(all[..512].iter().all(|b| *b == 1));
        assert!(all[512..512 + 62 * PAGE].iter().all(|b| *b == 0));
        assert!(all[512 + 62 * PAGE..].iter().all(|b| *b == 1));
    }

    #[test]
    fn a_disk_that_ends_within_a_page_has_its_exact_size() {
        let disk = MemDisk::new(9, 512).unwrap();
        assert_eq!(disk.info().bytes(), 9 * 512);
        assert_eq!(disk.bytes().len(), 9 * 512);
        let mut data = Segments::from_bytes(&Mapping::anonymous(4096).unwrap().bytes());
        let request = Request { op: Op::Read, offset: 8 * 512, len: 1024 };
        let mut queue = disk.queue().unwrap();
        let done = queue.submit(1, &request, &mut data);
        assert_eq!(done, Submitted::Done(Err(DiskError::OutOfRange)));
    }

    #[test]
    fn requests_of_any_length_work_on_small_and_large_disks() {
        let memory = Mapping::anonymous(1 << 20).unwrap().bytes();
        for bytes in [LARGE - 512, LARGE] {
            let disk = MemDisk::new(bytes as u64 / 512, 512).unwrap();
            let mut queue = disk.queue().unwrap();
            for len in [512, 4096, 8192, 8192 + 512, 128 << 10, (1 << 20) - 8] {
                let len = len / 512 * 512;
                // The buffer of this test is not aligned to a cache line.
                let mut data = Segments::from_bytes(&memory.slice(4, len).unwrap());
                let pattern: Vec<u8> = (0..len).map(|n| (n % 251) as u8).collect();
                data.write_from(0, &pattern).unwrap();
                let offset = (bytes - len) as u64;
                for op in [Op::Write { fua: false }, Op::Read] {
                    let request = Request { op, offset, len: len as u64 };
                    assert_eq!(queue.submit(1, &request, &mut data), Submitted::Done(Ok(())));
                    let mut found = vec![0; len];
                    data.read_into(0, &mut found).unwrap();
                    assert!(found == pattern, "{len} bytes, {op:?}");
                    data.fill(0, len, 0).unwrap();
                }
            }
        }
    }

    #[test]
    fn bytes_are_written_within_the_disk_alone() {
        let disk = MemDisk::new(9, 512).unwrap();
        let mut queue = disk.queue().unwrap();
        assert!(queue.writes_bytes());
        assert_eq!(queue.write_bytes(9 * 512 - 3, &[1, 2, 3]), Some(Ok(())));
        assert_eq!(disk.bytes().read::<u8>(9 * 512 - 4), Some(0));
        assert_eq!(disk.bytes().read::<u8>(9 * 512 - 1), Some(3));
        for offset in [9 * 512 - 2, 9 * 512, u64::MAX - 1, u64::MAX] {
            assert_eq!(queue.write_bytes(offset, &[1, 2, 3]), Some(Err(DiskError::OutOfRange)));
        }
        let mut queue = disk.with_read_only(true).queue().unwrap();
        assert_eq!(queue.write_bytes(0, &[1]), Some(Err(DiskError::ReadOnly)));
    }

    #[test]
    fn another_size_is_on_the_same_bytes() {
        let disk = MemDisk::recoverable(9, 512).unwrap();
        disk.bytes().fill(0, 9 * 512, 7).unwrap();
        let memory = Mapping::anonymous(4096).unwrap().bytes();
        let read = |disk: &dyn Disk, block: u64| {
            let request = Request { op: Op::Read, offset: block * 512, len: 512 };
            let data = &mut Segments::from_bytes(&memory);
            let Submitted::Done(outcome) = disk.queue().unwrap().submit(1, &request, data) else {
                panic!("memory answers at once");
            };
            outcome.map(|()| memory.read::<u8>(511).unwrap())
        };
        let large = disk.resized(Some(100 * 512)).unwrap();
        assert_eq!(large.info(), DiskInfo { blocks: 100, ..disk.info() });
        assert_eq!(read(&*large, 8), Ok(7));
        assert_eq!(read(&*large, 9), Ok(0), "new blocks are zeroes");
        assert_eq!(read(&*large, 99), Ok(0));
        assert_eq!(read(&disk, 9), Err(DiskError::OutOfRange), "this one stays as it is");
        disk.bytes().fill(0, 512, 8).unwrap();
        assert_eq!(read(&*large, 0), Ok(8));
        let small = large.resized(Some(512)).unwrap();
        assert_eq!((read(&*small, 0), read(&*small, 1)), (Ok(8), Err(DiskError::OutOfRange)));
        let again = small.resized(Some(200 * 512)).unwrap();
        assert_eq!((read(&*again, 8), read(&*again, 199)), (Ok(7), Ok(0)));

        let private = MemDisk::new(8, 512).unwrap();
        assert_eq!(private.resized(Some(512)).unwrap().info().blocks, 1);
        assert!(matches!(private.resized(Some(1 << 20)), Err(ResizeError::Private { .. })));
        assert!(matches!(private.resized(Some(100)), Err(ResizeError::Size { .. })));
    }

    #[test]
    fn prefetch_hints_change_no_data() {
        let disk = MemDisk::new(9, 512).unwrap();
        let queue = disk.queue().unwrap();
        assert!(queue.uses_prefetch_hints());
        for offset in [0, 8 * 512, 9 * 512, 1 << 40, u64::MAX] {
            for op in [Op::Read, Op::Write { fua: false }] {
                for len in [512, usize::MAX] {
                    queue.prefetch_hint(op, offset, len, 2);
                    queue.prefetch_hint(op, offset, len, 1);
                }
            }
        }
        let mut all = vec![9; 9 * 512];
        disk.bytes().read_into(0, &mut all).unwrap();
        assert!(all.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_memory_disk_beyond_the_address_space_is_refused() {
        let error = MemDisk::new(1 << 54, 512).unwrap_err();
        assert!(error.to_string().contains("8EiB"), "{error}");
    }
}
