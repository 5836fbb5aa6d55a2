//! The two traits: a disk, and one thread's queue on it.

use crate::extent::{Extent, Tell};
use crate::file::RawFile;
use crate::hand_over::HandOverError;
use crate::info::DiskInfo;
use crate::limit::Limiter;
use crate::metadata::Metadata;
use crate::request::{DiskError, Op, Request, Submitted};
use crate::resize::ResizeError;
use crate::zoned::Zones;
use shadowbell_memory::{DmaTable, Segments, SharedBytes};
use shadowbell_state::Descriptors;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::{fmt, io};

/// Something that keeps blocks. Shared by all threads.
///
/// A disk that is a layer over another one names that as [`inner`](Self::inner). What it says
/// nothing else of is then the other one's: what is called the default below holds for a disk that
/// is no layer. What a layer can not leave to the other one it has to say itself: its sizes
/// ([`resized`](Self::resized), [`with_writes`](Self::with_writes)) and its memory
/// ([`map`](Self::map)).
pub trait Disk: Send + Sync + fmt::Debug {
    /// What the disk is.
    fn info(&self) -> DiskInfo;

    /// Opens a queue for the calling thread.
    ///
    /// # Errors
    /// The system's, when it has no more of what a queue needs.
    fn queue(&self) -> io::Result<Box<dyn Queue>>;

    /// What to call the disk in a message to a person: `disk.img`, `mem:1GiB`.
    fn name(&self) -> String;

    /// The disk that this one is a layer over. The default is no layer.
    fn inner(&self) -> Option<&Arc<dyn Disk>> {
        None
    }

    /// All limits of the disk: its own, and then those of its group. The default has none.
    fn limiters(&self) -> &[Arc<Limiter>] {
        self.inner().map_or(&[], |inner| inner.limiters())
    }

    /// The disk without its limits, if it has any. The default has none.
    fn unlimited(&self) -> Option<&Arc<dyn Disk>> {
        None
    }

    /// What is not as it should be with the disk, though it works: a sentence for an operator. The
    /// default has nothing to say.
    fn remark(&self) -> Option<String> {
        self.inner()?.remark()
    }

    /// Whether the storage below has refused a write for want of room, and has not taken it since.
    /// Asked under locks: it must not wait for anything. The default never lacks room.
    fn is_full(&self) -> bool {
        self.inner().is_some_and(|inner| inner.is_full())
    }

    /// Whether data that were written may be lost, because the system could not write them back:
    /// then every flush fails until the disk is opened again. Must not wait, either. The default
    /// loses nothing.
    fn has_lost(&self) -> bool {
        self.inner().is_some_and(|inner| inner.has_lost())
    }

    /// What the disk has counted of how it works, by name, for an operator. The default counts
    /// nothing.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.inner().map_or_else(Vec::new, |inner| inner.counters())
    }

    /// Tells which bytes are allocated: extents without gaps, the first from byte `offset` on,
    /// until they are `len` bytes or `tell` wants no more. Several of the same kind may follow each
    /// other.
    ///
    /// What was written before the call is allocated, unless it was discarded or zeroed since.
    /// What is written or discarded meanwhile may be told either way.
    ///
    /// May wait for the storage, and takes its time: no thread that serves queues may call it. What
    /// one call between two `tell`s costs is bounded. The default takes everything for data.
    fn extents(&self, offset: u64, len: u64, tell: &mut Tell<'_>) {
        match self.inner() {
            Some(inner) => inner.extents(offset, len, tell),
            None if len != 0 => {
                tell(Extent::data(len));
            }
            None => {}
        }
    }

    /// What [`adopt`](crate::adopt) needs in another process to go on with the disk, when no
    /// request is pending here: its descriptors go to `fds`. This disk stays as it is. The default
    /// can not be handed over.
    ///
    /// # Errors
    /// [`HandOverError`].
    fn hand_over(&self, fds: &mut Descriptors) -> Result<serde_json::Value, HandOverError> {
        match self.inner() {
            Some(inner) => inner.hand_over(fds),
            None => Err(HandOverError::Impossible { disk: self.name() }),
        }
    }

    /// The same disk in another size: of `bytes`, or of as many as its storage has by now. Both
    /// are on the same bytes, and have one lock; this one stays as it is. The default can not be
    /// resized.
    ///
    /// # Errors
    /// [`ResizeError`].
    fn resized(&self, bytes: Option<u64>) -> Result<Arc<dyn Disk>, ResizeError> {
        let _ = bytes;
        Err(ResizeError::Impossible { disk: self.name() })
    }

    /// Whether the storage below has said, since this was asked last, that it may have another
    /// size: then [`resized`](Self::resized) says which. Must not wait. The default never says so.
    fn takes_new_size(&self) -> bool {
        self.inner().is_some_and(|inner| inner.takes_new_size())
    }

    /// The same disk, taking no writes or taking them; otherwise as [`resized`](Self::resized) has
    /// it. The default stays as it was opened.
    ///
    /// # Errors
    /// [`ResizeError`].
    fn with_writes(&self, taken: bool) -> Result<Arc<dyn Disk>, ResizeError> {
        let _ = taken;
        Err(ResizeError::Opened { disk: self.name() })
    }

    /// What [`recover`](crate::recover) needs in another process to go on with the disk after this
    /// process has died, whatever was under way; its descriptors go to `fds`. None of them is the
    /// open file that requests work on: that is to be closed when the last of them has ended. The
    /// default can not be gone on with.
    ///
    /// # Errors
    /// [`HandOverError`].
    fn keep(&self, fds: &mut Descriptors) -> Result<serde_json::Value, HandOverError> {
        match self.inner() {
            Some(inner) => inner.keep(fds),
            None => Err(HandOverError::Mortal { disk: self.name() }),
        }
    }

    /// Has `changed` called whenever [`keep`](Self::keep) gives something else than before, by the
    /// thread that found that out, and before a host can know of it. There is one such call for a
    /// disk and those that were [made of it](Self::resized): the one that was named last. The
    /// default never changes.
    fn on_change(&self, changed: Box<dyn Fn() + Send + Sync>) {
        if let Some(inner) = self.inner() {
            inner.on_change(changed);
        }
    }

    /// The first `len` bytes of the disk as memory, if it can be had: what is stored there is a
    /// part of the disk at once, stays when this process dies, and is on the medium after a flush.
    /// The default is not memory.
    fn map(&self, len: u64) -> Option<SharedBytes> {
        let _ = len;
        None
    }

    /// The file that the disk is, byte for byte, if others may make calls on it by an io_uring of
    /// their own, beside the queues. A layer has none: requests would go past it. Nor has the
    /// default.
    fn raw_file(&self) -> Option<RawFile> {
        None
    }

    /// Whether another process has the disk by the same descriptors. As long as one has, dropping
    /// this disk leaves the lock on it: it is the lock of both. The default has no lock.
    fn share_lock(&self, shared: bool) {
        if let Some(inner) = self.inner() {
            inner.share_lock(shared);
        }
    }
}

/// One thread's way to a disk.
pub trait Queue {
    /// Starts `request` with the buffer `data` (empty for operations without data). A buffer may be
    /// longer than the request, as one is that has metadata behind the data; what is behind them is
    /// neither read nor written. `tag` comes back at [`reap`](Self::reap) and is the caller's own,
    /// unique among its pending requests.
    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted;

    /// As [`submit`](Self::submit), for a disk whose blocks have
    /// [metadata](crate::DiskInfo::metadata). A request that comes without a word of them is
    /// carried out as if they were not transferred, and as if nothing were to be checked. The
    /// default has none.
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

    /// Writes all of `data` from byte `offset` on, at once, which need not be whole blocks. What a
    /// [`submit`](Self::submit) of the same bytes finds is from before it or from after it. `None`,
    /// and nothing is done, if the queue can not: the default.
    fn write_bytes(&mut self, offset: u64, data: &[u8]) -> Option<Result<(), DiskError>> {
        let _ = (offset, data);
        None
    }

    /// Whether [`write_bytes`](Self::write_bytes) can. The default can not.
    fn writes_bytes(&self) -> bool {
        false
    }

    /// Whether a [compare and write](Op::CompareAndWrite) can be submitted. The default can not.
    fn compares_and_writes(&self) -> bool {
        false
    }

    /// The zones of the disk, if it is made of some. The default has none.
    fn zones(&self) -> Option<&Zones> {
        None
    }

    /// Where the data of the [`Append`](Op::Append) with this tag, which has ended or was completed
    /// at once, were put: in bytes of the disk. To be asked once.
    fn appended(&mut self, tag: u32) -> Option<u64> {
        let _ = tag;
        None
    }

    /// Whether what is submitted from here on may have been carried out by a process that is dead:
    /// a write whose place was taken by that is no mistake.
    fn set_replays(&mut self, replays: bool) {
        let _ = replays;
    }

    /// Whether the queue is to be told by [`begin_turn`](Self::begin_turn) whose requests come.
    fn takes_turns(&self) -> bool {
        false
    }

    /// The requests that come from here on are of this submission queue of the host's, by a small
    /// number of the caller's.
    fn begin_turn(&mut self, source: u32) {
        let _ = source;
    }

    /// Whether the queue gains by [`prefetch_hint`](Self::prefetch_hint).
    fn wants_prefetch_hints(&self) -> bool {
        false
    }

    /// A request to do `op`, a read or a write, with `len` bytes from byte `offset` of the disk
    /// most likely comes `distance` requests from now (2, and then 1): what it needs can be brought
    /// into the processor's caches. A hint, of which nothing has been checked.
    fn prefetch_hint(&self, op: Op, offset: u64, len: usize, distance: u32) {
        let _ = (op, offset, len, distance);
    }

    /// The longest request without data (write zeroes, discard, verify), in bytes, that should be
    /// submitted at once. A longer one is submitted in pieces of so many, with other work in
    /// between: a disk that carries such a request out inline would hold up the thread for as long
    /// as it takes. At least a logical block; the default has no limit.
    fn longest_inline(&self) -> u64 {
        u64::MAX
    }

    /// The thread that has this queue serves no other, and so may wait a little for the storage
    /// where that is shorter than to have somebody else wait. The default makes nothing of it.
    fn may_wait(&mut self) {}

    /// Hands what was submitted and is not under way yet to the system, in one call.
    fn commit(&mut self) {}

    /// Calls `done` for each request that has ended, with its buffer. Does not wait.
    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        let _ = done;
    }

    /// Asks that the pending request `tag` ends soon: as [`DiskError::Cancelled`] if that came in
    /// time, or as it would have.
    fn cancel(&mut self, tag: u32) {
        let _ = tag;
    }

    /// The host's memory is what `table` says from now on. Whatever the queue remembers of other
    /// memory, apart from the buffers of pending requests, is to be forgotten.
    fn memory_changed(&mut self, table: &DmaTable) {
        let _ = table;
    }

    /// How many requests are pending.
    fn pending(&self) -> usize {
        0
    }

    /// A descriptor that becomes readable when [`reap`](Self::reap) has something to do; `None`
    /// for a disk that never leaves a request pending. It stays readable until then.
    ///
    /// A wait that the system ends with `EINTR` counts as a wake-up, too: that is how it brings
    /// a completion to a thread that sleeps.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Another descriptor that becomes readable when [`reap`](Self::reap) has something to do: at a
    /// time. It stays readable until then. The default has none.
    fn timer_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Whether the [wake descriptor](Self::wake_fd) becomes readable again and again without ever
    /// ceasing to be, so that it has to be watched for that (`EPOLLET`).
    fn wakes_by_edges(&self) -> bool {
        false
    }
}
