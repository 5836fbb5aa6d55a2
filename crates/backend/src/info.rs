//! What a disk is.

use crate::metadata::MetadataFormat;
use crate::zoned::ZoneFormat;
use serde::{Deserialize, Serialize};

/// What a disk is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DiskInfo {
    /// Bytes in a logical block: 512 or 4096.
    pub block_size: u32,
    /// Logical blocks in the disk.
    pub blocks: u64,
    /// Writes are refused; the namespace is write-protected.
    pub read_only: bool,
    /// Completed writes can be lost with the power until a flush: there is a volatile write cache.
    pub volatile_cache: bool,
    /// Discarded blocks are given back to the storage below.
    pub discard: bool,
    /// Blocks to which discards and other requests are best aligned, in logical blocks; at least 1.
    pub granularity: u32,
    /// What metadata each block has, if it has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<MetadataFormat>,
    /// What its zones are, if it has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zoned: Option<ZoneFormat>,
}

impl DiskInfo {
    /// A disk of `blocks` logical blocks of `block_size` bytes (512 or 4096): writable, without a
    /// volatile cache and without discards, aligned to single blocks. The fields can be changed.
    #[must_use]
    pub fn new(block_size: u32, blocks: u64) -> Self {
        Self {
            block_size,
            blocks,
            read_only: false,
            volatile_cache: false,
            discard: false,
            granularity: 1,
            metadata: None,
            zoned: None,
        }
    }

    /// As this, with so many bytes, if a disk can have them.
    pub(crate) fn with_bytes(&self, bytes: u64) -> Option<Self> {
        let block_size = u64::from(self.block_size);
        let fits = bytes != 0 && bytes.is_multiple_of(block_size);
        fits.then(|| Self { blocks: bytes / block_size, ..self.clone() })
    }

    /// The capacity in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(u64::from(self.block_size))
    }
}
