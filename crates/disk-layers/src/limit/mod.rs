//! Rate limits: requests and bytes per second of a disk.
//!
//! A [`LimitedDisk`] is a layer around a disk. A request beyond the rate waits in the layer, as if
//! the disk were slow, and is submitted at its start time. A disk without limits does not have this
//! layer, and so no cost.
//!
//! | module | content |
//! |---|---|
//! | `rates` | the limits and their text form |
//! | `limiter` | start times of requests; shared by disks, queues and threads |
//! | `timer` | wakes a thread at a start time |
//! | `counts` | counters of waiting requests |
//! | `queue` | waiting requests of one queue |
//! | `disk` | the layer around a disk |

mod counts;
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
