//! What changes with every command and has to survive this process, should it be killed: how far
//! the queues are, and which commands the disks have in hand.
//!
//! It lies in a memory file that outlives the process. A worker writes there with plain stores:
//! no system call, no lock. What is killed is a process and not the machine, so all stores that were
//! executed are found, in their order.
//!
//! # The order of stores
//!
//! 1. A command that a disk has taken in hand is [recorded](JournalPart::record): its own copy of
//!    the submission queue entry, for the host may put another one there, and which command of its
//!    queue it is, counted from the queue's creation.
//! 2. Completions are posted.
//! 3. The records of the commands that were among them are [freed](JournalPart::free).
//! 4. The position of the submission queue is stored: how many commands were fetched.
//! 5. The position of the completion queue is stored: where the next completion goes.
//!
//! Nothing more is fetched before 5 (by the worker that has the queues, which is one).
//!
//! # What is found
//!
//! Completions that were posted after the last 5 are seen in the completion queue itself, by their
//! phase tags. Each names its command, and says how far its submission queue had been fetched. So
//! what is to be done again are the recorded commands that are not among them, and all that follow
//! in the submission queue. What was fetched and executed at once, and not posted, is among the
//! latter: executing it once more is no different from executing it late. A record of a command
//! that would be fetched again does not count.
//!
//! Had 3 come before 2, a command would be lost; had 5 come before 3, one that is complete would be
//! executed again, over what was written since; had 5 come before 4, the same for commands that
//! were executed at once.

mod position;
mod recovered;

pub(crate) use position::Position;
pub(crate) use recovered::{RecoveredCommand, RecoveredJournal};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use shadowbell_doorbell::DoorbellState;
use shadowbell_memory::{Mapping, Protection, SharedBytes};
use shadowbell_spec::Sqe;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// Bytes of the positions of all queues. Each queue identifier has a cache line of its own, for
/// queues of two workers shall not share one.
const POSITIONS: usize = 8192;
const LINE: usize = 64;
const SQ: usize = 0;
const SQ_DOORBELL: usize = 8;
const CQ: usize = 16;
const CQ_DOORBELL: usize = 24;
/// Queue identifiers that there is room for.
pub(crate) const QUEUES: usize = POSITIONS / LINE;

/// Bytes of a record: which command it is, and its submission queue entry.
const RECORD: usize = 8 + Sqe::SIZE;
/// More requests than the quota says may be under way: the last batch is fetched whole, and long
/// commands are several requests.
const BEYOND_QUOTA: usize = 2048;

/// A record is there.
const VALID: u64 = 1 << 63;

/// The key of a record: which command of which queue, after so many resets.
fn key(generation: u64, sqid: u16, count: u32) -> u64 {
    VALID | (generation & 0x7fff) << 48 | u64::from(sqid) << 32 | u64::from(count)
}

/// The journal of a controller.
#[derive(Debug)]
pub(crate) struct Journal {
    file: OwnedFd,
    positions: SharedBytes,
    /// Records of each worker.
    records: usize,
    workers: usize,
}

impl Journal {
    /// An empty one, for as many workers as there can be, each of which may have so many requests
    /// under way.
    pub(crate) fn new(workers: usize, requests: usize) -> io::Result<Self> {
        // For what is under way, and as many again for what was under way in a process before.
        let records = (requests + BEYOND_QUOTA) * 2;
        let file = memfd_create("shadowbell-journal", MemfdFlags::CLOEXEC)?;
        // Pages that nobody touches cost nothing.
        ftruncate(&file, (POSITIONS + workers * table_bytes(records)) as u64)?;
        let positions = map(&file, 0, POSITIONS)?;
        Ok(Self { file, positions, records, workers })
    }

    /// The file, for whoever keeps it.
    pub(crate) fn file(&self) -> io::Result<OwnedFd> {
        self.file.try_clone()
    }

    /// Records that each worker has.
    pub(crate) fn records(&self) -> usize {
        self.records
    }

    /// The part that `worker` writes, after `generation` resets.
    pub(crate) fn part(&self, worker: usize, generation: u64) -> io::Result<JournalPart> {
        let table = table_bytes(self.records);
        let at = POSITIONS + worker.min(self.workers.saturating_sub(1)) * table;
        Ok(JournalPart {
            positions: self.positions.clone(),
            table: map(&self.file, at, table)?,
            generation,
            records: self.records,
        })
    }
}

fn table_bytes(records: usize) -> usize {
    (records * RECORD).next_multiple_of(4096)
}

fn map(file: &impl AsFd, offset: usize, len: usize) -> io::Result<SharedBytes> {
    let mapping = Mapping::from_fd(file, offset as u64, len as u64, Protection::ReadWrite);
    Ok(mapping.map_err(io::Error::other)?.bytes())
}

/// What one worker writes of a controller's journal.
#[derive(Clone, Debug)]
pub(crate) struct JournalPart {
    positions: SharedBytes,
    table: SharedBytes,
    generation: u64,
    records: usize,
}

impl JournalPart {
    /// A disk has taken the command in hand whose entry is `tag`: of queue `sqid`, of which `count`
    /// were fetched before it.
    #[inline]
    pub(crate) fn record(&self, tag: u32, sqid: u16, count: u32, sqe: &Sqe) {
        let at = tag as usize * RECORD;
        // A tag beyond the table: the quota does not let it come to that.
        if self.table.write(at + 8, sqe).is_some() {
            let _ = self.table.store_u64_release(at, key(self.generation, sqid, count));
        }
    }

    /// The completion of the command whose entry was `tag` has been posted.
    #[inline]
    pub(crate) fn free(&self, tag: u32) {
        let _ = self.table.store_u64_release(tag as usize * RECORD, 0);
    }

    /// The number of a record for the `nth` command that was under way in a process before: of
    /// those that no request gets.
    pub(crate) fn spare(&self, nth: usize) -> u32 {
        (self.records - 1).saturating_sub(nth) as u32
    }

    /// How far a submission queue was fetched.
    #[inline]
    pub(crate) fn store_sq(&self, qid: u16, position: Position) {
        self.store(qid, SQ, position.pack());
    }

    /// Where the next completion goes.
    #[inline]
    pub(crate) fn store_cq(&self, qid: u16, position: Position) {
        self.store(qid, CQ, position.pack());
    }

    /// The submission queue's doorbell has got a shadow entry, or the queue has just begun.
    pub(crate) fn store_sq_doorbell(&self, qid: u16, state: DoorbellState) {
        self.store(qid, SQ_DOORBELL, position::pack_doorbell(state));
    }

    /// As [`store_sq_doorbell`](Self::store_sq_doorbell), of a completion queue.
    pub(crate) fn store_cq_doorbell(&self, qid: u16, state: DoorbellState) {
        self.store(qid, CQ_DOORBELL, position::pack_doorbell(state));
    }

    #[inline]
    fn store(&self, qid: u16, word: usize, value: u64) {
        let _ = self.positions.store_u64_release(usize::from(qid) * LINE + word, value);
    }
}
