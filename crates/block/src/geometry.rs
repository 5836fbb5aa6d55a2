//! Size and features of a disk.

use shadowbell_disk::DiskInfo;

/// Size and features of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size in bytes.
    pub bytes: u64,
    /// Block size in bytes. Requests of whole blocks are faster than others.
    pub block_size: u32,
    /// True if writes are refused.
    pub read_only: bool,
    /// True if a power loss before a flush can lose writes (volatile write cache).
    pub volatile_cache: bool,
    /// True if the disk can zero ranges by itself. Otherwise zeroes are written as data.
    pub write_zeroes: bool,
    /// True if blocks can be discarded.
    pub discard: bool,
}

impl Geometry {
    pub(crate) fn of(info: &DiskInfo, read_only: bool) -> Self {
        Self {
            bytes: info.bytes(),
            block_size: info.block_size,
            read_only: read_only || info.read_only,
            volatile_cache: info.volatile_cache,
            write_zeroes: true,
            discard: info.discard,
        }
    }
}
