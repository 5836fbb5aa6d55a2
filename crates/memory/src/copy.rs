//! Long copies between the data of a command and a disk that is memory.
//!
//! Such a disk is larger than the processor's caches, so a copy of many pages waits for memory all
//! the time, and it depends on who asks for what and when. The system's `memmove` copies long
//! blocks by `rep movsb`. Of blocks of 128 KiB between 32 buffers in a row and random places of 256
//! MiB (an AMD EPYC of the third generation under a hypervisor, loops of copies alone, medians of
//! five, in turn):
//!
//! * from the disk to the buffers 19.4 GB/s, and 21.6 with every line of the disk asked for 6 KiB
//!   ahead, into the second level of the cache (19 at 12 KiB, 17 into the first level);
//! * from the buffers to the disk 18.1 GB/s, and 26.0 by stores that go past the caches: the lines
//!   need not be fetched to be overwritten, and what was in the cache stays there. Whether all of
//!   them have arrived has to be waited for, though, which takes longer than a page does.
//!
//! A single page of the disk is better asked for before its turn, as a whole
//! ([`SharedBytes::prefetch_range`](crate::SharedBytes::prefetch_range)).

use std::ptr::copy;

/// From how many bytes on it pays, either way.
const LONG: usize = 8 << 10;

/// Whether so many bytes go past the caches to a disk that is memory ([`Segments::copy_to_large`]),
/// so that it is no use to bring what they overwrite near.
///
/// [`Segments::copy_to_large`]: crate::Segments::copy_to_large
#[inline]
#[must_use]
pub fn goes_past_caches(len: usize) -> bool {
    len >= LONG && has_streams()
}

/// Copies `len` bytes of a disk that is too large for the caches to a buffer. The two may overlap.
///
/// # Safety
/// `len` bytes from `from` can be read, and `len` bytes from `into` written.
#[inline]
pub(crate) unsafe fn from_disk(from: *const u8, into: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= LONG && can_be_ours(from, into, len) {
        // SAFETY: the caller vouches for the ranges, they were seen to be disjoint, and the
        // processor to have AVX2.
        return unsafe { x86_64::ask_ahead(from, into, len) };
    }
    // SAFETY: the caller vouches for the ranges.
    unsafe { copy(from, into, len) }
}

/// Copies `len` bytes of a buffer to a disk that is too large for the caches. The two may overlap.
/// What is stored afterwards is seen afterwards, as with any other copy.
///
/// # Safety
/// `len` bytes from `from` can be read, and `len` bytes from `into` written.
#[inline]
pub(crate) unsafe fn to_disk(from: *const u8, into: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= LONG && can_be_ours(from, into, len) {
        // SAFETY: as in `from_disk`.
        return unsafe { x86_64::past_caches(from, into, len) };
    }
    // SAFETY: the caller vouches for the ranges.
    unsafe { copy(from, into, len) }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn can_be_ours(from: *const u8, into: *mut u8, len: usize) -> bool {
    from.addr().abs_diff(into.addr()) >= len && has_streams()
}

/// Whether the processor has what the loops of our own are made of.
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

    /// Bytes of a turn of the loops: as many loads in a row as there is room for in registers, and
    /// then as many stores.
    const TURN: usize = 8 * size_of::<__m256i>();
    /// How far ahead of the copy lines are asked for.
    const AHEAD: usize = 6 << 10;
    /// Stores are aligned to a line.
    const LINE: usize = 64;

    /// # Safety
    /// As for [`super::from_disk`]; the two ranges do not overlap, and the processor has AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn ask_ahead(from: *const u8, into: *mut u8, len: usize) {
        // What is behind the block is not wanted: it would be a twentieth of 128 KiB.
        let asking = len.saturating_sub(AHEAD);
        // SAFETY: the caller vouches for all of it, and a prefetch has no effect on memory.
        unsafe {
            by_turns(from, into, asking, |from, into| {
                for line in (0..TURN).step_by(LINE) {
                    _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(AHEAD + line).cast());
                }
                store(load(from), into);
            });
            by_turns(from.add(asking), into.add(asking), len - asking, |from, into| {
                store(load(from), into);
            });
        }
    }

    /// # Safety
    /// `TURN` bytes from `into`, which is aligned to a line, can be written.
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn store(units: [__m256i; 8], into: *mut u8) {
        for (index, unit) in units.into_iter().enumerate() {
            // SAFETY: eight units are a turn.
            unsafe { _mm256_store_si256(into.cast::<__m256i>().add(index), unit) };
        }
    }

    /// # Safety
    /// As for [`super::to_disk`]; the two ranges do not overlap, and the processor has AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn past_caches(from: *const u8, into: *mut u8, len: usize) {
        // SAFETY: the caller vouches for all of it.
        unsafe {
            by_turns(from, into, len, |from, into| {
                let units = load(from);
                for (index, unit) in units.into_iter().enumerate() {
                    _mm256_stream_si256(into.cast::<__m256i>().add(index), unit);
                }
            });
        }
        // These stores are not ordered with others by themselves, and a completion comes next.
        _mm_sfence();
    }

    /// # Safety
    /// `TURN` bytes from `from` can be read.
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn load(from: *const u8) -> [__m256i; 8] {
        let from = from.cast::<__m256i>();
        // SAFETY: eight units are a turn.
        let unit = |index| unsafe { _mm256_loadu_si256(from.add(index)) };
        [unit(0), unit(1), unit(2), unit(3), unit(4), unit(5), unit(6), unit(7)]
    }

    /// Copies all of it: whole turns from the first line of `into` on by `turn`, and what is before
    /// and behind as usual.
    ///
    /// # Safety
    /// `len` bytes from `from` can be read and `len` bytes from `into` written, and they do not
    /// overlap.
    #[inline(always)]
    unsafe fn by_turns(
        from: *const u8,
        into: *mut u8,
        len: usize,
        turn: impl Fn(*const u8, *mut u8),
    ) {
        let before = into.align_offset(LINE).min(len);
        let behind = (len - before) % TURN;
        // SAFETY: `before`, the turns and `behind` add up to `len`.
        unsafe {
            copy_nonoverlapping(from, into, before);
            let mut at = before;
            while at < len - behind {
                turn(from.add(at), into.add(at));
                at += TURN;
            }
            copy_nonoverlapping(from.add(at), into.add(at), behind);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Copier = unsafe fn(*const u8, *mut u8, usize);

    /// Bytes that repeat nowhere within a few pages.
    fn pattern(len: usize) -> Vec<u8> {
        (0..len as u64).map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
    }

    #[test]
    fn every_byte_is_copied_and_no_other_is_touched() {
        const EDGE: usize = 512;
        let source = pattern(LONG * 5);
        for copier in [from_disk as Copier, to_disk] {
            let lens = [LONG, 2 * LONG].map(|len| [len - 1, len, len + 1, len + 300]);
            for len in [0, 1, 4 * LONG - 7].into_iter().chain(lens.into_iter().flatten()) {
                for (skip, shift) in [(0, 0), (1, 0), (0, 1), (31, 33), (63, 64), (100, 255)] {
                    let mut target = vec![0xa5; 2 * EDGE + len];
                    let (from, into) = (&source[skip..], &mut target[shift..]);
                    assert!(from.len() >= len && into.len() >= len + EDGE);
                    // SAFETY: both were just seen to have as many bytes.
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

    /// An in-process host can name the disk's own memory as its buffer.
    #[test]
    fn what_overlaps_is_copied_as_it_was() {
        let len = 2 * LONG;
        for copier in [from_disk as Copier, to_disk] {
            for (from, into) in [(0, 0), (0, 1), (1, 0), (0, 4096), (4096, 0), (0, len - 1)] {
                let mut both = pattern(2 * len);
                let expected = both[from..from + len].to_vec();
                let start = both.as_mut_ptr();
                // SAFETY: both ranges are inside of the vector.
                unsafe { copier(start.add(from), start.add(into), len) };
                assert!(both[into..into + len] == expected, "{from} {into}");
            }
        }
    }
}
