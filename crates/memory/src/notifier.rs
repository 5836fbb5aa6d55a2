//! Signalling an eventfd of somebody else's.
//!
//! A write to an eventfd waits while the count is full, unless its open file is non-blocking; and
//! the open file is shared with whoever sent the descriptor, who can clear that flag and fill the
//! count at any moment, the last one before the write included. There is no write that does not
//! wait whatever the flag says: `RWF_NOWAIT` is refused for eventfds. But the kernel itself signals
//! without ever waiting. So it is asked to: each request of Linux AIO names an eventfd that is to
//! be signalled when it completes, and the request here, whether an eventfd of our own takes a
//! write, completes at once.
//!
//! One context serves all eventfds of the process, from any number of threads, and costs a
//! descriptor that a peer sends nothing. (An io_uring signals one eventfd, so each needed a ring of
//! its own, 64 of them for a message with 64 eventfds.) A signal takes a microsecond more than a
//! write does, which is why one's own eventfds are written to.

use libc::{SYS_io_getevents, SYS_io_setup, SYS_io_submit, c_long, syscall};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, write};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::LazyLock;

/// Requests that may be complete and not taken yet.
const REQUESTS: c_long = 256;

/// How often a system call is repeated that says that the kernel is out of memory for now.
const RETRIES: u32 = 100;

/// `IOCB_CMD_POLL` and `IOCB_FLAG_RESFD` of `<linux/aio_abi.h>`.
const POLL: u16 = 5;
const RESFD: u32 = 1;
/// `POLLOUT`.
const OUT: u64 = 4;

/// A request, `struct iocb` of `<linux/aio_abi.h>`.
#[repr(C)]
#[derive(Default)]
struct Request {
    data: u64,
    /// A key and flags, both 0.
    key: u64,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    len: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    signal: u32,
}
const _: () = assert!(size_of::<Request>() == 64);

/// What is said of a request that is complete, `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Event([u64; 4]);

/// A context of Linux AIO, and what its requests are about. Never closed.
struct Context {
    number: usize,
    /// Takes a write at any time.
    own: OwnedFd,
}

static CONTEXT: LazyLock<io::Result<Context>> = LazyLock::new(|| {
    let own = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let mut number = 0usize;
    // SAFETY: the kernel writes the context's number there, and keeps no pointer.
    if unsafe { syscall(SYS_io_setup, REQUESTS, &raw mut number) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Context { number, own })
});

/// Whether eventfds can be signalled so: not if the kernel has no AIO, this process may not use it,
/// or the system has no context left (`fs.aio-max-nr`).
pub(crate) fn is_available() -> bool {
    CONTEXT.is_ok()
}

/// Signals an eventfd, whoever has it. Does nothing if it is none, or if this
/// [is not available](is_available).
pub(crate) fn notify(event: BorrowedFd<'_>) {
    let Ok(context) = &*CONTEXT else { return };
    let mut request = Request {
        opcode: POLL,
        fd: context.own.as_raw_fd().cast_unsigned(),
        buffer: OUT,
        flags: RESFD,
        signal: event.as_raw_fd().cast_unsigned(),
        ..Request::default()
    };
    for _ in 0..RETRIES {
        let mut list = [&raw mut request];
        // SAFETY: the one request in the list is a valid one, which the kernel copies. It names no
        // memory.
        let submitted = unsafe { syscall(SYS_io_submit, context.number, 1, list.as_mut_ptr()) };
        if submitted == 1 || io::Error::last_os_error().kind() != io::ErrorKind::WouldBlock {
            return;
        }
        // There is no place for it until those that are complete are taken.
        context.take_completed();
    }
}

/// Adds one to the count of an eventfd that takes a write at once.
pub(crate) fn raise(fd: BorrowedFd<'_>) {
    while let Err(Errno::INTR) = write(fd, &1u64.to_ne_bytes()) {}
}

impl Context {
    fn take_completed(&self) {
        let mut events = [Event::default(); REQUESTS as usize];
        // SAFETY: there is room for as many events as are asked for, and the call waits for none.
        let taken = unsafe {
            let timeout = ptr::null_mut::<libc::timespec>();
            syscall(SYS_io_getevents, self.number, 0, REQUESTS, events.as_mut_ptr(), timeout)
        };
        if taken <= 0 {
            std::thread::yield_now();
        }
    }
}
