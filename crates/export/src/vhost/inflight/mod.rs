//! In-flight tracking: a record of the requests in flight, in memory that remains with the frontend
//! when this process dies (`VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD`; vhost-user, "Inflight I/O
//! tracking").
//!
//! The device creates a file for this memory when the frontend requests it. The frontend sends the
//! file back, and after a reconnect it sends the file to the next process. The guest does not
//! notice the new process: its queues keep their state.
//!
//! # Order of stores
//!
//! After the death of the process (but not of the machine), all executed stores are visible, in
//! their order. A request is identified by its head, the index of its first descriptor.
//!
//! 1. A request is taken from the available ring. Its number is stored, then its mark. Then the
//!    disk gets the request.
//! 2. When the request has completed, and data and status are in the guest's memory, it becomes the
//!    first entry of the list of answered requests.
//! 3. The entry of the used ring is written, and then the ring's index.
//! 4. The request's mark is removed.
//! 5. The index of the used ring is stored in the tracking memory.
//!
//! # Recovery
//!
//! If the index of the used ring and the stored index differ, the process died between the third
//! and the fifth step. The difference is the number of requests at the start of the list that are
//! answered, even if they have a mark. All other marked requests are executed again, in the order
//! of their numbers, before any new request is taken. The position in the available ring is the
//! number of these requests plus the number of requests in the used ring, because all of them were
//! taken.
//!
//! | killed | found state | action |
//! |---|---|---|
//! | before the mark | the request is in the available ring | it is taken |
//! | between 1 and 3 | a mark | it is executed again, once |
//! | between 3 and 5 | indices differ by one, the request is first in the list | none: answered |
//!
//! If the mark were removed before the request is in the used ring, the request could be lost. If
//! the index were stored before the mark is removed, the request could be answered twice. The
//! test `model` explores all orders.
//!
//! I/O of the dead process may still reach the disk after the death. The next process that opens
//! the disk must wait for the end of that I/O. For images, the image lock ensures this
//! (`shadowbell_disk`).
//!
//! # Trust
//!
//! The frontend owns the memory. The device reads it once, when a queue starts, and validates the
//! copy.

mod layout;
#[cfg(test)]
mod model;
mod region;
mod tracker;

pub(super) use region::{Kept, Region, Shape, ShapeError};
pub(super) use tracker::{Found, Inconsistent, Tracker};
