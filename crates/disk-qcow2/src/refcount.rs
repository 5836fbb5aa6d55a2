//! Reference counts: allocation and release of clusters.
//!
//! # Order of writes
//!
//! The reference count of a cluster is above 0 (the cluster is *counted*), durably, before anything
//! refers to the cluster. That needs no sync per cluster: clusters are counted in batches, which
//! form the *reserve*, and allocations take clusters from the reserve. A file is also extended,
//! durably, before its new clusters are allocated. A cluster is released only after a sync that
//! follows the removal of the last reference; until then it is *freed*, and not used again. So
//! after a crash at any time, the only defects are leaked clusters: the rest of the reserve, most
//! of which occupies no space, and the freed clusters. Closing the image returns the reserve.

use crate::header::Header;
use crate::storage::{FileStorage, IoBuffer, Reach};
use crate::tables::{Cache, damaged, read_table};
use std::collections::{HashSet, VecDeque};
use std::io;
use std::ops::Range;

/// Mask of the bits of a refcount table entry that contain the offset of the refcount block.
const BLOCK: u64 = !0x1ff;
/// Size of the first and of the largest reserve in bytes, and its minimum number of clusters.
const FIRST: u64 = 1 << 20;
const LARGEST: u64 = 64 << 20;
const FEWEST: u64 = 16;
/// Maximum size of the refcount table, as in QEMU.
const MAX_TABLE: u64 = 8 << 20;
/// Maximum number of ranges in the list of freed clusters, and in that of released ones.
const MAX_FREED: usize = 1 << 16;

/// Adjacent clusters of the reserve: they are counted and not used yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) start: u64,
    pub(crate) len: u64,
    /// True if the file was extended by these clusters, so that they contain zeroes.
    pub(crate) is_fresh: bool,
}

pub(crate) struct Refcounts {
    bits: u32,
    /// Width of a count: log2 of its number of bits.
    order: u32,
    table: Vec<u64>,
    table_offset: u64,
    /// Number of the cluster from which the next search starts. Before it, only clusters in
    /// `released` can be free.
    cursor: u64,
    /// Clusters before the cursor that may be free.
    released: Vec<Range<u64>>,
    /// True if clusters have been released since the last complete search.
    has_released: bool,
    /// Number of counts that searches have read.
    #[cfg(test)]
    pub(crate) searched: u64,
    /// Number of the first cluster after all counted ones; `None` until it is looked up.
    top: Option<u64>,
    reserve: VecDeque<Span>,
    /// Clusters to release after the next sync.
    freed: Vec<Range<u64>>,
    /// Clusters of the header and of tables. They are never data.
    pub(crate) tables: HashSet<u64>,
    /// Number of clusters to add to the reserve when it is next filled.
    batch: u64,
    /// True if a write of the refcount table has failed, so that its content in the file is
    /// unknown.
    is_broken: bool,
}

impl Refcounts {
    /// Creates the counts without their table: only a change of the image needs the table.
    pub(crate) fn new(header: &Header) -> Self {
        let bits = header.cluster_bits;
        Self {
            bits,
            order: header.refcount_order,
            table: Vec::new(),
            table_offset: header.refcounts.offset,
            cursor: 1,
            released: Vec::new(),
            has_released: false,
            #[cfg(test)]
            searched: 0,
            top: None,
            reserve: VecDeque::new(),
            freed: Vec::new(),
            tables: HashSet::new(),
            batch: (FIRST >> bits).max(FEWEST),
            is_broken: false,
        }
    }

    /// Reads the refcount table. Its blocks are read when they are needed.
    pub(crate) fn read(&mut self, file: &FileStorage, header: &Header) -> io::Result<()> {
        self.table = read_table(file, header.refcounts)?;
        Ok(())
    }

    /// Offsets of the refcount blocks.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = u64> {
        self.table.iter().map(|entry| entry & BLOCK).filter(|at| *at != 0)
    }

    /// log2 of the number of counts per block.
    fn block_bits(&self) -> u32 {
        self.bits + 3 - self.order
    }

    /// Number of clusters whose offsets fit in an L1 or L2 entry.
    fn limit(&self) -> u64 {
        1 << (56 - self.bits)
    }

    /// End of the clusters that the refcount table can count.
    pub(crate) fn end_of_blocks(&self) -> u64 {
        (self.table.len() as u64) << self.block_bits()
    }

    /// Maximum count.
    pub(crate) fn max(&self) -> u64 {
        u64::MAX >> (64 - (1 << self.order))
    }

    /// Offset of the block of a cluster, if there is one.
    fn block(&self, file: &FileStorage, cluster: u64) -> io::Result<Option<u64>> {
        let nth = usize::try_from(cluster >> self.block_bits()).unwrap_or(usize::MAX);
        match self.table.get(nth).map_or(0, |entry| entry & BLOCK) {
            0 => Ok(None),
            at if at.is_multiple_of(1 << self.bits) && at < file.len() => Ok(Some(at)),
            _ => Err(damaged("a refcount block at an invalid offset")),
        }
    }

    /// Adds the missing refcount blocks for the clusters before `end`. The blocks are placed in
    /// clusters from `end` on. Returns the clusters that were used for that.
    pub(crate) fn cover(
        &mut self,
        file: &FileStorage,
        cache: &mut Cache,
        end: u64,
    ) -> io::Result<Range<u64>> {
        let mut first = 0;
        while first < end && self.block(file, first)?.is_some() {
            first += 1 << self.block_bits();
        }
        if first >= end {
            return Ok(end..end);
        }
        // The caller writes all counts anew, so the old ones do not matter.
        self.top = Some(self.tables.iter().max().map_or(end, |last| end.max(last + 1)));
        let free = self.extend(file, cache, 1, first)?;
        self.give_back(free.start, 1);
        Ok(end..free.end)
    }

    /// Resets the search for free clusters, after all counts have been written anew.
    pub(crate) fn restart(&mut self) {
        (self.top, self.cursor) = (None, 1);
        self.released.clear();
    }

    /// Changes the counts of clusters, slice by slice. `change` is called with the number of a
    /// cluster and its count, and returns the new count. Clusters without a block have no count,
    /// and are skipped.
    pub(crate) fn update(
        &mut self,
        file: &FileStorage,
        cache: &mut Cache,
        clusters: Range<u64>,
        change: &mut dyn FnMut(u64, u64) -> u64,
    ) -> io::Result<()> {
        let (order, per_slice) = (self.order, (cache.unit() * 8) >> self.order);
        let mut at = clusters.start;
        while at < clusters.end {
            let Some(block) = self.block(file, at)? else {
                at = ((at >> self.block_bits()) + 1) << self.block_bits();
                continue;
            };
            let end = clusters.end.min((at / per_slice + 1) * per_slice);
            let nth = at & ((1 << self.block_bits()) - 1);
            let (from, to) = ((nth << order) / 8, ((nth + end - at) << order).div_ceil(8));
            let skip = nth - ((from * 8) >> order);
            let (_, slice) = cache.slice(file, block + from)?;
            let base = (from % slice.len() as u64) as usize;
            let counts = &slice[base..base + (to - from) as usize];
            let old = (0..end - at).map(|n| count(counts, (skip + n) as usize, order));
            let new: Vec<u64> = old.enumerate().map(|(n, c)| change(at + n as u64, c)).collect();
            let old = (0..end - at).map(|n| count(counts, (skip + n) as usize, order));
            if old.eq(new.iter().copied()) {
                at = end;
                continue;
            }
            if new.iter().any(|new| *new > self.max()) {
                return Err(damaged("a reference count that is too large for its width"));
            }
            cache.change(file, block + from, to - from, |counts| {
                for (n, new) in new.into_iter().enumerate() {
                    set_count(counts, skip as usize + n, order, new);
                }
            })?;
            at = end;
        }
        Ok(())
    }

    /// Number of the first cluster after all counted clusters and all tables.
    pub(crate) fn top(&mut self, file: &FileStorage, cache: &mut Cache) -> io::Result<u64> {
        if let Some(top) = self.top {
            return Ok(top);
        }
        let mut top = self.tables.iter().max().map_or(1, |last| last + 1);
        'blocks: for nth in (0..self.table.len() as u64).rev() {
            let first = nth << self.block_bits();
            let Some(block) = self.block(file, first)? else { continue };
            let per_slice = (cache.unit() * 8) >> self.order;
            let unit = cache.unit();
            for from in (0..(1 << self.bits) / unit).rev().map(|nth| nth * unit) {
                let (_, slice) = cache.slice(file, block + from)?;
                let last =
                    (0..per_slice).rev().find(|n| count(slice, *n as usize, self.order) != 0);
                if let Some(last) = last {
                    top = top.max(first + ((from * 8) >> self.order) + last + 1);
                    break 'blocks;
                }
            }
        }
        if top > self.limit() {
            return Err(damaged("counts of clusters beyond the largest offset"));
        }
        self.top = Some(top);
        Ok(top)
    }

    /// Finds up to `want` clusters that are not used: released ones, and those from the cursor on.
    /// Each count is read only once, unless its cluster is released later.
    fn search(
        &mut self,
        file: &FileStorage,
        cache: &mut Cache,
        want: u64,
    ) -> io::Result<Vec<Range<u64>>> {
        let top = self.top(file, cache)?;
        let mut found = Found::default();
        while found.have < want
            && let Some(range) = self.released.pop()
        {
            // Clusters from `top` on are not searched: the image is extended to use them.
            let range = range.start..range.end.min(top);
            let left = self.search_range(file, cache, range.clone(), want, &mut found)?;
            if left < range.end {
                self.released.push(left..range.end);
            }
        }
        if found.have < want && self.cursor < top {
            self.cursor = self.search_range(file, cache, self.cursor..top, want, &mut found)?;
        }
        Ok(found.ranges)
    }

    /// Finds clusters of a range that are not used, until there are `want`. Returns the number of
    /// the first cluster that was not examined.
    fn search_range(
        &mut self,
        file: &FileStorage,
        cache: &mut Cache,
        range: Range<u64>,
        want: u64,
        found: &mut Found,
    ) -> io::Result<u64> {
        let (mut at, order) = (range.start, self.order);
        let per_slice = (cache.unit() * 8) >> order;
        while at < range.end && found.have < want {
            let Some(block) = self.block(file, at)? else {
                at = ((at >> self.block_bits()) + 1) << self.block_bits();
                continue;
            };
            let nth = at & ((1 << self.block_bits()) - 1);
            let (_, slice) = cache.slice(file, block + (nth << order) / 8)?;
            let end = range.end.min((at / per_slice + 1) * per_slice);
            while at < end && found.have < want {
                let is_counted = count(slice, (at % per_slice) as usize, order) != 0;
                if !is_counted && !self.tables.contains(&at) {
                    found.have += 1;
                    push(&mut found.ranges, at..at + 1);
                }
                at += 1;
                #[cfg(test)]
                {
                    self.searched += 1;
                }
            }
        }
        Ok(at.min(range.end))
    }

    /// Adds clusters that may be free. Clusters from the cursor on are left out: the search finds
    /// them anyway, and would find them twice.
    fn add_released(&mut self, clusters: Range<u64>) {
        let clusters = clusters.start..clusters.end.min(self.cursor);
        if clusters.is_empty() {
            return;
        }
        if self.released.len() < MAX_FREED {
            push(&mut self.released, clusters);
        } else {
            // The list is full, so the cursor moves back. A search from there also finds the
            // clusters that are removed from the list.
            self.cursor = clusters.start;
            self.released.retain(|range| range.end <= clusters.start);
        }
    }

    /// Adds clusters to the reserve: at least one, and at most `want` or `batch`, whichever is
    /// larger.
    fn fill(&mut self, file: &FileStorage, cache: &mut Cache, want: u64) -> io::Result<()> {
        if self.is_broken {
            return Err(damaged("a refcount table that could not be written"));
        }
        let freed = self.take_freed();
        if !freed.is_empty() {
            if let Err(error) = file.sync() {
                self.keep_freed(freed);
                return Err(error);
            }
            self.release(file, cache, freed)?;
        }
        let want = want.max(self.batch);
        let found = self.search(file, cache, want)?;
        self.has_released &= !self.released.is_empty() || self.cursor < self.top(file, cache)?;
        let have: u64 = found.iter().map(|range| range.end - range.start).sum();
        for range in &found {
            self.update(file, cache, range.clone(), &mut |_, _| 1)?;
        }
        let old_end = file.len().div_ceil(1 << self.bits);
        let end = found.iter().map(|range| range.end).max().unwrap_or(0);
        if file.grows && end > old_end {
            file.set_len(end << self.bits)?;
        }
        let added = match want - have {
            0 => None,
            _ if !self.reserve.is_empty() => None,
            missing => match self.extend(file, cache, missing, u64::MAX) {
                Ok(added) => Some(added),
                Err(_) if have != 0 && !self.is_broken => None,
                Err(error) => return Err(error),
            },
        };
        if have != 0 || added.is_some() {
            file.sync()?;
        }
        let fresh = old_end.max(added.as_ref().map_or(0, |added| added.start));
        let spans = found.into_iter().chain(added).flat_map(|range| {
            let middle = fresh.clamp(range.start, range.end);
            let of = |start, end, is_fresh| Span { start, len: end - start, is_fresh };
            [of(range.start, middle, false), of(middle, range.end, file.grows)]
        });
        let spans: VecDeque<Span> = spans.filter(|span| span.len != 0).collect();
        let rest = std::mem::replace(&mut self.reserve, spans);
        self.reserve.extend(rest);
        self.batch = (self.batch * 2).min((LARGEST >> self.bits).max(FEWEST));
        Ok(())
    }

    /// Counts `missing` clusters at the end of the file as used, after the refcount blocks and the
    /// refcount table that these clusters need. Also adds the missing blocks of all clusters from
    /// `from` on. The counts are durable after the next sync.
    fn extend(
        &mut self,
        file: &FileStorage,
        cache: &mut Cache,
        mut missing: u64,
        from: u64,
    ) -> io::Result<Range<u64>> {
        let (cluster, block_bits) = (1_u64 << self.bits, self.block_bits());
        let base = self.top(file, cache)?;
        let (mut in_table, mut in_blocks) = (0, 0);
        let new_blocks = loop {
            let last = (base + missing + in_table + in_blocks - 1) >> block_bits;
            let entries = self.table.len() as u64;
            let table = if last < entries { 0 } else { (last + 1 + last / 2) * 8 };
            let missing_blocks: Vec<u64> = (base.min(from) >> block_bits..=last)
                .filter(|nth| self.table.get(*nth as usize).is_none_or(|entry| entry & BLOCK == 0))
                .collect();
            let next = (table.div_ceil(cluster), missing_blocks.len() as u64);
            if !file.grows && base + missing + next.0 + next.1 > file.len() / cluster {
                (missing, in_table, in_blocks) = (missing / 2, 0, 0);
                if missing == 0 {
                    return Err(io::ErrorKind::StorageFull.into());
                }
            } else if next == (in_table, in_blocks) {
                break missing_blocks;
            } else {
                (in_table, in_blocks) = next;
            }
        };
        if in_table * cluster > MAX_TABLE {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let end = base + in_table + in_blocks + missing;
        if end > self.limit() {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        if file.grows && end * cluster > file.len() {
            file.set_len(end * cluster)?;
        }
        // `update` changes the counts in existing blocks only. The new blocks are written below.
        self.update(file, cache, base..end, &mut |_, _| 1)?;
        cache.forget(base * cluster, (in_table + in_blocks) * cluster);
        let mut table = self.table.clone();
        for (at, nth) in (base + in_table..).zip(&new_blocks) {
            let mut block = IoBuffer::new(cluster as usize);
            let first = nth << block_bits;
            for counted in base.max(first)..end.min(first + (1 << block_bits)) {
                set_count(&mut block, (counted - first) as usize, self.order, 1);
            }
            file.write(&block, at * cluster, Reach::Cache)?;
            if table.len() as u64 <= *nth {
                table.resize((in_table * cluster / 8) as usize, 0);
            }
            table[*nth as usize] = at * cluster;
        }
        if let (Some(first), Some(last)) = (new_blocks.first(), new_blocks.last()) {
            // The table refers only to durable blocks, and the header only to a durable table.
            file.sync()?;
            self.is_broken = true;
            let bytes = |entries: &[u64]| -> Vec<u8> {
                entries.iter().flat_map(|entry| entry.to_be_bytes()).collect()
            };
            if in_table == 0 {
                let changed = bytes(&table[*first as usize..=*last as usize]);
                file.patch(&changed, self.table_offset + first * 8)?;
            } else {
                let mut all = IoBuffer::new((in_table * cluster) as usize);
                all[..table.len() * 8].copy_from_slice(&bytes(&table));
                file.write(&all, base * cluster, Reach::Cache)?;
                file.sync()?;
                let (header, at) = Header::refcount_table(base * cluster, in_table as u32);
                file.patch(&header, at)?;
                let old = self.table_offset >> self.bits;
                let len = (self.table.len() as u64 * 8).div_ceil(cluster);
                self.free(old..old + len);
                self.table_offset = base * cluster;
            }
            self.is_broken = false;
        }
        self.table = table;
        self.tables.extend(base..base + in_table + in_blocks);
        self.top = Some(end);
        Ok(base + in_table + in_blocks..end)
    }

    /// Takes up to `want` adjacent clusters from the reserve.
    pub(crate) fn allocate(
        &mut self,
        file: &FileStorage,
        cache: &mut Cache,
        want: u64,
    ) -> io::Result<Span> {
        // Released clusters are used before new ones at the end of the file, so that the file does
        // not grow.
        if self.reserve.front().is_none_or(|front| front.is_fresh && self.has_released) {
            self.fill(file, cache, want)?;
        }
        let Some(front) = self.reserve.front_mut() else {
            return Err(io::ErrorKind::StorageFull.into());
        };
        let taken = Span { len: front.len.min(want), ..*front };
        *front = Span { start: front.start + taken.len, len: front.len - taken.len, ..*front };
        if front.len == 0 {
            self.reserve.pop_front();
        }
        Ok(taken)
    }

    /// Returns allocated clusters to the reserve. Nothing may refer to them; their content is
    /// arbitrary.
    pub(crate) fn give_back(&mut self, start: u64, len: u64) {
        self.reserve.push_front(Span { start, len, is_fresh: false });
    }

    /// Records that one reference to each of these clusters was removed. Their counts are
    /// decremented after the next sync.
    pub(crate) fn free(&mut self, clusters: Range<u64>) {
        push(&mut self.freed, clusters);
    }

    /// True if too many clusters wait for a sync.
    pub(crate) fn needs_sync(&self) -> bool {
        self.freed.len() > MAX_FREED
    }

    /// Returns the freed clusters. After a sync, they have to be [released](Self::release).
    pub(crate) fn take_freed(&mut self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.freed)
    }

    /// Adds freed clusters to the list again, for the next sync, because a sync has failed.
    pub(crate) fn keep_freed(&mut self, freed: Vec<Range<u64>>) {
        self.freed.extend(freed);
    }

    /// Removes one reference to each of these clusters. After an error, the clusters of the failed
    /// range leak, because some of them may be released already.
    pub(crate) fn release(
        &mut self,
        file: &FileStorage,
        cache: &mut Cache,
        freed: Vec<Range<u64>>,
    ) -> io::Result<()> {
        let mut freed = freed.into_iter();
        while let Some(clusters) = freed.next() {
            let mut unused = Vec::new();
            let outcome = self.update(file, cache, clusters, &mut |cluster, count| {
                if count == 1 {
                    unused.push(cluster);
                }
                count.saturating_sub(1)
            });
            if outcome.is_err() {
                self.keep_freed(freed.collect());
                return outcome;
            }
            for cluster in unused {
                self.tables.remove(&cluster);
                self.add_released(cluster..cluster + 1);
                self.has_released = true;
            }
        }
        Ok(())
    }

    /// True if the reserve is not empty.
    pub(crate) fn has_reserve(&self) -> bool {
        !self.reserve.is_empty()
    }

    /// Sets the reference counts of the reserved clusters to 0. Returns their positions. No sync is
    /// needed, because nothing has ever referred to these clusters.
    pub(crate) fn return_reserve(
        &mut self,
        file: &FileStorage,
        cache: &mut Cache,
    ) -> io::Result<Vec<Span>> {
        let spans = Vec::from(std::mem::take(&mut self.reserve));
        for span in &spans {
            self.update(file, cache, span.start..span.start + span.len, &mut |_, _| 0)?;
            self.add_released(span.start..span.start + span.len);
        }
        Ok(spans)
    }

    /// Releases the freed clusters and the reserve, and shortens the file.
    pub(crate) fn close(&mut self, file: &FileStorage, cache: &mut Cache) -> io::Result<()> {
        let freed = self.take_freed();
        let mut spans = self.return_reserve(file, cache)?;
        if freed.is_empty() && spans.is_empty() {
            return Ok(());
        }
        // This sync also makes the changed counts durable. The file may be shortened only after
        // that, because it must not end before a cluster with a count above 0.
        file.sync()?;
        self.release(file, cache, freed)?;
        spans.sort_by_key(|span| std::cmp::Reverse(span.start));
        let (old, mut end) = (file.len(), file.len().div_ceil(1 << self.bits));
        for span in spans {
            if span.start + span.len == end {
                end = span.start;
            }
        }
        if file.grows && end << self.bits < old {
            file.set_len(end << self.bits)?;
        }
        (self.top, self.batch) = (None, (FIRST >> self.bits).max(FEWEST));
        Ok(())
    }
}

/// Free clusters that a search has found, and their number.
#[derive(Default)]
struct Found {
    ranges: Vec<Range<u64>>,
    have: u64,
}

/// Adds a range to a list. Extends the last range of the list if the two are adjacent.
fn push(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

/// Returns a count of `2^order` bits.
fn count(block: &[u8], nth: usize, order: u32) -> u64 {
    if order < 3 {
        // A byte contains several counts, the first one in the lowest bits.
        let (bits, per_byte) = (1_usize << order, 8 >> order);
        return u64::from(block[nth / per_byte] >> (nth % per_byte * bits)) & ((1 << bits) - 1);
    }
    let len = 1_usize << (order - 3);
    block[nth * len..(nth + 1) * len].iter().fold(0, |all, byte| all << 8 | u64::from(*byte))
}

fn set_count(block: &mut [u8], nth: usize, order: u32, value: u64) {
    if order < 3 {
        let (bits, per_byte) = (1_usize << order, 8 >> order);
        let shift = nth % per_byte * bits;
        let mask = (((1_u16 << bits) - 1) << shift) as u8;
        let byte = &mut block[nth / per_byte];
        *byte = *byte & !mask | (value as u8) << shift;
        return;
    }
    let len = 1_usize << (order - 3);
    block[nth * len..(nth + 1) * len].copy_from_slice(&value.to_be_bytes()[8 - len..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_any_width() {
        for order in 0..=6 {
            let mut block = vec![0; 512];
            let (counts, max) = ((512 * 8) >> order, u64::MAX >> (64 - (1 << order)));
            for (nth, value) in [(3, 1), (counts - 1, max), (4, max), (4, 0)] {
                set_count(&mut block, nth, order, value);
                assert_eq!(count(&block, nth, order), value, "{order} {nth}");
            }
            assert_eq!((0..counts).filter(|nth| count(&block, *nth, order) != 0).count(), 2);
            // Counts of at least 8 bits are big-endian. Shorter counts start with the lowest bit of
            // a byte.
            let at = match order {
                0 => (0, 1 << 3),
                1 => (0, 1 << 6),
                2 => (1, 1 << 4),
                order => ((4 << (order - 3)) - 1, 1),
            };
            assert_eq!(block[at.0], at.1, "{order}");
        }
    }
}
