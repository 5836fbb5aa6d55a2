//! Sleep of a queue's thread on an epoll set.

use ::shadowbell_memory::EventFd;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use shadowbell_backend::Queue;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Largest number of descriptors that a wait reports.
const EVENTS: usize = 5;

/// Epoll set of all events that end the sleep of a queue's thread.
pub(super) struct Sleep {
    epoll: OwnedFd,
    kick: Option<EventFd>,
}

impl Sleep {
    /// Creates the set: the guest's notifications, other events, and the disk.
    pub(super) fn on(
        kick: Option<EventFd>,
        events: [&EventFd; 2],
        disk: &dyn Queue,
    ) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let add = |fd: BorrowedFd<'_>, flags| {
            epoll::add(&epoll, fd, EventData::new_u64(0), EventFlags::IN | flags)
        };
        // Edge-triggered, so that events need not be drained, except the guest's, whose count
        // could fill up.
        for event in kick.iter().chain(events) {
            add(event.as_fd(), EventFlags::ET)?;
        }
        let edges = if disk.wakes_by_edges() { EventFlags::ET } else { EventFlags::empty() };
        if let Some(fd) = disk.wake_fd() {
            add(fd, edges)?;
        }
        if let Some(fd) = disk.timer_fd() {
            add(fd, EventFlags::empty())?;
        }
        Ok(Self { epoll, kick })
    }

    /// Waits until an event is signalled, or until `limit` has passed.
    pub(super) fn wait(&self, limit: Option<Duration>) {
        let limit = limit.map(|limit| Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        });
        let mut events = [const { MaybeUninit::uninit() }; EVENTS];
        match epoll::wait(&self.epoll, &mut events[..], limit.as_ref()) {
            // EINTR: the kernel interrupts a sleeping thread to deliver io_uring completions.
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => {
                tracing::warn!("waiting for requests failed: {errno}");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        if let Some(kick) = &self.kick {
            kick.drain();
        }
    }
}
