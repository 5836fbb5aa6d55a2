//! Simulated host whose queue entries, doorbell writes and shadow entries are each written by the
//! test.
#![allow(dead_code, reason = "every test file uses its own part of it")]
#![allow(unreachable_pub, reason = "a module of tests")]

pub mod wire;

use shadowbell_controller::{
    Carrier, Config, Controller, NamespaceConfig, Polling, Pool, PoolOptions, Turns,
};
use shadowbell_memory::{EventFd, Mapping, SharedBytes};
use shadowbell_spec::admin::DoorbellBufferConfig;
use shadowbell_spec::regs::{self, Aqa, Cap, Cc, Csts, cq_doorbell_offset, sq_doorbell_offset};
use shadowbell_spec::{Cqe, Sqe, Status};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

/// Runs `what` on another thread while this thread acts as the I/O thread.
pub fn run_beside<T: Send + 'static>(
    turns: &mut Turns,
    what: impl FnOnce() -> T + Send + 'static,
) -> T {
    let other = std::thread::spawn(what);
    while !other.is_finished() {
        if !turns.turn() {
            std::thread::yield_now();
        }
    }
    while turns.turn() {}
    other.join().unwrap()
}

/// Bus address of the host's memory.
pub const BASE: u64 = 0x10_0000;
/// Size of the host's memory.
pub const MEMORY: u64 = 64 << 20;
/// Time limit of waits for expected events.
pub use shadowbell_testing::wait::LIMIT;

pub fn pool(polling: Polling) -> Pool {
    Pool::start(&PoolOptions { workers: 1, polling, pin: Vec::new() }).unwrap()
}

pub fn config(disks: &[&str]) -> Config {
    let namespaces = disks
        .iter()
        .enumerate()
        .map(|(i, uri)| NamespaceConfig {
            disk: shadowbell_disk_file::open(uri).unwrap(),
            uuid: shadowbell_controller::config::uuid_from(&format!("test-{i}")),
        })
        .collect();
    Config { namespaces, ..Config::default() }
}

/// Queue pair, as the host sees it.
pub struct Queue {
    pub qid: u16,
    pub entries: u32,
    pub sq: u64,
    pub cq: u64,
    pub tail: u32,
    pub head: u32,
    pub phase: bool,
    pub sq_head: u32,
    /// True if the queue's doorbells use the shadow pages.
    pub shadowed: bool,
    pub irq: Option<EventFd>,
}

pub struct Host {
    pub controller: Controller,
    pub memory: SharedBytes,
    next: u64,
    pub admin: Queue,
    pub shadow: Option<(u64, u64)>,
    pub rings: u64,
    /// Eventfds that the host signals instead of writing doorbell registers.
    pub doorbell_eventfds: shadowbell_controller::DoorbellEventfds,
    /// True if the host writes doorbells in the mapped page.
    pub mapped: bool,
    cid: u16,
}

/// A completion: command identifier, status, and dword 0.
pub type Done = (u16, Status, u32);

impl Host {
    /// Creates a controller of `disks`, attaches to it and enables it. The admin queue has 32
    /// entries.
    pub fn new(disks: &[&str], polling: Polling) -> Self {
        Self::with(config(disks), polling)
    }

    pub fn with(config: Config, polling: Polling) -> Self {
        let controller = Controller::new(config, pool(polling), Carrier::default()).unwrap();
        let mut host = Self::attach(controller);
        host.enable();
        host
    }

    /// Creates a host and maps its memory. The controller is not enabled yet.
    pub fn attach(controller: Controller) -> Self {
        let memory = Mapping::shared("host", MEMORY).unwrap().bytes();
        controller.map_dma(BASE, MEMORY, &memory).unwrap();
        let admin = Queue {
            qid: 0,
            entries: 32,
            sq: BASE,
            cq: BASE + 4096,
            tail: 0,
            head: 0,
            phase: true,
            sq_head: 0,
            shadowed: false,
            irq: None,
        };
        let (next, shadow, rings, cid) = (BASE + 8192, None, 0, 0);
        let doorbell_eventfds = shadowbell_controller::DoorbellEventfds::default();
        let mapped = controller.has_mapped_doorbells();
        Self { controller, memory, next, admin, shadow, rings, doorbell_eventfds, mapped, cid }
    }

    pub fn read32(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.controller.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    pub fn read64(&self, offset: u64) -> u64 {
        let mut data = [0; 8];
        self.controller.read(offset, &mut data);
        u64::from_le_bytes(data)
    }

    pub fn write32(&self, offset: u64, value: u32) {
        self.controller.write(offset, &value.to_le_bytes());
    }

    pub fn cap(&self) -> Cap {
        Cap::from_bits(self.read64(regs::CAP))
    }

    pub fn csts(&self) -> Csts {
        Csts::from_bits(self.read32(regs::CSTS))
    }

    /// Waits until `holds` returns true; `what` is for the message on a timeout.
    pub fn until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < LIMIT, "timed out waiting for {what}");
            std::thread::yield_now();
        }
    }

    pub fn enable_with(&mut self, cc: Cc) {
        let aqa = Aqa::new().with_asqs(31).with_acqs(31);
        self.write32(regs::AQA, aqa.into_bits());
        self.controller.write(regs::ASQ, &self.admin.sq.to_le_bytes());
        self.controller.write(regs::ACQ, &self.admin.cq.to_le_bytes());
        self.memory.fill(0, 8192, 0).unwrap();
        let admin = &mut self.admin;
        (admin.tail, admin.head, admin.phase, admin.shadowed) = (0, 0, true, false);
        self.shadow = None;
        self.write32(regs::CC, cc.with_en(true).into_bits());
    }

    pub fn enable(&mut self) {
        self.enable_with(Cc::new().with_iosqes(6).with_iocqes(4));
        assert!(self.csts().rdy(), "{:?}", self.csts());
    }

    /// Clears CC.EN and waits until CSTS.RDY is 0.
    pub fn disable(&self) {
        let cc = Cc::from_bits(self.read32(regs::CC));
        self.write32(regs::CC, cc.with_en(false).into_bits());
        self.until("CSTS.RDY to clear", || !self.csts().rdy());
    }

    /// Allocates zeroed, page-aligned memory.
    pub fn alloc(&mut self, len: u64) -> u64 {
        let at = self.next;
        self.next += len.next_multiple_of(4096);
        assert!(self.next <= BASE + MEMORY, "the host is out of memory");
        at
    }

    /// Frees all memory that was allocated after `at`, and zeroes it.
    pub fn rewind(&mut self, at: u64) {
        self.poke(at, &vec![0; (self.next - at) as usize]);
        self.next = at;
    }

    pub fn poke(&self, iova: u64, bytes: &[u8]) {
        self.memory.write_from((iova - BASE) as usize, bytes).unwrap();
    }

    pub fn peek(&self, iova: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_into((iova - BASE) as usize, &mut bytes).unwrap();
        bytes
    }

    pub fn peek32(&self, iova: u64) -> u32 {
        self.memory.cell((iova - BASE) as usize).unwrap().load(Ordering::Acquire)
    }

    pub fn poke32(&self, iova: u64, value: u32) {
        self.memory.cell((iova - BASE) as usize).unwrap().store(value, Ordering::Release);
    }

    pub fn next_cid(&mut self) -> u16 {
        self.cid = self.cid.wrapping_add(1);
        self.cid
    }

    /// Stores an entry in a queue's memory and advances its tail, without a doorbell.
    pub fn put(&self, queue: &mut Queue, sqe: &Sqe) {
        use zerocopy::IntoBytes;
        self.poke(queue.sq + u64::from(queue.tail) * 64, sqe.as_bytes());
        queue.tail = (queue.tail + 1) % queue.entries;
    }

    /// Rings a queue's tail doorbell, through the mechanism that this host uses.
    pub fn ring(&mut self, queue: &Queue, old: u32) {
        let offset = sq_doorbell_offset(queue.qid, 0);
        self.doorbell(queue.shadowed, offset, old, queue.tail);
    }

    /// Writes a doorbell: to the register or to the shadow page. After a write to the shadow page,
    /// the host writes the register only if EventIdx requires it, like Linux.
    pub fn doorbell(&mut self, shadowed: bool, offset: u64, old: u32, new: u32) {
        if let (true, Some((shadow, event_idx))) = (shadowed, self.shadow) {
            let entry = offset - regs::DOORBELLS;
            self.poke32(shadow + entry, new);
            fence(Ordering::SeqCst);
            let event = self.peek32(event_idx + entry) as u16;
            let (new, old) = (new as u16, old as u16);
            if new.wrapping_sub(event).wrapping_sub(1) >= new.wrapping_sub(old) {
                return;
            }
        }
        self.rings += 1;
        let kick =
            self.doorbell_eventfds.doorbells.iter().find(|(doorbell, _)| *doorbell == offset);
        match kick {
            Some((_, index)) if shadowed => self.doorbell_eventfds.events[*index].signal(),
            _ if self.mapped => {
                let at = (offset - regs::DOORBELLS) as usize;
                self.controller.doorbells().cell(at).unwrap().store(new, Ordering::Release);
            }
            _ => drop(self.controller.write_doorbell(offset, new)),
        }
    }

    /// Stores one entry and rings the doorbell.
    pub fn submit(&mut self, queue: &mut Queue, sqe: &Sqe) {
        let old = queue.tail;
        self.put(queue, sqe);
        self.ring(queue, old);
    }

    /// Returns the next completion, if it was posted. Advances the head and rings its doorbell.
    pub fn reap(&mut self, queue: &mut Queue) -> Option<Done> {
        let at = (queue.cq + u64::from(queue.head) * 16 - BASE) as usize;
        let word = self.memory.load_u64_acquire(at + 8).unwrap();
        if (word >> 48) & 1 != u64::from(queue.phase) {
            return None;
        }
        let cqe: Cqe = self.memory.read(at).unwrap();
        assert_eq!(cqe.sq_id, queue.qid);
        queue.sq_head = cqe.sq_head.into();
        let old = queue.head;
        queue.head = (queue.head + 1) % queue.entries;
        queue.phase ^= queue.head == 0;
        let (shadowed, new) = (queue.shadowed, queue.head);
        self.doorbell(shadowed, cq_doorbell_offset(queue.qid, 0), old, new);
        Some((cqe.cid, cqe.status(), cqe.dw0))
    }

    /// Waits for the next completion.
    pub fn wait(&mut self, queue: &mut Queue) -> Done {
        let start = Instant::now();
        loop {
            if let Some(done) = self.reap(queue) {
                return done;
            }
            assert!(
                start.elapsed() < LIMIT,
                "no completion on queue {}: tail {} head {} csts {:?} {:?}",
                queue.qid,
                queue.tail,
                queue.head,
                self.csts(),
                self.controller.stats(),
            );
            std::thread::yield_now();
        }
    }

    /// Submits one command and waits for its completion.
    pub fn run(&mut self, queue: &mut Queue, sqe: Sqe) -> (Status, u32) {
        let cid = self.next_cid();
        self.submit(queue, &sqe.with_cid(cid));
        let (done, status, dw0) = self.wait(queue);
        assert_eq!(done, cid);
        (status, dw0)
    }

    pub fn admin(&mut self, sqe: Sqe) -> (Status, u32) {
        let mut admin = std::mem::replace(&mut self.admin, Queue::none());
        let done = self.run(&mut admin, sqe);
        self.admin = admin;
        done
    }

    /// Runs an admin command that must succeed. Returns dword 0 of its completion.
    pub fn must(&mut self, sqe: Sqe) -> u32 {
        let (status, dw0) = self.admin(sqe);
        assert!(status.is_success(), "opcode {:#x}: {status}", sqe.opcode);
        dw0
    }

    /// Runs an admin command that returns a page of data.
    pub fn page(&mut self, sqe: Sqe) -> Result<Vec<u8>, Status> {
        let at = self.alloc(4096);
        let (status, _) = self.admin(sqe.with_prps(at, 0));
        if status.is_success() { Ok(self.peek(at, 4096)) } else { Err(status) }
    }

    /// Configures shadow doorbells; `initial` is the first value of every shadow entry.
    pub fn configure_shadow(&mut self, initial: impl Fn(&Self, u64) -> u32) -> Status {
        let (shadow, event_idx) = (self.alloc(4096), self.alloc(4096));
        for entry in (0..4096).step_by(4) {
            let value = initial(self, entry);
            self.poke32(shadow + entry, value);
        }
        let (status, _) =
            self.admin(Sqe::dbbuf_config(DoorbellBufferConfig { shadow, event_idx }, 0));
        if status.is_success() {
            self.shadow = Some((shadow, event_idx));
        }
        status
    }

    /// Creates I/O queue pair `qid`.
    pub fn create(&mut self, qid: u16, entries: u32, irq: bool) -> Queue {
        let (sq, cq) = (self.alloc(u64::from(entries) * 64), self.alloc(u64::from(entries) * 16));
        let irq = irq.then(|| {
            let event = EventFd::new().unwrap();
            self.controller.set_interrupt(qid.into(), Some(event.try_clone().unwrap()));
            event
        });
        let qsize0 = (entries - 1) as u16;
        let iv = irq.is_some().then_some(qid);
        self.must(create_cq(qid, qsize0, iv, cq));
        self.must(create_sq(qid, qsize0, qid, sq));
        Queue {
            qid,
            entries,
            sq,
            cq,
            tail: 0,
            head: 0,
            phase: true,
            sq_head: 0,
            shadowed: self.shadow.is_some(),
            irq,
        }
    }
}

impl Queue {
    pub fn none() -> Self {
        Self {
            qid: 0,
            entries: 2,
            sq: 0,
            cq: 0,
            tail: 0,
            head: 0,
            phase: true,
            sq_head: 0,
            shadowed: false,
            irq: None,
        }
    }
}

pub fn create_cq(qid: u16, qsize0: u16, iv: Option<u16>, at: u64) -> Sqe {
    use shadowbell_spec::admin::CreateIoCq;
    let command = CreateIoCq { qid, qsize0, pc: true, ien: iv.is_some(), iv: iv.unwrap_or(0) };
    command.encode(Sqe::new(0x05, 0, 0)).with_prps(at, 0)
}

pub fn create_sq(qid: u16, qsize0: u16, cqid: u16, at: u64) -> Sqe {
    use shadowbell_spec::admin::CreateIoSq;
    let command = CreateIoSq { qid, qsize0, pc: true, qprio: 0, cqid, nvmsetid: 0 };
    command.encode(Sqe::new(0x01, 0, 0)).with_prps(at, 0)
}

/// Disk that completes no request by itself: the test releases each request, with an outcome.
pub mod slow {
    use shadowbell_disk::{Disk, DiskError, DiskInfo, Queue, Request, Submitted};
    use shadowbell_memory::{EventFd, Segments};
    use std::collections::VecDeque;
    use std::os::fd::{AsFd, BorrowedFd};
    use std::sync::{Arc, Mutex};

    #[derive(Debug, Default)]
    pub struct Gate {
        /// Outcomes that the disk will report. The first outcome is for the oldest pending request.
        pub release: Mutex<VecDeque<Result<(), DiskError>>>,
        /// Tags of pending requests, oldest first.
        pub pending: Mutex<Vec<u32>>,
        /// Tags of cancelled requests.
        pub cancelled: Mutex<Vec<u32>>,
        /// True if the disk completes a request when it is cancelled.
        pub heed_cancel: std::sync::atomic::AtomicBool,
        wake: Mutex<Option<EventFd>>,
    }

    impl Gate {
        /// Makes the disk complete the oldest pending request with this outcome.
        pub fn end(&self, outcome: Result<(), DiskError>) {
            self.release.lock().unwrap().push_back(outcome);
            if let Some(wake) = &*self.wake.lock().unwrap() {
                wake.signal();
            }
        }

        pub fn waiting(&self) -> usize {
            self.pending.lock().unwrap().len()
        }
    }

    #[derive(Debug)]
    pub struct Slow(pub Arc<Gate>);

    impl Disk for Slow {
        fn info(&self) -> DiskInfo {
            let mut info = DiskInfo::new(512, 1 << 20);
            info.volatile_cache = true;
            info.discard = true;
            info
        }

        fn queue(&self) -> std::io::Result<Box<dyn Queue>> {
            let event = EventFd::new()?;
            *self.0.wake.lock().unwrap() = Some(event.try_clone()?);
            Ok(Box::new(SlowQueue { gate: Arc::clone(&self.0), event, held: VecDeque::new() }))
        }

        fn name(&self) -> String {
            "slow".into()
        }
    }

    struct SlowQueue {
        gate: Arc<Gate>,
        event: EventFd,
        held: VecDeque<(u32, Request, Segments)>,
    }

    impl Queue for SlowQueue {
        fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
            self.gate.pending.lock().unwrap().push(tag);
            self.held.push_back((tag, *request, data.take()));
            Submitted::Pending
        }

        fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
            self.event.drain();
            let mut end = |held: (u32, Request, Segments), outcome: Result<(), DiskError>| {
                self.gate.pending.lock().unwrap().retain(|t| *t != held.0);
                if outcome.is_ok() && held.1.op == shadowbell_disk::Op::Read {
                    held.2.fill(0, held.1.len as usize, 0xee).unwrap();
                }
                done(held.0, outcome, held.2);
            };
            while !self.held.is_empty() {
                let Some(outcome) = self.gate.release.lock().unwrap().pop_front() else { break };
                end(self.held.pop_front().unwrap(), outcome);
            }
            if self.gate.heed_cancel.load(std::sync::atomic::Ordering::Relaxed) {
                let cancelled = std::mem::take(&mut *self.gate.cancelled.lock().unwrap());
                for tag in cancelled {
                    if let Some(at) = self.held.iter().position(|h| h.0 == tag) {
                        end(self.held.remove(at).unwrap(), Err(DiskError::Cancelled));
                    }
                }
            }
        }

        fn cancel(&mut self, tag: u32) {
            self.gate.cancelled.lock().unwrap().push(tag);
            self.event.signal();
        }

        fn pending(&self) -> usize {
            self.held.len()
        }

        fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
            Some(self.event.as_fd())
        }
    }
}

/// Creates a host with a [`slow::Slow`] disk.
pub fn slow_host(polling: Polling) -> (Host, Arc<slow::Gate>) {
    let gate = Arc::new(slow::Gate::default());
    let disk: Arc<dyn shadowbell_disk::Disk> = Arc::new(slow::Slow(Arc::clone(&gate)));
    let namespaces = vec![NamespaceConfig { disk, uuid: [7; 16] }];
    (Host::with(Config { namespaces, ..Config::default() }, polling), gate)
}
