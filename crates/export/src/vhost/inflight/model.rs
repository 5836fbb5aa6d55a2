//! Exhaustive model of the in-flight tracking. It explores every interleaving of a guest, a device,
//! a disk and deaths of the device's process, for a few requests. If the order of stores is wrong,
//! a request is lost, is answered twice, or overwrites newer data.
//!
//! The stores are those of the [`Tracker`]. A process may die before any store, also during
//! recovery. The disk executes requests in any order, including those of a dead process. The guest
//! reuses a descriptor and an entry of the available ring as soon as the specification permits.

use super::layout::Words;
use super::tracker::TrackerState;
use super::{Found, Tracker};
use std::cell::RefCell;
use std::collections::HashSet;

const ENTRIES: u16 = 3;
const WORDS: usize = 2 + 2 * ENTRIES as usize;
/// Block that each request writes. The guest creates a request after the previous request to the
/// same block was answered.
const BLOCKS: [usize; 5] = [0, 1, 2, 0, 1];
const MAX_CRASHES: u8 = 2;

/// Deliberate mistake: a step that is omitted or in the wrong order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    UnmarkedBeforeUsed,
    IndexBeforeUnmarked,
    ListedAfterUsed,
    NeverListed,
    MarkedBeforeNumbered,
    NeverMarked,
    RecoveredIndexFirst,
    OnlyAnsweredAreCounted,
    NoFence,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Store {
    Word(usize, u64),
    /// Appends the head to the used ring, and increments the ring's index.
    Used(u16),
}

/// Memory that only records the stores, so that they do not become visible.
struct Log {
    words: RefCell<[u64; WORDS]>,
    stores: RefCell<Vec<Store>>,
}

impl Words for &Log {
    fn load(&self, at: usize) -> u64 {
        self.words.borrow()[at / 8]
    }

    fn store(&self, at: usize, word: u64) {
        self.words.borrow_mut()[at / 8] = word;
        self.stores.borrow_mut().push(Store::Word(at / 8, word));
    }
}

/// Volatile state of a process: it is lost when the process dies.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Process {
    number: u8,
    tracker: TrackerState,
    available: u16,
    replays: Vec<u16>,
    /// Requests that the disk has completed, and that the process has not answered.
    ended: Vec<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    // State of the guest, in memory that it shares with the device.
    made: u8,
    requests: [Option<u8>; ENTRIES as usize],
    /// Contents of the descriptors, including those of answered requests.
    descriptors: [u8; ENTRIES as usize],
    ring: [u16; ENTRIES as usize],
    available: u16,
    used: Vec<u16>,
    seen: u16,
    acknowledged: [Option<u8>; 3],
    // State of the disk.
    blocks: [Option<u8>; 3],
    in_hand: Vec<(u8, u16, u8)>,
    /// Tracking memory, which the frontend keeps when a process dies.
    words: [u64; WORDS],
    /// Number of processes that have been started.
    processes: u8,
    process: Option<Process>,
    /// Requests that were marked and have not been answered since, in the order of the marks.
    order: Vec<u16>,
}

struct Model {
    mistake: Option<Mistake>,
}

/// Violation: a request is lost, is answered twice, or is older than another one that it
/// overwrites.
type Wrong = &'static str;

impl State {
    fn new() -> Self {
        Self {
            made: 0,
            requests: [None; ENTRIES as usize],
            descriptors: [0; ENTRIES as usize],
            ring: [0; ENTRIES as usize],
            available: 0,
            used: Vec::new(),
            seen: 0,
            acknowledged: [None; 3],
            blocks: [None; 3],
            in_hand: Vec::new(),
            words: [0; WORDS],
            processes: 0,
            process: None,
            order: Vec::new(),
        }
    }

    fn is_over(&self) -> bool {
        usize::from(self.made) == BLOCKS.len() && self.requests == [None; ENTRIES as usize]
    }

    fn log(&self) -> Log {
        Log { words: RefCell::new(self.words), stores: RefCell::default() }
    }

    fn apply(&mut self, store: Store) {
        match store {
            Store::Word(at, word) => {
                self.words[at] = word;
                let is_mark = at >= 2 && at % 2 == 0 && word.to_ne_bytes()[0] == 1;
                let head = (at as u16).wrapping_sub(2) / 2;
                if is_mark && !self.order.contains(&head) {
                    self.order.push(head);
                }
            }
            Store::Used(head) => {
                self.used.push(head);
                self.order.retain(|other| *other != head);
            }
        }
    }

    /// Adds one state to `next` for each store: the process has died directly after this store.
    /// Returns the state after all stores.
    fn crashes(&self, model: &Model, stores: &[Store], next: &mut Vec<Self>) -> Self {
        let mut state = self.clone();
        for store in stores {
            if model.may_die(self) {
                next.push(Self { process: None, ..state.clone() });
            }
            state.apply(*store);
        }
        state
    }
}

impl Model {
    fn is(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    fn may_die(&self, state: &State) -> bool {
        state.processes <= MAX_CRASHES
    }

    fn next(&self, state: &State) -> Result<Vec<State>, Wrong> {
        let mut next = Vec::new();
        self.guest(state, &mut next)?;
        self.disk(state, &mut next)?;
        match &state.process {
            None => self.start(state, &mut next)?,
            Some(process) => {
                if self.may_die(state) {
                    next.push(State { process: None, ..state.clone() });
                }
                self.take(state, process, &mut next);
                self.reply(state, process, &mut next);
            }
        }
        Ok(next)
    }

    fn guest(&self, state: &State, next: &mut Vec<State>) -> Result<(), Wrong> {
        if let Some(block) = BLOCKS.get(usize::from(state.made)) {
            let free = state.requests.iter().position(Option::is_none);
            let is_written =
                state.requests.iter().flatten().any(|n| BLOCKS[usize::from(*n)] == *block);
            if let Some(head) = free.filter(|_| !is_written) {
                let mut state = state.clone();
                state.requests[head] = Some(state.made);
                state.descriptors[head] = state.made;
                state.ring[usize::from(state.available % ENTRIES)] = head as u16;
                state.available += 1;
                state.made += 1;
                next.push(state);
            }
        }
        if let Some(head) = state.used.get(usize::from(state.seen)) {
            let mut state = state.clone();
            let request = state.requests[usize::from(*head)].take().ok_or("answered twice")?;
            let block = BLOCKS[usize::from(request)];
            state.acknowledged[block] = Some(request);
            if state.blocks[block] < Some(request) {
                return Err("answered, and not done");
            }
            state.seen += 1;
            next.push(state);
        }
        Ok(())
    }

    fn disk(&self, state: &State, next: &mut Vec<State>) -> Result<(), Wrong> {
        for nth in 0..state.in_hand.len() {
            let mut state = state.clone();
            let (number, head, request) = state.in_hand.remove(nth);
            let block = BLOCKS[usize::from(request)];
            state.blocks[block] = Some(request);
            if state.blocks[block] < state.acknowledged[block] {
                return Err("an old write over a newer one");
            }
            if let Some(process) = state.process.as_mut().filter(|it| it.number == number) {
                process.ended.push(head);
                process.ended.sort_unstable();
            }
            next.push(state);
        }
        Ok(())
    }

    fn start(&self, state: &State, next: &mut Vec<State>) -> Result<(), Wrong> {
        // Fence: the next process starts after all I/O of the dead process has ended.
        if !state.in_hand.is_empty() && !self.is(Mistake::NoFence) {
            return Ok(());
        }
        let log = state.log();
        let used = state.used.len() as u16;
        let started = Tracker::start(&log, ENTRIES, ENTRIES, used);
        let (tracker, found) = started.map_err(|_| "what was left makes no sense")?;
        let tracker = tracker.state();
        let found = found.unwrap_or(Found { heads: Vec::new(), available: 0 });
        if found.heads != state.order
            && self.mistake.is_none_or(|it| it == Mistake::MarkedBeforeNumbered)
        {
            return Err("carried out again in another order");
        }
        let mut stores = log.stores.into_inner();
        if self.is(Mistake::RecoveredIndexFirst) {
            stores.rotate_right(1);
        }
        let counted = if self.is(Mistake::OnlyAnsweredAreCounted) { used } else { found.available };
        let mut state = state.clone();
        state.processes += 1;
        let mut after = state.crashes(self, &stores, next);
        after.process = Some(Process {
            number: state.processes,
            tracker,
            available: counted,
            replays: found.heads,
            ended: Vec::new(),
        });
        next.push(after);
        Ok(())
    }

    fn take(&self, state: &State, process: &Process, next: &mut Vec<State>) {
        let mut process = process.clone();
        let (head, is_new) = match process.replays.is_empty() {
            false => (process.replays.remove(0), false),
            true if process.available >= state.available => return,
            true => {
                let head = state.ring[usize::from(process.available % ENTRIES)];
                process.available += 1;
                (head, true)
            }
        };
        let mut stores = Vec::new();
        if is_new {
            let log = state.log();
            let mut tracker = Tracker::with_state(&log, process.tracker);
            tracker.taken(head);
            process.tracker = tracker.state();
            stores = log.stores.into_inner();
            match self.mistake {
                Some(Mistake::MarkedBeforeNumbered) => stores.reverse(),
                Some(Mistake::NeverMarked) => stores.truncate(1),
                _ => {}
            }
        }
        let mut after = state.crashes(self, &stores, next);
        after.in_hand.push((process.number, head, state.descriptors[usize::from(head)]));
        after.process = Some(process);
        next.push(after);
    }

    fn reply(&self, state: &State, process: &Process, next: &mut Vec<State>) {
        for nth in 0..process.ended.len() {
            let mut process = process.clone();
            let head = process.ended.remove(nth);
            let log = state.log();
            let mut tracker = Tracker::with_state(&log, process.tracker);
            tracker.answering(head);
            log.stores.borrow_mut().push(Store::Used(head));
            tracker.replied(head, state.used.len() as u16 + 1);
            process.tracker = tracker.state();
            let mut stores = log.stores.into_inner();
            let [_, _, _, _, _] = stores[..] else { unreachable!("{stores:?}") };
            match self.mistake {
                Some(Mistake::UnmarkedBeforeUsed) => stores.swap(2, 3),
                Some(Mistake::IndexBeforeUnmarked) => stores.swap(3, 4),
                Some(Mistake::ListedAfterUsed) => stores.swap(1, 2),
                Some(Mistake::NeverListed) => {
                    stores.remove(1);
                }
                _ => {}
            }
            let mut after = state.crashes(self, &stores, next);
            after.process = Some(process);
            next.push(after);
        }
    }

    /// Explores all states. Returns their number, or the first violation.
    fn explore(&self) -> Result<usize, Wrong> {
        let mut known = HashSet::from([State::new()]);
        let mut open = vec![State::new()];
        while let Some(state) = open.pop() {
            let next = self.next(&state)?;
            if next.is_empty() && !state.is_over() {
                return Err("a request is lost");
            }
            open.extend(next.into_iter().filter(|state| known.insert(state.clone())));
        }
        Ok(known.len())
    }
}

#[test]
fn no_request_is_lost_or_completed_twice() {
    let states = Model { mistake: None }.explore().unwrap();
    println!("{states} states");
    assert!(states > 10_000, "{states} states are too few to say anything");
}

#[test]
fn each_mistake_is_found() {
    for (mistake, wrong) in [
        (Mistake::UnmarkedBeforeUsed, "answered twice"),
        (Mistake::IndexBeforeUnmarked, "answered twice"),
        (Mistake::ListedAfterUsed, "answered twice"),
        (Mistake::NeverListed, "answered twice"),
        (Mistake::MarkedBeforeNumbered, "carried out again in another order"),
        (Mistake::NeverMarked, "answered twice"),
        (Mistake::RecoveredIndexFirst, "answered twice"),
        (Mistake::OnlyAnsweredAreCounted, "answered twice"),
        // Without the fence, an old write overwrites a newer one.
        (Mistake::NoFence, "answered, and not done"),
    ] {
        let found = Model { mistake: Some(mistake) }.explore();
        println!("{mistake:?}: {found:?}");
        assert_eq!(found, Err(wrong), "{mistake:?}");
    }
}
