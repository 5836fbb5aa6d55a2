//! A queue for futures, and the right to drive it.

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

/// A queue pair with a thread of its own, for futures of any executor. A clone is another handle on
/// the same queue.
///
/// When the last handle and the last future are dropped, the thread waits for what is outstanding
/// (until its deadline), deletes the queue pair and ends, and the drop waits for that.
#[derive(Clone)]
pub struct AsyncQueue(Arc<AsyncHandle>);

impl AsyncQueue {
    /// Gives `queue` a thread.
    ///
    /// # Errors
    /// The system's, when there is no thread or descriptor to be had.
    pub fn start(queue: QueuePair) -> io::Result<Self> {
        Ok(Self(Arc::new(AsyncHandle::start(queue)?)))
    }

    /// Any I/O command, with its buffer if it has data. It is submitted when the future is first
    /// polled.
    pub fn submit(&self, command: Command, buffer: Option<Buffer>) -> Io {
        Io::new(Arc::clone(&self.0), command, buffer)
    }

    /// Any I/O command with metadata, as [`submit`](Self::submit) has those without.
    pub fn submit_with_metadata(&self, command: MetadataCommand, buffer: Option<Buffer>) -> Io {
        Io::with_metadata(Arc::clone(&self.0), command, buffer)
    }

    /// Memory for `count` buffers of `size` bytes, shared with the controller at once: for whoever
    /// knows the queue and not the controller.
    ///
    /// # Errors
    /// [`DmaError`].
    pub fn buffers(&self, count: usize, size: usize) -> Result<BufferPool, DmaError> {
        self.shared().pool(count, size)
    }

    /// The right to drive this queue, if nobody else has it at the moment.
    #[must_use]
    pub fn try_drive(&self) -> Option<Driver> {
        Driver::new(self.clone())
    }

    /// The right to drive this queue, for an event loop, which comes here again soon: if it is the
    /// queue's own thread that drives, it stops, even with commands under way.
    #[must_use]
    pub fn ask_to_drive(&self) -> Option<Driver> {
        let driver = self.try_drive();
        if driver.is_none() {
            self.shared().request(ASKED);
        }
        driver
    }

    /// Ends the sleep of whoever drives the queue, or has its thread look at it.
    pub fn nudge(&self) {
        self.shared().nudge();
    }

    /// What is signalled, as an eventfd is, while whoever drives the queue sleeps and there is
    /// something to do. For event loops: edge-triggered, since nobody resets its count.
    #[must_use]
    pub fn event(&self) -> BorrowedFd<'_> {
        self.shared().event().as_fd()
    }

    /// A socket that hangs up when the device has gone, if it is one that has such a thing: to be
    /// watched (`EPOLLRDHUP`) together with [`event`](Self::event), and followed by
    /// [`Driver::check_gone`].
    #[must_use]
    pub fn hang_up(&self) -> Option<BorrowedFd<'_>> {
        self.shared().hang_up().map(AsFd::as_fd)
    }

    /// What the queue did, as of the last time that its driver had nothing better to do.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        self.shared().lock().stats
    }

    /// The identifier of its submission queue, and of its completion queue.
    #[must_use]
    pub fn qid(&self) -> u16 {
        self.shared().qid
    }

    /// How many commands may be outstanding at once; further ones wait.
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

/// The right to drive a queue, and the duty: while this lives, nobody else does. See the
/// [module](super).
///
/// Whoever has it calls [`step`](Self::step) again and again, and sleeps only after
/// [`prepare_sleep`](Self::prepare_sleep) (or by [`sleep`](Self::sleep)). It can be dropped at any
/// time, and taken again.
pub struct Driver {
    /// Not here any more when the queue does not work.
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

    /// The queue.
    #[must_use]
    pub fn queue(&self) -> &AsyncQueue {
        &self.queue
    }

    /// Submits what futures have left, with one doorbell or none, takes completions and wakes their
    /// futures. Whether there was anything to do.
    pub fn step(&mut self) -> bool {
        let Some(worker) = &mut self.worker else { return false };
        let busy = worker.step(self.queue.shared());
        if worker.has_failed() {
            self.park();
        }
        busy
    }

    /// How many commands are with the controller.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.worker.as_ref().map_or(0, |worker| worker.outstanding())
    }

    /// Whether nothing is under way, and nobody waits for a free slot. If so, whoever drives has
    /// nothing to do for the queue.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.worker.as_ref().is_none_or(|worker| !worker.has_work()) && !self.has_inbox()
    }

    /// Whether futures have left something.
    fn has_inbox(&self) -> bool {
        self.worker.is_some() && self.queue.shared().has_inbox()
    }

    /// Whether somebody else has tried to drive the queue since this was called last. Who has
    /// nothing under way had best drop this then.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.queue.shared().take_request(ANY)
    }

    /// Looks for something to do, here or as far as `also` knows, for as long as the queue's
    /// [`SpinPolicy`](crate::SpinPolicy) says. Whether there is.
    pub fn spin(&mut self, also: impl FnMut() -> bool) -> bool {
        let Some(worker) = &mut self.worker else { return false };
        worker.spin(self.queue.shared(), also)
    }

    /// To be called before sleeping on [`AsyncQueue::event`]: whether there is nothing to do yet.
    /// If so, the event will be signalled for whatever comes, the sleep must not last longer than
    /// [`sleep_until`](Self::sleep_until), and [`awake`](Self::awake) has to follow it.
    #[must_use]
    pub fn prepare_sleep(&mut self) -> bool {
        match &mut self.worker {
            Some(worker) => worker.prepare_sleep(self.queue.shared()),
            None => true,
        }
    }

    /// When a sleep has to end at the latest.
    #[must_use]
    pub fn sleep_until(&self) -> Option<Instant> {
        self.worker.as_ref().and_then(|worker| worker.sleep_until())
    }

    /// To be called after a sleep that was prepared.
    pub fn awake(&mut self) {
        if let Some(worker) = &mut self.worker {
            worker.wake_up();
        }
    }

    /// Sleeps until there is something to do for the queue, or until `deadline`. Not at all if
    /// there is something to do as far as `also` knows; what makes that change later has to
    /// [nudge](AsyncQueue::nudge) the queue.
    pub fn sleep(&mut self, deadline: Option<Instant>, also: impl FnOnce() -> bool) {
        if let Some(worker) = &mut self.worker {
            worker.sleep(self.queue.shared(), deadline, also);
        }
    }

    /// Whether the queue does not work any more: there is nothing left to drive.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.worker.is_none()
    }

    /// To be called when [`AsyncQueue::hang_up`] has hung up: if the device has gone, this fails
    /// everything that is under way.
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
