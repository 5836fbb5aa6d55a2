//! Reader for the journal of a dead process.

use super::decision::Decision;
use super::layout::{
    CQ, CQ_DOORBELL, DECIDED, LINE, POSITIONS, RECORD, RecoveredCommand, SQ, SQ_COVERS,
    SQ_DOORBELL, TRYING, VALID, map, table_bytes, unpack, unpack_trying,
};
use super::position::{Position, covers, unpack_doorbell};
use crate::saved::Death;
use shadowbell_doorbell::{DoorbellState, RingSize};
use shadowbell_memory::{FileStatus, SharedBytes};
use shadowbell_spec::Cqe;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;

/// Journal of a dead process.
#[derive(Debug)]
pub(crate) struct RecoveredJournal {
    positions: SharedBytes,
    death: Death,
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
        death: Death,
    ) -> io::Result<Self> {
        let len = usize::try_from(FileStatus::of(file)?.len).unwrap_or(usize::MAX);
        let positions = map(file, 0, POSITIONS)?;
        let mut commands: BTreeMap<u16, Vec<RecoveredCommand>> = BTreeMap::new();
        let bytes = table_bytes(records);
        let mut at = POSITIONS;
        while bytes != 0 && at + bytes <= len {
            // Most tables were never written, and reading a hole of the file would allocate it.
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

    /// Number of processes that have crashed while starting command `count` of a submission queue,
    /// which is its next command.
    pub(crate) fn deaths_with(&self, qid: u16, count: u32) -> u8 {
        unpack_trying(self.word(qid, TRYING), count, self.death).unwrap_or(0)
    }

    /// True if the process crashed by a fault, of which one of its commands may be the cause.
    pub(crate) fn is_of_a_fault(&self) -> bool {
        self.death == Death::Fault
    }

    /// Position and doorbell of a completion queue.
    pub(crate) fn cq(&self, qid: u16) -> (Position, DoorbellState) {
        let position = Position::unpack(self.word(qid, CQ));
        (position, unpack_doorbell(self.word(qid, CQ_DOORBELL), position.truth))
    }

    /// Processes a completion that the dead process has posted, number `nth` of its queue: removes
    /// the command's record, and advances `position` of its submission queue of `size` entries.
    pub(crate) fn posted(&mut self, cqe: &Cqe, nth: u64, size: RingSize, position: &mut Position) {
        let word = self.word(cqe.sq_id, SQ_COVERS);
        // The stored position may already be further than the completion's head.
        let is_covered = covers(word, self.sq(cqe.sq_id).0.at, nth);
        if let Some(head) = size.position(u32::from(cqe.sq_head)).filter(|_| !is_covered) {
            let further = size.distance(position.at, head);
            *position =
                Position { at: head, count: position.count + u64::from(further), ..*position };
        }
        let Some(commands) = self.commands.get_mut(&cqe.sq_id) else { return };
        // A host may reuse an identifier as soon as it has seen the completion. A command fetched
        // after that has not been fetched yet at `position`, so its age is not above 0.
        let age = |command: &RecoveredCommand| age(*position, command);
        let is_it = |command: &&RecoveredCommand| command.sqe.cid == cqe.cid && age(command) > 0;
        let oldest = commands.iter().filter(is_it).max_by_key(|command| age(command));
        if let Some(count) = oldest.map(|command| command.count) {
            commands.retain(|command| command.count != count);
        }
    }

    /// Takes the commands of queue `sqid` to execute again, oldest first; `position` is the
    /// queue's.
    pub(crate) fn take(&mut self, sqid: u16, position: Position) -> Vec<RecoveredCommand> {
        let mut commands = self.commands.remove(&sqid).unwrap_or_default();
        // Commands behind the position are fetched again.
        commands.retain(|command| age(position, command) > 0);
        commands.sort_by_key(|command| std::cmp::Reverse(age(position, command)));
        // A command whose record was being moved has two records.
        commands.dedup_by_key(|command| command.count);
        commands
    }
}

/// Number of commands fetched since this one (inclusive) if the queue is at `position`; 0 or less
/// if it is not fetched yet.
fn age(position: Position, command: &RecoveredCommand) -> i32 {
    (position.count as u32).wrapping_sub(command.count) as i32
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
    death: Death,
) -> Option<RecoveredCommand> {
    let at = nth * RECORD;
    let found = table.load_u64_acquire(at).filter(|found| found & VALID != 0)?;
    // Records from before a reset are ignored.
    let (sqid, count, deaths) = unpack(found, generation, death)?;
    let sqe = table.read(at + 8)?;
    let decision = if found & DECIDED != 0 { Decision::unpack(&sqe) } else { None };
    Some(RecoveredCommand { sqid, count, deaths, sqe, decision })
}
