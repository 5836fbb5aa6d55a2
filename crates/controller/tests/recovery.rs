//! Processes that are killed at any moment, and others that go on with their hosts.
//!
//! The host is this process: it has the memory, the queues and the doorbells, and what the process
//! with the controller has recorded. That process is this program once more, and is killed.

use serde::{Deserialize, Serialize};
use shadowbell_backend::Disk;
use shadowbell_controller::{
    Carrier, Config, Controller, NamespaceConfig, Polling, Pool, PoolOptions, Recorder,
    SavedController,
};
use shadowbell_memory::{Mapping, Protection, SharedBytes};
use shadowbell_spec::admin::{
    CreateIoCq, CreateIoSq, DeleteIoQueue, DoorbellBufferConfig, Identify,
};
use shadowbell_spec::regs::{self, Aqa, Cc, Csts};
use shadowbell_spec::{Cqe, Sqe};
use shadowbell_state::{AbortPoint, Descriptors, FdRef, Parcel};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Long: the kernel ends what a dead process has under way by threads of its own, which need a
/// processor, and the machine may be busy.
const TIMEOUT: Duration = Duration::from_secs(150);
const WORKER: &str = "SHADOWBELL_TEST_RECOVERY_WORKER";
const BASE: u64 = 0x10_0000;
const MEMORY: u64 = 8 << 20;
const BLOCKS: u64 = 512;
/// Where things are in the host's memory.
const ADMIN_SQ: u64 = 0;
const ADMIN_CQ: u64 = 0x1000;
const SHADOW: u64 = 0x2000;
const EVENT_IDX: u64 = 0x3000;
const ADMIN_DATA: u64 = 0x4000;
const QUEUES: u64 = 0x10000;
const DATA: u64 = 0x10_0000;

/// What a process is to serve.
#[derive(Debug, Serialize, Deserialize)]
struct Task {
    memory: FdRef,
    /// A file, by its path; or the state of a `mem:` disk.
    disk: Result<String, serde_json::Value>,
    polling: bool,
    workers: usize,
    mapped: bool,
    recovers: bool,
}

// ------------------------------------------------------------------------------------------------
// The process with the controller.

struct ToHost(Mutex<UnixStream>);

impl ToHost {
    fn say(&self, what: &str, body: &impl Serialize, fds: Descriptors) {
        let mut parcel = Parcel::new();
        *parcel.descriptors() = fds;
        parcel.add(what, true, body).unwrap();
        let host = self.0.lock().unwrap();
        // The host may have gone.
        let _ = parcel.send(&host);
    }
}

impl Recorder for ToHost {
    fn record(&self, state: &SavedController, fds: Descriptors) {
        self.say("record", state, fds);
    }
}

fn open(disk: &Result<String, serde_json::Value>, fds: &mut Descriptors) -> Arc<dyn Disk> {
    match disk {
        // Locked until nothing of the dead process is under way.
        Ok(path) => {
            let until = Instant::now() + TIMEOUT / 2;
            loop {
                match shadowbell_backend::open(path) {
                    Ok(disk) => return disk,
                    Err(error) => assert!(Instant::now() < until, "{path}: {error}"),
                }
                // The kernel needs a processor to end what is under way.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Err(state) => {
            shadowbell_backend::adopt(&format!("mem:{}", BLOCKS * 512), state, fds).unwrap()
        }
    }
}

/// Serves, if this is the process that is to.
#[test]
#[ignore = "the process that is killed, for the other tests"]
fn worker() {
    if std::env::var_os(WORKER).is_none() {
        return;
    }
    let host = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut parcel = Parcel::receive(&host).unwrap();
    let task: Task = parcel.take("task").unwrap().unwrap();
    let memory = parcel.descriptors().take(task.memory).unwrap();
    let memory = Mapping::from_own_fd(memory, 0, MEMORY, Protection::ReadWrite).unwrap().bytes();
    let disk = open(&task.disk, parcel.descriptors());
    let namespaces =
        vec![NamespaceConfig { disk, uuid: shadowbell_controller::config::uuid_from("recovery") }];
    let config = Config { namespaces, ..Config::default() };
    let polling = match task.polling {
        true => Polling::Always,
        false => Polling::Adaptive(Duration::from_micros(20)),
    };
    let workers = task.workers;
    let pool = Pool::start(&PoolOptions { workers, polling, pin: Vec::new() }).unwrap();
    let carrier = Carrier { mapped_doorbells: task.mapped, ..Carrier::default() };
    let recorder = Arc::new(ToHost(Mutex::new(host.try_clone().unwrap())));
    let recording: Arc<dyn Recorder> = Arc::<ToHost>::clone(&recorder);
    let controller;
    if task.recovers {
        let mut record = Parcel::receive(&host).unwrap();
        let saved: SavedController = record.take("record").unwrap().unwrap();
        let fds = record.descriptors();
        controller = Controller::successor(config, pool, carrier, &saved, fds).unwrap();
        controller.map_dma(BASE, MEMORY, &memory).unwrap();
        controller.record_with(recording).unwrap();
        let replays = controller.recover(&saved, fds).unwrap();
        recorder.say("taken", &replays, Descriptors::default());
        controller.resume();
    } else {
        controller = Controller::new(config, pool, carrier).unwrap();
        controller.map_dma(BASE, MEMORY, &memory).unwrap();
        controller.record_with(recording).unwrap();
        let mut fds = Descriptors::default();
        let page = controller.doorbells().mapping().fd().unwrap().try_clone_to_owned().unwrap();
        let page = fds.add(page);
        recorder.say("doorbells", &page, fds);
        let aqa = Aqa::new().with_asqs(15).with_acqs(15);
        controller.write(regs::AQA, &aqa.into_bits().to_le_bytes());
        controller.write(regs::ASQ, &(BASE + ADMIN_SQ).to_le_bytes());
        controller.write(regs::ACQ, &(BASE + ADMIN_CQ).to_le_bytes());
        let cc = Cc::new().with_en(true).with_iosqes(6).with_iocqes(4);
        controller.write(regs::CC, &cc.into_bits().to_le_bytes());
        let mut csts = [0; 4];
        controller.read(regs::CSTS, &mut csts);
        assert!(Csts::from_bits(u32::from_le_bytes(csts)).rdy());
        recorder.say("taken", &0usize, Descriptors::default());
    }
    // Until it is killed, or the host is gone.
    while let Ok(mut parcel) = Parcel::receive(&host) {
        let (offset, value) = parcel.take::<(u64, u32)>("ring").unwrap().unwrap();
        controller.write_doorbell(offset, value);
    }
    std::process::exit(0);
}

// ------------------------------------------------------------------------------------------------
// The host.

/// What a process has recorded.
#[derive(Default)]
struct Records {
    last: Option<Parcel>,
    doorbells: Option<SharedBytes>,
    taken: Option<usize>,
}

/// What a process is to do wrong, and at which step it is to die.
#[derive(Clone, Copy, Default)]
struct Orders {
    abort_at: Option<(AbortPoint, u32)>,
    wrong: Option<&'static str>,
}

struct Process {
    child: Child,
    host: UnixStream,
    reader: JoinHandle<Records>,
    taken: Arc<AtomicBool>,
}

impl Process {
    fn start(task: &Task, fds: Descriptors, record: Option<&Parcel>, orders: &Orders) -> Self {
        let (host, theirs) = UnixStream::pair().unwrap();
        let abort_at = orders.abort_at.map(|(point, nth)| format!("{}:{nth}", point.name()));
        let abort_at = abort_at.map(|value| ("SHADOWBELL_ABORT_AT", value));
        let wrong = orders.wrong.map(|order| ("SHADOWBELL_WRONG_ORDER", order.to_owned()));
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "worker", "--ignored", "--nocapture", "--test-threads", "1"])
            .env(WORKER, "")
            .envs(abort_at.into_iter().chain(wrong))
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut parcel = Parcel::new();
        *parcel.descriptors() = fds;
        parcel.add("task", true, task).unwrap();
        parcel.send(&host).unwrap();
        if let Some(record) = record {
            record.send(&host).unwrap();
        }
        let taken = Arc::new(AtomicBool::new(false));
        let (socket, flag) = (host.try_clone().unwrap(), Arc::clone(&taken));
        let reader = std::thread::spawn(move || {
            let mut records = Records::default();
            // Half a parcel is none.
            while let Ok(mut parcel) = Parcel::receive(&socket) {
                if let Some(replays) = parcel.take::<usize>("taken").unwrap() {
                    records.taken = Some(replays);
                    flag.store(true, Ordering::Release);
                } else if let Some(page) = parcel.take::<FdRef>("doorbells").unwrap() {
                    let file = parcel.descriptors().take(page).unwrap();
                    let bar = Mapping::from_own_fd(file, 0, 8192, Protection::ReadWrite).unwrap();
                    records.doorbells = bar.bytes().slice(4096, 4096);
                } else {
                    records.last = Some(parcel);
                }
            }
            records
        });
        Self { child, host, reader, taken }
    }

    fn until_taken(&mut self) {
        let began = Instant::now();
        while !self.taken.load(Ordering::Acquire) && !self.has_died() {
            assert!(began.elapsed() < TIMEOUT, "a process does not begin to serve");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Whether it has died as it was told to.
    fn has_died(&mut self) -> bool {
        let Some(status) = self.child.try_wait().unwrap() else { return false };
        assert_eq!(status.signal(), Some(9), "{status}");
        true
    }

    fn kill(mut self) -> Records {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        drop(self.host);
        self.reader.join().unwrap()
    }
}

/// One queue pair.
struct Queue {
    qid: u16,
    entries: u32,
    sq: u64,
    cq: u64,
    tail: u32,
    head: u32,
    phase: bool,
}

struct Host {
    memory: SharedBytes,
    file: OwnedFd,
    /// A path, or `mem:` memory that lasts.
    disk: Result<String, Arc<dyn Disk>>,
    mapped: bool,
    polling: bool,
    process: Option<Process>,
    /// For the processes to come.
    orders: Orders,
    /// How long to wait for what has to happen.
    patience: Duration,
    /// What another process goes on from.
    record: Option<Parcel>,
    doorbells: Option<SharedBytes>,
    shadow: bool,
    admin: Queue,
    queues: Vec<Queue>,
    /// By offset, what was rung last.
    rung: BTreeMap<u64, u32>,
    next_cid: u16,
    /// Queue and command: the block, and what is written there, if it is a write.
    under_way: BTreeMap<(u16, u16), (u64, Option<u64>)>,
    written: BTreeMap<u64, u64>,
    /// Completions since the last kill.
    completed: u64,
    replayed: usize,
}

impl Host {
    fn new(disk: Result<String, Arc<dyn Disk>>, mapped: bool, polling: bool) -> Self {
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
            orders: Orders::default(),
            patience: TIMEOUT,
            record: None,
            doorbells: None,
            shadow: false,
            admin,
            queues: Vec::new(),
            rung: BTreeMap::new(),
            next_cid: 0,
            under_way: BTreeMap::new(),
            written: BTreeMap::new(),
            completed: 0,
            replayed: 0,
        };
        host.start();
        host
    }

    /// Starts a process that serves, or goes on.
    fn start(&mut self) {
        let mut fds = Descriptors::default();
        let memory = fds.add(self.file.try_clone().unwrap());
        let disk = match &self.disk {
            Ok(path) => Ok(path.clone()),
            Err(disk) => Err(disk.hand_over(&mut fds).unwrap()),
        };
        let (mapped, polling) = (self.mapped, self.polling);
        let recovers = self.record.is_some();
        let task = Task { memory, disk, polling, workers: 2, mapped, recovers };
        self.process = Some(Process::start(&task, fds, self.record.as_ref(), &self.orders));
    }

    /// Kills it, and starts another. The one before the last may have left the record that counts.
    fn kill(&mut self) {
        let records = self.process.take().unwrap().kill();
        if let Some(replays) = records.taken {
            self.replayed += replays;
            self.record = records.last;
        }
        self.doorbells = self.doorbells.take().or(records.doorbells);
        self.completed = 0;
        self.start();
        // What was rung for a process that is dead is in a socket yet, and is read by the next.
        let rung: Vec<_> = self.rung.iter().map(|(offset, value)| (*offset, *value)).collect();
        for (offset, value) in rung {
            self.write_doorbell(offset, value);
        }
    }

    fn until_taken(&mut self) {
        self.process.as_mut().unwrap().until_taken();
    }

    fn write_doorbell(&mut self, offset: u64, value: u32) {
        self.rung.insert(offset, value);
        if self.mapped
            && let Some(page) = &self.doorbells
        {
            page.write(offset as usize - 4096, &value).unwrap();
            return;
        }
        let mut parcel = Parcel::new();
        parcel.add("ring", true, &(offset, value)).unwrap();
        // It may have been killed.
        let _ = parcel.send(&self.process.as_ref().unwrap().host);
    }

    fn poke(&self, at: u64, bytes: &[u8]) {
        self.memory.write_from(at as usize, bytes).unwrap();
    }

    /// Tells of a doorbell, as Linux does.
    fn doorbell(&mut self, index: u64, old: u32, new: u32) {
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

    fn submit(&mut self, at: Option<usize>, sqe: Sqe) -> u16 {
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

    fn reap(&mut self, at: Option<usize>) -> Option<Cqe> {
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

    /// An admin command, during which the process may be killed `kills` times.
    fn admin(&mut self, sqe: Sqe, kill: &mut dyn FnMut() -> bool) -> Cqe {
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
            if began.elapsed() > self.patience {
                let word = |at| self.memory.load_u32_acquire(at as usize).unwrap();
                let (shadow, event_idx) = (word(SHADOW), word(EVENT_IDX));
                let Queue { tail, head, phase, .. } = self.admin;
                panic!(
                    "admin command {:#x} never ends: tail {tail}, shadow {shadow}, EventIdx \
                     {event_idx}, rung {:?}, head {head}, phase {phase}, taken {}",
                    sqe.opcode,
                    self.rung.get(&4096),
                    self.process.as_ref().unwrap().taken.load(Ordering::Acquire)
                );
            }
            std::thread::yield_now();
        }
    }

    fn create(&mut self, qid: u16, entries: u32, kill: &mut dyn FnMut() -> bool) {
        let base = QUEUES + u64::from(qid) * 0x4000;
        let (sq, cq) = (base, base + 0x2000);
        self.poke(cq, &vec![0; entries as usize * 16]);
        for kind in 0..2 {
            let index = u64::from(qid) * 2 + kind;
            self.poke(SHADOW + index * 4, &[0; 4]);
            self.poke(EVENT_IDX + index * 4, &[0; 4]);
            self.rung.remove(&(4096 + index * 4));
        }
        let qsize0 = entries as u16 - 1;
        let command = CreateIoCq { qid, qsize0, pc: true, ien: false, iv: 0 };
        self.admin(command.encode(Sqe::new(5, 0, 0)).with_prps(BASE + cq, 0), kill);
        let command = CreateIoSq { qid, qsize0, pc: true, cqid: qid, ..CreateIoSq::default() };
        self.admin(command.encode(Sqe::new(1, 0, 0)).with_prps(BASE + sq, 0), kill);
        self.queues.push(queue(qid, entries, sq, cq));
    }

    /// Submits a read or a write of a block that nothing else is under way for.
    fn submit_io(&mut self, at: usize, random: u64) -> bool {
        let queue = &self.queues[at];
        let qid = queue.qid;
        let under_way = self.under_way.keys().filter(|(of, _)| *of == qid).count() as u32;
        let lba = random % BLOCKS;
        if under_way >= queue.entries - 1 || self.under_way.values().any(|(busy, _)| *busy == lba) {
            return false;
        }
        let page = DATA + lba * 512;
        let value = random | 1;
        if random & 3 << 40 == 0 && self.written.contains_key(&lba) {
            self.poke(page, &[0; 512]);
            let cid = self.submit(Some(at), Sqe::read(1, lba, 0, 0).with_prps(BASE + page, 0));
            self.under_way.insert((qid, cid), (lba, None));
        } else {
            self.poke(page, &value.to_le_bytes().repeat(64));
            let cid = self.submit(Some(at), Sqe::write(1, lba, 0, 0).with_prps(BASE + page, 0));
            self.under_way.insert((qid, cid), (lba, Some(value)));
        }
        true
    }

    fn reap_io(&mut self, at: usize) -> bool {
        let Some(cqe) = self.reap(Some(at)) else { return false };
        assert!(cqe.status().is_success(), "{}", cqe.status());
        let qid = self.queues[at].qid;
        assert_eq!(cqe.sq_id, qid);
        let command = self.under_way.remove(&(qid, cqe.cid));
        let (lba, wrote) = command.unwrap_or_else(|| {
            let Queue { head, phase, .. } = self.queues[at];
            panic!("each command completes once, not {cqe:?}; head {head}, phase {phase}");
        });
        self.completed += 1;
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

    /// Waits for all that is under way.
    fn drain(&mut self) {
        let began = Instant::now();
        while !self.under_way.is_empty() {
            for at in 0..self.queues.len() {
                self.reap_io(at);
            }
            assert!(began.elapsed() < self.patience, "these never end: {:?}", self.under_way);
            std::thread::sleep(Duration::from_micros(20));
            if self.has_died() {
                self.kill();
            }
        }
    }

    /// Whether the process has died as it was told to. The one after it is told nothing.
    fn has_died(&mut self) -> bool {
        let has_died = self.process.as_mut().is_some_and(Process::has_died);
        if has_died {
            self.orders.abort_at = None;
        }
        has_died
    }

    /// Reads every block that was written.
    fn verify(&mut self) {
        self.drain();
        for lba in self.written.keys().copied().collect::<Vec<_>>() {
            // A read: none of the bits that make it a write.
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

fn queue(qid: u16, entries: u32, sq: u64, cq: u64) -> Queue {
    Queue { qid, entries, sq, cq, tail: 0, head: 0, phase: true }
}

trait StoreU32 {
    fn store_u32(&self, at: u64, value: u32);
}

impl StoreU32 for SharedBytes {
    fn store_u32(&self, at: u64, value: u32) {
        shadowbell_doorbell::Cell::store_release(&self.cell(at as usize).unwrap(), value);
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// How often a test kills: more for whoever asks for more.
fn kills(default: u32) -> u32 {
    let asked = std::env::var("SHADOWBELL_KILLS").ok().and_then(|kills| kills.parse().ok());
    asked.unwrap_or(default)
}

/// One test at a time: a kernel that has to end what a dead process had under way, on processors
/// that others keep busy, takes its time.
static ALONE: Mutex<()> = Mutex::new(());

/// Writes and reads while the process is killed again and again.
fn survive(disk: Result<String, Arc<dyn Disk>>, mapped: bool, polling: bool, seed: u64) {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut random = Random(seed | 1);
    let mut host = Host::new(disk, mapped, polling);
    let mut never = || false;
    if !mapped {
        let command = DoorbellBufferConfig { shadow: BASE + SHADOW, event_idx: BASE + EVENT_IDX };
        host.admin(command.encode(Sqe::new(0x7c, 0, 0)), &mut never);
        host.shadow = true;
    }
    host.create(1, 16, &mut never);
    host.create(2, 5, &mut never);
    for _ in 0..kills(8) {
        host.until_taken();
        let (until, began) = (random.next() % 400, Instant::now());
        while host.completed < until {
            let at = (random.next() % 2) as usize;
            for _ in 0..random.next() % 8 {
                host.submit_io(at, random.next());
            }
            let mut reaped = false;
            for _ in 0..random.next() % 8 {
                reaped |= host.reap_io(at);
            }
            if !reaped {
                std::thread::sleep(Duration::from_micros(20));
            }
            assert!(began.elapsed() < TIMEOUT, "it stands still: {:?}", host.under_way);
        }
        host.kill();
    }
    host.verify();
    println!("{} commands were carried out again", host.replayed);
}

fn memory() -> Result<String, Arc<dyn Disk>> {
    Err(shadowbell_backend::open_lasting(&format!("mem:{}", BLOCKS * 512)).unwrap())
}

#[test]
fn a_disk_in_memory_and_mapped_doorbells() {
    survive(memory(), true, true, 0x1234_5678);
    survive(memory(), true, false, 0x8765_4321);
}

#[test]
fn a_disk_in_memory_and_shadow_doorbells() {
    survive(memory(), false, true, 0x1111_2222);
    survive(memory(), false, false, 0x3333_4444);
}

#[test]
fn a_file_and_shadow_doorbells() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(BLOCKS * 512).unwrap();
    survive(Ok(path.display().to_string()), false, false, 0x5555_6666);
}

#[test]
fn a_file_and_mapped_doorbells() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(BLOCKS * 512).unwrap();
    survive(Ok(path.display().to_string()), true, true, 0x7777_8888);
}

/// Queues come and go, and events are asked for, while the process is killed.
#[test]
fn admin_commands_end_once_each() {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut random = Random(0x9999_aaaa);
    let mut host = Host::new(memory(), true, true);
    let mut left = kills(25);
    host.until_taken();
    let mut requests = BTreeSet::new();
    for _ in 0..2 {
        requests.insert(host.submit(None, Sqe::new(0x0c, 0, 0)));
    }
    while left > 0 {
        let budget = (random.next() % 3) as u32;
        let mut to_kill = budget.min(left);
        let mut kill = || {
            let now = to_kill > 0 && random.next().is_multiple_of(400);
            to_kill -= u32::from(now);
            now
        };
        host.create(1, 8, &mut kill);
        left -= budget.min(left);
        let identify = Identify { cns: 1, ..Identify::default() }.encode(Sqe::new(6, 0, 0));
        host.admin(identify.with_prps(BASE + ADMIN_DATA, 0), &mut || false);
        for _ in 0..20 {
            host.submit_io(0, random.next());
        }
        host.drain();
        for opcode in [0, 4] {
            host.admin(DeleteIoQueue { qid: 1 }.encode(Sqe::new(opcode, 0, 0)), &mut || false);
        }
        host.queues.clear();
        host.under_way.clear();
    }
}

/// Writes and reads until the process has died as it was told to; false if it does not come to
/// that. With `admin`, queues come and go meanwhile, and then it may have been replaced already.
fn work_until_dead(host: &mut Host, random: &mut Random, admin: bool) -> bool {
    let (began, mut completed) = (Instant::now(), 0);
    while !host.has_died() && host.orders.abort_at.is_some() && completed < 300 {
        assert!(began.elapsed() < host.patience, "it stands still: {:?}", host.under_way);
        let at = (random.next() % 2) as usize;
        for _ in 0..random.next() % 8 {
            host.submit_io(at, random.next());
        }
        while host.reap_io(at) {
            completed += 1;
        }
        if admin && random.next().is_multiple_of(16) {
            host.create(3, 4, &mut || false);
            for opcode in [0, 4] {
                let command = DeleteIoQueue { qid: 3 }.encode(Sqe::new(opcode, 0, 0));
                host.admin(command, &mut || false);
            }
            host.queues.pop();
        }
    }
    host.orders.abort_at.take().is_none()
}

/// A process that dies at each step on purpose, and others that go on.
fn die_at_each_step(host: &mut Host, random: &mut Random, points: &[AbortPoint]) {
    let mut never = || false;
    if !host.mapped {
        let command = DoorbellBufferConfig { shadow: BASE + SHADOW, event_idx: BASE + EVENT_IDX };
        host.admin(command.encode(Sqe::new(0x7c, 0, 0)), &mut never);
        host.shadow = true;
    }
    host.create(1, 16, &mut never);
    host.create(2, 5, &mut never);
    host.until_taken();
    for (point, nth) in points.iter().flat_map(|point| [(*point, 1), (*point, 2), (*point, 5)]) {
        println!("{}, time {nth}", point.name());
        if matches!(point, AbortPoint::ReplayStarted | AbortPoint::ReplayRecorded) {
            // So that there is something to go on with.
            host.orders.abort_at = Some((AbortPoint::SqStored, 3));
            host.kill();
            assert!(work_until_dead(host, random, false), "nothing is ever fetched");
        }
        host.orders.abort_at = Some((point, nth));
        host.kill();
        let is_reached = work_until_dead(host, random, true);
        // There may be less than that to go on with.
        assert!(is_reached || nth != 1, "{} is never come to", point.name());
        host.kill();
        host.until_taken();
    }
    host.verify();
}

/// What the controller of a file comes to.
const OF_FILES: &[AbortPoint] = &[
    AbortPoint::Fetched,
    AbortPoint::Started,
    AbortPoint::Recorded,
    AbortPoint::Staged,
    AbortPoint::Posted,
    AbortPoint::Freed,
    AbortPoint::SqStored,
    AbortPoint::CqStored,
    AbortPoint::Notified,
    AbortPoint::ReplayStarted,
    AbortPoint::ReplayRecorded,
    AbortPoint::Changed,
    AbortPoint::ChangeRecorded,
    AbortPoint::AdminPosted,
    AbortPoint::QueuesRecovered,
];

/// What the controller of a disk in memory comes to: no command is under way.
const OF_MEMORY: &[AbortPoint] = &[
    AbortPoint::Fetched,
    AbortPoint::Staged,
    AbortPoint::Posted,
    AbortPoint::Freed,
    AbortPoint::SqStored,
    AbortPoint::CqStored,
    AbortPoint::Notified,
    AbortPoint::Changed,
    AbortPoint::ChangeRecorded,
    AbortPoint::AdminPosted,
    AbortPoint::QueuesRecovered,
];

#[test]
fn a_process_may_die_at_each_step() {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    for (mapped, polling) in [(false, false), (true, true)] {
        let path = dir.path().join(format!("{mapped}.img"));
        std::fs::File::create(&path).unwrap().set_len(BLOCKS * 512).unwrap();
        let mut host = Host::new(Ok(path.display().to_string()), mapped, polling);
        host.patience = Duration::from_secs(15);
        die_at_each_step(&mut host, &mut Random(0xaaaa_bbbb), OF_FILES);
        let mut host = Host::new(memory(), mapped, polling);
        die_at_each_step(&mut host, &mut Random(0xcccc_dddd), OF_MEMORY);
    }
}

/// With the steps in a wrong order, commands are lost, or completed twice, or carried out again
/// after newer ones.
#[test]
fn steps_in_a_wrong_order_do_not_survive() {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    for (order, point) in
        [("freed-before-posted", AbortPoint::Staged), ("stored-before-freed", AbortPoint::CqStored)]
    {
        let path = dir.path().join(order);
        std::fs::File::create(&path).unwrap().set_len(BLOCKS * 512).unwrap();
        let disk = path.display().to_string();
        let outcome = std::panic::catch_unwind(move || {
            let mut host = Host::new(Ok(disk), false, false);
            host.orders.wrong = Some(order);
            host.patience = Duration::from_secs(10);
            die_at_each_step(&mut host, &mut Random(0xeeee_ffff), &[point; 4]);
        });
        assert!(outcome.is_err(), "{order} is survived");
    }
}

/// A process finds what the one before it had posted. The one after it knows of that, too.
#[test]
fn what_was_posted_before_a_death_is_not_posted_again_after_another() {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut host = Host::new(memory(), true, true);
    for _ in 0..3 {
        host.until_taken();
        for _ in 0..3 {
            let identify = Identify { cns: 1, ..Identify::default() }.encode(Sqe::new(6, 0, 0));
            host.admin(identify.with_prps(BASE + ADMIN_DATA, 0), &mut || false);
        }
        host.kill();
    }
    host.until_taken();
    let identify = Identify { cns: 1, ..Identify::default() }.encode(Sqe::new(6, 0, 0));
    host.admin(identify.with_prps(BASE + ADMIN_DATA, 0), &mut || false);
    assert!(host.reap(None).is_none());
}
