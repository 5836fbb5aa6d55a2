//! State of a disk that is stopped by an error of its storage.

use crate::request::DiskError;

/// State of a disk that holds requests after an error of its storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// Error of the first request that was held.
    pub reason: DiskError,
    /// Number of held requests.
    pub held: u64,
    /// Number of times that the disk has been stopped so far, in this process.
    pub times: u64,
}
