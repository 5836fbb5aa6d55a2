//! Zones: a disk around another one, that is written from the start of each zone on. ZNS 1.1.
//!
//! | file | what |
//! |---|---|
//! | `format` | how large zones are and how many may be open: what options say |
//! | `table` | where zones and data lie on the disk below, and what is written down of a zone |
//! | `zones` | the zones of a disk: their states, and what may be done with them |
//! | `limits` | how many zones are active and open |
//! | `manage` | commands that change states, one zone at a time or all |
//! | `report` | what a host is told of them |
//! | `disk`, `queue`, `task` | the disk, one thread's way to it, and a request there |
//!
//! A write takes its place when it is submitted, under one lock for the disk, which is held for a
//! few instructions: write pointers never wait for storage. What a zone is is stored with plain
//! stores in memory that is the first part of the disk below, so it outlives the process with the
//! data. A reset waits for the writes that have their place in the zone.

mod disk;
mod format;
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
pub use format::ZoneFormat;
pub use report::ZoneReport;
pub use zones::Zones;
