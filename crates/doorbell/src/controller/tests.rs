//! Single-threaded tests of one doorbell.

use core::sync::atomic::{AtomicU32, Ordering};

use super::{CqHead, DoorbellState, InvalidDoorbell, SqTail, Truth};
use crate::{RingSize, Sleeper};

/// Register, shadow entry and EventIdx of a doorbell.
#[derive(Default)]
struct Cells {
    register: AtomicU32,
    shadow: AtomicU32,
    event_idx: AtomicU32,
}

impl Cells {
    fn ring(&self, value: u32) {
        self.register.store(value, Ordering::Relaxed);
    }

    fn shadow(&self, value: u32) {
        self.shadow.store(value, Ordering::Relaxed);
    }

    fn event_idx(&self) -> u32 {
        self.event_idx.load(Ordering::Relaxed)
    }
}

fn size(entries: u32) -> RingSize {
    RingSize::new(entries).unwrap()
}

/// Creates a tail at position `at` whose source of the value is already the shadow entry.
fn departed(cells: &Cells, entries: u32, at: u16) -> SqTail<&AtomicU32> {
    let state = DoorbellState { last: at, truth: Truth::Shadow, snapshot: Some(u32::MAX) };
    cells.shadow(u32::from(at));
    let mut tail = SqTail::resume(size(entries), &cells.register, state).unwrap();
    tail.reattach(&cells.shadow, &cells.event_idx);
    tail
}

#[test]
fn the_register_is_the_truth_without_a_shadow_entry() {
    let cells = Cells::default();
    let mut tail: SqTail<_> = SqTail::new(size(8), &cells.register);
    assert_eq!(tail.poll(), Ok(0));
    cells.ring(5);
    assert_eq!(tail.poll(), Ok(5));
    cells.ring(2);
    assert_eq!(tail.poll(), Ok(2));
    let stats = tail.stats();
    assert_eq!((stats.polls, stats.found_new, stats.event_idx_moved), (3, 2, 0));
}

#[test]
fn the_register_stays_the_truth_until_the_entry_departs() {
    let cells = Cells::default();
    cells.ring(5);
    cells.shadow(3);
    let mut tail = SqTail::new(size(8), &cells.register);
    assert_eq!(tail.poll(), Ok(5));
    tail.enable(&cells.shadow, &cells.event_idx).unwrap();
    assert_eq!(cells.event_idx(), 5);
    assert_eq!(tail.poll(), Ok(5), "the snapshot does not count as a value");
    cells.ring(6);
    assert_eq!(tail.poll(), Ok(6));
    assert_eq!(cells.event_idx(), 6, "in step until the entry departs");
    cells.shadow(7);
    assert_eq!(tail.poll(), Ok(7));
    // After the first change of the shadow entry, a register write is only a wakeup: even a late
    // register write does not change the tail.
    cells.ring(4);
    assert_eq!(tail.poll(), Ok(7));
    // The entry remains the source even if it returns to the value of its snapshot.
    cells.shadow(3);
    assert_eq!(tail.poll(), Ok(3));
    assert_eq!(tail.state().truth, Truth::Shadow);
}

#[test]
fn the_shadow_entry_is_never_written() {
    let cells = Cells::default();
    cells.shadow(0xdead_beef);
    let mut tail = SqTail::new(size(8), &cells.register);
    tail.enable(&cells.shadow, &cells.event_idx).unwrap();
    let mut sleeper: Sleeper<_> = Sleeper::new(AtomicU32::new(0));
    for value in 1..8 {
        cells.ring(value);
        assert_eq!(tail.poll(), Ok(value as u16));
        tail.arm(&mut sleeper.prepare());
    }
    assert_eq!(cells.shadow.load(Ordering::Relaxed), 0xdead_beef);
}

#[test]
fn an_invalid_tail_is_reported_once_and_ends_the_queue() {
    for bad in [8, 9, 0xffff, 0x1_0000, u32::MAX] {
        let cells = Cells::default();
        let mut tail = departed(&cells, 8, 3);
        cells.shadow(bad);
        assert_eq!(tail.poll(), Err(InvalidDoorbell { value: bad }));
        assert_eq!(tail.state().truth, Truth::Invalid);
        for value in [4, bad, 5] {
            cells.shadow(value);
            cells.ring(value);
            assert_eq!((tail.poll(), tail.peek()), (Ok(3), 3));
            // After an invalid value, the tail is constant: neither another Doorbell Buffer Config
            // nor the recovery by another process changes it.
            tail.enable(&cells.shadow, &cells.event_idx).unwrap();
            assert_eq!(tail.poll(), Ok(3));
        }
        assert_eq!(tail.stats().invalid, 1);
        let mut resumed = SqTail::resume(size(8), &cells.register, tail.state()).unwrap();
        resumed.reattach(&cells.shadow, &cells.event_idx);
        assert_eq!(resumed.poll(), Ok(3));
    }
}

#[test]
fn an_invalid_tail_in_a_register_or_before_a_sleep_ends_the_queue() {
    let cells = Cells::default();
    let mut tail: SqTail<_> = SqTail::new(size(8), &cells.register);
    cells.ring(8);
    assert_eq!(tail.poll(), Err(InvalidDoorbell { value: 8 }));
    cells.ring(1);
    assert_eq!(tail.poll(), Ok(0));
    let mut tail = departed(&cells, 8, 3);
    cells.shadow(9);
    let mut sleeper: Sleeper<_> = Sleeper::new(AtomicU32::new(0));
    let mut arming = sleeper.prepare();
    tail.arm(&mut arming);
    let mut fenced = arming.fence();
    assert_eq!(tail.recheck(&mut fenced), Err(InvalidDoorbell { value: 9 }));
    assert!(fenced.try_sleep().is_none(), "the event is reported before a sleep");
    cells.shadow(4);
    assert_eq!(tail.poll(), Ok(3));
}

#[test]
fn every_position_of_the_largest_queue_is_valid() {
    let cells = Cells::default();
    let mut tail = departed(&cells, 65536, 0);
    cells.shadow(65535);
    assert_eq!(tail.poll(), Ok(65535));
    cells.shadow(65536);
    assert_eq!(tail.poll(), Err(InvalidDoorbell { value: 65536 }));
}

#[test]
fn a_head_cannot_pass_the_tail() {
    let cells = Cells::default();
    let mut head: CqHead<_> = CqHead::new(size(8), &cells.register);
    assert_eq!(head.poll(3), Ok(0));
    cells.ring(4);
    assert_eq!(head.poll(3), Err(InvalidDoorbell { value: 4 }));
    assert_eq!(head.poll(3), Ok(0));
    assert_eq!(head.poll(4), Ok(4), "posted meanwhile");
    // A head that moves backwards is interpreted as a move forwards by nearly the whole ring. That
    // move would pass the tail.
    cells.ring(3);
    assert_eq!(head.poll(6), Err(InvalidDoorbell { value: 3 }));
    cells.ring(6);
    assert_eq!(head.poll(6), Ok(6));
    assert_eq!(head.stats().invalid, 2);
}

#[test]
fn event_idx_follows_at_a_distance() {
    let cells = Cells::default();
    let mut tail = departed(&cells, 64, 0);
    assert_eq!(cells.event_idx(), 0);
    let mut stores = 0;
    for value in (1..=64).chain(1..=64) {
        cells.shadow(value % 64);
        tail.poll().unwrap();
        let before = cells.event_idx();
        let behind = (value + 64 - before) % 64;
        assert!((1..=16).contains(&behind), "{value}: {before}");
        stores = tail.stats().event_idx_moved;
    }
    // The tail moves over 128 entries, one at a time. After every 16 entries, EventIdx moves to 2
    // entries behind the tail.
    assert_eq!(stores, 8);
}

#[test]
fn arming_sets_event_idx_and_disarming_restores_it() {
    let cells = Cells::default();
    let mut tail = departed(&cells, 8, 0);
    let mut sleeper: Sleeper<_> = Sleeper::new(AtomicU32::new(0));
    cells.shadow(1);
    assert_eq!((tail.poll(), cells.event_idx()), (Ok(1), 0));

    let mut arming = sleeper.prepare();
    tail.arm(&mut arming);
    assert_eq!(cells.event_idx(), 1);
    let mut fenced = arming.fence();
    assert_eq!(tail.recheck(&mut fenced), Ok(1));
    // A poll between arming and disarming does not change EventIdx.
    assert_eq!((tail.poll(), cells.event_idx()), (Ok(1), 1));
    let asleep = fenced.try_sleep();
    assert!(asleep.is_some());
    drop(asleep);
    tail.disarm(&sleeper);
    assert_eq!(cells.event_idx(), 0);
    // Repeats the sequence at the wrap of the ring. Only the first `disarm` after an `arm` moves
    // EventIdx.
    cells.shadow(0);
    assert_eq!(tail.poll(), Ok(0));
    tail.arm(&mut sleeper.prepare());
    assert_eq!(cells.event_idx(), 0);
    tail.disarm(&sleeper);
    assert_eq!(cells.event_idx(), 7);
    tail.disarm(&sleeper);
    assert_eq!(cells.event_idx(), 7);
    let stats = tail.stats();
    assert_eq!((stats.event_idx_armed, stats.rechecks, stats.rechecks_found), (2, 1, 0));
}

#[test]
fn an_entry_that_has_not_departed_is_not_disarmed() {
    let cells = Cells::default();
    let mut tail = SqTail::new(size(8), &cells.register);
    tail.enable(&cells.shadow, &cells.event_idx).unwrap();
    cells.ring(3);
    assert_eq!(tail.poll(), Ok(3));
    tail.disarm(&Sleeper::<_>::new(AtomicU32::new(0)));
    assert_eq!(cells.event_idx(), 3);
}

#[test]
fn a_recheck_with_news_prevents_sleep() {
    let cells = Cells::default();
    let mut sleeper: Sleeper<_> = Sleeper::new(AtomicU32::new(0));
    for value in [2, 99] {
        let mut tail = departed(&cells, 8, 1);
        let mut arming = sleeper.prepare();
        tail.arm(&mut arming);
        let mut fenced = arming.fence();
        cells.shadow(value);
        assert_eq!(tail.recheck(&mut fenced).is_ok(), value == 2);
        assert!(fenced.try_sleep().is_none());
    }
    assert_eq!(sleeper.stats().stayed_awake, 2);
}

#[test]
fn a_queue_pauses_while_its_shadow_page_is_unmapped() {
    let cells = Cells::default();
    let mut tail = departed(&cells, 8, 2);
    cells.shadow(3);
    assert_eq!(tail.poll(), Ok(3));
    tail.disable();
    cells.shadow(5);
    cells.ring(7);
    assert_eq!(tail.poll(), Ok(3), "neither the unmapped page nor the register");
    tail.arm(&mut Sleeper::<_>::new(AtomicU32::new(0)).prepare());
    assert_eq!(cells.event_idx(), 2, "the unmapped page is not written");
    tail.reattach(&cells.shadow, &cells.event_idx);
    assert_eq!(cells.event_idx(), 3);
    assert_eq!(tail.poll(), Ok(5));
}

#[test]
fn a_register_queue_does_not_depend_on_the_page() {
    let cells = Cells::default();
    let mut tail = SqTail::new(size(8), &cells.register);
    tail.enable(&cells.shadow, &cells.event_idx).unwrap();
    cells.ring(2);
    assert_eq!(tail.poll(), Ok(2));
    tail.disable();
    cells.ring(3);
    assert_eq!(tail.poll(), Ok(3));
}

#[test]
fn new_buffers_for_a_queue_that_has_departed() {
    let (old, new) = (Cells::default(), Cells::default());
    let mut tail = departed(&old, 8, 5);
    tail.enable(&new.shadow, &new.event_idx).unwrap();
    assert_eq!(tail.state(), DoorbellState { last: 5, truth: Truth::Last, snapshot: Some(0) });
    assert_eq!(tail.poll(), Ok(5), "neither the old register nor the new, untouched entry");
    assert_eq!(new.event_idx(), 5);
    new.shadow(6);
    assert_eq!(tail.poll(), Ok(6));
    assert_eq!(tail.state().truth, Truth::Shadow);
}

#[test]
fn a_second_configuration_takes_over_the_pending_value() {
    // Doorbell Buffer Config selects the same entry again, while the entry has a value that the
    // controller has not read.
    let cells = Cells::default();
    let mut tail = departed(&cells, 8, 5);
    cells.shadow(6);
    tail.enable(&cells.shadow, &cells.event_idx).unwrap();
    assert_eq!(tail.poll(), Ok(6));
    cells.shadow(7);
    assert_eq!(tail.poll(), Ok(7));
    // Doorbell Buffer Config selects another entry, whose value is zero.
    let new = Cells::default();
    cells.shadow(0);
    tail.enable(&new.shadow, &new.event_idx).unwrap();
    assert_eq!((tail.poll(), new.event_idx()), (Ok(0), 0));
    new.shadow(3);
    assert_eq!(tail.poll(), Ok(3));
    // An invalid value is reported, and the position does not change any more.
    new.shadow(8);
    let refused = Err(InvalidDoorbell { value: 8 });
    assert_eq!(tail.enable(&cells.shadow, &cells.event_idx), refused);
    assert_eq!(tail.poll(), Ok(3));
}

#[test]
fn a_second_configuration_takes_over_a_head_up_to_the_tail() {
    let (old, new) = (Cells::default(), Cells::default());
    let mut head = CqHead::new(size(8), &old.register);
    head.enable(&old.shadow, &old.event_idx, 0).unwrap();
    old.shadow(1);
    assert_eq!(head.poll(4), Ok(1));
    old.shadow(4);
    head.enable(&new.shadow, &new.event_idx, 4).unwrap();
    assert_eq!(head.poll(4), Ok(4));
    new.shadow(5);
    assert_eq!(head.poll(6), Ok(5));
    new.shadow(7);
    let refused = Err(InvalidDoorbell { value: 7 });
    assert_eq!(head.enable(&old.shadow, &old.event_idx, 6), refused);
}

/// The new entry is zero, and the first update stores zero, so only the register shows the update.
/// A late write of another value to the register is ignored.
#[test]
fn an_update_to_the_value_of_the_new_entry_counts_when_it_is_rung() {
    let (old, new) = (Cells::default(), Cells::default());
    let mut tail = departed(&old, 8, 5);
    tail.enable(&new.shadow, &new.event_idx).unwrap();
    old.ring(4);
    assert_eq!(tail.poll(), Ok(5));
    old.ring(0);
    assert_eq!(tail.poll(), Ok(0));
    assert_eq!(tail.state().truth, Truth::Shadow);
}

#[test]
fn a_doorbell_state_is_resumed_in_another_object() {
    let cells = Cells::default();
    let mut tail = departed(&cells, 8, 2);
    cells.shadow(4);
    assert_eq!(tail.poll(), Ok(4));
    let state = tail.state();
    cells.shadow(6);
    let mut tail = SqTail::resume(size(8), &cells.register, state).unwrap();
    tail.reattach(&cells.shadow, &cells.event_idx);
    assert_eq!(tail.poll(), Ok(6));
    assert!(SqTail::<_>::resume(size(4), &cells.register, state).is_none(), "outside the ring");
}

#[test]
fn a_shadow_entry_is_enabled_when_it_is_mapped() {
    let cells = Cells::default();
    let mut tail = SqTail::new(size(8), &cells.register);
    tail.disable();
    cells.ring(2);
    cells.shadow(6);
    assert_eq!(tail.poll(), Ok(2));
    tail.reattach(&cells.shadow, &cells.event_idx);
    assert_eq!(tail.poll(), Ok(2), "the first content of the entry is its snapshot");
    cells.shadow(3);
    assert_eq!(tail.poll(), Ok(3));
}

#[test]
fn a_peek_returns_the_next_value_without_consuming_it() {
    let cells = Cells::default();
    let mut tail: SqTail<_> = SqTail::new(size(8), &cells.register);
    cells.ring(5);
    assert_eq!((tail.peek(), tail.last()), (5, 0));
    assert_eq!(tail.poll(), Ok(5));
    // Between Doorbell Buffer Config and the next poll, it is undecided whether the register or the
    // shadow entry is the source of the value. A peek then returns the last value.
    cells.shadow(3);
    tail.enable(&cells.shadow, &cells.event_idx).unwrap();
    cells.ring(6);
    assert_eq!(tail.peek(), 5);

    let mut tail = departed(&cells, 8, 2);
    cells.shadow(7);
    let (polls, event_idx) = (tail.stats().polls, cells.event_idx());
    assert_eq!((tail.peek(), tail.last()), (7, 2));
    assert_eq!((tail.stats().polls, cells.event_idx()), (polls, event_idx));
    // If a poll would refuse the value, a peek returns the last valid value.
    for invalid in [8, 0x1_0003, u32::MAX] {
        cells.shadow(invalid);
        assert_eq!((tail.peek(), tail.last()), (2, 2), "{invalid:#x}");
    }
    cells.shadow(7);
    assert_eq!(tail.poll(), Ok(7));
}
