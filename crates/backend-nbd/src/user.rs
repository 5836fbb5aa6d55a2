//! What a queue and a connection share: what has ended, and how the queue's thread is woken.

use parking_lot::Mutex;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use shadowbell_backend::DiskError;
use shadowbell_memory::EventFd;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// A part of a request that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) task: u32,
    /// Where it begins in the request's data, and how long it is.
    pub(crate) at: u64,
    pub(crate) len: u32,
    pub(crate) result: Result<(), DiskError>,
    /// What was read.
    pub(crate) data: Vec<u8>,
}

pub(crate) struct User {
    ended: Mutex<Vec<Ended>>,
    /// There is something in `ended`, or something else to look at.
    signalled: AtomicBool,
    event: EventFd,
    /// Readable when `event` is or the connection is.
    set: OwnedFd,
}

impl User {
    pub(crate) fn new() -> io::Result<Self> {
        let event = EventFd::new()?;
        let set = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&set, &event, EventData::new_u64(0), EventFlags::IN)?;
        Ok(Self { ended: Mutex::default(), signalled: AtomicBool::new(false), event, set })
    }

    /// Something has ended, which another thread found out.
    pub(crate) fn push(&self, ended: Ended) {
        self.ended.lock().push(ended);
        self.signal();
    }

    /// There is something to do.
    pub(crate) fn signal(&self) {
        if !self.signalled.swap(true, Ordering::AcqRel) {
            self.event.signal();
        }
    }

    /// Appends what has ended. Whether there was a signal.
    pub(crate) fn take(&self, into: &mut Vec<Ended>) -> bool {
        if !self.signalled.load(Ordering::Acquire) {
            return false;
        }
        // Before the flag: who signals from here on makes it readable again.
        self.event.drain();
        self.signalled.swap(false, Ordering::AcqRel);
        into.append(&mut self.ended.lock());
        true
    }

    /// Wakes for what comes on this connection from now on.
    pub(crate) fn watch(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::add(&self.set, socket, EventData::new_u64(1), EventFlags::IN)?)
    }

    /// Wakes also when the connection takes more, or no longer for that.
    pub(crate) fn watch_room(&self, socket: BorrowedFd<'_>, room: bool) {
        let flags = if room { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
        // One that is not in the set has ended.
        let _ = epoll::modify(&self.set, socket, EventData::new_u64(1), flags);
    }

    /// Does not wake for this connection any more.
    pub(crate) fn forget(&self, socket: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.set, socket);
    }
}

impl AsFd for User {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}
