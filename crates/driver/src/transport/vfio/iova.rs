//! Allocator of I/O virtual addresses (IOVA) within the ranges of the IOMMU.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// Alignment of allocations: the smallest common IOMMU page, and NVMe's alignment of queues.
const PAGE: u64 = 4096;
/// Size of a large IOMMU page, which all common IOMMUs support. Allocations of at least this size
/// are aligned to it if possible.
const LARGE: u64 = 2 << 20;
/// Lowest allocated address. Address 0 often means "none". The IOMMU should also stop a misbehaving
/// device that uses a small number as an address.
const FIRST: u64 = 0x1_0000;

/// Usable ranges for an IOMMU that does not report them: addresses of 39 bits, as the oldest IOMMUs
/// support, without the x86 interrupt message window.
pub(super) const CLASSIC: [RangeInclusive<u64>; 2] =
    [FIRST..=0xfedf_ffff, 0x1_0000_0000..=0x7f_ffff_ffff];

/// Free I/O virtual addresses of a device.
#[derive(Debug)]
pub(super) struct IovaSpace {
    /// Free ranges, as a map from first address to last address. The ranges are not adjacent.
    free: BTreeMap<u64, u64>,
}

impl IovaSpace {
    /// Creates a space of the usable `ranges`. They may overlap and be in any order. Each range is
    /// shrunk to whole pages of `granule` bytes. `granule` is rounded up to a power of two of at
    /// least 4096.
    pub(super) fn new(ranges: impl IntoIterator<Item = RangeInclusive<u64>>, granule: u64) -> Self {
        let granule = granule.max(PAGE).checked_next_power_of_two().unwrap_or(1 << 63);
        let mut usable: Vec<(u64, u64)> = ranges
            .into_iter()
            .filter_map(|range| {
                let first = (*range.start()).max(FIRST).checked_next_multiple_of(granule)?;
                // Address after the last whole granule. The last granule of the 64-bit space is
                // left out, so that the addition cannot overflow.
                let end = range.end().saturating_add(1) / granule * granule;
                (first < end).then(|| (first, end - 1))
            })
            .collect();
        usable.sort_unstable();
        let mut free: BTreeMap<u64, u64> = BTreeMap::new();
        for (first, last) in usable {
            match free.last_entry() {
                Some(mut piece) if first <= piece.get().saturating_add(1) => {
                    let last = last.max(*piece.get());
                    piece.insert(last);
                }
                _ => {
                    free.insert(first, last);
                }
            }
        }
        Self { free }
    }

    /// Allocates `len` bytes, a multiple of 4096, at the lowest possible address.
    pub(super) fn take(&mut self, len: u64) -> Option<u64> {
        if len == 0 || !len.is_multiple_of(PAGE) {
            return None;
        }
        let large = if len >= LARGE { self.find(len, LARGE) } else { None };
        let (piece, last, first) = large.or_else(|| self.find(len, PAGE))?;
        self.free.remove(&piece);
        let end = first + (len - 1);
        if piece < first {
            self.free.insert(piece, first - 1);
        }
        if end < last {
            self.free.insert(end + 1, last);
        }
        Some(first)
    }

    /// The lowest free range with room for `len` bytes at a multiple of `alignment`. Returns its
    /// first address, its last address, and the aligned address.
    fn find(&self, len: u64, alignment: u64) -> Option<(u64, u64, u64)> {
        self.free.iter().find_map(|(&piece, &last)| {
            let first = piece.checked_next_multiple_of(alignment)?;
            let end = first.checked_add(len - 1)?;
            (end <= last).then_some((piece, last, first))
        })
    }

    /// Frees an allocation of [`take`](Self::take).
    pub(super) fn release(&mut self, iova: u64, len: u64) {
        let Some(mut last) = len.checked_sub(1).and_then(|rest| iova.checked_add(rest)) else {
            return;
        };
        let mut first = iova;
        if let Some((&before, &end)) = self.free.range(..iova).next_back() {
            if end >= iova {
                // The range is already free, so nothing changes.
                return;
            }
            if end + 1 == iova {
                self.free.remove(&before);
                first = before;
            }
        }
        if let Some(next) = last.checked_add(1)
            && let Some(end) = self.free.remove(&next)
        {
            last = end;
        }
        self.free.insert(first, last);
    }

    /// The number of free bytes.
    pub(super) fn available(&self) -> u64 {
        self.free.iter().fold(0, |sum: u64, (first, last)| sum.saturating_add(last - first + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranges_are_cut_to_whole_pages_and_joined() {
        let space = IovaSpace::new(
            [
                0x5000_0001..=0x5000_2fff,
                0..=0x1_0fff,
                0x1_1000..=0x1_1fff,
                RangeInclusive::new(9, 3),
                0x8000..=0x8fff,
            ],
            4096,
        );
        let pieces: Vec<_> = space.free.into_iter().collect();
        assert_eq!(pieces, [(0x1_0000, 0x1_1fff), (0x5000_1000, 0x5000_2fff)]);
        assert!(IovaSpace::new([0..=u64::MAX], 1 << 20).available() > 1 << 62);
        assert_eq!(IovaSpace::new([0..=u64::MAX], u64::MAX).available(), 0);
        assert_eq!(IovaSpace::new([], 4096).available(), 0);
        assert!(IovaSpace::new(CLASSIC, 4096).available() > 500 << 30);
    }

    #[test]
    fn large_memory_begins_at_a_large_page_where_there_is_room() {
        let mut space = IovaSpace::new([0x10_0000..=0x5f_ffff], 4096);
        assert_eq!(space.take(4096), Some(0x10_0000));
        assert_eq!(space.take(LARGE), Some(0x20_0000));
        // The longest free range, from 40_0000h on, has only `LARGE` bytes.
        assert_eq!(space.take(LARGE + 4096), None);
        assert_eq!(space.take(LARGE), Some(0x40_0000));
        assert_eq!(space.take(0xf_f000), Some(0x10_1000));
        assert_eq!(space.take(4096), None);
        let mut tight = IovaSpace::new([0x10_0000..=0x2f_ffff], 4096);
        assert_eq!(tight.take(LARGE), Some(0x10_0000), "misaligned is better than nothing");
    }

    #[test]
    fn impossible_lengths_are_refused() {
        let mut space = IovaSpace::new(CLASSIC, 4096);
        for len in [0, 1, 4095, u64::MAX, u64::MAX - 4095, 1 << 63] {
            assert_eq!(space.take(len), None, "{len:#x}");
        }
        let before = space.available();
        space.release(0x2_0000, 4096);
        space.release(u64::MAX, u64::MAX);
        space.release(5, 0);
        assert_eq!(space.available(), before, "freeing free addresses has no effect");
    }

    proptest! {
        #[test]
        fn allocations_are_disjoint_and_can_be_freed(
            steps in proptest::collection::vec((any::<bool>(), 1u64..600, any::<usize>()), 1..200)
        ) {
            let ranges = [0x10_0000..=0x3f_ffff, 0x80_0000..=0xff_ffff];
            let inside = |first: u64, last: u64| {
                ranges.iter().any(|range| range.contains(&first) && range.contains(&last))
            };
            let mut space = IovaSpace::new(ranges.clone(), 4096);
            let whole = space.available();
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (take, pages, index) in steps {
                if take || held.is_empty() {
                    let len = pages * 4096;
                    if let Some(iova) = space.take(len) {
                        prop_assert!(inside(iova, iova + len - 1));
                        prop_assert!(held.iter().all(|(i, l)| iova + len <= *i || i + l <= iova));
                        held.push((iova, len));
                    }
                } else {
                    let (iova, len) = held.swap_remove(index % held.len());
                    space.release(iova, len);
                }
                let taken: u64 = held.iter().map(|(_, len)| len).sum();
                prop_assert_eq!(space.available(), whole - taken);
            }
            for (iova, len) in held {
                space.release(iova, len);
            }
            prop_assert_eq!(space.free.len(), 2);
        }
    }
}
