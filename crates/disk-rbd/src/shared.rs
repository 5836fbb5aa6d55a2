//! Shared state of a disk's queues.

use crate::sys::{Cache, Image};
use shadowbell_disk::DiskInfo;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Open image and its properties.
pub(crate) struct Opened {
    /// `Some` until the drop.
    pub(crate) image: Option<Image>,
    pub(crate) name: String,
    /// Number of bytes that are contiguous in an object.
    pub(crate) unit: u64,
    /// True if the last write failed for lack of space.
    pub(crate) is_full: AtomicBool,
    pub(crate) cache: Cache,
    /// True if the image has checkpoints: answered writes must be durable.
    pub(crate) lasts: AtomicBool,
}

impl Drop for Opened {
    fn drop(&mut self) {
        // Closing waits for the cluster, and the last handle may be dropped by an I/O thread.
        if let Some(mut image) = self.image.take() {
            image.closes();
            let closer = std::thread::Builder::new().name("sb-rbd-close".into());
            // Without a thread, the failed spawn drops the image on this thread.
            let _ = closer.spawn(move || drop(image));
        }
    }
}

/// Image as a disk of one size.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) opened: Arc<Opened>,
    pub(crate) info: DiskInfo,
}
