//! Model of a disk whose server may be killed at any moment.
//!
//! A disk is divided into slots of some blocks. Each slot is written again and again, so that a
//! write that is executed too late would overwrite newer data. A slot has at most one write in
//! flight, and any number of reads. A read must return, for each block, the last write that was
//! acknowledged before the read was submitted, or a later one.

use std::ops::RangeInclusive;

use anyhow::{Result, bail};
use zerocopy::{FromBytes, IntoBytes};

use super::pattern::{BLOCK, pattern};
use shadowbell_hostile::random::Random;

/// Number of slots of a disk, and number of blocks of the largest slot.
const SLOTS: u64 = 256;
const SLOT_BLOCKS: u64 = 16;
/// Size of a disk with these slots, and of the largest slot, in bytes.
pub(crate) const DISK_BYTES: u64 = SLOTS * SLOT_BYTES as u64;
pub(crate) const SLOT_BYTES: usize = SLOT_BLOCKS as usize * BLOCK;

/// Type of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Flush,
}

/// Command on a slot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Op {
    pub(crate) kind: Kind,
    slot: u64,
    /// For a write: its own generation. For a read: the oldest allowed generation.
    generation: u64,
}

impl Op {
    /// First block.
    pub(crate) fn first(self) -> u64 {
        self.slot * SLOT_BLOCKS
    }

    /// Number of blocks.
    pub(crate) fn blocks(self) -> u64 {
        match self.kind {
            Kind::Flush => 0,
            Kind::Read | Kind::Write => blocks(self.slot),
        }
    }
}

/// Number of blocks of a slot.
fn blocks(slot: u64) -> u64 {
    1 + slot * 7 % SLOT_BLOCKS
}

/// Kind of disk: whether it stores data, and whether its reads are atomic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Persistence {
    /// Written data are discarded.
    Nothing,
    /// Data are stored. A read that runs at the same time as a write may return a block with old
    /// and new bytes, as from the page cache.
    Bytes,
    /// Data are stored, and reads return whole blocks.
    Blocks,
}

/// Write generations of a slot.
#[derive(Debug, Clone, Copy, Default)]
struct SlotState {
    /// Generation of the last acknowledged write, and of the last submitted one.
    acknowledged: u64,
    submitted: u64,
}

/// Model of the slots of a disk.
#[derive(Debug, Clone)]
pub(crate) struct SlotMap {
    disk: u64,
    persistence: Persistence,
    slots: Vec<SlotState>,
    random: Random,
    /// Ratio of all commands to flushes; 0 for no flushes.
    flush_every: u64,
    since_flush: u64,
}

impl SlotMap {
    /// Model of the disk with this number, before the first write.
    pub(crate) fn new(disk: u64, persistence: Persistence, seed: u64, flush_every: u64) -> Self {
        let random = Random::new(seed ^ disk << 32);
        let slots = vec![SlotState::default(); SLOTS as usize];
        Self { disk, persistence, slots, random, flush_every, since_flush: 0 }
    }

    /// A random command: as many reads as writes, and occasional flushes.
    pub(crate) fn draw(&mut self) -> Op {
        self.since_flush += 1;
        if self.since_flush == self.flush_every {
            self.since_flush = 0;
            return Op { kind: Kind::Flush, slot: 0, generation: 0 };
        }
        let slot = self.random.below(SLOTS);
        let is_write = self.random.below(2) == 0;
        let Some(about) = self.slots.get_mut(slot as usize) else {
            return Op { kind: Kind::Flush, slot: 0, generation: 0 };
        };
        if is_write && about.acknowledged == about.submitted {
            about.submitted += 1;
            return Op { kind: Kind::Write, slot, generation: about.submitted };
        }
        Op { kind: Kind::Read, slot, generation: about.acknowledged }
    }

    /// A read of the `nth` slot; `None` beyond the last slot.
    pub(crate) fn read(&self, nth: usize) -> Option<Op> {
        let about = self.slots.get(nth)?;
        Some(Op { kind: Kind::Read, slot: nth as u64, generation: about.acknowledged })
    }

    /// Data of a write.
    pub(crate) fn content(&self, op: Op, into: &mut Vec<u8>) {
        into.clear();
        for block in op.first()..op.first() + op.blocks() {
            into.extend_from_slice(pattern(self.disk, block, op.generation).as_bytes());
        }
    }

    /// Updates the model after a successful command. Returns the number of verified blocks.
    ///
    /// # Errors
    ///
    /// `found` has data that the model does not allow.
    pub(crate) fn completed(&mut self, op: Op, found: &[u8]) -> Result<u64> {
        let Some(slot) = self.slots.get_mut(op.slot as usize) else { return Ok(0) };
        match op.kind {
            Kind::Flush => Ok(0),
            Kind::Write => {
                slot.acknowledged = op.generation;
                Ok(0)
            }
            Kind::Read if self.persistence == Persistence::Nothing => Ok(0),
            Kind::Read => {
                let most = slot.submitted;
                for (block, found) in (op.first()..).zip(found.chunks(BLOCK)) {
                    let allowed = op.generation..=most;
                    if self.persistence == Persistence::Blocks
                        || !is_mixture(self.disk, block, found, allowed.clone())
                    {
                        check(self.disk, block, found, allowed)?;
                    }
                }
                Ok(op.blocks())
            }
        }
    }

    /// Verifies the whole disk, with no command in flight.
    ///
    /// # Errors
    ///
    /// A block has wrong data.
    pub(crate) fn compare(&mut self, disk: &[u8]) -> Result<u64> {
        let mut blocks = 0;
        for op in (0..).map_while(|nth| self.read(nth)).collect::<Vec<_>>() {
            let from = op.first() as usize * BLOCK;
            let found = disk.get(from..from + op.blocks() as usize * BLOCK);
            let Some(found) = found else { bail!("the disk is too short: {} bytes", disk.len()) };
            blocks += self.completed(op, found)?;
        }
        Ok(blocks)
    }
}

/// Checks that a block is from one of the allowed writes.
fn check(disk: u64, block: u64, found: &[u8], allowed: RangeInclusive<u64>) -> Result<()> {
    let word = |nth: usize| {
        let bytes = found.get(nth * 8..nth * 8 + 8).unwrap_or_default();
        u64::read_from_bytes(bytes).unwrap_or_default()
    };
    let (least, most, generation) = (*allowed.start(), *allowed.end(), word(2));
    let wanted = if least == most {
        format!("write {least}, which was acknowledged")
    } else {
        format!("write {least}, which was acknowledged, or one to {most}")
    };
    if found != pattern(disk, block, generation).as_bytes() {
        bail!(
            "block {block} does not hold {wanted}, but disk {}, block {}, write {}",
            word(0),
            word(1),
            word(2)
        );
    }
    if !allowed.contains(&generation) {
        bail!("block {block} holds write {generation}, and not {wanted}");
    }
    Ok(())
}

/// Checks a block that may be a mixture of several writes: each word must be from one of the
/// allowed writes.
fn is_mixture(disk: u64, block: u64, found: &[u8], allowed: RangeInclusive<u64>) -> bool {
    let (least, most) = (*allowed.start(), *allowed.end());
    // If only one write is allowed, there is no other write with which it could be mixed.
    if least == most {
        return false;
    }
    let writes: Vec<_> = allowed.map(|generation| pattern(disk, block, generation)).collect();
    let mut words = found.chunks_exact(8).enumerate();
    words.all(|(nth, found)| {
        writes.iter().any(|write| write.get(nth).is_some_and(|word| word.as_bytes() == found))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(slots: &mut SlotMap) -> Op {
        loop {
            let op = slots.draw();
            if op.kind == Kind::Write {
                return op;
            }
        }
    }

    /// A read must return an acknowledged write or a write in flight. An older write is an error.
    #[test]
    fn a_stale_block_is_detected() {
        let mut slots = SlotMap::new(3, Persistence::Blocks, 1, 500);
        let first = write(&mut slots);
        let (mut old, mut new) = (Vec::new(), Vec::new());
        slots.content(first, &mut old);
        let zero = vec![0; old.len()];
        let nth = first.slot as usize;
        let read = slots.read(nth).unwrap();
        assert!(slots.completed(read, &zero).is_ok() && slots.completed(read, &old).is_ok());
        slots.completed(first, &[]).unwrap();
        // The read was submitted before the acknowledgement of the write.
        slots.completed(read, &zero).unwrap();
        let read = slots.read(nth).unwrap();
        assert!(slots.completed(read, &zero).is_err());
        assert_eq!(slots.completed(read, &old).unwrap(), first.blocks());
        let second = loop {
            let op = write(&mut slots);
            if op.slot == first.slot {
                break op;
            }
            slots.completed(op, &[]).unwrap();
        };
        slots.content(second, &mut new);
        // While the second write is in flight, each block that is read may be old or new.
        let mut half = new.clone();
        half[..BLOCK].copy_from_slice(&old[..BLOCK]);
        for found in [&old, &new, &half] {
            slots.completed(read, found).unwrap();
        }
        slots.completed(second, &[]).unwrap();
        let read = slots.read(nth).unwrap();
        assert!(slots.completed(read, &new).is_ok());
        let error = slots.completed(read, &old).unwrap_err().to_string();
        assert!(
            error.contains("holds write 1, and not write 2, which was acknowledged"),
            "{error}"
        );
        new[17] ^= 1;
        assert!(slots.completed(read, &new).is_err());
    }

    /// A read from the page cache that runs at the same time as a write may return a mixture of old
    /// and new words.
    #[test]
    fn a_block_with_words_of_two_writes_is_a_mixture() {
        let block = |generation| pattern(3, 7, generation);
        let mut mixture = block(5);
        mixture[20..40].copy_from_slice(&block(6)[20..40]);
        let found = mixture.as_bytes();
        assert!(is_mixture(3, 7, found, 5..=6) && is_mixture(3, 7, found, 4..=8));
        assert!(!is_mixture(3, 7, found, 6..=7) && !is_mixture(3, 7, found, 5..=5));
        assert!(check(3, 7, found, 5..=6).is_err());
        mixture[30] ^= 1;
        assert!(!is_mixture(3, 7, mixture.as_bytes(), 5..=6));
    }

    #[test]
    fn a_place_has_at_most_one_write_in_flight() {
        let mut slots = SlotMap::new(0, Persistence::Blocks, 7, 500);
        let mut in_flight = std::collections::HashSet::new();
        let mut kinds = [0_u32; 3];
        for _ in 0..2000 {
            let op = slots.draw();
            kinds[op.kind as usize] += 1;
            if op.kind == Kind::Write {
                assert!(in_flight.insert(op.slot));
            }
            assert!((op.first() + op.blocks()) * BLOCK as u64 <= DISK_BYTES);
            assert!(op.blocks() as usize * BLOCK <= SLOT_BYTES);
        }
        assert!(kinds.iter().all(|count| *count > 0), "{kinds:?}");
        assert!(slots.compare(&[0; 512]).is_err());
        let mut fresh = SlotMap::new(0, Persistence::Blocks, 7, 500);
        assert!(fresh.compare(&vec![0; DISK_BYTES as usize]).unwrap() >= SLOTS);
    }
}
