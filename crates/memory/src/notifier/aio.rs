//! Signals by Linux AIO: a request names an eventfd that the kernel signals on completion.
//!
//! The request polls an eventfd of this process that is always writable, so it completes at once.
//! One context serves all eventfds of the process, from any number of threads.

use libc::{SYS_io_getevents, SYS_io_setup, SYS_io_submit, c_long, syscall};
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::LazyLock;

/// Largest number of completed requests whose events are not yet read.
const REQUESTS: c_long = 256;

/// Largest number of retries of a system call that fails for lack of resources.
const RETRIES: u32 = 100;

/// `IOCB_CMD_POLL` and `IOCB_FLAG_RESFD` of `<linux/aio_abi.h>`.
const POLL: u16 = 5;
const RESFD: u32 = 1;
/// `POLLOUT`.
const POLL_OUT: u64 = 4;

/// Request, `struct iocb` of `<linux/aio_abi.h>`.
#[repr(C)]
#[derive(Default)]
struct Request {
    data: u64,
    /// Key and flags, which are 0.
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

/// Event of a completed request, `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Event([u64; 4]);

/// Context of Linux AIO, and the eventfd that its requests poll. The context is never destroyed.
struct Context {
    number: usize,
    /// Eventfd that is always writable.
    signal_fd: OwnedFd,
}

static CONTEXT: LazyLock<io::Result<Context>> = LazyLock::new(|| {
    let signal_fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let mut number = 0usize;
    // SAFETY: the kernel writes the context's number to the variable, and keeps no pointer.
    if unsafe { syscall(SYS_io_setup, REQUESTS, &raw mut number) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Context { number, signal_fd })
});

/// True if AIO is available: the kernel supports and permits it, and has a free context
/// (`fs.aio-max-nr`).
pub(super) fn is_available() -> bool {
    CONTEXT.is_ok()
}

/// Signals the eventfd. Has no effect if AIO [is not available](is_available).
pub(super) fn notify(event: BorrowedFd<'_>) {
    let Ok(context) = &*CONTEXT else { return };
    let mut request = Request {
        opcode: POLL,
        fd: context.signal_fd.as_raw_fd().cast_unsigned(),
        buffer: POLL_OUT,
        flags: RESFD,
        signal: event.as_raw_fd().cast_unsigned(),
        ..Request::default()
    };
    for _ in 0..RETRIES {
        let mut list = [&raw mut request];
        // SAFETY: the list has one valid request, which the kernel copies. The request refers to no
        // memory.
        let submitted = unsafe { syscall(SYS_io_submit, context.number, 1, list.as_mut_ptr()) };
        if submitted == 1 || io::Error::last_os_error().kind() != io::ErrorKind::WouldBlock {
            return;
        }
        // The context is full until the events of completed requests are read.
        context.take_completed();
    }
}

impl Context {
    fn take_completed(&self) {
        let mut events = [Event::default(); REQUESTS as usize];
        // SAFETY: the buffer has room for the requested number of events. The call does not wait.
        let taken = unsafe {
            let timeout = ptr::null_mut::<libc::timespec>();
            syscall(SYS_io_getevents, self.number, 0, REQUESTS, events.as_mut_ptr(), timeout)
        };
        if taken <= 0 {
            std::thread::yield_now();
        }
    }
}
