//! Inbox of a reactor: requests of other threads, and the wake-up of the reactor.

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

/// Identifier of a device that a reactor serves. Unique in the lifetime of the reactor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub(super) u64);

/// Source of a device's clients.
pub(super) enum Source {
    /// Listening socket: one client after the other.
    Listener(Listener),
    /// Connected socket of the only client.
    Stream(OwnedFd),
}

/// Request to a reactor.
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
    /// Runs the closure.
    Visit(Box<dyn FnOnce() + Send>),
    Completed {
        port: PortId,
        sequence: u64,
        outcome: Result<(), Errno>,
    },
    /// Reads and handles the client's messages; there may be none.
    Turn {
        port: PortId,
    },
}

struct RequestQueue {
    waiting: Vec<Request>,
    /// True if the reactor sleeps or is about to, and has to be woken.
    sleeping: bool,
}

/// Queue of requests, shared by a reactor and its requesters.
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

    /// Eventfd that is readable when the reactor has to wake up.
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
            // A write fails only if the counter is at its maximum: then the reactor is awake.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// Moves all requests to `into`.
    pub(super) fn take(&self, into: &mut Vec<Request>) {
        let mut queue = self.queue.lock();
        queue.sleeping = false;
        into.append(&mut queue.waiting);
    }

    /// True if there are no requests: from now on a new request wakes the reactor.
    pub(super) fn may_sleep(&self) -> bool {
        let mut queue = self.queue.lock();
        queue.sleeping = queue.waiting.is_empty();
        queue.sleeping
    }

    /// Clears the wake-up event.
    pub(super) fn woken(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }
}

/// Creates a [`Done`] that reports its completion to the reactor.
pub(super) fn done(inbox: &Arc<Inbox>, port: PortId, sequence: u64) -> Done {
    let inbox = Arc::clone(inbox);
    Done::new(move |outcome| inbox.push(Request::Completed { port, sequence, outcome }))
}

/// Handle for controlling a [`Reactor`](super::Reactor) from any thread.
#[derive(Clone)]
pub struct Handle(pub(super) Arc<Inbox>);

impl Handle {
    /// Serves `device` on `listener` from now on.
    pub fn add(&self, listener: Listener, device: Box<dyn Device>) -> PortId {
        let port = self.0.new_port();
        let source = Source::Listener(listener);
        self.0.push(Request::Add { port, source, device, recorder: None });
        port
    }

    /// [`add`](Self::add) with checkpoints, which `recorder` stores
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

    /// Serves `device` to the only client at the other end of `stream`, a connected UNIX socket.
    /// The device is dropped when the client disconnects.
    pub fn add_stream(&self, stream: OwnedFd, device: Box<dyn Device>) -> PortId {
        let port = self.0.new_port();
        let source = Source::Stream(stream);
        self.0.push(Request::Add { port, source, device, recorder: None });
        port
    }

    /// Stops serving a device: its client is disconnected and released by the device, the socket
    /// file is removed, and the device is dropped. Then the channel gets a message, or is closed.
    /// Waiting for it on the reactor's thread would deadlock.
    pub fn remove(&self, port: PortId) -> Receiver<()> {
        let (gone, receiver) = sync_channel(1);
        self.0.push(Request::Remove { port, gone });
        receiver
    }

    /// Quiesces the reactor: sockets shared with other threads are taken back, started messages are
    /// finished, outstanding [`Done`]s are awaited, and the devices release clients that have
    /// disconnected. No new message is started, and no client is accepted. When quiesced,
    /// [`run`](super::Reactor::run) returns [`Ended::Frozen`](super::Ended::Frozen).
    ///
    /// The duration depends on the devices; [`thaw`](Self::thaw) cancels it.
    pub fn freeze(&self) {
        self.0.push(Request::Freeze);
    }

    /// Cancels an incomplete [`freeze`](Self::freeze). A complete one ends with the next
    /// [`run`](super::Reactor::run), and this has no effect on it.
    pub fn thaw(&self) {
        self.0.push(Request::Thaw);
    }

    /// Runs `visitor` on the reactor's thread, for a liveness check. It must not block.
    pub fn visit(&self, visitor: impl FnOnce() + Send + 'static) {
        self.0.push(Request::Visit(Box::new(visitor)));
    }

    /// Makes [`run`](super::Reactor::run) return: all clients are disconnected and released by
    /// their devices, and all devices and listeners are dropped.
    pub fn stop(&self) {
        self.0.push(Request::Stop);
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Handle")
    }
}
