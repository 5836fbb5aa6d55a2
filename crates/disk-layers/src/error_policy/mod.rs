//! Error policy: requests that fail because of the storage are reported to the host, or held.
//!
//! A [`HoldingDisk`] is a layer around a disk. A request that fails because the storage is full or
//! fails is held in the layer, and the disk is [stopped](shadowbell_disk::Disk::stopped). Held
//! requests are submitted again when the operator has repaired the storage and
//! [resumes](shadowbell_disk::Disk::resume) the disk. A disk whose errors are reported has no such
//! layer and no such cost.
//!
//! A held request is in flight for the host and for the journal. So it ends by a cancellation
//! (Abort, reset, deletion of the queue, disconnection of the client), and the next server process
//! submits it again. New requests are not delayed while a disk is stopped. They are held if they
//! fail, too.
//!
//! A held request keeps the guest's memory mapped, so a change of the guest's memory map moves its
//! data to the new map. A request whose data are not in the new map ends.
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
