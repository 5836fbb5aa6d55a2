//! The threads that carry requests out. All queues of a disk share them, and no other disk does: an
//! image whose storage does not answer keeps its own threads and nobody else's.

use crate::completions::{Completions, Ended};
use crate::image::Image;
use imago::io_buffers::IoBuffer;
use parking_lot::{Condvar, Mutex};
use shadowbell_backend::{DiskError, Op, Request, unpin};
use shadowbell_memory::AbortOnPanic;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most threads of a disk: as many requests are at the storage at most.
pub const MAX_THREADS: usize = 16;
/// How long tables that were changed stay in memory alone.
pub const WRITE_BACK: Duration = Duration::from_millis(200);
/// How long a thread without work stays.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);

/// A request on its way.
pub(crate) struct Job {
    pub(crate) id: u64,
    pub(crate) request: Request,
    pub(crate) buffer: Option<IoBuffer>,
    pub(crate) to: Arc<Completions>,
}

impl Job {
    fn end(self, result: Result<(), DiskError>) {
        let Self { id, buffer, to, .. } = self;
        to.push(Ended { id, result, buffer });
    }

    /// Whether it is to be durable when it ends.
    fn forces(&self) -> bool {
        matches!(self.request.op, Op::Write { fua: true } | Op::WriteZeroes { fua: true, .. })
    }

    fn changes(&self) -> bool {
        matches!(self.request.op, Op::Write { .. } | Op::WriteZeroes { .. } | Op::Discard)
    }
}

/// The threads of a disk, with the image. Closed with its last handle.
pub(crate) struct Pool(Arc<PoolShared>);

struct PoolShared {
    image: Image,
    work: Mutex<Work>,
    /// For threads that wait for work.
    work_ready: Condvar,
    thread_gone: Condvar,
}

#[derive(Default)]
struct Work {
    jobs: VecDeque<Job>,
    /// Those that wait for the next sync.
    syncs: Vec<Job>,
    /// A thread is in a sync.
    is_syncing: bool,
    /// Those that were carried out and wait for the tables.
    tables: Vec<Job>,
    /// A thread writes tables.
    is_writing: bool,
    /// Since when tables may be in memory alone.
    changed: Option<Instant>,
    threads: usize,
    /// Those of them that wait for work.
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

    /// How many threads there is work for.
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
            thread_gone: Condvar::new(),
        }))
    }

    pub(crate) fn image(&self) -> &Image {
        &self.0.image
    }

    /// Has threads carry `jobs` out.
    pub(crate) fn give(&self, jobs: impl Iterator<Item = Job>) {
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

    fn start(&self) -> bool {
        let shared = Arc::clone(&self.0);
        let run = move || {
            let _guard = AbortOnPanic::new();
            // It has come from a worker that may be pinned to a processor.
            unpin();
            shared.serve();
        };
        std::thread::Builder::new().name("sb-qcow2".into()).spawn(run).is_ok()
    }

    /// So many threads were not to be had. If there are none at all, nobody does the work, which
    /// whoever serves queues must not do.
    fn fewer(&self, missing: usize) {
        let mut work = self.0.work.lock();
        work.threads -= missing;
        if work.threads != 0 {
            return;
        }
        let jobs = std::mem::take(&mut work.jobs);
        let syncs = std::mem::take(&mut work.syncs);
        drop(work);
        jobs.into_iter().chain(syncs).for_each(|job| job.end(Err(DiskError::Io(libc::EAGAIN))));
    }

    /// Takes a job back that no thread has begun.
    pub(crate) fn take_back(&self, id: u64, to: &Arc<Completions>) -> Option<Job> {
        let mut work = self.0.work.lock();
        let is = |job: &Job| job.id == id && Arc::ptr_eq(&job.to, to);
        // A write that waits for a sync has been carried out.
        if let Some(at) = work.syncs.iter().position(|job| is(job) && !job.forces()) {
            return Some(work.syncs.swap_remove(at));
        }
        let at = work.jobs.iter().position(is)?;
        work.jobs.remove(at)
    }
}

impl Drop for Pool {
    /// Waits until the threads are gone, and closes the image: it could not be opened again before.
    fn drop(&mut self) {
        let mut work = self.0.work.lock();
        work.over = true;
        self.0.work_ready.notify_all();
        while work.threads != 0 {
            self.0.thread_gone.wait(&mut work);
        }
        drop(work);
        self.0.image.close();
    }
}

impl PoolShared {
    /// What a thread does.
    fn serve(&self) {
        let mut work = self.work.lock();
        loop {
            if !work.is_syncing && !work.syncs.is_empty() {
                work.is_syncing = true;
                let syncs = std::mem::take(&mut work.syncs);
                work.changed = None;
                drop(work);
                let result = self.image.sync();
                syncs.into_iter().for_each(|job| job.end(result));
                work = self.work.lock();
                work.is_syncing = false;
                continue;
            }
            if !work.is_writing && !work.tables.is_empty() {
                work.is_writing = true;
                let jobs = std::mem::take(&mut work.tables);
                drop(work);
                let result = self.image.write_back();
                jobs.into_iter().for_each(|job| job.end(result));
                work = self.work.lock();
                work.is_writing = false;
                continue;
            }
            if work.changed.is_some_and(|since| since.elapsed() >= WRITE_BACK) {
                work.changed = None;
                drop(work);
                // What can not be written stays, and is said of the flush.
                let _ = self.image.write_back();
                work = self.work.lock();
                continue;
            }
            if let Some(mut job) = work.jobs.pop_front() {
                drop(work);
                let result = self.image.run(&job.request, job.buffer.as_mut());
                let (changes, syncs) = (job.changes(), job.forces() && result.is_ok());
                if syncs {
                    work = self.work.lock();
                    work.syncs.push(job);
                    continue;
                }
                if changes && result.is_ok() && self.image.waits_for_tables() {
                    work = self.work.lock();
                    work.tables.push(job);
                    continue;
                }
                job.end(result);
                work = self.work.lock();
                if changes && work.changed.is_none() {
                    work.changed = Some(Instant::now());
                }
                continue;
            }
            if work.over {
                break;
            }
            let timeout = match work.changed {
                Some(since) => WRITE_BACK.saturating_sub(since.elapsed()),
                None => IDLE_TIMEOUT,
            };
            work.idle += 1;
            let timed_out = self.work_ready.wait_for(&mut work, timeout).timed_out();
            work.idle -= 1;
            if timed_out && work.ready() == 0 && work.changed.is_none() {
                break;
            }
        }
        work.threads -= 1;
        self.thread_gone.notify_all();
    }
}
