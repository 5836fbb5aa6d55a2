//! Calls of one queue, and ownership of the memory that the kernel accesses.
//!
//! The kernel accesses memory without the compiler's knowledge from the submission of a call until
//! its completion is collected. The ring owns the memory during that time. Each call belongs to a
//! slot, which holds the data buffer, the bounce buffer and the iovecs. A busy slot releases none
//! of them, and dropping a ring first waits for every busy slot. If a ring is leaked instead of
//! dropped, the memory is never freed.

mod inline_write;

use super::call::{INDEX_BITS, Kind, Prepared, QUEUE_BITS, Stuck, WAKE};
use super::inline_writes::InlineWrites;
use super::namespace_ring::NamespaceRing;
use super::passthrough::Namespace;
use super::slot::{Call, Slot};
use super::threads::Threads;
use super::uring::Uring;
use super::waker::{Alarm, Waker};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use shadowbell_memory::{Segments, SharedBytes};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of calls in flight of a queue. Further calls wait in this process, in order. The
/// limit prevents calls on a hung file from delaying calls on other files of the thread.
const IN_FLIGHT: usize = 1024;
/// Number of different generations of a slot: as many as fit in the id of a call.
const GENERATIONS: u32 = 1 << (u64::BITS - INDEX_BITS - QUEUE_BITS);
/// Identifier of a slot for one call: the slot's number, and its generation, which changes with
/// each call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    index: u32,
    generation: u32,
}

impl Key {
    /// Creates a key that belongs to no ring.
    pub(crate) const fn of(index: u32, generation: u32) -> Self {
        Self { index, generation }
    }

    /// Number of the slot. Free slots are reused, so the number is small.
    pub(crate) fn index(self) -> u32 {
        self.index
    }

    /// Id of the slot's call.
    fn id(self) -> u64 {
        u64::from(self.generation) << (INDEX_BITS + QUEUE_BITS) | u64::from(self.index)
    }

    /// Slot of the call with this id.
    fn of_id(id: u64) -> Self {
        Self { index: (id & WAKE) as u32, generation: (id >> (INDEX_BITS + QUEUE_BITS)) as u32 }
    }
}

/// Content removed from a slot.
pub(crate) struct Taken<T> {
    pub(crate) task: T,
    pub(crate) data: Segments,
    pub(crate) own: Option<SharedBytes>,
}

/// I/O engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EngineKind {
    /// io_uring.
    Uring,
    /// Threads of this process.
    Threads,
}

#[allow(clippy::large_enum_variant, reason = "there is one for each queue")]
enum Engine {
    Uring(Uring),
    /// io_uring that passes NVMe commands to a namespace.
    Namespace(NamespaceRing),
    Threads(Threads),
}

/// Replaces io_uring by threads if no ring is left: a sandboxed process cannot create more rings.
fn or_threads(
    engine: io::Result<Engine>,
    threads: impl FnOnce() -> io::Result<Threads>,
) -> io::Result<Engine> {
    match engine {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => threads().map(Engine::Threads),
        engine => engine,
    }
}

/// Evaluates an expression with the engine in use.
macro_rules! with {
    ($engine:expr, $it:ident => $what:expr) => {
        match $engine {
            Engine::Uring($it) => $what,
            Engine::Namespace($it) => $what,
            Engine::Threads($it) => $what,
        }
    };
}

/// Threads for calls that would block in the kernel. All other calls use io_uring.
///
/// For blocking calls, the kernel has about eight worker threads, which all rings of a thread
/// share. A hung file would occupy all of them, and block the calls on every other file of the
/// thread. So threads that belong to this ring alone make the blocking calls.
struct Blocking {
    file: Arc<File>,
    threads: Option<Threads>,
    /// True if all reads may block, because the file does not support `RWF_NOWAIT`.
    reads: bool,
    /// True if all writes may block, because the file does not support `RWF_NOWAIT`.
    writes: bool,
    /// True if reads bypass the page cache. If not, reads need no threads: the kernel continues a
    /// buffered read without a worker thread when the page arrives.
    direct: bool,
    /// True if threads cannot be used, for example for lack of file descriptors.
    off: bool,
    /// Policy of inline writes, the writes that the ring's thread executes itself.
    inline: InlineWrites,
    /// Scratch list of the slots whose calls io_uring has returned because they would block.
    retries: Vec<u32>,
}

/// Queue of calls on one file, with a slot for each call. `T` is the state that the owner stores
/// for each call.
pub(crate) struct Ring<T> {
    engine: Engine,
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    busy: usize,
    blocking: Blocking,
    /// Parameters of the namespace, if the file is an NVMe generic character device.
    namespace: Option<Namespace>,
    /// Epoll descriptor that [`merge`](Self::merge) has created. If there is one, [`fd`](Self::fd)
    /// returns it instead of the engine's descriptor.
    merged: Option<OwnedFd>,
}

impl<T> Ring<T> {
    /// Opens a queue for calls on `file`. Only this thread uses it. `waits` is true if the file
    /// does not support `RWF_NOWAIT`. `direct` is true if calls bypass the page cache.
    pub(crate) fn new(
        file: Arc<File>,
        engine: EngineKind,
        waits: bool,
        direct: bool,
    ) -> io::Result<Self> {
        let mut blocking = Blocking {
            file: Arc::clone(&file),
            threads: None,
            reads: waits,
            writes: waits,
            direct,
            off: false,
            inline: InlineWrites::default(),
            retries: Vec::new(),
        };
        let engine = match engine {
            EngineKind::Uring => Uring::new(Arc::clone(&file)).map(Engine::Uring),
            EngineKind::Threads => Threads::new(Arc::clone(&file)).map(Engine::Threads),
        };
        let engine = or_threads(engine, || Threads::new(file))?;
        blocking.off |= matches!(engine, Engine::Threads(_));
        Ok(Self::with(engine, blocking, None))
    }

    /// Opens a queue on the character device of `namespace`. Its calls are NVMe commands. An error
    /// status is reported as the error number [`NVME_STATUS`] plus the status.
    pub(crate) fn of_namespace(
        file: Arc<File>,
        engine: EngineKind,
        namespace: Namespace,
    ) -> io::Result<Self> {
        let blocking = Blocking {
            file: Arc::clone(&file),
            threads: None,
            reads: false,
            writes: false,
            direct: true,
            // Threads are not needed, because passthrough commands never block in the kernel.
            off: true,
            inline: InlineWrites::default(),
            retries: Vec::new(),
        };
        let engine = match engine {
            EngineKind::Uring => {
                NamespaceRing::new(Arc::clone(&file), namespace).map(Engine::Namespace)
            }
            EngineKind::Threads => {
                Threads::of(Arc::clone(&file), Some(namespace)).map(Engine::Threads)
            }
        };
        let engine = or_threads(engine, || Threads::of(file, Some(namespace)))?;
        Ok(Self::with(engine, blocking, Some(namespace)))
    }

    fn with(engine: Engine, blocking: Blocking, namespace: Option<Namespace>) -> Self {
        let (slots, free) = (Vec::new(), Vec::new());
        Self { engine, slots, free, busy: 0, blocking, namespace, merged: None }
    }

    /// Disables the threads of the engine, so that a test determines when and how calls end. `None`
    /// for io_uring, which does not support that.
    #[cfg(feature = "scripted")]
    pub(crate) fn set_scripted(&mut self) -> Option<Arc<super::threads::ThreadsShared>> {
        let Engine::Threads(threads) = &mut self.engine else { return None };
        threads.set_scripted();
        Some(Arc::clone(threads.shared()))
    }

    /// True if the threads have to make a call of this kind.
    fn is_for_threads(&mut self, kind: Kind) -> bool {
        let waits = match kind {
            Kind::Read => self.blocking.reads,
            Kind::Write { .. } => self.blocking.writes,
            Kind::Allocate { .. } | Kind::Deallocate => true,
        };
        waits && !self.blocking.off && self.has_threads()
    }

    /// Creates the threads if they do not exist yet. Returns false if they cannot be created.
    fn has_threads(&mut self) -> bool {
        let Engine::Uring(uring) = &self.engine else { return false };
        if self.blocking.threads.is_none() {
            let threads = Threads::new(Arc::clone(&self.blocking.file));
            self.blocking.threads = threads.ok().filter(|it| uring.watch(it.fd()).is_ok());
            self.blocking.off = self.blocking.threads.is_none();
        }
        self.blocking.threads.is_some()
    }

    /// Passes the calls that io_uring has returned, because they would block, to the threads.
    fn retry_blocked(&mut self) {
        let mut retries = std::mem::take(&mut self.blocking.retries);
        for index in retries.drain(..) {
            let slot = &mut self.slots[index as usize];
            slot.nowait = false;
            let id = Key { index, generation: slot.generation }.id();
            let Slot { kind, offset, len, .. } = *slot;
            let call = Prepared { id, kind, iovecs: &slot.iovecs, offset, len, nowait: false };
            if let Some(threads) = &mut self.blocking.threads {
                // SAFETY: the slot is busy, so the memory that the call points to stays valid.
                unsafe { threads.push(&call) };
            }
        }
        self.blocking.retries = retries;
        self.submit_blocking();
    }

    fn submit_blocking(&mut self) {
        if let Some(threads) = &mut self.blocking.threads
            && threads.prepared() != 0
        {
            threads.enter();
        }
    }

    /// Puts a task and its data into a free slot.
    pub(crate) fn insert(&mut self, task: T, data: Segments) -> Key {
        let index = self.free.pop().unwrap_or_else(|| {
            let index = u32::try_from(self.slots.len()).ok().filter(|n| u64::from(*n) < WAKE);
            let index = index.expect("fewer than 2^28 requests pend");
            self.slots.push(Slot {
                generation: 0,
                busy: false,
                task: None,
                data: Segments::new(),
                own: None,
                iovecs: Vec::new(),
                kind: Kind::Deallocate,
                offset: 0,
                len: 0,
                nowait: false,
            });
            index
        });
        let slot = &mut self.slots[index as usize];
        slot.task = Some(task);
        slot.data = data;
        Key { index, generation: slot.generation }
    }

    /// Removes the content of a slot that is not busy.
    pub(crate) fn remove(&mut self, key: Key) -> Option<Taken<T>> {
        let slot = self.slots.get_mut(key.index as usize)?;
        if slot.busy || slot.generation != key.generation {
            return None;
        }
        let task = slot.task.take()?;
        slot.generation = (slot.generation + 1) % GENERATIONS;
        self.free.push(key.index);
        Some(Taken { task, data: slot.data.take(), own: slot.own.take() })
    }

    /// Iterates over the tasks in all slots.
    pub(crate) fn tasks(&mut self) -> impl Iterator<Item = (Key, &mut T)> {
        (0..).zip(&mut self.slots).filter_map(|(index, slot)| {
            let key = Key { index, generation: slot.generation };
            Some((key, slot.task.as_mut()?))
        })
    }

    /// Key of the current content of a slot.
    pub(crate) fn key(&self, index: u32) -> Option<Key> {
        let slot = self.slots.get(index as usize)?;
        slot.task.as_ref().map(|_| Key { index, generation: slot.generation })
    }

    /// Number of used slots.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    fn slot(&mut self, key: Key) -> Option<&mut Slot<T>> {
        self.slots.get_mut(key.index as usize).filter(|s| s.generation == key.generation)
    }

    /// Task, data and own buffer of a slot.
    pub(crate) fn get(&mut self, key: Key) -> Option<(&mut T, &Segments, Option<&SharedBytes>)> {
        let slot = self.slot(key)?;
        Some((slot.task.as_mut()?, &slot.data, slot.own.as_ref()))
    }

    /// Stores the buffer `own` in a slot that is not busy. The slot holds it until
    /// [`remove`](Self::remove).
    pub(crate) fn set_buffer(&mut self, key: Key, own: SharedBytes) {
        if let Some(slot) = self.slot(key).filter(|s| !s.busy) {
            slot.own = Some(own);
        }
    }

    /// True if the kernel may be executing the call of this slot.
    pub(crate) fn is_busy(&mut self, key: Key) -> bool {
        self.slot(key).is_some_and(|s| s.busy)
    }

    /// True if one more call may be in flight.
    pub(crate) fn has_room(&self) -> bool {
        self.busy < IN_FLIGHT
    }

    /// Prepares a call for the slot, on `len` bytes of the file from `offset` on. The call uses the
    /// buffer of the slot from `skip` on, and may transfer fewer bytes. Returns false if the
    /// submission queue is full; [`submit`](Self::submit) makes room.
    pub(crate) fn prepare(
        &mut self,
        key: Key,
        call: Call,
        skip: usize,
        offset: u64,
        len: u64,
    ) -> bool {
        let len = match &self.namespace {
            Some(namespace) => {
                let moves_data = matches!(call, Call::Read(_) | Call::Write { .. });
                namespace.max_len(moves_data, len)
            }
            None => len,
        };
        let Some(slot) = self.slot(key) else { return false };
        assert!(!slot.busy, "a slot has one call at a time");
        let kind = slot.gather_for(call, skip, len);
        let for_threads = self.is_for_threads(kind);
        let nowait = match kind {
            Kind::Read => self.blocking.direct,
            // io_uring makes the direct writes. If direct writes would block, they occupy at most
            // one of the kernel's worker threads, because the kernel locks a regular file for each
            // write, and so executes them one after another. Several threads would only wait for
            // that lock.
            Kind::Write { .. } => !self.blocking.direct,
            _ => false,
        };
        let nowait = nowait && !for_threads && !self.blocking.off;
        let Some(slot) = self.slots.get_mut(key.index as usize) else { return false };
        (slot.kind, slot.offset, slot.len, slot.nowait) = (kind, offset, len, nowait);
        let id = key.id();
        let call = Prepared { id, kind, iovecs: &slot.iovecs, offset, len, nowait };
        // SAFETY: the call points to memory that the slot holds: its iovecs, and the mappings
        // behind its data and its own buffer. The slot is marked busy. So the slot neither changes
        // nor frees any of this memory before the completion of the call was collected. See the
        // documentation of the module.
        slot.busy = unsafe {
            match self.blocking.threads.as_mut().filter(|_| for_threads) {
                Some(threads) => threads.push(&call),
                None => with!(&mut self.engine, it => it.push(&call)),
            }
        };
        self.busy += usize::from(slot.busy);
        slot.busy
    }

    /// Requests that the call of this slot ends early.
    pub(crate) fn cancel(&mut self, key: Key) {
        if let Some(threads) = &mut self.blocking.threads {
            threads.cancel(key.id());
        }
        with!(&mut self.engine, it => it.cancel(key.id()));
    }

    /// Makes the descriptor of the ring readable although no call has ended.
    pub(crate) fn wake(&mut self) {
        with!(&mut self.engine, it => it.wake());
    }

    /// Passes all prepared calls to the kernel by one system call, which also collects completions.
    /// If no call is prepared, makes no system call.
    pub(crate) fn submit(&mut self) {
        self.submit_blocking();
        with!(&mut self.engine, it => if it.prepared() != 0 { it.enter() });
    }

    /// Submits the prepared calls like [`submit`](Self::submit), but only if at least as many calls
    /// are prepared as are in flight.
    ///
    /// Calls that are submitted together reach the device only after the kernel has prepared the
    /// last of them. The preparation takes some microseconds per call, during which an idle device
    /// would do nothing. So the first call is submitted alone, then batches of one, two, four and
    /// so on follow. The device is busy with one batch while the next is prepared, and n calls need
    /// only log n system calls.
    pub(crate) fn submit_in_time(&mut self) {
        self.submit_blocking();
        let prepared = with!(&mut self.engine, it => it.prepared());
        if prepared != 0 && prepared >= self.busy.saturating_sub(prepared) {
            with!(&mut self.engine, it => it.enter());
        }
    }

    /// Moves all completions to `into`. A completion consists of the slot and the result of the
    /// call: the number of transferred bytes, or a negative error number.
    pub(crate) fn collect(&mut self, into: &mut Vec<(Key, i32)>) {
        let Self { engine, slots, busy, blocking, .. } = self;
        let is_command = matches!(engine, Engine::Namespace(_));
        let Blocking { threads, reads, writes, retries, .. } = blocking;
        let mut each = |data: u64, result: i32| {
            let key = Key::of_id(data);
            if let Some(slot) = slots.get_mut(key.index as usize)
                && slot.generation == key.generation
                && slot.busy
            {
                if slot.nowait && matches!(-result, libc::EAGAIN | libc::EOPNOTSUPP) {
                    if result == -libc::EOPNOTSUPP {
                        let all = if slot.kind == Kind::Read { &mut *reads } else { &mut *writes };
                        *all = true;
                    }
                    return retries.push(key.index);
                }
                slot.busy = false;
                *busy -= 1;
                let result = if is_command { slot.of_command(result) } else { result };
                into.push((key, result));
            }
        };
        if let Some(threads) = threads {
            threads.collect(&mut each);
        }
        with!(engine, it => it.collect(each));
        if !self.blocking.retries.is_empty() {
            self.take_back(into);
        }
    }

    /// Processes the calls that io_uring has returned because they would block.
    fn take_back(&mut self, into: &mut Vec<(Key, i32)>) {
        self.probe_writes(into);
        if self.blocking.retries.is_empty() {
            return;
        }
        if self.has_threads() {
            return self.retry_blocked();
        }
        // Without threads, the calls end with `EAGAIN`. The owner repeats them, now without
        // `RWF_NOWAIT`, and the kernel's workers execute them.
        for index in std::mem::take(&mut self.blocking.retries) {
            let slot = &mut self.slots[index as usize];
            slot.busy = false;
            self.busy -= 1;
            into.push((Key { index, generation: slot.generation }, -libc::EAGAIN));
        }
    }

    /// Returns a waker, which makes the descriptor readable from any thread. The owner has to call
    /// [`quieten`](Self::quieten) before it checks for work.
    pub(crate) fn waker(&self) -> Waker {
        match &self.engine {
            Engine::Uring(it) => Waker::Alarm(Arc::clone(it.alarm())),
            Engine::Namespace(it) => Waker::Alarm(Arc::clone(it.alarm())),
            Engine::Threads(it) => Waker::Threads(Arc::clone(it.shared())),
        }
    }

    /// [`Alarm`] of the thread's io_uring. `None` for the engine of threads.
    fn alarm(&self) -> Option<&Alarm> {
        match &self.engine {
            Engine::Uring(it) => Some(it.alarm()),
            Engine::Namespace(it) => Some(it.alarm()),
            Engine::Threads(_) => None,
        }
    }

    /// Makes the descriptor unreadable after calls of a [`Waker`]. (With threads,
    /// [`collect`](Self::collect) does that.)
    pub(crate) fn quieten(&self) {
        if let Some(alarm) = self.alarm() {
            alarm.quieten();
        }
    }

    /// Makes the descriptor readable again if results for other queues of the thread have not been
    /// taken: [`quieten`](Self::quieten) has cleared their wake-up too. Called after the results
    /// for this queue were taken.
    pub(crate) fn wake_others(&self) {
        if let Some(alarm) = self.alarm() {
            alarm.ring_if_due();
        }
    }

    /// Makes the descriptor also readable while `fd` is readable.
    pub(crate) fn merge(&mut self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let both = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in [self.fd(), fd] {
            epoll::add(&both, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        self.merged = Some(both);
        Ok(())
    }

    /// Descriptor that is readable while [`collect`](Self::collect) has work.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match &self.merged {
            Some(both) => both.as_fd(),
            None => with!(&self.engine, it => it.fd()),
        }
    }

    /// True if other queues of the thread have the same [`fd`](Self::fd).
    pub(crate) fn shares_fd(&self) -> bool {
        self.merged.is_none() && self.alarm().is_some()
    }
}

impl<T> Drop for Ring<T> {
    /// Cancels all calls that can be cancelled. Waits until the kernel no longer accesses the
    /// memory of any slot. While the storage is hung, this blocks.
    fn drop(&mut self) {
        let busy: Vec<Key> = (0..)
            .zip(&self.slots)
            .filter(|(_, slot)| slot.busy)
            .map(|(index, slot)| Key { index, generation: slot.generation })
            .collect();
        for key in busy {
            self.cancel(key);
        }
        let mut ended = Vec::new();
        while self.busy > 0 {
            self.collect(&mut ended);
            ended.clear();
            if self.busy == 0 {
                break;
            }
            if self.blocking.threads.is_some() {
                // The next completion may come from io_uring or from the threads. `poll` may return
                // at once because the descriptor is readable for another queue of the thread. So
                // the thread also sleeps.
                let fd = self.fd();
                let mut fds = [PollFd::new(&fd, PollFlags::IN)];
                let pause = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
                let _ = poll(&mut fds, Some(&pause));
                self.submit();
                self.collect(&mut ended);
                if ended.is_empty() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            } else if let Err(Stuck) = with!(&mut self.engine, it => it.wait()) {
                // The kernel may still access the memory, so it is leaked instead of freed.
                std::mem::forget(std::mem::take(&mut self.slots));
                return;
            }
        }
        if let (Some(threads), Engine::Uring(uring)) = (&self.blocking.threads, &self.engine) {
            uring.unwatch(threads.fd());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::slot::Memory;
    use super::*;
    use shadowbell_memory::Mapping;
    use shadowbell_testing::wait;
    use std::os::fd::AsRawFd;

    fn memfd() -> Arc<File> {
        let fd = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        Arc::new(fd.into())
    }

    fn ring(file: Arc<File>) -> Ring<()> {
        Ring::new(file, EngineKind::Uring, false, false).unwrap()
    }

    fn read(ring: &mut Ring<()>) {
        let bytes = Mapping::anonymous(4096).unwrap().bytes();
        let key = ring.insert((), Segments::from_bytes(&bytes));
        assert!(ring.prepare(key, Call::Read(Memory::Data), 0, 0, 512));
    }

    fn results(ring: &mut Ring<()>) -> Vec<i32> {
        let mut ended = Vec::new();
        ring.collect(&mut ended);
        ended.into_iter().map(|(_, result)| result).collect()
    }

    /// Submits the prepared calls, and waits until the kernel's queue has `count` completions.
    fn submit(ring: &mut Ring<()>, count: usize) {
        ring.submit();
        let Engine::Uring(uring) = &mut ring.engine else { panic!("it has no io_uring") };
        wait::until("completions", || uring.completions() == count);
    }

    fn is_readable(ring: &Ring<()>) -> bool {
        let fd = ring.fd();
        poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&Timespec::default())).unwrap() != 0
    }

    /// The descriptor stays readable until each queue has collected its completions, even if
    /// another queue takes them from the kernel.
    #[test]
    fn queues_of_a_thread_share_a_ring_and_get_their_own_completions() {
        let (mut a, mut b, c) = (ring(memfd()), ring(memfd()), ring(memfd()));
        assert!(a.fd().as_raw_fd() == b.fd().as_raw_fd() && a.shares_fd());
        for round in 0..300 {
            let (reads_of_a, reads_of_b) = (1 + round % 3, round % 5);
            (0..reads_of_a).for_each(|_| read(&mut a));
            (0..reads_of_b).for_each(|_| read(&mut b));
            // One system call submits the calls of both queues.
            submit(&mut a, reads_of_a + reads_of_b);
            assert!(is_readable(&c));
            assert_eq!(results(&mut a), vec![512; reads_of_a]);
            assert_eq!(is_readable(&a), reads_of_b != 0);
            if round % 2 == 0 {
                // A further completion of `a` arrives while completions of `b` are in the inbox of
                // `b` (see `uring.rs`).
                read(&mut a);
                submit(&mut a, 1 + usize::from(reads_of_b != 0));
                assert_eq!(results(&mut a), [512]);
                assert_eq!(is_readable(&a), reads_of_b != 0);
            }
            assert_eq!(results(&mut b), vec![512; reads_of_b]);
            assert!(!is_readable(&a));
            for ring in [&mut a, &mut b] {
                let keys: Vec<_> = (0..8).filter_map(|n| ring.key(n)).collect();
                assert!(keys.into_iter().all(|key| ring.remove(key).is_some()));
            }
        }
    }

    #[test]
    fn a_hung_file_occupies_its_own_calls_only() {
        // Reads of an empty pipe never end.
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        let (mut hung, mut other) = (ring(Arc::new(File::from(reader))), ring(memfd()));
        while hung.has_room() {
            read(&mut hung);
            hung.submit();
        }
        assert!(other.has_room());
        for _ in 0..100 {
            read(&mut other);
            submit(&mut other, 1);
            assert_eq!(results(&mut other), [512]);
            other.remove(other.key(0).unwrap()).unwrap();
        }
        assert_eq!((results(&mut hung), hung.busy), (vec![], IN_FLIGHT));
        read(&mut other);
        submit(&mut other, 1);
        // The drop waits for the calls of `hung`, and collects the completion of `other`.
        drop(hung);
        assert_eq!(results(&mut other), [512]);
        // The next queue gets the number of the closed queue, but not its completions.
        let mut next = ring(memfd());
        read(&mut next);
        submit(&mut next, 1);
        assert_eq!(results(&mut next), [512]);
        assert!(!is_readable(&next));
    }

    #[test]
    fn an_answer_for_one_queue_is_not_lost_when_another_one_is_reaped() {
        let (a, b) = (ring(memfd()), ring(memfd()));
        let answer = b.waker();
        answer.wake();
        a.quieten();
        a.wake_others();
        rustix::event::poll(&mut [PollFd::new(&a.fd(), PollFlags::IN)], None).unwrap();
        answer.taken(1);
        b.quieten();
        b.wake_others();
        assert!(!is_readable(&a));
    }

    #[test]
    fn a_kernel_that_has_little_in_hand_gets_more_at_once() {
        // Reads of an empty pipe never end.
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        let mut ring: Ring<()> =
            Ring::new(Arc::new(File::from(reader)), EngineKind::Uring, false, false).unwrap();
        let bytes = Mapping::anonymous(4096).unwrap().bytes();
        let calls: Vec<usize> = (1..=64)
            .filter(|_| {
                let key = ring.insert((), Segments::from_bytes(&bytes));
                assert!(ring.prepare(key, Call::Read(Memory::Data), 0, 0, 512));
                ring.submit_in_time();
                with!(&mut ring.engine, it => it.prepared()) == 0
            })
            .collect();
        assert_eq!(calls, [1, 2, 4, 8, 16, 32, 64]);
    }
}
