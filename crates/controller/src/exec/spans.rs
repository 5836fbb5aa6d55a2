//! Which parts of a host's memory were touched lately: what tells memory that is in use from memory
//! that is touched here and there.
//!
//! A page table is of 2 MiB, and to touch these a second time makes no other. An honest host with a
//! lot of memory comes back to the same parts all the time; one that has page tables made goes
//! elsewhere. So only what is touched for the first time since page tables have gone is counted.

use shadowbell_memory::page_tables;

/// Parts that are known at a time, at most: 128 GiB.
const MOST: u64 = 1 << 16;
/// Bytes of a part, as a power of two.
const SHIFT: u32 = page_tables::SPAN.trailing_zeros();

/// Parts of a host's memory that were touched since page tables have gone.
#[derive(Debug, Default)]
pub(super) struct TouchedSpans {
    /// [`page_tables::epoch`] when it was last looked at.
    epoch: u64,
    /// Times that all was forgotten.
    generation: u32,
    /// By number of the part, modulo the length: the part that was touched last, and in which
    /// generation. Two that share a place are both counted again.
    seen: Vec<(u32, u32)>,
}

impl TouchedSpans {
    /// The memory is that of a host with so much; 0 forgets all.
    pub(super) fn resize(&mut self, bytes: u64) {
        let len = match bytes {
            0 => 0,
            _ => (bytes >> SHIFT).clamp(1, MOST).next_power_of_two() as usize,
        };
        if len != self.seen.len() {
            self.seen = vec![(0, 0); len];
            self.generation = 0;
        }
    }

    /// Nothing is known of what was touched.
    pub(super) fn forget(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        if self.generation == 0 {
            self.seen.fill((0, 0));
        }
    }

    /// How many parts these pieces of memory, each an address with a length, lie in that were not
    /// touched before. They are from here on.
    pub(super) fn touch(&mut self, pieces: impl Iterator<Item = (usize, usize)>) -> usize {
        let epoch = page_tables::epoch();
        if epoch != self.epoch {
            self.epoch = epoch;
            self.forget();
        }
        let mask = self.seen.len().wrapping_sub(1);
        let mut fresh = 0;
        for (address, len) in pieces {
            for span in address >> SHIFT..=(address + len.saturating_sub(1)) >> SHIFT {
                // No address of a process is so high, or so low.
                let now = (u32::try_from(span).unwrap_or(0), self.generation);
                let Some(seen) = self.seen.get_mut(span & mask) else { return fresh };
                fresh += usize::from(std::mem::replace(seen, now) != now || now.0 == 0);
            }
        }
        fresh
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_memory::{Mapping, Segments};

    #[test]
    fn a_part_counts_once_until_page_tables_go() {
        let span = 1usize << SHIFT;
        let mapping = Mapping::shared("spans", 16 * span as u64).unwrap();
        // Wherever it lies, the middle of its parts is not a border.
        let middle = (span - mapping.address() % span + span / 2) % span;
        let at = |n: usize, len| Segments::from_bytes(&mapping.bytes().slice(n, len).unwrap());
        let mut spans = TouchedSpans::default();
        spans.resize(1 << 30);
        let mut touch = |data: &Segments| {
            spans.touch(data.pieces().iter().map(|piece| (piece.address(), piece.len())))
        };
        assert_eq!(touch(&at(middle, 512)), 1);
        assert_eq!(touch(&at(middle + 4096, 512)), 0);
        assert_eq!(touch(&at(middle, 3 * span)), 3);
        assert_eq!(touch(&at(middle, 3 * span)), 0);
        assert_eq!(touch(&at(middle + 9 * span, 512)), 1);
        // A mapping that goes may leave its place to another one.
        drop(Mapping::shared("another", 8 << 20).unwrap());
        assert_eq!(touch(&at(middle, 3 * span)), 4);
    }
}
