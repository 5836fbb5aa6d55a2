//! Which requests are in flight, written down in memory that the frontend keeps while this process
//! may die (`VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD`; vhost-user, "Inflight I/O tracking").
//!
//! The frontend has the file made, gives it back, and gives it to the next process as well, when it
//! has connected again. A virtio guest does not notice: its queues stay as they are.
//!
//! # The order of stores
//!
//! What is killed is a process and not the machine, so all stores that were executed are found, in
//! their order. A request is known by its head, the index of its first descriptor.
//!
//! 1. A request that was taken from the available ring gets the next number, and then its mark. The
//!    disk has it after that.
//! 2. When it has ended, and data and status are in the guest's memory, it is put at the head of
//!    the list of what was answered last.
//! 3. The used ring's entry is written, and then the index of the used ring (virtio).
//! 4. The mark is removed.
//! 5. The index of the used ring is stored here, too.
//!
//! # What is found
//!
//! If the two indices differ, the process died between 3 and 5, and the first of the list, as many
//! as they differ by, are answered, marked or not. What else is marked is carried out again, in the
//! order of the numbers, before anything new is taken. So many, and those in the used ring, were
//! taken from the available ring.
//!
//! | killed | what is found | what is done |
//! |---|---|---|
//! | before the mark | the request is in the available ring | it is taken |
//! | between 1 and 3 | a mark | carried out again, once |
//! | between 3 and 5 | an index that differs by one, and the request at the head of the list | it is answered |
//!
//! Were the mark removed before the used ring has the request, it would be lost; were the index
//! stored before the mark is removed, it would be answered twice. `model` explores that.
//!
//! What the dead process had given to a disk may land later than it died. Whoever starts the next
//! process on the same disk waits for that; for images the lock does it (`shadowbell_backend`).
//!
//! # Trust
//!
//! The memory is the frontend's. It is read once, when a queue starts, and what is read is checked.

mod layout;
#[cfg(test)]
mod model;
mod region;
mod tracker;

pub(super) use region::{Kept, Region, Shape};
pub(super) use tracker::{Found, Senseless, Tracker};
