//! Held requests of one queue.

use super::policy::ErrorPolicy;
use super::stop_state::{Bell, StopState};
use shadowbell_disk::{
    Disk, DiskError, Metadata, Op, Queue, Request, Submitted, Tasks, merge, submit_any,
};
use shadowbell_memory::{AfterChange, Segments, View, ViewChange};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Request at the disk below, or held.
struct Task {
    request: Request,
    metadata: Option<Metadata>,
    /// Length of the buffer.
    len: usize,
    /// Buffer while the request is held.
    data: Segments,
    /// Error with which a held request ends if it is not submitted again.
    error: DiskError,
    is_held: bool,
    /// True if the caller has cancelled the request. It must then not be held when it fails.
    is_cancelled: bool,
}

pub(super) struct HoldingQueue {
    inner: Box<dyn Queue>,
    disk: Arc<dyn Disk>,
    policy: ErrorPolicy,
    state: Arc<StopState>,
    /// Wakes this queue after a resume, and when a held request has ended.
    bell: Arc<Bell>,
    /// Epoll descriptor that is readable while this queue's bell or the timer of the disk below is
    /// readable; `None` if the disk below has no timer.
    merged: Option<OwnedFd>,
    /// Requests in flight by their tags. Held ones are in the waiting list.
    tasks: Tasks<Task>,
    held: u64,
    /// Number of resumes of the disk when this queue last submitted its held requests again.
    resumes: u64,
    /// Current view of guest memory. `None` before its first change.
    view: Option<View>,
    notices: Vec<()>,
    /// Scratch buffer for completions of the disk below.
    ended: Vec<(u32, Result<(), DiskError>, Segments)>,
}

impl HoldingQueue {
    pub(super) fn new(
        inner: Box<dyn Queue>,
        disk: Arc<dyn Disk>,
        policy: ErrorPolicy,
        state: Arc<StopState>,
    ) -> io::Result<Self> {
        let bell = Arc::new(Bell::new()?);
        let merged = inner.timer_fd().map(|of_disk| merge([of_disk, bell.as_fd()])).transpose()?;
        Ok(Self {
            merged,
            inner,
            disk,
            policy,
            resumes: state.resumes(),
            state,
            bell,
            tasks: Tasks::default(),
            held: 0,
            view: None,
            notices: Vec::new(),
            ended: Vec::new(),
        })
    }

    /// True if a request that fails with `error` is held.
    ///
    /// Not held are durable writes (FUA) after a loss of data, because they fail until the disk is
    /// opened again, and requests whose data are not in the current DMA table.
    fn holds(&self, op: Op, error: DiskError, data: &mut Segments) -> bool {
        self.policy.holds(op, error)
            && !self.state.is_suspended()
            && !(is_durable(op) && self.disk.has_lost_writes())
            && self.is_mapped(data)
    }

    /// Moves `data` to the current DMA table, so that an earlier one is released. Returns false if
    /// the current table does not contain the data.
    fn is_mapped(&self, data: &mut Segments) -> bool {
        let change = self.view.as_ref().map(ViewChange::new);
        change.is_none_or(|mut change| data.move_to(&mut change) == AfterChange::Moved)
    }

    fn take_in(
        &mut self,
        tag: u32,
        request: &Request,
        metadata: Option<&Metadata>,
        data: &mut Segments,
    ) -> Submitted {
        let len = data.len();
        let submitted = submit_any(&mut *self.inner, tag, request, metadata, data);
        let error = match submitted {
            Submitted::Pending => None,
            Submitted::Done(Err(error)) if self.holds(request.op, error, data) => Some(error),
            Submitted::Done(_) => return submitted,
        };
        let key = self.tasks.insert(
            tag,
            Task {
                request: *request,
                metadata: metadata.copied(),
                len,
                data: Segments::new(),
                error: DiskError::Cancelled,
                is_held: false,
                is_cancelled: false,
            },
        );
        if let Some(error) = error {
            self.hold(key, error, data.take());
        }
        Submitted::Pending
    }

    fn hold(&mut self, key: u32, error: DiskError, data: Segments) {
        let Some(task) = self.tasks.get_mut(key) else { return };
        (task.data, task.error, task.is_held) = (data, error, true);
        self.tasks.wait(key);
        self.held += 1;
        self.state.hold(error, &self.bell);
    }

    /// Removes a request from the held ones.
    fn release(&mut self, key: u32) -> Option<&mut Task> {
        let task = self.tasks.get_mut(key).filter(|task| task.is_held)?;
        task.is_held = false;
        self.tasks.stop_waiting(key);
        self.held -= 1;
        let is_last = self.held == 0;
        self.state.release(1, is_last.then_some(&self.bell));
        if is_last {
            // A resume may have signalled just before. Nothing would handle that wake-up later.
            self.bell.take(&mut self.notices);
        }
        self.tasks.get_mut(key)
    }

    /// Ends a held request with `error` at the next [`reap`](Queue::reap).
    fn end_held(&mut self, key: u32, error: Option<DiskError>) {
        if let Some(task) = self.release(key) {
            task.error = error.unwrap_or(task.error);
            self.tasks.finish(key);
            self.bell.signal();
        }
    }

    /// Handles a request that has ended at the disk below: holds it, or returns its result.
    fn complete(
        &mut self,
        tag: u32,
        outcome: Result<(), DiskError>,
        mut data: Segments,
    ) -> Option<(u32, Result<(), DiskError>, Segments)> {
        let Some(key) = self.tasks.find(tag) else { return Some((tag, outcome, data)) };
        let task = self.tasks.get_mut(key)?;
        // A request cannot be repeated if the disk below has not returned its whole buffer: it may
        // have copied the data and released guest memory.
        let can_repeat = !task.is_cancelled && data.len() == task.len;
        let op = task.request.op;
        if let Err(error) = outcome
            && can_repeat
            && self.holds(op, error, &mut data)
        {
            self.hold(key, error, data);
            return None;
        }
        self.tasks.remove(key);
        Some((tag, outcome, data))
    }

    /// Submits each held request again. Requests that fail at once are held again.
    fn repeat(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        for _ in 0..self.held {
            let Some(key) = self.tasks.first_waiting() else { return };
            let tag = self.tasks.tag_of(key).unwrap_or_default();
            let Some(task) = self.release(key) else { return };
            let (request, metadata, mut data) = (task.request, task.metadata, task.data.take());
            if let Submitted::Done(outcome) =
                submit_any(&mut *self.inner, tag, &request, metadata.as_ref(), &mut data)
                && let Some((tag, outcome, data)) = self.complete(tag, outcome, data)
            {
                done(tag, outcome, data);
            }
        }
    }
}

/// True if the host may rely on durable data after the completion of this request.
fn is_durable(op: Op) -> bool {
    matches!(
        op,
        Op::Flush
            | Op::Write { fua: true }
            | Op::WriteZeroes { fua: true, .. }
            | Op::CompareAndWrite { fua: true }
            | Op::Append { fua: true }
    )
}

impl Queue for HoldingQueue {
    fn inner(&self) -> Option<&dyn Queue> {
        Some(&*self.inner)
    }

    fn inner_mut(&mut self) -> Option<&mut dyn Queue> {
        Some(&mut *self.inner)
    }

    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        self.take_in(tag, request, None, data)
    }

    fn submit_with_metadata(
        &mut self,
        tag: u32,
        request: &Request,
        metadata: &Metadata,
        data: &mut Segments,
    ) -> Submitted {
        self.take_in(tag, request, Some(metadata), data)
    }

    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        self.bell.take(&mut self.notices);
        let mut ended = std::mem::take(&mut self.ended);
        self.inner.reap(&mut |tag, outcome, data| ended.push((tag, outcome, data)));
        for (tag, outcome, data) in ended.drain(..) {
            if let Some((tag, outcome, data)) = self.complete(tag, outcome, data) {
                done(tag, outcome, data);
            }
        }
        self.ended = ended;
        if self.held != 0 && self.state.is_suspended() {
            while let Some(key) = self.tasks.first_waiting() {
                self.end_held(key, None);
            }
        }
        while let Some((tag, task)) = self.tasks.take_finished() {
            done(tag, Err(task.error), task.data);
        }
        let resumes = self.state.resumes();
        if std::mem::replace(&mut self.resumes, resumes) != resumes {
            self.repeat(done);
            // Requests to the disk below that this call has submitted must be started before it
            // returns.
            self.inner.commit();
        }
    }

    fn cancel(&mut self, tag: u32) {
        let Some(key) = self.tasks.find(tag) else { return self.inner.cancel(tag) };
        match self.tasks.get_mut(key) {
            Some(task) if task.is_held => self.end_held(key, Some(DiskError::Cancelled)),
            Some(task) => {
                task.is_cancelled = true;
                self.inner.cancel(tag);
            }
            None => {}
        }
    }

    fn memory_changed(&mut self, view: &View) {
        self.inner.memory_changed(view);
        self.view = Some(view.clone());
        let mut change = ViewChange::new(view);
        let keys: Vec<_> = self.tasks.keys().collect();
        for key in keys {
            let Some(task) = self.tasks.get_mut(key).filter(|task| task.is_held) else { continue };
            match task.data.move_to(&mut change) {
                AfterChange::Moved => {}
                AfterChange::Unmapped => self.end_held(key, Some(DiskError::BadBuffer)),
                AfterChange::Unknown => self.end_held(key, None),
            }
        }
    }

    fn pending(&self) -> usize {
        self.tasks.len()
    }

    fn held(&self) -> usize {
        self.held as usize
    }

    fn timer_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.merged.as_ref().map_or(self.bell.as_fd(), |merged| merged.as_fd()))
    }
}

impl Drop for HoldingQueue {
    fn drop(&mut self) {
        self.state.release(self.held, Some(&self.bell));
    }
}
