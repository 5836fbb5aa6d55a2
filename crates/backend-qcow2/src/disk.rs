//! An image as a disk.

use crate::error::OpenError;
use crate::image::Image;
use crate::open;
use crate::pool::Pool;
use crate::queue::QcowQueue;
use shadowbell_backend::{Disk, DiskInfo, FileOptions, Queue, Tell};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, io};

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
    /// Opens the image at `path`. Of the options, `format` is not looked at, and neither is `aio`.
    ///
    /// # Errors
    /// [`OpenError`], in a sentence that says what is wrong with the image and what to do.
    pub fn open(path: &Path, options: &FileOptions) -> Result<Self, OpenError> {
        let opened = open::open(path, options)?;
        let block_size = options.block_size.unwrap_or(512);
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
