//! A device, from its beginning to its end.

use super::acquire::{add, find, header, take_over, was_never_started};
use super::error::UblkError;
use super::parameters::{LARGEST_BLOCK, aligned, parameters};
use super::serve::{QueueStatus, Work, serve};
use super::sys::{Control, Device};
use super::wire::{Parameters, control, feature};
use crate::local_disk::LocalDisk;
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use shadowbell_backend::RawFile;
use shadowbell_block::{BlockDevice, Geometry};
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
    /// Have the kernel copy the data of requests, also where they could go straight to and from the
    /// disk's file.
    pub copy: bool,
}

/// Why data are copied that could go straight between the block layer's memory and a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WhyCopied {
    /// Somebody wants it so.
    #[error("that is asked for")]
    Asked,
    /// There is no such file.
    #[error(
        "the disk is not the bytes of a raw image or a block device that this program reads and \
         writes past the page cache, by io_uring and without limits"
    )]
    NoFile,
    /// The kernel can not.
    #[error("the kernel's driver has no UBLK_F_AUTO_BUF_REG as it is since Linux 6.17")]
    Kernel,
    /// The device, which goes on, was made to be copied.
    #[error("the device was made for that by the process before this one")]
    Device,
}

/// Keeps the kernel from writing to disks in order to find memory for this process: one of them
/// might be the disk that this process is. To be called before there are other threads, which
/// inherit it. Without the right to do that (CAP_SYS_RESOURCE), nothing happens.
pub fn promise_progress() {
    if let Err(errno) = rustix::process::configure_io_flusher_behavior(true) {
        tracing::debug!("not marked as a process that writes for the kernel: {errno}");
    }
}

/// The file to which data can go straight, if the exported disk is all of it and requests are of
/// whole blocks, and how long a request may take there.
fn file_of(local: Option<&LocalDisk>, geometry: &Geometry) -> Option<(RawFile, Duration)> {
    let local = local?;
    if geometry.block_size > LARGEST_BLOCK || !local.is_all_of(geometry) {
        return None;
    }
    Some((local.disk.raw_file()?, local.timeout))
}

/// Why data are to be copied. The kernel is asked only if it matters.
fn why_copied(asked: bool, has_file: bool, kernel: impl FnOnce() -> bool) -> Option<WhyCopied> {
    if asked {
        Some(WhyCopied::Asked)
    } else if !has_file {
        Some(WhyCopied::NoFile)
    } else if !kernel() {
        Some(WhyCopied::Kernel)
    } else {
        None
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
    /// The file to which data go straight, and how long a request may take there.
    file: Option<(RawFile, Duration)>,
    why_copied: Option<WhyCopied>,
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
        Self::start_on(disk, options, None, on_end)
    }

    /// As [`start`](Self::start), where `disk` is all of `local`, which is served in no other way
    /// meanwhile: then the data of reads and writes go straight between its file and the block
    /// layer's memory, if that is possible ([`why_copied`](Self::why_copied)).
    ///
    /// # Errors
    /// As there.
    pub fn start_on(
        disk: &BlockDevice,
        options: Options,
        local: Option<&LocalDisk>,
        on_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self, UblkError> {
        let file = File::options().read(true).write(true).open(CONTROL);
        let mut control =
            Control::new(file.map_err(UblkError::of_open)?).map_err(UblkError::NoRing)?;
        let mut parameters = parameters(disk.geometry());
        let mut file = file_of(local, disk.geometry());
        let mut why_copied = why_copied(options.copy, file.is_some(), || {
            control.features().is_ok_and(feature::is_straight)
        });
        if let (Some((file, _)), None) = (&file, why_copied) {
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
                take_over(&mut control, id, &info, &parameters, options.recover)?;
                if info.flags & feature::STRAIGHT == 0 {
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
            let work = Work { device, queue, disk, file: self.file.clone() };
            self.shared.left.fetch_add(1, Ordering::AcqRel);
            let run = move || {
                let outcome = serve(work, &shared.status, &sender);
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

    /// Why data are copied; nothing if those of reads and writes go straight between the disk's
    /// file and the block layer's memory, but for what the storage refuses.
    #[must_use]
    pub fn why_copied(&self) -> Option<WhyCopied> {
        self.why_copied
    }

    /// How many requests have ended whose data were not copied, and how many others had data.
    #[must_use]
    pub fn straight_and_copied(&self) -> (u64, u64) {
        let QueueStatus { straight, copied, .. } = &self.shared.status;
        (straight.load(Ordering::Relaxed), copied.load(Ordering::Relaxed))
    }

    /// Removes the device, once it is not used any more: what has it mounted or open may have more
    /// to write. How many requests failed because the disk did.
    #[must_use]
    pub fn stop(mut self) -> u64 {
        // From here on it is this call that ends it.
        drop(self.shared.take_on_end());
        self.wait_until_unused();
        let (shared, is_straight) = (Arc::clone(&self.shared), self.file.is_some());
        drop(self);
        if is_straight {
            let QueueStatus { straight, copied, .. } = &shared.status;
            let (straight, copied) =
                (straight.load(Ordering::Relaxed), copied.load(Ordering::Relaxed));
            tracing::info!(
                "the data of {straight} requests were not copied, of {copied} they were"
            );
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

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_backend::MemDisk;

    #[test]
    fn a_kernel_that_can_not_leave_data_where_they_are_has_them_copied() {
        // The features of Linux 6.1, 6.12 and 7.2.
        let on = |features: u64| why_copied(false, true, || feature::is_straight(features));
        assert_eq!(on(0x1f), Some(WhyCopied::Kernel));
        assert_eq!(on(0x3ff), Some(WhyCopied::Kernel));
        assert_eq!(on(0xf_ffff), None);
        let not_asked = || -> bool { panic!("the kernel is asked in vain") };
        assert_eq!(why_copied(true, true, not_asked), Some(WhyCopied::Asked));
        assert_eq!(why_copied(false, false, not_asked), Some(WhyCopied::NoFile));
    }

    #[test]
    fn a_driver_that_does_not_know_the_question_has_no_features() {
        // Any file that is not the driver's.
        let file = File::options().read(true).write(true).open("/dev/null").unwrap();
        let Ok(mut control) = Control::new(file) else {
            return eprintln!("skipped: there is no io_uring here");
        };
        assert!(!control.features().is_ok_and(feature::is_straight));
    }

    #[test]
    fn memory_and_what_is_not_there_are_no_file() {
        let bytes = 1 << 20;
        let geometry = Geometry {
            bytes,
            block_size: 512,
            read_only: false,
            volatile_cache: false,
            write_zeroes: true,
            discard: true,
            compare: true,
            copy: true,
        };
        assert!(file_of(None, &geometry).is_none());
        let local = LocalDisk {
            disk: Arc::new(MemDisk::new(bytes / 512, 512).unwrap()),
            poll: Duration::ZERO,
            timeout: Duration::MAX,
        };
        assert!(local.is_all_of(&geometry));
        assert!(file_of(Some(&local), &geometry).is_none());
    }
}
