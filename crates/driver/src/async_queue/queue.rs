//! Public handle of an async queue, and the [`Driver`] that drives it.

use super::future::Io;
use super::handle::AsyncHandle;
use super::shared::{ANY, ASKED, AsyncShared, TRIED};
use super::worker::Worker;
use crate::command::Command;
use crate::dma::{Buffer, BufferPool, DmaError};
use crate::metadata::MetadataCommand;
use crate::queue::QueueStats;
use crate::queue_pair::QueuePair;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

/// A queue pair with a queue thread, for futures of any executor. A clone is another handle to the
/// same queue.
///
/// After the last handle and the last future were dropped, the queue thread waits until the
/// outstanding commands complete or time out, deletes the queue pair and ends. The last drop waits
/// for the end of the thread.
#[derive(Clone)]
pub struct AsyncQueue(Arc<AsyncHandle>);

impl AsyncQueue {
    /// Starts a queue thread for `queue`.
    ///
    /// # Errors
    /// The error of the system, if no thread or descriptor is available.
    pub fn start(queue: QueuePair) -> io::Result<Self> {
        Ok(Self(Arc::new(AsyncHandle::start(queue)?)))
    }

    /// Creates the future of an I/O command, with a buffer if the command transfers data. The
    /// command is submitted when the future is first polled.
    pub fn submit(&self, command: Command, buffer: Option<Buffer>) -> Io {
        Io::new(Arc::clone(&self.0), command, buffer)
    }

    /// As [`submit`](Self::submit), for a command with metadata.
    pub fn submit_with_metadata(&self, command: MetadataCommand, buffer: Option<Buffer>) -> Io {
        Io::with_metadata(Arc::clone(&self.0), command, buffer)
    }

    /// Allocates `count` buffers of `size` bytes in memory that is shared with the controller. Same
    /// as [`Controller::buffers`](crate::Controller::buffers), for code that has no `Controller`.
    ///
    /// # Errors
    /// [`DmaError`].
    pub fn buffers(&self, count: usize, size: usize) -> Result<BufferPool, DmaError> {
        self.shared().pool(count, size)
    }

    /// Takes the right to drive this queue; `None` if another thread drives it.
    #[must_use]
    pub fn try_drive(&self) -> Option<Driver> {
        Driver::new(self.clone())
    }

    /// Requests and takes the right to drive this queue. If the queue thread drives the queue, it
    /// stops on this request, even with commands in flight. Returns `None` until the other thread
    /// has stopped; an event loop calls this method again soon.
    #[must_use]
    pub fn ask_to_drive(&self) -> Option<Driver> {
        let driver = self.try_drive();
        if driver.is_none() {
            self.shared().request(ASKED);
        }
        driver
    }

    /// Wakes the driving thread if it sleeps, or the queue thread if no thread drives.
    pub fn nudge(&self) {
        self.shared().nudge();
    }

    /// An eventfd that is signalled if there is work for the queue while the driving thread sleeps.
    /// Event loops must watch the eventfd edge-triggered, because its counter is not reset.
    #[must_use]
    pub fn event(&self) -> BorrowedFd<'_> {
        self.shared().event().as_fd()
    }

    /// A socket that hangs up when the device disappears, or `None` if the transport has no such
    /// socket. An event loop watches the socket for `EPOLLRDHUP`, together with
    /// [`event`](Self::event), and calls [`Driver::check_gone`] after a hang-up.
    #[must_use]
    pub fn hang_up(&self) -> Option<BorrowedFd<'_>> {
        self.shared().hang_up().map(AsFd::as_fd)
    }

    /// Statistics of the queue. The driving thread updates them when it prepares to sleep.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        self.shared().lock().stats
    }

    /// The identifier of the submission and completion queue.
    #[must_use]
    pub fn qid(&self) -> u16 {
        self.shared().qid
    }

    /// The maximum number of outstanding commands; further commands wait.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.shared().capacity
    }

    pub(super) fn handle(&self) -> &Arc<AsyncHandle> {
        &self.0
    }

    fn shared(&self) -> &AsyncShared {
        self.0.shared()
    }
}

impl fmt::Debug for AsyncQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncQueue").field("capacity", &self.capacity()).finish_non_exhaustive()
    }
}

/// Exclusive right and duty to drive a queue: while it exists, no other thread drives the queue.
/// See the [module](super).
///
/// The owner calls [`step`](Self::step) in a loop, and sleeps only after
/// [`prepare_sleep`](Self::prepare_sleep) (or by [`sleep`](Self::sleep)). The owner may drop the
/// driver at any time, and take it again later.
pub struct Driver {
    /// `None` after the queue has failed.
    worker: Option<Box<Worker>>,
    queue: AsyncQueue,
}

impl Driver {
    pub(super) fn new(queue: AsyncQueue) -> Option<Self> {
        let Some(mut worker) = queue.0.parking.unpark() else {
            queue.shared().request(TRIED);
            return None;
        };
        worker.forget_wait();
        Some(Self { worker: Some(worker), queue })
    }

    /// The driven queue.
    #[must_use]
    pub fn queue(&self) -> &AsyncQueue {
        &self.queue
    }

    /// Submits the commands of the inbox with at most one doorbell write, takes completions and
    /// wakes their futures. Returns true if there was work.
    pub fn step(&mut self) -> bool {
        let Some(worker) = &mut self.worker else { return false };
        let busy = worker.step(self.queue.shared());
        if worker.has_failed() {
            self.park();
        }
        busy
    }

    /// The number of commands in flight.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.worker.as_ref().map_or(0, |worker| worker.outstanding())
    }

    /// True if the queue needs no driving: no command is in flight or queued, and no future waits
    /// for a free slot.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.worker.as_ref().is_none_or(|worker| !worker.has_work()) && !self.has_inbox()
    }

    /// True if futures have put commands into the inbox.
    fn has_inbox(&self) -> bool {
        self.worker.is_some() && self.queue.shared().has_inbox()
    }

    /// True if another thread tried to drive the queue since the last call. In that case, an owner
    /// without commands in flight should drop the driver.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.queue.shared().take_request(ANY)
    }

    /// Polls until there is work for the queue, until `also` returns true, or until the limit of
    /// the queue's [`SpinPolicy`](crate::SpinPolicy). Returns true if there is work.
    pub fn spin(&mut self, also: impl FnMut() -> bool) -> bool {
        let Some(worker) = &mut self.worker else { return false };
        worker.spin(self.queue.shared(), also)
    }

    /// Prepares a sleep on [`AsyncQueue::event`]. Returns true if the owner may sleep, because
    /// there is no work yet. From then on, new work signals the event. The sleep must end at
    /// [`sleep_until`](Self::sleep_until), and the owner must call [`awake`](Self::awake)
    /// afterwards.
    #[must_use]
    pub fn prepare_sleep(&mut self) -> bool {
        match &mut self.worker {
            Some(worker) => worker.prepare_sleep(self.queue.shared()),
            None => true,
        }
    }

    /// Deadline of a sleep.
    #[must_use]
    pub fn sleep_until(&self) -> Option<Instant> {
        self.worker.as_ref().and_then(|worker| worker.sleep_until())
    }

    /// Ends a sleep that was prepared with [`prepare_sleep`](Self::prepare_sleep).
    pub fn awake(&mut self) {
        if let Some(worker) = &mut self.worker {
            worker.wake_up();
        }
    }

    /// Sleeps until there is work for the queue, or until `deadline`. Does not sleep if `also`
    /// returns true. Code that makes `also` true during the sleep must [nudge](AsyncQueue::nudge)
    /// the queue.
    pub fn sleep(&mut self, deadline: Option<Instant>, also: impl FnOnce() -> bool) {
        if let Some(worker) = &mut self.worker {
            worker.sleep(self.queue.shared(), deadline, also);
        }
    }

    /// True if the queue has failed and needs no driving any more.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.worker.is_none()
    }

    /// Checks whether the device has disappeared, after a hang-up of [`AsyncQueue::hang_up`]. If
    /// so, all commands in flight fail.
    pub fn check_gone(&mut self) {
        if let Some(worker) = &mut self.worker {
            worker.check_gone(self.queue.shared());
        }
    }

    fn park(&mut self) {
        if let Some(worker) = self.worker.take() {
            self.queue.0.parking.park(worker);
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.park();
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("outstanding", &self.outstanding()).finish_non_exhaustive()
    }
}
