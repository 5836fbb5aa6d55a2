//! Power-fail atomicity of block writes.
//!
//! A controller always promises that a write of one block is atomic across a loss of power (AWUPF
//! and NAWUPF are zero-based block counts). A device writes each physical block atomically, so a
//! logical block that is aligned and not longer than a physical block is safe. A longer logical
//! block is safe if the write requests atomicity (`RWF_ATOMIC`) and the file system and the device
//! support that. Writes of several blocks are not atomic.

use super::device::{attribute_of, is_tmpfs};
use super::namespace::NamespaceFacts;
use rustix::fs::{AtFlags, StatxFlags};
use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;

/// Mechanism that makes the write of a block atomic across a loss of power.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteAtomicity {
    /// The storage writes every block atomically.
    Storage,
    /// Each write of one block has to set `RWF_ATOMIC`.
    Requested,
    /// No known mechanism: after a loss of power, a block may contain old and new parts.
    Nothing,
}

/// Minimum physical block size of all devices, in bytes.
const SECTOR: u32 = 512;
/// `STATX_WRITE_ATOMIC` of Linux 6.11.
const WRITE_ATOMIC: StatxFlags = StatxFlags::from_bits_retain(0x0001_0000);

impl WriteAtomicity {
    /// Selects the mechanism for blocks of `block_size` bytes. `physical` is the physical block
    /// size in bytes, if it is known. `reported` contains the minimum and maximum size in bytes of
    /// a write with `RWF_ATOMIC`, if it is supported.
    fn of(block_size: u32, physical: Option<u32>, reported: Option<(u32, u32)>) -> Self {
        if block_size <= SECTOR || physical.is_some_and(|physical| physical >= block_size) {
            Self::Storage
        } else if reported.is_some_and(|(least, most)| (least..=most).contains(&block_size)) {
            Self::Requested
        } else {
            Self::Nothing
        }
    }

    /// Selects the mechanism for blocks of `block_size` bytes on an NVMe namespace.
    pub(super) fn of_namespace(facts: &NamespaceFacts, block_size: u32) -> Self {
        Self::of(block_size, u32::try_from(facts.atom).ok(), None)
    }

    /// Selects the mechanism for blocks of `block_size` bytes in a file. `direct` is true if the
    /// page cache is bypassed.
    pub(super) fn of_file(
        file: &File,
        metadata: &Metadata,
        is_block: bool,
        direct: bool,
        block_size: u32,
    ) -> Self {
        let device = if is_block { metadata.rdev() } else { metadata.dev() };
        // After a loss of power, the content of a tmpfs is gone, so it contains no torn blocks.
        let physical = if !is_block && is_tmpfs(file) { Some(u32::MAX) } else { physical(device) };
        // `RWF_ATOMIC` needs direct I/O: the page cache may write a block back in several parts.
        Self::of(block_size, physical, if direct { reported(file) } else { None })
    }
}

/// Physical block size of a block device in bytes. `None` if it is unknown, or if the start of the
/// device (a partition) is not aligned to physical blocks.
fn physical(device: u64) -> Option<u32> {
    // A partition does not have the attribute itself; the attribute of the whole disk is one
    // directory up.
    let size = ["queue", "../queue"]
        .iter()
        .find_map(|queue| attribute_of(device, &format!("{queue}/physical_block_size")))?;
    let is_aligned = attribute_of(device, "alignment_offset").is_none_or(|offset| offset == "0");
    size.parse().ok().filter(|_| is_aligned)
}

/// Sizes in bytes of the smallest and the largest write that can be atomic with `RWF_ATOMIC`.
fn reported(file: &File) -> Option<(u32, u32)> {
    let stat = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, WRITE_ATOMIC).ok()?;
    let is_reported =
        stat.stx_mask & WRITE_ATOMIC.bits() != 0 && stat.stx_atomic_write_unit_max != 0;
    is_reported.then_some((stat.stx_atomic_write_unit_min, stat.stx_atomic_write_unit_max))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_atomicity_follows_the_reported_block_and_atomic_sizes() {
        // Every device writes its sectors atomically.
        assert_eq!(WriteAtomicity::of(512, None, None), WriteAtomicity::Storage);
        for (physical, reported, expected) in [
            (None, None, WriteAtomicity::Nothing),
            (Some(512), None, WriteAtomicity::Nothing),
            (Some(4096), None, WriteAtomicity::Storage),
            (Some(16384), None, WriteAtomicity::Storage),
            (Some(512), Some((512, 2048)), WriteAtomicity::Nothing),
            (Some(512), Some((8192, 16384)), WriteAtomicity::Nothing),
            (Some(512), Some((512, 4096)), WriteAtomicity::Requested),
            (None, Some((4096, 65536)), WriteAtomicity::Requested),
            (Some(4096), Some((512, 4096)), WriteAtomicity::Storage),
        ] {
            assert_eq!(
                WriteAtomicity::of(4096, physical, reported),
                expected,
                "{physical:?} {reported:?}"
            );
        }
    }
}
