//! Transfer of bytes and descriptors over a Unix socket.

use crate::error::StateError;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Number of descriptors per message. Linux allows up to 253 (`SCM_MAX_FD`).
const MAX_FDS_PER_MESSAGE: usize = 128;

// The functions use `read` and `write`. The standard library uses other system calls for sockets,
// which the sandbox (seccomp) would also have to allow.

pub(crate) fn send_bytes(socket: &UnixStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(socket, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(len) => bytes = bytes.get(len..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

pub(crate) fn receive_bytes(socket: &UnixStream, mut bytes: &mut [u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::read(socket, &mut *bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(len) => bytes = bytes.get_mut(len..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Sends descriptors in several messages, each with one byte of data and at most
/// [`MAX_FDS_PER_MESSAGE`] descriptors.
pub(crate) fn send_fds(socket: &UnixStream, fds: &[&OwnedFd]) -> io::Result<()> {
    for some in fds.chunks(MAX_FDS_PER_MESSAGE) {
        let some: Vec<_> = some.iter().map(|fd| fd.as_fd()).collect();
        let mut space =
            [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS_PER_MESSAGE))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(&some)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        loop {
            match sendmsg(socket, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL) {
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
    Ok(())
}

/// Receives the announced number of descriptors.
pub(crate) fn receive_fds(socket: &UnixStream, count: usize) -> Result<Vec<OwnedFd>, StateError> {
    let mut fds = Vec::new();
    while fds.len() < count {
        let before = fds.len();
        let mut byte = [0];
        let mut space =
            [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS_PER_MESSAGE))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [IoSliceMut::new(&mut byte)];
        let received = match recvmsg(socket, &mut bytes, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => received,
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(io::Error::from(errno).into()),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(some) = message {
                fds.extend(some);
            }
        }
        if received.bytes == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(io::Error::other(
                "this process may not open more files: raise its limit (ulimit -n)",
            )
            .into());
        }
        if fds.len() == before {
            return Err(StateError::NotAState("a descriptor is missing"));
        }
    }
    if fds.len() > count {
        return Err(StateError::NotAState("there are more descriptors than announced"));
    }
    Ok(fds)
}
