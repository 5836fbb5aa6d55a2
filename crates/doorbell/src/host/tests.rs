//! Single-threaded tests of the host end. The predicates are tested separately.

use core::sync::atomic::{AtomicU32, Ordering};

use super::{HostDoorbell, Predicate};
use crate::RingSize;

type Host<'a> = HostDoorbell<&'a AtomicU32>;

fn load(cell: &AtomicU32) -> u32 {
    cell.load(Ordering::Relaxed)
}

#[test]
fn a_plain_doorbell_is_always_written() {
    let mut host: Host<'_> = HostDoorbell::new(0);
    assert!(host.publish(1));
    assert!(host.publish(2));
    host.enable_shadow();
    assert!(host.publish(3), "no shadow entry is attached");
    assert_eq!(host.current(), 3);
    assert_eq!(host.stats().mmio_needed, 3);
}

#[test]
fn mirrored_then_trusted_then_forgotten() {
    let (shadow, event_idx) = (AtomicU32::new(99), AtomicU32::new(99));
    let mut host: Host<'_> = HostDoorbell::new(5);
    host.attach_shadow(&shadow, &event_idx);
    assert_eq!(
        (load(&shadow), load(&event_idx)),
        (5, 5),
        "initialized independently of the page's content"
    );
    assert!(host.publish(6), "not trusted yet: entry and register");
    assert_eq!(load(&shadow), 6);

    host.enable_shadow();
    assert!(!host.publish(7), "EventIdx is at 5");
    event_idx.store(7, Ordering::Relaxed);
    assert!(host.publish(0), "stepped over 7, at the wrap");
    assert!(!host.publish(1));
    assert_eq!(load(&shadow), 1);

    host.detach_shadow();
    assert!(host.publish(2));
    assert_eq!(load(&shadow), 1, "the page may be reused by now");
    let stats = host.stats();
    assert_eq!((stats.published, stats.mmio_needed, stats.mmio_saved), (5, 3, 2));
}

#[test]
fn the_two_predicates_differ_at_the_end_of_the_update_only() {
    for (event_idx, linux, spdk) in
        [(3, false, false), (4, true, true), (5, true, true), (6, false, true), (7, false, false)]
    {
        assert_eq!(Predicate::Linux.needs_mmio(event_idx, 4, 6), linux, "{event_idx}");
        assert_eq!(Predicate::SpdkInclusive.needs_mmio(event_idx, 4, 6), spdk, "{event_idx}");
    }
}

#[test]
fn a_controller_that_writes_the_shadow_entry_confuses_only_itself() {
    let (shadow, event_idx) = <(AtomicU32, AtomicU32)>::default();
    let mut host: Host<'_> = HostDoorbell::new(0);
    host.attach_shadow(&shadow, &event_idx);
    host.enable_shadow();
    // The host uses its own copy of the old value, not the value in the page.
    shadow.store(1, Ordering::Relaxed);
    assert!(host.publish(1));
    for hostile in [u32::MAX, 0x1_0000, 0x8000_0000] {
        event_idx.store(hostile, Ordering::Relaxed);
        let _ = host.publish(2);
        assert_eq!((host.current(), load(&shadow)), (2, 2));
    }
}

#[test]
fn a_deferred_value_is_notified_once() {
    let (shadow, event_idx) = <(AtomicU32, AtomicU32)>::default();
    let mut host: Host<'_> = HostDoorbell::new(0);
    assert!(host.publish_deferred(1), "a plain doorbell is written");
    host.attach_shadow(&shadow, &event_idx);
    assert!(host.publish_deferred(2), "a shadow entry is not trusted yet");
    assert!(!host.has_deferred() && !host.needs_notification());
    host.enable_shadow();

    assert!(!host.publish_deferred(4));
    assert_eq!((load(&shadow), host.has_deferred()), (4, true), "the value is stored at once");
    event_idx.store(3, Ordering::Relaxed);
    assert!(host.needs_notification(), "stepped over 3");
    assert!(!host.has_deferred() && !host.needs_notification(), "once");

    // The next update also checks EventIdx for the earlier update, separately.
    assert!(!host.publish_deferred(5));
    event_idx.store(4, Ordering::Relaxed);
    assert!(host.publish_deferred(6), "the update before passed 4");
    assert!(!host.needs_notification());
    assert!(!host.publish_deferred(7));
    event_idx.store(6, Ordering::Relaxed);
    assert!(host.publish(8), "the update before passed 6");
    assert!(!host.has_deferred());
    assert!(!host.publish_deferred(9));
    event_idx.store(9, Ordering::Relaxed);
    assert!(host.publish(10), "this update passed 9");

    assert!(!host.publish_deferred(11));
    host.detach_shadow();
    assert!(!host.needs_notification(), "no shadow entry is attached any more");
    let stats = host.stats();
    assert_eq!((stats.published, stats.mmio_needed + stats.mmio_saved), (10, 10));
}

#[test]
fn an_event_idx_outside_of_the_ring_requests_no_write() {
    for (entries, event_idx, writes) in [
        (128, u32::MAX, 0),
        (128, 128, 0),
        (128, 0x7f, 3),
        // Bits 31:16 of an EventIdx entry are reserved, so they are ignored.
        (128, 0xffff_007f, 3),
        (2, 2, 0),
        (3, 1, 3),
    ] {
        let (shadow, cell) = <(AtomicU32, AtomicU32)>::default();
        let mut host: Host<'_> = HostDoorbell::new(0);
        let size = RingSize::new(entries).unwrap();
        host.set_ring(size);
        cell.store(event_idx, Ordering::Relaxed);
        host.attach_shadow(&shadow, &cell);
        host.enable_shadow();
        // `attach_shadow` leaves an EventIdx outside of the ring unchanged, and sets any other to
        // the current value.
        assert_eq!(load(&cell), if writes == 0 { event_idx } else { 0 });
        cell.store(event_idx, Ordering::Relaxed);
        let mut at = 0;
        for turn in 0..3 * entries {
            at = size.next(at);
            let written = if turn % 2 == 0 {
                host.publish(at)
            } else {
                // `publish_deferred` returns the result for the previous update, and
                // `needs_notification` the result for this update.
                assert!(!host.publish_deferred(at));
                host.needs_notification()
            };
            assert!(!written || writes != 0, "{entries} entries, EventIdx {event_idx:#x}");
        }
        assert_eq!(host.stats().mmio_needed, writes, "{entries} entries, EventIdx {event_idx:#x}");
    }
    // In the largest ring, every 16-bit value is a position.
    let (shadow, cell) = (AtomicU32::new(0), AtomicU32::new(0));
    let mut host: Host<'_> = HostDoorbell::new(0xffff);
    host.set_ring(RingSize::new(RingSize::MAX).unwrap());
    host.attach_shadow(&shadow, &cell);
    host.enable_shadow();
    assert!(host.publish(0));
    cell.store(0, Ordering::Relaxed);
    assert!(host.publish(1));
}
