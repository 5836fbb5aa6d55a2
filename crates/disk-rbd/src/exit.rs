//! Exit of the process while images are open.
//!
//! A separate thread closes an image, because closing may wait for the cluster. At the exit of the
//! process, the destructors of Ceph's libraries run while other threads are still active. They
//! crash if another thread is closing an image. So the exit waits, with a limit, until images are
//! closed. If images are still open afterwards, the process exits without running the destructors.

use parking_lot::{Condvar, Mutex};
use std::time::Duration;

/// Maximum time for which the exit waits.
const LONGEST: Duration = Duration::from_secs(5);

/// Counts of images in this process.
struct OpenImages {
    open: usize,
    /// Number of images that are being closed.
    closing: usize,
}

static OPEN_IMAGES: Mutex<OpenImages> = Mutex::new(OpenImages { open: 0, closing: 0 });
static CHANGED: Condvar = Condvar::new();

/// Registration of one open image in the counts. Dropping it records that the image is closed.
pub(crate) struct Counted {
    is_closing: bool,
}

impl Counted {
    pub(crate) fn new() -> Self {
        OPEN_IMAGES.lock().open += 1;
        Self { is_closing: false }
    }

    /// Marks the image as being closed.
    pub(crate) fn closes(&mut self) {
        if !std::mem::replace(&mut self.is_closing, true) {
            OPEN_IMAGES.lock().closing += 1;
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut images = OPEN_IMAGES.lock();
        images.open -= 1;
        images.closing -= usize::from(self.is_closing);
        CHANGED.notify_all();
    }
}

/// Waits, with a limit, until no image is being closed. Returns true if no image is open.
pub(crate) fn wait() -> bool {
    let mut images = OPEN_IMAGES.lock();
    let is_closing = |images: &mut OpenImages| images.closing != 0;
    let _ = CHANGED.wait_while_for(&mut images, is_closing, LONGEST);
    images.open == 0
}
