//! A request as calls of the crate that knows the format. Everything here may wait for the storage.

use crate::header::Header;
use crate::map::Map;
use crate::open::Opened;
use crate::storage::FileStorage;
use imago::io_buffers::IoBuffer;
use imago::{FormatAccess, Mapping};
use parking_lot::{Mutex, RwLock};
use rustix::fs::SeekFrom;
use shadowbell_backend::{DiskError, DiskInfo, Extent, ImageBytes, ImageFile, Op, Request, Tell};
use shadowbell_memory::contain_panic;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

/// Alignment of buffers: enough for direct I/O on anything.
pub(crate) const ALIGNMENT: usize = 4096;
/// How much is compared, verified or zeroed at once.
const PIECE: usize = 256 << 10;
/// How much is discarded at once, which keeps every other request waiting.
const DISCARD_PIECE: u64 = 256 << 20;

/// An open image.
pub(crate) struct Image {
    /// Nothing once it is closed. Alone with it is who discards or zeroes clusters: what was looked
    /// up is not where it was after that.
    pub(crate) format: RwLock<Option<FormatAccess<FileStorage>>>,
    pub(crate) header: Header,
    pub(crate) info: DiskInfo,
    file: ImageFile,
    /// Locked as long as this is.
    pub(crate) below: Vec<ImageFile>,
    pub(crate) is_direct: bool,
    /// Nothing can be said of what is in the image any more.
    pub(crate) broken: AtomicBool,
    /// The error number of the first sync that has lost data, or 0.
    lost: AtomicI32,
    /// The longest that the file was.
    longest: AtomicU64,
    /// The byte of the disk that was last refused for want of room, and one; 0 if none, or if it
    /// has been taken since.
    full: AtomicU64,
    pub(crate) name: String,
    /// The next process goes on with the image, should this one die: what has ended is in the file.
    lasts: AtomicBool,
    /// There may be tables that differ from those in the file. Set before a change, and taken back
    /// while nothing changes.
    has_changed: AtomicBool,
    /// Who is to know that data are lost.
    on_loss: Mutex<Option<Box<dyn Fn() + Send + Sync>>>,
    /// The file, and the clusters in it that need nothing of the format.
    pub(crate) bytes: Option<ImageBytes>,
    pub(crate) map: Option<Map>,
    /// Such clusters may be written, too.
    pub(crate) is_sound: bool,
    /// Those of them whose tables are not in the file yet.
    pub(crate) unsaved: Mutex<Vec<u64>>,
}

impl Image {
    pub(crate) fn new(opened: Opened, info: DiskInfo, name: String) -> Self {
        let Opened { format, header, file, below, is_direct, bytes, is_sound } = opened;
        let longest = AtomicU64::new(rustix::fs::seek(file.file(), SeekFrom::End(0)).unwrap_or(0));
        // Before a write goes straight, the thread that serves queues looks how long the file is.
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

    /// The image's own file, and those below it.
    pub(crate) fn files(&self) -> impl Iterator<Item = &ImageFile> {
        [&self.file].into_iter().chain(&self.below)
    }

    /// From here on, what has ended is in the file.
    pub(crate) fn last(&self) -> Result<(), DiskError> {
        if self.info.read_only || self.lasts.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        // Whatever has changed until now.
        self.has_changed.store(true, Ordering::SeqCst);
        self.write_back()
    }

    /// Whether a change that was carried out ends only when the tables are written.
    pub(crate) fn waits_for_tables(&self) -> bool {
        self.lasts.load(Ordering::SeqCst) && self.has_changed.load(Ordering::SeqCst)
    }

    /// The error number of the first sync that has lost data, or 0.
    pub(crate) fn lost(&self) -> i32 {
        self.lost.load(Ordering::Acquire)
    }

    /// Data were lost before, by another process.
    pub(crate) fn set_lost(&self, errno: i32) {
        self.lost.store(errno, Ordering::Release);
    }

    pub(crate) fn on_loss(&self, changed: Box<dyn Fn() + Send + Sync>) {
        *self.on_loss.lock() = Some(changed);
    }

    /// Carries `request` out, but for what of it is to be durable.
    pub(crate) fn run(
        &self,
        request: &Request,
        buffer: Option<&mut IoBuffer>,
    ) -> Result<(), DiskError> {
        let result = match self.check() {
            Ok(()) => self.contained(|| self.carry_out(request, buffer)),
            Err(error) => Err(error),
        };
        // What was read beyond the end of a file that has become shorter is zeroes.
        let result = result.and_then(|()| self.check());
        if result.is_ok() {
            self.learn(request);
        }
        self.note_room(request, result);
        result
    }

    /// Tells which bytes are allocated, here or below. What can not be found out is data.
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

    /// Writes the tables that are only in memory, while nothing changes them: a cluster that were
    /// counted after the counts are written, and named in a table before that is, would be used and
    /// count as free if the process is killed then.
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

    /// Has everything that was written before on stable storage. One at a time: the system says
    /// only to one sync what it has lost.
    pub(crate) fn sync(&self) -> Result<(), DiskError> {
        let result = self.write_back();
        self.note_room(&Request { op: Op::Flush, offset: 0, len: 0 }, result);
        result?;
        let outcome = rustix::io::retry_on_intr(|| rustix::fs::fdatasync(self.file.file()));
        if let Err(errno) = outcome {
            let errno = errno.raw_os_error();
            if !self.is_direct && self.lost.swap(errno, Ordering::Release) == 0 {
                tracing::error!(
                    "{}: the system could not write everything back (error {errno}); what a guest \
                     has written may be lost",
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

    /// Closes the image. What can not be written any more is lost, which is said.
    pub(crate) fn close(&self) {
        if !self.info.read_only
            && let Err(error) = self.write_back()
        {
            tracing::error!("{}: its tables could not be written at the end: {error}", self.name);
        }
        let format = self.format.write().take();
        if self.broken.load(Ordering::Relaxed) {
            // It would write what it has, of which nobody knows whether it is right.
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

    /// Bytes that the file takes of its file system.
    pub(crate) fn allocated(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        self.file.file().metadata().map_or(0, |about| about.blocks() * 512)
    }

    /// The longest that the file was, or how long the device is.
    pub(crate) fn longest(&self) -> u64 {
        self.longest.load(Ordering::Acquire)
    }

    /// Whether the image is still as it was left.
    pub(crate) fn check(&self) -> Result<(), DiskError> {
        if self.broken.load(Ordering::Relaxed) {
            return Err(DiskError::Io(libc::EIO));
        }
        if self.file.is_block_device() {
            return Ok(());
        }
        // In this order: other threads make the file longer, and say so afterwards.
        let longest = self.longest.load(Ordering::Acquire);
        // Who can not say how long it is has not become shorter: its storage is gone, and may be
        // there again.
        let now = self.file.file().metadata().map_err(|error| error_of(&error))?.len();
        if now > longest {
            self.longest.fetch_max(now, Ordering::Release);
        } else if now < longest {
            self.give_up("the file has become shorter");
            return Err(DiskError::Io(libc::EIO));
        }
        Ok(())
    }

    fn give_up(&self, why: &str) {
        if !self.broken.swap(true, Ordering::Relaxed) {
            tracing::error!("{}: {why}; nothing is read or written any more", self.name);
        }
    }

    pub(crate) fn contained(
        &self,
        f: impl FnOnce() -> Result<(), DiskError>,
    ) -> Result<(), DiskError> {
        contain_panic(f).unwrap_or_else(|why| {
            self.give_up(&format!("the image is damaged, or its reader has a fault ({why})"));
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

    /// Notes that tables will change, unless this range is only overwritten. Whoever finds a
    /// cluster of another request's there finds its note, too.
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

    /// Reads what is there, and compares it.
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

    /// Gives a range back, which reads as zeroes then.
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
            // What has no cluster needs no entry in a table either.
            if !unallocated {
                self.has_changed.store(true, Ordering::SeqCst);
                self.close_clusters(offset, there);
                format.discard_to_zero(offset, there)?;
            }
            offset += there;
        }
        Ok(())
    }

    /// Has a range read as zeroes.
    fn zero(&self, mut offset: u64, len: u64, deallocate: bool) -> io::Result<()> {
        // Version 2 has no clusters that are zero.
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

    /// Has the beginning of a range read as zeroes, by what the format has for that. How much of
    /// it.
    fn zero_clusters(&self, offset: u64, len: u64) -> io::Result<u64> {
        let cluster = 1 << self.header.cluster_bits;
        // Alone with the whole clusters only: what is left of others is written.
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

    /// Writes zeroes to the beginning of a range. To how much of it.
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

    /// Has nobody at work in these clusters past the format, and nobody begin. With `format` locked
    /// by who is alone with it.
    fn close_clusters(&self, offset: u64, len: u64) {
        if let Some(map) = &self.map {
            map.close(offset, len);
        }
    }

    /// Remembers where there was no room, until the same place is written with success, as a raw
    /// image does.
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

/// What a failure means for the request.
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
