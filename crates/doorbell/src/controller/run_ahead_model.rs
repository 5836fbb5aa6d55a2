//! Exhaustive model of a polling controller and a host, for small rings: finds the states in which
//! EventIdx makes the host ring without need.
//!
//! The modelled memory is sequentially consistent, with one exception: the controller's store to
//! EventIdx may stay invisible until the controller posts the next completion (a release store).
//! The host's update is either one step, or two steps with arbitrary events between its shadow
//! store and its EventIdx load.

use core::sync::atomic::{AtomicU32, Ordering};
use std::collections::HashMap;

use super::{Doorbell, DoorbellState, Shadow, Truth};
use crate::{Predicate, RingSize};

/// Model state: distances modulo the ring instead of positions, so that one state stands for all
/// positions in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct State {
    /// Commands fetched and not completed.
    fetched: u32,
    /// Entries submitted since the controller's last poll.
    unseen: u32,
    /// Distance from the EventIdx that the host can see to the last value that the controller has
    /// seen.
    visible: u32,
    /// Distance from the EventIdx that the controller has stored to the last value that it has
    /// seen.
    published: u32,
    /// Entries of the host's unfinished update; 0 if there is none.
    unfinished: u32,
}

/// Transition to a successor state.
#[derive(Clone, Copy, Debug)]
struct Step {
    next: State,
    /// Number of entries submitted.
    entries: u32,
    /// True if the host rang.
    rang: bool,
}

#[derive(Clone, Copy)]
struct Model {
    size: RingSize,
    predicate: Predicate,
    /// Maximum number of outstanding commands.
    depth: u32,
    /// Maximum number of entries per update.
    batch: u32,
    /// True if events may happen between the host's store to the shadow entry and its load of
    /// EventIdx.
    caught: bool,
    /// Position in the ring that stands for the last value seen when the shipped code is executed.
    origin: u16,
}

impl Model {
    fn start(&self) -> State {
        State { fetched: 0, unseen: 0, visible: 1, published: 1, unfinished: 0 }
    }

    /// True if the host rings for the update that moved the tail by `moved` entries, to `unseen`
    /// entries after the last value seen.
    fn rings(&self, state: &State, moved: u32) -> bool {
        let last = self.origin;
        let new = self.size.forward(last, state.unseen);
        let old = self.size.back(new, moved);
        let event_idx = self.size.back(last, state.visible);
        self.predicate.needs_mmio(u32::from(event_idx), old, new)
    }

    /// Executes one poll of the shipped code.
    fn poll(&self, state: &State) -> State {
        let value = AtomicU32::new(0);
        let event_idx = AtomicU32::new(0);
        let register = AtomicU32::new(0);
        let last = self.origin;
        value.store(u32::from(self.size.forward(last, state.unseen)), Ordering::Relaxed);
        let departed = DoorbellState { last, truth: Truth::Shadow, snapshot: Some(u32::MAX) };
        let mut doorbell = Doorbell::new(self.size, &register, departed);
        doorbell.shadow = Some(Shadow {
            value: &value,
            event_idx: &event_idx,
            published: self.size.back(last, state.published),
        });
        let seen = doorbell.poll(RingSize::MAX).unwrap();
        let published = doorbell.shadow.unwrap().published;
        State {
            fetched: state.fetched + state.unseen,
            unseen: 0,
            visible: self.size.distance(self.size.back(last, state.visible), seen),
            published: self.size.distance(published, seen),
            unfinished: state.unfinished,
        }
    }

    fn steps(&self, state: State, mut visit: impl FnMut(Step)) {
        let quiet = |next| Step { next, entries: 0, rang: false };
        let outstanding = state.fetched + state.unseen;
        if state.unfinished > 0 {
            // The controller may have seen the new tail in the meantime; then `unseen` is 0.
            // Otherwise the tail is `unseen` entries after the last value seen.
            let rang = self.rings(&state, state.unfinished);
            visit(Step { rang, ..quiet(State { unfinished: 0, ..state }) });
        } else {
            for moved in 1..=self.batch.min(self.depth - outstanding) {
                let next = State { unseen: state.unseen + moved, ..state };
                if self.caught {
                    let next = State { unfinished: moved, ..next };
                    visit(Step { next, entries: moved, rang: false });
                } else {
                    visit(Step { next, entries: moved, rang: self.rings(&next, moved) });
                }
            }
        }
        if state.visible == state.published {
            visit(quiet(self.poll(&state)));
        } else {
            visit(quiet(State { visible: state.published, ..state }));
        }
        // A posted completion makes the EventIdx visible that was stored before it.
        if state.fetched > 0 && state.visible == state.published {
            visit(quiet(State { fetched: state.fetched - 1, ..state }));
        }
    }

    /// Returns all reachable states.
    fn explore(&self) -> (Vec<State>, HashMap<State, usize>) {
        let mut states = vec![self.start()];
        let mut index = HashMap::from([(self.start(), 0)]);
        let mut at = 0;
        while at < states.len() {
            let state = states[at];
            at += 1;
            self.steps(state, |step| {
                index.entry(step.next).or_insert_with(|| {
                    states.push(step.next);
                    states.len() - 1
                });
            });
        }
        (states, index)
    }

    /// Returns the first step in which the host rings, if any.
    fn find_ring(&self) -> Option<(State, Step)> {
        let mut found = None;
        for state in self.explore().0 {
            self.steps(state, |step| {
                if step.rang && found.is_none() {
                    found = Some((state, step));
                }
            });
        }
        found
    }

    /// True if an endless schedule exists in which the host rings more than `rings` times per
    /// `entries` submitted.
    fn exceeds(&self, rings: i64, entries: i64) -> bool {
        let (states, index) = self.explore();
        let mut edges = Vec::new();
        for (from, &state) in states.iter().enumerate() {
            self.steps(state, |step| {
                let gain = i64::from(step.rang) * entries - i64::from(step.entries) * rings;
                edges.push((from, index[&step.next], gain));
            });
        }
        // The searched schedule is a cycle with a positive gain. On it, the longest paths grow
        // without a limit.
        let mut best = vec![0i64; states.len()];
        for _ in 0..=states.len() {
            let mut changed = false;
            for &(from, to, gain) in &edges {
                if best[from] + gain > best[to] {
                    best[to] = best[from] + gain;
                    changed = true;
                }
            }
            if !changed {
                return false;
            }
            // A path that visits no state twice gains less than this bound.
            if best.iter().any(|&gain| gain > entries * states.len() as i64) {
                return true;
            }
        }
        true
    }
}

fn ring(entries: u32) -> RingSize {
    RingSize::new(entries).unwrap()
}

/// Largest queue depth at which the host never rings while the controller polls: see the crate's
/// documentation.
fn quiet_depth(predicate: Predicate, entries: u32) -> u32 {
    let quarter = (entries / 4).max(1);
    match predicate {
        Predicate::Linux => entries - quarter,
        Predicate::SpdkInclusive => entries - quarter - 1,
    }
}

const PREDICATES: [Predicate; 2] = [Predicate::Linux, Predicate::SpdkInclusive];

#[test]
fn no_ring_up_to_three_quarters_of_the_queue() {
    for entries in (2..=24).chain([32]) {
        for predicate in PREDICATES {
            let size = ring(entries);
            let depth = quiet_depth(predicate, entries).min(entries - 1);
            assert!(entries < 3 || depth >= 1, "{entries}");
            assert!(entries < 5 || depth >= entries / 2, "{entries}");
            let origin = (entries / 2) as u16;
            let model = Model { size, predicate, depth, batch: depth, caught: false, origin };
            assert_eq!(model.find_ring().map(|(s, _)| s), None, "{entries} {predicate:?}");
        }
    }
}

#[test]
fn the_quiet_depth_is_independent_of_the_ring_position() {
    for entries in [2, 3, 5, 8, 12] {
        for predicate in PREDICATES {
            let depth = quiet_depth(predicate, entries).min(entries - 1);
            for origin in 0..entries as u16 {
                let size = ring(entries);
                let model = Model { size, predicate, depth, batch: depth, caught: false, origin };
                assert_eq!(model.find_ring().map(|(s, _)| s), None, "{entries} at {origin}");
            }
        }
    }
}

#[test]
fn the_promise_is_exact_and_the_model_can_fail() {
    // EventIdx does not move while it is at most a quarter of the ring behind the last value seen.
    // From this distance, the tail passes EventIdx after `quiet_depth` plus one commands.
    for entries in [4, 5, 8, 12, 16, 32] {
        for predicate in PREDICATES {
            let depth = quiet_depth(predicate, entries) + 1;
            if depth > entries - 1 {
                continue;
            }
            let size = ring(entries);
            let model = Model { size, predicate, depth, batch: depth, caught: false, origin: 1 };
            assert!(model.find_ring().is_some(), "{entries} {predicate:?}");
        }
    }
}

#[test]
fn a_small_update_in_progress_needs_no_register_write() {
    for entries in (8..=20).chain([24, 32]) {
        for predicate in PREDICATES {
            let depth = quiet_depth(predicate, entries);
            let batch = entries / 8;
            let model =
                Model { size: ring(entries), predicate, depth, batch, caught: true, origin: 3 };
            assert_eq!(model.find_ring().map(|(s, _)| s), None, "{entries} {predicate:?}");
        }
    }
}

/// Limit of the number of rings at greater depths: with a full queue, Linux rings at most three
/// times per turn of the ring and SPDK five times, in any schedule.
#[test]
fn a_full_queue_rings_a_few_times_per_turn_at_worst() {
    for entries in [8, 12, 16] {
        for (predicate, worst) in [(Predicate::Linux, 3), (Predicate::SpdkInclusive, 5)] {
            let (size, depth) = (ring(entries), entries - 1);
            let model = Model { size, predicate, depth, batch: depth, caught: false, origin: 0 };
            let turn = i64::from(entries);
            assert!(!model.exceeds(worst, turn), "{entries} {predicate:?}");
            assert!(model.exceeds(worst - 1, turn), "{entries} {predicate:?}: the bound is slack");
        }
    }
}
