//! Controllers that quiesce, and new controllers (successors) that continue to serve their hosts.

use crate::{common, held};
use common::slow::{Gate, Slow};
use common::{BASE, Host, MEMORY, Queue, config};
use held::Held;
use proptest::prelude::*;
use shadowbell_controller::{
    Carrier, CauseOfDeath, Config, Controller, NamespaceConfig, Polling, Pool, PoolOptions,
    Recorder, RelocateError, RestoreError, SaveError, SavedController,
};
use shadowbell_disk::Disk;
use shadowbell_memory::EventFd;
use shadowbell_spec::admin::{DeleteIoQueue, GetFeatures, GetLogPage, Identify, SetFeatures};
use shadowbell_spec::feature::fid;
use shadowbell_spec::log::{ErrorLogEntry, lid};
use shadowbell_spec::regs::{self, Cc};
use shadowbell_spec::{Sqe, Status};
use shadowbell_state::{Descriptors, Parcel};
use shadowbell_testing::wait;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use zerocopy::FromBytes;

const ADAPTIVE: Polling = Polling::Adaptive(Duration::from_micros(50));

fn pool(workers: usize, polling: Polling) -> Pool {
    Pool::start(&PoolOptions { workers, polling, pin: Vec::new() }).unwrap()
}

/// Builds an Identify Controller command.
fn identify(cid: u16) -> Sqe {
    Identify { cns: 1, ..Identify::default() }.encode(Sqe::new(0x06, cid, 0))
}

/// Simulated host, and the configuration from which its controller and the successors are created.
struct Setup {
    host: Host,
    config: Config,
    mapped: bool,
    /// Eventfds by vector.
    interrupts: BTreeMap<usize, EventFd>,
    /// Recorder that receives the checkpoints of the successors.
    recorder: Option<Arc<LastCheckpoint>>,
}

/// Last recorded checkpoint.
#[derive(Default)]
struct LastCheckpoint(Mutex<serde_json::Value>);

impl Recorder for LastCheckpoint {
    fn record(&self, state: &SavedController, _: Descriptors) {
        *self.0.lock().unwrap() = serde_json::to_value(state).unwrap();
    }
}

impl Setup {
    fn new(config: Config, pool: Pool, mapped: bool) -> Self {
        let carrier = Carrier { mapped_doorbells: mapped, ..Carrier::default() };
        let controller = Controller::new(config.clone(), pool, carrier).unwrap();
        let mut host = Host::attach(controller);
        host.enable();
        Self { host, config, mapped, interrupts: BTreeMap::new(), recorder: None }
    }

    fn create(&mut self, qid: u16, entries: u32, irq: bool) -> Queue {
        let queue = self.host.create(qid, entries, irq);
        if let Some(event) = &queue.irq {
            self.interrupts.insert(qid.into(), event.try_clone().unwrap());
        }
        queue
    }

    fn freeze(&self) {
        let (done, frozen) = channel();
        self.host.controller.freeze(move || done.send(()).unwrap());
        frozen.recv_timeout(common::LIMIT).expect("the controller is quiesced");
    }

    /// Replaces the controller by a successor. Calls `during_replacement` while neither controller
    /// serves the host.
    fn replace(&mut self, pool: Pool, during_replacement: impl FnOnce(&mut Host)) {
        self.freeze();
        let mut parcel = Parcel::new();
        let saved = self.host.controller.save(parcel.descriptors()).unwrap();
        parcel.add("controller", true, &saved).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let sender = std::thread::spawn(move || parcel.send(&ours).unwrap());
        let mut parcel = Parcel::receive(&theirs).unwrap();
        sender.join().unwrap();
        let saved: SavedController = parcel.take("controller").unwrap().unwrap();
        during_replacement(&mut self.host);
        let carrier = Carrier { mapped_doorbells: self.mapped, ..Carrier::default() };
        let fds = parcel.descriptors();
        let config = self.config.clone();
        let successor = Controller::successor(config, pool, carrier, &saved, fds).unwrap();
        successor.map_dma(BASE, MEMORY, &self.host.memory).unwrap();
        for (vector, event) in &self.interrupts {
            successor.set_interrupt(*vector, Some(event.try_clone().unwrap()));
        }
        if let Some(recorder) = &self.recorder {
            successor.record_with(Arc::<LastCheckpoint>::clone(recorder)).unwrap();
        }
        // The predecessor is dropped before the successor starts.
        drop(std::mem::replace(&mut self.host.controller, successor));
        self.host.controller.restore(&saved, fds).unwrap();
        parcel.finish().unwrap();
    }
}

/// Commands in flight, and written data.
#[derive(Default)]
struct Model {
    /// Commands in flight by queue and identifier: the block, and the written value of a write.
    in_flight: BTreeMap<(u16, u16), (u64, Option<u64>)>,
    written: BTreeMap<u64, u64>,
    next: u64,
}

const BLOCKS: u64 = 256;

impl Model {
    /// Submits a write or read of a block that no other command in flight uses, with a data page of
    /// its own.
    fn submit(&mut self, host: &mut Host, queue: &mut Queue, data: u64, ring: bool) {
        let room = queue.entries - 2;
        if self.in_flight.keys().filter(|(qid, _)| *qid == queue.qid).count() as u32 >= room {
            return;
        }
        self.next += 1;
        let cid = self.next as u16;
        let busy = |lba| self.in_flight.values().any(|(of, _)| *of == lba);
        let Some(lba) = (0..BLOCKS).map(|n| (self.next * 7 + n) % BLOCKS).find(|lba| !busy(*lba))
        else {
            return;
        };
        let page = data + lba * 4096;
        let sqe = if self.next.is_multiple_of(3) && self.written.contains_key(&lba) {
            host.poke(page, &[0; 512]);
            self.in_flight.insert((queue.qid, cid), (lba, None));
            Sqe::read(1, lba, 0, cid)
        } else {
            host.poke(page, &self.next.to_le_bytes().repeat(64));
            self.in_flight.insert((queue.qid, cid), (lba, Some(self.next)));
            Sqe::write(1, lba, 0, cid)
        };
        let old = queue.tail;
        host.put(queue, &sqe.with_prps(page, 0));
        if ring {
            host.ring(queue, old);
        }
    }

    /// Takes a completion and checks it. Returns false if there is none.
    fn reap(&mut self, host: &mut Host, queue: &mut Queue, data: u64) -> bool {
        let Some((cid, status, _)) = host.reap(queue) else { return false };
        assert!(status.is_success(), "{status}");
        let command = self.in_flight.remove(&(queue.qid, cid));
        let (lba, wrote) = command.expect("each command completes once");
        match wrote {
            Some(value) => drop(self.written.insert(lba, value)),
            None => {
                let bytes = host.peek(data + lba * 4096, 512);
                assert_eq!(bytes, self.written[&lba].to_le_bytes().repeat(64));
            }
        }
        true
    }
}

#[derive(Clone, Debug)]
enum Step {
    Submit(usize, u8),
    Reap(usize, u8),
    Identify,
    /// Creates or deletes a queue pair.
    Create,
    Delete,
    Replace {
        workers: usize,
        /// Number of commands that the host submits after the old controller has quiesced and
        /// before the successor serves.
        during_replacement: u8,
    },
    Resume {
        /// True if the test resumes the controller without waiting until it has quiesced.
        at_once: bool,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0usize..4, 1u8..12).prop_map(|(queue, count)| Step::Submit(queue, count)),
        4 => (0usize..4, 1u8..16).prop_map(|(queue, count)| Step::Reap(queue, count)),
        1 => Just(Step::Identify),
        1 => Just(Step::Create),
        1 => Just(Step::Delete),
        2 => (1usize..4, 0u8..6)
            .prop_map(|(workers, during_replacement)| Step::Replace { workers, during_replacement }),
        1 => any::<bool>().prop_map(|at_once| Step::Resume { at_once }),
    ];
    prop::collection::vec(step, 1..40)
}

/// Kind of doorbells that a host uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doorbells {
    Registers,
    Shadow,
    Eventfds,
    Mapped,
}

fn run(doorbells: Doorbells, polling: Polling, steps: &[Step]) {
    let mapped = doorbells == Doorbells::Mapped;
    let mut setup = Setup::new(config(&["mem:1MiB"]), pool(2, polling), mapped);
    if matches!(doorbells, Doorbells::Shadow | Doorbells::Eventfds) {
        assert!(setup.host.configure_shadow(|_, _| 0).is_success());
    }
    let mut queues = vec![setup.create(1, 16, true), setup.create(2, 8, false)];
    let connect = |setup: &mut Setup| {
        if doorbells == Doorbells::Eventfds {
            setup.host.doorbell_eventfds = setup.host.controller.doorbell_eventfds().unwrap();
        }
    };
    connect(&mut setup);
    let (data, spare) = (setup.host.alloc(BLOCKS * 4096), setup.host.alloc(4096));
    let mut model = Model::default();
    for step in steps {
        match *step {
            Step::Submit(at, count) => {
                let at = at % queues.len();
                (0..count).for_each(|_| model.submit(&mut setup.host, &mut queues[at], data, true));
            }
            Step::Reap(at, count) => {
                let at = at % queues.len();
                for _ in 0..count {
                    model.reap(&mut setup.host, &mut queues[at], data);
                }
            }
            Step::Identify => {
                assert!(setup.host.admin(identify(0).with_prps(spare, 0)).0.is_success());
            }
            Step::Create if queues.len() < 4 => {
                let free = (1..).find(|qid| queues.iter().all(|q| q.qid != *qid)).unwrap();
                queues.push(setup.create(free, 16, false));
                connect(&mut setup);
            }
            Step::Create => {}
            Step::Delete if queues.len() > 1 => {
                let mut queue = queues.pop().unwrap();
                while model.in_flight.keys().any(|(qid, _)| *qid == queue.qid) {
                    model.reap(&mut setup.host, &mut queue, data);
                }
                let delete = DeleteIoQueue { qid: queue.qid };
                setup.host.must(delete.encode(Sqe::new(0x00, 0, 0)));
                setup.host.must(delete.encode(Sqe::new(0x04, 0, 0)));
                // Clears the shadow entries before a queue is created, like Linux. Otherwise the
                // new queue could begin with an old value, and the tail's return to this value
                // would look like no change.
                if let Some((shadow, event_idx)) = setup.host.shadow {
                    for entry in [shadow, event_idx] {
                        setup.host.poke(entry + u64::from(queue.qid) * 8, &[0; 8]);
                    }
                }
            }
            Step::Delete => {}
            Step::Replace { workers, during_replacement } => {
                let at = usize::from(during_replacement) % queues.len();
                let before: Vec<_> = queues.iter().map(|queue| queue.tail).collect();
                let queue = &mut queues[at];
                setup.replace(pool(workers, polling), |host| {
                    // The host stores commands without a doorbell write: the front end delays
                    // doorbell writes until the successor serves.
                    (0..during_replacement).for_each(|_| model.submit(host, queue, data, false));
                });
                if queues[at].tail != before[at] {
                    setup.host.ring(&queues[at], before[at]);
                }
            }
            Step::Resume { at_once } => {
                if at_once {
                    setup.host.controller.freeze(|| ());
                } else {
                    setup.freeze();
                }
                setup.host.controller.resume();
            }
        }
    }
    for queue in &mut queues {
        while model.in_flight.keys().any(|(qid, _)| *qid == queue.qid) {
            let began = std::time::Instant::now();
            while !model.reap(&mut setup.host, queue, data) {
                assert!(
                    began.elapsed() < common::LIMIT,
                    "queue {}: {:?} {:#?}",
                    queue.qid,
                    model.in_flight,
                    setup.host.controller.stats()
                );
                std::thread::yield_now();
            }
        }
        assert_eq!(setup.host.reap(queue), None, "nothing completes twice");
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 24,
        max_shrink_iters: 200,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_sequence_of_replacements_keeps_every_command(
        steps in steps(), which in 0usize..4, polls in 0usize..3
    ) {
        use Doorbells::{Eventfds, Mapped, Registers, Shadow};
        let doorbells = [Registers, Shadow, Eventfds, Mapped][which];
        let polling = [Polling::Never, ADAPTIVE, Polling::Always][polls];
        run(doorbells, polling, &steps);
    }
}

fn held_setup() -> (Setup, Held, Queue) {
    let held = Held::new(1024);
    held.mark();
    let disk: Arc<dyn Disk> = Arc::new(held.clone());
    let namespaces = vec![NamespaceConfig { disk, uuid: [7; 16] }];
    let config = Config { namespaces, ..Config::default() };
    let mut setup = Setup::new(config, pool(1, Polling::Never), false);
    let queue = setup.create(1, 64, true);
    (setup, held, queue)
}

#[test]
fn quiesce_waits_for_requests_in_flight_and_starts_no_others() {
    let (mut setup, held, mut queue) = held_setup();
    let page = setup.host.alloc(4096);
    held.instruct(|instructions| instructions.hold = true);
    setup.host.submit(&mut queue, &Sqe::read(1, 1, 0, 1).with_prps(page, 0));
    setup.host.until("the first", || held.seen().len() == 1);
    let (done, frozen) = channel();
    setup.host.controller.freeze(move || done.send(()).unwrap());
    wait::short_pause();
    assert!(frozen.try_recv().is_err());
    assert!(matches!(
        setup.host.controller.save(Parcel::new().descriptors()),
        Err(SaveError::AtWork)
    ));
    assert!(matches!(setup.host.controller.isolate(), Err(RelocateError::Frozen)));
    held.instruct(|instructions| instructions.hold = false);
    frozen.recv_timeout(common::LIMIT).unwrap();
    // The controller has quiesced after the end of the held command, whose completion it has
    // posted.
    assert_eq!(setup.host.wait(&mut queue).0, 1);
    for cid in 2..9 {
        setup.host.submit(&mut queue, &Sqe::read(1, cid.into(), 0, cid).with_prps(page, 0));
    }
    wait::short_pause();
    assert_eq!(held.seen().len(), 1);
    assert_eq!(setup.host.reap(&mut queue), None);
    setup.replace(pool(2, Polling::Never), |_| ());
    let mut ended: Vec<_> = (2..9).map(|_| setup.host.wait(&mut queue).0).collect();
    ended.sort_unstable();
    assert_eq!(ended, [2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(held.seen().len(), 8);
}

#[test]
fn a_quiesce_can_be_cancelled() {
    let (mut setup, held, mut queue) = held_setup();
    let page = setup.host.alloc(4096);
    for round in 0..20u16 {
        held.instruct(|instructions| instructions.hold = true);
        let (first, second) = (round * 2, round * 2 + 1);
        setup.host.submit(&mut queue, &Sqe::read(1, 1, 0, first).with_prps(page, 0));
        setup.host.until("the first", || held.seen().len() == usize::from(first) + 1);
        let (done, frozen) = channel::<()>();
        setup.host.controller.freeze(move || done.send(()).unwrap());
        if round % 2 == 0 {
            wait::pause();
            assert!(frozen.try_recv().is_err());
        }
        setup.host.controller.resume();
        assert!(frozen.recv().is_err(), "the callback is dropped and not called");
        setup.host.submit(&mut queue, &Sqe::read(1, 2, 0, second).with_prps(page, 0));
        // The controller serves again: it submits the second request while the first one is still
        // held.
        setup.host.until("the second", || held.seen().len() == usize::from(second) + 1);
        held.instruct(|instructions| instructions.hold = false);
        let mut ended = [setup.host.wait(&mut queue).0, setup.host.wait(&mut queue).0];
        ended.sort_unstable();
        assert_eq!(ended, [first, second]);
    }
}

#[test]
fn quiesce_waits_for_started_admin_commands() {
    let (mut setup, held, mut queue) = held_setup();
    let page = setup.host.alloc(4096);
    held.instruct(|instructions| instructions.hold = true);
    setup.host.submit(&mut queue, &Sqe::read(1, 1, 0, 1).with_prps(page, 0));
    setup.host.until("the read", || held.seen().len() == 1);
    // The deletion waits for the read.
    let delete = DeleteIoQueue { qid: 1 }.encode(Sqe::new(0x00, 70, 0));
    let mut admin = std::mem::replace(&mut setup.host.admin, Queue::none());
    setup.host.submit(&mut admin, &delete);
    setup.host.until("the deletion", || held.cancelled() == 1);
    let (done, frozen) = channel();
    setup.host.controller.freeze(move || done.send(()).unwrap());
    wait::short_pause();
    assert!(frozen.try_recv().is_err());
    setup.host.submit(&mut admin, &identify(71).with_prps(page, 0));
    held.instruct(|instructions| instructions.hold = false);
    assert_eq!(setup.host.wait(&mut admin).0, 70);
    frozen.recv_timeout(common::LIMIT).unwrap();
    wait::short_pause();
    assert_eq!(setup.host.reap(&mut admin), None);
    setup.host.admin = admin;
    setup.replace(pool(1, Polling::Never), |_| ());
    let mut admin = std::mem::replace(&mut setup.host.admin, Queue::none());
    assert_eq!(setup.host.wait(&mut admin), (71, Status::SUCCESS, 0));
}

#[test]
fn features_events_and_errors_survive_a_replacement() {
    let mut setup = Setup::new(config(&["mem:1MiB"]), pool(1, Polling::Never), false);
    let mut queue = setup.create(1, 16, true);
    let set = |fid, cdw11| SetFeatures { fid, sv: false, cdw11, ..SetFeatures::default() };
    setup.host.must(set(fid::TEMPERATURE_THRESHOLD, 0x173).encode(Sqe::new(0x09, 0, 0)));
    setup.host.must(set(fid::INTERRUPT_COALESCING, 0x102).encode(Sqe::new(0x09, 0, 0)));
    setup.host.must(set(fid::ASYNC_EVENT_CONFIGURATION, 0x1ff).encode(Sqe::new(0x09, 0, 0)));
    let page = setup.host.alloc(4096);
    // Asynchronous Event Request that stays outstanding over the replacement. The temperature event
    // was already reported, and the host has not cleared it, so it does not complete this request.
    let mut admin = std::mem::replace(&mut setup.host.admin, Queue::none());
    setup.host.submit(&mut admin, &Sqe::new(0x0c, 900, 0));
    // This command adds an error to the log.
    let (status, _) = setup.host.run(&mut queue, Sqe::read(1, 1 << 40, 0, 0).with_prps(page, 0));
    assert_eq!(status.code(), Status::LBA_OUT_OF_RANGE);
    setup.host.admin = admin;
    let before = setup.host.controller.stats();
    setup.replace(pool(2, ADAPTIVE), |_| ());
    let got = |setup: &mut Setup, fid| {
        setup.host.must(GetFeatures { fid, ..GetFeatures::default() }.encode(Sqe::new(0x0a, 0, 0)))
    };
    assert_eq!(got(&mut setup, fid::TEMPERATURE_THRESHOLD), 0x173);
    assert_eq!(got(&mut setup, fid::INTERRUPT_COALESCING), 0x102);
    let log = GetLogPage { lid: lid::ERROR_INFORMATION, numd0: 15, ..GetLogPage::default() };
    let page = setup.host.page(Sqe::get_log_page(0, log, 0)).unwrap();
    let (entry, _) = ErrorLogEntry::read_from_prefix(&page).unwrap();
    assert_eq!((entry.error_count, entry.sqid), (1, 1));
    let after = setup.host.controller.stats();
    assert_eq!(after.io, before.io);
    // The Asynchronous Event Request from before the replacement is still outstanding. An invalid
    // doorbell write causes an event that completes it.
    setup.host.controller.write_doorbell(0x1000 + 8 * 60, 1);
    let mut admin = std::mem::replace(&mut setup.host.admin, Queue::none());
    let (cid, status, dw0) = setup.host.wait(&mut admin);
    assert_eq!((cid, status, dw0 & 7), (900, Status::SUCCESS, 0));
}

#[test]
fn a_coalesced_interrupt_is_raised_by_the_successor() {
    let mut setup = Setup::new(config(&["mem:1MiB"]), pool(1, Polling::Never), false);
    let mut queue = setup.create(1, 16, true);
    // Interrupts are coalesced for the longest possible time.
    let set = SetFeatures { fid: fid::INTERRUPT_COALESCING, cdw11: 0xffff, ..Default::default() };
    setup.host.must(set.encode(Sqe::new(0x09, 0, 0)));
    let page = setup.host.alloc(4096);
    setup.host.submit(&mut queue, &Sqe::read(1, 1, 0, 5).with_prps(page, 0));
    setup.host.until("the completion", || {
        setup.host.memory.load_u64_acquire((queue.cq - BASE) as usize + 8).unwrap() >> 48 & 1 == 1
    });
    let event = queue.irq.as_ref().unwrap().try_clone().unwrap();
    setup.replace(pool(1, Polling::Never), |_| ());
    assert!(event.wait(Some(common::LIMIT)).unwrap());
    assert_eq!(setup.host.reap(&mut queue).unwrap().0, 5);
}

#[test]
fn a_disabled_or_failed_controller_stays_so_in_a_successor() {
    let mut setup = Setup::new(config(&["mem:1MiB"]), pool(1, Polling::Never), false);
    setup.host.disable();
    setup.replace(pool(1, Polling::Never), |_| ());
    assert!(!setup.host.csts().rdy());
    setup.host.enable();
    let queue = setup.create(1, 16, false);
    drop(queue);
    // Enabling with an invalid configuration is fatal.
    setup.host.disable();
    use shadowbell_spec::regs::{CC, Cc};
    setup.host.write32(CC, Cc::new().with_mps(15).with_en(true).into_bits());
    assert!(setup.host.csts().cfs());
    setup.replace(pool(1, Polling::Never), |_| ());
    assert!(setup.host.csts().cfs());
    setup.host.disable();
    setup.host.enable();
    let mut queue = setup.create(1, 16, false);
    let page = setup.host.alloc(4096);
    assert!(setup.host.run(&mut queue, Sqe::read(1, 1, 0, 0).with_prps(page, 0)).0.is_success());
}

#[test]
fn an_isolated_controller_is_isolated_in_the_successor() {
    let mut setup = Setup::new(config(&["mem:1MiB"]), pool(1, Polling::Never), false);
    let mut queue = setup.create(1, 16, false);
    setup.host.controller.isolate().unwrap();
    let page = setup.host.alloc(4096);
    let read = Sqe::read(1, 1, 0, 0).with_prps(page, 0);
    assert!(setup.host.run(&mut queue, read).0.is_success());
    setup.replace(pool(1, Polling::Never), |_| ());
    assert!(setup.host.run(&mut queue, read).0.is_success());
    let workers = setup.host.controller.stats().workers;
    assert!(workers.iter().all(|sleep| sleep.worker == 1), "{workers:?}");
}

#[test]
fn unmapped_memory_can_be_mapped_in_the_successor() {
    let mut setup = Setup::new(config(&["mem:1MiB"]), pool(1, Polling::Never), false);
    assert!(setup.host.configure_shadow(|_, _| 0).is_success());
    let mut queue = setup.create(1, 16, false);
    let page = setup.host.alloc(4096);
    setup.freeze();
    let mut parcel = Parcel::new();
    let fds = parcel.descriptors();
    let saved = setup.host.controller.save(fds).unwrap();
    let carrier = Carrier::default();
    let config = setup.config.clone();
    let pool = pool(1, Polling::Never);
    let successor = Controller::successor(config, pool, carrier, &saved, fds).unwrap();
    setup.host.controller = successor;
    setup.host.controller.restore(&saved, fds).unwrap();
    setup.host.submit(&mut queue, &Sqe::read(1, 1, 0, 3).with_prps(page, 0));
    wait::short_pause();
    assert_eq!(setup.host.reap(&mut queue), None);
    setup.host.controller.map_dma(BASE, MEMORY, &setup.host.memory).unwrap();
    assert_eq!(setup.host.wait(&mut queue).0, 3);
    assert!(setup.host.admin(identify(0).with_prps(page, 0)).0.is_success());
}

#[test]
fn a_successor_with_another_configuration_is_refused() {
    let mut setup = Setup::new(config(&["mem:1MiB"]), pool(1, Polling::Never), false);
    let mut queue = setup.create(1, 16, false);
    setup.freeze();
    let others = [
        (Config { serial: "OTHER".into(), ..setup.config.clone() }, "serial number"),
        (Config { io_queues: 2, ..setup.config.clone() }, "number of I/O queues"),
        (Config { mdts: 9, ..setup.config.clone() }, "transfer limit"),
        (config(&["mem:2MiB"]), "set of namespaces"),
    ];
    for (other, what) in others {
        let mut parcel = Parcel::new();
        let saved = setup.host.controller.save(parcel.descriptors()).unwrap();
        let (pool, carrier) = (pool(1, Polling::Never), Carrier::default());
        let error = Controller::successor(other, pool, carrier, &saved, parcel.descriptors());
        let error = error.unwrap_err();
        assert!(matches!(error, RestoreError::Shape(shape) if shape == what), "{error}");
    }
    setup.host.controller.resume();
    let page = setup.host.alloc(4096);
    assert!(setup.host.run(&mut queue, Sqe::read(1, 1, 0, 0).with_prps(page, 0)).0.is_success());
}

/// A saved state comes from a trusted server, but may be corrupt.
#[test]
fn a_corrupt_state_never_panics() {
    let mut setup = Setup::new(config(&["mem:1MiB"]), pool(1, Polling::Never), false);
    assert!(setup.host.configure_shadow(|_, _| 0).is_success());
    let mut queue = setup.create(1, 16, true);
    let page = setup.host.alloc(4096);
    assert!(setup.host.run(&mut queue, Sqe::read(1, 1, 0, 0).with_prps(page, 0)).0.is_success());
    setup.freeze();
    let mut parcel = Parcel::new();
    let saved = setup.host.controller.save(parcel.descriptors()).unwrap();
    let whole = serde_json::to_value(&saved).unwrap();
    let (pool, count) = (pool(2, Polling::Never), Mutex::new(0));
    let mut places = 0;
    visit_numbers(&whole, &mut |_| places += 1);
    for place in 0..places {
        for value in [0u64, 1, 65_535, u64::MAX] {
            let mut changed = whole.clone();
            change(&mut changed, place, value);
            let Ok(state) = serde_json::from_value::<SavedController>(changed) else { continue };
            let mut fds = shadowbell_state::Descriptors::default();
            let doorbells = setup.host.controller.doorbells().mapping().fd().unwrap();
            fds.add(doorbells.try_clone_to_owned().unwrap());
            let (config, carrier) = (setup.config.clone(), Carrier::default());
            let made = Controller::successor(config, pool.clone(), carrier, &state, &mut fds);
            if let Ok(successor) = made {
                successor.map_dma(BASE, MEMORY, &setup.host.memory).unwrap();
                if successor.restore(&state, &mut fds).is_ok() {
                    *count.lock().unwrap() += 1;
                }
                let (done, gone) = channel();
                successor.disconnect(move || done.send(()).unwrap());
                gone.recv_timeout(common::LIMIT).expect("the controller can be reset");
            }
        }
    }
    assert!(*count.lock().unwrap() > 10);
}

/// Name of a field whose values the test does not change to extremes: the sum of counters must not
/// overflow.
const COUNTERS: &str = "counters";

fn visit_numbers(value: &serde_json::Value, with: &mut dyn FnMut(&serde_json::Value)) {
    match value {
        serde_json::Value::Array(items) => items.iter().for_each(|item| visit_numbers(item, with)),
        serde_json::Value::Object(items) => {
            items
                .iter()
                .filter(|(key, _)| *key != COUNTERS)
                .for_each(|(_, item)| visit_numbers(item, with));
        }
        serde_json::Value::Number(_) => with(value),
        _ => {}
    }
}

/// Replaces the number at this position of the state. Returns the position behind `value`.
fn change(value: &mut serde_json::Value, place: usize, new: u64) -> usize {
    match value {
        serde_json::Value::Array(items) => {
            items.iter_mut().fold(place, |place, item| change(item, place, new))
        }
        serde_json::Value::Object(items) => {
            let items = items.iter_mut().filter(|(key, _)| *key != COUNTERS);
            items.fold(place, |place, (_, item)| change(item, place, new))
        }
        serde_json::Value::Number(number) if place == 0 => {
            *number = new.into();
            usize::MAX
        }
        serde_json::Value::Number(_) => place - 1,
        _ => place,
    }
}

/// The checkpoint of a successor contains its current state. If it still contained the state at the
/// successor's start, the process after a crash would execute completed admin commands again.
#[test]
fn a_successors_checkpoint_has_its_current_state() {
    let mut setup = Setup::new(config(&["mem:1MiB"]), pool(1, ADAPTIVE), false);
    setup.recorder = Some(Arc::default());
    let page = setup.host.alloc(4096);
    let last = Arc::clone(setup.recorder.as_ref().unwrap());
    let at = |setup: &Setup| {
        let state = last.0.lock().unwrap();
        let (sq, cq) = (&state["admin"]["sq"], &state["admin"]["cq"]);
        assert_eq!(sq["head"], setup.host.admin.tail, "{state}");
        (cq["tail"].as_u64().unwrap(), cq["phase"].as_bool().unwrap(), cq["staged"].clone())
    };
    for _ in 0..3 {
        for _ in 0..5 {
            assert!(setup.host.admin(identify(0).with_prps(page, 0)).0.is_success());
        }
        setup.replace(pool(1, ADAPTIVE), |_| ());
        let (tail, phase, staged) = at(&setup);
        assert_eq!((tail, phase), (u64::from(setup.host.admin.head), setup.host.admin.phase));
        assert_eq!(staged, serde_json::json!([]));
        assert!(setup.host.admin(identify(0).with_prps(page, 0)).0.is_success());
        // The checkpoint is stored before the completion is posted.
        let (before, _, staged) = at(&setup);
        assert_eq!((before, staged.as_array().unwrap().len()), (tail, 1));
    }
}

/// Last recorded checkpoint with its descriptors.
#[derive(Default)]
struct WholeCheckpoint(Mutex<Option<(serde_json::Value, Descriptors)>>);

impl Recorder for WholeCheckpoint {
    fn record(&self, state: &SavedController, fds: Descriptors) {
        *self.0.lock().unwrap() = Some((serde_json::to_value(state).unwrap(), fds));
    }
}

/// A shutdown that a process has begun is completed by the process that recovers the controller.
#[test]
fn a_shutdown_continues_after_a_crash() {
    type Begin<'a> = &'a dyn Fn(&mut Host, &Gate);
    let cc = |host: &Host| Cc::from_bits(host.read32(regs::CC));
    let shut_down = |host: &Host| {
        let cc = cc(host).with_shn(regs::SHN_NORMAL);
        host.write32(regs::CC, cc.into_bits());
    };
    // Progress of the shutdown at the crash: it waits for the queues, it waits for a reset, or the
    // host has enabled the controller in the meantime.
    let begin: [(&str, Begin<'_>); 3] = [
        ("ready", &|host, _| shut_down(host)),
        ("resetting", &|host, gate| {
            let mut queue = host.create(1, 16, false);
            let page = host.alloc(4096);
            host.submit(&mut queue, &Sqe::write(1, 0, 0, 0).with_prps(page, 0));
            host.until("a request", || gate.waiting() == 1);
            let cc = cc(host).with_en(false).with_shn(regs::SHN_NORMAL);
            host.write32(regs::CC, cc.into_bits());
        }),
        ("enabled again", &|host, gate| {
            host.disable();
            shut_down(host);
            host.until("the flush", || gate.waiting() == 1);
            host.enable();
            shut_down(host);
        }),
    ];
    for (what, begin) in begin {
        let slow = || {
            let gate = Arc::new(Gate::default());
            let disk: Arc<dyn Disk> = Arc::new(Slow(Arc::clone(&gate)));
            let namespaces = vec![NamespaceConfig { disk, uuid: [7; 16] }];
            (Config { namespaces, ..Config::default() }, gate)
        };
        let (config, gate) = slow();
        let mut host = Host::with(config, ADAPTIVE);
        let checkpoint = Arc::new(WholeCheckpoint::default());
        let recorder: Arc<dyn Recorder> = Arc::<WholeCheckpoint>::clone(&checkpoint);
        host.disable();
        host.controller.record_with(recorder).unwrap();
        host.enable();
        begin(&mut host, &gate);
        assert_eq!(host.csts().shst(), regs::SHST_OCCURRING, "{what}");
        let (state, mut fds) = checkpoint.0.lock().unwrap().take().unwrap();
        let saved: SavedController = serde_json::from_value(state).unwrap();
        let (config, next) = slow();
        let pool = pool(1, ADAPTIVE);
        let successor =
            Controller::successor(config, pool, Carrier::default(), &saved, &mut fds).unwrap();
        successor.map_dma(BASE, MEMORY, &host.memory).unwrap();
        successor.recover(&saved, &mut fds, CauseOfDeath::Killed).unwrap();
        successor.resume();
        let dead = std::mem::replace(&mut host.controller, successor);
        host.until(&format!("{what}: the flush"), || next.waiting() == 1);
        assert_eq!(host.csts().shst(), regs::SHST_OCCURRING, "{what}");
        next.end(Ok(()));
        host.until("the shutdown", || host.csts().shst() == regs::SHST_COMPLETE);
        // Completes the requests of the dead controller, because a controller with requests in
        // flight cannot be dropped.
        (0..2).for_each(|_| gate.end(Ok(())));
        drop(dead);
    }
}

/// Paths of all fields in a JSON value, with their types.
fn form(value: &serde_json::Value, path: &str, all: &mut BTreeSet<String>) {
    use serde_json::Value;
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(name, field)| form(field, &format!("{path}.{name}"), all));
        }
        Value::Array(values) => {
            values.iter().for_each(|value| form(value, &format!("{path}[]"), all));
        }
        Value::Null => drop(all.insert(format!("{path}: null"))),
        Value::Bool(_) => drop(all.insert(format!("{path}: bool"))),
        Value::Number(_) => drop(all.insert(format!("{path}: number"))),
        Value::String(_) => drop(all.insert(format!("{path}: string"))),
    }
}

fn form_of(value: &serde_json::Value) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    form(value, "", &mut all);
    all
}

/// For each readable version of the state, `tests/golden` has a file. The file of the current
/// version must have the same fields as the state that the program writes. After a change of the
/// fields, `SHADOWBELL_WRITE_GOLDEN=1` writes the file again. A change other than a new field with
/// a default requires a new version.
#[test]
fn states_of_all_readable_versions_are_read() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
    let path = |version: u32| format!("{directory}/controller-{version}.json");
    let mut setup = Setup::new(config(&["mem:1MiB"]), pool(1, ADAPTIVE), false);
    assert!(setup.host.configure_shadow(|_, _| 0).is_success());
    let _queue = setup.create(1, 16, true);
    let since = Instant::now();
    // Times of 0 ms are not saved. After some milliseconds, all times are greater than 0.
    wait::until("some milliseconds", || since.elapsed() > Duration::from_millis(2));
    setup.freeze();
    let mut fds = Descriptors::default();
    let saved = setup.host.controller.save(&mut fds).unwrap();
    let written = serde_json::to_value(&saved).unwrap();
    if std::env::var_os("SHADOWBELL_WRITE_GOLDEN").is_some() {
        let text = serde_json::to_string_pretty(&written).unwrap() + "\n";
        std::fs::write(path(shadowbell_state::VERSION), text).unwrap();
    }
    for version in shadowbell_state::READABLE {
        let text = std::fs::read(path(version)).expect("a file for each version");
        let read: SavedController = shadowbell_state::read_json("controller", &text).unwrap();
        assert_eq!(read.namespaces().count(), 1);
        if version == shadowbell_state::VERSION {
            let golden: serde_json::Value = serde_json::from_slice(&text).unwrap();
            assert_eq!(form_of(&written), form_of(&golden));
        }
    }
}
