//! What a loss of power leaves of a block that is being written.
//!
//! A controller can not say less than that it is one or the other (AWUPF and NAWUPF count from one
//! block on). A device writes its physical blocks as a whole, so a block that is no longer than
//! one, and aligned as they are, is safe. A longer one is if the write asks for it (`RWF_ATOMIC`),
//! where the file system and the device have that. Of several blocks nothing is promised.

use super::device::{attribute_of, is_tmpfs};
use super::namespace::NamespaceFacts;
use rustix::fs::{AtFlags, StatxFlags};
use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;

/// What keeps a block whole when the power goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Atom {
    /// The storage, whatever is written.
    Storage,
    /// Each write of one block has to ask for it.
    Asked,
    /// Nothing, for all that is known.
    Nothing,
}

/// The shortest block that a device can have.
const SECTOR: u32 = 512;
/// `STATX_WRITE_ATOMIC` of Linux 6.11.
const WRITE_ATOMIC: StatxFlags = StatxFlags::from_bits_retain(0x0001_0000);

impl Atom {
    /// For blocks of so many bytes, on storage with physical blocks of so many, if that is known,
    /// and on which a write of so many at least and at most can ask for it.
    fn of(block_size: u32, physical: Option<u32>, asked: Option<(u32, u32)>) -> Self {
        if block_size <= SECTOR || physical.is_some_and(|physical| physical >= block_size) {
            Self::Storage
        } else if asked.is_some_and(|(least, most)| (least..=most).contains(&block_size)) {
            Self::Asked
        } else {
            Self::Nothing
        }
    }

    /// For blocks of so many bytes of this namespace.
    pub(super) fn of_namespace(facts: &NamespaceFacts, block_size: u32) -> Self {
        Self::of(block_size, u32::try_from(facts.atom).ok(), None)
    }

    /// For blocks of so many bytes of this file; `direct` if its page cache is bypassed.
    pub(super) fn of_file(
        file: &File,
        metadata: &Metadata,
        is_block: bool,
        direct: bool,
        block_size: u32,
    ) -> Self {
        let device = if is_block { metadata.rdev() } else { metadata.dev() };
        // Nothing of it is left when the power goes.
        let physical = if !is_block && is_tmpfs(file) { Some(u32::MAX) } else { physical(device) };
        // Of what goes through the page cache nobody knows when, and in what pieces.
        Self::of(block_size, physical, if direct { asked(file) } else { None })
    }
}

/// The physical blocks of a block device, in bytes, if it begins where one does.
fn physical(device: u64) -> Option<u32> {
    // A partition has its queue's limits one directory up.
    let size = ["queue", "../queue"]
        .iter()
        .find_map(|queue| attribute_of(device, &format!("{queue}/physical_block_size")))?;
    let is_aligned = attribute_of(device, "alignment_offset").is_none_or(|offset| offset == "0");
    size.parse().ok().filter(|_| is_aligned)
}

/// How long a write may be, at least and at most, that asks for being there as a whole or not at
/// all.
fn asked(file: &File) -> Option<(u32, u32)> {
    let stat = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, WRITE_ATOMIC).ok()?;
    let is_said = stat.stx_mask & WRITE_ATOMIC.bits() != 0 && stat.stx_atomic_write_unit_max != 0;
    is_said.then_some((stat.stx_atomic_write_unit_min, stat.stx_atomic_write_unit_max))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_whole_where_somebody_says_so() {
        // Every device writes its sectors as a whole.
        assert_eq!(Atom::of(512, None, None), Atom::Storage);
        for (physical, asked, expected) in [
            (None, None, Atom::Nothing),
            (Some(512), None, Atom::Nothing),
            (Some(4096), None, Atom::Storage),
            (Some(16384), None, Atom::Storage),
            (Some(512), Some((512, 2048)), Atom::Nothing),
            (Some(512), Some((8192, 16384)), Atom::Nothing),
            (Some(512), Some((512, 4096)), Atom::Asked),
            (None, Some((4096, 65536)), Atom::Asked),
            (Some(4096), Some((512, 4096)), Atom::Storage),
        ] {
            assert_eq!(Atom::of(4096, physical, asked), expected, "{physical:?} {asked:?}");
        }
    }
}
