//! Allocation status of byte ranges.

use crate::shared::Handle;
use shadowbell_driver::AllocatedBlocks;
use std::ops::Range;

/// Contiguous bytes with the same allocation status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Number of bytes, at least one.
    pub len: u64,
    /// True if the bytes are deallocated and read as zeroes. False if they may hold data.
    pub is_hole: bool,
}

/// Extents of a range, which must be within the disk; at most `most`.
pub(crate) async fn extents(handle: &Handle, offset: u64, len: u64, most: usize) -> Vec<Extent> {
    if len == 0 {
        return Vec::new();
    }
    let all = vec![Extent { len, is_hole: false }];
    let status = &handle.shared.status;
    if !status.is_possible() {
        return all;
    }
    let size = u64::from(handle.geometry().block_size);
    let blocks = offset / size..(offset + len).div_ceil(size);
    let Ok(namespace) = handle.namespace() else { return all };
    let whose = (handle.shared.admin.clone(), namespace.nsid());
    // Each allocated range can be preceded by a hole, so `most` extents need half as many ranges.
    let found = status.ask(whose, blocks.clone(), most / 2 + 1).await;
    match found {
        Some(found) if found.until > blocks.start => {
            in_bytes(&found, blocks.start, size, offset..offset + len, most.max(1))
        }
        _ => all,
    }
}

/// Converts the status of the blocks from `first` on to extents of the byte range `range`.
fn in_bytes(
    found: &AllocatedBlocks,
    first: u64,
    size: u64,
    range: Range<u64>,
    most: usize,
) -> Vec<Extent> {
    let mut extents: Vec<Extent> = Vec::new();
    let mut at = range.start;
    let mut add = |until: u64, is_hole: bool| {
        let until = until.saturating_mul(size).min(range.end);
        if until <= at {
            return;
        }
        match extents.last_mut() {
            Some(last) if last.is_hole == is_hole => last.len += until - at,
            _ => extents.push(Extent { len: until - at, is_hole }),
        }
        at = until;
    };
    let mut block = first;
    for allocated in &found.ranges {
        if allocated.start > block {
            add(allocated.start, true);
        }
        add(allocated.end, false);
        block = allocated.end;
    }
    if found.until > block {
        add(found.until, true);
    }
    extents.truncate(most);
    extents
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extents(ranges: &[(u64, u64)], until: u64, at: Range<u64>) -> Vec<(u64, bool)> {
        let ranges = ranges.iter().map(|(first, after)| *first..*after).collect();
        let found = AllocatedBlocks { ranges, until };
        let extents = in_bytes(&found, at.start / 512, 512, at, 4);
        extents.iter().map(|extent| (extent.len, extent.is_hole)).collect()
    }

    #[test]
    fn blocks_become_bytes_of_the_range() {
        let (data, hole) = (false, true);
        assert_eq!(extents(&[], 8, 0..4096), [(4096, hole)]);
        assert_eq!(extents(&[(0, 8)], 8, 0..4096), [(4096, data)]);
        let some = [(2, 3), (3, 4), (6, 7)];
        let all = [(1024, hole), (1024, data), (1024, hole), (512, data)];
        assert_eq!(extents(&some, 8, 0..4096), all);
        // The status of the last blocks is unknown.
        assert_eq!(extents(&some, 7, 0..4096), all);
        assert_eq!(extents(&some[..2], 4, 0..4096), all[..2]);
        // The range begins and ends inside of a block.
        assert_eq!(extents(&[(2, 7)], 8, 700..2000), [(324, hole), (976, data)]);
        assert_eq!(
            extents(&[(1, 2), (3, 8)], 8, 700..2000),
            [(324, data), (512, hole), (464, data)]
        );
    }
}
