//! Data buffer of a command: a list of pieces of host memory.

use crate::copy;
use crate::dma::{DmaTable, View};
use crate::error::Fault;
use crate::mapping::Mapping;
use crate::shared::SharedBytes;
use crate::view_change::{AfterChange, ViewChange};
use std::ptr::NonNull;
use std::sync::Arc;

/// Contiguous piece of host memory with the layout of an `iovec`.
///
/// A segment does not keep its memory mapped: code that passes it to the kernel must hold the
/// [`Segments`] that contain it until the kernel has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Segment {
    ptr: NonNull<u8>,
    len: usize,
}

impl Segment {
    /// Address of the first byte in this process.
    #[inline]
    #[must_use]
    pub fn address(&self) -> usize {
        self.ptr.as_ptr() as usize
    }

    /// Length in bytes, never 0.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: empty pieces are not stored.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Owner of the data's memory, which keeps the pieces mapped.
#[derive(Clone, Debug)]
enum Owner {
    Nothing,
    View(#[allow(dead_code, reason = "held so that a ViewWatch sees it")] View),
    Bytes(#[allow(dead_code, reason = "held so that the memory stays mapped")] SharedBytes),
}

/// Resolved data buffer of a command: pieces of host memory in order, with neighbours merged.
///
/// The value keeps the memory mapped. After its list has grown to the size that the commands of a
/// queue need, [`clear`](Self::clear) and another resolution allocate no memory.
#[derive(Debug)]
pub struct Segments {
    list: Vec<Segment>,
    total: usize,
    writable: bool,
    owner: Owner,
    /// Number of segments of the SGL from which the data was last resolved.
    lists: usize,
}

// `Segments` is not `Send`, because a `View` counts its users without atomics.

impl Default for Segments {
    fn default() -> Self {
        Self::new()
    }
}

impl Segments {
    /// Creates an empty buffer.
    #[must_use]
    pub const fn new() -> Self {
        Self { list: Vec::new(), total: 0, writable: false, owner: Owner::Nothing, lists: 0 }
    }

    /// Creates a buffer of one piece, all of `bytes`. For data of a command in the process's own
    /// memory.
    #[must_use]
    pub fn from_bytes(bytes: &SharedBytes) -> Self {
        let mut all = Self::new();
        all.set_bytes(bytes);
        all
    }

    /// Replaces the data by all of `bytes` as one piece, as [`from_bytes`](Self::from_bytes)
    /// does, and reuses the list's allocation.
    pub fn set_bytes(&mut self, bytes: &SharedBytes) {
        self.list.clear();
        if let (Some(ptr), false) = (NonNull::new(bytes.as_ptr()), bytes.is_empty()) {
            self.list.push(Segment { ptr, len: bytes.len() });
        }
        (self.total, self.writable, self.lists) = (bytes.len(), bytes.is_writable(), 0);
        self.owner = Owner::Bytes(bytes.clone());
    }

    /// Releases the memory and the view. The list's allocation is kept for the next command.
    #[inline]
    pub fn clear(&mut self) {
        self.list.clear();
        self.total = 0;
        self.owner = Owner::Nothing;
    }

    /// Removes the data and releases the view, if the data were resolved through one. Data in other
    /// memory stay.
    pub fn release_view(&mut self) {
        if matches!(self.owner, Owner::View(_)) {
            self.clear();
        }
    }

    /// Moves the data to the view of `change`. Data in other memory stay. If a part of the data is
    /// not mapped any more, the data are removed.
    pub fn move_to(&mut self, change: &mut ViewChange) -> AfterChange {
        let Owner::View(old) = &self.owner else { return AfterChange::Moved };
        if old.is(change.view()) {
            return AfterChange::Moved;
        }
        let pieces = self.list.iter().map(|piece| (piece.address(), piece.len));
        let state = change.state(old, pieces, self.writable);
        match state {
            AfterChange::Moved => self.owner = Owner::View(change.view().clone()),
            AfterChange::Unmapped => self.clear(),
            AfterChange::Unknown => {}
        }
        state
    }

    /// DMA table through which the data were resolved; `None` for data in other memory.
    #[must_use]
    pub fn table(&self) -> Option<&Arc<DmaTable>> {
        match &self.owner {
            Owner::View(view) => Some(view.table()),
            Owner::Nothing | Owner::Bytes(_) => None,
        }
    }

    /// Removes the data but keeps the view, for the next command that uses the same view.
    #[inline]
    pub fn rewind(&mut self) {
        self.list.clear();
        self.total = 0;
    }

    /// Number of pieces that fit without an allocation.
    #[must_use]
    pub fn room(&self) -> usize {
        self.list.capacity()
    }

    /// Moves the data out and leaves `self` empty.
    #[inline]
    #[must_use]
    pub fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    /// Prepares for data that is resolved through `view`. If the device writes the data (a Read
    /// command), `write` is true, and every address is checked to be writable.
    #[inline(always)]
    pub(crate) fn start(&mut self, view: &View, write: bool) {
        self.list.clear();
        self.total = 0;
        self.hold(view, write);
    }

    #[inline(always)]
    fn hold(&mut self, view: &View, write: bool) {
        self.writable = write;
        if !matches!(&self.owner, Owner::View(kept) if kept.is(view)) {
            self.owner = Owner::View(view.clone());
        }
    }

    /// Prepares for data that is resolved from an SGL: see [`start`](Self::start).
    pub(crate) fn start_list(&mut self, view: &View, write: bool) {
        self.lists = 0;
        self.start(view, write);
    }

    /// Counts a segment of an SGL that is read.
    pub(crate) fn add_list(&mut self) {
        self.lists += 1;
    }

    /// Number of segments of the SGL from which the data was last resolved. Each segment is in a
    /// different place of memory.
    #[must_use]
    pub fn lists(&self) -> usize {
        self.lists
    }

    /// Replaces the data by `ranges` (address and length) of the memory of `view`, in order. If the
    /// device writes the data, `write` is true, and every address is checked to be writable.
    ///
    /// # Errors
    /// [`Fault`]; the buffer is empty then.
    #[inline]
    pub fn resolve_ranges(
        &mut self,
        view: &View,
        ranges: &[(u64, usize)],
        write: bool,
    ) -> Result<(), Fault> {
        if let [(iova, len)] = ranges
            && self.set_whole(view, *iova, *len, write)
        {
            return Ok(());
        }
        self.start(view, write);
        for (iova, len) in ranges {
            if let Err(fault) = self.push(view, *iova, *len) {
                self.rewind();
                return Err(fault);
            }
        }
        Ok(())
    }

    /// Replaces the data by one piece, if `[iova, iova + len)` is in the map of the last lookup, as
    /// for most commands. Otherwise returns false and changes nothing.
    #[inline(always)]
    pub(crate) fn set_whole(&mut self, view: &View, iova: u64, len: usize, write: bool) -> bool {
        let Some(ptr) = view.translate_last_hit(iova, len, write) else { return false };
        self.hold(view, write);
        self.total = len;
        // Overwriting the first entry is faster than clearing the list and adding an entry.
        if let Some(first) = self.list.first_mut() {
            *first = Segment { ptr, len };
            self.list.truncate(1);
        } else {
            self.list.push(Segment { ptr, len });
        }
        true
    }

    /// Appends `[iova, iova + len)`, which may cross maps.
    pub(crate) fn push(&mut self, view: &View, iova: u64, len: usize) -> Result<(), Fault> {
        let mut done = 0;
        while done < len {
            let at = iova
                .checked_add(done as u64)
                .ok_or(Fault { iova: u64::MAX, write: self.writable })?;
            let (ptr, n) = view.translate(at, len - done, self.writable)?;
            self.add(ptr, n);
            done += n;
        }
        self.total += len;
        Ok(())
    }

    /// Appends `len` bytes that repeat `bytes`. The content of `bytes` is never read.
    pub(crate) fn push_repeated(&mut self, bytes: &'static SharedBytes, len: usize) {
        let Some(ptr) = NonNull::new(bytes.as_ptr()).filter(|_| !bytes.is_empty()) else { return };
        let mut done = 0;
        while done < len {
            let n = (len - done).min(bytes.len());
            self.list.push(Segment { ptr, len: n });
            done += n;
        }
        self.total += len;
    }

    #[inline]
    fn add(&mut self, ptr: NonNull<u8>, len: usize) {
        if let Some(last) = self.list.last_mut()
            && last.ptr.as_ptr() as usize + last.len == ptr.as_ptr() as usize
        {
            // Two maps can be neighbours in this process by chance. One copy over both has the same
            // effect as two copies, since all of the memory is mapped. The pointer keeps the
            // provenance of the first map, which for memory from `mmap` is the exposed address
            // space.
            last.len += len;
            return;
        }
        self.list.push(Segment { ptr, len });
    }

    /// Pieces, in order.
    #[inline]
    #[must_use]
    pub fn pieces(&self) -> &[Segment] {
        &self.list
    }

    /// Mapping that contains the byte at `address` of this process, among the mappings of the data.
    /// A caller that passes the data to a device uses it to check whether the device can access the
    /// memory.
    #[must_use]
    pub fn mapping_at(&self, address: usize) -> Option<&Arc<Mapping>> {
        match &self.owner {
            Owner::Nothing => None,
            Owner::View(view) => view.table().mappings().find(|mapping| mapping.holds(address)),
            Owner::Bytes(bytes) => Some(bytes.mapping()).filter(|mapping| mapping.holds(address)),
        }
    }

    /// Stores parts of the data in `into`, in order: from each of the first `count` strides (of
    /// `stride` bytes), the `len` bytes from `offset` on. `None` if the data is too short.
    #[must_use]
    pub fn select(
        &self,
        (offset, len): (usize, usize),
        stride: usize,
        count: usize,
        into: &mut Self,
    ) -> Option<()> {
        into.clear();
        (into.writable, into.owner) = (self.writable, self.owner.clone());
        let (mut pieces, mut start) = (self.list.iter(), 0);
        let mut piece = pieces.next();
        for nth in 0..count {
            let mut at = nth.checked_mul(stride)?.checked_add(offset)?;
            let end = at.checked_add(len).filter(|end| *end <= self.total)?;
            while at < end {
                let now = piece?;
                if at >= start + now.len {
                    start += now.len;
                    piece = pieces.next();
                    continue;
                }
                let n = (end - at).min(start + now.len - at);
                // SAFETY: `at` lies inside the piece, which begins at `start`.
                into.add(unsafe { now.ptr.add(at - start) }, n);
                at += n;
            }
        }
        into.total = len * count;
        Some(())
    }

    /// Shortens the data to its first `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        let mut left = len.min(self.total);
        self.total = left;
        self.list.retain_mut(|piece| {
            piece.len = piece.len.min(left);
            left -= piece.len;
            piece.len != 0
        });
    }

    /// Appends the memory of `[iova, iova + len)`. `view` must be the view through which the
    /// existing data was resolved.
    ///
    /// # Errors
    /// [`Fault`]; the data is unchanged then.
    pub fn extend(&mut self, view: &View, iova: u64, len: usize) -> Result<(), Fault> {
        let (pieces, total) = (self.list.len(), self.total);
        let last = self.list.last().copied();
        let outcome = self.push(view, iova, len);
        if outcome.is_err() {
            self.list.truncate(pieces);
            if let (Some(place), Some(last)) = (self.list.last_mut(), last) {
                *place = last;
            }
            self.total = total;
        }
        outcome
    }

    /// Appends the data of `other`. Returns `None` and changes nothing if `self` and `other` have
    /// different views or directions.
    #[must_use]
    pub fn append(&mut self, other: &Self) -> Option<()> {
        let is_same = match (&self.owner, &other.owner) {
            (Owner::View(one), Owner::View(other)) => one.is(other),
            _ => false,
        };
        if !is_same || self.writable != other.writable {
            return None;
        }
        other.list.iter().for_each(|piece| self.add(piece.ptr, piece.len));
        self.total += other.total;
        Some(())
    }

    /// Length of the data in bytes.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.total
    }

    /// True if there is no data.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.total == 0
    }

    /// True if the device may write the data.
    #[inline]
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// True if the address and the length of every piece are multiples of `alignment` (a power of
    /// two), as direct I/O requires.
    #[inline]
    #[must_use]
    pub fn is_aligned(&self, alignment: usize) -> bool {
        self.list.iter().all(|s| (s.address() | s.len) & (alignment - 1) == 0)
    }

    /// Calls `each` with the pieces of `[offset, offset + len)`. Returns `None` without a call if
    /// the data is too short.
    #[inline]
    fn for_range(
        &self,
        offset: usize,
        len: usize,
        mut each: impl FnMut(NonNull<u8>, usize),
    ) -> Option<()> {
        if offset > self.total || len > self.total - offset {
            return None;
        }
        let (mut skip, mut left) = (offset, len);
        for piece in &self.list {
            if left == 0 {
                break;
            }
            if skip >= piece.len {
                skip -= piece.len;
                continue;
            }
            let n = (piece.len - skip).min(left);
            // SAFETY: `skip` is less than the piece's length.
            each(unsafe { piece.ptr.add(skip) }, n);
            skip = 0;
            left -= n;
        }
        Some(())
    }

    /// Copies data from `offset` into all of `into`. Returns `None` without a copy if the data is
    /// too short.
    #[must_use]
    pub fn read_into(&self, offset: usize, into: &mut [u8]) -> Option<()> {
        let mut done = 0;
        self.for_range(offset, into.len(), |ptr, n| {
            // SAFETY: the piece is readable, and `self.owner` keeps it mapped. The destination is a
            // Rust slice, and no mapping overlaps it. The pieces of `for_range` together have the
            // slice's length.
            unsafe {
                std::ptr::copy_nonoverlapping(ptr.as_ptr(), into[done..].as_mut_ptr(), n);
            }
            done += n;
        })
    }

    /// Copies all of `from` into the data at `offset`. Returns `None` without a copy if the data is
    /// too short or was resolved only for reading.
    #[must_use]
    pub fn write_from(&self, offset: usize, from: &[u8]) -> Option<()> {
        if !self.writable {
            return None;
        }
        let mut done = 0;
        self.for_range(offset, from.len(), |ptr, n| {
            // SAFETY: as in `read_into`, and every piece was resolved for writing.
            unsafe {
                std::ptr::copy_nonoverlapping(from[done..].as_ptr(), ptr.as_ptr(), n);
            }
            done += n;
        })
    }

    /// Sets `len` bytes of the data from `offset` to `byte`. Returns `None` if the data is too
    /// short or was resolved only for reading.
    #[must_use]
    pub fn fill(&self, offset: usize, len: usize, byte: u8) -> Option<()> {
        if !self.writable {
            return None;
        }
        self.for_range(offset, len, |ptr, n| {
            // SAFETY: the piece is mapped, and was resolved for writing.
            unsafe { ptr.as_ptr().write_bytes(byte, n) };
        })
    }

    /// Copies `len` bytes of the data from `offset` to `to` at `to_offset`: a write to a
    /// memory-backed disk. Returns `None` without a copy if the data or `to` is too short, or if
    /// `to` is read-only.
    #[must_use]
    pub fn copy_to(
        &self,
        offset: usize,
        to: &SharedBytes,
        to_offset: usize,
        len: usize,
    ) -> Option<()> {
        self.copy_to_by(std::ptr::copy, offset, to, to_offset, len)
    }

    /// Variant of [`copy_to`](Self::copy_to) for a disk that is much larger than the processor's
    /// caches: large copies bypass the caches and do not evict other data.
    #[must_use]
    pub fn copy_to_large(
        &self,
        offset: usize,
        to: &SharedBytes,
        to_offset: usize,
        len: usize,
    ) -> Option<()> {
        self.copy_to_by(copy::to_disk, offset, to, to_offset, len)
    }

    /// Copies by the function `copy`, whose arguments are source, destination and number of bytes.
    #[inline(always)]
    fn copy_to_by(
        &self,
        copy: unsafe fn(*const u8, *mut u8, usize),
        offset: usize,
        to: &SharedBytes,
        to_offset: usize,
        len: usize,
    ) -> Option<()> {
        if !to.is_writable() || to_offset > to.len() || len > to.len() - to_offset {
            return None;
        }
        let mut at = to_offset;
        self.for_range(offset, len, |ptr, n| {
            // SAFETY: both ranges are mapped and checked, and `to` is writable. The ranges may
            // overlap if the peer is in this process; `copy` allows that.
            unsafe { copy(ptr.as_ptr(), to.as_ptr().add(at), n) };
            at += n;
        })
    }

    /// Copies `len` bytes of `from` at `from_offset` into the data at `offset`: a read from a
    /// memory-backed disk. Returns `None` without a copy if one of the two is too short or the data
    /// was resolved only for reading.
    #[must_use]
    pub fn copy_from(
        &self,
        offset: usize,
        from: &SharedBytes,
        from_offset: usize,
        len: usize,
    ) -> Option<()> {
        self.copy_from_by(std::ptr::copy, offset, from, from_offset, len)
    }

    /// Variant of [`copy_from`](Self::copy_from) for a disk that is much larger than the
    /// processor's caches: large copies are prefetched.
    #[must_use]
    pub fn copy_from_large(
        &self,
        offset: usize,
        from: &SharedBytes,
        from_offset: usize,
        len: usize,
    ) -> Option<()> {
        self.copy_from_by(copy::from_disk, offset, from, from_offset, len)
    }

    /// Copies by the function `copy`, in the reverse direction of [`copy_to_by`](Self::copy_to_by).
    #[inline(always)]
    fn copy_from_by(
        &self,
        copy: unsafe fn(*const u8, *mut u8, usize),
        offset: usize,
        from: &SharedBytes,
        from_offset: usize,
        len: usize,
    ) -> Option<()> {
        if !self.writable || from_offset > from.len() || len > from.len() - from_offset {
            return None;
        }
        let mut at = from_offset;
        self.for_range(offset, len, |ptr, n| {
            // SAFETY: both ranges are mapped and checked, and the pieces were resolved for writing.
            // `copy` allows an overlap.
            unsafe { copy(from.as_ptr().add(at), ptr.as_ptr(), n) };
            at += n;
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DmaSpace, Mapping};
    use std::sync::Arc;

    #[test]
    fn data_of_two_commands_follow_each_other() {
        let whole = Mapping::anonymous(8192).unwrap().bytes();
        let mut space = DmaSpace::default();
        space.map(0, 8192, &whole).unwrap();
        let view = View::new(Arc::clone(space.table()));
        let at = |iova, len, write| {
            let mut segments = Segments::new();
            segments.start(&view, write);
            segments.push(&view, iova, len).unwrap();
            segments
        };
        whole.write(5000, &7u64).unwrap();
        let (mut first, second) = (at(100, 50, false), at(5000, 60, false));
        first.append(&second).unwrap();
        assert_eq!((first.len(), first.pieces().len()), (110, 2));
        let mut back = [0; 8];
        first.read_into(50, &mut back).unwrap();
        assert_eq!(u64::from_le_bytes(back), 7);
        // Data for the other transfer direction, and data with another owner, cannot be appended.
        assert!(first.append(&at(0, 8, true)).is_none());
        assert!(first.append(&Segments::from_bytes(&whole)).is_none());
        let other = View::new(Arc::clone(space.table()));
        let mut foreign = Segments::new();
        foreign.start(&other, false);
        assert!(first.append(&foreign).is_none());
        assert_eq!(first.len(), 110);
    }

    #[test]
    fn neighbours_are_merged_and_maps_crossed() {
        let whole = Mapping::anonymous(16384).unwrap().bytes();
        let mut space = DmaSpace::default();
        space.map(0, 4096, &whole.slice(0, 4096).unwrap()).unwrap();
        space.map(4096, 4096, &whole.slice(4096, 4096).unwrap()).unwrap();
        space.map(8192, 4096, &whole.slice(12288, 4096).unwrap()).unwrap();
        let view = View::new(Arc::clone(space.table()));
        let mut segments = Segments::new();
        segments.start(&view, true);
        segments.push(&view, 100, 12000).unwrap();
        assert_eq!(segments.len(), 12000);
        let lens: Vec<_> = segments.pieces().iter().map(Segment::len).collect();
        assert_eq!(lens, [8192 - 100, 12000 - (8192 - 100)]);
        let data: Vec<u8> = (0..12000).map(|i| i as u8).collect();
        segments.write_from(0, &data).unwrap();
        let mut back = vec![0; 7000];
        segments.read_into(5000, &mut back).unwrap();
        assert_eq!(back, data[5000..]);
        assert!(segments.read_into(5001, &mut back).is_none());
        type To = fn(&Segments, usize, &SharedBytes, usize, usize) -> Option<()>;
        let ways: [(To, To); 2] = [
            (Segments::copy_to, Segments::copy_from),
            (Segments::copy_to_large, Segments::copy_from_large),
        ];
        for (to, from) in ways {
            segments.write_from(0, &data).unwrap();
            let other = Mapping::anonymous(16384).unwrap().bytes();
            to(&segments, 10, &other, 20, 11990).unwrap();
            segments.fill(0, 12000, 0).unwrap();
            from(&segments, 10, &other, 20, 11990).unwrap();
            let mut back = vec![9; 12000];
            segments.read_into(0, &mut back).unwrap();
            assert_eq!(back[..10], [0; 10]);
            assert_eq!(back[10..], data[10..]);
            assert!(to(&segments, 0, &other, 16384 - 11, 12).is_none());
            assert!(to(&segments, 1, &other, 0, 12000).is_none());
            assert!(from(&segments, 0, &other, usize::MAX, 12).is_none());
        }
        let other = Mapping::anonymous(16384).unwrap().bytes();
        assert!(segments.copy_to(0, &other, 16384 - 11, 12).is_none());
        assert!(segments.copy_from(0, &other, usize::MAX, 12).is_none());
        assert!(segments.push(&view, 12287, 2).is_err());
    }

    #[test]
    fn parts_are_selected_and_more_is_added() {
        let whole = Mapping::anonymous(16384).unwrap().bytes();
        let all: Vec<u8> = (0..16384u32).map(|i| ((i * 7) >> 3) as u8).collect();
        whole.write_from(0, &all).unwrap();
        let mut space = DmaSpace::default();
        space.map(0, 4096, &whole.slice(8192, 4096).unwrap()).unwrap();
        space.map(4096, 4096, &whole.slice(0, 4096).unwrap()).unwrap();
        let view = View::new(Arc::clone(space.table()));
        let mut segments = Segments::new();
        segments.start(&view, true);
        segments.push(&view, 100, 7900).unwrap();
        let mut data = vec![0; 7900];
        segments.read_into(0, &mut data).unwrap();
        let mut parts = Segments::new();
        for (range, stride, count) in
            [((0, 512), 520, 15), ((512, 8), 520, 15), ((0, 7900), 7900, 1), ((7, 0), 1, 3)]
        {
            segments.select(range, stride, count, &mut parts).unwrap();
            let expected: Vec<u8> = (0..count)
                .flat_map(|nth| &data[nth * stride + range.0..][..range.1])
                .copied()
                .collect();
            let mut selected = vec![0; parts.len()];
            parts.read_into(0, &mut selected).unwrap();
            assert_eq!(selected, expected);
            assert!(parts.is_writable());
        }
        assert!(segments.select((0, 512), 520, 16, &mut parts).is_none());
        assert!(segments.select((0, 512), usize::MAX, 3, &mut parts).is_none());
        // The range follows the last piece, but the last byte of the range is not mapped.
        assert!(segments.extend(&view, 8000, 193).is_err());
        let mut back = vec![0; 7900];
        segments.read_into(0, &mut back).unwrap();
        assert_eq!((segments.len(), segments.pieces().len(), back), (7900, 2, data));
        segments.extend(&view, 8000, 192).unwrap();
        segments.extend(&view, 3, 5).unwrap();
        let mut more = vec![0; 5];
        segments.read_into(7900 + 192, &mut more).unwrap();
        assert_eq!(more, all[8195..8200]);
    }

    #[test]
    fn clear_releases_the_view() {
        let mut space = DmaSpace::default();
        space.map(0, 4096, &Mapping::anonymous(4096).unwrap().bytes()).unwrap();
        let view = View::new(Arc::clone(space.table()));
        let watch = view.watch();
        let mut segments = Segments::new();
        segments.start(&view, false);
        segments.push(&view, 0, 4096).unwrap();
        drop(view);
        assert!(!watch.is_idle());
        assert!(segments.write_from(0, &[1]).is_none(), "resolved for reading only");
        segments.clear();
        assert!(watch.is_idle());
        assert!(segments.is_empty());
    }

    #[test]
    fn own_memory_is_a_buffer_too() {
        let bytes = Mapping::anonymous(4096).unwrap().bytes();
        let segments = Segments::from_bytes(&bytes.slice(512, 1024).unwrap());
        segments.write_from(0, &[3; 1024]).unwrap();
        assert_eq!(bytes.read::<u8>(511), Some(0));
        assert_eq!(bytes.read::<u8>(1535), Some(3));
        assert!(segments.is_aligned(512));
        assert!(!segments.is_aligned(1024));
    }
}
