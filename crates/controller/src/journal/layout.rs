//! Where things are in the file of a journal.

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
/// Queue identifiers that there is room for.
pub(crate) const QUEUES: usize = POSITIONS / LINE;

/// Bytes of a record: which command it is, and its submission queue entry.
pub(super) const RECORD: usize = 8 + Sqe::SIZE;
/// More requests than the quota says may be under way: the last batch is fetched whole, and long
/// commands are several requests.
pub(super) const BEYOND_QUOTA: usize = 2048;

/// A record is there.
pub(super) const VALID: u64 = 1 << 63;

/// The key of a record: which command of which queue, after so many resets.
pub(super) fn key(generation: u64, sqid: u16, count: u32) -> u64 {
    VALID | (generation & 0x7fff) << 48 | u64::from(sqid) << 32 | u64::from(count)
}

/// A command that was fetched and had not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecoveredCommand {
    pub(crate) sqid: u16,
    /// How many of its queue were fetched before it.
    pub(crate) count: u32,
    pub(crate) sqe: Sqe,
}

pub(super) fn table_bytes(records: usize) -> usize {
    (records * RECORD).next_multiple_of(4096)
}

pub(super) fn map(file: &impl AsFd, offset: usize, len: usize) -> io::Result<SharedBytes> {
    let mapping = Mapping::from_fd(file, offset as u64, len as u64, Protection::ReadWrite);
    Ok(mapping.map_err(io::Error::other)?.bytes())
}
