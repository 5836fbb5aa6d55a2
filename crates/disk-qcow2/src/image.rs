//! Open image. `imago` executes the requests. All functions may block on the storage.

use crate::header::Header;
use crate::map::Map;
use crate::open::Opened;
use crate::storage::FileStorage;
use imago::io_buffers::IoBuffer;
use imago::{FormatAccess, Mapping};
use parking_lot::{Mutex, RwLock};
use rustix::fs::SeekFrom;
use shadowbell_disk::{DiskError, DiskInfo, Extent, Op, Request, Tell};
use shadowbell_disk_file::{ImageBytes, ImageFile};
use shadowbell_memory::contain_panic;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

/// Alignment of buffers. It is sufficient for direct I/O on any device.
pub(crate) const ALIGNMENT: usize = 4096;
/// Number of bytes that are compared, verified or zeroed at once.
const PIECE: usize = 256 << 10;
/// Number of bytes that are discarded at once. All other requests wait meanwhile.
const DISCARD_PIECE: u64 = 256 << 20;

/// Open image.
pub(crate) struct Image {
    /// `None` after the image was closed. Discarding or zeroing clusters takes the lock
    /// exclusively, because it invalidates locations that other threads have looked up.
    pub(crate) format: RwLock<Option<FormatAccess<FileStorage>>>,
    pub(crate) header: Header,
    pub(crate) info: DiskInfo,
    file: ImageFile,
    /// Backing files, locked while the image is open.
    pub(crate) below: Vec<ImageFile>,
    pub(crate) is_direct: bool,
    /// True if the content is unreliable. All requests then fail.
    pub(crate) broken: AtomicBool,
    /// Error number of the first sync that has lost data, or 0 if no data were lost.
    lost: AtomicI32,
    /// Maximum length that the file has had.
    longest: AtomicU64,
    /// Offset, plus 1, of the last request that failed for lack of space. 0 if there is none, or if
    /// a later write to that offset has succeeded.
    full: AtomicU64,
    pub(crate) name: String,
    /// True if the image has checkpoints. A write then completes only when its data and tables are
    /// in the file, so that recovery finds them.
    lasts: AtomicBool,
    /// True if tables in memory may differ from the tables in the file. It is set before a change.
    /// It is cleared only while no request changes tables.
    has_changed: AtomicBool,
    /// Callback for the loss of data.
    on_loss: Mutex<Option<Box<dyn Fn() + Send + Sync>>>,
    /// File and map of the fast path.
    pub(crate) bytes: Option<ImageBytes>,
    pub(crate) map: Option<Map>,
    /// True if the fast path may also write.
    pub(crate) is_sound: bool,
    /// Clusters that the fast path may write after their tables were written to the file.
    pub(crate) unsaved: Mutex<Vec<u64>>,
}

impl Image {
    pub(crate) fn new(opened: Opened, info: DiskInfo, name: String) -> Self {
        let Opened { format, header, file, below, is_direct, bytes, is_sound } = opened;
        let longest = AtomicU64::new(rustix::fs::seek(file.file(), SeekFrom::End(0)).unwrap_or(0));
        // Before writes, the fast path queries the file length on the I/O thread. On a remote file
        // that may block, so the fast path does not write there.
        let is_sound = is_sound && !file.is_remote();
        let map = bytes.as_ref().map(|_| Map::new(header.cluster_bits, header.size));
        Self {
            format: RwLock::new(Some(format)),
            header,
            info,
            file,
            below,
            is_direct,
            broken: AtomicBool::new(false),
            lost: AtomicI32::new(0),
            longest,
            full: AtomicU64::new(0),
            name,
            lasts: AtomicBool::new(false),
            has_changed: AtomicBool::new(false),
            on_loss: Mutex::default(),
            bytes,
            map,
            is_sound,
            unsaved: Mutex::default(),
        }
    }

    /// The image's own file and its backing files.
    pub(crate) fn file(&self) -> &ImageFile {
        &self.file
    }

    /// The image and its backing files.
    pub(crate) fn files(&self) -> impl Iterator<Item = &ImageFile> {
        [&self.file].into_iter().chain(&self.below)
    }

    /// Starts checkpoints. From now on, the data and tables of a completed write are in the file.
    pub(crate) fn last(&self) -> Result<(), DiskError> {
        if self.info.read_only || self.lasts.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        // The flag is set here because of all changes before this call.
        self.has_changed.store(true, Ordering::SeqCst);
        self.write_back()
    }

    /// True if a change must not complete before the tables are written.
    pub(crate) fn waits_for_tables(&self) -> bool {
        self.lasts.load(Ordering::SeqCst) && self.has_changed.load(Ordering::SeqCst)
    }

    /// Error number of the first sync that has lost data, or 0 if no data were lost.
    pub(crate) fn lost(&self) -> i32 {
        self.lost.load(Ordering::Acquire)
    }

    /// Sets the error number of a loss that occurred in an earlier process.
    pub(crate) fn set_lost(&self, errno: i32) {
        self.lost.store(errno, Ordering::Release);
    }

    pub(crate) fn on_loss(&self, changed: Box<dyn Fn() + Send + Sync>) {
        *self.on_loss.lock() = Some(changed);
    }

    /// Executes `request`. The caller is responsible for its durability (FUA).
    pub(crate) fn run(
        &self,
        request: &Request,
        buffer: Option<&mut IoBuffer>,
    ) -> Result<(), DiskError> {
        let result = match self.check() {
            Ok(()) => self.contained(|| self.carry_out(request, buffer)),
            Err(error) => Err(error),
        };
        // If the file was truncated, the read may have returned zeroes from beyond its end.
        let result = result.and_then(|()| self.check());
        if result.is_ok() {
            self.fill_map(request);
        }
        self.note_room(request, result);
        result
    }

    /// Reports which bytes are allocated, in the image or in its backing files. If the look-up
    /// fails, the bytes are reported as allocated.
    pub(crate) fn extents(&self, offset: u64, len: u64, tell: &mut Tell<'_>) {
        let (mut at, end) = (offset, offset.saturating_add(len));
        while at < end {
            let mut found = None;
            let outcome = self.check().and_then(|()| {
                self.contained(|| {
                    let format = self.format.read();
                    let mapping = access(&format)?.get_mapping(at, (end - at).min(DISCARD_PIECE));
                    let (mapping, there) = mapping.map_err(|error| error_of(&error))?;
                    found = Some((matches!(mapping, Mapping::Zero { .. }), there));
                    Ok(())
                })
            });
            let found = found.filter(|(_, there)| outcome.is_ok() && *there != 0);
            let (is_zero, there) = found.unwrap_or((false, end - at));
            if !tell(Extent { len: there.min(end - at), allocated: !is_zero }) {
                return;
            }
            at = at.saturating_add(there);
        }
    }

    /// Writes modified tables while no request changes them. Otherwise a request could count a
    /// cluster after the counts were written, and refer to it in a table that is written
    /// afterwards. After a crash, that cluster would be in use but counted as free.
    pub(crate) fn write_back(&self) -> Result<(), DiskError> {
        self.check()?;
        self.contained(|| {
            let format = self.format.write();
            let Some(format) = &*format else { return Err(DiskError::Io(libc::EIO)) };
            let has_changed = self.has_changed.swap(false, Ordering::SeqCst);
            format.flush().map_err(|error| {
                self.has_changed.fetch_or(has_changed, Ordering::SeqCst);
                error_of(&error)
            })?;
            self.tables_are_saved();
            Ok(())
        })
    }

    /// Makes all completed writes durable. Calls are serialized, because the kernel reports lost
    /// data to only one sync.
    pub(crate) fn sync(&self) -> Result<(), DiskError> {
        let result = self.write_back();
        self.note_room(&Request { op: Op::Flush, offset: 0, len: 0 }, result);
        result?;
        let outcome = rustix::io::retry_on_intr(|| rustix::fs::fdatasync(self.file.file()));
        if let Err(errno) = outcome {
            let errno = errno.raw_os_error();
            if !self.is_direct && self.lost.swap(errno, Ordering::Release) == 0 {
                tracing::error!(
                    "{}: write-back of the page cache has failed (error {errno}); data that the \
                     guest has written may be lost",
                    self.name
                );
                if let Some(changed) = &*self.on_loss.lock() {
                    changed();
                }
            }
            return Err(error_of(&io::Error::from_raw_os_error(errno)));
        }
        match self.lost.load(Ordering::Acquire) {
            0 => Ok(()),
            errno => Err(error_of(&io::Error::from_raw_os_error(errno))),
        }
    }

    /// Closes the image. If tables cannot be written, they are lost, and an error is logged.
    pub(crate) fn close(&self) {
        if !self.info.read_only
            && let Err(error) = self.write_back()
        {
            tracing::error!("{}: its tables could not be written on close: {error}", self.name);
        }
        let format = self.format.write().take();
        if self.broken.load(Ordering::Relaxed) {
            // Dropping the format would write tables that may be wrong, so it is leaked.
            std::mem::forget(format);
            return;
        }
        let _ = self.contained(|| {
            drop(format);
            Ok(())
        });
    }

    pub(crate) fn has_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed) != 0 || self.broken.load(Ordering::Relaxed)
    }

    pub(crate) fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed) != 0
    }

    /// Bytes that the file occupies in its file system.
    pub(crate) fn allocated(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        self.file.file().metadata().map_or(0, |about| about.blocks() * 512)
    }

    /// Maximum length that the file has had, or the size of the device.
    pub(crate) fn longest(&self) -> u64 {
        self.longest.load(Ordering::Acquire)
    }

    /// Checks that the image is usable and the file was not truncated.
    pub(crate) fn check(&self) -> Result<(), DiskError> {
        if self.broken.load(Ordering::Relaxed) {
            return Err(DiskError::Io(libc::EIO));
        }
        if self.file.is_block_device() {
            return Ok(());
        }
        // `longest` is read before the file length: other threads first extend the file and then
        // update `longest`.
        let longest = self.longest.load(Ordering::Acquire);
        // If the length cannot be queried, that is no truncation: the storage may be unavailable
        // for a while.
        let now = self.file.file().metadata().map_err(|error| error_of(&error))?.len();
        if now > longest {
            self.longest.fetch_max(now, Ordering::Release);
        } else if now < longest {
            self.give_up("the file was truncated");
            return Err(DiskError::Io(libc::EIO));
        }
        Ok(())
    }

    fn give_up(&self, why: &str) {
        if !self.broken.swap(true, Ordering::Relaxed) {
            tracing::error!("{}: {why}; all further requests fail", self.name);
        }
    }

    pub(crate) fn contained(
        &self,
        f: impl FnOnce() -> Result<(), DiskError>,
    ) -> Result<(), DiskError> {
        contain_panic(f).unwrap_or_else(|why| {
            self.give_up(&format!("the image is damaged, or imago has a bug ({why})"));
            Err(DiskError::Io(libc::EIO))
        })
    }

    fn carry_out(&self, request: &Request, buffer: Option<&mut IoBuffer>) -> Result<(), DiskError> {
        let &Request { op, offset, len } = request;
        let outcome = match (op, buffer) {
            (Op::Discard, _) => self.discard(offset, len),
            (Op::WriteZeroes { deallocate, .. }, _) => self.zero(offset, len, deallocate),
            (Op::Read, Some(buffer)) => {
                let format = self.format.read();
                access(&format)?.read(buffer.as_mut_range(0..len as usize), offset)
            }
            (Op::Write { .. }, Some(buffer)) => {
                let format = self.format.read();
                let format = access(&format)?;
                self.note_change(format, offset, len);
                format.write(buffer.as_ref_range(0..len as usize), offset)
            }
            (Op::Compare, Some(expected)) => return self.compare(offset, len, Some(expected)),
            (Op::Verify, _) => return self.compare(offset, len, None),
            _ => return Err(DiskError::Unsupported),
        };
        outcome.map_err(|error| error_of(&error))
    }

    /// Sets `has_changed` if a write to this range changes tables. An overwrite of allocated
    /// clusters changes none. If another request has just allocated the clusters, that request has
    /// set the flag.
    fn note_change(&self, format: &FormatAccess<FileStorage>, mut offset: u64, len: u64) {
        if !self.lasts.load(Ordering::SeqCst) || self.has_changed.load(Ordering::SeqCst) {
            return;
        }
        let end = offset + len;
        while offset < end {
            match format.get_mapping(offset, end - offset) {
                Ok((Mapping::Raw { writable: true, .. }, there)) if there != 0 => offset += there,
                _ => return self.has_changed.store(true, Ordering::SeqCst),
            }
        }
    }

    /// Reads a range and compares it with `expected`, if given.
    fn compare(&self, offset: u64, len: u64, expected: Option<&IoBuffer>) -> Result<(), DiskError> {
        let format = self.format.read();
        let format = access(&format)?;
        let system = |error: io::Error| error_of(&error);
        let mut piece = IoBuffer::new(PIECE.min(len as usize), ALIGNMENT).map_err(system)?;
        let mut done = 0;
        while done < len {
            let now = (len - done).min(PIECE as u64) as usize;
            format.read(piece.as_mut_range(0..now), offset + done).map_err(system)?;
            if let Some(expected) = expected {
                let expected = expected.as_ref_range(done as usize..done as usize + now);
                if expected.into_slice() != piece.as_ref_range(0..now).into_slice() {
                    return Err(DiskError::CompareFailed);
                }
            }
            done += now as u64;
        }
        Ok(())
    }

    /// Frees the clusters of a range. The range then reads as zeroes.
    fn discard(&self, mut offset: u64, len: u64) -> io::Result<()> {
        let end = offset + len;
        while offset < end {
            let mut format = self.format.write();
            let Some(format) = &mut *format else { return Err(gone()) };
            let (mapping, there) = format.get_mapping(offset, (end - offset).min(DISCARD_PIECE))?;
            let unallocated = matches!(mapping, Mapping::Zero { explicit: false, .. });
            if there == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            // An unallocated range reads as zeroes already, so its table entry does not change.
            if !unallocated {
                self.has_changed.store(true, Ordering::SeqCst);
                self.close_clusters(offset, there);
                format.discard_to_zero(offset, there)?;
            }
            offset += there;
        }
        Ok(())
    }

    /// Zeroes a range.
    fn zero(&self, mut offset: u64, len: u64, deallocate: bool) -> io::Result<()> {
        // Version 2 has no zero clusters, so the range cannot be discarded.
        let has_zeroes = self.header.version >= 3;
        if deallocate && has_zeroes {
            return self.discard(offset, len);
        }
        let end = offset + len;
        let mut zeroes = None;
        while offset < end {
            let now = if has_zeroes {
                self.zero_clusters(offset, end - offset)?
            } else {
                self.write_zeroes(offset, end - offset, &mut zeroes)?
            };
            offset += now;
        }
        Ok(())
    }

    /// Zeroes the beginning of a range, with zero clusters where possible. Returns the length of
    /// the zeroed part.
    fn zero_clusters(&self, offset: u64, len: u64) -> io::Result<u64> {
        let cluster = 1 << self.header.cluster_bits;
        // Only whole clusters need the exclusive lock. Parts of clusters are zeroed by writes.
        let (skew, is_last) = (offset % cluster, offset + len == self.header.size);
        let whole = if is_last { len } else { len - len % cluster };
        let len = match (skew, whole) {
            (0, 0) => len,
            (0, whole) => whole.min(DISCARD_PIECE),
            (skew, _) => len.min(cluster - skew),
        };
        if skew != 0 || (len < cluster && !is_last) {
            let format = self.format.read();
            let Some(format) = &*format else { return Err(gone()) };
            return self.zero_piece(format, offset, len);
        }
        let format = self.format.write();
        let Some(format) = &*format else { return Err(gone()) };
        self.close_clusters(offset, len);
        self.zero_piece(format, offset, len)
    }

    fn zero_piece(
        &self,
        format: &FormatAccess<FileStorage>,
        offset: u64,
        len: u64,
    ) -> io::Result<u64> {
        let (mapping, there) = format.get_mapping(offset, len)?;
        if there == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if !matches!(mapping, Mapping::Zero { .. }) {
            self.has_changed.store(true, Ordering::SeqCst);
            format.write_zeroes(offset, there)?;
        }
        Ok(there)
    }

    /// Writes zeroes to the beginning of a range. Returns the number of bytes that were zeroed.
    fn write_zeroes(
        &self,
        offset: u64,
        len: u64,
        zeroes: &mut Option<IoBuffer>,
    ) -> io::Result<u64> {
        let format = self.format.read();
        let Some(format) = &*format else { return Err(gone()) };
        let (mapping, there) = format.get_mapping(offset, len.min(DISCARD_PIECE))?;
        if there == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if matches!(mapping, Mapping::Zero { .. }) {
            return Ok(there);
        }
        let now = there.min(PIECE as u64);
        let zeroes = match zeroes {
            Some(zeroes) => zeroes,
            none => {
                let mut buffer = IoBuffer::new(PIECE, ALIGNMENT)?;
                buffer.as_mut().into_slice().fill(0);
                none.insert(buffer)
            }
        };
        self.note_change(format, offset, now);
        format.write(zeroes.as_ref_range(0..now as usize), offset)?;
        Ok(now)
    }

    /// Closes clusters for the fast path, and waits for its requests there. The caller holds the
    /// lock of `format` exclusively.
    fn close_clusters(&self, offset: u64, len: u64) {
        if let Some(map) = &self.map {
            map.close(offset, len);
        }
    }

    /// Updates the out-of-space state. A request that fails for lack of space sets it, and a
    /// successful write to the same offset clears it. Raw images do the same.
    pub(crate) fn note_room(&self, request: &Request, result: Result<(), DiskError>) {
        let at = if request.op == Op::Flush { self.info.bytes() } else { request.offset };
        match result {
            Err(DiskError::NoSpace) => self.full.store(at + 1, Ordering::Relaxed),
            Ok(()) => {
                let full = self.full.load(Ordering::Relaxed);
                let covers = at < full && full - 1 < at.saturating_add(request.len.max(1));
                if covers && matches!(request.op, Op::Write { .. } | Op::Flush) {
                    self.full.store(0, Ordering::Relaxed);
                }
            }
            Err(_) => {}
        }
    }
}

pub(crate) fn access(
    format: &Option<FormatAccess<FileStorage>>,
) -> Result<&FormatAccess<FileStorage>, DiskError> {
    format.as_ref().ok_or(DiskError::Io(libc::EIO))
}

fn gone() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}

/// Converts an I/O error of `imago` to a disk error.
pub(crate) fn error_of(error: &io::Error) -> DiskError {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    match (error.kind(), error.raw_os_error()) {
        (StorageFull | QuotaExceeded | FileTooLarge, _) => DiskError::NoSpace,
        (_, Some(errno)) => DiskError::Io(errno),
        (_, None) => {
            tracing::debug!("qcow2: {error}");
            DiskError::Io(libc::EIO)
        }
    }
}
