//! An eventfd, the one thing that both sides of a sleep know.

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, read, write};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// A non-blocking event file descriptor: [`signal`](Self::signal) wakes whoever polls it.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// Makes a new one, closed on exec, with its count at 0.
    ///
    /// # Errors
    /// The system's, when the process is out of file descriptors or memory.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Takes a descriptor that a peer sent. Nothing is assumed of it: if it is not an eventfd,
    /// signalling it does nothing useful and nothing harmful, except that a blocking descriptor
    /// could stall its signaller, so it is made non-blocking here.
    ///
    /// # Errors
    /// The system's, when the descriptor's flags can not be changed.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Self(fd))
    }

    /// Adds one to the count and so makes the descriptor readable.
    ///
    /// A count that is already full, or a peer's descriptor that takes no write, is ignored: the
    /// first means that the other side has a wakeup pending anyway, the second that it wants none.
    #[inline]
    pub fn signal(&self) {
        loop {
            match write(&self.0, &1u64.to_ne_bytes()) {
                Err(Errno::INTR) => {}
                _ => return,
            }
        }
    }

    /// Takes the count back to 0 and returns what it was (0 if nobody signalled).
    pub fn drain(&self) -> u64 {
        let mut count = [0; 8];
        loop {
            match read(&self.0, &mut count) {
                Ok(8) => return u64::from_ne_bytes(count),
                Err(Errno::INTR) => {}
                _ => return 0,
            }
        }
    }

    /// The count, left as it is; 0 where the system does not tell. For statistics about a descriptor
    /// that a peer has too: who shares it can make it block, and then reading it is no question of
    /// ours any more.
    #[must_use]
    pub fn count(&self) -> u64 {
        let path = format!("/proc/self/fdinfo/{}", self.0.as_raw_fd());
        let Ok(text) = std::fs::read_to_string(path) else { return 0 };
        let count = text.lines().find_map(|line| line.strip_prefix("eventfd-count:"));
        count.and_then(|count| u64::from_str_radix(count.trim(), 16).ok()).unwrap_or(0)
    }

    /// Blocks until signalled or `timeout` has passed; whether it was signalled.
    ///
    /// # Errors
    /// The system's, other than an interruption, which is waited through.
    pub fn wait(&self, timeout: Option<std::time::Duration>) -> io::Result<bool> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let deadline = timeout.map(|t| std::time::Instant::now() + t);
        loop {
            let left = deadline.map(|d| {
                let left = d.saturating_duration_since(std::time::Instant::now());
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
            });
            let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
            match poll(&mut fds, left.as_ref()) {
                Ok(0) => return Ok(false),
                Ok(_) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// A second descriptor for the same count.
    ///
    /// # Errors
    /// The system's, when the process is out of file descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(self.0.try_clone()?))
    }
}

/// Waits for signals of an [`EventFd`] one by one, without taking its count back to 0: a sleep and a
/// wakeup are one system call and not two.
///
/// Each signal ends one wait, whether it came before it or during it; several that came before count
/// as one. Whoever polls the descriptor itself is not disturbed.
#[derive(Debug)]
pub struct Edges {
    epoll: OwnedFd,
    /// Held, because a descriptor that is closed is waited for no longer.
    _hang_up: Option<OwnedFd>,
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edge {
    /// The event was signalled.
    Signal,
    /// Whoever would signal it has gone. Told once.
    HungUp,
    /// The time has passed.
    Timeout,
}

const SIGNAL: u64 = 0;
const HANG_UP: u64 = 1;

impl Edges {
    /// Waits for signals of `event` from now on; if it was signalled and not drained, that counts.
    /// If the peer of `hang_up`, a socket, goes away, that ends a wait as well.
    ///
    /// # Errors
    /// The system's, when the process is out of file descriptors.
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

    /// Blocks until signalled or hung up, or until `timeout` has passed.
    ///
    /// # Errors
    /// The system's, other than an interruption, which is waited through.
    pub fn wait(&self, timeout: Option<std::time::Duration>) -> io::Result<Edge> {
        use rustix::event::Timespec;
        let deadline = timeout.map(|t| std::time::Instant::now() + t);
        loop {
            let left = deadline.map(|d| {
                let left = d.saturating_duration_since(std::time::Instant::now());
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
            });
            let mut events = [const { std::mem::MaybeUninit::uninit() }; 1];
            match rustix::event::epoll::wait(&self.epoll, &mut events[..], left.as_ref()) {
                Ok((found, _)) => {
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
        self.0.as_fd()
    }
}

impl From<EventFd> for OwnedFd {
    fn from(event: EventFd) -> Self {
        event.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        assert_eq!(edges.wait(none).unwrap(), Edge::Timeout, "not drained, and yet heard");
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
    fn a_descriptor_that_is_no_eventfd_does_no_harm() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let event = EventFd::from_fd(writer).unwrap();
        for _ in 0..100_000 {
            event.signal(); // a full pipe must not block
        }
        drop(reader);
    }
}
