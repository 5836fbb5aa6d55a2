//! Changes of an image: writes, and zeroing of clusters.
//!
//! The caller holds the [lock](crate::ranges) of the clusters of the disk that a call changes.
//!
//! # Order of writes
//!
//! When a call returns, its change is in the file, with the tables, so a killed process loses
//! nothing. After a loss of power, any of the changes since the last sync may be missing, even if
//! later ones are present. So a new table is durable before an entry refers to it. If a part of a
//! cluster with old content is written to a new location, the copy is also durable before the L2
//! entry refers to it; otherwise the old content could be lost. A cluster without old content needs
//! no sync if it is in a new part of the file, because new parts are durably zero. For the order of
//! reference counts, see [`refcount`](crate::refcount).

use crate::format::{Format, Kind, Meta};
use crate::refcount::Span;
use crate::storage::{IoBuffer, Reach, SECTOR, is_full};
use crate::tables::{COPIED, Cluster, damaged};
use std::io;
use std::ops::Range;

/// Maximum number of clusters that are written at once.
const MOST: u64 = 1024;

/// Write to a cluster of the disk.
struct Step {
    cluster: u64,
    /// Part of the cluster that is written.
    from: u64,
    to: u64,
    old: Cluster,
    /// Location of the cluster in the file. `is_fresh` is true if the location contains zeroes.
    host: u64,
    is_fresh: bool,
    /// True if the cluster gets another location.
    moves: bool,
    /// True if the L2 entry of the cluster changes.
    links: bool,
}

impl Format {
    /// Writes `data`.
    pub(crate) fn write(&self, data: &[u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < data.len() {
            done += self.write_some(&data[done..], offset + done as u64)?;
        }
        Ok(())
    }

    /// Writes the beginning of `data`, and returns its length.
    fn write_some(&self, data: &[u8], offset: u64) -> io::Result<usize> {
        let steps = self.plan(&mut self.meta(), offset, data.len() as u64)?;
        let outcome = self.write_data(&steps, data, offset);
        let meta = &mut *self.meta();
        let outcome = outcome.and_then(|()| self.link(meta, &steps));
        if let Err(error) = outcome {
            // New clusters are returned to the reserve only if the storage is full. After another
            // error, a table in the file may already refer to them, so they are leaked.
            if is_full(&error) {
                for step in steps.iter().filter(|step| step.moves) {
                    if self.look_up(meta, step.cluster).is_ok_and(|now| now == step.old) {
                        meta.counts.give_back(step.host >> self.layout.bits, 1);
                    }
                }
            }
            return Err(error);
        }
        Ok(steps.iter().map(|step| (step.to - step.from) as usize).sum())
    }

    /// Chooses the locations for a write.
    fn plan(&self, meta: &mut Meta, offset: u64, len: u64) -> io::Result<Vec<Step>> {
        let (layout, end) = (&self.layout, offset + len);
        let first = offset >> layout.bits;
        let last = (first / layout.per_table() + 1) * layout.per_table();
        let clusters = first..end.div_ceil(layout.cluster()).min(last).min(first + MOST);
        let mut steps = Vec::with_capacity((clusters.end - first) as usize);
        for cluster in clusters {
            let old = self.look_up(meta, cluster)?;
            let base = cluster << layout.bits;
            let (from, to) = (offset.max(base) - base, end.min(base + layout.cluster()) - base);
            let touched = layout.mask(from, to);
            let is_external = self.data_file.is_some();
            let moves = !is_external && !old.is_writable();
            let host = if is_external { base } else { old.host.unwrap_or(0) };
            let links = moves || !old.is_writable() || old.alloc & touched != touched;
            steps.push(Step { cluster, from, to, old, host, is_fresh: false, moves, links });
        }
        if steps.iter().any(|step| step.links) {
            self.own_table(meta, first)?;
        }
        let mut moving: Vec<&mut Step> = steps.iter_mut().filter(|step| step.moves).collect();
        let mut done = 0;
        while done < moving.len() {
            let left = (moving.len() - done) as u64;
            match meta.counts.allocate(&self.file, &mut meta.cache, left) {
                Ok(Span { start, len, is_fresh }) => {
                    for (step, host) in moving[done..].iter_mut().zip(start..start + len) {
                        (step.host, step.is_fresh) = (host << layout.bits, is_fresh);
                    }
                    done += len as usize;
                }
                Err(error) => {
                    for step in &moving[..done] {
                        meta.counts.give_back(step.host >> layout.bits, 1);
                    }
                    return Err(error);
                }
            }
        }
        Ok(steps)
    }

    /// Ensures that the L2 table of a cluster exists and is not shared with a snapshot: creates or
    /// copies the table if necessary.
    fn own_table(&self, meta: &mut Meta, cluster: u64) -> io::Result<()> {
        let (layout, size) = (&self.layout, self.layout.cluster());
        let old = match self.table(meta, cluster)? {
            Some((_, true)) => return Ok(()),
            Some((at, false)) => Some(at),
            None => None,
        };
        let Span { start, is_fresh, .. } = meta.counts.allocate(&self.file, &mut meta.cache, 1)?;
        let (at, place) = (start << layout.bits, self.l1_entry(cluster)?);
        meta.cache.forget(at, size);
        if let Some(map) = self.map.get().filter(|_| !is_fresh) {
            // In a damaged image, the new table's cluster may also be used as data, although its
            // count was zero. So all clusters are removed from the map.
            map.close(0, layout.size);
        }
        let cache = &mut meta.cache;
        let mut write = || -> io::Result<()> {
            let mut table = IoBuffer::new(size as usize);
            if let Some(old) = old {
                self.file.read(&mut table, old)?;
                // The snapshot also refers to these clusters, so their entries lose the flag
                // COPIED.
                for entry in table.chunks_mut(layout.entry as usize) {
                    entry[0] &= !((COPIED >> 56) as u8);
                }
            }
            if old.is_some() || !is_fresh {
                self.file.write(&table, at, Reach::Storage)?;
            }
            let entry = (at | COPIED).to_be_bytes();
            cache.change(&self.file, place, 8, |bytes| bytes.copy_from_slice(&entry))
        };
        if let Err(error) = write() {
            if is_full(&error) {
                meta.counts.give_back(start, 1);
            }
            return Err(error);
        }
        meta.counts.tables.insert(start);
        if let Some(old) = old {
            meta.counts.free(old >> layout.bits..(old >> layout.bits) + 1);
        }
        Ok(())
    }

    /// Subclusters that a step writes: those of the request, and those with data if the cluster
    /// moves.
    fn written(&self, step: &Step) -> u32 {
        let layout = &self.layout;
        let old = match (step.moves, step.old.packed) {
            (false, _) => 0,
            (true, None) => step.old.alloc,
            (true, Some(_)) => layout.all(),
        };
        let mask = layout.mask(step.from, step.to) | old;
        let all = u32::MAX >> mask.leading_zeros() & u32::MAX << mask.trailing_zeros();
        all & layout.all()
    }

    /// Bytes of the cluster that the step writes. In an external data file, the cluster ends at the
    /// end of the disk.
    fn written_bytes(&self, step: &Step) -> Range<u64> {
        let (mask, unit) = (self.written(step), self.layout.unit());
        let end = u64::from(u32::BITS - mask.leading_zeros()) * unit;
        let end = match self.data_file {
            Some(_) => {
                let size = self.layout.size.next_multiple_of(SECTOR);
                end.min(size - (step.cluster << self.layout.bits))
            }
            None => end,
        };
        u64::from(mask.trailing_zeros()) * unit..end
    }

    /// Writes the data of the steps to their locations.
    fn write_data(&self, steps: &[Step], data: &[u8], offset: u64) -> io::Result<()> {
        let layout = &self.layout;
        let write = |data: &[u8], at, reach| {
            let _lock = self.lock_data(at, data.len() as u64, true);
            self.data().write(data, at, reach)
        };
        // Run of adjacent data that is not written yet: its range of `data`, and its offset in the
        // file.
        let mut open: Option<(Range<usize>, u64)> = None;
        for step in steps {
            let base = step.cluster << layout.bits;
            let start = (base + step.from - offset) as usize;
            let end = start + (step.to - step.from) as usize;
            let place = step.host + step.from;
            if self.is_plain(step, base) {
                match &mut open {
                    Some((range, at))
                        if range.end == start && *at + range.len() as u64 == place =>
                    {
                        range.end = end;
                    }
                    _ => {
                        if let Some((range, at)) = open.replace((start..end, place)) {
                            write(&data[range], at, Reach::Cache)?;
                        }
                    }
                }
                continue;
            }
            let Range { start: lo, end: hi } = self.written_bytes(step);
            let mut whole = IoBuffer::new((hi - lo) as usize);
            self.read(&mut whole, base + lo)?;
            whole[(step.from - lo) as usize..(step.to - lo) as usize]
                .copy_from_slice(&data[start..end]);
            write(&whole, step.host + lo, Reach::Storage)?;
        }
        match open {
            Some((range, at)) => write(&data[range], at, Reach::Cache),
            None => Ok(()),
        }
    }

    /// True if only the data of the request have to be written.
    fn is_plain(&self, step: &Step, base: u64) -> bool {
        if !step.links {
            return true;
        }
        let Range { start: lo, end: hi } = self.written_bytes(step);
        let hi = hi.min(self.layout.size - base);
        let is_whole = step.from <= lo && step.to >= hi;
        let is_blank = || {
            let (runs, end) = (self.runs(base + lo, hi - lo), base + hi);
            runs.iter().all(|run| run.kind == Kind::Zero)
                && runs.last().is_some_and(|run| run.offset + run.len == end)
        };
        is_whole || step.is_fresh && is_blank()
    }

    /// Updates the L2 entries of the steps to their new locations.
    fn link(&self, meta: &mut Meta, steps: &[Step]) -> io::Result<()> {
        let mut at = 0;
        while at < steps.len() {
            if !steps[at].links {
                at += 1;
                continue;
            }
            let per_slice = meta.cache.unit() / self.layout.entry;
            let slice = steps[at].cluster / per_slice;
            let count = steps[at..]
                .iter()
                .take_while(|step| step.links && step.cluster / per_slice == slice)
                .count();
            let steps = &steps[at..at + count];
            let entries: Vec<Cluster> = steps
                .iter()
                .map(|step| {
                    let set = self.written(step);
                    let old = if step.moves { 0 } else { step.old.alloc };
                    Cluster {
                        host: Some(step.host),
                        is_owned: true,
                        alloc: old | set,
                        zero: step.old.zero & !set,
                        packed: None,
                    }
                })
                .collect();
            self.set_entries(meta, steps[0].cluster, &entries)?;
            for step in steps.iter().filter(|step| step.moves) {
                self.free(meta, &step.old);
            }
            at += count;
        }
        Ok(())
    }

    /// Writes the entries of adjacent clusters. All of these entries are in one slice of one table.
    fn set_entries(&self, meta: &mut Meta, first: u64, entries: &[Cluster]) -> io::Result<()> {
        let (layout, size) = (&self.layout, self.layout.entry);
        let Some((table, true)) = self.table(meta, first)? else {
            return Err(damaged("an L2 table that is shared"));
        };
        let at = table + first % layout.per_table() * size;
        meta.cache.change(&self.file, at, entries.len() as u64 * size, |bytes| {
            for (bytes, cluster) in bytes.chunks_mut(size as usize).zip(entries) {
                let (entry, bitmap) = cluster.encode(layout);
                bytes[..8].copy_from_slice(&entry.to_be_bytes());
                if let Some(bytes) = bytes.get_mut(8..16) {
                    bytes.copy_from_slice(&bitmap.to_be_bytes());
                }
            }
        })
    }

    /// Frees the old location `old` of a cluster. The cluster's entry must not refer to it any
    /// more.
    fn free(&self, meta: &mut Meta, old: &Cluster) {
        if let Some(entry) = old.packed {
            let clusters = self.layout.compressed(entry).0;
            meta.counts.free(clusters);
        } else if let Some(host) = old.host {
            let cluster = host >> self.layout.bits;
            meta.counts.free(cluster..cluster + 1);
        }
    }

    /// Zeroes a range. Whole clusters become zero clusters; with `keep`, they stay allocated.
    /// Before a cluster changes, `close` is called for its range of the disk. The lock of the
    /// tables is held during that call, so that the cluster is not added to the map again.
    pub(crate) fn zero(
        &self,
        range: Range<u64>,
        keep: bool,
        close: &dyn Fn(Range<u64>),
    ) -> io::Result<()> {
        let layout = &self.layout;
        let end_of = |at: u64| (at / layout.cluster() + 1) * layout.cluster();
        let mut at = range.start;
        while at < range.end {
            let is_end = range.end == layout.size;
            let whole = if is_end { range.end } else { range.end & !(layout.cluster() - 1) };
            // Version 2 has no zero clusters.
            let can_clear = layout.can_zero() || !self.has_base();
            if at.is_multiple_of(layout.cluster()) && at < whole && can_clear {
                let clusters = at >> layout.bits..whole.div_ceil(layout.cluster());
                at = (self.clear(clusters, keep, close)? << layout.bits).min(range.end);
                continue;
            }
            let end = end_of(at).min(range.end);
            let runs = self.runs(at, end - at);
            if runs.iter().any(|run| run.kind != Kind::Zero) {
                self.write(&IoBuffer::new((end - at) as usize), at)?;
            }
            at = end;
        }
        Ok(())
    }

    /// Zeroes whole clusters, up to the end of a slice of a table, or of a table. Returns the first
    /// cluster that remains.
    fn clear(
        &self,
        clusters: Range<u64>,
        keep: bool,
        close: &dyn Fn(Range<u64>),
    ) -> io::Result<u64> {
        let (layout, first) = (&self.layout, clusters.start);
        let next = |unit: u64| clusters.end.min((first / unit + 1) * unit);
        let mut guard = self.meta();
        let meta = &mut *guard;
        if self.table(meta, first)?.is_none() && !self.has_base() {
            return Ok(next(layout.per_table()));
        }
        let per_slice = meta.cache.unit() / layout.entry;
        let end = next(per_slice.min(layout.per_table()));
        let bytes = first << layout.bits..(end << layout.bits).min(layout.size);
        close(bytes.clone());
        if let Some(data_file) = &self.data_file {
            // In an external data file, a cluster has the same offset as on the disk and cannot get
            // another location. So it is zeroed in place.
            data_file.zero(bytes.start, bytes.end - bytes.start)?;
        }
        let mut old = Vec::with_capacity((end - first) as usize);
        for cluster in first..end {
            old.push(self.look_up(meta, cluster)?);
        }
        let zero = if layout.can_zero() { layout.all() } else { 0 };
        let cleared = |(cluster, old): (u64, &Cluster)| {
            let is_zero = old.alloc == 0
                && old.packed.is_none()
                && (old.zero == layout.all() || !self.has_base());
            if is_zero && (keep || old.host.is_none() || self.data_file.is_some()) {
                return *old;
            }
            if self.data_file.is_some() {
                let (host, alloc) = (Some(cluster << layout.bits), layout.all());
                return Cluster { host, is_owned: true, alloc, zero: 0, packed: None };
            }
            if keep && old.is_writable() && zero != 0 {
                return Cluster { alloc: 0, zero, ..*old };
            }
            Cluster { zero: if self.has_base() { zero } else { 0 }, ..Cluster::default() }
        };
        let new: Vec<Cluster> = (first..end).zip(&old).map(cleared).collect();
        if new == old {
            return Ok(end);
        }
        self.own_table(meta, first)?;
        self.set_entries(meta, first, &new)?;
        for (old, new) in old.iter().zip(&new) {
            if old.host.is_some() && new.host.is_none()
                || old.packed.is_some() && new.packed.is_none()
            {
                self.free(meta, old);
            }
        }
        let is_many = meta.counts.needs_sync();
        drop(guard);
        if is_many {
            self.sync()?;
        }
        Ok(end)
    }
}
