//! Memory maps that change while commands are in flight.

mod common;

use proptest::prelude::*;
use shadowbell_memory::{DmaSpace, Fault, Mapping, Segments, View};
use std::sync::Arc;

fn is_mapped(address: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|line| {
        let range = line.split(' ').next().and_then(|r| r.split_once('-'));
        range.is_some_and(|(from, to)| {
            let parse = |s| usize::from_str_radix(s, 16).unwrap();
            (parse(from)..parse(to)).contains(&address)
        })
    })
}

#[test]
fn a_command_in_flight_keeps_unmapped_memory() {
    let mut space = DmaSpace::default();
    // The mapping is larger than any other of this process, so that no other mapping gets its
    // address soon after the unmap.
    let mapping = Mapping::shared("guest", 64 << 20).unwrap();
    let address = mapping.address();
    space.map(0, 64 << 20, &mapping.bytes()).unwrap();
    drop(mapping);
    let view = View::new(Arc::clone(space.table()));
    let watch = view.watch();
    let mut in_flight = Segments::new();
    view.resolve_prps(0x1000, 0, 4096, 4096, true, &mut in_flight).unwrap();

    space.unmap(0, 64 << 20).unwrap();
    drop(view); // the I/O thread adopts the new table
    let new = View::new(Arc::clone(space.table()));
    let fault = Fault { iova: 0x1000, write: false };
    assert_eq!(new.read(0x1000, &mut [0; 4]), Err(fault));
    assert!(!watch.is_idle(), "a command still works on the old memory");
    assert!(is_mapped(address));
    in_flight.write_from(0, &[7; 4096]).unwrap();

    // The data of a command can be moved, for example to the queue of another thread. They hold the
    // view in which they were resolved until they are dropped.
    let taken = in_flight.take();
    assert!(in_flight.is_empty());
    assert!(!watch.is_idle());
    drop(taken);
    assert!(watch.is_idle());
    assert!(!is_mapped(address), "the memory is unmapped with the last user");
}

#[test]
fn the_same_addresses_can_be_mapped_to_new_memory_meanwhile() {
    let mut space = DmaSpace::default();
    let (old, new) = (Mapping::anonymous(8192).unwrap(), Mapping::anonymous(8192).unwrap());
    space.map(0x4000, 8192, &old.bytes()).unwrap();
    let before = View::new(Arc::clone(space.table()));
    let mut in_flight = Segments::new();
    before.resolve_prps(0x4000, 0x5000, 8192, 4096, true, &mut in_flight).unwrap();
    space.unmap(0x4000, 8192).unwrap();
    space.map(0x4000, 8192, &new.bytes()).unwrap();
    let after = View::new(Arc::clone(space.table()));
    in_flight.write_from(0, &[1; 8192]).unwrap();
    after.write(0x4000, &[2; 8192]).unwrap();
    assert_eq!((old.bytes().read::<u8>(8191), new.bytes().read::<u8>(8191)), (Some(1), Some(2)));
    let watch = before.watch();
    drop(before);
    assert!(!watch.is_idle());
    // If the data are resolved again, they release the old view, as at the end of the command.
    after.resolve_prps(0x4000, 0, 512, 4096, true, &mut in_flight).unwrap();
    assert!(watch.is_idle());
    let mut seen = [0; 512];
    in_flight.read_into(0, &mut seen).unwrap();
    assert_eq!(seen, [2; 512]);
}

#[test]
fn every_view_has_its_own_watch() {
    let space = DmaSpace::default();
    let (one, two) = (View::new(Arc::clone(space.table())), View::new(Arc::clone(space.table())));
    let (watch_one, watch_two) = (one.watch(), two.watch());
    drop(one);
    assert!(watch_one.is_idle() && !watch_two.is_idle());
    let watch = watch_two.clone();
    drop(two);
    assert!(watch.is_idle() && watch_two.is_idle());
}

#[derive(Clone, Debug)]
enum Change {
    Map(u64, u64),
    Unmap(u64, u64),
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 128, failure_persistence: None, ..ProptestConfig::default()
    })]

    /// Random maps and unmaps, compared with a list that is searched linearly.
    #[test]
    fn the_table_matches_a_list_of_maps(
        changes in proptest::collection::vec(
            prop_oneof![
                (0..40u64, 0..6u64).prop_map(|(at, len)| Change::Map(at, len)),
                (0..40u64, 0..20u64).prop_map(|(at, len)| Change::Unmap(at, len)),
            ],
            1..60,
        ),
    ) {
        let memory = Mapping::anonymous(4 * 4096).unwrap().bytes();
        let mut space = DmaSpace::default();
        let mut model: Vec<(u64, u64)> = Vec::new();
        for change in changes {
            match change {
                Change::Map(at, len) => {
                    let free = model.iter().all(|(a, l)| at + len <= *a || a + l <= at);
                    let fits = (1..=4).contains(&len);
                    let result = space.map(at * 4096, len * 4096, &memory);
                    prop_assert_eq!(result.is_ok(), free && fits, "{:?}", result);
                    if result.is_ok() {
                        model.push((at, len));
                        model.sort_unstable();
                    }
                }
                Change::Unmap(at, len) => {
                    let inside = |(a, l): &(u64, u64)| at <= *a && a + l <= at + len;
                    let touches = |(a, l): &(u64, u64)| *a < at + len && at < a + l;
                    let some = model.iter().any(inside);
                    let splits = model.iter().any(|m| touches(m) && !inside(m));
                    let result = space.unmap(at * 4096, len * 4096);
                    prop_assert_eq!(result.is_ok(), len > 0 && some && !splits, "{:?}", result);
                    if result.is_ok() {
                        model.retain(|m| !inside(m));
                    }
                }
            }
            let ranges: Vec<_> = space.table().ranges().map(|(a, l)| (a / 4096, l / 4096)).collect();
            prop_assert_eq!(&ranges, &model);
            let view = View::new(Arc::clone(space.table()));
            for page in 0..48 {
                let mapped = model.iter().any(|(a, l)| (*a..a + l).contains(&page));
                prop_assert_eq!(view.read(page * 4096 + 4095, &mut [0]).is_ok(), mapped);
            }
        }
    }
}
