//! What each cluster of an image's file is used for, by what its tables say when it is opened.
//!
//! An honest image uses each cluster for one thing. One that was made by somebody else may name its
//! own tables as a part of the disk, so that a guest would write them; or name one cluster twice,
//! of which the second use is left when the first gives it back, and a table may be the next to get
//! it. The first kind is not opened to write to it. In the second, nothing is written past the
//! crate that knows the format.

use std::collections::{HashMap, HashSet};

/// Clusters of which a chunk says whether they are used.
const CHUNK: u64 = 4096;
/// The most chunks: 32 MiB of memory, for 16 TiB of a file with clusters of 64 KiB.
const MAX_CHUNKS: usize = 1 << 16;

/// A table that names clusters is in a cluster that is used for something else, too.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Overlap {
    pub(crate) cluster: u64,
}

/// Who uses what.
#[derive(Default)]
pub(crate) struct Claims {
    tables: HashSet<u64>,
    data: HashMap<u64, Box<[u64; CHUNK as usize / 64]>>,
    /// There may be a cluster that has two uses.
    is_shared: bool,
}

impl Claims {
    /// A cluster is a table's, or the header's. All of them come before the first cluster of data.
    pub(crate) fn table(&mut self, cluster: u64) -> Result<(), Overlap> {
        if self.tables.insert(cluster) { Ok(()) } else { Err(Overlap { cluster }) }
    }

    /// A cluster is a part of the disk.
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

    /// A part of the disk is compressed, in these clusters. They have several such parts each, and
    /// how many of them is what their count has to say: which is not looked at.
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

    /// Whether no cluster can have a second use, now or when one of its uses has given it back.
    pub(crate) fn are_sound(&self) -> bool {
        !self.is_shared
    }
}

/// The clusters that a compressed cluster is in, by its entry in a table.
pub(crate) fn clusters_of_compressed(
    entry: u64,
    cluster_bits: u32,
) -> std::ops::RangeInclusive<u64> {
    let offset_bits = 62 - (cluster_bits - 8);
    let offset = entry & ((1 << offset_bits) - 1);
    let sectors = (entry >> offset_bits) & ((1 << (cluster_bits - 8)) - 1);
    // The first sector is not counted.
    let last = (offset & !511) + sectors * 512 + 511;
    offset >> cluster_bits..=last >> cluster_bits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_has_one_use() {
        let mut claims = Claims::default();
        assert_eq!((claims.table(0), claims.table(3)), (Ok(()), Ok(())));
        assert_eq!(claims.table(3), Err(Overlap { cluster: 3 }));
        assert_eq!(claims.data(3), Err(Overlap { cluster: 3 }));
        for cluster in [4, 67, CHUNK + 4, 1 << 50] {
            assert_eq!(claims.data(cluster), Ok(()));
        }
        assert!(claims.are_sound());
        assert_eq!(claims.data(67), Ok(()));
        assert!(!claims.are_sound());
    }

    #[test]
    fn a_compressed_cluster_may_begin_anywhere() {
        // Of 64 KiB: 54 bits of the place, then 8 of the length.
        assert_eq!(clusters_of_compressed((1 << 62) | 0x1_2345, 16), 1..=1);
        assert_eq!(clusters_of_compressed((1 << 62) | (1 << 54) | 0x1_ff00, 16), 1..=2);
        assert_eq!(clusters_of_compressed((1 << 62) | (0xff << 54) | 0x1_0000, 16), 1..=2);
        let mut claims = Claims::default();
        assert_eq!(claims.table(2), Ok(()));
        assert_eq!(claims.compressed(0..=1), Ok(()));
        assert!(!claims.are_sound());
        assert_eq!(claims.compressed(1..=2), Err(Overlap { cluster: 2 }));
    }

    #[test]
    fn what_an_image_names_all_over_takes_no_more_memory() {
        let mut claims = Claims::default();
        for nth in 0..=MAX_CHUNKS as u64 {
            assert!(claims.are_sound());
            assert_eq!(claims.data(nth * CHUNK), Ok(()));
        }
        assert!(!claims.are_sound());
        assert_eq!(claims.data.len(), MAX_CHUNKS);
    }
}
