//! Inbox of a reactor: requests of other threads, and the wakeup of the reactor.

use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use super::listener::Listener;
use super::recorder::PortRecorder;
use crate::Errno;
use crate::device::{Completer, Device};

/// Identifier of a port: a device that a reactor serves, its socket and its client. The reactor
/// never assigns the same identifier twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub(super) u64);

/// Request to a reactor.
pub(super) enum Request {
    Add {
        port: PortId,
        listener: Listener,
        device: Box<dyn Device>,
        recorder: Option<Box<dyn PortRecorder>>,
    },
    Restore {
        port: PortId,
        /// A `RestoredPort`.
        restored: Box<dyn Any + Send>,
        recorder: Box<dyn PortRecorder>,
        /// Called when the checkpoint of the port is stored, before its sockets are used.
        begin: Box<dyn FnOnce() + Send>,
    },
    Remove {
        port: PortId,
        removed: SyncSender<()>,
    },
    Stop,
    Freeze,
    Thaw,
    /// Runs the closure on the reactor's thread.
    LivenessCheck(Box<dyn FnOnce() + Send>),
    Completed {
        port: PortId,
        sequence: u64,
        outcome: Result<(), Errno>,
    },
    /// Read and handle the client's messages, if there are any.
    Turn {
        port: PortId,
    },
}

struct RequestQueue {
    waiting: Vec<Request>,
    /// True if the reactor sleeps or is about to sleep, so that a new request has to wake it.
    sleeping: bool,
}

/// Queue of requests that other threads send to a reactor.
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

    /// Eventfd that wakes the reactor: it is readable when requests have arrived.
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
            // The write fails only if the counter is at its maximum. The eventfd is readable in
            // that case too.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// Moves all requests to `into`.
    pub(super) fn take(&self, into: &mut Vec<Request>) {
        let mut queue = self.queue.lock();
        queue.sleeping = false;
        into.append(&mut queue.waiting);
    }

    /// True if no requests are waiting, so that the reactor may sleep. From this call on, a new
    /// request wakes the reactor.
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

/// Creates a [`Completer`] that reports its completion to the reactor.
pub(super) fn done(inbox: &Arc<Inbox>, port: PortId, sequence: u64) -> Completer {
    let inbox = Arc::clone(inbox);
    Completer::new(move |outcome| inbox.push(Request::Completed { port, sequence, outcome }))
}

/// Handle for controlling a [`Reactor`](super::Reactor) from any thread.
#[derive(Clone)]
pub struct Handle(pub(super) Arc<Inbox>);

impl Handle {
    /// Starts to serve `device` on `listener`.
    pub fn add(&self, listener: Listener, device: Box<dyn Device>) -> PortId {
        let port = self.0.new_port();
        self.0.push(Request::Add { port, listener, device, recorder: None });
        port
    }

    /// Starts to serve a device like [`add`](Self::add), with checkpoints, which `recorder` stores.
    /// Messages of a client then stay in its socket until their effects are stored, and a second
    /// thread handles only posted writes.
    pub fn add_recorded(
        &self,
        listener: Listener,
        device: Box<dyn Device>,
        recorder: Box<dyn PortRecorder>,
    ) -> PortId {
        let port = self.0.new_port();
        self.0.push(Request::Add { port, listener, device, recorder: Some(recorder) });
        port
    }

    /// Stops serving a device. The reactor disconnects its client, waits until the device has
    /// released that client, removes the socket file, and drops the device. Then the channel gets a
    /// message or is closed. The reactor's own thread must not wait for the channel, because that
    /// would deadlock.
    pub fn remove(&self, port: PortId) -> Receiver<()> {
        let (removed, receiver) = sync_channel(1);
        self.0.push(Request::Remove { port, removed });
        receiver
    }

    /// Quiesces the reactor. The reactor takes back sockets that are shared with other threads,
    /// finishes messages that have started, and waits for outstanding [`Completer`]s and for
    /// devices that are releasing a client. It starts no new message and accepts no client. When it
    /// is quiesced, [`run`](super::Reactor::run) returns [`RunEnd::Frozen`](super::RunEnd::Frozen).
    ///
    /// The duration depends on the devices. [`thaw`](Self::thaw) cancels the quiesce.
    pub fn freeze(&self) {
        self.0.push(Request::Freeze);
    }

    /// Cancels a [`freeze`](Self::freeze) that is not complete. It has no effect on a complete
    /// freeze, which ends with the next [`run`](super::Reactor::run).
    pub fn thaw(&self) {
        self.0.push(Request::Thaw);
    }

    /// Runs `check` on the reactor's thread, for a liveness check. `check` must not block.
    pub fn check_liveness(&self, check: impl FnOnce() + Send + 'static) {
        self.0.push(Request::LivenessCheck(Box::new(check)));
    }

    /// Stops the reactor. It disconnects all clients, waits until the devices have released them,
    /// and drops all devices and listeners. Then [`run`](super::Reactor::run) returns.
    pub fn stop(&self) {
        self.0.push(Request::Stop);
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Handle")
    }
}
