//! Exit of the process while images are open.
//!
//! An image is closed on its own thread, because that may wait for the cluster. At the exit of the
//! process, Ceph's libraries run their destructors whatever their threads are doing, and crash if a
//! thread is closing an image. So the exit waits until images are closed, with a limit. If images
//! are still open then, the process exits without running the destructors.

use parking_lot::{Condvar, Mutex};
use std::time::Duration;

/// Maximum delay of the exit.
const LONGEST: Duration = Duration::from_secs(5);

/// Number of images.
struct There {
    open: usize,
    /// Number of open images that are being closed.
    closing: usize,
}

static THERE: Mutex<There> = Mutex::new(There { open: 0, closing: 0 });
static CHANGED: Condvar = Condvar::new();

/// Counts one image, until it is closed and this is dropped.
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

/// Waits until no image is being closed, with a limit. Returns true if no image is open.
pub(crate) fn wait() -> bool {
    let mut there = THERE.lock();
    let is_closing = |there: &mut There| there.closing != 0;
    let _ = CHANGED.wait_while_for(&mut there, is_closing, LONGEST);
    there.open == 0
}
