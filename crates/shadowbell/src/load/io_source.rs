//! Where a job's I/Os come from, and what it does to the content of their blocks: nothing, or
//! checks on it.

use super::pattern::{Io, Pattern};
use crate::content::{self, BadBlock};
use shadowbell_driver::{Buffer, Command, QueuePair, Refused, Token};

/// The most bad blocks that are described; all are counted.
const DESCRIBED: usize = 8;

/// A job's source of I/Os. What it does on the way is compiled into the job's loop: a source
/// that does not look at the content costs nothing there.
pub(super) trait IoSource: Send {
    /// The next I/O; nothing if there will be none until others have completed, or at all.
    fn next(&mut self) -> Option<Io>;

    /// Fills the buffer of a write.
    fn fill(&mut self, io: Io, buffer: &mut Buffer);

    /// Submits the I/O, of which this is the plain command and the first block.
    #[inline(always)]
    fn submit(
        &mut self,
        queue: &mut QueuePair,
        (command, _, _): (Command, Io, u64),
        buffer: Buffer,
    ) -> Result<Token, Refused> {
        queue.submit(command, Some(buffer))
    }

    /// The I/O was submitted as command `slot` of its queue.
    fn submitted(&mut self, slot: usize, io: Io);

    /// Command `slot` has completed with success.
    fn completed(&mut self, slot: usize, buffer: Option<&Buffer>);

    /// The run is over, and nothing is in flight: from now on, [`next`](Self::next) reads back
    /// what is to be checked, once. False if nothing is.
    fn read_back(&mut self) -> bool;

    /// What the checks came to, if there were any.
    fn checks(&self) -> Option<CheckSummary>;
}

/// What checking came to.
#[derive(Clone, Debug, Default)]
pub(super) struct CheckSummary {
    /// Blocks whose content was checked.
    pub(super) checked: u64,
    /// How many of them were not as they had to be.
    pub(super) bad: u64,
    /// Some of those.
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

/// Does not look at the content.
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

/// Writes content that can be checked, and checks what it reads.
pub(super) struct Checked {
    pattern: Pattern,
    last_writes: LastWrites,
    /// By slot of the queue.
    in_flight: Box<[Io]>,
    /// A block's content.
    scratch: Box<[u8]>,
    /// Byte of the namespace at which the job's part begins.
    start: u64,
    seed: u32,
    /// What a block has to hold is known only where this run wrote it, and a run that writes
    /// nothing checks what an earlier one wrote.
    only_reads: bool,
    /// The next block to read back.
    back: Option<usize>,
    checks: CheckSummary,
}

/// What was last written to each block, and whether somebody is at it.
struct LastWrites(Box<[u32]>);

/// An I/O on the block is in flight.
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

    /// The number of a block's next write: never 0, which stands for none.
    fn following(&self, index: u64) -> u32 {
        match self.sequence(index) + 1 {
            BUSY => 1,
            next => next,
        }
    }
}

impl Checked {
    /// For a part of `ios` blocks of `bs` bytes, from byte `start` of the namespace on.
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
            // Nobody knows what is there.
            0 if !self.only_reads => return,
            0 => None,
            sequence => Some(sequence),
        };
        let offset = self.offset(index);
        self.checks.checked += 1;
        let bad = if buffer.copy_to(0, &mut self.scratch) {
            content::check(&self.scratch, offset, expected, self.seed)
        } else {
            Err(BadBlock { offset, fault: content::Fault::Foreign })
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
        // Two I/Os on a block at once would leave it, or find it, in a state that nobody knows.
        // There are at least as many blocks as I/Os in flight, so one is free.
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
        content::fill(&mut self.scratch, offset, sequence, self.seed);
        // The buffer has room for a block.
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
