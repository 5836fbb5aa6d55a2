//! Commands under way, and what becomes of those that nobody waits for any more.

use crate::buffers::Lease;
use crate::error::BlockError;
use crate::locks::RangeGuard;
use driver::async_queue::Io;
use driver::{AsyncQueue, Command};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::task::{Context, Poll, Wake, Waker};

/// A command with the buffer that it uses and the range that it writes.
///
/// If it is dropped while it is under way, it runs to its end all the same: its range stays locked
/// until then, and its buffer comes back.
#[must_use = "nothing is submitted until the future is polled"]
pub(crate) struct Flight {
    io: Option<Io>,
    lease: Option<Lease>,
    guard: Option<Arc<RangeGuard>>,
    orphans: Arc<Orphans>,
    polled: bool,
    /// What it came to already when it was submitted.
    early: Option<Result<Option<Lease>, BlockError>>,
}

impl Flight {
    pub(crate) fn new(
        queue: &AsyncQueue,
        command: Command,
        mut lease: Option<Lease>,
        guard: Option<Arc<RangeGuard>>,
        orphans: &Arc<Orphans>,
    ) -> Self {
        let buffer = lease.as_mut().and_then(|lease| lease.buffer.take());
        let io = Some(queue.submit(command, buffer));
        Self { io, lease, guard, orphans: Arc::clone(orphans), polled: false, early: None }
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

impl Future for Flight {
    type Output = Result<Option<Lease>, BlockError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let Some(outcome) = this.early.take() {
            return Poll::Ready(outcome);
        }
        let Some(io) = this.io.as_mut() else { return Poll::Ready(Err(BlockError::Buffer)) };
        this.polled = true;
        let Poll::Ready(outcome) = Pin::new(io).poll(context) else { return Poll::Pending };
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

impl Drop for Flight {
    fn drop(&mut self) {
        // One that was never polled was never submitted.
        if let Some(io) = self.io.take()
            && self.polled
        {
            self.orphans.adopt(Orphan { io, lease: self.lease.take(), _guard: self.guard.take() });
        }
    }
}

struct Orphan {
    io: Io,
    lease: Option<Lease>,
    _guard: Option<Arc<RangeGuard>>,
}

/// Commands whose futures were dropped while they were under way.
pub(crate) struct Orphans {
    /// Those that are new here.
    inbox: Mutex<Vec<Orphan>>,
    list: Mutex<Vec<Orphan>>,
    /// Somebody wants them to be looked at.
    news: AtomicBool,
    myself: Weak<Self>,
}

impl Orphans {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new_cyclic(|myself| Self {
            inbox: Mutex::default(),
            list: Mutex::default(),
            news: AtomicBool::new(false),
            myself: Weak::clone(myself),
        })
    }

    fn inbox(&self) -> MutexGuard<'_, Vec<Orphan>> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn adopt(&self, orphan: Orphan) {
        self.inbox().push(orphan);
        // Has it tell us, not the task that it belonged to.
        self.look();
    }

    /// Takes the completions of those that have one. Never waits for another who does this: a
    /// completion may bring us here again, on the same thread.
    fn look(&self) {
        self.news.store(true, Ordering::SeqCst);
        let Some(myself) = self.myself.upgrade() else { return };
        let waker = Waker::from(myself);
        let mut context = Context::from_waker(&waker);
        while self.news.load(Ordering::SeqCst) {
            let mut list = match self.list.try_lock() {
                Ok(list) => list,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                // Who has the lock looks at the news again after giving it up.
                Err(TryLockError::WouldBlock) => return,
            };
            self.news.store(false, Ordering::SeqCst);
            list.append(&mut self.inbox());
            let done: Vec<_> = list
                .extract_if(.., |orphan| match Pin::new(&mut orphan.io).poll(&mut context) {
                    Poll::Pending => false,
                    Poll::Ready(outcome) => {
                        let buffer = outcome.map_or_else(|error| error.buffer, |done| done.buffer);
                        if let Some(lease) = &mut orphan.lease {
                            lease.buffer = buffer;
                        }
                        true
                    }
                })
                .collect();
            drop(list);
            // Wakes who waits for the buffers and the ranges.
            drop(done);
        }
    }
}

impl Wake for Orphans {
    fn wake(self: Arc<Self>) {
        self.look();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.look();
    }
}
