//! Features and configuration space of the virtio-blk device.

use super::request::{MAX_DATA, SECTOR};
use shadowbell_block::Geometry;

/// Largest number of data descriptors per request (`seg_max`).
const SEG_MAX: u32 = 254;

/// Feature bits (Virtio 1.2, 5.2.3 and 6).
pub(super) mod feature {
    pub(crate) const SEG_MAX: u64 = 1 << 2;
    pub(crate) const RO: u64 = 1 << 5;
    pub(crate) const BLK_SIZE: u64 = 1 << 6;
    pub(crate) const FLUSH: u64 = 1 << 9;
    pub(crate) const TOPOLOGY: u64 = 1 << 10;
    pub(crate) const MQ: u64 = 1 << 12;
    pub(crate) const DISCARD: u64 = 1 << 13;
    pub(crate) const WRITE_ZEROES: u64 = 1 << 14;
    pub(crate) const INDIRECT_DESC: u64 = 1 << 28;
    pub(crate) const EVENT_IDX: u64 = 1 << 29;
    /// Feature bit of vhost-user.
    pub(crate) const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub(crate) const VERSION_1: u64 = 1 << 32;
}

/// Offered features.
pub(super) fn features(geometry: &Geometry) -> u64 {
    let mut features = feature::SEG_MAX
        | feature::BLK_SIZE
        | feature::TOPOLOGY
        | feature::FLUSH
        | feature::MQ
        | feature::INDIRECT_DESC
        | feature::EVENT_IDX
        | feature::PROTOCOL_FEATURES
        | feature::VERSION_1;
    if geometry.read_only {
        features |= feature::RO;
    } else {
        features |= feature::WRITE_ZEROES;
        if geometry.discard {
            features |= feature::DISCARD;
        }
    }
    features
}

/// Configuration space, `struct virtio_blk_config` (Virtio 1.2, 5.2.4).
pub(super) fn configuration(geometry: &Geometry, queues: usize) -> Vec<u8> {
    let block = geometry.block_size;
    let sectors = u32::try_from(MAX_DATA as u64 * 16 / SECTOR).unwrap_or(u32::MAX);
    let alignment = block / SECTOR as u32;
    let queues = u16::try_from(queues).unwrap_or(u16::MAX);
    let mut out = Vec::with_capacity(60);
    out.extend((geometry.bytes / SECTOR).to_le_bytes());
    out.extend(0u32.to_le_bytes()); // size_max: not offered
    out.extend(SEG_MAX.to_le_bytes());
    out.extend([0; 4]); // geometry: not offered
    out.extend(block.to_le_bytes());
    // Topology: one logical block per physical block, and an optimal I/O size of 4096 bytes.
    out.extend([0, 0]);
    out.extend(u16::try_from(4096 / block.min(4096)).unwrap_or(1).to_le_bytes());
    out.extend(0u32.to_le_bytes());
    out.extend([0, 0]); // writeback: not offered
    out.extend(queues.to_le_bytes());
    for field in [sectors, 1, alignment, sectors, 1] {
        out.extend(field.to_le_bytes());
    }
    out.extend([1, 0, 0, 0]); // write_zeroes_may_unmap
    out
}
