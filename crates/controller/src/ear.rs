//! Doorbells that a sleeping worker hears by itself.
//!
//! Whoever carries a controller delivers a trapped doorbell write by [`Controller::write_doorbell`],
//! on a thread of its own, and that wakes the worker: two threads are woken for a command. If what
//! brings the writes is a descriptor, the worker can wait for it as well, and take those by itself
//! that wake it.

use crate::controller::Controller;
use crate::worker::message::Message;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// What came of listening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heard {
    /// Doorbell writes that were taken.
    pub rings: u32,
    /// There was no more. Otherwise whoever lent the ear sees to the rest.
    pub all: bool,
}

/// What hears the doorbell writes of a host. All of it is called by a worker, and waits for nobody.
/// It is dropped when the worker no longer listens.
pub trait Ear: Send {
    /// Reports to `epoll`, as `token`, when there may be something to hear: edge-triggered, and at
    /// best only while somebody sleeps in it. Called once, before anything else.
    ///
    /// # Errors
    /// It can not be, or not now. The ear is then given up.
    fn watch(&mut self, epoll: &Arc<OwnedFd>, token: u64) -> io::Result<()>;

    /// After such a report: hands a few doorbell writes to `ring`, as offset in BAR0 and value, in
    /// the order in which they came. `ring` takes one and returns true, or returns false; what it does
    /// not take is to be delivered as if nobody had listened, and so is all that follows it.
    fn listen(&mut self, ring: &mut dyn FnMut(u64, u32) -> bool) -> Heard;
}

impl Controller {
    /// Has `worker`, which is one that [`write_doorbell`](Self::write_doorbell) named, listen to the
    /// host by itself: it takes doorbell writes of the I/O queues that it serves, while it sleeps. It
    /// drops the ear when the controller is reset, when another is lent, or when it has been woken in
    /// vain several times in a row.
    pub fn lend_ear(&self, worker: usize, ear: Box<dyn Ear>) {
        let inner = self.inner();
        inner.pool.send(worker, Message::Ear { controller: inner.shared.id, ear });
    }
}
