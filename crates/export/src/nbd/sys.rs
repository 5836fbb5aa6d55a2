//! What is sent from, and received into, memory that is shared with a device.

use crate::vectors::{Part, Room};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Parts that go with one call, at most.
pub(super) const MOST: usize = 128;

/// Sends as much as the socket takes without waiting, of the first [`MOST`] parts. Whoever has
/// gone is an error, and no signal.
pub(super) fn send(socket: BorrowedFd<'_>, parts: &[Part<'_>]) -> Result<usize, Errno> {
    let mut vectors = [const { libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 } }; MOST];
    for (vector, part) in vectors.iter_mut().zip(parts) {
        *vector = part.vector;
    }
    // SAFETY: all zeroes are a message without an address, parts or anything else.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = parts.len().min(MOST) as _;
    // SAFETY: each vector is that of a part, whose bytes are borrowed, or whose mapping is, until
    // the call returns. The kernel reads them, and memory that is gone is an error of the call.
    let count =
        unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    usize::try_from(count).map_err(|_| last_error())
}

/// Receives into the one and then into the other, without waiting if the socket does not.
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    first: &Room<'_>,
    then: &Room<'_>,
) -> Result<usize, Errno> {
    let vectors = [first.vector, then.vector];
    // SAFETY: each vector is that of a room, which is borrowed for writing or is writable memory
    // whose mapping is borrowed, until the call returns. No Rust reference points into the latter.
    let count = unsafe { libc::readv(socket.as_raw_fd(), vectors.as_ptr(), 2) };
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
    fn who_has_gone_is_an_error() {
        let (a, b) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        drop(b);
        assert_eq!(send(a.as_fd(), &[Part::of(b"x")]), Err(Errno::PIPE));
    }
}
