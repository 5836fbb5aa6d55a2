//! The disk as a block device of this machine, `/dev/ublkbN`, through the kernel's driver for block
//! devices in user space (`ublk_drv`).
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | [`Ublk`] | a device, from its beginning to its end |
//! | `serve` | the thread of one queue |
//! | `request` | what is asked for, and carrying it out |
//! | `wire` | the driver's structures and numbers |
//! | `sys` | its commands, which are io_uring's: the only `unsafe` here |
//!
//! The kernel's block layer has a queue for each of the disk's, and each has a thread. The driver
//! copies the data of a request into its tag's buffer before we see it, and out of it when we
//! have answered.
//!
//! # When the server dies
//!
//! The device stays, and whoever uses it waits. The next server that [takes it
//! over](Options::recover) gets the requests that were not answered once more: reads and writes
//! of the same bytes to the same places, which can be done twice.
//!
//! # What it does not implement
//!
//! Zero copy, zones, integrity data, devices that belong to a user who is not root, and sizes that
//! change.

mod error;
mod request;
mod serve;
// Commands of the kernel's driver on memory of ours.
#[allow(unsafe_code)]
mod sys;
mod wire;

pub use error::UblkError;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use serve::Notes;
use shadowbell_block::{BlockDevice, Geometry};
use shadowbell_memory::EventFd;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use sys::{Control, Device};
use wire::{ControlCommand, DeviceInfo, Parameters, attribute, control, feature, parameter, state};
use zerocopy::IntoBytes;

/// Where the driver takes commands.
const CONTROL: &str = "/dev/ublk-control";
/// Requests that a queue has under way.
const DEPTH: u16 = 128;
/// The most bytes of a request: each tag has a buffer of so many, taken from the system as it is
/// touched.
const MAX_BYTES: u32 = 256 << 10;
/// Sectors to discard or to make zero in one request: the most that there can be.
const MAX_RANGE: u32 = u32::MAX >> 9;
/// What a device of ours is known by.
const OURS: u64 = u64::from_be_bytes(*b"shadowbl");
/// How long a server that was killed may take to be gone.
const FUNERAL: Duration = Duration::from_secs(5);
/// How often somebody who is waited for is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// Which device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Its number N in `/dev/ublkbN`; the first that is free if there is none.
    pub id: Option<u32>,
    /// If the device is there and waits for a server, take it over. One that is not there is made.
    pub recover: bool,
}

/// Keeps the kernel from writing to disks in order to find memory for this process: one of them might
/// be the disk that this process is. To be called before there are other threads, which inherit it.
/// Without the right to do that (CAP_SYS_RESOURCE), nothing happens.
pub fn promise_progress() {
    if let Err(errno) = rustix::process::configure_io_flusher_behavior(true) {
        tracing::debug!("not marked as one who writes for the kernel: {errno}");
    }
}

/// What the threads tell.
struct Shared {
    /// Threads that serve.
    left: AtomicUsize,
    /// One of them could not go on.
    broken: AtomicBool,
    notes: Notes,
    ended: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

/// A block device of this machine. Dropping it removes the device at once, with whatever was written
/// to the kernel's cache of it and not yet to the disk; [`stop`](Self::stop) waits.
pub struct Ublk {
    control: Control,
    id: u32,
    path: PathBuf,
    recovered: bool,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// What ends the threads' sleep.
    alarms: Vec<EventFd>,
    device: Option<Arc<Device>>,
    /// To be removed in the end.
    ours: bool,
}

impl Ublk {
    /// Makes `disk` a block device, or goes on with one. `ended` is called when the device was
    /// stopped by somebody else.
    ///
    /// # Errors
    /// [`UblkError`]; a device that was made is removed, one that was to be taken over waits on.
    pub fn start(
        disk: &BlockDevice,
        options: Options,
        ended: impl FnOnce() + Send + 'static,
    ) -> Result<Self, UblkError> {
        let file = File::options().read(true).write(true).open(CONTROL);
        let mut control =
            Control::new(file.map_err(UblkError::of_open)?).map_err(UblkError::NoRing)?;
        let parameters = parameters(disk.geometry());
        let there = match options.id {
            Some(id) => find(&mut control, id)?,
            None => None,
        };
        let (id, recovered) = match (options.id, there) {
            (Some(id), Some(info)) if !was_never_started(&mut control, id, &info, options)? => {
                take_over(&mut control, id, &info, &parameters, options.recover)?;
                (id, true)
            }
            _ => (add(&mut control, options.id, disk.queues())?, false),
        };
        let shared = Arc::new(Shared {
            left: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
            notes: Notes::default(),
            ended: Mutex::new(Some(Box::new(ended))),
        });
        let path = PathBuf::from(format!("/dev/ublkb{id}"));
        let mut this = Self {
            control,
            id,
            path,
            recovered,
            shared,
            threads: Vec::new(),
            alarms: Vec::new(),
            device: None,
            ours: !recovered,
        };
        this.bring_up(disk, &parameters)?;
        this.ours = true;
        Ok(this)
    }

    fn bring_up(&mut self, disk: &BlockDevice, parameters: &Parameters) -> Result<(), UblkError> {
        if !self.recovered {
            let mut parameters = *parameters;
            self.command("setting the size", control::SET_PARAMS, 0, parameters.as_mut_bytes())?;
        }
        let device = self.control.serve(self.id);
        let device = Arc::new(device.map_err(|e| UblkError::of_command("opening the device", e))?);
        let queues = device.info().queues;
        self.device = Some(Arc::clone(&device));
        let (sender, receiver) = sync_channel(usize::from(queues));
        for queue in 0..queues {
            let (device, shared) = (Arc::clone(&device), Arc::clone(&self.shared));
            let (disk, sender) = (disk.on_queue(queue.into()), sender.clone());
            self.shared.left.fetch_add(1, Ordering::AcqRel);
            let serve = move || {
                let outcome = serve::serve(device, queue, disk, &shared.notes, &sender);
                drop(sender);
                shared.left_one(queue, outcome);
            };
            let thread = std::thread::Builder::new().name(format!("ublk-q{queue}")).spawn(serve);
            match thread {
                Ok(thread) => self.threads.push(thread),
                Err(error) => {
                    self.shared.left.fetch_sub(1, Ordering::AcqRel);
                    return Err(UblkError::System(error));
                }
            }
        }
        drop(sender);
        for _ in 0..queues {
            let started = receiver.recv().unwrap_or(Err(io::ErrorKind::BrokenPipe.into()));
            let alarm = started.map_err(|e| UblkError::of_command("taking requests", e))?;
            self.alarms.push(alarm);
        }
        let pid = u64::from(std::process::id());
        if self.recovered {
            self.command("taking the device over", control::END_USER_RECOVERY, pid, &mut [])
        } else {
            self.command("starting the device", control::START_DEV, pid, &mut [])
        }
    }

    fn command(
        &mut self,
        doing: &'static str,
        op: u32,
        data: u64,
        memory: &mut [u8],
    ) -> Result<(), UblkError> {
        let outcome = self.control.command(op, header(self.id, data), memory);
        outcome.map_err(|error| UblkError::of_command(doing, error))
    }

    /// The block device.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its number.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Whether it was there already, and went on.
    #[must_use]
    pub fn was_taken_over(&self) -> bool {
        self.recovered
    }

    /// Removes the device, once nobody uses it any more: what has it mounted or open may have more
    /// to write. How many requests failed because the disk did.
    #[must_use]
    pub fn stop(mut self) -> u64 {
        // From here on it is us who end it.
        drop(self.shared.take_ended());
        self.wait_until_unused();
        let shared = Arc::clone(&self.shared);
        drop(self);
        shared.notes.failures.load(Ordering::Relaxed)
    }

    fn is_served(&self) -> bool {
        !self.shared.broken.load(Ordering::Acquire) && self.shared.left.load(Ordering::Acquire) > 0
    }

    fn wait_until_unused(&mut self) {
        let safe = self
            .device
            .as_ref()
            .is_some_and(|device| device.info().flags & feature::SAFE_STOP != 0);
        let mut told = false;
        while self.is_served() {
            if self.try_stop(safe) {
                return;
            }
            if !told {
                tracing::warn!(
                    "{} is in use, and is waited for; once more ends this program at once, and \
                     leaves the device to --recover",
                    self.path.display()
                );
                told = true;
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Stops the device if nobody has it open; what is in the kernel's cache of it is written first.
    fn try_stop(&mut self, safe: bool) -> bool {
        let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
        match rustix::fs::open(&self.path, flags, Mode::empty()) {
            Ok(file) => {
                if let Err(errno) = rustix::fs::fsync(&file) {
                    tracing::warn!("{}: not all of it is written: {errno}", self.path.display());
                }
            }
            Err(Errno::BUSY) => return false,
            Err(errno) => tracing::debug!("{}: {errno}", self.path.display()),
        }
        if !safe {
            return true;
        }
        let stopped = self.control.command(control::TRY_STOP_DEV, header(self.id, 0), &mut []);
        stopped.err().and_then(|error| error.raw_os_error()) != Some(Errno::BUSY.raw_os_error())
    }
}

impl Shared {
    fn take_ended(&self) -> Option<Box<dyn FnOnce() + Send>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// A thread is done. The last one tells.
    fn left_one(&self, queue: u16, outcome: io::Result<()>) {
        if let Err(error) = &outcome {
            tracing::error!(queue, "requests are not taken any more: {error}");
            self.broken.store(true, Ordering::Release);
        }
        let last = self.left.fetch_sub(1, Ordering::AcqRel) == 1;
        if (last || outcome.is_err())
            && let Some(ended) = self.take_ended()
        {
            ended();
        }
    }
}

impl Drop for Ublk {
    fn drop(&mut self) {
        drop(self.shared.take_ended());
        let stopped = self.ours
            && self.is_served()
            && self.command("stopping the device", control::STOP_DEV, 0, &mut []).is_ok();
        if !stopped {
            // Nothing else ends them: what they have not answered is the next server's.
            self.shared.notes.quit.store(true, Ordering::Release);
            self.alarms.iter().for_each(EventFd::signal);
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        self.device = None;
        if !self.ours {
            return;
        }
        match self.control.command(control::DEL_DEV, header(self.id, 0), &mut []) {
            Ok(()) => {}
            // Somebody else did.
            Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => {}
            Err(error) => tracing::warn!("{} is not removed: {error}", self.path.display()),
        }
    }
}

fn header(dev_id: u32, data: u64) -> ControlCommand {
    ControlCommand { dev_id, queue_id: u16::MAX, data, ..ControlCommand::default() }
}

/// What the driver is to know of the disk.
fn parameters(geometry: &Geometry) -> Parameters {
    // The driver takes blocks of up to a page; our disk takes parts of larger ones.
    let exponent = |bytes: u32| bytes.trailing_zeros() as u8;
    let block = exponent(geometry.block_size.min(4096));
    let mut attributes = 0;
    if geometry.read_only {
        attributes |= attribute::READ_ONLY;
    }
    if geometry.volatile_cache {
        attributes |= attribute::VOLATILE_CACHE | attribute::FUA;
    }
    let range = |has: bool| if has && !geometry.read_only { MAX_RANGE } else { 0 };
    Parameters {
        len: size_of::<Parameters>() as u32,
        types: parameter::BASIC | parameter::DISCARD,
        attributes,
        logical_block: block,
        physical_block: block,
        io_optimal: exponent(geometry.block_size.max(4096)),
        io_minimal: exponent(geometry.block_size),
        max_request: MAX_BYTES >> 9,
        size: geometry.bytes / wire::SECTOR,
        discard_granularity: geometry.block_size,
        max_discard: range(geometry.discard),
        max_write_zeroes: range(geometry.write_zeroes),
        max_discard_segments: 1,
        ..Parameters::default()
    }
}

/// Makes a device that nobody serves yet. Its number.
fn add(control: &mut Control, id: Option<u32>, queues: usize) -> Result<u32, UblkError> {
    let dev_id = id.unwrap_or(u32::MAX);
    let mut info = DeviceInfo {
        queues: u16::try_from(queues).unwrap_or(u16::MAX).clamp(1, 4096),
        depth: DEPTH,
        max_io_bytes: MAX_BYTES,
        dev_id,
        flags: feature::USER_RECOVERY | feature::USER_RECOVERY_REISSUE,
        server_flags: OURS,
        ..DeviceInfo::default()
    };
    let added = control.command(control::ADD_DEV, header(dev_id, 0), info.as_mut_bytes());
    match added {
        Ok(()) => Ok(info.dev_id),
        Err(error) if error.raw_os_error() == Some(Errno::EXIST.raw_os_error()) => {
            Err(UblkError::Taken { id: dev_id })
        }
        Err(error) => Err(UblkError::of_command("adding a device", error)),
    }
}

/// A device, if it is there.
fn find(control: &mut Control, id: u32) -> Result<Option<DeviceInfo>, UblkError> {
    match control.info(id) {
        Ok(info) => Ok(Some(info)),
        Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => Ok(None),
        Err(error) => Err(UblkError::of_command("looking for the device", error)),
    }
}

/// Whether a device is what a server left behind that was killed before it had started it. If it is
/// to be taken over, it is removed.
fn was_never_started(
    control: &mut Control,
    id: u32,
    info: &DeviceInfo,
    options: Options,
) -> Result<bool, UblkError> {
    if info.state != state::DEAD || info.server_flags != OURS || !options.recover {
        return Ok(false);
    }
    // A server that is about to start it has it open, and nobody else can.
    if let Err(error) = control.serve(id) {
        return Err(match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::BUSY) => UblkError::Taken { id },
            _ => UblkError::of_command("opening the device", error),
        });
    }
    let removed = control.command(control::DEL_DEV, header(id, 0), &mut []);
    removed.map_err(|error| UblkError::of_command("removing what is left of it", error))?;
    Ok(true)
}

/// Makes a device that has no server any more ours.
fn take_over(
    control: &mut Control,
    id: u32,
    info: &DeviceInfo,
    wanted: &Parameters,
    recover: bool,
) -> Result<(), UblkError> {
    let different = |why: String| UblkError::Different { id, why };
    if info.server_flags != OURS || info.flags & feature::FOREIGN != 0 {
        return Err(if recover {
            different("another program made it".into())
        } else {
            UblkError::Taken { id }
        });
    }
    if is_running(info.server_pid) && info.state == state::LIVE {
        return Err(UblkError::Served { id, pid: info.server_pid });
    }
    if !recover {
        let dead = info.state == state::DEAD;
        return Err(if dead { UblkError::Taken { id } } else { UblkError::Orphan { id } });
    }
    if info.flags & feature::USER_RECOVERY == 0 {
        return Err(different("this kernel lets no device outlive its server".into()));
    }
    let mut there = Parameters { len: wanted.len, ..Parameters::default() };
    let read = control.command(control::GET_PARAMS, header(id, 0), there.as_mut_bytes());
    read.map_err(|error| UblkError::of_command("reading the device's size", error))?;
    if let Some(why) = difference(&there, wanted) {
        return Err(different(why));
    }
    let deadline = Instant::now() + FUNERAL;
    loop {
        match control.command(control::START_USER_RECOVERY, header(id, 0), &mut []) {
            Ok(()) => return Ok(()),
            Err(error) if error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => {
                // What is left of the last server goes in the background.
                let now = control.info(id);
                let now = now.map_err(|e| UblkError::of_command("looking at the device", e))?;
                if now.state == state::DEAD {
                    return Err(different("it was never started, or stopped".into()));
                }
                if Instant::now() >= deadline {
                    return Err(UblkError::Served { id, pid: now.server_pid });
                }
                std::thread::sleep(LOOK);
            }
            Err(error) => return Err(UblkError::of_command("taking the device over", error)),
        }
    }
}

/// Why a device can not go on with a disk that wants these parameters.
fn difference(there: &Parameters, wanted: &Parameters) -> Option<String> {
    if there.size != wanted.size {
        let bytes = |parameters: &Parameters| parameters.size * wire::SECTOR;
        return Some(format!("it has {} bytes, and this disk {}", bytes(there), bytes(wanted)));
    }
    if there.logical_block != wanted.logical_block {
        let bytes = |parameters: &Parameters| {
            1u64.checked_shl(parameters.logical_block.into()).unwrap_or(0)
        };
        return Some(format!(
            "it has blocks of {} bytes, and this disk of {}",
            bytes(there),
            bytes(wanted)
        ));
    }
    (there.attributes != wanted.attributes).then(|| {
        "it can be written, or has a volatile cache, where this disk is or has not, or the other \
         way round"
            .to_owned()
    })
}

/// Whether there is such a process, and it is not one of which only the exit status is left.
fn is_running(pid: i32) -> bool {
    if pid <= 0 {
        return false;
    }
    // `pid (name) state ...`, where the name may hold anything.
    let about = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = about.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !"ZXx".contains(state))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry {
        bytes: 1 << 30,
        block_size: 512,
        read_only: false,
        volatile_cache: true,
        write_zeroes: true,
        discard: false,
        compare: false,
        copy: false,
    };

    #[test]
    fn the_driver_is_told_what_the_disk_is() {
        let told = parameters(&GEOMETRY);
        assert_eq!((told.size, told.logical_block, told.io_optimal), (2 << 20, 9, 12));
        assert_eq!(told.attributes, attribute::VOLATILE_CACHE | attribute::FUA);
        assert_eq!((told.max_discard, told.max_write_zeroes), (0, MAX_RANGE));
        let told = parameters(&Geometry { read_only: true, volatile_cache: false, ..GEOMETRY });
        assert_eq!((told.attributes, told.max_write_zeroes), (attribute::READ_ONLY, 0));
        // Larger blocks than the driver takes.
        let told = parameters(&Geometry { block_size: 65_536, ..GEOMETRY });
        assert_eq!((told.logical_block, told.io_minimal, told.io_optimal), (12, 16, 16));
        assert_eq!(told.discard_granularity, 65_536);
    }

    #[test]
    fn another_disk_is_no_heir() {
        let there = parameters(&GEOMETRY);
        assert_eq!(difference(&there, &there), None);
        // The driver adds what we do not look at.
        let more = Parameters { types: 7, rest: 3, ..there };
        assert_eq!(difference(&more, &there), None);
        for (other, word) in [
            (Geometry { bytes: 1 << 20, ..GEOMETRY }, "1048576"),
            (Geometry { block_size: 4096, ..GEOMETRY }, "blocks of 512 bytes"),
            (Geometry { read_only: true, ..GEOMETRY }, "can be written"),
        ] {
            let why = difference(&there, &parameters(&other)).unwrap();
            assert!(why.contains(word), "{why}");
        }
        let odd = Parameters { logical_block: 255, ..there };
        assert!(difference(&odd, &there).is_some());
    }

    #[test]
    fn processes_that_are_gone_do_not_run() {
        assert!(is_running(std::process::id() as i32));
        assert!(!is_running(-1));
        assert!(!is_running(0));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id() as i32;
        // Once it has ended, and before it is waited for.
        while is_running(pid) {
            std::thread::sleep(Duration::from_millis(1));
        }
        child.wait().unwrap();
        assert!(!is_running(pid));
    }
}
