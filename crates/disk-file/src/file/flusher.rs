//! Syncs of a file: they are serialized, and a separate thread executes them.
//!
//! If the kernel cannot write data back, it reports the error to only one sync per open file, and
//! drops the data. So if two syncs run concurrently, the first fails, and the second succeeds
//! although its data are lost. Therefore only one sync runs at a time, and its result is recorded
//! before the next one starts. After lost data, every sync fails until the disk is opened again,
//! because a repeated sync would not restore the data.
//!
//! A sync covers all writes that completed before it started. All requests that arrive while a sync
//! runs share the next sync, so at most two syncs are pending for any number of requests. I/O
//! threads never block on a sync.

use crate::sys::{Key, Waker, flush, unpin};
use parking_lot::{Condvar, Mutex};
use shadowbell_memory::AbortOnPanic;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

/// Time after which an idle thread exits.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);

/// Syncs of a file. All queues of a disk share them.
pub(super) struct Flusher {
    file: Arc<File>,
    method: Syncs,
    /// Error number of the first sync that lost data, or 0 if no data were lost.
    lost: AtomicI32,
    /// Callback for lost data. It is called before the failed requests complete.
    on_loss: Mutex<Option<OnLoss>>,
    /// Size of the file in bytes after the last sync. I/O threads use this value instead of
    /// `fstat`, which blocks if a remote file system is unreachable.
    len: AtomicU64,
    work: Mutex<Work>,
    work_added: Condvar,
    /// Signalled when the sync thread exits or starts a sync.
    thread_ended: Condvar,
    /// Replaces the system call of a sync in tests. Returns 0 or a negative error number.
    #[cfg(any(test, feature = "scripted"))]
    pub(super) scripted_result: Mutex<Option<Box<dyn FnMut() -> i32 + Send>>>,
}

/// Method of syncing a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Syncs {
    /// By `fdatasync`. `drops_failed_data` is true if the file is written through the page cache,
    /// which drops data after a failed write-back.
    Calls { drops_failed_data: bool },
    /// By a Flush command to this namespace, through its character device.
    Commands { nsid: u32 },
}

type OnLoss = Arc<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct Work {
    pending: Vec<(Arc<Requester>, Key)>,
    has_thread: bool,
    /// True if no thread runs: a test decides when a sync starts and how it ends.
    #[cfg(feature = "scripted")]
    is_scripted: bool,
    /// Requests that wait for the sync that a test has started and not ended.
    #[cfg(feature = "scripted")]
    started: Vec<(Arc<Requester>, Key)>,
    /// True while the thread executes a sync.
    syncs: bool,
    /// True after the disk was closed.
    closing: bool,
}

/// Receiver of the results of syncs, and of the ends of waits for range locks. Each queue has one.
pub(super) struct Requester {
    /// Results that the queue has not taken yet. `None` after the queue was closed.
    completions: Mutex<Option<Vec<(Key, i32)>>>,
    /// Wakes a thread in [`wait`](Self::wait).
    completed: Condvar,
    waker: Waker,
}

impl Requester {
    pub(super) fn new(waker: Waker) -> Arc<Self> {
        let completions = Mutex::new(Some(Vec::new()));
        Arc::new(Self { completions, completed: Condvar::new(), waker })
    }

    /// Moves all results to `into`. A result is 0 or a negative error number, as from system calls.
    pub(super) fn take(&self, into: &mut Vec<(Key, i32)>) {
        if let Some(completions) = &mut *self.completions.lock() {
            self.waker.taken(completions.len());
            into.append(completions);
        }
    }

    /// Delivers a result, unless the queue was closed. The wake-up is under the lock, because a
    /// closed queue must not wake its thread.
    pub(super) fn complete(&self, key: Key, result: i32) {
        if let Some(completions) = &mut *self.completions.lock() {
            completions.push((key, result));
            self.completed.notify_one();
            self.waker.wake();
        }
    }

    /// Blocks the calling thread until there is a result.
    pub(super) fn wait(&self) {
        let mut completions = self.completions.lock();
        while completions.as_ref().is_some_and(Vec::is_empty) {
            self.completed.wait(&mut completions);
        }
    }

    /// Drops all results, also those that are delivered later.
    pub(super) fn close(&self) {
        if let Some(completions) = self.completions.lock().take() {
            self.waker.taken(completions.len());
        }
    }
}

impl std::fmt::Debug for Flusher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flusher").field("lost", &self.lost).finish_non_exhaustive()
    }
}

impl Flusher {
    pub(super) fn new(file: Arc<File>, drops_failed_data: bool) -> Arc<Self> {
        Self::after(file, Syncs::Calls { drops_failed_data }, 0)
    }

    /// Creates a flusher that continues with the state of an earlier one. `lost` is the error
    /// number of the first sync that lost data, or 0.
    pub(super) fn after(file: Arc<File>, method: Syncs, lost: i32) -> Arc<Self> {
        Arc::new(Self {
            file,
            method,
            lost: AtomicI32::new(lost),
            on_loss: Mutex::default(),
            len: AtomicU64::new(u64::MAX),
            work: Mutex::default(),
            work_added: Condvar::new(),
            thread_ended: Condvar::new(),
            #[cfg(any(test, feature = "scripted"))]
            scripted_result: Mutex::default(),
        })
    }

    /// Error number of the first sync that lost data, or 0 if no data were lost.
    pub(super) fn lost(&self) -> i32 {
        self.lost.load(Ordering::Acquire)
    }

    /// Size of the file in bytes after the last sync; `u64::MAX` before the first one.
    pub(super) fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    /// Sets the error number of a sync that lost data in another process; 0 means no loss.
    pub(super) fn set_lost(&self, lost: i32) {
        self.lost.store(lost, Ordering::Release);
    }

    /// Sets the callback for lost data.
    pub(super) fn on_loss(&self, call: Box<dyn Fn() + Send + Sync>) {
        *self.on_loss.lock() = Some(Arc::from(call));
    }

    /// Requests a sync that starts after this call. Its result is delivered to `requester`.
    pub(super) fn request_sync(self: &Arc<Self>, requester: &Arc<Requester>, key: Key) {
        let mut work = self.work.lock();
        work.pending.push((Arc::clone(requester), key));
        #[cfg(feature = "scripted")]
        if work.is_scripted {
            return;
        }
        if work.has_thread {
            self.work_added.notify_one();
            return;
        }
        let ours = Arc::clone(self);
        let thread = std::thread::Builder::new().name("sb-flush".into());
        work.has_thread = thread
            .spawn(move || {
                let _guard = AbortOnPanic::new();
                unpin();
                ours.run();
            })
            .is_ok();
        if !work.has_thread {
            // The thread could not be started, and an I/O thread must not execute a sync. With
            // `EAGAIN`, the requests are repeated a few times before they fail.
            let pending = std::mem::take(&mut work.pending);
            drop(work);
            pending.iter().for_each(|(requester, key)| requester.complete(*key, -libc::EAGAIN));
        }
    }

    /// Stops the sync thread and waits for its exit, because the thread holds the file open. Does
    /// not wait if the thread is in a sync.
    pub(super) fn close(&self) {
        let mut work = self.work.lock();
        work.closing = true;
        self.work_added.notify_one();
        while work.has_thread && !work.syncs {
            self.thread_ended.wait(&mut work);
        }
    }

    /// Main loop of the thread.
    fn run(&self) {
        let mut work = self.work.lock();
        loop {
            if work.pending.is_empty() {
                let timed_out =
                    !work.closing && self.work_added.wait_for(&mut work, IDLE_TIMEOUT).timed_out();
                if work.pending.is_empty() && (work.closing || timed_out) {
                    work.has_thread = false;
                    self.thread_ended.notify_all();
                    return;
                }
                continue;
            }
            let pending = std::mem::take(&mut work.pending);
            work.syncs = true;
            self.thread_ended.notify_all();
            drop(work);
            self.serve(pending);
            work = self.work.lock();
            work.syncs = false;
        }
    }

    /// Executes one sync for all requests in `pending`.
    fn serve(&self, pending: Vec<(Arc<Requester>, Key)>) {
        let mut result = self.sync();
        if matches!(self.method, Syncs::Calls { .. }) {
            match self.file.metadata() {
                Ok(about) => self.len.store(about.len(), Ordering::Release),
                // The storage is unavailable, although the sync returned 0: the kernel returns 0
                // without a request to the storage if the file system implements no sync.
                Err(error) if result == 0 => result = -error.raw_os_error().unwrap_or(libc::EIO),
                Err(_) => {}
            }
        }
        for (requester, key) in pending {
            requester.complete(key, result);
        }
    }

    /// Disables the thread for a test.
    #[cfg(feature = "scripted")]
    pub(super) fn set_scripted(&self) {
        self.work.lock().is_scripted = true;
    }

    /// In a test, starts a sync for all requests. Returns false if there is no request or a sync is
    /// in flight.
    #[cfg(feature = "scripted")]
    pub(super) fn begin_scripted(&self) -> bool {
        let mut work = self.work.lock();
        if work.pending.is_empty() || !work.started.is_empty() {
            return false;
        }
        work.started = std::mem::take(&mut work.pending);
        true
    }

    /// In a test, ends the sync in flight with `result`, which is 0 or a negative error number.
    /// Returns false if no sync was in flight.
    #[cfg(feature = "scripted")]
    pub(super) fn end_scripted(&self, result: i32) -> bool {
        let started = std::mem::take(&mut self.work.lock().started);
        if started.is_empty() {
            return false;
        }
        *self.scripted_result.lock() = Some(Box::new(move || result));
        self.serve(started);
        true
    }

    /// Syncs the file, and records lost data before it returns. Calls must not overlap.
    fn sync(&self) -> i32 {
        let result = self.sync_file();
        let passing = matches!(-result, 0 | libc::EINTR | libc::EAGAIN);
        if self.method == (Syncs::Calls { drops_failed_data: true }) && !passing && self.lost() == 0
        {
            self.lost.store(-result, Ordering::Release);
            let call = self.on_loss.lock().clone();
            if let Some(call) = call {
                call();
            }
        }
        match self.lost() {
            0 => result,
            errno => -errno,
        }
    }

    fn sync_file(&self) -> i32 {
        #[cfg(any(test, feature = "scripted"))]
        if let Some(scripted_result) = &mut *self.scripted_result.lock() {
            return scripted_result();
        }
        if let Syncs::Commands { nsid } = self.method {
            return flush(&self.file, nsid);
        }
        match rustix::fs::fdatasync(&self.file).map_err(io::Error::from) {
            Ok(()) => 0,
            Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
        }
    }
}
