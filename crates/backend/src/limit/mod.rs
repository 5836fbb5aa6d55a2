//! Limits: how many requests and bytes a second a disk takes.
//!
//! A [`LimitedDisk`] is a disk around another. A request that comes too early waits in there, as if
//! the disk were slow, and goes on when its time has come. Disks that are not limited have nothing
//! of it around them, and pay nothing.
//!
//! | module | what it is |
//! |---|---|
//! | `rates` | what is allowed, and how it is written |
//! | `limiter` | when the next request may go; shared by disks, queues and threads |
//! | `timer` | wakes a thread for that |
//! | `queue` | the requests of one queue that wait |
//! | `disk` | the disk around another |

mod disk;
mod limiter;
mod queue;
mod rates;
mod timer;

#[cfg(test)]
mod tests;

pub use disk::LimitedDisk;
pub use limiter::{Clock, Limiter};
pub use rates::{Limits, Rate};
