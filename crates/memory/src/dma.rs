//! What the peer mapped where: I/O virtual addresses to bytes of this process.

use crate::{Mapping, SharedBytes};
use std::cell::Cell;
use std::ptr::NonNull;
use std::rc::{Rc, Weak};
use std::sync::Arc;

/// Why a change of the DMA map was refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum DmaError {
    /// The range is empty or wraps around the end of the address space.
    #[error("the IOVA range {iova:#x}+{len:#x} is empty or wraps around")]
    Range {
        /// First address.
        iova: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Part of the range is mapped already.
    #[error("the IOVA range {iova:#x}+{len:#x} overlaps the map at {other:#x}")]
    Overlap {
        /// First address.
        iova: u64,
        /// Length in bytes.
        len: u64,
        /// First address of the map that is in the way.
        other: u64,
    },
    /// The range would split an existing map, which VFIO's rules do not allow either.
    #[error("unmapping {iova:#x}+{len:#x} would split the map at {other:#x}")]
    Split {
        /// First address.
        iova: u64,
        /// Length in bytes.
        len: u64,
        /// First address of the map that would be split.
        other: u64,
    },
    /// Nothing is mapped there.
    #[error("nothing is mapped in the IOVA range {iova:#x}+{len:#x}")]
    NotMapped {
        /// First address.
        iova: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The host memory is shorter than the range.
    #[error("{len:#x} bytes at IOVA {iova:#x} are backed by only {have:#x} bytes")]
    Short {
        /// First address.
        iova: u64,
        /// Length in bytes.
        len: u64,
        /// Length of the memory behind it, in bytes.
        have: u64,
    },
}

/// An address that the peer named and may not use: not mapped, or mapped read-only and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("IOVA {iova:#x} is not mapped for a {}", if *.write { "write" } else { "read" })]
pub struct Fault {
    /// The first address that is not usable.
    pub iova: u64,
    /// Whether it was to be written.
    pub write: bool,
}

#[derive(Clone, Debug)]
struct Entry {
    start: u64,
    /// The last address, inclusive, so that a map can end at the end of the address space.
    last: u64,
    bytes: SharedBytes,
}

/// An immutable snapshot of all maps, sorted by address.
#[derive(Clone, Debug, Default)]
pub struct DmaTable {
    entries: Vec<Entry>,
}

impl DmaTable {
    /// How many ranges are mapped.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether the memory behind some range was lost to a truncation (see [`crate::sigbus`]).
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.entries.iter().any(|e| e.bytes.mapping().is_poisoned())
    }

    /// The memory behind the ranges; one mapping may be behind several.
    pub fn mappings(&self) -> impl Iterator<Item = &Arc<Mapping>> + '_ {
        self.entries.iter().map(|e| e.bytes.mapping())
    }

    /// The mapped ranges as (first IOVA, length in bytes), in order.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.entries.iter().map(|e| (e.start, e.last - e.start + 1))
    }

    /// The bytes at `[iova, iova + len)` if one map holds them all.
    #[must_use]
    pub fn bytes(&self, iova: u64, len: u64) -> Option<SharedBytes> {
        let entry = &self.entries[self.find(iova)?];
        let offset = usize::try_from(iova - entry.start).ok()?;
        entry.bytes.slice(offset, usize::try_from(len).ok()?)
    }

    /// The bytes from `iova` to the end of its map, at most `len`; `None` if it is not mapped.
    pub(crate) fn bytes_up_to(&self, iova: u64, len: u64) -> Option<SharedBytes> {
        let entry = &self.entries[self.find(iova)?];
        let len = len.min((entry.last - iova).saturating_add(1));
        let offset = usize::try_from(iova - entry.start).ok()?;
        entry.bytes.slice(offset, usize::try_from(len).ok()?)
    }

    fn find(&self, iova: u64) -> Option<usize> {
        let after = self.entries.partition_point(|e| e.start <= iova);
        let index = after.checked_sub(1)?;
        (iova <= self.entries[index].last).then_some(index)
    }
}

/// The control plane's picture of a peer's memory. Each change makes a new [`DmaTable`], which
/// the workers take over at a quiescent point.
#[derive(Debug, Default)]
pub struct DmaSpace {
    table: Arc<DmaTable>,
}

impl DmaSpace {
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
        if let Some(other) = self.overlapping(iova, last).next() {
            return Err(DmaError::Overlap { iova, len, other: other.start });
        }
        let have = bytes.len() as u64;
        let bytes = usize::try_from(len)
            .ok()
            .and_then(|len| bytes.slice(0, len))
            .ok_or(DmaError::Short { iova, len, have })?;
        let mut entries = self.table.entries.clone();
        let at = entries.partition_point(|e| e.start < iova);
        entries.insert(at, Entry { start: iova, last, bytes });
        self.table = Arc::new(DmaTable { entries });
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
        if let Some(e) = self.overlapping(iova, last).find(|e| e.start < iova || e.last > last) {
            return Err(DmaError::Split { iova, len, other: e.start });
        }
        let mut entries = self.table.entries.clone();
        entries.retain(|e| e.start < iova || e.last > last);
        if entries.len() == self.table.entries.len() {
            return Err(DmaError::NotMapped { iova, len });
        }
        self.table = Arc::new(DmaTable { entries });
        Ok(())
    }

    /// Takes away every map.
    pub fn clear(&mut self) {
        self.table = Arc::default();
    }

    fn overlapping(&self, first: u64, last: u64) -> impl Iterator<Item = &Entry> {
        self.table.entries.iter().filter(move |e| e.start <= last && e.last >= first)
    }
}

fn last_address(iova: u64, len: u64) -> Result<u64, DmaError> {
    len.checked_sub(1).and_then(|l| iova.checked_add(l)).ok_or(DmaError::Range { iova, len })
}

/// One thread's handle on a [`DmaTable`]: resolves addresses without a lock or an atomic, with
/// the last map that was hit tried first.
///
/// Cloning it is a plain increment: every command in flight holds one (in its
/// [`Segments`](crate::Segments)), so that [`ViewWatch`] can tell when the last is gone.
#[derive(Clone, Debug)]
pub struct View(Rc<Inner>);

#[derive(Debug)]
struct Inner {
    table: Arc<DmaTable>,
    last_hit: Hit,
}

/// A map that was hit, in few words next to each other.
#[derive(Debug)]
struct Hit {
    start: Cell<u64>,
    /// 0 before the first hit: no address lies in that.
    len: Cell<u64>,
    /// Where `start` is in this process.
    base: Cell<NonNull<u8>>,
    writable: Cell<bool>,
}

impl Hit {
    fn set(&self, entry: &Entry) {
        self.start.set(entry.start);
        // The map of all addresses would be one byte longer than can be said.
        self.len.set((entry.last - entry.start).saturating_add(1));
        self.base.set(entry.bytes.base());
        self.writable.set(entry.bytes.is_writable());
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

/// Tells when every use of a [`View`] has ended.
#[derive(Clone, Debug)]
pub struct ViewWatch(Weak<Inner>);

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
        Self(Rc::new(Inner { table, last_hit }))
    }

    /// The snapshot that the view resolves against.
    #[must_use]
    pub fn table(&self) -> &Arc<DmaTable> {
        &self.0.table
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
        let fault = Fault { iova, write };
        let index = self.0.table.find(iova).ok_or(fault)?;
        hit.set(&self.0.table.entries[index]);
        let (ptr, left) = hit.find(iova, write).ok_or(fault)?;
        Ok((ptr, left.min(len as u64) as usize))
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
