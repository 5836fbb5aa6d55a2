//! Shared test helpers of several crates. Other crates use this crate only as a dev-dependency by
//! path. So it is not published, and published packages do not name it.
//!
//! | module | feature | contents |
//! |---|---|---|
//! | `certificates` | `certificates` | directories of valid and invalid certificates |
//! | `disks` | `disks` | host of a disk: requests in batches, and a model |
//! | `guest` | `guest` | a guest over a vfio-user socket, with live migration |
//! | `late` | `late` | a block device that delays one write |
//! | `outside` | | disks provided from outside of the tests |
//! | `process_group` | | child processes that end with the test |
//! | `programs` | | programs of other projects that tests start, and skipped tests |
//! | `stalled` | `stalled` | a FUSE file system that hangs |
//! | `test_disk` | `test-disk` | disk in memory with holds and failures that a test controls |
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
pub mod programs;
#[cfg(feature = "stalled")]
pub mod stalled;
#[cfg(feature = "test-disk")]
pub mod test_disk;
pub mod wait;
