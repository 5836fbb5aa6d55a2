//! Bounds-checked window into memory that a peer can change concurrently.

use crate::mapping::{Mapping, Protection};
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Range of a [`Mapping`]. The mapping exists at least as long as this value. A clone costs one
/// atomic increment.
///
/// Every access is bounds-checked and copies the bytes, so a value that was read does not change
/// any more. Two concurrent copies to the same bytes leave a mix of both, as with any DMA.
#[derive(Clone, Debug)]
pub struct SharedBytes {
    mapping: Arc<Mapping>,
    ptr: NonNull<u8>,
    len: usize,
    /// Copy of the mapping's protection, which saves an access to the mapping.
    writable: bool,
}

// SAFETY: the value keeps the mapping of its pointer alive. The mapping itself is Send + Sync, and
// access is only by copies and atomics.
unsafe impl Send for SharedBytes {}
// SAFETY: as for `Send`.
unsafe impl Sync for SharedBytes {}

impl Mapping {
    /// Creates a window of the whole mapping.
    #[must_use]
    pub fn bytes(self: &Arc<Self>) -> SharedBytes {
        SharedBytes::whole(self)
    }
}

impl SharedBytes {
    fn whole(mapping: &Arc<Mapping>) -> Self {
        Self {
            ptr: mapping.base(),
            len: mapping.len(),
            writable: mapping.protection() == Protection::ReadWrite,
            mapping: Arc::clone(mapping),
        }
    }

    /// Length in bytes.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if the window has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True if the memory is writable.
    #[inline]
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Mapping behind the window.
    #[must_use]
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Offset of the window in its mapping, in bytes.
    #[must_use]
    pub fn offset_in_mapping(&self) -> usize {
        self.ptr.as_ptr() as usize - self.mapping.address()
    }

    /// Address of the first byte in this process.
    #[must_use]
    pub fn address(&self) -> usize {
        self.ptr.as_ptr() as usize
    }

    #[inline]
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Sub-window `[offset, offset + len)`, or `None` if it is not inside the window.
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> Option<Self> {
        let ptr = self.at(offset, len)?;
        let mapping = Arc::clone(&self.mapping);
        Some(Self { mapping, ptr, len, writable: self.writable })
    }

    #[inline]
    fn at(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        if offset <= self.len && len <= self.len - offset {
            // SAFETY: the offset was checked to lie inside the window (or at its end).
            Some(unsafe { self.ptr.add(offset) })
        } else {
            None
        }
    }

    #[inline]
    fn at_for_write(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        if self.is_writable() { self.at(offset, len) } else { None }
    }

    /// Copies the `T` at `offset`, which need not be aligned. Returns `None` if it is not inside
    /// the window.
    #[inline]
    #[must_use]
    pub fn read<T: FromBytes>(&self, offset: usize) -> Option<T> {
        self.at(offset, size_of::<T>())?;
        // SAFETY: the value is inside the window, as checked above.
        Some(unsafe { self.read_at(offset) })
    }

    /// Variant of [`read`](Self::read) without a check.
    ///
    /// # Safety
    /// `size_of::<T>()` bytes from `offset` must lie inside the window.
    #[inline]
    pub(crate) unsafe fn read_at<T: FromBytes>(&self, offset: usize) -> T {
        // SAFETY: the caller guarantees the offset.
        let from = unsafe { self.ptr.add(offset) }.as_ptr();
        let mut value = MaybeUninit::<T>::uninit();
        let into = value.as_mut_ptr().cast::<u8>();
        // The read is volatile, so that the compiler cannot read the shared memory a second time.
        // The copy uses the largest units and not a `T`, because a `T` would be read field by
        // field.
        let mut at = 0;
        // SAFETY: `size_of::<T>()` bytes at `from` are mapped and readable, and `into` has the same
        // length. The three calls together copy all of these bytes.
        unsafe {
            copy_by::<Wide>(from, into, &mut at, size_of::<T>());
            copy_by::<u64>(from, into, &mut at, size_of::<T>());
            copy_by::<u8>(from, into, &mut at, size_of::<T>());
        }
        // SAFETY: every byte is initialized, and any bytes are a valid `T` (FromBytes).
        unsafe { value.assume_init() }
    }

    /// Variant of [`write`](Self::write) without a check.
    ///
    /// # Safety
    /// `size_of::<T>()` bytes from `offset` must lie inside the window, which must be writable.
    #[inline]
    pub(crate) unsafe fn write_at<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        let from = value.as_bytes();
        // SAFETY: the caller guarantees the range. No Rust reference points into a mapping, so
        // source and destination do not overlap.
        unsafe {
            let into = self.ptr.add(offset).as_ptr();
            std::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len());
        }
    }

    /// Writes the eight words of a submission queue entry at `offset`, without a check.
    ///
    /// # Safety
    /// 64 bytes from `offset` must lie inside the window, which must be writable.
    #[inline(always)]
    pub(crate) unsafe fn write_words_at(&self, offset: usize, words: [u64; 8]) {
        // SAFETY: the caller guarantees the range.
        unsafe { store_words(self.ptr.add(offset).as_ptr(), words) };
    }

    /// Copies `count` cache lines from `lines` to `offset`, in order, without a check.
    ///
    /// # Safety
    /// `count` times 64 bytes must be readable at `lines`. The same number of bytes from `offset`
    /// must lie inside the window, and the window must be writable.
    #[inline]
    pub(crate) unsafe fn write_lines_at(&self, offset: usize, lines: *const u8, count: usize) {
        let into = self.ptr.as_ptr().wrapping_add(offset);
        for line in 0..count {
            // SAFETY: the caller guarantees both ranges. One belongs to Rust and one to a mapping,
            // so they do not overlap.
            unsafe {
                copy_by::<Wide>(lines.add(64 * line), into.wrapping_add(64 * line), &mut 0, 64);
            }
        }
    }

    /// Variant of [`load_u64_acquire`](Self::load_u64_acquire) without a check.
    ///
    /// # Safety
    /// Eight bytes from `offset` must lie inside the window, and their address must be aligned to
    /// 8.
    #[inline]
    pub(crate) unsafe fn load_u64_at(&self, offset: usize) -> u64 {
        // SAFETY: the caller guarantees the position. All accesses to shared memory are atomics
        // or copies.
        unsafe { self.ptr.add(offset).cast::<AtomicU64>().as_ref() }.load(Ordering::Acquire)
    }

    /// Writes `value` at `offset`. Returns `None` if it does not fit or the memory is read-only.
    #[inline]
    #[must_use]
    pub fn write<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) -> Option<()> {
        self.write_from(offset, value.as_bytes())
    }

    /// Copies from `offset` into all of `into`. Returns `None` without a copy if the window is too
    /// short.
    #[inline]
    #[must_use]
    pub fn read_into(&self, offset: usize, into: &mut [u8]) -> Option<()> {
        let ptr = self.at(offset, into.len())?;
        // SAFETY: the source is mapped for this length. The destination is a Rust slice, and no
        // Rust reference points into a mapping, so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(ptr.as_ptr(), into.as_mut_ptr(), into.len()) };
        Some(())
    }

    /// Copies all of `from` to `offset`. Returns `None` without a copy if it does not fit or the
    /// memory is read-only.
    #[inline]
    #[must_use]
    pub fn write_from(&self, offset: usize, from: &[u8]) -> Option<()> {
        let ptr = self.at_for_write(offset, from.len())?;
        // SAFETY: the destination is mapped and writable for this length. The source is a Rust
        // slice, and no Rust reference points into a mapping, so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), ptr.as_ptr(), from.len()) };
        Some(())
    }

    /// Sets `len` bytes from `offset` to `byte`. Returns `None` if the range is not inside the
    /// window or is read-only.
    #[must_use]
    pub fn fill(&self, offset: usize, len: usize, byte: u8) -> Option<()> {
        let ptr = self.at_for_write(offset, len)?;
        // SAFETY: the range is mapped and writable.
        unsafe { ptr.as_ptr().write_bytes(byte, len) };
        Some(())
    }

    /// Aligned 32-bit cell at `offset`. The cell keeps the mapping alive. `None` if the cell is not
    /// inside the window, is not aligned to 4 bytes, or is read-only, because the holder of an
    /// atomic can write it.
    #[must_use]
    pub fn cell(&self, offset: usize) -> Option<SharedU32> {
        let ptr = self.at_for_write(offset, 4)?.cast::<AtomicU32>();
        ptr.is_aligned().then(|| SharedU32 { _mapping: Arc::clone(&self.mapping), ptr })
    }

    /// Loads the aligned 64-bit word at `offset` with acquire ordering. Returns `None` if it is not
    /// inside the window or not aligned to 8 bytes.
    #[inline]
    #[must_use]
    pub fn load_u64_acquire(&self, offset: usize) -> Option<u64> {
        let ptr = self.at(offset, 8)?.cast::<AtomicU64>();
        // SAFETY: the word is mapped and aligned. All accesses to shared memory are atomics or
        // copies.
        ptr.is_aligned().then(|| unsafe { ptr.as_ref() }.load(Ordering::Acquire))
    }

    /// Loads the aligned 32-bit word at `offset` with acquire ordering. Returns `None` if it is not
    /// inside the window or not aligned to 4 bytes.
    #[inline]
    #[must_use]
    pub fn load_u32_acquire(&self, offset: usize) -> Option<u32> {
        let ptr = self.at(offset, 4)?.cast::<AtomicU32>();
        // SAFETY: the word is mapped and aligned. All accesses to shared memory are atomics or
        // copies.
        ptr.is_aligned().then(|| unsafe { ptr.as_ref() }.load(Ordering::Acquire))
    }

    /// Loads the aligned 16-bit word at `offset` with acquire ordering. Returns `None` if it is not
    /// inside the window or not aligned to 2 bytes.
    #[inline]
    #[must_use]
    pub fn load_u16_acquire(&self, offset: usize) -> Option<u16> {
        let ptr = self.at(offset, 2)?.cast::<AtomicU16>();
        // SAFETY: the word is mapped and aligned. All accesses to shared memory are atomics or
        // copies.
        ptr.is_aligned().then(|| unsafe { ptr.as_ref() }.load(Ordering::Acquire))
    }

    /// Stores the aligned 16-bit word at `offset` with release ordering. Returns `None` if it is
    /// not inside the window, not aligned, or read-only.
    #[inline]
    #[must_use]
    pub fn store_u16_release(&self, offset: usize, value: u16) -> Option<()> {
        let ptr = self.at_for_write(offset, 2)?.cast::<AtomicU16>();
        if !ptr.is_aligned() {
            return None;
        }
        // SAFETY: the word is mapped, aligned and writable. All accesses to shared memory are
        // atomics or copies.
        unsafe { ptr.as_ref() }.store(value, Ordering::Release);
        Some(())
    }

    /// Stores the aligned 64-bit word at `offset` with release ordering: a reader that loads it
    /// with acquire ordering sees all earlier writes. Returns `None` if it is not inside the
    /// window, not aligned, or read-only.
    #[inline]
    #[must_use]
    pub fn store_u64_release(&self, offset: usize, value: u64) -> Option<()> {
        let ptr = self.at_for_write(offset, 8)?.cast::<AtomicU64>();
        if !ptr.is_aligned() {
            return None;
        }
        // SAFETY: the word is mapped, aligned and writable. All accesses to shared memory are
        // atomics or copies.
        unsafe { ptr.as_ref() }.store(value, Ordering::Release);
        Some(())
    }

    /// Writes pairs of words consecutively from `offset`, with the bits `with` added to the second
    /// word of each pair. The second word is stored with release ordering. Returns `None` without a
    /// write if the pairs are not completely inside the window, not aligned to 8 bytes, or
    /// read-only.
    #[inline]
    #[must_use]
    pub fn store_pairs_release(&self, offset: usize, pairs: &[[u64; 2]], with: u64) -> Option<()> {
        let at = self.at_for_write(offset, size_of_val(pairs))?.cast::<[AtomicU64; 2]>();
        if !at.is_aligned() {
            return None;
        }
        for (index, [first, second]) in pairs.iter().enumerate() {
            // SAFETY: as in `load_u64_acquire`; in addition, the memory is writable, and all
            // pairs were checked to fit.
            let words = unsafe { at.add(index).as_ref() };
            words[0].store(*first, Ordering::Relaxed);
            words[1].store(*second | with, Ordering::Release);
        }
        Some(())
    }

    /// Prefetches the cache line at `offset` for writing. This takes the line from other
    /// processors. The offset may be outside of the window; a useless prefetch has no other effect.
    #[inline]
    pub fn prefetch_for_write(&self, offset: usize) {
        let at = self.ptr.as_ptr().wrapping_add(offset);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch has no effect on memory, and a prefetch of an unmapped address has
        // no effect at all. A processor without this instruction executes it as a no-operation.
        unsafe {
            std::arch::asm!(
                "prefetchw byte ptr [{}]",
                in(reg) at,
                options(nostack, readonly, preserves_flags)
            );
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at;
    }

    /// Prefetches the cache line at `offset` for reading. The offset may lie outside the window,
    /// as with [`prefetch_for_write`](Self::prefetch_for_write).
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        let at = self.ptr.as_ptr().wrapping_add(offset);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch has no effect on memory, and a prefetch of an unmapped address has
        // no effect at all.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at;
    }

    /// Prefetches the cache lines of `len` bytes from `offset` into the second-level cache.
    ///
    /// The second-level cache can have many outstanding lines. The first level has only about
    /// twenty fill buffers, and further prefetches have to wait for a free one. The range may lie
    /// outside the window, as with [`prefetch_for_write`](Self::prefetch_for_write).
    #[inline]
    pub fn prefetch_range(&self, offset: usize, len: usize) {
        let from = self.ptr.as_ptr().wrapping_add(offset);
        for line in 0..len.div_ceil(CACHE_LINE) {
            let at = from.wrapping_add(line * CACHE_LINE);
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a prefetch has no effect on memory.
            unsafe {
                std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(at.cast());
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = at;
        }
    }
}

/// Cache line size in bytes.
const CACHE_LINE: usize = 64;

/// Largest unit in which a value is copied.
#[cfg(target_arch = "x86_64")]
type Wide = std::arch::x86_64::__m128i;
#[cfg(not(target_arch = "x86_64"))]
type Wide = u64;

/// Copies as many whole units `U` as fit between `at` and `len`, and adds their length to `at`.
///
/// # Safety
///
/// `len` bytes must be readable at `from` and writable at `into`, and the ranges must not overlap.
#[inline(always)]
unsafe fn copy_by<U: Copy>(from: *const u8, into: *mut u8, at: &mut usize, len: usize) {
    while *at + size_of::<U>() <= len {
        // SAFETY: the unit lies inside both ranges.
        unsafe {
            let unit = from.add(*at).cast::<Unaligned<U>>().read_volatile();
            into.add(*at).cast::<Unaligned<U>>().write(unit);
        }
        *at += size_of::<U>();
    }
}

/// Writes the eight words of an entry from registers, in the largest units.
///
/// If the value were assembled on the stack in small pieces and then copied, the processor would
/// wait until those pieces have reached the cache. The pieces would wait for the stores of all
/// earlier entries, whose cache lines come from another processor.
///
/// # Safety
/// 64 bytes must be writable at `into`.
#[inline(always)]
pub(crate) unsafe fn store_words(into: *mut u8, words: [u64; 8]) {
    let [a, b, c, d, e, f, g, h] = words;
    for (index, (low, high)) in [(a, b), (c, d), (e, f), (g, h)].into_iter().enumerate() {
        let into = into.wrapping_add(16 * index);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the 16 bytes lie in the range that the caller guarantees, and need not be
        // aligned; SSE2 is part of the architecture.
        unsafe {
            use std::arch::x86_64::{__m128i, _mm_set_epi64x, _mm_storeu_si128};
            _mm_storeu_si128(into.cast::<__m128i>(), _mm_set_epi64x(high as i64, low as i64));
        }
        #[cfg(not(target_arch = "x86_64"))]
        // SAFETY: the 16 bytes lie in the range that the caller guarantees.
        unsafe {
            into.cast::<[u64; 2]>().write_unaligned([low, high]);
        }
    }
}

/// Wrapper without alignment, for volatile accesses at addresses that the peer chooses.
#[repr(C, packed)]
struct Unaligned<T>(T);

/// 32-bit cell of shared memory: a doorbell register, a shadow doorbell, an EventIdx.
///
/// The value dereferences to the atomic, and keeps the mapping alive.
#[derive(Clone, Debug)]
pub struct SharedU32 {
    _mapping: Arc<Mapping>,
    ptr: NonNull<AtomicU32>,
}

// SAFETY: the value keeps the memory of its atomic alive.
unsafe impl Send for SharedU32 {}
// SAFETY: as for `Send`.
unsafe impl Sync for SharedU32 {}

impl Deref for SharedU32 {
    type Target = AtomicU32;
    #[inline]
    fn deref(&self) -> &AtomicU32 {
        // SAFETY: the cell is aligned, and is mapped as long as `_mapping` lives. All accesses to
        // shared memory are atomics or copies.
        unsafe { self.ptr.as_ref() }
    }
}

impl shadowbell_doorbell::Cell for SharedU32 {
    #[inline]
    fn load_relaxed(&self) -> u32 {
        shadowbell_doorbell::Cell::load_relaxed(&**self)
    }

    #[inline]
    fn load_acquire(&self) -> u32 {
        shadowbell_doorbell::Cell::load_acquire(&**self)
    }

    #[inline]
    fn store_release(&self, value: u32) {
        shadowbell_doorbell::Cell::store_release(&**self, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_beyond_the_end_are_refused() {
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
    fn a_cell_keeps_its_mapping_alive() {
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
