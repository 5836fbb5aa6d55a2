//! Doorbell Buffer Config with commands in flight. Some hosts use shadow doorbells on the queue
//! afterwards, and others do not.

use loom::sync::atomic::Ordering;
use loom::thread;
use shadowbell_doorbell::{
    Cell, Fence, FullFence, HostDoorbell, Predicate, RingSize, Sleeper, SqTail,
};
use std::sync::Arc;

use crate::rig::{
    DoorbellCells, Entries, Event, PREDICATES, Wake, Word, by_register, explore, in_use, is_set,
    ring, sleep_pair, word,
};

/// State of the Doorbell Buffer Config command, as two flags: the host has submitted it, and the
/// controller has completed it.
#[derive(Clone)]
struct Config {
    submitted: Word,
    completed: Word,
}

impl Config {
    fn new() -> Self {
        Self { submitted: word(0), completed: word(0) }
    }

    fn submit(&self, wake: &Wake) {
        self.submitted.store(1, Ordering::Release);
        wake.kick();
    }
}

/// Function that executes Doorbell Buffer Config for one doorbell.
type Enable = dyn Fn(SqTail<Word>, &DoorbellCells) -> SqTail<Word>;

/// Executes Doorbell Buffer Config as the shipped code does.
pub(crate) fn enable(mut tail: SqTail<Word>, cells: &DoorbellCells) -> SqTail<Word> {
    tail.enable(cells.shadow.clone(), cells.event_idx.clone()).unwrap();
    tail
}

/// Controller that fetches `count` entries from position `from` on, and executes Doorbell Buffer
/// Config when it finds the command. Calls `progress` with the number of fetched entries, and with
/// true once Doorbell Buffer Config is complete.
struct Controller {
    cells: DoorbellCells,
    size: RingSize,
    from: u16,
    count: u32,
    config: Config,
    entries: Arc<Entries>,
}

impl Controller {
    fn run(self, sleeper: &mut Sleeper<Word>, wake: &Wake, progress: impl Fn(u32, bool)) {
        let register = self.cells.register.clone();
        let tail = SqTail::resume(self.size, register, by_register(self.from)).unwrap();
        self.run_with(tail, &enable, sleeper, wake, progress);
    }

    /// Variant of [`run`](Self::run): the caller supplies the state of the queue's tail before
    /// Doorbell Buffer Config, and the function that executes this command.
    fn run_with(
        self,
        mut tail: SqTail<Word>,
        enable: &Enable,
        sleeper: &mut Sleeper<Word>,
        wake: &Wake,
        progress: impl Fn(u32, bool),
    ) {
        let Self { cells, size, from, count, config, entries } = self;
        let (mut at, mut left, mut enabled) = (from, count, false);
        loop {
            if !enabled && is_set(&config.submitted) {
                tail = enable(tail, &cells);
                enabled = true;
                config.completed.store(1, Ordering::Release);
            }
            let seen = tail.poll().unwrap();
            let moved = size.distance(at, seen);
            assert!(moved <= left, "the tail moved backwards");
            entries.fetch(size, at, seen);
            (at, left) = (seen, left - moved);
            progress(count - left, enabled);
            if left == 0 && enabled {
                break;
            }
            if moved == 0 {
                let mut arming = sleeper.prepare();
                tail.arm(&mut arming);
                let mut fenced = arming.fence();
                fenced.note(!enabled && is_set(&config.submitted));
                tail.recheck(&mut fenced).unwrap();
                if let Some(_asleep) = fenced.try_sleep() {
                    wake.event.wait();
                }
            }
        }
    }
}

/// Source of the old value in the predicate of another host implementation.
#[derive(Clone, Copy)]
enum Old {
    /// The shadow entry, as in Linux and SPDK.
    Shadow,
    /// Private memory of the host.
    Private,
}

/// Host implementation other than this crate's: it writes the shadow entry only after the command
/// is complete.
struct OtherHost {
    cells: DoorbellCells,
    wake: Wake,
    predicate: Predicate,
    old: Old,
    current: u16,
    trusted: bool,
}

impl OtherHost {
    fn update(&mut self, new: u16) {
        let private = std::mem::replace(&mut self.current, new);
        let mut mmio = true;
        if self.trusted {
            let old = match self.old {
                Old::Shadow => self.cells.shadow.load_relaxed() as u16,
                Old::Private => private,
            };
            self.cells.shadow.store_release(new.into());
            FullFence::full();
            mmio = self.predicate.needs_mmio(self.cells.event_idx.load_relaxed(), old, new);
        }
        if mmio {
            self.wake.trap(&self.cells.register, new);
        }
    }
}

/// This crate's host enables shadow doorbells while it submits. One command is already in flight.
#[test]
fn our_host_enables_under_load() {
    for predicate in PREDICATES {
        explore(Some(2), move || {
            let (size, cells, config) = (ring(8), DoorbellCells::at(0), Config::new());
            let entries = Entries::new(size);
            let (mut sleeper, wake) = sleep_pair();
            entries.write(0);
            cells.register.store(1, Ordering::Relaxed);
            let host = {
                let (cells, entries) = (cells.clone(), entries.clone());
                let (config, wake) = (config.clone(), wake.clone());
                thread::spawn(move || {
                    let mut doorbell: HostDoorbell<Word> = HostDoorbell::new(1);
                    doorbell.attach_shadow(cells.shadow.clone(), cells.event_idx.clone());
                    config.submit(&wake);
                    for at in 1..3 {
                        entries.write(at);
                        wake.update(&mut doorbell, predicate, &cells.register, at + 1);
                        if is_set(&config.completed) {
                            doorbell.enable_shadow();
                        }
                    }
                })
            };
            let controller = Controller { cells, size, from: 0, count: 3, config, entries };
            controller.run(&mut sleeper, &wake, |_, _| ());
            host.join().unwrap();
        });
    }
}

/// This crate's host enables shadow doorbells while it submits. The ring is so small that the first
/// doorbell values after Doorbell Buffer Config equal the shadow entry at the time when that
/// command was executed.
#[test]
fn our_host_wraps_to_the_snapshot() {
    for predicate in PREDICATES {
        explore(Some(3), move || {
            let (size, cells, config) = (ring(3), DoorbellCells::at(0), Config::new());
            let entries = Entries::new(size);
            let room = Arc::new(Event::default());
            let (mut sleeper, wake) = sleep_pair();
            let host = {
                let (cells, entries, room) = (cells.clone(), entries.clone(), room.clone());
                let (config, wake) = (config.clone(), wake.clone());
                thread::spawn(move || {
                    let mut doorbell: HostDoorbell<Word> = HostDoorbell::new(0);
                    doorbell.attach_shadow(cells.shadow.clone(), cells.event_idx.clone());
                    config.submit(&wake);
                    entries.write(0);
                    wake.update(&mut doorbell, predicate, &cells.register, 1);
                    room.wait();
                    doorbell.enable_shadow();
                    for at in [1, 2] {
                        entries.write(at);
                        let next = size.forward(at, 1);
                        wake.update(&mut doorbell, predicate, &cells.register, next);
                    }
                })
            };
            let is_trusted = std::cell::Cell::new(false);
            let controller = Controller { cells, size, from: 0, count: 3, config, entries };
            controller.run(&mut sleeper, &wake, |fetched, enabled| {
                if fetched >= 1 && enabled && !is_trusted.replace(true) {
                    room.signal();
                }
            });
            host.join().unwrap();
        });
    }
}

/// Other hosts enable shadow doorbells while they submit. The shadow entry is zero, or was set to
/// the tail before.
#[test]
fn other_hosts_enable_under_load() {
    for predicate in PREDICATES {
        for old in [Old::Shadow, Old::Private] {
            for initial in [0, 1] {
                explore(Some(2), move || {
                    let (size, cells, config) = (ring(8), DoorbellCells::at(0), Config::new());
                    let entries = Entries::new(size);
                    let (mut sleeper, wake) = sleep_pair();
                    entries.write(0);
                    cells.register.store(1, Ordering::Relaxed);
                    cells.shadow.store(initial, Ordering::Relaxed);
                    let host = {
                        let (cells, entries) = (cells.clone(), entries.clone());
                        let (config, wake) = (config.clone(), wake.clone());
                        thread::spawn(move || {
                            config.submit(&wake);
                            let mut host = OtherHost {
                                cells,
                                wake,
                                predicate,
                                old,
                                current: 1,
                                trusted: false,
                            };
                            for at in 1..3 {
                                entries.write(at);
                                host.update(at + 1);
                                host.trusted |= is_set(&config.completed);
                            }
                        })
                    };
                    let controller = Controller { cells, size, from: 0, count: 3, config, entries };
                    controller.run(&mut sleeper, &wake, |_, _| ());
                    host.join().unwrap();
                });
            }
        }
    }
}

/// The new shadow entry is zero, and the first update after the command wraps to zero. So the entry
/// does not change, and only the doorbell register shows the update. The host writes the register,
/// because EventIdx has followed the tail.
#[test]
fn the_first_update_lands_on_a_stale_zero() {
    for predicate in PREDICATES {
        explore(Some(3), move || {
            let (size, cells, config) = (ring(4), DoorbellCells::at(2), Config::new());
            let entries = Entries::new(size);
            let fetched_one = Arc::new(Event::default());
            let (mut sleeper, wake) = sleep_pair();
            cells.shadow.store(0, Ordering::Relaxed);
            let host = {
                let (cells, entries) = (cells.clone(), entries.clone());
                let (config, wake) = (config.clone(), wake.clone());
                let fetched_one = fetched_one.clone();
                thread::spawn(move || {
                    config.submit(&wake);
                    let old = Old::Private;
                    let mut host =
                        OtherHost { cells, wake, predicate, old, current: 2, trusted: false };
                    entries.write(2);
                    host.update(3);
                    fetched_one.wait();
                    host.trusted = true;
                    entries.write(3);
                    host.update(0);
                })
            };
            let is_trusted = std::cell::Cell::new(false);
            let controller = Controller { cells, size, from: 2, count: 2, config, entries };
            controller.run(&mut sleeper, &wake, |fetched, enabled| {
                if enabled && fetched >= 1 && !is_trusted.replace(true) {
                    fetched_one.signal();
                }
            });
            host.join().unwrap();
        });
    }
}

/// Admin queue with a host like Linux or SPDK: the controller has executed Doorbell Buffer Config,
/// but the host never uses a shadow entry for this queue.
#[test]
fn a_host_that_never_shadows_the_queue() {
    for initial in [0, 2] {
        explore(Some(3), move || {
            let (size, cells, config) = (ring(4), DoorbellCells::at(2), Config::new());
            let entries = Entries::new(size);
            let (mut sleeper, wake) = sleep_pair();
            cells.shadow.store(initial, Ordering::Relaxed);
            let host = {
                let (cells, entries) = (cells.clone(), entries.clone());
                let (config, wake) = (config.clone(), wake.clone());
                thread::spawn(move || {
                    config.submit(&wake);
                    for at in [2, 3, 0] {
                        entries.write(at);
                        wake.trap(&cells.register, size.forward(at, 1));
                    }
                })
            };
            let controller = Controller { cells, size, from: 2, count: 3, config, entries };
            controller.run(&mut sleeper, &wake, |_, _| ());
            host.join().unwrap();
        });
    }
}

/// Pages of a second Doorbell Buffer Config.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pages {
    /// Pages of the first Doorbell Buffer Config.
    Same,
    /// Other pages.
    Other,
}

/// Doorbell updates of the host around a second Doorbell Buffer Config.
#[derive(Clone, Copy)]
pub(crate) enum Updates {
    /// Until the command is complete, each update goes to the old entry first and to the new one
    /// second, as in this crate's host.
    Both,
    /// Updates the new entry first.
    BothNewFirst,
    /// Updates the entry as if there were no command. Both pages are the same.
    InPlace,
    /// One update in the old entry directly before the command is submitted, and the next update
    /// after its completion. Before the command, the new entry has the given value.
    Before(u16),
}

/// Model of a second Doorbell Buffer Config for a queue in use. The host submits to the last two
/// entries of a ring of `entries`, so that the tail ends at zero.
pub(crate) fn configured_again(
    (entries, predicate): (u32, Predicate),
    pages: Pages,
    updates: Updates,
    enable: &Enable,
) {
    let size = ring(entries);
    let from = size.back(0, 2);
    let old = DoorbellCells::at(size.back(from, 1));
    let (mut doorbell, tail) = in_use::<FullFence>(&old, size, from);
    // The register is outdated, because the host has recently updated only the shadow entry.
    old.register.store(0, Ordering::Relaxed);
    let cells = match pages {
        Pages::Same => old.clone(),
        Pages::Other => DoorbellCells { register: old.register.clone(), ..DoorbellCells::at(0) },
    };
    let (config, memory) = (Config::new(), Entries::new(size));
    let is_complete = Arc::new(Event::default());
    let (mut sleeper, wake) = sleep_pair();
    let host = {
        let (cells, entries, old) = (cells.clone(), memory.clone(), old.clone());
        let (config, wake, is_complete) = (config.clone(), wake.clone(), is_complete.clone());
        thread::spawn(move || {
            let tails = [size.forward(from, 1), size.forward(from, 2)];
            match updates {
                Updates::Both => {
                    doorbell.attach_shadow(cells.shadow.clone(), cells.event_idx.clone());
                    config.submit(&wake);
                    for tail in tails {
                        entries.write(size.back(tail, 1));
                        wake.update(&mut doorbell, predicate, &cells.register, tail);
                        if is_set(&config.completed) {
                            doorbell.enable_shadow();
                        }
                    }
                }
                Updates::BothNewFirst => {
                    cells.shadow.store_release(from.into());
                    config.submit(&wake);
                    for tail in tails {
                        entries.write(size.back(tail, 1));
                        cells.shadow.store_release(tail.into());
                        old.shadow.store_release(tail.into());
                        wake.trap(&cells.register, tail);
                    }
                }
                Updates::InPlace => {
                    config.submit(&wake);
                    for tail in tails {
                        entries.write(size.back(tail, 1));
                        wake.update(&mut doorbell, predicate, &cells.register, tail);
                    }
                }
                Updates::Before(initial) => {
                    if pages == Pages::Other {
                        cells.shadow.store_release(initial.into());
                    }
                    entries.write(from);
                    wake.update(&mut doorbell, predicate, &cells.register, tails[0]);
                    config.submit(&wake);
                    is_complete.wait();
                    let mut host = OtherHost {
                        cells,
                        wake,
                        predicate,
                        old: Old::Private,
                        current: tails[0],
                        trusted: true,
                    };
                    entries.write(size.forward(from, 1));
                    host.update(tails[1]);
                }
            }
        })
    };
    let has_signalled = std::cell::Cell::new(false);
    let controller = Controller { cells, size, from, count: 2, config, entries: memory };
    controller.run_with(tail, enable, &mut sleeper, &wake, |fetched, enabled| {
        // The host learns of the completion of Doorbell Buffer Config only after the controller has
        // fetched the commands that were submitted before it.
        if enabled && fetched >= 1 && !has_signalled.replace(true) {
            is_complete.signal();
        }
    });
    host.join().unwrap();
}

#[test]
fn a_second_configuration_under_load_takes_over_the_pending_value() {
    for predicate in PREDICATES {
        for pages in [Pages::Same, Pages::Other] {
            explore(Some(2), move || {
                configured_again((8, predicate), pages, Updates::Both, &enable);
            });
        }
        explore(Some(2), move || {
            configured_again((8, predicate), Pages::Same, Updates::InPlace, &enable);
        });
    }
}

/// Before the command, the new entry is zero, or has the position that the host stored last, or the
/// position before that. The host is at the last position of the ring, so its first update after
/// the command stores zero. If the entry already is zero, only the register shows the update.
#[test]
fn a_second_configuration_keeps_what_was_rung_just_before() {
    for predicate in PREDICATES {
        for pages in [Pages::Same, Pages::Other] {
            for initial in [0, 6, 7] {
                explore(Some(2), move || {
                    configured_again((8, predicate), pages, Updates::Before(initial), &enable);
                });
            }
        }
    }
}
