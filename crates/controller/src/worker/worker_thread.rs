//! A worker's thread, lent to somebody who has work of his own and does the worker's with it.
//!
//! A program that reaches a controller in its own process has two threads in each command: its own
//! and the worker's, each of which wakes the other. Where one thread does both, nobody is woken. So
//! a worker can be lent to a job, which runs on the worker's thread, calls
//! [`turn`](WorkerThread::turn) often, and sleeps by [`sleep`](WorkerThread::sleep), together with
//! whatever else it waits for.

use std::os::fd::BorrowedFd;
use std::time::Duration;

/// What is to run on a worker's thread.
///
/// It must not wait for anything that the worker has to do (a queue to be created or deleted,
/// memory to be let go of): that is done in its own turns.
pub type ThreadJob = Box<dyn FnOnce(&mut dyn WorkerThread) + Send>;

/// The worker of the calling thread.
pub trait WorkerThread {
    /// Takes messages, then passes once over every queue: fetches, executes, posts, interrupts.
    /// Whether there was anything to do.
    fn turn(&mut self) -> bool;

    /// After a turn that found nothing: whether to look again before a sleep. A worker does so for
    /// as long as it is worth it (see [`Polling`](super::Polling)).
    fn looks_again(&mut self) -> bool;

    /// Arms the doorbells, looks once more, and calls `wait` if there is nothing to do, which waits
    /// for so long at most, or without an end. It has to end when [`event`](Self::event) is
    /// readable, and says whether it was. Whether `wait` was called.
    fn sleep(&mut self, wait: &mut dyn FnMut(Option<Duration>) -> bool) -> bool;

    /// Readable when the worker has something to do, as far as an event tells: to be watched from
    /// before the first turn, edge-triggered.
    fn event(&self) -> BorrowedFd<'_>;

    /// Whether the queues of the controller that it was lent by are served here: it may be moved to
    /// another worker, or be reset.
    fn serves_lender(&self) -> bool;
}
