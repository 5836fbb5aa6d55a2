//! What the tests of several crates need. It is a dev-dependency of theirs by its path alone, so it
//! is not published, and what they publish does not name it.
//!
//! | module | feature | what it is |
//! |---|---|---|
//! | `certificates` | `certificates` | directories of certificates, right ones and wrong ones |
//! | `disks` | `disks` | a host of a disk: requests in batches, and a model |
//! | `guest` | `guest` | a guest over a vfio-user socket, that can be moved to another |
//! | `late` | `late` | a block device one of whose writes arrives late |
//! | `outside` | | disks that somebody outside of the tests has made |
//! | `process_group` | | child processes that end with the test |
//! | `stalled` | `stalled` | a FUSE file system that does not answer |
//! | `test_disk` | `test-disk` | disk in memory that holds, fails and records requests as ordered |
//! | `wait` | | waits for events, with one limit for all tests |
#![forbid(unsafe_code)]

#[cfg(feature = "certificates")]
pub mod certificates;
#[cfg(feature = "disks")]
pub mod disks;
#[cfg(feature = "guest")]
pub mod guest;
#[cfg(feature = "late")]
pub mod late;
pub mod outside;
pub mod process_group;
#[cfg(feature = "stalled")]
pub mod stalled;
#[cfg(feature = "test-disk")]
pub mod test_disk;
pub mod wait;
