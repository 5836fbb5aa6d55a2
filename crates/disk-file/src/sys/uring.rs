//! io_uring engine. Each thread has one io_uring instance for its files, which its queues share.
//!
//! The user data of a request contain the number of its queue. A queue that collects completions
//! moves those of other queues to their inboxes. As long as any inbox is not empty, the last
//! completion stays in the kernel's queue although it was processed. So the wake descriptor stays
//! readable until each queue has collected its completions.
//!
//! The ring itself does not limit the number of calls in flight; the owner of each queue does. If
//! more calls end than fit in the completion queue, the kernel stores the further completions.
//!
//! The instances are restricted to the operations that this module uses, and a sandboxed process
//! creates all of them before it closes its filter of system calls ([`prepare`]).

use super::call::{HOLE, INDEX_BITS, Kind, Prepared, QUEUE_BITS, Stuck, WAKE};
use super::fence::writer_fd;
use super::waker::Alarm;
use io_uring::squeue::{self, Entry};
use io_uring::{EnterFlags, IoUring, cqueue, opcode, types};
use rustix::event::epoll;
use rustix::process::{Resource, getrlimit};
use shadowbell_uring::{Allowed, Reserve, register};
use std::cell::{RefCell, UnsafeCell};
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::rc::{Rc, Weak};
use std::sync::{Arc, LazyLock};
use std::thread::LocalKey;
use std::time::Duration;

/// Number of entries in the submission queue. It limits the calls per system call.
const SUBMISSIONS: u32 = 128;
/// Number of entries in the completion queue. If more calls end at once, the kernel stores the
/// further completions.
const COMPLETIONS: u32 = 4096;
/// Maximum number of consecutive system calls that try to submit the prepared calls.
const TRIES: u32 = 8;
/// Delay before the next attempt, if the kernel had no memory for a call.
const PAUSE: Duration = Duration::from_millis(1);
/// Maximum number of entries in the table of registered files. Further files are passed by
/// descriptor.
const FILES: u64 = 1024;

/// Queue number in the user data of cancellations: these belong to no queue.
const NO_QUEUE: u16 = u16::MAX;
const QUEUE_MASK: u64 = ((1 << QUEUE_BITS) - 1) << INDEX_BITS;

/// Queue's handle on the io_uring instance of its thread. `S` is the type of the submission queue
/// entries; for calls on files, that is [`Entry`].
pub(super) struct Uring<S: Shape = Entry> {
    ring: Rc<ThreadRing<S>>,
    /// Number of the queue.
    id: u16,
    /// True if the file is registered with the ring, which saves a look-up per call.
    registered: bool,
    file: Arc<File>,
    /// True if waiting for the calls has failed. Some may then still be in flight when the queue is
    /// closed, so the ring cannot be used again.
    stuck: bool,
}

/// io_uring instance of a thread.
struct ThreadRing<S: Shape> {
    /// Wakes the owner for reasons other than a completion.
    alarm: Arc<Alarm>,
    /// Readable while the ring or the alarm is readable.
    wakes: OwnedFd,
    state: UnsafeCell<State<S>>,
}

struct State<S: Shape> {
    uring: ManuallyDrop<IoUring<S, S::Completion>>,
    /// Alarm of the ring.
    alarm: Arc<Alarm>,
    /// Number of entries in the submission queue.
    prepared: usize,
    /// True if the kernel did not accept a call, and the alarm is set for the next attempt.
    refused: bool,
    /// Inbox of each queue, by queue number: completions (id and result of a call) that another
    /// queue has collected for it. `None` for an unused queue number.
    inboxes: Vec<Option<Vec<(u64, i32)>>>,
    /// Number of completions in the inboxes.
    undelivered: usize,
    /// True if the first entry of the kernel's completion queue was already processed. It stays
    /// there until the inboxes are empty, so that the descriptor stays readable.
    has_processed_entry: bool,
    /// True if the ring cannot be used again.
    broken: bool,
}

/// Type of a ring's submission queue entries. It determines the type of its completions.
pub(super) trait Shape: squeue::EntryMarker + From<Entry> + 'static {
    /// Type of the completions.
    type Completion: cqueue::EntryMarker;

    /// Reserve of rings of this type. A sandboxed process cannot create rings, and takes them from
    /// here ([`prepare`]).
    fn reserve() -> &'static Reserve<Self, Self::Completion>;

    /// Ring of the calling thread.
    fn of_thread() -> &'static LocalKey<OfThread<Self>>;
}

/// Ring of a thread, as long as the thread has queues.
pub(super) struct OfThread<S: Shape>(RefCell<Weak<ThreadRing<S>>>);

impl<S: Shape> OfThread<S> {
    pub(super) const fn none() -> Self {
        Self(RefCell::new(Weak::new()))
    }
}

impl Shape for Entry {
    type Completion = cqueue::Entry;

    fn reserve() -> &'static Reserve {
        static RESERVE: Reserve = Reserve::new("files", || {
            const OPCODES: &[u8] = &[
                opcode::Nop::CODE,
                opcode::AsyncCancel::CODE,
                opcode::Read::CODE,
                opcode::Readv::CODE,
                opcode::Write::CODE,
                opcode::Writev::CODE,
                opcode::Fallocate::CODE,
            ];
            build(OPCODES)
        });
        &RESERVE
    }

    fn of_thread() -> &'static LocalKey<OfThread<Self>> {
        thread_local! {
            static RING: OfThread<Entry> = const { OfThread::none() };
        }
        &RING
    }
}

impl<S: Shape> ThreadRing<S> {
    fn new() -> io::Result<Self> {
        let alarm = Arc::new(Alarm::new()?);
        let wakes = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let watch = |fd: BorrowedFd<'_>| {
            epoll::add(&wakes, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
        };
        watch(alarm.fd())?;
        let uring = S::reserve().take()?;
        if let Err(errno) = watch(uring.as_fd()) {
            S::reserve().put_back(uring);
            return Err(errno.into());
        }
        let state = State {
            uring: ManuallyDrop::new(uring),
            alarm: Arc::clone(&alarm),
            prepared: 0,
            refused: false,
            inboxes: Vec::new(),
            undelivered: 0,
            has_processed_entry: false,
            broken: false,
        };
        Ok(Self { alarm, wakes, state: UnsafeCell::new(state) })
    }

    /// Ring of the calling thread. It is created for the first queue.
    fn of_thread() -> io::Result<Rc<Self>> {
        S::of_thread().with(|OfThread(known)| {
            let mut known = known.borrow_mut();
            if let Some(ring) = known.upgrade() {
                return Ok(ring);
            }
            let ring = Rc::new(Self::new()?);
            *known = Rc::downgrade(&ring);
            Ok(ring)
        })
    }
}

impl<S: Shape> Drop for ThreadRing<S> {
    /// Returns the ring to the reserve. At this time no queue uses the ring, and no call is in
    /// flight.
    fn drop(&mut self) {
        let state = self.state.get_mut();
        // SAFETY: the field is not used any more.
        let uring = unsafe { ManuallyDrop::take(&mut state.uring) };
        if !state.broken {
            S::reserve().put_back(uring);
        }
    }
}

impl<S: Shape> State<S> {
    /// Assigns a number to a queue.
    fn open(&mut self) -> io::Result<u16> {
        let free = self.inboxes.iter().position(Option::is_none).unwrap_or(self.inboxes.len());
        let id = u16::try_from(free).ok().filter(|id| *id != NO_QUEUE);
        let id = id.ok_or_else(|| io::Error::from_raw_os_error(libc::EMFILE))?;
        if free == self.inboxes.len() {
            self.inboxes.push(None);
        }
        if let Some(inbox) = self.inboxes.get_mut(free) {
            *inbox = Some(Vec::new());
        }
        Ok(id)
    }

    /// Sets the entry of a queue in the table of registered files. Returns false if the table is
    /// too small.
    fn register(&mut self, id: u16, file: i32) -> bool {
        self.uring.submitter().register_files_update(slot_of(id), &[file]).is_ok()
    }

    /// Submits all prepared calls by one system call, which also collects completions.
    fn enter(&mut self) {
        for _ in 0..TRIES {
            match self.enter_once(0) {
                Ok(_) if self.prepared == 0 => return,
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        self.refused = true;
        self.alarm.ring_in(PAUSE);
    }

    fn enter_once(&mut self, wait: u32) -> io::Result<usize> {
        let prepared = self.prepared as u32;
        let flags = EnterFlags::GETEVENTS.bits();
        // SAFETY: no argument structure is passed. The memory of the prepared entries stays valid,
        // as `push_entry` requires.
        let entered =
            unsafe { self.uring.submitter().enter::<libc::sigset_t>(prepared, wait, flags, None) };
        self.prepared = self.uring.submission().len();
        entered
    }

    /// Reports the completions in the inbox of a queue.
    #[cold]
    fn deliver(&mut self, id: u16, each: &mut impl FnMut(u64, i32)) {
        let Some(Some(inbox)) = self.inboxes.get_mut(usize::from(id)) else { return };
        self.undelivered -= inbox.len();
        inbox.drain(..).for_each(|(data, result)| each(data, result));
    }

    /// Removes the processed entry from the kernel's completion queue if the inboxes are empty.
    fn release(&mut self) {
        if self.has_processed_entry && self.undelivered == 0 {
            self.has_processed_entry = false;
            self.uring.completion().next();
        }
    }

    /// Processes all completions in the kernel's queue. Reports the completions of queue `id`, and
    /// moves the others to the inboxes of their queues.
    fn take(&mut self, id: u16, each: &mut impl FnMut(u64, i32)) {
        let Self { uring, inboxes, undelivered, has_processed_entry, .. } = self;
        let mut completions = uring.completion();
        let processed = completions.len();
        if *has_processed_entry {
            completions.next();
        }
        for completion in completions.by_ref() {
            let completion: cqueue::Entry = completion.into();
            let (data, result) = (completion.user_data(), completion.result());
            if (data >> INDEX_BITS) as u16 == id {
                each(data & !QUEUE_MASK, result);
            } else {
                *undelivered += route(inboxes, data, result);
            }
        }
        *has_processed_entry = *undelivered != 0;
        if *has_processed_entry {
            // All entries were processed above. The iterator is forgotten, because its drop would
            // remove all of them; the last one has to stay.
            std::mem::forget(completions);
            uring.completion().by_ref().take(processed.saturating_sub(1)).for_each(drop);
        }
    }
}

/// Moves a completion to the inbox of its queue. Returns the number of moved completions.
#[cold]
fn route(inboxes: &mut [Option<Vec<(u64, i32)>>], data: u64, result: i32) -> usize {
    let id = usize::from((data >> INDEX_BITS) as u16);
    // Cancellations have no queue.
    let Some(Some(inbox)) = inboxes.get_mut(id) else { return 0 };
    inbox.push((data & !QUEUE_MASK, result));
    1
}

/// Index of a queue's file in the table of registered files. Entry 0 is the fence.
fn slot_of(id: u16) -> u32 {
    u32::from(id) + 1
}

impl<S: Shape> Uring<S> {
    /// Opens the queue of a file on the ring of this thread.
    ///
    /// # Errors
    /// The system's error; `ResourceBusy` if a sandboxed process has no ring left.
    pub(super) fn new(file: Arc<File>) -> io::Result<Self> {
        let ring = ThreadRing::of_thread()?;
        let mut this = Self { ring, id: NO_QUEUE, registered: false, file, stuck: false };
        this.id = this.state().open()?;
        let (id, fd) = (this.id, this.file.as_raw_fd());
        this.registered = this.state().register(id, fd);
        Ok(this)
    }

    /// State of the ring.
    fn state(&mut self) -> &mut State<S> {
        // SAFETY: all queues of the ring belong to one thread, since `Rc` is not `Send`. A
        // reference from here does not outlive a method of a queue, and no method calls another
        // queue: the functions that get completions use only the calls of their own queue.
        unsafe { &mut *self.ring.state.get() }
    }

    /// File as the target of an io_uring call: its index in the ring's table if it is registered,
    /// otherwise its descriptor.
    pub(super) fn target(&self) -> Result<types::Fixed, types::Fd> {
        if self.registered {
            Ok(types::Fixed(slot_of(self.id)))
        } else {
            Err(types::Fd(self.file.as_raw_fd()))
        }
    }

    /// User data of the call `id` of this queue.
    pub(super) fn user_data(&self, id: u64) -> u64 {
        id | u64::from(self.id) << INDEX_BITS
    }

    /// Queues an entry. Returns false if the submission queue is full; [`enter`](Self::enter) makes
    /// room.
    ///
    /// # Safety
    /// The memory that the entry points to must stay valid until the completion of the entry was
    /// collected.
    pub(super) unsafe fn push_entry(&mut self, entry: &S) -> bool {
        let state = self.state();
        // SAFETY: the caller guarantees that the memory of the entry stays valid. The file is open
        // until the queue is closed, and the close waits for the completion.
        let is_pushed = unsafe { state.uring.submission().push(entry) }.is_ok();
        state.prepared += usize::from(is_pushed);
        is_pushed
    }

    pub(super) fn cancel(&mut self, id: u64) {
        let entry = opcode::AsyncCancel::new(self.user_data(id)).build();
        self.push_control(&entry, u64::from(NO_QUEUE) << INDEX_BITS);
    }

    pub(super) fn wake(&mut self) {
        self.push_control(&opcode::Nop::new().build(), self.user_data(WAKE));
    }

    fn push_control(&mut self, entry: &Entry, user_data: u64) {
        let entry = S::from(entry.clone().user_data(user_data));
        for _ in 0..2 {
            // SAFETY: a cancellation and a no-op use no memory.
            let is_pushed = unsafe { self.push_entry(&entry) };
            self.enter();
            if is_pushed {
                return;
            }
        }
    }

    /// Number of calls of this thread that were prepared but not submitted yet.
    pub(super) fn prepared(&mut self) -> usize {
        self.state().prepared
    }

    /// Submits all prepared calls by one system call, which also collects completions. If the
    /// kernel has no memory for some of the calls, they stay prepared, and the alarm wakes the
    /// owner after `PAUSE` for another attempt. This call does not wait, because the thread serves
    /// other queues too.
    pub(super) fn enter(&mut self) {
        self.state().enter();
    }

    /// Makes the descriptor also readable while `fd` is readable.
    pub(super) fn watch(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let data = epoll::EventData::new_u64(0);
        Ok(epoll::add(&self.ring.wakes, fd, data, epoll::EventFlags::IN)?)
    }

    /// Ends [`watch`](Self::watch).
    pub(super) fn unwatch(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.ring.wakes, fd);
    }

    pub(super) fn alarm(&self) -> &Arc<Alarm> {
        &self.ring.alarm
    }

    /// Waits until a call has ended.
    pub(super) fn wait(&mut self) -> Result<(), Stuck> {
        let state = self.state();
        // The processed entry that stays in the completion queue is no new completion.
        let wanted = 1 + u32::from(state.has_processed_entry);
        match state.enter_once(wanted).map_err(|e| e.raw_os_error()) {
            Ok(_) | Err(Some(libc::EINTR)) => Ok(()),
            Err(Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM)) => {
                std::thread::sleep(PAUSE);
                Ok(())
            }
            Err(_) => {
                self.stuck = true;
                Err(Stuck)
            }
        }
    }

    /// Reports all completions of this queue. Each consists of the id of a call and its result.
    pub(super) fn collect(&mut self, mut each: impl FnMut(u64, i32)) {
        let id = self.id;
        let state = self.state();
        if state.refused {
            // The alarm is no longer needed: collecting completions frees memory of the kernel, and
            // then the owner submits the refused calls again.
            state.refused = false;
            state.alarm.quieten();
            state.alarm.ring_if_due();
        }
        if state.undelivered != 0 {
            state.deliver(id, &mut each);
        }
        if state.uring.completion().len() == usize::from(state.has_processed_entry) {
            let submission = state.uring.submission();
            // The kernel has further completions. It adds them to the completion queue only when
            // this thread enters the kernel.
            let due = submission.taskrun() || submission.cq_overflow();
            drop(submission);
            if !due {
                return state.release();
            }
            state.enter();
        }
        state.take(id, &mut each);
    }

    /// Number of completions in the kernel's queue.
    #[cfg(test)]
    pub(super) fn completions(&mut self) -> usize {
        let state = self.state();
        state.enter();
        state.uring.completion().len()
    }

    /// Wake descriptor, which all queues of the thread share.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.ring.wakes.as_fd()
    }
}

impl<S: Shape> Drop for Uring<S> {
    /// Releases the queue's registered file and number, after the owner has waited for all calls.
    /// The file is not left to the drop of the ring, because a block device could not be opened
    /// exclusively until then.
    fn drop(&mut self) {
        let (id, stuck, registered) = (self.id, self.stuck, self.registered);
        let state = self.state();
        if stuck {
            // Calls may still be in flight, so the queue number is not reused, and the ring does
            // not return to the reserve.
            state.broken = true;
            return;
        }
        // Cancellations that were not submitted must not affect a later queue with this number.
        while state.prepared != 0 {
            match state.enter_once(0).map_err(|e| e.raw_os_error()) {
                Ok(_) | Err(Some(libc::EINTR)) => {}
                Err(Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM)) => std::thread::sleep(PAUSE),
                Err(_) => {
                    state.broken = true;
                    break;
                }
            }
        }
        if registered {
            state.register(id, -1);
        }
        // All calls of the queue have ended, so only wake-ups may be left.
        state.deliver(id, &mut |_, _| {});
        state.take(id, &mut |_, _| {});
        if let Some(inbox) = state.inboxes.get_mut(usize::from(id)) {
            *inbox = None;
        }
    }
}

impl Uring {
    /// Queues a call. Returns false if the submission queue is full; [`enter`](Self::enter) makes
    /// room.
    ///
    /// # Safety
    /// The call's `iovecs`, and the memory that they describe, must stay valid until the completion
    /// of the call was collected.
    pub(super) unsafe fn push(&mut self, call: &Prepared<'_>) -> bool {
        let entry = match self.target() {
            Ok(fixed) => entry(call, fixed),
            Err(fd) => entry(call, fd),
        };
        // SAFETY: the caller guarantees that the memory of the call stays valid.
        unsafe { self.push_entry(&entry.user_data(self.user_data(call.id))) }
    }
}

/// Target of an io_uring call: the descriptor of a file, or the index of a file in the ring's
/// table.
trait Target {
    fn read(self, iovecs: &[libc::iovec], offset: u64, flags: i32) -> Entry;
    fn write(self, iovecs: &[libc::iovec], offset: u64, flags: i32) -> Entry;
    fn fallocate(self, mode: i32, offset: u64, len: u64) -> Entry;
}

fn entry(call: &Prepared<'_>, file: impl Target) -> Entry {
    let Prepared { iovecs, offset, len, .. } = *call;
    let nowait = if call.nowait { libc::RWF_NOWAIT } else { 0 };
    match call.kind {
        Kind::Read => file.read(iovecs, offset, nowait),
        Kind::Write { flags } => file.write(iovecs, offset, flags | nowait),
        Kind::Allocate { mode } => file.fallocate(mode, offset, len),
        Kind::Deallocate => file.fallocate(HOLE, offset, len),
    }
}

macro_rules! target {
    ($kind:ty) => {
        impl Target for $kind {
            fn read(self, iovecs: &[libc::iovec], offset: u64, flags: i32) -> Entry {
                // A single `iovec` is not passed as a list. So the kernel does not have to copy a
                // list.
                if let [one] = iovecs {
                    return opcode::Read::new(self, one.iov_base.cast(), one.iov_len as u32)
                        .offset(offset)
                        .rw_flags(flags)
                        .build();
                }
                opcode::Readv::new(self, iovecs.as_ptr(), iovecs.len() as u32)
                    .offset(offset)
                    .rw_flags(flags)
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
            fn fallocate(self, mode: i32, offset: u64, len: u64) -> Entry {
                opcode::Fallocate::new(self, len).offset(offset).mode(mode).build()
            }
        }
    };
}
target!(types::Fixed);
target!(types::Fd);

/// Creates a ring that accepts only requests with these opcodes, with the best features that the
/// kernel supports: completions that do not interrupt this thread while it runs (Linux 5.19). A
/// kernel before 5.10 lacks restrictions, and gets a plain ring.
///
/// `IORING_SETUP_DEFER_TASKRUN` is not used, because with this flag the ring's descriptor does not
/// wake a thread that sleeps on it in `poll` or `epoll_wait`. (Observed with Linux 6.18: only
/// commits to the completion queue wake the thread, and the flag defers these commits.)
/// `IORING_SETUP_SINGLE_ISSUER` is not used, because one thread creates the ring, and other threads
/// use it.
pub(super) fn build<S: Shape>(opcodes: &'static [u8]) -> io::Result<IoUring<S, S::Completion>> {
    let allowed =
        Allowed { opcodes, flags: squeue::Flags::FIXED_FILE, registers: &[register::FILES_UPDATE] };
    let mut plain = IoUring::<S, S::Completion>::builder();
    plain.setup_cqsize(COMPLETIONS);
    let mut good = plain.clone();
    good.setup_submit_all().setup_coop_taskrun().setup_taskrun_flag();
    let is_unsupported = |error: &io::Error| error.raw_os_error() == Some(libc::EINVAL);
    let mut outcome = allowed.build(&good, SUBMISSIONS, register_files);
    if outcome.as_ref().is_err_and(is_unsupported) {
        outcome = allowed.build(&plain, SUBMISSIONS, register_files);
    }
    if outcome.as_ref().is_err_and(is_unsupported) && !S::reserve().is_sealed() {
        outcome = plain.build(SUBMISSIONS).and_then(|ring| register_files(&ring).map(|()| ring));
    }
    let uring = outcome?;
    if !uring.params().is_feature_nodrop() {
        // Without this feature (before Linux 5.5), the kernel could drop completions.
        return Err(io::Error::from_raw_os_error(libc::ENOSYS));
    }
    Ok(uring)
}

/// Registers a table of files: the write end of the fence pipe, and empty entries for the files of
/// queues. The ring holds the write end until its last request has ended.
fn register_files<S: Shape>(uring: &IoUring<S, S::Completion>) -> io::Result<()> {
    // The kernel accepts no more files than the process may open.
    let max_files = getrlimit(Resource::Nofile).current.unwrap_or(FILES).clamp(1, FILES);
    let fence = writer_fd();
    let mut files = vec![-1; max_files as usize];
    files[0] = fence.unwrap_or(-1);
    match uring.submitter().register_files(&files) {
        Err(error) if fence.is_some() => Err(error),
        _ => Ok(()),
    }
}

/// Creates all rings of a sandboxed process, before it closes its filter of system calls:
/// `workers + more` for files, and `workers` for NVMe namespaces. One thread uses at most one of
/// each type.
///
/// If none is left, the queues of further threads use threads for their calls. Returns the number
/// of rings for files. It is 0 if the system does not permit restricted rings (Linux 5.10).
pub fn prepare(workers: usize, more: usize) -> usize {
    // The availability is determined before the filter is closed. Disks that are opened later use
    // the stored result.
    let (for_files, for_commands) = (available().is_ok(), supports_commands().is_ok());
    <squeue::Entry128 as Shape>::reserve().seal(if for_commands { workers } else { 0 });
    Entry::reserve().seal(if for_files { workers + more } else { 0 })
}

/// Checks that this process may create a ring for commands of NVMe namespaces, and that the kernel
/// supports its operations.
///
/// # Errors
/// The system's error; `ENOSYS` for a kernel without the operations.
pub(crate) fn supports_commands() -> io::Result<()> {
    static AVAILABLE: Availability = LazyLock::new(|| {
        supports::<squeue::Entry128>(&[opcode::UringCmd80::CODE, opcode::AsyncCancel::CODE])
    });
    AVAILABLE.map_err(io::Error::from_raw_os_error)
}

/// Checks that this process may use io_uring, and that the kernel supports the operations that are
/// needed.
///
/// # Errors
/// The system's error; `ENOSYS` for a kernel without the operations.
pub(crate) fn available() -> io::Result<()> {
    static AVAILABLE: Availability = LazyLock::new(|| {
        supports::<Entry>(&[
            opcode::Read::CODE,
            opcode::Readv::CODE,
            opcode::Write::CODE,
            opcode::Writev::CODE,
            opcode::Fallocate::CODE,
            opcode::AsyncCancel::CODE,
        ])
    });
    AVAILABLE.map_err(io::Error::from_raw_os_error)
}

/// Availability of io_uring: `Ok`, or an error number. It is determined once, before the sandbox,
/// because a sandboxed process could not determine it.
pub(super) type Availability = LazyLock<Result<(), i32>>;

/// Checks that the process may create rings, and that the kernel supports these operations.
pub(super) fn supports<S: Shape>(opcodes: &[u8]) -> Result<(), i32> {
    let probe = || -> io::Result<bool> {
        let uring = IoUring::<S, S::Completion>::builder().build(4)?;
        let mut probe = io_uring::Probe::new();
        uring.submitter().register_probe(&mut probe)?;
        Ok(opcodes.iter().all(|code| probe.is_supported(*code)))
    };
    match probe() {
        Ok(true) => Ok(()),
        Ok(false) => Err(libc::ENOSYS),
        Err(error) => Err(error.raw_os_error().unwrap_or(libc::ENOSYS)),
    }
}
