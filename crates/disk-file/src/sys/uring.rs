//! io_uring engine.

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

/// Number of entries in the submission queue. It limits the calls per system call.
const SUBMISSIONS: u32 = 128;
/// Maximum number of attempts to submit, one after the other.
const TRIES: u32 = 8;
/// Delay before the next attempt, if the kernel had no memory for a call.
const PAUSE: Duration = Duration::from_millis(1);

/// io_uring of one queue. `S` is the type of its submission queue entries; for calls on files, that
/// is [`Entry`].
pub(super) struct Uring<S: Shape = Entry> {
    uring: IoUring<S, S::Completion>,
    /// True if the file is registered with the ring, which saves a look-up per call.
    registered: bool,
    file: Arc<File>,
    /// Wakes the owner for reasons other than a completion.
    alarm: Arc<Alarm>,
    /// True if the kernel did not accept a call, and the alarm is set for the next attempt.
    refused: bool,
    /// Readable while the ring or the alarm is readable.
    wakes: OwnedFd,
}

/// Type of a ring's submission queue entries. It determines the type of its completions.
pub(super) trait Shape: squeue::EntryMarker + From<Entry> {
    /// Type of the completions.
    type Completion: cqueue::EntryMarker;
}

impl Shape for Entry {
    type Completion = cqueue::Entry;
}

impl<S: Shape> Uring<S> {
    /// Opens a ring for calls on `file`. Only this thread uses it. The ring has room for
    /// `completions` completions.
    pub(super) fn new(file: Arc<File>, completions: u32) -> io::Result<Self> {
        let uring = build(SUBMISSIONS, completions)?;
        // The file of the disk and the write end of the fence are registered, so the ring holds
        // both until it ends.
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

    /// File as the target of an io_uring call: its index in the ring's table if it is registered,
    /// otherwise its descriptor.
    pub(super) fn target(&self) -> Result<types::Fixed, types::Fd> {
        if self.registered { Ok(types::Fixed(0)) } else { Err(types::Fd(self.file.as_raw_fd())) }
    }

    /// Queues an entry. Returns false if the submission queue is full; [`enter`](Self::enter) makes
    /// room.
    ///
    /// # Safety
    /// The memory that the entry points to must stay valid until the completion of the entry was
    /// collected.
    pub(super) unsafe fn push_entry(&mut self, entry: &S) -> bool {
        // SAFETY: the caller guarantees that the memory of the entry stays valid. The file is open
        // as long as the ring exists.
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
            // SAFETY: a cancellation and a no-op use no memory.
            if unsafe { self.uring.submission().push(&entry) }.is_ok() {
                self.enter();
                return;
            }
            self.enter();
        }
    }

    /// Number of calls that were prepared but not submitted yet.
    pub(super) fn prepared(&mut self) -> usize {
        self.uring.submission().len()
    }

    /// Submits all prepared calls by one system call, which also collects completions. If the
    /// kernel has no memory for some of the calls, they stay prepared, and the owner is woken a
    /// moment later. The thread does not wait for memory, because it serves other queues too.
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

    /// Makes the descriptor also readable while `fd` is readable.
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
        // SAFETY: no argument structure is passed. The memory of the prepared entries stays valid,
        // as `push_entry` requires.
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

    /// Reports all completions. Each consists of the id of a call and its result.
    pub(super) fn collect(&mut self, mut each: impl FnMut(u64, i32)) {
        if self.refused {
            // Collecting completions makes room, and the owner submits the refused calls again
            // afterwards.
            self.refused = false;
            self.alarm.quieten();
        }
        if self.uring.completion().is_empty() {
            let submission = self.uring.submission();
            // Some completions arrived while this thread ran. They become visible only when it
            // enters the kernel.
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

    /// Releases the file. A kernel thread destroys the ring later. If the file stayed open until
    /// then, a block device could not be opened exclusively again meanwhile.
    pub(super) fn close(&mut self) {
        if self.registered {
            let _ = self.uring.submitter().unregister_files();
        }
    }
}

impl Uring {
    /// Queues a call. Returns false if the submission queue is full; [`enter`](Self::enter) makes
    /// room.
    ///
    /// # Safety
    /// The list of pieces, and the memory of the pieces, must stay valid until the completion of
    /// the call was collected.
    pub(super) unsafe fn push(&mut self, call: &Prepared<'_>) -> bool {
        let entry = match self.target() {
            Ok(fixed) => entry(call, fixed),
            Err(fd) => entry(call, fd),
        };
        // SAFETY: guaranteed by the caller.
        unsafe { self.push_entry(&entry.user_data(call.id)) }
    }
}

/// Target of an io_uring call: the descriptor of a file, or the index of a file in the ring's
/// table.
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
                // For a single piece, no list is passed, which saves the kernel a copy of the list.
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

/// Creates a ring with the best features that the kernel supports: completions that do not
/// interrupt this thread while it runs (Linux 5.19), and a single submitter (6.0). Older kernels
/// get a plain ring.
///
/// `IORING_SETUP_DEFER_TASKRUN` is not used, because the descriptor of such a ring does not wake a
/// thread that sleeps on it in `poll` or `epoll_wait`. (Observed with Linux 6.18: only commits to
/// the completion queue wake the thread, and such a ring defers these commits.)
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
        // Without this feature (before Linux 5.5), the kernel could drop completions.
        return Err(io::Error::from_raw_os_error(libc::ENOSYS));
    }
    Ok(uring)
}

/// Checks that this process may use io_uring, and that the kernel supports the operations that are
/// needed.
///
/// # Errors
/// The system's error; `ENOSYS` for a kernel without the operations.
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
