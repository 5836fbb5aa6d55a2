//! Exit of the process while images are open.
//!
//! A separate thread closes an image, because closing may wait for the cluster. At the exit of the
//! process, the destructors of Ceph's libraries run while other threads are active; they crash if a
//! thread is closing an image. So the exit waits, with a limit, until images are closed. If images
//! are still open afterwards, the process exits without running the destructors.

use parking_lot::{Condvar, Mutex};
use std::time::Duration;

/// Maximum time for which the exit waits.
const LONGEST: Duration = Duration::from_secs(5);

/// Counts of images in this process.
struct There {
    open: usize,
    /// Number of images that are being closed.
    closing: usize,
}

static THERE: Mutex<There> = Mutex::new(There { open: 0, closing: 0 });
static CHANGED: Condvar = Condvar::new();

/// Entry of one image in the counts. Dropping it means that the image is closed.
pub(crate) struct Counted {
    is_closing: bool,
}

impl Counted {
    pub(crate) fn new() -> Self {
        THERE.lock().open += 1;
        Self { is_closing: false }
    }

    /// Marks the image as being closed.
    pub(crate) fn closes(&mut self) {
        if !std::mem::replace(&mut self.is_closing, true) {
            THERE.lock().closing += 1;
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut there = THERE.lock();
        there.open -= 1;
        there.closing -= usize::from(self.is_closing);
        CHANGED.notify_all();
    }
}

/// Waits, with a limit, until no image is being closed. Returns true if no image is open.
pub(crate) fn wait() -> bool {
    let mut there = THERE.lock();
    let is_closing = |there: &mut There| there.closing != 0;
    let _ = CHANGED.wait_while_for(&mut there, is_closing, LONGEST);
    there.open == 0
}
