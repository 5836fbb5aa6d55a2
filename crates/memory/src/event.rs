//! Eventfd for wakeups between threads and processes.

use crate::epoll::epoll_wait;
use crate::eventfd_signal::{PeerDescriptor, PeerEvent, Signals};
use crate::notifier::{self, raise};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, ReadWriteFlags, preadv2, read};
use std::io::{self, IoSliceMut, Read as _};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Event file descriptor: [`signal`](Self::signal) wakes the threads that poll it.
///
/// Neither a signal nor a drain ever blocks. A peer that shares the open file can clear
/// `O_NONBLOCK` at any moment, because that flag belongs to the open file. Signals and drains of a
/// shared eventfd do not depend on the flag.
#[derive(Debug)]
pub struct EventFd(Fd);

#[derive(Debug)]
enum Fd {
    Own(OwnedFd),
    Peer(Arc<PeerEvent>),
}

impl EventFd {
    /// Creates an eventfd that is closed on exec, with a count of 0.
    ///
    /// # Errors
    /// The error of the system call if the process is out of file descriptors or memory.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Fd::Own(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// Takes an eventfd that is shared with a peer, with a cost account of its own. If the peer has
    /// several eventfds, use [`of_peer`](Self::of_peer).
    ///
    /// # Errors
    ///
    /// As for [`of_peer`](Self::of_peer).
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        Self::of_peer(Arc::new(fd), &Signals::default())
    }

    /// Takes an untrusted eventfd that a peer sent.
    ///
    /// An ordinary write to an untrusted eventfd could block forever (if it is blocking and its
    /// count is full). So the kernel signals it through io_uring or AIO: these cannot block. If the
    /// kernel supports or allows neither, the signal is a write to the descriptor. In that case
    /// this function makes the descriptor non-blocking, but a malicious peer can revert that.
    ///
    /// A signal wakes all waiters, and a peer may have a million waiters. The cost of the wakeups
    /// is accounted to `signals` of that peer: see [`Signals`].
    ///
    /// # Errors
    /// `EINVAL` if the descriptor is no eventfd; the error of the system if the type of the
    /// descriptor cannot be determined.
    pub fn of_peer(fd: PeerDescriptor, signals: &Signals) -> io::Result<Self> {
        let number = fd.as_fd().as_raw_fd();
        let link = std::fs::read_link(format!("/proc/self/fd/{number}"))?;
        if link.as_os_str() != "anon_inode:[eventfd]" {
            return Err(Errno::INVAL.into());
        }
        if !notifier::is_available() {
            let flags = rustix::fs::fcntl_getfl(fd.as_fd())?;
            rustix::fs::fcntl_setfl(fd.as_fd(), flags | rustix::fs::OFlags::NONBLOCK)?;
        }
        Ok(Self(Fd::Peer(Arc::new(PeerEvent::new(fd, signals)))))
    }

    /// Adds one to the count, which makes the descriptor readable.
    ///
    /// If the count is full, nothing changes: a wakeup is pending already. If a peer's descriptor
    /// accepts no write, the peer gets no wakeup.
    #[inline]
    pub fn signal(&self) {
        match &self.0 {
            Fd::Own(fd) => raise(fd.as_fd()),
            Fd::Peer(event) => event.signal(),
        }
    }

    /// Resets the count to 0 and returns its previous value (0 if there was no signal).
    pub fn drain(&self) -> u64 {
        let mut count = [0; 8];
        loop {
            let outcome = preadv2(
                self.as_fd(),
                &mut [IoSliceMut::new(&mut count)],
                NOWHERE,
                ReadWriteFlags::NOWAIT,
            );
            let outcome = match outcome {
                // Kernels before Linux 5.8 do not support the flag.
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => read(self.as_fd(), &mut count),
                outcome => outcome,
            };
            match outcome {
                Ok(8) => return u64::from_ne_bytes(count),
                Err(Errno::INTR) => {}
                _ => return 0,
            }
        }
    }

    /// Returns the count without a reset, or 0 if the system does not report it.
    ///
    /// For statistics about a descriptor that is shared with a peer. A read could block, because
    /// the peer can make the descriptor blocking.
    #[must_use]
    pub fn count(&self) -> u64 {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        // Most counts are 0, which a poll detects at a lower cost than a read of the file.
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        if poll(&mut [PollFd::new(self, PollFlags::IN)], Some(&at_once)) == Ok(0) {
            return 0;
        }
        let path = format!("/proc/self/fdinfo/{}", self.as_fd().as_raw_fd());
        // A query of the metrics calls this function for every controller. With a sufficiently
        // large buffer, one read returns the whole text, which saves two thirds of the system
        // calls.
        let mut text = [0; 512];
        let file = std::fs::File::open(path);
        let Ok(len) = file.and_then(|mut file| file.read(&mut text)) else { return 0 };
        let text = text.get(..len).and_then(|text| str::from_utf8(text).ok()).unwrap_or_default();
        let count = text.lines().find_map(|line| line.strip_prefix("eventfd-count:"));
        count.and_then(|count| u64::from_str_radix(count.trim(), 16).ok()).unwrap_or(0)
    }

    /// Blocks until the event is signalled or `timeout` has passed. Returns true if it was
    /// signalled.
    ///
    /// # Errors
    /// The error of the system call, except for interruptions by signals, after which the wait
    /// continues.
    pub fn wait(&self, timeout: Option<std::time::Duration>) -> io::Result<bool> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let deadline = timeout.map(|t| std::time::Instant::now() + t);
        loop {
            let left = deadline.map(|d| {
                let left = d.saturating_duration_since(std::time::Instant::now());
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
            });
            let mut fds = [PollFd::new(self, PollFlags::IN)];
            match poll(&mut fds, left.as_ref()) {
                Ok(0) => return Ok(false),
                Ok(_) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Duplicates the handle. The handle and the duplicate share one count.
    ///
    /// # Errors
    /// The error of the system call if the process is out of file descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(match &self.0 {
            Fd::Own(fd) => Fd::Own(fd.try_clone()?),
            Fd::Peer(event) => Fd::Peer(Arc::clone(event)),
        }))
    }
}

/// Offset for `preadv2` that stands for "no position".
const NOWHERE: u64 = u64::MAX;

/// Edge-triggered wait for signals of an [`EventFd`] that leaves its count unchanged: a sleep and
/// a wakeup take one system call instead of two.
///
/// A signal before or during a wait ends the wait. Several signals before a wait count as one.
/// Other pollers of the descriptor are not affected.
#[derive(Debug)]
pub struct Edges {
    epoll: OwnedFd,
    /// Descriptor for the peer's disconnection. It stays open, because epoll drops a descriptor
    /// that is closed.
    _hang_up: Option<OwnedFd>,
}

/// Result of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edge {
    /// The event was signalled.
    Signal,
    /// The peer that signals the event has disconnected. Reported once.
    HungUp,
    /// The timeout has passed.
    Timeout,
}

const SIGNAL: u64 = 0;
const HANG_UP: u64 = 1;

impl Edges {
    /// Starts to watch `event`. A signal before this call also ends a wait, if it was not drained.
    /// If the peer of the socket `hang_up` disconnects, the wait ends as well.
    ///
    /// # Errors
    /// The error of the system call if the process is out of file descriptors.
    pub fn new(event: &EventFd, hang_up: Option<OwnedFd>) -> io::Result<Self> {
        use rustix::event::epoll::{CreateFlags, EventData, EventFlags, add, create};
        let epoll = create(CreateFlags::CLOEXEC)?;
        add(&epoll, event, EventData::new_u64(SIGNAL), EventFlags::IN | EventFlags::ET)?;
        if let Some(socket) = &hang_up {
            let flags = EventFlags::RDHUP | EventFlags::ET;
            add(&epoll, socket, EventData::new_u64(HANG_UP), flags)?;
        }
        Ok(Self { epoll, _hang_up: hang_up })
    }

    /// Blocks until the event is signalled, the peer has disconnected, or `timeout` has passed.
    ///
    /// # Errors
    /// The error of the system call, except for interruptions by signals, after which the wait
    /// continues.
    pub fn wait(&self, timeout: Option<std::time::Duration>) -> io::Result<Edge> {
        let deadline = timeout.map(|t| std::time::Instant::now() + t);
        loop {
            let left = deadline.map(|d| d.saturating_duration_since(std::time::Instant::now()));
            let mut events = [const { std::mem::MaybeUninit::uninit() }; 1];
            match epoll_wait(&self.epoll, &mut events[..], left) {
                Ok(found) => {
                    return Ok(match found.first().map(|event| event.data.u64()) {
                        Some(HANG_UP) => Edge::HungUp,
                        Some(_) => Edge::Signal,
                        None => Edge::Timeout,
                    });
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Fd::Own(fd) => fd.as_fd(),
            Fd::Peer(event) => event.as_fd(),
        }
    }
}

impl TryFrom<EventFd> for OwnedFd {
    type Error = io::Error;

    /// Returns the descriptor of an eventfd that belongs to this process alone. Fails for an
    /// eventfd that is shared with a peer.
    fn try_from(event: EventFd) -> io::Result<Self> {
        match event.0 {
            Fd::Own(fd) => Ok(fd),
            Fd::Peer(_) => Err(Errno::INVAL.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::write;
    use std::time::Duration;

    #[test]
    fn signals_add_up_and_drain_to_nothing() {
        let event = EventFd::new().unwrap();
        assert_eq!(event.drain(), 0);
        assert!(!event.wait(Some(Duration::ZERO)).unwrap());
        event.signal();
        event.try_clone().unwrap().signal();
        assert!(event.wait(None).unwrap());
        assert_eq!((event.count(), event.count()), (2, 2));
        assert_eq!(event.drain(), 2);
        assert_eq!(event.count(), 0);
        assert_eq!(event.drain(), 0);
    }

    #[test]
    fn each_signal_ends_one_wait() {
        let event = EventFd::new().unwrap();
        event.signal();
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let edges = Edges::new(&event, Some(ours.into())).unwrap();
        let none = Some(Duration::ZERO);
        assert_eq!(edges.wait(none).unwrap(), Edge::Signal);
        assert_eq!(edges.wait(none).unwrap(), Edge::Timeout, "not drained, and yet reported");
        event.signal();
        event.signal();
        assert_eq!(edges.wait(none).unwrap(), Edge::Signal);
        assert_eq!(edges.wait(none).unwrap(), Edge::Timeout);
        let other = event.try_clone().unwrap();
        let signaller = std::thread::spawn(move || other.signal());
        assert_eq!(edges.wait(None).unwrap(), Edge::Signal);
        drop(theirs);
        assert_eq!(edges.wait(None).unwrap(), Edge::HungUp);
        assert_eq!(edges.wait(none).unwrap(), Edge::Timeout);
        signaller.join().unwrap();
        assert_eq!(event.drain(), 4);
    }

    #[test]
    fn a_descriptor_that_is_no_eventfd_is_refused() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        assert!(EventFd::from_fd(writer).is_err());
        drop(reader);
    }

    /// A peer that shares the open file makes the descriptor blocking, and fills or empties the
    /// count.
    #[test]
    fn a_blocking_descriptor_of_a_peer_stalls_no_thread() {
        let block = |fd: &OwnedFd| {
            let flags = rustix::fs::fcntl_getfl(fd).unwrap();
            rustix::fs::fcntl_setfl(fd, flags & !rustix::fs::OFlags::NONBLOCK).unwrap();
        };
        let theirs = OwnedFd::try_from(EventFd::new().unwrap()).unwrap();
        let ours = EventFd::from_fd(theirs.try_clone().unwrap()).unwrap();
        ours.signal();
        assert_eq!(ours.try_clone().unwrap().drain(), 1);
        block(&theirs);
        assert_eq!(ours.drain(), 0, "with nothing there");
        write(&theirs, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        for _ in 0..10 {
            ours.signal();
        }
        assert_eq!(ours.drain() | 1, u64::MAX, "full is all that it can be");
        ours.signal();
        assert_eq!(ours.drain(), 1, "and it still works");
    }

    #[test]
    fn many_threads_signal_a_peer() {
        let theirs = EventFd::new().unwrap();
        let fd = theirs.try_clone().unwrap().try_into().unwrap();
        let ours = Arc::new(EventFd::from_fd(fd).unwrap());
        let signal = |event: &Arc<EventFd>| {
            let event = Arc::clone(event);
            std::thread::spawn(move || (0..1000).for_each(|_| event.signal()))
        };
        let threads: Vec<_> = (0..4).map(|_| signal(&ours)).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(theirs.drain(), 4000);
    }
}
