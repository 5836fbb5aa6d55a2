//! Acknowledged writes of a guest, and the check that the disk contains them.
//!
//! A program in the guest repeatedly overwrites a few thousand slots of the disk, of 4 KiB each.
//! It reports each write on a separate serial port *after* the write has returned. QEMU copies the
//! port to a file, so the list survives a crash of the guest. Afterwards each sector of an
//! acknowledged slot must be complete, and must come from the acknowledged write of this slot or
//! from a later one. An older sector means a lost write, or a stale write that was executed late.

pub mod sector;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};

use sector::{PARTS, SECTOR, SLOT};

/// Acknowledged writes of one or more sessions of the writer.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Acknowledged {
    /// Last acknowledged generation of each slot.
    pub slots: BTreeMap<u64, u64>,
    /// Number of acknowledged writes.
    pub writes: u64,
    /// Errors in the guest: failed writes, and reads of wrong data.
    pub failures: Vec<String>,
}

impl Acknowledged {
    /// Parses the log of acknowledgements: `A <slot> <generation>` for a write that returned, `E
    /// <words>` for a failure. If the guest was killed while it wrote a line, the truncated line
    /// counts as no acknowledgement, also if the next session has appended to it.
    pub fn parse(log: &str) -> Self {
        let mut acknowledged = Self::default();
        // The text after the last line feed is an incomplete line.
        let whole = log.rsplit_once('\n').map_or("", |(whole, _)| whole);
        for line in whole.lines() {
            let mut words = line.split(' ');
            match (words.next(), words.next(), words.next(), words.next()) {
                (Some("A"), Some(slot), Some(generation), None) => {
                    if let (Ok(slot), Ok(generation)) = (slot.parse(), generation.parse::<u64>()) {
                        let last = acknowledged.slots.entry(slot).or_default();
                        *last = generation.max(*last);
                        acknowledged.writes += 1;
                    }
                }
                (Some("E"), ..) => acknowledged.failures.push(line.to_owned()),
                _ => {}
            }
        }
        acknowledged
    }

    /// Compares the image with the acknowledged writes. Returns one sentence for each slot with
    /// wrong data.
    pub fn broken(&self, image: &Path, seed: u64) -> Result<Vec<String>> {
        let mut file = File::open(image).with_context(|| image.display().to_string())?;
        let size = file.seek(SeekFrom::End(0))?;
        let mut broken = Vec::new();
        let mut slot_bytes = vec![0; SLOT];
        for (&slot, &generation) in &self.slots {
            let at = slot.saturating_mul(SLOT as u64);
            if at.saturating_add(SLOT as u64) > size {
                broken.push(format!("slot {slot}: beyond the end of the disk"));
                continue;
            }
            file.read_exact_at(&mut slot_bytes, at).with_context(|| format!("slot {slot}"))?;
            if let Err(why) = check_sector(&slot_bytes, seed, slot, generation) {
                broken.push(format!("slot {slot}, promised generation {generation}: {why}"));
            }
        }
        Ok(broken)
    }
}

fn check_sector(bytes: &[u8], seed: u64, slot: u64, generation: u64) -> Result<(), String> {
    for part in 0..PARTS {
        let bytes = bytes.get(part * SECTOR..(part + 1) * SECTOR).unwrap_or_default();
        let stamp = sector::read(part, bytes).map_err(|why| format!("sector {part}: {why}"))?;
        if stamp.seed != seed || stamp.slot != slot || stamp.generation < generation {
            return Err(format!("sector {part}: {stamp:?}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::sector::{Stamp, fill};
    use super::*;

    fn slot(seed: u64, slot: u64, generation: u64) -> Vec<u8> {
        let mut bytes = vec![0; SLOT];
        fill(Stamp { seed, slot, generation }, &mut bytes);
        bytes
    }

    #[test]
    fn a_sector_identifies_its_slot_and_generation() {
        let bytes = slot(9, 3, 7);
        for part in 0..PARTS {
            let sector = &bytes[part * SECTOR..(part + 1) * SECTOR];
            let want = Stamp { seed: 9, slot: 3, generation: 7 };
            assert_eq!(sector::read(part, sector), Ok(want));
            assert!(sector::read(part ^ 1, sector).is_err(), "a sector of another place");
        }
        assert_eq!(sector::read(0, &[0; SECTOR]), Err("empty".into()));
        assert_eq!(sector::read(0, &[1; SECTOR]), Err("foreign".into()));
        assert!(sector::read(0, &bytes[..100]).is_err());
    }

    #[test]
    fn every_flipped_byte_is_noticed() {
        let good = slot(1, 2, 3);
        for at in 0..SECTOR {
            let mut bad = good[..SECTOR].to_vec();
            bad[at] ^= 0x10;
            let read = sector::read(0, &bad);
            // The damaged byte may be in the stamp as well. Then the stamp does not match the data.
            assert!(read.is_err(), "byte {at}: {read:?}");
        }
    }

    #[test]
    fn incomplete_lines_are_ignored() {
        let acknowledged =
            Acknowledged::parse("\nA 1 2\nA 1 3\nA 12 3\nA 7 \nA 12 3A 12 9\nE write\nA 5 66");
        assert_eq!(acknowledged.slots, BTreeMap::from([(1, 3), (12, 3)]));
        assert_eq!(acknowledged.writes, 3);
        assert_eq!(acknowledged.failures, ["E write"]);
        assert_eq!(Acknowledged::parse("A 1 2"), Acknowledged::default());
    }

    #[test]
    fn lost_stale_torn_and_misplaced_writes_are_found() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let put = |at: u64, bytes: &[u8]| {
            image.as_file().write_all_at(bytes, at * SLOT as u64).unwrap();
        };
        for at in 0..6 {
            put(at, &slot(1, at, 5));
        }
        let log: String = (0..6).map(|at| format!("A {at} 5\n")).collect();
        let acknowledged = Acknowledged::parse(&log);
        let broken = || acknowledged.broken(image.path(), 1).unwrap();
        assert!(broken().is_empty());
        put(0, &slot(1, 0, 6)); // a later write that was not acknowledged is allowed
        put(1, &slot(1, 1, 6)[..SECTOR]); // a part of such a write is allowed too
        assert!(broken().is_empty());
        put(1, &[0; SECTOR]); // a lost write
        put(2, &slot(1, 2, 4)); // a stale write
        put(3, &slot(1, 4, 5)); // a write at a wrong place
        put(4, &slot(1, 4, 6)[..100]); // a write that is torn inside a sector
        put(5, &slot(2, 5, 5)); // a write of another run
        let found = broken();
        assert_eq!(found.len(), 5, "{found:#?}");
        let beyond = Acknowledged::parse("A 600 1\n");
        assert_eq!(beyond.broken(image.path(), 1).unwrap().len(), 1);
    }
}
