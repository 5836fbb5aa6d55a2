//! Submissions while the controller goes to sleep, also at the end of the ring.

use loom::thread;
use shadowbell_doorbell::{Fence, FullFence, Predicate};
use std::sync::Arc;

use crate::rig::{
    DoorbellCells, Entries, Event, PREDICATES, explore, in_use, ring, serve, sleep_pair,
};

/// A host that submits `count` entries one by one from position `from` on, and a controller that
/// sleeps whenever there is no entry to fetch.
pub(crate) fn submit<H: Fence, S: Fence, W: Fence>(
    predicate: Predicate,
    entries: u32,
    from: u16,
    count: u32,
) {
    let size = ring(entries);
    let cells = DoorbellCells::at(size.back(from, 1));
    let (mut doorbell, mut tail) = in_use::<H>(&cells, size, from);
    let memory = Entries::new(size);
    let (mut sleeper, wake) = sleep_pair::<S, W>();
    let end = size.forward(from, count);

    let host = {
        let (cells, memory, wake) = (cells.clone(), memory.clone(), wake.clone());
        thread::spawn(move || {
            for i in 0..count {
                let at = size.forward(from, i);
                memory.write(at);
                wake.update(&mut doorbell, predicate, &cells.register, size.forward(at, 1));
            }
        })
    };

    serve(&mut tail, &memory, end, &mut sleeper, &wake);
    host.join().unwrap();
}

#[test]
fn no_wakeup_is_lost() {
    for predicate in PREDICATES {
        explore(None, move || submit::<FullFence, FullFence, FullFence>(predicate, 8, 0, 1));
        explore(Some(3), move || submit::<FullFence, FullFence, FullFence>(predicate, 8, 0, 3));
    }
}

#[test]
fn no_wakeup_is_lost_at_the_wrap_of_the_ring() {
    for predicate in PREDICATES {
        for (entries, from) in [(2, 1), (3, 2), (3, 1), (4, 3), (4, 2)] {
            explore(Some(3), move || {
                submit::<FullFence, FullFence, FullFence>(predicate, entries, from, entries - 1);
            });
        }
    }
}

/// With `publish_deferred`, the host evaluates the predicate for an update only at the next update.
/// For the last update, it does so before it waits.
#[test]
fn no_wakeup_is_lost_with_a_deferred_predicate() {
    for count in [1, 2, 3] {
        explore(Some(3), move || {
            let size = ring(8);
            let cells = DoorbellCells::at(7);
            let (mut doorbell, mut tail) = in_use::<FullFence>(&cells, size, 0);
            let memory = Entries::new(size);
            let (mut sleeper, wake) = sleep_pair::<FullFence, FullFence>();
            let host = {
                let (cells, memory, wake) = (cells.clone(), memory.clone(), wake.clone());
                thread::spawn(move || {
                    for at in 0..count {
                        memory.write(at);
                        let mmio = doorbell.publish_deferred(at + 1);
                        if mmio {
                            wake.trap(&cells.register, at + 1);
                        }
                    }
                    let mmio = doorbell.needs_notification();
                    if mmio {
                        wake.trap(&cells.register, count);
                    }
                })
            };
            serve(&mut tail, &memory, count, &mut sleeper, &wake);
            host.join().unwrap();
        });
    }
}

/// The host submits more entries than a ring of two entries has, so the ring wraps. It waits for
/// room before each entry. EventIdx has only two possible values.
#[test]
fn no_wakeup_is_lost_over_several_turns() {
    for predicate in PREDICATES {
        explore(Some(3), move || {
            let size = ring(2);
            let cells = DoorbellCells::at(0);
            let (mut doorbell, mut tail) = in_use::<FullFence>(&cells, size, 1);
            let memory = Entries::new(size);
            let room = Arc::new(Event::default());
            let (mut sleeper, wake) = sleep_pair::<FullFence, FullFence>();
            let host = {
                let (cells, memory, wake) = (cells.clone(), memory.clone(), wake.clone());
                let room = room.clone();
                thread::spawn(move || {
                    for at in [1, 0, 1] {
                        memory.write(at);
                        wake.update(&mut doorbell, predicate, &cells.register, size.forward(at, 1));
                        room.wait();
                    }
                })
            };
            for end in [0, 1, 0] {
                serve(&mut tail, &memory, end, &mut sleeper, &wake);
                room.signal();
            }
            host.join().unwrap();
        });
    }
}

/// While the controller polls and does not sleep, the host never writes the register, because
/// EventIdx moves in time.
#[test]
fn polling_costs_no_mmio() {
    for predicate in PREDICATES {
        explore(Some(4), move || {
            let size = ring(16);
            let cells = DoorbellCells::at(14);
            let (mut doorbell, mut tail) = in_use::<FullFence>(&cells, size, 15);
            let host = thread::spawn(move || {
                for at in [0, 1, 2] {
                    assert!(!doorbell.publish_with(predicate, at), "an MMIO write for nothing");
                }
            });
            for _ in 0..3 {
                tail.poll().unwrap();
            }
            host.join().unwrap();
        });
    }
    // With a deferred predicate, the host does not ring either.
    explore(Some(4), move || {
        let size = ring(16);
        let cells = DoorbellCells::at(14);
        let (mut doorbell, mut tail) = in_use::<FullFence>(&cells, size, 15);
        let host = thread::spawn(move || {
            for at in [0, 1, 2] {
                assert!(!doorbell.publish_deferred(at), "an MMIO write for nothing");
            }
            assert!(!doorbell.needs_notification(), "an MMIO write for nothing");
        });
        for _ in 0..3 {
            tail.poll().unwrap();
        }
        host.join().unwrap();
    });
}
