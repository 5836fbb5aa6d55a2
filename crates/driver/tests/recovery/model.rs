//! A program that keeps a queue full and checks the contents of the disk. Every block contains its
//! number and its version.

use crate::disk::{BLOCK, CachedDisk};
use shadowbell_driver::{Buffer, BufferPool, Command, Completion, Namespace, QueuePair};
use shadowbell_spec::nvm::DsmRange;
use shadowbell_testing::wait::LIMIT;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Maximum number of blocks of a command.
const MAX_BLOCKS: u64 = 16;
/// Contents of a block after `version` writes; version 0 is zeroes.
fn fill(block: u64, version: u64) -> [u8; BLOCK] {
    let mut bytes = [0; BLOCK];
    if version != 0 {
        let seed = (block << 32 ^ version).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for (i, word) in bytes.chunks_exact_mut(8).enumerate() {
            let value = match i {
                0 => block,
                1 => version,
                _ => seed.rotate_left(i as u32) ^ i as u64,
            };
            word.copy_from_slice(&value.to_le_bytes());
        }
    }
    bytes
}

/// Returns the version of `block` that `bytes` contains. Fails if the bytes are not one intact
/// version.
fn version_of(block: u64, bytes: &[u8]) -> Result<u64, String> {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let version = if bytes.iter().all(|b| *b == 0) { 0 } else { word(8) };
    if bytes == fill(block, version) {
        Ok(version)
    } else {
        Err(format!("block {block} has bytes of block {} version {}", word(0), word(8)))
    }
}

/// Kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    /// Write of the versions that the model has chosen. If the outcome is unknown, the program
    /// submits it again.
    Write,
    Zero,
    Discard,
    /// Flush, with the time of its submission.
    Flush(u64),
}

#[derive(Clone, Copy, Debug)]
struct Op {
    kind: Kind,
    lba: u64,
    blocks: u64,
    began: Instant,
}

/// Program for one queue. It uses the blocks from `first` on.
pub(crate) struct Program {
    namespace: Namespace,
    /// The controller's disk.
    disk: CachedDisk,
    first: u64,
    /// Version of the last write to each block, whether it has completed or not.
    versions: Vec<u64>,
    /// Version of the next write; never 0, which means zeroes.
    next_version: u64,
    busy: Vec<bool>,
    /// Time and version of the last completed change of each block.
    changed: Vec<(u64, u64)>,
    /// Oldest version of each block that a power cut may leave, as a position in the order of
    /// changes.
    durable: Vec<u64>,
    /// All versions of a block in order, with zeroes as version 0.
    history: Vec<Vec<u64>>,
    clock: u64,
    ops: Vec<Option<Op>>,
    random: u64,
    pub(crate) completed: u64,
    /// Number of failed commands; the program has submitted them again.
    pub(crate) failures: u64,
    pub(crate) slowest: Duration,
}

impl Program {
    pub(crate) fn new(
        queue: &QueuePair,
        (namespace, disk): (&Namespace, &CachedDisk),
        (first, count): (u64, u64),
    ) -> Self {
        let blocks = count as usize;
        Self {
            namespace: namespace.clone(),
            disk: disk.clone(),
            first,
            versions: vec![0; blocks],
            next_version: 1,
            busy: vec![false; blocks],
            changed: vec![(0, 0); blocks],
            durable: vec![0; blocks],
            history: vec![vec![0]; blocks],
            clock: 0,
            ops: vec![None; queue.capacity()],
            random: 0x1234_5678_9abc_def1 ^ first << 7,
            completed: 0,
            failures: 0,
            slowest: Duration::ZERO,
        }
    }

    fn draw(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn range(&self, lba: u64, blocks: u64) -> std::ops::Range<usize> {
        let start = (lba - self.first) as usize;
        start..start + blocks as usize
    }

    /// Chooses an operation that uses no block of an operation in flight, and records its effect in
    /// the model.
    fn choose(&mut self) -> Option<Op> {
        let random = self.draw();
        let blocks = [1, 8, 8, 8, MAX_BLOCKS][(random >> 8) as usize % 5];
        let lba = self.first + (random >> 16) % (self.versions.len() as u64 - blocks);
        let kind = match random % 100 {
            0..45 => Kind::Read,
            45..90 => Kind::Write,
            90..93 => Kind::Zero,
            93..95 => Kind::Discard,
            _ => Kind::Flush(self.clock),
        };
        let began = Instant::now();
        if let Kind::Flush(_) = kind {
            return Some(Op { kind, lba, blocks: 0, began });
        }
        let range = self.range(lba, blocks);
        if self.busy[range.clone()].contains(&true) {
            return None;
        }
        self.busy[range.clone()].fill(true);
        if kind != Kind::Read {
            for block in range {
                let version = if kind == Kind::Write { self.next_version } else { 0 };
                self.versions[block] = version;
                self.history[block].push(version);
            }
            self.next_version += 1;
        }
        Some(Op { kind, lba, blocks, began })
    }

    fn submit(&mut self, queue: &mut QueuePair, op: Op, mut buffer: Buffer) {
        let (lba, blocks) = (op.lba, op.blocks as u32);
        let first = self.first;
        let command: Command = match op.kind {
            Kind::Read => {
                buffer.fill(0x11);
                self.namespace.read(lba, blocks).unwrap()
            }
            Kind::Write => {
                for (i, block) in (lba..lba + op.blocks).enumerate() {
                    let data = fill(block, self.versions[(block - first) as usize]);
                    assert!(buffer.copy_from(i * BLOCK, &data));
                }
                let command = self.namespace.write(lba, blocks).unwrap();
                // Some writes are marked so that the driver does not repeat them. The program
                // itself repeats these.
                if self.draw().is_multiple_of(8) { command.once() } else { command }
            }
            Kind::Zero => self.namespace.write_zeroes(lba, blocks, true).unwrap(),
            Kind::Discard => {
                let range = DsmRange { attributes: 0, blocks, slba: lba };
                assert!(buffer.copy_from(0, range.as_bytes()));
                self.namespace.deallocate(1).unwrap()
            }
            Kind::Flush(_) => self.namespace.flush(),
        };
        let token = queue.submit(command, Some(buffer)).unwrap();
        assert!(self.ops[token.index()].is_none(), "a slot that is in use");
        self.ops[token.index()] = Some(op);
    }

    /// Keeps the queue full until `enough` returns true. Then waits for the commands in flight.
    pub(crate) fn run(
        &mut self,
        queue: &mut QueuePair,
        pool: &BufferPool,
        mut enough: impl FnMut(&Self) -> bool,
    ) {
        let mut last = Instant::now();
        loop {
            let over = enough(self);
            let mut tries = 0;
            while !over && queue.outstanding() < queue.capacity() && tries < 1000 {
                tries += 1;
                let Some(op) = self.choose() else { continue };
                let buffer = pool.take().expect("as many buffers as commands");
                self.submit(queue, op, buffer);
            }
            queue.ring().unwrap();
            if over && queue.outstanding() == 0 {
                break;
            }
            let _ = queue.wait(Some(Instant::now() + LIMIT / 2)).unwrap();
            assert!(last.elapsed() < LIMIT, "nothing completes: {:?}", queue.stats());
            while let Some(completion) = queue.pop() {
                last = Instant::now();
                self.complete(queue, completion);
            }
        }
        queue.ring_cq_doorbell_if_needed().unwrap();
        assert!(self.ops.iter().all(Option::is_none), "a command that never completed");
        assert!(self.busy.iter().all(|busy| !busy));
        assert_eq!(pool.available(), pool.count(), "a buffer that was not given back");
    }

    fn complete(&mut self, queue: &mut QueuePair, completion: Completion) {
        let Completion { token, status, buffer, .. } = completion;
        let op = self.ops[token.index()].take().expect("a completion of a command");
        self.slowest = self.slowest.max(op.began.elapsed());
        assert!(op.began.elapsed() < LIMIT, "a command took {:?}", op.began.elapsed());
        let buffer = buffer.expect("the controller is done with the buffer");
        if !status.is_success() {
            // The outcome is unknown, so the command is repeated before any other command to these
            // blocks.
            self.failures += 1;
            return self.submit(queue, op, buffer);
        }
        self.completed += 1;
        self.clock += 1;
        if let Kind::Flush(submitted) = op.kind {
            for block in 0..self.changed.len() {
                let (when, version) = self.changed[block];
                // The flush makes those changes durable that had completed before its submission.
                if when <= submitted && self.durable[block] < version {
                    self.durable[block] = version;
                    self.check_stable(block);
                }
            }
            return;
        }
        for (i, block) in (op.lba..op.lba + op.blocks).enumerate() {
            let index = (block - self.first) as usize;
            if op.kind == Kind::Read {
                let mut bytes = [0; BLOCK];
                assert!(buffer.copy_to(i * BLOCK, &mut bytes));
                let found = version_of(block, &bytes).unwrap_or_else(|error| panic!("{error}"));
                assert_eq!(found, self.versions[index], "block {block}: lost or stale data");
            } else {
                self.changed[index] = (self.clock, self.history[index].len() as u64 - 1);
            }
            self.busy[index] = false;
        }
    }

    /// Reads every block once more.
    pub(crate) fn read_all(&mut self, queue: &mut QueuePair, pool: &BufferPool) {
        for lba in
            (self.first..self.first + self.versions.len() as u64).step_by(MAX_BLOCKS as usize)
        {
            let range = self.range(lba, MAX_BLOCKS);
            self.busy[range].fill(true);
            let op = Op { kind: Kind::Read, lba, blocks: MAX_BLOCKS, began: Instant::now() };
            self.submit(queue, op, pool.take().expect("a buffer"));
            while self.ops.iter().any(Option::is_some) {
                let _ = queue.wait(Some(Instant::now() + LIMIT)).unwrap();
                while let Some(completion) = queue.pop() {
                    self.complete(queue, completion);
                }
            }
        }
    }

    /// Checks the contents of every block after a power cut.
    pub(crate) fn check_all_stable(&self) {
        (0..self.versions.len()).for_each(|index| self.check_stable(index));
    }

    fn check_stable(&self, index: usize) {
        let block = self.first + index as u64;
        let bytes = self.disk.stable(block);
        let found = version_of(block, &bytes).unwrap_or_else(|error| panic!("{error}"));
        let (history, least) = (&self.history[index], self.durable[index] as usize);
        assert!(
            history[least..].contains(&found),
            "block {block}: a flush lost version {}, and left {found}",
            history[least]
        );
    }
}
