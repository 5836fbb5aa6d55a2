//! Layout of the journal file.

use super::decision::Decision;
use crate::saved::Death;
use shadowbell_memory::{Mapping, Protection, SharedBytes};
use shadowbell_spec::Sqe;
use std::io;
use std::os::fd::AsFd;

/// Bytes of the queue positions. Each queue identifier has a cache line of its own, so that queues
/// of two I/O threads never share one.
pub(super) const POSITIONS: usize = 8192;
pub(super) const LINE: usize = 64;
pub(super) const SQ: usize = 0;
pub(super) const SQ_DOORBELL: usize = 8;
pub(super) const CQ: usize = 16;
pub(super) const CQ_DOORBELL: usize = 24;
pub(super) const SQ_COVERS: usize = 32;
pub(super) const TRYING: usize = 40;
/// Maximum number of queue identifiers.
pub(crate) const QUEUES: usize = POSITIONS / LINE;

/// Bytes of a record: its key and the submission queue entry.
pub(super) const RECORD: usize = 8 + Sqe::SIZE;
/// Records beyond the request quota: the last batch is fetched as a whole, and long commands
/// consist of several requests.
pub(super) const BEYOND_QUOTA: usize = 2048;

/// Maximum number of commands fetched from one queue before other queues get their turn: round
/// robin with a burst (Base 2.1, "Round Robin Arbitration"). The queue's position is stored after a
/// burst, so an unrecorded command that crashes the process is one of this many.
pub(crate) const BURST: u32 = 64;

/// Key flag: the record is valid.
pub(super) const VALID: u64 = 1 << 63;
/// Key flag: this process has not started the command yet.
pub(super) const WAITS: u64 = 1 << 47;
/// Key flag: the entry contains a decision about the command.
pub(super) const DECIDED: u64 = 1 << 46;
/// Position of the crash count in the key: three bits, which a queue identifier does not need.
const DEATHS: u32 = 40;
pub(super) const MOST_DEATHS: u8 = 7;

/// Key of a record: command number `count` of queue `sqid` after `generation` resets.
pub(super) fn key(generation: u64, sqid: u16, count: u32) -> u64 {
    VALID | (generation & 0x7fff) << 48 | u64::from(sqid) << 32 | u64::from(count)
}

/// Key bits for the number of processes that have crashed with a command.
pub(super) fn pack_deaths(deaths: u8) -> u64 {
    u64::from(deaths.min(MOST_DEATHS)) << DEATHS
}

/// Decodes a key: queue, command number, number of crashes; `None` for a record of another
/// generation. `death` is the cause of death of the process that has written it.
pub(super) fn unpack(found: u64, generation: u64, death: Death) -> Option<(u16, u32, u8)> {
    let (sqid, count) = ((found >> 32 & 0xff) as u16, found as u32);
    let deaths = (found >> DEATHS) as u8 & MOST_DEATHS;
    if found & !(WAITS | DECIDED) != key(generation, sqid, count) | pack_deaths(deaths) {
        return None;
    }
    // The dead process had started the command, unless WAITS is set.
    let had_it = found & WAITS == 0;
    let counts = had_it && death == Death::Fault;
    Some((sqid, count, (deaths + u8::from(counts)).min(MOST_DEATHS)))
}

/// Encodes the command of a queue that is being started (or waits for that), with the number of
/// processes that have crashed with it.
pub(super) fn pack_trying(count: u32, deaths: u8, waits: bool) -> u64 {
    let waits = if waits { WAITS } else { 0 };
    VALID | waits | u64::from(deaths.min(MOST_DEATHS)) << 32 | u64::from(count)
}

/// Number of processes that have crashed with command `count`; `None` if the word is about another
/// command. `death` is the cause of death of the process that has written it.
pub(super) fn unpack_trying(word: u64, count: u32, death: Death) -> Option<u8> {
    let counts = word & WAITS == 0 && death == Death::Fault;
    let deaths = (word >> 32) as u8 & MOST_DEATHS;
    (word & VALID != 0 && word as u32 == count).then_some(deaths + u8::from(counts))
}

/// Command that was fetched and not completed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecoveredCommand {
    pub(crate) sqid: u16,
    /// Number of commands fetched from its queue before it.
    pub(crate) count: u32,
    /// Number of consecutive processes that have crashed with the command in flight.
    pub(crate) deaths: u8,
    pub(crate) sqe: Sqe,
    /// Decision about the command, if any.
    pub(crate) decision: Option<Decision>,
}

pub(super) fn table_bytes(records: usize) -> usize {
    (records * RECORD).next_multiple_of(4096)
}

pub(super) fn map(file: &impl AsFd, offset: usize, len: usize) -> io::Result<SharedBytes> {
    let mapping = Mapping::from_fd(file, offset as u64, len as u64, Protection::ReadWrite);
    Ok(mapping.map_err(io::Error::other)?.bytes())
}
