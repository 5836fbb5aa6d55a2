//! Header of an image. It is parsed and checked before any other access, because images are
//! untrusted. The limits are those of QEMU.

use crate::error::OpenError;
use crate::storage::FileStorage;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Length in bytes of the version 2 header, and minimum length of the version 3 header.
const V2_LEN: usize = 72;
const V3_LEN: usize = 104;
/// Valid cluster sizes, as powers of two.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// Maximum length of the L1 table and of the refcount table in bytes.
const MAX_L1: u64 = 32 << 20;
const MAX_REFCOUNT_TABLE: u64 = 8 << 20;
/// Maximum length of a backing file name in bytes.
const MAX_NAME: usize = 1023;
/// Maximum size of a disk in bytes.
const MAX_SIZE: u64 = 1 << 62;

/// Maximum number of internal snapshots, as in QEMU.
const MAX_SNAPSHOTS: u32 = 65536;

const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
const EXTENSION_FEATURES: u32 = 0x6803_f857;
const EXTENSION_DATA_FILE: u32 = 0x4441_5441;
const FEATURE_LEN: usize = 48;

/// Bits of the incompatible features in the header.
const DIRTY: u64 = 1;
const CORRUPT: u64 = 1 << 1;
const DATA_FILE: u64 = 1 << 2;
const COMPRESSION: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;
/// Bit of the autoclear features in the header: the data file has the format of a raw image.
const RAW_DATA_FILE: u64 = 1 << 1;
/// Offsets of the header fields that this crate changes.
const REFCOUNT_TABLE_AT: u64 = 48;
const INCOMPATIBLE_AT: u64 = 72;
const AUTOCLEAR_AT: u64 = 88;

/// Parsed header of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) cluster_bits: u32,
    /// Size of the disk in bytes.
    pub(crate) size: u64,
    /// Name of the backing file, and its format if the image states the format.
    pub(crate) backing: Option<(String, Option<String>)>,
    pub(crate) l1: Table,
    pub(crate) refcounts: Table,
    /// Width of a reference count: log2 of its number of bits.
    pub(crate) refcount_order: u32,
    /// Snapshot table: its offset, and the number of snapshots.
    pub(crate) snapshots: (u64, u32),
    /// Name of the external data file.
    pub(crate) data_file: Option<String>,
    /// True if compressed clusters contain zstd, otherwise deflate.
    pub(crate) is_zstd: bool,
    /// True if L2 entries have subclusters.
    pub(crate) has_subclusters: bool,
    /// True if the image is marked as dirty: its reference counts may be out of date.
    pub(crate) is_dirty: bool,
    /// True if the image is marked as corrupt.
    pub(crate) is_corrupt: bool,
    incompatible: u64,
    autoclear: u64,
}

/// Values from the header extensions.
#[derive(Default)]
struct Extensions {
    backing_format: Option<String>,
    data_file: Option<String>,
}

/// Table of 64-bit entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Table {
    /// Offset in the file.
    pub(crate) offset: u64,
    pub(crate) entries: u64,
}

/// Reason why an image is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Damaged(String),
    Encrypted(&'static str),
    Unsupported(String),
}

impl Fault {
    pub(crate) fn of(self, path: &str) -> OpenError {
        let path = path.to_owned();
        match self {
            Self::Damaged(why) => OpenError::Damaged { path, why },
            Self::Encrypted(how) => OpenError::Encrypted { path, how },
            Self::Unsupported(what) => OpenError::Unsupported { path, what },
        }
    }
}

fn damaged<T>(why: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::Damaged(why.into()))
}

/// Reads the start of `file`: the largest possible cluster, or less if the file is shorter.
pub(crate) fn read_start(file: &File) -> io::Result<Vec<u8>> {
    let mut start = vec![0; 1 << CLUSTER_BITS.end()];
    let mut len = 0;
    while let Some(rest @ [_, ..]) = start.get_mut(len..) {
        match file.read_at(rest, len as u64) {
            Ok(0) => break,
            Ok(read) => len += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    start.truncate(len);
    Ok(start)
}

impl Header {
    /// Parses the header of an image. The image has `len` bytes and starts with `start`.
    pub(crate) fn parse(start: &[u8], len: u64) -> Result<Self, Fault> {
        if start.get(..4) != Some(b"QFI\xfb") {
            return damaged("it is not a qcow2 image");
        }
        if start.len() < V2_LEN {
            return damaged("it ends inside of its header");
        }
        let version = be32(start, 4);
        if !matches!(version, 2 | 3) {
            return Err(Fault::Unsupported(format!("has format version {version}")));
        }
        if version == 3 && start.len() < V3_LEN {
            return damaged("it ends inside of its header");
        }
        match be32(start, 32) {
            0 => {}
            1 => return Err(Fault::Encrypted("AES")),
            2 => return Err(Fault::Encrypted("LUKS")),
            _ => return Err(Fault::Encrypted("by an unknown method")),
        }
        let cluster_bits = be32(start, 20);
        if !CLUSTER_BITS.contains(&cluster_bits) {
            return damaged(format!(
                "its cluster size of 2^{cluster_bits} bytes is not between 2^9 and 2^21"
            ));
        }
        let cluster = 1_u64 << cluster_bits;
        // Extensions and names must be in the first cluster.
        let first = start.get(..start.len().min(cluster as usize)).unwrap_or_default();
        let header_len = if version == 3 { check_v3(first, cluster)? } else { V2_LEN };

        let size = be64(start, 24);
        if size == 0 || size > MAX_SIZE {
            return damaged(format!("its disk size of {size} bytes is invalid"));
        }
        check_table(
            "L1 table",
            be64(start, 40),
            u64::from(be32(start, 36)) * 8,
            MAX_L1,
            cluster,
            len,
        )?;
        let features = if version == 3 { be64(start, INCOMPATIBLE_AT as usize) } else { 0 };
        let autoclear = if version == 3 { be64(start, AUTOCLEAR_AT as usize) } else { 0 };
        let has_subclusters = features & EXTENDED_L2 != 0;
        if has_subclusters && cluster_bits < 14 {
            return damaged("it has extended L2 entries, and clusters of less than 16 KiB");
        }
        let l2_bytes = cluster * (cluster / if has_subclusters { 16 } else { 8 });
        if u64::from(be32(start, 36)) < size.div_ceil(l2_bytes) {
            return damaged("its L1 table is too small for its disk");
        }
        let clusters = u64::from(be32(start, 56));
        if clusters == 0 {
            return damaged("it has no refcount table");
        }
        let bytes = clusters.saturating_mul(cluster);
        check_table("refcount table", be64(start, 48), bytes, MAX_REFCOUNT_TABLE, cluster, len)?;

        let snapshots = (be64(start, 64), be32(start, 60));
        if snapshots.1 > MAX_SNAPSHOTS || !snapshots.0.is_multiple_of(cluster) {
            return damaged("its snapshot table is invalid");
        }
        let found = extensions(first, header_len)?;
        let has_data_file = features & DATA_FILE != 0;
        if has_data_file && found.data_file.is_none() {
            return damaged("it does not name its external data file");
        }
        let format = found.backing_format;
        let backing = match (be64(start, 8), be32(start, 16) as usize) {
            (0, _) => None,
            (_, 1..=MAX_NAME) => {
                let (at, len) = (be64(start, 8) as usize, be32(start, 16) as usize);
                let name = at.checked_add(len).and_then(|end| first.get(at..end));
                match name.map(std::str::from_utf8) {
                    Some(Ok(name)) if !name.contains('\0') => Some((name.to_owned(), format)),
                    _ => return damaged("the name of its backing file is invalid"),
                }
            }
            _ => return damaged("the name of its backing file is invalid"),
        };
        let l1 = Table { offset: be64(start, 40), entries: be32(start, 36).into() };
        let refcounts = Table { offset: be64(start, 48), entries: bytes / 8 };
        let refcount_order = if version == 3 { be32(start, 96) } else { 4 };
        Ok(Self {
            version,
            cluster_bits,
            size,
            backing,
            l1,
            refcounts,
            refcount_order,
            snapshots,
            data_file: found.data_file.filter(|_| has_data_file),
            is_zstd: features & COMPRESSION != 0 && first.get(V3_LEN) == Some(&1),
            has_subclusters,
            is_dirty: features & DIRTY != 0,
            is_corrupt: features & CORRUPT != 0,
            incompatible: features,
            autoclear,
        })
    }

    /// Clears the autoclear bits of features that this crate does not maintain. Must be called
    /// before the first change of the image.
    pub(crate) fn clear_features(&self, file: &FileStorage) -> io::Result<()> {
        let kept = self.autoclear & if self.data_file.is_some() { RAW_DATA_FILE } else { 0 };
        if kept != self.autoclear {
            file.patch(&kept.to_be_bytes(), AUTOCLEAR_AT)?;
            file.sync()?;
        }
        Ok(())
    }

    /// Clears the dirty flag of the image. The correct reference counts must already be durable.
    pub(crate) fn clear_dirty(&self, file: &FileStorage) -> io::Result<()> {
        file.patch(&(self.incompatible & !DIRTY).to_be_bytes(), INCOMPATIBLE_AT)?;
        file.sync()
    }

    /// Encodes the header fields for a refcount table at `offset`. Returns their bytes, and the
    /// offset of these fields in the header.
    pub(crate) fn refcount_table(offset: u64, clusters: u32) -> ([u8; 12], u64) {
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&offset.to_be_bytes());
        bytes[8..].copy_from_slice(&clusters.to_be_bytes());
        (bytes, REFCOUNT_TABLE_AT)
    }
}

/// Checks the fields that only version 3 has. Returns the length of the header.
fn check_v3(first: &[u8], cluster: u64) -> Result<usize, Fault> {
    if first.len() < V3_LEN {
        return damaged("it ends inside of its header");
    }
    let features = be64(first, INCOMPATIBLE_AT as usize);
    if features & !0x1f != 0 {
        return Err(Fault::Unsupported(format!("has unknown features ({features:#x})")));
    }
    if be32(first, 96) > 6 {
        return damaged("the width of its reference counts is invalid");
    }
    let len = be32(first, 100) as usize;
    if !(V3_LEN..=cluster as usize).contains(&len) || len > first.len() {
        return damaged(format!("its header length of {len} bytes is invalid"));
    }
    let method = if len > V3_LEN { first.get(V3_LEN).copied().unwrap_or(0) } else { 0 };
    if method > 1 || (method == 1) != (features & COMPRESSION != 0) {
        return Err(Fault::Unsupported(format!("has the compression method {method}")));
    }
    Ok(len)
}

fn check_table(
    what: &str,
    offset: u64,
    bytes: u64,
    most: u64,
    cluster: u64,
    len: u64,
) -> Result<(), Fault> {
    if bytes > most {
        return damaged(format!("its {what} has {bytes} bytes, more than the limit of {most}"));
    }
    if offset == 0 || !offset.is_multiple_of(cluster) {
        return damaged(format!(
            "its {what} is at byte {offset}, which is not a valid cluster offset"
        ));
    }
    if offset.checked_add(bytes).is_none_or(|end| end > len.next_multiple_of(cluster)) {
        return damaged(format!("its {what} is beyond the end of the file"));
    }
    Ok(())
}

/// Parses the header extensions.
fn extensions(first: &[u8], header_len: usize) -> Result<Extensions, Fault> {
    let mut at = header_len;
    let mut found = Extensions::default();
    loop {
        // The end marker is missing because the file ends here, so there are no further extensions.
        let Some(head) = first.get(at..at + 8) else { return Ok(found) };
        let (kind, len) = (be32(head, 0), be32(head, 4) as usize);
        if kind == 0 {
            return Ok(found);
        }
        let Some(data) = (at + 8).checked_add(len).and_then(|end| first.get(at + 8..end)) else {
            return damaged("an extension of its header is longer than the first cluster");
        };
        let text = || match std::str::from_utf8(data) {
            Ok(text) if !text.contains('\0') => Ok(Some(text.to_owned())),
            _ => damaged("a name in an extension of its header is invalid"),
        };
        match kind {
            EXTENSION_BACKING_FORMAT => found.backing_format = text()?,
            EXTENSION_DATA_FILE => found.data_file = text()?,
            EXTENSION_FEATURES if !len.is_multiple_of(FEATURE_LEN) => {
                return damaged("the feature names in its header are incomplete");
            }
            _ => {}
        }
        at += 8 + len.next_multiple_of(8);
    }
}

/// Returns the big-endian number at an offset that the caller has checked.
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    let digits = bytes.get(at..at + 4).and_then(|digits| digits.try_into().ok());
    digits.map_or(0, u32::from_be_bytes)
}

pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from(be32(bytes, at)) << 32 | u64::from(be32(bytes, at + 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: u64 = 1 << 20;

    /// Header of an image of 1 GiB with clusters of 64 KiB, as `qemu-img create` writes it.
    fn image() -> Vec<u8> {
        let mut start = vec![0; 1 << 16];
        start[..4].copy_from_slice(b"QFI\xfb");
        for (at, value) in [(4, 3), (20, 16), (36, 2), (56, 1), (96, 4), (100, 112)] {
            put32(&mut start, at, value);
        }
        for (at, value) in [(24, 1 << 30), (40, 3 << 16), (48, 1 << 16)] {
            put64(&mut start, at, value);
        }
        start
    }

    fn put32(bytes: &mut [u8], at: usize, value: u32) {
        bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
    }

    fn put64(bytes: &mut [u8], at: usize, value: u64) {
        bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
    }

    #[test]
    fn a_header_is_understood() {
        let header = Header {
            version: 3,
            cluster_bits: 16,
            size: 1 << 30,
            backing: None,
            l1: Table { offset: 3 << 16, entries: 2 },
            refcounts: Table { offset: 1 << 16, entries: 1 << 13 },
            refcount_order: 4,
            snapshots: (0, 0),
            data_file: None,
            is_zstd: false,
            has_subclusters: false,
            is_dirty: false,
            is_corrupt: false,
            incompatible: 0,
            autoclear: 0,
        };
        assert_eq!(Header::parse(&image(), LEN), Ok(header.clone()));
        let mut start = image();
        put64(&mut start, 8, 0x200);
        put32(&mut start, 16, 8);
        start[0x200..0x208].copy_from_slice(b"base.img");
        let backing = Some(("base.img".to_owned(), None));
        assert_eq!(Header::parse(&start, LEN), Ok(Header { backing, ..header.clone() }));
        put32(&mut start, 112, EXTENSION_BACKING_FORMAT);
        put32(&mut start, 116, 3);
        start[120..123].copy_from_slice(b"raw");
        let backing = Some(("base.img".to_owned(), Some("raw".to_owned())));
        assert_eq!(Header::parse(&start, LEN), Ok(Header { backing, ..header }));
    }

    #[test]
    fn unsupported_headers_are_refused_with_the_reason() {
        let with = |at: usize, value: u64| {
            let mut start = image();
            if (72..80).contains(&at) || matches!(at, 8 | 24 | 40 | 48) {
                put64(&mut start, at, value);
            } else {
                put32(&mut start, at, value as u32);
            }
            format!("{:?}", Header::parse(&start, LEN).unwrap_err())
        };
        for (at, value, words) in [
            (0, 0, "not a qcow2"),
            (4, 4, "version 4"),
            (20, 8, "2^8"),
            (20, 64, "2^64"),
            (24, 0, "0 bytes"),
            (24, u64::MAX, "bytes"),
            (24, 1 << 40, "too small"),
            (32, 1, "AES"),
            (32, 2, "LUKS"),
            (32, 3, "unknown method"),
            (36, 1 << 30, "more than the limit"),
            (36, 1, "too small"),
            (40, 0, "not a valid cluster"),
            (40, 77, "not a valid cluster"),
            (40, 1 << 60, "beyond"),
            (48, 0, "not a valid cluster"),
            (56, 0, "no refcount"),
            (56, u64::from(u32::MAX), "more than the limit"),
            (60, 65537, "snapshot table"),
            (72, 4, "external data file"),
            (72, 8, "compression method 0"),
            (72, 32, "unknown"),
            (104, 1 << 24, "compression method 1"),
            (96, 7, "width"),
            (100, 103, "103"),
            (100, u64::from(u32::MAX), "bytes"),
            (8, 1 << 40, "backing file is invalid"),
        ] {
            let error = with(at, value);
            assert!(error.contains(words), "{at}: {value:#x}: {error}");
        }
    }

    #[test]
    fn random_headers_cause_no_panic() {
        let mut state = 1_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for _ in 0..20_000 {
            let mut start = image();
            for _ in 0..1 + next() % 4 {
                let at = (next() % 160) as usize;
                start[at] = next() as u8;
            }
            start.truncate((next() % 300) as usize * 8);
            let _ = Header::parse(&start, LEN);
        }
    }
}
