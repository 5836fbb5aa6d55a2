//! The asynchronous API: futures over a queue pair, for any executor.
//!
//! A queue pair belongs to one thread at a time: the one that drives it. It submits what futures
//! leave in the inbox, in batches, and wakes them when their commands complete. It polls while
//! there is work, for as long as the queue's [`SpinPolicy`](crate::SpinPolicy) says, and then
//! sleeps on one descriptor, which the controller's interrupt and new work both signal. Nothing
//! here needs an executor of a certain kind: `std::task::Waker` is all.
//!
//! # Who drives
//!
//! An [`AsyncQueue`] has a thread of its own for that, so futures get on wherever they are polled.
//! But a command that goes to another thread and back costs two wakeups, which is more than the
//! command itself. A thread that polls futures and has nothing better to do than to wait for them
//! (an event loop, a blocking call) therefore drives the queue itself, as long as it has a
//! [`Driver`]:
//!
//! ```no_run
//! # use shadowbell_driver::AsyncQueue;
//! # fn poll_futures_that_were_woken() -> bool { false }
//! # fn serve(queue: &AsyncQueue) {
//! let Some(mut driver) = queue.try_drive() else { return /* somebody else does */ };
//! loop {
//!     // What they submit goes to the controller in one batch, with one doorbell.
//!     let polled = poll_futures_that_were_woken();
//!     if driver.step() || polled {
//!         continue;
//!     }
//!     if driver.is_idle() {
//!         break;
//!     }
//!     if !driver.spin(|| false) {
//!         driver.sleep(None, || false);
//!     }
//! }
//! # }
//! ```
//!
//! Futures of other threads are served as well meanwhile. When the [`Driver`] is dropped, whatever
//! is under way goes on, by the queue's own thread.
//!
//! # Dropping a future
//!
//! Dropping a future never touches the device and never frees memory that the device may use. A
//! command that was not submitted yet is forgotten, and its buffer goes back to its pool. One that
//! was submitted runs to its end: the queue keeps its buffer until the completion, with which it
//! goes back to its pool.
//!
//! # Order, and time
//!
//! Commands are submitted in the order of the first poll of their futures. A queue that is full has
//! them wait, first come, first served. The controller may carry commands out in any order. A
//! command that does not complete in time ([`Timeouts::io`](crate::Timeouts)) fails its future, and
//! so does one that waits for a full queue for so long.

mod future;
mod handle;
mod namespace;
mod parking;
mod queue;
mod shared;
mod thread;
mod worker;

pub use self::future::{Done, Io, Transfer, Unit};
pub use self::namespace::AsyncNamespace;
pub use self::queue::{AsyncQueue, Driver};
