//! Lifecycle of a ublk device.

use super::add_device::{add, adopt, find, header, was_never_started};
use super::error::UblkError;
use super::parameters::{aligned, parameters};
use super::serve::{QueueStatus, Work, serve};
use super::sys::{Control, Device};
use super::wire::{Parameters, control, feature};
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use shadowbell_block::{BlockDevice, QueueThread};
use shadowbell_disk_file::RawFile;
use shadowbell_memory::EventFd;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::Duration;
use zerocopy::IntoBytes;

/// Control device of the driver.
const CONTROL: &str = "/dev/ublk-control";
/// Interval of the checks for a device that is still in use.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

type OnEnd = Box<dyn FnOnce() + Send>;

/// Options of a ublk device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// Device number N in `/dev/ublkbN`. The default is the first free number.
    pub id: Option<u32>,
    /// Takes over an existing device that waits for a server. If the device does not exist, it is
    /// added.
    pub recover: bool,
    /// Disables zero copy: the kernel copies the data of requests.
    pub copy: bool,
    /// True if the disk has other users, whose writes of partial blocks rely on locks of the
    /// written ranges. Disables zero copy, which bypasses these locks.
    pub shared: bool,
}

/// Reason why the data of requests is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WhyCopied {
    /// Zero copy is disabled by an option.
    #[error("an option requests it")]
    Asked,
    /// The disk has other users.
    #[error("the disk is exported in other ways too")]
    Shared,
    /// The disk has no suitable file.
    #[error(
        "the disk is not a raw image or a block device that this program accesses past the page \
         cache, by io_uring and without limits"
    )]
    NoFile,
    /// The kernel does not support zero copy.
    #[error("the kernel's driver lacks UBLK_F_AUTO_BUF_REG in the form of Linux 6.17")]
    Kernel,
    /// The device that is taken over was created without zero copy.
    #[error("the device that was taken over was created without zero copy")]
    Device,
}

/// Marks the process as an I/O flusher. When this process needs memory, the kernel usually writes
/// cached data to disks in order to free memory. When an I/O flusher needs memory, the kernel does
/// not write, because it might write to the disk that this process serves. Must be called before
/// other threads start: they inherit the mark. Has no effect without the capability
/// CAP_SYS_RESOURCE.
pub fn mark_as_io_flusher() {
    if let Err(errno) = rustix::process::configure_io_flusher_behavior(true) {
        tracing::debug!("cannot mark the process as an I/O flusher: {errno}");
    }
}

/// Returns the reason for copying data, if there is one. `kernel` is called only if its result
/// matters.
fn why_copied(
    options: Options,
    has_file: bool,
    kernel: impl FnOnce() -> bool,
) -> Option<WhyCopied> {
    if options.copy {
        Some(WhyCopied::Asked)
    } else if options.shared {
        Some(WhyCopied::Shared)
    } else if !has_file {
        Some(WhyCopied::NoFile)
    } else if !kernel() {
        Some(WhyCopied::Kernel)
    } else {
        None
    }
}

/// State that the device and the threads of its queues share.
struct UblkShared {
    /// Number of running threads.
    left: AtomicUsize,
    /// True if a thread has failed.
    broken: AtomicBool,
    status: QueueStatus,
    on_end: Mutex<Option<OnEnd>>,
}

/// Block device of this machine. Dropping the value removes the device at once, and loses data in
/// the kernel's cache. In contrast, [`stop`](Self::stop) waits until the device is unused.
pub struct Ublk {
    control: Control,
    id: u32,
    path: PathBuf,
    recovered: bool,
    shared: Arc<UblkShared>,
    threads: Vec<QueueThread>,
    /// Events that end the threads' sleep.
    wakers: Vec<EventFd>,
    device: Option<Arc<Device>>,
    /// File for zero-copy requests.
    file: Option<RawFile>,
    why_copied: Option<WhyCopied>,
    /// True if the device must be removed on drop.
    is_owned: bool,
}

impl Ublk {
    /// Adds a block device for `disk`, or takes one over. `on_end` is called when another process
    /// has stopped the device.
    ///
    /// If the disk is a raw image or a block device that is accessed past the page cache, the data
    /// of reads and writes is transferred directly between its file and the block layer's memory,
    /// unless there is a [reason](Self::why_copied) against it.
    ///
    /// # Errors
    /// [`UblkError`]. A device that this call has added is removed. An existing device keeps
    /// waiting for a server.
    pub fn start(
        disk: &BlockDevice,
        options: Options,
        on_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self, UblkError> {
        let file = File::options().read(true).write(true).open(CONTROL);
        let mut control =
            Control::new(file.map_err(UblkError::of_open)?).map_err(UblkError::NoRing)?;
        let mut parameters = parameters(disk.geometry());
        let mut file = RawFile::of(&**disk.disk());
        let mut why_copied = why_copied(options, file.is_some(), || {
            control.features().is_ok_and(feature::is_zero_copy)
        });
        if let (Some(file), None) = (&file, why_copied) {
            parameters = aligned(parameters, file.alignment().memory);
        }
        let there = match options.id {
            Some(id) => find(&mut control, id)?,
            None => None,
        };
        let (id, recovered) = match (options.id, there) {
            (Some(id), Some(info))
                if !was_never_started(&mut control, id, &info, options.recover)? =>
            {
                adopt(&mut control, id, &info, &parameters, options.recover)?;
                if info.flags & feature::ZERO_COPY == 0 {
                    why_copied.get_or_insert(WhyCopied::Device);
                }
                (id, true)
            }
            _ => (add(&mut control, options.id, disk.queues(), why_copied.is_none())?, false),
        };
        file = file.filter(|_| why_copied.is_none());
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
            file,
            why_copied,
            is_owned: !recovered,
        };
        this.bring_up(disk, &parameters)?;
        this.is_owned = true;
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
            let (disk, sender) = (disk.clone(), sender.clone());
            let work = Work { device, queue, disk, file: self.file.clone() };
            self.shared.left.fetch_add(1, Ordering::AcqRel);
            let run = move || {
                let outcome = serve(work, &shared.status, &sender);
                drop(sender);
                shared.thread_ended(queue, outcome);
            };
            match QueueThread::spawn(format!("ublk-q{queue}"), run) {
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

    /// Path of the block device.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Device number.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// True if the device existed and was taken over.
    #[must_use]
    pub fn was_recovered(&self) -> bool {
        self.recovered
    }

    /// Reason why data is copied. `None` if reads and writes are zero-copy, except those that the
    /// storage refuses.
    #[must_use]
    pub fn why_copied(&self) -> Option<WhyCopied> {
        self.why_copied
    }

    /// Number of requests that failed because of the disk.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.shared.status.failures.count()
    }

    /// Removes the device when it is no longer in use. A program that has the device mounted or
    /// open may still have data to write. Returns the number of requests that failed because of the
    /// disk.
    #[must_use]
    pub fn stop(mut self) -> u64 {
        // The callback is dropped, because it reports only a stop by another process.
        drop(self.shared.take_when_ended());
        self.wait_until_unused();
        let (shared, is_zero_copy) = (Arc::clone(&self.shared), self.file.is_some());
        drop(self);
        if is_zero_copy {
            let QueueStatus { zero_copy, copied, .. } = &shared.status;
            let (zero_copy, copied) =
                (zero_copy.load(Ordering::Relaxed), copied.load(Ordering::Relaxed));
            tracing::info!("zero-copy for {zero_copy} requests, and copies for {copied}");
        }
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
                    "{} is in use, waiting for its users; a second signal ends this program \
                     at once and leaves the device to --recover",
                    self.path.display()
                );
                warned = true;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Stops the device if no program has it open, after writing back the kernel's cache.
    fn try_stop(&mut self, safe: bool) -> bool {
        let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
        match rustix::fs::open(&self.path, flags, Mode::empty()) {
            Ok(file) => {
                if let Err(errno) = rustix::fs::fsync(&file) {
                    tracing::warn!(
                        "{}: writing back the cache failed: {errno}",
                        self.path.display()
                    );
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
    fn take_when_ended(&self) -> Option<OnEnd> {
        self.on_end.lock().take()
    }

    /// Records the end of a thread. The last one calls `on_end`.
    fn thread_ended(&self, queue: u16, outcome: io::Result<()>) {
        if let Err(error) = &outcome {
            tracing::error!(queue, "the queue takes no more requests: {error}");
            self.broken.store(true, Ordering::Release);
        }
        let last = self.left.fetch_sub(1, Ordering::AcqRel) == 1;
        if (last || outcome.is_err())
            && let Some(on_end) = self.take_when_ended()
        {
            on_end();
        }
    }
}

impl Drop for Ublk {
    fn drop(&mut self) {
        drop(self.shared.take_when_ended());
        let stopped = self.is_owned
            && self.is_served()
            && self.command("stopping the device", control::STOP_DEV, 0, &mut []).is_ok();
        if !stopped {
            // The device stays, so only `quit` ends the threads. The next server gets the requests
            // that the threads have not answered.
            self.shared.status.quit.store(true, Ordering::Release);
            self.wakers.iter().for_each(EventFd::signal);
        }
        self.threads.drain(..).for_each(QueueThread::join);
        self.device = None;
        if !self.is_owned {
            return;
        }
        match self.control.command(control::DEL_DEV, header(self.id, 0), &mut []) {
            Ok(()) => {}
            // NODEV means that another process has already removed the device.
            Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => {}
            Err(error) => tracing::warn!("cannot remove {}: {error}", self.path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_are_copied_without_zero_copy_support() {
        // Feature bits of Linux 6.1, 6.12 and 7.2.
        let on = |features: u64| {
            why_copied(Options::default(), true, || feature::is_zero_copy(features))
        };
        assert_eq!(on(0x1f), Some(WhyCopied::Kernel));
        assert_eq!(on(0x3ff), Some(WhyCopied::Kernel));
        assert_eq!(on(0xf_ffff), None);
        let not_asked = || -> bool { panic!("the kernel is asked in vain") };
        let copy = Options { copy: true, ..Options::default() };
        assert_eq!(why_copied(copy, true, not_asked), Some(WhyCopied::Asked));
        let shared = Options { shared: true, ..Options::default() };
        assert_eq!(why_copied(shared, true, not_asked), Some(WhyCopied::Shared));
        assert_eq!(why_copied(Options::default(), false, not_asked), Some(WhyCopied::NoFile));
    }

    #[test]
    fn a_driver_that_does_not_know_the_question_has_no_features() {
        // /dev/null stands for a driver that does not know the command.
        let file = File::options().read(true).write(true).open("/dev/null").unwrap();
        let Ok(mut control) = Control::new(file) else {
            return shadowbell_testing::programs::skipped("there is no io_uring here");
        };
        assert!(!control.features().is_ok_and(feature::is_zero_copy));
    }
}
