//! Wrapper of the system call `epoll_wait`.
//!
//! rustix always uses `epoll_pwait`, but other libraries use `epoll_wait`. If this process uses
//! `epoll_wait` only, the sandbox need not allow both.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use rustix::event::epoll::Event;

use crate::Errno;

const _: () = assert!(size_of::<Event>() == size_of::<libc::epoll_event>());
const _: () = assert!(align_of::<Event>() == align_of::<libc::epoll_event>());

/// Waits until there are events or `timeout` has passed. `room` must not be empty; its length is
/// the maximum number of returned events.
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
    // SAFETY: `room` has space for `count` events and is exclusively borrowed. Both types have the
    // layout of the system's `epoll_event`.
    let found = unsafe { libc::epoll_wait(fd, at, count, millis) };
    let Ok(found) = usize::try_from(found) else {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::INVAL));
    };
    let found = room.get(..found).unwrap_or_default();
    // SAFETY: the kernel has written this number of events, and an event may have any bytes.
    Ok(unsafe { std::slice::from_raw_parts(found.as_ptr().cast::<Event>(), found.len()) })
}
