//! Queue of one thread on a disk with metadata.

use super::cache::Cache;
use super::checks::Scratch;
use super::layout::{Layout, Location};
use super::locks::{Bell, Locks, granted};
use super::task::{Stage, Task, Transfer};
use shadowbell_disk::{
    Bounds, DiskError, DiskInfo, Metadata, MetadataBuffer, Op, Queue, Request, Submitted, Tasks,
    merge,
};
use shadowbell_memory::{AfterChange, Mapping, Segments, SharedBytes, View, ViewChange};
use shadowbell_spec::nvm::PRINFO_PRACT;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Size of a buffer for stored metadata, and maximum number of free buffers to keep.
const BUFFER_LEN: usize = 64 << 10;
const MAX_POOLED: usize = 64;
/// Longest request without data transfer (such as Write Zeroes) to submit at once, in bytes. The
/// queue's thread processes the metadata of the whole range, and its data if they are checked, so a
/// longer request would delay other requests.
const LONGEST: u64 = 1 << 20;
/// Maximum number of metadata bytes that are written without the rest of their block, if the disk
/// below supports such writes.
const MAX_BYTE_WRITE: usize = 512;

pub(super) struct MetadataQueue {
    inner: Box<dyn Queue>,
    layout: Layout,
    bounds: Bounds,
    discards: bool,
    of_all: OfAll,
    /// Readable while the [`Bell`] or the timer of the disk below is readable.
    timer: Option<OwnedFd>,
    tasks: Tasks<Task>,
    serial: u64,
    buffers: Vec<SharedBytes>,
    lists: Vec<Segments>,
    scratch: Box<Scratch>,
    /// Scratch buffer for completions of the disk below.
    ended: Vec<(u32, Result<(), DiskError>, Segments)>,
}

/// State that requests share. Must be dropped after the queue of the disk below: until that drop,
/// requests that use the locks may be in flight.
struct OfAll {
    layout: Layout,
    locks: Arc<Locks>,
    cache: Arc<Cache>,
    bell: Arc<Bell>,
}

impl Drop for OfAll {
    fn drop(&mut self) {
        for claim in self.locks.writes_of(&self.bell) {
            let Range { start, end } = claim.blocks;
            self.cache.was_written(&self.layout.locate(start, end - start), false, None);
        }
        self.locks.leave_all(&self.bell);
    }
}

/// Tag for a request to the disk below. The request transfers the data or the metadata of a task.
fn tag_of(key: u32, is_metadata: bool) -> u32 {
    key << 1 | u32::from(is_metadata)
}

impl MetadataQueue {
    pub(super) fn new(
        inner: Box<dyn Queue>,
        layout: Layout,
        info: &DiskInfo,
        (locks, cache): (Arc<Locks>, Arc<Cache>),
    ) -> io::Result<Self> {
        let bell = Arc::new(Bell::new()?);
        let both = |timer| merge([timer, bell.as_fd()]);
        Ok(Self {
            timer: inner.timer_fd().map(both).transpose()?,
            inner,
            layout,
            bounds: info.bounds(),
            discards: info.discard,
            of_all: OfAll { layout, locks, cache, bell },
            tasks: Tasks::default(),
            serial: 0,
            buffers: Vec::new(),
            lists: Vec::new(),
            scratch: Scratch::new(),
            ended: Vec::new(),
        })
    }

    fn check(
        &self,
        request: &Request,
        metadata: &Metadata,
        data: &Segments,
    ) -> Result<(), DiskError> {
        request.check(&self.bounds, data)?;
        // Data and metadata are separate writes, so a compare and write would not be atomic.
        if matches!(request.op, Op::CompareAndWrite { .. }) {
            return Err(DiskError::Unsupported);
        }
        let takes = matches!(request.op, Op::Read | Op::Write { .. } | Op::Compare);
        let blocks = request.len / u64::from(self.layout.block_size);
        let more = blocks * u64::from(self.layout.format.size);
        let has = metadata.buffer != MetadataBuffer::None;
        if takes && has && (data.len() as u64) < request.len + more {
            return Err(DiskError::BadBuffer);
        }
        Ok(())
    }

    /// Default metadata parameters, for a request that has none. Protection information is
    /// generated (PRACT) and not checked. For a discard, none is generated.
    fn unsaid(&self, request: &Request) -> Metadata {
        let mut metadata = Metadata::default();
        if request.op != Op::Discard {
            metadata.fields.prinfo = PRINFO_PRACT;
        }
        metadata.fields.ref_tag = request.offset / u64::from(self.layout.block_size);
        metadata
    }

    fn memory(&mut self, len: usize) -> Result<SharedBytes, DiskError> {
        if len <= BUFFER_LEN
            && let Some(buffers) = self.buffers.pop()
        {
            return Ok(buffers);
        }
        let mapping = Mapping::anonymous(len.max(BUFFER_LEN) as u64);
        mapping.map(|mapping| mapping.bytes()).map_err(|_| DiskError::Io(12))
    }

    /// Starts a request that has the locks of its blocks. Returns true if the request has ended.
    fn begin(&mut self, key: u32) -> bool {
        let Some(task) = self.tasks.get_mut(key) else { return false };
        let (transfer, location) = (task.transfer(&self.layout), task.location);
        // The request was cancelled while it waited for its blocks.
        if task.outcome.is_err() {
            return true;
        }
        if transfer == Transfer::Plain {
            return self.move_all(key, transfer);
        }
        let memory = self.memory((location.to - location.from) as usize);
        let Some(task) = self.tasks.get_mut(key) else { return false };
        match memory {
            Ok(memory) => task.stored = Some(memory),
            Err(error) => {
                task.outcome = Err(error);
                return true;
            }
        }
        let writes = matches!(transfer, Transfer::Write | Transfer::Zero);
        let needs_neighbours = writes && location.has_neighbours() && !self.writes_bytes(&location);
        if needs_neighbours && !self.is_cached(key, true) {
            let Some(task) = self.tasks.get_mut(key) else { return false };
            task.stage = Stage::Reading;
            self.submit_metadata(key, Op::Read);
            return self.advance(key);
        }
        self.move_all(key, transfer)
    }

    /// True if these metadata are written without the rest of their block.
    fn writes_bytes(&self, location: &Location) -> bool {
        location.len <= MAX_BYTE_WRITE && self.inner.writes_bytes()
    }

    /// Loads the stored metadata from the cache. Returns false if they are not cached and have to
    /// be read.
    fn is_cached(&mut self, key: u32, neighbours: bool) -> bool {
        let Some(task) = self.tasks.get_mut(key) else { return false };
        let Some(stored) = &task.stored else { return false };
        self.of_all.cache.load(&task.location, neighbours, stored)
    }

    /// Continues a request, unless it has requests in flight at the disk below. Returns true if the
    /// request has ended.
    fn advance(&mut self, key: u32) -> bool {
        let Some(task) = self.tasks.get_mut(key) else { return false };
        if task.left != 0 {
            return false;
        }
        let transfer = task.transfer(&self.layout);
        if let Some(versions) = task.versions.take()
            && let Some(stored) = &task.stored
            && task.outcome.is_ok()
        {
            self.of_all.cache.was_read(&task.location, &versions, stored);
        }
        match task.stage {
            Stage::Waiting => false,
            Stage::Reading if task.outcome.is_ok() => self.move_all(key, transfer),
            Stage::Reading => true,
            Stage::Moving => {
                if task.outcome.is_ok() {
                    let scratch = &mut self.scratch;
                    let blocks = |scratch| task.blocks(&self.layout, scratch);
                    task.outcome = match transfer {
                        Transfer::Read => blocks(scratch).and_then(|blocks| blocks.read()),
                        Transfer::Compare => blocks(scratch).and_then(|blocks| blocks.compare()),
                        Transfer::Plain | Transfer::Write | Transfer::Zero => Ok(()),
                    };
                }
                true
            }
        }
    }

    /// Starts the transfer of data and metadata. Returns true if the request has ended.
    fn move_all(&mut self, key: u32, transfer: Transfer) -> bool {
        let Some(task) = self.tasks.get_mut(key) else { return false };
        task.stage = Stage::Moving;
        let (op, mut metadata_op) = (task.request.op, None);
        match transfer {
            Transfer::Plain => {}
            Transfer::Read | Transfer::Compare => {
                let stored = task.stored.as_ref();
                let cached = |stored| self.of_all.cache.load(&task.location, false, stored);
                metadata_op = Some(Op::Read).filter(|_| !stored.is_some_and(cached));
            }
            Transfer::Write | Transfer::Zero => {
                let blocks = task.blocks(&self.layout, &mut self.scratch);
                let made = blocks.and_then(|blocks| blocks.write(transfer == Transfer::Zero));
                if made.is_err() {
                    task.outcome = made;
                    return true;
                }
                let fua = match op {
                    Op::Write { fua } | Op::WriteZeroes { fua, .. } => fua,
                    _ => false,
                };
                metadata_op = Some(Op::Write { fua });
                task.has_written = true;
            }
        }
        if let Some(op) = metadata_op {
            self.submit_metadata(key, op);
        }
        self.submit_data(key, transfer);
        self.advance(key)
    }

    fn submit_metadata(&mut self, key: u32, op: Op) {
        let Some(task) = self.tasks.get_mut(key) else { return };
        let location = task.location;
        if op != Op::Read && location.len <= MAX_BYTE_WRITE && self.inner.writes_bytes() {
            // The disk below writes single bytes, so a read-modify-write of the whole block is not
            // needed.
            let mut bytes = [0; MAX_BYTE_WRITE];
            let bytes = bytes.get_mut(..location.len).unwrap_or_default();
            let stored =
                task.stored.as_ref().and_then(|stored| stored.read_into(location.at, bytes));
            let outcome = match stored {
                Some(()) => self.inner.write_bytes(location.from + location.at as u64, bytes),
                None => None,
            };
            task.outcome = task.outcome.and(outcome.unwrap_or(Err(DiskError::BadBuffer)));
            return;
        }
        let request = Request { op, offset: location.from, len: location.to - location.from };
        let mut data = self.lists.pop().unwrap_or_default();
        if let Err(error) = task.stored_data(&mut data) {
            task.outcome = Err(error);
            return;
        }
        if op == Op::Read {
            task.versions = Some(self.of_all.cache.versions(&location));
            // The buffer is zeroed first, because a disk such as `null` does not fill it.
            let _ = data.fill(0, data.len(), 0);
        }
        let submitted = self.inner.submit(tag_of(key, true), &request, &mut data);
        if submitted != Submitted::Pending {
            self.recycle_list(data);
        }
        self.submitted(key, submitted);
    }

    fn submit_data(&mut self, key: u32, transfer: Transfer) {
        let Some(task) = self.tasks.get_mut(key) else { return };
        let op = if transfer == Transfer::Read { Op::Read } else { task.request.op };
        let request = Request { op, ..task.request };
        if let Err(error) = task.provide(&self.layout) {
            task.outcome = Err(error);
            return;
        }
        if task.is_direct() {
            let submitted = self.inner.submit(tag_of(key, false), &request, &mut task.data);
            self.submitted(key, submitted);
            return;
        }
        let mut data = self.lists.pop().unwrap_or_default();
        if matches!(transfer, Transfer::Read | Transfer::Compare | Transfer::Write)
            && let Err(error) = task.select(&self.layout, &mut data)
        {
            task.outcome = Err(error);
            return;
        }
        let submitted = self.inner.submit(tag_of(key, false), &request, &mut data);
        if submitted != Submitted::Pending {
            self.recycle_list(data);
        }
        self.submitted(key, submitted);
    }

    fn recycle_list(&mut self, mut data: Segments) {
        if self.lists.len() < MAX_POOLED {
            data.clear();
            self.lists.push(data);
        }
    }

    fn submitted(&mut self, key: u32, submitted: Submitted) {
        let Some(task) = self.tasks.get_mut(key) else { return };
        match submitted {
            Submitted::Pending => task.left += 1,
            Submitted::Done(outcome) => task.outcome = task.outcome.and(outcome),
        }
    }

    /// Removes an ended request and returns its tag, result and buffer.
    fn end(&mut self, key: u32) -> Option<(u32, Result<(), DiskError>, Segments)> {
        let (tag, task) = self.tasks.remove(key)?;
        let OfAll { locks, cache, bell, .. } = &self.of_all;
        if task.has_written {
            let stored = task.stored.as_ref().filter(|_| task.outcome.is_ok());
            let by_bytes = task.location.len <= MAX_BYTE_WRITE && self.inner.writes_bytes();
            let neighbours = !task.location.has_neighbours() || !by_bytes;
            cache.was_written(&task.location, neighbours, stored);
        }
        if task.transfer(&self.layout) != Transfer::Plain {
            locks.leave(task.serial, bell);
        }
        if let Some(stored) = task.stored
            && stored.len() == BUFFER_LEN
            && self.buffers.len() < MAX_POOLED
        {
            self.buffers.push(stored);
        }
        Some((tag, task.outcome, task.data))
    }

    fn start(
        &mut self,
        tag: u32,
        request: &Request,
        metadata: &Metadata,
        data: &mut Segments,
    ) -> Submitted {
        if let Err(error) = self.check(request, metadata, data) {
            return Submitted::Done(Err(error));
        }
        // If the disk below ignores discards, a discard must not change the metadata either.
        if request.op == Op::Discard && !self.discards {
            return Submitted::Done(Ok(()));
        }
        self.serial += 1;
        let task = Task::new(self.serial, request, metadata, &self.layout, data.take());
        let claims = task.transfer(&self.layout) != Transfer::Plain;
        let claim = task.claim(&self.layout);
        let key = self.tasks.insert(tag, task);
        let OfAll { locks, bell, .. } = &self.of_all;
        if claims && !locks.enter(claim, self.serial, bell) {
            return Submitted::Pending;
        }
        if !self.begin(key) {
            return Submitted::Pending;
        }
        match self.end(key) {
            Some((_, outcome, back)) => {
                *data = back;
                Submitted::Done(outcome)
            }
            None => Submitted::Done(Err(DiskError::BadBuffer)),
        }
    }
}

impl Queue for MetadataQueue {
    fn inner(&self) -> Option<&dyn Queue> {
        Some(&*self.inner)
    }

    fn inner_mut(&mut self) -> Option<&mut dyn Queue> {
        Some(&mut *self.inner)
    }

    fn compares_and_writes(&self) -> bool {
        false
    }

    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        self.start(tag, request, &self.unsaid(request), data)
    }

    fn submit_with_metadata(
        &mut self,
        tag: u32,
        request: &Request,
        metadata: &Metadata,
        data: &mut Segments,
    ) -> Submitted {
        self.start(tag, request, metadata, data)
    }

    fn longest_inline(&self) -> u64 {
        self.inner.longest_inline().min(LONGEST)
    }

    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        let mut ended = std::mem::take(&mut self.ended);
        self.inner.reap(&mut |tag, outcome, data| ended.push((tag, outcome, data)));
        let mut over = Vec::new();
        for (tag, outcome, data) in ended.drain(..) {
            let (key, is_metadata) = (tag >> 1, tag & 1 != 0);
            let Some(task) = self.tasks.get_mut(key) else { continue };
            let mut list = Some(data);
            if !is_metadata && task.is_direct() {
                task.data = list.take().unwrap_or_default();
            }
            task.left -= 1;
            task.outcome = task.outcome.and(outcome);
            if let Some(list) = list {
                self.recycle_list(list);
            }
            if self.advance(key) {
                over.push(key);
            }
        }
        self.ended = ended;
        for serial in granted(&self.of_all.bell) {
            let waits = |task: &Task| task.serial == serial && task.stage == Stage::Waiting;
            let found = self.tasks.keys().collect::<Vec<_>>().into_iter();
            let mut found = found.filter(|key| self.tasks.get_mut(*key).is_some_and(|t| waits(t)));
            if let Some(key) = found.next()
                && self.begin(key)
            {
                over.push(key);
            }
        }
        for key in over {
            if let Some((tag, outcome, data)) = self.end(key) {
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
        if task.stage == Stage::Waiting {
            // The queue's next poll takes this notification, and ends the request with that
            // outcome.
            task.outcome = Err(DiskError::Cancelled);
            return self.of_all.bell.push(task.serial);
        }
        for is_metadata in [false, true] {
            self.inner.cancel(tag_of(key, is_metadata));
        }
    }

    fn memory_changed(&mut self, view: &View) {
        self.lists.clear();
        self.inner.memory_changed(view);
        let mut change = ViewChange::new(view);
        let keys: Vec<_> = self.tasks.keys().collect();
        for key in keys {
            let Some(task) = self.tasks.get_mut(key) else { continue };
            let state = task.data.move_to(&mut change);
            // A write that has started does not read its buffer again.
            if state == AfterChange::Unmapped && !task.has_written {
                task.outcome = task.outcome.and(Err(DiskError::BadBuffer));
                if task.stage == Stage::Waiting {
                    self.of_all.bell.push(task.serial);
                }
            }
        }
    }

    fn pending(&self) -> usize {
        self.tasks.len()
    }

    fn timer_fd(&self) -> Option<BorrowedFd<'_>> {
        let bell = self.of_all.bell.as_fd();
        Some(self.timer.as_ref().map_or(bell, |timer| timer.as_fd()))
    }
}
