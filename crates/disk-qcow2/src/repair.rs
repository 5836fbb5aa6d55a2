//! Scan of all references of an image, to repair its reference counts and to detect a file that is
//! too short.
//!
//! Images that only this crate has written never need a repair. But other programs mark an image as
//! dirty while its reference counts are out of date (QEMU's `lazy_refcounts`). In a dirty image,
//! all references are counted before anything else is written. Each table is read once, in the
//! order of the file, even if many snapshots share it. [`Check`](crate::check::Check) runs the scan
//! on a thread.

use crate::format::Format;
use crate::header::{Table, be64};
use crate::snapshot::Snapshot;
use crate::storage::FileStorage;
use crate::tables::{
    COMPRESSED, COPIED, Cache, Layout, OFFSET, damaged, for_each_entry, read_table,
};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

/// Maximum number of clusters of an image that is repaired. Each takes two bytes of memory.
const MOST: u64 = 64 << 20;
/// Maximum number of L2 tables, including those of snapshots.
const MOST_TABLES: usize = 6 << 20;

/// Scan of all references of an image.
pub(crate) struct Scan<'a> {
    pub(crate) format: &'a Format,
    pub(crate) snapshots: &'a [Snapshot],
    /// Function that returns false if the scan has to end.
    pub(crate) goes_on: &'a dyn Fn() -> bool,
}

impl Scan<'_> {
    /// Calls `found` for each reference in the header, a table or a snapshot, with the clusters
    /// that it refers to and the number of times that it occurs. References that are not aligned
    /// are skipped, because accesses to them fail.
    fn references(&self, found: &mut dyn FnMut(Range<u64>, u16)) -> io::Result<()> {
        let format = self.format;
        let (header, file, bits) = (&format.header, &format.file, format.layout.bits);
        let mut add = |offset: u64, len: u64, times: u16| {
            // A table without entries is no reference, whatever its offset is.
            if len != 0 && offset.is_multiple_of(1 << bits) {
                found(offset >> bits..offset.saturating_add(len).div_ceil(1 << bits), times);
            }
        };
        add(0, 1, 1);
        add(header.refcounts.offset, header.refcounts.entries * 8, 1);
        format.meta().counts.blocks().for_each(|block| add(block, 1, 1));
        add(header.snapshots.0, Snapshot::table_len(self.snapshots), 1);
        // L2 tables, and how many L1 tables refer to each.
        let mut tables: BTreeMap<u64, u16> = BTreeMap::new();
        for l1 in [header.l1].into_iter().chain(self.snapshots.iter().map(|it| it.l1)) {
            self.check_end()?;
            add(l1.offset, l1.entries * 8, 1);
            let is_whole = for_each_entry(file, l1, |entry| {
                if entry & OFFSET != 0 {
                    let times = tables.entry(entry & OFFSET).or_default();
                    *times = times.saturating_add(1);
                }
                tables.len() <= MOST_TABLES
            })?;
            if !is_whole {
                return Err(damaged("more tables than a scan of them supports"));
            }
        }
        tables.retain(|at, _| at.is_multiple_of(1 << bits));
        if tables.len() as u64 > format.max_tables()? {
            return Err(damaged("more tables than fit into its file"));
        }
        let words = format.layout.entry / 8;
        for (at, times) in tables {
            add(at, 1, times);
            if at >= file.len() {
                continue;
            }
            self.check_end()?;
            let table = Table { offset: at, entries: format.layout.per_table() * words };
            for entry in read_table(file, table)?.into_iter().step_by(words as usize) {
                if entry & COMPRESSED != 0 {
                    let clusters = format.layout.compressed(entry).0;
                    add(clusters.start << bits, (clusters.end - clusters.start) << bits, times);
                } else if entry & OFFSET != 0 && format.data_file.is_none() {
                    add(entry & OFFSET, 1, times);
                }
            }
        }
        Ok(())
    }

    fn check_end(&self) -> io::Result<()> {
        match (self.goes_on)() {
            true => Ok(()),
            false => Err(io::ErrorKind::Interrupted.into()),
        }
    }

    /// Scans all references. Returns the number of references to each cluster of the file (only if
    /// `counts` is true), and the length in bytes that the file must have to contain all referenced
    /// clusters.
    pub(crate) fn run(&self, counts: bool) -> io::Result<(Vec<u16>, u64)> {
        let bits = self.format.layout.bits;
        let end = if counts { self.format.file.len().div_ceil(1 << bits) } else { 0 };
        if end > MOST {
            return Err(damaged("too many clusters for a repair of its reference counts"));
        }
        let (mut counts, mut last) = (vec![0_u16; end as usize], 0);
        self.references(&mut |clusters, times| {
            last = last.max(clusters.end);
            for cluster in clusters.start..clusters.end.min(end) {
                counts[cluster as usize] = counts[cluster as usize].saturating_add(times);
            }
        })?;
        Ok((counts, last.saturating_mul(1 << bits)))
    }

    /// Writes the counts to the refcount blocks, and sets the COPIED flag of the table entries
    /// whose cluster has the count 1. Returns a description if the image is damaged. Otherwise, the
    /// caller has to clear the dirty flag of the image.
    pub(crate) fn rebuild(&self, mut counts: Vec<u16>) -> io::Result<Result<(), &'static str>> {
        let format = self.format;
        let (file, bits) = (&format.file, format.layout.bits);
        let meta = &mut *format.meta();
        let is_one = |at: u64| counts.get((at >> bits) as usize) == Some(&1);
        if !is_one(0) || !meta.counts.blocks().all(is_one) {
            return Ok(Err("it refers to its own tables as data"));
        }
        let most = meta.counts.max().min(u64::from(u16::MAX) - 1);
        if counts.iter().any(|count| u64::from(*count) > most) {
            return Ok(Err("it has more references to a cluster than can be counted"));
        }
        let used = counts.iter().rposition(|count| *count != 0).map_or(0, |last| last + 1);
        let added = meta.counts.cover(file, &mut meta.cache, used as u64)?;
        if added.end > MOST {
            return Ok(Err("it has tables that are too far apart"));
        }
        counts.resize(counts.len().max(added.end as usize), 0);
        counts[added.start as usize..added.end as usize].fill(1);
        // All refcount blocks are updated, because some may count clusters beyond the end of the
        // file; these counts become 0.
        let all = 0..meta.counts.end_of_blocks();
        let count = &mut |nth: u64, _| counts.get(nth as usize).copied().map_or(0, u64::from);
        meta.counts.update(file, &mut meta.cache, all, count)?;
        meta.counts.restart();
        file.sync()?;
        // The flag COPIED is set in the entries whose clusters have one reference.
        let is_one = |at: u64| counts.get((at >> bits) as usize) == Some(&1);
        let l1 = format.header.l1;
        for at in (l1.offset..l1.offset + l1.entries * 8).step_by(8) {
            let old = meta.cache.number(file, at)?;
            let table = old & OFFSET;
            if table == 0 || !table.is_multiple_of(1 << bits) || table >= file.len() {
                continue;
            }
            self.check_end()?;
            let new = table | if is_one(table) { COPIED } else { 0 };
            if new != old {
                let change = |bytes: &mut [u8]| bytes.copy_from_slice(&new.to_be_bytes());
                meta.cache.change(file, at, 8, change)?;
            }
            if format.data_file.is_none() {
                mark_entries(file, &mut meta.cache, &format.layout, table, &is_one)?;
            }
        }
        file.sync()?;
        Ok(Ok(()))
    }
}

/// Sets or clears the flag COPIED in the entries of an L2 table.
fn mark_entries(
    file: &FileStorage,
    cache: &mut Cache,
    layout: &Layout,
    table: u64,
    is_one: &dyn Fn(u64) -> bool,
) -> io::Result<()> {
    for at in (table..table + layout.cluster()).step_by(cache.unit() as usize) {
        let unit = cache.unit();
        let (_, slice) = cache.slice(file, at)?;
        let mut new = slice.to_vec();
        for entry in new.chunks_mut(layout.entry as usize) {
            let old = be64(entry, 0);
            let flag = if old & OFFSET != 0 && is_one(old & OFFSET) { COPIED } else { 0 };
            if old & COMPRESSED == 0 {
                entry[..8].copy_from_slice(&(old & !COPIED | flag).to_be_bytes());
            }
        }
        if new[..] != slice[..] {
            cache.change(file, at, unit, |bytes| bytes.copy_from_slice(&new))?;
        }
    }
    Ok(())
}
