//! What the writer in the guest puts on the disk, sector by sector: any sector says by itself which
//! write it comes from, and whether all of it does.
//!
//! The guest's program and the host's check share this file.

/// Bytes of a sector: no disk writes less at once, so one is never half old and half new.
pub const SECTOR: usize = 512;
/// Bytes of a slot, the unit of one write.
pub const SLOT: usize = 4096;
/// Sectors of a slot.
pub const PARTS: usize = SLOT / SECTOR;

const MAGIC: u64 = u64::from_le_bytes(*b"SBACKED1");

/// Which write a sector comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Tells one test run from another on the same disk.
    pub seed: u64,
    /// The slot, counted from the start of the disk.
    pub slot: u64,
    /// The how-manieth write of this slot; from 1, and never back.
    pub generation: u64,
}

/// Fills a slot. A buffer of another length keeps what does not fit.
pub fn fill(stamp: Stamp, slot: &mut [u8]) {
    for (part, sector) in slot.chunks_exact_mut(SECTOR).enumerate() {
        for (index, word) in sector.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&word_of(stamp, part as u64, index as u64).to_le_bytes());
        }
    }
}

/// Reads one sector: its stamp, or how it is damaged. `part` is its place in the slot.
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
            // splitmix64 over everything that identifies the word
            let mut x = stamp.seed ^ stamp.slot.rotate_left(40) ^ stamp.generation.rotate_left(20);
            x = x.wrapping_add((part << 8 | index).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            x ^ (x >> 31)
        }
    }
}
