//! Completion queue of one disk queue, filled by the threads of the disk.

use imago::io_buffers::IoBuffer;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use shadowbell_backend::DiskError;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Completed job.
pub(crate) struct Ended {
    pub(crate) id: u64,
    pub(crate) result: Result<(), DiskError>,
    pub(crate) buffer: Option<IoBuffer>,
}

/// Completion queue, shared by a disk queue and the threads.
pub(crate) struct Completions {
    ended: Mutex<Vec<Ended>>,
    /// True if `ended` has entries, or the owner of the queue has to wake up.
    signalled: AtomicBool,
    /// Readable while `signalled` is set.
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

    /// Makes the descriptor readable without a completion.
    pub(crate) fn wake(&self) {
        let _list = self.ended.lock();
        self.signal();
    }

    /// Sets the signal. The caller holds the lock of `ended`.
    fn signal(&self) {
        if !self.signalled.swap(true, Ordering::Relaxed) {
            // A write fails only after 2^64 signals.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// Moves the completions to `into`, which is empty.
    pub(crate) fn take(&self, into: &mut Vec<Ended>) {
        // Only a hint: a thread that is about to set it makes the descriptor readable, too.
        if !self.signalled.load(Ordering::Relaxed) {
            return;
        }
        let mut list = self.ended.lock();
        self.signalled.store(false, Ordering::Relaxed);
        let mut count = [0; 8];
        // Does not block, and the value is irrelevant.
        let _ = rustix::io::read(&self.event, &mut count);
        std::mem::swap(&mut *list, into);
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
