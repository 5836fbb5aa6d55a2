//! `epoll_wait` by the system call of that name.
//!
//! Other libraries also use `epoll_wait`, but rustix always uses `epoll_pwait`. If the program uses
//! only `epoll_wait`, the allow list of the sandbox (seccomp) is shorter.

use rustix::event::epoll::Event;
use rustix::io::Errno;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

const _: () = assert!(size_of::<Event>() == size_of::<libc::epoll_event>());
const _: () = assert!(align_of::<Event>() == align_of::<libc::epoll_event>());

/// Waits until events are available or at least `timeout` has passed.
///
/// Returns at most `room.len()` events. `room` must not be empty.
///
/// # Errors
/// The error of the system call; [`Errno::INTR`] after a signal.
pub fn epoll_wait(
    epoll: impl AsFd,
    room: &mut [MaybeUninit<Event>],
    timeout: Option<Duration>,
) -> Result<&[Event], Errno> {
    let millis = timeout.map_or(-1, |timeout| {
        i32::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX)
    });
    let count = i32::try_from(room.len()).unwrap_or(i32::MAX);
    let (fd, at) = (epoll.as_fd().as_raw_fd(), room.as_mut_ptr().cast::<libc::epoll_event>());
    // SAFETY: `room`, which this function borrows exclusively, holds `count` events, and both
    // types have the layout of the kernel's `epoll_event`.
    let found = unsafe { libc::epoll_wait(fd, at, count, millis) };
    let Ok(found) = usize::try_from(found) else {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::INVAL));
    };
    let found = room.get(..found).unwrap_or_default();
    // SAFETY: the kernel has written `found.len()` events, and an event may have any bytes.
    Ok(unsafe { std::slice::from_raw_parts(found.as_ptr().cast::<Event>(), found.len()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EventFd;
    use rustix::event::epoll::{CreateFlags, EventData, EventFlags, add, create};
    use std::time::Instant;

    #[test]
    fn only_requested_events_are_reported() {
        let epoll = create(CreateFlags::CLOEXEC).unwrap();
        let events: Vec<_> = (0..3).map(|_| EventFd::new().unwrap()).collect();
        for (number, event) in events.iter().enumerate() {
            add(&epoll, event, EventData::new_u64(number as u64 + 7), EventFlags::IN).unwrap();
        }
        let mut room = [const { MaybeUninit::uninit() }; 2];
        assert!(epoll_wait(&epoll, &mut room, Some(Duration::ZERO)).unwrap().is_empty());
        let began = Instant::now();
        // The test waits until this time has passed.
        let wait = Duration::from_micros(1500);
        assert!(epoll_wait(&epoll, &mut room, Some(wait)).unwrap().is_empty());
        // The timeout is rounded up to milliseconds, so the wait must not end early.
        assert!(began.elapsed() >= wait);
        events[1].signal();
        let found = epoll_wait(&epoll, &mut room, None).unwrap();
        assert_eq!(found.iter().map(|event| event.data.u64()).collect::<Vec<_>>(), [8]);
        let flags = found[0].flags;
        assert!(flags.contains(EventFlags::IN));
        events.iter().for_each(EventFd::signal);
        assert_eq!(epoll_wait(&epoll, &mut room, None).unwrap().len(), 2);
        let memory = rustix::fs::memfd_create("none", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert!(epoll_wait(&memory, &mut room, None).is_err(), "it is no epoll instance");
    }
}
