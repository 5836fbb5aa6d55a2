//! The syncs of a file: one at a time, by a thread of their own.
//!
//! The system tells whoever syncs a file of data that it could not write back; once for each open
//! file, and then it forgets the data. Of two syncs at once the first is told, and the second
//! succeeds, though the data were its own. So there is one at a time, and what it said is noted
//! before the next begins: once data are lost, no sync succeeds until the disk is opened again.
//! Trying again would not bring them back.
//!
//! A sync covers all that was written before it began. So everybody who asks while one is under way
//! shares the next, and however many ask, the file system has two to do. No thread that serves
//! queues ever waits for one.

use crate::sys::{Key, Waker, flush, unpin};
use parking_lot::{Condvar, Mutex};
use shadowbell_memory::AbortOnPanic;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

/// How long the thread stays without work.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);

/// The syncs of a file that all queues of a disk share.
pub(super) struct Flusher {
    file: Arc<File>,
    how: Syncs,
    /// The error number of the first sync that has lost data, or 0.
    lost: AtomicI32,
    /// Who is to know of that before those whose data it were.
    on_loss: Mutex<Option<OnLoss>>,
    /// Bytes of the file after the last sync. Whoever serves queues can not look: a file system may
    /// ask somebody else, who does not answer.
    len: AtomicU64,
    work: Mutex<Work>,
    came: Condvar,
    /// The thread has gone.
    gone: Condvar,
    /// What a sync comes to, in a test.
    #[cfg(any(test, feature = "scripted"))]
    pub(super) answer: Mutex<Option<Box<dyn FnMut() -> i32 + Send>>>,
}

/// How a file is synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Syncs {
    /// By a call. Data that were lost are forgotten if it `forgets`: the file is written through
    /// the page cache.
    Calls { forgets: bool },
    /// By a command to the namespace whose character device it is.
    Commands { nsid: u32 },
}

type OnLoss = Arc<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct Work {
    asked: Vec<(Arc<Asker>, Key)>,
    has_thread: bool,
    /// There is no thread: a test says when a sync begins, and what comes of it.
    #[cfg(feature = "scripted")]
    by_hand: bool,
    /// Those whose sync has begun so.
    #[cfg(feature = "scripted")]
    begun: Vec<(Arc<Asker>, Key)>,
    /// The thread is in a sync.
    syncs: bool,
    /// The disk is closed.
    over: bool,
}

/// Where a queue gets its answers.
pub(super) struct Asker {
    answers: Mutex<Vec<(Key, i32)>>,
    waker: Waker,
}

impl Asker {
    pub(super) fn new(waker: Waker) -> Arc<Self> {
        Arc::new(Self { answers: Mutex::default(), waker })
    }

    /// Moves the answers of this moment to `into`: 0 or a negative error number, as calls have it.
    pub(super) fn take(&self, into: &mut Vec<(Key, i32)>) {
        into.append(&mut self.answers.lock());
    }

    /// Gives it an answer.
    pub(super) fn answer(&self, key: Key, result: i32) {
        self.answers.lock().push((key, result));
        self.waker.wake();
    }
}

impl std::fmt::Debug for Flusher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flusher").field("lost", &self.lost).finish_non_exhaustive()
    }
}

impl Flusher {
    pub(super) fn new(file: Arc<File>, forgets: bool) -> Arc<Self> {
        Self::after(file, Syncs::Calls { forgets }, 0)
    }

    /// One that goes on after another, whose first sync that has lost data failed with `lost`.
    pub(super) fn after(file: Arc<File>, how: Syncs, lost: i32) -> Arc<Self> {
        Arc::new(Self {
            file,
            how,
            lost: AtomicI32::new(lost),
            on_loss: Mutex::default(),
            len: AtomicU64::new(u64::MAX),
            work: Mutex::default(),
            came: Condvar::new(),
            gone: Condvar::new(),
            #[cfg(any(test, feature = "scripted"))]
            answer: Mutex::default(),
        })
    }

    /// The error number of the first sync that has lost data, or 0.
    pub(super) fn lost(&self) -> i32 {
        self.lost.load(Ordering::Acquire)
    }

    /// Bytes of the file when the last sync had ended; before the first as many as there can be.
    pub(super) fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    /// Another process has lost data with this error number, or none if it is 0.
    pub(super) fn set_lost(&self, lost: i32) {
        self.lost.store(lost, Ordering::Release);
    }

    /// Has this called when data were lost, and nothing else.
    pub(super) fn on_loss(&self, call: Box<dyn Fn() + Send + Sync>) {
        *self.on_loss.lock() = Some(Arc::from(call));
    }

    /// A sync that begins after this, for `asker`.
    pub(super) fn ask(self: &Arc<Self>, asker: &Arc<Asker>, key: Key) {
        let mut work = self.work.lock();
        work.asked.push((Arc::clone(asker), key));
        #[cfg(feature = "scripted")]
        if work.by_hand {
            return;
        }
        if work.has_thread {
            self.came.notify_one();
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
            // Whoever serves queues must not do it instead. The request is repeated, and then
            // fails.
            let asked = std::mem::take(&mut work.asked);
            drop(work);
            asked.iter().for_each(|(asker, key)| asker.answer(*key, -libc::EAGAIN));
        }
    }

    /// Has the thread go, which has the file open, and waits until it does unless it is in a sync.
    pub(super) fn close(&self) {
        let mut work = self.work.lock();
        work.over = true;
        self.came.notify_one();
        while work.has_thread && !work.syncs {
            self.gone.wait(&mut work);
        }
    }

    /// What the thread does.
    fn run(&self) {
        let mut work = self.work.lock();
        loop {
            if work.asked.is_empty() {
                let timed_out =
                    !work.over && self.came.wait_for(&mut work, IDLE_TIMEOUT).timed_out();
                if work.asked.is_empty() && (work.over || timed_out) {
                    work.has_thread = false;
                    self.gone.notify_all();
                    return;
                }
                continue;
            }
            let asked = std::mem::take(&mut work.asked);
            work.syncs = true;
            self.gone.notify_all();
            drop(work);
            self.serve(asked);
            work = self.work.lock();
            work.syncs = false;
        }
    }

    /// One sync for all of these.
    fn serve(&self, asked: Vec<(Arc<Asker>, Key)>) {
        let mut result = self.sync();
        if matches!(self.how, Syncs::Calls { .. }) {
            match self.file.metadata() {
                Ok(about) => self.len.store(about.len(), Ordering::Release),
                // Its storage is gone. Where a file system has no syncs, the system does not ask
                // it, and says that there is nothing to do.
                Err(error) if result == 0 => result = -error.raw_os_error().unwrap_or(libc::EIO),
                Err(_) => {}
            }
        }
        for (asker, key) in asked {
            asker.answer(key, result);
        }
    }

    /// From here on there is no thread.
    #[cfg(feature = "scripted")]
    pub(super) fn set_by_hand(&self) {
        self.work.lock().by_hand = true;
    }

    /// Begins a sync for those who have asked, if there are any and none is under way.
    #[cfg(feature = "scripted")]
    pub(super) fn begin_by_hand(&self) -> bool {
        let mut work = self.work.lock();
        if work.asked.is_empty() || !work.begun.is_empty() {
            return false;
        }
        work.begun = std::mem::take(&mut work.asked);
        true
    }

    /// Ends the sync that is under way: 0 or a negative error number. Whether there was one.
    #[cfg(feature = "scripted")]
    pub(super) fn end_by_hand(&self, result: i32) -> bool {
        let begun = std::mem::take(&mut self.work.lock().begun);
        if begun.is_empty() {
            return false;
        }
        *self.answer.lock() = Some(Box::new(move || result));
        self.serve(begun);
        true
    }

    /// Syncs. Alone: what was lost before this, and by this, is noted when it returns.
    fn sync(&self) -> i32 {
        let result = self.sync_file();
        let passing = matches!(-result, 0 | libc::EINTR | libc::EAGAIN);
        if self.how == (Syncs::Calls { forgets: true }) && !passing && self.lost() == 0 {
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
        if let Some(answer) = &mut *self.answer.lock() {
            return answer();
        }
        if let Syncs::Commands { nsid } = self.how {
            return flush(&self.file, nsid);
        }
        match rustix::fs::fdatasync(&self.file).map_err(io::Error::from) {
            Ok(()) => 0,
            Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
        }
    }
}
