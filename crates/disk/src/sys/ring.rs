//! One queue's io_uring, and the memory that the kernel works on.
//!
//! The kernel reads and writes memory behind the compiler's back from the moment that a call is
//! handed over until its completion is collected. So the ring owns that memory for as long: each
//! call belongs to a slot that holds the data buffer, the bounce buffer and the iovecs, a busy
//! slot gives none of them away, and a ring that is dropped waits for every busy slot first.
//! What is forgotten instead of dropped is never freed either.

use io_uring::squeue::Entry;
use io_uring::{EnterFlags, IoUring, opcode, types};
use memory::{Segments, SharedBytes};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

/// Calls that can be handed over at once; more just need another system call.
const SUBMISSIONS: u32 = 128;
/// Calls that can be under way at once; what is more waits in this process, in order. The kernel's
/// queue has twice the room, so that cancellations never fill it.
const COMPLETIONS: u32 = 1024;
/// The most pieces that the kernel takes in one call (UIO_MAXIOV). A transfer of more ends short,
/// and is continued.
const MAX_IOVECS: usize = 1024;
/// The most bytes in one call: what the kernel's 32-bit length holds, in whole pages.
const MAX_BYTES: u64 = 1 << 30;
/// The completion of a call without a slot (a cancellation, a wake-up).
const NO_SLOT: u64 = u64::MAX;
/// How often the kernel is asked again when it has no memory for a call, a millisecond apart.
const PATIENCE: u32 = 100;

/// What the kernel is to do with the file, at an offset that comes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// File to memory.
    Read(Memory),
    /// Memory to file; with `dsync`, onto stable storage.
    Write {
        from: Memory,
        dsync: bool,
    },
    Sync,
    /// Takes the range's blocks out of the file.
    Punch,
    /// Makes the range zeroes and keeps its blocks.
    ZeroRange,
}

/// Which of a slot's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// The command's data.
    Data,
    /// The queue's own buffer, lent to the slot.
    Own,
}

/// Names a slot, and the use that is made of it now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    index: u32,
    generation: u32,
}

impl Key {
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

struct Slot<T> {
    generation: u32,
    /// The kernel may be using what is in here.
    busy: bool,
    task: Option<T>,
    data: Segments,
    own: Option<SharedBytes>,
    iovecs: Vec<libc::iovec>,
}

/// A ring with its slots; `T` is what the owner remembers of each.
pub(crate) struct Ring<T> {
    uring: IoUring,
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    busy: usize,
    /// The file is registered with the ring, which saves a look-up for each call.
    registered: bool,
    file: Arc<File>,
}

impl<T> Ring<T> {
    /// Opens a ring for calls on `file`, to be used by this thread alone.
    pub(crate) fn new(file: Arc<File>) -> io::Result<Self> {
        let uring = build(SUBMISSIONS, 2 * COMPLETIONS)?;
        let registered = uring.submitter().register_files(&[file.as_raw_fd()]).is_ok();
        Ok(Self { uring, slots: Vec::new(), free: Vec::new(), busy: 0, registered, file })
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

    /// Lends `own` to a slot that is not busy and has none.
    pub(crate) fn lend(&mut self, key: Key, own: SharedBytes) {
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
        let fd = if self.registered { Ok(types::Fixed(0)) } else { Err(self.file.as_raw_fd()) };
        let Some(slot) =
            self.slots.get_mut(key.index as usize).filter(|s| s.generation == key.generation)
        else {
            return false;
        };
        assert!(!slot.busy, "a slot has one call at a time");
        let entry = match fd {
            Ok(fd) => slot.entry(call, skip, offset, len, fd),
            Err(fd) => slot.entry(call, skip, offset, len, types::Fd(fd)),
        };
        // SAFETY: the entry points to memory that the slot holds (its iovecs, and the mappings
        // behind its data and own buffer). The slot is marked busy, and so neither changes nor
        // frees any of it before the call's completion has been collected; see the module's
        // documentation. The file is open as long as the ring is.
        let pushed = unsafe { self.uring.submission().push(&entry.user_data(key.user_data())) };
        slot.busy = pushed.is_ok();
        self.busy += usize::from(slot.busy);
        slot.busy
    }

    /// Asks the kernel to end the slot's call early.
    pub(crate) fn cancel(&mut self, key: Key) {
        self.push_control(&opcode::AsyncCancel::new(key.user_data()).build());
    }

    /// Makes the ring's descriptor readable, though no call has ended.
    pub(crate) fn wake(&mut self) {
        self.push_control(&opcode::Nop::new().build());
    }

    fn push_control(&mut self, entry: &Entry) {
        let entry = entry.clone().user_data(NO_SLOT);
        for _ in 0..2 {
            // SAFETY: neither a cancellation nor a no-op has memory.
            if unsafe { self.uring.submission().push(&entry) }.is_ok() {
                self.enter();
                return;
            }
            self.enter();
        }
    }

    /// Hands everything that was prepared to the kernel, in one system call, which also brings in
    /// what has ended. Without anything prepared, no call.
    pub(crate) fn submit(&mut self) {
        if !self.uring.submission().is_empty() {
            self.enter();
        }
    }

    /// As [`submit`](Self::submit), once as much is prepared as the kernel has in hand.
    ///
    /// What is handed over together reaches the device together, when the last call of it has been
    /// made ready; each takes the kernel some microseconds, in which a device that has run dry does
    /// nothing. So it gets the first call at once, then one, two, four and so on: it has work for as
    /// long as the next are made ready, and a queue of n costs log n system calls.
    pub(crate) fn submit_in_time(&mut self) {
        let prepared = self.uring.submission().len();
        if prepared != 0 && prepared >= self.busy.saturating_sub(prepared) {
            self.enter();
        }
    }

    /// As [`submit`](Self::submit), even if nothing was prepared. When the kernel has no memory
    /// for a call, it is asked again for a while; what it still does not take stays prepared.
    pub(crate) fn enter(&mut self) {
        for _ in 0..PATIENCE {
            match self.enter_once(0) {
                Ok(_) if self.uring.submission().is_empty() => return,
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    fn enter_once(&mut self, wait: u32) -> io::Result<usize> {
        let prepared = self.uring.submission().len() as u32;
        let flags = EnterFlags::GETEVENTS.bits();
        // SAFETY: no argument structure is passed, and what the prepared entries point to is kept
        // as `prepare` says.
        unsafe { self.uring.submitter().enter::<libc::sigset_t>(prepared, wait, flags, None) }
    }

    /// Moves the completions of this moment to `into`: which slot, and the call's result (a
    /// negative error number, or the bytes that it moved).
    pub(crate) fn collect(&mut self, into: &mut Vec<(Key, i32)>) {
        if self.uring.completion().is_empty() {
            let submission = self.uring.submission();
            // What has ended while this thread ran becomes visible when it enters the kernel.
            let due = submission.taskrun() || submission.cq_overflow();
            drop(submission);
            if !due {
                return;
            }
            self.enter();
        }
        for completion in self.uring.completion() {
            let data = completion.user_data();
            let key = Key { index: data as u32, generation: (data >> 32) as u32 };
            if data == NO_SLOT {
                continue;
            }
            if let Some(slot) = self.slots.get_mut(key.index as usize)
                && slot.generation == key.generation
                && slot.busy
            {
                slot.busy = false;
                self.busy -= 1;
                into.push((key, completion.result()));
            }
        }
    }

    /// The ring's descriptor: readable when [`collect`](Self::collect) has something to do.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.uring.as_fd()
    }
}

impl<T> Slot<T> {
    fn entry(&mut self, call: Call, skip: usize, offset: u64, len: u64, fd: impl Target) -> Entry {
        match call {
            Call::Read(memory) => {
                self.gather(memory, skip, len, true);
                fd.read(&self.iovecs, offset)
            }
            Call::Write { from, dsync } => {
                self.gather(from, skip, len, false);
                fd.write(&self.iovecs, offset, if dsync { libc::RWF_DSYNC } else { 0 })
            }
            Call::Sync => fd.sync(),
            Call::Punch => {
                fd.fallocate(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, offset, len)
            }
            Call::ZeroRange => {
                fd.fallocate(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE, offset, len)
            }
        }
    }

    /// Lists the pieces of the buffer from `skip`, `len` bytes at most. A buffer that the kernel
    /// is to write and may not, or that is missing, has none.
    fn gather(&mut self, memory: Memory, skip: usize, len: u64, write: bool) {
        self.iovecs.clear();
        let mut left = len.min(MAX_BYTES) as usize;
        let mut skip = skip;
        let mut add = |address: usize, len: usize| {
            if skip >= len {
                skip -= len;
            } else if left > 0 && self.iovecs.len() < MAX_IOVECS {
                let n = (len - skip).min(left);
                let iov_base = std::ptr::with_exposed_provenance_mut(address + skip);
                self.iovecs.push(libc::iovec { iov_base, iov_len: n });
                skip = 0;
                left -= n;
            }
        };
        match memory {
            Memory::Data if !write || self.data.is_writable() => {
                for piece in self.data.pieces() {
                    add(piece.address(), piece.len());
                }
            }
            Memory::Own => {
                if let Some(own) = self.own.as_ref().filter(|o| !write || o.is_writable()) {
                    add(own.address(), own.len());
                }
            }
            Memory::Data => {}
        }
    }
}

/// A file, by its number or by its place in the ring's table.
trait Target {
    fn read(self, iovecs: &[libc::iovec], offset: u64) -> Entry;
    fn write(self, iovecs: &[libc::iovec], offset: u64, flags: i32) -> Entry;
    fn sync(self) -> Entry;
    fn fallocate(self, mode: i32, offset: u64, len: u64) -> Entry;
}

macro_rules! target {
    ($kind:ty) => {
        impl Target for $kind {
            fn read(self, iovecs: &[libc::iovec], offset: u64) -> Entry {
                // One piece needs no list, and saves the kernel a copy of it.
                if let [one] = iovecs {
                    return opcode::Read::new(self, one.iov_base.cast(), one.iov_len as u32)
                        .offset(offset)
                        .build();
                }
                opcode::Readv::new(self, iovecs.as_ptr(), iovecs.len() as u32)
                    .offset(offset)
                    .build()
            }
            fn write(self, iovecs: &[libc::iovec], offset: u64, flags: i32) -> Entry {
                if let [one] = iovecs {
                    return opcode::Write::new(self, one.iov_base.cast(), one.iov_len as u32)
                        .offset(offset)
                        .rw_flags(flags)
                        .build();
                }
                opcode::Writev::new(self, iovecs.as_ptr(), iovecs.len() as u32)
                    .offset(offset)
                    .rw_flags(flags)
                    .build()
            }
            fn sync(self) -> Entry {
                opcode::Fsync::new(self).flags(types::FsyncFlags::DATASYNC).build()
            }
            fn fallocate(self, mode: i32, offset: u64, len: u64) -> Entry {
                opcode::Fallocate::new(self, len).offset(offset).mode(mode).build()
            }
        }
    };
}
target!(types::Fixed);
target!(types::Fd);

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
            match self.enter_once(1).map_err(|e| e.raw_os_error()) {
                Ok(_) | Err(Some(libc::EINTR)) => {}
                Err(Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM)) => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(_) => {
                    // There is no way left to learn when the kernel is done: rather than free
                    // memory under it, keep that memory for good.
                    std::mem::forget(std::mem::take(&mut self.slots));
                    return;
                }
            }
        }
        // The ring itself is taken apart later, by a kernel thread; the file is not to stay open
        // for as long, since that keeps a block device from being opened again.
        if self.registered {
            let _ = self.uring.submitter().unregister_files();
        }
    }
}

/// Makes a ring with the best that the kernel has: completions that do not interrupt this thread
/// while it runs (5.19) and one submitter only (6.0), or plain.
///
/// Not `IORING_SETUP_DEFER_TASKRUN`: such a ring's descriptor does not wake who sleeps on it in
/// `poll` or `epoll_wait` (seen with 6.18: only commits to the completion queue wake them, and
/// those are what is deferred).
fn build(submissions: u32, completions: u32) -> io::Result<IoUring> {
    let mut plain = IoUring::builder();
    plain.setup_cqsize(completions);
    let mut good = plain.clone();
    good.setup_submit_all().setup_coop_taskrun().setup_taskrun_flag();
    let mut best = good.clone();
    best.setup_single_issuer();
    let mut outcome = Err(io::ErrorKind::Unsupported.into());
    for builder in [best, good, plain] {
        outcome = builder.build(submissions);
        match &outcome {
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {}
            _ => break,
        }
    }
    let uring = outcome?;
    if !uring.params().is_feature_nodrop() {
        // Before 5.5 completions could be lost.
        return Err(io::Error::from_raw_os_error(libc::ENOSYS));
    }
    Ok(uring)
}

/// Whether this process may use io_uring, and the kernel has the calls that are needed.
///
/// # Errors
/// The system's refusal; `ENOSYS` for a kernel that lacks a call.
pub(crate) fn available() -> io::Result<()> {
    let uring = build(4, 8)?;
    let mut probe = io_uring::Probe::new();
    uring.submitter().register_probe(&mut probe)?;
    let needed = [
        opcode::Read::CODE,
        opcode::Readv::CODE,
        opcode::Write::CODE,
        opcode::Writev::CODE,
        opcode::Fsync::CODE,
        opcode::Fallocate::CODE,
        opcode::AsyncCancel::CODE,
    ];
    if needed.iter().all(|code| probe.is_supported(*code)) {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::ENOSYS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory::Mapping;

    #[test]
    fn a_kernel_that_has_little_in_hand_gets_more_at_once() {
        // Of an empty pipe, which answers nobody.
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        let mut ring: Ring<()> = Ring::new(Arc::new(File::from(reader))).unwrap();
        let bytes = Mapping::anonymous(4096).unwrap().bytes();
        let calls: Vec<usize> = (1..=64)
            .filter(|_| {
                let key = ring.insert((), Segments::from_bytes(&bytes));
                assert!(ring.prepare(key, Call::Read(Memory::Data), 0, 0, 512));
                ring.submit_in_time();
                ring.uring.submission().is_empty()
            })
            .collect();
        assert_eq!(calls, [1, 2, 4, 8, 16, 32, 64]);
    }
}
