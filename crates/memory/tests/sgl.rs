//! SGLs, compared with a simple implementation of the specification (Base 2.1, "Scatter Gather List
//! (SGL)").

mod common;

use common::{Access, BASE, GRANULE, Peer, Stretch, check, stretches};
use proptest::prelude::*;
use shadowbell_memory::{DataPointerError, Segments};
use shadowbell_spec::status::Status;
use shadowbell_testing::wait::LIMIT;
use std::time::Instant;

const GRANULES: usize = 256;
const WINDOW: u64 = (GRANULES * GRANULE) as u64;
/// Maximum number of descriptors of one command.
const MAX_DESCRIPTORS: usize = 4096;

const DATA_BLOCK: u8 = 0x00;
const BIT_BUCKET: u8 = 0x10;
const SEGMENT: u8 = 0x20;
const LAST_SEGMENT: u8 = 0x30;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Descriptor {
    address: u64,
    len: u32,
    identifier: u8,
}

impl Descriptor {
    fn new(identifier: u8, address: u64, len: usize) -> Self {
        Self { address, len: u32::try_from(len).unwrap(), identifier }
    }

    fn encode(self) -> [u8; 16] {
        let mut raw = [0; 16];
        raw[..8].copy_from_slice(&self.address.to_le_bytes());
        raw[8..12].copy_from_slice(&self.len.to_le_bytes());
        raw[15] = self.identifier;
        raw
    }

    fn decode(raw: &[u8]) -> Self {
        Self {
            address: u64::from_le_bytes(raw[..8].try_into().unwrap()),
            len: u32::from_le_bytes(raw[8..12].try_into().unwrap()),
            identifier: raw[15],
        }
    }
}

/// Reference implementation: places of the data, or an error.
fn naive(
    peer: &Peer,
    first: Descriptor,
    len: usize,
    write: bool,
) -> Result<Vec<(u64, usize)>, &'static str> {
    let mut data = Vec::new();
    let mut left = len;
    let mut block = |descriptor: Descriptor, left: &mut usize| {
        let n = (descriptor.len as usize).min(*left);
        for i in (0..n as u64).step_by(512).chain((n as u64).checked_sub(1)) {
            if !descriptor.address.checked_add(i).is_some_and(|at| peer.may(at, write)) {
                return Err("data fault");
            }
        }
        if n > 0 {
            data.push((descriptor.address, n));
            *left -= n;
        }
        Ok(())
    };
    let discard = |descriptor: Descriptor, left: &mut usize| {
        if write {
            *left -= (descriptor.len as usize).min(*left);
        }
    };
    let mut seen = 1;
    let mut segment = first;
    if first.identifier == DATA_BLOCK {
        block(first, &mut left)?;
    } else if first.identifier == BIT_BUCKET {
        discard(first, &mut left);
    } else {
        loop {
            if segment.identifier != SEGMENT && segment.identifier != LAST_SEGMENT {
                return Err("type");
            }
            if segment.len == 0 || !segment.len.is_multiple_of(16) {
                return Err("segment length");
            }
            let count = segment.len as usize / 16;
            seen += count;
            if seen > MAX_DESCRIPTORS {
                return Err("too many");
            }
            let mut next = None;
            for index in 0..count {
                let at = segment.address.checked_add(index as u64 * 16).ok_or("wrap")?;
                let descriptor = Descriptor::decode(&peer.get(at, 16).ok_or("list fault")?);
                match descriptor.identifier {
                    DATA_BLOCK => block(descriptor, &mut left)?,
                    BIT_BUCKET => discard(descriptor, &mut left),
                    SEGMENT | LAST_SEGMENT
                        if index + 1 == count && segment.identifier == SEGMENT =>
                    {
                        next = Some(descriptor);
                    }
                    _ => return Err("descriptor"),
                }
            }
            match next {
                Some(next) => segment = next,
                None if segment.identifier == LAST_SEGMENT => break,
                None => return Err("no next segment"),
            }
        }
    }
    if left > 0 { Err("too short") } else { Ok(data) }
}

fn resolve(
    peer: &Peer,
    first: Descriptor,
    len: usize,
    write: bool,
) -> Result<Segments, DataPointerError> {
    let mut segments = Segments::new();
    let view = peer.view();
    view.resolve_sgl(&first.encode(), len, write, &mut segments).map(|()| segments)
}

fn agree(peer: &Peer, first: Descriptor, len: usize, write: bool) -> Result<bool, TestCaseError> {
    match (naive(peer, first, len, write), resolve(peer, first, len, write)) {
        // A part of the data goes to a bit bucket, so the segments contain more than the data
        // blocks.
        (Ok(data), Ok(segments)) if data.iter().map(|(_, len)| len).sum::<usize>() < len => {
            prop_assert!(write && segments.len() == len);
            Ok(true)
        }
        (Ok(data), Ok(segments)) => check(peer, &segments, &data, write).map(|()| true),
        (Err(_), Err(_)) => Ok(false),
        (expected, got) => Err(TestCaseError::fail(format!("expected {expected:?}, got {got:?}"))),
    }
}

/// Writes the SGL segments for lists of data blocks: the first segment to `lists[0]`, and so on.
/// Each segment ends with a descriptor of the next one. Returns the descriptor for the command.
fn lay(peer: &Peer, segments: &[Vec<(u64, usize)>], lists: &[u64]) -> Descriptor {
    let kind = |index: usize| if index + 1 == segments.len() { LAST_SEGMENT } else { SEGMENT };
    let size =
        |index: usize| 16 * (segments[index].len() + usize::from(index + 1 < segments.len()));
    for (index, blocks) in segments.iter().enumerate() {
        let mut at = lists[index];
        let mut put = |descriptor: Descriptor| {
            peer.put(at, &descriptor.encode());
            at += 16;
        };
        for (address, len) in blocks {
            put(Descriptor::new(DATA_BLOCK, *address, *len));
        }
        if index + 1 < segments.len() {
            put(Descriptor::new(kind(index + 1), lists[index + 1], size(index + 1)));
        }
    }
    Descriptor::new(kind(0), lists[0], size(0))
}

fn block() -> impl Strategy<Value = (u64, usize)> {
    let len = prop_oneof![
        1 => Just(0usize),
        4 => 1..600usize,
        4 => Just(4096usize),
        1 => 1..100_000usize,
    ];
    // The blocks begin in the first half of the window. The lists are in its last quarter.
    (0..WINDOW / 2, len).prop_map(|(offset, len)| (BASE + offset, len))
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256, failure_persistence: None, max_shrink_iters: 400, ..ProptestConfig::default()
    })]

    #[test]
    fn chained_segments_resolve_to_the_naive_bytes(
        segments in proptest::collection::vec(proptest::collection::vec(block(), 1..50), 1..12),
        list_offset in 0..4096u64,
        mut stretches in stretches(GRANULES),
        whole: bool,
        less in 0..3usize,
        write: bool,
        seed: u64,
    ) {
        if whole {
            stretches.iter_mut().for_each(|s| s.access = Access::ReadWrite);
        }
        let peer = Peer::new(&stretches);
        peer.scribble(seed);
        let lists: Vec<u64> =
            (0..12).map(|i| BASE + WINDOW * 3 / 4 + i * 4096 * 5 + list_offset).collect();
        let first = lay(&peer, &segments, &lists);
        let total: usize = segments.iter().flatten().map(|(_, len)| len).sum();
        // The list may be longer than the command's data.
        let len = total.saturating_sub(less * 700);
        let resolved = agree(&peer, first, len, write)?;
        if whole {
            prop_assert!(resolved);
        }
        prop_assert!(!agree(&peer, first, total + 1, write)?, "more than the list holds");
        // The first block also works alone, with its descriptor in the command itself.
        let (address, len) = segments[0][0];
        let alone = agree(&peer, Descriptor::new(DATA_BLOCK, address, len), len, write)?;
        if whole {
            prop_assert!(alone);
        }
    }

    #[test]
    fn garbage_is_an_error_or_data_but_never_a_panic(
        descriptors in proptest::collection::vec(
            (
                prop_oneof![8 => 0..1u64 << 18, 1 => any::<u64>()],
                prop_oneof![4 => (0..40u32).prop_map(|n| n * 16), 2 => 0..5000u32, 1 => any::<u32>()],
                prop_oneof![
                    6 => Just(DATA_BLOCK),
                    1 => Just(BIT_BUCKET),
                    4 => Just(SEGMENT),
                    3 => Just(LAST_SEGMENT),
                    1 => any::<u8>(),
                ],
            ),
            1..200,
        ),
        first: prop::sample::Index,
        stretches in stretches(64),
        len in 0..100_000usize,
        write: bool,
    ) {
        let peer = Peer::new(&stretches);
        let window = peer.len() as u64;
        let all: Vec<Descriptor> = descriptors
            .iter()
            .map(|(address, len, identifier)| Descriptor {
                // Most addresses are in the window, at the position of a descriptor.
                address: if *address < 1 << 18 { BASE + address / 16 * 16 % window } else { *address },
                len: *len,
                identifier: *identifier,
            })
            .collect();
        for (i, descriptor) in all.iter().cycle().take(peer.len() / 16).enumerate() {
            peer.put(BASE + i as u64 * 16, &descriptor.encode());
        }
        let since = Instant::now();
        agree(&peer, *first.get(&all), len, write)?;
        prop_assert!(since.elapsed() < LIMIT);
    }

    /// Random bytes without any structure.
    #[test]
    fn noise_is_an_error_or_data_but_never_a_panic(seed: u64, raw: [u8; 16], len: u32, write: bool) {
        let peer = Peer::plain(16);
        peer.scribble(seed);
        let mut segments = Segments::new();
        let view = peer.view();
        if view.resolve_sgl(&raw, len as usize, write, &mut segments).is_ok() {
            prop_assert_eq!(segments.len(), len as usize);
        } else {
            prop_assert!(segments.is_empty());
        }
    }
}

#[test]
fn each_mistake_has_its_status() {
    let peer = Peer::plain(64);
    let list = BASE;
    let data = BASE + 8192;
    let good = Descriptor::new(DATA_BLOCK, data, 512);
    let put = |descriptors: &[Descriptor]| {
        for (i, descriptor) in descriptors.iter().enumerate() {
            peer.put(list + i as u64 * 16, &descriptor.encode());
        }
        descriptors.len() * 16
    };
    let status = |first: Descriptor, len: usize| {
        resolve(&peer, first, len, true).map(|_| ()).map_err(|e| e.status())
    };
    let dnr = |status: Status| Err(status.with_dnr());
    let (length, invalid) =
        (Status::SGL_DATA_LENGTH_INVALID, Status::SGL_INVALID_SEGMENT_DESCRIPTOR);
    let kind = Status::SGL_DESCRIPTOR_TYPE_INVALID;

    assert_eq!(status(good, 512), Ok(()));
    assert_eq!(status(good, 100), Ok(()), "more than is needed");
    assert_eq!(status(good, 513), dnr(length));
    let two = put(&[good, good]);
    assert_eq!(status(Descriptor::new(LAST_SEGMENT, list, two), 1024), Ok(()));
    assert_eq!(status(Descriptor::new(LAST_SEGMENT, list, two), 1025), dnr(length));
    assert_eq!(status(Descriptor::new(LAST_SEGMENT, list, 16), 1024), dnr(length));

    for segment in [SEGMENT, LAST_SEGMENT] {
        for len in [0, 1, 15, 17, 40] {
            let result = status(Descriptor::new(segment, list, len), 512);
            assert_eq!(result, dnr(invalid), "a segment of {len} bytes");
        }
        // A segment descriptor that is not the last descriptor of its segment (Base 2.1, "Invalid
        // Number of SGL Descriptors"), and one in a last segment.
        let inner = Descriptor::new(segment, list + 4096, 16);
        let n = put(&[inner, good]);
        let misplaced = Status::SGL_INVALID_NUMBER_OF_DESCRIPTORS;
        assert_eq!(status(Descriptor::new(SEGMENT, list, n), 512), dnr(misplaced));
        assert_eq!(status(Descriptor::new(LAST_SEGMENT, list, n), 512), dnr(invalid));
        let n = put(&[good, inner]);
        assert_eq!(status(Descriptor::new(LAST_SEGMENT, list, n), 1024), dnr(invalid));
    }
    // A segment without a descriptor of the next segment.
    let n = put(&[good, good]);
    assert_eq!(status(Descriptor::new(SEGMENT, list, n), 1024), dnr(invalid));

    // Keyed, transport and vendor descriptors; data blocks and bit buckets with a sub type other
    // than address.
    for identifier in [0x11, 0x40, 0x50, 0xf0, 0x01, 0x21, 0x3a, 0xff] {
        let bad = Descriptor::new(identifier, data, 512);
        assert_eq!(status(bad, 512), dnr(kind), "{identifier:#x} in the command");
        let n = put(&[good, bad]);
        let first = Descriptor::new(LAST_SEGMENT, list, n);
        assert_eq!(status(first, 1024), dnr(kind), "{identifier:#x} in a segment");
    }
}

#[test]
fn bit_buckets_discard_and_supply_no_data() {
    let peer = Peer::plain(256);
    peer.scribble(1);
    let (list, data) = (BASE, BASE + 8192);
    let bucket = |len| Descriptor::new(BIT_BUCKET, u64::MAX, len);
    let parts = [
        bucket(100),
        Descriptor::new(DATA_BLOCK, data, 512),
        // This bit bucket is longer than the memory into which the crate discards data.
        bucket(300_000),
        Descriptor::new(DATA_BLOCK, data + 4096, 512),
        bucket(7),
    ];
    for (i, descriptor) in parts.iter().enumerate() {
        peer.put(list + i as u64 * 16, &descriptor.encode());
    }
    let first = Descriptor::new(LAST_SEGMENT, list, parts.len() * 16);
    let all = 100 + 512 + 300_000 + 512 + 7;
    let before = peer.content();
    let segments = resolve(&peer, first, all, true).unwrap();
    let bytes: Vec<u8> = (0..all).map(|n| n as u8).collect();
    segments.write_from(0, &bytes).unwrap();
    let after = peer.content();
    let at = (data - BASE) as usize;
    assert_eq!(after[at..at + 512], bytes[100..612]);
    assert_eq!(after[at + 4096..at + 4608], bytes[300_612..301_124]);
    let differ = before.iter().zip(&after).filter(|(before, after)| before != after).count();
    assert!(differ <= 1024, "nothing else was written");
    let short = Err(Status::SGL_DATA_LENGTH_INVALID.with_dnr());
    let resolved = |len, write| {
        resolve(&peer, first, len, write).map(|data| data.len()).map_err(|error| error.status())
    };
    assert_eq!(resolved(all + 1, true), short);
    // If the device reads the data, only the data blocks count.
    assert_eq!(resolved(1024, false), Ok(1024));
    assert_eq!(resolved(1025, false), short);
    // A bit bucket descriptor in the command itself.
    assert_eq!(resolve(&peer, bucket(512), 512, true).unwrap().len(), 512);
    assert!(resolve(&peer, bucket(512), 512, false).is_err());
}

#[test]
fn unmapped_memory_is_a_transfer_error() {
    let transfer = Err(Status::DATA_XFER_ERROR);
    let stretch = |granules, access| Stretch { granules, access, apart: false };
    let peer = Peer::new(&[
        stretch(2, Access::ReadWrite),
        stretch(2, Access::Read),
        stretch(1, Access::None),
        stretch(2, Access::ReadWrite),
    ]);
    let at = |index: u64| BASE + index * 4096;
    let status = |first: Descriptor, len: usize, write: bool| {
        resolve(&peer, first, len, write).map(|_| ()).map_err(|e| e.status())
    };
    for (address, len, read, write) in [
        (at(1), 4096, true, true),
        (at(1), 4097, true, false), // into the read-only part
        (at(1), 4096 * 3, true, false),
        (at(1), 4096 * 3 + 1, false, false), // into the hole
        (at(5) - 1, 1, false, false),
        (at(7), 1, false, false),
        (u64::MAX, 2, false, false),
        (u64::MAX - 4095, 4096, false, false),
    ] {
        let first = Descriptor::new(DATA_BLOCK, address, len);
        assert_eq!(status(first, len, false) == Ok(()), read, "{address:#x}+{len}");
        assert_eq!(status(first, len, true) == Ok(()), write, "{address:#x}+{len}");
        assert!(read || status(first, len, false) == transfer);
        // If a descriptor is longer than the data, the addresses after the data are not checked.
        let first = Descriptor::new(DATA_BLOCK, at(1), 1 << 30);
        assert_eq!(status(first, 4096, true), Ok(()));
    }
    // A list may be in read-only memory, because the device only reads it.
    peer.put(at(2), &Descriptor::new(DATA_BLOCK, at(0), 512).encode());
    assert_eq!(status(Descriptor::new(LAST_SEGMENT, at(2), 16), 512, true), Ok(()));
    assert_eq!(status(Descriptor::new(LAST_SEGMENT, at(4), 16), 512, true), transfer);
    assert_eq!(status(Descriptor::new(LAST_SEGMENT, at(4) - 16, 32), 512, false), transfer);
    assert_eq!(status(Descriptor::new(LAST_SEGMENT, u64::MAX - 15, 32), 512, false), transfer);
}

#[test]
fn an_endless_sgl_is_refused() {
    let peer = Peer::plain(128);
    let too_many = Status::SGL_INVALID_NUMBER_OF_DESCRIPTORS.with_dnr();
    let status = |first: Descriptor, len: usize| {
        resolve(&peer, first, len, true).map(|_| ()).map_err(|e| e.status())
    };
    let since = Instant::now();
    // A segment whose next segment is itself.
    let first = Descriptor::new(SEGMENT, BASE, 16);
    peer.put(BASE, &first.encode());
    assert_eq!(status(first, 512), Err(too_many));
    // A segment of 4 GiB.
    let first = Descriptor { len: u32::MAX / 16 * 16, ..first };
    assert_eq!(status(first, 512), Err(too_many));
    // The maximum number of data blocks, and one more.
    for i in 0..MAX_DESCRIPTORS as u64 {
        let block = Descriptor::new(DATA_BLOCK, BASE + (100 << 12) + i % 7 * 512, 16);
        peer.put(BASE + i * 16, &block.encode());
    }
    let list = |count: usize| Descriptor::new(LAST_SEGMENT, BASE, count * 16);
    assert_eq!(status(list(MAX_DESCRIPTORS - 1), (MAX_DESCRIPTORS - 1) * 16), Ok(()));
    assert_eq!(status(list(MAX_DESCRIPTORS), MAX_DESCRIPTORS * 16), Err(too_many));
    assert!(since.elapsed() < LIMIT);
}
