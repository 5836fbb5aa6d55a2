//! Signalling by Linux AIO: each of its requests names an eventfd that is to be signalled when it
//! completes. The request here, whether an eventfd of our own takes a write, completes at once.
//!
//! One context serves all eventfds of the process, from any number of threads.

use libc::{SYS_io_getevents, SYS_io_setup, SYS_io_submit, c_long, syscall};
use rustix::event::{EventfdFlags, eventfd};
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

/// Not if the kernel has no AIO, this process may not use it, or the system has no context left
/// (`fs.aio-max-nr`).
pub(super) fn is_available() -> bool {
    CONTEXT.is_ok()
}

/// Does nothing if this [is not available](is_available).
pub(super) fn notify(event: BorrowedFd<'_>) {
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
