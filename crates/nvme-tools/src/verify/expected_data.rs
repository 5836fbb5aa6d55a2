//! Expected content of every block of a part of the namespace, and blocks with commands in flight.

use crate::block_pattern;
use crate::rng::Rng;
use shadowbell_driver::Buffer;

/// Largest number of bad blocks that are described; all are counted.
pub(super) const DESCRIBED: usize = 8;

/// Flag of an entry: a command on the block is in flight.
const BUSY: u32 = 1 << 31;
/// Entry of a block with unknown content: not written yet, or changed by a failed command.
const UNKNOWN: u32 = 0;
const ZEROES: u32 = 1;
/// Sequence number of the first write. The entry of a written block is the sequence number of its
/// last write.
const FIRST: u32 = 2;

/// Kind of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
    WriteZeroes,
    Deallocate,
    Compare,
    Flush,
}

impl Kind {
    pub(super) const ALL: [Self; 6] =
        [Self::Read, Self::Write, Self::WriteZeroes, Self::Deallocate, Self::Compare, Self::Flush];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::WriteZeroes => "write-zeroes",
            Self::Deallocate => "deallocate",
            Self::Compare => "compare",
            Self::Flush => "flush",
        }
    }

    fn changes(self) -> bool {
        matches!(self, Self::Write | Self::WriteZeroes | Self::Deallocate)
    }
}

/// Command on a job's part of the namespace; `first` counts blocks from the start of the part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Op {
    pub(super) kind: Kind,
    pub(super) first: u64,
    pub(super) blocks: u32,
    /// Sequence number of a write.
    sequence: u32,
}

/// Part of the namespace that a job verifies, and parameters of the commands.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    /// Byte offset of the part in the namespace.
    pub(super) start: u64,
    /// Blocks of the part.
    pub(super) blocks: u64,
    pub(super) block_size: u32,
    /// Blocks of the largest command.
    pub(super) max_blocks: u32,
    /// Percentage of reads and compares.
    pub(super) percent_read: u8,
    pub(super) write_zeroes: bool,
    pub(super) deallocate: bool,
    pub(super) compare: bool,
    pub(super) seed: u64,
}

/// Expected content of a part, with a generator of commands.
pub(super) struct ExpectedData {
    shape: Shape,
    entries: Box<[u32]>,
    sequence: u32,
    rng: Rng,
    /// Next block of the verification pass.
    back: u64,
    scratch: Box<[u8]>,
    /// Blocks whose content was known and compared.
    pub(super) checked: u64,
    /// Blocks with wrong content.
    pub(super) bad: u64,
    /// Descriptions of the first bad blocks.
    pub(super) described: Vec<String>,
}

impl ExpectedData {
    pub(super) fn new(shape: Shape) -> Self {
        Self {
            entries: vec![UNKNOWN; usize::try_from(shape.blocks).unwrap_or(0)].into(),
            sequence: FIRST,
            // The start of the part makes the sequences of the jobs different.
            rng: Rng::new(shape.seed ^ shape.start.rotate_left(20)),
            back: 0,
            scratch: vec![0; shape.block_size as usize].into(),
            checked: 0,
            bad: 0,
            described: Vec::new(),
            shape,
        }
    }

    fn range(&mut self, first: u64, blocks: u32) -> &mut [u32] {
        let first = usize::try_from(first).unwrap_or(usize::MAX);
        let end = first.saturating_add(blocks as usize);
        self.entries.get_mut(first..end).unwrap_or_default()
    }

    /// Draws a random command. `None` if it would overlap a command in flight.
    pub(super) fn draw(&mut self) -> Option<Op> {
        let sizes = u64::from(self.shape.max_blocks.ilog2()) + 1;
        let blocks = 1u32 << self.rng.below(sizes);
        let blocks = blocks.min(u32::try_from(self.shape.blocks).unwrap_or(u32::MAX));
        let first = self.rng.below(self.shape.blocks - u64::from(blocks) + 1);
        let kind = self.kind();
        if kind == Kind::Flush {
            return Some(Op { kind, first: 0, blocks: 0, sequence: 0 });
        }
        self.begin(kind, first, blocks)
    }

    fn kind(&mut self) -> Kind {
        let reads = self.rng.below(100) < self.shape.percent_read.into();
        match (reads, self.rng.below(100)) {
            (true, 0..8) if self.shape.compare => Kind::Compare,
            (true, _) => Kind::Read,
            (false, 0..6) if self.shape.write_zeroes => Kind::WriteZeroes,
            (false, 6..10) if self.shape.deallocate => Kind::Deallocate,
            (false, 10..20) => Kind::Flush,
            (false, _) => Kind::Write,
        }
    }

    /// Records the start of a command. `None` if it would overlap a command in flight.
    fn begin(&mut self, kind: Kind, first: u64, blocks: u32) -> Option<Op> {
        let sequence = self.sequence;
        let entries = self.range(first, blocks);
        if entries.iter().any(|entry| entry & BUSY != 0) {
            return None;
        }
        // A Compare of blocks with unknown content becomes a read.
        let unknown = entries.contains(&UNKNOWN);
        let kind = if kind == Kind::Compare && unknown { Kind::Read } else { kind };
        for entry in entries {
            *entry = BUSY
                | match kind {
                    Kind::Write => sequence,
                    Kind::WriteZeroes | Kind::Deallocate => ZEROES,
                    _ => *entry,
                };
        }
        if kind == Kind::Write {
            self.sequence = if sequence + 1 == BUSY { FIRST } else { sequence + 1 };
        }
        Some(Op { kind, first, blocks, sequence })
    }

    /// Next read of the verification pass. The pass reads all blocks with known content, in order.
    /// `None` after the last. No other command may be in flight.
    pub(super) fn read_back(&mut self) -> Option<Op> {
        let known = |entries: &[u32]| entries.iter().any(|entry| entry & !BUSY != UNKNOWN);
        while self.back < self.shape.blocks {
            let (first, left) = (self.back, self.shape.blocks - self.back);
            let blocks = u32::try_from(left).unwrap_or(u32::MAX).min(self.shape.max_blocks);
            self.back += u64::from(blocks);
            if known(self.range(first, blocks)) {
                return self.begin(Kind::Read, first, blocks);
            }
        }
        None
    }

    /// Entry of block `index` of a command, and the block's byte offset.
    fn expected(&mut self, op: Op, index: u32) -> (u32, u64) {
        let block = op.first + u64::from(index);
        let offset = self.shape.start + block * u64::from(self.shape.block_size);
        let entry = self.range(block, 1).first().copied().unwrap_or(UNKNOWN);
        (entry & !BUSY, offset)
    }

    /// Fills `buffer` with the data of a write or compare. False if the buffer is too short.
    pub(super) fn fill(&mut self, op: Op, buffer: &mut Buffer) -> bool {
        let size = self.shape.block_size as usize;
        let seed = self.shape.seed as u32;
        (0..op.blocks).all(|index| {
            let (entry, offset) = self.expected(op, index);
            if entry == ZEROES {
                self.scratch.fill(0);
            } else {
                block_pattern::fill(&mut self.scratch, offset, entry, seed);
            }
            buffer.copy_from(index as usize * size, &self.scratch)
        })
    }

    /// Handles the success of a command and checks the data of a read.
    pub(super) fn succeeded(&mut self, op: Op, buffer: Option<&Buffer>) {
        if op.kind == Kind::Compare {
            self.checked += u64::from(op.blocks);
        }
        if op.kind == Kind::Read {
            let size = self.shape.block_size as usize;
            for index in 0..op.blocks {
                let (entry, offset) = self.expected(op, index);
                if entry == UNKNOWN {
                    continue;
                }
                let there = buffer
                    .is_some_and(|from| from.copy_to(index as usize * size, &mut self.scratch));
                let wrong =
                    if there { self.wrong(entry, offset) } else { Some("was not read".into()) };
                self.checked += 1;
                if let Some(wrong) = wrong {
                    self.add_bad(wrong);
                }
            }
        }
        self.range(op.first, op.blocks).iter_mut().for_each(|entry| *entry &= !BUSY);
    }

    fn wrong(&self, entry: u32, offset: u64) -> Option<String> {
        let seed = self.shape.seed as u32;
        if entry != ZEROES {
            return block_pattern::check(&self.scratch, offset, Some(entry), seed)
                .err()
                .map(|bad| bad.to_string());
        }
        let at = self.scratch.iter().position(|byte| *byte != 0)?;
        let holds = match block_pattern::check(&self.scratch, offset, None, seed) {
            Ok(()) => "holds a write from before it was zeroed",
            Err(_) => "is not zero, and was zeroed",
        };
        Some(format!("byte {}: {holds}", offset + at as u64))
    }

    /// Handles a Compare that found other content.
    pub(super) fn compare_failed(&mut self, op: Op) {
        let (_, offset) = self.expected(op, 0);
        self.checked += u64::from(op.blocks);
        let blocks = op.blocks;
        self.add_bad(format!(
            "byte {offset}: Compare of {blocks} blocks found other content there"
        ));
        self.range(op.first, op.blocks).iter_mut().for_each(|entry| *entry &= !BUSY);
    }

    fn add_bad(&mut self, wrong: String) {
        self.bad += 1;
        if self.described.len() < DESCRIBED {
            self.described.push(wrong);
        }
    }

    /// Handles the final failure of a command. Blocks that it would have changed become unknown.
    pub(super) fn failed(&mut self, op: Op) {
        let changes = op.kind.changes();
        for entry in self.range(op.first, op.blocks) {
            *entry = if changes { UNKNOWN } else { *entry & !BUSY };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(max_blocks: u32) -> ExpectedData {
        ExpectedData::new(Shape {
            start: 1 << 20,
            blocks: 64,
            block_size: 512,
            max_blocks,
            percent_read: 50,
            write_zeroes: true,
            deallocate: true,
            compare: true,
            seed: 3,
        })
    }

    #[test]
    fn commands_in_flight_are_disjoint_and_inside_the_part() {
        let mut expected = data(16);
        let mut busy = [false; 64];
        let mut kinds = std::collections::HashSet::new();
        for round in 0..200 {
            let ops: Vec<Op> = (0..20).filter_map(|_| expected.draw()).collect();
            for op in &ops {
                kinds.insert(op.kind.name());
                for block in op.first..op.first + u64::from(op.blocks) {
                    assert!(!std::mem::replace(&mut busy[block as usize], true), "{round}");
                }
            }
            for op in ops {
                expected.failed(op);
            }
            busy.fill(false);
        }
        // All blocks are unknown, so no Compare is drawn.
        assert_eq!(kinds.len(), Kind::ALL.len() - 1);
        assert!(expected.entries.iter().all(|entry| *entry == UNKNOWN));
    }

    #[test]
    fn blocks_of_a_failed_write_are_not_read_back() {
        let mut expected = data(16);
        let write = expected.begin(Kind::Write, 20, 4).unwrap();
        assert_eq!(expected.begin(Kind::Read, 23, 1), None, "a write is in flight there");
        expected.succeeded(write, None);
        let failed = expected.begin(Kind::WriteZeroes, 40, 4).unwrap();
        expected.failed(failed);
        let back = expected.read_back().unwrap();
        assert_eq!((back.kind, back.first, back.blocks), (Kind::Read, 16, 16));
        assert_eq!(expected.read_back(), None);
        // The read returns no data, so its four blocks with known content count as bad.
        expected.succeeded(back, None);
        assert_eq!((expected.checked, expected.bad), (4, 4));
    }

    #[test]
    fn stale_and_nonzero_blocks_are_found() {
        let mut expected = data(16);
        let offset = 1 << 20;
        block_pattern::fill(&mut expected.scratch, offset, 7, 3);
        assert_eq!(expected.wrong(7, offset), None);
        let stale = expected.wrong(8, offset).unwrap();
        assert!(stale.contains("holds write 7, but the last completed write is 8"), "{stale}");
        let old = expected.wrong(ZEROES, offset).unwrap();
        assert!(old.contains("from before it was zeroed"), "{old}");
        expected.scratch.fill(0);
        assert_eq!(expected.wrong(ZEROES, offset), None);
        expected.scratch[100] = 1;
        let nonzero = expected.wrong(ZEROES, offset).unwrap();
        assert!(nonzero.contains(&format!("byte {}", offset + 100)), "{nonzero}");
    }
}
