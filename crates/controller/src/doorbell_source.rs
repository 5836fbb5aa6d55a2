//! Doorbell writes that a sleeping I/O thread receives without the reactor thread.
//!
//! The carrier of a controller delivers a trapped doorbell write with
//! [`Controller::write_doorbell`](crate::Controller::write_doorbell) on its own thread, which then
//! wakes the I/O thread: two wakeups per command. If the writes arrive through a descriptor, the
//! I/O thread can wait for the descriptor as well and take the writes that wake it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Result of [`DoorbellSource::poll_doorbells`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolledDoorbells {
    /// Number of doorbell writes that were taken.
    pub writes: u32,
    /// True if no more writes were pending. If false, the registrant of the source delivers the
    /// rest.
    pub all: bool,
}

/// Source of a host's doorbell writes. An I/O thread calls all methods, so none may block. The
/// source is dropped when the I/O thread stops polling it.
pub trait DoorbellSource: Send {
    /// Registers the source with `epoll` under `token`: edge-triggered, and if possible reporting
    /// only while a thread sleeps in `epoll`. Called once, before all other methods.
    ///
    /// # Errors
    /// The source cannot be registered, or not now. It is then dropped.
    fn watch(&mut self, epoll: &Arc<OwnedFd>, token: u64) -> io::Result<()>;

    /// Takes a few doorbell writes after an event of `epoll`, and passes each to `ring` as offset
    /// in BAR0 and value, in the order of arrival. `ring` returns true if it took the write. A
    /// write that it does not take, and all that follow it, must be delivered the usual way.
    fn poll_doorbells(&mut self, ring: &mut dyn FnMut(u64, u32) -> bool) -> PolledDoorbells;
}
