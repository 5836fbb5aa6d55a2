//! Commands in flight: retries, and completion of commands whose futures were dropped.

use crate::buffers::Lease;
use crate::error::BlockError;
use crate::locks::RangeGuard;
use parking_lot::Mutex;
use shadowbell_driver::async_queue::Io;
use shadowbell_driver::{AsyncQueue, Command, IoErrorKind};
use shadowbell_spec::Status;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};

/// Maximum number of retries of a command that failed with a transient error.
const RETRIES: u8 = 3;

/// True if a retry may succeed: the controller has not set Do Not Retry, and the status does not
/// mean that the command itself is invalid. Base 2.1, 4.2.3.
///
/// An aborted command is not retried: the driver's recovery has handled it already.
fn may_succeed(status: Status) -> bool {
    const PATH: u8 = 3;
    // If the ANA state makes the namespace inaccessible through this controller, a retry fails as
    // well. The caller has to use another controller.
    let is_no_way = matches!(status.code(), Status::ANA_INACCESSIBLE | Status::ANA_PERSISTENT_LOSS);
    !status.dnr()
        && !is_no_way
        && (status.sct() == PATH
            || matches!(
                status.code(),
                Status::DATA_XFER_ERROR
                    | Status::INTERNAL
                    | Status::COMMAND_INTERRUPTED
                    | Status::TRANSIENT_TRANSPORT_ERROR
                    | Status::NAMESPACE_NOT_READY
                    | Status::INSUFFICIENT_RESOURCES
                    | Status::WRITE_FAULT
                    | Status::UNRECOVERED_READ
            ))
}

fn is_passing(error: &IoErrorKind) -> bool {
    matches!(error, IoErrorKind::Status { status, .. } if may_succeed(*status))
}

/// A command with its buffer and with the lock of the range that it writes.
///
/// After a transient failure, the command is submitted again immediately: only hosts that have
/// enabled Advanced Command Retry (ACRE) get a delay (CRD), and the driver has not. The range
/// remains locked meanwhile, so executing a write twice has the effect of executing it once.
///
/// If the future is dropped while the command is in flight, the command is executed to its end: its
/// range remains locked until then, and its buffer is returned to the pool afterwards.
#[must_use = "nothing is submitted until the future is polled"]
pub(crate) struct InFlight {
    io: Option<Io>,
    command: Command,
    retries: u8,
    lease: Option<Lease>,
    guard: Option<Arc<RangeGuard>>,
    abandoned: Arc<Abandoned>,
    polled: bool,
    /// Result that was available when the command was submitted.
    early: Option<Result<Option<Lease>, BlockError>>,
}

impl InFlight {
    pub(crate) fn new(
        queue: &AsyncQueue,
        command: Command,
        mut lease: Option<Lease>,
        guard: Option<Arc<RangeGuard>>,
        abandoned: &Arc<Abandoned>,
    ) -> Self {
        let buffer = lease.as_mut().and_then(|lease| lease.buffer.take());
        let io = Some(queue.submit(command, buffer));
        let abandoned = Arc::clone(abandoned);
        Self { io, command, retries: RETRIES, lease, guard, abandoned, polled: false, early: None }
    }

    /// Submits the command without waiting for its completion.
    pub(crate) async fn submit(&mut self) {
        poll_fn(|context| {
            if let Poll::Ready(outcome) = Pin::new(&mut *self).poll(context) {
                self.early = Some(outcome);
            }
            Poll::Ready(())
        })
        .await;
    }
}

impl Future for InFlight {
    type Output = Result<Option<Lease>, BlockError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let Some(outcome) = this.early.take() {
            return Poll::Ready(outcome);
        }
        let outcome = loop {
            let Some(io) = this.io.as_mut() else { return Poll::Ready(Err(BlockError::Buffer)) };
            this.polled = true;
            let Poll::Ready(outcome) = Pin::new(&mut *io).poll(context) else {
                return Poll::Pending;
            };
            match outcome {
                Err(error) if this.retries > 0 && is_passing(&error.kind) => {
                    this.retries -= 1;
                    *io = io.another(this.command, error.buffer);
                }
                outcome => break outcome,
            }
        };
        this.io = None;
        this.guard = None;
        let mut lease = this.lease.take();
        let (buffer, outcome) = match outcome {
            Ok(done) => (done.buffer, Ok(())),
            Err(error) => (error.buffer, Err(BlockError::Command(error.kind))),
        };
        if let Some(lease) = &mut lease {
            lease.buffer = buffer;
        }
        Poll::Ready(outcome.map(|()| lease))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        // A command that was never polled was never submitted.
        if let Some(io) = self.io.take()
            && self.polled
        {
            self.abandoned.add(AbandonedCommand {
                io,
                lease: self.lease.take(),
                _guard: self.guard.take(),
            });
        }
    }
}

struct AbandonedCommand {
    io: Io,
    lease: Option<Lease>,
    _guard: Option<Arc<RangeGuard>>,
}

/// Commands whose futures were dropped while the commands were in flight.
pub(crate) struct Abandoned {
    /// Newly added commands.
    inbox: Mutex<Vec<AbandonedCommand>>,
    list: Mutex<Vec<AbandonedCommand>>,
    /// Set if the commands must be polled.
    poll_wanted: AtomicBool,
    myself: Weak<Self>,
}

impl Abandoned {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new_cyclic(|myself| Self {
            inbox: Mutex::default(),
            list: Mutex::default(),
            poll_wanted: AtomicBool::new(false),
            myself: Weak::clone(myself),
        })
    }

    fn add(&self, command: AbandonedCommand) {
        self.inbox.lock().push(command);
        // Replaces the waker of the dropped task by the waker of this list.
        self.poll_all();
    }

    /// Polls all commands and removes completed ones. Never blocks on the lock, because a
    /// completion may call this function on the thread that holds the lock.
    fn poll_all(&self) {
        self.poll_wanted.store(true, Ordering::SeqCst);
        let Some(myself) = self.myself.upgrade() else { return };
        let waker = Waker::from(myself);
        let mut context = Context::from_waker(&waker);
        while self.poll_wanted.load(Ordering::SeqCst) {
            // The thread that holds the lock checks `poll_wanted` again after its release.
            let Some(mut list) = self.list.try_lock() else { return };
            self.poll_wanted.store(false, Ordering::SeqCst);
            list.append(&mut self.inbox.lock());
            let done: Vec<_> = list
                .extract_if(.., |command| match Pin::new(&mut command.io).poll(&mut context) {
                    Poll::Pending => false,
                    Poll::Ready(outcome) => {
                        let buffer = outcome.map_or_else(|error| error.buffer, |done| done.buffer);
                        if let Some(lease) = &mut command.lease {
                            lease.buffer = buffer;
                        }
                        true
                    }
                })
                .collect();
            drop(list);
            // Wakes requests that wait for these buffers or ranges. Must not run under the lock.
            drop(done);
        }
    }
}

impl Wake for Abandoned {
    fn wake(self: Arc<Self>) {
        self.poll_all();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.poll_all();
    }
}
