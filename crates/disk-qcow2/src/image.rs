//! Open image: requests of the slow path. All functions may block on the storage.

use crate::check::Check;
use crate::format::Format;
use crate::map::Map;
use crate::open::Opened;
use crate::ranges::RangeLocks;
use crate::storage::{IoBuffer, is_full};
use parking_lot::Mutex;
use shadowbell_disk::{DiskError, DiskInfo, Extent, Op, ReportExtent, Request};
use shadowbell_disk_file::{ImageBytes, ImageFile};
use shadowbell_memory::contain_panic;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Number of bytes that are compared or verified at once.
const PIECE: usize = 256 << 10;
/// Number of bytes that are looked up at once for the allocation status.
const EXTENT_PIECE: u64 = 256 << 20;

/// Open image.
pub(crate) struct Image {
    pub(crate) format: Arc<Format>,
    /// Check of the tables in the background, if there is one. Requests on the slow path wait for
    /// its end.
    check: Option<Arc<Check>>,
    pub(crate) info: DiskInfo,
    /// Locks of the clusters that requests on the slow path are accessing.
    locks: RangeLocks,
    /// The image's own file, its data file and its backing files, locked while the image is open.
    pub(crate) files: Vec<ImageFile>,
    /// True if the content is unreliable. All requests then fail.
    pub(crate) broken: AtomicBool,
    /// True if the locks of the files were released. This process must then not change the files
    /// any more. The mutex is also held while unused clusters are released, so that the locks are
    /// not released meanwhile.
    is_released: Mutex<bool>,
    /// True if a loss of data was reported.
    is_loss_reported: AtomicBool,
    /// True if a damaged entry of a table was reported.
    is_damage_reported: AtomicBool,
    /// Offset, plus 1, of the last request that failed for lack of space. 0 if there is none, or if
    /// a later write to that offset has succeeded.
    full: AtomicU64,
    pub(crate) name: String,
    /// Callback for the loss of data.
    on_loss: Mutex<Option<Box<dyn Fn() + Send + Sync>>>,
    /// File and map of the fast path.
    pub(crate) bytes: Option<ImageBytes>,
    pub(crate) map: Option<Arc<Map>>,
    /// True if the fast path may also write.
    pub(crate) writes_fast: bool,
}

impl Image {
    pub(crate) fn new(opened: Opened, info: DiskInfo, name: String) -> Self {
        let Opened { format, files, bytes, check } = opened;
        // Before a write, the fast path queries the file length on the I/O thread. For a remote
        // file, this query may block, so the fast path does not write to remote files.
        let writes_fast = !info.read_only && !files.iter().any(ImageFile::is_remote);
        let new_map = || Arc::new(Map::new(format.layout.bits, format.layout.size));
        let map = bytes.as_ref().map(|_| new_map());
        if let Some(map) = &map {
            let _ = format.map.set(Arc::clone(map));
        }
        if let Some(locks) = bytes.as_ref().and_then(ImageBytes::range_locks) {
            let _ = format.locks.set(locks);
        }
        Self {
            format,
            check,
            info,
            locks: RangeLocks::default(),
            files,
            broken: AtomicBool::new(false),
            is_released: Mutex::new(false),
            is_loss_reported: AtomicBool::new(false),
            is_damage_reported: AtomicBool::new(false),
            full: AtomicU64::new(0),
            name,
            on_loss: Mutex::default(),
            bytes,
            map,
            writes_fast,
        }
    }

    /// Error number of the first sync that has lost data, or 0 if no data were lost.
    pub(crate) fn lost(&self) -> i32 {
        let data_file = self.format.data_file.as_ref().map_or(0, |file| file.lost());
        if data_file != 0 { data_file } else { self.format.file.lost() }
    }

    /// Sets the error number of a loss of data in an earlier process.
    pub(crate) fn set_lost(&self, errno: i32) {
        self.format.file.set_lost(errno);
        self.is_loss_reported.store(errno != 0, Ordering::Relaxed);
    }

    pub(crate) fn on_loss(&self, changed: Box<dyn Fn() + Send + Sync>) {
        *self.on_loss.lock() = Some(changed);
    }

    /// Executes `request`. FUA is ignored: the caller has to sync afterwards.
    pub(crate) fn run(
        &self,
        request: &Request,
        buffer: Option<&mut IoBuffer>,
    ) -> Result<(), DiskError> {
        let result = match self.ready() {
            Ok(()) => self.contained(|| self.carry_out(request, buffer)),
            Err(error) => Err(error),
        };
        // If the file was truncated, the read may have returned zeroes from beyond its end.
        let result = result.and_then(|()| self.check());
        if result.is_ok() {
            self.fill_map(request);
        }
        self.note_loss();
        self.note_room(request, result);
        result
    }

    /// Reports which bytes are allocated, in the image or in its backing files. If the look-up
    /// fails, the bytes are reported as allocated.
    pub(crate) fn extents(&self, offset: u64, len: u64, report: &mut ReportExtent<'_>) {
        let (mut at, end) = (offset, offset.saturating_add(len));
        if self.is_checking() {
            report(Extent { len, allocated: true });
            return;
        }
        while at < end {
            let piece = at..end.min(at.saturating_add(EXTENT_PIECE));
            let mut goes_on = true;
            let mut done = at;
            let outcome = self.check().and_then(|()| {
                self.contained(|| {
                    goes_on = self.format.extents(piece.clone(), &mut |len, allocated| {
                        done += len;
                        report(Extent { len, allocated })
                    });
                    Ok(())
                })
            });
            if outcome.is_err() && goes_on && done < end {
                report(Extent { len: end - done, allocated: true });
                return;
            }
            if !goes_on {
                return;
            }
            at = piece.end;
        }
    }

    /// Makes all completed writes durable. Calls are serialized by the caller.
    pub(crate) fn sync(&self) -> Result<(), DiskError> {
        self.ready()?;
        let result =
            self.contained(|| self.format.sync().map_err(|error| self.error_of(0, &error)));
        self.note_room(&Request { op: Op::Flush, offset: 0, len: 0 }, result);
        self.note_loss();
        result
    }

    /// Releases the freed clusters and the reserve (clusters that are counted for later
    /// allocations). Called while the disk is idle.
    pub(crate) fn settle(&self) {
        let is_released = self.is_released.lock();
        if !*is_released && !self.is_checking() {
            self.return_clusters(|| self.format.settle());
        }
    }

    /// Releases unused clusters by calling `give`, if the image may be changed.
    fn return_clusters(&self, give: impl FnOnce() -> io::Result<()>) {
        if self.info.read_only || self.check().is_err() || self.has_lost_writes() {
            return;
        }
        if let Err(error) = self.contained(|| give().map_err(|error| self.error_of(0, &error))) {
            tracing::warn!(
                "{}: unused clusters could not be returned ({error}); `qemu-img check -r leaks` \
                 frees them",
                self.name
            );
        }
        self.note_loss();
    }

    /// Releases the locks of the files, unless a check runs or the reserve still holds clusters
    /// (these have to be released first). Returns true if the locks were released. From then on,
    /// the next process may change the files.
    pub(crate) fn try_release_lock(&self) -> bool {
        let Some(mut is_released) = self.is_released.try_lock() else { return false };
        if self.is_checking() || !self.format.is_settled() {
            return false;
        }
        *is_released = true;
        self.files.iter().for_each(ImageFile::release_lock);
        true
    }

    /// Ends a running check, releases the clusters of the reserve, and releases the locks of the
    /// files.
    pub(crate) fn release_lock(&self) {
        self.cancel_check();
        let mut is_released = self.is_released.lock();
        self.return_clusters(|| self.format.return_reserve());
        *is_released = true;
        self.files.iter().for_each(ImageFile::release_lock);
    }

    /// Ends a check of the tables.
    pub(crate) fn cancel_check(&self) {
        self.check.iter().for_each(|check| check.cancel());
    }

    fn is_checking(&self) -> bool {
        self.check.as_ref().is_some_and(|check| check.is_running())
    }

    /// Waits for the check of the tables, and checks that the image is usable.
    fn ready(&self) -> Result<(), DiskError> {
        match &self.check {
            Some(check) if !check.wait() => {
                self.broken.store(true, Ordering::Relaxed);
                Err(DiskError::Io(libc::EIO))
            }
            _ => self.check(),
        }
    }

    /// Reports the loss of data, once.
    fn note_loss(&self) {
        let errno = self.lost();
        if errno == 0 || self.is_loss_reported.swap(true, Ordering::Relaxed) {
            return;
        }
        tracing::error!(
            "{}: write-back of the page cache has failed (error {errno}); data that the guest has \
             written may be lost",
            self.name
        );
        if let Some(changed) = &*self.on_loss.lock() {
            changed();
        }
    }

    pub(crate) fn has_lost_writes(&self) -> bool {
        self.lost() != 0 || self.broken.load(Ordering::Relaxed)
    }

    pub(crate) fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed) != 0
    }

    /// Number of bytes that the image's own file and its data file occupy in the file system.
    pub(crate) fn allocated(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        let of = |file: &ImageFile| file.file().metadata().map_or(0, |about| about.blocks() * 512);
        self.files.iter().take(1 + usize::from(self.format.data_file.is_some())).map(of).sum()
    }

    /// Checks that the image is usable and its files were not truncated.
    fn check(&self) -> Result<(), DiskError> {
        if self.broken.load(Ordering::Relaxed) {
            return Err(DiskError::Io(libc::EIO));
        }
        for file in [&self.format.file].into_iter().chain(&self.format.data_file) {
            // A failed query of the length only fails this request, because the storage may be
            // unavailable for a while. A truncation makes all later requests fail.
            if file.is_truncated().map_err(|error| self.error_of(0, &error))? {
                self.give_up("the file was truncated");
                return Err(DiskError::Io(libc::EIO));
            }
        }
        Ok(())
    }

    /// True if a request may use the fast path. Before a write (`writes`), also checks by a system
    /// call that the file was not truncated.
    pub(crate) fn is_intact(&self, writes: bool) -> bool {
        !self.broken.load(Ordering::Relaxed) && (!writes || self.check().is_ok())
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
            self.give_up(&format!("a bug in the handling of its tables ({why})"));
            Err(DiskError::Io(libc::EIO))
        })
    }

    fn carry_out(&self, request: &Request, buffer: Option<&mut IoBuffer>) -> Result<(), DiskError> {
        let &Request { op, offset, len } = request;
        let bits = self.format.layout.bits;
        let clusters = offset >> bits..(offset + len).div_ceil(1 << bits);
        let reads = matches!(op, Op::Read | Op::Compare | Op::Verify);
        let _lock = self.locks.lock(clusters, !reads);
        let close = |range: std::ops::Range<u64>| {
            if let Some(map) = &self.map {
                map.close(range.start, range.end - range.start);
            }
        };
        let outcome = match (op, buffer) {
            (Op::Discard, _) => self.format.zero(offset..offset + len, false, &close),
            (Op::WriteZeroes { deallocate, .. }, _) => {
                self.format.zero(offset..offset + len, !deallocate, &close)
            }
            (Op::Read, Some(buffer)) => self.format.read(&mut buffer[..len as usize], offset),
            (Op::Write { .. }, Some(buffer)) => self.format.write(&buffer[..len as usize], offset),
            (Op::Compare, Some(expected)) => return self.compare(offset, len, Some(expected)),
            (Op::Verify, _) => return self.compare(offset, len, None),
            _ => return Err(DiskError::Unsupported),
        };
        outcome.map_err(|error| self.error_of(offset, &error))
    }

    /// Reads a range and compares it with `expected`, if given.
    fn compare(&self, offset: u64, len: u64, expected: Option<&IoBuffer>) -> Result<(), DiskError> {
        let mut piece = IoBuffer::new(PIECE.min(len as usize));
        let mut done = 0;
        while done < len as usize {
            let now = (len as usize - done).min(PIECE);
            let outcome = self.format.read(&mut piece[..now], offset + done as u64);
            outcome.map_err(|error| self.error_of(offset + done as u64, &error))?;
            if expected.is_some_and(|expected| expected[done..done + now] != piece[..now]) {
                return Err(DiskError::CompareFailed);
            }
            done += now;
        }
        Ok(())
    }

    /// Updates the out-of-space state. A request that fails for lack of space sets it to the offset
    /// of the request (a flush: the size of the disk). A successful write that covers this offset,
    /// or a successful flush, clears the state.
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

    /// Converts the error of a request at `offset` to a disk error. The first damage is logged.
    fn error_of(&self, offset: u64, error: &io::Error) -> DiskError {
        match error.raw_os_error() {
            _ if is_full(error) => DiskError::NoSpace,
            Some(errno) => DiskError::Io(errno),
            None => {
                if !self.is_damage_reported.swap(true, Ordering::Relaxed) {
                    tracing::error!(
                        "{}: a request for byte {offset} of the disk has failed, because the image \
                         has {error}; the first damage is logged, and `qemu-img check` finds all",
                        self.name
                    );
                }
                DiskError::Io(libc::EIO)
            }
        }
    }
}
