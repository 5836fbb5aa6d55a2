//! Sector pattern of the writer in the guest: each sector identifies the write that it comes from,
//! and reveals damage.
//!
//! The guest's program and the host's check share this file.

/// Size of a sector in bytes. Every disk writes a sector atomically, so a sector never contains
/// parts of two writes.
pub const SECTOR: usize = 512;
/// Size of a slot in bytes: the unit of one write.
pub const SLOT: usize = 4096;
/// Number of sectors of a slot.
pub const PARTS: usize = SLOT / SECTOR;

const MAGIC: u64 = u64::from_le_bytes(*b"SBACKED1");

/// Identity of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Seed of a test run. It distinguishes runs on the same disk.
    pub seed: u64,
    /// Number of the slot, from the start of the disk.
    pub slot: u64,
    /// Number of this write among all writes to the slot: 1 for the first.
    pub generation: u64,
}

/// Fills `slot` with the pattern of the write `stamp`. An incomplete sector at the end of the
/// buffer is not changed.
pub fn fill(stamp: Stamp, slot: &mut [u8]) {
    for (part, sector) in slot.chunks_exact_mut(SECTOR).enumerate() {
        for (index, word) in sector.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&word_of(stamp, part as u64, index as u64).to_le_bytes());
        }
    }
}

/// Parses one sector. Returns its stamp, or the type of damage. `part` is the index of the sector
/// in the slot.
pub fn read(part: usize, sector: &[u8]) -> Result<Stamp, String> {
    let word = |index: usize| {
        let bytes = sector.get(8 * index..8 * index + 8).unwrap_or_default();
        bytes.try_into().map(u64::from_le_bytes).map_err(|_| "cut short".to_owned())
    };
    if word(0)? != MAGIC {
        return Err(if sector.iter().all(|&byte| byte == 0) { "empty" } else { "foreign" }.into());
    }
    let stamp = Stamp { seed: word(1)?, slot: word(2)?, generation: word(4)? };
    for index in 0..SECTOR / 8 {
        if word(index)? != word_of(stamp, part as u64, index as u64) {
            return Err(format!("{stamp:?}, but not from byte {} on", 8 * index));
        }
    }
    Ok(stamp)
}

fn word_of(stamp: Stamp, part: u64, index: u64) -> u64 {
    match index {
        0 => MAGIC,
        1 => stamp.seed,
        2 => stamp.slot,
        3 => part,
        4 => stamp.generation,
        _ => {
            // splitmix64 of the seed, slot, generation and word index.
            let mut x = stamp.seed ^ stamp.slot.rotate_left(40) ^ stamp.generation.rotate_left(20);
            x = x.wrapping_add((part << 8 | index).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            x ^ (x >> 31)
        }
    }
}
