//! A hostile host's doorbell values, in a register or in a shadow entry, and a model of their
//! validation.
//!
//! After each read of the doorbell (a look), this body checks the following. The position is that
//! of the last valid value. An invalid value is reported once, and does not permit a sleep. A
//! submission queue has stopped after an invalid tail. EventIdx is a position of the ring.

use crate::limits::Limits;
use crate::source::Source;
use shadowbell_doorbell::{
    CqHead, DoorbellState, FullFence, InvalidDoorbell, RingSize, Sleeper, SqTail, Truth,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

type Word = Arc<AtomicU32>;
type Look = Result<u16, InvalidDoorbell>;

/// Cells of one doorbell.
#[derive(Default)]
struct Cells {
    register: Word,
    shadow: Word,
    event_idx: Word,
    /// True if the shadow entry is the source of the value.
    is_shadow: bool,
}

impl Cells {
    fn source(&self) -> &Word {
        if self.is_shadow { &self.shadow } else { &self.register }
    }

    fn state(&self) -> DoorbellState {
        let truth = if self.is_shadow { Truth::Shadow } else { Truth::Register };
        DoorbellState { last: 0, truth, snapshot: self.is_shadow.then_some(0) }
    }

    /// Stores a doorbell value as a host does: mostly near the last value, and sometimes any value.
    fn write(&self, source: &mut Source<'_>, last: u16, entries: u32) -> u32 {
        let near = u64::from(last).saturating_add(source.below(4) as u64);
        let value = source.near(&[near, entries.into(), u64::from(entries) - 1, 0]) as u32;
        self.source().store(value, Ordering::Release);
        value
    }
}

/// Runs the program that `input` encodes.
pub fn run(input: &[u8]) {
    let mut source = Source::new(input);
    let limits = Limits::begin();
    while !source.is_empty() {
        let entries = source.of(&[2, 3, 8, 64, 4096, RingSize::MAX]);
        let size = RingSize::new(entries).expect("a size of a ring");
        let cells = Cells { is_shadow: source.bool(), ..Cells::default() };
        if source.bool() {
            tails(&mut source, size, &cells);
        } else {
            heads(&mut source, size, &cells);
        }
        limits.step("doorbell");
    }
}

/// Checks the result of one read of the doorbell, after which the thread may have slept.
fn check(cells: &Cells, entries: u32, (look, slept): (Look, bool), expected: Look) {
    assert_eq!(look, expected);
    assert!(look.is_ok() || !slept, "the thread sleeps with an error to report");
    assert!(cells.event_idx.load(Ordering::Acquire) < entries, "EventIdx is outside of the ring");
}

fn tails(source: &mut Source<'_>, size: RingSize, cells: &Cells) {
    let tail = SqTail::<Word>::resume(size, Arc::clone(&cells.register), cells.state());
    let mut tail = tail.expect("a valid state");
    if cells.is_shadow {
        tail.reattach(Arc::clone(&cells.shadow), Arc::clone(&cells.event_idx));
    }
    let mut sleeper: Sleeper<Word, FullFence> = Sleeper::new(Arc::default());
    let entries = size.entries();
    let (mut last, mut is_stopped) = (0, false);
    for _ in 0..source.below(32) {
        let value = cells.write(source, last, entries);
        let expected = match value {
            _ if is_stopped => Ok(last),
            valid if valid < entries => Ok(valid as u16),
            value => Err(InvalidDoorbell { value }),
        };
        assert!(u32::from(tail.peek()) < entries, "a hint outside of the ring");
        let look = if source.bool() {
            (tail.poll(), false)
        } else {
            let mut arming = sleeper.prepare();
            tail.arm(&mut arming);
            let mut fenced = arming.fence();
            let look = tail.recheck(&mut fenced);
            let slept = fenced.try_sleep().is_some();
            tail.disarm(&sleeper);
            (look, slept)
        };
        check(cells, entries, look, expected);
        (last, is_stopped) = (expected.unwrap_or(last), is_stopped || expected.is_err());
        assert_eq!(tail.last(), last);
    }
}

fn heads(source: &mut Source<'_>, size: RingSize, cells: &Cells) {
    let head = CqHead::<Word>::resume(size, Arc::clone(&cells.register), cells.state());
    let mut head = head.expect("a valid state");
    if cells.is_shadow {
        head.reattach(Arc::clone(&cells.shadow), Arc::clone(&cells.event_idx));
    }
    let mut sleeper: Sleeper<Word, FullFence> = Sleeper::new(Arc::default());
    let entries = size.entries();
    let ahead = |from: u16, to: u32| (to + entries - u32::from(from)) % entries;
    let (mut last, mut posted, mut reported) = (0, 0u32, None);
    for _ in 0..source.below(32) {
        // The controller posts at most as many entries as there is room for.
        let room = entries - 1 - ahead(last, posted);
        posted = (posted + source.below(room as usize + 1) as u32) % entries;
        let value = cells.write(source, last, entries);
        let is_valid = value < entries && ahead(last, value) <= ahead(last, posted);
        let expected = match value {
            valid if is_valid => Ok(valid as u16),
            known if reported == Some(known) => Ok(last),
            value => Err(InvalidDoorbell { value }),
        };
        let look = if source.bool() {
            (head.poll(posted as u16), false)
        } else {
            let mut arming = sleeper.prepare();
            head.arm(&mut arming);
            let mut fenced = arming.fence();
            let look = head.recheck(&mut fenced, posted as u16);
            let slept = fenced.try_sleep().is_some();
            head.disarm(&sleeper);
            (look, slept)
        };
        check(cells, entries, look, expected);
        match expected {
            // An invalid value is reported again only if the head has moved since the first report.
            Ok(seen) if is_valid && seen != last => (last, reported) = (seen, None),
            Ok(_) => {}
            Err(error) => reported = Some(error.value),
        }
        assert_eq!(head.last(), last);
    }
}
