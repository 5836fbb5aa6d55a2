//! State that all queues of a disk share.

use crate::sys::{Cache, Image};
use shadowbell_disk::{DiskInfo, Orphans};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Open image and its properties.
pub(crate) struct Opened {
    /// Open image. `None` only while this value is dropped.
    pub(crate) image: Option<Image>,
    pub(crate) name: String,
    /// Stripe unit: number of bytes that are contiguous in an object.
    pub(crate) unit: u64,
    /// True if the last write failed for lack of space.
    pub(crate) is_full: AtomicBool,
    pub(crate) cache: Cache,
    /// Writes in flight whose commands were cancelled.
    pub(crate) orphans: Arc<Orphans>,
    /// True if a writable disk was checkpointed, so that the next process may recover it after a
    /// crash. A write then completes only when the cluster has stored it, because librbd's cache is
    /// lost in a crash.
    pub(crate) lasts: AtomicBool,
}

impl Drop for Opened {
    fn drop(&mut self) {
        // A separate thread closes the image: closing waits for the cluster, and an I/O thread may
        // drop the last handle.
        if let Some(mut image) = self.image.take() {
            image.closes();
            let closer = std::thread::Builder::new().name("sb-rbd-close".into());
            // If no thread can be started, the failed `spawn` drops the image on this thread.
            let _ = closer.spawn(move || drop(image));
        }
    }
}

/// Open image, with the properties of one version of the disk. A version has a fixed size.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) opened: Arc<Opened>,
    pub(crate) info: DiskInfo,
}
