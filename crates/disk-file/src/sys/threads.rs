//! Thread pool engine. It is used where io_uring does not exist or this process is not allowed to
//! use it, as in most containers. With this engine, each call costs two thread wake-ups and one
//! system call, and there are at most as many calls in flight as threads.

use super::call::{HOLE, Kind, Prepared, Stuck};
use super::jobs::Jobs;
use super::passthrough::Namespace;
use parking_lot::{Condvar, Mutex};
use shadowbell_disk::CompletionQueue;
use shadowbell_memory::AbortOnPanic;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of threads per queue, and so of calls in flight.
const MAX_THREADS: usize = 64;
/// Time after which an idle thread exits.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
/// Stack size of a thread in bytes. It is small, because the threads only make system calls.
const STACK: usize = 128 * 1024;

pub(super) struct Threads {
    shared: Arc<ThreadsShared>,
    /// Calls that were prepared but not passed to the threads yet.
    prepared: Vec<Job>,
    /// Scratch list of completions that were taken but not reported yet.
    ended: Vec<(u64, i32)>,
    /// Maximum number of threads.
    max_threads: usize,
    /// True if no threads run, because a test that has the shared state ends the calls.
    #[cfg(feature = "scripted")]
    is_scripted: bool,
}

/// Call, with pointers to the memory that it needs.
struct Job {
    id: u64,
    kind: Kind,
    iovecs: *const libc::iovec,
    count: i32,
    offset: u64,
    len: u64,
}

// SAFETY: the list behind the pointer neither changes nor is freed before the completion of the job
// was collected (see `Threads::push`). Until then, only the thread that has the job uses the list.
unsafe impl Send for Job {}

/// State that a queue and its threads share.
pub(crate) struct ThreadsShared {
    file: Arc<File>,
    /// Parameters of the namespace, if the file is an NVMe generic character device.
    namespace: Option<Namespace>,
    work: Mutex<Work>,
    /// Wakes threads when work is available.
    work_ready: Condvar,
    /// Completions: ids and results of calls.
    completions: CompletionQueue<(u64, i32)>,
    /// Signalled when a thread exits.
    thread_ended: Condvar,
}

#[derive(Default)]
struct Work {
    jobs: Jobs<Job>,
    threads: usize,
    /// Number of threads that wait for work.
    idle: usize,
    /// True after the queue was closed.
    closing: bool,
}

impl Threads {
    /// Creates the engine for calls on a file.
    ///
    /// # Errors
    /// The process has no free file descriptors.
    pub(super) fn new(file: Arc<File>) -> io::Result<Self> {
        Self::of(file, None)
    }

    /// Creates the engine for calls on a file. If there is a `namespace`, `file` is its character
    /// device and the calls are commands. A command with several `iovec`s ends with `EINVAL`.
    ///
    /// # Errors
    /// Like [`new`](Self::new).
    pub(super) fn of(file: Arc<File>, namespace: Option<Namespace>) -> io::Result<Self> {
        let shared = ThreadsShared {
            file,
            namespace,
            work: Mutex::default(),
            work_ready: Condvar::new(),
            completions: CompletionQueue::new()?,
            thread_ended: Condvar::new(),
        };
        Ok(Self {
            shared: Arc::new(shared),
            prepared: Vec::new(),
            ended: Vec::new(),
            max_threads: MAX_THREADS,
            #[cfg(feature = "scripted")]
            is_scripted: false,
        })
    }

    /// Disables the threads for a test. Calls wait until
    /// [`end_scripted`](ThreadsShared::end_scripted) ends them.
    #[cfg(feature = "scripted")]
    pub(super) fn set_scripted(&mut self) {
        self.is_scripted = true;
    }

    /// Queues a call.
    ///
    /// # Safety
    /// The call's `iovecs`, and the memory that they describe, must stay valid until the completion
    /// of the call was collected.
    pub(super) unsafe fn push(&mut self, call: &Prepared<'_>) -> bool {
        let Prepared { id, kind, iovecs, offset, len, .. } = *call;
        let count = i32::try_from(iovecs.len()).unwrap_or(0);
        self.prepared.push(Job { id, kind, iovecs: iovecs.as_ptr(), count, offset, len });
        true
    }

    pub(super) fn prepared(&self) -> usize {
        self.prepared.len()
    }

    /// Passes the prepared calls to the threads.
    pub(super) fn enter(&mut self) {
        if self.prepared.is_empty() {
            return;
        }
        let mut work = self.shared.work.lock();
        self.prepared.drain(..).for_each(|job| work.jobs.push_back(job.id, job));
        #[cfg(feature = "scripted")]
        if self.is_scripted {
            return;
        }
        let wake = work.idle.min(work.jobs.len());
        let more = (work.jobs.len() - wake).min(self.max_threads.saturating_sub(work.threads));
        work.threads += more;
        drop(work);
        for _ in 0..wake {
            self.shared.work_ready.notify_one();
        }
        let started = (0..more).take_while(|_| self.start()).count();
        if started < more || more == 0 {
            self.run_inline(more - started);
        }
    }

    fn start(&self) -> bool {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name("sb-file".into()).stack_size(STACK);
        let run = move || {
            let _guard = AbortOnPanic::new();
            unpin();
            shared.serve();
        };
        thread.spawn(run).is_ok()
    }

    /// Records that `missing` threads could not be created. If no thread exists, executes the
    /// waiting calls on the calling thread.
    fn run_inline(&self, missing: usize) {
        let mut work = self.shared.work.lock();
        work.threads -= missing;
        if work.threads != 0 {
            return;
        }
        let mut jobs = std::mem::take(&mut work.jobs);
        drop(work);
        while let Some(job) = jobs.pop_front() {
            let result = self.shared.call(&job);
            self.shared.end(job.id, result);
        }
    }

    /// Cancels a call that no thread has started: it ends with `ECANCELED`. A call that has started
    /// is not changed.
    pub(super) fn cancel(&mut self, id: u64) {
        self.enter();
        let mut work = self.shared.work.lock();
        let taken = work.jobs.remove(id);
        drop(work);
        if taken.is_some() {
            self.shared.end(id, -libc::ECANCELED);
        }
    }

    pub(super) fn wake(&self) {
        self.shared.wake();
    }

    pub(super) fn shared(&self) -> &Arc<ThreadsShared> {
        &self.shared
    }

    /// Reports all completions. Each consists of the id of a call and its result.
    pub(super) fn collect(&mut self, mut each: impl FnMut(u64, i32)) {
        self.shared.completions.take(&mut self.ended);
        self.ended.drain(..).for_each(|(id, result)| each(id, result));
    }

    /// Waits until a call has ended.
    pub(super) fn wait(&mut self) -> Result<(), Stuck> {
        self.enter();
        self.shared.completions.wait(&mut self.ended);
        Ok(())
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.shared.completions.as_fd()
    }
}

impl Drop for Threads {
    /// Waits until all threads, which have no more work, have exited. A running thread would hold
    /// the file open, and a block device could not be opened exclusively again.
    fn drop(&mut self) {
        let mut work = self.shared.work.lock();
        work.closing = true;
        self.shared.work_ready.notify_all();
        while work.threads != 0 {
            self.shared.thread_ended.wait(&mut work);
        }
    }
}

impl ThreadsShared {
    /// Main loop of a thread.
    fn serve(&self) {
        let mut work = self.work.lock();
        loop {
            if let Some(job) = work.jobs.pop_front() {
                drop(work);
                let result = self.call(&job);
                self.end(job.id, result);
                work = self.work.lock();
                continue;
            }
            if work.closing {
                break;
            }
            work.idle += 1;
            let outcome = self.work_ready.wait_for(&mut work, IDLE_TIMEOUT);
            work.idle -= 1;
            if outcome.timed_out() && work.jobs.is_empty() {
                break;
            }
        }
        work.threads -= 1;
        self.thread_ended.notify_all();
    }

    /// Executes a call. The result has the same form as that of io_uring.
    fn call(&self, job: &Job) -> i32 {
        if let Some(namespace) = &self.namespace {
            // SAFETY: the list and the memory of its pieces are valid. See `Threads::push`.
            return unsafe {
                let iovecs = pieces(job);
                let Job { id, kind, offset, len, .. } = *job;
                let call = Prepared { id, kind, iovecs, offset, len, nowait: false };
                namespace.call(&self.file, &call)
            };
        }
        match job.kind {
            // If the file does not support the flag for a durable write, the thread writes and then
            // syncs.
            Kind::Write { flags } if flags != 0 => match self.make(job, job.kind) {
                refused if refused == -libc::EOPNOTSUPP => {
                    let moved = self.make(job, Kind::Write { flags: 0 });
                    let synced = if moved > 0 { self.sync() } else { 0 };
                    if synced < 0 { synced } else { moved }
                }
                result => result,
            },
            kind => self.make(job, kind),
        }
    }

    fn sync(&self) -> i32 {
        match rustix::fs::fdatasync(&self.file) {
            Ok(()) => 0,
            Err(errno) => -errno.raw_os_error(),
        }
    }

    fn make(&self, job: &Job, kind: Kind) -> i32 {
        let fd = self.file.as_raw_fd();
        let (offset, len) = (job.offset as libc::off_t, job.len as libc::off_t);
        // SAFETY: the list and the memory of its pieces are valid (see `Threads::push`), and `self`
        // keeps the file open.
        let result = unsafe {
            match kind {
                Kind::Read => libc::preadv2(fd, job.iovecs, job.count, offset, 0),
                Kind::Write { flags } => libc::pwritev2(fd, job.iovecs, job.count, offset, flags),
                Kind::Allocate { mode } => libc::fallocate(fd, mode, offset, len) as isize,
                Kind::Deallocate => libc::fallocate(fd, HOLE, offset, len) as isize,
            }
        };
        if result < 0 {
            return -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        }
        // The result fits, because a call transfers at most MAX_BYTES.
        i32::try_from(result).unwrap_or(i32::MAX)
    }

    fn end(&self, id: u64, result: i32) {
        self.completions.push((id, result));
    }

    /// Number of waiting calls.
    #[cfg(feature = "scripted")]
    pub(crate) fn waiting(&self) -> usize {
        self.work.lock().jobs.len()
    }

    /// Executes or fails the `n`th waiting call, as `how` requests. No effect if fewer calls wait.
    #[cfg(feature = "scripted")]
    pub(crate) fn end_scripted(&self, n: usize, how: CallOutcome) {
        let Some(job) = self.work.lock().jobs.remove_nth(n) else { return };
        let result = match how {
            CallOutcome::Executed => self.call(&job),
            CallOutcome::Failed(errno) => -errno,
            CallOutcome::Partial(max_threads) => {
                let mut left = max_threads;
                // SAFETY: the list is valid until the completion of the call was collected (see
                // `Threads::push`), and this call has not completed.
                let all = unsafe { pieces(&job) };
                let mut pieces = all.to_vec();
                for piece in &mut pieces {
                    piece.iov_len = piece.iov_len.min(left);
                    left -= piece.iov_len;
                }
                self.call(&Job { iovecs: pieces.as_ptr(), ..job })
            }
        };
        self.end(job.id, result);
    }

    /// Makes the descriptor readable although no call has ended.
    pub(super) fn wake(&self) {
        self.completions.signal();
    }
}

/// Outcome that a test selects for a call.
#[cfg(feature = "scripted")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallOutcome {
    /// The call is executed.
    Executed,
    /// The call is executed, for at most this many bytes.
    Partial(usize),
    /// The call fails with this error number and has no effect.
    Failed(i32),
}

/// `iovec`s of a call.
///
/// # Safety
/// The completion of the call must not have been collected yet, so that the list is valid.
unsafe fn pieces(job: &Job) -> &[libc::iovec] {
    let count = usize::try_from(job.count).unwrap_or(0);
    // SAFETY: the caller guarantees that the list is valid. The pointer is aligned even if the
    // `Vec` is empty.
    unsafe { std::slice::from_raw_parts(job.iovecs, count) }
}

/// Allows the calling thread to run on all CPUs of its process. Otherwise a new thread would
/// inherit the CPU affinity of the I/O thread that created it, and would take time from that
/// thread.
pub fn unpin() {
    let _ = rustix::thread::sched_setaffinity(None, &shadowbell_memory::processors::processors());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> Arc<File> {
        let fd = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        Arc::new(fd.into())
    }

    fn punch(threads: &mut Threads, id: u64) {
        let (kind, len) = (Kind::Deallocate, 4096);
        let call = Prepared { id, kind, iovecs: &[], offset: 0, len, nowait: false };
        // SAFETY: the call uses no memory.
        assert!(unsafe { threads.push(&call) });
    }

    fn collect(threads: &mut Threads) -> Vec<(u64, i32)> {
        let mut ended = Vec::new();
        threads.collect(|id, result| ended.push((id, result)));
        ended.sort_unstable();
        ended
    }

    #[test]
    fn threads_do_not_inherit_the_affinity_of_their_queue() {
        let processors = || rustix::thread::sched_getaffinity(None).unwrap();
        let all = rustix::thread::sched_getaffinity(Some(rustix::process::getpid())).unwrap();
        std::thread::spawn(move || {
            let mut one = rustix::thread::CpuSet::new();
            one.set((0..).find(|n| all.is_set(*n)).unwrap());
            rustix::thread::sched_setaffinity(None, &one).unwrap();
            assert!(processors() == one);
            std::thread::spawn(move || {
                assert!(processors() == one, "a thread begins where the one is that made it");
                unpin();
                assert!(processors() == all);
            })
            .join()
            .unwrap();
        })
        .join()
        .unwrap();
    }

    /// Cancelling takes linear time in total. With quadratic time, this test would not end.
    #[test]
    fn a_hundred_thousand_calls_are_cancelled_at_once() {
        const MANY: u64 = 200_000;
        let mut threads = Threads::new(file()).unwrap();
        threads.shared.work.lock().threads = MAX_THREADS;
        (0..MANY).for_each(|id| punch(&mut threads, id));
        threads.enter();
        // The last call is cancelled first: the worst order for a search from the front.
        (1..MANY).rev().for_each(|id| threads.cancel(id));
        let mut ended = collect(&mut threads);
        ended.sort_unstable();
        threads.shared.work.lock().threads = 0;
        assert!(ended.into_iter().eq((1..MANY).map(|id| (id, -libc::ECANCELED))));
        assert_eq!(threads.shared.work.lock().jobs.len(), 1);
    }

    #[test]
    fn calls_that_no_thread_has_started_are_cancelled() {
        let mut threads = Threads::new(file()).unwrap();
        // The maximum number of threads exists, and all of them are busy.
        threads.shared.work.lock().threads = MAX_THREADS;
        for id in 0..3 {
            punch(&mut threads, id);
        }
        threads.enter();
        assert_eq!(collect(&mut threads), []);
        threads.cancel(1);
        threads.cancel(7);
        assert_eq!(collect(&mut threads), [(1, -libc::ECANCELED)]);
        // One thread becomes available.
        let shared = Arc::clone(&threads.shared);
        let thread = std::thread::spawn(move || shared.serve());
        let mut ended = Vec::new();
        while ended.len() < 2 {
            threads.wait().unwrap();
            ended.extend(collect(&mut threads));
        }
        ended.sort_unstable();
        assert_eq!(ended, [(0, 0), (2, 0)]);
        threads.shared.work.lock().threads = 1;
        drop(threads);
        thread.join().unwrap();
    }

    #[test]
    fn without_any_thread_the_calls_are_made_all_the_same() {
        let mut threads = Threads::new(file()).unwrap();
        threads.max_threads = 0;
        punch(&mut threads, 3);
        punch(&mut threads, 4);
        threads.enter();
        assert_eq!(collect(&mut threads), [(3, 0), (4, 0)]);
    }

    #[test]
    fn threads_stay_for_a_while_and_go_with_their_queue() {
        let file = file();
        let mut threads = Threads::new(Arc::clone(&file)).unwrap();
        for id in 0..200 {
            punch(&mut threads, id);
            threads.enter();
            threads.wait().unwrap();
            collect(&mut threads);
        }
        assert!(threads.shared.work.lock().threads <= 200.min(MAX_THREADS));
        assert!(threads.shared.work.lock().threads > 0);
        drop(threads);
        // The last thread has announced its exit, but may hold the file open for a moment.
        while Arc::strong_count(&file) != 1 {
            std::thread::yield_now();
        }
    }
}
