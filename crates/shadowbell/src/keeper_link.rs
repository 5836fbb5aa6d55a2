//! What a keeper, its workers, and who asks the keeper say to each other: packets over Unix
//! sockets, a letter and what belongs to it, now and then with a descriptor.

use crate::late_close;
use crate::self_as_is;
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recv, recvmsg, sendmsg, socketpair,
};
use std::ffi::OsStr;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Bytes that may be on their way to somebody who does not listen.
const ROOM: usize = 1 << 20;
/// The option by which a worker knows that its standard input is its keeper.
pub(crate) const AS_WORKER: &str = "--as-worker";
/// Its value for the one that serves at once.
pub(crate) const START: &str = "start";
/// Its value for the one that takes over from another.
pub(crate) const SUCCESSOR: &str = "successor";
/// Its value for the one that goes on for another that has died.
pub(crate) const RECOVER: &str = "recover";

/// The longest packet: a letter and a path, a sentence, or items.
pub(crate) const MOST: usize = 16384;
/// What whoever passes a packet on may add to it.
const ROOM_AROUND: usize = 64;
/// The most descriptors that Linux takes in a packet (`SCM_MAX_FD`).
pub(crate) const MOST_FDS: usize = 253;

/// What the other end says.
#[derive(Debug)]
pub(crate) struct Packet {
    pub(crate) letter: u8,
    pub(crate) body: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

impl Packet {
    /// The body, as a sentence for a person.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn path(self) -> PathBuf {
        std::ffi::OsString::from_vec(self.body).into()
    }

    /// The one descriptor of a packet that has one.
    pub(crate) fn fd(mut self) -> Option<OwnedFd> {
        self.fds.pop()
    }
}

/// From a keeper to its worker.
pub(crate) mod to_worker {
    /// End the service.
    pub(crate) const END: u8 = b'E';
    /// Write the counters.
    pub(crate) const REPORT: u8 = b'R';
    /// Read the configuration file again, and answer [`READ`](super::to_keeper::READ).
    pub(crate) const READ: u8 = b'L';
    /// Answer [`ALIVE`](super::to_keeper::ALIVE) when all threads that serve have come by.
    pub(crate) const VISIT: u8 = b'V';
    /// Hand over to whoever is at the other end of the descriptor, and reads the state versions
    /// `FIRST LAST`.
    pub(crate) const HAND_OVER: u8 = b'H';
    /// The same, one controller after the other: both [can](super::to_keeper::MOVES).
    pub(crate) const MOVE: u8 = b'M';
    /// The same, or come to rest for good, and say [`RESTS`](super::to_keeper::RESTS): it
    /// [can](super::to_keeper::CAN_REST).
    pub(crate) const REPLACE: u8 = b'Q';
    /// Take over from whoever is at the other end of the descriptor.
    pub(crate) const TAKE_OVER: u8 = b'T';
    /// The worker before has died by a fault, and was not killed: comes before its items.
    pub(crate) const FAULT: u8 = b'F';
    /// What the worker before has left: [items](crate::items), in one transaction.
    pub(crate) const ITEMS: u8 = b'I';
}

/// From a worker to its keeper.
pub(crate) mod to_keeper {
    /// The path of a socket at which it serves.
    pub(crate) const SOCKET: u8 = b'S';
    /// It serves: what, in a few words. One of an earlier release has no words, and none of what
    /// such a release does not know may be asked of it.
    pub(crate) const SERVING: u8 = b'R';
    /// The configuration was read again, or refused: what came of it, in a sentence.
    pub(crate) const READ: u8 = b'L';
    /// All threads that serve do: what it serves, in a few words.
    pub(crate) const ALIVE: u8 = b'V';
    /// It can take over, and reads the state versions `FIRST LAST`.
    pub(crate) const PREPARED: u8 = b'P';
    /// It has not handed over, and goes on: why.
    pub(crate) const GOES_ON: u8 = b'G';
    /// It has handed over, touches nothing any more, and ends.
    pub(crate) const HANDED_OVER: u8 = b'C';
    /// It can not go on: why.
    pub(crate) const FAILED: u8 = b'X';
    /// A change of what is kept for the time after its death: [items](crate::items).
    pub(crate) const ITEMS: u8 = b'I';
    /// It goes on for the one before, and what is kept for itself counts from now on.
    pub(crate) const TAKEN: u8 = b'A';
    /// Have a new worker of the same program take over; the outcome is for the descriptor.
    pub(crate) const UPGRADE: u8 = b'U';
    /// It can hand over, and take over, one controller after the other. Comes first.
    pub(crate) const MOVES: u8 = b'M';
    /// It can come to rest for good, so that another one goes on as after its death. Comes first.
    pub(crate) const CAN_REST: u8 = b'W';
    /// It rests for good, and is to be ended.
    pub(crate) const RESTS: u8 = b'Z';
    /// It hands over one controller after the other, and there is no way back any more. Said again
    /// from time to time, as long as that takes.
    pub(crate) const MOVING: u8 = b'N';
    /// It goes on for a part of what the one before had: what both have left counts from now on.
    pub(crate) const SHARED: u8 = b'B';
    /// The descriptor is a socket at which it will ask for images to be [opened](opening).
    pub(crate) const OPENER: u8 = b'O';
    /// The descriptor is a socket at which it will ask for [sockets and
    /// files](crate::place_link).
    pub(crate) const PLACES: u8 = b'D';
}

/// What a worker in a sandbox asks for, and what it is told.
pub(crate) mod opening {
    use shadowbell_backend::Access;

    /// The path of a file or a device that it may have, without symbolic links. No answer.
    pub(crate) const FILE: u8 = b'f';
    /// The same of a directory: all that is below it. No answer.
    pub(crate) const DIRECTORY: u8 = b'd';
    /// The same of the configuration file: whenever that is asked for, what it names then counts,
    /// too. No answer.
    pub(crate) const CONFIG: u8 = b'k';
    /// That is all that it may have.
    pub(crate) const COMPLETE: u8 = b'c';
    /// A descriptor that names what is at this path (`O_PATH`).
    pub(crate) const NAME: u8 = b'n';
    /// What the descriptor names, opened anew; how is said by a letter.
    pub(crate) const OPEN: u8 = b'o';
    /// What the namespace says whose character device the descriptor names: the answer is
    /// [`OPENED`] with that as JSON. With the access `w` not if the system uses its block device.
    pub(crate) const IDENTIFY: u8 = b'i';
    /// This was opened.
    pub(crate) const OPENED: u8 = b'y';
    /// An error of the system's, a number.
    pub(crate) const ERRNO: u8 = b'e';
    /// It is not to be had: why.
    pub(crate) const REFUSED: u8 = b'r';

    const ACCESS: [(Access, &str); 3] =
        [(Access::Read, "r"), (Access::Write, "w"), (Access::WriteAlone, "x")];

    /// How something is to be opened, as it is said.
    pub(crate) fn access(access: Access) -> &'static str {
        ACCESS.iter().find(|(other, _)| *other == access).map_or("", |(_, letter)| letter)
    }

    /// The other way round.
    pub(crate) fn parse_access(body: &[u8]) -> Option<Access> {
        let known = ACCESS.iter().find(|(_, letter)| letter.as_bytes() == body);
        known.map(|(access, _)| *access)
    }
}

/// From who asks a keeper.
pub(crate) mod question {
    /// Whether this is its process, or its worker's.
    pub(crate) const IS_YOURS: u8 = b'p';
    /// Whether its worker serves at this path.
    pub(crate) const SERVES: u8 = b's';
    /// Have a new worker take over: the path of its program, or nothing for that of the old one.
    pub(crate) const UPGRADE: u8 = b'u';
    /// Let the worker have the image at this path, in which there are no symbolic links.
    pub(crate) const GRANT: u8 = b'g';
}

/// From a keeper that was asked.
pub(crate) mod answer {
    pub(crate) const YES: u8 = b'y';
    pub(crate) const NO: u8 = b'n';
}

/// How long a keeper's name is before its number.
pub(crate) const NAME: &str = "shadowbell-keeper/";

/// The name, in the abstract namespace, of the keeper with this process number. Somebody else may
/// have taken one, so there are several.
pub(crate) fn name(pid: i32, attempt: u8) -> String {
    format!("{NAME}{pid}/{attempt}")
}

/// The two ends of a socket for packets.
///
/// There is room for what a worker says while its keeper is held up, as the changes that a client
/// brings about when it attaches; as much of it as the system lets us have.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    for end in [&pair.0, &pair.1] {
        let _ = set_socket_send_buffer_size(end, ROOM);
    }
    Ok(pair)
}

/// Says something. A sentence that is too long is cut.
pub(crate) fn send(
    socket: impl AsFd,
    letter: u8,
    body: impl AsRef<OsStr>,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let body = body.as_ref().as_bytes();
    let body = body.get(..MOST - 1).unwrap_or(body);
    send_bytes(socket, letter, body, fd.as_slice(), false)
}

/// Says something that is no text, with up to [`MOST_FDS`] descriptors. Waits unless `now`.
///
/// # Errors
/// The system's: [`io::ErrorKind::WouldBlock`] if there is no room `now`, or not in time.
pub(crate) fn send_bytes(
    socket: impl AsFd,
    letter: u8,
    body: &[u8],
    fds: &[BorrowedFd<'_>],
    now: bool,
) -> io::Result<()> {
    let letter = [letter];
    let bytes = [IoSlice::new(&letter), IoSlice::new(body)];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut flags = SendFlags::NOSIGNAL;
    flags.set(SendFlags::DONTWAIT, now);
    rustix::io::retry_on_intr(|| sendmsg(&socket, &bytes, &mut control, flags))?;
    Ok(())
}

/// What the other end has said; `None` if it is gone. Waits unless `now`.
///
/// # Errors
/// The system's: [`io::ErrorKind::WouldBlock`] if there is nothing `now`.
pub(crate) fn receive(socket: impl AsFd, now: bool) -> io::Result<Option<Packet>> {
    let mut flags = RecvFlags::empty();
    flags.set(RecvFlags::DONTWAIT, now);
    receive_with(socket, flags)
}

/// The next packet, which stays there. Does not wait.
///
/// # Errors
/// As [`receive`].
pub(crate) fn peek(socket: impl AsFd) -> io::Result<Option<Packet>> {
    receive_with(socket, RecvFlags::DONTWAIT | RecvFlags::PEEK)
}

/// Takes the next packet away, whatever it is. Does not wait, also not for what is closed with it.
pub(crate) fn drop_one(socket: impl AsFd) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC | RecvFlags::CMSG_CLOEXEC;
    let mut byte = [0];
    let received = rustix::io::retry_on_intr(|| {
        recvmsg(&socket, &mut [IoSliceMut::new(&mut byte)], &mut control, flags)
    });
    if received.is_err() {
        return;
    }
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            late_close::close(fds);
        }
    }
}

/// The number of the next packet, if it is one that has a number. That stays there.
pub(crate) fn peek_number(socket: impl AsFd) -> Option<u64> {
    let mut bytes = [0; 9];
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let (_, len) = rustix::io::retry_on_intr(|| recv(&socket, &mut bytes, flags)).ok()?;
    let number = bytes.get(1..len)?.first_chunk()?;
    Some(u64::from_le_bytes(*number))
}

fn receive_with(socket: impl AsFd, flags: RecvFlags) -> io::Result<Option<Packet>> {
    let mut bytes = vec![0; MOST + ROOM_AROUND];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let received = loop {
        match recvmsg(&socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Ok(received) => break received,
            // It has gone, and left something unread. What it has said is there still: this is
            // reported once, and before that.
            Err(Errno::INTR | Errno::CONNRESET) => {}
            Err(errno) => return Err(errno.into()),
        }
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            fds.extend(some);
        }
    }
    bytes.truncate(received.bytes);
    let Some(letter) = bytes.first().copied() else { return Ok(None) };
    Ok(Some(Packet { letter, body: bytes.split_off(1), fds }))
}

/// Whether it is our own user, or root, at the other end.
pub(crate) fn is_ours(socket: impl AsFd) -> bool {
    let peer = rustix::net::sockopt::socket_peercred(socket).map(|peer| peer.uid);
    peer.is_ok_and(|uid| uid.is_root() || uid == self_as_is::user())
}

/// The path by which a socket is known, however it was written.
pub(crate) fn known_path(path: &Path) -> PathBuf {
    let from_root = self_as_is::absolute(path);
    let path = std::fs::canonicalize(from_root).unwrap_or_else(|_| path.to_owned());
    // What a directory stands for, as SPDK has it.
    if path.is_dir() { path.join("cntrl") } else { path }
}

/// State versions, as they are said.
pub(crate) fn versions(range: &std::ops::RangeInclusive<u32>) -> String {
    format!("{} {}", range.start(), range.end())
}

/// The other way round.
pub(crate) fn parse_versions(text: &str) -> Option<std::ops::RangeInclusive<u32>> {
    let (first, last) = text.split_once(' ')?;
    Some(first.parse().ok()?..=last.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_arrive_one_by_one_with_their_descriptors() {
        let (ours, theirs) = pair().unwrap();
        assert_eq!(receive(&theirs, true).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let (read, write) = io::pipe().unwrap();
        send(&ours, to_worker::HAND_OVER, versions(&(1..=3)), Some(read.as_fd())).unwrap();
        send(&ours, to_keeper::FAILED, "x".repeat(2 * MOST), None).unwrap();
        let packet = receive(&theirs, false).unwrap().unwrap();
        assert_eq!((packet.letter, parse_versions(&packet.text())), (b'H', Some(1..=3)));
        drop((read, write));
        assert_eq!(rustix::io::read(packet.fd().unwrap(), &mut [0; 1]), Ok(0), "it is the pipe");
        let packet = receive(&theirs, false).unwrap().unwrap();
        assert_eq!((packet.letter, packet.body.len()), (b'X', MOST - 1));
        assert!(packet.fds.is_empty() && parse_versions(&packet.text()).is_none());
        // Its last words are heard, though it has not read all that was said to it.
        send(&theirs, to_worker::END, "", None).unwrap();
        send(&ours, to_keeper::FAILED, "why", None).unwrap();
        drop(ours);
        assert_eq!(receive(&theirs, false).unwrap().unwrap().text(), "why");
        assert!(receive(&theirs, false).unwrap().is_none());
    }
}
