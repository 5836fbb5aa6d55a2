//! Detection of clusters with two uses, from the tables of an image when it is opened.
//!
//! A valid image uses each cluster once. A malicious image may refer to its own tables as data, so
//! that a guest would overwrite them. Or it may refer to one cluster twice. If the guest then frees
//! one reference, the other remains, and the cluster may be used again for a table. An image of the
//! first kind is not opened for writing. An image of the second kind is written only by `imago`,
//! never on the fast path.

use std::collections::{HashMap, HashSet};

/// Number of clusters per bitmap chunk.
const CHUNK: u64 = 4096;
/// Maximum number of chunks. They need 32 MiB of memory, and cover a file of 16 TiB with clusters
/// of 64 KiB.
const MAX_CHUNKS: usize = 1 << 16;

/// Error: a cluster of a table or of the header has another use too.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Overlap {
    pub(crate) cluster: u64,
}

/// Uses of clusters that were found so far.
#[derive(Default)]
pub(crate) struct OverlapCheck {
    tables: HashSet<u64>,
    data: HashMap<u64, Box<[u64; CHUNK as usize / 64]>>,
    /// True if a cluster may have two uses.
    is_shared: bool,
}

impl OverlapCheck {
    /// Adds a cluster of a table or of the header. All these clusters must be added before any data
    /// cluster.
    pub(crate) fn table(&mut self, cluster: u64) -> Result<(), Overlap> {
        if self.tables.insert(cluster) { Ok(()) } else { Err(Overlap { cluster }) }
    }

    /// Adds a data cluster.
    pub(crate) fn data(&mut self, cluster: u64) -> Result<(), Overlap> {
        if self.tables.contains(&cluster) {
            return Err(Overlap { cluster });
        }
        let chunk = cluster / CHUNK;
        if self.data.len() == MAX_CHUNKS && !self.data.contains_key(&chunk) {
            self.is_shared = true;
            return Ok(());
        }
        let used = self.data.entry(chunk).or_insert_with(|| Box::new([0; CHUNK as usize / 64]));
        let bit = 1 << (cluster % 64);
        if let Some(word) = used.get_mut((cluster % CHUNK / 64) as usize) {
            self.is_shared |= *word & bit != 0;
            *word |= bit;
        }
        Ok(())
    }

    /// Adds the clusters of the file that contain a compressed cluster. A cluster of the file may
    /// contain several compressed ones. Its reference count contains their number, which is not
    /// checked here.
    pub(crate) fn compressed(
        &mut self,
        clusters: std::ops::RangeInclusive<u64>,
    ) -> Result<(), Overlap> {
        self.is_shared = true;
        for cluster in clusters {
            if self.tables.contains(&cluster) {
                return Err(Overlap { cluster });
            }
        }
        Ok(())
    }

    /// True if no cluster has two uses, and none can get a second one after it is freed.
    pub(crate) fn are_sound(&self) -> bool {
        !self.is_shared
    }
}

/// Clusters of the file that contain the compressed cluster of an L2 entry.
pub(crate) fn clusters_of_compressed(
    entry: u64,
    cluster_bits: u32,
) -> std::ops::RangeInclusive<u64> {
    let offset_bits = 62 - (cluster_bits - 8);
    let offset = entry & ((1 << offset_bits) - 1);
    let sectors = (entry >> offset_bits) & ((1 << (cluster_bits - 8)) - 1);
    // The field counts the sectors after the first one.
    let last = (offset & !511) + sectors * 512 + 511;
    offset >> cluster_bits..=last >> cluster_bits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_has_one_use() {
        let mut check = OverlapCheck::default();
        assert_eq!((check.table(0), check.table(3)), (Ok(()), Ok(())));
        assert_eq!(check.table(3), Err(Overlap { cluster: 3 }));
        assert_eq!(check.data(3), Err(Overlap { cluster: 3 }));
        for cluster in [4, 67, CHUNK + 4, 1 << 50] {
            assert_eq!(check.data(cluster), Ok(()));
        }
        assert!(check.are_sound());
        assert_eq!(check.data(67), Ok(()));
        assert!(!check.are_sound());
    }

    #[test]
    fn a_compressed_cluster_may_begin_anywhere() {
        // With clusters of 64 KiB, an entry has 54 bits of offset, followed by 8 bits of length.
        assert_eq!(clusters_of_compressed((1 << 62) | 0x1_2345, 16), 1..=1);
        assert_eq!(clusters_of_compressed((1 << 62) | (1 << 54) | 0x1_ff00, 16), 1..=2);
        assert_eq!(clusters_of_compressed((1 << 62) | (0xff << 54) | 0x1_0000, 16), 1..=2);
        let mut check = OverlapCheck::default();
        assert_eq!(check.table(2), Ok(()));
        assert_eq!(check.compressed(0..=1), Ok(()));
        assert!(!check.are_sound());
        assert_eq!(check.compressed(1..=2), Err(Overlap { cluster: 2 }));
    }

    #[test]
    fn the_overlap_check_uses_bounded_memory() {
        let mut check = OverlapCheck::default();
        for nth in 0..=MAX_CHUNKS as u64 {
            assert!(check.are_sound());
            assert_eq!(check.data(nth * CHUNK), Ok(()));
        }
        assert!(!check.are_sound());
        assert_eq!(check.data.len(), MAX_CHUNKS);
    }
}
