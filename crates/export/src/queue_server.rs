//! Interface to an I/O thread that serves the disk's queues and can serve an export's client too.
//!
//! If the controller is in this process, a request passes from the client's thread to the I/O
//! thread of the queue, and back. If the I/O thread is lent ([`QueueThreads`]), it serves the
//! client too, so that no thread has to wake another.

use std::fmt::Debug;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Job that serves a client. The argument is `None` on a thread that does not serve the queue.
pub type QueueServerJob = Box<dyn FnOnce(Option<&mut dyn QueueServer>) + Send>;

/// Access to the I/O threads that serve the disk's queues.
pub trait QueueThreads: Debug + Send + Sync {
    /// Runs `job` on the I/O thread that serves the submission queue `qid`.
    ///
    /// # Errors
    /// If the thread is not available: returns the job, which the caller has to run.
    fn lend(&self, qid: u16, job: QueueServerJob) -> Result<(), QueueServerJob>;
}

/// Queue work of the calling I/O thread.
///
/// The thread must not wait for its own work: the creation or deletion of a queue, or the release
/// of memory that is shared with the controller.
pub trait QueueServer {
    /// Does the pending work of the queues. Returns true if there was any.
    fn turn(&mut self) -> bool;

    /// True if all queues are to be polled again before a sleep, after a turn without work.
    fn looks_again(&mut self) -> bool;

    /// Calls `wait` if no work is pending, with the longest time to wait (`None`: no limit).
    ///
    /// `wait` ends when [`event`](Self::event) is readable, and returns whether it was. The
    /// result of this function is true if `wait` was called.
    fn sleep(&mut self, wait: &mut dyn FnMut(Option<Duration>) -> bool) -> bool;

    /// Edge-triggered descriptor that is readable when work is pending.
    fn event(&self) -> BorrowedFd<'_>;
}
