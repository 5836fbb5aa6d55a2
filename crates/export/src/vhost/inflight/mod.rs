//! In-flight tracking: a record of the requests in flight, in memory that the frontend keeps when
//! this process dies (`VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD`; vhost-user, "Inflight I/O
//! tracking").
//!
//! The device creates the file on request of the frontend. The frontend sends it back, and sends
//! it to the next process after a reconnect. The guest does not notice the change: its queues
//! keep their state.
//!
//! # Order of stores
//!
//! If the process is killed, but not the machine, all executed stores are visible, in their
//! order. A request is identified by its head, the index of its first descriptor.
//!
//! 1. A request that was taken from the available ring gets the next number, and then its mark.
//!    Then the disk gets the request.
//! 2. When the request has completed, with data and status in the guest's memory, it becomes the
//!    first entry of the list of answered requests.
//! 3. The entry of the used ring is written, and then the index of the used ring (virtio).
//! 4. The mark is removed.
//! 5. The index of the used ring is stored in the tracking memory.
//!
//! # Recovery
//!
//! If the index of the used ring and the stored index differ, the process died between steps 3
//! and 5. As many requests from the start of the list as the difference are answered, marked or
//! not. All other marked requests are executed again, in the order of their numbers, before any
//! new request is taken. These requests and those in the used ring were taken from the available
//! ring, which yields its position.
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
//! I/O that the dead process had submitted may still reach the disk after the death. The next
//! process on the same disk must wait for the end of that I/O; for images, the image lock ensures
//! it (`shadowbell_disk`).
//!
//! # Trust
//!
//! The frontend owns the memory. It is read once, when a queue starts, and validated.

mod layout;
#[cfg(test)]
mod model;
mod region;
mod tracker;

pub(super) use region::{Kept, Region, Shape, ShapeError};
pub(super) use tracker::{Found, Senseless, Tracker};
