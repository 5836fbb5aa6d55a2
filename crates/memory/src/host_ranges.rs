//! Ranges of addresses of this process.

/// Host memory as sorted, disjoint ranges of addresses of this process.
#[derive(Debug, Default)]
pub(crate) struct Ranges(Vec<(usize, usize)>);

impl Ranges {
    /// Sorts and merges ranges, each from its first address to the address after its last.
    pub(crate) fn new(mut ranges: Vec<(usize, usize)>) -> Self {
        ranges.sort_unstable();
        ranges.dedup_by(|next, last| {
            let overlaps = next.0 <= last.1;
            if overlaps {
                last.1 = last.1.max(next.1);
            }
            overlaps
        });
        Self(ranges)
    }

    /// True if `[start, end)` overlaps a range.
    pub(crate) fn overlap(&self, start: usize, end: usize) -> bool {
        let after = self.0.partition_point(|range| range.1 <= start);
        self.0.get(after).is_some_and(|range| range.0 < end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_merged_and_searched() {
        let ranges = Ranges::new(vec![(30, 40), (0, 10), (10, 12), (5, 7), (60, 70)]);
        assert_eq!(ranges.0, [(0, 12), (30, 40), (60, 70)]);
        let overlapping = [(0, 1), (11, 12), (12, 31), (39, 100), (0, 100)];
        assert!(overlapping.iter().all(|(start, end)| ranges.overlap(*start, *end)));
        let free = [(12, 30), (40, 60), (70, 80), (13, 14)];
        assert!(free.iter().all(|(start, end)| !ranges.overlap(*start, *end)));
        assert!(!Ranges::default().overlap(0, usize::MAX));
    }
}
