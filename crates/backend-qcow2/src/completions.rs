//! What the threads of a disk hand back to one queue.

use imago::io_buffers::IoBuffer;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use shadowbell_backend::DiskError;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// A job that is over.
pub(crate) struct Ended {
    pub(crate) id: u64,
    pub(crate) result: Result<(), DiskError>,
    pub(crate) buffer: Option<IoBuffer>,
}

/// What a queue and the threads share.
pub(crate) struct Completions {
    ended: Mutex<Vec<Ended>>,
    /// There is something in `ended`, or the owner of the queue is to be woken.
    signalled: AtomicBool,
    /// Readable as long as `signalled` is set.
    event: OwnedFd,
}

impl Completions {
    pub(crate) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { ended: Mutex::default(), signalled: AtomicBool::new(false), event })
    }

    pub(crate) fn push(&self, ended: Ended) {
        let mut list = self.ended.lock();
        list.push(ended);
        self.signal();
    }

    /// Makes the descriptor readable, though nothing has ended.
    pub(crate) fn wake(&self) {
        let _list = self.ended.lock();
        self.signal();
    }

    /// With `ended` locked.
    fn signal(&self) {
        if !self.signalled.swap(true, Ordering::Relaxed) {
            // It can only fail if it was signalled 2^64 times.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// Moves what has ended into `into`, which is empty.
    pub(crate) fn take(&self, into: &mut Vec<Ended>) {
        // Only a hint: who is about to set it makes the descriptor readable as well.
        if !self.signalled.load(Ordering::Relaxed) {
            return;
        }
        let mut list = self.ended.lock();
        self.signalled.store(false, Ordering::Relaxed);
        let mut count = [0; 8];
        // It does not block, and what it says is known.
        let _ = rustix::io::read(&self.event, &mut count);
        std::mem::swap(&mut *list, into);
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
