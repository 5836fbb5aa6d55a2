//! Many controllers on one worker, most of them quiet: what they cost the others, and that whoever
//! has something to say is heard.

mod common;

use common::slow::{Gate, Slow};
use common::{Host, PATIENCE, Queue, config};
use controller::{Carrier, Controller, Polling, Pool, PoolOptions, Stats, Turns};
use shadowbell_controller as controller;
use shadowbell_spec::{Sqe, regs};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const ADAPTIVE: Polling = Polling::Adaptive(Duration::from_micros(100));
/// Sleeps in a row, and more, after which a controller_queues with nothing to do is parked.
const LONG_ENOUGH: usize = 12;

/// How a host says that it has something to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bell {
    /// Doorbell writes are delivered; there are no shadow doorbells.
    Trap,
    /// The same when the shadow doorbells say so.
    Shadow,
    /// Then a descriptor is signalled instead.
    Event,
    /// The doorbells are mapped.
    Mapped,
}

const BELLS: [Bell; 3] = [Bell::Trap, Bell::Shadow, Bell::Event];

/// Lets another thread wait for the worker while this one takes its turns.
fn meanwhile<T: Send + 'static>(turns: &mut Turns, what: impl FnOnce() -> T + Send + 'static) -> T {
    let other = std::thread::spawn(what);
    while !other.is_finished() {
        if !turns.turn() {
            std::thread::yield_now();
        }
    }
    while turns.turn() {}
    other.join().unwrap()
}

fn plug_in(controller: Controller, bell: Bell) -> (Host, Queue) {
    let mut host = Host::attach(controller);
    let queue = boot(&mut host, bell);
    (host, queue)
}

fn boot(host: &mut Host, bell: Bell) -> Queue {
    host.enable();
    host.doorbell_eventfds = controller::DoorbellEventfds::default();
    if bell != Bell::Trap {
        assert!(host.configure_shadow(|_, _| 0).is_success());
    }
    let queue = host.create(1, 8, false);
    if bell == Bell::Event {
        host.doorbell_eventfds = host.controller.doorbell_eventfds().unwrap();
    }
    queue
}

/// Sleeps; a sleep that nothing ends is the end of the test.
fn sleep(turns: &mut Turns) -> bool {
    let (awake, asleep) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        if asleep.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("a sleep does not end: whoever rang was not heard");
            std::process::exit(101);
        }
    });
    let slept = turns.sleep();
    drop(awake);
    slept
}

/// Hosts of one worker, with a buffer each.
struct House {
    turns: Turns,
    pool: Pool,
    hosts: Vec<(Host, Queue, u64)>,
}

impl House {
    fn new(polling: Polling) -> Self {
        let (pool, turns) = Pool::driven(polling).unwrap();
        Self { turns, pool, hosts: Vec::new() }
    }

    fn move_in(&mut self, bell: Bell) -> usize {
        self.move_in_with(controller::Config { io_queues: 2, ..config(&["null:1GiB"]) }, bell)
    }

    fn move_in_with(&mut self, config: controller::Config, bell: Bell) -> usize {
        let carrier = Carrier { mapped_doorbells: bell == Bell::Mapped, listener: None };
        let controller = Controller::new(config, self.pool.clone(), carrier).unwrap();
        let (mut host, queue) = meanwhile(&mut self.turns, move || plug_in(controller, bell));
        let buffer = host.alloc(4096);
        self.hosts.push((host, queue, buffer));
        self.hosts.len() - 1
    }

    fn submit(&mut self, who: usize) {
        let (host, queue, buffer) = &mut self.hosts[who];
        let cid = host.next_cid();
        host.submit(queue, &Sqe::read(1, 0, 7, cid).with_prps(*buffer, 0));
    }

    fn reap(&mut self, who: usize) -> bool {
        let (host, queue, _) = &mut self.hosts[who];
        host.reap(queue).is_some_and(|(_, status, _)| status.is_success())
    }

    /// A command of which the worker hears as it goes to sleep or asleep.
    fn disturb(&mut self, who: usize) {
        self.submit(who);
        sleep(&mut self.turns);
        self.turns.turn();
        assert!(self.reap(who));
    }

    /// As many sleeps as it takes for all but `who` to be parked; and once more after enough passes
    /// for what was signalled before to be heard.
    fn lull(&mut self, who: usize) {
        for _ in 0..2 {
            (0..LONG_ENOUGH).for_each(|_| self.disturb(who));
            for _ in 0..1_000 {
                self.turns.turn();
            }
        }
        (0..LONG_ENOUGH).for_each(|_| self.disturb(who));
    }

    /// Takes turns until a controller has been answered.
    fn answer(&mut self, who: usize) {
        let mut turns = 0;
        while !self.reap(who) {
            turns += 1;
            assert!(turns < 2_000, "controller {who}: not heard");
            self.turns.turn();
        }
    }

    fn stats(&mut self, who: usize) -> Stats {
        let controller = self.hosts[who].0.controller.clone();
        meanwhile(&mut self.turns, move || controller.stats())
    }

    /// How often a submission queue's doorbell was looked at, in passes and before sleeps.
    fn looks(&mut self, who: usize) -> [u64; 3] {
        let sq = self.stats(who).io_queues().0.doorbell;
        [sq.looks, sq.rechecks, sq.event_idx_armed]
    }
}

#[test]
fn quiet_controllers_are_left_alone() {
    let mut house = House::new(ADAPTIVE);
    let busy = house.move_in(Bell::Shadow);
    let mut quiet: Vec<_> = (0..15).map(|n| house.move_in(BELLS[n % 3])).collect();
    quiet.push(house.move_in(Bell::Mapped));
    house.lull(busy);
    let before: Vec<_> = quiet.iter().map(|who| house.looks(*who)).collect();
    let own = house.looks(busy);
    for _ in 0..100 {
        house.disturb(busy);
        house.turns.turn();
    }
    for (who, before) in quiet.iter().zip(before) {
        let now = house.looks(*who);
        if *who == quiet[15] {
            assert!(now[0] >= before[0] + 200, "mapped doorbells have to be looked at");
        } else {
            assert_eq!(now, before, "controller {who}");
        }
    }
    assert!(house.looks(busy)[0] >= own[0] + 200);
    // They are all there, whoever tells it.
    assert!(quiet.iter().all(|who| house.stats(*who).submission_queues.len() == 2));
}

#[test]
fn who_is_parked_is_heard_asleep_and_awake() {
    for bell in BELLS {
        let mut house = House::new(ADAPTIVE);
        let busy = house.move_in(Bell::Shadow);
        let quiet = house.move_in(bell);
        for round in 0..3 {
            house.lull(busy);
            let rings = house.hosts[quiet].0.rings;
            house.submit(quiet);
            assert_eq!(house.hosts[quiet].0.rings, rings + 1, "{bell:?}: it must ring");
            if round == 0 {
                // The sleep ends, or does not begin.
                sleep(&mut house.turns);
                house.turns.turn();
            } else {
                // Nobody sleeps: the other one is busy all the time, or there is nothing to do.
                let mut turns = 0;
                while house.stats(quiet).io_queues().0.commands != round + 1 {
                    turns += 1;
                    assert!(turns < 2_000, "{bell:?}: not heard");
                    if round == 1 {
                        house.submit(busy);
                    }
                    house.turns.turn();
                    assert!(round != 1 || house.reap(busy));
                }
            }
            assert!(house.reap(quiet), "{bell:?}: round {round}");
        }
    }
}

#[test]
fn who_is_parked_is_heard_by_an_ear() {
    let mut house = House::new(ADAPTIVE);
    let busy = house.move_in(Bell::Shadow);
    let quiet = house.move_in(Bell::Trap);
    let (wire, ear) = common::wire::Wire::new();
    house.hosts[quiet].0.controller.add_doorbell_source(0, ear);
    for _ in 0..3 {
        house.lull(busy);
        assert!(wire.is_heard());
        let (host, queue, buffer) = &mut house.hosts[quiet];
        let read = Sqe::read(1, 0, 7, host.next_cid()).with_prps(*buffer, 0);
        host.put(queue, &read);
        wire.write(regs::sq_doorbell_offset(queue.qid, 0), queue.tail);
        assert!(sleep(&mut house.turns));
        house.turns.turn();
        assert!(house.reap(quiet));
    }
}

/// A hundred eventfds at once are more than are heard at once.
#[test]
fn everybody_who_rings_is_heard() {
    let mut house = House::new(ADAPTIVE);
    let busy = house.move_in(Bell::Trap);
    let quiet: Vec<_> = (0..100).map(|_| house.move_in(Bell::Event)).collect();
    house.lull(busy);
    quiet.iter().for_each(|who| house.submit(*who));
    assert!(sleep(&mut house.turns));
    for _ in 0..4 {
        house.turns.turn();
    }
    for who in quiet {
        assert!(house.reap(who), "controller {who}");
    }
}

#[test]
fn a_ring_without_a_command_is_not_the_last() {
    for bell in BELLS {
        let mut house = House::new(Polling::Never);
        let busy = house.move_in(Bell::Shadow);
        let quiet = house.move_in(bell);
        for _ in 0..3 {
            house.lull(busy);
            for _ in 0..3 {
                let (host, queue, _) = &house.hosts[quiet];
                match host.doorbell_eventfds.events.first() {
                    Some(event) => event.signal(),
                    None => {
                        let offset = regs::sq_doorbell_offset(queue.qid, 0);
                        host.controller.write_doorbell(offset, queue.tail);
                    }
                }
                house.disturb(busy);
            }
            house.disturb(quiet);
        }
    }
}

#[test]
fn a_queue_that_waits_for_room_is_parked_as_well() {
    for bell in BELLS {
        let mut house = House::new(ADAPTIVE);
        let busy = house.move_in(Bell::Shadow);
        let quiet = house.move_in(bell);
        // Seven completions are there and nobody takes them; an eighth has no room.
        for _ in 0..7 {
            house.submit(quiet);
            house.turns.turn();
        }
        house.submit(quiet);
        house.turns.turn();
        house.lull(busy);
        let sq = house.stats(quiet).io_queues().0.clone();
        assert_eq!((sq.commands, sq.blocked), (7, 1));
        let before = house.looks(quiet);
        house.lull(busy);
        assert_eq!(house.looks(quiet), before, "{bell:?}: it is parked");
        assert!(house.reap(quiet));
        sleep(&mut house.turns);
        while house.turns.turn() {}
        for taken in 1..8 {
            assert!(house.reap(quiet), "{bell:?}: {taken}");
        }
    }
}

#[test]
fn what_the_control_plane_does_finds_the_parked() {
    for bell in BELLS {
        let mut house = House::new(ADAPTIVE);
        let busy = house.move_in(Bell::Shadow);
        let quiet = house.move_in(bell);
        house.disturb(quiet);
        house.lull(busy);
        // Another map of the host's memory: what it had before is let go.
        let controller = house.hosts[quiet].0.controller.clone();
        let other = shadowbell_memory::Mapping::shared("other", 1 << 20).unwrap().bytes();
        let gone = Arc::downgrade(other.mapping());
        meanwhile(&mut house.turns, {
            let controller = controller.clone();
            move || controller.map_dma(1 << 40, 1 << 20, &other).unwrap()
        });
        house.lull(busy);
        meanwhile(&mut house.turns, {
            let controller = controller.clone();
            move || {
                let (sent, done) = mpsc::channel();
                controller.unmap_dma(1 << 40, 1 << 20, move || sent.send(()).unwrap()).unwrap();
                done.recv_timeout(PATIENCE).unwrap();
            }
        });
        assert_eq!(gone.strong_count(), 0, "{bell:?}: nobody holds it any more");
        house.disturb(quiet);

        // Doorbell Buffer Config, and the next command by its rule.
        house.lull(busy);
        let (mut host, mut queue, buffer) = house.hosts.remove(quiet);
        let tail = queue.tail;
        let (host, mut queue) = meanwhile(&mut house.turns, move || {
            let sq = regs::sq_doorbell_offset(1, 0) - regs::DOORBELLS;
            let (head, tail) = (queue.head, queue.tail);
            let at = move |entry| match entry {
                e if e == sq => tail,
                e if e == sq + 4 => head,
                _ => 0,
            };
            assert!(host.configure_shadow(|_, entry| at(entry)).is_success());
            host.doorbell_eventfds = controller::DoorbellEventfds::default();
            queue.shadowed = true;
            (host, queue)
        });
        assert_eq!(queue.tail, tail);
        queue.shadowed = true;
        house.hosts.push((host, queue, buffer));
        house.disturb(quiet);
        house.lull(busy);
        house.disturb(quiet);

        // A reset lets everything go, and another life begins.
        house.lull(busy);
        let (mut host, ..) = house.hosts.remove(quiet);
        let (mut host, queue) = meanwhile(&mut house.turns, move || {
            host.disable();
            let queue = boot(&mut host, bell);
            (host, queue)
        });
        let buffer = host.alloc(4096);
        house.hosts.push((host, queue, buffer));
        house.disturb(quiet);
        house.lull(busy);
        house.disturb(quiet);
    }
}

#[test]
fn a_disk_that_works_is_waited_for() {
    let gate = Arc::new(Gate::default());
    let mut config = config(&["null:1GiB"]);
    config.namespaces[0].disk = Arc::new(Slow(Arc::clone(&gate)));
    let mut house = House::new(ADAPTIVE);
    let busy = house.move_in(Bell::Shadow);
    let quiet = house.move_in_with(config, Bell::Shadow);
    house.submit(quiet);
    house.turns.turn();
    house.lull(busy);
    assert_eq!(gate.waiting(), 1);
    gate.end(Ok(()));
    sleep(&mut house.turns);
    house.turns.turn();
    assert!(house.reap(quiet));
    house.lull(busy);
    let before = house.looks(quiet);
    house.lull(busy);
    assert_eq!(house.looks(quiet), before, "then it is parked");
}

/// A worker that polls for ever has promised that nobody rings.
#[test]
fn nobody_rings_for_a_worker_that_always_polls() {
    let mut house = House::new(Polling::Always);
    let busy = house.move_in(Bell::Shadow);
    let quiet: Vec<_> = (0..16).map(|_| house.move_in(Bell::Shadow)).collect();
    quiet.iter().chain([&busy]).for_each(|who| {
        house.submit(*who);
        house.answer(*who);
    });
    // Until they are visited instead of looked at in every pass.
    let started = Instant::now();
    loop {
        let before = house.looks(quiet[7])[0];
        for _ in 0..1_000 {
            house.submit(busy);
            house.turns.turn();
            assert!(house.reap(busy));
        }
        let looks = house.looks(quiet[7])[0] - before;
        if looks < 100 {
            assert!(looks > 2, "it is visited: {looks}");
            break;
        }
        assert!(started.elapsed() < PATIENCE, "{looks} looks in 1000 passes");
    }
    let rings = |house: &House| house.hosts.iter().map(|(host, ..)| host.rings).sum::<u64>();
    let before = rings(&house);
    for who in quiet {
        house.submit(who);
        house.answer(who);
    }
    assert_eq!(rings(&house), before);
}

/// Each worker has to look by itself, not only the one that has the admin queue.
#[test]
fn mapped_doorbells_are_found_by_every_worker() {
    for polling in [Polling::Never, ADAPTIVE] {
        let options = PoolOptions { workers: 2, polling, pin: Vec::new() };
        let pool = Pool::start(&options).unwrap();
        let carrier = Carrier { mapped_doorbells: true, listener: None };
        let controller = Controller::new(config(&["null:1GiB"]), pool, carrier).unwrap();
        let (mut host, first) = plug_in(controller, Bell::Mapped);
        let second = host.create(2, 8, false);
        let buffer = host.alloc(4096);
        for mut queue in [first, second] {
            for _ in 0..20 {
                std::thread::sleep(Duration::from_millis(1));
                let read = Sqe::read(1, 0, 7, 0).with_prps(buffer, 0);
                assert!(host.run(&mut queue, read).0.is_success());
            }
        }
    }
}

/// Hosts of all kinds that do something now and then, sometimes a lot, on few workers.
#[test]
fn no_command_is_lost_among_many() {
    const HOSTS: u64 = 24;
    for (seed, polling) in [(1, ADAPTIVE), (2, Polling::Never), (3, Polling::Always)] {
        let options = PoolOptions { workers: 2, polling, pin: Vec::new() };
        let pool = Pool::start(&options).unwrap();
        let hosts: Vec<_> = (0..HOSTS)
            .map(|n| {
                let pool = pool.clone();
                std::thread::spawn(move || live(&pool, n, seed << 32 | n))
            })
            .collect();
        let done: u64 = hosts.into_iter().map(|host| host.join().unwrap()).sum();
        assert!(done > HOSTS * 20, "{polling:?}: {done} commands");
    }
}

/// A host's life; how many commands it had answered.
fn live(pool: &Pool, n: u64, seed: u64) -> u64 {
    let mut random = Random(seed);
    let bell = [Bell::Trap, Bell::Shadow, Bell::Event, Bell::Mapped][n as usize % 4];
    let carrier = Carrier { mapped_doorbells: bell == Bell::Mapped, listener: None };
    let disk = if n.is_multiple_of(3) { "mem:1MiB" } else { "null:1GiB" };
    let config = controller::Config { io_queues: 4, ..config(&[disk]) };
    let controller = Controller::new(config, pool.clone(), carrier).unwrap();
    let (mut host, mut queue) = plug_in(controller, bell);
    let buffer = host.alloc(4096);
    let (mut done, mut next) = (0, 2);
    let end = Instant::now() + Duration::from_millis(1500);
    while Instant::now() < end {
        match random.below(40) {
            // For so long that it is parked.
            0..10 => std::thread::sleep(Duration::from_micros(random.below(20_000))),
            10 => {
                host.disable();
                queue = boot(&mut host, bell);
            }
            11 if next < 20 => {
                // Another queue pair; this one is left as it is.
                let other = host.create(2, 8, false);
                let read = Sqe::read(1, 0, 7, 0).with_prps(buffer, 0);
                let mut other = other;
                assert!(host.run(&mut other, read).0.is_success());
                for opcode in [0x00, 0x04] {
                    let mut delete = Sqe::new(opcode, 0, 0);
                    delete.cdw10 = 2;
                    host.must(delete);
                }
                next += 1;
            }
            // A ring for nothing.
            12 => host.doorbell(false, regs::sq_doorbell_offset(1, 0), queue.tail, queue.tail),
            13 => std::thread::yield_now(),
            depth => {
                let depth = depth % 7 + 1;
                for _ in 0..depth {
                    let cid = host.next_cid();
                    host.submit(&mut queue, &Sqe::read(1, 0, 7, cid).with_prps(buffer, 0));
                }
                for _ in 0..depth {
                    assert!(host.wait(&mut queue).1.is_success());
                }
                done += depth;
            }
        }
    }
    done
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % limit
    }
}
