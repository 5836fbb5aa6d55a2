//! One queue's calls, and the memory that the kernel works on.
//!
//! The kernel reads and writes memory behind the compiler's back from the moment that a call is
//! handed over until its completion is collected. So the ring owns that memory for as long: each
//! call belongs to a slot that holds the data buffer, the bounce buffer and the iovecs, a busy
//! slot gives none of them away, and a ring that is dropped waits for every busy slot first.
//! What is forgotten instead of dropped is never freed either.

mod in_place;

use super::call::{Kind, NO_SLOT, Prepared, Stuck};
use super::here::Here;
use super::namespace_ring::NamespaceRing;
use super::passthrough::Namespace;
use super::slot::{Call, Slot};
use super::threads::Threads;
use super::uring::Uring;
use super::waker::Waker;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shadowbell_memory::{Segments, SharedBytes};
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Calls that can be under way at once; what is more waits in this process, in order. The kernel's
/// queue has twice the room, so that cancellations never fill it.
const COMPLETIONS: u32 = 1024;
/// Names a slot, and the use that is made of it now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    index: u32,
    generation: u32,
}

impl Key {
    /// One of no ring.
    #[cfg(test)]
    pub(crate) fn of(index: u32, generation: u32) -> Self {
        Self { index, generation }
    }

    /// The slot's number, which is small.
    pub(crate) fn index(self) -> u32 {
        self.index
    }

    fn user_data(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }
}

/// What a slot held.
pub(crate) struct Taken<T> {
    pub(crate) task: T,
    pub(crate) data: Segments,
    pub(crate) own: Option<SharedBytes>,
}

/// How calls are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EngineKind {
    /// By the kernel, through an io_uring.
    Uring,
    /// By threads of this process.
    Threads,
}

#[allow(clippy::large_enum_variant, reason = "there is one for each queue")]
enum Engine {
    Uring(Uring),
    /// io_uring, with commands for a namespace.
    Namespace(NamespaceRing),
    Threads(Threads),
}

/// Runs an expression with whichever engine there is.
macro_rules! with {
    ($engine:expr, $it:ident => $what:expr) => {
        match $engine {
            Engine::Uring($it) => $what,
            Engine::Namespace($it) => $what,
            Engine::Threads($it) => $what,
        }
    };
}

/// The calls that the kernel would have to wait for, where it is io_uring that makes the others.
///
/// The kernel has workers for those, some eight, which all rings of a thread share. A file that
/// does not answer would keep all of them, and the calls on every other file of the thread would
/// wait for that. So what would be theirs is made by threads that this ring has for itself.
struct Blocking {
    file: Arc<File>,
    threads: Option<Threads>,
    /// Every read waits: the file has no way to say that it would.
    reads: bool,
    /// Every write does, for all that is known.
    writes: bool,
    /// Reads go past the page cache. (Those that do not are continued by the kernel when their
    /// page has come, without a worker.)
    direct: bool,
    /// There is no descriptor for threads: it has to go without.
    off: bool,
    /// Which of them the thread makes itself.
    here: Here,
    /// Calls that io_uring has given back, kept for its room.
    again: Vec<u32>,
}

/// A queue of calls with its slots; `T` is what the owner remembers of each.
pub(crate) struct Ring<T> {
    engine: Engine,
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    busy: usize,
    blocking: Blocking,
    /// The file is the character device of this.
    namespace: Option<Namespace>,
}

impl<T> Ring<T> {
    /// Opens a queue for calls on `file`, to be used by this thread alone. `waits` says whether
    /// its calls can not be asked to fail rather than wait, and `direct` whether they go past the
    /// page cache.
    pub(crate) fn new(
        file: Arc<File>,
        engine: EngineKind,
        waits: bool,
        direct: bool,
    ) -> io::Result<Self> {
        let blocking = Blocking {
            file: Arc::clone(&file),
            threads: None,
            reads: waits,
            writes: waits,
            direct,
            off: engine == EngineKind::Threads,
            here: Here::default(),
            again: Vec::new(),
        };
        let engine = match engine {
            EngineKind::Uring => Engine::Uring(Uring::new(file, 2 * COMPLETIONS)?),
            EngineKind::Threads => Engine::Threads(Threads::new(file)?),
        };
        Ok(Self::with(engine, blocking, None))
    }

    /// As [`new`](Self::new), where `file` is the character device of `namespace`: calls are its
    /// commands, whose statuses are error numbers from [`NVME_STATUS`] on.
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
            // The system never waits for a device here.
            off: true,
            here: Here::default(),
            again: Vec::new(),
        };
        let engine = match engine {
            EngineKind::Uring => {
                Engine::Namespace(NamespaceRing::new(file, 2 * COMPLETIONS, namespace)?)
            }
            EngineKind::Threads => Engine::Threads(Threads::of(file, Some(namespace))?),
        };
        Ok(Self::with(engine, blocking, Some(namespace)))
    }

    fn with(engine: Engine, blocking: Blocking, namespace: Option<Namespace>) -> Self {
        Self { engine, slots: Vec::new(), free: Vec::new(), busy: 0, blocking, namespace }
    }

    /// From here on a test says when calls end, and how; nothing if io_uring makes them.
    #[cfg(feature = "scripted")]
    pub(crate) fn set_by_hand(&mut self) -> Option<Arc<super::threads::ThreadsShared>> {
        let Engine::Threads(threads) = &mut self.engine else { return None };
        threads.set_by_hand();
        Some(Arc::clone(threads.shared()))
    }

    /// Whether a call of this kind is for the threads beside io_uring.
    fn is_for_threads(&mut self, kind: Kind) -> bool {
        let waits = match kind {
            Kind::Read => self.blocking.reads,
            Kind::Write { .. } => self.blocking.writes,
            Kind::Sync | Kind::Allocate { .. } | Kind::Deallocate => true,
        };
        waits && !self.blocking.off && self.has_threads()
    }

    /// Sees to it that there are threads beside io_uring.
    fn has_threads(&mut self) -> bool {
        let Engine::Uring(uring) = &self.engine else { return false };
        if self.blocking.threads.is_none() {
            let threads = Threads::new(Arc::clone(&self.blocking.file));
            self.blocking.threads = threads.ok().filter(|it| uring.watch(it.fd()).is_ok());
            self.blocking.off = self.blocking.threads.is_none();
        }
        self.blocking.threads.is_some()
    }

    /// Has threads make the calls that io_uring has given back.
    fn try_again(&mut self) {
        let mut again = std::mem::take(&mut self.blocking.again);
        for index in again.drain(..) {
            let slot = &mut self.slots[index as usize];
            slot.nowait = false;
            let id = Key { index, generation: slot.generation }.user_data();
            let Slot { kind, offset, len, .. } = *slot;
            let call = Prepared { id, kind, iovecs: &slot.iovecs, offset, len, nowait: false };
            if let Some(threads) = &mut self.blocking.threads {
                // SAFETY: as in `prepare`: the slot is busy still.
                unsafe { threads.push(&call) };
            }
        }
        self.blocking.again = again;
        self.submit_blocking();
    }

    fn submit_blocking(&mut self) {
        if let Some(threads) = &mut self.blocking.threads
            && threads.prepared() != 0
        {
            threads.enter();
        }
    }

    /// Puts a task and its data into a slot.
    pub(crate) fn insert(&mut self, task: T, data: Segments) -> Key {
        let index = self.free.pop().unwrap_or_else(|| {
            let index = u32::try_from(self.slots.len()).expect("fewer than 2^32 requests pend");
            self.slots.push(Slot {
                generation: 0,
                busy: false,
                task: None,
                data: Segments::new(),
                own: None,
                iovecs: Vec::new(),
                kind: Kind::Sync,
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

    /// Takes everything out of a slot that is not busy.
    pub(crate) fn remove(&mut self, key: Key) -> Option<Taken<T>> {
        let slot = self.slots.get_mut(key.index as usize)?;
        if slot.busy || slot.generation != key.generation {
            return None;
        }
        let task = slot.task.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(key.index);
        Some(Taken { task, data: slot.data.take(), own: slot.own.take() })
    }

    /// The tasks in all slots.
    pub(crate) fn tasks(&mut self) -> impl Iterator<Item = (Key, &mut T)> {
        (0..).zip(&mut self.slots).filter_map(|(index, slot)| {
            let key = Key { index, generation: slot.generation };
            Some((key, slot.task.as_mut()?))
        })
    }

    /// The key of what is in a slot now.
    pub(crate) fn key(&self, index: u32) -> Option<Key> {
        let slot = self.slots.get(index as usize)?;
        slot.task.as_ref().map(|_| Key { index, generation: slot.generation })
    }

    /// How many slots are in use.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    fn slot(&mut self, key: Key) -> Option<&mut Slot<T>> {
        self.slots.get_mut(key.index as usize).filter(|s| s.generation == key.generation)
    }

    /// A slot's task, data and own buffer.
    pub(crate) fn get(&mut self, key: Key) -> Option<(&mut T, &Segments, Option<&SharedBytes>)> {
        let slot = self.slot(key)?;
        Some((slot.task.as_mut()?, &slot.data, slot.own.as_ref()))
    }

    /// Gives `own` to a slot that is not busy and has none.
    pub(crate) fn set_own(&mut self, key: Key, own: SharedBytes) {
        if let Some(slot) = self.slot(key).filter(|s| !s.busy) {
            slot.own = Some(own);
        }
    }

    /// Whether the kernel may have been given the slot's call.
    pub(crate) fn is_busy(&mut self, key: Key) -> bool {
        self.slot(key).is_some_and(|s| s.busy)
    }

    /// Whether one more call can be under way.
    pub(crate) fn has_room(&self) -> bool {
        self.busy < COMPLETIONS as usize
    }

    /// Prepares a call for the slot: `len` bytes of the file from `offset`; its buffer is used
    /// from `skip`. It may move fewer bytes. Returns whether there was room in the submission
    /// queue; if not, [`enter`](Self::enter) makes some.
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
                namespace.most(moves_data, len)
            }
            None => len,
        };
        let Some(slot) = self.slot(key) else { return false };
        assert!(!slot.busy, "a slot has one call at a time");
        let kind = slot.gather_for(call, skip, len);
        let for_threads = self.is_for_threads(kind);
        let nowait = match kind {
            Kind::Read => self.blocking.direct,
            // Direct writes to a regular file are one after the other in the kernel, and so never
            // keep more than one worker; threads would only contend for its lock.
            Kind::Write { .. } => !self.blocking.direct,
            _ => false,
        };
        let nowait = nowait && !for_threads && !self.blocking.off;
        let Some(slot) = self.slots.get_mut(key.index as usize) else { return false };
        (slot.kind, slot.offset, slot.len, slot.nowait) = (kind, offset, len, nowait);
        let id = key.user_data();
        let call = Prepared { id, kind, iovecs: &slot.iovecs, offset, len, nowait };
        // SAFETY: the call points to memory that the slot holds (its iovecs, and the mappings
        // behind its data and own buffer). The slot is marked busy, and so neither changes nor
        // frees any of it before the call's completion has been collected; see the module's
        // documentation.
        slot.busy = unsafe {
            match self.blocking.threads.as_mut().filter(|_| for_threads) {
                Some(threads) => threads.push(&call),
                None => with!(&mut self.engine, it => it.push(&call)),
            }
        };
        self.busy += usize::from(slot.busy);
        slot.busy
    }

    /// Asks that the slot's call ends early.
    pub(crate) fn cancel(&mut self, key: Key) {
        if let Some(threads) = &mut self.blocking.threads {
            threads.cancel(key.user_data());
        }
        with!(&mut self.engine, it => it.cancel(key.user_data()));
    }

    /// Makes the ring's descriptor readable, though no call has ended.
    pub(crate) fn wake(&mut self) {
        with!(&mut self.engine, it => it.wake());
    }

    /// Hands over everything that was prepared, in one go, which also brings in what has ended.
    /// Without anything prepared, no call.
    pub(crate) fn submit(&mut self) {
        self.submit_blocking();
        with!(&mut self.engine, it => if it.prepared() != 0 { it.enter() });
    }

    /// As [`submit`](Self::submit), once as much is prepared as the kernel has in hand.
    ///
    /// What is handed over together reaches the device together, when the last call of it has been
    /// made ready; each takes the kernel some microseconds, in which a device that has run dry does
    /// nothing. So it gets the first call at once, then one, two, four and so on: it has work for
    /// as long as the next are made ready, and a queue of n costs log n system calls.
    pub(crate) fn submit_in_time(&mut self) {
        self.submit_blocking();
        let prepared = with!(&mut self.engine, it => it.prepared());
        if prepared != 0 && prepared >= self.busy.saturating_sub(prepared) {
            with!(&mut self.engine, it => it.enter());
        }
    }

    /// Moves the completions of this moment to `into`: which slot, and the call's result (a
    /// negative error number, or the bytes that it moved).
    pub(crate) fn collect(&mut self, into: &mut Vec<(Key, i32)>) {
        let Self { engine, slots, busy, blocking, .. } = self;
        let is_command = matches!(engine, Engine::Namespace(_));
        let Blocking { threads, reads, writes, again, .. } = blocking;
        let mut each = |data: u64, result: i32| {
            let key = Key { index: data as u32, generation: (data >> 32) as u32 };
            if data != NO_SLOT
                && let Some(slot) = slots.get_mut(key.index as usize)
                && slot.generation == key.generation
                && slot.busy
            {
                if slot.nowait && matches!(-result, libc::EAGAIN | libc::EOPNOTSUPP) {
                    if result == -libc::EOPNOTSUPP {
                        let all = if slot.kind == Kind::Read { &mut *reads } else { &mut *writes };
                        *all = true;
                    }
                    return again.push(key.index);
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
        if !self.blocking.again.is_empty() {
            self.take_back(into);
        }
    }

    /// io_uring has given calls back.
    fn take_back(&mut self, into: &mut Vec<(Key, i32)>) {
        self.ask_about_writes(into);
        if self.blocking.again.is_empty() {
            return;
        }
        if self.has_threads() {
            return self.try_again();
        }
        // They are repeated, and the kernel's workers have to do.
        for index in std::mem::take(&mut self.blocking.again) {
            let slot = &mut self.slots[index as usize];
            slot.busy = false;
            self.busy -= 1;
            into.push((Key { index, generation: slot.generation }, -libc::EAGAIN));
        }
    }

    /// Makes the descriptor readable from any thread. Whoever expects that calls
    /// [`quieten`](Self::quieten) before it looks what there is.
    pub(crate) fn waker(&self) -> Waker {
        match &self.engine {
            Engine::Uring(it) => Waker::Alarm(Arc::clone(it.alarm())),
            Engine::Namespace(it) => Waker::Alarm(Arc::clone(it.alarm())),
            Engine::Threads(it) => Waker::Threads(Arc::clone(it.shared())),
        }
    }

    /// What a [`Waker`] has done until now is undone. (With threads that is part of
    /// [`collect`](Self::collect).)
    pub(crate) fn quieten(&self) {
        match &self.engine {
            Engine::Uring(it) => it.quieten(),
            Engine::Namespace(it) => it.quieten(),
            Engine::Threads(_) => {}
        }
    }

    /// Makes the descriptor readable whenever `fd` is, too, if io_uring makes the calls.
    pub(crate) fn watch(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        match &self.engine {
            Engine::Uring(it) => it.watch(fd),
            Engine::Namespace(it) => it.watch(fd),
            Engine::Threads(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// A descriptor: readable when [`collect`](Self::collect) has something to do.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        with!(&self.engine, it => it.fd())
    }
}

impl<T> Drop for Ring<T> {
    /// Waits until the kernel is done with the memory of every slot. Calls that can be cancelled
    /// are; storage that never answers holds this up for as long.
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
                // Either may be first.
                let fd = self.fd();
                let mut fds = [PollFd::new(&fd, PollFlags::IN)];
                let pause = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
                let _ = poll(&mut fds, Some(&pause));
                self.submit();
            } else if let Err(Stuck) = with!(&mut self.engine, it => it.wait()) {
                // Rather than free memory under the kernel, keep that memory for good.
                std::mem::forget(std::mem::take(&mut self.slots));
                return;
            }
        }
        match &mut self.engine {
            Engine::Uring(uring) => uring.close(),
            Engine::Namespace(uring) => uring.close(),
            Engine::Threads(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::slot::Memory;
    use super::*;
    use shadowbell_memory::Mapping;

    #[test]
    fn a_kernel_that_has_little_in_hand_gets_more_at_once() {
        // Of an empty pipe, which never answers.
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
