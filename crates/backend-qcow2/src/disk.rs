//! An image as a disk.

use crate::error::OpenError;
use crate::image::Image;
use crate::kept::{self, Kept, KeptImage, refused};
use crate::open::{self, ByPath, Opened};
use crate::pool::Pool;
use crate::queue::QcowQueue;
use serde::Deserialize;
use shadowbell_backend::{Disk, DiskInfo, FileOptions, HandOverError, Queue, Tell, Wait};
use shadowbell_state::Descriptors;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, io};

/// What says that a disk was kept as a qcow2 image.
const KEY: &str = "qcow2";

/// A qcow2 image.
///
/// While it is open, the image is locked as a raw one is, and so are its backing files, if it may
/// have any. With the last handle on it, the queues included, its tables are written.
#[derive(Clone)]
pub struct Qcow2Disk {
    pool: Arc<Pool>,
    path: PathBuf,
}

impl Qcow2Disk {
    /// Opens the image at `path`. Of the options, `format` is not looked at. With `aio=threads`, or
    /// where there is no io_uring, all requests go by threads.
    ///
    /// # Errors
    /// [`OpenError`], in a sentence that says what is wrong with the image and what to do.
    pub fn open(path: &Path, options: &FileOptions) -> Result<Self, OpenError> {
        Self::of(path, open::open(path, options, &mut ByPath)?, options.block_size.unwrap_or(512))
    }

    /// Goes on with the image of a process that has died, which had it
    /// [kept](Disk::keep) as `state` and had opened it with the same options. Returns when nothing
    /// of what that process had under way can reach the image any more; `wait` is called for as long
    /// as it can.
    ///
    /// # Errors
    /// [`OpenError`]; it is not that image any more, or `wait` waits no longer.
    pub fn recover(
        path: &Path,
        options: &FileOptions,
        state: &serde_json::Value,
        fds: &mut Descriptors,
        wait: Wait<'_>,
    ) -> Result<Self, OpenError> {
        let kept = state.get(KEY).map(KeptImage::deserialize);
        let kept = match kept {
            Some(Ok(kept)) => kept,
            Some(Err(error)) => return Err(refused(path, error.to_string())),
            None => return Err(refused(path, "it was no qcow2 image".to_owned())),
        };
        let opened = open::open(path, options, &mut Kept::new(&kept, fds, wait))?;
        let disk = Self::of(path, opened, kept.block_size)?;
        let image = disk.pool.image();
        if image.info.read_only && !kept.read_only {
            return Err(refused(path, "it can not be written any more".to_owned()));
        }
        if image.info.blocks != kept.blocks {
            return Err(refused(path, "it has another size now".to_owned()));
        }
        image.set_lost(kept.lost);
        Ok(disk)
    }

    /// Whether `state` is what the disk of a dead process was kept by, and that was a qcow2 image.
    #[must_use]
    pub fn is_kept_by(state: &serde_json::Value) -> bool {
        state.get(KEY).is_some()
    }

    fn of(path: &Path, opened: Opened, block_size: u32) -> Result<Self, OpenError> {
        let size = opened.header.size;
        let name = path.display().to_string();
        if !size.is_multiple_of(u64::from(block_size)) {
            return Err(OpenError::NotBlockMultiple { path: name, size, block_size });
        }
        let mut info = DiskInfo::new(block_size, size / u64::from(block_size));
        info.read_only = opened.file.is_read_only();
        info.volatile_cache = !info.read_only;
        // Version 2 can not say that a cluster is zero, whatever is below.
        info.discard = !info.read_only && opened.header.version >= 3;
        info.granularity = ((1 << opened.header.cluster_bits) / block_size).max(1);
        let pool = Arc::new(Pool::new(Image::new(opened, info, name)));
        Ok(Self { pool, path: path.to_owned() })
    }

    /// Whether a request for these bytes goes straight to the image's file now: it reads, or
    /// `writes`, clusters that are allocated, not shared and not compressed, in one piece of the
    /// file, and a request has gone to them or near them before.
    #[must_use]
    pub fn goes_straight(&self, offset: u64, len: u64, writes: bool) -> bool {
        let Some(map) = &self.pool.image().map else { return false };
        let entered = map.enter(offset, len, writes);
        if let Some((_, entered)) = entered {
            map.leave(entered);
        }
        entered.is_some()
    }

    /// What the image is, in a few words: `qcow2 version 3, clusters of 64 KiB, 1 MiB in the file`.
    #[must_use]
    pub fn describe(&self) -> String {
        let image = self.pool.image();
        let below = match &image.header.backing {
            Some((name, _)) => format!(", the difference to {name}"),
            None => String::new(),
        };
        format!(
            "qcow2 version {}, clusters of {}, {} in the file{below}",
            image.header.version,
            binary(1 << image.header.cluster_bits),
            binary(image.allocated()),
        )
    }
}

/// A size as people read it: 64 KiB, 1.5 GiB.
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

    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn extents(&self, offset: u64, len: u64, tell: &mut Tell<'_>) {
        self.pool.image().extents(offset, len, tell);
    }

    fn keep(&self, fds: &mut Descriptors) -> Result<serde_json::Value, HandOverError> {
        let system = |source| HandOverError::System { disk: self.name(), source };
        let image = self.pool.image();
        image.last().map_err(|error| system(io::Error::other(error.to_string())))?;
        let kept = kept::keep(image, fds).map_err(system)?;
        Ok(serde_json::json!({ KEY: kept }))
    }

    fn on_change(&self, changed: Box<dyn Fn() + Send + Sync>) {
        self.pool.image().on_loss(changed);
    }

    fn is_full(&self) -> bool {
        self.pool.image().is_full()
    }

    fn has_lost(&self) -> bool {
        self.pool.image().has_lost()
    }
}

impl fmt::Debug for Qcow2Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let image = self.pool.image();
        f.debug_struct("Qcow2Disk")
            .field("path", &self.path)
            .field("header", &image.header)
            .field("below", &image.below.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
