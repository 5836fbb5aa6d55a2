//! Malformed descriptor chains. Disks of every block size must answer them in the same way.

use crate::vhost::{Guest, MEMORY, READ, Rig, Ring, each_block_size, has_short_blocks};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Guest address of the header of a request, and that of its indirect descriptor table (`TABLE`).
const HEADER: u64 = 0x60_0000;
const TABLE: u64 = 0x60_1000;
/// Guest address of the used ring, and that of used ring entries to which the device writes nothing
/// in this test (`UNUSED_ENTRIES`).
const USED: u64 = 0x1_3000;
const UNUSED_ENTRIES: u64 = USED + 4 + 40 * 8;
/// Names of those cases in which the data are outside of guest memory, but the status descriptor is
/// valid.
const DATA_OUTSIDE: [&str; 4] =
    ["data outside", "half of the data outside", "data at the end of all", "data of 4 GiB"];
/// Slot of a well-formed request.
const GOOD: u16 = 15;

type Entry = (u64, u32, u16, u16);

/// A malformed request: descriptors of the queue from index 0 on, indirect descriptors, and the
/// head.
struct Case {
    what: &'static str,
    queue: Vec<Entry>,
    table: Vec<Entry>,
    head: u16,
}

fn case(what: &'static str, queue: &[Entry], table: &[Entry]) -> Case {
    Case { what, queue: queue.to_vec(), table: table.to_vec(), head: 0 }
}

fn cases(data: u64, status: u64) -> Vec<Case> {
    let header = (HEADER, 16, NEXT, 1);
    let request = [header, (data, 512, NEXT | WRITE, 2), (status, 1, WRITE, 0)];
    let with = |at: usize, entry: Entry| {
        let mut all = request;
        all[at] = entry;
        all
    };
    let table = |entries: u32| [(TABLE, 16 * entries, INDIRECT, 0)];
    let chain = |count: u16| -> Vec<Entry> {
        let middle = (1..count - 1).map(|n| (data, 512, NEXT | WRITE, n + 1));
        [header].into_iter().chain(middle).chain([(status, 1, WRITE, 0)]).collect()
    };
    let mut cases = vec![
        case("a good one", &request, &[]),
        case("a loop of two", &with(1, (data, 512, NEXT | WRITE, 0)), &[]),
        case("a loop of one", &[(HEADER, 16, NEXT, 0)], &[]),
        case("a loop of one to write", &[(data, 512, NEXT | WRITE, 0)], &[]),
        case("a next that is none", &with(1, (data, 512, NEXT | WRITE, 64)), &[]),
        case("a next far away", &with(1, (data, 512, NEXT | WRITE, u16::MAX)), &[]),
        case("a header outside", &with(0, (MEMORY, 16, NEXT, 1)), &[]),
        case("half a header outside", &with(0, (MEMORY - 8, 16, NEXT, 1)), &[]),
        case("data outside", &with(1, (MEMORY, 512, NEXT | WRITE, 2)), &[]),
        case("half of the data outside", &with(1, (MEMORY - 256, 512, NEXT | WRITE, 2)), &[]),
        case("data at the end of all", &with(1, (u64::MAX - 100, 512, NEXT | WRITE, 2)), &[]),
        case("a status outside", &with(2, (MEMORY, 1, WRITE, 0)), &[]),
        case("a status at the end of all", &with(2, (u64::MAX, 1, WRITE, 0)), &[]),
        case("data of 4 GiB", &with(1, (data, u32::MAX, NEXT | WRITE, 2)), &[]),
        case("no data", &with(1, (data, 0, NEXT | WRITE, 2)), &[]),
        case("data over the used ring", &with(1, (UNUSED_ENTRIES, 512, NEXT | WRITE, 2)), &[]),
        case("a status in the used ring", &with(2, (UNUSED_ENTRIES, 1, WRITE, 0)), &[]),
        case("a table", &table(3), &request),
        case("an empty table", &table(0), &request),
        case("a table that is cut off", &table(2), &request),
        case("a loop in a table", &table(3), &with(1, (data, 512, NEXT | WRITE, 0))),
        case("a table outside", &[(MEMORY, 48, INDIRECT, 0)], &[]),
        case("a table in a table", &table(3), &with(0, (TABLE, 48, INDIRECT, 0))),
        case("a table of 2^16", &table(1 << 16), &request),
        case("a table of 2^16 - 1", &table((1 << 16) - 1), &request),
        case("a table of 2^28", &[(TABLE, u32::MAX, INDIRECT, 0)], &request),
        case("a chain of 1,000 in a table", &table(1000), &chain(1000)),
        case("a chain of 2^16 - 1 in a table", &table((1 << 16) - 1), &chain(u16::MAX)),
    ];
    for (what, head) in [("a head that is none", 64), ("a head far away", u16::MAX)] {
        cases.push(Case { head, ..case(what, &request, &[]) });
    }
    cases
}

/// Observed results: the used entries (head, length, status byte), and the byte at the address of
/// the malformed request's status.
type Answers = (Vec<(u16, u32, u8)>, [u8; 1]);

fn answers(ring: &mut Ring, case: &Case) -> Answers {
    let bytes = |entries: &[Entry]| {
        let entry = |(at, len, flags, next): &Entry| {
            let mut bytes = at.to_le_bytes().to_vec();
            bytes.extend(len.to_le_bytes());
            bytes.extend([*flags, *next].map(u16::to_le_bytes).concat());
            bytes
        };
        entries.iter().flat_map(entry).collect::<Vec<_>>()
    };
    ring.write(HEADER, &[0; 16]);
    ring.write(TABLE, &bytes(&case.table));
    for (&(at, len, flags, next), index) in case.queue.iter().zip(0..) {
        ring.descriptor(index, at, len, flags, next);
    }
    ring.write(ring.status(0), &[0xff]);
    ring.offer(case.head);
    ring.submit(GOOD, READ, 0, b"", 512);
    let mut found = Vec::new();
    // Requests complete in any order. A head outside of the queue gets no entry in the used ring.
    let expected = if case.head == 0 { 2 } else { 1 };
    while found.len() < expected {
        found.push(ring.take());
    }
    found.sort_unstable();
    let mut status = [0];
    ring.memory_at(ring.status(0), &mut status);
    (found, status)
}

#[test]
fn invalid_requests_have_the_same_replies_on_both_paths() {
    let mut all: [Vec<(&str, Answers)>; 2] = Default::default();
    let all_of = std::cell::RefCell::new(&mut all);
    each_block_size(|| {
        let rig = Rig::new(false);
        let (data, status) = {
            let guest = Guest::connect(&rig, 1, 0);
            (guest.rings[0].data(0), guest.rings[0].status(0))
        };
        for case in cases(data, status) {
            let mut guest = Guest::connect(&rig, 1, 0);
            let found = answers(&mut guest.rings[0], &case);
            all_of.borrow_mut()[usize::from(has_short_blocks())].push((case.what, found));
        }
        drop(rig);
    });
    let [long, short] = all;
    for ((what, one), (_, other)) in long.iter().zip(&short) {
        assert_eq!(one, other, "{what}");
        if DATA_OUTSIDE.contains(what) {
            // The status descriptor is valid, so the device reports IOERR.
            assert_eq!(*one, (vec![(0, 1, 1), (GOOD, 513, 0)], [1]), "{what}");
        }
    }
    assert_eq!(short[0].1, (vec![(0, 513, 0), (GOOD, 513, 0)], [0]));
}
