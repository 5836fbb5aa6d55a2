//! Calls by threads: for systems that have no io_uring, or do not let this process use it, as the
//! usual profiles of containers do. A call then costs two wakeups and a system call of its own, and
//! as many are under way as there are threads.

use super::call::{HOLE, Kind, Prepared, Stuck};
use super::jobs::Jobs;
use super::passthrough::Namespace;
use parking_lot::{Condvar, Mutex};
use rustix::event::EventfdFlags;
use shadowbell_memory::AbortOnPanic;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The most threads of a queue: as many calls are under way at most.
const MAX_THREADS: usize = 64;
/// How long a thread without work stays.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
/// They call the system and nothing else.
const STACK: usize = 128 * 1024;

pub(super) struct Threads {
    shared: Arc<ThreadsShared>,
    /// Calls that are prepared, and not handed over yet.
    prepared: Vec<Job>,
    /// The most threads that there may be.
    most: usize,
    /// There are none: whoever has the shared state ends the calls.
    #[cfg(feature = "scripted")]
    by_hand: bool,
}

/// A call, and the memory that it needs.
struct Job {
    id: u64,
    kind: Kind,
    iovecs: *const libc::iovec,
    count: i32,
    offset: u64,
    len: u64,
}

// SAFETY: the pointer is to a list that does not change and does not go until the job's completion
// was collected (see `Threads::push`), and only the thread that has the job uses it before.
unsafe impl Send for Job {}

/// What a queue and its threads share.
pub(crate) struct ThreadsShared {
    file: Arc<File>,
    /// The file is the character device of this.
    namespace: Option<Namespace>,
    work: Mutex<Work>,
    /// For threads that wait for work.
    work_ready: Condvar,
    ended: Mutex<Vec<(u64, i32)>>,
    /// For who waits in [`Threads::wait`].
    call_done: Condvar,
    /// For who waits for the last thread.
    thread_gone: Condvar,
    /// There is something in `ended`, or the owner of the queue is to be woken.
    signalled: AtomicBool,
    /// Readable as long as `signalled` is set.
    event: OwnedFd,
}

#[derive(Default)]
struct Work {
    jobs: Jobs<Job>,
    threads: usize,
    /// Those of them that wait for work.
    idle: usize,
    /// The queue is gone.
    over: bool,
}

impl Threads {
    /// # Errors
    /// There is no more descriptor.
    pub(super) fn new(file: Arc<File>) -> io::Result<Self> {
        Self::of(file, None)
    }

    /// For calls that are commands to `namespace`, if there is one, whose character device the file
    /// is. They need their data in one piece, and end with `EINVAL` otherwise.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(super) fn of(file: Arc<File>, namespace: Option<Namespace>) -> io::Result<Self> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let shared = ThreadsShared {
            file,
            namespace,
            work: Mutex::default(),
            work_ready: Condvar::new(),
            ended: Mutex::default(),
            call_done: Condvar::new(),
            thread_gone: Condvar::new(),
            signalled: AtomicBool::new(false),
            event,
        };
        Ok(Self {
            shared: Arc::new(shared),
            prepared: Vec::new(),
            most: MAX_THREADS,
            #[cfg(feature = "scripted")]
            by_hand: false,
        })
    }

    /// From here on no thread makes the calls. They wait for
    /// [`end_by_hand`](ThreadsShared::end_by_hand).
    #[cfg(feature = "scripted")]
    pub(super) fn set_by_hand(&mut self) {
        self.by_hand = true;
    }

    /// Takes a call.
    ///
    /// # Safety
    /// The list of pieces, and the memory that it names, stay until the call's completion was
    /// collected.
    pub(super) unsafe fn push(&mut self, call: &Prepared<'_>) -> bool {
        let Prepared { id, kind, iovecs, offset, len, .. } = *call;
        let count = i32::try_from(iovecs.len()).unwrap_or(0);
        self.prepared.push(Job { id, kind, iovecs: iovecs.as_ptr(), count, offset, len });
        true
    }

    pub(super) fn prepared(&self) -> usize {
        self.prepared.len()
    }

    /// Hands over what was prepared.
    pub(super) fn enter(&mut self) {
        if self.prepared.is_empty() {
            return;
        }
        let mut work = self.shared.work.lock();
        self.prepared.drain(..).for_each(|job| work.jobs.push_back(job.id, job));
        #[cfg(feature = "scripted")]
        if self.by_hand {
            return;
        }
        let wake = work.idle.min(work.jobs.len());
        let more = (work.jobs.len() - wake).min(self.most.saturating_sub(work.threads));
        work.threads += more;
        drop(work);
        for _ in 0..wake {
            self.shared.work_ready.notify_one();
        }
        let started = (0..more).take_while(|_| self.start()).count();
        if started < more || more == 0 {
            self.run_here(more - started);
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

    /// So many threads were not to be had. If there are none at all, this one does their work.
    fn run_here(&self, missing: usize) {
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

    /// A call that no thread has begun yet ends as if it had been cancelled; the others end as they
    /// would have.
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

    /// The completions of this moment: whose, and the result.
    pub(super) fn collect(&mut self, mut each: impl FnMut(u64, i32)) {
        // Only a hint: who is about to set it makes the descriptor readable as well.
        if !self.shared.signalled.load(Ordering::Relaxed) {
            return;
        }
        let mut ended = self.shared.ended.lock();
        self.shared.signalled.store(false, Ordering::Relaxed);
        let mut count = [0; 8];
        // It does not block, and what it says is known.
        let _ = rustix::io::read(&self.shared.event, &mut count);
        ended.drain(..).for_each(|(id, result)| each(id, result));
    }

    /// Waits until a call has ended.
    pub(super) fn wait(&mut self) -> Result<(), Stuck> {
        self.enter();
        let mut ended = self.shared.ended.lock();
        while ended.is_empty() {
            self.shared.call_done.wait(&mut ended);
        }
        Ok(())
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }
}

impl Drop for Threads {
    /// Waits until the threads are gone, which have nothing to do any more: they have the file
    /// open, and a block device could not be opened again.
    fn drop(&mut self) {
        let mut work = self.shared.work.lock();
        work.over = true;
        self.shared.work_ready.notify_all();
        while work.threads != 0 {
            self.shared.thread_gone.wait(&mut work);
        }
    }
}

impl ThreadsShared {
    /// What a thread does.
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
            if work.over {
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
        self.thread_gone.notify_all();
    }

    /// The result, as io_uring has it.
    fn call(&self, job: &Job) -> i32 {
        if let Some(namespace) = &self.namespace {
            // SAFETY: the list and the memory that it names are there, see `Threads::push`.
            return unsafe {
                let iovecs = pieces(job);
                let Job { id, kind, offset, len, .. } = *job;
                let call = Prepared { id, kind, iovecs, offset, len, nowait: false };
                namespace.call(&self.file, &call)
            };
        }
        match job.kind {
            // Files of a kind that takes no flags: the same in two steps.
            Kind::Write { flags } if flags != 0 => match self.make(job, job.kind) {
                refused if refused == -libc::EOPNOTSUPP => {
                    let moved = self.make(job, Kind::Write { flags: 0 });
                    let synced = if moved > 0 { self.make(job, Kind::Sync) } else { 0 };
                    if synced < 0 { synced } else { moved }
                }
                result => result,
            },
            kind => self.make(job, kind),
        }
    }

    fn make(&self, job: &Job, kind: Kind) -> i32 {
        let fd = self.file.as_raw_fd();
        let (offset, len) = (job.offset as libc::off_t, job.len as libc::off_t);
        // SAFETY: the list and the memory that it names are there, see `Threads::push`; the file is
        // open as long as this is.
        let result = unsafe {
            match kind {
                Kind::Read => libc::preadv2(fd, job.iovecs, job.count, offset, 0),
                Kind::Write { flags } => libc::pwritev2(fd, job.iovecs, job.count, offset, flags),
                Kind::Sync => libc::fdatasync(fd) as isize,
                Kind::Allocate { mode } => libc::fallocate(fd, mode, offset, len) as isize,
                Kind::Deallocate => libc::fallocate(fd, HOLE, offset, len) as isize,
            }
        };
        if result < 0 {
            return -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        }
        // A call moves MAX_BYTES at most.
        i32::try_from(result).unwrap_or(i32::MAX)
    }

    fn end(&self, id: u64, result: i32) {
        let mut ended = self.ended.lock();
        ended.push((id, result));
        self.signal();
        self.call_done.notify_one();
    }

    /// How many calls wait.
    #[cfg(feature = "scripted")]
    pub(crate) fn waiting(&self) -> usize {
        self.work.lock().jobs.len()
    }

    /// Ends the `n`th of the calls that wait, if there are so many.
    #[cfg(feature = "scripted")]
    pub(crate) fn end_by_hand(&self, n: usize, how: End) {
        let Some(job) = self.work.lock().jobs.remove_nth(n) else { return };
        let result = match how {
            End::Made => self.call(&job),
            End::Failed(errno) => -errno,
            End::Short(most) => {
                let mut left = most;
                // SAFETY: the list is there until the call's completion was collected, see
                // `Threads::push`, and this call has none yet.
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

    /// Makes the descriptor readable, though no call has ended.
    pub(super) fn wake(&self) {
        let _ended = self.ended.lock();
        self.signal();
    }

    /// With `ended` locked.
    fn signal(&self) {
        if !self.signalled.swap(true, Ordering::Relaxed) {
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }
}

/// How a test has a call end.
#[cfg(feature = "scripted")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It is made.
    Made,
    /// So many bytes of it are moved, at most.
    Short(usize),
    /// With this error number, and nothing was done.
    Failed(i32),
}

/// The list of a call.
///
/// # Safety
/// The call's completion was not collected, so its list is there.
unsafe fn pieces(job: &Job) -> &[libc::iovec] {
    let count = usize::try_from(job.count).unwrap_or(0);
    // SAFETY: as the caller has promised. An empty `Vec` has an address that is aligned, too.
    unsafe { std::slice::from_raw_parts(job.iovecs, count) }
}

/// Lets this thread run wherever its process may. It has come from a worker that may be pinned to a
/// processor, which it needs for itself.
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

    fn sync(threads: &mut Threads, id: u64) {
        let call = Prepared { id, kind: Kind::Sync, iovecs: &[], offset: 0, len: 0, nowait: false };
        // SAFETY: it has no memory.
        assert!(unsafe { threads.push(&call) });
    }

    fn collect(threads: &mut Threads) -> Vec<(u64, i32)> {
        let mut ended = Vec::new();
        threads.collect(|id, result| ended.push((id, result)));
        ended.sort_unstable();
        ended
    }

    #[test]
    fn they_are_not_pinned_to_where_their_queue_is() {
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

    /// A step for each, and not one for each pair: with these many it would not end.
    #[test]
    fn a_hundred_thousand_calls_are_cancelled_at_once() {
        const MANY: u64 = 200_000;
        let mut threads = Threads::new(file()).unwrap();
        threads.shared.work.lock().threads = MAX_THREADS;
        (0..MANY).for_each(|id| sync(&mut threads, id));
        threads.enter();
        // The last one first, which is the worst order for a search from the front.
        (1..MANY).rev().for_each(|id| threads.cancel(id));
        let mut ended = collect(&mut threads);
        ended.sort_unstable();
        threads.shared.work.lock().threads = 0;
        assert!(ended.into_iter().eq((1..MANY).map(|id| (id, -libc::ECANCELED))));
        assert_eq!(threads.shared.work.lock().jobs.len(), 1);
    }

    #[test]
    fn what_no_thread_has_begun_is_cancelled() {
        let mut threads = Threads::new(file()).unwrap();
        // As many as there may be, and all of them are busy.
        threads.shared.work.lock().threads = MAX_THREADS;
        for id in 0..3 {
            sync(&mut threads, id);
        }
        threads.enter();
        assert_eq!(collect(&mut threads), []);
        threads.cancel(1);
        threads.cancel(7);
        assert_eq!(collect(&mut threads), [(1, -libc::ECANCELED)]);
        // One has time.
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
        threads.most = 0;
        sync(&mut threads, 3);
        sync(&mut threads, 4);
        threads.enter();
        assert_eq!(collect(&mut threads), [(3, 0), (4, 0)]);
    }

    #[test]
    fn threads_stay_for_a_while_and_go_with_their_queue() {
        let file = file();
        let mut threads = Threads::new(Arc::clone(&file)).unwrap();
        for id in 0..200 {
            sync(&mut threads, id);
            threads.enter();
            threads.wait().unwrap();
            collect(&mut threads);
        }
        assert!(threads.shared.work.lock().threads <= 200.min(MAX_THREADS));
        assert!(threads.shared.work.lock().threads > 0);
        drop(threads);
        // The last of them has said that it goes, and may still be on its way.
        while Arc::strong_count(&file) != 1 {
            std::thread::yield_now();
        }
    }
}
