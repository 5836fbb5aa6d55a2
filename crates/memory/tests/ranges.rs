//! Ranges of a peer's memory that form the data of one command, like a virtqueue's descriptors.

use shadowbell_memory::{DmaSpace, Mapping, Protection, Segments, SharedBytes, View};
use std::sync::Arc;

const PAGE: u64 = 4096;

/// Creates three pages: two whose memory is not contiguous in this process, and a read-only one.
fn peer() -> (View, SharedBytes) {
    let whole = Mapping::anonymous(2 * PAGE).unwrap().bytes();
    let file = Mapping::shared("constant", PAGE).unwrap();
    let constant = Mapping::from_fd(file.fd().unwrap(), 0, PAGE, Protection::Read).unwrap();
    let mut space = DmaSpace::default();
    space.map(0, PAGE, &whole.slice(PAGE as usize, PAGE as usize).unwrap()).unwrap();
    space.map(PAGE, PAGE, &whole.slice(0, PAGE as usize).unwrap()).unwrap();
    space.map(2 * PAGE, PAGE, &constant.bytes()).unwrap();
    let data: Vec<u8> = (0..2 * PAGE).map(|at| (at % 251) as u8).collect();
    whole.write_from(0, &data).unwrap();
    (View::new(Arc::clone(space.table())), whole)
}

#[test]
fn ranges_follow_each_other() {
    let (view, whole) = peer();
    let mut segments = Segments::new();
    // Ranges: one piece, one across two maps, several with an empty one, and several with a
    // repeated one.
    let cases: [&[(u64, usize)]; 4] = [
        &[(16, 512)],
        &[(PAGE - 100, 300)],
        &[(PAGE + 8, 512), (40, 0), (0, 1024), (0, 1024), (PAGE - 1, 2)],
        &[],
    ];
    for ranges in cases {
        segments.resolve_ranges(&view, ranges, true).unwrap();
        let expected: Vec<u8> = ranges
            .iter()
            .flat_map(|(at, len)| *at..*at + *len as u64)
            .map(|at| (at + PAGE) % (2 * PAGE))
            .map(|at| whole.read::<[u8; 1]>(at as usize).unwrap()[0])
            .collect();
        let mut data = vec![0; segments.len()];
        segments.read_into(0, &mut data).unwrap();
        assert_eq!(data, expected);
        assert!(segments.is_writable());
    }
}

#[test]
fn an_unmapped_range_leaves_no_data() {
    let (view, _) = peer();
    let mut segments = Segments::new();
    let bad: [&[(u64, usize)]; 4] = [
        &[(3 * PAGE - 1, 2)],
        &[(0, 512), (3 * PAGE, 1)],
        &[(u64::MAX, 2)],
        &[(0, 512), (u64::MAX - 1, usize::MAX)],
    ];
    for ranges in bad {
        segments.resolve_ranges(&view, &[(0, 512)], false).unwrap();
        assert!(segments.resolve_ranges(&view, ranges, false).is_err());
        assert!(segments.is_empty(), "{ranges:?}");
    }
    // A disk read cannot store data in read-only memory, alone or together with writable memory.
    for ranges in [&[(2 * PAGE, 512)][..], &[(0, 512), (2 * PAGE, 512)]] {
        segments.resolve_ranges(&view, ranges, false).unwrap();
        assert!(!segments.is_writable());
        assert!(segments.resolve_ranges(&view, ranges, true).is_err());
        assert!(segments.is_empty());
    }
}
