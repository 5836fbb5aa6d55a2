//! File-backed disk.

use super::image;
use super::open::open;
use super::options::FileOptions;
use super::queue::FileQueue;
use super::recovery;
use super::shared::FileShared;
use super::write_atomicity::WriteAtomicity;
use crate::extents::report_file_extents;
use crate::sys::EngineKind;
use rustix::fs::OFlags;
use shadowbell_disk::{
    CheckpointError, Disk, DiskInfo, OpenError, Queue, ReportExtent, ResizeError, Wait,
};
use shadowbell_memory::{Mapping, Protection, SharedBytes};
use shadowbell_state::Descriptors;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Raw image or block device.
///
/// While the disk is open, the image is locked against other writers. A writable disk is also
/// locked against readers. QEMU uses the same kind of lock.
#[derive(Debug)]
pub struct FileDisk {
    pub(super) shared: Arc<FileShared>,
    pub(super) path: PathBuf,
}

impl FileDisk {
    /// Opens the image or block device at `path`.
    ///
    /// # Errors
    /// [`OpenError`]: the message says what is wrong with the file and what to do.
    pub fn open(path: &Path, options: &FileOptions) -> Result<Self, OpenError> {
        Ok(Self { shared: Arc::new(open(path, options)?), path: path.to_owned() })
    }

    /// Opens a disk like [`open`](Self::open), for tests. A test script determines when each system
    /// call on the file completes and with which result. The calls complete on the thread that runs
    /// the script.
    ///
    /// # Errors
    /// Like [`open`](Self::open).
    #[cfg(feature = "scripted")]
    #[doc(hidden)]
    pub fn scripted(
        path: &Path,
        options: &FileOptions,
    ) -> Result<(Self, super::test_script::Script), OpenError> {
        let options = FileOptions { aio: super::options::Aio::Threads, ..options.clone() };
        let mut shared = open(path, &options)?;
        let script = super::test_script::Script::new(Arc::clone(&shared.flusher));
        shared.script = Some(script.clone());
        Ok((Self { shared: Arc::new(shared), path: path.to_owned() }, script))
    }

    /// Recovers the disk of a dead process from its [checkpoint](Disk::checkpoint), by the same
    /// path and options. Calls `wait` repeatedly until no I/O of that process is in flight.
    pub(crate) fn recover(
        path: &Path,
        options: &FileOptions,
        state: &serde_json::Value,
        fds: &mut Descriptors,
        wait: Wait<'_>,
    ) -> Result<Self, OpenError> {
        let shared = recovery::recover(path, options, state, fds, wait)?;
        Ok(Self { shared: Arc::new(shared), path: path.to_owned() })
    }

    /// True if the page cache is bypassed.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.shared.direct.is_some()
    }
}

impl Disk for FileDisk {
    fn info(&self) -> DiskInfo {
        self.shared.info.clone()
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(FileQueue::new(Arc::clone(&self.shared))?))
    }

    fn queue_files(&self) -> u64 {
        match self.shared.engine {
            // The descriptors of an io_uring belong to the thread, and not to one of its queues.
            EngineKind::Uring => 0,
            EngineKind::Threads => 1,
        }
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn has_lost_writes(&self) -> bool {
        self.shared.unsynced().is_some()
    }

    fn is_deleted(&self) -> bool {
        self.shared.regular && image::is_deleted(self.shared.file.as_fd())
    }

    fn is_full(&self) -> bool {
        self.shared.full.load(Ordering::Relaxed) != 0
    }

    fn extents(&self, offset: u64, len: u64, report: &mut ReportExtent<'_>) {
        // From `end` on, all bytes are reported as data. `end` is 0 for a block device, because it
        // reports no holes, and for a file whose size is unknown.
        let end = if self.shared.regular { self.shared.size().unwrap_or(0) } else { 0 };
        let end = end.min(self.shared.end.load(Ordering::Relaxed));
        let to = offset.saturating_add(len);
        report_file_extents(&self.shared.file, (offset, to), end, report);
    }

    fn resized(&self, bytes: Option<u64>) -> Result<Arc<dyn Disk>, ResizeError> {
        let disk = || self.name();
        let info = self.info();
        let system = |source| ResizeError::System { disk: disk(), source };
        let there = self.shared.size().map_err(system)?;
        let wanted = bytes.unwrap_or(there);
        let flags = rustix::fs::fcntl_getfl(&self.shared.file);
        let flags = flags.map_err(|errno| system(errno.into()))?;
        let can_grow = self.shared.regular && flags.contains(OFlags::RDWR);
        if wanted > there && !can_grow {
            return Err(ResizeError::Short { disk: disk(), there, wanted });
        }
        let info = info.with_bytes(wanted).ok_or_else(|| ResizeError::Size {
            disk: disk(),
            bytes: wanted,
            block_size: info.block_size,
        })?;
        if wanted > there {
            self.shared.file.set_len(wanted).map_err(system)?;
        }
        let shared = Arc::new(self.shared.resized(info, there.max(wanted)));
        Ok(Arc::new(Self { shared, path: self.path.clone() }))
    }

    fn with_writes(&self, accepted: bool) -> Result<Arc<dyn Disk>, ResizeError> {
        let flags = rustix::fs::fcntl_getfl(&self.shared.file);
        let flags = flags
            .map_err(|errno| ResizeError::System { disk: self.name(), source: errno.into() })?;
        if accepted && !flags.contains(OFlags::RDWR) {
            return Err(ResizeError::Opened { disk: self.name() });
        }
        let info = DiskInfo { read_only: !accepted, ..self.info() };
        let shared = self.shared.resized(info, self.shared.end.load(Ordering::Relaxed));
        Ok(Arc::new(Self { shared: Arc::new(shared), path: self.path.clone() }))
    }

    fn map(&self, len: u64) -> Option<SharedBytes> {
        let flags = rustix::fs::fcntl_getfl(&self.shared.file).ok()?;
        let writable = flags.contains(OFlags::RDWR);
        let protection = if writable { Protection::ReadWrite } else { Protection::Read };
        if len > self.info().bytes() {
            return None;
        }
        let mapping = Mapping::from_fd(&*self.shared.file, 0, len, protection).ok()?;
        mapping.bytes().slice(0, usize::try_from(len).ok()?)
    }

    fn checkpoint(&self, fds: &mut Descriptors) -> Result<serde_json::Value, CheckpointError> {
        recovery::checkpoint(&self.shared, fds)
            .map_err(|source| CheckpointError::System { disk: self.name(), source })
    }

    fn on_change(&self, changed: Box<dyn Fn() + Send + Sync>) {
        self.shared.flusher.on_loss(changed);
    }

    fn release_lock(&self) {
        crate::sys::unlock_image(&self.shared.file);
    }

    fn remark(&self) -> Option<String> {
        let path = self.path.display();
        let torn = (self.shared.atom == WriteAtomicity::Nothing && !self.shared.info.read_only)
            .then(|| {
                format!(
                    "{path}: a loss of power may leave a block of {} bytes partly written, because \
                 the storage does not guarantee atomic writes of that size, and NVMe cannot \
                 report this to the host; leave out `block-size` for blocks that the storage \
                 writes atomically",
                    self.shared.info.block_size
                )
            });
        let slow = self.shared.no_uring.as_ref().map(|why| self.by_threads(why));
        let remarks: Vec<_> = slow.into_iter().chain(torn).collect();
        (!remarks.is_empty()).then(|| remarks.join(". "))
    }
}

impl FileDisk {
    fn by_threads(&self, why: &str) -> String {
        format!(
            "{}: uses threads, which take more CPU time, because the system refuses io_uring \
             ({why}); it needs Linux 5.6 or later, `sysctl kernel.io_uring_disabled=0`, and no \
             container profile that forbids it. `aio=threads` turns this warning off",
            self.path.display()
        )
    }
}
