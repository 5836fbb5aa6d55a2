//! DMA map of a peer: I/O virtual addresses to bytes of this process.

use crate::dirty::{DirtyLog, ViewPages};
use crate::error::{DmaError, Fault};
use crate::host_ranges::Ranges;
use crate::mapping::Mapping;
use crate::page_tables;
use crate::shared::SharedBytes;
use std::cell::Cell;
use std::collections::HashSet;
use std::ptr::NonNull;
use std::rc::{Rc, Weak};
use std::sync::Arc;

#[derive(Clone, Debug)]
struct Entry {
    start: u64,
    /// Last address, inclusive. So a map can end at the end of the address space.
    last: u64,
    bytes: SharedBytes,
}

impl Entry {
    /// Bytes that the page tables of this map can cover. The same page tables can also cover
    /// neighbouring memory.
    fn reach(&self) -> u64 {
        page_tables::reach(self.last - self.start)
    }

    /// Addresses of the memory in this process.
    fn host_range(&self) -> (usize, usize) {
        let start = self.bytes.base().as_ptr() as usize;
        (start, start + self.bytes.len())
    }
}

/// Maximum number of maps in a chunk of a table. Two neighbouring chunks with at most `MAX_MERGED`
/// maps together are merged.
const CHUNK: usize = 512;
const MAX_MERGED: usize = CHUNK / 4;

/// Immutable snapshot of all maps, sorted by address.
///
/// Snapshots share unchanged chunks: a change copies one chunk of maps and the list of chunks. This
/// keeps changes cheap for a guest with a virtual IOMMU, which has tens of thousands of maps and
/// changes them frequently.
#[derive(Clone, Debug, Default)]
pub struct DmaTable {
    /// Chunks of maps, none of which is empty.
    chunks: Vec<Arc<Vec<Entry>>>,
    /// Upper bound of the bytes that the page tables of these maps can cover.
    reach: u64,
    /// Dirty page log, if writes are logged.
    log: Option<Arc<DirtyLog>>,
}

impl DmaTable {
    /// Number of mapped ranges.
    #[must_use]
    pub fn len(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.len()).sum()
    }

    /// True if no range is mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// True if the page tables of the maps could exceed the limit. Threads that touch this memory
    /// have to count the touched places: see [`page_tables`].
    #[must_use]
    pub fn is_sparse(&self) -> bool {
        self.reach > page_tables::MIN_BYTES_TO_CHECK
    }

    fn entries(&self) -> impl Iterator<Item = &Entry> + '_ {
        self.chunks.iter().flat_map(|chunk| chunk.iter())
    }

    /// Upper bound of the bytes that the page tables of the maps can cover if the table [is
    /// sparse](Self::is_sparse), 0 otherwise.
    #[must_use]
    pub fn sparse_bytes(&self) -> u64 {
        if self.is_sparse() { self.reach } else { 0 }
    }

    /// True if the memory of some range was lost to a truncation (see [`crate::sigbus`]).
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.entries().any(|e| e.bytes.mapping().is_poisoned())
    }

    /// Mappings behind the ranges, in order. A mapping that several ranges use occurs several
    /// times.
    pub fn mappings(&self) -> impl Iterator<Item = &Arc<Mapping>> + '_ {
        self.entries().map(|e| e.bytes.mapping())
    }

    /// Mapping behind the range that contains `iova`.
    #[must_use]
    pub fn mapping_at(&self, iova: u64) -> Option<&Arc<Mapping>> {
        self.find(iova).map(|e| e.bytes.mapping())
    }

    /// First address of a range of `mapping`, found by a linear search.
    #[must_use]
    pub fn iova_of(&self, mapping: &Arc<Mapping>) -> Option<u64> {
        self.entries().find(|e| Arc::ptr_eq(e.bytes.mapping(), mapping)).map(|e| e.start)
    }

    /// Mapped ranges as (first IOVA, length in bytes), in order.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.entries().map(|e| (e.start, e.last - e.start + 1))
    }

    /// Bytes of `[iova, iova + len)` if a single map contains them all.
    #[must_use]
    pub fn bytes(&self, iova: u64, len: u64) -> Option<SharedBytes> {
        let entry = self.find(iova)?;
        let offset = usize::try_from(iova - entry.start).ok()?;
        entry.bytes.slice(offset, usize::try_from(len).ok()?)
    }

    /// Bytes from `iova` to the end of its map, at most `len`, or `None` if `iova` is not mapped.
    pub(crate) fn bytes_up_to(&self, iova: u64, len: u64) -> Option<SharedBytes> {
        let entry = self.find(iova)?;
        let len = len.min((entry.last - iova).saturating_add(1));
        let offset = usize::try_from(iova - entry.start).ok()?;
        entry.bytes.slice(offset, usize::try_from(len).ok()?)
    }

    /// True if writes are logged.
    #[must_use]
    pub fn is_logged(&self) -> bool {
        self.log.is_some()
    }

    /// Memory of maps that `later` does not contain.
    pub(crate) fn removed_by(&self, later: &Self) -> Ranges {
        let kept: HashSet<_> = later.chunks.iter().map(Arc::as_ptr).collect();
        let changed = self.chunks.iter().filter(|chunk| !kept.contains(&Arc::as_ptr(chunk)));
        let is_same = |entry: &Entry, other: &Entry| {
            entry.last == other.last
                && entry.bytes.base() == other.bytes.base()
                && entry.bytes.is_writable() == other.bytes.is_writable()
        };
        let removed = changed.flat_map(|chunk| chunk.iter()).filter(|entry| {
            let other = later.find(entry.start).filter(|other| other.start == entry.start);
            !other.is_some_and(|other| is_same(entry, other))
        });
        Ranges::new(removed.map(Entry::host_range).collect())
    }

    /// Memory of all maps.
    pub(crate) fn host_ranges(&self) -> Ranges {
        let entries = self.chunks.iter().flat_map(|chunk| chunk.iter());
        Ranges::new(entries.map(Entry::host_range).collect())
    }

    /// Memory of all writable maps: I/O virtual address, and addresses of this process.
    pub(crate) fn writable_maps(&self) -> impl Iterator<Item = (u64, (usize, usize))> {
        let entries = self.chunks.iter().flat_map(|chunk| chunk.iter());
        let entries = entries.filter(|entry| entry.bytes.is_writable());
        entries.map(|entry| (entry.start, entry.host_range()))
    }

    fn find(&self, iova: u64) -> Option<&Entry> {
        let chunk = self.chunks.get(self.chunk_of(iova))?;
        let after = chunk.partition_point(|e| e.start <= iova);
        let entry = &chunk[after.checked_sub(1)?];
        (iova <= entry.last).then_some(entry)
    }

    /// Index of the chunk that contains the map of `iova`, or into which a new map of `iova` is
    /// inserted.
    fn chunk_of(&self, iova: u64) -> usize {
        let begins_above = |chunk: &Arc<Vec<Entry>>| chunk.first().is_some_and(|e| e.start <= iova);
        self.chunks.partition_point(begins_above).saturating_sub(1)
    }

    /// Maps that overlap `[first, last]`.
    fn overlapping(&self, first: u64, last: u64) -> impl Iterator<Item = &Entry> {
        self.chunks[self.chunk_of(first)..]
            .iter()
            .flat_map(|chunk| chunk.iter())
            .skip_while(move |e| e.last < first)
            .take_while(move |e| e.start <= last)
    }

    fn insert(&mut self, entry: Entry) {
        self.reach = self.reach.saturating_add(entry.reach());
        let index = self.chunk_of(entry.start);
        let Some(chunk) = self.chunks.get_mut(index) else {
            return self.chunks.push(Arc::new(vec![entry]));
        };
        let chunk = Arc::make_mut(chunk);
        let at = chunk.partition_point(|e| e.start < entry.start);
        chunk.insert(at, entry);
        if chunk.len() > CHUNK {
            let rest = chunk.split_off(CHUNK / 2);
            self.chunks.insert(index + 1, Arc::new(rest));
        }
    }

    /// Removes the maps that lie inside `[first, last]`.
    fn remove(&mut self, first: u64, last: u64) {
        let from = self.chunk_of(first);
        let mut index = from;
        while let Some(chunk) = self.chunks.get_mut(index) {
            if chunk.first().is_some_and(|e| e.start > last) {
                break;
            }
            let stays = |e: &Entry| e.start < first || e.last > last;
            if !chunk.iter().all(stays) {
                let removed = chunk.iter().filter(|e| !stays(e)).map(Entry::reach);
                self.reach = self.reach.saturating_sub(removed.fold(0, u64::saturating_add));
                Arc::make_mut(chunk).retain(stays);
            }
            if chunk.is_empty() {
                self.chunks.remove(index);
            } else {
                index += 1;
            }
        }
        // Small neighbouring chunks are merged, because many small chunks would make the list of
        // chunks long.
        for index in [from, from.saturating_sub(1)] {
            if let Some([one, two]) = self.chunks.get_mut(index..index + 2)
                && one.len() + two.len() <= MAX_MERGED
            {
                Arc::make_mut(one).extend_from_slice(two);
                self.chunks.remove(index + 1);
            }
        }
    }
}

/// DMA map of a peer, owned by the control plane.
///
/// Each change creates a new [`DmaTable`], to which the I/O threads switch at a quiescent point.
#[derive(Debug, Default)]
pub struct DmaSpace {
    table: Arc<DmaTable>,
    peer: Option<u32>,
}

impl DmaSpace {
    /// Creates an empty map of a peer. [`losses`](crate::sigbus::losses) counts the faults in the
    /// peer's memory under the number `peer`.
    #[must_use]
    pub fn of_peer(peer: u32) -> Self {
        Self { peer: Some(peer), ..Self::default() }
    }

    /// Current snapshot.
    #[must_use]
    pub fn table(&self) -> &Arc<DmaTable> {
        &self.table
    }

    /// Maps `len` bytes at `iova` to `bytes`.
    ///
    /// # Errors
    /// [`DmaError`] if the range is invalid, overlaps another map, or is longer than the memory.
    pub fn map(&mut self, iova: u64, len: u64, bytes: &SharedBytes) -> Result<(), DmaError> {
        let last = last_address(iova, len)?;
        if let Some(other) = self.table.overlapping(iova, last).next() {
            return Err(DmaError::Overlap { iova, len, other: other.start });
        }
        let have = bytes.len() as u64;
        let bytes = usize::try_from(len)
            .ok()
            .and_then(|len| bytes.slice(0, len))
            .ok_or(DmaError::Short { iova, len, have })?;
        if let Some(peer) = self.peer {
            bytes.mapping().claim(peer);
        }
        // The table is copied if a snapshot of it is in use, which is nearly always the case.
        Arc::make_mut(&mut self.table).insert(Entry { start: iova, last, bytes });
        Ok(())
    }

    /// Removes every map inside `[iova, iova + len)`.
    ///
    /// The memory stays mapped in the process until the last snapshot, view and command that can
    /// access it is dropped.
    ///
    /// # Errors
    /// [`DmaError`] if the range is invalid, contains no map, or would split one.
    pub fn unmap(&mut self, iova: u64, len: u64) -> Result<(), DmaError> {
        let last = last_address(iova, len)?;
        let sticks_out = |e: &&Entry| e.start < iova || e.last > last;
        if let Some(e) = self.table.overlapping(iova, last).find(sticks_out) {
            return Err(DmaError::Split { iova, len, other: e.start });
        }
        if self.table.overlapping(iova, last).next().is_none() {
            return Err(DmaError::NotMapped { iova, len });
        }
        Arc::make_mut(&mut self.table).remove(iova, last);
        Ok(())
    }

    /// Removes all maps.
    pub fn clear(&mut self) {
        let log = self.table.log.clone();
        self.table = Arc::new(DmaTable { log, ..DmaTable::default() });
    }

    /// Starts a dirty page log: views of later snapshots record their writes. Returns false if a
    /// log exists already.
    ///
    /// Writes to a [`Ring`](crate::Ring) or a [cell](crate::SharedU32) are not recorded. The owner
    /// of the ring or cell has to [add](DirtyLog::add) them.
    pub fn start_log(&mut self) -> bool {
        let is_new = self.table.log.is_none();
        if is_new {
            Arc::make_mut(&mut self.table).log = Some(Arc::default());
        }
        is_new
    }

    /// Stops the dirty page log for later snapshots. Returns false if no log exists.
    pub fn stop_log(&mut self) -> bool {
        let is_there = self.table.log.is_some();
        if is_there {
            Arc::make_mut(&mut self.table).log = None;
        }
        is_there
    }

    /// Dirty page log, if one exists.
    #[must_use]
    pub fn log(&self) -> Option<&Arc<DirtyLog>> {
        self.table.log.as_ref()
    }
}

fn last_address(iova: u64, len: u64) -> Result<u64, DmaError> {
    len.checked_sub(1).and_then(|l| iova.checked_add(l)).ok_or(DmaError::Range { iova, len })
}

/// Handle of one thread on a [`DmaTable`]. The handle resolves addresses without a lock or an
/// atomic operation. The map of the last lookup is tried first.
///
/// A clone costs one plain increment. Every command in flight holds a clone (in its
/// [`Segments`](crate::Segments)), so that [`ViewWatch`] reports the end of the last command.
#[derive(Clone, Debug)]
pub struct View(Rc<ViewShared>);

#[derive(Debug)]
struct ViewShared {
    table: Arc<DmaTable>,
    last_hit: Hit,
    /// Pages that were resolved for writing, if the table has a log.
    view_pages: Option<ViewPages>,
}

impl ViewShared {
    fn add_to_log(&self) {
        if let (Some(view_pages), Some(log)) = (&self.view_pages, &self.table.log) {
            view_pages.add_to_log(log);
        }
    }
}

impl Drop for ViewShared {
    fn drop(&mut self) {
        self.add_to_log();
    }
}

/// Copy of the map that the last lookup found, in a few adjacent words.
#[derive(Debug)]
struct Hit {
    start: Cell<u64>,
    /// Length of the map in bytes. 0 before the first lookup, so that no address matches.
    len: Cell<u64>,
    /// Address of `start` in this process.
    base: Cell<NonNull<u8>>,
    /// True if writes are allowed and not logged. Otherwise a write needs the full lookup.
    writable: Cell<bool>,
}

impl Hit {
    fn set(&self, entry: &Entry, is_logged: bool) {
        self.start.set(entry.start);
        // The length of a map of the whole address space does not fit into 64 bits, so its last
        // byte is left out here.
        self.len.set((entry.last - entry.start).saturating_add(1));
        self.base.set(entry.bytes.base());
        self.writable.set(entry.bytes.is_writable() && !is_logged);
    }

    /// Address of `iova` in this process, and the number of bytes from it to the end of the map.
    #[inline]
    fn find(&self, iova: u64, write: bool) -> Option<(NonNull<u8>, u64)> {
        let offset = iova.wrapping_sub(self.start.get());
        let left = self.len.get().checked_sub(offset)?;
        if left == 0 || write && !self.writable.get() {
            return None;
        }
        // SAFETY: `offset` lies inside the entry's bytes, which `DmaSpace::map` cut to exactly
        // the length of the range.
        Some((unsafe { self.base.get().add(offset as usize) }, left))
    }
}

/// Watch that reports when a [`View`] is no longer used.
#[derive(Clone, Debug)]
pub struct ViewWatch(Weak<ViewShared>);

impl ViewWatch {
    /// True if the view and all its clones, including those of commands in flight, are dropped.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.0.strong_count() == 0
    }
}

impl View {
    /// Creates a handle on `table`.
    #[must_use]
    pub fn new(table: Arc<DmaTable>) -> Self {
        let last_hit = Hit {
            start: Cell::new(0),
            len: Cell::new(0),
            base: Cell::new(NonNull::dangling()),
            writable: Cell::new(false),
        };
        let view_pages = table.log.is_some().then(ViewPages::default);
        Self(Rc::new(ViewShared { table, last_hit, view_pages }))
    }

    /// Snapshot against which the view resolves addresses.
    #[must_use]
    pub fn table(&self) -> &Arc<DmaTable> {
        &self.0.table
    }

    /// Adds the recorded pages to the log while the view still exists. No access that was resolved
    /// through the view may be in flight.
    pub fn flush_log(&self) {
        self.0.add_to_log();
    }

    /// Records a range that a request may write later, if writes are logged.
    pub(crate) fn record_write(&self, iova: u64, len: u64) {
        if let Some(view_pages) = &self.0.view_pages {
            view_pages.add(iova, len);
        }
    }

    /// Creates a watch on this view and its clones. The caller drops the view and then polls the
    /// watch.
    #[must_use]
    pub fn watch(&self) -> ViewWatch {
        ViewWatch(Rc::downgrade(&self.0))
    }

    /// True if `other` is this view or a clone of it.
    #[inline]
    pub(crate) fn is(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// Address of `[iova, iova + len)` in this process, by the map of the last lookup. `None` if
    /// `len` is 0, the range is not completely in that map, or the map does not allow the access.
    #[inline]
    pub(crate) fn translate_last_hit(
        &self,
        iova: u64,
        len: usize,
        write: bool,
    ) -> Option<NonNull<u8>> {
        let (ptr, left) = self.0.last_hit.find(iova, write)?;
        ((len as u64).wrapping_sub(1) < left).then_some(ptr)
    }

    /// Address of `iova` in this process, and the number of bytes, at most `len`, from there to the
    /// map's end.
    #[inline]
    pub(crate) fn translate(
        &self,
        iova: u64,
        len: usize,
        write: bool,
    ) -> Result<(NonNull<u8>, usize), Fault> {
        let hit = &self.0.last_hit;
        if let Some((ptr, left)) = hit.find(iova, write) {
            return Ok((ptr, left.min(len as u64) as usize));
        }
        self.translate_slow(iova, len, write)
    }

    /// Slow path of [`translate`](Self::translate), for addresses outside the map of the last
    /// lookup, and for writes that are logged.
    fn translate_slow(
        &self,
        iova: u64,
        len: usize,
        write: bool,
    ) -> Result<(NonNull<u8>, usize), Fault> {
        let ViewShared { table, last_hit, view_pages } = &*self.0;
        let fault = Fault { iova, write };
        let entry = table.find(iova).ok_or(fault)?;
        last_hit.set(entry, view_pages.is_some());
        let (ptr, left) = last_hit.find(iova, false).ok_or(fault)?;
        let len = left.min(len as u64);
        if write {
            if !entry.bytes.is_writable() {
                return Err(fault);
            }
            if let Some(view_pages) = view_pages {
                view_pages.add(iova, len);
            }
        }
        Ok((ptr, len as usize))
    }

    /// Address of the byte at `iova` in this process, if it is mapped.
    #[must_use]
    pub fn address(&self, iova: u64) -> Option<usize> {
        self.translate(iova, 1, false).ok().map(|(byte, _)| byte.as_ptr() as usize)
    }

    /// Copies `into.len()` bytes from `iova`. The range may cross maps.
    ///
    /// # Errors
    /// [`Fault`] with the first address that is not mapped.
    pub fn read(&self, iova: u64, into: &mut [u8]) -> Result<(), Fault> {
        let mut done = 0;
        while done < into.len() {
            let at = iova.checked_add(done as u64).ok_or(Fault { iova, write: false })?;
            let (ptr, n) = self.translate(at, into.len() - done, false)?;
            // SAFETY: `translate` guarantees `n` mapped bytes. The destination is a Rust slice, and
            // no mapping overlaps it.
            unsafe {
                std::ptr::copy_nonoverlapping(ptr.as_ptr(), into[done..].as_mut_ptr(), n);
            }
            done += n;
        }
        Ok(())
    }

    /// Copies `from` to `iova`. The range may cross maps.
    ///
    /// # Errors
    /// [`Fault`] with the first address that is not mapped or read-only; bytes before it may have
    /// been written.
    pub fn write(&self, iova: u64, from: &[u8]) -> Result<(), Fault> {
        let mut done = 0;
        while done < from.len() {
            let at = iova.checked_add(done as u64).ok_or(Fault { iova, write: true })?;
            let (ptr, n) = self.translate(at, from.len() - done, true)?;
            // SAFETY: as in `read`. In addition, `translate` has checked that the bytes are
            // writable.
            unsafe {
                std::ptr::copy_nonoverlapping(from[done..].as_ptr(), ptr.as_ptr(), n);
            }
            done += n;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mapping, Protection};

    fn memory(len: u64) -> SharedBytes {
        Mapping::anonymous(len).unwrap().bytes()
    }

    #[test]
    fn maps_do_not_overlap_wrap_or_outgrow_their_memory() {
        let mut space = DmaSpace::default();
        let m = memory(8192);
        assert_eq!(space.map(0, 0, &m), Err(DmaError::Range { iova: 0, len: 0 }));
        assert!(matches!(space.map(u64::MAX, 2, &m), Err(DmaError::Range { .. })));
        assert!(matches!(space.map(0, 12288, &m), Err(DmaError::Short { have: 8192, .. })));
        space.map(0x1000, 8192, &m).unwrap();
        for (iova, len) in [(0x1000, 1), (0, 0x1001), (0x2fff, 1), (0, 8192)] {
            assert!(
                matches!(space.map(iova, len, &m), Err(DmaError::Overlap { other: 0x1000, .. })),
                "{iova:#x}+{len:#x}"
            );
        }
        space.map(0x3000, 4096, &m).unwrap();
        space.map(0, 4096, &m).unwrap();
        space.map(u64::MAX - 4095, 4096, &m).unwrap(); // up to the last address
        assert_eq!(space.table().len(), 4);
    }

    /// As many maps as a virtual IOMMU creates, changed in random order and compared with a simple
    /// model.
    #[test]
    fn tens_of_thousands_of_maps_are_found_and_removed() {
        use std::collections::BTreeMap;
        const COUNT: u64 = 40_000;
        let memory = memory(3 * 4096);
        let (mut space, mut model) = (DmaSpace::default(), BTreeMap::new());
        // Each number below COUNT occurs once, far from its predecessor.
        let scattered = |n: u64| n * 25_583 % COUNT;
        let check = |space: &DmaSpace, model: &BTreeMap<u64, u64>| {
            let table = space.table();
            assert!(table.ranges().eq(model.iter().map(|(start, len)| (*start, *len))));
            assert_eq!((table.len(), table.is_empty()), (model.len(), model.is_empty()));
            assert!(table.chunks.iter().all(|chunk| !chunk.is_empty() && chunk.len() <= CHUNK));
            let worst = model.len() * 2 / MAX_MERGED + 3;
            assert!(table.chunks.len() <= worst, "{} for {}", table.chunks.len(), model.len());
        };
        for n in (0..COUNT).map(scattered) {
            let (start, len) = (n * 4 * 4096, 4096 * (n % 3 + 1));
            space.map(start, len, &memory).unwrap();
            model.insert(start, len);
        }
        check(&space, &model);
        let before = Arc::clone(space.table());
        for n in (0..COUNT).map(scattered) {
            let (start, len) = (n * 4 * 4096, 4096 * (n % 3 + 1));
            let table = space.table();
            for (at, there) in [(start, true), (start + len - 1, true), (start + len, false)] {
                assert_eq!(table.find(at).is_some(), there, "{at:#x}");
            }
            assert!(matches!(
                space.map(start + len - 1, 4096, &memory),
                Err(DmaError::Overlap { other, .. }) if other == start
            ));
            if n % 10 < 7 {
                space.unmap(start, len).unwrap();
                model.remove(&start);
                assert!(matches!(space.unmap(start, len), Err(DmaError::NotMapped { .. })));
            }
            if n % 2000 == 0 {
                check(&space, &model);
                // One call removes the remaining maps of a part of the address space.
                let part = n * 4 * 4096..(n + 1000) * 4 * 4096;
                if model.range(part.clone()).next().is_some() {
                    space.unmap(part.start, part.end - part.start).unwrap();
                    model.retain(|start, _| !part.contains(start));
                }
                for n in n..n + 1000 {
                    space.map(n * 4 * 4096, 4096 * (n % 3 + 1), &memory).unwrap();
                    model.insert(n * 4 * 4096, 4096 * (n % 3 + 1));
                }
                check(&space, &model);
            }
        }
        assert_eq!(before.len(), COUNT as usize, "a snapshot stays as it was");
        space.unmap(0, u64::MAX).unwrap();
        assert!(space.table().is_empty());
    }

    #[test]
    fn memory_and_bus_address_are_translated_both_ways() {
        let mut space = DmaSpace::default();
        let (one, two) = (memory(8192), memory(4096));
        space.map(0x1000, 4096, &one).unwrap();
        space.map(0x4000, 8192, &one).unwrap();
        let table = space.table();
        assert_eq!(table.iova_of(one.mapping()), Some(0x1000));
        assert!(table.mapping_at(0x5fff).is_some_and(|found| Arc::ptr_eq(found, one.mapping())));
        assert!(table.mapping_at(0x2000).is_none());
        assert_eq!(table.iova_of(two.mapping()), None);
    }

    #[test]
    fn a_table_detects_that_its_page_tables_may_exceed_the_limit() {
        let mut space = DmaSpace::default();
        let large = memory(page_tables::MIN_BYTES_TO_CHECK);
        let is_sparse = |space: &DmaSpace| space.table().is_sparse();
        space.map(0, page_tables::MIN_BYTES_TO_CHECK / 2, &large).unwrap();
        assert!(!is_sparse(&space));
        space.map(1 << 50, page_tables::MIN_BYTES_TO_CHECK / 2, &large).unwrap();
        assert!(is_sparse(&space));
        space.unmap(1 << 50, page_tables::MIN_BYTES_TO_CHECK / 2).unwrap();
        assert!(!is_sparse(&space));
        // A few single pages can need as many page tables as large maps.
        let few = page_tables::MIN_BYTES_TO_CHECK / page_tables::SPAN / 4;
        (0..few).for_each(|n| space.map(1 << 50 | n << 12, 4096, &large).unwrap());
        assert!(is_sparse(&space));
        space.unmap(0, u64::MAX).unwrap();
        assert_eq!(space.table().reach, 0);
    }

    #[test]
    fn unmap_takes_whole_maps_only() {
        let mut space = DmaSpace::default();
        let m = memory(8192);
        space.map(0x1000, 0x1000, &m).unwrap();
        space.map(0x2000, 0x2000, &m).unwrap();
        assert!(matches!(space.unmap(0x1000, 0x2000), Err(DmaError::Split { other: 0x2000, .. })));
        assert!(matches!(space.unmap(0x8000, 0x1000), Err(DmaError::NotMapped { .. })));
        space.unmap(0, 0x4000).unwrap();
        assert!(space.table().is_empty());
    }

    #[test]
    fn a_view_reads_across_maps_and_names_the_first_hole() {
        let mut space = DmaSpace::default();
        let (a, b) = (memory(4096), memory(4096));
        a.fill(0, 4096, 1).unwrap();
        b.fill(0, 4096, 2).unwrap();
        space.map(0x1000, 4096, &a).unwrap();
        space.map(0x2000, 4096, &b).unwrap();
        let view = View::new(Arc::clone(space.table()));
        let mut out = [0; 8];
        view.read(0x1ffc, &mut out).unwrap();
        assert_eq!(out, [1, 1, 1, 1, 2, 2, 2, 2]);
        assert_eq!(view.read(0x2ffc, &mut out), Err(Fault { iova: 0x3000, write: false }));
        assert_eq!(view.write(0xffc, &out), Err(Fault { iova: 0xffc, write: true }));
        assert!(view.read(u64::MAX - 3, &mut out).is_err());
        view.write(0x1ffe, &[9; 4]).unwrap();
        assert_eq!((a.read::<u16>(4094), b.read::<u16>(0)), (Some(0x0909), Some(0x0909)));
    }

    #[test]
    fn read_only_maps_fault_on_writes() {
        let owner = Mapping::shared("ro", 4096).unwrap();
        let ro = Mapping::from_fd(owner.fd().unwrap(), 0, 4096, Protection::Read).unwrap();
        let mut space = DmaSpace::default();
        space.map(0, 4096, &ro.bytes()).unwrap();
        let view = View::new(Arc::clone(space.table()));
        assert!(view.read(0, &mut [0; 4]).is_ok());
        assert_eq!(view.write(16, &[0; 4]), Err(Fault { iova: 16, write: true }));
    }

    #[test]
    fn a_watch_detects_the_release_by_the_last_user() {
        let view = View::new(Arc::default());
        let watch = view.watch();
        let in_flight = view.clone();
        drop(view);
        assert!(!watch.is_idle());
        drop(in_flight);
        assert!(watch.is_idle());
    }
}
