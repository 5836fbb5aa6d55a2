//! What other threads want of a reactor, and how they wake it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use super::listener::Listener;
use super::recorder::PortRecorder;
use crate::Errno;
use crate::device::{Device, Done};

/// Names a device that a reactor serves. Never used twice by one reactor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub(super) u64);

/// Where clients of a device come from.
pub(super) enum Source {
    /// One after the other from a listening socket.
    Listener(Listener),
    /// There is one, and it is here.
    Stream(OwnedFd),
}

/// What is asked of a reactor.
pub(super) enum Request {
    Add {
        port: PortId,
        source: Source,
        device: Box<dyn Device>,
        recorder: Option<Box<dyn PortRecorder>>,
    },
    Remove {
        port: PortId,
        gone: SyncSender<()>,
    },
    Stop,
    Freeze,
    Thaw,
    /// This is to be called.
    Visit(Box<dyn FnOnce() + Send>),
    Completed {
        port: PortId,
        sequence: u64,
        outcome: Result<(), Errno>,
    },
    /// There is, or was, something to be read from the client.
    Turn {
        port: PortId,
    },
}

struct RequestQueue {
    waiting: Vec<Request>,
    /// The reactor sleeps, or is about to, and has to be woken.
    sleeping: bool,
}

/// Shared between a reactor and all that ask something of it.
pub(super) struct Inbox {
    queue: Mutex<RequestQueue>,
    wake: OwnedFd,
    next_port: AtomicU64,
}

impl Inbox {
    pub(super) fn new() -> Result<Self, Errno> {
        Ok(Self {
            queue: Mutex::new(RequestQueue { waiting: Vec::new(), sleeping: false }),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            next_port: AtomicU64::new(1),
        })
    }

    /// Becomes readable when the reactor is needed.
    pub(super) fn wake_fd(&self) -> &OwnedFd {
        &self.wake
    }

    pub(super) fn new_port(&self) -> PortId {
        PortId(self.next_port.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn push(&self, request: Request) {
        let mut queue = self.queue.lock();
        queue.waiting.push(request);
        if std::mem::take(&mut queue.sleeping) {
            // It can only fail when the counter is full, and then the reactor is awake.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// Moves what waits into `into`.
    pub(super) fn take(&self, into: &mut Vec<Request>) {
        let mut queue = self.queue.lock();
        queue.sleeping = false;
        into.append(&mut queue.waiting);
    }

    /// From now on whoever pushes has to wake the reactor; false if something waits already.
    pub(super) fn may_sleep(&self) -> bool {
        let mut queue = self.queue.lock();
        queue.sleeping = queue.waiting.is_empty();
        queue.sleeping
    }

    /// Takes the signal back.
    pub(super) fn woken(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }
}

/// A [`Done`] that reports to the reactor behind `inbox`.
pub(super) fn done(inbox: &Arc<Inbox>, port: PortId, sequence: u64) -> Done {
    let inbox = Arc::clone(inbox);
    Done::new(move |outcome| inbox.push(Request::Completed { port, sequence, outcome }))
}

/// Reaches a [`Reactor`](super::Reactor) from any thread.
#[derive(Clone)]
pub struct Handle(pub(super) Arc<Inbox>);

impl Handle {
    /// Serves `device` at `listener` from now on.
    pub fn add(&self, listener: Listener, device: Box<dyn Device>) -> PortId {
        let port = self.0.new_port();
        let source = Source::Listener(listener);
        self.0.push(Request::Add { port, source, device, recorder: None });
        port
    }

    /// As [`add`](Self::add), and has `recorder` keep what comes of it
    /// ([`Reactor::record_with`](super::Reactor::record_with)).
    pub fn add_recorded(
        &self,
        listener: Listener,
        device: Box<dyn Device>,
        recorder: Box<dyn PortRecorder>,
    ) -> PortId {
        let port = self.0.new_port();
        let (source, recorder) = (Source::Listener(listener), Some(recorder));
        self.0.push(Request::Add { port, source, device, recorder });
        port
    }

    /// Serves `device` to the one client at the other end of `stream`, a connected UNIX socket.
    /// When it leaves, the device is dropped.
    pub fn add_stream(&self, stream: OwnedFd, device: Box<dyn Device>) -> PortId {
        let port = self.0.new_port();
        let source = Source::Stream(stream);
        self.0.push(Request::Add { port, source, device, recorder: None });
        port
    }

    /// Ends the service of a device: its client is dropped, the device lets go of it, the socket's
    /// file is removed and the device dropped. The channel gets a message, or is closed, when that
    /// has happened; do not wait for it on the reactor's own thread.
    pub fn remove(&self, port: PortId) -> Receiver<()> {
        let (gone, receiver) = sync_channel(1);
        self.0.push(Request::Remove { port, gone });
        receiver
    }

    /// Makes the reactor come to rest: sockets that are polled by others too are taken back, what
    /// was begun of a client's messages is finished, a [`Done`] that is outstanding is waited for,
    /// and a client that leaves is let go. No other message is begun, and nobody is let in.
    /// Then [`run`](super::Reactor::run) returns [`Ended::Frozen`](super::Ended::Frozen).
    ///
    /// How long that takes is up to the devices; [`thaw`](Self::thaw) ends it.
    pub fn freeze(&self) {
        self.0.push(Request::Freeze);
    }

    /// Takes a [`freeze`](Self::freeze) back that is not complete: all goes on. One that is
    /// complete ends with the next [`run`](super::Reactor::run), and this does nothing then.
    pub fn thaw(&self) {
        self.0.push(Request::Thaw);
    }

    /// Runs `visitor` on the reactor's thread when that comes to what it is asked, for whoever
    /// wants to know whether it still does. It may not wait for anything.
    pub fn visit(&self, visitor: impl FnOnce() + Send + 'static) {
        self.0.push(Request::Visit(Box::new(visitor)));
    }

    /// Makes [`run`](super::Reactor::run) return: all clients are dropped, their devices let go of
    /// them, all devices and listeners are dropped.
    pub fn stop(&self) {
        self.0.push(Request::Stop);
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Handle")
    }
}
