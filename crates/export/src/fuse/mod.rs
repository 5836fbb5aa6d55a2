//! FUSE export: the disk as a file, from which a loop device can make a block device.
//!
//! The file system consists of one file, its root, and is mounted over an existing file. The kernel
//! does not cache the file: every read or write of the file is a read or write of the disk.
//!
//! ```text
//! shadowbell export nvme://0000:01:00.0/1 --fuse /run/disk &
//! losetup --find --show --direct-io=on /run/disk
//! ```
//!
//! If a program copies within the file by `copy_file_range(2)`, the disk copies the data, and the
//! data does not pass through the kernel or the program.
//!
//! Size, owner and mode of the file cannot be changed. So programs have to open the file without
//! truncation (`dd conv=notrunc`).
//!
//! # Architecture
//!
//! | module | content |
//! |---|---|
//! | [`Mount`] | the mount, by `mount(2)` or fusermount3 |
//! | [`Session`] | the threads that serve a mount of this process or of another one |
//! | `device` | requests: the threads that execute them |
//! | `file` | translation of a request to a disk operation |
//! | `wire`, `sys` | layout of requests and answers; system calls that read and write them |

mod device;
mod file;
mod mount;
#[allow(unsafe_code, reason = "memory that a device may change is not borrowed")]
mod sys;
mod wire;

pub use mount::{Mount, MountError};

use crate::failures::FailureCount;
use crate::vectors::Part;
use device::{Device, HelperThreads, Shared, execute};
use file::DiskFile;
use shadowbell_block::{BlockDevice, QueueThread};
use shadowbell_memory::EventFd;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;
use wire::Reply;

/// Largest default number of threads of a mount. At most half of the processors are used, because a
/// program with a high load needs the others.
const MAX_THREADS: usize = 4;

/// Options of a mount.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// Number of threads that serve requests. Threads other than the first are used only while the
    /// first has too many requests. The default is half the number of processors, but at most four.
    /// There are never more threads than the disk has queues.
    pub threads: Option<usize>,
    /// User and group of the file. The default is that of the process.
    pub owner: Option<(u32, u32)>,
}

/// Threads that answer the kernel's requests for a mounted file, by requests to the disk. Dropping
/// the value ends the threads; the file stays mounted.
pub struct Session {
    helper_threads: Arc<HelperThreads>,
    failures: Arc<FailureCount>,
    server: Option<QueueThread>,
    /// True after the file system was unmounted.
    over: Arc<(Mutex<bool>, Condvar)>,
}

impl Session {
    /// Serves `disk` to the kernel. The kernel's requests arrive on `device`, the descriptor of a
    /// [`Mount`]. `on_end` is called when the file system is unmounted for any reason.
    ///
    /// # Errors
    /// A thread or descriptor cannot be created, or the disk has no queue.
    pub fn start(
        disk: &BlockDevice,
        device: OwnedFd,
        options: &Options,
        on_end: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&device, true)?;
        let Threads { shared, first, helpers } = threads(disk, device, options)?;
        let over = Arc::<(Mutex<bool>, Condvar)>::default();
        let (helper_threads, failures) =
            (Arc::clone(&shared.helper_threads), Arc::clone(&shared.failures));
        let its = Arc::clone(&over);
        let server = move || serve(shared, first, helpers, &its, on_end);
        let server = QueueThread::spawn("fuse".to_owned(), server)?;
        Ok(Self { helper_threads, failures, server: Some(server), over })
    }

    /// Makes the kernel resend the requests that a session of a dead process has read from `device`
    /// and not answered. Returns false if the kernel cannot do that (before Linux 6.9): the
    /// programs that wait for these requests then wait until the file system is unmounted. Must be
    /// called before the first session of this process.
    #[must_use]
    pub fn resend(device: BorrowedFd<'_>) -> bool {
        sys::write(device, Reply::resend().bytes(), Part::NONE).is_ok()
    }

    /// Number of requests that failed because of the disk.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures.count()
    }

    /// True after the file system was unmounted, and no program uses the file any more.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.is_over_within(Duration::ZERO)
    }

    /// Waits like [`finish`](Self::finish), but not longer than `limit`. Returns true if the file
    /// system was unmounted, and no program uses the file any more.
    #[must_use]
    pub fn is_over_within(&self, limit: Duration) -> bool {
        let (over, changed) = &*self.over;
        let over = over.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = changed.wait_timeout_while(over, limit, |over| !*over);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Completes the requests in flight, and ends the session; the file stays mounted. Returns the
    /// number of requests that failed because of the disk.
    #[must_use]
    pub fn stop(self) -> u64 {
        let failures = Arc::clone(&self.failures);
        drop(self);
        failures.count()
    }

    /// Ends the session like [`stop`](Self::stop), but does not wait for requests that the disk
    /// holds after an error of its storage. The next process answers them after a
    /// [`resend`](Self::resend).
    #[must_use]
    pub fn leave(self) -> u64 {
        self.helper_threads.leave_held();
        self.stop()
    }

    /// Waits until the file system is unmounted, and no program uses the file any more. Until then,
    /// a program that has the file open, such as a loop device, may still write data.
    /// Returns the number of requests that failed because of the disk.
    #[must_use]
    pub fn finish(mut self) -> u64 {
        self.wait();
        self.failures()
    }

    /// Waits for the end of the threads.
    fn wait(&mut self) {
        if let Some(server) = self.server.take() {
            server.join();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.helper_threads.stop();
        self.wait();
    }
}

/// Main function of a thread.
type Run = Box<dyn FnOnce() -> io::Result<()> + Send>;

/// Threads of a session: the first thread and its helpers.
struct Threads {
    shared: Arc<Shared>,
    first: Run,
    helpers: Vec<Run>,
}

fn threads(disk: &BlockDevice, device: OwnedFd, options: &Options) -> io::Result<Threads> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let count = options.threads.unwrap_or((processors / 2).min(MAX_THREADS));
    let count = count.clamp(1, disk.queues());
    let first = EventFd::new()?;
    let mut helper_threads = HelperThreads::new(first.try_clone()?);
    let mut parts = vec![(None, first)];
    for _ in 1..count {
        let event = EventFd::new()?;
        parts.push((Some(helper_threads.add(event.try_clone()?)), event));
    }
    // Opens a queue once, so that a disk without a free queue is detected before the kernel sends a
    // request.
    drop(disk.queue()?);
    let (file, failures) = (DiskFile::new(*disk.geometry(), options.owner), Arc::default());
    let helper_threads = Arc::new(helper_threads);
    let shared = Arc::new(Shared { device, file, failures, helper_threads });
    let mut runs = Vec::new();
    for (helper, event) in parts {
        let (shared, disk) = (Arc::clone(&shared), disk.clone());
        runs.push(
            Box::new(move || Device::new(shared, helper, &disk, event)?.run(&execute)) as Run
        );
    }
    let first = runs.remove(0);
    Ok(Threads { shared, first, helpers: runs })
}

fn serve(
    shared: Arc<Shared>,
    first: Run,
    helpers: Vec<Run>,
    over: &(Mutex<bool>, Condvar),
    on_end: impl FnOnce(),
) {
    let mut running = Vec::new();
    for helper in helpers {
        match QueueThread::spawn("fuse-helper".to_owned(), move || drop(helper())) {
            Ok(thread) => running.push(thread),
            Err(error) => tracing::debug!("the mount runs with one thread less: {error}"),
        }
    }
    let outcome = first();
    let is_stopped = shared.helper_threads.is_stopped();
    shared.helper_threads.end();
    for thread in running {
        thread.join();
    }
    match outcome {
        Ok(()) if is_stopped => return,
        Ok(()) => tracing::debug!("unmounted"),
        Err(error) => tracing::warn!("the mount has ended: {error}"),
    }
    // When the device is dropped, the kernel fails the requests that were not answered.
    drop(shared);
    *over.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
    over.1.notify_all();
    on_end();
}
