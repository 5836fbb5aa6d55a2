//! Threads that execute requests on the slow path. All queues of a disk share them. Each disk has
//! threads of its own, so hung storage blocks no other disk.

use crate::image::Image;
use crate::storage::IoBuffer;
use parking_lot::{Condvar, Mutex};
use shadowbell_disk::{CompletionQueue, DiskError, Op, Request};
use shadowbell_disk_file::unpin;
use shadowbell_memory::AbortOnPanic;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

/// Maximum number of threads of a disk, and so of its slow-path requests in flight at the storage.
pub const MAX_THREADS: usize = 16;
/// Time without work after which a thread ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum time that [`Pool::release_lock`] waits for the release.
const RELEASE_LIMIT: Duration = Duration::from_millis(20);

/// Request for the threads.
pub(crate) struct Job {
    pub(crate) id: u64,
    pub(crate) request: Request,
    pub(crate) buffer: Option<IoBuffer>,
    pub(crate) to: Arc<CompletionQueue<Ended>>,
}

/// Completed job.
pub(crate) struct Ended {
    pub(crate) id: u64,
    pub(crate) result: Result<(), DiskError>,
    pub(crate) buffer: Option<IoBuffer>,
}

impl Job {
    fn end(self, result: Result<(), DiskError>) {
        let Self { id, buffer, to, .. } = self;
        to.push(Ended { id, result, buffer });
    }

    /// True if the request has FUA, so that a sync has to follow.
    fn forces(&self) -> bool {
        matches!(self.request.op, Op::Write { fua: true } | Op::WriteZeroes { fua: true, .. })
    }
}

/// Threads of a disk, with its image. Dropping the last handle closes the image.
pub(crate) struct Pool(Arc<PoolShared>);

struct PoolShared {
    image: Image,
    work: Mutex<Work>,
    /// Wakes threads that wait for work.
    work_ready: Condvar,
    thread_ended: Condvar,
}

#[derive(Default)]
struct Work {
    jobs: VecDeque<Job>,
    /// Jobs that wait for the next sync: flushes, and FUA writes that were executed.
    syncs: Vec<Job>,
    /// True while a thread syncs.
    is_syncing: bool,
    threads: usize,
    /// Number of threads that wait for work.
    idle: usize,
    over: bool,
}

impl Work {
    fn add(&mut self, job: Job) {
        if job.request.op == Op::Flush {
            self.syncs.push(job);
        } else {
            self.jobs.push_back(job);
        }
    }

    /// Number of jobs or syncs that a thread could start now.
    fn ready(&self) -> usize {
        self.jobs.len() + usize::from(!self.is_syncing && !self.syncs.is_empty())
    }
}

impl Pool {
    pub(crate) fn new(image: Image) -> Self {
        Self(Arc::new(PoolShared {
            image,
            work: Mutex::default(),
            work_ready: Condvar::new(),
            thread_ended: Condvar::new(),
        }))
    }

    pub(crate) fn image(&self) -> &Image {
        &self.0.image
    }

    /// Passes `jobs` to the threads.
    pub(crate) fn submit(&self, jobs: impl Iterator<Item = Job>) {
        let mut work = self.0.work.lock();
        jobs.for_each(|job| work.add(job));
        let ready = work.ready();
        let wake = work.idle.min(ready);
        let more = (ready - wake).min(MAX_THREADS.saturating_sub(work.threads));
        work.threads += more;
        drop(work);
        for _ in 0..wake {
            self.0.work_ready.notify_one();
        }
        let started = (0..more).take_while(|_| self.start()).count();
        if started < more {
            self.fewer(more - started);
        }
    }

    /// Releases unused clusters, then the locks of the image. If the storage does not respond
    /// within [`RELEASE_LIMIT`], the locks are released later, at the latest when the process ends.
    pub(crate) fn release_lock(&self) {
        if self.0.image.try_release_lock() {
            return;
        }
        let shared = Arc::clone(&self.0);
        let (sender, ended) = sync_channel(1);
        let run = move || {
            let _guard = AbortOnPanic::new();
            unpin();
            shared.image.release_lock();
            let _ = sender.send(());
        };
        if std::thread::Builder::new().name("sb-qcow2-end".into()).spawn(run).is_ok() {
            let _ = ended.recv_timeout(RELEASE_LIMIT);
        }
    }

    fn start(&self) -> bool {
        let shared = Arc::clone(&self.0);
        let run = move || {
            let _guard = AbortOnPanic::new();
            // This thread would otherwise inherit the CPU affinity of the I/O thread that starts
            // it.
            unpin();
            shared.serve();
        };
        std::thread::Builder::new().name("sb-qcow2".into()).spawn(run).is_ok()
    }

    /// Records that `missing` threads could not be started. If the disk has no thread at all, all
    /// waiting jobs fail, because an I/O thread must not execute them.
    fn fewer(&self, missing: usize) {
        let mut work = self.0.work.lock();
        work.threads -= missing;
        if work.threads != 0 {
            return;
        }
        let jobs = std::mem::take(&mut work.jobs);
        // The jobs in `syncs` are flushes that no thread has executed. An executed FUA write cannot
        // be among them: it waits here only while another thread exists, and `threads` is 0 now.
        let syncs = std::mem::take(&mut work.syncs);
        drop(work);
        jobs.into_iter().chain(syncs).for_each(|job| job.end(Err(DiskError::Io(libc::EAGAIN))));
    }

    /// In a test, removes and returns the first waiting job, as a thread does.
    #[cfg(test)]
    pub(crate) fn start_by_hand(&self) -> Option<Job> {
        self.0.work.lock().jobs.pop_front()
    }

    /// Sets the number of threads for a test. With [`MAX_THREADS`], no thread will be started.
    #[cfg(test)]
    pub(crate) fn set_threads(&self, threads: usize) {
        self.0.work.lock().threads = threads;
    }

    /// Removes and returns a job that no thread has started.
    pub(crate) fn take_back(&self, id: u64, to: &Arc<CompletionQueue<Ended>>) -> Option<Job> {
        let mut work = self.0.work.lock();
        let is = |job: &Job| job.id == id && Arc::ptr_eq(&job.to, to);
        // A FUA write in `syncs` was already executed, so it is not removed.
        if let Some(at) = work.syncs.iter().position(|job| is(job) && !job.forces()) {
            return Some(work.syncs.swap_remove(at));
        }
        let at = work.jobs.iter().position(is)?;
        work.jobs.remove(at)
    }
}

impl Drop for Pool {
    /// Waits until the threads have ended, and closes the image, which can be opened again
    /// afterwards.
    fn drop(&mut self) {
        self.0.image.cancel_check();
        let mut work = self.0.work.lock();
        work.over = true;
        self.0.work_ready.notify_all();
        while work.threads != 0 {
            self.0.thread_ended.wait(&mut work);
        }
        drop(work);
        self.0.image.settle();
    }
}

impl PoolShared {
    /// Runs a thread of the pool.
    fn serve(&self) {
        let mut work = self.work.lock();
        loop {
            if !work.is_syncing && !work.syncs.is_empty() {
                work.is_syncing = true;
                let syncs = std::mem::take(&mut work.syncs);
                drop(work);
                let result = self.image.sync();
                syncs.into_iter().for_each(|job| job.end(result));
                work = self.work.lock();
                work.is_syncing = false;
                continue;
            }
            if let Some(mut job) = work.jobs.pop_front() {
                drop(work);
                let result = self.image.run(&job.request, job.buffer.as_mut());
                if job.forces() && result.is_ok() {
                    work = self.work.lock();
                    work.syncs.push(job);
                    continue;
                }
                job.end(result);
                work = self.work.lock();
                continue;
            }
            if work.over {
                break;
            }
            work.idle += 1;
            let timed_out = self.work_ready.wait_for(&mut work, IDLE_TIMEOUT).timed_out();
            work.idle -= 1;
            if timed_out && work.ready() == 0 {
                if work.threads == 1 {
                    drop(work);
                    self.image.settle();
                    work = self.work.lock();
                }
                if work.ready() == 0 {
                    break;
                }
            }
        }
        work.threads -= 1;
        self.thread_ended.notify_all();
    }
}
