//! Hosts of the controllers of one subsystem. The controllers share namespaces. The hosts use
//! reservations of all types, ANA states change, hosts change or lose their host identifier, and
//! controllers are reset.
//!
//! A model predicts the status of each command by the rules of the specification, from registrants
//! and keys, the holder, and the ANA state. After each step this body checks
//!
//! * the status of the command, and the data of a read;
//! * the generation, the type and the registrants of Reservation Report, for a host with access;
//! * the states and the change count of the log page Asymmetric Namespace Access;
//! * that every command and every change of a state ends.

use crate::limits::Limits;
use crate::source::Source;
use shadowbell_controller::{
    Carrier, Config, Controller, NamespaceConfig, Polling, Pool, Subsystem, Turns,
};
use shadowbell_disk::Disk;
use shadowbell_memory::{Mapping, SharedBytes};
use shadowbell_spec::admin::{GetLogPage, SetFeatures};
use shadowbell_spec::feature::fid;
use shadowbell_spec::log::{AnaLog, AnaState, lid};
use shadowbell_spec::nvm::{DatasetManagement, DsmRange};
use shadowbell_spec::reservation::{RegisteredController, ReservationStatus};
use shadowbell_spec::status::Status;
use shadowbell_spec::{Cqe, Sqe, regs};
use shadowbell_testing::wait::LIMIT;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

const ACTIONS: usize = 200;
const HOSTS: usize = 3;
/// Number of namespaces, each in its own ANA group, and their number of blocks.
const NAMESPACES: u32 = 2;
const BLOCKS: u64 = 16;
const PAGE: u64 = 4096;
const BASE: u64 = 0x10_0000;
const PAGES: u64 = 8;
const ENTRIES: u32 = 8;
/// Addresses of data, and of keys and range lists.
const DATA: u64 = BASE + 4 * PAGE;
const LIST: u64 = BASE + 5 * PAGE;
/// Time after which an operation counts as hung.
const HUNG: Duration = LIMIT;

const CONFLICT: Status = Status::RESERVATION_CONFLICT;
const INVALID: Status = Status::INVALID_FIELD;

/// Runs the program that `input` encodes.
pub fn run(input: &[u8]) {
    let mut source = Source::new(input);
    let limits = Limits::begin();
    let mut field = Field::new();
    for _ in 0..ACTIONS {
        if source.is_empty() {
            break;
        }
        let which = source.below(HOSTS);
        field.act(which, &mut source);
        field.compare(which);
        let Field { turns, hosts, .. } = &mut field;
        limits.step_of("subsystem", turns, &hosts[which].controller);
    }
}

/// Reservation state of a namespace, by host identifier.
#[derive(Clone, Debug, Default)]
struct Reserved {
    generation: u32,
    keys: BTreeMap<u64, u64>,
    /// Type of the reservation, and its holder. The holder is not used for the types in which all
    /// registrants are holders.
    held: Option<(u8, u64)>,
    data: BTreeMap<u64, u8>,
}

/// A reservation command.
#[derive(Clone, Copy, Debug)]
enum ReservationCommand {
    Register { key: u64 },
    Unregister { key: Option<u64> },
    Replace { key: Option<u64>, new: u64 },
    Acquire { key: u64, kind: u8 },
    Preempt { key: u64, of: u64, kind: u8 },
    Release { key: u64, kind: u8 },
    Clear { key: u64 },
}

fn is_of_all(kind: u8) -> bool {
    kind >= 5
}

impl Reserved {
    fn is_holder(&self, host: u64) -> bool {
        match self.held {
            None => false,
            Some((kind, _)) if is_of_all(kind) => self.keys.contains_key(&host),
            Some((_, holder)) => holder == host,
        }
    }

    /// Rights of a host to read and to write.
    fn rights(&self, host: Option<u64>) -> (bool, bool) {
        let Some((kind, _)) = self.held else { return (true, true) };
        let is_registrant = host.is_some_and(|host| self.keys.contains_key(&host));
        if host.is_some_and(|host| self.is_holder(host)) || is_registrant && kind > 2 {
            return (true, true);
        }
        (kind % 2 == 1, false)
    }

    fn unregister(&mut self, host: u64) {
        let held = self.is_holder(host);
        self.keys.remove(&host);
        let goes_on = self.held.is_some_and(|(kind, _)| is_of_all(kind)) && !self.keys.is_empty();
        if held && !goes_on {
            self.held = None;
        }
    }

    fn unregister_all(&mut self, which: impl Fn(u64, u64) -> bool) {
        let chosen: Vec<u64> =
            self.keys.iter().filter(|(h, k)| which(**h, **k)).map(|(h, _)| *h).collect();
        chosen.into_iter().for_each(|host| self.unregister(host));
    }

    fn apply(&mut self, host: u64, command: ReservationCommand) -> Result<(), Status> {
        let own = self.keys.get(&host).copied();
        let known = |key: Option<u64>| match own {
            Some(own) if key.is_none_or(|key| key == own) => Ok(()),
            _ => Err(CONFLICT),
        };
        match command {
            ReservationCommand::Register { key: 0 }
            | ReservationCommand::Replace { new: 0, .. } => return Err(INVALID),
            ReservationCommand::Register { key } if own.is_some_and(|own| own != key) => {
                return Err(CONFLICT);
            }
            ReservationCommand::Register { key } => drop(self.keys.insert(host, key)),
            ReservationCommand::Unregister { key } => {
                known(key)?;
                self.unregister(host);
            }
            ReservationCommand::Replace { key, new } => {
                if key.is_some() || own.is_some() {
                    known(key)?;
                }
                self.keys.insert(host, new);
            }
            ReservationCommand::Acquire { key, kind } => {
                known(Some(key))?;
                match self.held {
                    None => self.held = Some((kind, host)),
                    Some((present, _)) if present == kind && self.is_holder(host) => {}
                    Some(_) => return Err(CONFLICT),
                }
                return Ok(());
            }
            ReservationCommand::Preempt { key, of, kind } => {
                known(Some(key))?;
                let holder = self.held.filter(|(kind, _)| !is_of_all(*kind));
                match (self.held, holder) {
                    (Some((present, _)), _) if is_of_all(present) && of == 0 => {
                        self.unregister_all(|other, _| other != host);
                        self.held = Some((kind, host));
                    }
                    (_, Some(_)) if of == 0 => return Err(INVALID),
                    (_, Some((_, holder))) if self.keys.get(&holder) == Some(&of) => {
                        self.held = Some((kind, host));
                        self.unregister_all(|other, key| other != host && key == of);
                    }
                    _ if of == 0 || self.keys.values().all(|key| *key != of) => {
                        return Err(CONFLICT);
                    }
                    _ => self.unregister_all(|_, key| key == of),
                }
            }
            ReservationCommand::Release { key, kind } => {
                known(Some(key))?;
                match self.held {
                    Some((present, _)) if self.is_holder(host) && present != kind => {
                        return Err(INVALID);
                    }
                    Some(_) if self.is_holder(host) => self.held = None,
                    _ => {}
                }
                return Ok(());
            }
            ReservationCommand::Clear { key } => {
                known(Some(key))?;
                self.keys.clear();
                self.held = None;
            }
        }
        self.generation += 1;
        Ok(())
    }
}

/// A controller, and its host's state.
struct Host {
    controller: Controller,
    memory: SharedBytes,
    /// Tail, head and phase tag of the admin queue and the I/O queue.
    queues: [(u32, u32, bool); 2],
    id: Option<u64>,
    states: [AnaState; NAMESPACES as usize],
    /// Number of ANA state changes since the last reset.
    changes: u64,
}

struct Field {
    turns: Turns,
    hosts: Vec<Host>,
    reserved: Vec<Reserved>,
}

impl Field {
    fn new() -> Self {
        let (pool, turns) = Pool::driven(Polling::default()).expect("a worker");
        let subsystem = Subsystem::new(None).expect("a subsystem");
        let disks: Vec<Arc<dyn Disk>> = (0..NAMESPACES)
            .map(|_| shadowbell_disk_file::open("mem:8KiB").expect("memory"))
            .collect();
        let host = |_| {
            let namespaces = (1..).zip(&disks);
            let namespaces = namespaces
                .map(|(n, disk)| NamespaceConfig { disk: Arc::clone(disk), uuid: [n; 16] });
            let member = subsystem.join(None).expect("a place").with_ana([(2, 2)], []);
            let config = Config {
                namespaces: namespaces.collect(),
                io_queues: 1,
                member: Some(member),
                ..Config::default()
            };
            let controller =
                Controller::new(config, pool.clone(), Carrier::default()).expect("a controller");
            let memory = Mapping::shared("guest", PAGES * PAGE).expect("memory").bytes();
            controller.map_dma(BASE, PAGES * PAGE, &memory).expect("a map");
            let (states, queues) = Default::default();
            Host { controller, memory, queues, id: None, states, changes: 0 }
        };
        let hosts = (0..HOSTS).map(host).collect();
        let reserved = vec![Reserved::default(); NAMESPACES as usize];
        let mut field = Self { turns, hosts, reserved };
        (0..HOSTS).for_each(|which| field.enable(which));
        field
    }

    /// Runs turns of the I/O thread until the condition holds.
    fn until(&mut self, what: &str, mut holds: impl FnMut(&mut Self) -> bool) {
        let end = Instant::now() + HUNG;
        while !holds(self) {
            assert!(Instant::now() < end, "{what} does not come");
            if !self.turns.turn() {
                // Lets the subsystem's own thread run, because the condition may depend on it.
                std::thread::yield_now();
            }
        }
    }

    fn csts(&self, which: usize) -> u32 {
        let mut bytes = [0; 4];
        self.hosts[which].controller.read(regs::CSTS, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn enable(&mut self, which: usize) {
        let host = &mut self.hosts[which];
        host.memory.fill(0, (PAGES * PAGE) as usize, 0).expect("all of it");
        host.queues = [(0, 0, true); 2];
        let write = |at, value: u64| host.controller.write(at, &value.to_le_bytes());
        host.controller.write(regs::AQA, &((ENTRIES - 1) << 16 | (ENTRIES - 1)).to_le_bytes());
        write(regs::ASQ, BASE);
        write(regs::ACQ, BASE + PAGE);
        host.controller.write(regs::CC, &0x0046_0001_u32.to_le_bytes());
        self.until("CSTS.RDY", |field| field.csts(which) & 1 == 1);
        let size = (ENTRIES - 1) << 16 | 1;
        for (opcode, at, cdw11) in [(0x05, 3, 1), (0x01, 2, 1 << 16 | 1)] {
            let sqe = Sqe { cdw10: size, cdw11, ..Sqe::new(opcode, 0, 0) };
            let (status, _) = self.execute(which, 0, sqe.with_prps(BASE + at * PAGE, 0));
            assert!(status.is_success(), "a queue: {status}");
        }
    }

    /// Executes a command in the admin queue (0) or the I/O queue.
    fn execute(&mut self, which: usize, qid: usize, sqe: Sqe) -> (Status, u32) {
        let (sq, cq) = ([0, 2 * PAGE][qid], [PAGE, 3 * PAGE][qid]);
        let host = &mut self.hosts[which];
        let (tail, head, phase) = host.queues[qid];
        let at = sq + u64::from(tail) * Sqe::SIZE as u64;
        host.memory.write_from(at as usize, sqe.as_bytes()).expect("in range");
        let tail = (tail + 1) % ENTRIES;
        host.queues[qid].0 = tail;
        host.controller.write_doorbell(0x1000 + 8 * qid as u64, tail);
        let at = (cq + u64::from(head) * Cqe::SIZE as u64) as usize;
        let mut end = Cqe::default();
        self.until("a completion", |field| {
            let mut bytes = [0; Cqe::SIZE];
            field.hosts[which].memory.read_into(at, &mut bytes).expect("in range");
            end = Cqe::read_from_bytes(&bytes).expect("an entry");
            end.phase() == phase
        });
        let host = &mut self.hosts[which];
        let next = (head + 1) % ENTRIES;
        host.queues[qid] = (tail, next, phase ^ (next == 0));
        host.controller.write_doorbell(0x1004 + 8 * qid as u64, next);
        (end.status(), end.dw0)
    }

    fn poke(&self, which: usize, iova: u64, bytes: &[u8]) {
        self.hosts[which].memory.write_from((iova - BASE) as usize, bytes).expect("in range");
    }

    fn peek(&self, which: usize, iova: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.hosts[which].memory.read_into((iova - BASE) as usize, &mut bytes).expect("in range");
        bytes
    }

    fn act(&mut self, which: usize, source: &mut Source<'_>) {
        match source.below(16) {
            0..=5 => self.reserve(which, source),
            6..=12 => self.transfer(which, source),
            13 => self.change_ana_state(which, source),
            14 => self.change_host(which, source),
            _ => self.reset(which),
        }
    }

    fn nsid(source: &mut Source<'_>) -> u32 {
        1 + source.below(NAMESPACES as usize) as u32
    }

    /// Status with which the ANA state refuses a command, if it does.
    fn refused_by_ana(&self, which: usize, nsid: u32) -> Option<Status> {
        self.hosts[which].states[nsid as usize - 1].refusal()
    }

    fn reserve(&mut self, which: usize, source: &mut Source<'_>) {
        let nsid = Self::nsid(source);
        let keys = [1, 1, 2, 3, 0];
        let (key, other) = (source.of(&keys), source.of(&keys));
        let kind = 1 + source.below(6) as u8;
        let ignores = source.rarely(3);
        let given = (!ignores).then_some(key);
        let aborts = source.bool();
        let (opcode, cdw10, first, second, command) = match source.below(7) {
            0 => (0x0d, 0, key, other, ReservationCommand::Register { key: other }),
            1 => (0x0d, 1, key, other, ReservationCommand::Unregister { key: given }),
            2 => (0x0d, 2, key, other, ReservationCommand::Replace { key: given, new: other }),
            3 => (0x11, 0, key, other, ReservationCommand::Acquire { key, kind }),
            4 => {
                let action = if aborts { 2 } else { 1 };
                (0x11, action, key, other, ReservationCommand::Preempt { key, of: other, kind })
            }
            5 => (0x15, 0, key, other, ReservationCommand::Release { key, kind }),
            _ => (0x15, 1, key, other, ReservationCommand::Clear { key }),
        };
        let is_register = opcode == 0x0d;
        let iekey = u32::from(is_register && ignores) << 3;
        let rtype = if is_register { 0 } else { u32::from(kind) << 8 };
        let mut list = first.to_le_bytes().to_vec();
        list.extend_from_slice(&second.to_le_bytes());
        self.poke(which, LIST, &list);
        let sqe = Sqe { cdw10: cdw10 | iekey | rtype, ..Sqe::new(opcode, 1, nsid) };
        let (status, _) = self.execute(which, 1, sqe.with_prps(LIST, 0));
        let expected = match (self.refused_by_ana(which, nsid), self.hosts[which].id) {
            (Some(refused), _) => Err(refused),
            (None, None) => Err(Status::HOST_ID_NOT_INITIALIZED),
            (None, Some(host)) => self.reserved[nsid as usize - 1].apply(host, command),
        };
        assert_eq!(status.code(), expected.err().unwrap_or(Status::SUCCESS), "{command:?}");
    }

    /// Executes a command that reads or writes, and checks its status.
    fn transfer(&mut self, which: usize, source: &mut Source<'_>) {
        let (nsid, lba) = (Self::nsid(source), source.below(BLOCKS as usize) as u64);
        let byte = source.u8() | 1;
        let index = nsid as usize - 1;
        let host = self.hosts[which].id;
        let (reads, writes) = self.reserved[index].rights(host);
        let kind = source.below(8);
        let plain = |sqe: Sqe| sqe.with_prps(DATA, 0);
        let known = self.reserved[index].data.get(&lba).copied().unwrap_or(0);
        let (sqe, may) = match kind {
            0 | 1 => {
                self.poke(which, DATA, &[byte; 512]);
                (plain(Sqe::write(nsid, lba, 0, 1)), writes)
            }
            2 | 3 => {
                self.poke(which, DATA, &[0xee; 512]);
                (plain(Sqe::read(nsid, lba, 0, 1)), reads)
            }
            4 => {
                self.poke(which, DATA, &[known; 512]);
                (plain(Sqe::compare(nsid, lba, 0, 1)), reads)
            }
            5 => (Sqe::write_zeroes(nsid, lba, 0, false, 1), writes),
            6 => {
                let range = DsmRange { attributes: 0, blocks: 1, slba: lba };
                self.poke(which, LIST, range.as_bytes());
                let fields = DatasetManagement { ad: true, ..DatasetManagement::default() };
                (Sqe::dsm(nsid, fields, 1).with_prps(LIST, 0), writes)
            }
            _ => (Sqe::flush(if byte > 128 { u32::MAX } else { nsid }, 1), writes),
        };
        let (status, _) = self.execute(which, 1, sqe);
        let refused =
            |nsid: u32, may: bool| self.refused_by_ana(which, nsid).or((!may).then_some(CONFLICT));
        let expected = match sqe.nsid {
            u32::MAX => (1..=NAMESPACES)
                .find_map(|nsid| refused(nsid, self.reserved[nsid as usize - 1].rights(host).1)),
            _ => refused(nsid, may),
        };
        assert_eq!(status.code(), expected.unwrap_or(Status::SUCCESS), "command {kind} of {nsid}");
        if expected.is_some() {
            return;
        }
        let data = &mut self.reserved[index].data;
        match kind {
            0 | 1 => drop(data.insert(lba, byte)),
            2 | 3 => assert_eq!(self.peek(which, DATA, 512), [known; 512], "block {lba}"),
            5 | 6 => drop(data.remove(&lba)),
            _ => {}
        }
    }

    fn change_ana_state(&mut self, which: usize, source: &mut Source<'_>) {
        // A change of a group without a namespace has no effect.
        let group = 1 + source.below(NAMESPACES as usize + 1) as u32;
        let state = source.of(&AnaState::ALL);
        let done = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&done);
        let host = &mut self.hosts[which];
        host.controller.set_ana_state(group, state, move || flag.store(true, Ordering::Release));
        if let Some(its) = host.states.get_mut(group as usize - 1)
            && std::mem::replace(its, state) != state
        {
            host.changes += 1;
        }
        self.until("a change of a way", |_| done.load(Ordering::Acquire));
    }

    fn change_host(&mut self, which: usize, source: &mut Source<'_>) {
        // Two hosts may have the same identifier.
        let id = source.of(&[0_u64, 1, 2, 3, 3]);
        self.poke(which, LIST, &id.to_le_bytes());
        let fields = SetFeatures { fid: fid::HOST_IDENTIFIER, ..SetFeatures::default() };
        let (status, _) =
            self.execute(which, 0, Sqe::set_features(0, fields, 1).with_prps(LIST, 0));
        assert!(status.is_success(), "a host's identifier: {status}");
        self.hosts[which].id = (id != 0).then_some(id);
    }

    fn reset(&mut self, which: usize) {
        self.hosts[which].controller.write(regs::CC, &0x0046_0000_u32.to_le_bytes());
        self.until("the end of a reset", |field| field.csts(which) & 1 == 0);
        let host = &mut self.hosts[which];
        (host.id, host.changes) = (None, 0);
        self.enable(which);
    }

    /// Compares a controller's reports with the model.
    fn compare(&mut self, which: usize) {
        let fields = GetLogPage { lid: lid::ANA, numd0: 1023, ..GetLogPage::default() };
        let sqe = Sqe::get_log_page(0, fields, 1).with_prps(DATA, 0);
        assert!(self.execute(which, 0, sqe).0.is_success());
        let log = AnaLog::decode(&self.peek(which, DATA, 4096)).expect("the log page");
        let states: Vec<_> = log.groups.iter().map(|group| group.state).collect();
        let host = &self.hosts[which];
        assert_eq!(states, host.states.map(Some));
        assert_eq!(log.changes, host.changes);
        for nsid in 1..=NAMESPACES {
            let sqe = Sqe { cdw10: 1023, ..Sqe::new(0x0e, 1, nsid) }.with_prps(DATA, 0);
            let (status, _) = self.execute(which, 1, sqe);
            let refused = self.refused_by_ana(which, nsid);
            assert_eq!(status.code(), refused.unwrap_or(Status::SUCCESS));
            if refused.is_some() {
                continue;
            }
            let page = self.peek(which, DATA, 4096);
            let (head, rest) = ReservationStatus::read_from_prefix(&page).expect("a head");
            let its = &self.reserved[nsid as usize - 1];
            assert_eq!(u32::from_le_bytes(head.generation), its.generation);
            assert_eq!(head.rtype, its.held.map_or(0, |(kind, _)| kind));
            let mut seen = BTreeMap::new();
            let count = usize::from(u16::from_le_bytes(head.regctl));
            for bytes in rest.chunks_exact(size_of::<RegisteredController>()).take(count) {
                let one = RegisteredController::read_from_bytes(bytes).expect("a controller");
                assert_eq!(one.rcsts & 1 == 1, its.is_holder(one.hostid), "{one:?}");
                seen.insert(one.hostid, one.rkey);
            }
            assert_eq!(seen, its.keys, "the registrants of {nsid}");
        }
    }
}
