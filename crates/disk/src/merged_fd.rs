//! An epoll descriptor that merges two descriptors.

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Creates a descriptor that is readable while at least one of `fds` is.
///
/// # Errors
/// The error of `epoll_create1` or `epoll_ctl`.
pub fn merge(fds: [BorrowedFd<'_>; 2]) -> io::Result<OwnedFd> {
    let both = epoll::create(CreateFlags::CLOEXEC)?;
    for (nth, fd) in (0..).zip(fds) {
        epoll::add(&both, fd, EventData::new_u64(nth), EventFlags::IN)?;
    }
    Ok(both)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use shadowbell_memory::EventFd;
    use std::os::fd::AsFd;

    #[test]
    fn a_merged_descriptor_is_readable_while_one_of_its_parts_is() {
        let events = [EventFd::new().unwrap(), EventFd::new().unwrap()];
        let both = merge([events[0].as_fd(), events[1].as_fd()]).unwrap();
        let is_readable = || {
            let mut fds = [PollFd::new(&both, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
        };
        for event in &events {
            assert!(!is_readable());
            event.signal();
            assert!(is_readable() && is_readable());
            event.drain();
        }
        assert!(!is_readable());
    }
}
