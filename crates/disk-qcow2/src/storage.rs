//! File of an image, and buffers that are aligned for direct I/O.
//!
//! This module uses only system calls that other disks use too, so the sandbox need not allow
//! further ones. It opens no file by name.

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::{ReadWriteFlags, retry_on_intr};
use shadowbell_disk_file::Alignment;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

/// Alignment of buffers. It is sufficient for direct I/O on any device.
pub(crate) const ALIGNMENT: usize = 4096;
/// Unit of table writes in bytes: their offsets and lengths are multiples of it.
pub(crate) const SECTOR: u64 = 512;
/// Number of consecutive checks that must find the file too short before it counts as truncated.
const LOOKS: usize = 3;
/// Number of zero bytes per write, if the file does not support holes.
const ZEROES: u64 = 256 << 10;

/// Buffer whose first byte is aligned to [`ALIGNMENT`].
pub(crate) struct IoBuffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl IoBuffer {
    /// Returns a buffer of zeroes.
    pub(crate) fn new(len: usize) -> Self {
        let bytes = vec![0; len + ALIGNMENT];
        let start = bytes.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Self { bytes, start, len }
    }
}

impl Deref for IoBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl DerefMut for IoBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// Durability of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// The write has reached the page cache or, with direct I/O, the device.
    Cache,
    /// The write is durable.
    Storage,
}

/// Open regular file or block device.
#[derive(Debug)]
pub(crate) struct FileStorage {
    file: File,
    /// Alignment of direct I/O. `None` with the page cache.
    direct: Option<Alignment>,
    /// True for a regular file, which grows.
    pub(crate) grows: bool,
    /// Length of the file in bytes, as this process has left it. If the file is shorter, another
    /// process has truncated it.
    len: AtomicU64,
    /// Error number of the first sync that has lost data, or 0 if no data were lost.
    lost: AtomicI32,
    /// True if the file does not support holes.
    no_holes: AtomicBool,
    /// Number of reads, for tests.
    #[cfg(test)]
    pub(crate) reads: AtomicU64,
    /// Changes of the file in their order, for tests of crashes.
    #[cfg(test)]
    pub(crate) log: parking_lot::Mutex<Option<Vec<Change>>>,
}

/// Change of a file, or a sync.
#[cfg(test)]
#[derive(Clone, Debug)]
pub(crate) enum Change {
    Write { offset: u64, bytes: Vec<u8>, reach: Reach },
    Len(u64),
    Sync,
}

impl FileStorage {
    /// Creates the storage for `file`. `direct` is the alignment of direct I/O, if the page cache
    /// is bypassed.
    pub(crate) fn new(file: File, direct: Option<Alignment>) -> io::Result<Self> {
        let len = rustix::fs::seek(&file, SeekFrom::End(0))?;
        let grows = file.metadata()?.is_file();
        Ok(Self {
            file,
            direct,
            grows,
            len: AtomicU64::new(len),
            lost: AtomicI32::new(0),
            no_holes: AtomicBool::new(false),
            #[cfg(test)]
            reads: AtomicU64::new(0),
            #[cfg(test)]
            log: parking_lot::Mutex::default(),
        })
    }

    /// Length of the file, or size of the device.
    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    /// Number of bytes that the file occupies in its file system, or `u64::MAX` if that is unknown.
    pub(crate) fn occupied(&self) -> io::Result<u64> {
        use std::os::unix::fs::MetadataExt;
        match self.file.metadata()?.blocks().saturating_mul(512) {
            occupied @ 1.. if self.grows => Ok(occupied),
            _ => Ok(u64::MAX),
        }
    }

    /// Error number of the first sync that has lost data, or 0 if no data were lost.
    pub(crate) fn lost(&self) -> i32 {
        self.lost.load(Ordering::Acquire)
    }

    /// Records a loss of data with its error number, unless an earlier one was recorded.
    pub(crate) fn set_lost(&self, errno: i32) {
        let _ = self.lost.compare_exchange(0, errno, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// True if another process has truncated the file: it is shorter than this process has left it.
    pub(crate) fn is_truncated(&self) -> io::Result<bool> {
        // A difference is checked again, because another thread may be changing the length at this
        // moment. `len` is read first, because that thread updates it before it shortens the file,
        // and after it extends the file.
        for _ in 0..LOOKS {
            let known = self.len();
            if !self.grows || self.file.metadata()?.len() >= known {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// True if direct I/O needs a copy of bytes at this address.
    fn needs_copy(&self, bytes: &[u8]) -> bool {
        self.direct.is_some_and(|direct| !(bytes.as_ptr() as usize).is_multiple_of(direct.memory))
    }

    /// Fills `into`. Bytes beyond the end of the file are zeroes.
    pub(crate) fn read(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let sectors = |n: u64| n.is_multiple_of(SECTOR);
        let is_whole = self.direct.is_none() || sectors(offset) && sectors(into.len() as u64);
        if !is_whole || self.needs_copy(into) {
            let start = offset & !(SECTOR - 1);
            let skip = (offset - start) as usize;
            let mut copy = IoBuffer::new((skip + into.len()).next_multiple_of(SECTOR as usize));
            self.read(&mut copy, start)?;
            into.copy_from_slice(&copy[skip..skip + into.len()]);
            return Ok(());
        }
        #[cfg(test)]
        self.reads.fetch_add(1, Ordering::Relaxed);
        let mut done = 0;
        while done < into.len() {
            let at = place(offset.saturating_add(done as u64))?;
            let read = retry_on_intr(|| {
                let piece = &mut [IoSliceMut::new(&mut into[done..])];
                rustix::io::preadv2(&self.file, piece, at, ReadWriteFlags::empty())
            })?;
            done += read;
            // A direct read that ends at an unaligned offset has reached the end of the file. The
            // rest is zeroes.
            let unit = self.direct.map_or(1, |direct| direct.offset);
            if read == 0 || !(offset as usize).wrapping_add(done).is_multiple_of(unit) {
                into[done..].fill(0);
                break;
            }
        }
        Ok(())
    }

    /// Writes all of `from`, and extends the file if necessary.
    pub(crate) fn write(&self, from: &[u8], offset: u64, reach: Reach) -> io::Result<()> {
        if self.needs_copy(from) {
            let mut copy = IoBuffer::new(from.len());
            copy.copy_from_slice(from);
            return self.write(&copy, offset, reach);
        }
        let flags = match reach {
            Reach::Cache => ReadWriteFlags::empty(),
            Reach::Storage => ReadWriteFlags::DSYNC,
        };
        #[cfg(test)]
        self.note(|| Change::Write { offset, bytes: from.to_vec(), reach });
        let mut done = 0;
        while done < from.len() {
            let at = place(offset.saturating_add(done as u64))?;
            let outcome = retry_on_intr(|| {
                rustix::io::pwritev2(&self.file, &[IoSlice::new(&from[done..])], at, flags)
            });
            match outcome {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => done += written,
                Err(errno) => {
                    let error = io::Error::from(errno);
                    // A durable write also reports an earlier failed write-back of the page cache,
                    // and the kernel reports that only once.
                    if reach == Reach::Storage && !is_full(&error) {
                        self.note_loss(errno.raw_os_error());
                    }
                    return Err(error);
                }
            }
            self.len.fetch_max(at + done as u64, Ordering::AcqRel);
        }
        Ok(())
    }

    /// Replaces `bytes` at any offset. The other bytes of their sectors are read first.
    pub(crate) fn patch(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let start = offset & !(SECTOR - 1);
        let end = (offset + bytes.len() as u64).next_multiple_of(SECTOR);
        let mut sectors = IoBuffer::new((end - start) as usize);
        self.read(&mut sectors, start)?;
        let at = (offset - start) as usize;
        sectors[at..at + bytes.len()].copy_from_slice(bytes);
        self.write(&sectors, start, Reach::Cache)
    }

    /// Zeroes a range, by a hole if the file supports that.
    pub(crate) fn zero(&self, mut offset: u64, len: u64) -> io::Result<()> {
        if !self.no_holes.load(Ordering::Relaxed) {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            match retry_on_intr(|| rustix::fs::fallocate(&self.file, flags, offset, len)) {
                Ok(()) => return Ok(()),
                Err(errno) if is_unsupported(errno) => self.no_holes.store(true, Ordering::Relaxed),
                Err(errno) => return Err(errno.into()),
            }
        }
        let zeroes = IoBuffer::new(ZEROES.min(len) as usize);
        let end = offset + len;
        while offset < end {
            let now = ZEROES.min(end - offset);
            self.write(&zeroes[..now as usize], offset, Reach::Cache)?;
            offset += now;
        }
        Ok(())
    }

    /// Makes all completed writes durable, including the file's length.
    ///
    /// The kernel reports lost data to only one sync. So the loss is recorded, and all later syncs
    /// fail too.
    pub(crate) fn sync(&self) -> io::Result<()> {
        if let Err(errno) = retry_on_intr(|| rustix::fs::fdatasync(&self.file)) {
            self.note_loss(errno.raw_os_error());
            return Err(errno.into());
        }
        #[cfg(test)]
        self.note(|| Change::Sync);
        match self.lost() {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    fn note_loss(&self, errno: i32) {
        if self.direct.is_none() {
            self.set_lost(errno);
        }
    }

    /// Sets the length of a regular file.
    pub(crate) fn set_len(&self, len: u64) -> io::Result<()> {
        #[cfg(test)]
        self.note(|| Change::Len(len));
        if len < self.len() {
            self.len.store(len, Ordering::Release);
        }
        self.file.set_len(place(len)?)?;
        self.len.store(len, Ordering::Release);
        Ok(())
    }

    #[cfg(test)]
    fn note(&self, change: impl FnOnce() -> Change) {
        if let Some(log) = &mut *self.log.lock() {
            log.push(change());
        }
    }
}

/// True if an error means that there is no space left.
pub(crate) fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

fn is_unsupported(errno: rustix::io::Errno) -> bool {
    matches!(errno.raw_os_error(), libc::EOPNOTSUPP | libc::ENODEV | libc::ENXIO | libc::ENOTTY)
}

/// Checks that an offset is valid for the system calls, whose offsets are signed.
fn place(offset: u64) -> io::Result<u64> {
    match i64::try_from(offset) {
        Ok(_) => Ok(offset),
        Err(_) => Err(io::ErrorKind::FileTooLarge.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    /// Runs `test` on a file with this content, and on a second open file of it. Runs it with the
    /// page cache, and also with direct I/O if the file system supports that.
    fn each(content: &[u8], test: impl Fn(&FileStorage, &File)) {
        for direct in [false, true] {
            let file = tempfile::tempfile_in("/var/tmp").unwrap();
            file.write_all_at(content, 0).unwrap();
            let (ours, other) = (file.try_clone().unwrap(), reopened(&file));
            let alignment = Alignment { memory: 4096, offset: 512 };
            if direct {
                let flags = rustix::fs::fcntl_getfl(&file).unwrap() | rustix::fs::OFlags::DIRECT;
                if rustix::fs::fcntl_setfl(&file, flags).is_err() {
                    shadowbell_testing::programs::skipped("no direct I/O here");
                    continue;
                }
            }
            test(&FileStorage::new(ours, direct.then_some(alignment)).unwrap(), &other);
        }
    }

    /// Second open file, which uses the page cache.
    fn reopened(file: &File) -> File {
        use std::os::fd::AsRawFd;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        File::options().read(true).write(true).open(path).unwrap()
    }

    fn read(storage: &FileStorage, offset: u64, len: usize) -> Vec<u8> {
        let mut buffer = vec![0xee; len];
        storage.read(&mut buffer, offset).unwrap();
        buffer
    }

    #[test]
    fn bytes_beyond_the_end_are_zeroes() {
        // The file ends within an alignment unit, where a direct read cannot continue.
        let content: Vec<u8> = (0..1000_u32).map(|n| n as u8 | 1).collect();
        each(&content, |storage, _| {
            let all = read(storage, 0, 8192);
            assert_eq!(all[..1000], content);
            assert!(all[1000..].iter().all(|byte| *byte == 0));
            assert_eq!(read(storage, 512, 512)[..488], content[512..]);
            assert_eq!(read(storage, 1 << 40, 4096), [0; 4096]);
            assert_eq!(storage.len(), 1000);
        });
    }

    #[test]
    fn writes_patches_and_lengths_change_the_file() {
        each(&[1; 8192], |storage, file| {
            let len = || file.metadata().unwrap().len();
            for reach in [Reach::Cache, Reach::Storage] {
                storage.write(&[2; 4096], 16384, reach).unwrap();
                assert_eq!((storage.len(), len()), (20480, 20480));
            }
            storage.patch(&[3; 8], 508).unwrap();
            let held = read(storage, 0, 8192);
            assert_eq!((held[507], &held[508..516], held[516]), (1, &[3; 8][..], 1));
            storage.set_len(4096).unwrap();
            assert_eq!((storage.len(), len()), (4096, 4096));
            storage.set_len(12288).unwrap();
            assert_eq!(read(storage, 4096, 8192), [0; 8192]);
            assert!(!storage.is_truncated().unwrap());
            file.set_len(512).unwrap();
            assert!(storage.is_truncated().unwrap());
        });
    }

    #[test]
    fn a_hole_occupies_no_space_and_keeps_the_length() {
        each(&vec![1; 1 << 20], |storage, file| {
            let before = file.metadata().unwrap();
            storage.zero(0, 512 << 10).unwrap();
            storage.sync().unwrap();
            let after = file.metadata().unwrap();
            assert_eq!((after.len(), storage.len()), (1 << 20, 1 << 20));
            assert!(after.blocks() < before.blocks(), "{} {}", after.blocks(), before.blocks());
            assert_eq!(read(storage, 508 << 10, 8192), [[0; 4096], [1; 4096]].concat());
            // Without holes, zeroes are written.
            storage.no_holes.store(true, Ordering::Relaxed);
            storage.zero(512 << 10, 300 << 10).unwrap();
            assert_eq!(read(storage, 808 << 10, 8192), [[0; 4096], [1; 4096]].concat());
        });
    }

    #[test]
    fn errors_are_those_of_the_system() {
        let full = File::options().read(true).write(true).open("/dev/full").unwrap();
        let storage = FileStorage::new(full, None).unwrap();
        let error = storage.write(&[0; 512], 0, Reach::Cache).unwrap_err();
        assert!(is_full(&error), "{error}");
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8192).unwrap();
        let storage = FileStorage::new(File::open(file.path()).unwrap(), None).unwrap();
        for outcome in [storage.write(&[0; 512], 0, Reach::Cache), storage.zero(0, 4096)] {
            assert_eq!(outcome.unwrap_err().raw_os_error(), Some(libc::EBADF));
        }
        let mut into = [0; 512];
        for offset in [u64::MAX, 1 << 63] {
            assert!(storage.read(&mut into, offset).is_err());
        }
        // A pipe has no seek position, so it cannot be an image.
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert!(FileStorage::new(File::from(reader), None).is_err());
    }
}
