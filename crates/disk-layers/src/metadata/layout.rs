//! Positions of data and metadata on the disk below.

use shadowbell_disk::MetadataFormat;

/// Layout of data and metadata on the disk below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) format: MetadataFormat,
    pub(super) block_size: u32,
    /// Number of logical blocks.
    pub(super) blocks: u64,
}

/// Range of stored metadata on the disk below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Location {
    /// Start and end of the range on the disk below in bytes, extended to whole blocks of that
    /// disk.
    pub(super) from: u64,
    pub(super) to: u64,
    /// Offset of the metadata from `from`, and their length, in bytes.
    pub(super) at: usize,
    pub(super) len: usize,
}

impl Location {
    /// True if the blocks of the disk below also contain metadata of other logical blocks.
    pub(super) fn has_neighbours(&self) -> bool {
        (self.to - self.from) as usize != self.len
    }
}

impl Layout {
    /// Layout for a disk of `bytes` bytes.
    pub(super) fn new(format: MetadataFormat, block_size: u32, bytes: u64) -> Self {
        let block = u64::from(block_size);
        let size = u64::from(format.size);
        let mut blocks = bytes / (block + size);
        let taken = |blocks: u64| blocks * block + (blocks * size).next_multiple_of(block);
        while blocks != 0 && taken(blocks) > bytes {
            blocks -= 1;
        }
        Self { format, block_size, blocks }
    }

    /// Range of the metadata of `count` blocks from `first` on.
    pub(super) fn locate(&self, first: u64, count: u64) -> Location {
        let (block, size) = (u64::from(self.block_size), u64::from(self.format.size));
        let data = self.blocks * block;
        let (start, end) = (first * size, (first + count) * size);
        let from = start / block * block;
        Location {
            from: data + from,
            to: data + end.next_multiple_of(block),
            at: (start - from) as usize,
            len: (end - start) as usize,
        }
    }

    /// Logical blocks whose metadata lie in the blocks of `location`. May include one more logical
    /// block at either end.
    pub(super) fn around(&self, location: &Location) -> std::ops::Range<u64> {
        let (data, size) = (self.blocks * u64::from(self.block_size), u64::from(self.format.size));
        (location.from - data) / size..(location.to - data).div_ceil(size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_metadata_layout_uses_the_whole_disk() {
        for (block_size, size, bytes) in [
            (512, 8, 1 << 20),
            (512, 64, 4096),
            (4096, 8, 1 << 30),
            (4096, 64, 12288),
            (512, 8, 1024),
        ] {
            let format = MetadataFormat::new(size).unwrap();
            let layout = Layout::new(format, block_size, bytes);
            let taken = |blocks| format.bytes_for(blocks, block_size).unwrap();
            assert!(layout.blocks != 0 && taken(layout.blocks) <= bytes);
            assert!(taken(layout.blocks + 1) > bytes);
            let last = layout.locate(layout.blocks - 1, 1);
            assert!(last.to <= bytes && last.from >= layout.blocks * u64::from(block_size));
            let around = layout.around(&last);
            assert!(around.start < layout.blocks && around.end >= layout.blocks);
        }
        let format = MetadataFormat::new(8).unwrap();
        assert_eq!(Layout::new(format, 512, 512).blocks, 0);
        assert_eq!(format.bytes_for(u64::MAX, 512), None);
        let layout = Layout::new(format, 512, 1 << 20);
        let location = layout.locate(65, 2);
        let data = layout.blocks * 512;
        assert_eq!(
            (location.from - data, location.to - data, location.at, location.len),
            (512, 1024, 8, 16)
        );
        assert_eq!((layout.around(&location), location.has_neighbours()), (64..128, true));
        assert!(!layout.locate(64, 64).has_neighbours());
    }
}
