//! A command's data, as pieces of host memory.

use crate::copy;
use crate::dma::View;
use crate::error::Fault;
use crate::mapping::Mapping;
use crate::shared::SharedBytes;
use std::ptr::NonNull;
use std::sync::Arc;

/// A contiguous piece of host memory: what an `iovec` says.
///
/// The pair alone is only numbers; whoever hands it to the kernel must hold the [`Segments`] that
/// it came from until the kernel is done with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Segment {
    ptr: NonNull<u8>,
    len: usize,
}

impl Segment {
    /// The address of the first byte in this process.
    #[inline]
    #[must_use]
    pub fn address(&self) -> usize {
        self.ptr.as_ptr() as usize
    }

    /// The length in bytes, never 0.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: an empty piece is not kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Who keeps the pieces mapped.
#[derive(Clone, Debug)]
enum Keep {
    Nothing,
    View(#[allow(dead_code, reason = "held so that a ViewWatch sees it")] View),
    Bytes(#[allow(dead_code, reason = "held so that the memory stays mapped")] SharedBytes),
}

/// A command's data buffer, resolved: pieces of host memory in order, neighbours merged.
///
/// It holds what keeps the memory mapped. Once its list has grown to what the commands of a queue
/// need, [`clear`](Self::clear) and resolving again allocate nothing.
#[derive(Debug)]
pub struct Segments {
    list: Vec<Segment>,
    total: usize,
    writable: bool,
    keep: Keep,
    /// Segments of the list that they were last resolved from, if that was an SGL.
    lists: usize,
}

// `Segments` is not Send: a `View` counts its users without atomics.

impl Default for Segments {
    fn default() -> Self {
        Self::new()
    }
}

impl Segments {
    /// No data.
    #[must_use]
    pub const fn new() -> Self {
        Self { list: Vec::new(), total: 0, writable: false, keep: Keep::Nothing, lists: 0 }
    }

    /// All of `bytes` as one piece: the process's own memory as a command's data.
    #[must_use]
    pub fn from_bytes(bytes: &SharedBytes) -> Self {
        let mut all = Self::new();
        all.set_bytes(bytes);
        all
    }

    /// All of `bytes` as one piece, as [`from_bytes`](Self::from_bytes) makes it, in the list's
    /// room.
    pub fn set_bytes(&mut self, bytes: &SharedBytes) {
        self.list.clear();
        if let (Some(ptr), false) = (NonNull::new(bytes.as_ptr()), bytes.is_empty()) {
            self.list.push(Segment { ptr, len: bytes.len() });
        }
        (self.total, self.writable, self.lists) = (bytes.len(), bytes.is_writable(), 0);
        self.keep = Keep::Bytes(bytes.clone());
    }

    /// Lets go of the memory and of the view; keeps the list's room for the next command.
    #[inline]
    pub fn clear(&mut self) {
        self.list.clear();
        self.total = 0;
        self.keep = Keep::Nothing;
    }

    /// Has no data any more, but holds on to the view that they were resolved through, for a next
    /// command through the same.
    #[inline]
    pub fn rewind(&mut self) {
        self.list.clear();
        self.total = 0;
    }

    /// How many pieces the list has room for without an allocation.
    #[must_use]
    pub fn room(&self) -> usize {
        self.list.capacity()
    }

    /// The data, taken out of the caller's hands: `self` is left without any.
    #[inline]
    #[must_use]
    pub fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    /// Starts over, for data that is to be resolved through `view`; `write` if the device is to
    /// write it (a Read command), in which case every address is checked to be writable.
    #[inline(always)]
    pub(crate) fn start(&mut self, view: &View, write: bool) {
        self.list.clear();
        self.total = 0;
        self.hold(view, write);
    }

    #[inline(always)]
    fn hold(&mut self, view: &View, write: bool) {
        self.writable = write;
        if !matches!(&self.keep, Keep::View(kept) if kept.is(view)) {
            self.keep = Keep::View(view.clone());
        }
    }

    /// As [`start`](Self::start), for an SGL.
    pub(crate) fn start_list(&mut self, view: &View, write: bool) {
        self.lists = 0;
        self.start(view, write);
    }

    /// Another segment of an SGL is read.
    pub(crate) fn add_list(&mut self) {
        self.lists += 1;
    }

    /// How many segments the SGL has that it was last resolved from: each in a place of its own.
    #[must_use]
    pub fn lists(&self) -> usize {
        self.lists
    }

    /// Becomes these ranges (address and length) of the memory that `view` has, one after the
    /// other; `write` if the device is to write them, in which case every address is checked to be
    /// writable.
    ///
    /// # Errors
    /// [`Fault`], and then there are no data.
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

    /// One piece, if `[iova, iova + len)` lies in the map that was last hit: what most commands
    /// come to. `false`, and nothing changed, if not.
    #[inline(always)]
    pub(crate) fn set_whole(&mut self, view: &View, iova: u64, len: usize, write: bool) -> bool {
        let Some(ptr) = view.translate_again(iova, len, write) else { return false };
        self.hold(view, write);
        self.total = len;
        // The place of what was there before, which is less to do than to begin with none.
        if let Some(first) = self.list.first_mut() {
            *first = Segment { ptr, len };
            self.list.truncate(1);
        } else {
            self.list.push(Segment { ptr, len });
        }
        true
    }

    /// Adds `[iova, iova + len)`, which may cross maps.
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

    /// Adds `len` bytes, which are those of `bytes` again and again: memory that is there as long as
    /// the process, and whose content nobody looks at.
    pub(crate) fn push_again(&mut self, bytes: &'static SharedBytes, len: usize) {
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
            // Two maps can be neighbours in this process by chance; a copy over both is as good
            // as two copies, since all of it is mapped. The pointer keeps the first one's
            // provenance, which for memory that came from `mmap` is the exposed address space.
            last.len += len;
            return;
        }
        self.list.push(Segment { ptr, len });
    }

    /// The pieces, in order.
    #[inline]
    #[must_use]
    pub fn pieces(&self) -> &[Segment] {
        &self.list
    }

    /// The mapping in which the byte at `address` of this process lies, if it is among those that
    /// the data can be in. Whoever hands the data to a device knows by that whether the device can
    /// reach it.
    #[must_use]
    pub fn mapping_at(&self, address: usize) -> Option<&Arc<Mapping>> {
        match &self.keep {
            Keep::Nothing => None,
            Keep::View(view) => view.table().mappings().find(|mapping| mapping.holds(address)),
            Keep::Bytes(bytes) => Some(bytes.mapping()).filter(|mapping| mapping.holds(address)),
        }
    }

    /// Parts of these data in `into`, in order: `count` of them, each as long as the range
    /// (offset and length) says, from one `stride` to the next. `None` if there are not so many.
    #[must_use]
    pub fn select(
        &self,
        (offset, len): (usize, usize),
        stride: usize,
        count: usize,
        into: &mut Self,
    ) -> Option<()> {
        into.clear();
        (into.writable, into.keep) = (self.writable, self.keep.clone());
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
                // SAFETY: `at` is within the piece, which begins at `start`.
                into.add(unsafe { now.ptr.add(at - start) }, n);
                at += n;
            }
        }
        into.total = len * count;
        Some(())
    }

    /// Leaves the first `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        let mut left = len.min(self.total);
        self.total = left;
        self.list.retain_mut(|piece| {
            piece.len = piece.len.min(left);
            left -= piece.len;
            piece.len != 0
        });
    }

    /// Adds `[iova, iova + len)` of the memory that the data were resolved through: what else
    /// belongs to them.
    ///
    /// # Errors
    /// [`Fault`], and the data are as they were.
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

    /// Adds the data of `other` behind these. `None`, and nothing is added, if they are not of the
    /// same memory and for the same direction.
    #[must_use]
    pub fn append(&mut self, other: &Self) -> Option<()> {
        let is_same = match (&self.keep, &other.keep) {
            (Keep::View(one), Keep::View(other)) => one.is(other),
            _ => false,
        };
        if !is_same || self.writable != other.writable {
            return None;
        }
        other.list.iter().for_each(|piece| self.add(piece.ptr, piece.len));
        self.total += other.total;
        Some(())
    }

    /// The length of the data in bytes.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.total
    }

    /// Whether there is no data.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.total == 0
    }

    /// Whether the device may write the data.
    #[inline]
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Whether every piece starts at and is as long as a multiple of `alignment` (a power of two):
    /// what a direct I/O needs.
    #[inline]
    #[must_use]
    pub fn is_aligned(&self, alignment: usize) -> bool {
        self.list.iter().all(|s| (s.address() | s.len) & (alignment - 1) == 0)
    }

    /// Calls `each` with the pieces of `[offset, offset + len)`; `None`, without a call, if the
    /// data is shorter.
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

    /// Copies data from `offset` into all of `into`; `None`, and nothing copied, if there is not
    /// enough.
    #[must_use]
    pub fn read_into(&self, offset: usize, into: &mut [u8]) -> Option<()> {
        let mut done = 0;
        self.for_range(offset, into.len(), |ptr, n| {
            // SAFETY: the piece is mapped (kept by `self.keep`) and readable; the destination is a
            // Rust slice, which no mapping overlaps, and `for_range` adds up to its length.
            unsafe {
                std::ptr::copy_nonoverlapping(ptr.as_ptr(), into[done..].as_mut_ptr(), n);
            }
            done += n;
        })
    }

    /// Copies all of `from` into the data at `offset`; `None`, and nothing copied, if there is not
    /// enough room or the data was resolved for reading only.
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

    /// Sets `len` bytes of the data from `offset` to `byte`; `None` as for
    /// [`write_from`](Self::write_from).
    #[must_use]
    pub fn fill(&self, offset: usize, len: usize, byte: u8) -> Option<()> {
        if !self.writable {
            return None;
        }
        self.for_range(offset, len, |ptr, n| {
            // SAFETY: as in `write_from`.
            unsafe { ptr.as_ptr().write_bytes(byte, n) };
        })
    }

    /// Copies `len` bytes of the data from `offset` to `to` at `to_offset` (a write to a disk that
    /// is memory); `None`, and nothing copied, if either side is too short or `to` is read-only.
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

    /// Copies as [`copy_to`](Self::copy_to) does, to a disk that is much larger than the
    /// processor's caches: what is long goes past them, and does not push out what else is there.
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

    /// `copy` reads as many bytes from its first argument as its third says, and writes them to its
    /// second; it needs no more than that.
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
            // SAFETY: both ranges are mapped and checked, and `to` can be written. They may
            // overlap, as an in-process peer's could.
            unsafe { copy(ptr.as_ptr(), to.as_ptr().add(at), n) };
            at += n;
        })
    }

    /// Copies `len` bytes of `from` at `from_offset` into the data at `offset` (a read from a disk
    /// that is memory); `None`, and nothing copied, if either side is too short or the data was
    /// resolved for reading only.
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

    /// Copies as [`copy_from`](Self::copy_from) does, from a disk that is much larger than the
    /// processor's caches: what is long is asked for ahead of the copy.
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

    /// As [`copy_to_by`](Self::copy_to_by), the other way round.
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
            // SAFETY: as in `copy_to_by`.
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
        // Of another direction, or kept by somebody else.
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
        // The next byte is a neighbour of the last piece, and the one after the last is not there.
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
    fn clearing_lets_the_view_go() {
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
