//! Queue of one thread on a file-backed disk.

use super::flusher::Requester;
use super::ranges::Entered;
use super::shared::FileShared;
use super::task::{BOUNCE, Stage, Step, Task};
use crate::sys::{Key, Ring};
use shadowbell_disk::{Bounds, DiskError, Lists, Op, Queue, Request, Submitted, TagIndex, compare};
use shadowbell_memory::{Mapping, Segments, SharedBytes};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Maximum number of bounce buffers per queue. Further requests wait for a free one.
const BOUNCES: usize = 32;
/// Index of the list of waiting requests in [`FileQueue::waiting`].
const WAITING: u32 = 0;

pub(super) struct FileQueue {
    ring: Ring<Task>,
    /// Range locks of the requests. This field must be declared after the ring: the ring is dropped
    /// first and ends all requests in flight, and only then their locks may be released.
    entered: Entered,
    shared: Arc<FileShared>,
    by_tag: TagIndex<Key>,
    /// Slots of requests that wait for room in the ring or for a bounce buffer, in order.
    waiting: Lists,
    /// Requests that were cancelled while they waited for a resource. The next call of `reap`
    /// reports them.
    cancelled: Vec<Key>,
    /// Free bounce buffers. A further one is created when none is free, up to [`BOUNCES`].
    bounces: Vec<SharedBytes>,
    bounces_created: usize,
    /// Scratch buffer for completions, reused by each batch to save allocations.
    completions: Vec<(Key, i32)>,
    bounds: Bounds,
    /// Number of completions that the queue still has to take from `requester`, including those
    /// that have not arrived yet: one for each requested sync, and one for each request that waits
    /// for a range lock.
    notifications: usize,
    requester: Arc<Requester>,
}

impl FileQueue {
    pub(super) fn new(shared: Arc<FileShared>) -> io::Result<Self> {
        // The first bounce buffer is created here, where an error can be reported. So whenever a
        // request waits for a buffer, another request has one and will release it.
        let first = Mapping::anonymous(BOUNCE as u64).map_err(io::Error::other)?.bytes();
        let (file, direct) = (Arc::clone(&shared.file), shared.direct.is_some());
        let ring = match &shared.namespace {
            Some(facts) => Ring::of_namespace(file, shared.engine, facts.commands())?,
            None => Ring::new(file, shared.engine, shared.waits, direct)?,
        };
        #[cfg(feature = "scripted")]
        let ring = match &shared.script {
            Some(script) => script.adopt(ring),
            None => ring,
        };
        let requester = Requester::new(ring.waker());
        Ok(Self {
            entered: Entered::new(shared.ranges.clone(), &requester),
            requester,
            ring,
            notifications: 0,
            bounds: shared.info.bounds(),
            shared,
            by_tag: TagIndex::default(),
            waiting: Lists::default(),
            cancelled: Vec::new(),
            bounces: vec![first],
            bounces_created: 1,
            completions: Vec::new(),
        })
    }

    /// Makes the wake descriptor also readable while `fd` is readable.
    pub(super) fn merge(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.ring.merge(fd)
    }

    /// Prepares the next call of a task. Returns false if the task has to wait for a resource.
    fn start(&mut self, key: Key) -> bool {
        if self.ring.get(key).is_none_or(|(task, ..)| task.cancelled) {
            return true; // the request was cancelled while it waited
        }
        if !self.ring.has_room() || !self.equip(key) {
            return false;
        }
        let Some((task, ..)) = self.ring.get(key) else {
            return true;
        };
        let Some(next) = task.call() else {
            self.notifications += 1;
            self.shared.flusher.request_sync(&self.requester, key);
            return true;
        };
        self.ring.prepare(key, next.call, next.skip, next.offset, next.len)
    }

    /// Assigns a bounce buffer or the shared buffer of zeroes to a task, if its stage needs one.
    /// For a write, copies the data of the current part to the bounce buffer. Returns false if no
    /// bounce buffer is free.
    fn equip(&mut self, key: Key) -> bool {
        let Some((task, data, own)) = self.ring.get(key) else {
            return true;
        };
        match task.stage {
            Stage::Bounced { piece, moved } => {
                let fill = matches!(task.op(), Op::Write { .. }) && moved == 0;
                let (at, _) = task.piece();
                if let Some(own) = own {
                    return !fill || data.copy_to(at, own, 0, piece).is_some();
                }
                let Some(bounce) = self.bounce() else {
                    return false;
                };
                self.ring.set_buffer(key, bounce);
                self.equip(key)
            }
            Stage::Zeroes if own.is_none() => {
                self.ring.set_buffer(key, self.shared.zeroes.clone());
                true
            }
            _ => true,
        }
    }

    fn bounce(&mut self) -> Option<SharedBytes> {
        if let Some(bounce) = self.bounces.pop() {
            return Some(bounce);
        }
        if self.bounces_created == BOUNCES {
            return None;
        }
        let bounce = Mapping::anonymous(BOUNCE as u64).ok()?.bytes();
        self.bounces_created += 1;
        Some(bounce)
    }
}

impl FileQueue {
    /// Finds the pending request with this tag. Takes constant time, because a host may cancel many
    /// requests at once.
    fn find(&mut self, tag: u32) -> Option<Key> {
        let Ok(indexed) = self.by_tag.get(tag) else {
            return self.ring.tasks().find(|(_, task)| task.tag == tag).map(|(key, _)| key);
        };
        let key = indexed?;
        self.ring.get(key).is_some_and(|(task, ..)| task.tag == tag).then_some(key)
    }

    /// Starts requests that wait for resources (such as entries of the submission queue), as far as
    /// these are free.
    fn start_waiting(&mut self) {
        while let Some(slot) = self.waiting.first(WAITING) {
            if let Some(key) = self.ring.key(slot)
                && !self.start(key)
            {
                // The missing resource may be an entry of the submission queue. Submitting the
                // entries frees them.
                self.ring.submit();
                if !self.start(key) {
                    return;
                }
            }
            self.waiting.remove(slot);
        }
    }

    /// Starts a request that holds its range lock. If resources are missing, adds it to the waiting
    /// requests.
    fn begin(&mut self, key: Key) {
        if !self.waiting.is_empty(WAITING) || !self.start(key) {
            self.waiting.push_back(WAITING, key.index());
        } else {
            self.ring.submit_in_time();
        }
    }

    /// Executes a write on this thread, if the policy of inline writes allows that. Returns the
    /// result if the request has ended.
    fn write_inline(&mut self, key: Key) -> Option<Result<(), DiskError>> {
        let (task, ..) = self.ring.get(key)?;
        if task.stage != Stage::Straight || !matches!(task.op(), Op::Write { .. }) {
            return None;
        }
        let next = task.call()?;
        let moved = self.ring.try_inline(key, next.call, next.skip, next.offset, next.len)?;
        self.advance(key, moved)
    }

    /// Continues a task after its call has ended. Returns the result if the request has ended.
    fn advance(&mut self, key: Key, result: i32) -> Option<Result<(), DiskError>> {
        let shared = Arc::clone(&self.shared);
        let (task, data, own) = self.ring.get(key)?;
        if std::mem::take(&mut task.is_waiting) {
            self.begin(key);
            return None;
        }
        let mut step = task.outcome(result, &shared);
        if step == Step::Piece {
            let (at, len) = task.piece();
            let used = match (task.op(), own) {
                (Op::Read, Some(own)) => {
                    data.copy_from(at, own, 0, len).ok_or(DiskError::BadBuffer)
                }
                (Op::Compare, Some(own)) => compare(data, at, own, 0, len),
                _ => Ok(()),
            };
            step = match used {
                Ok(()) => task.finish_piece(),
                Err(error) => Step::End(Err(error)),
            };
        }
        match step {
            Step::End(result) => {
                if result == Err(DiskError::NoSpace) || shared.full.load(Ordering::Relaxed) != 0 {
                    shared.note_room(task.request(), result);
                }
                Some(result)
            }
            Step::Call | Step::Piece => {
                if !self.start(key) {
                    // A request that was started before waits at the head, before requests that
                    // were not.
                    self.waiting.push_front(WAITING, key.index());
                }
                None
            }
        }
    }

    /// Passes the result of a request that has ended to `done`, and releases its range and buffers.
    fn finish(
        &mut self,
        key: Key,
        result: Result<(), DiskError>,
        done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments),
    ) {
        if let Some(taken) = self.ring.remove(key) {
            if self.entered.leave(taken.task.request(), key) {
                self.notifications -= 1;
            }
            if let (Some(own), true) = (taken.own, taken.task.may_bounce()) {
                self.bounces.push(own);
            }
            done(taken.task.tag, result, taken.data);
        }
    }
}

impl Queue for FileQueue {
    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        if let Err(error) = request.check(&self.bounds, data) {
            return Submitted::Done(Err(error));
        }
        let task = match Task::new(tag, request, data, &self.shared) {
            Ok(task) => task,
            Err(result) => return Submitted::Done(result),
        };
        let key = self.ring.insert(task, data.take());
        self.by_tag.set(tag, key);
        if self.entered.enter(request, key) {
            if self.ring.writes_inline()
                && let Some(result) = self.write_inline(key)
            {
                self.finish(key, result, &mut |_, _, segments| *data = segments);
                return Submitted::Done(result);
            }
            self.begin(key);
        } else if let Some((task, ..)) = self.ring.get(key) {
            task.is_waiting = true;
            self.notifications += 1;
        }
        Submitted::Pending
    }

    fn may_wait(&mut self) {
        self.ring.may_wait();
    }

    fn commit(&mut self) {
        self.start_waiting();
        self.ring.submit();
    }

    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        let mut completions = std::mem::take(&mut self.completions);
        if self.notifications != 0 {
            self.ring.quieten();
        }
        self.ring.collect(&mut completions);
        // `quieten` comes first: a completion that `requester` gets after the `take` makes the
        // descriptor readable again.
        if self.notifications != 0 {
            let before = completions.len();
            self.requester.take(&mut completions);
            self.notifications -= completions.len() - before;
            self.ring.wake_others();
        }
        for (key, result) in completions.drain(..) {
            if let Some(result) = self.advance(key, result) {
                self.finish(key, result, done);
            }
        }
        self.completions = completions;
        while let Some(key) = self.cancelled.pop() {
            self.finish(key, Err(DiskError::Cancelled), done);
        }
        self.commit();
    }

    fn cancel(&mut self, tag: u32) {
        let Some(key) = self.find(tag) else { return };
        let Some((task, ..)) = self.ring.get(key) else { return };
        if std::mem::replace(&mut task.cancelled, true) {
            return;
        }
        if self.ring.is_busy(key) {
            self.ring.cancel(key);
        } else {
            self.waiting.remove(key.index());
            // The next call of `reap` ends the request. The wake-up makes the owner of the queue
            // call `reap`.
            if self.cancelled.is_empty() {
                self.ring.wake();
            }
            self.cancelled.push(key);
        }
    }

    fn pending(&self) -> usize {
        self.ring.len()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.ring.fd())
    }

    fn shares_wake_fd(&self) -> bool {
        self.ring.shares_fd()
    }
}

impl Drop for FileQueue {
    /// Prevents further wake-ups of the thread for this queue. Then the ring is dropped, which ends
    /// the requests.
    fn drop(&mut self) {
        self.requester.close();
        self.ring.quieten();
        self.ring.wake_others();
    }
}
