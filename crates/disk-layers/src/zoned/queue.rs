//! Queue of one thread on a zoned disk.

use super::manage::Reset;
use super::task::{Kind, Stage, Task};
use super::zones::{Piece, ZoneSet};
use crate::metadata::{Bell, granted};
use shadowbell_disk::{
    Bounds, DiskError, DiskInfo, Op, Queue, Request, Submitted, Tasks, Zones, merge,
};
use shadowbell_memory::{AfterChange, Segments, View, ViewChange};
use shadowbell_spec::zns::ZoneAction;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Maximum number of steps of a reset in one call of `advance`. It bounds the time in which a reset
/// of all zones delays other requests.
const AT_ONCE: u32 = 64;
/// Tag of requests to the disk below that belong to no request of the host.
const INTERNAL: u32 = u32::MAX;
/// Maximum number of free segment lists to keep.
const MAX_POOLED: usize = 16;

pub(super) struct ZonedQueue {
    inner: Box<dyn Queue>,
    zones: Arc<ZoneSet>,
    bounds: Bounds,
    discards: bool,
    /// True if a FUA write is followed by a flush of the disk below, because FUA alone would not
    /// make the write pointer in the zone table durable.
    syncs: bool,
    read_only: bool,
    bell: Arc<Bell>,
    /// Readable while the [`Bell`] or the timer of the disk below is readable.
    timer: Option<OwnedFd>,
    tasks: Tasks<Task>,
    serial: u64,
    replays: bool,
    /// Offsets at which completed Zone Appends have written their data, by the tag of the request.
    appended_at: HashMap<u32, u64>,
    pooled: Vec<Segments>,
    ended: Vec<(u32, Result<(), DiskError>, Segments)>,
}

impl ZonedQueue {
    pub(super) fn new(
        inner: Box<dyn Queue>,
        zones: Arc<ZoneSet>,
        info: &DiskInfo,
    ) -> io::Result<Self> {
        let bell = Arc::new(Bell::new()?);
        let both = |timer| merge([timer, bell.as_fd()]);
        let timer = inner.timer_fd().map(both).transpose()?;
        zones.enter();
        Ok(Self {
            timer,
            inner,
            zones,
            bounds: info.bounds(),
            discards: info.discard,
            syncs: info.volatile_cache,
            read_only: info.read_only,
            bell,
            tasks: Tasks::default(),
            serial: 0,
            replays: false,
            appended_at: HashMap::new(),
            pooled: Vec::new(),
            ended: Vec::new(),
        })
    }

    /// Creates the request to the disk below for a range of the zoned disk: it adds the offset of
    /// the data.
    fn below(&self, op: Op, offset: u64, len: u64) -> Request {
        Request { op, offset: self.zones.layout().data + offset, len }
    }

    /// Submits a request of this kind to the disk below. Returns its result if it completes inline.
    fn submit_below(
        &mut self,
        (tag, kind): (u32, Kind),
        below: &Request,
        data: &mut Segments,
    ) -> Submitted {
        self.serial += 1;
        let key = self.tasks.insert(tag, Task::new(kind, self.serial));
        match self.inner.submit(key, below, data) {
            Submitted::Pending => Submitted::Pending,
            Submitted::Done(outcome) => {
                if let Kind::Write { zone, flush } = kind {
                    self.zones.end_write(zone);
                    if flush && outcome.is_ok() {
                        return self.flush(key, data.take(), data);
                    }
                }
                self.tasks.remove(key);
                Submitted::Done(outcome)
            }
        }
    }

    /// Starts the flush after a FUA write. This flush makes the data and the write pointer durable.
    /// `own` is the buffer of the task. If the flush completes inline, the buffer is returned in
    /// `data`.
    fn flush(&mut self, key: u32, own: Segments, data: &mut Segments) -> Submitted {
        if let Some(task) = self.tasks.get_mut(key) {
            (task.kind, task.data) = (Kind::Flush, own);
        }
        let request = Request { op: Op::Flush, offset: 0, len: 0 };
        let submitted = self.inner.submit(key, &request, &mut Segments::new());
        if submitted != Submitted::Pending
            && let Some((_, task)) = self.tasks.remove(key)
        {
            *data = task.data;
        }
        submitted
    }

    /// Submits a write at byte `offset`, which is in zone `zone`.
    fn write(
        &mut self,
        (tag, request): (u32, &Request),
        (zone, offset): (usize, u64),
        data: &mut Segments,
    ) -> Submitted {
        let fua = match request.op {
            Op::Write { fua } | Op::Append { fua } | Op::WriteZeroes { fua, .. } => fua,
            _ => false,
        };
        let fua_below = fua && !self.syncs;
        let op = match request.op {
            Op::WriteZeroes { deallocate, .. } => Op::WriteZeroes { deallocate, fua: fua_below },
            _ => Op::Write { fua: fua_below },
        };
        let below = self.below(op, offset, request.len);
        let kind = Kind::Write { zone, flush: fua && self.syncs };
        self.submit_below((tag, kind), &below, data)
    }

    /// Executes Read, Compare and Verify. Written parts are read from the disk below; the rest is
    /// zero.
    fn read(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        // A Verify may come from a device self-test, which may verify a range that spans several
        // zones.
        let across = self.zones.format().read_across || request.op == Op::Verify;
        let pieces = match self.zones.written(request.offset, request.len, across) {
            Ok(pieces) => pieces,
            Err(error) => return Submitted::Done(Err(error)),
        };
        if let Err(error) = Self::gaps(request, &pieces, data) {
            return Submitted::Done(Err(error));
        }
        match pieces[..] {
            [] => Submitted::Done(Ok(())),
            [Piece { offset, len }] if offset == request.offset => {
                let below = self.below(request.op, offset, len);
                self.submit_below((tag, Kind::Plain), &below, data)
            }
            _ => self.read_parts(tag, request, &pieces, data),
        }
    }

    /// Handles the parts of a request that were never written: a Read zeroes them in the buffer,
    /// and a Compare compares the buffer with zeroes.
    fn gaps(request: &Request, pieces: &[Piece], data: &Segments) -> Result<(), DiskError> {
        let end = request.offset + request.len;
        let starts = pieces.iter().map(|piece| piece.offset).chain([end]);
        let ends = pieces.iter().map(|piece| piece.offset + piece.len);
        for (from, to) in std::iter::once(request.offset).chain(ends).zip(starts) {
            let (at, len) = ((from - request.offset) as usize, (to - from) as usize);
            match request.op {
                Op::Read => data.fill(at, len, 0).ok_or(DiskError::BadBuffer)?,
                Op::Compare => compare_with_zeroes(data, at, len)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn read_parts(
        &mut self,
        tag: u32,
        request: &Request,
        pieces: &[Piece],
        data: &mut Segments,
    ) -> Submitted {
        self.serial += 1;
        let mut task = Task::new(Kind::Parts, self.serial);
        task.data = data.take();
        let parent = self.tasks.insert(tag, task);
        for piece in pieces {
            let mut part = self.pooled.pop().unwrap_or_default();
            let (at, len) = ((piece.offset - request.offset) as usize, piece.len as usize);
            let below = self.below(request.op, piece.offset, piece.len);
            let Some(task) = self.tasks.get_mut(parent) else { break };
            let takes = request.op != Op::Verify;
            if takes && task.data.select((at, len), 0, 1, &mut part).is_none() {
                task.outcome = Err(DiskError::BadBuffer);
                break;
            }
            let own = (INTERNAL, Kind::Part { parent });
            match self.submit_below(own, &below, &mut part) {
                Submitted::Pending => {
                    if let Some(task) = self.tasks.get_mut(parent) {
                        task.left += 1;
                    }
                }
                Submitted::Done(outcome) => {
                    self.recycle_list(part);
                    if let Some(task) = self.tasks.get_mut(parent) {
                        task.outcome = task.outcome.and(outcome);
                    }
                }
            }
        }
        self.finish_now(parent, data)
    }

    /// Ends the task inline, unless parts of it are in flight.
    fn finish_now(&mut self, key: u32, data: &mut Segments) -> Submitted {
        if self.tasks.get_mut(key).is_some_and(|task| task.left != 0) {
            return Submitted::Pending;
        }
        match self.tasks.remove(key) {
            Some((_, task)) => {
                *data = task.data;
                Submitted::Done(task.outcome)
            }
            None => Submitted::Done(Err(DiskError::BadBuffer)),
        }
    }

    fn recycle_list(&mut self, mut list: Segments) {
        if self.pooled.len() < MAX_POOLED {
            list.clear();
            self.pooled.push(list);
        }
    }

    /// Executes a Zone Send Action on one zone, or on all zones whose state permits it.
    fn manage(
        &mut self,
        (tag, request): (u32, &Request),
        (action, all): (ZoneAction, bool),
        data: &mut Segments,
    ) -> Submitted {
        if self.read_only {
            return Submitted::Done(Err(DiskError::ReadOnly));
        }
        match action {
            ZoneAction::Reset => {}
            ZoneAction::SetExtension => {
                let mut bytes = vec![0; self.zones.format().extension_bytes()];
                let read = data.read_into(0, &mut bytes).ok_or(DiskError::BadBuffer);
                let done = read.and_then(|()| self.zones.set_extension(request.offset, &bytes));
                return Submitted::Done(if all { Err(DiskError::InvalidZone) } else { done });
            }
            _ if all => return Submitted::Done(self.zones.manage_all(action)),
            _ => return Submitted::Done(self.zones.manage(action, request.offset)),
        }
        let first = if all { self.zones.next_resettable(0) } else { Some(request.offset) };
        let Some(at) = first else { return Submitted::Done(Ok(())) };
        self.serial += 1;
        let kind = Kind::Reset { at, all, stage: Stage::Asking };
        let mut task = Task::new(kind, self.serial);
        task.data = data.take();
        let key = self.tasks.insert(tag, task);
        if self.advance(key) { self.finish_now(key, data) } else { Submitted::Pending }
    }

    /// Continues a reset by a bounded number of steps. Returns true if the reset has ended.
    fn advance(&mut self, key: u32) -> bool {
        for _ in 0..AT_ONCE {
            let Some(task) = self.tasks.get_mut(key) else { return false };
            let Kind::Reset { at, all, stage } = task.kind else { return false };
            let serial = task.serial;
            match stage {
                Stage::Asking if task.outcome.is_err() => return true,
                Stage::Asking => match self.zones.begin_reset(at, (&self.bell, serial)) {
                    Err(error) => {
                        task.outcome = Err(error);
                        return true;
                    }
                    Ok(Reset::Wait) => return false,
                    Ok(Reset::Discard(len)) => {
                        let to = if self.discards { at + len } else { at };
                        let stage = Stage::Discarding { from: at, to };
                        task.kind = Kind::Reset { at, all, stage };
                    }
                    Ok(Reset::Finished) => {
                        let size = self.zones.format().size;
                        let next = all.then(|| self.zones.next_resettable(at + size)).flatten();
                        let Some(at) = next else { return true };
                        task.kind = Kind::Reset { at, all, stage: Stage::Asking };
                    }
                },
                Stage::Discarding { from, to } if from < to && task.outcome.is_ok() => {
                    let len = self.inner.longest_inline().min(to - from);
                    let below = self.below(Op::Discard, from, len);
                    match self.inner.submit(key, &below, &mut Segments::new()) {
                        Submitted::Pending => return false,
                        Submitted::Done(outcome) => self.discarded(key, outcome),
                    }
                    // The next part is discarded in a later pass, so that other requests are not
                    // delayed.
                    self.bell.push(serial);
                    return false;
                }
                Stage::Discarding { .. } => {
                    self.zones.end_reset(at, task.outcome.is_ok());
                    task.kind = Kind::Reset { at, all, stage: Stage::Asking };
                }
            }
        }
        if let Some(task) = self.tasks.get_mut(key) {
            self.bell.push(task.serial);
        }
        false
    }

    /// Records the result of a discard of one part of a zone's data.
    fn discarded(&mut self, key: u32, outcome: Result<(), DiskError>) {
        let longest = self.inner.longest_inline();
        let Some(task) = self.tasks.get_mut(key) else { return };
        task.outcome = task.outcome.and(outcome);
        if let Kind::Reset { at, all, stage: Stage::Discarding { from, to } } = task.kind {
            let from = from.saturating_add(longest.min(to - from));
            task.kind = Kind::Reset { at, all, stage: Stage::Discarding { from, to } };
        }
    }

    /// Processes a completion of the disk below. Returns the task if it has ended.
    fn complete_below(
        &mut self,
        key: u32,
        outcome: Result<(), DiskError>,
        mut data: Segments,
    ) -> Option<(u32, Result<(), DiskError>, Segments)> {
        let task = self.tasks.get_mut(key)?;
        match task.kind {
            Kind::Plain => self.tasks.remove(key).map(|(tag, _)| (tag, outcome, data)),
            Kind::Flush => self.tasks.remove(key).map(|(tag, task)| (tag, outcome, task.data)),
            Kind::Write { zone, flush } => {
                let tag = self.tasks.tag_of(key)?;
                self.zones.end_write(zone);
                if !flush || outcome.is_err() {
                    self.tasks.remove(key);
                    return Some((tag, outcome, data));
                }
                match self.flush(key, data.take(), &mut data) {
                    Submitted::Pending => None,
                    Submitted::Done(outcome) => Some((tag, outcome, data)),
                }
            }
            Kind::Part { parent } => {
                self.tasks.remove(key);
                self.recycle_list(data);
                let whole = self.tasks.get_mut(parent)?;
                whole.left = whole.left.saturating_sub(1);
                whole.outcome = whole.outcome.and(outcome);
                if whole.left != 0 {
                    return None;
                }
                self.tasks.remove(parent).map(|(tag, task)| (tag, task.outcome, task.data))
            }
            Kind::Reset { .. } => {
                self.discarded(key, outcome);
                self.reset_continues(key)
            }
            Kind::Parts => None,
        }
    }

    fn reset_continues(&mut self, key: u32) -> Option<(u32, Result<(), DiskError>, Segments)> {
        if !self.advance(key) {
            return None;
        }
        self.tasks.remove(key).map(|(tag, task)| (tag, task.outcome, task.data))
    }
}

/// Compares a part of the data with zeroes.
fn compare_with_zeroes(data: &Segments, mut at: usize, mut len: usize) -> Result<(), DiskError> {
    let mut chunk = [0; 4096];
    while len != 0 {
        let part = len.min(chunk.len());
        let chunk = chunk.get_mut(..part).ok_or(DiskError::BadBuffer)?;
        data.read_into(at, chunk).ok_or(DiskError::BadBuffer)?;
        if chunk.iter().any(|byte| *byte != 0) {
            return Err(DiskError::CompareFailed);
        }
        (at, len) = (at + part, len - part);
    }
    Ok(())
}

impl Queue for ZonedQueue {
    fn inner(&self) -> Option<&dyn Queue> {
        Some(&*self.inner)
    }

    fn inner_mut(&mut self) -> Option<&mut dyn Queue> {
        Some(&mut *self.inner)
    }

    fn compares_and_writes(&self) -> bool {
        false
    }

    // The disk below must not get hints, because they contain offsets of this disk.
    fn uses_prefetch_hints(&self) -> bool {
        false
    }

    fn prefetch_hint(&self, _: Op, _: u64, _: usize, _: u32) {}

    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        if let Op::Zone { action, all } = request.op {
            return self.manage((tag, request), (action, all), data);
        }
        if let Err(error) = request.check(&self.bounds, data) {
            return Submitted::Done(Err(error));
        }
        let placed = match request.op {
            Op::Read | Op::Compare | Op::Verify => return self.read(tag, request, data),
            // A discard is ignored, because written blocks of a zone cannot change before a reset.
            Op::Discard => return Submitted::Done(Ok(())),
            Op::CompareAndWrite { .. } => return Submitted::Done(Err(DiskError::Unsupported)),
            Op::Flush => return self.submit_below((tag, Kind::Plain), request, data),
            Op::Append { .. } => {
                let begun = self.zones.begin_append(request.offset, request.len);
                if let Ok((_, at)) = begun {
                    self.appended_at.insert(tag, at);
                }
                begun
            }
            _ => {
                let begun = self.zones.begin_write(request.offset, request.len, self.replays);
                begun.map(|zone| (zone, request.offset))
            }
        };
        match placed {
            Ok(place) => self.write((tag, request), place, data),
            Err(error) => Submitted::Done(Err(error)),
        }
    }

    fn zones(&self) -> Option<&dyn Zones> {
        Some(&*self.zones)
    }

    fn appended(&mut self, tag: u32) -> Option<u64> {
        self.appended_at.remove(&tag)
    }

    fn set_replays(&mut self, replays: bool) {
        self.replays = replays;
    }

    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        let mut ended = std::mem::take(&mut self.ended);
        self.inner.reap(&mut |key, outcome, data| ended.push((key, outcome, data)));
        for (key, outcome, data) in ended.drain(..) {
            if let Some((tag, outcome, data)) = self.complete_below(key, outcome, data) {
                done(tag, outcome, data);
            }
        }
        self.ended = ended;
        for serial in granted(&self.bell) {
            let keys: Vec<_> = self.tasks.keys().collect();
            let is_it =
                |task: &mut Task| task.serial == serial && matches!(task.kind, Kind::Reset { .. });
            let found = keys.into_iter().find(|key| self.tasks.get_mut(*key).is_some_and(is_it));
            if let Some((tag, outcome, data)) = found.and_then(|key| self.reset_continues(key)) {
                done(tag, outcome, data);
            }
        }
        // Requests to the disk below that this call has submitted must be started before it
        // returns.
        self.inner.commit();
    }

    fn cancel(&mut self, tag: u32) {
        let Some(key) = self.tasks.find(tag) else { return };
        let Some(task) = self.tasks.get_mut(key) else { return };
        match task.kind {
            Kind::Reset { stage: Stage::Asking, .. } => {
                // The bell notifies the queue: its next `reap` ends the request with this outcome.
                task.outcome = Err(DiskError::Cancelled);
                self.bell.push(task.serial);
            }
            Kind::Parts => {
                let parts: Vec<_> = self.tasks.keys().collect();
                for part in parts {
                    let kind = self.tasks.get_mut(part).map(|task| task.kind);
                    if kind == Some(Kind::Part { parent: key }) {
                        self.inner.cancel(part);
                    }
                }
            }
            Kind::Reset { stage: Stage::Discarding { .. }, .. } => {
                // The zones that follow are not reset either. The discard may be held by the error
                // policy, so it is cancelled too.
                task.outcome = Err(DiskError::Cancelled);
                self.inner.cancel(key);
            }
            _ => self.inner.cancel(key),
        }
    }

    fn memory_changed(&mut self, view: &View) {
        self.pooled.clear();
        self.inner.memory_changed(view);
        let mut change = ViewChange::new(view);
        let keys: Vec<_> = self.tasks.keys().collect();
        for key in keys {
            let Some(task) = self.tasks.get_mut(key) else { continue };
            if task.data.move_to(&mut change) == AfterChange::Unmapped {
                task.outcome = task.outcome.and(Err(DiskError::BadBuffer));
            }
        }
    }

    fn pending(&self) -> usize {
        self.tasks.len()
    }

    fn timer_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.timer.as_ref().map_or(self.bell.as_fd(), |timer| timer.as_fd()))
    }
}

impl Drop for ZonedQueue {
    fn drop(&mut self) {
        self.zones.cancel_waits(&self.bell);
        let keys: Vec<_> = self.tasks.keys().collect();
        for key in keys {
            match self.tasks.get_mut(key).map(|task| task.kind) {
                Some(Kind::Write { zone, .. }) => self.zones.end_write(zone),
                Some(Kind::Reset { at, stage: Stage::Discarding { .. }, .. }) => {
                    self.zones.end_reset(at, false);
                }
                _ => {}
            }
        }
        self.zones.leave();
    }
}
