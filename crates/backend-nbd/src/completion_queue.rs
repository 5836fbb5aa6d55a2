//! Completion queue of one disk queue on a connection, and its wake-up.

use parking_lot::Mutex;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use shadowbell_backend::DiskError;
use shadowbell_memory::EventFd;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// An ended subrequest.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) task: u32,
    /// Offset in the request's data, and length.
    pub(crate) at: u64,
    pub(crate) len: u32,
    pub(crate) result: Result<(), DiskError>,
    /// Data of a read.
    pub(crate) data: Vec<u8>,
}

pub(crate) struct CompletionQueue {
    ended: Mutex<Vec<Ended>>,
    /// `ended` has entries, or the queue has other work.
    signalled: AtomicBool,
    event: EventFd,
    /// Readable while `event` or the connection is.
    set: OwnedFd,
}

impl CompletionQueue {
    pub(crate) fn new() -> io::Result<Self> {
        let event = EventFd::new()?;
        let set = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&set, &event, EventData::new_u64(0), EventFlags::IN)?;
        Ok(Self { ended: Mutex::default(), signalled: AtomicBool::new(false), event, set })
    }

    /// Adds a completion found by another thread.
    pub(crate) fn push(&self, ended: Ended) {
        self.ended.lock().push(ended);
        self.signal();
    }

    /// Wakes the queue's thread.
    pub(crate) fn signal(&self) {
        if !self.signalled.swap(true, Ordering::AcqRel) {
            self.event.signal();
        }
    }

    /// Appends all completions to `into`. Returns false if there was no signal.
    pub(crate) fn take(&self, into: &mut Vec<Ended>) -> bool {
        if !self.signalled.load(Ordering::Acquire) {
            return false;
        }
        // The event is drained before the flag is cleared, otherwise a signal between the two is
        // lost.
        self.event.drain();
        self.signalled.swap(false, Ordering::AcqRel);
        into.append(&mut self.ended.lock());
        true
    }

    /// Wakes the queue's thread for input on this connection from now on.
    pub(crate) fn watch(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::add(&self.set, socket, EventData::new_u64(1), EventFlags::IN)?)
    }

    /// Adds or removes the wake-up for room in the connection's socket buffer.
    pub(crate) fn watch_room(&self, socket: BorrowedFd<'_>, room: bool) {
        let flags = if room { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
        // A connection that is not in the set has ended.
        let _ = epoll::modify(&self.set, socket, EventData::new_u64(1), flags);
    }

    /// Stops waking for this connection.
    pub(crate) fn forget(&self, socket: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.set, socket);
    }
}

impl AsFd for CompletionQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}
