//! RBD image as a disk.

use crate::error::OpenError;
use crate::queue::RbdQueue;
use crate::recovery::{KEY, SavedImage, addresses, reach, refused};
use crate::shared::{Opened, Shared};
use crate::sys::{Cache, Failure, Image};
use crate::uri::RbdSpec;
use serde::Deserialize;
use serde_json::{Value, json};
use shadowbell_disk::{CheckpointError, Disk, DiskInfo, Queue, ResizeError, Wait};
use shadowbell_state::{Descriptors, WrongOrder, is_wrong};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{fmt, io};

/// RBD image of a Ceph cluster.
///
/// If the image has the feature `exclusive-lock`, the first write acquires that lock of Ceph. If
/// another client then writes to the image, Ceph passes the lock to that client. The image is
/// closed when the disk and all its queues are dropped.
#[derive(Clone)]
pub struct RbdDisk(Shared);

impl RbdDisk {
    /// Opens the image. Waits until the cluster answers.
    ///
    /// # Errors
    /// [`OpenError`]: the message says what is wrong and what to do.
    pub fn open(spec: &RbdSpec) -> Result<Self, OpenError> {
        Self::open_excluding(spec, &[], true)
    }

    /// Opens the image without a cache in this process. Each write completes only when the cluster
    /// has stored it, as crash recovery requires. So [checkpoints](Disk::checkpoint) do not slow
    /// writes down further.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open_recoverable(spec: &RbdSpec) -> Result<Self, OpenError> {
        Self::open_excluding(spec, &[], false)
    }

    /// Recovers the disk of a dead process. That process opened it by the same specification, and
    /// stored `state` as its [checkpoint](Disk::checkpoint). Returns when no request of the dead
    /// process can reach the image any more. Calls `wait` repeatedly until then, and while the
    /// cluster is unreachable.
    ///
    /// # Errors
    /// [`OpenError`] if the image has been replaced, or `wait` gives up.
    pub fn recover(spec: &RbdSpec, state: &Value, wait: Wait<'_>) -> Result<Self, OpenError> {
        let saved = match state.get(KEY).map(SavedImage::deserialize) {
            Some(Ok(saved)) => saved,
            Some(Err(error)) => return Err(refused(spec, error.to_string())),
            None => return Err(refused(spec, "its stored state is not that of an RBD image")),
        };
        let out = if is_wrong(WrongOrder::NoFence) { Vec::new() } else { saved.addresses.clone() };
        let named = spec.clone();
        let mut disk = reach(spec, wait, move || Self::open_excluding(&named, &out, false))?;
        let now = disk.0.info.blocks;
        disk.0.info =
            saved.with_previous_properties(&disk.0.info).map_err(|why| refused(spec, why))?;
        if disk.0.info.blocks != now
            && let Some(image) = &disk.0.opened.image
        {
            image.set_changed();
        }
        Ok(disk)
    }

    /// True if `state` is the checkpoint of an RBD disk.
    #[must_use]
    pub fn is_checkpoint(state: &Value) -> bool {
        state.get(KEY).is_some()
    }

    /// Opens the image after the clients `dead` were added to the cluster's blocklist. `caches`
    /// permits librbd's cache.
    fn open_excluding(spec: &RbdSpec, dead: &[String], caches: bool) -> Result<Self, OpenError> {
        let disk = || spec.to_string();
        let failed = |what, source| OpenError::Ceph { disk: disk(), what, source };
        let open = |caches| {
            Image::open(spec, dead, caches).map_err(|failure| match failure {
                Failure::Library(why) => OpenError::Library { disk: disk(), why },
                Failure::Call(what, source) => failed(what, source),
            })
        };
        let mut image = open(caches)?;
        let is_cached = image.cache() != Cache::None;
        if is_cached != caches {
            // The cluster's administrator has enforced or forbidden the cache. The image is opened
            // again for the effective setting, because a write without space is handled differently
            // with a cache (see `Image::open`).
            image = open(is_cached)?;
        }
        let size = image.size().map_err(|source| failed("querying its size", source))?;
        let block_size = spec.block_size;
        let blocks = size / u64::from(block_size);
        if blocks == 0 || !size.is_multiple_of(block_size.into()) || size > i64::MAX as u64 {
            return Err(OpenError::Size { disk: disk(), size, block_size });
        }
        let mut info = DiskInfo::new(block_size, blocks);
        info.read_only = spec.read_only;
        // librbd may cache writes in this process.
        info.volatile_cache = !info.read_only;
        info.discard = !info.read_only;
        let unit = image.stripe_unit();
        let granularity = unit.clamp(u64::from(block_size), 1 << 22);
        info.granularity = (granularity / u64::from(block_size)) as u32;
        let (cache, is_full, lasts) =
            (image.cache(), AtomicBool::new(false), AtomicBool::new(false));
        let opened = Opened {
            image: Some(image),
            name: disk(),
            unit,
            cache,
            is_full,
            lasts,
            orphans: Arc::default(),
        };
        Ok(Self(Shared { opened: Arc::new(opened), info }))
    }
}

impl Disk for RbdDisk {
    fn info(&self) -> DiskInfo {
        self.0.info.clone()
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(RbdQueue::new(self.0.clone())?))
    }

    fn queue_files(&self) -> u64 {
        1
    }

    fn name(&self) -> String {
        self.0.opened.name.clone()
    }

    /// Returns the checkpoint. From then on, a write completes only when the cluster has stored it.
    /// If librbd has a cache, this layer flushes it after each write.
    fn checkpoint(&self, _: &mut Descriptors) -> Result<Value, CheckpointError> {
        let Shared { opened, info } = &self.0;
        let Some(image) = &opened.image else {
            return Err(CheckpointError::Unfenced { disk: self.name(), why: "it is closed" });
        };
        // A read-only client cannot change the image after the death of the process, so the next
        // process need not add it to the blocklist, and its address is not stored.
        let mut clients = Vec::new();
        if !info.read_only {
            let system = |source| CheckpointError::System { disk: self.name(), source };
            clients = addresses(&image.addresses().map_err(system)?);
            if clients.is_empty() {
                let why = "the cluster does not report the address of this client";
                return Err(CheckpointError::Unfenced { disk: self.name(), why });
            }
            opened.lasts.store(true, Ordering::Relaxed);
        }
        Ok(json!({ KEY: SavedImage::new(info, clients) }))
    }

    fn is_full(&self) -> bool {
        self.0.opened.is_full.load(Ordering::Relaxed)
    }

    fn orphans(&self) -> usize {
        self.0.opened.orphans.len()
    }

    fn take_size_change(&self) -> bool {
        self.0.opened.image.as_ref().is_some_and(Image::take_changed)
    }

    fn resized(&self, bytes: Option<u64>) -> Result<Arc<dyn Disk>, ResizeError> {
        let disk = self.name();
        let there = match self.0.opened.image.as_ref().map(Image::size) {
            Some(Ok(size)) => size,
            Some(Err(source)) => return Err(ResizeError::System { disk, source }),
            None => return Err(ResizeError::Impossible { disk }),
        };
        let wanted = bytes.unwrap_or(there);
        if wanted > there {
            return Err(ResizeError::Short { disk, there, wanted });
        }
        let block_size = self.0.info.block_size;
        if wanted == 0 || !wanted.is_multiple_of(block_size.into()) {
            return Err(ResizeError::Size { disk, bytes: wanted, block_size });
        }
        let mut resized = self.clone();
        resized.0.info.blocks = wanted / u64::from(block_size);
        Ok(Arc::new(resized))
    }
}

impl fmt::Debug for RbdDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RbdDisk")
            .field("name", &self.0.opened.name)
            .field("info", &self.0.info)
            .finish_non_exhaustive()
    }
}
