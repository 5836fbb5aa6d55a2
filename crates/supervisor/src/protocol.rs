//! Protocol between supervisor, server processes and clients of the supervisor: packets over Unix
//! sockets, each with a type code (a letter), a body, and for some types descriptors.

use rustix::io::Errno;
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recv, recvmsg, sendmsg, socketpair,
};
use shadowbell_process::deferred_close;
use shadowbell_process::process_env;
use std::ffi::OsStr;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Size of the sockets' send buffers, in bytes. Messages that the receiver has not read yet must
/// fit.
const ROOM: usize = 1 << 20;
/// Option that marks a server process, whose standard input is the socket to its supervisor.
pub const AS_WORKER: &str = "--as-worker";
/// Value of [`AS_WORKER`] for a process that serves at once.
pub const START: &str = "start";
/// Value of [`AS_WORKER`] for a process that recovers after a crash or an upgrade.
pub const RECOVER: &str = "recover";

/// Maximum packet size in bytes: a code and a path, a sentence, or checkpoint data.
pub const MAX_PACKET: usize = 16384;
/// Bytes that the fd store adds in front of a forwarded packet's body.
const ROOM_AROUND: usize = 64;
/// Maximum number of descriptors in a packet on Linux (`SCM_MAX_FD`).
pub const MAX_FDS: usize = 253;

/// A received packet.
#[derive(Debug)]
pub struct Packet {
    /// Type of the message.
    pub code: u8,
    /// Content of the message.
    pub body: Vec<u8>,
    /// Descriptors of the message.
    pub fds: Vec<OwnedFd>,
}

impl Packet {
    /// The body as text, with replacement characters for invalid UTF-8.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as a path.
    pub fn path(self) -> PathBuf {
        std::ffi::OsString::from_vec(self.body).into()
    }

    /// The descriptor of a packet that has one.
    pub fn fd(mut self) -> Option<OwnedFd> {
        self.fds.pop()
    }
}

/// Messages from the supervisor to a server process.
pub mod to_worker {
    /// End the service.
    pub const END: u8 = b'E';
    /// Report the statistics (SIGUSR1).
    pub const REPORT: u8 = b'R';
    /// First message: descriptors of the sockets to the open broker and to the path broker, and of
    /// the text of the configuration file, if there is one and it is readable.
    pub const BEGIN: u8 = b'B';
    /// Apply the configuration of the text in the descriptor, and answer
    /// [`READ`](super::to_supervisor::READ). Without a descriptor: the file cannot be read, and the
    /// body is the reason.
    pub const READ: u8 = b'L';
    /// Answer [`ALIVE`](super::to_supervisor::ALIVE) once all I/O threads have passed a liveness
    /// check.
    pub const LIVENESS_CHECK: u8 = b'V';
    /// Quiesce until the end of the process and answer
    /// [`QUIESCED`](super::to_supervisor::QUIESCED), or resume and answer
    /// [`RESUMES`](super::to_supervisor::RESUMES).
    pub const QUIESCE: u8 = b'Q';
    /// Check the checkpoint that follows, of a process that still serves, and answer
    /// [`CHECKED`](super::to_supervisor::CHECKED).
    pub const CHECK: u8 = b'C';
    /// The previous server process had quiesced and released its locks, so none of its I/O is in
    /// flight. Sent before its checkpoint.
    pub const QUIESCED: u8 = b'Z';
    /// The previous server process ended by a fault of its own, such as a panic, and not by
    /// SIGKILL. Sent before its checkpoint.
    pub const FAULT: u8 = b'F';
    /// The last process that wrote the checkpoint, or was started to recover from it, ended by a
    /// fault of its own, and not by SIGKILL. Sent before the checkpoint.
    pub const LAST_BY_FAULT: u8 = b'D';
    /// Number of consecutive deaths of server processes, in decimal. Above a limit, the supervisor
    /// discards the checkpoint. Sent before the checkpoint.
    pub const DEATHS: u8 = b'N';
    /// Checkpoint of the previous server process (see [`checkpoint`](crate::checkpoint)), in one
    /// transaction.
    pub const CHECKPOINT: u8 = b'I';
}

/// Messages from a server process to the supervisor.
pub mod to_supervisor {
    /// Path of a socket at which the process serves.
    pub const SOCKET: u8 = b'S';
    /// The process serves. Body: a short status.
    pub const SERVING: u8 = b'R';
    /// Result of a configuration reload. Body: a sentence.
    pub const READ: u8 = b'L';
    /// All I/O threads have passed the liveness check. Body: a short status.
    pub const ALIVE: u8 = b'V';
    /// The process has started its threads and waits for a checkpoint.
    pub const PREPARED: u8 = b'P';
    /// The process has checked the checkpoint, as requested, and can recover from it. Body: the
    /// clients that cannot be recovered, a sentence each, one per line.
    pub const CHECKED: u8 = b'K';
    /// The process resumes instead of quiescing for an upgrade, because its checkpoint is
    /// incomplete. Body: the reason.
    pub const RESUMES: u8 = b'G';
    /// A client was not recovered, or waits for its disks. Body: a sentence.
    pub const WARNING: u8 = b'W';
    /// The process has quiesced and does not resume, so it can be killed. Body: empty if it has
    /// released its locks, otherwise the clients that did not quiesce, a sentence each, one per
    /// line.
    pub const QUIESCED: u8 = b'Z';
    /// The process cannot serve. Body: the reason.
    pub const FAILED: u8 = b'X';
    /// Checkpoint change, for recovery after the process's death: see
    /// [`checkpoint`](crate::checkpoint).
    pub const CHECKPOINT: u8 = b'I';
    /// The process has recovered the clients of the previous process. From this message on, only
    /// the checkpoint that this process sends is valid, and the previous process's is obsolete.
    pub const RECOVERED: u8 = b'A';
    /// Upgrade to a new process of the same program. Descriptor: socket that receives the result.
    pub const UPGRADE: u8 = b'U';
    /// The process does not use the image of the descriptor any more, for which it has sent one
    /// [`NAME`](super::open_broker::NAME) request: the disk was refused or removed. The supervisor
    /// releases an image without further uses once no checkpoint contains it.
    pub const FORGET: u8 = b'F';
    /// The process is to end, and waits until programs no longer use its mounted files and block
    /// devices. The stop limit does not count this wait.
    pub const USED: u8 = b'M';
    /// The wait of [`USED`] is over, and the stop limit begins anew.
    pub const UNUSED: u8 = b'N';
}

/// Requests of a sandboxed server process to the open broker, and the answers.
pub mod open_broker {
    use shadowbell_disk_file::Access;

    /// Requests an `O_PATH` descriptor of the path in the body.
    pub const NAME: u8 = b'n';
    /// Requests that the image of an `O_PATH` descriptor is opened. Body: the access ([`access`]).
    pub const OPEN: u8 = b'o';
    /// Requests Identify data of the namespace whose character device the descriptor names.
    /// Answer: [`OPENED`] with JSON. Refused for the access `w` if the system uses the block
    /// device.
    pub const IDENTIFY: u8 = b'i';
    /// Requests the UUID of the disk with the name in the body, which is generated if there is
    /// none. Answer: [`OPENED`] with 16 bytes.
    pub const UUID: u8 = b'u';
    /// Requests another connection to the open broker, so that an image on hung storage delays only
    /// its own requests.
    pub const CONNECT: u8 = b'c';
    /// Requests a connected socket to the NBD server in the body: a TCP address, or the absolute
    /// path of a UNIX socket.
    pub const CONNECT_TO: u8 = b's';
    /// Answer: success, with the descriptor.
    pub const OPENED: u8 = b'y';
    /// Answer: a system error. Body: the errno in decimal.
    pub const ERRNO: u8 = b'e';
    /// Answer: refused. Body: the reason.
    pub const REFUSED: u8 = b'r';

    const ACCESS: [(Access, &str); 3] =
        [(Access::Read, "r"), (Access::Write, "w"), (Access::WriteExclusive, "x")];

    /// Encodes an access.
    pub fn access(access: Access) -> &'static str {
        ACCESS.iter().find(|(other, _)| *other == access).map_or("", |(_, code)| code)
    }

    /// Decodes an access.
    pub fn parse_access(body: &[u8]) -> Option<Access> {
        let known = ACCESS.iter().find(|(_, code)| code.as_bytes() == body);
        known.map(|(access, _)| *access)
    }
}

/// Requests of a supervisor's client.
pub mod question {
    /// Tests if the process id in the body is that of the supervisor or of its server process.
    pub const IS_YOURS: u8 = b'p';
    /// Tests if the server process serves at the socket path in the body.
    pub const SERVES: u8 = b's';
    /// Upgrades to the program at this path; an empty body stands for the current program.
    pub const UPGRADE: u8 = b'u';
    /// Checks an upgrade to the program at this path, as [`UPGRADE`], without carrying it out.
    pub const CHECK: u8 = b'c';
    /// Permits the server process to open the file of the descriptor, with the access of the
    /// descriptor, as the image at this absolute path.
    pub const GRANT: u8 = b'g';
    /// Permits the server process to create a socket at this absolute path.
    pub const GRANT_SOCKET: u8 = b'l';
    /// Permits the server process to have connections to the NBD server at the TCP address, or the
    /// absolute path of a UNIX socket, in the body.
    pub const GRANT_SERVER: u8 = b'n';
}

/// Answers of the supervisor.
pub mod answer {
    /// The request is granted or has succeeded.
    pub const YES: u8 = b'y';
    /// The request is refused or has failed.
    pub const NO: u8 = b'n';
}

/// Prefix of a supervisor's socket name, before the process id.
pub const NAME: &str = "shadowbell-supervisor/";

/// Socket name, in the abstract namespace, of the supervisor with this process id. The name
/// contains the number of the attempt to bind it, because other processes may already have bound
/// the names of earlier attempts.
pub fn name(pid: i32, attempt: u8) -> String {
    format!("{NAME}{pid}/{attempt}")
}

/// Creates a pair of packet sockets.
///
/// The send buffers have to hold the messages that a server process sends while its supervisor is
/// blocked. An example are the checkpoint changes when a client attaches. The kernel may limit
/// their size to less than `ROOM`.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    for end in [&pair.0, &pair.1] {
        let _ = set_socket_send_buffer_size(end, ROOM);
    }
    Ok(pair)
}

/// Longest time for which [`while_in_flight`] waits until other processes have received the
/// descriptors that are in flight, and the pause between its attempts.
const IN_FLIGHT: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_millis(1);

/// Sends a packet with text. Text beyond [`MAX_PACKET`] is cut.
pub fn send(
    socket: impl AsFd,
    code: u8,
    body: impl AsRef<OsStr>,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let body = body.as_ref().as_bytes();
    let body = body.get(..MAX_PACKET - 1).unwrap_or(body);
    send_bytes(socket, code, body, fd.as_slice(), false)
}

/// Sends a packet with bytes and up to [`MAX_FDS`] descriptors. Blocks unless `now`.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] if the socket buffer is full; or another error of `sendmsg`.
pub fn send_bytes(
    socket: impl AsFd,
    code: u8,
    body: &[u8],
    fds: &[BorrowedFd<'_>],
    now: bool,
) -> io::Result<()> {
    let code = [code];
    let bytes = [IoSlice::new(&code), IoSlice::new(body)];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut flags = SendFlags::NOSIGNAL;
    flags.set(SendFlags::DONTWAIT, now);
    let mut send = || {
        let sent = rustix::io::retry_on_intr(|| sendmsg(&socket, &bytes, &mut control, flags));
        sent.map(drop).map_err(io::Error::from)
    };
    if now { send() } else { while_in_flight(send) }
}

/// Repeats a send, for a limited time, while other processes of this user have sent as many
/// descriptors as the process's limit of open files, and their receivers have not received them.
///
/// # Errors
/// The send fails for another reason, or after the time limit.
pub(super) fn while_in_flight(mut send: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    let until = Instant::now() + IN_FLIGHT;
    let is_full = |error: &io::Error| error.raw_os_error() == Some(libc::ETOOMANYREFS);
    loop {
        match send() {
            Err(error) if is_full(&error) && Instant::now() < until => sleep(RETRY),
            outcome => return outcome,
        }
    }
}

/// Answer to a request that has failed: type `system` with the error number, or `refused` with the
/// reason.
pub(super) fn failure(error: &io::Error, system: u8, refused: u8) -> (u8, Vec<u8>, Vec<OwnedFd>) {
    match error.raw_os_error() {
        Some(errno) => (system, errno.to_string().into(), Vec::new()),
        None => (refused, error.to_string().into(), Vec::new()),
    }
}

/// Receives a packet; `None` after the end of the connection. Blocks unless `now`.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] if no packet is queued; or another error of `recvmsg`.
pub fn receive(socket: impl AsFd, now: bool) -> io::Result<Option<Packet>> {
    let mut flags = RecvFlags::empty();
    flags.set(RecvFlags::DONTWAIT, now);
    receive_with(socket, flags)
}

/// Returns the next packet without removing it. Does not block.
///
/// # Errors
/// See [`receive`].
pub fn peek(socket: impl AsFd) -> io::Result<Option<Packet>> {
    receive_with(socket, RecvFlags::DONTWAIT | RecvFlags::PEEK)
}

/// Removes the next packet. Does not block, not even to close the packet's descriptors.
pub fn drop_one(socket: impl AsFd) {
    if let Ok(Some(packet)) = receive(socket, true) {
        deferred_close::close(packet.fds);
    }
}

/// Returns the sequence number of the next packet without removing it, if it has one.
pub fn peek_number(socket: impl AsFd) -> Option<u64> {
    let mut bytes = [0; 9];
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let (_, len) = rustix::io::retry_on_intr(|| recv(&socket, &mut bytes, flags)).ok()?;
    let number = bytes.get(1..len)?.first_chunk()?;
    Some(u64::from_le_bytes(*number))
}

fn receive_with(socket: impl AsFd, flags: RecvFlags) -> io::Result<Option<Packet>> {
    let mut bytes = vec![0; MAX_PACKET + ROOM_AROUND];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let received = loop {
        match recvmsg(&socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Ok(received) => break received,
            // CONNRESET: the peer closed its socket before it had read all packets. The kernel
            // returns this error once. Afterwards the packets that the peer has sent can be
            // received.
            Err(Errno::INTR | Errno::CONNRESET) => {}
            Err(errno) => return Err(errno.into()),
        }
    };
    let fds = rights(&mut control);
    bytes.truncate(received.bytes);
    let Some(code) = bytes.first().copied() else {
        deferred_close::close(fds);
        return Ok(None);
    };
    Ok(Some(Packet { code, body: bytes.split_off(1), fds }))
}

/// Takes the descriptors of a received packet.
fn rights(control: &mut RecvAncillaryBuffer<'_>) -> Vec<OwnedFd> {
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    rights.flatten().collect()
}

/// Returns true if the peer runs as this process's user or as root.
pub fn is_ours(socket: impl AsFd) -> bool {
    let peer = rustix::net::sockopt::socket_peercred(socket).map(|peer| peer.uid);
    peer.is_ok_and(|uid| uid.is_root() || uid == process_env::user())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::process::Uid;
    use rustix::thread::set_thread_uid;

    use super::*;
    use crate::broker;

    #[test]
    fn packets_arrive_one_by_one_with_their_descriptors() {
        let (ours, theirs) = pair().unwrap();
        assert_eq!(receive(&theirs, true).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let (read, write) = io::pipe().unwrap();
        send(&ours, to_supervisor::UPGRADE, "now", Some(read.as_fd())).unwrap();
        send(&ours, to_supervisor::FAILED, "x".repeat(2 * MAX_PACKET), None).unwrap();
        let packet = receive(&theirs, false).unwrap().unwrap();
        assert_eq!((packet.code, &packet.text()[..]), (b'U', "now"));
        drop((read, write));
        assert_eq!(rustix::io::read(packet.fd().unwrap(), &mut [0; 1]), Ok(0), "it is the pipe");
        let packet = receive(&theirs, false).unwrap().unwrap();
        assert_eq!((packet.code, packet.body.len()), (b'X', MAX_PACKET - 1));
        assert!(packet.fds.is_empty());
        // The peer closes its socket without reading `END`. Its own packet is still received.
        send(&theirs, to_worker::END, "", None).unwrap();
        send(&ours, to_supervisor::FAILED, "why", None).unwrap();
        drop(ours);
        assert_eq!(receive(&theirs, false).unwrap().unwrap().text(), "why");
        assert!(receive(&theirs, false).unwrap().is_none());
    }

    /// A process without CAP_SYS_RESOURCE cannot send descriptors while its user has more of them
    /// in flight than its limit of open files. The send waits until they are received.
    #[test]
    fn a_blocking_send_waits_for_descriptors_in_flight() {
        // The thread changes its user.
        std::thread::spawn(send_during_flood).join().unwrap();
    }

    /// An answer of a broker is sent once the kernel accepts descriptors again.
    #[test]
    fn a_broker_answers_during_a_flood_of_descriptors() {
        std::thread::spawn(ask_during_flood).join().unwrap();
    }

    fn ask_during_flood() {
        let Some((flood, ends)) = flood() else {
            eprintln!("skipped: descriptors in flight are not limited here");
            return;
        };
        let broker = broker::start(broker::Kind::Images, broker::Owner::new()).unwrap();
        send(&broker, open_broker::CONNECT, "", None).unwrap();
        // A broker that gives up closes its socket at once.
        let limit = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        let answered = poll(&mut [PollFd::new(&broker, PollFlags::IN)], Some(&limit)).unwrap();
        assert_eq!(answered, 0);
        drop((flood, ends));
        let answer = receive(&broker, false).unwrap().unwrap();
        assert_eq!((answer.code, answer.fds.len()), (open_broker::OPENED, 1));
    }

    fn send_during_flood() {
        let Some((flood, ends)) = flood() else {
            eprintln!("skipped: descriptors in flight are not limited here");
            return;
        };
        let (ours, theirs) = pair().unwrap();
        let late = send_bytes(&ours, 0, b"", &[ours.as_fd()], true).unwrap_err();
        assert_eq!(Errno::from_io_error(&late), Some(Errno::TOOMANYREFS));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // The send below has begun, most likely.
                std::thread::sleep(Duration::from_millis(50));
                drop((flood, ends));
            });
            send_bytes(&ours, 0, b"", &[ours.as_fd()], false).unwrap();
        });
        assert_eq!(receive(&theirs, false).unwrap().unwrap().fds.len(), 1);
    }

    /// Makes the calling thread one of a user without capabilities, and sends descriptors until the
    /// kernel refuses further ones. Returns the sockets that hold them. They count for that user
    /// only, so other tests are not affected.
    fn flood() -> Option<(Vec<UnixStream>, Vec<UnixStream>)> {
        set_thread_uid(Uid::from_raw(54_321)).ok()?;
        let (mut all, mut ends) = (Vec::new(), Vec::new());
        for _ in 0..64 {
            let (from, to) = UnixStream::pair().ok()?;
            from.set_nonblocking(true).ok()?;
            let fds = [from.as_fd(); 128];
            loop {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(128))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
                match sendmsg(&from, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()) {
                    Ok(_) => {}
                    Err(Errno::TOOMANYREFS) => {
                        all.push(from);
                        ends.push(to);
                        return Some((all, ends));
                    }
                    Err(_) => break,
                }
            }
            all.push(from);
            ends.push(to);
        }
        None
    }
}
