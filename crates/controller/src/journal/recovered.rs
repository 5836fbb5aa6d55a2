//! The journal of a process that is dead, read.

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

/// The journal of a process that is dead.
#[derive(Debug)]
pub(crate) struct RecoveredJournal {
    positions: SharedBytes,
    death: Death,
    /// By submission queue, the oldest first.
    commands: BTreeMap<u16, Vec<RecoveredCommand>>,
}

impl RecoveredJournal {
    /// Reads it. `records` and `generation` are those of the controller that wrote it, and `death`
    /// is how its process has died.
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
            // Most tables were never written, and reading a hole would fill it.
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

    /// The position of a submission queue, and its doorbell.
    pub(crate) fn sq(&self, qid: u16) -> (Position, DoorbellState) {
        let position = Position::unpack(self.word(qid, SQ));
        (position, unpack_doorbell(self.word(qid, SQ_DOORBELL), position.truth))
    }

    /// How many processes have died that were starting command `count` of a submission queue, which
    /// is at this command.
    pub(crate) fn deaths_with(&self, qid: u16, count: u32) -> u8 {
        unpack_trying(self.word(qid, TRYING), count, self.death).unwrap_or(0)
    }

    /// Whether one of its commands may be what the process has died of.
    pub(crate) fn is_of_a_fault(&self) -> bool {
        self.death == Death::Fault
    }

    /// The position of a completion queue, and its doorbell.
    pub(crate) fn cq(&self, qid: u16) -> (Position, DoorbellState) {
        let position = Position::unpack(self.word(qid, CQ));
        (position, unpack_doorbell(self.word(qid, CQ_DOORBELL), position.truth))
    }

    /// Takes the completion of a command into account that was posted, the `nth` of its queue: it
    /// is not to be done again, and the submission queue, of `size` entries, is at `position` then.
    pub(crate) fn posted(&mut self, cqe: &Cqe, nth: u64, size: RingSize, position: &mut Position) {
        let word = self.word(cqe.sq_id, SQ_COVERS);
        // What is stored may be further already than the completion says.
        let is_covered = covers(word, self.sq(cqe.sq_id).0.at, nth);
        if let Some(head) = size.position(u32::from(cqe.sq_head)).filter(|_| !is_covered) {
            let further = size.distance(position.at, head);
            *position =
                Position { at: head, count: position.count + u64::from(further), ..*position };
        }
        let Some(commands) = self.commands.get_mut(&cqe.sq_id) else { return };
        // A host may use an identifier again as soon as it has seen the completion. What was
        // fetched then is none of those that had been fetched when the completion was posted.
        let age = |command: &RecoveredCommand| age(*position, command);
        let is_it = |command: &&RecoveredCommand| command.sqe.cid == cqe.cid && age(command) > 0;
        let oldest = commands.iter().filter(is_it).max_by_key(|command| age(command));
        if let Some(count) = oldest.map(|command| command.count) {
            commands.retain(|command| command.count != count);
        }
    }

    /// What is to be done again of queue `sqid`, which is at `position`; the oldest first.
    pub(crate) fn take(&mut self, sqid: u16, position: Position) -> Vec<RecoveredCommand> {
        let mut commands = self.commands.remove(&sqid).unwrap_or_default();
        // What comes after it is fetched again.
        commands.retain(|command| age(position, command) > 0);
        commands.sort_by_key(|command| std::cmp::Reverse(age(position, command)));
        // One that was being moved has two.
        commands.dedup_by_key(|command| command.count);
        commands
    }
}

/// How many commands of its queue were fetched from this one on, if the queue is at `position`; not
/// more than 0 if it was not fetched yet.
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
    // Of before a reset: it concerns nobody.
    let (sqid, count, deaths) = unpack(found, generation, death)?;
    let sqe = table.read(at + 8)?;
    let decision = if found & DECIDED != 0 { Decision::unpack(&sqe) } else { None };
    Some(RecoveredCommand { sqid, count, deaths, sqe, decision })
}
