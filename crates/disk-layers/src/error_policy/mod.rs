//! Error policy: requests that fail because of the storage are reported to the host, or held.
//!
//! A [`HoldingDisk`] is a layer around a disk. If a request fails because the storage is full or
//! defective, the layer holds the request, and the disk is
//! [stopped](shadowbell_disk::Disk::stopped). Held requests are submitted again when the operator
//! has repaired the storage and [resumes](shadowbell_disk::Disk::resume) the disk. A disk with the
//! policy to report errors does not have this layer, and so no cost.
//!
//! A held request is in flight for the host and for the journal. So it can be cancelled (by an
//! Abort, a reset, the deletion of the queue or a disconnection of the client), and after a crash,
//! the next server process submits it again. While a disk is stopped, new requests are submitted
//! normally, and are held only if they fail too.
//!
//! A held request counts as in flight. So a quiesce of its controller takes the whole time limit,
//! and the next process executes the command again, as after a crash. A move of the queues to
//! another thread waits until the request ends.
//!
//! A held request keeps the guest's memory mapped, so a change of the guest's memory map moves its
//! data to the new map. If its data are not in the new map, the request ends with an error. A
//! request that fails after a change of the map is treated in the same way, so changes of other
//! memory do not matter.
//!
//! | module | content |
//! |---|---|
//! | `policy` | the policies, and the errors to which they apply |
//! | `stop_state` | stopped state of a disk; shared by queues and threads |
//! | `queue` | held requests of one queue |
//! | `disk` | the layer around a disk |

mod disk;
mod policy;
mod queue;
mod stop_state;

#[cfg(test)]
mod tests;

pub use disk::HoldingDisk;
pub use policy::ErrorPolicy;
