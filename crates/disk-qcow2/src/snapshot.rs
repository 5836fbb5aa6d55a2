//! Internal snapshots. Writes do not change them: a cluster that belongs to a snapshot is copied
//! before it is written.

use crate::header::{Header, Table, be32, be64};
use crate::storage::FileStorage;
use crate::tables::damaged;
use std::io;

/// Length in bytes of a snapshot's entry without its variable parts.
const ENTRY: u64 = 40;
/// Maximum length of the snapshot table, and of an L1 table in bytes, as in QEMU.
const MAX_TABLE: u64 = 1 << 30;
const MAX_L1: u64 = 32 << 20;

/// Internal snapshot.
pub(crate) struct Snapshot {
    pub(crate) l1: Table,
    /// Length of the snapshot's entry in the snapshot table, in bytes.
    len: u64,
}

impl Snapshot {
    /// Reads the snapshot table.
    pub(crate) fn read_all(file: &FileStorage, header: &Header) -> io::Result<Vec<Self>> {
        let (mut at, count) = header.snapshots;
        let mut all = Vec::new();
        for _ in 0..count {
            let mut entry = [0; ENTRY as usize];
            file.read(&mut entry, at)?;
            let l1 = Table { offset: be64(&entry, 0), entries: be32(&entry, 8).into() };
            let names = u64::from(be32(&entry, 12) >> 16) + u64::from(be32(&entry, 12) & 0xffff);
            let len = (ENTRY + u64::from(be32(&entry, 36)) + names).next_multiple_of(8);
            let end = l1.offset.checked_add(l1.entries * 8);
            if !l1.offset.is_multiple_of(1 << header.cluster_bits)
                || l1.entries * 8 > MAX_L1
                || end.is_none_or(|end| end > file.len())
                || at + ENTRY > file.len()
                || at + len - header.snapshots.0 > MAX_TABLE
            {
                return Err(damaged("an invalid snapshot"));
            }
            all.push(Self { l1, len });
            at += len;
        }
        Ok(all)
    }

    /// Length of the snapshot table in bytes.
    pub(crate) fn table_len(snapshots: &[Self]) -> u64 {
        snapshots.iter().map(|snapshot| snapshot.len).sum()
    }
}
