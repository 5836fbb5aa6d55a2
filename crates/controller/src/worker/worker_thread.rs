//! Lending an I/O thread: a job runs on the thread and includes the thread's turns in its loop.
//!
//! A program that uses a controller in its own process involves two threads per command, its own
//! and the I/O thread, which wake each other. If one thread does the work of both, no wakeups are
//! needed. So an I/O thread can be lent to a job, which runs on that thread, calls
//! [`turn`](WorkerThread::turn) often, and sleeps with [`sleep`](WorkerThread::sleep), together
//! with the other events that it waits for.

use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Job that runs on a lent I/O thread.
///
/// The job must not wait for work of the I/O thread itself (queue creation or deletion, release of
/// memory), because that work is done in the turns that the job makes.
pub type ThreadJob = Box<dyn FnOnce(&mut dyn WorkerThread) + Send>;

/// I/O thread that is lent to the running job.
pub trait WorkerThread {
    /// Handles messages, then makes one pass over every queue: fetches, executes, posts, raises
    /// interrupts. True if there was work.
    fn turn(&mut self) -> bool;

    /// After a turn without work: true if the job should poll once more instead of sleeping, as an
    /// I/O thread itself would (see [`Polling`](super::Polling)).
    fn looks_again(&mut self) -> bool;

    /// Arms the doorbells, rechecks, and calls `wait` if there is no work. `wait` waits for at most
    /// the given time, or without a limit; it has to end when [`event`](Self::event) is readable,
    /// and returns true in that case. Returns true if `wait` was called.
    fn sleep(&mut self, wait: &mut dyn FnMut(Option<Duration>) -> bool) -> bool;

    /// Descriptor that is readable when the I/O thread has work. It has to be watched from before
    /// the first turn, edge-triggered.
    fn event(&self) -> BorrowedFd<'_>;

    /// True if this I/O thread still serves the queues of the controller that has lent it, which
    /// may have moved to another thread or been reset.
    fn serves_lender(&self) -> bool;
}
