//! Commands in flight, and what becomes of those whose futures were dropped.

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

/// How often a command is submitted once more that failed, and need not.
const RETRIES: u8 = 3;

/// Whether the same command may yet succeed: the controller has not set Do Not Retry, and does not
/// say that the command is wrong, which it will be the next time as well. Base 2.1, 4.2.3.
///
/// One that was aborted is not among them: the driver has done what can be done about that.
fn may_succeed(status: Status) -> bool {
    const PATH: u8 = 3;
    // A namespace that this controller is no way to is not there a moment later either: whoever has
    // another controller asks that one.
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

/// A command with the buffer that it uses and the range that it writes.
///
/// If it fails and the controller does not rule out that it succeeds, it is submitted again, at
/// once: a delay (CRD) is only given to hosts that have asked for it (ACRE), which the driver does
/// not. What it writes is locked meanwhile, so that doing it twice is doing it once.
///
/// If it is dropped while it is under way, it runs to its end all the same: its range stays locked
/// until then, and its buffer comes back.
#[must_use = "nothing is submitted until the future is polled"]
pub(crate) struct InFlight {
    io: Option<Io>,
    command: Command,
    retries: u8,
    lease: Option<Lease>,
    guard: Option<Arc<RangeGuard>>,
    abandoned: Arc<Abandoned>,
    polled: bool,
    /// What it came to already when it was submitted.
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

    /// Submits the command, without waiting for it.
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
        // One that was never polled was never submitted.
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

/// Commands whose futures were dropped while they were under way.
pub(crate) struct Abandoned {
    /// Those that are new.
    inbox: Mutex<Vec<AbandonedCommand>>,
    list: Mutex<Vec<AbandonedCommand>>,
    /// They are to be polled.
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
        // Being polled here, it wakes this list and no longer the task that it belonged to.
        self.poll_all();
    }

    /// Takes the completions of those that have one. Never waits for the lock: a completion may
    /// lead here again, on the same thread.
    fn poll_all(&self) {
        self.poll_wanted.store(true, Ordering::SeqCst);
        let Some(myself) = self.myself.upgrade() else { return };
        let waker = Waker::from(myself);
        let mut context = Context::from_waker(&waker);
        while self.poll_wanted.load(Ordering::SeqCst) {
            // The thread that has the lock looks at the flag again after giving it up.
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
            // Wakes the requests that wait for the buffers and the ranges.
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
