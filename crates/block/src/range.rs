//! Splitting of a byte range into whole and partial blocks.

/// A byte range, and the blocks that it includes completely or partially.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockRange {
    /// First byte of the first block that the range touches.
    pub(crate) start: u64,
    /// First byte after the last block that the range touches.
    pub(crate) end: u64,
    /// Start of the first block that is completely in the range. Equal to `end_whole` if there is
    /// none.
    pub(crate) first_whole: u64,
    pub(crate) end_whole: u64,
    block: u64,
    offset: u64,
    offset_end: u64,
}

/// Bytes at the beginning or end of a range that cover only a part of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Edge {
    /// First byte of the block.
    pub(crate) block: u64,
    /// First byte of the part.
    pub(crate) at: u64,
    /// Number of bytes of the part.
    pub(crate) len: usize,
}

impl BlockRange {
    /// Splits the bytes from `offset` to `offset_end` on a disk with blocks of `block` bytes.
    pub(crate) fn of(offset: u64, offset_end: u64, block: u64) -> Self {
        let down = |at: u64| at / block * block;
        // The result does not exceed the size of the disk, which is a multiple of the block size.
        let up = |at: u64| at.div_ceil(block).saturating_mul(block);
        if offset == offset_end {
            let at = down(offset);
            return Self {
                start: at,
                end: at,
                first_whole: at,
                end_whole: at,
                block,
                offset: at,
                offset_end: at,
            };
        }
        let (start, end) = (down(offset), up(offset_end));
        let first_whole = up(offset);
        let end_whole = down(offset_end).max(first_whole);
        Self { start, end, first_whole, end_whole, block, offset, offset_end }
    }

    /// The partial blocks at both ends.
    pub(crate) fn edges(&self) -> impl Iterator<Item = Edge> + use<> {
        let Self { start, block, offset, offset_end, first_whole, end_whole, .. } = *self;
        let edge = |block, from: u64, to: u64| Edge { block, at: from, len: (to - from) as usize };
        let head = (start < first_whole)
            .then(|| edge(start, offset, offset_end.min(start.saturating_add(block))));
        let tail = (offset_end > end_whole).then(|| edge(end_whole, end_whole, offset_end));
        head.into_iter().chain(tail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_blocks_at_both_ends_of_a_range_are_its_edges() {
        let edges = |from, to| {
            let range = BlockRange::of(from, to, 512);
            let edges = range.edges().map(|e| (e.block, e.at, e.len));
            (edges.collect::<Vec<_>>(), range.first_whole..range.end_whole)
        };
        assert_eq!(edges(0, 1024), (vec![], 0..1024));
        assert_eq!(edges(1, 2), (vec![(0, 1, 1)], 512..512));
        assert_eq!(edges(0, 2), (vec![(0, 0, 2)], 0..0).clone());
        assert_eq!(edges(511, 513), (vec![(0, 511, 1), (512, 512, 1)], 512..512));
        assert_eq!(edges(600, 2000), (vec![(512, 600, 424), (1536, 1536, 464)], 1024..1536));
        assert_eq!(edges(512, 2000), (vec![(1536, 1536, 464)], 512..1536));
        assert_eq!(edges(600, 1536), (vec![(512, 600, 424)], 1024..1536));
        assert_eq!(edges(700, 700).0, vec![]);
    }

    proptest::proptest! {
        #[test]
        fn edges_and_whole_blocks_are_the_range(from in 0u64..5000, len in 0u64..5000) {
            let range = BlockRange::of(from, from + len, 512);
            let mut bytes: Vec<u64> = (range.first_whole..range.end_whole).collect();
            for edge in range.edges() {
                assert!(edge.len < 512 && edge.at - edge.block + edge.len as u64 <= 512);
                assert_eq!(edge.block % 512, 0);
                bytes.extend(edge.at..edge.at + edge.len as u64);
            }
            bytes.sort_unstable();
            assert_eq!(bytes, (from..from + len).collect::<Vec<_>>());
        }
    }
}
