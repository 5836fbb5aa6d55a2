//! Where things are in the file of a journal.

use super::decision::Decision;
use crate::saved::Death;
use shadowbell_memory::{Mapping, Protection, SharedBytes};
use shadowbell_spec::Sqe;
use std::io;
use std::os::fd::AsFd;

/// Bytes of the positions of all queues. Each queue identifier has a cache line of its own, for
/// queues of two workers shall not share one.
pub(super) const POSITIONS: usize = 8192;
pub(super) const LINE: usize = 64;
pub(super) const SQ: usize = 0;
pub(super) const SQ_DOORBELL: usize = 8;
pub(super) const CQ: usize = 16;
pub(super) const CQ_DOORBELL: usize = 24;
pub(super) const SQ_COVERS: usize = 32;
pub(super) const TRYING: usize = 40;
/// Queue identifiers that there is room for.
pub(crate) const QUEUES: usize = POSITIONS / LINE;

/// Bytes of a record: which command it is, and its submission queue entry.
pub(super) const RECORD: usize = 8 + Sqe::SIZE;
/// More requests than the quota says may be under way: the last batch is fetched whole, and long
/// commands are several requests.
pub(super) const BEYOND_QUOTA: usize = 2048;

/// Commands fetched from one queue before the others get their turn: round robin with a burst
/// (Base 2.1, "Round Robin Arbitration"). The queue's position is stored after them, so a process
/// that dies with a command that is not recorded dies with one of so many.
pub(crate) const BURST: u32 = 64;

/// A record is there.
pub(super) const VALID: u64 = 1 << 63;
/// This process has not started the command yet.
pub(super) const WAITS: u64 = 1 << 47;
/// Something was decided of the command, and is in its entry.
pub(super) const DECIDED: u64 = 1 << 46;
/// How many processes have died that had started the command: three bits, of which a queue's
/// identifier needs none.
const DEATHS: u32 = 40;
pub(super) const MOST_DEATHS: u8 = 7;

/// The key of a record: which command of which queue, after so many resets.
pub(super) fn key(generation: u64, sqid: u16, count: u32) -> u64 {
    VALID | (generation & 0x7fff) << 48 | u64::from(sqid) << 32 | u64::from(count)
}

/// What is added to the key of a command with which so many processes have died.
pub(super) fn pack_deaths(deaths: u8) -> u64 {
    u64::from(deaths.min(MOST_DEATHS)) << DEATHS
}

/// The queue, the count, and how many processes have died with the command, if the record is one of
/// after so many resets. `death` is that of the process that has left it.
pub(super) fn unpack(found: u64, generation: u64, death: Death) -> Option<(u16, u32, u8)> {
    let (sqid, count) = ((found >> 32 & 0xff) as u16, found as u32);
    let deaths = (found >> DEATHS) as u8 & MOST_DEATHS;
    if found & !(WAITS | DECIDED) != key(generation, sqid, count) | pack_deaths(deaths) {
        return None;
    }
    // The process that has left this had it in hand, if it had come to that.
    let had_it = found & WAITS == 0;
    let counts = had_it && death == Death::Fault;
    Some((sqid, count, (deaths + u8::from(counts)).min(MOST_DEATHS)))
}

/// The command of a queue that is being started, or that waits for that, and how many processes
/// have died with it already.
pub(super) fn pack_trying(count: u32, deaths: u8, waits: bool) -> u64 {
    let waits = if waits { WAITS } else { 0 };
    VALID | waits | u64::from(deaths.min(MOST_DEATHS)) << 32 | u64::from(count)
}

/// How many processes have died with a command, if it is this one. `death` is that of the process
/// that has left it.
pub(super) fn unpack_trying(word: u64, count: u32, death: Death) -> Option<u8> {
    let counts = word & WAITS == 0 && death == Death::Fault;
    let deaths = (word >> 32) as u8 & MOST_DEATHS;
    (word & VALID != 0 && word as u32 == count).then_some(deaths + u8::from(counts))
}

/// A command that was fetched and had not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecoveredCommand {
    pub(crate) sqid: u16,
    /// How many of its queue were fetched before it.
    pub(crate) count: u32,
    /// How many processes have died that had it in hand, one after the other.
    pub(crate) deaths: u8,
    pub(crate) sqe: Sqe,
    /// What was decided of it.
    pub(crate) decision: Option<Decision>,
}

pub(super) fn table_bytes(records: usize) -> usize {
    (records * RECORD).next_multiple_of(4096)
}

pub(super) fn map(file: &impl AsFd, offset: usize, len: usize) -> io::Result<SharedBytes> {
    let mapping = Mapping::from_fd(file, offset as u64, len as u64, Protection::ReadWrite);
    Ok(mapping.map_err(io::Error::other)?.bytes())
}
