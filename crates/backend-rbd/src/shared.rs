//! What the queues of a disk share.

use crate::sys::{Cache, Image};
use shadowbell_backend::DiskInfo;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// An image that is open, and what is known of it.
pub(crate) struct Opened {
    /// Nothing while it is dropped.
    pub(crate) image: Option<Image>,
    pub(crate) name: String,
    /// Bytes that are one after the other in an object.
    pub(crate) unit: u64,
    /// The last write found no room.
    pub(crate) is_full: AtomicBool,
    pub(crate) cache: Cache,
    /// What was answered has to outlive this process.
    pub(crate) lasts: AtomicBool,
}

impl Drop for Opened {
    fn drop(&mut self) {
        // Closing waits for the cluster, and the last handle may be a worker's.
        if let Some(mut image) = self.image.take() {
            image.closes();
            let closer = std::thread::Builder::new().name("sb-rbd-close".into());
            // Without a thread it is closed here.
            let _ = closer.spawn(move || drop(image));
        }
    }
}

/// An image as a disk of one size.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) opened: Arc<Opened>,
    pub(crate) info: DiskInfo,
}
