//! Parked controllers: many idle controllers of an I/O thread cost its other controllers nothing,
//! and the thread notices work for a parked controller.

mod common;

use common::slow::{Gate, Slow};
use common::{Host, LIMIT, Queue, config, run_beside};
use shadowbell_controller::{Carrier, Controller, Polling, Pool, PoolOptions, Stats, Turns};
use shadowbell_spec::{Sqe, regs};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const ADAPTIVE: Polling = Polling::Adaptive(Duration::from_micros(100));
/// Number of consecutive sleeps after which an idle controller is certainly parked.
const SLEEPS_UNTIL_PARKED: usize = 12;

/// Kind of doorbell that a host uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DoorbellKind {
    /// Doorbell writes are trapped; there are no shadow doorbells.
    Trap,
    /// A trapped write if the shadow doorbells require one.
    Shadow,
    /// An eventfd is signalled if the shadow doorbells require a write.
    Event,
    /// The doorbells are mapped.
    Mapped,
}

const DOORBELL_KINDS: [DoorbellKind; 3] =
    [DoorbellKind::Trap, DoorbellKind::Shadow, DoorbellKind::Event];

fn attach(controller: Controller, kind: DoorbellKind) -> (Host, Queue) {
    let mut host = Host::attach(controller);
    let queue = boot(&mut host, kind);
    (host, queue)
}

fn boot(host: &mut Host, kind: DoorbellKind) -> Queue {
    host.enable();
    host.doorbell_eventfds = shadowbell_controller::DoorbellEventfds::default();
    if kind != DoorbellKind::Trap {
        assert!(host.configure_shadow(|_, _| 0).is_success());
    }
    let queue = host.create(1, 8, false);
    if kind == DoorbellKind::Event {
        host.doorbell_eventfds = host.controller.doorbell_eventfds().unwrap();
    }
    queue
}

/// Makes the I/O thread sleep. Ends the test process if the sleep does not end within the time
/// limit.
fn fall_asleep(turns: &mut Turns) -> bool {
    let (awake, asleep) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        if asleep.recv_timeout(LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("a sleep does not end: whoever rang was not noticed");
            std::process::exit(101);
        }
    });
    let slept = turns.sleep();
    drop(awake);
    slept
}

/// Controllers on one I/O thread, each with its host and a buffer.
struct PoolOfHosts {
    turns: Turns,
    pool: Pool,
    hosts: Vec<(Host, Queue, u64)>,
}

impl PoolOfHosts {
    fn new(polling: Polling) -> Self {
        let (pool, turns) = Pool::driven(polling).unwrap();
        Self { turns, pool, hosts: Vec::new() }
    }

    fn add(&mut self, kind: DoorbellKind) -> usize {
        self.add_with(
            shadowbell_controller::Config { io_queues: 2, ..config(&["null:1GiB"]) },
            kind,
        )
    }

    fn add_with(&mut self, config: shadowbell_controller::Config, kind: DoorbellKind) -> usize {
        let carrier = Carrier { mapped_doorbells: kind == DoorbellKind::Mapped, listener: None };
        let controller = Controller::new(config, self.pool.clone(), carrier).unwrap();
        let (mut host, queue) = run_beside(&mut self.turns, move || attach(controller, kind));
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

    /// Submits a command when the I/O thread is about to sleep. The thread finds the command in its
    /// last check, or is woken by it.
    fn submit_near_sleep(&mut self, who: usize) {
        self.submit(who);
        fall_asleep(&mut self.turns);
        self.turns.turn();
        assert!(self.reap(who));
    }

    /// Parks all controllers except that of `who`, by a series of sleeps. The series is executed
    /// twice: in the first round, the thread still handles earlier signals.
    fn park_all_but(&mut self, who: usize) {
        for _ in 0..2 {
            (0..SLEEPS_UNTIL_PARKED).for_each(|_| self.submit_near_sleep(who));
            for _ in 0..1_000 {
                self.turns.turn();
            }
        }
        (0..SLEEPS_UNTIL_PARKED).for_each(|_| self.submit_near_sleep(who));
    }

    /// Takes turns until the controller of `who` has completed its command.
    fn complete_one(&mut self, who: usize) {
        let mut turns = 0;
        while !self.reap(who) {
            turns += 1;
            assert!(turns < 2_000, "controller {who}: not noticed");
            self.turns.turn();
        }
    }

    fn stats(&mut self, who: usize) -> Stats {
        let controller = self.hosts[who].0.controller.clone();
        run_beside(&mut self.turns, move || controller.stats())
    }

    /// Numbers of checks of a submission queue's doorbell: polls in passes, rechecks before sleeps,
    /// and armings of EventIdx.
    fn polls(&mut self, who: usize) -> [u64; 3] {
        let sq = self.stats(who).io_queues().0.doorbell;
        [sq.polls, sq.rechecks, sq.event_idx_armed]
    }
}

#[test]
fn idle_controllers_are_left_alone() {
    let mut pool = PoolOfHosts::new(ADAPTIVE);
    let busy = pool.add(DoorbellKind::Shadow);
    let mut idle: Vec<_> = (0..15).map(|n| pool.add(DOORBELL_KINDS[n % 3])).collect();
    idle.push(pool.add(DoorbellKind::Mapped));
    pool.park_all_but(busy);
    let before: Vec<_> = idle.iter().map(|who| pool.polls(*who)).collect();
    let own = pool.polls(busy);
    for _ in 0..100 {
        pool.submit_near_sleep(busy);
        pool.turns.turn();
    }
    for (who, before) in idle.iter().zip(before) {
        let now = pool.polls(*who);
        if *who == idle[15] {
            assert!(now[0] >= before[0] + 200, "mapped doorbells have to be polled");
        } else {
            assert_eq!(now, before, "controller {who}");
        }
    }
    assert!(pool.polls(busy)[0] >= own[0] + 200);
    // Statistics contain parked controllers, too.
    assert!(idle.iter().all(|who| pool.stats(*who).submission_queues.len() == 2));
}

#[test]
fn a_parked_controller_is_noticed_asleep_and_awake() {
    for kind in DOORBELL_KINDS {
        let mut pool = PoolOfHosts::new(ADAPTIVE);
        let busy = pool.add(DoorbellKind::Shadow);
        let idle = pool.add(kind);
        for round in 0..3 {
            pool.park_all_but(busy);
            let rings = pool.hosts[idle].0.rings;
            pool.submit(idle);
            assert_eq!(pool.hosts[idle].0.rings, rings + 1, "{kind:?}: the host must ring");
            if round == 0 {
                // The submission wakes the I/O thread or prevents its sleep.
                fall_asleep(&mut pool.turns);
                pool.turns.turn();
            } else {
                // The I/O thread does not sleep. In round 1, the other host keeps it busy; in round
                // 2, it polls without work.
                let mut turns = 0;
                while pool.stats(idle).io_queues().0.commands != round + 1 {
                    turns += 1;
                    assert!(turns < 2_000, "{kind:?}: not noticed");
                    if round == 1 {
                        pool.submit(busy);
                    }
                    pool.turns.turn();
                    assert!(round != 1 || pool.reap(busy));
                }
            }
            assert!(pool.reap(idle), "{kind:?}: round {round}");
        }
    }
}

#[test]
fn a_parked_controller_is_noticed_by_a_doorbell_source() {
    let mut pool = PoolOfHosts::new(ADAPTIVE);
    let busy = pool.add(DoorbellKind::Shadow);
    let idle = pool.add(DoorbellKind::Trap);
    let (wire, source) = common::wire::DoorbellChannel::new();
    pool.hosts[idle].0.controller.add_doorbell_source(0, source);
    for _ in 0..3 {
        pool.park_all_but(busy);
        assert!(wire.is_watched());
        let (host, queue, buffer) = &mut pool.hosts[idle];
        let read = Sqe::read(1, 0, 7, host.next_cid()).with_prps(*buffer, 0);
        host.put(queue, &read);
        wire.write(regs::sq_doorbell_offset(queue.qid, 0), queue.tail);
        assert!(fall_asleep(&mut pool.turns));
        pool.turns.turn();
        assert!(pool.reap(idle));
    }
}

/// Test with more signalled eventfds than one `epoll_wait` call returns.
#[test]
fn a_hundred_parked_controllers_are_all_noticed() {
    let mut pool = PoolOfHosts::new(ADAPTIVE);
    let busy = pool.add(DoorbellKind::Trap);
    let idle: Vec<_> = (0..100).map(|_| pool.add(DoorbellKind::Event)).collect();
    pool.park_all_but(busy);
    idle.iter().for_each(|who| pool.submit(*who));
    assert!(fall_asleep(&mut pool.turns));
    for _ in 0..4 {
        pool.turns.turn();
    }
    for who in idle {
        assert!(pool.reap(who), "controller {who}");
    }
}

#[test]
fn a_parked_controller_survives_empty_doorbell_writes() {
    for kind in DOORBELL_KINDS {
        let mut pool = PoolOfHosts::new(Polling::Never);
        let busy = pool.add(DoorbellKind::Shadow);
        let idle = pool.add(kind);
        for _ in 0..3 {
            pool.park_all_but(busy);
            for _ in 0..3 {
                let (host, queue, _) = &pool.hosts[idle];
                match host.doorbell_eventfds.events.first() {
                    Some(event) => event.signal(),
                    None => {
                        let offset = regs::sq_doorbell_offset(queue.qid, 0);
                        host.controller.write_doorbell(offset, queue.tail);
                    }
                }
                pool.submit_near_sleep(busy);
            }
            pool.submit_near_sleep(idle);
        }
    }
}

#[test]
fn a_queue_that_waits_for_room_is_parked_as_well() {
    for kind in DOORBELL_KINDS {
        let mut pool = PoolOfHosts::new(ADAPTIVE);
        let busy = pool.add(DoorbellKind::Shadow);
        let idle = pool.add(kind);
        // Seven completions are posted and not consumed. There is no room for an eighth.
        for _ in 0..7 {
            pool.submit(idle);
            pool.turns.turn();
        }
        pool.submit(idle);
        pool.turns.turn();
        pool.park_all_but(busy);
        let sq = pool.stats(idle).io_queues().0.clone();
        assert_eq!((sq.commands, sq.blocked), (7, 1));
        let before = pool.polls(idle);
        pool.park_all_but(busy);
        assert_eq!(pool.polls(idle), before, "{kind:?}: the controller is parked");
        assert!(pool.reap(idle));
        fall_asleep(&mut pool.turns);
        while pool.turns.turn() {}
        for taken in 1..8 {
            assert!(pool.reap(idle), "{kind:?}: {taken}");
        }
    }
}

#[test]
fn control_operations_reach_parked_controllers() {
    for kind in DOORBELL_KINDS {
        let mut pool = PoolOfHosts::new(ADAPTIVE);
        let busy = pool.add(DoorbellKind::Shadow);
        let idle = pool.add(kind);
        pool.submit_near_sleep(idle);
        pool.park_all_but(busy);
        // The host's memory is mapped again, and the old map is released.
        let controller = pool.hosts[idle].0.controller.clone();
        let other = shadowbell_memory::Mapping::shared("other", 1 << 20).unwrap().bytes();
        let gone = Arc::downgrade(other.mapping());
        run_beside(&mut pool.turns, {
            let controller = controller.clone();
            move || controller.map_dma(1 << 40, 1 << 20, &other).unwrap()
        });
        pool.park_all_but(busy);
        run_beside(&mut pool.turns, {
            let controller = controller.clone();
            move || {
                let (sent, done) = mpsc::channel();
                controller.unmap_dma(1 << 40, 1 << 20, move || sent.send(()).unwrap()).unwrap();
                done.recv_timeout(LIMIT).unwrap();
            }
        });
        assert_eq!(gone.strong_count(), 0, "{kind:?}: the old memory is released");
        pool.submit_near_sleep(idle);

        // Doorbell Buffer Config is enabled, and the next command is submitted with shadow
        // doorbells.
        pool.park_all_but(busy);
        let (mut host, mut queue, buffer) = pool.hosts.remove(idle);
        let tail = queue.tail;
        let (host, mut queue) = run_beside(&mut pool.turns, move || {
            let sq = regs::sq_doorbell_offset(1, 0) - regs::DOORBELLS;
            let (head, tail) = (queue.head, queue.tail);
            let at = move |entry| match entry {
                e if e == sq => tail,
                e if e == sq + 4 => head,
                _ => 0,
            };
            assert!(host.configure_shadow(|_, entry| at(entry)).is_success());
            host.doorbell_eventfds = shadowbell_controller::DoorbellEventfds::default();
            queue.shadowed = true;
            (host, queue)
        });
        assert_eq!(queue.tail, tail);
        queue.shadowed = true;
        pool.hosts.push((host, queue, buffer));
        pool.submit_near_sleep(idle);
        pool.park_all_but(busy);
        pool.submit_near_sleep(idle);

        // A reset ends the parking, and the host enables the controller again.
        pool.park_all_but(busy);
        let (mut host, ..) = pool.hosts.remove(idle);
        let (mut host, queue) = run_beside(&mut pool.turns, move || {
            host.disable();
            let queue = boot(&mut host, kind);
            (host, queue)
        });
        let buffer = host.alloc(4096);
        pool.hosts.push((host, queue, buffer));
        pool.submit_near_sleep(idle);
        pool.park_all_but(busy);
        pool.submit_near_sleep(idle);
    }
}

#[test]
fn a_parked_controllers_disk_completion_is_noticed() {
    let gate = Arc::new(Gate::default());
    let mut config = config(&["null:1GiB"]);
    config.namespaces[0].disk = Arc::new(Slow(Arc::clone(&gate)));
    let mut pool = PoolOfHosts::new(ADAPTIVE);
    let busy = pool.add(DoorbellKind::Shadow);
    let idle = pool.add_with(config, DoorbellKind::Shadow);
    pool.submit(idle);
    pool.turns.turn();
    pool.park_all_but(busy);
    assert_eq!(gate.waiting(), 1);
    gate.end(Ok(()));
    fall_asleep(&mut pool.turns);
    pool.turns.turn();
    assert!(pool.reap(idle));
    pool.park_all_but(busy);
    let before = pool.polls(idle);
    pool.park_all_but(busy);
    assert_eq!(pool.polls(idle), before, "the controller is parked");
}

/// If the I/O thread always polls, hosts with shadow doorbells need not write doorbell registers,
/// even for idle controllers.
#[test]
fn a_polling_io_thread_needs_no_doorbell_writes() {
    let mut pool = PoolOfHosts::new(Polling::Always);
    let busy = pool.add(DoorbellKind::Shadow);
    let idle: Vec<_> = (0..16).map(|_| pool.add(DoorbellKind::Shadow)).collect();
    idle.iter().chain([&busy]).for_each(|who| {
        pool.submit(*who);
        pool.complete_one(*who);
    });
    // Waits until the I/O thread polls idle controllers only occasionally instead of in every pass.
    let started = Instant::now();
    loop {
        let before = pool.polls(idle[7])[0];
        for _ in 0..1_000 {
            pool.submit(busy);
            pool.turns.turn();
            assert!(pool.reap(busy));
        }
        let polls = pool.polls(idle[7])[0] - before;
        if polls < 100 {
            assert!(polls > 2, "the controller is checked occasionally: {polls}");
            break;
        }
        assert!(started.elapsed() < LIMIT, "{polls} looks in 1000 passes");
    }
    let rings = |pool: &PoolOfHosts| pool.hosts.iter().map(|(host, ..)| host.rings).sum::<u64>();
    let before = rings(&pool);
    for who in idle {
        pool.submit(who);
        pool.complete_one(who);
    }
    assert_eq!(rings(&pool), before);
}

/// Each I/O thread polls the mapped doorbells of its own queues, even if the admin queue is
/// served by another thread.
#[test]
fn mapped_doorbells_are_found_by_every_io_thread() {
    for polling in [Polling::Never, ADAPTIVE] {
        let options = PoolOptions { workers: 2, polling, pin: Vec::new() };
        let pool = Pool::start(&options).unwrap();
        let carrier = Carrier { mapped_doorbells: true, listener: None };
        let controller = Controller::new(config(&["null:1GiB"]), pool, carrier).unwrap();
        let (mut host, first) = attach(controller, DoorbellKind::Mapped);
        let second = host.create(2, 8, false);
        let buffer = host.alloc(4096);
        for mut queue in [first, second] {
            for _ in 0..20 {
                // The I/O thread usually goes to sleep in this time.
                std::thread::sleep(Duration::from_millis(1));
                let read = Sqe::read(1, 0, 7, 0).with_prps(buffer, 0);
                assert!(host.run(&mut queue, read).0.is_success());
            }
        }
    }
}

/// Hosts of all kinds with irregular load on few I/O threads.
#[test]
fn no_command_is_lost_with_many_hosts() {
    const HOSTS: u64 = 24;
    for (seed, polling) in [(1, ADAPTIVE), (2, Polling::Never), (3, Polling::Always)] {
        let options = PoolOptions { workers: 2, polling, pin: Vec::new() };
        let pool = Pool::start(&options).unwrap();
        let hosts: Vec<_> = (0..HOSTS)
            .map(|n| {
                let pool = pool.clone();
                std::thread::spawn(move || run_host(&pool, n, seed << 32 | n))
            })
            .collect();
        hosts.into_iter().for_each(|host| host.join().unwrap());
    }
}

/// Runs one host.
fn run_host(pool: &Pool, n: u64, seed: u64) {
    let mut random = Random(seed);
    let kind =
        [DoorbellKind::Trap, DoorbellKind::Shadow, DoorbellKind::Event, DoorbellKind::Mapped]
            [n as usize % 4];
    let carrier = Carrier { mapped_doorbells: kind == DoorbellKind::Mapped, listener: None };
    let disk = if n.is_multiple_of(3) { "mem:1MiB" } else { "null:1GiB" };
    let config = shadowbell_controller::Config { io_queues: 4, ..config(&[disk]) };
    let controller = Controller::new(config, pool.clone(), carrier).unwrap();
    let (mut host, mut queue) = attach(controller, kind);
    let buffer = host.alloc(4096);
    let (mut done, mut next) = (0, 2);
    // The load lasts 1.5 s, and longer on a slow machine: until 20 commands have completed.
    let end = Instant::now() + Duration::from_millis(1500);
    while Instant::now() < end || done < 20 {
        match random.below(40) {
            // The sleep is long enough for the controller to be parked.
            0..10 => std::thread::sleep(Duration::from_micros(random.below(20_000))),
            10 => {
                host.disable();
                queue = boot(&mut host, kind);
            }
            11 if next < 20 => {
                // Creates, uses and deletes another queue pair. The first one remains.
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
            // A doorbell write without a new command.
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
}

/// Pseudo-random numbers (xorshift64*).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % limit
    }
}
