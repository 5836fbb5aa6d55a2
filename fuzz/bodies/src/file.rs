//! A file with short, failing and reordered reads and writes, as a disk with two queues, and a
//! model of its contents.
//!
//! There is only one thread. The program decides when each call on the file ends and with what
//! result, and when each sync starts and with what result. This body checks that
//!
//! * each request ends exactly once, and ends when no call is held back;
//! * a request fails only if it was cancelled, or if an error was injected while it was in flight;
//! * a read returns the last written data, unless that write failed or other writes were in flight;
//! * a flush, or a write with FUA, succeeds only after a sync that started after its submission has
//!   succeeded. With the page cache, none succeeds after a failed sync.

use crate::limits::Limits;
use crate::source::Source;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use shadowbell_disk::{Disk, DiskError, Op, Queue, Request, Submitted};
use shadowbell_disk_file::{CallOutcome, Direct, FileDisk, FileOptions, Script};
use shadowbell_memory::{Mapping, Segments, SharedBytes};
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

const ACTIONS: usize = 160;
const BLOCK: usize = 512;
const BLOCKS: usize = 1280;
/// Maximum number of requests in flight of a queue.
const TAGS: u32 = 8;
const QUEUES: usize = 2;
/// Maximum number of blocks of a request. Such a request exceeds one bounce buffer.
const MAX_BLOCKS: usize = 600;
/// Distance of the buffers of two requests in bytes. It leaves room for an unaligned buffer.
const SLOT: usize = MAX_BLOCKS * BLOCK + 4096;
/// Number of rounds within which all requests must have ended.
const ROUNDS: usize = 400;

const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const PASSING: [i32; 2] = [4, 11];
const ERRORS: [i32; 8] = [EIO, ENOSPC, 11, 4, 95, 22, 11, 125];

/// Runs the program that `input` encodes.
pub fn run(input: &[u8]) {
    let mut source = Source::new(input);
    let limits = Limits::begin();
    let mut user = User::new(&mut source);
    for _ in 0..ACTIONS {
        if source.is_empty() {
            break;
        }
        user.act(&mut source);
        limits.step("file");
    }
    if source.rarely(4) {
        // When the queues are dropped, they cancel the requests in flight and wait for their end.
        return;
    }
    user.finish();
    limits.step("file");
}

/// Expected state of a block.
#[derive(Clone, Copy, Default)]
struct Block {
    /// Word with which the whole block is filled. `None` if it is unknown.
    word: Option<u64>,
    /// Number of requests in flight that change the block.
    writers: u32,
    /// Number of times that a request which changes the block has started or ended.
    version: u64,
}

struct Pending {
    request: Request,
    /// Offset of the request's data in the buffers.
    at: usize,
    /// For a write: the word that fills its first block. Each further block has the next word.
    word: u64,
    /// State of each block when the request was submitted.
    blocks: Vec<Block>,
    /// Numbers of injected errors and of started syncs when the request was submitted.
    injected: u64,
    started: u64,
    cancelled: bool,
}

struct User {
    queues: Vec<Box<dyn Queue>>,
    script: Script,
    direct: bool,
    discards: bool,
    buffers: SharedBytes,
    blocks: Vec<Block>,
    pending: [BTreeMap<u32, Pending>; QUEUES],
    next: u64,
    injected: u64,
    /// Number of syncs that were started, and the number of them at the start of the last sync that
    /// succeeded.
    started: u64,
    succeeded: u64,
    lost: bool,
    /// Descriptor for the check of the contents. The disk has opened the same file a second time.
    file: OwnedFd,
}

impl User {
    fn new(source: &mut Source<'_>) -> Self {
        let file: OwnedFd = memfd_create("file", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&file, (BLOCKS * BLOCK) as u64).expect("room");
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let mut options = FileOptions::default();
        options.direct = source.of(&[Direct::Off, Direct::Auto]);
        let (disk, script) = FileDisk::scripted(&path, &options).expect("a disk");
        let queues = (0..QUEUES).map(|_| disk.queue().expect("a queue")).collect();
        let len = (QUEUES * TAGS as usize * SLOT) as u64;
        let block = Block { word: Some(0), ..Block::default() };
        Self {
            queues,
            script,
            direct: disk.is_direct(),
            discards: disk.info().discard,
            buffers: Mapping::anonymous(len).expect("memory").bytes(),
            blocks: vec![block; BLOCKS],
            pending: Default::default(),
            next: 1,
            injected: 0,
            started: 0,
            succeeded: 0,
            lost: false,
            file,
        }
    }

    fn act(&mut self, source: &mut Source<'_>) {
        let queue = source.below(QUEUES);
        match source.below(20) {
            0..=6 => self.submit(source, queue),
            7..=11 => {
                for _ in 0..1 + source.below(3) {
                    let n = source.below(self.script.waiting(queue).max(1));
                    let outcome = self.outcome(source);
                    self.script.end(queue, n, outcome);
                }
            }
            12 => {
                for n in (0..self.script.waiting(queue)).rev() {
                    self.script.end(queue, n, CallOutcome::Executed);
                }
            }
            13 => {
                let tag = source.below(TAGS as usize) as u32;
                if let Some(pending) = self.pending[queue].get_mut(&tag) {
                    pending.cancelled = true;
                }
                self.queues[queue].cancel(tag);
            }
            14 => self.queues[queue].commit(),
            15 => self.begin_sync(),
            16 => {
                let result = source.of(&[0, 0, 0, -EIO, -ENOSPC, -11, -4]);
                self.end_sync(result);
            }
            _ => {}
        }
        if !source.rarely(3) {
            self.reap(queue);
        }
    }

    /// Result that the next file system call of the disk will have. Most calls succeed.
    fn outcome(&mut self, source: &mut Source<'_>) -> CallOutcome {
        match source.below(8) {
            0 => {
                self.injected += 1;
                CallOutcome::Failed(source.of(&ERRORS))
            }
            1 => {
                let most = source.of(&[BLOCK, 1, 4096, 0, 777, 1 << 18]);
                // With direct I/O, a call that transfers less than a block has transferred nothing,
                // and this counts as an error.
                self.injected += u64::from(most == 0 || self.direct);
                CallOutcome::Partial(most)
            }
            _ => CallOutcome::Executed,
        }
    }

    fn begin_sync(&mut self) {
        self.started += u64::from(self.script.begin_sync());
    }

    fn end_sync(&mut self, result: i32) {
        if !self.script.end_sync(result) {
            return;
        }
        if result != 0 {
            self.injected += 1;
            self.lost |= !self.direct && !PASSING.contains(&-result);
        } else if !self.lost {
            self.succeeded = self.started;
        }
    }

    fn slot(queue: usize, tag: u32) -> usize {
        (queue * TAGS as usize + tag as usize) * SLOT
    }

    fn submit(&mut self, source: &mut Source<'_>, queue: usize) {
        let Some(tag) = (0..TAGS).find(|tag| !self.pending[queue].contains_key(tag)) else {
            return;
        };
        let op = match source.below(12) {
            0..=2 => Op::Read,
            3..=5 => Op::Write { fua: false },
            6 => Op::Write { fua: true },
            7 | 8 => Op::Flush,
            9 => Op::WriteZeroes { deallocate: source.bool(), fua: source.bool() },
            10 => Op::Discard,
            _ => source.of(&[Op::Compare, Op::Verify]),
        };
        let count = match source.below(16) {
            0 => MAX_BLOCKS,
            1 => 513,
            _ => 1 + source.below(16),
        };
        // Most requests use the same few blocks, so that they overlap.
        let end = if source.rarely(4) { BLOCKS - count + 1 } else { 24 };
        let first = source.below(end);
        let flushes = op == Op::Flush;
        let range = if flushes { 0..0 } else { first..first + count };
        let request =
            Request { op, offset: (range.start * BLOCK) as u64, len: (range.len() * BLOCK) as u64 };
        let at = Self::slot(queue, tag) + source.of(&[0, 0, 0, 4]);
        let word = self.next;
        self.next += MAX_BLOCKS as u64;
        if matches!(op, Op::Write { .. }) {
            self.fill(at, (word..).take(count));
        } else if op == Op::Compare {
            let blocks = self.blocks[range.clone()].iter();
            let words: Vec<u64> = blocks.map(|block| block.word.unwrap_or(u64::MAX)).collect();
            self.fill(at, words.into_iter());
            if source.rarely(4) {
                let byte = at + source.below(count * BLOCK);
                self.buffers.write_from(byte, &[0xee]).expect("room");
            }
        }
        let needs_data = matches!(op, Op::Read | Op::Write { .. } | Op::Compare);
        let mut data = if needs_data {
            let bytes = self.buffers.slice(at, range.len() * BLOCK).expect("room");
            Segments::from_bytes(&bytes)
        } else {
            Segments::new()
        };
        if changes(op) {
            for block in &mut self.blocks[range.clone()] {
                block.writers += 1;
                block.version += 1;
            }
        }
        let blocks = self.blocks[range].to_vec();
        let (injected, started) = (self.injected, self.started);
        let pending = Pending { request, at, word, blocks, injected, started, cancelled: false };
        match self.queues[queue].submit(tag, &request, &mut data) {
            Submitted::Done(result) => self.complete(&pending, result),
            Submitted::Pending => {
                self.pending[queue].insert(tag, pending);
            }
        }
        self.count(queue);
    }

    /// Fills blocks in the buffers, from byte `at` on. Each block contains repetitions of one word.
    fn fill(&self, at: usize, words: impl Iterator<Item = u64>) {
        let mut bytes = Vec::with_capacity(BLOCKS * BLOCK);
        for word in words {
            let block = [word.to_le_bytes(); BLOCK / 8];
            bytes.extend_from_slice(block.as_flattened());
        }
        self.buffers.write_from(at, &bytes).expect("room");
    }

    /// Checks the number of pending requests that the queue reports.
    fn count(&self, queue: usize) {
        assert_eq!(self.queues[queue].pending(), self.pending[queue].len(), "of queue {queue}");
    }

    fn reap(&mut self, queue: usize) {
        let mut complete = Vec::new();
        self.queues[queue].reap(&mut |tag, result, _| complete.push((tag, result)));
        for (tag, result) in complete {
            let pending = self.pending[queue].remove(&tag);
            let pending = pending.unwrap_or_else(|| panic!("tag {tag} ends, and is not pending"));
            self.complete(&pending, result);
        }
        self.count(queue);
    }

    fn range(request: &Request) -> Range<usize> {
        let (first, count) = (request.offset as usize / BLOCK, request.len as usize / BLOCK);
        first..first + count
    }

    fn complete(&mut self, pending: &Pending, result: Result<(), DiskError>) {
        let Pending { request, .. } = pending;
        let excused = pending.cancelled || pending.injected != self.injected || self.lost;
        match result {
            Ok(()) => {}
            Err(DiskError::CompareFailed) => assert_eq!(request.op, Op::Compare),
            Err(DiskError::Cancelled) => {
                assert!(pending.cancelled || pending.injected != self.injected, "{request:?}");
            }
            Err(error) => assert!(excused, "{request:?} fails by itself: {error}"),
        }
        let ok = result.is_ok();
        let durable = match request.op {
            Op::Flush => true,
            Op::Write { fua } => fua && !self.direct,
            Op::WriteZeroes { fua, .. } => fua,
            _ => false,
        };
        if ok && durable {
            assert!(
                self.succeeded > pending.started,
                "{request:?} succeeds, and no sync has since"
            );
        }
        let range = Self::range(request);
        match request.op {
            Op::Read if ok => {
                let mut bytes = vec![0; range.len() * BLOCK];
                self.buffers.read_into(pending.at, &mut bytes).expect("data");
                let words = bytes.chunks_exact(BLOCK).map(word);
                for ((now, then), word) in self.blocks[range].iter().zip(&pending.blocks).zip(words)
                {
                    let known = then.word.filter(|_| then.writers == 0);
                    if let Some(known) = known.filter(|_| now.version == then.version) {
                        assert_eq!(word, Some(known), "{request:?} brings what is not there");
                    }
                }
            }
            Op::Compare => {
                let steady = self.blocks[range].iter().zip(&pending.blocks).all(|(now, then)| {
                    then.word.is_some() && then.writers == 0 && now.version == then.version
                });
                if steady && (ok || result == Err(DiskError::CompareFailed)) {
                    let mut bytes = vec![0; pending.blocks.len() * BLOCK];
                    self.buffers.read_into(pending.at, &mut bytes).expect("data");
                    let mut both = bytes.chunks_exact(BLOCK).map(word).zip(&pending.blocks);
                    let same = both.all(|(word, block)| word == block.word);
                    assert_eq!(same, ok, "{request:?}");
                }
            }
            op if changes(op) => {
                for (n, at) in range.enumerate() {
                    let (then, now) = (&pending.blocks[n], &mut self.blocks[at]);
                    let alone = then.writers == 1 && now.version == then.version;
                    now.word = match op {
                        _ if !ok || !alone => None,
                        Op::Write { .. } => Some(pending.word + n as u64),
                        Op::Discard if !self.discards => then.word,
                        _ => Some(0),
                    };
                    now.writers -= 1;
                    now.version += 1;
                }
            }
            _ => {}
        }
    }

    /// Ends all requests without further errors, and checks the known contents.
    fn finish(&mut self) {
        for _ in 0..ROUNDS {
            for queue in 0..QUEUES {
                self.queues[queue].commit();
                for n in (0..self.script.waiting(queue)).rev() {
                    self.script.end(queue, n, CallOutcome::Executed);
                }
                self.begin_sync();
                self.end_sync(0);
                self.reap(queue);
            }
            if self.pending.iter().all(BTreeMap::is_empty) {
                return self.check_all_blocks();
            }
        }
        panic!("requests do not come to their end");
    }

    fn check_all_blocks(&mut self) {
        let mut bytes = vec![0; BLOCKS * BLOCK];
        let len = rustix::io::pread(&self.file, &mut bytes, 0).expect("to read");
        assert_eq!(len, bytes.len());
        for (n, (block, bytes)) in self.blocks.iter().zip(bytes.chunks_exact(BLOCK)).enumerate() {
            assert!(block.word.is_none() || word(bytes) == block.word, "block {n} is another");
        }
    }
}

/// True if the operation changes its range.
fn changes(op: Op) -> bool {
    matches!(op, Op::Write { .. } | Op::WriteZeroes { .. } | Op::Discard)
}

/// The word that fills a block.
fn word(block: &[u8]) -> Option<u64> {
    let first: [u8; 8] = block.get(..8)?.try_into().ok()?;
    block.chunks_exact(8).all(|word| word == first).then(|| u64::from_le_bytes(first))
}
