//! Host of a controller whose process dies.

use crate::process::{
    ADMIN_CQ, ADMIN_SQ, BASE, BLOCKS, DATA, EVENT_IDX, Instructions, LIMIT, MEMORY, Process,
    QUEUES, SHADOW, Task,
};
use shadowbell_disk::Disk;
use shadowbell_memory::{Mapping, SharedBytes};
use shadowbell_spec::admin::{CreateIoCq, CreateIoSq, DoorbellBufferConfig};
use shadowbell_spec::status::Status;
use shadowbell_spec::{Cqe, Sqe};
use shadowbell_state::{Descriptors, Parcel};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

/// Queue pair, as the host sees it.
pub(crate) struct Queue {
    pub(crate) qid: u16,
    pub(crate) entries: u32,
    pub(crate) sq: u64,
    pub(crate) cq: u64,
    pub(crate) tail: u32,
    pub(crate) head: u32,
    pub(crate) phase: bool,
}

pub(crate) struct Host {
    pub(crate) memory: SharedBytes,
    pub(crate) file: OwnedFd,
    /// Path of a file, or a memory disk that outlives the process.
    pub(crate) disk: Result<String, Arc<dyn Disk>>,
    pub(crate) mapped: bool,
    pub(crate) polling: bool,
    pub(crate) process: Option<Process>,
    /// Injected errors and crash points of the processes that are started next.
    pub(crate) instructions: Instructions,
    /// Time limit of waits for expected events.
    pub(crate) timeout: Duration,
    /// Checkpoint from which the next process recovers the controller.
    pub(crate) record: Option<Parcel>,
    /// True if the process that wrote the checkpoint crashed, and was not killed by the test.
    pub(crate) by_fault: bool,
    pub(crate) doorbells: Option<SharedBytes>,
    pub(crate) shadow: bool,
    pub(crate) admin: Queue,
    pub(crate) queues: Vec<Queue>,
    /// Last value written to each doorbell, by offset.
    pub(crate) last_doorbells: BTreeMap<u64, u32>,
    pub(crate) next_cid: u16,
    /// Commands in flight, by queue and command identifier: the block, and for a write the value
    /// that is written.
    pub(crate) in_flight: BTreeMap<(u16, u16), (u64, Option<u64>)>,
    pub(crate) written: BTreeMap<u64, u64>,
    /// Number of completions since the last kill.
    pub(crate) completed: u64,
    pub(crate) replayed: usize,
    /// Blocks of the commands that must fail, and of the commands that have failed.
    pub(crate) deadly: BTreeSet<u64>,
    pub(crate) abandoned: BTreeSet<u64>,
    /// Number of processes that died at a crash point.
    pub(crate) crashes: u32,
}

impl Host {
    pub(crate) fn new(disk: Result<String, Arc<dyn Disk>>, mapped: bool, polling: bool) -> Self {
        Self::with_instructions(disk, mapped, polling, Instructions::default())
    }

    pub(crate) fn with_instructions(
        disk: Result<String, Arc<dyn Disk>>,
        mapped: bool,
        polling: bool,
        instructions: Instructions,
    ) -> Self {
        let memory = Mapping::shared("recovery-host", MEMORY).unwrap().bytes();
        let file = memory.mapping().fd().unwrap().try_clone_to_owned().unwrap();
        let admin = queue(0, 16, ADMIN_SQ, ADMIN_CQ);
        let mut host = Self {
            memory,
            file,
            disk,
            mapped,
            polling,
            process: None,
            instructions,
            timeout: LIMIT,
            record: None,
            by_fault: false,
            doorbells: None,
            shadow: false,
            admin,
            queues: Vec::new(),
            last_doorbells: BTreeMap::new(),
            next_cid: 0,
            in_flight: BTreeMap::new(),
            written: BTreeMap::new(),
            completed: 0,
            replayed: 0,
            deadly: BTreeSet::new(),
            abandoned: BTreeSet::new(),
            crashes: 0,
        };
        host.start();
        host
    }

    /// Starts a process. It recovers the controller if there is a checkpoint, and creates a new one
    /// otherwise.
    pub(crate) fn start(&mut self) {
        let mut fds = Descriptors::default();
        let memory = fds.add(self.file.try_clone().unwrap());
        let disk = match &self.disk {
            Ok(path) => Ok(path.clone()),
            Err(disk) => Err(disk.checkpoint(&mut fds).unwrap()),
        };
        let (mapped, polling) = (self.mapped, self.polling);
        let recovers = self.record.is_some();
        let by_fault = self.by_fault;
        let Instructions { isolated, quiesces, one_step, .. } = self.instructions;
        let task = Task {
            memory,
            disk,
            polling,
            workers: 2,
            mapped,
            recovers,
            by_fault,
            isolated,
            quiesces,
            one_step,
        };
        self.process = Some(Process::start(&task, fds, self.record.as_ref(), &self.instructions));
    }

    /// Kills the process and starts another one. If the killed process had not yet recovered the
    /// controller, the next process starts from the same checkpoint.
    pub(crate) fn kill(&mut self) {
        let (records, by_fault) = self.process.take().unwrap().kill();
        if let Some(replays) = records.taken {
            self.replayed += replays;
            self.record = records.last;
            self.by_fault = by_fault;
        }
        self.doorbells = self.doorbells.take().or(records.doorbells);
        self.completed = 0;
        self.start();
        // With a real client, unread doorbell writes stay in its socket for the next process. In
        // this test, each process has its own socket, so the last value of each doorbell is sent
        // again.
        let last_doorbells: Vec<_> =
            self.last_doorbells.iter().map(|(offset, value)| (*offset, *value)).collect();
        for (offset, value) in last_doorbells {
            self.write_doorbell(offset, value);
        }
    }

    pub(crate) fn until_taken(&mut self) {
        self.process.as_mut().unwrap().until_taken();
    }

    pub(crate) fn write_doorbell(&mut self, offset: u64, value: u32) {
        self.last_doorbells.insert(offset, value);
        if self.mapped
            && let Some(page) = &self.doorbells
        {
            page.write(offset as usize - 4096, &value).unwrap();
            return;
        }
        let mut parcel = Parcel::new();
        parcel.add("ring", true, &(offset, value)).unwrap();
        // An error is ignored, because the process may have been killed.
        let _ = parcel.send(&self.process.as_ref().unwrap().host);
    }

    pub(crate) fn poke(&self, at: u64, bytes: &[u8]) {
        self.memory.write_from(at as usize, bytes).unwrap();
    }

    /// Writes a doorbell by the rule of Linux: with shadow doorbells, the register only if EventIdx
    /// requires it.
    pub(crate) fn doorbell(&mut self, index: u64, old: u32, new: u32) {
        if self.shadow {
            fence(Ordering::SeqCst);
            self.memory.store_u32(SHADOW + index * 4, new);
            fence(Ordering::SeqCst);
            let event_idx = self.memory.load_u32_acquire((EVENT_IDX + index * 4) as usize).unwrap();
            let passed =
                (new.wrapping_sub(event_idx).wrapping_sub(1) as u16) < new.wrapping_sub(old) as u16;
            if !passed {
                return;
            }
        }
        self.write_doorbell(4096 + index * 4, new);
    }

    pub(crate) fn submit(&mut self, at: Option<usize>, sqe: Sqe) -> u16 {
        self.next_cid = (self.next_cid + 1) % 0xfff0;
        let cid = self.next_cid;
        let (qid, old, new);
        {
            let queue = at.map_or(&mut self.admin, |at| &mut self.queues[at]);
            let place = queue.sq + u64::from(queue.tail) * 64;
            self.memory.write(place as usize, &Sqe { cid, ..sqe }).unwrap();
            old = queue.tail;
            queue.tail = (queue.tail + 1) % queue.entries;
            (qid, new) = (queue.qid, queue.tail);
        }
        self.doorbell(u64::from(qid) * 2, old, new);
        cid
    }

    pub(crate) fn reap(&mut self, at: Option<usize>) -> Option<Cqe> {
        let queue = at.map_or(&mut self.admin, |at| &mut self.queues[at]);
        let place = (queue.cq + u64::from(queue.head) * 16) as usize;
        let word = self.memory.load_u64_acquire(place + 8).unwrap();
        if (word >> 48 & 1 != 0) != queue.phase {
            return None;
        }
        let cqe: Cqe = self.memory.read(place).unwrap();
        let old = queue.head;
        queue.head = (queue.head + 1) % queue.entries;
        queue.phase ^= queue.head == 0;
        let (qid, new) = (queue.qid, queue.head);
        self.doorbell(u64::from(qid) * 2 + 1, old, new);
        Some(cqe)
    }

    /// Runs an admin command to its completion. Whenever `kill` returns true, the process is killed
    /// and another one started.
    pub(crate) fn admin(&mut self, sqe: Sqe, kill: &mut dyn FnMut() -> bool) -> Cqe {
        let cid = self.submit(None, sqe);
        let began = Instant::now();
        loop {
            if let Some(cqe) = self.reap(None) {
                assert_eq!(cqe.cid, cid, "each admin command completes once");
                assert!(cqe.status().is_success(), "{}: opcode {:#x}", cqe.status(), sqe.opcode);
                return cqe;
            }
            if kill() || self.has_died() {
                self.kill();
            }
            if began.elapsed() > self.timeout {
                let word = |at| self.memory.load_u32_acquire(at as usize).unwrap();
                let (shadow, event_idx) = (word(SHADOW), word(EVENT_IDX));
                let Queue { tail, head, phase, .. } = self.admin;
                panic!(
                    "admin command {:#x} never ends: tail {tail}, shadow {shadow}, EventIdx \
                     {event_idx}, rung {:?}, head {head}, phase {phase}, taken {}",
                    sqe.opcode,
                    self.last_doorbells.get(&4096),
                    self.process.as_ref().unwrap().taken.load(Ordering::Acquire)
                );
            }
            std::thread::yield_now();
        }
    }

    /// Makes the process reset the controller and die. Another process recovers the controller.
    pub(crate) fn reset_and_kill(&mut self) {
        self.poke(ADMIN_CQ, &[0; 16 * 16]);
        self.admin = queue(0, 16, ADMIN_SQ, ADMIN_CQ);
        (self.shadow, self.last_doorbells) = (false, BTreeMap::new());
        self.queues.clear();
        let mut parcel = Parcel::new();
        parcel.add("reset", true, &()).unwrap();
        parcel.send(&self.process.as_ref().unwrap().host).unwrap();
        while !self.has_died() {
            std::thread::yield_now();
        }
        self.kill();
    }

    /// Enables shadow doorbells if possible, and creates two queue pairs.
    pub(crate) fn begin(&mut self) {
        let mut never = || false;
        if !self.mapped {
            let command =
                DoorbellBufferConfig { shadow: BASE + SHADOW, event_idx: BASE + EVENT_IDX };
            self.admin(command.encode(Sqe::new(0x7c, 0, 0)), &mut never);
            self.shadow = true;
        }
        self.create(1, 16, &mut never);
        self.create(2, 5, &mut never);
    }

    pub(crate) fn create(&mut self, qid: u16, entries: u32, kill: &mut dyn FnMut() -> bool) {
        let base = QUEUES + u64::from(qid) * 0x4000;
        let (sq, cq) = (base, base + 0x2000);
        self.poke(cq, &vec![0; entries as usize * 16]);
        for kind in 0..2 {
            let index = u64::from(qid) * 2 + kind;
            self.poke(SHADOW + index * 4, &[0; 4]);
            self.poke(EVENT_IDX + index * 4, &[0; 4]);
            self.last_doorbells.remove(&(4096 + index * 4));
        }
        let qsize0 = entries as u16 - 1;
        let command = CreateIoCq { qid, qsize0, pc: true, ien: false, iv: 0 };
        self.admin(command.encode(Sqe::new(5, 0, 0)).with_prps(BASE + cq, 0), kill);
        let command = CreateIoSq { qid, qsize0, pc: true, cqid: qid, ..CreateIoSq::default() };
        self.admin(command.encode(Sqe::new(1, 0, 0)).with_prps(BASE + sq, 0), kill);
        self.queues.push(queue(qid, entries, sq, cq));
    }

    /// Submits a read or a write of a block that no other command in flight uses.
    pub(crate) fn submit_io(&mut self, at: usize, random: u64) -> bool {
        let queue = &self.queues[at];
        let qid = queue.qid;
        let in_flight = self.in_flight.keys().filter(|(of, _)| *of == qid).count() as u32;
        let lba = random % BLOCKS;
        if in_flight >= queue.entries - 1 || self.in_flight.values().any(|(busy, _)| *busy == lba) {
            return false;
        }
        let page = DATA + lba * 512;
        let value = random | 1;
        if random & 3 << 40 == 0 && self.written.contains_key(&lba) {
            self.poke(page, &[0; 512]);
            let cid = self.submit(Some(at), Sqe::read(1, lba, 0, 0).with_prps(BASE + page, 0));
            self.in_flight.insert((qid, cid), (lba, None));
        } else {
            self.poke(page, &value.to_le_bytes().repeat(64));
            let cid = self.submit(Some(at), Sqe::write(1, lba, 0, 0).with_prps(BASE + page, 0));
            self.in_flight.insert((qid, cid), (lba, Some(value)));
        }
        true
    }

    pub(crate) fn reap_io(&mut self, at: usize) -> bool {
        let Some(cqe) = self.reap(Some(at)) else { return false };
        let qid = self.queues[at].qid;
        assert_eq!(cqe.sq_id, qid);
        let command = self.in_flight.remove(&(qid, cqe.cid));
        let (lba, wrote) = command.unwrap_or_else(|| {
            let Queue { head, phase, .. } = self.queues[at];
            panic!("each command completes once, not {cqe:?}; head {head}, phase {phase}");
        });
        self.completed += 1;
        if self.deadly.contains(&lba) {
            assert_eq!(cqe.status(), Status::INTERNAL.with_dnr());
            assert!(self.abandoned.insert(lba), "the command completed twice");
            return true;
        }
        assert!(cqe.status().is_success(), "block {lba}: {}", cqe.status());
        match wrote {
            Some(value) => drop(self.written.insert(lba, value)),
            None => {
                let mut bytes = [0; 512];
                self.memory.read_into((DATA + lba * 512) as usize, &mut bytes).unwrap();
                assert_eq!(
                    bytes[..],
                    self.written[&lba].to_le_bytes().repeat(64)[..],
                    "block {lba}"
                );
            }
        }
        true
    }

    /// Waits for the completions of all commands in flight.
    pub(crate) fn drain(&mut self) {
        let began = Instant::now();
        while !self.in_flight.is_empty() {
            for at in 0..self.queues.len() {
                self.reap_io(at);
            }
            assert!(began.elapsed() < self.timeout, "these never end: {:?}", self.in_flight);
            // This sleep is shorter than `wait::pause`, because it occurs once per few commands.
            std::thread::sleep(Duration::from_micros(20));
            if self.has_died() {
                self.kill();
            }
        }
    }

    /// Returns true if the process has died at its crash point. The next process gets no crash
    /// point.
    pub(crate) fn has_died(&mut self) -> bool {
        let has_died = self.process.as_mut().is_some_and(Process::has_died);
        if has_died {
            self.crashes += 1;
            self.instructions.abort_at = None;
        }
        has_died
    }

    /// Reads every written block and checks its contents.
    pub(crate) fn verify(&mut self) {
        self.drain();
        for lba in self.written.keys().copied().collect::<Vec<_>>() {
            // This value of `random` selects a read of the block.
            assert!(self.submit_io(0, lba));
            self.drain();
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(process) = self.process.take() {
            process.kill();
        }
    }
}

pub(crate) fn queue(qid: u16, entries: u32, sq: u64, cq: u64) -> Queue {
    Queue { qid, entries, sq, cq, tail: 0, head: 0, phase: true }
}

pub(crate) trait StoreU32 {
    fn store_u32(&self, at: u64, value: u32);
}

impl StoreU32 for SharedBytes {
    fn store_u32(&self, at: u64, value: u32) {
        shadowbell_doorbell::Cell::store_release(&self.cell(at as usize).unwrap(), value);
    }
}
