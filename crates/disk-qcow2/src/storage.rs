//! The image's file as storage of `imago`.
//!
//! `imago` has its own file storage. This storage uses only system calls that the server process
//! also needs for other disks, so the sandbox need not allow further ones. The alignment of direct
//! I/O is known since the image was opened, so no write is needed to probe it. No file is opened by
//! name.

use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::drivers::CommonStorageHelper;
use parking_lot::RwLock;
use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::{ReadWriteFlags, retry_on_intr};
use shadowbell_disk_file::Alignment;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Maximum number of memory segments per call (`IOV_MAX`).
const MAX_PIECES: usize = 1024;

/// Open regular file or block device.
#[derive(Debug)]
pub(crate) struct FileStorage {
    file: File,
    alignment: Alignment,
    /// Allocation unit of the file system in bytes. A smaller hole frees nothing.
    unit: usize,
    /// Length of the file. No other process changes it.
    len: AtomicU64,
    /// Held shared by writes, and exclusively while the length is set. Otherwise setting the length
    /// could cut off a concurrent write.
    growth: RwLock<()>,
    /// True if the file does not support holes.
    no_holes: AtomicBool,
    helper: CommonStorageHelper,
}

impl FileStorage {
    /// Creates the storage for `file`. `direct` is the alignment of direct I/O, if the page cache
    /// is bypassed.
    pub(crate) fn new(file: File, direct: Option<Alignment>) -> io::Result<Self> {
        let len = rustix::fs::seek(&file, SeekFrom::End(0))?;
        let unit = retry_on_intr(|| rustix::fs::fstatfs(&file)).ok();
        let unit = unit.and_then(|about| usize::try_from(about.f_frsize).ok());
        Ok(Self {
            file,
            alignment: direct.unwrap_or(Alignment { memory: 1, offset: 1 }),
            unit: unit.filter(|unit| unit.is_power_of_two()).unwrap_or(4096),
            len: AtomicU64::new(len),
            growth: RwLock::new(()),
            no_holes: AtomicBool::new(false),
            helper: CommonStorageHelper::default(),
        })
    }

    pub(crate) fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// Preferred alignment of zeroes and holes in bytes.
    pub(crate) fn unit(&self) -> usize {
        self.unit.max(self.alignment.offset)
    }

    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    pub(crate) fn helper(&self) -> &CommonStorageHelper {
        &self.helper
    }

    /// Fills `into`. Bytes beyond the end of the file are zeroes.
    pub(crate) fn read(&self, into: IoVectorMut<'_>, mut offset: u64) -> io::Result<()> {
        let mut pieces = into.into_inner();
        let mut left = pieces.as_mut_slice();
        while !left.is_empty() {
            let at = place(offset)?;
            let (now, _) = left.split_at_mut(left.len().min(MAX_PIECES));
            let read = retry_on_intr(|| {
                rustix::io::preadv2(&self.file, &mut *now, at, ReadWriteFlags::empty())
            })?;
            IoSliceMut::advance_slices(&mut left, read);
            offset = offset.saturating_add(read as u64);
            // A direct read that ends within an alignment unit has reached the end of the file. It
            // cannot continue at that offset.
            if read == 0 || !offset.is_multiple_of(self.alignment.offset as u64) {
                left.iter_mut().for_each(|piece| piece.fill(0));
                break;
            }
        }
        Ok(())
    }

    /// Writes all of `from`, and extends the file if necessary.
    pub(crate) fn write(&self, from: IoVector<'_>, mut offset: u64) -> io::Result<()> {
        let mut pieces = from.into_inner();
        let mut left = pieces.as_mut_slice();
        while !left.is_empty() {
            let at = place(offset)?;
            let (now, _) = left.split_at(left.len().min(MAX_PIECES));
            let _shared = self.growth.read();
            let written = retry_on_intr(|| {
                rustix::io::pwritev2(&self.file, now, at, ReadWriteFlags::empty())
            })?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            IoSlice::advance_slices(&mut left, written);
            offset = offset.saturating_add(written as u64);
            self.len.fetch_max(offset, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Zeroes a range without allocating it. If the range exceeds the file, the file is extended.
    pub(crate) fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        let end = place(offset.saturating_add(len))?;
        self.punch(offset, len)?;
        let _alone = self.growth.write();
        if end > self.len() {
            self.file.set_len(end)?;
            self.len.store(end, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Allocates and zeroes a range.
    pub(crate) fn allocate_zeroes(&self, offset: u64, len: u64) -> io::Result<()> {
        let end = place(offset.saturating_add(len))?;
        let _shared = self.growth.read();
        self.allocate(FallocateFlags::ZERO_RANGE, offset, len)?;
        self.len.fetch_max(end, Ordering::Relaxed);
        Ok(())
    }

    /// Punches a hole within the file. The hole reads as zeroes. The error has the kind
    /// `Unsupported` if the file does not support holes.
    pub(crate) fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        if offset >= self.len() {
            return Ok(());
        }
        if self.no_holes.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let outcome = self.allocate(flags, offset, len);
        if outcome.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::Unsupported) {
            self.no_holes.store(true, Ordering::Relaxed);
        }
        outcome
    }

    /// Makes all completed writes durable, including the file's metadata that are needed to read
    /// them.
    pub(crate) fn sync(&self) -> io::Result<()> {
        Ok(retry_on_intr(|| rustix::fs::fdatasync(&self.file))?)
    }

    pub(crate) fn set_len(&self, len: u64) -> io::Result<()> {
        let _alone = self.growth.write();
        self.file.set_len(place(len)?)?;
        self.len.store(len, Ordering::Relaxed);
        Ok(())
    }

    fn allocate(&self, flags: FallocateFlags, offset: u64, len: u64) -> io::Result<()> {
        retry_on_intr(|| rustix::fs::fallocate(&self.file, flags, offset, len)).map_err(|errno| {
            let error = io::Error::from(errno);
            match errno.raw_os_error() {
                libc::ENODEV | libc::ENXIO | libc::ENOTTY => {
                    io::Error::new(io::ErrorKind::Unsupported, error)
                }
                _ => error,
            }
        })
    }
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
    use imago::io_buffers::IoBuffer;
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

    fn buffer(bytes: &[u8]) -> IoBuffer {
        let mut buffer = IoBuffer::new(bytes.len(), 4096).unwrap();
        buffer.as_mut().into_slice().copy_from_slice(bytes);
        buffer
    }

    fn read(storage: &FileStorage, offset: u64, len: usize) -> Vec<u8> {
        let mut buffer = buffer(&vec![0xee; len]);
        storage.read((&mut buffer).into(), offset).unwrap();
        buffer.as_ref().into_slice().to_vec()
    }

    #[test]
    fn reads_beyond_the_end_return_zeroes() {
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
    fn many_pieces_are_read_and_written_in_their_order() {
        let content: Vec<u8> = (0..3000_u32).map(|n| (n % 251) as u8).collect();
        let file = tempfile::tempfile().unwrap();
        let storage = FileStorage::new(file.try_clone().unwrap(), None).unwrap();
        let mut from = IoVector::new();
        content.chunks(1).for_each(|piece| from.push(piece));
        storage.write(from, 7).unwrap();
        assert_eq!((storage.len(), file.metadata().unwrap().len()), (3007, 3007));
        let mut read = vec![0xee; 3100];
        let mut into = IoVectorMut::new();
        read.chunks_mut(1).for_each(|piece| into.push(piece));
        storage.read(into, 0).unwrap();
        assert_eq!(read, [&[0; 7], &content[..], &[0; 93]].concat());
    }

    #[test]
    fn writes_zeroes_and_lengths_make_the_file_longer() {
        each(&[1; 8192], |storage, file| {
            let len = || file.metadata().unwrap().len();
            storage.write((&buffer(&[2; 4096])).into(), 16384).unwrap();
            assert_eq!((storage.len(), len()), (20480, 20480));
            // Ranges that cross the end of the file, and a range beyond it.
            storage.zero(16384, 8192).unwrap();
            assert_eq!((storage.len(), len()), (24576, 24576));
            storage.zero(32768, 4096).unwrap();
            assert_eq!((storage.len(), len()), (36864, 36864));
            // A range inside the file does not change the length of the file.
            storage.zero(0, 4096).unwrap();
            assert_eq!((storage.len(), len()), (36864, 36864));
            let all = read(storage, 0, 36864);
            assert!(all[..4096].iter().chain(&all[8192..]).all(|byte| *byte == 0));
            assert_eq!(all[4096..8192], [1; 4096]);
            storage.set_len(4096).unwrap();
            assert_eq!((storage.len(), len()), (4096, 4096));
            storage.set_len(12288).unwrap();
            assert_eq!(read(storage, 4096, 8192), [0; 8192]);
        });
    }

    #[test]
    fn a_hole_frees_space_and_keeps_the_length() {
        each(&vec![1; 1 << 20], |storage, file| {
            let before = file.metadata().unwrap();
            storage.punch(0, 512 << 10).unwrap();
            // Ranges at the end of the file.
            storage.punch((1 << 20) - 4096, 8192).unwrap();
            storage.punch(1 << 20, 4096).unwrap();
            storage.sync().unwrap();
            let after = file.metadata().unwrap();
            assert_eq!((after.len(), storage.len()), (1 << 20, 1 << 20));
            assert!(after.blocks() < before.blocks(), "{} {}", after.blocks(), before.blocks());
            assert_eq!(read(storage, 508 << 10, 8192), [[0; 4096], [1; 4096]].concat());
        });
    }

    #[test]
    fn zeroes_that_are_allocated_are_that() {
        each(&[1; 8192], |storage, file| match storage.allocate_zeroes(4096, 1 << 20) {
            Ok(()) => {
                let about = file.metadata().unwrap();
                assert_eq!((about.len(), storage.len()), (4096 + (1 << 20), 4096 + (1 << 20)));
                assert!(about.blocks() * 512 >= 1 << 20, "{}", about.blocks());
                assert_eq!(read(storage, 0, 8192), [[1; 4096], [0; 4096]].concat());
            }
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::Unsupported),
        });
    }

    #[test]
    fn files_without_holes_return_unsupported() {
        let device = |path: &str| File::options().read(true).write(true).open(path).unwrap();
        let storage = FileStorage::new(device("/dev/null"), None).unwrap();
        storage.write((&buffer(&[0; 4096])).into(), 0).unwrap();
        for _ in 0..2 {
            let error = storage.punch(0, 4096).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::Unsupported);
        }
        // A pipe has no seek position, so it cannot be an image.
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert!(FileStorage::new(File::from(reader), None).is_err());
    }

    #[test]
    fn storage_errors_are_those_of_the_system() {
        let full = File::options().read(true).write(true).open("/dev/full").unwrap();
        let storage = FileStorage::new(full, None).unwrap();
        let error = storage.write((&buffer(&[0; 512])).into(), 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
        assert_eq!(storage.len(), 0);
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8192).unwrap();
        let storage = FileStorage::new(File::open(file.path()).unwrap(), None).unwrap();
        let refused = [
            storage.write((&buffer(&[0; 512])).into(), 0),
            storage.punch(0, 4096),
            storage.zero(0, 4096),
            storage.allocate_zeroes(0, 4096),
        ];
        for outcome in refused {
            assert_eq!(outcome.unwrap_err().raw_os_error(), Some(libc::EBADF));
        }
        assert!(storage.set_len(0).is_err());
        assert_eq!((storage.len(), file.as_file().metadata().unwrap().len()), (8192, 8192));
    }

    #[test]
    fn offsets_that_are_none_are_refused() {
        let storage = FileStorage::new(tempfile::tempfile().unwrap(), None).unwrap();
        for offset in [u64::MAX, 1 << 63] {
            let mut into = buffer(&[0; 512]);
            assert!(storage.read((&mut into).into(), offset).is_err());
            assert!(storage.write((&into).into(), offset).is_err());
            assert!(storage.zero(offset, 512).is_err());
            assert!(storage.allocate_zeroes(offset, 512).is_err());
        }
        assert_eq!(storage.len(), 0);
    }
}
