//! A window into memory that a peer may be changing.

use crate::{Mapping, Protection};
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A range of a [`Mapping`], which it keeps alive. Cloning it costs one atomic increment.
///
/// Every access is bounds-checked, and copies: a value that was read can not change any more.
/// Two sides that copy to the same bytes at once get a mix of both, as with any DMA.
#[derive(Clone, Debug)]
pub struct SharedBytes {
    mapping: Arc<Mapping>,
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: a pointer into a mapping that the value keeps alive; the mapping itself is Send + Sync
// and access is by copies and atomics only.
unsafe impl Send for SharedBytes {}
// SAFETY: as above.
unsafe impl Sync for SharedBytes {}

impl SharedBytes {
    pub(crate) fn whole(mapping: &Arc<Mapping>) -> Self {
        Self { ptr: mapping.base(), len: mapping.len(), mapping: Arc::clone(mapping) }
    }

    /// The length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the window has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the memory may be written.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.mapping.protection() == Protection::ReadWrite
    }

    /// The mapping behind the window.
    #[must_use]
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Where the window starts in its mapping, in bytes.
    #[must_use]
    pub fn offset_in_mapping(&self) -> usize {
        self.ptr.as_ptr() as usize - self.mapping.address()
    }

    /// The address of the first byte in this process.
    #[must_use]
    pub fn address(&self) -> usize {
        self.ptr.as_ptr() as usize
    }

    #[inline]
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// The window's bytes `[offset, offset + len)`, or `None` if it has not that many.
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> Option<Self> {
        let ptr = self.at(offset, len)?;
        Some(Self { mapping: Arc::clone(&self.mapping), ptr, len })
    }

    #[inline]
    fn at(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        if offset <= self.len && len <= self.len - offset {
            // SAFETY: the offset was just checked to lie inside the window (or at its end).
            Some(unsafe { self.ptr.add(offset) })
        } else {
            None
        }
    }

    #[inline]
    fn at_for_write(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        if self.is_writable() { self.at(offset, len) } else { None }
    }

    /// A copy of the `T` at `offset`, which need not be aligned; `None` if it is not all inside.
    #[inline]
    #[must_use]
    pub fn read<T: FromBytes>(&self, offset: usize) -> Option<T> {
        let ptr = self.at(offset, size_of::<T>())?;
        // SAFETY: `size_of::<T>()` bytes from `ptr` are mapped and readable, any bytes make a `T`
        // (FromBytes), and the volatile read keeps the compiler from reading shared memory again.
        Some(unsafe { ptr.cast::<Unaligned<T>>().as_ptr().read_volatile().0 })
    }

    /// Writes `value` at `offset`; `None` if it does not fit or the memory is read-only.
    #[inline]
    #[must_use]
    pub fn write<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) -> Option<()> {
        self.write_from(offset, value.as_bytes())
    }

    /// Copies from `offset` into all of `into`; `None`, and nothing copied, if there is not enough.
    #[inline]
    #[must_use]
    pub fn read_into(&self, offset: usize, into: &mut [u8]) -> Option<()> {
        let ptr = self.at(offset, into.len())?;
        // SAFETY: the source is mapped for the length; the destination is a distinct Rust slice
        // (no Rust reference ever points into a mapping), so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(ptr.as_ptr(), into.as_mut_ptr(), into.len()) };
        Some(())
    }

    /// Copies all of `from` to `offset`; `None`, and nothing copied, if it does not fit or the
    /// memory is read-only.
    #[inline]
    #[must_use]
    pub fn write_from(&self, offset: usize, from: &[u8]) -> Option<()> {
        let ptr = self.at_for_write(offset, from.len())?;
        // SAFETY: as in `read_into`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), ptr.as_ptr(), from.len()) };
        Some(())
    }

    /// Sets `len` bytes from `offset` to `byte`; `None` if they are not all inside or read-only.
    #[must_use]
    pub fn fill(&self, offset: usize, len: usize, byte: u8) -> Option<()> {
        let ptr = self.at_for_write(offset, len)?;
        // SAFETY: the range is mapped and writable.
        unsafe { ptr.as_ptr().write_bytes(byte, len) };
        Some(())
    }

    /// The aligned 32-bit cell at `offset`, kept alive by itself. `None` if it is not inside, not
    /// aligned to 4 bytes, or the memory is read-only (an atomic may be written by its holder).
    #[must_use]
    pub fn cell(&self, offset: usize) -> Option<SharedU32> {
        let ptr = self.at_for_write(offset, 4)?.cast::<AtomicU32>();
        ptr.is_aligned().then(|| SharedU32 { _mapping: Arc::clone(&self.mapping), ptr })
    }

    /// Loads the aligned 64-bit word at `offset` with acquire ordering; `None` if it is not inside
    /// or not aligned to 8 bytes.
    #[inline]
    #[must_use]
    pub fn load_u64_acquire(&self, offset: usize) -> Option<u64> {
        let ptr = self.at(offset, 8)?.cast::<AtomicU64>();
        if !ptr.is_aligned() {
            return None;
        }
        // SAFETY: mapped and aligned; shared memory is only ever accessed as atomics or by copies.
        Some(unsafe { ptr.as_ref() }.load(Ordering::Acquire))
    }

    /// Loads the aligned 32-bit word at `offset` with acquire ordering; `None` if it is not inside
    /// or not aligned to 4 bytes.
    #[inline]
    #[must_use]
    pub fn load_u32_acquire(&self, offset: usize) -> Option<u32> {
        let ptr = self.at(offset, 4)?.cast::<AtomicU32>();
        if !ptr.is_aligned() {
            return None;
        }
        // SAFETY: as in `load_u64_acquire`.
        Some(unsafe { ptr.as_ref() }.load(Ordering::Acquire))
    }

    /// Stores the aligned 64-bit word at `offset` with release ordering: whoever sees it sees all
    /// that was written before. `None` if it is not inside, not aligned, or read-only.
    #[inline]
    #[must_use]
    pub fn store_u64_release(&self, offset: usize, value: u64) -> Option<()> {
        let ptr = self.at_for_write(offset, 8)?.cast::<AtomicU64>();
        if !ptr.is_aligned() {
            return None;
        }
        // SAFETY: as in `load_u64_acquire`, and the memory is writable.
        unsafe { ptr.as_ref() }.store(value, Ordering::Release);
        Some(())
    }

    /// Asks the processor to bring the cache line at `offset` near. Does nothing outside.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        #[cfg(target_arch = "x86_64")]
        if let Some(ptr) = self.at(offset, 1) {
            // SAFETY: a prefetch has no effect on memory, and the address is mapped.
            unsafe {
                std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
                    ptr.as_ptr().cast(),
                );
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = offset;
    }
}

/// So that a volatile read needs no alignment of the peer's choosing.
#[repr(C, packed)]
struct Unaligned<T>(T);

/// A 32-bit cell of shared memory: a doorbell register, a shadow doorbell, an EventIdx.
///
/// It dereferences to the atomic, and keeps the mapping alive.
#[derive(Clone, Debug)]
pub struct SharedU32 {
    _mapping: Arc<Mapping>,
    ptr: NonNull<AtomicU32>,
}

// SAFETY: an atomic in memory that the value keeps alive.
unsafe impl Send for SharedU32 {}
// SAFETY: as above.
unsafe impl Sync for SharedU32 {}

impl Deref for SharedU32 {
    type Target = AtomicU32;
    #[inline]
    fn deref(&self) -> &AtomicU32 {
        // SAFETY: aligned and mapped for as long as `_mapping` lives; only atomics and copies
        // touch shared memory.
        unsafe { self.ptr.as_ref() }
    }
}

impl doorbell::Cell for SharedU32 {
    #[inline]
    fn load_relaxed(&self) -> u32 {
        doorbell::Cell::load_relaxed(&**self)
    }

    #[inline]
    fn load_acquire(&self) -> u32 {
        doorbell::Cell::load_acquire(&**self)
    }

    #[inline]
    fn store_release(&self, value: u32) {
        doorbell::Cell::store_release(&**self, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_reaches_past_the_window() {
        let bytes = Mapping::anonymous(4096).unwrap().bytes().slice(4000, 96).unwrap();
        assert_eq!(bytes.len(), 96);
        assert!(bytes.slice(90, 7).is_none());
        assert!(bytes.slice(97, 0).is_none());
        assert!(bytes.slice(96, 0).is_some());
        assert!(bytes.read::<u64>(88).is_some());
        assert!(bytes.read::<u64>(89).is_none());
        assert!(bytes.read::<u64>(usize::MAX - 2).is_none());
        assert!(bytes.write(92, &1u32).is_some());
        assert!(bytes.write(93, &1u32).is_none());
        assert!(bytes.fill(0, 97, 0).is_none());
        assert!(bytes.read_into(1, &mut [0; 96]).is_none());
        assert!(bytes.cell(92).is_some());
        assert!(bytes.cell(93).is_none());
        assert!(bytes.cell(96).is_none());
        assert!(bytes.store_u64_release(88, 1).is_some());
        assert!(bytes.store_u64_release(84, 1).is_none());
        assert!(bytes.load_u64_acquire(92).is_none());
        bytes.prefetch(usize::MAX);
    }

    #[test]
    fn read_only_memory_is_not_written() {
        let owner = Mapping::shared("ro", 4096).unwrap();
        let map = Mapping::from_fd(owner.fd().unwrap(), 0, 4096, Protection::Read).unwrap();
        let bytes = map.bytes();
        assert!(bytes.write(0, &1u32).is_none());
        assert!(bytes.fill(0, 1, 1).is_none());
        assert!(bytes.cell(0).is_none());
        assert!(bytes.store_u64_release(0, 1).is_none());
        assert_eq!(bytes.read::<u32>(0), Some(0));
    }

    #[test]
    fn a_cell_outlives_everything_else() {
        let cell = {
            let mapping = Mapping::anonymous(4096).unwrap();
            mapping.bytes().write(64, &7u32).unwrap();
            mapping.bytes().cell(64).unwrap()
        };
        assert_eq!(cell.load(Ordering::Relaxed), 7);
        cell.store(8, Ordering::Relaxed);
        assert_eq!(cell.clone().load(Ordering::Relaxed), 8);
    }
}
