//! Properties of a disk.

use crate::metadata::MetadataFormat;
use crate::zoned::ZoneFormat;
use serde::{Deserialize, Serialize};

/// Properties of a disk, as the namespace reports them to the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskInfo {
    /// Logical block size in bytes: 512 or 4096.
    pub block_size: u32,
    /// Capacity in logical blocks.
    pub blocks: u64,
    /// True if the disk refuses writes; the namespace is then write-protected.
    pub read_only: bool,
    /// True if the disk has a volatile write cache: a loss of power before a flush can lose
    /// completed writes.
    pub volatile_cache: bool,
    /// True if discards have an effect: blocks are returned to the storage, and then read as
    /// zeroes.
    pub discard: bool,
    /// Preferred alignment of discards and other requests, in logical blocks; at least 1.
    pub granularity: u32,
    /// Metadata format, if blocks have metadata.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<MetadataFormat>,
    /// Zone format, if the disk is zoned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zoned: Option<ZoneFormat>,
}

impl DiskInfo {
    /// Creates the properties of a disk with `blocks` logical blocks of `block_size` bytes (512 or
    /// 4096): writable, no volatile cache, no discards, granularity 1. The caller can then change
    /// the fields.
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

    /// Copies the properties with a capacity of `bytes`; `None` if that is zero or not a multiple
    /// of the block size.
    pub fn with_bytes(&self, bytes: u64) -> Option<Self> {
        let block_size = u64::from(self.block_size);
        let fits = bytes != 0 && bytes.is_multiple_of(block_size);
        fits.then(|| Self { blocks: bytes / block_size, ..self.clone() })
    }

    /// Capacity in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(u64::from(self.block_size))
    }
}
