//! All references of an image: repair of its reference counts, and detection of a file that is too
//! short.
//!
//! The order of writes in this crate needs no repair. But other programs mark an image as dirty
//! while its reference counts are out of date (QEMU's `lazy_refcounts`). Then all references are
//! counted, in one pass over the tables, before anything else is written.

use crate::format::Format;
use crate::header::{be32, be64};
use crate::snapshot::Snapshot;
use crate::storage::FileStorage;
use crate::tables::{COMPRESSED, COPIED, Cache, Layout, OFFSET, read_table};
use std::io;
use std::ops::Range;

/// Maximum number of clusters of a file whose references are counted: 256 MiB of memory.
const MOST: u64 = 64 << 20;

/// Calls `found` for the clusters of each reference: of the header, of tables and of data.
/// References that are not aligned are skipped, because accesses to them fail.
fn references(
    format: &Format,
    snapshots: &[Snapshot],
    found: &mut dyn FnMut(Range<u64>),
) -> io::Result<()> {
    let (header, file, bits) = (&format.header, &format.file, format.layout.bits);
    let mut add = |offset: u64, len: u64| {
        if offset.is_multiple_of(1 << bits) {
            found(offset >> bits..offset.saturating_add(len).div_ceil(1 << bits));
        }
    };
    add(0, 1);
    add(header.refcounts.offset, header.refcounts.entries * 8);
    let blocks: Vec<u64> = format.meta().counts.blocks().collect();
    blocks.into_iter().for_each(|block| add(block, 1));
    add(header.snapshots.0, Snapshot::table_len(snapshots));
    bitmaps(format, &mut add)?;
    let tables = [header.l1].into_iter().chain(snapshots.iter().map(|snapshot| snapshot.l1));
    for l1 in tables {
        add(l1.offset, l1.entries * 8);
        for entry in read_table(file, l1.offset, l1.entries)? {
            let table = entry & OFFSET;
            if table == 0 {
                continue;
            }
            add(table, 1);
            if table >= file.len() {
                continue;
            }
            let words = format.layout.entry / 8;
            let entries = read_table(file, table, format.layout.per_table() * words)?;
            for entry in entries.into_iter().step_by(words as usize) {
                if entry & COMPRESSED != 0 {
                    let clusters = format.layout.compressed(entry).0;
                    add(clusters.start << bits, (clusters.end - clusters.start) << bits);
                } else if entry & OFFSET != 0 && format.data_file.is_none() {
                    add(entry & OFFSET, 1);
                }
            }
        }
    }
    Ok(())
}

/// Reports the clusters of QEMU's persistent bitmaps.
fn bitmaps(format: &Format, add: &mut dyn FnMut(u64, u64)) -> io::Result<()> {
    let Some((directory, count)) = format.header.bitmaps else { return Ok(()) };
    let mut at = directory;
    for _ in 0..count {
        let mut entry = [0; 24];
        if at >= format.file.len() {
            break;
        }
        format.file.read(&mut entry, at)?;
        let (table, entries) = (be64(&entry, 0) & OFFSET, u64::from(be32(&entry, 8)));
        add(table, entries * 8);
        if table + entries * 8 <= format.file.len() {
            for cluster in read_table(&format.file, table, entries)? {
                if cluster & OFFSET != 0 {
                    add(cluster & OFFSET, 1);
                }
            }
        }
        let name = u64::from(be32(&entry, 16) & 0xffff);
        at += (24 + name + u64::from(be32(&entry, 20))).next_multiple_of(8);
    }
    add(directory, at - directory);
    Ok(())
}

/// Length that the file must have for its references. They are looked up if clusters are counted
/// beyond the end of the file, or `always`.
pub(crate) fn needed_len(
    format: &Format,
    snapshots: &[Snapshot],
    always: bool,
) -> io::Result<Option<u64>> {
    let bits = format.layout.bits;
    let end = format.file.len().div_ceil(1 << bits);
    let top = {
        let meta = &mut *format.meta();
        meta.counts.top(&format.file, &mut meta.cache)?
    };
    if !format.file.grows || top <= end && !always {
        return Ok(None);
    }
    let mut last = 0;
    references(format, snapshots, &mut |clusters| last = last.max(clusters.end))?;
    Ok((last > end).then(|| last.saturating_mul(1 << bits)))
}

/// Counts all references, and writes the counts. Returns the defect if the image is damaged.
/// Afterwards, the image has to be marked as clean.
pub(crate) fn rebuild(
    format: &Format,
    snapshots: &[Snapshot],
) -> io::Result<Result<(), &'static str>> {
    let (file, bits) = (&format.file, format.layout.bits);
    let end = file.len().div_ceil(1 << bits);
    if end > MOST {
        return Ok(Err("it has too many clusters for a repair of its reference counts"));
    }
    let mut counts = vec![0_u32; end as usize];
    references(format, snapshots, &mut |clusters| {
        for cluster in clusters.start..clusters.end.min(end) {
            counts[cluster as usize] = counts[cluster as usize].saturating_add(1);
        }
    })?;
    let meta = &mut *format.meta();
    let blocks: Vec<u64> = meta.counts.blocks().collect();
    if counts.first() != Some(&1) || blocks.iter().any(|at| counts[(at >> bits) as usize] != 1) {
        return Ok(Err("it refers to its own tables as data"));
    }
    if counts.iter().any(|count| u64::from(*count) > meta.counts.max()) {
        return Ok(Err("it has more references to a cluster than can be counted"));
    }
    let used = counts.iter().rposition(|count| *count != 0).map_or(0, |last| last + 1);
    let added = meta.counts.cover(file, &mut meta.cache, used as u64)?;
    counts.resize(counts.len().max(added.end as usize), 0);
    counts[added.start as usize..added.end as usize].fill(1);
    let all = 0..counts.len() as u64;
    meta.counts.update(file, &mut meta.cache, all, &mut |nth, _| counts[nth as usize].into())?;
    meta.counts.restart();
    file.sync()?;
    // Flags of entries whose clusters have one reference.
    let is_one = |at: u64| counts.get((at >> bits) as usize) == Some(&1);
    for nth in 0..meta.l1.len() {
        let (old, table) = (meta.l1[nth], meta.l1[nth] & OFFSET);
        if table == 0 || !table.is_multiple_of(1 << bits) || table >= file.len() {
            continue;
        }
        let new = table | if is_one(table) { COPIED } else { 0 };
        if new != old {
            file.patch(&new.to_be_bytes(), format.header.l1.offset + nth as u64 * 8)?;
            meta.l1[nth] = new;
        }
        if format.data_file.is_none() {
            mark_entries(file, &mut meta.cache, &format.layout, table, &is_one)?;
        }
    }
    file.sync()?;
    Ok(Ok(()))
}

/// Sets the flags of the entries of an L2 table.
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
