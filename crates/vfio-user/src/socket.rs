//! Sending and receiving bytes with descriptors beside them.

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

/// The most descriptors that Linux passes in one message (`SCM_MAX_FD`).
pub(crate) const SCM_MAX_FD: usize = 253;

/// What a receive came to.
pub(crate) enum Received {
    /// The decoder got more.
    Bytes {
        /// The socket had no more than that.
        drained: bool,
    },
    /// The other end is gone.
    Closed,
    /// Descriptors were lost: this process has too many open.
    FdsLost,
}

/// What one call has received.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) bytes: usize,
    /// There was room for more.
    pub(crate) is_short: bool,
    /// Nobody has looked at them.
    pub(crate) fds: Vec<PeerFd>,
    /// Others were lost: this process has too many open.
    pub(crate) fds_lost: bool,
}

impl Arrival {
    /// It is bytes and nothing else.
    pub(crate) fn is_plain(&self) -> bool {
        self.bytes != 0 && self.fds.is_empty() && !self.fds_lost
    }
}

/// Receives some bytes, and the descriptors that came with them; no bytes are the end.
///
/// The only place in which descriptors of peers come in. From here on they are in [`PeerFd`]s.
pub(crate) fn receive_some(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    closer: &Arc<Closer>,
) -> Result<Arrival, Errno> {
    receive_how(socket, into, closer, RecvFlags::empty())
}

/// As [`receive_some`], and leaves everything where it is. The next call brings what comes after
/// that: see [`peek_from`].
pub(crate) fn peek_some(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    closer: &Arc<Closer>,
) -> Result<Arrival, Errno> {
    receive_how(socket, into, closer, RecvFlags::PEEK)
}

/// [`peek_some`] begins so many bytes after what was received, and goes on from there
/// (SO_PEEK_OFF). The kernel counts that for the socket, whoever has it.
pub(crate) fn peek_from(socket: BorrowedFd<'_>, offset: usize) -> Result<(), Errno> {
    sys::set_peek_offset(socket, i32::try_from(offset).unwrap_or(i32::MAX))
}

/// Takes `len` bytes out of the socket that were [peeked](peek_some) at. How many were there.
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
            Ok(Arrival { bytes: 0, .. }) | Err(Errno::AGAIN) => break,
            Ok(arrival) => {
                left -= arrival.bytes;
                // They come again, and are closed like all others.
                drop(inspector.inspect(arrival.fds));
            }
            Err(errno) => return Err(errno),
        }
    }
    Ok(len - left)
}

fn receive_how(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    closer: &Arc<Closer>,
    how: RecvFlags,
) -> Result<Arrival, Errno> {
    // Room for all that the kernel lets through at once: what it has to leave out, it closes here.
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(SCM_MAX_FD))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let room = into.len();
    let mut buffers = [IoSliceMut::new(into)];
    let received = loop {
        match recvmsg(socket, &mut buffers, &mut control, how | RecvFlags::CMSG_CLOEXEC) {
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
    Ok(Arrival { bytes: received.bytes, is_short: received.bytes < room, fds, fds_lost })
}

/// Receives whatever is there into `decoder`, descriptors by way of `inspector`.
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    decoder: &mut Decoder,
    inspector: &Inspector,
) -> Result<Received, Errno> {
    let arrival = receive_some(socket, decoder.space(), inspector.closer())?;
    Ok(take_in(arrival, decoder, inspector))
}

/// Takes in what was received into the decoder's space.
pub(crate) fn take_in(arrival: Arrival, decoder: &mut Decoder, inspector: &Inspector) -> Received {
    let fds = inspector.inspect(arrival.fds);
    if arrival.fds_lost {
        return Received::FdsLost;
    }
    if arrival.bytes == 0 {
        return Received::Closed;
    }
    // With descriptors, the kernel stops at their message whatever there is behind it.
    let drained = arrival.is_short && fds.is_empty();
    decoder.advance(arrival.bytes, fds);
    Received::Bytes { drained }
}

/// Sends some of `bytes`, with `fds` beside the first of them; returns how many. At most as many
/// descriptors as Linux passes in one message.
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

/// As [`send`], for descriptors that are owned.
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
