//! Wait on an epoll instance by `epoll_wait`.
//!
//! Other libraries use the same system call, whereas rustix always uses `epoll_pwait`. With only
//! one of them, the sandbox can allow fewer system calls.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use rustix::event::epoll::Event;

use crate::Errno;

const _: () = assert!(size_of::<Event>() == size_of::<libc::epoll_event>());
const _: () = assert!(align_of::<Event>() == align_of::<libc::epoll_event>());

/// Waits for events, at least until `timeout` has passed if there are none. Returns at most as many
/// events as `room` has place for, which must not be empty.
pub(super) fn epoll_wait(
    epoll: impl AsFd,
    room: &mut [MaybeUninit<Event>],
    timeout: Option<Duration>,
) -> Result<&[Event], Errno> {
    let millis = timeout.map_or(-1, |timeout| {
        i32::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX)
    });
    let count = i32::try_from(room.len()).unwrap_or(i32::MAX);
    let (fd, at) = (epoll.as_fd().as_raw_fd(), room.as_mut_ptr().cast::<libc::epoll_event>());
    // SAFETY: `room` has place for `count` events and is exclusively borrowed, and both types are
    // the system's `epoll_event`.
    let found = unsafe { libc::epoll_wait(fd, at, count, millis) };
    let Ok(found) = usize::try_from(found) else {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::INVAL));
    };
    let found = room.get(..found).unwrap_or_default();
    // SAFETY: the system has written this number of events, and any bytes are a valid event.
    Ok(unsafe { std::slice::from_raw_parts(found.as_ptr().cast::<Event>(), found.len()) })
}
