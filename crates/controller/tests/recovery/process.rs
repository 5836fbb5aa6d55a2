//! Process with the controller. It runs the same test program as the host.

use crate::one_step::OneStep;
use serde::{Deserialize, Serialize};
use shadowbell_controller::{
    Carrier, CauseOfDeath, Config, Controller, NamespaceConfig, Polling, Pool, PoolOptions,
    Recorder, SavedController,
};
use shadowbell_disk::Disk;
use shadowbell_memory::{Mapping, Protection, SharedBytes};
use shadowbell_spec::regs::{self, Aqa, Cc, Csts};
use shadowbell_state::{AbortPoint, Descriptors, FdRef, Parcel};
use shadowbell_testing::wait;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub(crate) use shadowbell_testing::wait::LIMIT;
pub(crate) const WORKER: &str = "SHADOWBELL_TEST_RECOVERY_WORKER";
pub(crate) const BASE: u64 = 0x10_0000;
pub(crate) const MEMORY: u64 = 8 << 20;
pub(crate) const BLOCKS: u64 = 512;
/// Layout of the host's memory.
pub(crate) const ADMIN_SQ: u64 = 0;
pub(crate) const ADMIN_CQ: u64 = 0x1000;
pub(crate) const SHADOW: u64 = 0x2000;
pub(crate) const EVENT_IDX: u64 = 0x3000;
pub(crate) const ADMIN_DATA: u64 = 0x4000;
pub(crate) const QUEUES: u64 = 0x10000;
pub(crate) const DATA: u64 = 0x10_0000;

/// Task of a process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) memory: FdRef,
    /// Path of a file, or the saved state of a `mem:` disk.
    pub(crate) disk: Result<String, serde_json::Value>,
    pub(crate) polling: bool,
    pub(crate) workers: usize,
    pub(crate) mapped: bool,
    pub(crate) recovers: bool,
    /// True if the previous process died by a fault of its own and not by a kill.
    pub(crate) by_fault: bool,
    /// True if the controller gets an I/O thread of its own.
    pub(crate) isolated: bool,
    /// True if a recovered controller quiesces at once, and then resumes.
    pub(crate) quiesces: bool,
    /// True if the disk supports atomic compare-and-write.
    pub(crate) one_step: bool,
}

pub(crate) struct ToHost(Mutex<UnixStream>);

impl ToHost {
    pub(crate) fn send_message(&self, what: &str, body: &impl Serialize, fds: Descriptors) {
        let mut parcel = Parcel::new();
        *parcel.descriptors() = fds;
        parcel.add(what, true, body).unwrap();
        let host = self.0.lock().unwrap();
        // An error is ignored, because the host may have ended.
        let _ = parcel.send(&host);
    }
}

impl Recorder for ToHost {
    fn record(&self, state: &SavedController, fds: Descriptors) {
        self.send_message("record", state, fds);
    }
}

pub(crate) fn open(
    disk: &Result<String, serde_json::Value>,
    fds: &mut Descriptors,
) -> Arc<dyn Disk> {
    match disk {
        // Opening is repeated, because the file is locked until the I/O of the dead process has
        // ended.
        Ok(path) => {
            let until = Instant::now() + LIMIT;
            loop {
                match shadowbell_disk_file::open(path) {
                    Ok(disk) => return disk,
                    Err(error) => assert!(Instant::now() < until, "{path}: {error}"),
                }
                // This pause leaves the CPU to the kernel, which has to end the dead process's I/O.
                wait::pause();
            }
        }
        Err(state) => {
            shadowbell_disk_file::recover(&format!("mem:{}", BLOCKS * 512), state, fds, &|_| true)
                .unwrap()
        }
    }
}

/// Entry point of the child process, which serves the controller. No test of its own.
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
    let mut disk = open(&task.disk, parcel.descriptors());
    if task.one_step {
        disk = Arc::new(OneStep(disk));
    }
    let namespaces =
        vec![NamespaceConfig { disk, uuid: shadowbell_controller::config::uuid_from("recovery") }];
    let mut config = Config { namespaces, ..Config::default() };
    if task.quiesces {
        // With one request in flight at a time, some commands have not started when the controller
        // quiesces.
        config.quota.requests = 1;
    }
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
        let death = if task.by_fault { CauseOfDeath::Fault } else { CauseOfDeath::Killed };
        let replays = controller.recover(&saved, fds, death).unwrap();
        recorder.send_message("taken", &replays, Descriptors::default());
        controller.resume();
        controller.announce_recovery(&saved);
        if task.quiesces {
            let (sender, receiver) = std::sync::mpsc::channel();
            controller.freeze(move || sender.send(()).unwrap());
            receiver.recv_timeout(LIMIT).expect("the controller is quiesced");
            controller.resume();
        }
    } else {
        controller = Controller::new(config, pool, carrier).unwrap();
        controller.map_dma(BASE, MEMORY, &memory).unwrap();
        controller.record_with(recording).unwrap();
        let mut fds = Descriptors::default();
        let page = controller.doorbells().mapping().fd().unwrap().try_clone_to_owned().unwrap();
        let page = fds.add(page);
        recorder.send_message("doorbells", &page, fds);
        let aqa = Aqa::new().with_asqs(15).with_acqs(15);
        controller.write(regs::AQA, &aqa.into_bits().to_le_bytes());
        controller.write(regs::ASQ, &(BASE + ADMIN_SQ).to_le_bytes());
        controller.write(regs::ACQ, &(BASE + ADMIN_CQ).to_le_bytes());
        let cc = Cc::new().with_en(true).with_iosqes(6).with_iocqes(4);
        controller.write(regs::CC, &cc.into_bits().to_le_bytes());
        let mut csts = [0; 4];
        controller.read(regs::CSTS, &mut csts);
        assert!(Csts::from_bits(u32::from_le_bytes(csts)).rdy());
        recorder.send_message("taken", &0usize, Descriptors::default());
    }
    if task.isolated {
        // An error is ignored: the controller may be isolated already, as its predecessor was.
        let _ = controller.isolate();
    }
    // The loop runs until the process is killed or the host has ended.
    while let Ok(mut parcel) = Parcel::receive(&host) {
        if parcel.take::<()>("reset").unwrap().is_some() {
            reset_and_exit(&controller);
        }
        let (offset, value) = parcel.take::<(u64, u32)>("ring").unwrap().unwrap();
        controller.write_doorbell(offset, value);
    }
    std::process::exit(0);
}

/// Resets the controller, and kills this process as soon as CSTS.RDY is 1 again.
fn reset_and_exit(controller: &Controller) {
    let cc = |en| Cc::new().with_en(en).with_iosqes(6).with_iocqes(4).into_bits().to_le_bytes();
    controller.write(regs::CC, &cc(false));
    let mut csts = [0; 4];
    while {
        controller.read(regs::CSTS, &mut csts);
        Csts::from_bits(u32::from_le_bytes(csts)).rdy()
    } {
        std::thread::yield_now();
    }
    controller.write(regs::CC, &cc(true));
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
        .unwrap();
}

/// Checkpoints that a process has sent.
#[derive(Default)]
pub(crate) struct Records {
    pub(crate) last: Option<Parcel>,
    pub(crate) doorbells: Option<SharedBytes>,
    pub(crate) taken: Option<usize>,
}

/// Injected errors of a process, and its crash point.
#[derive(Clone, Copy, Default)]
pub(crate) struct Instructions {
    pub(crate) abort_at: Option<(AbortPoint, u32)>,
    pub(crate) wrong: Option<&'static str>,
    /// Commands that crash this process and the next ones.
    pub(crate) deadly: Option<&'static str>,
    /// True if the controller gets an I/O thread of its own.
    pub(crate) isolated: bool,
    /// True if a recovered controller quiesces.
    pub(crate) quiesces: bool,
    /// True if the disk supports atomic compare-and-write.
    pub(crate) one_step: bool,
}

pub(crate) struct Process {
    pub(crate) child: Child,
    pub(crate) host: UnixStream,
    pub(crate) reader: JoinHandle<Records>,
    pub(crate) taken: Arc<AtomicBool>,
}

impl Process {
    pub(crate) fn start(
        task: &Task,
        fds: Descriptors,
        record: Option<&Parcel>,
        instructions: &Instructions,
    ) -> Self {
        let (host, theirs) = UnixStream::pair().unwrap();
        let abort_at = instructions.abort_at.map(|(point, nth)| format!("{}:{nth}", point.name()));
        let abort_at = abort_at.map(|value| ("SHADOWBELL_ABORT_AT", value));
        let wrong = instructions.wrong.map(|order| ("SHADOWBELL_WRONG_ORDER", order.to_owned()));
        let deadly =
            instructions.deadly.map(|which| ("SHADOWBELL_ABORT_COMMAND", which.to_owned()));
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "process::worker", "--ignored", "--nocapture", "--test-threads", "1"])
            .env(WORKER, "")
            .envs(abort_at.into_iter().chain(wrong).chain(deadly))
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
            // An incomplete message is an error, which ends the loop.
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

    pub(crate) fn until_taken(&mut self) {
        let began = Instant::now();
        while !self.taken.load(Ordering::Acquire) && !self.has_died() {
            assert!(began.elapsed() < LIMIT, "a process does not begin to serve");
            wait::pause();
        }
    }

    /// Returns true if the process has died at its crash point.
    pub(crate) fn has_died(&mut self) -> bool {
        let Some(status) = self.child.try_wait().unwrap() else { return false };
        assert!(matches!(status.signal(), Some(6 | 9)), "{status}");
        true
    }

    /// Kills the process, unless it is dead. Returns its checkpoints, and true if it died by a
    /// fault.
    pub(crate) fn kill(mut self) -> (Records, bool) {
        self.child.kill().unwrap();
        let by_fault = self.child.wait().unwrap().signal() == Some(6);
        drop(self.host);
        (self.reader.join().unwrap(), by_fault)
    }
}
