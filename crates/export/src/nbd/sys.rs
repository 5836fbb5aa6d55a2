//! System calls that send from and receive into memory that is shared with a device.

use crate::vectors::{Part, Room};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Largest number of parts per call.
pub(super) const MAX_VECTORS: usize = 128;

/// Sends as much of the first [`MAX_VECTORS`] parts as the socket accepts without blocking. If the
/// peer has disconnected, the result is an error, and no signal is raised.
pub(super) fn send(socket: BorrowedFd<'_>, parts: &[Part<'_>]) -> Result<usize, Errno> {
    let mut vectors =
        [const { libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 } }; MAX_VECTORS];
    for (vector, part) in vectors.iter_mut().zip(parts) {
        *vector = part.vector;
    }
    // SAFETY: an all-zero `msghdr` is a valid message without an address, parts or control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = parts.len().min(MAX_VECTORS) as _;
    // SAFETY: each vector belongs to a part, and its bytes or its mapping are borrowed until the
    // call returns. The kernel only reads the bytes. If shared memory was lost, the call returns an
    // error.
    let count =
        unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    usize::try_from(count).map_err(|_| last_error())
}

/// Receives into `first` and then into `then`. On a non-blocking socket, the call does not block.
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    first: &Room<'_>,
    then: &Room<'_>,
) -> Result<usize, Errno> {
    let mut vectors = [first.vector, then.vector];
    // SAFETY: an all-zero `msghdr` is a valid message without an address, parts or control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = vectors.len() as _;
    // SAFETY: each vector belongs to a room that is borrowed until the call returns. The room is
    // either memory that is borrowed for writing, or writable shared memory. The mapping of shared
    // memory is borrowed, and no Rust reference points into it.
    let count = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0) };
    usize::try_from(count).map_err(|_| last_error())
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use shadowbell_memory::Mapping;
    use std::os::fd::AsFd;

    #[test]
    fn memory_of_both_kinds_is_sent_and_received_in_order() {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (a, b) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let memory = Mapping::anonymous(4096).unwrap().bytes();
        memory.write_from(100, b"shared").unwrap();
        let parts = [Part::of(b"own,"), Part::shared(&memory, 100, 106), Part::NONE];
        assert_eq!(parts.map(|part| part.len()), [4, 6, 0]);
        assert_eq!((parts[0].own(), parts[1].own()), (Some(&b"own,"[..]), None));
        assert_eq!(send(a.as_fd(), &parts), Ok(10));

        let mut rest = [0; 8];
        let (first, then) = (Room::shared(&memory, 4090, 4096), Room::of(&mut rest));
        assert_eq!((first.len(), then.len()), (6, 8));
        assert_eq!(receive(b.as_fd(), &first, &then), Ok(10));
        let mut start = [0; 6];
        memory.read_into(4090, &mut start).unwrap();
        assert_eq!((&start, &rest), (b"own,sh", b"ared\0\0\0\0"));
        let (first, then) = (Room::of(&mut start), Room::of(&mut rest));
        assert_eq!(receive(b.as_fd(), &first, &then), Err(Errno::AGAIN));
    }

    #[test]
    fn sending_to_a_disconnected_peer_is_an_error() {
        let (a, b) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        drop(b);
        assert_eq!(send(a.as_fd(), &[Part::of(b"x")]), Err(Errno::PIPE));
    }
}
