//! Hostile guest: registers, doorbells, commands, lists and shadow doorbells with any content.
//! Memory is mapped and unmapped meanwhile, and the disk is slow or fails.
//!
//! Besides panics and endless loops, this body detects writes of the controller to
//! * memory that is not shared, or is shared for reading only,
//! * unmapped memory after the unmap was confirmed,
//! * any memory between the end of a reset and the next enable.

use crate::command::{self, BASE, PAGE, PAGES};
use crate::layered;
use crate::limits::Limits;
use crate::source::Source;
use crate::test_disk::{self, TestDisk};
use shadowbell_controller::config::uuid_from;
use shadowbell_controller::{Carrier, Config, Controller, NamespaceConfig, Polling, Pool, Turns};
use shadowbell_disk::Disk;
use shadowbell_memory::{EventFd, Mapping, Protection, SharedBytes};
use shadowbell_spec::regs;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use zerocopy::IntoBytes;

const ACTIONS: usize = 128;
/// Maximum number of turns of the I/O thread until an operation of the guest has ended.
const MAX_TURNS: usize = 20_000;
/// Number of repetitions of an operation in a flood: the I/O thread processes nothing in between.
const FLOOD: u64 = 128;
/// Bus address of the first map of a flood, far above the guest's memory.
const FAR_ADDRESS: u64 = 1 << 48;
/// Fill byte of the guard pages.
const GUARD: u8 = 0xa5;
/// Number of guard pages after the end of the guest's memory. They are never shared with the
/// controller.
const GUARDS: u64 = 4;
/// Parts of memory that are shared and unmapped as a whole: first page, number of pages.
const REGIONS: [(u64, u64); 4] = [(0, 12), (12, 2), (14, 10), (24, 8)];

/// Runs the program that `input` encodes.
pub fn run(input: &[u8]) {
    let mut source = Source::new(input);
    let limits = Limits::begin();
    let mut guest = Guest::new(&mut source);
    if !source.rarely(8) {
        guest.enable();
        guest.create_queues(&mut source);
    }
    for _ in 0..ACTIONS {
        if source.is_empty() {
            break;
        }
        guest.act(&mut source);
        limits.step_of("chaos", &mut guest.turns, &guest.controller);
        guest.check();
    }
    guest.finish();
}

/// State of a part of the guest's memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Shared,
    SharedToRead,
    /// The part is unmapped, and the unmap was confirmed.
    Away,
}

struct Guest {
    controller: Controller,
    turns: Turns,
    test_disk: TestDisk,
    memory: SharedBytes,
    /// Read-only mapping of the same memory as `memory`, for maps that the controller must not
    /// write.
    to_read: SharedBytes,
    parts: [Part; REGIONS.len()],
    /// Expected contents of all memory: the contents at the last call of `remember`, with the
    /// guest's later writes. `check` compares the parts that the controller must not write.
    image: Vec<u8>,
    /// Buffer for a check: all guest memory is copied into it, and compared with `image`.
    snapshot: Cell<Vec<u8>>,
    /// True after the end of a reset, until the guest may have enabled the controller again. The
    /// controller must not write meanwhile.
    frozen: bool,
    tails: [u32; 4],
    irq: EventFd,
}

impl Guest {
    fn new(source: &mut Source<'_>) -> Self {
        let polling = source.of(&[Polling::Never, Polling::Always, Polling::default()]);
        let (pool, turns) = Pool::driven(polling).expect("a worker");
        let test_disk = TestDisk::default();
        let disks: [Arc<dyn Disk>; 4] = [
            Arc::new(test_disk.clone()),
            Arc::new(test_disk.clone()),
            layered::with_metadata(test_disk.clone(), source),
            layered::zoned(source),
        ];
        let namespaces = disks
            .into_iter()
            .enumerate()
            .map(|(n, disk)| NamespaceConfig { disk, uuid: uuid_from(&n.to_string()) });
        let config = Config {
            namespaces: namespaces.collect(),
            io_queues: 4,
            max_queue_entries: 64,
            shadow_doorbells: !source.rarely(16),
            ..Config::default()
        };
        let carrier = Carrier { mapped_doorbells: source.rarely(8), listener: None };
        let controller = Controller::new(config, pool, carrier).expect("a controller");
        let len = (PAGES + GUARDS) * PAGE;
        let mapping = Mapping::shared("guest", len).expect("memory");
        let memory = mapping.bytes();
        memory.fill((PAGES * PAGE) as usize, (GUARDS * PAGE) as usize, GUARD).expect("guards");
        let fd = mapping.fd().expect("a file").try_clone_to_owned().expect("a descriptor");
        let to_read = Mapping::from_fd(&fd, 0, len, Protection::Read).expect("memory").bytes();
        let mut guest = Self {
            controller,
            turns,
            test_disk,
            memory,
            to_read,
            parts: [Part::Away; REGIONS.len()],
            image: Vec::new(),
            snapshot: Cell::default(),
            frozen: true,
            tails: [0; 4],
            irq: EventFd::new().expect("an eventfd"),
        };
        guest.image = guest.all();
        for part in 0..REGIONS.len() {
            guest.share(part, true);
        }
        guest
    }

    fn all(&self) -> Vec<u8> {
        let mut all = self.snapshot.take();
        all.resize(self.memory.len(), 0);
        self.memory.read_into(0, &mut all).expect("all of it");
        all
    }

    fn share(&mut self, part: usize, writable: bool) {
        let (first, pages) = REGIONS[part];
        let memory = if writable { &self.memory } else { &self.to_read };
        let bytes = memory.slice((first * PAGE) as usize, (pages * PAGE) as usize);
        let bytes = bytes.expect("a part");
        let outcome = self.controller.map_dma(command::page(first), pages * PAGE, &bytes);
        assert_eq!(outcome.is_ok(), self.parts[part] == Part::Away, "{outcome:?}");
        if outcome.is_ok() {
            self.parts[part] = if writable { Part::Shared } else { Part::SharedToRead };
            self.remember();
        }
    }

    fn take_back(&mut self, part: usize) {
        let (first, pages) = REGIONS[part];
        let done = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&done);
        let outcome = self.controller.unmap_dma(command::page(first), pages * PAGE, move || {
            flag.store(true, Ordering::SeqCst);
        });
        assert_eq!(outcome.is_ok(), self.parts[part] != Part::Away, "{outcome:?}");
        if outcome.is_ok() {
            self.run_until(&done, "memory is not given back");
            self.parts[part] = Part::Away;
            self.remember();
        }
    }

    /// Records the current contents of all memory, with which `check` will compare.
    fn remember(&mut self) {
        let now = self.all();
        self.snapshot.set(std::mem::replace(&mut self.image, now));
    }

    /// Checks that all memory that the controller must not write has its recorded contents.
    fn check(&self) {
        let now = self.all();
        let same = |first: u64, pages: u64, why: &str| {
            let range = (first * PAGE) as usize..((first + pages) * PAGE) as usize;
            assert!(now[range.clone()] == self.image[range], "page {first} and on: {why}");
        };
        same(PAGES, GUARDS, "memory that was never shared was written");
        for (part, (first, pages)) in self.parts.iter().zip(REGIONS) {
            match part {
                Part::Away => same(first, pages, "memory that was taken back was written"),
                Part::SharedToRead => same(first, pages, "memory for reading was written"),
                Part::Shared if self.frozen => {
                    same(first, pages, "memory was written after a reset");
                }
                Part::Shared => {}
            }
        }
        self.snapshot.set(now);
    }

    /// Writes to the guest's memory.
    fn poke(&mut self, iova: u64, bytes: &[u8]) {
        let at = iova.wrapping_sub(BASE);
        if at.saturating_add(bytes.len() as u64) <= PAGES * PAGE {
            let at = at as usize;
            self.memory.write_from(at, bytes).expect("an address in range");
            self.image[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    /// Takes turns until the I/O thread is idle.
    fn run_until_idle(&mut self) {
        for _ in 0..MAX_TURNS {
            if !self.turns.turn() {
                return;
            }
        }
        panic!("there is always something to do");
    }

    fn run_until(&mut self, done: &AtomicBool, what: &str) {
        for _ in 0..4 {
            self.run_until_idle();
            if done.load(Ordering::SeqCst) {
                return;
            }
            // The disk completes requests only when the program does so explicitly, and the
            // operation may wait for the end of a request.
            self.test_disk.state().complete_all();
        }
        panic!("{what}");
    }

    fn write32(&mut self, offset: u64, value: u32) {
        self.write(offset, &value.to_le_bytes());
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if offset < regs::DOORBELLS {
            self.frozen = false;
        }
        self.controller.write(offset, data);
    }

    fn csts(&self) -> regs::Csts {
        let mut bytes = [0; 4];
        self.controller.read(regs::CSTS, &mut bytes);
        regs::Csts::from_bits(u32::from_le_bytes(bytes))
    }

    fn enable(&mut self) {
        let aqa = (command::ADMIN_ENTRIES - 1) * 0x1_0001;
        self.write32(regs::AQA, aqa);
        self.write(regs::ASQ, &command::ASQ.to_le_bytes());
        self.write(regs::ACQ, &command::ACQ.to_le_bytes());
        // CC.CSS enables all I/O command sets of the controller.
        self.write32(regs::CC, 0x0046_0061);
        self.tails = [0; 4];
    }

    /// Creates queue pairs 1 and 2 and configures shadow doorbells, as most guests do.
    fn create_queues(&mut self, source: &mut Source<'_>) {
        let shadow = source.bool();
        for qid in 1..=2u16 {
            let size = u32::from(source.of(&[3u16, 1, 7, 15, 63])) << 16;
            let mut cq = shadowbell_spec::Sqe::new(0x05, qid, 0).with_prps(command::cq_at(qid), 0);
            (cq.cdw10, cq.cdw11) = (size | u32::from(qid), 3 | u32::from(qid) << 16);
            self.store_command(0, &cq);
            self.ring(0, false);
            self.run_until_idle();
            let mut sq = shadowbell_spec::Sqe::new(0x01, qid, 0).with_prps(command::sq_at(qid), 0);
            (sq.cdw10, sq.cdw11) = (size | u32::from(qid), 1 | u32::from(qid) << 16);
            self.store_command(0, &sq);
            self.ring(0, false);
            self.run_until_idle();
        }
        if shadow {
            let sqe = shadowbell_spec::Sqe::new(0x7c, 9, 0)
                .with_prps(command::SHADOW, command::EVENT_IDX);
            self.store_command(0, &sqe);
            self.ring(0, false);
            self.run_until_idle();
        }
    }

    /// Stores a command at the entry that is probably the next one of this queue.
    fn store_command(&mut self, qid: u16, sqe: &shadowbell_spec::Sqe) {
        let tail = self.tails[usize::from(qid)];
        self.poke(command::sq_at(qid) + u64::from(tail) * 64, sqe.as_bytes());
        // The length of the queue is unknown. Some queues have 16 entries.
        self.tails[usize::from(qid)] = (tail + 1) % command::ADMIN_ENTRIES;
    }

    fn ring(&mut self, qid: u16, quietly: bool) {
        let tail = self.tails[usize::from(qid)];
        let bell = regs::sq_doorbell_offset(qid, 0);
        self.poke(command::SHADOW + bell - regs::DOORBELLS, &tail.to_le_bytes());
        if !quietly {
            self.controller.write_doorbell(bell, tail);
        }
    }

    fn act(&mut self, source: &mut Source<'_>) {
        match source.below(24) {
            0..=7 => {
                let qid = source.of(&[0, 1, 1, 1, 2, 3]);
                for _ in 0..1 + source.below(4) {
                    let sqe = command::command(source, qid == 0);
                    self.store_command(qid, &sqe);
                }
                self.ring(qid, source.rarely(4));
            }
            8 => {
                let (list, at) = (command::list(source), command::address(source));
                self.poke(at, &list);
            }
            9 => {
                let (bytes, at) = (source.bytes(64), command::address(source));
                self.poke(at, &bytes);
            }
            10 => {
                // Changes an entry of one of the two buffers of Doorbell Buffer Config.
                let entry = u64::from(source.u8() % 12) * 4;
                let at = source.of(&[command::SHADOW, command::EVENT_IDX]);
                let value = source.near(&[0, 1, 3, 15, 63, 64, 0xffff, 0x1_0000]) as u32;
                self.poke(at + entry, &value.to_le_bytes());
            }
            11 | 12 => {
                let bell = regs::DOORBELLS + u64::from(source.u8() % 12) * 4;
                let value = source.near(&[0, 1, 2, 3, 15, 16, 63, 64]) as u32;
                for _ in 0..FLOOD {
                    self.controller.write_doorbell(bell, value);
                }
            }
            13 => {
                let offset = source.near(&[0x14, 0x14, 0x1c, 0x24, 0x28, 0x30, 0x0c, 0x20, 0xe04]);
                let len = source.of(&[4, 8, 4, 2, 16]);
                let value = source.near(&[0x0046_0001, 0x0046_0060, 0x0046_4061, 0, 0x4e56_4d65]);
                let mut data = value.to_le_bytes().to_vec();
                data.resize(len, 0);
                if offset < regs::DOORBELLS + 0x1000 {
                    self.write(offset, &data);
                }
            }
            14 => {
                let len = source.of(&[4, 8, 1, 64, 0]);
                let mut data = vec![0; len];
                self.controller.read(source.near(&[0, 0x1c, 0x38, 0x1000]), &mut data);
            }
            15 => self.take_back(source.below(REGIONS.len())),
            16 => {
                let part = source.below(REGIONS.len());
                let writable = !source.rarely(4);
                if self.parts[part] == Part::Away {
                    self.share(part, writable);
                }
            }
            17 => self.reset(source.below(3)),
            18 => {
                self.enable();
                self.create_queues(source);
            }
            19 => {
                let mut state = self.test_disk.state();
                (state.defer, state.cancellable) = (source.bool(), source.bool());
            }
            20 => {
                let error = test_disk::error(source);
                self.test_disk.state().fail.push_back(error);
            }
            21 => {
                let mut state = self.test_disk.state();
                let n = source.below(state.deferred().max(1));
                state.end(n);
            }
            22 => {
                let vector = source.below(6);
                let event = source.bool().then(|| self.irq.try_clone().expect("an eventfd"));
                self.controller.set_interrupt(vector, event);
                self.controller.trigger_interrupt(source.below(6));
                self.map_and_unmap();
            }
            _ => {
                self.turns.turn();
            }
        }
        if !source.rarely(3) {
            self.run_until_idle();
        }
        let csts = self.csts();
        assert!(!csts.rdy() || !self.frozen, "CSTS.RDY is set after a reset: {csts:?}");
    }

    /// Sends many maps and unmaps before the I/O thread has processed any of them.
    fn map_and_unmap(&self) {
        let page = self.memory.slice(0, PAGE as usize).expect("a page");
        for n in 0..FLOOD {
            let at = FAR_ADDRESS + n * PAGE;
            self.controller.map_dma(at, PAGE, &page).expect("nothing else is there");
            self.controller.unmap_dma(at, PAGE, || ()).expect("a mapped page");
        }
    }

    /// Executes a reset of the given kind, and waits for its end.
    fn reset(&mut self, kind: usize) {
        let done = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&done);
        let then = move || flag.store(true, Ordering::SeqCst);
        match kind {
            0 => self.controller.reset(then),
            1 => self.controller.disconnect(then),
            _ => {
                let cc = {
                    let mut bytes = [0; 4];
                    self.controller.read(regs::CC, &mut bytes);
                    u32::from_le_bytes(bytes)
                };
                self.write32(regs::CC, cc & !1);
                for _ in 0..4 {
                    self.run_until_idle();
                    if !self.csts().rdy() {
                        done.store(true, Ordering::SeqCst);
                        break;
                    }
                    self.test_disk.state().complete_all();
                }
            }
        }
        self.run_until(&done, "a reset does not end");
        if kind == 1 {
            self.parts = [Part::Away; REGIONS.len()];
        }
        self.frozen = true;
        self.remember();
        self.run_until_idle();
        self.check();
        if kind == 1 {
            (0..REGIONS.len()).for_each(|part| self.share(part, true));
        }
    }

    fn finish(&mut self) {
        self.reset(1);
        self.check();
        // Repeated, because an operation may wait for the end of another one.
        for _ in 0..8 {
            self.test_disk.state().complete_flushes();
            self.run_until_idle();
        }
        assert_eq!(self.test_disk.state().transfers(), 0, "requests at the disk without a command");
    }
}
