//! Verifiable block content: detects corrupt, misplaced, torn and stale blocks.
//!
//! A block consists of cells of 512 bytes, the smallest unit that a disk writes atomically. A cell
//! contains a magic number, a CRC-32C of all following fields, the cell's byte offset in the
//! namespace, the sequence number of the write, the seed of the run, and pseudo-random bytes that
//! are generated from offset, sequence number and seed.

use crate::rng::Rng;
use shadowbell_spec::Status;
use std::fmt;

/// Bytes of a cell: the smallest logical block.
pub(super) const CELL: usize = 512;
/// First field of each cell: the characters `SBVF`.
const MAGIC: u32 = u32::from_le_bytes(*b"SBVF");
const MAGIC_AT: usize = 0;
const CRC_AT: usize = 4;
const OFFSET_AT: usize = 8;
const SEQUENCE_AT: usize = 16;
const SEED_AT: usize = 20;
const RANDOM_AT: usize = 24;

/// Fault of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Content that no verifying run has written.
    Foreign,
    /// Content that a run with another seed has written.
    OtherRun,
    /// Checksum mismatch.
    Corrupt,
    /// Content that was written for another byte offset of the namespace. The value is that offset.
    Misplaced(u64),
    /// Cells of different writes in one block: sequence numbers of the first cell, and of the first
    /// cell that differs from it.
    Torn { beginning: u32, here: u32 },
    /// Content of an older write: not of the last completed write of the block.
    Stale { expected: u32, found: u32 },
    /// Protection information check failed.
    Protection(Status),
}

/// Block with wrong content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadBlock {
    /// Offset of the first bad cell of the block, in bytes from the start of the namespace.
    pub(crate) offset: u64,
    pub(crate) fault: Fault,
}

impl fmt::Display for BadBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {}: ", self.offset)?;
        match self.fault {
            Fault::Foreign => f.write_str("not written with --verify"),
            Fault::OtherRun => f.write_str("written with another --seed"),
            Fault::Corrupt => f.write_str("the checksum does not match the content"),
            Fault::Misplaced(written) => {
                write!(f, "misplaced: holds the data of byte {written}")
            }
            Fault::Torn { beginning, here } => {
                write!(f, "torn: holds write {here}, but the block begins with write {beginning}")
            }
            Fault::Protection(status) => {
                write!(f, "protection information: {status}")
            }
            Fault::Stale { expected, found } => {
                write!(f, "stale: holds write {found}, but the last completed write is {expected}")
            }
        }
    }
}

fn read_u32(cell: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*cell.get(at..)?.first_chunk()?))
}

fn store<const N: usize>(cell: &mut [u8], at: usize, bytes: [u8; N]) {
    if let Some(field) = cell.get_mut(at..).and_then(|rest| rest.first_chunk_mut()) {
        *field = bytes;
    }
}

/// Fills `block`, which begins at byte `offset`, with the content of its write number `sequence`.
pub(crate) fn fill(block: &mut [u8], offset: u64, sequence: u32, seed: u32) {
    for (n, cell) in block.chunks_exact_mut(CELL).enumerate() {
        let offset = offset + (n * CELL) as u64;
        store(cell, MAGIC_AT, MAGIC.to_le_bytes());
        store(cell, OFFSET_AT, offset.to_le_bytes());
        store(cell, SEQUENCE_AT, sequence.to_le_bytes());
        store(cell, SEED_AT, seed.to_le_bytes());
        let mut rng = Rng::new(offset ^ u64::from(sequence) << 32 ^ u64::from(seed));
        let (words, _) = cell.get_mut(RANDOM_AT..).unwrap_or_default().as_chunks_mut();
        for word in words {
            *word = rng.next().to_le_bytes();
        }
        let crc = crc32c::crc32c(cell.get(OFFSET_AT..).unwrap_or_default());
        store(cell, CRC_AT, crc.to_le_bytes());
    }
}

/// Checks `block`, which was read from byte `offset`. `expected` is the sequence number of the
/// block's last write, if known.
pub(crate) fn check(
    block: &[u8],
    offset: u64,
    expected: Option<u32>,
    seed: u32,
) -> Result<(), BadBlock> {
    let mut beginning = None;
    for (n, cell) in block.chunks_exact(CELL).enumerate() {
        let offset = offset + (n * CELL) as u64;
        let bad = |fault| Err(BadBlock { offset, fault });
        let crc = crc32c::crc32c(cell.get(OFFSET_AT..).unwrap_or_default());
        if read_u32(cell, MAGIC_AT) != Some(MAGIC) {
            return bad(Fault::Foreign);
        }
        if read_u32(cell, CRC_AT) != Some(crc) {
            return bad(Fault::Corrupt);
        }
        // The checksum matches, so the other fields are those that `fill` has written.
        let low = read_u32(cell, OFFSET_AT).unwrap_or_default();
        let high = read_u32(cell, OFFSET_AT + 4).unwrap_or_default();
        let written = u64::from(low) | u64::from(high) << 32;
        if read_u32(cell, SEED_AT) != Some(seed) {
            return bad(Fault::OtherRun);
        }
        if written != offset {
            return bad(Fault::Misplaced(written));
        }
        let here = read_u32(cell, SEQUENCE_AT).unwrap_or_default();
        let beginning = *beginning.get_or_insert(here);
        if here != beginning {
            return bad(Fault::Torn { beginning, here });
        }
        if let Some(expected) = expected
            && here != expected
        {
            return bad(Fault::Stale { expected, found: here });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFFSET: u64 = 7 << 33;

    fn block(offset: u64, sequence: u32) -> Vec<u8> {
        let mut block = vec![0; 4096];
        fill(&mut block, offset, sequence, 9);
        block
    }

    fn fault(block: &[u8]) -> BadBlock {
        check(block, OFFSET, Some(5), 9).unwrap_err()
    }

    #[test]
    fn a_filled_block_passes_the_check() {
        assert_eq!(check(&block(OFFSET, 5), OFFSET, Some(5), 9), Ok(()));
        assert_eq!(check(&block(OFFSET, 5), OFFSET, None, 9), Ok(()));
    }

    #[test]
    fn any_flipped_bit_is_found() {
        for at in 0..4096 {
            let mut block = block(OFFSET, 5);
            block[at] ^= 1 << (at % 8);
            let bad = fault(&block);
            assert_eq!(bad.offset, OFFSET + (at as u64 & !511), "byte {at}");
            let expected = if at % CELL < CRC_AT { Fault::Foreign } else { Fault::Corrupt };
            assert_eq!(bad.fault, expected, "byte {at}");
        }
    }

    #[test]
    fn a_block_of_another_offset_is_misplaced() {
        let bad = fault(&block(4096, 5));
        assert_eq!(bad, BadBlock { offset: OFFSET, fault: Fault::Misplaced(4096) });
        assert!(bad.to_string().contains("the data of byte 4096"), "{bad}");
        // A single misplaced cell is detected as well.
        let mut mixed = block(OFFSET, 5);
        mixed[1024..1536].copy_from_slice(&block(OFFSET, 5)[512..1024]);
        let bad = fault(&mixed);
        assert_eq!(bad, BadBlock { offset: OFFSET + 1024, fault: Fault::Misplaced(OFFSET + 512) });
    }

    #[test]
    fn a_block_of_two_writes_is_torn() {
        let mut torn = block(OFFSET, 5);
        torn[2048..].copy_from_slice(&block(OFFSET, 4)[2048..]);
        let torn_fault = Fault::Torn { beginning: 5, here: 4 };
        assert_eq!(fault(&torn), BadBlock { offset: OFFSET + 2048, fault: torn_fault });
        // If the first cells are stale and the last cells are current, the block is reported as
        // stale.
        let mut torn = block(OFFSET, 4);
        torn[2048..].copy_from_slice(&block(OFFSET, 5)[2048..]);
        assert_eq!(fault(&torn).fault, Fault::Stale { expected: 5, found: 4 });
        assert!(check(&torn, OFFSET, None, 9).is_err());
    }

    #[test]
    fn a_lost_write_is_found() {
        assert_eq!(fault(&block(OFFSET, 4)).fault, Fault::Stale { expected: 5, found: 4 });
        assert_eq!(fault(&[0; 4096]).fault, Fault::Foreign);
        let mut other = block(OFFSET, 5);
        fill(&mut other, OFFSET, 5, 10);
        assert_eq!(fault(&other).fault, Fault::OtherRun);
    }
}
