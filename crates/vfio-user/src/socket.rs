//! Sending and receiving bytes with file descriptors (`SCM_RIGHTS`).

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::Errno;
use crate::codec::Decoder;
use crate::descriptor::{Closer, Inspector, PeerFd, sys};

/// Maximum number of descriptors that Linux passes in one message (`SCM_MAX_FD`).
pub(crate) const SCM_MAX_FD: usize = 253;

/// Result of a receive into a decoder.
pub(crate) enum Received {
    /// Bytes were added to the decoder.
    Bytes {
        /// True if no data are left in the socket.
        drained: bool,
    },
    /// The peer has closed the connection.
    Closed,
    /// Descriptors were lost, because this process has too many open files.
    FdsLost,
}

/// Result of one receive call.
#[derive(Debug)]
pub(crate) struct RecvOutput {
    pub(crate) bytes: usize,
    /// True if the buffer was not filled.
    pub(crate) is_short: bool,
    /// Descriptors that are not inspected yet.
    pub(crate) fds: Vec<PeerFd>,
    /// True if descriptors were lost, because this process has too many open files.
    pub(crate) fds_lost: bool,
}

impl RecvOutput {
    /// True if bytes were received without descriptors.
    pub(crate) fn is_plain(&self) -> bool {
        self.bytes != 0 && self.fds.is_empty() && !self.fds_lost
    }
}

/// Receives bytes and their descriptors. 0 bytes mean the end of the stream.
///
/// This function receives all descriptors of peers, and wraps them in [`PeerFd`].
pub(crate) fn receive_some(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    closer: &Arc<Closer>,
) -> Result<RecvOutput, Errno> {
    receive_with(socket, into, closer, RecvFlags::empty())
}

/// Receives like [`receive_some`], but the data stay in the socket. The next call returns the data
/// after them, see [`peek_from`].
pub(crate) fn peek_some(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    closer: &Arc<Closer>,
) -> Result<RecvOutput, Errno> {
    receive_with(socket, into, closer, RecvFlags::PEEK)
}

/// Sets the offset of the next [`peek_some`], from the first unread byte (SO_PEEK_OFF). Each peek
/// advances the offset. All processes that have the socket share this offset.
pub(crate) fn peek_from(socket: BorrowedFd<'_>, offset: usize) -> Result<(), Errno> {
    sys::set_peek_offset(socket, i32::try_from(offset).unwrap_or(i32::MAX))
}

/// Removes `len` bytes that were [peeked at](peek_some) from the socket. Returns the number of
/// removed bytes.
pub(crate) fn discard(
    socket: BorrowedFd<'_>,
    len: usize,
    inspector: &Inspector,
) -> Result<usize, Errno> {
    let mut scratch = [0; 4096];
    let mut left = len;
    while left != 0 {
        let room = scratch.get_mut(..left.min(4096)).unwrap_or_default();
        match receive_some(socket, room, inspector.closer()) {
            Ok(RecvOutput { bytes: 0, .. }) | Err(Errno::AGAIN) => break,
            Ok(output) => {
                left -= output.bytes;
                // These are duplicates of descriptors that an earlier peek has returned.
                drop(inspector.inspect(output.fds));
            }
            Err(errno) => return Err(errno),
        }
    }
    Ok(len - left)
}

fn receive_with(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    closer: &Arc<Closer>,
    flags: RecvFlags,
) -> Result<RecvOutput, Errno> {
    // The buffer has space for the kernel's maximum. Otherwise the kernel would close the remaining
    // descriptors on this thread, and that may block.
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(SCM_MAX_FD))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let room = into.len();
    let mut buffers = [IoSliceMut::new(into)];
    let received = loop {
        match recvmsg(socket, &mut buffers, &mut control, flags | RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => continue,
            other => break other?,
        }
    };
    let mut fds: Vec<PeerFd> = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights.map(|fd| PeerFd::new(fd, closer)));
        }
    }
    let fds_lost = received.flags.contains(ReturnFlags::CTRUNC);
    Ok(RecvOutput { bytes: received.bytes, is_short: received.bytes < room, fds, fds_lost })
}

/// Receives available data into `decoder`. `inspector` checks the descriptors.
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    decoder: &mut Decoder,
    inspector: &Inspector,
) -> Result<Received, Errno> {
    let output = receive_some(socket, decoder.space(), inspector.closer())?;
    Ok(take_in(output, decoder, inspector))
}

/// Passes the result of a receive to the decoder.
pub(crate) fn take_in(
    output: RecvOutput,
    decoder: &mut Decoder,
    inspector: &Inspector,
) -> Received {
    let fds = inspector.inspect(output.fds);
    if output.fds_lost {
        return Received::FdsLost;
    }
    if output.bytes == 0 {
        return Received::Closed;
    }
    // A receive also ends at a message with descriptors. So even if the buffer is not full, the
    // socket may have more data.
    let drained = output.is_short && fds.is_empty();
    decoder.advance(output.bytes, fds);
    Received::Bytes { drained }
}

/// Sends as many of `bytes` as the socket accepts. The descriptors `fds` (at most [`SCM_MAX_FD`])
/// are attached to the first byte. Returns the number of sent bytes.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[&[u8]],
    fds: &[BorrowedFd<'_>],
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(SCM_MAX_FD))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOMANYREFS);
    }
    let mut buffers = [IoSlice::new(&[]); 4];
    let mut used = 0;
    for (buffer, part) in buffers.iter_mut().zip(bytes) {
        *buffer = IoSlice::new(part);
        used += 1;
    }
    let buffers = buffers.get(..used).unwrap_or_default();
    loop {
        match sendmsg(socket, buffers, &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => continue,
            other => return other,
        }
    }
}

/// Sends like [`send`], with owned descriptors.
pub(crate) fn send_owned<'a>(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: impl Iterator<Item = &'a OwnedFd>,
) -> Result<usize, Errno> {
    let mut fds = fds.map(AsFd::as_fd);
    match fds.next() {
        None => send(socket, &[bytes], &[]),
        Some(first) => {
            let all: Vec<_> = std::iter::once(first).chain(fds).collect();
            send(socket, &[bytes], &all)
        }
    }
}
