//! A window into memory that a peer may be changing.

use crate::mapping::{Mapping, Protection};
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};
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
    /// As the mapping has it, here so that a store does not have to ask there.
    writable: bool,
}

// SAFETY: a pointer into a mapping that the value keeps alive; the mapping itself is Send + Sync
// and access is by copies and atomics only.
unsafe impl Send for SharedBytes {}
// SAFETY: as above.
unsafe impl Sync for SharedBytes {}

impl Mapping {
    /// The whole mapping as bytes. (Here, because a mapping knows nothing of windows.)
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

    /// The length in bytes.
    #[inline]
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
    #[inline]
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.writable
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

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.ptr
    }

    /// The window's bytes `[offset, offset + len)`, or `None` if it has not that many.
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> Option<Self> {
        let ptr = self.at(offset, len)?;
        let mapping = Arc::clone(&self.mapping);
        Some(Self { mapping, ptr, len, writable: self.writable })
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
        self.at(offset, size_of::<T>())?;
        // SAFETY: the value was just checked to lie inside.
        Some(unsafe { self.read_at(offset) })
    }

    /// As [`read`](Self::read), without a check.
    ///
    /// # Safety
    /// `size_of::<T>()` bytes from `offset` lie inside the window.
    #[inline]
    pub(crate) unsafe fn read_at<T: FromBytes>(&self, offset: usize) -> T {
        // SAFETY: the caller vouches for the offset.
        let from = unsafe { self.ptr.add(offset) }.as_ptr();
        let mut value = MaybeUninit::<T>::uninit();
        let into = value.as_mut_ptr().cast::<u8>();
        // Volatile, so that the compiler can not read shared memory a second time; by units as
        // large as there are and not as a `T`, because it would be read field by field.
        let mut at = 0;
        // SAFETY: `size_of::<T>()` bytes from `from` are mapped and readable, and `into` has as
        // many; the three calls copy them from the first to the last.
        unsafe {
            copy_by::<Wide>(from, into, &mut at, size_of::<T>());
            copy_by::<u64>(from, into, &mut at, size_of::<T>());
            copy_by::<u8>(from, into, &mut at, size_of::<T>());
        }
        // SAFETY: every byte was written, and any bytes make a `T` (FromBytes).
        unsafe { value.assume_init() }
    }

    /// As [`write`](Self::write), without a check.
    ///
    /// # Safety
    /// `size_of::<T>()` bytes from `offset` lie inside the window, which is writable.
    #[inline]
    pub(crate) unsafe fn write_at<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        let from = value.as_bytes();
        // SAFETY: the caller vouches for the range; no Rust reference points into a mapping, so the
        // two do not overlap.
        unsafe {
            let into = self.ptr.add(offset).as_ptr();
            std::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len());
        }
    }

    /// Writes the eight words of a submission queue entry at `offset`, without a check.
    ///
    /// # Safety
    /// 64 bytes from `offset` lie inside the window, which is writable.
    #[inline(always)]
    pub(crate) unsafe fn write_words_at(&self, offset: usize, words: [u64; 8]) {
        // SAFETY: the caller vouches for the range.
        unsafe { store_words(self.ptr.add(offset).as_ptr(), words) };
    }

    /// Copies `count` cache lines from `lines` to `offset`, in order, without a check.
    ///
    /// # Safety
    /// `count` times 64 bytes can be read at `lines`, and lie inside the window from `offset` on,
    /// which is writable.
    #[inline]
    pub(crate) unsafe fn write_lines_at(&self, offset: usize, lines: *const u8, count: usize) {
        let into = self.ptr.as_ptr().wrapping_add(offset);
        for line in 0..count {
            // SAFETY: the caller vouches for both ranges. One is Rust's and one is a mapping, so
            // they do not overlap.
            unsafe {
                copy_by::<Wide>(lines.add(64 * line), into.wrapping_add(64 * line), &mut 0, 64);
            }
        }
    }

    /// As [`load_u64_acquire`](Self::load_u64_acquire), without a check.
    ///
    /// # Safety
    /// Eight bytes from `offset` lie inside the window, and there is an address aligned to 8.
    #[inline]
    pub(crate) unsafe fn load_u64_at(&self, offset: usize) -> u64 {
        // SAFETY: the caller vouches for the place; shared memory is only ever accessed as atomics
        // or by copies.
        unsafe { self.ptr.add(offset).cast::<AtomicU64>().as_ref() }.load(Ordering::Acquire)
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

    /// Loads the aligned 16-bit word at `offset` with acquire ordering; `None` if it is not inside
    /// or not aligned to 2 bytes.
    #[inline]
    #[must_use]
    pub fn load_u16_acquire(&self, offset: usize) -> Option<u16> {
        let ptr = self.at(offset, 2)?.cast::<AtomicU16>();
        if !ptr.is_aligned() {
            return None;
        }
        // SAFETY: as in `load_u64_acquire`.
        Some(unsafe { ptr.as_ref() }.load(Ordering::Acquire))
    }

    /// Stores the aligned 16-bit word at `offset` with release ordering. `None` if it is not
    /// inside, not aligned, or read-only.
    #[inline]
    #[must_use]
    pub fn store_u16_release(&self, offset: usize, value: u16) -> Option<()> {
        let ptr = self.at_for_write(offset, 2)?.cast::<AtomicU16>();
        if !ptr.is_aligned() {
            return None;
        }
        // SAFETY: as in `load_u64_acquire`, and the memory is writable.
        unsafe { ptr.as_ref() }.store(value, Ordering::Release);
        Some(())
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

    /// Writes pairs of words one after the other from `offset` on, the bits `with` added to the
    /// second of each, which is stored with release ordering. `None`, and nothing written, if they
    /// are not all inside, not aligned to 8 bytes, or read-only.
    #[inline]
    #[must_use]
    pub fn store_pairs_release(&self, offset: usize, pairs: &[[u64; 2]], with: u64) -> Option<()> {
        let at = self.at_for_write(offset, size_of_val(pairs))?.cast::<[AtomicU64; 2]>();
        if !at.is_aligned() {
            return None;
        }
        for (index, [first, second]) in pairs.iter().enumerate() {
            // SAFETY: as in `load_u64_acquire`, the memory is writable, and as many pairs as there
            // are were just checked to fit.
            let words = unsafe { at.add(index).as_ref() };
            words[0].store(*first, Ordering::Relaxed);
            words[1].store(*second | with, Ordering::Release);
        }
        Some(())
    }

    /// Asks the processor to bring the cache line at `offset` near for writing, which takes it from
    /// whoever else has it. The offset may lie outside: that only takes somebody a line in vain.
    #[inline]
    pub fn prefetch_for_write(&self, offset: usize) {
        let at = self.ptr.as_ptr().wrapping_add(offset);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch has no effect on memory, and one of an address that is not mapped has
        // none at all. A processor that does not know this one takes it for a no-operation.
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

    /// Asks the processor to bring the cache line at `offset` near. The offset may lie outside, as
    /// with [`prefetch_for_write`](Self::prefetch_for_write).
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        let at = self.ptr.as_ptr().wrapping_add(offset);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch has no effect on memory, and one of an address that is not mapped has
        // none at all.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at;
    }

    /// Asks the processor to bring the cache lines of `len` bytes from `offset` into the second
    /// level of its cache, where there is room for many at a time: the first level has some twenty
    /// places for lines on their way, and whoever asks for more waits. The range may lie outside,
    /// as with [`prefetch_for_write`](Self::prefetch_for_write).
    #[inline]
    pub fn prefetch_range(&self, offset: usize, len: usize) {
        let from = self.ptr.as_ptr().wrapping_add(offset);
        for line in 0..len.div_ceil(CACHE_LINE) {
            let at = from.wrapping_add(line * CACHE_LINE);
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as in `prefetch`.
            unsafe {
                std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(at.cast());
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = at;
        }
    }
}

/// What a cache moves at a time, in bytes.
const CACHE_LINE: usize = 64;

/// The largest unit that memory is read by.
#[cfg(target_arch = "x86_64")]
type Wide = std::arch::x86_64::__m128i;
#[cfg(not(target_arch = "x86_64"))]
type Wide = u64;

/// Copies as many whole units `U` as there are between `at` and `len`, and moves `at` past them.
///
/// # Safety
/// `len` bytes from `from` can be read and `len` bytes from `into` written, and they do not
/// overlap.
#[inline(always)]
unsafe fn copy_by<U: Copy>(from: *const u8, into: *mut u8, at: &mut usize, len: usize) {
    while *at + size_of::<U>() <= len {
        // SAFETY: the unit lies inside of both.
        unsafe {
            let unit = from.add(*at).cast::<Unaligned<U>>().read_volatile();
            into.add(*at).cast::<Unaligned<U>>().write(unit);
        }
        *at += size_of::<U>();
    }
}

/// Writes the eight words of an entry, from registers and by units as large as there are.
///
/// A copy of a value that was put together on the stack in small pieces makes the processor wait
/// until those have reached the cache, behind every entry written before, whose cache lines are
/// still to come from the other side.
///
/// # Safety
/// 64 bytes from `into` can be written.
#[inline(always)]
pub(crate) unsafe fn store_words(into: *mut u8, words: [u64; 8]) {
    let [a, b, c, d, e, f, g, h] = words;
    for (index, (low, high)) in [(a, b), (c, d), (e, f), (g, h)].into_iter().enumerate() {
        let into = into.wrapping_add(16 * index);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the 16 bytes lie in the range that the caller vouches for, and need not be
        // aligned; SSE2 is part of the architecture.
        unsafe {
            use std::arch::x86_64::{__m128i, _mm_set_epi64x, _mm_storeu_si128};
            _mm_storeu_si128(into.cast::<__m128i>(), _mm_set_epi64x(high as i64, low as i64));
        }
        #[cfg(not(target_arch = "x86_64"))]
        // SAFETY: the 16 bytes lie in the range that the caller vouches for.
        unsafe {
            into.cast::<[u64; 2]>().write_unaligned([low, high]);
        }
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
