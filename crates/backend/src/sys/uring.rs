//! Calls through io_uring.

use super::call::{HOLE, Kind, NO_SLOT, Prepared, Stuck};
use super::fence::kept_by_rings;
use super::waker::Alarm;
use io_uring::squeue::{self, Entry};
use io_uring::{EnterFlags, IoUring, cqueue, opcode, types};
use rustix::event::epoll;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// Calls that can be handed over at once; more just need another system call.
const SUBMISSIONS: u32 = 128;
/// How often the kernel is asked in a row to take what is prepared.
const TRIES: u32 = 8;
/// How long after it had no memory for a call it is asked again.
const PAUSE: Duration = Duration::from_millis(1);

/// `S` is the shape of the entries that are submitted: [`Entry`] for calls on files.
pub(super) struct Uring<S: Shape = Entry> {
    uring: IoUring<S, S::Completion>,
    /// The file is registered with the ring, which saves a look-up for each call.
    registered: bool,
    file: Arc<File>,
    /// Wakes the owner for other reasons than a completion.
    alarm: Arc<Alarm>,
    /// The kernel did not take a call, and the alarm is set to try again.
    refused: bool,
    /// Readable if the ring or the alarm is.
    wakes: OwnedFd,
}

/// The shape of the entries of a ring, and of its completions.
pub(super) trait Shape: squeue::EntryMarker + From<Entry> {
    /// Of what the kernel answers.
    type Completion: cqueue::EntryMarker;
}

impl Shape for Entry {
    type Completion = cqueue::Entry;
}

impl<S: Shape> Uring<S> {
    /// Opens a ring for calls on `file`, to be used by this thread alone, with room for so many
    /// completions.
    pub(super) fn new(file: Arc<File>, completions: u32) -> io::Result<Self> {
        let uring = build(SUBMISSIONS, completions)?;
        // The ring has the file first, and what it keeps until it has gone.
        let fence = kept_by_rings();
        let files: Vec<_> = [file.as_raw_fd()].into_iter().chain(fence).collect();
        let registered = match uring.submitter().register_files(&files) {
            Err(error) if fence.is_some() => return Err(error),
            outcome => outcome.is_ok(),
        };
        let alarm = Alarm::new()?;
        let wakes = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in [uring.as_fd(), alarm.fd()] {
            epoll::add(&wakes, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        Ok(Self { uring, registered, file, alarm: Arc::new(alarm), refused: false, wakes })
    }

    /// The file, by the number that it has in the ring's table, or by its own.
    pub(super) fn target(&self) -> Result<types::Fixed, types::Fd> {
        if self.registered { Ok(types::Fixed(0)) } else { Err(types::Fd(self.file.as_raw_fd())) }
    }

    /// Takes an entry, if there is room in the submission queue; if not, [`enter`](Self::enter)
    /// makes some.
    ///
    /// # Safety
    /// What the entry points to stays until its completion was collected.
    pub(super) unsafe fn push_entry(&mut self, entry: &S) -> bool {
        // SAFETY: what the entry points to stays, as the caller has promised. The file is open as
        // long as the ring is.
        unsafe { self.uring.submission().push(entry) }.is_ok()
    }

    pub(super) fn cancel(&mut self, id: u64) {
        self.push_control(&opcode::AsyncCancel::new(id).build());
    }

    pub(super) fn wake(&mut self) {
        self.push_control(&opcode::Nop::new().build());
    }

    fn push_control(&mut self, entry: &Entry) {
        let entry = S::from(entry.clone().user_data(NO_SLOT));
        for _ in 0..2 {
            // SAFETY: neither a cancellation nor a no-op has memory.
            if unsafe { self.uring.submission().push(&entry) }.is_ok() {
                self.enter();
                return;
            }
            self.enter();
        }
    }

    /// How many calls are prepared, and not handed over yet.
    pub(super) fn prepared(&mut self) -> usize {
        self.uring.submission().len()
    }

    /// Hands everything that was prepared to the kernel, in one system call, which also brings in
    /// what has ended. What the kernel does not take, since it has no memory for it, stays
    /// prepared, and the owner is woken a moment later: others are served by the same thread.
    pub(super) fn enter(&mut self) {
        for _ in 0..TRIES {
            match self.enter_once(0) {
                Ok(_) if self.uring.submission().is_empty() => return,
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        self.refused = true;
        self.alarm.ring_in(PAUSE);
    }

    /// Makes the descriptor readable whenever `fd` is, too.
    pub(super) fn watch(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let data = epoll::EventData::new_u64(0);
        Ok(epoll::add(&self.wakes, fd, data, epoll::EventFlags::IN)?)
    }

    pub(super) fn alarm(&self) -> &Arc<Alarm> {
        &self.alarm
    }

    pub(super) fn quieten(&self) {
        self.alarm.quieten();
    }

    fn enter_once(&mut self, wait: u32) -> io::Result<usize> {
        let prepared = self.uring.submission().len() as u32;
        let flags = EnterFlags::GETEVENTS.bits();
        // SAFETY: no argument structure is passed, and what the prepared entries point to is kept
        // as `push` says.
        unsafe { self.uring.submitter().enter::<libc::sigset_t>(prepared, wait, flags, None) }
    }

    /// Waits until a call has ended.
    pub(super) fn wait(&mut self) -> Result<(), Stuck> {
        match self.enter_once(1).map_err(|e| e.raw_os_error()) {
            Ok(_) | Err(Some(libc::EINTR)) => Ok(()),
            Err(Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM)) => {
                std::thread::sleep(Duration::from_millis(1));
                Ok(())
            }
            Err(_) => Err(Stuck),
        }
    }

    /// The completions of this moment: whose, and the result.
    pub(super) fn collect(&mut self, mut each: impl FnMut(u64, i32)) {
        if self.refused {
            // Whoever collects submits next.
            self.refused = false;
            self.alarm.quieten();
        }
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
            let completion: cqueue::Entry = completion.into();
            each(completion.user_data(), completion.result());
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.wakes.as_fd()
    }

    /// Lets go of the file. The ring itself is taken apart later, by a kernel thread; the file is
    /// not to stay open for as long, since that keeps a block device from being opened again.
    pub(super) fn close(&mut self) {
        if self.registered {
            let _ = self.uring.submitter().unregister_files();
        }
    }
}

impl Uring {
    /// Takes a call, if there is room in the submission queue; if not, [`enter`](Self::enter) makes
    /// some.
    ///
    /// # Safety
    /// The list of pieces, and the memory that it names, stay until the call's completion was
    /// collected.
    pub(super) unsafe fn push(&mut self, call: &Prepared<'_>) -> bool {
        let entry = match self.target() {
            Ok(fixed) => entry(call, fixed),
            Err(fd) => entry(call, fd),
        };
        // SAFETY: as the caller has promised.
        unsafe { self.push_entry(&entry.user_data(call.id)) }
    }
}

/// A file, by its number or by its place in the ring's table.
trait Target {
    fn read(self, iovecs: &[libc::iovec], offset: u64, flags: i32) -> Entry;
    fn write(self, iovecs: &[libc::iovec], offset: u64, flags: i32) -> Entry;
    fn sync(self) -> Entry;
    fn fallocate(self, mode: i32, offset: u64, len: u64) -> Entry;
}

fn entry(call: &Prepared<'_>, file: impl Target) -> Entry {
    let Prepared { iovecs, offset, len, .. } = *call;
    let nowait = if call.nowait { libc::RWF_NOWAIT } else { 0 };
    match call.kind {
        Kind::Read => file.read(iovecs, offset, nowait),
        Kind::Write { flags } => file.write(iovecs, offset, flags | nowait),
        Kind::Sync => file.sync(),
        Kind::Allocate { mode } => file.fallocate(mode, offset, len),
        Kind::Deallocate => file.fallocate(HOLE, offset, len),
    }
}

macro_rules! target {
    ($kind:ty) => {
        impl Target for $kind {
            fn read(self, iovecs: &[libc::iovec], offset: u64, flags: i32) -> Entry {
                // One piece needs no list, and saves the kernel a copy of it.
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

/// Makes a ring with the best that the kernel has: completions that do not interrupt this thread
/// while it runs (5.19) and one submitter only (6.0), or plain.
///
/// Not `IORING_SETUP_DEFER_TASKRUN`: such a ring's descriptor does not wake who sleeps on it in
/// `poll` or `epoll_wait` (seen with 6.18: only commits to the completion queue wake them, and
/// those are what is deferred).
pub(super) fn build<S: Shape>(
    submissions: u32,
    completions: u32,
) -> io::Result<IoUring<S, S::Completion>> {
    let mut plain = IoUring::<S, S::Completion>::builder();
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
    let uring = build::<Entry>(4, 8)?;
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
