//! Entries of L2 tables, and a bounded cache of tables.
//!
//! The cache writes through: a change of a table is in the file before the change returns. So a
//! slice of a table can be dropped from the cache at any time.

use crate::header::{Header, Table, be64};
use crate::storage::{ALIGNMENT, FileStorage, IoBuffer, Reach, SECTOR};
use std::collections::HashMap;
use std::io;

/// Mask of the bits of an L1 or L2 entry that contain the offset of a table or a cluster.
pub(crate) const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Flag of an L1 or L2 entry: the reference count is exactly one.
pub(crate) const COPIED: u64 = 1 << 63;
/// Flag of an L2 entry: the cluster is compressed.
pub(crate) const COMPRESSED: u64 = 1 << 62;
/// Flag of an L2 entry without subclusters: the cluster reads as zeroes.
const ZERO: u64 = 1;
/// Maximum size in bytes of a slice of a table in the cache.
const SLICE: u64 = 16 << 10;
/// Maximum size of the cache of an image in bytes. Its backing files share another one.
pub(crate) const CACHE: u64 = 16 << 20;
/// Minimum size of the cache of a backing file in bytes.
const MIN_CACHE: u64 = 256 << 10;
/// Maximum number of entries of a table that are read at once.
const PIECE: u64 = 64 << 10;

/// Creates the error for an invalid table or entry.
pub(crate) fn damaged(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Sizes that follow from the header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) bits: u32,
    /// Size of the disk in bytes.
    pub(crate) size: u64,
    /// Size of an L2 entry in bytes.
    pub(crate) entry: u64,
    /// Number of subclusters of a cluster; 1 without subclusters.
    pub(crate) units: u32,
    version: u32,
}

impl Layout {
    pub(crate) fn new(header: &Header) -> Self {
        let (entry, units) = if header.has_subclusters { (16, 32) } else { (8, 1) };
        let (bits, size, version) = (header.cluster_bits, header.size, header.version);
        Self { bits, size, entry, units, version }
    }

    pub(crate) fn cluster(&self) -> u64 {
        1 << self.bits
    }

    /// True if an entry can state that its cluster reads as zeroes.
    pub(crate) fn can_zero(&self) -> bool {
        self.version >= 3
    }

    /// Size of a subcluster in bytes.
    pub(crate) fn unit(&self) -> u64 {
        self.cluster() / u64::from(self.units)
    }

    /// Number of entries of an L2 table.
    pub(crate) fn per_table(&self) -> u64 {
        self.cluster() / self.entry
    }

    /// Mask of all subclusters.
    pub(crate) fn all(&self) -> u32 {
        u32::MAX >> (32 - self.units)
    }

    /// Mask of the subclusters that contain bytes from `from` to `to` of a cluster.
    pub(crate) fn mask(&self, from: u64, to: u64) -> u32 {
        let (first, end) = (from / self.unit(), to.div_ceil(self.unit()));
        let below = |n: u64| ((1_u64 << n) - 1) as u32;
        below(end) & !below(first)
    }

    /// Location of the compressed cluster of an L2 entry: the clusters of the file that contain it,
    /// and the range of its bytes in the file.
    pub(crate) fn compressed(&self, entry: u64) -> (std::ops::Range<u64>, std::ops::Range<u64>) {
        let offset_bits = 62 - (self.bits - 8);
        let offset = entry & ((1 << offset_bits) - 1);
        // The length field of an entry counts the sectors after the first one.
        let sectors = (entry >> offset_bits) & ((1 << (self.bits - 8)) - 1);
        let end = (offset & !(SECTOR - 1)) + (sectors + 1) * SECTOR;
        (offset >> self.bits..((end - 1) >> self.bits) + 1, offset..end)
    }
}

/// Decoded L2 entry. In an image without subclusters, the masks have one bit for the whole cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cluster {
    /// Offset in the file.
    pub(crate) host: Option<u64>,
    /// True if no snapshot shares the cluster, so that it can be written in place.
    pub(crate) is_owned: bool,
    /// Mask of the subclusters whose data are in this image.
    pub(crate) alloc: u32,
    /// Mask of the subclusters that read as zeroes.
    pub(crate) zero: u32,
    /// The entry itself, if the cluster is compressed. All other fields are then empty.
    pub(crate) packed: Option<u64>,
}

impl Cluster {
    /// Decodes an entry. If the data are in an external file, `fixed` is the offset that the entry
    /// must have.
    pub(crate) fn decode(
        (entry, bitmap): (u64, u64),
        layout: &Layout,
        fixed: Option<u64>,
    ) -> io::Result<Self> {
        if entry & COMPRESSED != 0 {
            return match fixed {
                None => Ok(Self { packed: Some(entry), ..Self::default() }),
                Some(_) => Err(damaged("a compressed cluster in an image with a data file")),
            };
        }
        let (at, is_owned) = (entry & OFFSET, entry & COPIED != 0);
        let exists = at != 0 || fixed.is_some() && is_owned;
        let host = exists.then_some(at);
        let (alloc, zero) = if layout.units > 1 {
            (bitmap as u32, (bitmap >> 32) as u32)
        } else {
            let is_zero = entry & ZERO != 0;
            (u32::from(host.is_some() && !is_zero), u32::from(is_zero))
        };
        if alloc & zero != 0 || alloc != 0 && host.is_none() {
            return Err(damaged("subclusters with two states"));
        }
        if layout.version == 2 && zero != 0 {
            return Err(damaged("a zero cluster in version 2"));
        }
        if host.is_some_and(|at| {
            !at.is_multiple_of(layout.cluster()) || fixed.is_some_and(|fixed| at != fixed)
        }) {
            return Err(damaged("a cluster at an invalid offset"));
        }
        Ok(Self { host, is_owned: is_owned && exists, alloc, zero, packed: None })
    }

    pub(crate) fn encode(&self, layout: &Layout) -> (u64, u64) {
        if let Some(entry) = self.packed {
            return (entry, 0);
        }
        let entry = self.host.unwrap_or(0) | if self.is_owned { COPIED } else { 0 };
        if layout.units > 1 {
            return (entry, u64::from(self.zero) << 32 | u64::from(self.alloc));
        }
        (entry | u64::from(self.zero), 0)
    }

    /// True if the cluster can be written in place.
    pub(crate) fn is_writable(&self) -> bool {
        self.host.is_some() && self.is_owned
    }
}

/// Cache of slices of L2 tables and refcount blocks, by their offsets in the file.
pub(crate) struct Cache {
    slice: u64,
    /// Maximum number of slices in `young`, and so in `old`.
    most: usize,
    /// Recently used slices. If there are `most` of them, they become the old ones, and the
    /// previous old slices are dropped.
    young: HashMap<u64, IoBuffer>,
    old: HashMap<u64, IoBuffer>,
}

impl Cache {
    pub(crate) fn new(cluster_bits: u32) -> Self {
        let slice = SLICE.min(1 << cluster_bits);
        let mut cache = Self { slice, most: 0, young: HashMap::new(), old: HashMap::new() };
        cache.limit(CACHE);
        cache
    }

    /// Sets the maximum size of the cache in bytes, at least [`MIN_CACHE`].
    pub(crate) fn limit(&mut self, bytes: u64) {
        // A buffer is longer than its slice, because it is aligned.
        let slice = self.slice + ALIGNMENT as u64;
        self.most = (bytes.max(MIN_CACHE) / 2 / slice) as usize;
    }

    /// Returns the slice that contains the byte at `at`, and its offset.
    pub(crate) fn slice(
        &mut self,
        file: &FileStorage,
        at: u64,
    ) -> io::Result<(u64, &mut IoBuffer)> {
        let base = at & !(self.slice - 1);
        if !self.young.contains_key(&base) {
            if base >= file.len() {
                return Err(damaged("a table beyond the end of the file"));
            }
            let slice = match self.old.remove(&base) {
                Some(slice) => slice,
                None => {
                    let mut slice = IoBuffer::new(self.slice as usize);
                    file.read(&mut slice, base)?;
                    slice
                }
            };
            if self.young.len() >= self.most {
                self.old = std::mem::take(&mut self.young);
            }
            self.young.insert(base, slice);
        }
        match self.young.get_mut(&base) {
            Some(slice) => Ok((base, slice)),
            None => Err(damaged("a slice that was dropped")),
        }
    }

    /// Returns the number at `at`.
    pub(crate) fn number(&mut self, file: &FileStorage, at: u64) -> io::Result<u64> {
        let (base, slice) = self.slice(file, at)?;
        Ok(be64(slice, (at - base) as usize))
    }

    /// Changes `len` bytes from `at` on by calling `change`, and writes them to the file. The bytes
    /// must be in one slice.
    pub(crate) fn change(
        &mut self,
        file: &FileStorage,
        at: u64,
        len: u64,
        change: impl FnOnce(&mut [u8]),
    ) -> io::Result<()> {
        let (base, slice) = self.slice(file, at)?;
        let from = (at - base) as usize;
        change(&mut slice[from..from + len as usize]);
        let start = at & !(SECTOR - 1);
        let end = (at + len).next_multiple_of(SECTOR);
        let sectors = &slice[(start - base) as usize..(end - base) as usize];
        let outcome = file.write(sectors, start, Reach::Cache);
        if outcome.is_err() {
            self.forget(base, 1);
        }
        outcome
    }

    /// Drops the slices of a range.
    pub(crate) fn forget(&mut self, offset: u64, len: u64) {
        let mut base = offset & !(self.slice - 1);
        while base < offset + len {
            self.young.remove(&base);
            self.old.remove(&base);
            base += self.slice;
        }
    }

    /// Size of a slice in bytes.
    pub(crate) fn unit(&self) -> u64 {
        self.slice
    }
}

/// Reads all entries of a table.
pub(crate) fn read_table(file: &FileStorage, table: Table) -> io::Result<Vec<u64>> {
    let mut bytes = IoBuffer::new((table.entries * 8).next_multiple_of(SECTOR) as usize);
    file.read(&mut bytes, table.offset)?;
    Ok((0..table.entries as usize).map(|nth| be64(&bytes, nth * 8)).collect())
}

/// Calls `found` with each entry of a table. A long table is read in parts. If `found` returns
/// false, stops and returns false.
pub(crate) fn for_each_entry(
    file: &FileStorage,
    table: Table,
    mut found: impl FnMut(u64) -> bool,
) -> io::Result<bool> {
    for first in (0..table.entries).step_by(PIECE as usize) {
        let entries = PIECE.min(table.entries - first);
        let piece = read_table(file, Table { offset: table.offset + first * 8, entries })?;
        if !piece.into_iter().all(&mut found) {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(bits: u32, units: u32) -> Layout {
        let entry = if units > 1 { 16 } else { 8 };
        Layout { bits, size: 1 << 40, entry, units, version: 3 }
    }

    #[test]
    fn a_compressed_cluster_may_begin_anywhere() {
        // With clusters of 64 KiB, an entry has 54 bits of offset, followed by 8 bits of length.
        let layout = layout(16, 1);
        let clusters = |entry: u64| layout.compressed(COMPRESSED | entry).0;
        assert_eq!(clusters(0x1_2345), 1..2);
        assert_eq!(clusters((1 << 54) | 0x1_ff00), 1..3);
        assert_eq!(clusters((0xff << 54) | 0x1_0000), 1..3);
        assert_eq!(layout.compressed((1 << 54) | 0x1_ff00).1, 0x1_ff00..0x2_0200);
    }

    #[test]
    fn the_cache_is_bounded_and_writes_through() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 30).unwrap();
        let storage = FileStorage::new(file, None).unwrap();
        for bits in [9, 16] {
            let mut cache = Cache::new(bits);
            for nth in 0..10_000_u64 {
                let at = (nth * 7 % 10_000) << bits;
                let value = nth.to_be_bytes();
                cache.change(&storage, at, 8, |bytes| bytes.copy_from_slice(&value)).unwrap();
                assert_eq!(cache.number(&storage, at).unwrap(), nth);
                let held = (cache.young.len() + cache.old.len()) as u64 * (cache.slice + 4096);
                assert!(held <= CACHE, "{held}");
                let table = Table { offset: at, entries: 1 };
                assert_eq!(read_table(&storage, table).unwrap(), [nth]);
            }
        }
        assert!(Cache::new(16).slice(&storage, 1 << 30).is_err(), "beyond the end of the file");
    }

    #[test]
    fn entries_are_decoded_and_encoded() {
        let (plain, sub) = (layout(16, 1), layout(16, 32));
        for (layout, entry, bitmap) in [
            (&plain, 0, 0),
            (&plain, COPIED | 5 << 16, 0),
            (&plain, 5 << 16 | ZERO, 0),
            (&plain, ZERO, 0),
            (&plain, COMPRESSED | 12345, 0),
            (&sub, COPIED | 5 << 16, 0xf0_0000_000f),
            (&sub, 0, 0xffff_ffff_0000_0000),
        ] {
            let cluster = Cluster::decode((entry, bitmap), layout, None).unwrap();
            assert_eq!(cluster.encode(layout), (entry, bitmap), "{entry:#x} {bitmap:#x}");
        }
        for (layout, entry, bitmap, fixed) in [
            (&plain, COPIED | 5 << 16 | 512, 0, None),
            (&plain, COPIED | 5 << 16, 0, Some(4 << 16)),
            (&plain, COMPRESSED, 0, Some(0)),
            (&sub, COPIED | 5 << 16, 1 << 32 | 1, None),
            (&sub, 0, 1, None),
        ] {
            assert!(Cluster::decode((entry, bitmap), layout, fixed).is_err(), "{entry:#x}");
        }
        let first = Cluster::decode((COPIED, 0), &plain, Some(0)).unwrap();
        assert_eq!((first.host, first.alloc), (Some(0), 1));
        assert_eq!((plain.mask(0, 512), sub.mask(0, 2048), sub.mask(2047, 4097)), (1, 1, 7));
        assert_eq!((plain.all(), sub.all(), sub.mask(0, 65536)), (1, u32::MAX, u32::MAX));
    }
}
