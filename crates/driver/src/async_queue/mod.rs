//! Asynchronous API: futures over a queue pair, for any executor.
//!
//! Each queue has a thread. The thread submits the commands that futures put into the inbox, in
//! batches, and wakes the futures when their commands complete. While commands are in flight, the
//! thread polls for at most the time that the queue's [`SpinPolicy`](crate::SpinPolicy) permits.
//! Then it sleeps on an eventfd, which the controller's interrupt and new commands both signal.
//! Futures only need a `std::task::Waker`, so they work with any executor.
//!
//! Passing a command to the queue thread and back costs two wakeups, more than the command itself.
//! An event loop that needs a lower latency polls a [`QueuePair`](crate::QueuePair) itself.
//!
//! # Dropping a future
//!
//! Dropping a future never touches the device and never frees memory that the device may use. If
//! the command was not submitted yet, it is discarded, and its buffer returns to its pool. If the
//! command was submitted, it is executed: the queue keeps the buffer until the completion, and then
//! returns the buffer to its pool.
//!
//! # Order and timeouts
//!
//! Commands are submitted in the order of the first poll of their futures. If the queue is full,
//! futures wait in FIFO order. The controller may execute commands in any order. A command that
//! does not complete within [`Timeouts::io`](crate::Timeouts) fails its future; a future that waits
//! for a full queue for the same time fails as well.

mod future;
mod namespace;
mod queue;
mod shared;
mod worker;

pub use self::future::{Completed, Io, Transfer, Unit};
pub use self::namespace::AsyncNamespace;
pub use self::queue::AsyncQueue;
