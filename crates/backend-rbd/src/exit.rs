//! The end of the process.
//!
//! An image is closed by a thread of its own, for that may wait for the cluster. Ceph's libraries
//! take themselves apart when the process ends, whatever their threads are doing, and crash if
//! those are closing an image. So the end waits until images are closed, for a while; and if some
//! are open after that, the process ends without the libraries.

use parking_lot::{Condvar, Mutex};
use std::time::Duration;

/// How long the end of the process waits at most.
const LONGEST: Duration = Duration::from_secs(5);

/// Images that are there.
struct There {
    open: usize,
    /// Of these, those that are being closed.
    closing: usize,
}

static THERE: Mutex<There> = Mutex::new(There { open: 0, closing: 0 });
static CHANGED: Condvar = Condvar::new();

/// One image; dropped when it is closed.
pub(crate) struct Counted {
    is_closing: bool,
}

impl Counted {
    pub(crate) fn new() -> Self {
        THERE.lock().open += 1;
        Self { is_closing: false }
    }

    /// It is being closed from here on.
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

/// Waits until no image is being closed, for a while. Whether none is left.
pub(crate) fn wait() -> bool {
    let mut there = THERE.lock();
    let is_closing = |there: &mut There| there.closing != 0;
    let _ = CHANGED.wait_while_for(&mut there, is_closing, LONGEST);
    there.open == 0
}
