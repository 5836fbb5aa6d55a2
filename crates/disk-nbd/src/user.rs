//! A disk queue as seen by its connection: completions of the queue's subrequests, and wake-up of
//! the queue's thread.

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use shadowbell_disk::{CompletionQueue, DiskError};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::task::Wake;

/// Completed subrequest.
#[derive(Debug)]
pub(crate) struct SubrequestResult {
    pub(crate) task: u32,
    /// Offset of the subrequest in the data of the request, and its length.
    pub(crate) at: u64,
    pub(crate) len: u32,
    pub(crate) result: Result<(), DiskError>,
    /// Data of a read.
    pub(crate) data: Vec<u8>,
}

/// Disk queue on a connection.
pub(crate) struct User {
    pub(crate) completions: CompletionQueue<SubrequestResult>,
    /// Readable while `completions` or the connection's socket is readable.
    wakes: OwnedFd,
}

impl User {
    pub(crate) fn new() -> io::Result<Self> {
        let completions = CompletionQueue::new()?;
        let wakes = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&wakes, &completions, EventData::new_u64(0), EventFlags::IN)?;
        Ok(Self { completions, wakes })
    }

    /// Adds a socket to the wake descriptor, so that input on the connection wakes the thread of
    /// the queue.
    pub(crate) fn watch(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::add(&self.wakes, socket, EventData::new_u64(1), EventFlags::IN)?)
    }

    /// Sets whether the thread is also woken when the socket buffer has room (`room`).
    pub(crate) fn watch_room(&self, socket: BorrowedFd<'_>, room: bool) {
        let flags = if room { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
        // Fails only for a connection that has ended and is no longer in the set.
        let _ = epoll::modify(&self.wakes, socket, EventData::new_u64(1), flags);
    }

    /// Removes a socket from the wake descriptor.
    pub(crate) fn forget(&self, socket: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.wakes, socket);
    }
}

/// Wakes the thread of the queue, because an orphan of the disk has ended.
impl Wake for User {
    fn wake(self: Arc<Self>) {
        self.completions.signal();
    }
}

impl AsFd for User {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wakes.as_fd()
    }
}
