//! Repair of an image's reference counts after a crash.
//!
//! A cluster is counted before a reference to it is written. With this order, a crash leaves only
//! leaked clusters, which are counted and unused. `imago` violates the order in two cases: a new L2
//! table is referenced in the L1 table before its own count is written; and a table that is evicted
//! from the cache may refer to a cluster whose count was changed only in memory. If a cluster was
//! used but counted as free, it would be allocated a second time. An image does not show whether
//! its last user was killed. So before anything is written, all clusters that the tables refer to
//! are looked up, and counts of 0 are set to 1. Leaked clusters remain (`qemu-img check -r leaks`
//! frees them). The clusters of the header and of the tables are counted too: otherwise, an image
//! that declares them as free would cause their allocation.
//!
//! After a loss of power or a file system shutdown, tables may refer to clusters beyond the end of
//! the file. The missing data were never flushed, and read as zeroes. But `qemu-img check` reports
//! such an image as damaged and does not repair it. So the file is extended to the end of its last
//! cluster.
//!
//! This pass over the tables also checks that [each cluster has only one
//! use](crate::overlap_check).
//!
//! The tables are untrusted. Invalid entries are skipped, because accesses to them fail later, and
//! the number of tables is limited by the size of the file.

use crate::error::OpenError;
use crate::header::{Header, Table};
use crate::overlap_check::{Overlap, OverlapCheck, clusters_of_compressed};
use rustix::io::{ReadWriteFlags, pwritev2, retry_on_intr};
use shadowbell_disk_file::ImageFile;
use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

/// Offset of a table or a cluster in an L1 or L2 entry.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Flag in the L2 entry of a compressed cluster. This crate never writes compressed clusters.
const COMPRESSED: u64 = 1 << 62;
/// Maximum growth of a file that has lost its length. The file may grow by 16 clusters for each
/// referenced cluster beyond its end, and by 1024 more: some references are missing, because not
/// all tables are written at the same time.
const UNNAMED: u64 = 16;
const LATELY: u64 = 1024;
/// Maximum number of refcount blocks that are kept in memory.
const BLOCKS: usize = 256;

/// Result of a repair.
pub(crate) struct Repaired {
    /// Number of clusters that were used but not counted.
    pub(crate) count: u64,
    /// Number of bytes by which the file was extended.
    pub(crate) missing: u64,
    /// True if each cluster has only one use.
    pub(crate) is_sound: bool,
}

/// Counts all clusters that are used.
///
/// # Errors
/// [`OpenError`]: the image cannot be read or written, or is damaged.
pub(crate) fn repair(
    path: &Path,
    file: &ImageFile,
    header: &Header,
) -> Result<Repaired, OpenError> {
    let name = || path.display().to_string();
    let outcome = RepairPass::new(file, header).and_then(|mut pass| {
        let (fault, mut missing) = (pass.count_all()?, 0);
        if fault.is_none() {
            pass.write_blocks()?;
            missing = pass.lengthen()?;
        }
        let is_sound = pass.overlaps.are_sound();
        Ok((Repaired { count: pass.repaired, missing, is_sound }, fault))
    });
    match outcome {
        Ok((repaired, None)) => Ok(repaired),
        Ok((_, Some(why))) => Err(OpenError::Damaged { path: name(), why }),
        Err(source) => {
            Err(OpenError::System { path: name(), what: "checking its reference counts", source })
        }
    }
}

/// Refcount block.
struct Block {
    offset: u64,
    bytes: Vec<u8>,
    is_changed: bool,
}

struct RepairPass<'a> {
    file: &'a ImageFile,
    header: &'a Header,
    refcounts: Vec<u64>,
    /// Blocks by their index in the refcount table.
    blocks: BTreeMap<u64, Block>,
    /// Maximum number of L2 tables. It follows from the space that the file occupies in its file
    /// system.
    most_tables: u64,
    repaired: u64,
    /// Length of the file in clusters, rounded up. Unlimited for a device.
    len: u64,
    /// End of the last cluster that is used.
    end: u64,
    /// Number of references to clusters beyond the end of the file.
    beyond: u64,
    overlaps: OverlapCheck,
}

impl<'a> RepairPass<'a> {
    fn new(file: &'a ImageFile, header: &'a Header) -> io::Result<Self> {
        let taken = if file.is_block_device() {
            u64::MAX
        } else {
            file.file().metadata()?.blocks().saturating_mul(512)
        };
        Ok(Self {
            file,
            header,
            refcounts: read_table(file, header.refcounts)?,
            blocks: BTreeMap::new(),
            // In a valid image, the tables occupy space; only data can be holes.
            most_tables: (taken >> header.cluster_bits).saturating_add(16),
            repaired: 0,
            len: if file.is_block_device() {
                u64::MAX
            } else {
                file.file().metadata()?.len().div_ceil(1 << header.cluster_bits)
            },
            end: 0,
            beyond: 0,
            overlaps: OverlapCheck::default(),
        })
    }

    /// Counts all clusters that are used. Returns the defect if the image is damaged.
    fn count_all(&mut self) -> io::Result<Option<String>> {
        let tables = match self.count_tables()? {
            Ok(tables) => tables,
            Err(why) => return Ok(Some(why)),
        };
        for table in tables {
            let entries = 1 << (self.header.cluster_bits - 3);
            for entry in read_table(self.file, Table { offset: table, entries })? {
                if let Err(why) = self.count_data(entry)? {
                    return Ok(Some(why));
                }
            }
        }
        Ok(None)
    }

    /// Counts the header and all tables. Returns the offsets of the L2 tables.
    fn count_tables(&mut self) -> io::Result<Result<Vec<u64>, String>> {
        let cluster = 1_u64 << self.header.cluster_bits;
        let is_place = |at: &u64| *at != 0 && at.is_multiple_of(cluster);
        let of_table = |table: Table| {
            let first = table.offset / cluster;
            first..first + (table.entries * 8).div_ceil(cluster)
        };
        let blocks: Vec<u64> = self.refcounts.iter().map(|entry| entry & !0x1ff).collect();
        let l1 = read_table(self.file, self.header.l1)?;
        let l2: Vec<u64> = l1.iter().map(|entry| entry & OFFSET).filter(is_place).collect();
        if l2.len() as u64 > self.most_tables {
            return Ok(Err("it refers to more tables than fit into its file".to_owned()));
        }
        let all = (0..1)
            .chain(of_table(self.header.l1))
            .chain(of_table(self.header.refcounts))
            .chain(blocks.into_iter().filter(is_place).map(|at| at / cluster))
            .chain(l2.iter().map(|at| at / cluster));
        for nth in all {
            if let Err(Overlap { cluster: nth }) = self.overlaps.table(nth) {
                return Ok(Err(format!("two of its tables are at byte {}", nth * cluster)));
            }
            if !self.count(nth)? {
                return Ok(Err(uncounted(nth * cluster)));
            }
        }
        Ok(Ok(l2))
    }

    /// Counts the clusters that an L2 entry refers to. Returns the defect if the image is damaged.
    fn count_data(&mut self, entry: u64) -> io::Result<Result<(), String>> {
        let bits = self.header.cluster_bits;
        let at = entry & OFFSET;
        let checked = if entry & COMPRESSED != 0 {
            self.overlaps.compressed(clusters_of_compressed(entry, bits))
        } else if at == 0 || !at.is_multiple_of(1 << bits) {
            return Ok(Ok(()));
        } else {
            self.overlaps.data(at >> bits)
        };
        if let Err(Overlap { cluster }) = checked {
            return Ok(Err(format!(
                "it refers to byte {} as data, where one of its own tables is",
                cluster << bits
            )));
        }
        if entry & COMPRESSED == 0 && !self.count(at >> bits)? {
            return Ok(Err(uncounted(at)));
        }
        Ok(Ok(()))
    }

    /// Sets the count of a cluster to 1 if it is 0. Returns false if the cluster has no refcount
    /// block.
    fn count(&mut self, cluster: u64) -> io::Result<bool> {
        let order = self.header.refcount_order;
        // log2 of the number of counts per refcount block.
        let per_block_bits = self.header.cluster_bits + 3 - order;
        let (nth, at) = (cluster >> per_block_bits, cluster & ((1 << per_block_bits) - 1));
        self.end = self.end.max(cluster + 1);
        self.beyond += u64::from(cluster >= self.len);
        let Some(block) = self.block(nth)? else { return Ok(false) };
        let is_repaired = set_if_zero(&mut block.bytes, at as usize, order);
        block.is_changed |= is_repaired;
        self.repaired += u64::from(is_repaired);
        Ok(true)
    }

    fn block(&mut self, nth: u64) -> io::Result<Option<&mut Block>> {
        if !self.blocks.contains_key(&nth) {
            let cluster = 1_u64 << self.header.cluster_bits;
            let entry = usize::try_from(nth).ok().and_then(|nth| self.refcounts.get(nth));
            let offset = entry.map_or(0, |entry| entry & !0x1ff);
            if offset == 0 || !offset.is_multiple_of(cluster) {
                return Ok(None);
            }
            if self.blocks.len() == BLOCKS {
                self.write_blocks()?;
                self.blocks.clear();
            }
            let bytes = read(self.file, offset, cluster as usize)?;
            self.blocks.insert(nth, Block { offset, bytes, is_changed: false });
        }
        Ok(self.blocks.get_mut(&nth))
    }

    /// Extends the file to the end of its last cluster, if that is plausible: enough of the added
    /// clusters must be referenced. Returns the number of added bytes.
    fn lengthen(&self) -> io::Result<u64> {
        let grown = self.end.saturating_sub(self.len);
        if self.beyond == 0 || grown > self.beyond.saturating_mul(UNNAMED).saturating_add(LATELY) {
            return Ok(0);
        }
        let (end, now) = (self.end << self.header.cluster_bits, self.file.file().metadata()?.len());
        self.file.file().set_len(end)?;
        Ok(end.saturating_sub(now))
    }

    fn write_blocks(&mut self) -> io::Result<()> {
        for block in self.blocks.values_mut().filter(|block| block.is_changed) {
            write(self.file, &block.bytes, block.offset)?;
            block.is_changed = false;
        }
        Ok(())
    }
}

fn uncounted(at: u64) -> String {
    format!("the cluster at byte {at} is used, and has no reference count")
}

/// Sets a count of `2^order` bits to 1 if it is 0. Returns true if it was 0.
fn set_if_zero(block: &mut [u8], nth: usize, order: u32) -> bool {
    if order < 3 {
        // A byte contains several counts, the first one in the lowest bits.
        let (bits, per_byte) = (1_usize << order, 8 >> order);
        let (at, shift) = (nth / per_byte, nth % per_byte * bits);
        let Some(byte) = block.get_mut(at) else { return false };
        let mask = ((1_u16 << bits) - 1) as u8;
        let is_zero = *byte >> shift & mask == 0;
        if is_zero {
            *byte |= 1 << shift;
        }
        return is_zero;
    }
    let len = 1_usize << (order - 3);
    let Some(count) = block.get_mut(nth * len..(nth + 1) * len) else { return false };
    let is_zero = count.iter().all(|byte| *byte == 0);
    if let (true, Some(last)) = (is_zero, count.last_mut()) {
        *last = 1;
    }
    is_zero
}

fn read_table(file: &ImageFile, table: Table) -> io::Result<Vec<u64>> {
    let bytes = read(file, table.offset, (table.entries * 8) as usize)?;
    let entries = bytes.as_chunks().0.iter().copied();
    Ok(entries.map(u64::from_be_bytes).collect())
}

/// Writes by the same system call as other disks, because the sandbox allows no other.
fn write(file: &ImageFile, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let (piece, flags) = ([IoSlice::new(bytes)], ReadWriteFlags::empty());
        let written = retry_on_intr(|| pwritev2(file.file(), &piece, offset, flags))?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        bytes = bytes.get(written..).unwrap_or_default();
        offset += written as u64;
    }
    Ok(())
}

/// Reads bytes of the file. Bytes beyond its end are zeroes.
fn read(file: &ImageFile, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let mut done = 0;
    while let Some(rest @ [_, ..]) = bytes.get_mut(done..) {
        match file.file().read_at(rest, offset + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_any_width() {
        for order in 0..=6 {
            let mut block = vec![0; 512];
            let count = (512 * 8) >> order;
            assert!(set_if_zero(&mut block, 3, order) && !set_if_zero(&mut block, 3, order));
            assert!(set_if_zero(&mut block, count - 1, order));
            assert!(!set_if_zero(&mut block, count, order));
            assert_eq!(block.iter().map(|byte| byte.count_ones()).sum::<u32>(), 2, "{order}");
            // Counts of at least 8 bits are big-endian. Shorter counts start with the lowest bit of
            // a byte.
            let at = match order {
                0 => (0, 1 << 3),
                1 => (0, 1 << 6),
                2 => (1, 1 << 4),
                order => ((4 << (order - 3)) - 1, 1),
            };
            assert_eq!(block[at.0], at.1, "{order}");
        }
    }
}
