//! Sources of a job's I/Os, without or with verification of the content.

use super::pattern::{Io, Pattern};
use crate::block_pattern::{self, BadBlock};
use shadowbell_driver::{Buffer, Command, QueuePair, Refused, Token};

/// Largest number of bad blocks that are described; all are counted.
const DESCRIBED: usize = 8;

/// Source of a job's I/Os. Monomorphized into the job's loop, so that a source without
/// verification costs nothing.
pub(super) trait IoSource: Send {
    /// Returns the next I/O. Returns `None` if all I/Os were returned, or if the next one has to
    /// wait until an I/O in flight completes.
    fn next(&mut self) -> Option<Io>;

    /// Fills the buffer of a write.
    fn fill(&mut self, io: Io, buffer: &mut Buffer);

    /// Submits an I/O. The tuple has its command (without metadata), its position, and its first
    /// block.
    #[inline(always)]
    fn submit(
        &mut self,
        queue: &mut QueuePair,
        (command, _, _): (Command, Io, u64),
        buffer: Buffer,
    ) -> Result<Token, Refused> {
        queue.submit(command, Some(buffer))
    }

    /// Called after the I/O was submitted in slot `slot` of its queue.
    fn submitted(&mut self, slot: usize, io: Io);

    /// Called after the command in slot `slot` completed successfully.
    fn completed(&mut self, slot: usize, buffer: Option<&Buffer>);

    /// Switches to the verification pass. In this pass, [`next`](Self::next) returns one read for
    /// each block that has to be verified. Called after the run, with no I/O in flight. Returns
    /// false if no block has to be verified.
    fn read_back(&mut self) -> bool;

    /// Result of the verification; `None` without verification.
    fn checks(&self) -> Option<CheckSummary>;
}

/// Result of a verification.
#[derive(Clone, Debug, Default)]
pub(super) struct CheckSummary {
    /// Blocks whose content was checked.
    pub(super) checked: u64,
    /// Blocks with wrong content.
    pub(super) bad: u64,
    /// Descriptions of the first bad blocks.
    pub(super) described: Vec<BadBlock>,
}

impl CheckSummary {
    pub(super) fn add(&mut self, other: Self) {
        self.checked += other.checked;
        self.bad += other.bad;
        self.described.extend(other.described);
        self.described.truncate(DESCRIBED);
    }
}

/// Source without verification.
pub(super) struct Unchecked {
    pattern: Pattern,
}

impl Unchecked {
    pub(super) fn new(pattern: Pattern) -> Self {
        Self { pattern }
    }
}

impl IoSource for Unchecked {
    #[inline]
    fn next(&mut self) -> Option<Io> {
        Some(self.pattern.next())
    }

    #[inline]
    fn fill(&mut self, _: Io, _: &mut Buffer) {}

    #[inline]
    fn submitted(&mut self, _: usize, _: Io) {}

    #[inline]
    fn completed(&mut self, _: usize, _: Option<&Buffer>) {}

    fn read_back(&mut self) -> bool {
        false
    }

    fn checks(&self) -> Option<CheckSummary> {
        None
    }
}

/// Source that writes verifiable content and verifies what it reads.
pub(super) struct Checked {
    pattern: Pattern,
    last_writes: LastWrites,
    /// I/Os in flight, by slot of the queue.
    in_flight: Box<[Io]>,
    /// Content of one I/O.
    scratch: Box<[u8]>,
    /// Byte offset of the job's share in the namespace.
    start: u64,
    seed: u32,
    /// True if the run only reads, and verifies content of an earlier run. A run with writes
    /// verifies only the blocks that it has written itself.
    only_reads: bool,
    /// Next block of the verification pass.
    back: Option<usize>,
    checks: CheckSummary,
}

/// Element per block: sequence number of the last write (0: none), and the flag [`BUSY`].
struct LastWrites(Box<[u32]>);

/// Flag in an element of [`LastWrites`]: an I/O of the block is in flight.
const BUSY: u32 = 1 << 31;

impl LastWrites {
    fn sequence(&self, index: u64) -> u32 {
        usize::try_from(index).ok().and_then(|i| self.0.get(i)).map_or(0, |e| e & !BUSY)
    }

    fn is_busy(&self, index: u64) -> bool {
        usize::try_from(index).ok().and_then(|i| self.0.get(i)).is_some_and(|e| e & BUSY != 0)
    }

    fn set(&mut self, index: u64, entry: u32) {
        if let Some(slot) = usize::try_from(index).ok().and_then(|i| self.0.get_mut(i)) {
            *slot = entry;
        }
    }

    /// Sequence number of a block's next write: never 0, which means "not written".
    fn following(&self, index: u64) -> u32 {
        match self.sequence(index) + 1 {
            BUSY => 1,
            next => next,
        }
    }
}

impl Checked {
    /// Source for `ios` blocks of `bs` bytes, from byte `start` of the namespace on.
    pub(super) fn new(
        pattern: Pattern,
        ios: u64,
        bs: u32,
        start: u64,
        only_reads: bool,
        seed: u64,
    ) -> Self {
        Self {
            pattern,
            last_writes: LastWrites(vec![0; usize::try_from(ios).unwrap_or(0)].into_boxed_slice()),
            in_flight: Box::default(),
            scratch: vec![0; bs as usize].into_boxed_slice(),
            start,
            seed: seed as u32 ^ (seed >> 32) as u32,
            only_reads,
            back: None,
            checks: CheckSummary::default(),
        }
    }

    fn offset(&self, index: u64) -> u64 {
        self.start + index * self.scratch.len() as u64
    }

    fn check(&mut self, index: u64, buffer: &Buffer) {
        let expected = match self.last_writes.sequence(index) {
            // The content of a block that this run has not written is unknown.
            0 if !self.only_reads => return,
            0 => None,
            sequence => Some(sequence),
        };
        let offset = self.offset(index);
        self.checks.checked += 1;
        let bad = if buffer.copy_to(0, &mut self.scratch) {
            block_pattern::check(&self.scratch, offset, expected, self.seed)
        } else {
            Err(BadBlock { offset, fault: block_pattern::Fault::Foreign })
        };
        if let Err(bad) = bad {
            self.checks.bad += 1;
            if self.checks.described.len() < DESCRIBED {
                self.checks.described.push(bad);
            }
        }
    }
}

impl IoSource for Checked {
    fn next(&mut self) -> Option<Io> {
        if let Some(from) = self.back {
            let rest = self.last_writes.0.get(from..).unwrap_or_default();
            let found = rest.iter().position(|entry| *entry != 0).map(|n| from + n);
            self.back = Some(found.map_or(self.last_writes.0.len(), |index| index + 1));
            return found.map(|index| Io { index: index as u64, write: false });
        }
        let mut io = self.pattern.next();
        let ios = self.last_writes.0.len() as u64;
        // A block has at most one I/O in flight, otherwise its content would be unpredictable.
        // There are at least as many blocks as I/Os in flight, so a free one is found.
        for _ in 0..=self.in_flight.len() {
            if !self.last_writes.is_busy(io.index) {
                return Some(io);
            }
            io.index = if io.index + 1 < ios { io.index + 1 } else { 0 };
        }
        None
    }

    fn fill(&mut self, io: Io, buffer: &mut Buffer) {
        let sequence = self.last_writes.following(io.index);
        let offset = self.offset(io.index);
        block_pattern::fill(&mut self.scratch, offset, sequence, self.seed);
        // Cannot fail: the buffer has room for a block.
        let _ = buffer.copy_from(0, &self.scratch);
    }

    fn submitted(&mut self, slot: usize, io: Io) {
        if slot >= self.in_flight.len() {
            let mut grown = std::mem::take(&mut self.in_flight).into_vec();
            grown.resize(slot + 1, Io::default());
            self.in_flight = grown.into_boxed_slice();
        }
        if let Some(entry) = self.in_flight.get_mut(slot) {
            *entry = io;
        }
        let sequence = self.last_writes.sequence(io.index);
        self.last_writes.set(io.index, sequence | BUSY);
    }

    fn completed(&mut self, slot: usize, buffer: Option<&Buffer>) {
        let Some(&io) = self.in_flight.get(slot) else { return };
        let sequence = if io.write {
            self.last_writes.following(io.index)
        } else {
            self.last_writes.sequence(io.index)
        };
        self.last_writes.set(io.index, sequence);
        if !io.write
            && let Some(buffer) = buffer
        {
            self.check(io.index, buffer);
        }
    }

    fn read_back(&mut self) -> bool {
        self.back = Some(0);
        !self.only_reads
    }

    fn checks(&self) -> Option<CheckSummary> {
        Some(self.checks.clone())
    }
}
