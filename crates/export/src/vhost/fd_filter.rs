//! Filter for the descriptors that a frontend sends to rust-vmm's protocol backend.
//!
//! The backend uses the descriptors of a message without checks: it maps and closes files of any
//! file system. The frontend may have the daemon of a FUSE file system, which never answers. That
//! would block the thread that serves the socket, and every later frontend would wait. Therefore
//! each message passes through this filter, which passes only descriptors that are necessary and do
//! not depend on another process: for shared memory, memfds and files of local disks; for a queue,
//! eventfds.

use super::inflight_messages::{Bad, Handled, InflightMessages, Reply, SET_INFLIGHT_FD};
use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use shadowbell_vfio_user::descriptor::{Channel, Descriptor, PeerFd};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

/// Size of a header in bytes: request, flags, length of the payload.
const HEADER: usize = 12;
/// Longest payload that rust-vmm's backend accepts, in bytes.
const MAX_PAYLOAD: usize = 4096;
/// Largest number of descriptors that the backend accepts with a message.
const MAX_FDS: usize = 32;

/// Requests that may have descriptors, except those that are refused because their feature is not
/// offered.
mod request {
    pub(super) const SET_MEM_TABLE: u32 = 5;
    pub(super) const SET_VRING_KICK: u32 = 12;
    pub(super) const SET_VRING_CALL: u32 = 13;
    pub(super) const SET_VRING_ERR: u32 = 14;
    pub(super) const ADD_MEM_REG: u32 = 37;
    pub(super) const REM_MEM_REG: u32 = 38;
}

/// Reason to disconnect a frontend.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error(
        "it shares a descriptor that is not what request {0} takes: guest memory has to be a memfd, \
         or a file of tmpfs, hugetlbfs or a local disk, and notifications have to be eventfds"
    )]
    Descriptor(u32),
    #[error("it sends descriptors in the middle of a message, or more than {MAX_FDS}")]
    Descriptors,
    #[error("it sends a message of {0} bytes")]
    Length(usize),
    #[error(transparent)]
    Inflight(#[from] Bad),
    #[error("{0}")]
    Socket(#[from] Errno),
}

/// Passes messages to the backend until the frontend disconnects or `daemon` is closed. Messages
/// about in-flight tracking are not passed, but answered on `answers`. No other answer can
/// interfere, because a frontend sends no other request before it has the answer.
pub(super) fn pass(
    frontend: &mut Channel,
    daemon: &UnixStream,
    inflight: &mut InflightMessages,
    answers: &UnixStream,
) -> Result<(), Refusal> {
    loop {
        let mut message = [0; HEADER + MAX_PAYLOAD];
        let (header, payload) = message.split_at_mut(HEADER);
        let mut fds = Vec::new();
        if !fill(frontend, header, Some(&mut fds))? {
            return Ok(());
        }
        let field = |at: usize| {
            let bytes = header.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
            bytes.map(u32::from_ne_bytes).unwrap_or_default()
        };
        let (request, flags, len) = (field(0), field(4), field(8) as usize);
        let payload = payload.get_mut(..len).ok_or(Refusal::Length(len))?;
        let fds = allowed(request, fds)?;
        if !fill(frontend, payload, None)? {
            return Ok(());
        }
        let sent = match inflight.handle(request, flags, payload, &fds)? {
            Handled::Done(None) => Ok(()),
            Handled::Done(Some(Reply { bytes, fd })) => {
                let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
                send(answers, &bytes, &fds)
            }
            Handled::Passed => {
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                send(daemon, message.get(..HEADER + len).unwrap_or_default(), &fds)
            }
        };
        match sent {
            Ok(()) => {}
            // The backend has closed the connection. It reports the reason itself.
            Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Receives all of `into`. Returns false at the end of the stream. A descriptor is accepted only if
/// `fds` is `Some`.
fn fill(
    frontend: &mut Channel,
    into: &mut [u8],
    mut fds: Option<&mut Vec<Descriptor>>,
) -> Result<bool, Refusal> {
    let mut done = 0;
    while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match frontend.receive(rest) {
            Ok((0, _)) | Err(Errno::CONNRESET) => return Ok(false),
            Ok((received, came)) => {
                done += received;
                match &mut fds {
                    Some(fds) => fds.extend(came),
                    None if came.is_empty() => {}
                    None => return Err(Refusal::Descriptors),
                }
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(true)
}

/// Checks the descriptors of a request.
fn allowed(request: u32, fds: Vec<Descriptor>) -> Result<Vec<PeerFd>, Refusal> {
    if fds.len() > MAX_FDS {
        return Err(Refusal::Descriptors);
    }
    // The specification of vhost-user requires that the descriptor of REM_MEM_REG is ignored.
    if request == request::REM_MEM_REG {
        return Ok(Vec::new());
    }
    let fds = fds.into_iter().map(|fd| match (request, fd) {
        (
            request::SET_MEM_TABLE | request::ADD_MEM_REG | SET_INFLIGHT_FD,
            Descriptor::Memory(file),
        ) => Ok(file),
        (
            request::SET_VRING_KICK | request::SET_VRING_CALL | request::SET_VRING_ERR,
            Descriptor::Event(fd),
        ) => Ok(fd),
        _ => Err(Refusal::Descriptor(request)),
    });
    fds.collect()
}

fn send(to: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOMANYREFS);
    }
    let mut sent = 0;
    while let Some(rest) = bytes.get(sent..).filter(|rest| !rest.is_empty()) {
        match sendmsg(to, &[IoSlice::new(rest)], &mut control, SendFlags::NOSIGNAL) {
            Ok(more) => {
                sent += more;
                // The first call has sent the descriptors.
                control.clear();
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Connects to rust-vmm's backend, which can only connect to a socket path. `connect` gets such a
/// path, in the directory of the socket `beside`.
pub(super) fn connect_daemon<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
    beside: &Path,
    connect: impl FnOnce(&str) -> Result<(), E>,
) -> Result<UnixStream, Box<dyn std::error::Error + Send + Sync>> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let parent = beside.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = std::fs::File::open(parent.unwrap_or(Path::new(".")))?;
    let (pid, number) = (std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    // A path through /proc fits into a socket address, even if the directory's path is long.
    let path = format!("/proc/self/fd/{}/.vhost.{pid}.{number}", directory.as_raw_fd());
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path)?;
    let connected = connect(&path).map_err(Into::into);
    let _ = std::fs::remove_file(&path);
    connected?;
    // Another process may have connected to the path, so the process of the peer is verified.
    loop {
        let (stream, _) = listener.accept()?;
        let peer = rustix::net::sockopt::socket_peercred(&stream).map_err(io::Error::from)?;
        if peer.pid == rustix::process::getpid() {
            return Ok(stream);
        }
    }
}
