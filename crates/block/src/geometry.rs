//! Size and features of a disk.

use shadowbell_driver::Namespace;

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
    /// True if the controller has the Write Zeroes command; otherwise zeroes are written.
    pub write_zeroes: bool,
    /// True if blocks can be discarded (Dataset Management).
    pub discard: bool,
    /// True if the controller has the Compare command; otherwise the data are read.
    pub compare: bool,
    /// True if the controller has the Copy command; otherwise the data are read and written.
    pub copy: bool,
}

impl Geometry {
    pub(crate) fn of(namespace: &Namespace, read_only: bool) -> Self {
        let has = namespace.optional_commands();
        Self {
            bytes: namespace.bytes(),
            block_size: namespace.block_size(),
            read_only: read_only || namespace.is_read_only(),
            volatile_cache: namespace.has_volatile_cache(),
            write_zeroes: has.write_zeroes(),
            discard: has.dataset_management(),
            compare: namespace.compares(),
            copy: namespace.copy_limits().is_some(),
        }
    }
}
