//! One thread's queue on a file.

use super::flusher::Asker;
use super::ranges::Entered;
use super::shared::FileShared;
use super::task::{BOUNCE, Stage, Step, Task};
use crate::bounds::Bounds;
use crate::compare::compare;
use crate::disk::Queue;
use crate::lists::Lists;
use crate::request::{DiskError, Op, Request, Submitted};
use crate::sys::{Key, Ring};
use crate::tasks::TagIndex;
use shadowbell_memory::{Mapping, Segments, SharedBytes};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bounce buffers that a queue has at most; requests that find none wait for one.
const BOUNCES: usize = 32;
/// The list of requests that wait.
const WAITING: u32 = 0;

pub(super) struct FileQueue {
    ring: Ring<Task>,
    /// Behind the ring: when it is gone, so is what was under way.
    entered: Entered,
    shared: Arc<FileShared>,
    by_tag: TagIndex<Key>,
    /// The slots of requests that wait for room in the ring or for a bounce buffer, in order.
    waiting: Lists,
    /// Requests that were cancelled while they waited, until they are reaped.
    cancelled: Vec<Key>,
    /// Bounce buffers that are free. They are made when they are first needed.
    bounces: Vec<SharedBytes>,
    bounces_made: usize,
    /// Completions on their way, kept for its room.
    completions: Vec<(Key, i32)>,
    bounds: Bounds,
    /// Syncs that the flusher was asked for, and turns that are waited for, which have no answer
    /// yet or only just.
    asked: usize,
    asker: Arc<Asker>,
}

impl FileQueue {
    pub(super) fn new(shared: Arc<FileShared>) -> io::Result<Self> {
        // One is there from the start (its pages come with its first use), so that a
        // request that waits for a bounce buffer waits for one that has one.
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
        let asker = Asker::new(ring.waker());
        Ok(Self {
            entered: Entered::new(shared.ranges.clone(), &asker),
            asker,
            ring,
            asked: 0,
            bounds: shared.info.bounds(),
            shared,
            by_tag: TagIndex::new(),
            waiting: Lists::default(),
            cancelled: Vec::new(),
            bounces: vec![first],
            bounces_made: 1,
            completions: Vec::new(),
        })
    }

    /// Has the wake descriptor readable when `fd` is, too. Of io_uring only.
    pub(super) fn watch(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.ring.watch(fd)
    }

    /// Prepares the task's next call. `false` if it has to wait for something.
    fn start(&mut self, key: Key) -> bool {
        if self.ring.get(key).is_none_or(|(task, ..)| task.cancelled) {
            return true; // cancelled while it waited: nothing to wait for
        }
        if !self.ring.has_room() || !self.equip(key) {
            return false;
        }
        let Some((task, ..)) = self.ring.get(key) else {
            return true;
        };
        let Some(next) = task.call() else {
            self.asked += 1;
            self.shared.flusher.ask(&self.asker, key);
            return true;
        };
        self.ring.prepare(key, next.call, next.skip, next.offset, next.len)
    }

    /// Sees to it that the task has the buffer of the queue's that its stage needs, filled if the
    /// piece is to be written. `false` if there is none now.
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
                self.ring.set_own(key, bounce);
                self.equip(key)
            }
            Stage::Zeroes if own.is_none() => {
                self.ring.set_own(key, self.shared.zeroes.clone());
                true
            }
            _ => true,
        }
    }

    fn bounce(&mut self) -> Option<SharedBytes> {
        if let Some(bounce) = self.bounces.pop() {
            return Some(bounce);
        }
        if self.bounces_made == BOUNCES {
            return None;
        }
        let bounce = Mapping::anonymous(BOUNCE as u64).ok()?.bytes();
        self.bounces_made += 1;
        Some(bounce)
    }
}

impl FileQueue {
    /// The pending request with this tag. Many are cancelled at once, so it is not searched for.
    fn find(&mut self, tag: u32) -> Option<Key> {
        let Ok(indexed) = self.by_tag.get(tag) else {
            return self.ring.tasks().find(|(_, task)| task.tag == tag).map(|(key, _)| key);
        };
        let key = indexed?;
        self.ring.get(key).is_some_and(|(task, ..)| task.tag == tag).then_some(key)
    }

    /// Starts what waits, as far as there is room.
    fn start_waiting(&mut self) {
        while let Some(slot) = self.waiting.first(WAITING) {
            if let Some(key) = self.ring.key(slot)
                && !self.start(key)
            {
                // The submission queue may be all that is full.
                self.ring.submit();
                if !self.start(key) {
                    return;
                }
            }
            self.waiting.remove(slot);
        }
    }

    /// Begins with a task whose turn it is.
    fn begin(&mut self, key: Key) {
        if !self.waiting.is_empty(WAITING) || !self.start(key) {
            self.waiting.push_back(WAITING, key.index());
        } else {
            self.ring.submit_in_time();
        }
    }

    /// Makes a write at once, if this thread is to. The result, if it has ended with that.
    fn write_here(&mut self, key: Key) -> Option<Result<(), DiskError>> {
        let (task, ..) = self.ring.get(key)?;
        if task.stage != Stage::Straight || !matches!(task.op(), Op::Write { .. }) {
            return None;
        }
        let next = task.call()?;
        let moved = self.ring.make_here(key, next.call, next.skip, next.offset, next.len)?;
        self.advance(key, moved)
    }

    /// Goes on with a task whose call has ended. The result, if the request has ended with it.
    fn advance(&mut self, key: Key, result: i32) -> Option<Result<(), DiskError>> {
        let shared = Arc::clone(&self.shared);
        let (task, data, own) = self.ring.get(key)?;
        if std::mem::take(&mut task.held) {
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
                Ok(()) => task.piece_done(),
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
                    // Ahead of those that have not begun.
                    self.waiting.push_front(WAITING, key.index());
                }
                None
            }
        }
    }

    /// Hands an ended request back.
    fn finish(
        &mut self,
        key: Key,
        result: Result<(), DiskError>,
        done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments),
    ) {
        if let Some(taken) = self.ring.remove(key) {
            if self.entered.leave(taken.task.request(), key) {
                self.asked -= 1;
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
            if self.ring.writes_here()
                && let Some(result) = self.write_here(key)
            {
                self.finish(key, result, &mut |_, _, segments| *data = segments);
                return Submitted::Done(result);
            }
            self.begin(key);
        } else if let Some((task, ..)) = self.ring.get(key) {
            task.held = true;
            self.asked += 1;
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
        if self.asked != 0 {
            self.ring.quieten();
        }
        self.ring.collect(&mut completions);
        // Only now: what is answered from here on makes the descriptor readable again.
        if self.asked != 0 {
            let before = completions.len();
            self.asker.take(&mut completions);
            self.asked -= completions.len() - before;
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
            // It ends in `reap`: the wake descriptor makes the caller call it.
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
}
