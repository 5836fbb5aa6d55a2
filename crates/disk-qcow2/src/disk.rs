//! qcow2 image as a disk.

use crate::error::OpenError;
use crate::image::Image;
use crate::open::{self, ByPath, Opened};
use crate::pool::Pool;
use crate::queue::QcowQueue;
use crate::recovery::{self, SavedFiles, SavedImage, refused};
use serde::Deserialize;
use shadowbell_disk::{CheckpointError, Disk, DiskInfo, Queue, ReportExtent, Wait};
use shadowbell_disk_file::{FileOptions, ImageFile};
use shadowbell_state::Descriptors;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, io};

/// Key of a qcow2 image in a checkpoint.
const KEY: &str = "qcow2";
/// Reason why a checkpoint of another disk type is refused.
const NO_STATE: &str = "its stored state is not that of a qcow2 image";

/// qcow2 image.
///
/// While the disk is open, the image and its backing files are locked like raw images. The reserve
/// (clusters that are counted for later allocations) is released when the disk and all its queues
/// are dropped.
#[derive(Clone)]
pub struct Qcow2Disk {
    pool: Arc<Pool>,
    path: PathBuf,
}

impl Qcow2Disk {
    /// Opens the image at `path`. The option `format` is ignored. With `aio=threads`, or without
    /// io_uring, threads execute all requests.
    ///
    /// # Errors
    /// [`OpenError`]: the message says what is wrong with the image and what to do.
    pub fn open(path: &Path, options: &FileOptions) -> Result<Self, OpenError> {
        let opened = open::open(path, options, &mut ByPath)?;
        Ok(Self::of(path, opened, options.block_size.unwrap_or(512)))
    }

    /// Recovers the image of a dead process. That process opened it with the same options, and
    /// stored `state` as its [checkpoint](Disk::checkpoint). Returns when no request of the dead
    /// process can reach the image any more. Calls `wait` repeatedly until then.
    ///
    /// # Errors
    /// [`OpenError`] if the image has been replaced, or `wait` gives up.
    pub fn recover(
        path: &Path,
        options: &FileOptions,
        state: &serde_json::Value,
        fds: &mut Descriptors,
        wait: Wait<'_>,
    ) -> Result<Self, OpenError> {
        let kept = state.get(KEY).map(SavedImage::deserialize);
        let kept = match kept {
            Some(Ok(kept)) => kept,
            Some(Err(error)) => return Err(refused(path, error.to_string())),
            None => return Err(refused(path, NO_STATE.to_owned())),
        };
        let block_size = options.block_size.unwrap_or(512);
        if block_size != kept.block_size {
            return Err(refused(path, "it has another block size".to_owned()));
        }
        let opened = open::open(path, options, &mut SavedFiles::new(&kept, fds, wait))?;
        let disk = Self::of(path, opened, block_size);
        let image = disk.pool.image();
        if image.info.read_only && !kept.read_only {
            return Err(refused(path, "it is no longer writable".to_owned()));
        }
        if image.info.blocks != kept.blocks {
            return Err(refused(path, "it has another size".to_owned()));
        }
        image.set_lost(kept.lost);
        Ok(disk)
    }

    /// True if `state` is the checkpoint of a qcow2 image.
    #[must_use]
    pub fn is_checkpoint(state: &serde_json::Value) -> bool {
        state.get(KEY).is_some()
    }

    fn of(path: &Path, opened: Opened, block_size: u32) -> Self {
        let header = &opened.format.header;
        let (size, version, bits) = (header.size, header.version, header.cluster_bits);
        let name = path.display().to_string();
        let mut info = DiskInfo::new(block_size, size / u64::from(block_size));
        info.read_only = opened.files.first().is_none_or(ImageFile::is_read_only);
        info.volatile_cache = !info.read_only;
        // Discarded blocks must read as zeroes, even if the backing file has data at their offset.
        // That needs zero clusters, which version 2 does not have.
        info.discard = !info.read_only && version >= 3;
        info.granularity = ((1 << bits) / block_size).max(1);
        let pool = Arc::new(Pool::new(Image::new(opened, info, name)));
        Self { pool, path: path.to_owned() }
    }

    /// True if a request for these bytes would take the fast path now: its clusters are contiguous
    /// in the file, and the map permits the access (a write if `writes` is true). Clusters are
    /// added to the map after the first request to them or to their neighbours. Compressed clusters
    /// are never added, and shared clusters only on a read-only disk.
    #[must_use]
    pub fn uses_fast_path(&self, offset: u64, len: u64, writes: bool) -> bool {
        let Some(map) = &self.pool.image().map else { return false };
        let entered = map.enter(offset, len, writes);
        if let Some((_, entered)) = entered {
            map.leave(entered);
        }
        entered.is_some()
    }

    /// Describes the image for the operator: `qcow2 version 3, clusters of 64 KiB, 1 MiB in the
    /// file`.
    #[must_use]
    pub fn describe(&self) -> String {
        let image = self.pool.image();
        let below = match &image.format.header.backing {
            Some((name, _)) => format!(", backing file {name}"),
            None => String::new(),
        };
        format!(
            "qcow2 version {}, clusters of {}, {} in the file{below}",
            image.format.header.version,
            binary(1 << image.format.header.cluster_bits),
            binary(image.allocated()),
        )
    }
}

/// Formats a size with a binary unit: 64 KiB, 1.5 GiB.
fn binary(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let power = (bytes.max(1).ilog2() / 10) as usize;
    let unit = units.get(power).copied().unwrap_or("B");
    let whole = 1_u64 << (10 * power);
    if bytes.is_multiple_of(whole) {
        format!("{} {unit}", bytes / whole)
    } else {
        format!("{:.1} {unit}", bytes as f64 / whole as f64)
    }
}

impl Disk for Qcow2Disk {
    fn info(&self) -> DiskInfo {
        self.pool.image().info.clone()
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(QcowQueue::new(Arc::clone(&self.pool))?))
    }

    fn queue_files(&self) -> u64 {
        3
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn is_deleted(&self) -> bool {
        self.pool.image().files.first().is_some_and(ImageFile::is_deleted)
    }

    fn extents(&self, offset: u64, len: u64, report: &mut ReportExtent<'_>) {
        self.pool.image().extents(offset, len, report);
    }

    fn checkpoint(&self, fds: &mut Descriptors) -> Result<serde_json::Value, CheckpointError> {
        let system = |source| CheckpointError::System { disk: self.name(), source };
        let image = self.pool.image();
        let kept = recovery::save(image, fds).map_err(system)?;
        Ok(serde_json::json!({ KEY: kept }))
    }

    fn on_change(&self, changed: Box<dyn Fn() + Send + Sync>) {
        self.pool.image().on_loss(changed);
    }

    fn release_lock(&self) {
        self.pool.release_lock();
    }

    fn is_full(&self) -> bool {
        self.pool.image().is_full()
    }

    fn has_lost_writes(&self) -> bool {
        self.pool.image().has_lost_writes()
    }
}

impl fmt::Debug for Qcow2Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let image = self.pool.image();
        f.debug_struct("Qcow2Disk")
            .field("path", &self.path)
            .field("header", &image.format.header)
            .field("files", &image.files.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::create::create;
    use crate::pool::{Ended, Job, MAX_THREADS};
    use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
    use rustix::time::Timespec;
    use shadowbell_disk::{DiskError, Op, Request, Submitted};
    use shadowbell_memory::Segments;
    use shadowbell_testing::wait;

    /// An I/O thread reaps only queues with pending requests. So the late completion of a cancelled
    /// read must not keep its descriptor readable for the thread.
    #[test]
    fn the_end_of_a_cancelled_read_wakes_the_owner_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.qcow2");
        create(&path, 1 << 20).unwrap();
        let disk = Qcow2Disk::open(&path, &FileOptions::default()).unwrap();
        let mut queue = disk.queue().unwrap();
        disk.pool.set_threads(MAX_THREADS);
        let none = &mut Segments::default();
        let request = Request { op: Op::Verify, offset: 0, len: 4096 };
        assert_eq!(queue.submit(7, &request, none), Submitted::Pending);
        queue.commit();
        let job = disk.pool.start_by_hand();
        disk.pool.set_threads(0);
        let Job { id, buffer, to, .. } = job.unwrap();
        queue.cancel(7);
        let mut ended = Vec::new();
        queue.reap(&mut |tag, result, _| ended.push((tag, result)));
        assert_eq!((ended, queue.pending()), (vec![(7, Err(DiskError::Cancelled))], 0));
        // Waits in the same way as an I/O thread.
        let epoll = epoll::create(CreateFlags::CLOEXEC).unwrap();
        let edges = if queue.wakes_by_edges() { EventFlags::ET } else { EventFlags::empty() };
        let fd = queue.wake_fd().unwrap();
        epoll::add(&epoll, fd, EventData::new_u64(0), EventFlags::IN | edges).unwrap();
        let wakes = || {
            let mut events = Vec::with_capacity(1);
            let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
            let events = rustix::buffer::spare_capacity(&mut events);
            epoll::wait(&epoll, events, Some(&zero)).unwrap()
        };
        assert_eq!(wakes(), 0);
        to.push(Ended { id, result: Ok(()), buffer });
        assert_eq!([wakes(), wakes()], [1, 0]);
        // The next request must wake the thread again.
        let flush = Request { op: Op::Flush, offset: 0, len: 0 };
        assert_eq!(queue.submit(8, &flush, none), Submitted::Pending);
        queue.commit();
        let mut ended = Vec::new();
        loop {
            queue.reap(&mut |tag, result, _| ended.push((tag, result)));
            if queue.pending() == 0 {
                break;
            }
            wait::readable("a wake-up", &epoll);
        }
        assert_eq!(ended, [(8, Ok(()))]);
    }

    #[test]
    fn sizes_are_binary() {
        for (bytes, text) in [
            (0, "0 B"),
            (512, "512 B"),
            (65536, "64 KiB"),
            (3 << 19, "1.5 MiB"),
            (1 << 40, "1 TiB"),
        ] {
            assert_eq!(binary(bytes), text);
        }
    }
}
