//! Journal: queue positions and commands in flight, for recovery from a killed process.
//!
//! The journal is a memory file (memfd) that outlives the process. I/O threads write it with plain
//! stores, without system calls or locks. If only the process dies and not the machine, all
//! executed stores are visible to the recovering process, in the order of their execution.
//!
//! # Order of stores
//!
//! 1. A command with a request in flight is [recorded](JournalPart::record). The record contains
//!    the number of the command, counted from the creation of its queue, and a copy of the
//!    submission queue entry. A copy is needed because the host may overwrite the original.
//! 2. Completions are posted.
//! 3. The records of the posted commands are [freed](JournalPart::free).
//! 4. The position of the submission queue is stored: first the number of posted completions, then
//!    the number of fetched commands.
//! 5. The position of the completion queue is stored: the index of the next completion.
//!
//! Each queue is served by one I/O thread, which fetches no further command of it before step 5.
//!
//! # Recovery
//!
//! Completions that were posted after the last step 5 are found in the completion queue itself, by
//! their phase tags. Each of these completions contains the identifier of the command, and the head
//! of the submission queue at the time when the completion was posted. If the last step 4 has
//! counted this completion already, the stored position of the submission queue is ahead of this
//! head. The commands to execute again are the recorded ones without a completion, and all commands
//! in the submission queue after its position. Commands after the position may have been executed
//! inline without a posted completion. The host cannot distinguish a second execution of these
//! commands from a late execution. If a recorded command comes after the position, it is fetched
//! again, and its record is ignored.
//!
//! The order prevents these errors. With step 3 before step 2, a command could be lost. With step 5
//! before step 3, a completed command could be executed again and overwrite newer data. With step 5
//! before step 4, the same could happen to commands that were executed inline. Without the number
//! of completions in step 4, recovery could not distinguish a head that is older than the stored
//! position from a head that is almost a whole round of the ring ahead of that position.
//!
//! # Exclusive commands
//!
//! Decisions about an exclusive command are [stored](JournalPart::decide) in its record: first the
//! decision, then the flag that there is one. For a fused operation, the decision about the first
//! command is stored after the decision about the second.
//!
//! # Commands that crash the process
//!
//! A command may be the cause of a crash. Its record contains the number of processes that have
//! crashed with the command in flight. A command without a record may also be the cause. It then
//! belongs to the burst of commands that begins at the stored position. So after a crash by a
//! fault, the next process fetches the commands of that burst one at a time. Before the start of
//! each command, the process [stores](JournalPart::store_trying) the command's number.
//! `worker::recovery` evaluates records and numbers.

mod layout;

pub(crate) use layout::{BURST, Decision, Position, QUEUES, RecoveredCommand};

use crate::saved::CauseOfDeath;
use layout::{
    BEYOND_QUOTA, CQ, CQ_DOORBELL, DECIDED, DECISION_AT, GENERATION_SHIFT, LINE, POSITIONS, RECORD,
    SQ, SQ_COVERS, SQ_DOORBELL, TRYING, VALID, WAITS, covers, key, map, pack_crashes, pack_trying,
    table_bytes, unpack, unpack_doorbell, unpack_trying,
};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use shadowbell_doorbell::{DoorbellState, RingSize};
use shadowbell_memory::{FileStatus, SharedBytes};
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::{Cqe, Sqe};
use std::collections::BTreeMap;
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
        // Half of the records are for commands in flight, the other half for commands inherited
        // from the previous process.
        let records = (requests + BEYOND_QUOTA) * 2;
        let file = memfd_create("shadowbell-journal", MemfdFlags::CLOEXEC)?;
        // Pages of a memfd that are never touched occupy no memory.
        ftruncate(&file, (POSITIONS + workers * table_bytes(records)) as u64)?;
        let positions = map(&file, 0, POSITIONS)?;
        Ok(Self { file, positions, records, workers })
    }

    /// Duplicate of the journal's file descriptor, for the supervisor.
    pub(crate) fn file(&self) -> io::Result<OwnedFd> {
        self.file.try_clone()
    }

    /// Number of records of each I/O thread.
    pub(crate) fn records(&self) -> usize {
        self.records
    }

    /// I/O commands in flight after `generation` controller resets. I/O threads change the records
    /// meanwhile, so a command that begins or ends may be missing.
    pub(crate) fn in_flight(&self, generation: u64) -> io::Result<Vec<InFlightCommand>> {
        let bytes = table_bytes(self.records) as u64;
        let mut commands = Vec::new();
        for worker in 0..self.workers as u64 {
            let begin = POSITIONS as u64 + worker * bytes;
            let end = begin + (self.records * RECORD) as u64;
            let mut at = begin;
            // Pages that were never touched are not read.
            while at < end
                && let Some((from, to)) = data_extent(&self.file, at)
                && from < end
            {
                let first = (from.max(begin) - begin) / RECORD as u64;
                let last = (to.min(end) - begin).div_ceil(RECORD as u64);
                let mut table = vec![0; (last.saturating_sub(first) as usize) * RECORD];
                read_at(&self.file, &mut table, begin + first * RECORD as u64)?;
                let records = table.chunks_exact(RECORD);
                commands.extend(records.filter_map(|record| in_flight(record, generation)));
                at = begin + last * RECORD as u64;
            }
        }
        Ok(commands)
    }

    /// Part of the journal that the I/O thread `worker` writes after `generation` controller
    /// resets.
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

/// Record table of one I/O thread for one controller's commands. A record's slot is not the
/// request's tag, because the tag may be reused before the completion is posted.
#[derive(Clone, Debug)]
pub(crate) struct Records {
    table: SharedBytes,
    /// Maximum number of records.
    capacity: usize,
}

impl Records {
    fn write(&self, slot: u32, key: u64, sqe: &Sqe) {
        let at = slot as usize * RECORD;
        // The quota prevents a write beyond the table, which would have no effect.
        if self.table.write(at + 8, sqe).is_some() {
            let _ = self.table.store_u64_release(at, key);
        }
    }

    /// Frees the record at `slot`: the completion of its command is posted.
    #[inline]
    fn free(&self, slot: u32) {
        let _ = self.table.store_u64_release(slot as usize * RECORD, 0);
    }

    fn decide(&self, slot: u32, decision: Decision) {
        let at = slot as usize * RECORD;
        let key = self.table.load_u64_acquire(at).filter(|key| key & VALID != 0);
        if let Some(key) = key
            && self.table.store_u64_release(at + 8 + DECISION_AT, decision.pack()).is_some()
        {
            let _ = self.table.store_u64_release(at, key | DECIDED);
        }
    }

    fn read(&self, slot: u32) -> Option<(u64, Sqe)> {
        let at = slot as usize * RECORD;
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
    /// Slots whose records were freed.
    free: Vec<u32>,
    /// First slot that was never used.
    next: u32,
    /// Slot of the command's record, indexed by request tag.
    by_tag: Vec<u32>,
}

impl JournalPart {
    fn allocate_slot(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        })
    }

    /// Records a command in flight: the command of request `tag`, number `count` of queue `sqid`.
    #[inline]
    pub(crate) fn record(&mut self, tag: u32, sqid: u16, count: u32, sqe: &Sqe) {
        self.record_as(tag, key(self.generation, sqid, count), sqe);
    }

    /// [`record`](Self::record) for a command that was in flight in a previous process.
    pub(crate) fn record_recovered(&mut self, tag: u32, command: &RecoveredCommand) {
        let key = self.key_of(command);
        self.record_as(tag, key, &command.sqe);
    }

    fn key_of(&self, command: &RecoveredCommand) -> u64 {
        let decided = if command.decision.is_some() { DECIDED } else { 0 };
        key(self.generation, command.sqid, command.count) | pack_crashes(command.crashes) | decided
    }

    #[inline]
    fn record_as(&mut self, tag: u32, key: u64, sqe: &Sqe) {
        let slot = self.allocate_slot();
        self.records.write(slot, key, sqe);
        let tag = tag as usize;
        if self.by_tag.len() <= tag {
            self.by_tag.resize(tag + 1, 0);
        }
        self.by_tag[tag] = slot;
    }

    /// Stores a decision about the command of request `tag`.
    pub(crate) fn decide(&self, tag: u32, decision: Decision) {
        self.records.decide(self.slot_of(tag), decision);
    }

    /// Slot of the record of the command whose request was `tag`.
    #[inline]
    pub(crate) fn slot_of(&self, tag: u32) -> u32 {
        self.by_tag.get(tag as usize).copied().unwrap_or(u32::MAX)
    }

    /// Frees the record at `slot`: the completion of its command is posted.
    #[inline]
    pub(crate) fn free(&mut self, slot: u32) {
        self.records.free(slot);
        // Spare slots (see `record_recovered_at`) are used only once, so they are not added to the
        // free slots.
        if slot < self.next {
            self.free.push(slot);
        }
    }

    /// Record table of this I/O thread, for moving records to another thread.
    pub(crate) fn records(&self) -> Records {
        self.records.clone()
    }

    /// Moves a record of another I/O thread into this part. Returns its new slot.
    pub(crate) fn adopt(&mut self, records: &Records, slot: u32) -> Option<u32> {
        let (key, sqe) = records.read(slot)?;
        let own = self.allocate_slot();
        self.records.write(own, key, &sqe);
        records.free(slot);
        Some(own)
    }

    /// Records the `nth` command that was in flight in a previous process, as not started yet.
    /// Returns the record's slot, a spare slot: recovered commands use the slots from the end of
    /// the table downwards, and all other records use those from the start upwards.
    pub(crate) fn record_recovered_at(&self, nth: usize, command: &RecoveredCommand) -> u32 {
        let slot = (self.records.capacity - 1).saturating_sub(nth) as u32;
        self.records.write(slot, self.key_of(command) | WAITS, &command.sqe);
        slot
    }

    /// Marks the command with the spare record at `slot` as started.
    pub(crate) fn start_recovered(&self, slot: u32, command: &RecoveredCommand) {
        self.records.write(slot, self.key_of(command), &command.sqe);
    }

    /// Stores that command `count` of a submission queue is started next, that the commands of this
    /// queue are started one at a time, and that `crashes` processes have crashed with this command
    /// in flight.
    pub(crate) fn store_trying(&self, qid: u16, count: u32, crashes: u8) {
        self.store(qid, TRYING, pack_trying(count, crashes, false));
    }

    /// Stores that `crashes` processes have crashed with command `count` in flight, and that the
    /// command is not started yet. If this process crashes before the start, the command is not the
    /// cause.
    pub(crate) fn store_suspect(&self, qid: u16, count: u32, crashes: u8) {
        self.store(qid, TRYING, pack_trying(count, crashes, true));
    }

    /// Stores that the commands of the queue are not started one at a time.
    pub(crate) fn clear_trying(&self, qid: u16) {
        self.store(qid, TRYING, 0);
    }

    /// Stores the position of a submission queue, and the number of completions posted so far.
    #[inline]
    pub(crate) fn store_sq(&self, qid: u16, position: Position, completions: u64) {
        self.store(qid, SQ_COVERS, layout::pack_covers(position.at, completions));
        self.store(qid, SQ, position.pack());
    }

    /// Stores the position of a completion queue.
    #[inline]
    pub(crate) fn store_cq(&self, qid: u16, position: Position) {
        self.store(qid, CQ, position.pack());
    }

    /// Stores the doorbell state of a submission queue. Called when the queue was created or its
    /// doorbell got a shadow entry.
    pub(crate) fn store_sq_doorbell(&self, qid: u16, state: DoorbellState) {
        self.store(qid, SQ_DOORBELL, layout::pack_doorbell(state));
    }

    /// Stores the doorbell state of a completion queue.
    pub(crate) fn store_cq_doorbell(&self, qid: u16, state: DoorbellState) {
        self.store(qid, CQ_DOORBELL, layout::pack_doorbell(state));
    }

    #[inline]
    fn store(&self, qid: u16, word: usize, value: u64) {
        let _ = self.positions.store_u64_release(usize::from(qid) * LINE + word, value);
    }
}

/// Journal of a dead process.
#[derive(Debug)]
pub(crate) struct RecoveredJournal {
    positions: SharedBytes,
    death: CauseOfDeath,
    /// Recorded commands by submission queue, oldest first.
    commands: BTreeMap<u16, Vec<RecoveredCommand>>,
}

impl RecoveredJournal {
    /// Reads a journal. `records` and `generation` are those of the controller that wrote it, and
    /// `death` is the cause of death of its process.
    pub(crate) fn read(
        file: &OwnedFd,
        records: usize,
        generation: u64,
        death: CauseOfDeath,
    ) -> io::Result<Self> {
        let len = usize::try_from(FileStatus::of(file)?.len).unwrap_or(usize::MAX);
        let positions = map(file, 0, POSITIONS)?;
        let mut commands: BTreeMap<u16, Vec<RecoveredCommand>> = BTreeMap::new();
        let bytes = table_bytes(records);
        let mut at = POSITIONS;
        while bytes != 0 && at + bytes <= len {
            // Most tables were never written. They are skipped, because reading a hole would
            // allocate memory.
            if has_data(file, at as u64, bytes as u64) {
                let table = map(file, at, bytes)?;
                for command in (0..records).filter_map(|nth| record(&table, nth, generation, death))
                {
                    commands.entry(command.sqid).or_default().push(command);
                }
            }
            at += bytes;
        }
        Ok(Self { positions, death, commands })
    }

    fn word(&self, qid: u16, word: usize) -> u64 {
        self.positions.load_u64_acquire(usize::from(qid) * LINE + word).unwrap_or(0)
    }

    /// Position and doorbell of a submission queue.
    pub(crate) fn sq(&self, qid: u16) -> (Position, DoorbellState) {
        let position = Position::unpack(self.word(qid, SQ));
        (position, unpack_doorbell(self.word(qid, SQ_DOORBELL), position.truth))
    }

    /// Number of processes that have crashed while starting command `count`, the next one of a
    /// submission queue.
    pub(crate) fn crashes_with(&self, qid: u16, count: u32) -> u8 {
        unpack_trying(self.word(qid, TRYING), count, self.death).unwrap_or(0)
    }

    /// True if the process crashed by a fault, which one of its commands may have caused.
    pub(crate) fn is_of_a_fault(&self) -> bool {
        self.death == CauseOfDeath::Fault
    }

    /// Position and doorbell of a completion queue.
    pub(crate) fn cq(&self, qid: u16) -> (Position, DoorbellState) {
        let position = Position::unpack(self.word(qid, CQ));
        (position, unpack_doorbell(self.word(qid, CQ_DOORBELL), position.truth))
    }

    /// Processes a completion that the dead process has posted, number `nth` of its completion
    /// queue: removes the command's record, and advances `position` of the submission queue of
    /// `size` entries.
    pub(crate) fn posted(&mut self, cqe: &Cqe, nth: u64, size: RingSize, position: &mut Position) {
        let word = self.word(cqe.sq_id, SQ_COVERS);
        // If the stored position covers the completion, the position may be ahead of the head in
        // the completion.
        let is_covered = covers(word, self.sq(cqe.sq_id).0.at, nth);
        if let Some(head) = size.position(u32::from(cqe.sq_head)).filter(|_| !is_covered) {
            let further = size.distance(position.at, head);
            *position =
                Position { at: head, count: position.count + u64::from(further), ..*position };
        }
        let Some(commands) = self.commands.get_mut(&cqe.sq_id) else { return };
        // A host may reuse an identifier as soon as it has seen the completion. The newer command
        // with this identifier was not yet fetched at `position`, so its age is 0 or less.
        let age = |command: &RecoveredCommand| age(*position, command);
        let is_it = |command: &&RecoveredCommand| command.sqe.cid == cqe.cid && age(command) > 0;
        let oldest = commands.iter().filter(is_it).max_by_key(|command| age(command));
        if let Some(count) = oldest.map(|command| command.count) {
            commands.retain(|command| command.count != count);
        }
    }

    /// Takes the recorded commands of queue `sqid` that have to be executed again, oldest first.
    /// `position` is the position of the queue.
    pub(crate) fn take(&mut self, sqid: u16, position: Position) -> Vec<RecoveredCommand> {
        let mut commands = self.commands.remove(&sqid).unwrap_or_default();
        // Commands that come after `position` in the queue will be fetched again, so their records
        // are not used.
        commands.retain(|command| age(position, command) > 0);
        commands.sort_by_key(|command| std::cmp::Reverse(age(position, command)));
        // If the process crashed while it moved a record, the command has two equal records.
        commands.dedup_by_key(|command| command.count);
        commands
    }
}

/// Age of a command: number of commands that were fetched from its queue from this command on,
/// including it, until the queue reached `position`. The age is 0 or less if the command comes
/// after `position`.
fn age(position: Position, command: &RecoveredCommand) -> i32 {
    (position.count as u32).wrapping_sub(command.count) as i32
}

/// I/O command in flight at a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct InFlightCommand {
    /// Identifier that no other command of the controller has: queue, number of the command in the
    /// queue, and number of resets.
    pub id: u64,
    /// Namespace identifier; FFFFFFFFh for a command for all namespaces.
    pub nsid: u32,
    /// Opcode.
    pub opcode: u8,
}

impl InFlightCommand {
    /// True if the storage may work on the command for long, because the maximum transfer size does
    /// not limit the command's range or amount of data: Dataset Management, Write Zeroes, Verify,
    /// Copy and Zone Management Send.
    #[must_use]
    pub fn may_take_long(&self) -> bool {
        matches!(
            NvmOpcode::try_from(self.opcode),
            Ok(NvmOpcode::DatasetManagement
                | NvmOpcode::WriteZeroes
                | NvmOpcode::Verify
                | NvmOpcode::Copy
                | NvmOpcode::ZoneManagementSend)
        )
    }
}

/// True if the command with this identifier was fetched after `generation` resets.
pub(crate) fn is_of(id: u64, generation: u64) -> bool {
    id >> GENERATION_SHIFT == key(generation, 0, 0) >> GENERATION_SHIFT
}

/// Decodes a record. `None` unless it belongs to an I/O command that was started.
fn in_flight(record: &[u8], generation: u64) -> Option<InFlightCommand> {
    let word = u64::from_le_bytes(*record.first_chunk()?);
    let (sqid, count, _) = unpack(word, generation, CauseOfDeath::Killed)?;
    let (opcode, nsid) = (record.get(8)?, record.get(8 + NSID_AT..)?.first_chunk()?);
    let is_started = word & WAITS == 0 && sqid != 0;
    is_started.then(|| InFlightCommand {
        id: key(generation, sqid, count),
        nsid: u32::from_le_bytes(*nsid),
        opcode: *opcode,
    })
}

/// Position of the namespace identifier in a submission queue entry.
const NSID_AT: usize = 4;

/// Next range of the file, at or after `at`, that has allocated memory.
fn data_extent(file: &OwnedFd, at: u64) -> Option<(u64, u64)> {
    let from = rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)).ok()?;
    let to = rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(from)).ok()?;
    Some((from, to))
}

fn read_at(file: &OwnedFd, mut bytes: &mut [u8], mut at: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let len = rustix::io::pread(file, &mut *bytes, at)?;
        if len == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        bytes = &mut bytes[len..];
        at += len as u64;
    }
    Ok(())
}

fn has_data(file: &OwnedFd, from: u64, len: u64) -> bool {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(from)) {
        Ok(at) => at < from + len,
        Err(_) => false,
    }
}

fn record(
    table: &SharedBytes,
    nth: usize,
    generation: u64,
    death: CauseOfDeath,
) -> Option<RecoveredCommand> {
    let at = nth * RECORD;
    let found = table.load_u64_acquire(at).filter(|found| found & VALID != 0)?;
    // Records of other generations, from before a controller reset, are ignored.
    let (sqid, count, crashes) = unpack(found, generation, death)?;
    let sqe = table.read(at + 8)?;
    let decision = if found & DECIDED != 0 { Decision::unpack(&sqe) } else { None };
    Some(RecoveredCommand { sqid, count, crashes, sqe, decision })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    /// The commands in flight of the requested generation are found. The test prints the time for
    /// one journal: the scanner of stalled disks reads the journal of each controller with a
    /// client.
    #[test]
    fn commands_in_flight_are_found_in_many_journals() {
        const JOURNALS: usize = 100;
        const COMMANDS: u32 = 32;
        let write = || {
            let journal = Journal::new(2, 256).unwrap();
            for worker in 0..2 {
                let mut part = journal.part(worker, 1).unwrap();
                (0..COMMANDS).for_each(|tag| part.record(tag, 1, tag, &Sqe::default()));
            }
            journal
        };
        let journals: Vec<_> = (0..JOURNALS).map(|_| write()).collect();
        let began = Instant::now();
        for journal in &journals {
            assert_eq!(journal.in_flight(1).unwrap().len(), 2 * COMMANDS as usize);
        }
        println!("{:?} per journal", began.elapsed() / JOURNALS as u32);
        // After a reset, these are commands of another generation.
        assert!(journals[0].in_flight(2).unwrap().is_empty());
        let one = journals[0].in_flight(1).unwrap()[0];
        assert!(is_of(one.id, 1) && !is_of(one.id, 2));
        let discard = InFlightCommand { opcode: NvmOpcode::DatasetManagement as u8, ..one };
        assert!(discard.may_take_long() && !one.may_take_long());
    }
}
