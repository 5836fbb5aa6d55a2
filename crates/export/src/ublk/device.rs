//! A device, from its beginning to its end.

use super::acquire::{add, find, header, take_over, was_never_started};
use super::error::UblkError;
use super::parameters::parameters;
use super::serve::{QueueStatus, serve};
use super::sys::{Control, Device};
use super::wire::{Parameters, control, feature};
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use shadowbell_block::BlockDevice;
use shadowbell_memory::EventFd;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::Duration;
use zerocopy::IntoBytes;

/// Where the driver takes commands.
const CONTROL: &str = "/dev/ublk-control";
/// How often it is looked whether a device is still in use.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

type OnEnd = Box<dyn FnOnce() + Send>;

/// Which device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// Its number N in `/dev/ublkbN`; the first that is free if there is none.
    pub id: Option<u32>,
    /// If the device is there and waits for a server, take it over. One that is not there is made.
    pub recover: bool,
}

/// Keeps the kernel from writing to disks in order to find memory for this process: one of them
/// might be the disk that this process is. To be called before there are other threads, which
/// inherit it. Without the right to do that (CAP_SYS_RESOURCE), nothing happens.
pub fn promise_progress() {
    if let Err(errno) = rustix::process::configure_io_flusher_behavior(true) {
        tracing::debug!("not marked as a process that writes for the kernel: {errno}");
    }
}

/// What the device and the threads of its queues share.
struct UblkShared {
    /// Threads that serve.
    left: AtomicUsize,
    /// One of them could not go on.
    broken: AtomicBool,
    status: QueueStatus,
    on_end: Mutex<Option<OnEnd>>,
}

/// A block device of this machine. Dropping it removes the device at once, with whatever was
/// written to the kernel's cache of it and not yet to the disk; [`stop`](Self::stop) waits.
pub struct Ublk {
    control: Control,
    id: u32,
    path: PathBuf,
    recovered: bool,
    shared: Arc<UblkShared>,
    threads: Vec<JoinHandle<()>>,
    /// What ends the threads' sleep.
    wakers: Vec<EventFd>,
    device: Option<Arc<Device>>,
    /// To be removed in the end.
    ours: bool,
}

impl Ublk {
    /// Makes `disk` a block device, or goes on with one. `on_end` is called when the device was
    /// stopped by another process.
    ///
    /// # Errors
    /// [`UblkError`]; a device that was made is removed, one that was to be taken over waits on.
    pub fn start(
        disk: &BlockDevice,
        options: Options,
        on_end: impl FnOnce() + Send + 'static,
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
            (Some(id), Some(info))
                if !was_never_started(&mut control, id, &info, options.recover)? =>
            {
                take_over(&mut control, id, &info, &parameters, options.recover)?;
                (id, true)
            }
            _ => (add(&mut control, options.id, disk.queues())?, false),
        };
        let shared = Arc::new(UblkShared {
            left: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
            status: QueueStatus::default(),
            on_end: Mutex::new(Some(Box::new(on_end))),
        });
        let path = PathBuf::from(format!("/dev/ublkb{id}"));
        let mut this = Self {
            control,
            id,
            path,
            recovered,
            shared,
            threads: Vec::new(),
            wakers: Vec::new(),
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
            let run = move || {
                let outcome = serve(device, queue, disk, &shared.status, &sender);
                drop(sender);
                shared.thread_ended(queue, outcome);
            };
            let thread = std::thread::Builder::new().name(format!("ublk-q{queue}")).spawn(run);
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
            let waker = started.map_err(|e| UblkError::of_command("taking requests", e))?;
            self.wakers.push(waker);
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

    /// Removes the device, once it is not used any more: what has it mounted or open may have more
    /// to write. How many requests failed because the disk did.
    #[must_use]
    pub fn stop(mut self) -> u64 {
        // From here on it is this call that ends it.
        drop(self.shared.take_on_end());
        self.wait_until_unused();
        let shared = Arc::clone(&self.shared);
        drop(self);
        shared.status.failures.count()
    }

    fn is_served(&self) -> bool {
        !self.shared.broken.load(Ordering::Acquire) && self.shared.left.load(Ordering::Acquire) > 0
    }

    fn wait_until_unused(&mut self) {
        let safe = self
            .device
            .as_ref()
            .is_some_and(|device| device.info().flags & feature::SAFE_STOP != 0);
        let mut warned = false;
        while self.is_served() {
            if self.try_stop(safe) {
                return;
            }
            if !warned {
                tracing::warn!(
                    "{} is in use, and is waited for; once more ends this program at once, and \
                     leaves the device to --recover",
                    self.path.display()
                );
                warned = true;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Stops the device if it is not open; what is in the kernel's cache of it is written first.
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

impl UblkShared {
    fn take_on_end(&self) -> Option<OnEnd> {
        self.on_end.lock().take()
    }

    /// A thread has ended. The last one calls `on_end`.
    fn thread_ended(&self, queue: u16, outcome: io::Result<()>) {
        if let Err(error) = &outcome {
            tracing::error!(queue, "requests are not taken any more: {error}");
            self.broken.store(true, Ordering::Release);
        }
        let last = self.left.fetch_sub(1, Ordering::AcqRel) == 1;
        if (last || outcome.is_err())
            && let Some(on_end) = self.take_on_end()
        {
            on_end();
        }
    }
}

impl Drop for Ublk {
    fn drop(&mut self) {
        drop(self.shared.take_on_end());
        let stopped = self.ours
            && self.is_served()
            && self.command("stopping the device", control::STOP_DEV, 0, &mut []).is_ok();
        if !stopped {
            // Nothing else ends them: what they have not answered is the next server's.
            self.shared.status.quit.store(true, Ordering::Release);
            self.wakers.iter().for_each(EventFd::signal);
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
            // Another process did.
            Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => {}
            Err(error) => tracing::warn!("{} is not removed: {error}", self.path.display()),
        }
    }
}
