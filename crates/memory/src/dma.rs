//! What the peer mapped where: I/O virtual addresses to bytes of this process.

use crate::dirty::{DirtyLog, Noted};
use crate::error::{DmaError, Fault};
use crate::mapping::Mapping;
use crate::page_tables;
use crate::shared::SharedBytes;
use std::cell::Cell;
use std::ptr::NonNull;
use std::rc::{Rc, Weak};
use std::sync::Arc;

#[derive(Clone, Debug)]
struct Entry {
    start: u64,
    /// The last address, inclusive, so that a map can end at the end of the address space.
    last: u64,
    bytes: SharedBytes,
}

impl Entry {
    /// What page tables for it map: there may be others' memory on both sides.
    fn reach(&self) -> u64 {
        page_tables::reach(self.last - self.start)
    }
}

/// Most maps in a chunk of a table, and how many two neighbours have together when they become one.
const CHUNK: usize = 512;
const FEW: usize = CHUNK / 4;

/// An immutable snapshot of all maps, sorted by address.
///
/// Snapshots share what is the same in them: a change copies one chunk of the maps, and the list of
/// the chunks. With a guest's IOMMU in between there are tens of thousands of maps, and they change
/// all the time.
#[derive(Clone, Debug, Default)]
pub struct DmaTable {
    /// None of them is empty.
    chunks: Vec<Arc<Vec<Entry>>>,
    /// What the page tables of these maps can map at most, in bytes.
    reach: u64,
    /// Where it is noted what is written.
    log: Option<Arc<DirtyLog>>,
}

impl DmaTable {
    /// How many ranges are mapped.
    #[must_use]
    pub fn len(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.len()).sum()
    }

    /// Whether nothing is mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Whether so much is mapped that the page tables for it could be too many: who touches it
    /// counts that, see [`page_tables`].
    #[must_use]
    pub fn is_sparse(&self) -> bool {
        self.reach > page_tables::MATTERS
    }

    fn entries(&self) -> impl Iterator<Item = &Entry> + '_ {
        self.chunks.iter().flat_map(|chunk| chunk.iter())
    }

    /// What the page tables of the maps can map at most, in bytes, if that
    /// [could be too many](Self::is_sparse), and else 0.
    #[must_use]
    pub fn sparse_bytes(&self) -> u64 {
        if self.is_sparse() { self.reach } else { 0 }
    }

    /// Whether the memory behind some range was lost to a truncation (see [`crate::sigbus`]).
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.entries().any(|e| e.bytes.mapping().is_poisoned())
    }

    /// The memory behind the ranges; one mapping may be behind several.
    pub fn mappings(&self) -> impl Iterator<Item = &Arc<Mapping>> + '_ {
        self.entries().map(|e| e.bytes.mapping())
    }

    /// The memory behind the range in which `iova` lies.
    #[must_use]
    pub fn mapping_at(&self, iova: u64) -> Option<&Arc<Mapping>> {
        self.find(iova).map(|e| e.bytes.mapping())
    }

    /// The first address of a range that `mapping` is behind. Looks at one after the other.
    #[must_use]
    pub fn iova_of(&self, mapping: &Arc<Mapping>) -> Option<u64> {
        self.entries().find(|e| Arc::ptr_eq(e.bytes.mapping(), mapping)).map(|e| e.start)
    }

    /// The mapped ranges as (first IOVA, length in bytes), in order.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.entries().map(|e| (e.start, e.last - e.start + 1))
    }

    /// The bytes at `[iova, iova + len)` if one map holds them all.
    #[must_use]
    pub fn bytes(&self, iova: u64, len: u64) -> Option<SharedBytes> {
        let entry = self.find(iova)?;
        let offset = usize::try_from(iova - entry.start).ok()?;
        entry.bytes.slice(offset, usize::try_from(len).ok()?)
    }

    /// The bytes from `iova` to the end of its map, at most `len`; `None` if it is not mapped.
    pub(crate) fn bytes_up_to(&self, iova: u64, len: u64) -> Option<SharedBytes> {
        let entry = self.find(iova)?;
        let len = len.min((entry.last - iova).saturating_add(1));
        let offset = usize::try_from(iova - entry.start).ok()?;
        entry.bytes.slice(offset, usize::try_from(len).ok()?)
    }

    fn find(&self, iova: u64) -> Option<&Entry> {
        let chunk = self.chunks.get(self.chunk_of(iova))?;
        let after = chunk.partition_point(|e| e.start <= iova);
        let entry = &chunk[after.checked_sub(1)?];
        (iova <= entry.last).then_some(entry)
    }

    /// The chunk in which a map of `iova` is, if there is one, and belongs otherwise.
    fn chunk_of(&self, iova: u64) -> usize {
        let begins_above = |chunk: &Arc<Vec<Entry>>| chunk.first().is_some_and(|e| e.start <= iova);
        self.chunks.partition_point(begins_above).saturating_sub(1)
    }

    /// The maps that have an address in `[first, last]`.
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

    /// Takes the maps inside `[first, last]` out.
    fn remove(&mut self, first: u64, last: u64) {
        let from = self.chunk_of(first);
        let mut index = from;
        while let Some(chunk) = self.chunks.get_mut(index) {
            if chunk.first().is_some_and(|e| e.start > last) {
                break;
            }
            let stays = |e: &Entry| e.start < first || e.last > last;
            if !chunk.iter().all(stays) {
                let gone = chunk.iter().filter(|e| !stays(e)).map(Entry::reach);
                self.reach = self.reach.saturating_sub(gone.fold(0, u64::saturating_add));
                Arc::make_mut(chunk).retain(stays);
            }
            if chunk.is_empty() {
                self.chunks.remove(index);
            } else {
                index += 1;
            }
        }
        // Chunks of a few maps each would make the list of them long.
        for index in [from, from.saturating_sub(1)] {
            if let Some([one, two]) = self.chunks.get_mut(index..index + 2)
                && one.len() + two.len() <= FEW
            {
                Arc::make_mut(one).extend_from_slice(two);
                self.chunks.remove(index + 1);
            }
        }
    }
}

/// The control plane's picture of a peer's memory. Each change makes a new [`DmaTable`], which
/// the workers take over at a quiescent point.
#[derive(Debug, Default)]
pub struct DmaSpace {
    table: Arc<DmaTable>,
    peer: Option<u32>,
}

impl DmaSpace {
    /// The memory of a peer with this number, for [`losses`](crate::sigbus::losses).
    #[must_use]
    pub fn of_peer(peer: u32) -> Self {
        Self { peer: Some(peer), ..Self::default() }
    }

    /// The current snapshot.
    #[must_use]
    pub fn table(&self) -> &Arc<DmaTable> {
        &self.table
    }

    /// Maps `len` bytes at `iova` to `bytes`.
    ///
    /// # Errors
    /// [`DmaError`] if the range is bad, overlaps another map, or is longer than the memory.
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
        // Copied if a snapshot of it is out, which is nearly always so.
        Arc::make_mut(&mut self.table).insert(Entry { start: iova, last, bytes });
        Ok(())
    }

    /// Takes away every map inside `[iova, iova + len)`.
    ///
    /// Memory stays mapped in the process until the last snapshot, view and command that can
    /// reach it is gone.
    ///
    /// # Errors
    /// [`DmaError`] if the range is bad, holds no map, or would split one.
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

    /// Takes away every map.
    pub fn clear(&mut self) {
        let log = self.table.log.clone();
        self.table = Arc::new(DmaTable { log, ..DmaTable::default() });
    }

    /// From the next snapshot on, what is written through views is noted. What is written to a
    /// [`Ring`](crate::Ring) or a [cell](crate::SharedU32) is for its owner to
    /// [add](DirtyLog::add). False if there is a log already.
    pub fn start_log(&mut self) -> bool {
        let is_new = self.table.log.is_none();
        if is_new {
            Arc::make_mut(&mut self.table).log = Some(Arc::default());
        }
        is_new
    }

    /// From the next snapshot on, nothing is noted. False if nothing was.
    pub fn stop_log(&mut self) -> bool {
        let is_there = self.table.log.is_some();
        if is_there {
            Arc::make_mut(&mut self.table).log = None;
        }
        is_there
    }

    /// The log, if there is one.
    #[must_use]
    pub fn log(&self) -> Option<&Arc<DirtyLog>> {
        self.table.log.as_ref()
    }
}

fn last_address(iova: u64, len: u64) -> Result<u64, DmaError> {
    len.checked_sub(1).and_then(|l| iova.checked_add(l)).ok_or(DmaError::Range { iova, len })
}

/// One thread's handle on a [`DmaTable`]: resolves addresses without a lock or an atomic, with
/// the last map that was hit tried first.
///
/// Cloning it is a plain increment: every command in flight holds one (in its
/// [`Segments`](crate::Segments)), so that [`ViewWatch`] shows when the last is gone.
#[derive(Clone, Debug)]
pub struct View(Rc<ViewShared>);

#[derive(Debug)]
struct ViewShared {
    table: Arc<DmaTable>,
    last_hit: Hit,
    /// What was resolved for writing, if the table has a log.
    noted: Option<Noted>,
}

impl ViewShared {
    fn hand_in(&self) {
        if let (Some(noted), Some(log)) = (&self.noted, &self.table.log) {
            noted.hand_in(log);
        }
    }
}

impl Drop for ViewShared {
    fn drop(&mut self) {
        self.hand_in();
    }
}

/// A map that was hit, in few words next to each other.
#[derive(Debug)]
struct Hit {
    start: Cell<u64>,
    /// 0 before the first hit: no address lies in that.
    len: Cell<u64>,
    /// Where `start` is in this process.
    base: Cell<NonNull<u8>>,
    /// Writes need no second look: they are allowed, and nobody notes them.
    writable: Cell<bool>,
}

impl Hit {
    fn set(&self, entry: &Entry, is_logged: bool) {
        self.start.set(entry.start);
        // The map of all addresses would be one byte longer than can be said.
        self.len.set((entry.last - entry.start).saturating_add(1));
        self.base.set(entry.bytes.base());
        self.writable.set(entry.bytes.is_writable() && !is_logged);
    }

    /// Where `iova` is, and how many bytes follow it.
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

/// Shows when every use of a [`View`] has ended.
#[derive(Clone, Debug)]
pub struct ViewWatch(Weak<ViewShared>);

impl ViewWatch {
    /// Whether the view and all its clones, those held by commands in flight among them, are gone.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.0.strong_count() == 0
    }
}

impl View {
    /// A fresh handle on `table`.
    #[must_use]
    pub fn new(table: Arc<DmaTable>) -> Self {
        let last_hit = Hit {
            start: Cell::new(0),
            len: Cell::new(0),
            base: Cell::new(NonNull::dangling()),
            writable: Cell::new(false),
        };
        let noted = table.log.is_some().then(Noted::default);
        Self(Rc::new(ViewShared { table, last_hit, noted }))
    }

    /// The snapshot that the view resolves against.
    #[must_use]
    pub fn table(&self) -> &Arc<DmaTable> {
        &self.0.table
    }

    /// Has what was noted of writes in the log now, and not at the end of the view: nothing that
    /// was resolved through it is in flight.
    pub fn hand_in_log(&self) {
        self.0.hand_in();
    }

    /// A watch on this view and its clones; drop the view itself and ask.
    #[must_use]
    pub fn watch(&self) -> ViewWatch {
        ViewWatch(Rc::downgrade(&self.0))
    }

    /// Whether `other` is this view or a clone of it.
    #[inline]
    pub(crate) fn is(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// Where `[iova, iova + len)` is in this process, if all of it lies in the map that was last
    /// hit, may be used so, and `len` is not 0.
    #[inline]
    pub(crate) fn translate_again(
        &self,
        iova: u64,
        len: usize,
        write: bool,
    ) -> Option<NonNull<u8>> {
        let (ptr, left) = self.0.last_hit.find(iova, write)?;
        ((len as u64).wrapping_sub(1) < left).then_some(ptr)
    }

    /// Where `iova` is in this process, and how many bytes (at most `len`) follow it in its map.
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
        self.translate_anew(iova, len, write)
    }

    /// As [`translate`](Self::translate), for another map, or for a write that is noted.
    fn translate_anew(
        &self,
        iova: u64,
        len: usize,
        write: bool,
    ) -> Result<(NonNull<u8>, usize), Fault> {
        let ViewShared { table, last_hit, noted } = &*self.0;
        let fault = Fault { iova, write };
        let entry = table.find(iova).ok_or(fault)?;
        last_hit.set(entry, noted.is_some());
        let (ptr, left) = last_hit.find(iova, false).ok_or(fault)?;
        let len = left.min(len as u64);
        if write {
            if !entry.bytes.is_writable() {
                return Err(fault);
            }
            if let Some(noted) = noted {
                noted.add(iova, len);
            }
        }
        Ok((ptr, len as usize))
    }

    /// The address in this process of the byte at `iova`, if it is mapped.
    #[must_use]
    pub fn address(&self, iova: u64) -> Option<usize> {
        self.translate(iova, 1, false).ok().map(|(byte, _)| byte.as_ptr() as usize)
    }

    /// Copies `into.len()` bytes from `iova`, across maps if need be.
    ///
    /// # Errors
    /// [`Fault`] with the first address that is not mapped.
    pub fn read(&self, iova: u64, into: &mut [u8]) -> Result<(), Fault> {
        let mut done = 0;
        while done < into.len() {
            let at = iova.checked_add(done as u64).ok_or(Fault { iova, write: false })?;
            let (ptr, n) = self.translate(at, into.len() - done, false)?;
            // SAFETY: `translate` vouches for `n` mapped bytes; the destination is a Rust slice,
            // which no mapping overlaps.
            unsafe {
                std::ptr::copy_nonoverlapping(ptr.as_ptr(), into[done..].as_mut_ptr(), n);
            }
            done += n;
        }
        Ok(())
    }

    /// Copies `from` to `iova`, across maps if need be.
    ///
    /// # Errors
    /// [`Fault`] with the first address that is not mapped or read-only; bytes before it may have
    /// been written.
    pub fn write(&self, iova: u64, from: &[u8]) -> Result<(), Fault> {
        let mut done = 0;
        while done < from.len() {
            let at = iova.checked_add(done as u64).ok_or(Fault { iova, write: true })?;
            let (ptr, n) = self.translate(at, from.len() - done, true)?;
            // SAFETY: as in `read`, and `translate` checked that the bytes may be written.
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

    /// As many as a guest's IOMMU makes, in no order, against a map that can not be wrong.
    #[test]
    fn tens_of_thousands_of_maps_are_found_and_taken_away() {
        use std::collections::BTreeMap;
        const COUNT: u64 = 40_000;
        let memory = memory(3 * 4096);
        let (mut space, mut model) = (DmaSpace::default(), BTreeMap::new());
        // Each number below COUNT comes once, far from the one before it.
        let scattered = |n: u64| n * 25_583 % COUNT;
        let check = |space: &DmaSpace, model: &BTreeMap<u64, u64>| {
            let table = space.table();
            assert!(table.ranges().eq(model.iter().map(|(start, len)| (*start, *len))));
            assert_eq!((table.len(), table.is_empty()), (model.len(), model.is_empty()));
            assert!(table.chunks.iter().all(|chunk| !chunk.is_empty() && chunk.len() <= CHUNK));
            let worst = model.len() * 2 / FEW + 3;
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
                // What is left of a part of it goes at once.
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
    fn memory_is_found_by_its_address_and_its_address_by_the_memory() {
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
    fn a_table_knows_whether_its_page_tables_could_be_too_many() {
        let mut space = DmaSpace::default();
        let large = memory(page_tables::MATTERS);
        let is_sparse = |space: &DmaSpace| space.table().is_sparse();
        space.map(0, page_tables::MATTERS / 2, &large).unwrap();
        assert!(!is_sparse(&space));
        space.map(1 << 50, page_tables::MATTERS / 2, &large).unwrap();
        assert!(is_sparse(&space));
        space.unmap(1 << 50, page_tables::MATTERS / 2).unwrap();
        assert!(!is_sparse(&space));
        // Single pages can lie in as many page tables, and more.
        let few = page_tables::MATTERS / page_tables::SPAN / 4;
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
    fn a_watch_sees_the_last_user_go() {
        let view = View::new(Arc::default());
        let watch = view.watch();
        let in_flight = view.clone();
        drop(view);
        assert!(!watch.is_idle());
        drop(in_flight);
        assert!(watch.is_idle());
    }
}
