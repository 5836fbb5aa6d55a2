//! FUSE requests in flight: their reception, execution and answers.
//!
//! A thread reads requests, submits them, takes completions and writes answers. It sleeps until any
//! of these is possible ([`IoThread`]). Requests are answered in the order of their completion, so
//! none waits for another. Requests that arrive together are submitted together.
//!
//! On machines with enough processors, there are further threads, the helpers ([`HelperThreads`]).
//! A helper sleeps until a thread that is awake has too many requests. So a request wakes at most
//! one thread, and none if a thread is awake.

use super::file::{Action, DiskFile, Step};
use super::sys;
use super::wire::{Extent, MAX_REQUEST, Reply, Request, WRITE_HEAD};
use crate::data::{Data, DataMemory};
use crate::failures::FailureCount;
use crate::io_thread::{FIRST, IoThread};
use crate::vectors::Room;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use shadowbell_block::{BlockDevice, BlockError, BlockQueue};
use shadowbell_memory::EventFd;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Largest number of requests in flight per thread.
const SLOTS: usize = 128;
/// Number of data bytes of requests in flight at which a thread stops taking requests.
const MAX_HELD: usize = 16 << 20;
/// Largest number of requests that are taken before completed requests are answered.
const BATCH: usize = 32;
/// Number of requests that a thread reads, without finding the device empty, before it wakes a
/// helper.
const TOO_MANY: usize = 64;
/// Size in bytes of a thread's receive buffer: for the longest data of a write, or for other
/// content such as names.
const RECEIVE_BUFFER: usize = MAX_REQUEST as usize + 4096;
/// Size in bytes of a request without data. The fields of all supported requests fit into it.
const HEAD: usize = WRITE_HEAD + 48;
/// Identifier of the device in the thread's epoll set.
const DEVICE: u64 = FIRST;

/// State that the threads of a mount share.
pub(super) struct Shared {
    pub(super) device: OwnedFd,
    pub(super) file: DiskFile,
    pub(super) failures: Arc<FailureCount>,
    pub(super) helper_threads: Arc<HelperThreads>,
}

/// Threads of a session: the first one, and its helpers.
pub(super) struct HelperThreads {
    first: EventFd,
    helpers: Vec<Helper>,
    /// True after the file system was unmounted, or after [`stop`](Self::stop).
    over: AtomicBool,
    /// True after [`stop`](Self::stop).
    is_stopped: AtomicBool,
    /// True after [`leave_held`](Self::leave_held).
    leaves_held: AtomicBool,
}

struct Helper {
    is_called: AtomicBool,
    waker: EventFd,
}

impl HelperThreads {
    /// Creates the state of a session without helpers. `first` wakes the first thread.
    pub(super) fn new(first: EventFd) -> Self {
        Self {
            first,
            helpers: Vec::new(),
            over: AtomicBool::new(false),
            is_stopped: AtomicBool::new(false),
            leaves_held: AtomicBool::new(false),
        }
    }

    pub(super) fn add(&mut self, waker: EventFd) -> usize {
        self.helpers.push(Helper { is_called: AtomicBool::new(false), waker });
        self.helpers.len() - 1
    }

    /// Wakes an idle helper, if there is one.
    fn call(&self) {
        let idle = self.helpers.iter().find(|one| !one.is_called.swap(true, Ordering::AcqRel));
        if let Some(idle) = idle {
            idle.waker.signal();
        }
    }

    fn is_called(&self, helper: usize) -> bool {
        self.helpers.get(helper).is_some_and(|one| one.is_called.load(Ordering::Acquire))
    }

    fn dismiss(&self, helper: usize) {
        if let Some(one) = self.helpers.get(helper) {
            one.is_called.store(false, Ordering::Release);
        }
    }

    /// True if [`stop`](Self::stop) was called.
    pub(super) fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Acquire)
    }

    /// Ends all threads of the session. The file system stays mounted.
    pub(super) fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
        self.end();
    }

    /// Lets the threads end without answers to requests that the disk holds.
    pub(super) fn leave_held(&self) {
        self.leaves_held.store(true, Ordering::Release);
    }

    /// Ends all threads.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Release);
        self.first.signal();
        self.helpers.iter().for_each(|one| one.waker.signal());
    }
}

/// Disk operation, with its data or with a buffer for its data.
pub(super) struct Job {
    action: Action,
    data: Data,
}

/// Result of a job, with the job's data buffer.
pub(super) struct Completed {
    /// Result: the position that a seek has found; 0 for other operations.
    outcome: Result<u64, BlockError>,
    /// Data buffer of the job; empty if a failed operation has consumed it.
    data: Data,
}

/// Executes a job.
pub(super) async fn execute(disk: BlockQueue, Job { action, data }: Job) -> Completed {
    match (action, data) {
        (Action::Read(Extent { offset, len }), Data::Shared(buffer)) => {
            moved(disk.read_direct(offset, len as usize, buffer).await.map(Data::Shared))
        }
        (Action::Write(Extent { offset, len }), Data::Shared(buffer)) => {
            let written = disk.write_direct(offset, len as usize, buffer, false);
            moved(written.await.map(Data::Shared))
        }
        (Action::Read(Extent { offset, len }), Data::Own(mut data)) => {
            let into = data.get_mut(..len as usize).unwrap_or_default();
            let outcome = disk.read(offset, into).await;
            done(outcome, Data::Own(data))
        }
        (Action::Write(Extent { offset, len }), Data::Own(data)) => {
            let from = data.get(..len as usize).unwrap_or_default();
            let outcome = disk.write(offset, from, false).await;
            done(outcome, Data::Own(data))
        }
        (Action::Flush, data) => done(disk.flush().await, data),
        (Action::WriteZeroes { offset, len, how }, data) => {
            done(disk.write_zeroes(offset, len, how).await, data)
        }
        (Action::Copy { from, to, len }, data) => done(disk.copy(from, to, len.into()).await, data),
        (Action::Seek { offset, end, is_hole }, data) => {
            Completed { outcome: seek(&disk, offset, end, is_hole).await, data }
        }
    }
}

fn done(outcome: Result<(), BlockError>, data: Data) -> Completed {
    Completed { outcome: outcome.map(|()| 0), data }
}

/// Returns the offset of the first byte of a hole, or of data, at or after `offset`; `end` if there
/// is none.
async fn seek(
    disk: &BlockQueue,
    mut offset: u64,
    end: u64,
    is_hole: bool,
) -> Result<u64, BlockError> {
    while offset < end {
        for extent in disk.extents(offset, end - offset, 2).await? {
            if extent.is_hole == is_hole {
                return Ok(offset);
            }
            offset += extent.len;
        }
    }
    Ok(end)
}

fn moved(moved: Result<Data, BlockError>) -> Completed {
    match moved {
        Ok(data) => done(Ok(()), data),
        Err(error) => Completed { outcome: Err(error), data: Data::default() },
    }
}

/// State of the request in a slot.
#[derive(Clone, Copy)]
struct Pending {
    unique: u64,
    action: Action,
    held: usize,
}

/// Device handle of one thread.
pub(super) struct Device<F> {
    shared: Arc<Shared>,
    /// Index of the helper. `None` for the first thread, which takes requests at any time.
    helper: Option<usize>,
    disk: BlockQueue,
    io: IoThread<F>,
    pending: Vec<Option<Pending>>,
    held: usize,
    memory: DataMemory,
    /// True if the device may have a request to read.
    readable: bool,
    /// Number of requests that were taken since the device was last empty.
    taken: usize,
    head: [u8; HEAD],
    receive_buffer: Vec<u8>,
    done: Vec<(usize, Completed)>,
}

impl<F: Future<Output = Completed>> Device<F> {
    /// Creates the device handle of the calling thread, and opens a queue of the disk for the
    /// thread. `event` ends the thread's sleep.
    pub(super) fn new(
        shared: Arc<Shared>,
        helper: Option<usize>,
        disk: &BlockDevice,
        event: EventFd,
    ) -> io::Result<Self> {
        let mut io = IoThread::new(SLOTS, event)?;
        let disk = io.open(disk)?;
        if helper.is_none() {
            io.add_fd(shared.device.as_fd(), DEVICE, EventFlags::IN)?;
        }
        Ok(Self {
            shared,
            helper,
            disk,
            io,
            pending: vec![None; SLOTS],
            held: 0,
            memory: DataMemory::new(SLOTS),
            readable: helper.is_none(),
            taken: 0,
            head: [0; HEAD],
            receive_buffer: vec![0; RECEIVE_BUFFER],
            done: Vec::with_capacity(SLOTS),
        })
    }

    /// Serves requests until the file system is unmounted, or the session is to end.
    pub(super) fn run(mut self, make: &impl Fn(BlockQueue, Job) -> F) -> io::Result<()> {
        loop {
            let is_over = self.shared.helper_threads.over.load(Ordering::Acquire);
            self.readable &= !is_over;
            let any = match self.take(make) {
                Ok(any) => any,
                // The file system was unmounted. Requests in flight complete, although no program
                // waits for their answers.
                Err(Errno::NODEV) => {
                    self.readable = false;
                    self.shared.helper_threads.end();
                    false
                }
                Err(errno) => return Err(errno.into()),
            };
            let is_over = is_over || self.shared.helper_threads.over.load(Ordering::Acquire);
            if is_over && self.io.tasks().reserved() == 0 {
                return Ok(());
            }
            if is_over {
                let leaves_held = self.shared.helper_threads.leaves_held.load(Ordering::Acquire);
                if leaves_held && self.io.holds_requests() {
                    return Ok(());
                }
                self.io.limit_holds();
            }
            let busy = self.collect();
            if any || busy {
                continue;
            }
            let again = self.io.polls_again_by_call();
            // While the thread polls, it does not call epoll_wait. So only a read of the device
            // tells whether there is a request.
            self.readable |= again && self.listens() && !is_over;
            if !again && self.io.prepare_sleep() {
                let readable = &mut self.readable;
                self.io.wait(None, |_| *readable = !is_over);
                self.readable |= self.helper.is_some() && self.listens();
            }
        }
    }

    /// True if this thread takes requests: the first thread always does, a helper while it is
    /// called.
    fn listens(&self) -> bool {
        self.helper.is_none_or(|helper| self.shared.helper_threads.is_called(helper))
    }

    /// Takes the available requests and starts them. Returns true if there were any.
    fn take(&mut self, make: &impl Fn(BlockQueue, Job) -> F) -> Result<bool, Errno> {
        let mut count = 0;
        while self.readable && count < BATCH && self.held < MAX_HELD {
            let Some(slot) = self.io.tasks().reserve() else { break };
            let Self { shared, head, receive_buffer, .. } = self;
            let head = head.get_mut(..WRITE_HEAD).unwrap_or_default();
            let (mut head, mut rest) = (Room::of(head), Room::of(receive_buffer));
            match sys::read(shared.device.as_fd(), &mut head, &mut rest) {
                Ok(len) => {
                    count += 1;
                    self.begin(slot, len, make);
                    continue;
                }
                // The kernel has aborted the request that the thread was about to read.
                Err(Errno::INTR | Errno::NOENT) => {}
                Err(Errno::AGAIN) => {
                    self.readable = false;
                    self.taken = 0;
                    if let Some(helper) = self.helper {
                        shared.helper_threads.dismiss(helper);
                    }
                }
                Err(errno) => {
                    self.io.tasks().release(slot);
                    return Err(errno);
                }
            }
            self.io.tasks().release(slot);
        }
        self.taken += count;
        if self.taken >= TOO_MANY {
            self.taken = 0;
            self.shared.helper_threads.call();
        }
        Ok(count > 0)
    }

    /// Starts the request of `len` bytes that was read into `head` and `receive_buffer`.
    fn begin(&mut self, slot: usize, len: usize, make: &impl Fn(BlockQueue, Job) -> F) {
        let Self { shared, disk, memory, head, receive_buffer, .. } = self;
        // A read of the device stores the bytes after the first `WRITE_HEAD` in `receive_buffer`.
        // For requests other than writes, these bytes are fields, so they are copied to `head`.
        if let (Some(end), Some(rest)) =
            (head.get_mut(WRITE_HEAD..), receive_buffer.get(..HEAD - WRITE_HEAD))
        {
            end.copy_from_slice(rest);
        }
        let head = head.get(..len).unwrap_or(head);
        let data = receive_buffer.get(..len.saturating_sub(WRITE_HEAD)).unwrap_or(receive_buffer);
        let step = match Request::decode(head) {
            Some(request) => (request.unique, shared.file.ask(&request, data.len())),
            // An incomplete request has no number, so it cannot be answered.
            None => (0, Step::Nothing),
        };
        let (unique, action) = match step {
            (unique, Step::Do(action)) => (unique, action),
            (_, Step::Reply(reply)) => {
                self.io.tasks().release(slot);
                return self.reply(&reply, &Data::default(), 0);
            }
            (_, Step::Nothing) => return self.io.tasks().release(slot),
        };
        let (held, data) = match action {
            Action::Read(Extent { offset, len }) => {
                (len as usize, room(memory, disk, offset, len as usize))
            }
            Action::Write(Extent { offset, len }) => {
                let mut room = room(memory, disk, offset, len as usize);
                room.put(0, data.get(..len as usize).unwrap_or_default());
                (len as usize, room)
            }
            Action::Flush
            | Action::WriteZeroes { .. }
            | Action::Copy { .. }
            | Action::Seek { .. } => (0, Data::default()),
        };
        self.held += held;
        if let Some(pending) = self.pending.get_mut(slot) {
            *pending = Some(Pending { unique, action, held });
        }
        self.io.tasks().start(slot, make(disk.clone(), Job { action, data }));
    }

    /// Submits the started requests and answers completed ones. Returns true if there was any
    /// work.
    fn collect(&mut self) -> bool {
        let Self { io, done, .. } = self;
        let busy = io.run_once(|slot, completed| done.push((slot, completed)));
        let mut done = std::mem::take(&mut self.done);
        for (slot, Completed { outcome, data }) in done.drain(..) {
            self.io.tasks().release(slot);
            let pending = self.pending.get_mut(slot).and_then(Option::take);
            if let Some(Pending { unique, action, held }) = pending {
                self.held -= held;
                let (reply, len) = match outcome {
                    Ok(found) => reply(unique, action, found),
                    Err(error) => (Reply::error(unique, self.errno(&error)), 0),
                };
                self.reply(&reply, &data, len);
            }
            self.memory.give_back(data);
        }
        self.done = done;
        busy
    }

    /// Error number for the answer to a failed request. A failure of the disk is counted.
    fn errno(&self, error: &BlockError) -> Errno {
        let errno = error.errno();
        if errno == Errno::IO {
            self.shared.failures.record(error);
        }
        if matches!(error, BlockError::ReadOnly) { Errno::ROFS } else { errno }
    }

    /// Writes an answer with `len` bytes of data.
    fn reply(&self, reply: &Reply, data: &Data, len: usize) {
        let device = self.shared.device.as_fd();
        match sys::write(device, reply.bytes(), data.part(0, len)) {
            // These errors mean that the kernel has aborted the request.
            Ok(()) | Err(Errno::NOENT | Errno::NODEV) => {}
            Err(errno) => tracing::warn!("a request could not be answered: {errno}"),
        }
    }
}

/// Returns a buffer for the data of a read or write. Returns a shared buffer of the disk's queue if
/// that saves a copy and one is free.
fn room(memory: &mut DataMemory, disk: &BlockQueue, offset: u64, len: usize) -> Data {
    let shared = disk.is_direct(offset, len).then(|| memory.shared(disk, len)).flatten();
    shared.unwrap_or_else(|| memory.own(len))
}

/// Answer to a completed operation, and the length of its data.
fn reply(unique: u64, action: Action, found: u64) -> (Reply, usize) {
    match action {
        Action::Read(Extent { len, .. }) => {
            let len = len as usize;
            (Reply::done(unique).with_data(len), len)
        }
        Action::Write(Extent { len, .. }) | Action::Copy { len, .. } => {
            (Reply::written(unique, len), 0)
        }
        Action::Flush | Action::WriteZeroes { .. } => (Reply::done(unique), 0),
        // A search for data that reaches the end of the file has found none.
        Action::Seek { end, is_hole: false, .. } if found == end => {
            (Reply::error(unique, Errno::NXIO), 0)
        }
        Action::Seek { .. } => (Reply::offset(unique, found), 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_helper_thread_is_woken_once_until_it_runs_out_of_work() {
        let mut helper_threads = HelperThreads::new(EventFd::new().unwrap());
        let events = [EventFd::new().unwrap(), EventFd::new().unwrap()];
        let helpers = events.each_ref().map(|event| helper_threads.add(event.try_clone().unwrap()));
        let woken = || {
            events.each_ref().map(|event| {
                let woken = event.wait(Some(Duration::ZERO)).unwrap();
                event.drain();
                woken
            })
        };
        assert_eq!(helpers.map(|helper| helper_threads.is_called(helper)), [false, false]);
        helper_threads.call();
        assert_eq!(woken(), [true, false]);
        helper_threads.call();
        assert_eq!(woken(), [false, true]);
        helper_threads.call();
        assert_eq!(woken(), [false, false], "all of them help");
        assert_eq!(helpers.map(|helper| helper_threads.is_called(helper)), [true, true]);
        helper_threads.dismiss(helpers[1]);
        helper_threads.call();
        assert_eq!(woken(), [false, true]);
        helper_threads.end();
        assert_eq!(woken(), [true, true]);
    }
}
