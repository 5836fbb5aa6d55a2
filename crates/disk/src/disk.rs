//! The traits [`Disk`] and [`Queue`]: a disk, and one thread's queue on it.

use crate::checkpoint_error::CheckpointError;
use crate::extent::{Extent, ReportExtent};
use crate::info::DiskInfo;
use crate::metadata::Metadata;
use crate::request::{DiskError, Op, Request, Submitted};
use crate::resize::ResizeError;
use crate::stopped::Stopped;
use crate::zoned::Zones;
use shadowbell_memory::{Segments, SharedBytes, View};
use shadowbell_state::Descriptors;
use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::{fmt, io};

/// Reason why the recovery of a disk waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitReason<'a> {
    /// I/O of the dead process may still be in flight at the storage.
    InFlight,
    /// The image is locked: by another program, or by I/O of the dead process that has not ended.
    Locked,
    /// The storage cannot be used at present. The text is the last error.
    Unavailable(&'a str),
}

/// Callback that waits for a short time and returns true, or returns false if the caller has to
/// stop waiting. It is called repeatedly while a disk cannot be recovered yet.
pub type Wait<'a> = &'a dyn Fn(WaitReason<'_>) -> bool;

/// A block device that a namespace stores its data on. Shared by all threads.
///
/// A disk can be a layer over another disk, which it returns from [`inner`](Self::inner). The
/// provided methods call the same method of the inner disk. "Default" below is their result if
/// there is no inner disk. Sizes ([`resized`](Self::resized), [`with_writes`](Self::with_writes))
/// and memory ([`map`](Self::map)) are not forwarded: a layer has to implement these methods
/// itself.
pub trait Disk: Any + Send + Sync + fmt::Debug {
    /// Properties of the disk, such as block size and capacity.
    fn info(&self) -> DiskInfo;

    /// Opens a queue for the calling thread.
    ///
    /// # Errors
    /// The system's error if it lacks a resource that the queue needs.
    fn queue(&self) -> io::Result<Box<dyn Queue>>;

    /// Maximum number of files that one queue keeps open. Default: as many as a queue of the inner
    /// disk.
    fn queue_files(&self) -> u64 {
        self.inner().map_or(0, |inner| inner.queue_files())
    }

    /// Name of the disk in messages to the operator: `disk.img`, `mem:1GiB`.
    fn name(&self) -> String;

    /// The disk below this layer. Default: none.
    fn inner(&self) -> Option<&Arc<dyn Disk>> {
        None
    }

    /// Warning about a degraded disk, for the operator: one sentence. Default: none.
    fn remark(&self) -> Option<String> {
        self.inner()?.remark()
    }

    /// True if the storage has refused a write for lack of space and has not accepted a write
    /// since. Called under locks, so it must not block. Default: false.
    fn is_full(&self) -> bool {
        self.inner().is_some_and(|inner| inner.is_full())
    }

    /// True if completed writes may be lost because the kernel could not write them back. Then
    /// every flush fails until the disk is opened again. Must not block. Default: false.
    fn has_lost_writes(&self) -> bool {
        self.inner().is_some_and(|inner| inner.has_lost_writes())
    }

    /// True if the storage may still execute writes of a dead process, because the disk was opened
    /// after a crash without a fence. Default: false.
    fn may_have_late_writes(&self) -> bool {
        self.inner().is_some_and(|inner| inner.may_have_late_writes())
    }

    /// True if the file of the disk was deleted: it exists only as long as the disk is open. Must
    /// not block for long. Default: false.
    fn is_deleted(&self) -> bool {
        self.inner().is_some_and(|inner| inner.is_deleted())
    }

    /// Performance counters of the disk by name, for the operator. Default: none.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.inner().map_or_else(Vec::new, |inner| inner.counters())
    }

    /// Number of [orphans](crate::Orphans): cancelled writes that the storage may still execute.
    /// Must not block. Default: none.
    fn orphans(&self) -> usize {
        self.inner().map_or(0, |inner| inner.orphans())
    }

    /// Suspends the error policy of a disk that another disk replaces, or restores it if the
    /// replacement has failed. While `suspended`, no request is held, and the held ones end with
    /// their errors. Must not block. Default: nothing is held.
    fn suspend_error_policy(&self, suspended: bool) {
        if let Some(inner) = self.inner() {
            inner.suspend_error_policy(suspended);
        }
    }

    /// State of a disk that holds requests after an error of its storage; `None` if it holds none.
    /// Default: none.
    fn stopped(&self) -> Option<Stopped> {
        self.inner()?.stopped()
    }

    /// Submits the held requests of a [stopped](Self::stopped) disk to the storage again. Returns
    /// false if the disk is not stopped. Must not block. Default: false.
    fn resume(&self) -> bool {
        self.inner().is_some_and(|inner| inner.resume())
    }

    /// Number of calls of [`resume`](Self::resume) so far, in this process, that have submitted
    /// held requests again. A stop without a resume has ended because its requests were cancelled.
    fn resumes(&self) -> u64 {
        self.inner().map_or(0, |inner| inner.resumes())
    }

    /// Reports the allocation state of `len` bytes from byte `offset` on: calls `report` with
    /// consecutive extents without gaps until `len` bytes are reported or `report` returns false.
    /// Neighbouring extents may have the same state.
    ///
    /// Bytes written before the call are reported as allocated, unless they were discarded or
    /// zeroed since. Bytes written or discarded during the call may be reported either way.
    ///
    /// May block on the storage and take long, so I/O threads must not call it. The time between
    /// two calls of `report` is bounded. Default: all bytes are allocated.
    fn extents(&self, offset: u64, len: u64, report: &mut ReportExtent<'_>) {
        match self.inner() {
            Some(inner) => inner.extents(offset, len, report),
            None if len != 0 => {
                report(Extent::data(len));
            }
            None => {}
        }
    }

    /// Returns this disk with a capacity of `bytes`, or with the current size of its storage. The
    /// new disk and this disk share the storage and the lock; this disk is not changed. A writable
    /// file grows if it is smaller than `bytes`. Default: [`ResizeError::Impossible`].
    ///
    /// # Errors
    /// [`ResizeError`].
    fn resized(&self, bytes: Option<u64>) -> Result<Arc<dyn Disk>, ResizeError> {
        let _ = bytes;
        Err(ResizeError::Impossible { disk: self.name() })
    }

    /// True if the storage has signalled a possible size change since the last call;
    /// [`resized`](Self::resized) then finds the new size. Must not block. Default: false.
    fn take_size_change(&self) -> bool {
        self.inner().is_some_and(|inner| inner.take_size_change())
    }

    /// Returns this disk writable (`accepted`) or read-only. Like [`resized`](Self::resized), it
    /// shares the storage and does not change this disk. Default: [`ResizeError::Opened`].
    ///
    /// # Errors
    /// [`ResizeError`].
    fn with_writes(&self, accepted: bool) -> Result<Arc<dyn Disk>, ResizeError> {
        let _ = accepted;
        Err(ResizeError::Opened { disk: self.name() })
    }

    /// Serializes the disk for a checkpoint. After a crash of this process, the next process
    /// recovers the disk from it, even if requests are in flight. Adds the disk's descriptors to
    /// `fds`. None of them may be the open file that requests use. That file must be closed when
    /// the last request of the dead process ends, because its lock is the fence. Default:
    /// [`CheckpointError::Mortal`].
    ///
    /// # Errors
    /// [`CheckpointError`].
    fn checkpoint(&self, fds: &mut Descriptors) -> Result<serde_json::Value, CheckpointError> {
        match self.inner() {
            Some(inner) => inner.checkpoint(fds),
            None => Err(CheckpointError::Mortal { disk: self.name() }),
        }
    }

    /// Sets the callback for changes of the state that [`checkpoint`](Self::checkpoint) returns.
    /// The thread that detects a change calls it, before any host can see the change. A disk and
    /// the disks [made from it](Self::resized) share one callback; a new one replaces it. Default:
    /// the callback is never called, because the state does not change.
    fn on_change(&self, changed: Box<dyn Fn() + Send + Sync>) {
        if let Some(inner) = self.inner() {
            inner.on_change(changed);
        }
    }

    /// Maps the first `len` bytes of the disk as memory, if possible. A store to the mapping
    /// changes the disk at once, survives a crash of this process, and is on the medium after a
    /// flush. Default: none.
    fn map(&self, len: u64) -> Option<SharedBytes> {
        let _ = len;
        None
    }

    /// Releases the lock on the image, so that the next process need not wait for the end of this
    /// process. No request may be pending, and the disk must not be used afterwards. Default: the
    /// lock is held until this process ends.
    fn release_lock(&self) {
        if let Some(inner) = self.inner() {
            inner.release_lock();
        }
    }
}

/// One thread's queue on a disk.
///
/// A queue of a layer returns the queue of the disk below from [`inner`](Self::inner) and
/// [`inner_mut`](Self::inner_mut). The provided methods call the same method of that queue.
/// "Default" below is their result if there is no inner queue. Exceptions are
/// [`submit_with_metadata`](Self::submit_with_metadata) and [`write_bytes`](Self::write_bytes),
/// which a layer has to implement itself.
pub trait Queue {
    /// Queue of the disk below this layer. Default: none.
    fn inner(&self) -> Option<&dyn Queue> {
        None
    }

    /// Mutable access to the queue that [`inner`](Self::inner) returns. Default: none.
    fn inner_mut(&mut self) -> Option<&mut dyn Queue> {
        None
    }

    /// Starts `request` with the buffer `data` (empty for operations without data). A buffer may be
    /// longer than the request, for example if metadata follow the data; the excess is neither read
    /// nor written. `tag` is returned by [`reap`](Self::reap); the caller chooses it, unique among
    /// its pending requests.
    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted;

    /// Starts a request like [`submit`](Self::submit) on a disk whose blocks have
    /// [metadata](crate::DiskInfo::metadata). On a disk with metadata, plain `submit` transfers no
    /// metadata and checks none. Default: [`DiskError::Unsupported`].
    fn submit_with_metadata(
        &mut self,
        tag: u32,
        request: &Request,
        metadata: &Metadata,
        data: &mut Segments,
    ) -> Submitted {
        let _ = (tag, request, metadata, data);
        Submitted::Done(Err(DiskError::Unsupported))
    }

    /// Writes all of `data` from byte `offset` on, inline; `data` need not be whole blocks. A
    /// concurrent [`submit`](Self::submit) of the same bytes sees them before or after the write.
    /// Returns `None` and writes nothing if the queue does not support this (default).
    fn write_bytes(&mut self, offset: u64, data: &[u8]) -> Option<Result<(), DiskError>> {
        let _ = (offset, data);
        None
    }

    /// True if [`write_bytes`](Self::write_bytes) is supported. Default: false.
    fn writes_bytes(&self) -> bool {
        false
    }

    /// True if [compare and write](Op::CompareAndWrite) is supported. Default: false.
    fn compares_and_writes(&self) -> bool {
        self.inner().is_some_and(|inner| inner.compares_and_writes())
    }

    /// Zones of a zoned disk. Default: none.
    fn zones(&self) -> Option<&dyn Zones> {
        self.inner()?.zones()
    }

    /// Byte offset where the data of the completed [`Append`](Op::Append) with this tag were
    /// written. May be called once per request.
    fn appended(&mut self, tag: u32) -> Option<u64> {
        self.inner_mut()?.appended(tag)
    }

    /// Marks the requests submitted from now on as replays. A dead process may have executed them
    /// already. So a write to a zone that the write pointer has already passed is no error.
    fn set_replays(&mut self, replays: bool) {
        if let Some(inner) = self.inner_mut() {
            inner.set_replays(replays);
        }
    }

    /// True if the caller has to call [`begin_turn`](Self::begin_turn).
    fn schedules_sources(&self) -> bool {
        self.inner().is_some_and(|inner| inner.schedules_sources())
    }

    /// Announces that the following requests come from the host's submission queue `source`, a
    /// small number that the caller has assigned to that queue.
    fn begin_turn(&mut self, source: u32) {
        if let Some(inner) = self.inner_mut() {
            inner.begin_turn(source);
        }
    }

    /// True if the queue benefits from [`prefetch_hint`](Self::prefetch_hint).
    fn uses_prefetch_hints(&self) -> bool {
        self.inner().is_some_and(|inner| inner.uses_prefetch_hints())
    }

    /// Hints that a request `op` (read or write) for `len` bytes at byte `offset` will most likely
    /// be the request after the next (`distance` 2) or the next request (`distance` 1). The queue
    /// can then prefetch its data into the CPU's caches. None of the arguments has been checked.
    fn prefetch_hint(&self, op: Op, offset: u64, len: usize, distance: u32) {
        if let Some(inner) = self.inner() {
            inner.prefetch_hint(op, offset, len, distance);
        }
    }

    /// Longest request without data (write zeroes, discard, verify) to submit at once, in bytes. A
    /// disk that executes a request inline blocks the thread meanwhile. The caller therefore splits
    /// a longer request into pieces of this length, and does other work between the pieces. At
    /// least one logical block. Default: no limit.
    fn longest_inline(&self) -> u64 {
        self.inner().map_or(u64::MAX, |inner| inner.longest_inline())
    }

    /// Declares that the calling thread serves no other queue. The queue may then block briefly on
    /// the storage, if that is faster than passing the work to another thread. Default: ignored.
    fn may_wait(&mut self) {
        if let Some(inner) = self.inner_mut() {
            inner.may_wait();
        }
    }

    /// Passes all requests that are submitted but not yet in flight to the kernel, by one system
    /// call.
    fn commit(&mut self) {
        if let Some(inner) = self.inner_mut() {
            inner.commit();
        }
    }

    /// Calls `done` for each completed request, with its buffer. Does not block. Requests to the
    /// storage that the queue itself prepares during this call are submitted before it returns. So
    /// the caller need not call [`commit`](Self::commit) before it sleeps.
    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        if let Some(inner) = self.inner_mut() {
            inner.reap(done);
        }
    }

    /// Requests an early end of the pending request `tag`. The request ends with
    /// [`DiskError::Cancelled`] if it can still be cancelled, otherwise with its regular result. A
    /// write in flight may end as cancelled while the storage still executes it, as one of the
    /// disk's [orphans](crate::Orphans).
    fn cancel(&mut self, tag: u32) {
        if let Some(inner) = self.inner_mut() {
            inner.cancel(tag);
        }
    }

    /// Announces a new view of guest memory. The queue must drop everything that it caches about
    /// other memory, except the buffers of pending requests. It may release the buffer of a pending
    /// write whose data it has copied ([`Segments::release_view`]), and move other buffers to the
    /// new view ([`Segments::move_to`]). A request whose buffer is not mapped any more then ends
    /// with [`DiskError::BadBuffer`].
    fn memory_changed(&mut self, view: &View) {
        if let Some(inner) = self.inner_mut() {
            inner.memory_changed(view);
        }
    }

    /// Number of pending requests.
    fn pending(&self) -> usize {
        self.inner().map_or(0, |inner| inner.pending())
    }

    /// Number of pending requests that are held because the disk is [stopped](Disk::stopped). They
    /// are not at the storage, and end without an effect if the queue is dropped. Default: 0.
    fn held(&self) -> usize {
        self.inner().map_or(0, |inner| inner.held())
    }

    /// True if requests of this queue are [held](Self::held). Their age is then no sign of hung
    /// storage.
    fn holds_requests(&self) -> bool {
        self.held() != 0
    }

    /// File descriptor that is readable while [`reap`](Self::reap) has completions to report;
    /// `None` for a disk that never leaves a request pending.
    ///
    /// If the wait for this descriptor ends with `EINTR`, the caller must call [`reap`](Self::reap)
    /// too: the kernel may wake a sleeping thread that way for io_uring completions.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner()?.wake_fd()
    }

    /// Descriptor that becomes readable when [`reap`](Self::reap) has work at a certain time, for
    /// example to start a delayed request. It stays readable until the next call of `reap`.
    /// Default: none.
    fn timer_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner()?.timer_fd()
    }

    /// True if the [wake descriptor](Self::wake_fd) has to be watched edge-triggered (`EPOLLET`).
    /// An edge-triggered descriptor signals each event, but stays readable.
    fn wakes_by_edges(&self) -> bool {
        self.inner().is_some_and(|inner| inner.wakes_by_edges())
    }

    /// True if other queues of the thread may have the same [wake descriptor](Self::wake_fd). The
    /// descriptor stays open as long as any queue with this descriptor exists.
    fn shares_wake_fd(&self) -> bool {
        self.inner().is_some_and(|inner| inner.shares_wake_fd())
    }
}

/// Submits a request to a disk, with metadata parameters if there are any.
#[inline]
pub fn submit_any(
    queue: &mut dyn Queue,
    tag: u32,
    request: &Request,
    metadata: Option<&Metadata>,
    data: &mut Segments,
) -> Submitted {
    match metadata {
        None => queue.submit(tag, request, data),
        Some(metadata) => queue.submit_with_metadata(tag, request, metadata, data),
    }
}
