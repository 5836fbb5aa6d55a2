//! The journal, as the process writes it that serves.

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
            records: Records { table: map(&self.file, at, table)?, capacity: self.records },
            generation,
            free: Vec::new(),
            next: 0,
            by_tag: Vec::new(),
        })
    }
}

/// The records that one worker makes of a controller's commands. A record has a place of its own
/// and not that of the request's tag: a tag is given away again before the completion is posted.
#[derive(Clone, Debug)]
pub(crate) struct Records {
    table: SharedBytes,
    /// How many there can be.
    capacity: usize,
}

impl Records {
    fn write(&self, place: u32, key: u64, sqe: &Sqe) {
        let at = place as usize * RECORD;
        // A place beyond the table: the quota does not let it come to that.
        if self.table.write(at + 8, sqe).is_some() {
            let _ = self.table.store_u64_release(at, key);
        }
    }

    /// The completion of the command has been posted that has its record there.
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

/// What one worker writes of a controller's journal.
#[derive(Debug)]
pub(crate) struct JournalPart {
    positions: SharedBytes,
    records: Records,
    generation: u64,
    /// Places that were used, and are free.
    free: Vec<u32>,
    /// The first place that was never used.
    next: u32,
    /// By the tag of a request under way, the place of its command's record.
    by_tag: Vec<u32>,
}

impl JournalPart {
    fn place(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        })
    }

    /// A disk has taken the command in hand whose request is `tag`: of queue `sqid`, of which
    /// `count` were fetched before it.
    #[inline]
    pub(crate) fn record(&mut self, tag: u32, sqid: u16, count: u32, sqe: &Sqe) {
        self.record_as(tag, key(self.generation, sqid, count), sqe);
    }

    /// As [`record`](Self::record), of a command that was under way in a process before.
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

    /// Something was decided of the command whose request is `tag`.
    pub(crate) fn decide(&self, tag: u32, decision: Decision) {
        self.records.decide(self.place_of(tag), decision);
    }

    /// Where the record of the command is whose request was `tag`.
    #[inline]
    pub(crate) fn place_of(&self, tag: u32) -> u32 {
        self.by_tag.get(tag as usize).copied().unwrap_or(u32::MAX)
    }

    /// The completion of the command has been posted that has its record there.
    #[inline]
    pub(crate) fn free(&mut self, place: u32) {
        self.records.free(place);
        // Spare places are used once.
        if place < self.next {
            self.free.push(place);
        }
    }

    /// The records of this worker, for who is to move some of them.
    pub(crate) fn records(&self) -> Records {
        self.records.clone()
    }

    /// Moves a record here that another worker has made. Where it is now.
    pub(crate) fn adopt(&mut self, records: &Records, place: u32) -> Option<u32> {
        let (key, sqe) = records.read(place)?;
        let here = self.place();
        self.records.write(here, key, &sqe);
        records.free(place);
        Some(here)
    }

    /// Makes a record of the `nth` command that was under way in a process before. Where it is:
    /// none of those is there that are made here.
    pub(crate) fn record_spare(&self, nth: usize, command: &RecoveredCommand) -> u32 {
        let place = (self.records.capacity - 1).saturating_sub(nth) as u32;
        self.records.write(place, self.key_of(command) | WAITS, &command.sqe);
        place
    }

    /// The command is started now that has its record at `place`, of those that were under way in a
    /// process before.
    pub(crate) fn start_spare(&self, place: u32, command: &RecoveredCommand) {
        self.records.write(place, self.key_of(command), &command.sqe);
    }

    /// A command of a submission queue is started next, and no other one of the queue before its
    /// position is stored again: which one it is, and how many processes have died with it.
    pub(crate) fn store_trying(&self, qid: u16, count: u32, deaths: u8) {
        self.store(qid, TRYING, pack_trying(count, deaths, false));
    }

    /// So many processes have died with a command that is not started yet. Until it is, another
    /// command may be what this process dies of.
    pub(crate) fn store_suspect(&self, qid: u16, count: u32, deaths: u8) {
        self.store(qid, TRYING, pack_trying(count, deaths, true));
    }

    /// No command of the queue is being started alone.
    pub(crate) fn clear_trying(&self, qid: u16) {
        self.store(qid, TRYING, 0);
    }

    /// How far a submission queue was fetched, and how many completions had been posted by then.
    #[inline]
    pub(crate) fn store_sq(&self, qid: u16, position: Position, completions: u64) {
        self.store(qid, SQ_COVERS, position::pack_covers(position.at, completions));
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
