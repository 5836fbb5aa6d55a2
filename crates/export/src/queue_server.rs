//! A thread that serves the disk's queues, lent to whoever serves a client.
//!
//! Where the controller is in this process, a request goes from the thread that serves the client
//! to the one that serves the queue, and back. If the second one is lent ([`QueueThreads`]), it
//! serves the client too, and no thread wakes another.

use std::fmt::Debug;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// What serves a client, on a thread that serves queues, or on one that does not.
pub type QueueServerJob = Box<dyn FnOnce(Option<&mut dyn QueueServer>) + Send>;

/// Has threads that serve the disk's queues.
pub trait QueueThreads: Debug + Send + Sync {
    /// Has `job` run on the thread that serves the submission queue `qid`.
    ///
    /// # Errors
    /// It is not to be had: the job, to be run by the caller.
    fn lend(&self, qid: u16, job: QueueServerJob) -> Result<(), QueueServerJob>;
}

/// What the calling thread has to do for queues.
///
/// Nothing on this thread may wait for what it does itself: that a queue is created or deleted, or
/// that memory is let go of.
pub trait QueueServer {
    /// Does what there is to do. Whether there was anything.
    fn turn(&mut self) -> bool;

    /// After a turn that found nothing: whether to look again before a sleep, everywhere.
    fn looks_again(&mut self) -> bool;

    /// Calls `wait` if there is nothing to do, which waits for so long at most, or without an end.
    /// It ends when [`event`](Self::event) is readable, and says whether it was. Whether `wait` was
    /// called.
    fn sleep(&mut self, wait: &mut dyn FnMut(Option<Duration>) -> bool) -> bool;

    /// Readable when there is something to do: edge-triggered.
    fn event(&self) -> BorrowedFd<'_>;
}
