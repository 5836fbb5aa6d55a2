//! What Ceph's threads hand back to one queue.

use parking_lot::Mutex;
use shadowbell_memory::EventFd;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// A call that is over.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) id: u64,
    /// What it returned: an error's number, negative, or none.
    pub(crate) value: i64,
    /// The buffer that it had.
    pub(crate) buffer: Vec<u8>,
}

pub(crate) struct Completions {
    ended: Mutex<Vec<Ended>>,
    /// There is something in `ended`, or the owner of the queue is to be woken.
    is_signalled: AtomicBool,
    event: EventFd,
}

impl Completions {
    pub(crate) fn new() -> io::Result<Self> {
        let event = EventFd::new()?;
        Ok(Self { ended: Mutex::default(), is_signalled: AtomicBool::new(false), event })
    }

    pub(crate) fn push(&self, ended: Ended) {
        self.ended.lock().push(ended);
        self.signal();
    }

    /// Makes the descriptor readable.
    pub(crate) fn signal(&self) {
        if !self.is_signalled.swap(true, Ordering::AcqRel) {
            self.event.signal();
        }
    }

    /// Moves what has ended to the end of `into`.
    pub(crate) fn take(&self, into: &mut Vec<Ended>) {
        if !self.is_signalled.load(Ordering::Acquire) {
            return;
        }
        // Before the flag: who signals from here on makes it readable again.
        self.event.drain();
        self.is_signalled.swap(false, Ordering::AcqRel);
        into.append(&mut self.ended.lock());
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
