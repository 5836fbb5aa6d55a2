//! Header of an image. It is parsed and checked before any other access, because images are
//! untrusted. The limits are those of QEMU.

use crate::error::OpenError;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Length of the version 2 header, and minimum length of the version 3 header.
const V2_LEN: usize = 72;
const V3_LEN: usize = 104;
/// Valid cluster sizes, as powers of two.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// Maximum length of the L1 table and of the refcount table in bytes.
const MAX_L1: u64 = 32 << 20;
const MAX_REFCOUNT_TABLE: u64 = 8 << 20;
/// Maximum length of a backing file name.
const MAX_NAME: usize = 1023;
/// Maximum size of a disk.
const MAX_SIZE: u64 = 1 << 62;

const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
const EXTENSION_FEATURES: u32 = 0x6803_f857;
const FEATURE_LEN: usize = 48;

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
        let l2_bytes = cluster * (cluster / 8);
        if u64::from(be32(start, 36)) < size.div_ceil(l2_bytes) {
            return damaged("its L1 table is too small for its disk");
        }
        let clusters = u64::from(be32(start, 56));
        if clusters == 0 {
            return damaged("it has no refcount table");
        }
        let bytes = clusters.saturating_mul(cluster);
        check_table("refcount table", be64(start, 48), bytes, MAX_REFCOUNT_TABLE, cluster, len)?;

        let format = extensions(first, header_len)?;
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
        Ok(Self { version, cluster_bits, size, backing, l1, refcounts, refcount_order })
    }
}

/// Checks the fields that only version 3 has. Returns the length of the header.
fn check_v3(first: &[u8], cluster: u64) -> Result<usize, Fault> {
    if first.len() < V3_LEN {
        return damaged("it ends inside of its header");
    }
    let features = be64(first, 72);
    if features & 1 != 0 {
        return damaged("it was not closed properly, and its reference counts are out of date");
    }
    if features & 2 != 0 {
        return damaged("it is marked as corrupt");
    }
    for (bit, what) in [
        (2, "has an external data file"),
        (3, "has clusters that are compressed with zstd"),
        (4, "has extended L2 entries"),
    ] {
        if features & (1 << bit) != 0 {
            return Err(Fault::Unsupported(what.to_owned()));
        }
    }
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

/// Parses the header extensions. Returns the format of the backing file, if stated.
fn extensions(first: &[u8], header_len: usize) -> Result<Option<String>, Fault> {
    let mut at = header_len;
    let mut format = None;
    loop {
        // The end marker is missing because the file ends here, so there are no further extensions.
        let Some(head) = first.get(at..at + 8) else { return Ok(format) };
        let (kind, len) = (be32(head, 0), be32(head, 4) as usize);
        if kind == 0 {
            return Ok(format);
        }
        let Some(data) = (at + 8).checked_add(len).and_then(|end| first.get(at + 8..end)) else {
            return damaged("an extension of its header is longer than the first cluster");
        };
        match kind {
            EXTENSION_BACKING_FORMAT => match std::str::from_utf8(data) {
                Ok(text) => format = Some(text.to_owned()),
                Err(_) => return damaged("the format of its backing file is not UTF-8"),
            },
            EXTENSION_FEATURES if !len.is_multiple_of(FEATURE_LEN) => {
                return damaged("the feature names in its header are incomplete");
            }
            _ => {}
        }
        at += 8 + len.next_multiple_of(8);
    }
}

/// Returns the big-endian number at an offset that the caller has checked.
fn be32(bytes: &[u8], at: usize) -> u32 {
    let digits = bytes.get(at..at + 4).and_then(|digits| digits.try_into().ok());
    digits.map_or(0, u32::from_be_bytes)
}

fn be64(bytes: &[u8], at: usize) -> u64 {
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
            (72, 1, "closed"),
            (72, 2, "corrupt"),
            (72, 4, "external data file"),
            (72, 8, "zstd"),
            (72, 16, "extended"),
            (72, 32, "unknown"),
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
