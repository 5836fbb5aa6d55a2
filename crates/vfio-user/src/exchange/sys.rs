//! The io_uring instance, and the `msghdr` structures of an exchange.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};

use io_uring::{IoUring, opcode, types};
use rustix::io::{ReadWriteFlags, pwritev2};
use shadowbell_uring::{Allowed, Reserve};

use crate::Errno;
use crate::socket::SCM_MAX_FD;

/// Maximum number of calls of `io_uring_enter` until the kernel has accepted both operations of an
/// exchange.
const TRIES: u32 = 8;
const SEND: u64 = 1;
const TAKE: u64 = 2;

/// Size of a control message header in bytes.
const HEAD: usize = size_of::<libc::cmsghdr>();
/// Size of a control buffer for [`SCM_MAX_FD`] descriptors, in 64-bit words, because the buffer
/// must be aligned like `cmsghdr`.
const WORDS: usize = (HEAD + SCM_MAX_FD * size_of::<i32>()).div_ceil(size_of::<u64>());

/// Reserve of io_uring instances. They may only send and receive.
static RESERVE: Reserve = Reserve::new("replies", || build(WRITE_ONLY.load(Ordering::Relaxed)));

/// True if instances send by `WRITE`. The flags of `SENDMSG` are not restrictable: with
/// `MSG_FASTOPEN`, it connects a closed TCP socket to any address.
static WRITE_ONLY: AtomicBool = AtomicBool::new(false);

/// Creates an instance.
fn build(write_only: bool) -> io::Result<IoUring> {
    let opcodes: &[u8] = match write_only {
        true => &[opcode::Write::CODE, opcode::RecvMsg::CODE],
        false => &[opcode::SendMsg::CODE, opcode::RecvMsg::CODE],
    };
    Allowed { opcodes, ..Allowed::NOTHING }.build(&IoUring::builder(), 2, |_| Ok(()))
}

/// Creates the rings of `count` reactors. See [`prepare`](super::prepare).
pub(super) fn prepare(count: usize) -> usize {
    WRITE_ONLY.store(writes_do_not_block(), Ordering::Relaxed);
    RESERVE.seal(count)
}

/// True if a write to a socket can be non-blocking by its flags (Linux 6.5 or later).
fn writes_do_not_block() -> bool {
    let write = |socket: &UnixStream| {
        pwritev2(socket, &[io::IoSlice::new(b"x")], u64::MAX, ReadWriteFlags::NOWAIT)
    };
    UnixStream::pair().is_ok_and(|(socket, _peer)| write(&socket).is_ok())
}

pub(super) struct Ring {
    /// True if the instance sends by `WRITE`.
    write_only: bool,
    /// io_uring instance. `None` after a failed submit: the instance is closed, because operations
    /// that are still queued in it must not be executed later.
    uring: Option<IoUring>,
}

pub(super) struct Outcome {
    pub(super) sent: Result<usize, Errno>,
    pub(super) received: Result<usize, Errno>,
    pub(super) fds: Vec<OwnedFd>,
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").finish_non_exhaustive()
    }
}

impl Ring {
    pub(super) fn new() -> io::Result<Self> {
        let uring = RESERVE.take()?;
        Ok(Self { write_only: WRITE_ONLY.load(Ordering::Relaxed), uring: Some(uring) })
    }

    /// Ring that sends by `WRITE`.
    #[cfg(test)]
    pub(super) fn write_only() -> io::Result<Self> {
        Ok(Self { write_only: true, uring: Some(build(true)?) })
    }

    /// Sends and receives without blocking, in one system call. Returns `None` if the kernel did
    /// not accept both operations, or if the ring sends no descriptors.
    pub(super) fn send_and_receive(
        &mut self,
        socket: BorrowedFd<'_>,
        reply: &[u8],
        fds: &[BorrowedFd<'_>],
        into: &mut [u8],
    ) -> Option<Outcome> {
        if self.write_only && !fds.is_empty() {
            return None;
        }
        let mut rights = [0; WORDS];
        let rights_len = put_rights(&mut rights, fds)?;
        let mut reply = [libc::iovec {
            // The kernel only reads from this buffer.
            iov_base: reply.as_ptr().cast_mut().cast(),
            iov_len: reply.len(),
        }];
        let send = header(&mut reply, &mut rights, rights_len);
        let mut came = [0; WORDS];
        let mut into = [libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() }];
        let mut take = header(&mut into, &mut came, WORDS * size_of::<u64>());

        let fd = types::Fd(socket.as_raw_fd());
        let sending = if self.write_only {
            let [part] = &reply;
            let len = u32::try_from(part.iov_len).unwrap_or(u32::MAX);
            opcode::Write::new(fd, part.iov_base.cast(), len).rw_flags(libc::RWF_NOWAIT).build()
        } else {
            let flags = (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as u32;
            opcode::SendMsg::new(fd, &raw const send).flags(flags).build()
        };
        let flags = (libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC) as u32;
        let taking = opcode::RecvMsg::new(fd, &raw mut take).flags(flags).build();
        let entries = [sending.user_data(SEND), taking.user_data(TAKE)];
        let uring = self.uring.as_mut()?;
        // SAFETY: the headers and their buffers live until this call ends, and no operation uses
        // them later. Operations that do not wait (MSG_DONTWAIT, RWF_NOWAIT) have completed when
        // the submit returns, which is checked below. Operations that were not submitted are
        // discarded with the ring.
        if unsafe { uring.submission().push_multiple(&entries) }.is_err() {
            self.uring = None;
            return None;
        }
        for _ in 0..TRIES {
            let _ = uring.submit();
            if uring.submission().is_empty() {
                break;
            }
        }
        let missing = uring.submission().len();
        let (mut sent, mut received) = (None, None);
        while usize::from(sent.is_some()) + usize::from(received.is_some()) + missing < 2 {
            for completion in uring.completion() {
                let result = match u32::try_from(completion.result()) {
                    Ok(len) => Ok(len as usize),
                    Err(_) => Err(Errno::from_raw_os_error(-completion.result())),
                };
                match completion.user_data() {
                    SEND => sent = Some(result),
                    _ => received = Some(result),
                }
            }
            if usize::from(sent.is_some()) + usize::from(received.is_some()) + missing < 2 {
                // An operation that does not wait completes during the submit, so this never
                // happens. If it did, the buffers would have to stay allocated until the operations
                // have completed.
                let _ = uring.submit_and_wait(1);
            }
        }
        if missing != 0 {
            self.uring = None;
            sent.as_ref()?;
        }
        let fds = match &received {
            Some(Ok(_)) => take_rights(&came, take.msg_controllen),
            _ => Vec::new(),
        };
        let sent = sent.unwrap_or(Ok(0));
        Some(Outcome { sent, received: received.unwrap_or(Ok(0)), fds })
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if let Some(uring) = self.uring.take() {
            RESERVE.put_back(uring);
        }
    }
}

fn header(
    bytes: &mut [libc::iovec; 1],
    control: &mut [u64; WORDS],
    control_len: usize,
) -> libc::msghdr {
    // SAFETY: an all-zero `msghdr` is valid and has no pointers.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = bytes.as_mut_ptr();
    header.msg_iovlen = bytes.len();
    if control_len != 0 {
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = control_len;
    }
    header
}

/// Adds `fds` to the control buffer (`SCM_RIGHTS`). Returns the length of the control data, or
/// `None` if the descriptors do not fit.
fn put_rights(control: &mut [u64; WORDS], fds: &[BorrowedFd<'_>]) -> Option<usize> {
    if fds.is_empty() {
        return Some(0);
    }
    let len = HEAD + size_of_val(fds);
    let mut bytes = Vec::with_capacity(len.next_multiple_of(size_of::<u64>()));
    bytes.extend_from_slice(&len.to_ne_bytes());
    bytes.extend_from_slice(&libc::SOL_SOCKET.to_ne_bytes());
    bytes.extend_from_slice(&libc::SCM_RIGHTS.to_ne_bytes());
    bytes.extend(fds.iter().flat_map(|fd| fd.as_raw_fd().to_ne_bytes()));
    bytes.resize(len.next_multiple_of(size_of::<u64>()), 0);
    let fd_words = bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word));
    if bytes.len() / size_of::<u64>() > control.len() {
        return None;
    }
    control.iter_mut().zip(fd_words).for_each(|(to, word)| *to = word);
    Some(bytes.len())
}

/// Takes the received descriptors out of a control buffer.
fn take_rights(control: &[u64; WORDS], len: usize) -> Vec<OwnedFd> {
    let bytes: Vec<u8> = control.iter().flat_map(|word| word.to_ne_bytes()).take(len).collect();
    let mut rest = bytes.as_slice();
    let mut fds = Vec::new();
    while let Some((head, _)) = rest.split_first_chunk::<HEAD>() {
        let (size, kind) = head.split_at(size_of::<usize>());
        let size = size.try_into().map_or(0, usize::from_ne_bytes);
        let Some(body) = rest.get(HEAD..size) else { break };
        if kind == [libc::SOL_SOCKET.to_ne_bytes(), libc::SCM_RIGHTS.to_ne_bytes()].as_flattened() {
            for fd in body.as_chunks().0 {
                // SAFETY: the kernel has opened the descriptor for this process, and reports it
                // only here.
                fds.push(unsafe { OwnedFd::from_raw_fd(i32::from_ne_bytes(*fd)) });
            }
        }
        rest = rest.get(size.next_multiple_of(size_of::<usize>())..).unwrap_or_default();
    }
    fds
}
