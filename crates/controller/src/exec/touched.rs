//! Recently touched memory spans of a host: distinguishes a large working set from sparse touches.
//!
//! A page table covers 2 MiB, and a second touch in the same 2 MiB creates no further page table.
//! An ordinary host with much memory returns to the same spans; a host that makes the kernel
//! allocate page tables touches new ones. So only the first touch of a span since the last reclaim
//! of page tables is counted.

use shadowbell_memory::page_tables;

/// Maximum number of spans that are remembered at a time: 128 GiB.
const MOST: u64 = 1 << 16;
/// Bytes per span, as a power of two.
const SHIFT: u32 = page_tables::SPAN.trailing_zeros();

/// Spans of a host's memory touched since the last reclaim of page tables.
#[derive(Debug, Default)]
pub(super) struct TouchedSpans {
    /// [`page_tables::epoch`] at the last call.
    epoch: u64,
    /// Number of times that all spans were forgotten.
    generation: u32,
    /// Span that was touched last and the generation of that touch, by span number modulo the
    /// length. Two spans of one slot evict each other and are counted again.
    seen: Vec<(u32, u32)>,
}

impl TouchedSpans {
    /// Sets the amount of host memory; 0 forgets all spans.
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

    /// Forgets all touched spans.
    pub(super) fn forget(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        if self.generation == 0 {
            self.seen.fill((0, 0));
        }
    }

    /// Number of spans in these pieces (address, length) that were not touched before; marks them
    /// as touched.
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
                // A span number of 0 or above 32 bits is no valid address of a process.
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
        // An offset at which a piece of 512 bytes is far from a span's borders, at any address.
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
        // After an unmapping, another mapping may have the same address, so the epoch changes.
        drop(Mapping::shared("another", 8 << 20).unwrap());
        assert_eq!(touch(&at(middle, 3 * span)), 4);
    }
}
