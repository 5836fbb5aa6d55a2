//! Changes of a disk's size or write protection: errors, and notification of size changes.
//!
//! A disk whose storage signals a new size sets a flag ([`Disk::take_size_change`]) and calls
//! [`notify_resize`]. The thread that applies size changes sleeps in [`SizeChanges::wait`] and then
//! checks all disks.
//!
//! [`Disk::take_size_change`]: crate::Disk::take_size_change

use parking_lot::{Condvar, Mutex};
use std::io;

/// Error of changing the size or the write protection of an open disk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// This disk type cannot be resized.
    #[error(
        "{disk}: this disk type cannot be resized while it is open; remove the namespace, change \
         its disk, and add it again"
    )]
    Impossible {
        /// Name of the disk.
        disk: String,
    },
    /// The write protection of this disk type is fixed when the disk is opened.
    #[error(
        "{disk}: its write protection is fixed when it is opened; remove the namespace and add \
         it again"
    )]
    Opened {
        /// Name of the disk.
        disk: String,
    },
    /// A disk in anonymous memory, which belongs to this process alone, cannot grow.
    #[error("{disk}: memory that is private to this process cannot grow")]
    Private {
        /// Name of the disk.
        disk: String,
    },
    /// The storage is smaller than the requested size.
    #[error(
        "{disk}: its storage has {there} bytes, fewer than the requested {wanted}; make it larger \
         first, such as a logical volume by `lvextend`"
    )]
    Short {
        /// Name of the disk.
        disk: String,
        /// Current size of the storage in bytes.
        there: u64,
        /// Requested size in bytes.
        wanted: u64,
    },
    /// A disk with metadata cannot be resized, because the position of the metadata depends on the
    /// size of the disk.
    #[error(
        "{disk}: a disk with metadata cannot be resized, because their position depends on \
             its size"
    )]
    Metadata {
        /// Name of the disk.
        disk: String,
    },
    /// A zoned disk cannot be resized, because the number of its zones is fixed.
    #[error("{disk}: a zoned disk cannot be resized, because the number of its zones is fixed")]
    Zoned {
        /// Name of the disk.
        disk: String,
    },
    /// The size is zero or not a multiple of the block size.
    #[error(
        "{disk}: {bytes} bytes is no valid size with blocks of {block_size} bytes: it must be a \
         multiple of that, and at least one block"
    )]
    Size {
        /// Name of the disk.
        disk: String,
        /// Requested size in bytes.
        bytes: u64,
        /// Block size in bytes.
        block_size: u32,
    },
    /// A system call failed.
    #[error("{disk}: its size cannot be changed: {source}")]
    System {
        /// Name of the disk.
        disk: String,
        /// The system's error.
        source: io::Error,
    },
}

/// Number of notifications so far, from all disks of the process.
static RESIZES: Mutex<u64> = Mutex::new(0);
static CHANGED: Condvar = Condvar::new();

/// Wakes all threads in [`SizeChanges::wait`]. Called if a disk may have a new size, if the
/// [stopped](crate::Disk::stopped) state of a disk may have changed, or if a waiting thread has to
/// end.
pub fn notify_resize() {
    *RESIZES.lock() += 1;
    CHANGED.notify_all();
}

/// Receiver of notifications for one thread: the number of notifications that the thread has seen.
#[derive(Debug, Default)]
pub struct SizeChanges(u64);

impl SizeChanges {
    /// Blocks until there is a notification that the previous call did not see.
    pub fn wait(&mut self) {
        let mut changes = RESIZES.lock();
        let mut is_old = |changes: &mut u64| *changes == self.0;
        CHANGED.wait_while(&mut changes, &mut is_old);
        self.0 = *changes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiter_gets_earlier_and_later_size_changes() {
        notify_resize();
        let mut changes = SizeChanges::default();
        changes.wait();
        let teller = std::thread::spawn(notify_resize);
        changes.wait();
        teller.join().unwrap();
    }
}
