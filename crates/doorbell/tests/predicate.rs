//! The hosts' predicates as intervals of the ring, and the ring's arithmetic.
#![cfg(not(loom))]

use proptest::prelude::*;
use shadowbell_doorbell::{Predicate, RingSize};

fn ring(entries: u32) -> RingSize {
    RingSize::new(entries).unwrap()
}

/// Returns true if `at` lies in [from, to) of the ring.
fn steps_over(size: RingSize, from: u16, to: u16, at: u16) -> bool {
    size.distance(from, at) < size.distance(from, to)
}

/// The example of the specification (NVMe Base 2.0, B.5.2), computed modulo the size of the queue.
fn specification(size: RingSize, event_idx: u16, old: u16, new: u16) -> bool {
    let modulo = |value: i64| value.rem_euclid(i64::from(size.entries()));
    let (event_idx, old, new) = (i64::from(event_idx), i64::from(old), i64::from(new));
    modulo(new - event_idx - 1) < modulo(new - old)
}

fn check(size: RingSize, event_idx: u16, old: u16, new: u16) {
    let ei = u32::from(event_idx);
    let over = steps_over(size, old, new, event_idx);
    let context = (size, event_idx, old, new);
    assert_eq!(Predicate::Linux.needs_mmio(ei, old, new), over, "{context:?}");
    assert_eq!(specification(size, event_idx, old, new), over, "{context:?}");
    let inclusive = over || event_idx == new;
    assert_eq!(Predicate::SpdkInclusive.needs_mmio(ei, old, new), inclusive, "{context:?}");
}

#[test]
fn sixteen_bit_arithmetic_is_ring_arithmetic_in_every_small_ring() {
    for entries in 2..=24 {
        let size = ring(entries);
        for old in 0..entries as u16 {
            for new in 0..entries as u16 {
                for event_idx in 0..entries as u16 {
                    check(size, event_idx, old, new);
                }
            }
        }
    }
}

/// No value of EventIdx means "never ring". With an EventIdx outside of the ring, the host rings
/// when the ring wraps, and at no other time.
#[test]
fn an_event_idx_outside_the_ring_rings_once_per_turn() {
    for entries in [2u32, 3, 100, 1024, 65535] {
        for event_idx in [entries, 65535] {
            let size = ring(entries);
            let notified = (0..entries)
                .filter(|&at| {
                    let (old, new) = (at as u16, size.forward(at as u16, 1));
                    Predicate::Linux.needs_mmio(event_idx, old, new)
                })
                .collect::<Vec<_>>();
            assert_eq!(notified, [entries - 1]);
        }
    }
}

#[test]
fn ring_sizes_are_checked() {
    for entries in [0, 1, 65537, u32::MAX] {
        assert!(RingSize::new(entries).is_none(), "{entries}");
    }
    assert!(RingSize::from_zero_based(0).is_none());
    assert_eq!(RingSize::from_zero_based(1).map(RingSize::entries), Some(2));
    assert_eq!(RingSize::from_zero_based(u16::MAX).map(RingSize::entries), Some(65536));
}

/// Rings of any size. The smallest and the largest are chosen more often than by chance.
fn any_ring() -> impl Strategy<Value = RingSize> {
    prop_oneof![
        Just(2u32),
        Just(65535),
        Just(65536),
        2u32..=65536,
        (1u32..=16).prop_map(|bits| 1 << bits),
    ]
    .prop_map(ring)
}

fn ring_and_positions<const N: usize>() -> impl Strategy<Value = (RingSize, [u16; N])> {
    any_ring().prop_flat_map(|size| {
        let position = (0..size.entries()).prop_map(|p| p as u16);
        (Just(size), prop::array::uniform(position))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn sixteen_bit_arithmetic_is_ring_arithmetic(
        (size, [event_idx, old, new]) in ring_and_positions(),
    ) {
        check(size, event_idx, old, new);
    }

    #[test]
    fn ring_forward_and_back_are_inverse((size, [from, to]) in ring_and_positions()) {
        let distance = size.distance(from, to);
        prop_assert!(distance < size.entries());
        prop_assert_eq!(size.forward(from, distance), to);
        prop_assert_eq!(size.back(to, distance), from);
        prop_assert_eq!(size.forward(from, size.entries()), from);
        prop_assert_eq!(size.back(from, size.entries()), from);
    }

    #[test]
    fn no_value_panics(
        size in any_ring(),
        from: u16, to: u16, count: u32, value: u32,
    ) {
        let _ = (size.distance(from, to), size.forward(from, count), size.back(from, count));
        prop_assert_eq!(size.position(value).is_some(), value < size.entries());
        for predicate in [Predicate::Linux, Predicate::SpdkInclusive] {
            let _ = predicate.needs_mmio(value, from, to);
        }
    }
}
