//! Zoned disks: a layer that divides another disk into zones, which are written sequentially (ZNS
//! 1.1).
//!
//! | file | content |
//! |---|---|
//! | `table` | layout on the disk below, and the stored zone table |
//! | `zones` | zones of a disk: states, reads and writes |
//! | `limits` | limits of active and open zones |
//! | `manage` | state changes of one zone or of all |
//! | `report` | Report Zones |
//! | `disk`, `queue`, `task` | the disk, one thread's queue, and a request |
//!
//! When a write is submitted, the write pointer is advanced under a lock of the disk. The lock is
//! held for a few instructions only, and never while storage is accessed. The zone table is in the
//! first part of the disk below. This part is mapped as memory, and the table is updated by stores
//! to the mapping. So the table survives a crash of the process, as the data do. A reset waits for
//! the writes in flight in its zone.

mod disk;
mod limits;
mod manage;
mod queue;
mod report;
mod table;
mod task;
#[cfg(test)]
mod tests;
mod zones;

pub use disk::ZonedDisk;
