//! What is sent from, and received into, memory that is shared with a device: the kernel is told
//! where it is, and nobody here borrows it.

use rustix::io::Errno;
use shadowbell_memory::SharedBytes;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Parts that go with one call, at most.
pub(super) const MOST: usize = 128;

/// Bytes of this program's, or of memory that is shared with a device, to be sent.
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    vector: libc::iovec,
    /// The bytes, if they are this program's.
    own: Option<&'a [u8]>,
}

impl<'a> Part<'a> {
    pub(super) const NONE: Self = Self::of(&[]);

    pub(super) const fn of(own: &'a [u8]) -> Self {
        let start = own.as_ptr().cast_mut().cast();
        Self { vector: libc::iovec { iov_base: start, iov_len: own.len() }, own: Some(own) }
    }

    /// The bytes from `from` to `to`, as far as there are any.
    pub(super) fn shared(bytes: &'a SharedBytes, from: usize, to: usize) -> Self {
        Self { vector: vector(bytes, from, to), own: None }
    }

    /// The bytes, unless they are shared with a device.
    pub(super) fn own(&self) -> Option<&'a [u8]> {
        self.own
    }

    pub(super) fn len(&self) -> usize {
        self.vector.iov_len
    }
}

/// Room in memory of this program's, or in memory that is shared with a device.
pub(super) struct Room<'a> {
    vector: libc::iovec,
    borrowed: PhantomData<&'a mut [u8]>,
}

impl<'a> Room<'a> {
    pub(super) fn of(own: &'a mut [u8]) -> Self {
        let (iov_base, iov_len) = (own.as_mut_ptr().cast(), own.len());
        Self { vector: libc::iovec { iov_base, iov_len }, borrowed: PhantomData }
    }

    /// The bytes from `from` to `to`, as far as there are any that may be written.
    pub(super) fn shared(bytes: &'a SharedBytes, from: usize, to: usize) -> Self {
        let to = if bytes.is_writable() { to } else { 0 };
        Self { vector: vector(bytes, from, to), borrowed: PhantomData }
    }

    pub(super) fn len(&self) -> usize {
        self.vector.iov_len
    }
}

/// Where the bytes from `from` to `to` are, as far as there are any.
fn vector(bytes: &SharedBytes, from: usize, to: usize) -> libc::iovec {
    let to = to.min(bytes.len());
    let from = from.min(to);
    let start = std::ptr::with_exposed_provenance_mut(bytes.address() + from);
    libc::iovec { iov_base: start, iov_len: to - from }
}

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
    fn nothing_outside_of_the_memory_is_named() {
        let memory = Mapping::anonymous(4096).unwrap().bytes();
        for (from, to, len) in
            [(0, usize::MAX, 4096), (4096, 4097, 0), (usize::MAX, usize::MAX, 0), (9, 3, 0)]
        {
            assert_eq!(Part::shared(&memory, from, to).len(), len, "{from} {to}");
            assert_eq!(Room::shared(&memory, from, to).len(), len, "{from} {to}");
        }
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
