//! Batch of submission queue entries.

use crate::ring::Ring;
use crate::shared::store_words;

/// Submission queue entries that are collected and written to their queue together.
///
/// The consumer's processor has read the cache line of each entry in the previous round of the
/// ring, so the line has to be fetched from that processor's cache. A processor's stores reach the
/// cache in order. If a program writes entries one by one, with other stores in between, only one
/// or two of these lines are in flight at a time. As soon as its store buffer is full of later
/// stores, the program waits for each line. If sixteen consecutive entries are written together,
/// all their lines are in flight together.
#[derive(Debug)]
pub struct SqeBatch {
    lines: Box<[Line; Self::ROOM]>,
    staged: usize,
}

#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([u64; 8]);

impl SqeBatch {
    /// Capacity in entries. 16 entries are written by 64 stores of 16 bytes, as many as the store
    /// buffer of a current processor holds.
    pub const ROOM: usize = 16;

    /// Creates an empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self { lines: Box::new([Line([0; 8]); Self::ROOM]), staged: 0 }
    }

    /// Number of entries in the batch.
    #[inline]
    #[must_use]
    pub fn staged(&self) -> usize {
        self.staged
    }

    /// True if the batch has no room for another entry.
    #[inline]
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.staged >= Self::ROOM
    }

    /// Adds the eight words of an entry. The batch must not be full; otherwise entries are lost.
    #[inline(always)]
    pub fn push(&mut self, words: [u64; 8]) {
        debug_assert!(!self.is_full(), "there is room in the batch");
        // The modulo operation lets the compiler omit the bounds check.
        let line: *mut Line = &mut self.lines[self.staged % Self::ROOM];
        self.staged += 1;
        // SAFETY: a line has 64 bytes.
        unsafe { store_words(line.cast(), words) };
    }

    /// Writes the entries to `ring` from entry `first` on, also across the end of the ring.
    ///
    /// # Panics
    ///
    /// If `first` is outside the ring, or the memory is read-only.
    #[inline]
    pub fn flush(&mut self, ring: &Ring<64>, first: u32) {
        let staged = std::mem::take(&mut self.staged).min(Self::ROOM);
        let to_end = ring.entries().saturating_sub(first) as usize;
        self.write(ring, first, 0, staged.min(to_end));
        if staged > to_end {
            self.write(ring, 0, to_end, staged - to_end);
        }
    }

    /// Writes `count` entries of the batch, from `line` on, to the ring entries from `at` on.
    #[inline]
    fn write(&self, ring: &Ring<64>, at: u32, line: usize, count: usize) {
        let lines = &self.lines[line..line + count];
        match ring.run(at, count) {
            Some((bytes, offset)) => {
                assert!(bytes.is_writable(), "the ring can be written");
                // SAFETY: `lines` has `count` lines, and a run lies inside its bytes, which are
                // writable.
                unsafe { bytes.write_lines_at(offset, lines.as_ptr().cast(), count) };
            }
            // The ring entries are not contiguous in this process's memory, so they are written one
            // by one.
            None => {
                for (at, line) in (at..).zip(lines) {
                    ring.write_words(at, line.0);
                }
            }
        }
    }
}

impl Default for SqeBatch {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DmaSpace, Mapping};

    fn words(n: u64) -> [u64; 8] {
        std::array::from_fn(|i| n << 8 | i as u64)
    }

    #[test]
    fn a_flush_writes_pushed_entries_to_the_ring() {
        let ring = Ring::<64>::over(&Mapping::anonymous(4096).unwrap().bytes(), 64).unwrap();
        let mut batch = SqeBatch::new();
        let mut next = 0;
        // The batch crosses the end of the ring many times, at all positions and with all lengths.
        for n in 0..1000u64 {
            let count = n % (SqeBatch::ROOM as u64 + 1);
            for i in 0..count {
                assert!(!batch.is_full());
                batch.push(words(n << 16 | i));
            }
            assert_eq!(batch.staged() as u64, count);
            batch.flush(&ring, next);
            assert_eq!(batch.staged(), 0);
            for i in 0..count {
                let at = (next + i as u32) % 64;
                assert_eq!(ring.read::<[u64; 8]>(at), words(n << 16 | i), "{n} {i}");
            }
            next = (next + count as u32) % 64;
        }
    }

    #[test]
    fn a_flush_works_on_a_ring_in_several_maps() {
        let mut space = DmaSpace::default();
        for i in 0..2 {
            let part = Mapping::anonymous(4096).unwrap().bytes();
            space.map(0x10000 + i * 4096, 4096, &part).unwrap();
        }
        let ring = Ring::<64>::resolve(space.table(), 0x10000, 128, true).unwrap();
        let mut batch = SqeBatch::new();
        (0..16).for_each(|n| batch.push(words(n)));
        assert!(batch.is_full());
        batch.flush(&ring, 56);
        (0..16).for_each(|n| assert_eq!(ring.read::<[u64; 8]>(56 + n), words(u64::from(n))));
    }

    #[test]
    #[should_panic(expected = "there is room")]
    #[cfg(debug_assertions)]
    fn pushing_too_many_entries_panics() {
        let mut batch = SqeBatch::new();
        (0..17).for_each(|n| batch.push(words(n)));
    }
}
