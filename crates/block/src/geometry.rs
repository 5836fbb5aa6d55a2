//! What a disk is and can do.

use shadowbell_driver::Namespace;

/// What a disk is and can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// How many bytes it has.
    pub bytes: u64,
    /// Bytes of a block. Requests of whole blocks are the fast ones.
    pub block_size: u32,
    /// Whether it takes no writes.
    pub read_only: bool,
    /// Whether a write may be lost with the power until a flush.
    pub volatile_cache: bool,
    /// Whether there is a Write Zeroes command; without, zeroes are written.
    pub write_zeroes: bool,
    /// Whether blocks can be discarded.
    pub discard: bool,
    /// Whether there is a Compare command; without, the data are read.
    pub compare: bool,
    /// Whether there is a Copy command; without, the data are read and written.
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
