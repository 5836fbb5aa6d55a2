//! Simulated guest and VMM that use a controller over a vfio-user socket. The guest verifies the
//! contents of its disk, and the VMM migrates the guest to another server. The module creates and
//! accesses the queues itself, without the driver. After a migration, the guest has another memory
//! file.

use shadowbell_memory::{EventFd, Mapping, SharedBytes};
use shadowbell_spec::admin::{CreateIoCq, CreateIoSq, DoorbellBufferConfig};
use shadowbell_spec::regs::{self, Cc, cq_doorbell_offset, sq_doorbell_offset};
use shadowbell_spec::{Cqe, Sqe};
use shadowbell_vfio_user::client::{Client, ClientError, DmaRange};
use shadowbell_vfio_user::device::{irq, region};
use shadowbell_vfio_user::migration::MigrationState;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;
use zerocopy::IntoBytes;

use crate::wait::LIMIT;

/// Size of the guest's memory in bytes. It begins at bus address 0.
pub const MEMORY: u64 = 8 << 20;
const PAGE: u64 = 4096;
/// Number of entries of each queue, and maximum number of commands in flight on each I/O queue
/// (`SLOTS`).
const ENTRIES: u32 = 32;
const SLOTS: u64 = 24;
/// Block size in bytes.
const BLOCK: u64 = 512;
/// Number of blocks that the guest uses.
const BLOCKS: u64 = 512;
/// Memory layout: the admin queues, shadow doorbells and EventIdx; then eight pages for each I/O
/// queue pair; then the data buffers.
const ASQ: u64 = 0;
const ACQ: u64 = PAGE;
const SHADOW: u64 = 2 * PAGE;
const EVENT_IDX: u64 = 3 * PAGE;
const QUEUES: u64 = 16 * PAGE;
const DATA: u64 = 1 << 20;

/// A queue pair from the guest's side.
struct Queue {
    qid: u16,
    sq: u64,
    cq: u64,
    tail: u32,
    head: u32,
    phase: bool,
    shadowed: bool,
    free: Vec<u64>,
}

impl Queue {
    fn new(qid: u16, shadowed: bool) -> Self {
        let at = QUEUES + u64::from(qid) * 8 * PAGE;
        let (sq, cq) = if qid == 0 { (ASQ, ACQ) } else { (at, at + 4 * PAGE) };
        let free = (0..SLOTS).collect();
        Self { qid, sq, cq, tail: 0, head: 0, phase: true, shadowed, free }
    }
}

/// A command in flight.
struct Command {
    slot: u64,
    lba: u64,
    /// Value that the command writes to the block; `None` for a read.
    writes: Option<u64>,
}

/// The guest, and its VMM.
pub struct Guest {
    client: Client,
    memory: Arc<Mapping>,
    queues: Vec<Queue>,
    events: Vec<EventFd>,
    /// Pages that the guest has written since the VMM last copied them.
    written_pages: BTreeSet<u64>,
    in_flight: BTreeMap<(u16, u16), Command>,
    /// Expected contents of the disk, by block.
    disk: BTreeMap<u64, u64>,
    busy: BTreeSet<u64>,
    count: u64,
    completed: u64,
}

/// Statistics of a migration.
#[derive(Debug, Default)]
pub struct MigrationStats {
    /// Pages that the device reported as dirty.
    pub dirty: u64,
    /// Length of the stream in bytes.
    pub stream: usize,
    /// Commands in flight or in the queues at the stop.
    pub in_flight: usize,
}

impl Guest {
    /// Creates a guest with `pairs` I/O queue pairs, and enables the controller behind `client`.
    pub fn boot(client: Client, pairs: u16, shadow: bool) -> Self {
        let memory = Mapping::shared("guest", MEMORY).expect("memory");
        let events = (0..=pairs).map(|_| EventFd::new().expect("an eventfd")).collect();
        let queues = vec![Queue::new(0, false)];
        let mut guest = Self {
            client,
            memory,
            queues,
            events,
            written_pages: BTreeSet::new(),
            in_flight: BTreeMap::new(),
            disk: BTreeMap::new(),
            busy: BTreeSet::new(),
            count: 0,
            completed: 0,
        };
        guest.connect();
        guest.client.region_write(region::CONFIG, 4, &6u16.to_le_bytes()).expect("the command");
        let aqa = (ENTRIES - 1) * 0x1_0001;
        guest.write(regs::AQA, &aqa.to_le_bytes());
        guest.write(regs::ASQ, &ASQ.to_le_bytes());
        guest.write(regs::ACQ, &ACQ.to_le_bytes());
        let cc = Cc::new().with_iosqes(6).with_iocqes(4).with_en(true);
        guest.write(regs::CC, &cc.into_bits().to_le_bytes());
        let start = Instant::now();
        while !guest.is_ready() {
            assert!(start.elapsed() < LIMIT, "the controller does not become ready");
        }
        if shadow {
            let pages = DoorbellBufferConfig { shadow: SHADOW, event_idx: EVENT_IDX };
            guest.admin(Sqe::dbbuf_config(pages, 0));
            guest.queues[0].shadowed = true;
        }
        for qid in 1..=pairs {
            let queue = Queue::new(qid, shadow);
            let qsize0 = (ENTRIES - 1) as u16;
            let create = CreateIoCq { qid, qsize0, pc: true, ien: true, iv: qid };
            guest.admin(create.encode(Sqe::new(0x05, 0, 0)).with_prps(queue.cq, 0));
            let create = CreateIoSq { qid, qsize0, pc: true, qprio: 0, cqid: qid, nvmsetid: 0 };
            guest.admin(create.encode(Sqe::new(0x01, 0, 0)).with_prps(queue.sq, 0));
            guest.queues.push(queue);
        }
        guest
    }

    /// Shares the memory with the device, and connects the interrupts.
    fn connect(&self) {
        let share = DmaRange {
            iova: 0,
            len: MEMORY,
            readable: true,
            writable: true,
            fd: self.memory.fd(),
            fd_offset: 0,
        };
        self.client.dma_map(&share).expect("memory is shared");
        let events: Vec<_> = self.events.iter().map(AsFd::as_fd).collect();
        self.client.set_irq_eventfds(irq::MSIX, 0, &events).expect("interrupts");
    }

    fn bytes(&self) -> SharedBytes {
        self.memory.bytes()
    }

    /// True if CSTS.RDY is set.
    pub fn is_ready(&self) -> bool {
        let mut csts = [0; 4];
        self.client.region_read(region::BAR0, regs::CSTS, &mut csts).expect("CSTS");
        csts[0] & 1 == 1
    }

    /// Number of completed I/O commands.
    pub fn completed(&self) -> u64 {
        self.completed
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.client.region_write(region::BAR0, offset, data).expect("a register");
    }

    fn write_memory(&mut self, at: u64, bytes: &[u8]) {
        let last = at + bytes.len() as u64 - 1;
        self.written_pages.extend(at / PAGE..=last / PAGE);
        self.bytes().write_from(at as usize, bytes).expect("its own memory");
    }

    fn cell(&self, at: u64) -> shadowbell_memory::SharedU32 {
        self.bytes().cell(at as usize).expect("its own memory")
    }

    /// Rings a doorbell. With shadow doorbells, writes the register only if EventIdx requires it,
    /// as Linux does.
    fn ring(&mut self, shadowed: bool, offset: u64, old: u32, new: u32) {
        if shadowed {
            let entry = offset - regs::DOORBELLS;
            self.cell(SHADOW + entry).store(new, Ordering::Release);
            self.written_pages.insert(SHADOW / PAGE);
            fence(Ordering::SeqCst);
            let event = self.cell(EVENT_IDX + entry).load(Ordering::Acquire) as u16;
            let (new, old) = (new as u16, old as u16);
            if new.wrapping_sub(event).wrapping_sub(1) >= new.wrapping_sub(old) {
                return;
            }
        }
        let client = &self.client;
        client.region_write(region::BAR0, offset, &new.to_le_bytes()).expect("a doorbell");
    }

    fn put(&mut self, at: usize, sqe: &Sqe) {
        let Queue { qid, sq, tail: old, shadowed, .. } = self.queues[at];
        self.write_memory(sq + u64::from(old) * 64, sqe.as_bytes());
        let tail = (old + 1) % ENTRIES;
        self.queues[at].tail = tail;
        self.ring(shadowed, sq_doorbell_offset(qid, 0), old, tail);
    }

    /// Takes the next completion of a queue, if there is one.
    fn reap_one(&mut self, at: usize) -> Option<Cqe> {
        let Queue { qid, cq, head: old, phase, shadowed, .. } = self.queues[at];
        let entry = (cq + u64::from(old) * 16) as usize;
        let word = self.bytes().load_u64_acquire(entry + 8).expect("its own memory");
        if (word >> 48) & 1 != u64::from(phase) {
            return None;
        }
        let cqe: Cqe = self.bytes().read(entry).expect("its own memory");
        assert!(cqe.status().is_success(), "queue {qid}: {}", cqe.status());
        let head = (old + 1) % ENTRIES;
        (self.queues[at].head, self.queues[at].phase) = (head, phase ^ (head == 0));
        self.ring(shadowed, cq_doorbell_offset(qid, 0), old, head);
        Some(cqe)
    }

    /// Executes an admin command.
    pub fn admin(&mut self, sqe: Sqe) {
        self.count += 1;
        let cid = self.count as u16;
        self.put(0, &sqe.with_cid(cid));
        let start = Instant::now();
        loop {
            if let Some(cqe) = self.reap_one(0) {
                return assert_eq!(cqe.cid, cid, "another command has ended");
            }
            assert!(start.elapsed() < LIMIT, "an admin command does not complete");
            std::thread::yield_now();
        }
    }

    /// Submits up to `commands` reads and writes, as long as the queues have room.
    pub fn submit(&mut self, commands: usize) {
        for _ in 0..commands {
            self.count += 1;
            let at = 1 + self.count as usize % (self.queues.len() - 1);
            let lba = self.count.wrapping_mul(2_654_435_761) % BLOCKS;
            if self.busy.contains(&lba) {
                continue;
            }
            let Some(slot) = self.queues[at].free.pop() else { continue };
            let qid = self.queues[at].qid;
            let data = DATA + (u64::from(qid) * SLOTS + slot) * PAGE;
            let cid = self.count as u16;
            let writes = (!self.count.is_multiple_of(3)).then_some(self.count);
            let sqe = match writes {
                Some(value) => {
                    self.write_memory(data, &value.to_le_bytes().repeat(64));
                    Sqe::write(1, lba, 0, cid)
                }
                None => Sqe::read(1, lba, 0, cid),
            };
            self.busy.insert(lba);
            self.in_flight.insert((qid, cid), Command { slot, lba, writes });
            self.put(at, &sqe.with_prps(data, 0));
        }
    }

    /// Takes completions, and verifies the data of reads. Returns the number of completions.
    pub fn reap(&mut self) -> usize {
        let mut count = 0;
        for at in 1..self.queues.len() {
            while let Some(cqe) = self.reap_one(at) {
                let qid = self.queues[at].qid;
                let command = self.in_flight.remove(&(qid, cqe.cid));
                let command = command.expect("each command completes once");
                let Command { slot, lba, writes } = command;
                match writes {
                    Some(value) => drop(self.disk.insert(lba, value)),
                    None => {
                        let data = DATA + (u64::from(qid) * SLOTS + slot) * PAGE;
                        let mut found = vec![0; BLOCK as usize];
                        self.bytes().read_into(data as usize, &mut found).expect("its memory");
                        let value = self.disk.get(&lba).copied().unwrap_or(0);
                        assert_eq!(found, value.to_le_bytes().repeat(64), "block {lba}");
                    }
                }
                self.busy.remove(&lba);
                self.queues[at].free.push(slot);
                count += 1;
            }
        }
        self.completed += count as u64;
        count
    }

    /// Waits until no command is in flight.
    pub fn drain(&mut self) {
        let start = Instant::now();
        while !self.in_flight.is_empty() {
            self.reap();
            let left = self.in_flight.len();
            assert!(start.elapsed() < LIMIT, "{left} commands do not complete");
            std::thread::yield_now();
        }
    }

    /// Submits I/O commands and takes completions, for `rounds` rounds.
    pub fn work(&mut self, rounds: usize) {
        for _ in 0..rounds {
            self.submit(8);
            self.reap();
        }
    }

    /// Reads all written blocks, and verifies their data.
    pub fn verify(&mut self) {
        self.drain();
        let blocks: Vec<u64> = self.disk.keys().copied().collect();
        for lba in blocks {
            self.count += 1;
            let cid = self.count as u16;
            let slot = self.queues[1].free.pop().expect("nothing is in flight");
            self.busy.insert(lba);
            self.in_flight.insert((1, cid), Command { slot, lba, writes: None });
            let data = DATA + (SLOTS + slot) * PAGE;
            self.put(1, &Sqe::read(1, lba, 0, cid).with_prps(data, 0));
            self.drain();
        }
    }

    /// Copies the pages with the numbers `pages` of the guest's memory to `to`, as a VMM does for a
    /// migration.
    fn copy(&self, to: &SharedBytes, pages: impl IntoIterator<Item = u64>) {
        let mut page = vec![0; PAGE as usize];
        for at in pages.into_iter().map(|page| (page * PAGE) as usize) {
            self.bytes().read_into(at, &mut page).expect("its own memory");
            to.write_from(at, &page).expect("as much memory");
        }
    }

    /// Suspends the guest for a migration. Returns a copy of its memory, the device state and
    /// statistics, for [`resume`](Self::resume). The memory is copied once as a whole, and `rounds`
    /// times its dirty pages. During these copies, the guest continues its I/O. Then it stops, and
    /// the remaining dirty pages are copied.
    pub fn suspend(&mut self, rounds: usize) -> (Arc<Mapping>, Vec<u8>, MigrationStats) {
        let mut moved = MigrationStats::default();
        let target = Mapping::shared("moved guest", MEMORY).expect("memory");
        let to = target.bytes();
        self.client.start_dma_logging(&[]).expect("the log begins");
        self.written_pages.clear();
        self.copy(&to, 0..MEMORY / PAGE);
        for _ in 0..rounds {
            self.work(20);
            let dirty = self.client.dirty_pages(0, MEMORY, PAGE).expect("the log");
            moved.dirty += dirty.len() as u64;
            let written_pages = std::mem::take(&mut self.written_pages);
            self.copy(&to, dirty.into_iter().chain(written_pages));
        }
        self.submit(SLOTS as usize);
        self.client.set_migration_state(MigrationState::Stop).expect("the device stops");
        moved.in_flight = self.in_flight.len();
        let dirty = self.client.dirty_pages(0, MEMORY, PAGE).expect("the log");
        moved.dirty += dirty.len() as u64;
        let written_pages = std::mem::take(&mut self.written_pages);
        self.copy(&to, dirty.into_iter().chain(written_pages));
        self.client.set_migration_state(MigrationState::StopCopy).expect("its state is read");
        let stream = self.client.read_migration_stream().expect("the stream");
        moved.stream = stream.len();
        self.client.stop_dma_logging().expect("the log ends");
        // The comparison detects pages that the dirty log has missed.
        let (mut ours, mut theirs) = (vec![0; PAGE as usize], vec![0; PAGE as usize]);
        for page in 0..MEMORY / PAGE {
            let at = (page * PAGE) as usize;
            self.bytes().read_into(at, &mut ours).expect("its own memory");
            to.read_into(at, &mut theirs).expect("as much memory");
            assert!(ours == theirs, "page {page} was written, and is not in the log");
        }
        (target, stream, moved)
    }

    /// Resumes the guest with the device behind `client`. The device gets `memory` and the device
    /// state `stream`.
    ///
    /// # Errors
    ///
    /// If the server refuses the state.
    pub fn resume(
        &mut self,
        client: Client,
        memory: Arc<Mapping>,
        stream: &[u8],
    ) -> Result<(), ClientError> {
        (self.client, self.memory) = (client, memory);
        self.events.iter().for_each(|event| {
            event.drain();
        });
        self.connect();
        self.client.set_migration_state(MigrationState::Resuming)?;
        self.client.write_migration_stream(stream)?;
        self.client.set_migration_state(MigrationState::Running)
    }

    /// Resumes a suspended guest on the source server, as after a failed migration.
    pub fn resume_at_source(&mut self) {
        self.client.set_migration_state(MigrationState::Running).expect("the device runs again");
    }

    /// The guest's client.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Number of interrupts of each vector since the last call.
    pub fn interrupts(&self) -> Vec<u64> {
        self.events.iter().map(EventFd::drain).collect()
    }
}
