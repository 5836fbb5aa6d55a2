//! Writer for the journal of the running process.

use super::decision::{self, Decision};
use super::layout::{
    BEYOND_QUOTA, CQ, CQ_DOORBELL, DECIDED, LINE, POSITIONS, RECORD, RecoveredCommand, SQ,
    SQ_COVERS, SQ_DOORBELL, TRYING, VALID, WAITS, key, map, pack_deaths, pack_trying, table_bytes,
};
use super::position::{self, Position};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use shadowbell_doorbell::DoorbellState;
use shadowbell_memory::SharedBytes;
use shadowbell_spec::Sqe;
use std::io;
use std::os::fd::OwnedFd;

/// Journal of a controller.
#[derive(Debug)]
pub(crate) struct Journal {
    file: OwnedFd,
    positions: SharedBytes,
    /// Number of records of each I/O thread.
    records: usize,
    workers: usize,
}

impl Journal {
    /// Creates an empty journal for up to `workers` I/O threads, each with up to `requests`
    /// requests in flight.
    pub(crate) fn new(workers: usize, requests: usize) -> io::Result<Self> {
        // Twice as many: for commands in flight, and for those in flight in the previous process.
        let records = (requests + BEYOND_QUOTA) * 2;
        let file = memfd_create("shadowbell-journal", MemfdFlags::CLOEXEC)?;
        // A memfd allocates no memory for pages that are never touched.
        ftruncate(&file, (POSITIONS + workers * table_bytes(records)) as u64)?;
        let positions = map(&file, 0, POSITIONS)?;
        Ok(Self { file, positions, records, workers })
    }

    /// A duplicate of the file descriptor, for the supervisor.
    pub(crate) fn file(&self) -> io::Result<OwnedFd> {
        self.file.try_clone()
    }

    /// Number of records of each I/O thread.
    pub(crate) fn records(&self) -> usize {
        self.records
    }

    /// Part of the journal that the I/O thread `worker` writes, after `generation` resets.
    pub(crate) fn part(&self, worker: usize, generation: u64) -> io::Result<JournalPart> {
        let table = table_bytes(self.records);
        let at = POSITIONS + worker.min(self.workers.saturating_sub(1)) * table;
        Ok(JournalPart {
            positions: self.positions.clone(),
            records: Records { table: map(&self.file, at, table)?, capacity: self.records },
            generation,
            free: Vec::new(),
            next: 0,
            by_tag: Vec::new(),
        })
    }
}

/// Record table of one I/O thread for one controller's commands. A record has a place of its own
/// instead of the request's tag, because a tag is reused before the completion is posted.
#[derive(Clone, Debug)]
pub(crate) struct Records {
    table: SharedBytes,
    /// Maximum number of records.
    capacity: usize,
}

impl Records {
    fn write(&self, place: u32, key: u64, sqe: &Sqe) {
        let at = place as usize * RECORD;
        // A place beyond the table has no effect; the quota prevents it.
        if self.table.write(at + 8, sqe).is_some() {
            let _ = self.table.store_u64_release(at, key);
        }
    }

    /// Frees the record at `place`, after the completion of its command is posted.
    #[inline]
    fn free(&self, place: u32) {
        let _ = self.table.store_u64_release(place as usize * RECORD, 0);
    }

    fn decide(&self, place: u32, decision: Decision) {
        let at = place as usize * RECORD;
        let key = self.table.load_u64_acquire(at).filter(|key| key & VALID != 0);
        if let Some(key) = key
            && self.table.store_u64_release(at + 8 + decision::AT, decision.pack()).is_some()
        {
            let _ = self.table.store_u64_release(at, key | DECIDED);
        }
    }

    fn read(&self, place: u32) -> Option<(u64, Sqe)> {
        let at = place as usize * RECORD;
        let key = self.table.load_u64_acquire(at).filter(|key| key & VALID != 0)?;
        Some((key, self.table.read(at + 8)?))
    }
}

/// Journal part of one controller that one I/O thread writes.
#[derive(Debug)]
pub(crate) struct JournalPart {
    positions: SharedBytes,
    records: Records,
    generation: u64,
    /// Places that were used and are free again.
    free: Vec<u32>,
    /// First place that was never used.
    next: u32,
    /// Place of the command's record, by request tag.
    by_tag: Vec<u32>,
}

impl JournalPart {
    fn place(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        })
    }

    /// Records a command whose request `tag` is in flight: number `count` of queue `sqid`.
    #[inline]
    pub(crate) fn record(&mut self, tag: u32, sqid: u16, count: u32, sqe: &Sqe) {
        self.record_as(tag, key(self.generation, sqid, count), sqe);
    }

    /// [`record`](Self::record) for a command that was in flight in a previous process.
    pub(crate) fn record_again(&mut self, tag: u32, command: &RecoveredCommand) {
        let key = self.key_of(command);
        self.record_as(tag, key, &command.sqe);
    }

    fn key_of(&self, command: &RecoveredCommand) -> u64 {
        let decided = if command.decision.is_some() { DECIDED } else { 0 };
        key(self.generation, command.sqid, command.count) | pack_deaths(command.deaths) | decided
    }

    #[inline]
    fn record_as(&mut self, tag: u32, key: u64, sqe: &Sqe) {
        let place = self.place();
        self.records.write(place, key, sqe);
        let tag = tag as usize;
        if self.by_tag.len() <= tag {
            self.by_tag.resize(tag + 1, 0);
        }
        self.by_tag[tag] = place;
    }

    /// Stores a decision about the command of request `tag`.
    pub(crate) fn decide(&self, tag: u32, decision: Decision) {
        self.records.decide(self.place_of(tag), decision);
    }

    /// Place of the record of the command whose request was `tag`.
    #[inline]
    pub(crate) fn place_of(&self, tag: u32) -> u32 {
        self.by_tag.get(tag as usize).copied().unwrap_or(u32::MAX)
    }

    /// Frees the record at `place`, after the completion of its command is posted.
    #[inline]
    pub(crate) fn free(&mut self, place: u32) {
        self.records.free(place);
        // Spare places (see `record_spare`) are used only once.
        if place < self.next {
            self.free.push(place);
        }
    }

    /// Record table of this I/O thread, for moving records to another thread.
    pub(crate) fn records(&self) -> Records {
        self.records.clone()
    }

    /// Moves a record of another I/O thread into this part. Returns its new place.
    pub(crate) fn adopt(&mut self, records: &Records, place: u32) -> Option<u32> {
        let (key, sqe) = records.read(place)?;
        let here = self.place();
        self.records.write(here, key, &sqe);
        records.free(place);
        Some(here)
    }

    /// Records the `nth` command that was in flight in a previous process. Returns its place, which
    /// is counted from the end of the table, so that new records do not use it.
    pub(crate) fn record_spare(&self, nth: usize, command: &RecoveredCommand) -> u32 {
        let place = (self.records.capacity - 1).saturating_sub(nth) as u32;
        self.records.write(place, self.key_of(command) | WAITS, &command.sqe);
        place
    }

    /// Marks the command with the spare record at `place` as started.
    pub(crate) fn start_spare(&self, place: u32, command: &RecoveredCommand) {
        self.records.write(place, self.key_of(command), &command.sqe);
    }

    /// Stores that command `count` of a submission queue is started next and alone, and that
    /// `deaths` processes have crashed with it.
    pub(crate) fn store_trying(&self, qid: u16, count: u32, deaths: u8) {
        self.store(qid, TRYING, pack_trying(count, deaths, false));
    }

    /// Stores that `deaths` processes have crashed with a command that is not started yet. If this
    /// process crashes before it starts the command, another command is the cause.
    pub(crate) fn store_suspect(&self, qid: u16, count: u32, deaths: u8) {
        self.store(qid, TRYING, pack_trying(count, deaths, true));
    }

    /// Stores that no command of the queue is being started alone.
    pub(crate) fn clear_trying(&self, qid: u16) {
        self.store(qid, TRYING, 0);
    }

    /// Stores the position of a submission queue, and the number of completions posted by then.
    #[inline]
    pub(crate) fn store_sq(&self, qid: u16, position: Position, completions: u64) {
        self.store(qid, SQ_COVERS, position::pack_covers(position.at, completions));
        self.store(qid, SQ, position.pack());
    }

    /// Stores the position of a completion queue.
    #[inline]
    pub(crate) fn store_cq(&self, qid: u16, position: Position) {
        self.store(qid, CQ, position.pack());
    }

    /// Stores the doorbell state of a submission queue, when the queue was created or its doorbell
    /// got a shadow entry.
    pub(crate) fn store_sq_doorbell(&self, qid: u16, state: DoorbellState) {
        self.store(qid, SQ_DOORBELL, position::pack_doorbell(state));
    }

    /// Stores the doorbell state of a completion queue.
    pub(crate) fn store_cq_doorbell(&self, qid: u16, state: DoorbellState) {
        self.store(qid, CQ_DOORBELL, position::pack_doorbell(state));
    }

    #[inline]
    fn store(&self, qid: u16, word: usize, value: u64) {
        let _ = self.positions.store_u64_release(usize::from(qid) * LINE + word, value);
    }
}
