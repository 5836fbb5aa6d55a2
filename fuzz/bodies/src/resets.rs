//! A guest that resets its controller at any moment: while commands are in their queues, at the
//! disk or partly executed, while queues are deleted and memory is unmapped, and during another
//! reset. The controller has a small quota.
//!
//! After each turn of the I/O thread this body checks that
//!
//! * a completion belongs to an outstanding command, so each command completes at most once, and
//!   not to a queue whose deletion has completed;
//! * the disk has no more requests in flight than the quota allows, plus those of commands that
//!   need many requests;
//! * after a reset, the disk has no requests in flight, and no memory is written until the next
//!   enable; unmapped memory is never written;
//! * a reset, a deletion and an unmap end as soon as the disk completes its requests. If the disk
//!   can cancel requests, a reset ends even if the disk completes none.

use crate::command::{self, BASE, PAGE, PAGES, page};
use crate::limits::Limits;
use crate::source::Source;
use crate::test_disk::{self, BLOCKS, TestDisk};
use shadowbell_controller::config::uuid_from;
use shadowbell_controller::{Carrier, Config, Controller, NamespaceConfig, Polling, Pool, Turns};
use shadowbell_memory::{Mapping, SharedBytes};
use shadowbell_spec::nvm::{CopyRange, DsmRange};
use shadowbell_spec::{Cqe, Sqe, regs};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use zerocopy::{FromBytes, IntoBytes};

const ACTIONS: usize = 128;
/// Maximum number of turns of the I/O thread for which the guest waits for an operation.
const MAX_TURNS: usize = 20_000;
/// Number of entries of each I/O queue.
const ENTRIES: u32 = 32;
const QUEUES: u16 = 2;
/// First page for data, and the pages for range lists.
const DATA: u64 = 14;
const COPY_RANGES: u64 = PAGES - 2;
const DSM_RANGES: u64 = PAGES - 1;
/// Maximum number of disk requests in flight that do not count for the quota. They belong to
/// commands that need many requests: multi-step commands and Copy.
const MAX_MULTI_STEP_REQUESTS: usize = 32 + 32;
const CC: u32 = 0x0046_0000;

/// Runs the program that `input` encodes.
pub fn run(input: &[u8]) {
    let mut source = Source::new(input);
    let limits = Limits::begin();
    let mut guest = Guest::new(&mut source);
    guest.enable();
    for _ in 0..ACTIONS {
        if source.is_empty() {
            break;
        }
        guest.act(&mut source);
        limits.step_of("resets", &mut guest.turns, &guest.controller);
    }
    guest.finish();
    limits.step_of("resets", &mut guest.turns, &guest.controller);
}

/// State of the controller.
enum Life {
    /// The reset has ended, and the host has not enabled the controller again. The controller must
    /// not write to memory.
    Off,
    On,
    /// A reset is in progress. If there is a flag, the reset ends when the flag is set. Otherwise
    /// it ends when CSTS.RDY is 0.
    Ending(Option<Arc<AtomicBool>>),
}

/// Effect that an admin command has on the model if it succeeds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    DeleteSq(u16),
    CreateSq(u16),
    Other,
}

#[derive(Default)]
struct Sq {
    entries: u32,
    tail: u32,
    /// Head of the submission queue, as reported by the last completion.
    head: u32,
    commands: BTreeSet<u16>,
}

struct Cq {
    entries: u32,
    head: u32,
    phase: bool,
}

struct Guest {
    controller: Controller,
    turns: Turns,
    test_disk: TestDisk,
    memory: SharedBytes,
    quota: usize,
    /// True if each command needs at most one disk request.
    single_request: bool,
    life: Life,
    /// True if the reset in progress also unmaps the memory.
    unmaps: bool,
    /// True if the host has done something forbidden, after which the model does not know the
    /// contents of the queues.
    blind: bool,
    sqs: BTreeMap<u16, Sq>,
    cqs: BTreeMap<u16, Cq>,
    admin: BTreeMap<u16, Kind>,
    /// Contents of the guest's memory at the moment when the controller was disabled.
    image: Vec<u8>,
    /// Buffer for a check: all guest memory is copied into it, and compared with `image`.
    snapshot: Cell<Vec<u8>>,
    /// Unmap of the memory for data, if there is one: a flag that is set when the controller
    /// confirms the unmap, and the contents of that memory at this moment.
    away: Option<(Arc<AtomicBool>, Option<Vec<u8>>)>,
    cid: u16,
}

impl Guest {
    fn new(source: &mut Source<'_>) -> Self {
        let polling = source.of(&[Polling::Never, Polling::Always, Polling::default()]);
        let (pool, turns) = Pool::driven(polling).expect("a worker");
        let test_disk = TestDisk::default();
        let disks = [test_disk.clone(), test_disk.clone()];
        let namespaces = disks.into_iter().enumerate().map(|(n, disk)| NamespaceConfig {
            disk: Arc::new(disk),
            uuid: uuid_from(&n.to_string()),
        });
        let mut config = Config {
            namespaces: namespaces.collect(),
            io_queues: 4,
            max_queue_entries: 64,
            ..Config::default()
        };
        config.quota.requests = source.of(&[5, 1, 2, 64]);
        config.quota.bytes = source.of(&[1 << 30, 1 << 30, 8192]);
        config.quota.pieces = source.of(&[1 << 17, 4]);
        config.quota.long_commands = source.of(&[2, 1, 64]);
        let quota = config.quota.requests;
        let controller = Controller::new(config, pool, Carrier::default()).expect("a controller");
        let memory = Mapping::shared("guest", PAGES * PAGE).expect("memory").bytes();
        let mut guest = Self {
            controller,
            turns,
            test_disk,
            memory,
            quota,
            single_request: source.bool(),
            life: Life::Off,
            unmaps: false,
            blind: false,
            sqs: BTreeMap::new(),
            cqs: BTreeMap::new(),
            admin: BTreeMap::new(),
            image: Vec::new(),
            snapshot: Cell::default(),
            away: None,
            cid: 0,
        };
        let dsm = (0..256).flat_map(|n| {
            let range = DsmRange { attributes: 0, blocks: 1, slba: n % BLOCKS };
            range.as_bytes().to_vec()
        });
        guest.poke(page(DSM_RANGES), &dsm.collect::<Vec<u8>>());
        let copies = (0..128u64).flat_map(|n| {
            let range = CopyRange {
                snsid: 0,
                reserved4: 0,
                slba: n % (BLOCKS - 8),
                nlb0: (n % 8) as u16,
                reserved18: [0; 4],
                sopt: 0,
                reftag: 0,
                apptag: 0,
                apptag_mask: 0,
            };
            range.as_bytes().to_vec()
        });
        guest.poke(page(COPY_RANGES), &copies.collect::<Vec<u8>>());
        guest.map(0, DATA);
        guest.map(DATA, PAGES - DATA);
        guest.image = guest.all();
        guest
    }

    fn all(&self) -> Vec<u8> {
        let mut all = self.snapshot.take();
        all.resize(self.memory.len(), 0);
        self.memory.read_into(0, &mut all).expect("all of it");
        all
    }

    fn poke(&self, iova: u64, bytes: &[u8]) {
        self.memory.write_from((iova - BASE) as usize, bytes).expect("an address in range");
    }

    fn map(&self, first: u64, pages: u64) {
        let bytes = self.memory.slice((first * PAGE) as usize, (pages * PAGE) as usize);
        let bytes = bytes.expect("a part");
        self.controller.map_dma(page(first), pages * PAGE, &bytes).expect("to be mapped");
    }

    fn read32(&self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.controller.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn write32(&self, offset: u64, value: u32) {
        self.controller.write(offset, &value.to_le_bytes());
    }

    fn is_ready(&self) -> bool {
        regs::Csts::from_bits(self.read32(regs::CSTS)).rdy()
    }

    /// Enables the controller, and creates its queues.
    fn enable(&mut self) {
        self.run_until_idle();
        self.memory.fill(0, (DATA * PAGE) as usize, 0).expect("memory");
        let mut state = self.test_disk.state();
        state.fail.clear();
        state.defer = false;
        drop(state);
        self.write32(regs::AQA, (command::ADMIN_ENTRIES - 1) * 0x1_0001);
        self.controller.write(regs::ASQ, &command::ASQ.to_le_bytes());
        self.controller.write(regs::ACQ, &command::ACQ.to_le_bytes());
        self.write32(regs::CC, CC | 1);
        assert!(
            self.is_ready(),
            "the controller does not become ready: {:#x}",
            self.read32(regs::CSTS)
        );
        self.life = Life::On;
        (self.blind, self.unmaps) = (false, false);
        let entries = command::ADMIN_ENTRIES;
        self.sqs.insert(0, Sq { entries, ..Sq::default() });
        self.cqs.insert(0, Cq { entries, head: 0, phase: true });
        for qid in 1..=QUEUES {
            let mut sqe = Sqe::new(0x05, 0, 0).with_prps(command::cq_at(qid), 0);
            (sqe.cdw10, sqe.cdw11) = (u32::from(qid) | (ENTRIES - 1) << 16, 1);
            assert!(self.submit_admin(sqe, Kind::Other));
            self.run_until_idle();
            self.cqs.insert(qid, Cq { entries: ENTRIES, head: 0, phase: true });
            self.create(qid);
            self.run_until_idle();
            assert!(self.sqs.contains_key(&qid), "queue {qid} can not be created");
        }
    }

    fn create(&mut self, qid: u16) {
        let mut sqe = Sqe::new(0x01, 0, 0).with_prps(command::sq_at(qid), 0);
        sqe.cdw10 = u32::from(qid) | (ENTRIES - 1) << 16;
        sqe.cdw11 = 1 | u32::from(qid) << 16;
        self.submit_admin(sqe, Kind::CreateSq(qid));
    }

    /// Submits an admin command. Returns true if the queue had a free entry.
    fn submit_admin(&mut self, sqe: Sqe, kind: Kind) -> bool {
        let Some(cid) = self.store_command(0, sqe) else { return false };
        self.admin.insert(cid, kind);
        self.ring(0);
        true
    }

    /// Stores a command in a queue, if the queue has a free entry.
    fn store_command(&mut self, qid: u16, sqe: Sqe) -> Option<u16> {
        let sq = self.sqs.get_mut(&qid)?;
        let next = (sq.tail + 1) % sq.entries;
        if next == sq.head {
            return None;
        }
        self.cid = (self.cid + 1) % 0xfff0;
        let at = command::sq_at(qid) + u64::from(sq.tail) * 64;
        sq.tail = next;
        sq.commands.insert(self.cid);
        let cid = self.cid;
        self.poke(at, sqe.with_cid(cid).as_bytes());
        Some(cid)
    }

    fn ring(&self, qid: u16) {
        if let Some(sq) = self.sqs.get(&qid) {
            self.controller.write_doorbell(regs::sq_doorbell_offset(qid, 0), sq.tail);
        }
    }

    fn act(&mut self, source: &mut Source<'_>) {
        // If this register write has ended the reset, doorbells that are written later have no
        // effect.
        self.check_reset_end();
        if matches!(self.life, Life::Off) && !source.rarely(4) {
            self.enable();
        }
        match source.below(24) {
            0..=8 => {
                let qid = 1 + source.below(usize::from(QUEUES)) as u16;
                for _ in 0..1 + source.below(8) {
                    let sqe = io(source, self.single_request);
                    self.store_command(qid, sqe);
                }
                self.ring(qid);
            }
            9 | 10 => {
                for _ in 0..1 + source.below(4) {
                    self.turn();
                }
            }
            11 | 12 => {
                let mut state = self.test_disk.state();
                (state.defer, state.cancellable) = (!source.rarely(4), source.bool());
            }
            13 | 14 => {
                let mut state = self.test_disk.state();
                for _ in 0..1 + source.below(4) {
                    let n = source.below(state.deferred().max(1));
                    state.end(n);
                }
            }
            15 => {
                let error = test_disk::error(source);
                self.test_disk.state().fail.push_back(error);
            }
            16 | 17 => self.change_queue(source),
            18 | 19 => {
                self.begin_reset(source);
                self.check_reset_end();
            }
            20 => self.move_memory(),
            21 => self.run_until_idle(),
            22 => {
                // Rings all doorbells, so that commands are in the queues during the reset. The
                // reset must drop them.
                (1..=QUEUES).for_each(|qid| self.ring(qid));
            }
            _ => {
                let mut sqe = Sqe::new(source.of(&[0x0c, 0x02, 0x06]), 0, u32::MAX);
                sqe = sqe.with_prps(page(DATA), 0);
                sqe.cdw10 = source.of(&[1, 2 | 127 << 16]);
                self.submit_admin(sqe, Kind::Other);
            }
        }
        if source.bool() {
            self.turn();
        }
        self.check();
    }

    /// Deletes a queue, creates it again, or aborts one of its commands.
    fn change_queue(&mut self, source: &mut Source<'_>) {
        let qid = 1 + source.below(usize::from(QUEUES)) as u16;
        let pending = self.admin.values().any(|kind| *kind != Kind::Other);
        match self.sqs.get(&qid) {
            Some(sq) if source.bool() => {
                let cid = sq.commands.first().copied().unwrap_or(0);
                let mut sqe = Sqe::new(0x08, 0, 0);
                sqe.cdw10 = u32::from(qid) | u32::from(cid) << 16;
                self.submit_admin(sqe, Kind::Other);
            }
            Some(_) if !pending => {
                let mut sqe = Sqe::new(0x00, 0, 0);
                sqe.cdw10 = qid.into();
                self.submit_admin(sqe, Kind::DeleteSq(qid));
            }
            None if !pending && self.cqs.contains_key(&qid) => self.create(qid),
            _ => {}
        }
    }

    /// Starts a reset of a random kind, possibly during another reset.
    fn begin_reset(&mut self, source: &mut Source<'_>) {
        if matches!(self.life, Life::Off) {
            return;
        }
        let done = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&done);
        let then = move || flag.store(true, Ordering::SeqCst);
        match source.below(6) {
            0 | 1 => {
                self.write32(regs::CC, CC);
                if !matches!(self.life, Life::Ending(Some(_))) {
                    self.life = Life::Ending(None);
                }
            }
            2 => {
                self.controller.reset(then);
                self.life = Life::Ending(Some(done));
            }
            3 => {
                self.controller.disconnect(then);
                self.life = Life::Ending(Some(done));
                self.unmaps = true;
            }
            4 if !self.single_request => {
                // Starts a shutdown, and does not wait for its end.
                self.write32(regs::CC, CC | 0x4001);
                self.turn();
                self.write32(regs::CC, CC);
                if !matches!(self.life, Life::Ending(Some(_))) {
                    self.life = Life::Ending(None);
                }
            }
            _ => {
                // The host enables the controller before CSTS.RDY is 0. This is forbidden, and its
                // result is unknown.
                self.blind = true;
                self.write32(regs::CC, CC);
                for _ in 0..source.below(3) {
                    self.turn();
                }
                self.write32(regs::CC, CC | 1);
                for _ in 0..source.below(3) {
                    self.turn();
                }
                self.controller.reset(then);
                self.life = Life::Ending(Some(done));
            }
        }
    }

    /// Unmaps the memory for data, or shares it again.
    fn move_memory(&mut self) {
        if self.unmaps {
            return;
        }
        match self.away.take() {
            None => {
                let done = Arc::new(AtomicBool::new(false));
                let flag = Arc::clone(&done);
                let then = move || flag.store(true, Ordering::SeqCst);
                let len = (PAGES - DATA) * PAGE;
                self.controller.unmap_dma(page(DATA), len, then).expect("memory that was mapped");
                self.away = Some((done, None));
                self.note_away();
            }
            Some((done, image)) if !done.load(Ordering::SeqCst) => self.away = Some((done, image)),
            Some(_) => self.map(DATA, PAGES - DATA),
        }
    }

    /// Records the contents of the memory for data as soon as its unmap is confirmed.
    fn note_away(&mut self) {
        let is_given = |(done, image): &(Arc<AtomicBool>, Option<Vec<u8>>)| {
            image.is_none() && done.load(Ordering::SeqCst)
        };
        if !self.away.as_ref().is_some_and(is_given) {
            return;
        }
        let now = self.all();
        if let Some((_, image)) = &mut self.away {
            *image = Some(now[(DATA * PAGE) as usize..].to_vec());
        }
        self.snapshot.set(now);
    }

    fn turn(&mut self) -> bool {
        let busy = self.turns.turn();
        let at_disk = self.test_disk.state().deferred();
        let most = self.quota + if self.single_request { 0 } else { MAX_MULTI_STEP_REQUESTS };
        assert!(at_disk <= most, "{at_disk} requests at the disk, of {most}");
        self.check_completions();
        self.check_reset_end();
        busy
    }

    fn run_until_idle(&mut self) {
        for _ in 0..MAX_TURNS {
            if !self.turn() {
                return;
            }
        }
        panic!("there is always something to do");
    }

    fn check_completions(&mut self) {
        if self.blind {
            return;
        }
        // The admin queue is checked last. If it has the completion of a queue's deletion, all
        // completions of this queue have been checked, and there must be no more.
        for qid in (0..=QUEUES).rev() {
            while let Some(cq) = self.cqs.get_mut(&qid) {
                let at = (command::cq_at(qid) - BASE) as usize + cq.head as usize * 16;
                let mut bytes = [0; 16];
                self.memory.read_into(at, &mut bytes).expect("memory");
                let Ok(cqe) = Cqe::read_from_bytes(&bytes) else { break };
                if cqe.phase() != cq.phase {
                    break;
                }
                cq.head = (cq.head + 1) % cq.entries;
                cq.phase ^= cq.head == 0;
                let head = cq.head;
                self.completed(qid, &cqe);
                self.controller.write_doorbell(regs::cq_doorbell_offset(qid, 0), head);
            }
        }
    }

    fn completed(&mut self, cq: u16, cqe: &Cqe) {
        assert!(!matches!(self.life, Life::Off), "{cqe:?} comes after a reset");
        assert_eq!(cqe.sq_id, cq, "{cqe:?} is of another queue");
        let sq = self.sqs.get_mut(&cqe.sq_id);
        let sq = sq.unwrap_or_else(|| panic!("{cqe:?} is of no queue"));
        assert!(sq.commands.remove(&cqe.cid), "{cqe:?} is of no outstanding command");
        sq.head = cqe.sq_head.into();
        if cq != 0 {
            return;
        }
        let kind = self.admin.remove(&cqe.cid).unwrap_or(Kind::Other);
        if !cqe.status().is_success() {
            return;
        }
        match kind {
            Kind::DeleteSq(qid) => drop(self.sqs.remove(&qid)),
            Kind::CreateSq(qid) => {
                self.sqs.insert(qid, Sq { entries: ENTRIES, ..Sq::default() });
            }
            Kind::Other => {}
        }
    }

    /// Checks whether the reset in progress has ended.
    fn check_reset_end(&mut self) {
        self.note_away();
        let over = match &self.life {
            Life::Ending(Some(done)) => done.load(Ordering::SeqCst),
            Life::Ending(None) => !self.is_ready(),
            _ => false,
        };
        if !over {
            return;
        }
        // The disk must have no request of a command. It may still execute a flush of a shutdown.
        assert_eq!(self.test_disk.state().transfers(), 0, "requests at the disk without a command");
        self.life = Life::Off;
        self.sqs.clear();
        self.cqs.clear();
        self.admin.clear();
        let now = self.all();
        self.snapshot.set(std::mem::replace(&mut self.image, now));
        if std::mem::take(&mut self.unmaps) {
            if let Some((done, _)) = self.away.take() {
                assert!(done.load(Ordering::SeqCst), "memory is forgotten, and not given back");
            }
            self.map(0, DATA);
            self.map(DATA, PAGES - DATA);
        }
    }

    /// Checks that all memory that the controller must not write has its recorded contents.
    fn check(&self) {
        let off = matches!(self.life, Life::Off);
        let away = self.away.as_ref().and_then(|(_, image)| image.as_ref());
        if !off && away.is_none() {
            return;
        }
        let now = self.all();
        assert!(!off || now == self.image, "memory was written after a reset");
        let same = away.is_none_or(|image| now[(DATA * PAGE) as usize..] == *image);
        assert!(same, "memory was written that was given back");
        self.snapshot.set(now);
    }

    /// Executes a last reset, and checks that it ends.
    fn finish(&mut self) {
        // If no reset is in progress yet, this reset cancels all requests, and the disk ends
        // cancelled requests.
        let prompt = matches!(self.life, Life::On);
        self.test_disk.state().cancellable |= prompt;
        if !matches!(self.life, Life::Off | Life::Ending(Some(_))) {
            let done = Arc::new(AtomicBool::new(false));
            let flag = Arc::clone(&done);
            self.controller.reset(move || flag.store(true, Ordering::SeqCst));
            self.life = Life::Ending(Some(done));
        }
        for _ in 0..8 {
            self.run_until_idle();
            let given = self.away.as_ref().is_none_or(|(done, _)| done.load(Ordering::SeqCst));
            if matches!(self.life, Life::Off) && given {
                return self.check();
            }
            assert!(!prompt, "a reset waits for a cancellable request");
            self.test_disk.state().complete_all();
        }
        panic!("a reset does not end");
    }
}

/// Creates a well-formed command. If `single_request` is true, it needs at most one disk request.
/// Otherwise it may need many, or take several steps.
fn io(source: &mut Source<'_>, single_request: bool) -> Sqe {
    const ALL: [u8; 10] = [0x02, 0x02, 0x01, 0x01, 0x05, 0x0c, 0x08, 0x00, 0x09, 0x19];
    let opcode = source.of(if single_request { &ALL[..7] } else { &ALL });
    let nsid = if opcode == 0 { source.of(&[1, u32::MAX]) } else { source.of(&[1, 1, 2]) };
    let data =
        |source: &mut Source<'_>| page(DATA + source.below((COPY_RANGES - DATA) as usize) as u64);
    let (first, second) = (data(source), data(source));
    let mut sqe = Sqe::new(opcode, 0, nsid).with_prps(first, second);
    let blocks = source.of(&[1u32, 8, 16]);
    (sqe.cdw10, sqe.cdw12) = (source.below((BLOCKS - 16) as usize) as u32, blocks - 1);
    match opcode {
        0x09 => {
            let ranges = source.of(&[1u32, 3, 64, 256]);
            sqe = sqe.with_prps(page(DSM_RANGES), 0);
            (sqe.cdw10, sqe.cdw11, sqe.cdw12) = (ranges - 1, 4, 0);
        }
        0x19 => {
            let ranges = source.of(&[1u32, 3, 16]);
            sqe = sqe.with_prps(page(COPY_RANGES), 0);
            (sqe.cdw10, sqe.cdw12) = (0, ranges - 1);
        }
        _ => {}
    }
    sqe
}
