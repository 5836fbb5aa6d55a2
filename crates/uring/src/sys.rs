//! Test of io_uring restrictions: tries all operations on the rings of a sandboxed process.

use io_uring::{IoUring, cqueue, opcode, squeue};
use parking_lot::Mutex;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

/// Operations that the kernel did not refuse on a ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempted {
    /// Purpose of the ring.
    pub name: &'static str,
    /// Descriptor of the ring.
    pub fd: RawFd,
    /// Opcodes of requests.
    pub opcodes: Vec<u8>,
    /// Flags of requests.
    pub flags: u8,
}

/// Function that tries all operations on one ring.
type Attempt = Box<dyn Fn() -> io::Result<Attempted> + Send>;

static ATTEMPTS: Mutex<Vec<Attempt>> = Mutex::new(Vec::new());

/// Registers a sealed reserve for [`attempts`], with functions that take a ring and put it back.
pub(crate) fn register<S, C>(
    name: &'static str,
    take: impl Fn() -> io::Result<IoUring<S, C>> + Send + 'static,
    put_back: impl Fn(IoUring<S, C>) + Send + 'static,
) where
    S: squeue::EntryMarker + From<squeue::Entry>,
    C: cqueue::EntryMarker,
{
    ATTEMPTS.lock().push(Box::new(move || {
        let mut ring = take()?;
        let attempted = attempt(name, &mut ring)?;
        put_back(ring);
        Ok(attempted)
    }));
}

/// Tries all opcodes, without arguments, and flags of requests on a ring of each sealed reserve.
pub fn attempts() -> io::Result<Vec<Attempted>> {
    ATTEMPTS.lock().iter().map(|attempt| attempt()).collect()
}

fn attempt<S, C>(name: &'static str, ring: &mut IoUring<S, C>) -> io::Result<Attempted>
where
    S: squeue::EntryMarker + From<squeue::Entry>,
    C: cqueue::EntryMarker,
{
    let (mut opcodes, mut last) = (Vec::new(), 0);
    for code in 0..=u8::MAX {
        let result = result(ring, code, 0)?;
        if result != -EACCES {
            opcodes.push(code);
        }
        // A kernel answers EINVAL to opcodes that it does not have.
        if result != -EINVAL {
            last = code;
        }
    }
    opcodes.retain(|code| *code <= last);
    // The flags are tried with the last permitted opcode. Without flags, this request fails only
    // because it has no descriptor.
    let code = opcodes.last().copied().unwrap_or(0);
    let mut flags = 0;
    // Flags FIXED_FILE, DRAIN, LINK, HARDLINK, ASYNC and BUFFER_SELECT.
    for flag in (0..6).map(|bit| 1 << bit) {
        if ![-EACCES, -EOPNOTSUPP].contains(&result(ring, code, flag)?) {
            flags |= flag;
        }
    }
    Ok(Attempted { name, fd: ring.as_raw_fd(), opcodes, flags })
}

/// Result of a request with this opcode and these flags, and no arguments.
fn result<S, C>(ring: &mut IoUring<S, C>, code: u8, flags: u8) -> io::Result<i32>
where
    S: squeue::EntryMarker + From<squeue::Entry>,
    C: cqueue::EntryMarker,
{
    let mut entry = opcode::Nop::new().build();
    let bytes = (&raw mut entry).cast::<u8>();
    // SAFETY: `Entry` is a `struct io_uring_sqe`, whose first two bytes are the opcode and the
    // flags, and bytes 4 to 8 the descriptor. All values are valid for them.
    unsafe {
        bytes.write(code);
        bytes.add(1).write(flags);
        bytes.add(4).cast::<i32>().write_unaligned(-1);
    }
    // SAFETY: the entry has no address, and no descriptor that is open.
    unsafe { ring.submission().push(&S::from(entry)) }.map_err(io::Error::other)?;
    ring.submit_and_wait(1)?;
    let completion = ring.completion().next().ok_or(io::ErrorKind::UnexpectedEof)?;
    let completion: cqueue::Entry = completion.into();
    Ok(completion.result())
}

const EACCES: i32 = 13;
const EINVAL: i32 = 22;
const EOPNOTSUPP: i32 = 95;
