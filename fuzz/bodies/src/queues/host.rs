//! The guest's model of its queues, and the checks.

mod teardown;

use super::data::SLOT_PAGES;
use crate::command::{BASE, PAGE};
use crate::limits::Limits;
use crate::source::Source;
use crate::test_disk::{TestDisk, contents};
use shadowbell_controller::config::uuid_from;
use shadowbell_controller::{Carrier, Config, Controller, NamespaceConfig, Polling, Pool, Turns};
use shadowbell_memory::{EventFd, Mapping, SharedBytes};
use shadowbell_spec::regs::{self, cq_doorbell_offset, sq_doorbell_offset};
use shadowbell_spec::{Cqe, Sqe};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use zerocopy::{FromBytes, IntoBytes};

/// Maximum number of I/O queue pairs.
pub(super) const QUEUES: u16 = 3;
const ADMIN_ENTRIES: u32 = 8;
/// Number of pages for the queues and the buffers of Doorbell Buffer Config.
const QUEUE_PAGES: u64 = 10;
const SHADOW: u64 = BASE + 8 * PAGE;
const EVENT_IDX: u64 = BASE + 9 * PAGE;
const SLOTS: usize = 4;
const SLOTS_AT: u64 = BASE + QUEUE_PAGES * PAGE;
const BYTES: usize = ((QUEUE_PAGES + SLOTS as u64 * SLOT_PAGES) * PAGE) as usize;
/// Maximum number of turns of the I/O thread for which the guest waits for an operation.
const MAX_TURNS: usize = 20_000;

/// Offset of a data slot.
pub(super) fn slot_at(slot: usize) -> u64 {
    SLOTS_AT + slot as u64 * SLOT_PAGES * PAGE
}

fn sq_at(qid: u16) -> u64 {
    BASE + u64::from(qid) * 2 * PAGE
}

fn cq_at(qid: u16) -> u64 {
    sq_at(qid) + PAGE
}

/// Expected result of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expect {
    Success,
    Failure,
    Any,
}

pub(super) enum Kind {
    Read {
        offset: u64,
        len: u64,
    },
    /// Data that the disk must receive, and the number of bytes that it has received so far.
    Write {
        offset: u64,
        data: Vec<u8>,
        put: usize,
    },
    /// Data that the disk must receive for a copy. They are not counted, because other commands may
    /// write the same data.
    Copy {
        offset: u64,
        data: Vec<u8>,
    },
    CreateCq(u16, u32),
    CreateSq(u16, u16, u32),
    DeleteSq(u16),
    DeleteCq(u16),
    /// Asynchronous Event Request, which completes only when there is an event.
    Event,
    Other,
}

/// An outstanding command.
pub(super) struct Command {
    pub(super) slot: Option<usize>,
    /// Parts of the guest's memory that the command may change: address and length.
    pub(super) writes: Vec<(u64, usize)>,
    pub(super) kind: Kind,
    pub(super) expect: Expect,
}

struct Sq {
    entries: u32,
    cq: u16,
    tail: u32,
    /// Head of the submission queue, as reported by the last completion.
    head: u32,
    /// Last tail that the host has published to the controller.
    published_tail: u32,
    commands: BTreeMap<u16, Command>,
}

struct Cq {
    entries: u32,
    /// Next entry that the host consumes, and next entry that the model examines.
    head: u32,
    next: u32,
    phase: bool,
}

pub(super) struct Host {
    controller: Controller,
    turns: Turns,
    pub(super) test_disk: TestDisk,
    memory: SharedBytes,
    /// Expected contents of the guest's memory.
    image: Vec<u8>,
    /// Buffer for a check: all guest memory is copied into it, and compared with `image`.
    snapshot: Vec<u8>,
    sqs: BTreeMap<u16, Sq>,
    cqs: BTreeMap<u16, Cq>,
    shadow: bool,
    /// True if the host uses SPDK's rule for shadow doorbells: it writes the doorbell register also
    /// if EventIdx equals the new value.
    inclusive: bool,
    /// True if the host also uses shadow doorbells for the admin queue.
    shadows_admin: bool,
    /// True if valid commands may fail, because of an error of the disk, an abort or an unmap.
    pub(super) trouble: bool,
    cid: u16,
    irq: EventFd,
}

impl Host {
    pub(super) fn new(source: &mut Source<'_>) -> Self {
        let polling = source.of(&[Polling::Never, Polling::Always, Polling::default()]);
        let (pool, turns) = Pool::driven(polling).expect("a worker");
        let test_disk = TestDisk::default();
        let disk = Arc::new(test_disk.clone());
        let namespaces = vec![NamespaceConfig { disk, uuid: uuid_from("queues") }];
        let config =
            Config { namespaces, io_queues: 3, max_queue_entries: 64, ..Config::default() };
        let controller = Controller::new(config, pool, Carrier::default()).expect("a controller");
        let memory = Mapping::shared("guest", BYTES as u64).expect("memory").bytes();
        let host = Self {
            controller,
            turns,
            test_disk,
            memory,
            image: vec![0; BYTES],
            snapshot: vec![0; BYTES],
            sqs: BTreeMap::new(),
            cqs: BTreeMap::new(),
            shadow: false,
            inclusive: source.bool(),
            shadows_admin: source.bool(),
            trouble: false,
            cid: 0,
            irq: EventFd::new().expect("an eventfd"),
        };
        for vector in 0..=usize::from(QUEUES) {
            let event = host.irq.try_clone().expect("an eventfd");
            host.controller.set_interrupt(vector, Some(event));
        }
        host.map(0, QUEUE_PAGES * PAGE);
        host.map(QUEUE_PAGES * PAGE, BYTES as u64 - QUEUE_PAGES * PAGE);
        host
    }

    fn map(&self, at: u64, len: u64) {
        let bytes = self.memory.slice(at as usize, len as usize).expect("memory");
        self.controller.map_dma(BASE + at, len, &bytes).expect("to be mapped");
    }

    pub(super) fn poke(&mut self, iova: u64, bytes: &[u8]) {
        let at = (iova - BASE) as usize;
        self.memory.write_from(at, bytes).expect("memory");
        self.image[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub(super) fn poke_pieces(&mut self, pieces: &[(u64, usize)], mut bytes: &[u8]) {
        for (at, len) in pieces {
            let (piece, rest) = bytes.split_at(*len);
            self.poke(*at, piece);
            bytes = rest;
        }
    }

    fn write32(&self, offset: u64, value: u32) {
        self.controller.write(offset, &value.to_le_bytes());
    }

    fn read32(&self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.controller.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    pub(super) fn enable(&mut self) {
        let zeroes = vec![0; (QUEUE_PAGES * PAGE) as usize];
        self.poke(BASE, &zeroes);
        self.write32(regs::AQA, (ADMIN_ENTRIES - 1) * 0x1_0001);
        self.controller.write(regs::ASQ, &sq_at(0).to_le_bytes());
        self.controller.write(regs::ACQ, &cq_at(0).to_le_bytes());
        self.write32(regs::CC, 0x0046_0001);
        let csts = regs::Csts::from_bits(self.read32(regs::CSTS));
        assert!(csts.rdy() && !csts.cfs(), "{csts:?}");
        self.add_cq(0, ADMIN_ENTRIES);
        self.add_sq(0, 0, ADMIN_ENTRIES);
    }

    fn add_cq(&mut self, qid: u16, entries: u32) {
        self.cqs.insert(qid, Cq { entries, head: 0, next: 0, phase: true });
    }

    fn add_sq(&mut self, qid: u16, cq: u16, entries: u32) {
        let commands = BTreeMap::new();
        self.sqs.insert(qid, Sq { entries, cq, tail: 0, head: 0, published_tail: 0, commands });
    }

    pub(super) fn live_sqs(&self) -> impl Iterator<Item = u16> {
        self.sqs.keys().copied().filter(|qid| *qid != 0)
    }

    pub(super) fn next_cid(&mut self) -> u16 {
        self.cid = (self.cid + 1) % 0xfff0;
        self.cid
    }

    /// Identifier of the oldest outstanding command.
    pub(super) fn oldest(&self, qid: u16) -> u16 {
        let commands = self.sqs.get(&qid).and_then(|sq| sq.commands.keys().next());
        commands.copied().unwrap_or(0)
    }

    /// A free slot for data, if the queue has a free entry.
    pub(super) fn slot(&self, qid: u16) -> Option<usize> {
        let sq = self.sqs.get(&qid)?;
        let full = (sq.tail + 1) % sq.entries == sq.head;
        let outstanding = self.sqs.values().flat_map(|sq| sq.commands.values());
        let taken: Vec<_> = outstanding.filter_map(|command| command.slot).collect();
        (0..SLOTS).find(|slot| !full && !taken.contains(slot))
    }

    /// Stores a command in a queue that has a free entry.
    pub(super) fn store_command(&mut self, qid: u16, sqe: &Sqe, command: Command) {
        let Some(sq) = self.sqs.get_mut(&qid) else { return };
        let at = sq_at(qid) + u64::from(sq.tail) * 64;
        sq.tail = (sq.tail + 1) % sq.entries;
        assert_ne!(sq.tail, sq.head, "there was no room");
        let before = sq.commands.insert(sqe.cid, command);
        assert!(before.is_none(), "an identifier is used twice");
        self.poke(at, sqe.as_bytes());
    }

    /// Publishes a queue's tail to the controller.
    pub(super) fn ring_sq(&mut self, qid: u16) {
        let Some(sq) = self.sqs.get_mut(&qid) else { return };
        let (old, new) = (std::mem::replace(&mut sq.published_tail, sq.tail), sq.tail);
        if old != new {
            self.ring(qid, sq_doorbell_offset(qid, 0), old, new);
        }
    }

    /// Publishes a doorbell value. A host with shadow doorbells stores it in the shadow entry, and
    /// writes the register only if its rule requires that.
    fn ring(&mut self, qid: u16, offset: u64, old: u32, new: u32) {
        if self.shadow && (qid != 0 || self.shadows_admin) {
            let entry = offset - regs::DOORBELLS;
            self.poke(SHADOW + entry, &new.to_le_bytes());
            fence(Ordering::SeqCst);
            let mut event = [0; 4];
            let at = (EVENT_IDX + entry - BASE) as usize;
            self.memory.read_into(at, &mut event).expect("memory");
            let (event, old, new) = (u32::from_le_bytes(event) as u16, old as u16, new as u16);
            let since = new.wrapping_sub(event);
            let rings = if self.inclusive {
                since <= new.wrapping_sub(old)
            } else {
                since.wrapping_sub(1) < new.wrapping_sub(old)
            };
            if !rings {
                return;
            }
        }
        self.controller.write_doorbell(offset, new);
    }

    /// Runs one turn of the I/O thread, and checks its effects.
    pub(super) fn turn(&mut self) -> bool {
        let busy = self.turns.turn();
        if busy {
            self.check();
        }
        busy
    }

    /// Ends a step of the program.
    pub(super) fn step(&mut self, limits: &Limits) {
        limits.step_of("queues", &mut self.turns, &self.controller);
    }

    /// Takes turns until the I/O thread is idle.
    fn run_until_idle(&mut self) {
        for _ in 0..MAX_TURNS {
            if !self.turn() {
                // A turn without work must not change the guest's memory.
                return self.check();
            }
        }
        panic!("the I/O thread never becomes idle");
    }

    /// Checks memory, completions and writes to the disk.
    pub(super) fn check(&mut self) {
        let csts = regs::Csts::from_bits(self.read32(regs::CSTS));
        assert!(!csts.cfs(), "CSTS.CFS is set without an error of the host");
        let mut now = std::mem::take(&mut self.snapshot);
        self.memory.read_into(0, &mut now).expect("memory");
        let mut allowed: Vec<(u64, usize)> = Vec::new();
        for (qid, cq) in &self.cqs {
            // The free entries of a completion queue begin at the entry that the model examines
            // next.
            let unconsumed = (cq.next + cq.entries - cq.head) % cq.entries;
            let free = cq.entries - 1 - unconsumed;
            let indices = (0..free).map(|n| (cq.next + n) % cq.entries);
            allowed.extend(indices.map(|index| (cq_at(*qid) + u64::from(index) * 16, 16)));
            allowed.push((EVENT_IDX + cq_doorbell_offset(*qid, 0) - regs::DOORBELLS, 4));
        }
        for (qid, sq) in &self.sqs {
            allowed.push((EVENT_IDX + sq_doorbell_offset(*qid, 0) - regs::DOORBELLS, 4));
            sq.commands.values().for_each(|command| allowed.extend(&command.writes));
        }
        for (iova, len) in allowed {
            let at = (iova - BASE) as usize;
            self.image[at..at + len].copy_from_slice(&now[at..at + len]);
        }
        if self.image != now {
            let at = now.iter().zip(&self.image).position(|(a, b)| a != b).unwrap_or(0);
            panic!(
                "byte {at:#x} (page {}) of the guest's memory was written without a command",
                at as u64 / PAGE
            );
        }
        self.snapshot = now;
        self.check_writes();
        let qids: Vec<u16> = self.cqs.keys().copied().collect();
        // The admin queue is checked last. If it has the completion of a queue's deletion, all
        // completions of this queue have been checked, and there must be no more.
        qids.into_iter().rev().for_each(|qid| self.check_completions(qid));
        let outstanding = self.sqs.values().map(|sq| sq.commands.len()).sum::<usize>();
        let state = self.test_disk.state();
        self.trouble &= outstanding > 0 || !state.fail.is_empty();
    }

    /// Checks that each write to the disk belongs to a command.
    fn check_writes(&mut self) {
        let written = std::mem::take(&mut self.test_disk.state().written);
        for (at, bytes) in written {
            let commands = self.sqs.values_mut().flat_map(|sq| sq.commands.values_mut());
            let is_part = |offset: u64, data: &[u8]| {
                let from = at.checked_sub(offset).and_then(|from| usize::try_from(from).ok());
                let part = from.and_then(|from| data.get(from..from + bytes.len()));
                part.is_some_and(|part| part == bytes)
            };
            let mut is_wanted = false;
            for command in commands {
                match &mut command.kind {
                    Kind::Write { offset, data, put } if is_part(*offset, data) => {
                        *put += bytes.len();
                        is_wanted = true;
                    }
                    Kind::Copy { offset, data } => is_wanted |= is_part(*offset, data),
                    _ => {}
                }
            }
            assert!(is_wanted, "the disk gets data of no command");
        }
    }

    fn check_completions(&mut self, qid: u16) {
        loop {
            let Some(cq) = self.cqs.get_mut(&qid) else { return };
            let at = (cq_at(qid) - BASE) as usize + cq.next as usize * 16;
            let Ok(cqe) = Cqe::read_from_bytes(&self.image[at..at + 16]) else { return };
            if cqe.phase() != cq.phase {
                return;
            }
            cq.next = (cq.next + 1) % cq.entries;
            cq.phase ^= cq.next == 0;
            assert_ne!(cq.next, cq.head, "posted to completion queue {qid}, which is full");
            self.completed(qid, &cqe);
        }
    }

    fn completed(&mut self, cq: u16, cqe: &Cqe) {
        let (cid, status) = (cqe.cid, cqe.status());
        let sq = self.sqs.get_mut(&cqe.sq_id).filter(|sq| sq.cq == cq);
        let sq = sq.unwrap_or_else(|| panic!("{cqe:?} is of no queue of completion queue {cq}"));
        let distance = |to: u32| (to + sq.entries - sq.head) % sq.entries;
        let head = u32::from(cqe.sq_head);
        assert!(
            head < sq.entries && distance(head) <= distance(sq.published_tail),
            "a head of {head}"
        );
        sq.head = head;
        let command = sq.commands.remove(&cid);
        let command = command.unwrap_or_else(|| panic!("{cqe:?} is of no outstanding command"));
        match command.expect {
            Expect::Success => assert!(status.is_success() || self.trouble, "{cqe:?}: {status}"),
            Expect::Failure => assert!(!status.is_success(), "{cqe:?} has to fail"),
            Expect::Any => {}
        }
        if !status.is_success() {
            return;
        }
        match command.kind {
            Kind::Read { offset, len } => {
                let mut wanted = &contents(offset, len)[..];
                for (at, len) in command.writes {
                    let at = (at - BASE) as usize;
                    let (piece, rest) = wanted.split_at(len);
                    assert!(self.image[at..at + len] == *piece, "a read brought something else");
                    wanted = rest;
                }
            }
            Kind::Write { data, put, .. } => {
                assert_eq!(put, data.len(), "not all was written, or more than once");
            }
            Kind::CreateCq(qid, entries) => self.add_cq(qid, entries),
            Kind::CreateSq(qid, cq, entries) => self.add_sq(qid, cq, entries),
            // After the deletion of a queue, its outstanding commands have no further effect.
            Kind::DeleteSq(qid) => drop(self.sqs.remove(&qid)),
            Kind::DeleteCq(qid) => drop(self.cqs.remove(&qid)),
            Kind::Copy { .. } | Kind::Event | Kind::Other => {}
        }
    }

    /// Consumes at most `most` completions.
    pub(super) fn consume(&mut self, qid: u16, most: usize) {
        let Some(cq) = self.cqs.get_mut(&qid) else { return };
        let there = (cq.next + cq.entries - cq.head) % cq.entries;
        let take = there.min(most as u32);
        if take == 0 {
            return;
        }
        let (old, new) = (cq.head, (cq.head + take) % cq.entries);
        cq.head = new;
        self.ring(qid, cq_doorbell_offset(qid, 0), old, new);
    }

    /// Executes an admin command, and waits for its completion.
    fn admin(&mut self, sqe: Sqe, kind: Kind, expect: Expect) {
        let room = |host: &Self| {
            let admin = &host.sqs[&0];
            (admin.tail + 1) % admin.entries != admin.head
        };
        if !room(self) {
            self.consume(0, usize::MAX);
            self.run_until_idle();
        }
        // Only Asynchronous Event Requests are outstanding now. If they fill the queue, no command
        // can be submitted.
        if !room(self) {
            return;
        }
        let cid = self.next_cid();
        self.store_command(
            0,
            &sqe.with_cid(cid),
            Command { slot: None, writes: Vec::new(), kind, expect },
        );
        self.ring_sq(0);
        for _ in 0..4 {
            self.run_until_idle();
            self.consume(0, usize::MAX);
            self.run_until_idle();
            if !self.sqs[&0].commands.contains_key(&cid) {
                return;
            }
            // The deletion of a queue may wait for requests that the disk holds.
            self.test_disk.state().complete_all();
        }
        panic!("an admin command does not end");
    }

    pub(super) fn create(&mut self, qid: u16, cq: u16, of_cq: u32, of_sq: u32, interrupts: bool) {
        if self.cqs.contains_key(&cq) || qid != cq {
            // The command uses an existing completion queue, or that of another queue pair. If that
            // completion queue does not exist, the creation must fail.
        } else {
            self.poke(cq_at(cq), &[0; PAGE as usize]);
            self.clear_shadow(cq_doorbell_offset(cq, 0));
            let mut sqe = Sqe::new(0x05, 0, 0).with_prps(cq_at(cq), 0);
            sqe.cdw10 = u32::from(cq) | (of_cq - 1) << 16;
            sqe.cdw11 = 1 | u32::from(interrupts) << 1 | u32::from(cq) << 16;
            self.admin(sqe, Kind::CreateCq(cq, of_cq), Expect::Success);
        }
        let expect = match (self.cqs.contains_key(&cq), self.sqs.contains_key(&qid)) {
            (true, false) => Expect::Success,
            _ => Expect::Failure,
        };
        if expect == Expect::Success {
            self.clear_shadow(sq_doorbell_offset(qid, 0));
        }
        let mut sqe = Sqe::new(0x01, 0, 0).with_prps(sq_at(qid), 0);
        sqe.cdw10 = u32::from(qid) | (of_sq - 1) << 16;
        sqe.cdw11 = 1 | u32::from(cq) << 16;
        self.admin(sqe, Kind::CreateSq(qid, cq, of_sq), expect);
    }

    /// Clears the shadow entries of a new queue, as Linux does.
    fn clear_shadow(&mut self, bell: u64) {
        self.poke(SHADOW + bell - regs::DOORBELLS, &[0; 4]);
        self.poke(EVENT_IDX + bell - regs::DOORBELLS, &[0; 4]);
    }

    pub(super) fn delete(&mut self, qid: u16, only_cq: bool) {
        let mut sqe = Sqe::new(0x00, 0, 0);
        sqe.cdw10 = qid.into();
        let there = |there| if there { Expect::Success } else { Expect::Failure };
        if !only_cq {
            let expect = there(self.sqs.contains_key(&qid));
            for command in self.sqs.get_mut(&qid).iter_mut().flat_map(|sq| sq.commands.values_mut())
            {
                // The deletion may abort the command, so any status is valid.
                command.expect = Expect::Any;
            }
            self.admin(sqe, Kind::DeleteSq(qid), expect);
        }
        let in_use = self.sqs.values().any(|sq| sq.cq == qid);
        let expect = there(self.cqs.contains_key(&qid) && !in_use);
        sqe.opcode = 0x04;
        self.admin(sqe, Kind::DeleteCq(qid), expect);
    }

    pub(super) fn configure_shadow(&mut self, source: &mut Source<'_>) {
        if self.shadow {
            return;
        }
        // All bytes of both pages get the same random value. Then the shadow entries of existing
        // queues get the current values.
        let junk = source.u8();
        self.poke(SHADOW, &[junk; PAGE as usize]);
        self.poke(EVENT_IDX, &[junk; PAGE as usize]);
        self.update_shadow();
        let sqe = Sqe::new(0x7c, 0, 0).with_prps(SHADOW, EVENT_IDX);
        // This command itself advances the tail of the admin queue.
        self.admin(sqe, Kind::Other, Expect::Success);
        self.shadow = true;
        self.update_shadow();
    }

    fn update_shadow(&mut self) {
        let tails =
            self.sqs.iter().map(|(qid, sq)| (sq_doorbell_offset(*qid, 0), sq.published_tail));
        let heads = self.cqs.iter().map(|(qid, cq)| (cq_doorbell_offset(*qid, 0), cq.head));
        let values: Vec<_> = tails.chain(heads).collect();
        for (bell, value) in values {
            // If the host does not use shadow doorbells for the admin queue, it never updates the
            // entries of this queue.
            let of_admin = bell < regs::DOORBELLS + 8;
            if self.shadow && of_admin && !self.shadows_admin {
                continue;
            }
            self.poke(SHADOW + bell - regs::DOORBELLS, &value.to_le_bytes());
        }
    }
}
