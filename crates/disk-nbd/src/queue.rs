//! Queue of an I/O thread on an export. It sends and receives without blocking.

use crate::connections::Handle;
use crate::link::Link;
use crate::subrequest::{Owner, Subrequest};
use crate::task::Task;
use crate::user::{SubrequestResult, User};
use parking_lot::Mutex;
use shadowbell_disk::{Bounds, DiskError, DiskInfo, Op, Queue, Request, Submitted, Tasks};
use shadowbell_memory::{AfterChange, Segments, View, ViewChange};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::task::Waker;

/// Maximum total length of a queue's subrequests in flight, in bytes. Further subrequests wait.
const BUFFERS: u64 = 16 << 20;
/// Maximum number of a queue's subrequests in flight.
const PARTS: u32 = 512;

pub(crate) struct NbdQueue {
    handle: Arc<Handle>,
    /// Index of the connection.
    link: usize,
    user: Arc<User>,
    /// Waker of this queue, called when an orphan that a request waits for has ended.
    waker: Waker,
    /// Value of `Orphans::ended` when blocked requests were last checked.
    orphans_ended: u64,
    /// Number of the queue on the connection.
    number: u32,
    bounds: Bounds,
    reads_zeroes: bool,
    /// Requests that have not ended. Those in the waiting list have subrequests that are not
    /// started yet.
    tasks: Tasks<Task>,
    /// Total length in bytes of the subrequests in flight, and their number.
    bytes: u64,
    parts: u32,
    /// Scratch buffer for completions.
    ended: Vec<SubrequestResult>,
}

impl NbdQueue {
    pub(crate) fn new(handle: Arc<Handle>, info: &DiskInfo) -> io::Result<Self> {
        let user = Arc::new(User::new()?);
        let connections = &handle.0;
        connections.shared.users.lock().push(Arc::downgrade(&user));
        // Selects the connection with the fewest queues.
        let users = |(_, link): &(usize, &Mutex<Link>)| link.lock().users();
        let link = connections.links.iter().enumerate().min_by_key(users).map_or(0, |(at, _)| at);
        let Some(place) = connections.links.get(link) else {
            return Err(io::Error::other("there is no connection"));
        };
        let number = place.lock().join(&user)?;
        Ok(Self {
            link,
            waker: Waker::from(Arc::clone(&user)),
            orphans_ended: 0,
            user,
            number,
            bounds: info.bounds(),
            reads_zeroes: info.discard,
            handle,
            tasks: Tasks::default(),
            bytes: 0,
            parts: 0,
            ended: Vec::new(),
        })
    }

    /// Receives and processes replies if `receives` is true. Then starts and sends further
    /// subrequests, up to the limits `BUFFERS` and `PARTS`.
    fn turn(&mut self, receives: bool) {
        let Self { handle, link, tasks, bytes, parts, ended, number, waker, .. } = self;
        let connections = &handle.0;
        let Some(link) = connections.links.get(*link) else { return };
        let mut link = link.lock();
        if receives {
            link.receive(&connections.shared, Some((*number, ended)));
            for SubrequestResult { task: key, at, len, result, data } in ended.drain(..) {
                *parts = parts.saturating_sub(1);
                *bytes = bytes.saturating_sub(u64::from(len));
                if let Some(task) = tasks.get_mut(key) {
                    task.ended(at, result, &data);
                    if task.is_finished(connections.part) {
                        tasks.finish(key);
                    } else if task.next(connections.part).is_some() {
                        // The write has ended; its flush is started next.
                        tasks.wait(key);
                    }
                }
                link.recycle(data);
            }
        }
        let orphans = &connections.shared.orphans;
        if tasks.has_blocked() {
            let orphans_ended = orphans.ended();
            if std::mem::replace(&mut self.orphans_ended, orphans_ended) != orphans_ended {
                tasks.unblock_all();
            }
        }
        while let Some(key) = tasks.first_waiting() {
            let Some(task) = tasks.get_mut(key) else { break };
            let next = task.next(connections.part);
            if !orphans.is_empty() && task.is_blocked(next.as_ref(), orphans, waker) {
                tasks.block(key);
                continue;
            }
            let Some(next) = next else {
                if task.is_finished(connections.part) {
                    tasks.finish(key);
                }
                tasks.stop_waiting(key);
                continue;
            };
            if *parts != 0 && (*parts >= PARTS || *bytes + u64::from(next.len) > BUFFERS) {
                break;
            }
            let len = if next.has_data { next.len as usize } else { 0 };
            let mut buffer = link.buffer(len);
            if let Err(error) = task.fill(next.at, &mut buffer) {
                link.recycle(buffer);
                task.outcome = Err(error);
                continue;
            }
            task.began(&next);
            *parts += 1;
            *bytes += u64::from(next.len);
            let mut part = Subrequest::new(next.command, next.flags, next.offset, next.len, buffer);
            part.owner = Some(Owner { user: *number, task: key, at: next.at });
            link.push(part);
        }
        link.pump(&connections.shared, Some((*number, ended)));
    }

    /// Ends a request early with `error`. The results of its sent reads will be ignored, and its
    /// sent writes become orphans. If there are too many orphans, the request ends only after its
    /// sent writes.
    fn end_early(&mut self, key: u32, error: DiskError) {
        let connections = &self.handle.0;
        let (Some(task), Some(link)) = (self.tasks.get_mut(key), connections.links.get(self.link))
        else {
            return;
        };
        let mut link = link.lock();
        let (count, bytes) = link.cancel(self.number, key, &connections.shared);
        drop(link);
        self.parts = self.parts.saturating_sub(count);
        self.bytes = self.bytes.saturating_sub(bytes);
        if count == 0 && task.next(connections.part).is_none() && !task.is_barrier {
            // The request cannot be cancelled: it has already ended, or all of its writes are in
            // flight and cannot become orphans.
            return;
        }
        task.in_flight = task.in_flight.saturating_sub(count);
        task.outcome = task.outcome.and(Err(error));
        let is_finished = task.is_finished(connections.part);
        self.tasks.stop_waiting(key);
        if is_finished && self.tasks.finish(key) {
            // The next call of `reap` ends the request. The signal makes the I/O thread call
            // `reap`.
            self.user.completions.signal();
        }
    }
}

impl Queue for NbdQueue {
    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        if let Err(error) = request.check(&self.bounds, data) {
            return Submitted::Done(Err(error));
        }
        let connections = &self.handle.0;
        let is_durable = matches!(
            request.op,
            Op::Flush | Op::Write { fua: true } | Op::WriteZeroes { fua: true, .. }
        );
        if is_durable && connections.shared.unflushed.lock().has_lost_writes {
            return Submitted::Done(Err(DiskError::Io(libc::EIO)));
        }
        let mut task = match Task::new(request, &connections.first, self.reads_zeroes) {
            Ok(task) => task,
            Err(Ok(())) if request.op == Op::Flush && !connections.shared.orphans.is_empty() => {
                Task::barrier()
            }
            Err(result) => return Submitted::Done(result),
        };
        task.data = data.take();
        let key = self.tasks.insert(tag, task);
        self.tasks.wait(key);
        Submitted::Pending
    }

    fn commit(&mut self) {
        if self.tasks.first_waiting().is_some() {
            self.turn(false);
            // No reply wakes the I/O thread for requests that end here, for example because the
            // connection is lost during sending.
            if !self.ended.is_empty() || self.tasks.has_finished() {
                self.user.completions.signal();
            }
        }
    }

    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        loop {
            self.user.completions.take(&mut self.ended);
            self.turn(true);
            // If the connection is lost during sending, subrequests may end. The next iteration
            // processes them.
            if self.ended.is_empty() {
                break;
            }
        }
        while let Some((tag, task)) = self.tasks.take_finished() {
            done(tag, task.outcome, task.data);
        }
    }

    fn cancel(&mut self, tag: u32) {
        if let Some(key) = self.tasks.find(tag) {
            self.end_early(key, DiskError::Cancelled);
        }
    }

    fn memory_changed(&mut self, view: &View) {
        let mut change = ViewChange::new(view);
        let keys: Vec<_> = self.tasks.keys().collect();
        for key in keys {
            let state = self.tasks.get_mut(key).map(|task| task.change_memory(&mut change));
            if state == Some(AfterChange::Unmapped) {
                self.end_early(key, DiskError::BadBuffer);
            }
        }
    }

    fn pending(&self) -> usize {
        self.tasks.len()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.user.as_fd())
    }

    fn wakes_by_edges(&self) -> bool {
        true
    }
}

impl Drop for NbdQueue {
    fn drop(&mut self) {
        if let Some(link) = self.handle.0.links.get(self.link) {
            link.lock().leave(self.number, &self.handle.0.shared);
        }
    }
}
