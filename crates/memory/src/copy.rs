//! Large copies between the data of a command and a memory-backed disk.
//!
//! A memory-backed disk is larger than the processor's caches, so a copy of many pages is limited
//! by memory latency. Its speed depends on prefetching and on the kind of store. The `memmove` of
//! glibc copies large blocks with `rep movsb`. Measured with blocks of 128 KiB between 32
//! consecutive buffers and random positions in 256 MiB (third-generation AMD EPYC under a
//! hypervisor, loops of copies only, medians of five, alternating):
//!
//! * Disk to buffers: 19.4 GB/s with `memmove`, 21.6 GB/s if every line of the disk is prefetched
//!   6 KiB ahead into the second-level cache (19 at 12 KiB, 17 into the first level).
//! * Buffers to disk: 18.1 GB/s with `memmove`, 26.0 GB/s with non-temporal stores, which do not
//!   fetch the overwritten lines and leave the content of the cache unchanged. But the fence that
//!   has to wait for these stores takes longer than the copy of a single page.
//!
//! For a single page of the disk, prefetching the whole page before the copy is faster
//! ([`SharedBytes::prefetch_range`](crate::SharedBytes::prefetch_range)).

use std::ptr::copy;

/// Smallest length in bytes from which the loops of this module are faster than `memmove`, in both
/// directions.
const MIN_STREAMED: usize = 8 << 10;

/// True if a write of `len` bytes to a memory-backed disk uses non-temporal stores
/// ([`Segments::copy_to_large`]), which do not need a prefetch of the destination.
///
/// [`Segments::copy_to_large`]: crate::Segments::copy_to_large
#[inline]
#[must_use]
pub fn bypasses_caches(len: usize) -> bool {
    len >= MIN_STREAMED && has_streams()
}

/// Copies `len` bytes of a disk that exceeds the caches to a buffer. The ranges may overlap.
///
/// # Safety
/// `len` bytes must be readable at `from`, and `len` bytes writable at `into`.
#[inline]
pub(crate) unsafe fn from_disk(from: *const u8, into: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= MIN_STREAMED && can_use_streams(from, into, len) {
        // SAFETY: the caller guarantees the ranges. `can_use_streams` checked that they are
        // disjoint and that the processor has AVX2.
        return unsafe { x86_64::copy_prefetched(from, into, len) };
    }
    // SAFETY: the caller guarantees the ranges.
    unsafe { copy(from, into, len) }
}

/// Copies `len` bytes of a buffer to a disk that exceeds the caches. The ranges may overlap.
///
/// Later stores become visible after the copied data, as with an ordinary copy.
///
/// # Safety
/// `len` bytes must be readable at `from`, and `len` bytes writable at `into`.
#[inline]
pub(crate) unsafe fn to_disk(from: *const u8, into: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= MIN_STREAMED && can_use_streams(from, into, len) {
        // SAFETY: the caller guarantees the ranges. `can_use_streams` checked that they are
        // disjoint and that the processor has AVX2.
        return unsafe { x86_64::copy_non_temporal(from, into, len) };
    }
    // SAFETY: the caller guarantees the ranges.
    unsafe { copy(from, into, len) }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn can_use_streams(from: *const u8, into: *mut u8, len: usize) -> bool {
    from.addr().abs_diff(into.addr()) >= len && has_streams()
}

/// True if the processor has the instructions of the `x86_64` loops (AVX2).
#[inline]
fn has_streams() -> bool {
    #[cfg(target_arch = "x86_64")]
    let has = std::arch::is_x86_feature_detected!("avx2");
    #[cfg(not(target_arch = "x86_64"))]
    let has = false;
    has
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::x86_64::{
        __m256i, _MM_HINT_T1, _mm_prefetch, _mm_sfence, _mm256_loadu_si256, _mm256_store_si256,
        _mm256_stream_si256,
    };
    use std::ptr::copy_nonoverlapping;

    /// Bytes per iteration of the loops. Eight loads fill half of the registers, and eight stores
    /// follow.
    const ITERATION_BYTES: usize = 8 * size_of::<__m256i>();
    /// Prefetch distance in bytes.
    const PREFETCH_DISTANCE: usize = 6 << 10;
    /// Cache line size, to which stores are aligned.
    const LINE: usize = 64;

    /// Copies `len` bytes with prefetches of `from`.
    ///
    /// # Safety
    ///
    /// As for [`super::from_disk`]; in addition, the ranges must not overlap, and the processor
    /// must have AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn copy_prefetched(from: *const u8, into: *mut u8, len: usize) {
        // Lines after the end of the range are not prefetched. With 128 KiB, a twentieth of all
        // prefetches would be useless.
        let prefetched = len.saturating_sub(PREFETCH_DISTANCE);
        // SAFETY: the caller guarantees the ranges; a prefetch has no effect on memory.
        unsafe {
            in_iterations(from, into, prefetched, |from, into| {
                for line in (0..ITERATION_BYTES).step_by(LINE) {
                    _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(PREFETCH_DISTANCE + line).cast());
                }
                store(load(from), into);
            });
            in_iterations(
                from.add(prefetched),
                into.add(prefetched),
                len - prefetched,
                |from, into| {
                    store(load(from), into);
                },
            );
        }
    }

    /// Stores `ITERATION_BYTES` bytes with ordinary stores.
    ///
    /// # Safety
    ///
    /// `ITERATION_BYTES` bytes must be writable at `into`, which is aligned to a cache line.
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn store(units: [__m256i; 8], into: *mut u8) {
        for (index, unit) in units.into_iter().enumerate() {
            // SAFETY: the eight units are `ITERATION_BYTES` bytes together.
            unsafe { _mm256_store_si256(into.cast::<__m256i>().add(index), unit) };
        }
    }

    /// Copies `len` bytes with non-temporal stores.
    ///
    /// # Safety
    ///
    /// As for [`super::to_disk`]; in addition, the ranges must not overlap, and the processor must
    /// have AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn copy_non_temporal(from: *const u8, into: *mut u8, len: usize) {
        // SAFETY: the caller guarantees the ranges.
        unsafe {
            in_iterations(from, into, len, |from, into| {
                let units = load(from);
                for (index, unit) in units.into_iter().enumerate() {
                    _mm256_stream_si256(into.cast::<__m256i>().add(index), unit);
                }
            });
        }
        // Non-temporal stores are weakly ordered. Without the fence, a later store of a completion
        // entry could become visible before the data.
        _mm_sfence();
    }

    /// Loads `ITERATION_BYTES` bytes.
    ///
    /// # Safety
    ///
    /// `ITERATION_BYTES` bytes must be readable at `from`.
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn load(from: *const u8) -> [__m256i; 8] {
        let from = from.cast::<__m256i>();
        // SAFETY: the eight units are `ITERATION_BYTES` bytes together.
        let unit = |index| unsafe { _mm256_loadu_si256(from.add(index)) };
        [unit(0), unit(1), unit(2), unit(3), unit(4), unit(5), unit(6), unit(7)]
    }

    /// Copies `len` bytes. `turn` copies whole iterations, from the first cache line boundary of
    /// `into` on. The bytes before and after the iterations are copied by an ordinary copy.
    ///
    /// # Safety
    ///
    /// `len` bytes must be readable at `from` and writable at `into`, and the ranges must not
    /// overlap.
    #[inline(always)]
    unsafe fn in_iterations(
        from: *const u8,
        into: *mut u8,
        len: usize,
        turn: impl Fn(*const u8, *mut u8),
    ) {
        let before = into.align_offset(LINE).min(len);
        let behind = (len - before) % ITERATION_BYTES;
        // SAFETY: `before`, the iterations and `behind` are `len` bytes together.
        unsafe {
            copy_nonoverlapping(from, into, before);
            let mut at = before;
            while at < len - behind {
                turn(from.add(at), into.add(at));
                at += ITERATION_BYTES;
            }
            copy_nonoverlapping(from.add(at), into.add(at), behind);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Copier = unsafe fn(*const u8, *mut u8, usize);

    /// Byte pattern without a repetition within a few pages.
    fn pattern(len: usize) -> Vec<u8> {
        (0..len as u64).map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
    }

    #[test]
    fn every_byte_is_copied_and_no_other_is_touched() {
        const EDGE: usize = 512;
        let source = pattern(MIN_STREAMED * 5);
        for copier in [from_disk as Copier, to_disk] {
            let lens =
                [MIN_STREAMED, 2 * MIN_STREAMED].map(|len| [len - 1, len, len + 1, len + 300]);
            for len in [0, 1, 4 * MIN_STREAMED - 7].into_iter().chain(lens.into_iter().flatten()) {
                for (skip, shift) in [(0, 0), (1, 0), (0, 1), (31, 33), (63, 64), (100, 255)] {
                    let mut target = vec![0xa5; 2 * EDGE + len];
                    let (from, into) = (&source[skip..], &mut target[shift..]);
                    assert!(from.len() >= len && into.len() >= len + EDGE);
                    // SAFETY: the assertion above checked both lengths.
                    unsafe { copier(from.as_ptr(), into.as_mut_ptr(), len) };
                    let (before, rest) = target.split_at(shift);
                    let (copied, behind) = rest.split_at(len);
                    assert!(copied == &source[skip..skip + len], "{len} {skip} {shift}");
                    let is_untouched = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0xa5);
                    assert!(is_untouched(before) && is_untouched(behind), "{len} {skip} {shift}");
                }
            }
        }
    }

    /// The buffer of an in-process host can be the disk's own memory, so the ranges may overlap.
    #[test]
    fn overlapping_ranges_are_copied_correctly() {
        let len = 2 * MIN_STREAMED;
        for copier in [from_disk as Copier, to_disk] {
            for (from, into) in [(0, 0), (0, 1), (1, 0), (0, 4096), (4096, 0), (0, len - 1)] {
                let mut both = pattern(2 * len);
                let expected = both[from..from + len].to_vec();
                let start = both.as_mut_ptr();
                // SAFETY: both ranges are inside the vector.
                unsafe { copier(start.add(from), start.add(into), len) };
                assert!(both[into..into + len] == expected, "{from} {into}");
            }
        }
    }
}
