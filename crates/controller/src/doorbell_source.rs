//! Doorbell writes that a sleeping worker takes by itself.
//!
//! Whoever carries a controller delivers a trapped doorbell write by
//! [`Controller::write_doorbell`](crate::Controller::write_doorbell), on a thread of its own, and
//! that wakes the worker: two threads are woken for a command. If what brings the writes is a
//! descriptor, the worker can wait for it as well, and take those by itself that wake it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// What came of [`DoorbellSource::poll_doorbells`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolledDoorbells {
    /// Doorbell writes that were taken.
    pub writes: u32,
    /// There was no more. Otherwise whoever registered the source sees to the rest.
    pub all: bool,
}

/// Brings the doorbell writes of a host. All of it is called by a worker, and waits for nobody. It
/// is dropped when the worker no longer asks it.
pub trait DoorbellSource: Send {
    /// Reports to `epoll`, as `token`, when there may be writes: edge-triggered, and at best only
    /// while somebody sleeps in it. Called once, before anything else.
    ///
    /// # Errors
    /// It can not be, or not now. The source is then given up.
    fn watch(&mut self, epoll: &Arc<OwnedFd>, token: u64) -> io::Result<()>;

    /// After such a report: hands a few doorbell writes to `ring`, as offset in BAR0 and value, in
    /// the order in which they came. `ring` takes one and returns true, or returns false; what it
    /// does not take is to be delivered as if nobody had asked, and so is all that follows it.
    fn poll_doorbells(&mut self, ring: &mut dyn FnMut(u64, u32) -> bool) -> PolledDoorbells;
}
