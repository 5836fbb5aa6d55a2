//! Opening of images, UUIDs of disks, and connections to NBD servers, by the open broker of the
//! supervisor.

use crate::worker_link::WorkerLink;
use parking_lot::Mutex;
use rustix::io::Errno;
use shadowbell_disk_file::{Access, NamespaceFacts, Opener, open_images_by};
use shadowbell_process::process_env;
use shadowbell_storage::disk_kinds::Peer;
use shadowbell_supervisor::protocol::{self, Packet, open_broker as requests, to_supervisor};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;

/// Connections to the open broker. Each request in flight has a connection of its own, so that an
/// image on hung storage does not delay other requests.
struct Opening {
    /// Connection on which further connections are requested. It opens no image, because an open on
    /// hung storage would block all further requests.
    first: Mutex<OwnedFd>,
    /// Connection without a request, if there is one. Further idle connections are closed, because
    /// each costs descriptors of this process and of the supervisor.
    idle: Mutex<Option<OwnedFd>>,
}

static OPENING: OnceLock<Opening> = OnceLock::new();

/// Opener of images that uses the connection to the supervisor.
struct BySupervisor(&'static Opening, WorkerLink);

/// Sets the open broker, which is at the other end of `socket`. From now on the broker opens all
/// images. `link`: connection to its supervisor.
pub(super) fn begin(socket: OwnedFd, link: WorkerLink) {
    let opening = OPENING.get_or_init(|| Opening::over(socket));
    open_images_by(Box::new(BySupervisor(opening, link)));
}

/// Requests the UUID of the disk with this name.
///
/// # Errors
/// The supervisor cannot store the UUID.
pub(crate) fn uuid_of(name: &str) -> io::Result<[u8; 16]> {
    let opening = OPENING.get().ok_or(Errno::NOTCONN)?;
    let answer = parse_answer(opening.request(requests::UUID, name, None)?)?;
    answer.body.try_into().map_err(|_| unexpected_answer())
}

/// Text of an NBD server's address for the supervisor.
pub(super) fn server_text(peer: &Peer) -> OsString {
    match peer {
        Peer::Tcp(address) => address.to_string().into(),
        Peer::Unix(path) => process_env::absolute(path).into(),
    }
}

/// Requests a connection to an NBD server. `wait` waits until a descriptor is readable.
///
/// # Errors
/// The server is not permitted, cannot be reached, or `wait` fails.
pub(super) fn connect_to(
    peer: &Peer,
    wait: &dyn Fn(BorrowedFd<'_>) -> io::Result<()>,
) -> io::Result<OwnedFd> {
    let opening = OPENING.get().ok_or(Errno::NOTCONN)?;
    // Connection of its own: when it is closed, the supervisor gives up.
    let socket = opening.connect()?;
    protocol::send(&socket, requests::CONNECT_TO, server_text(peer), None)?;
    wait(socket.as_fd())?;
    parse_answer(answer_on(&socket)?)?.fd().ok_or_else(|| Errno::MFILE.into())
}

impl Opening {
    fn over(socket: OwnedFd) -> Self {
        Self { first: Mutex::new(socket), idle: Mutex::default() }
    }

    fn send_request(
        &self,
        code: u8,
        body: impl AsRef<OsStr>,
        fd: Option<BorrowedFd<'_>>,
    ) -> io::Result<OwnedFd> {
        // If this process has reached its descriptor limit, the kernel has dropped the descriptor.
        parse_answer(self.request(code, body, fd)?)?.fd().ok_or_else(|| Errno::MFILE.into())
    }

    fn request(
        &self,
        code: u8,
        body: impl AsRef<OsStr>,
        fd: Option<BorrowedFd<'_>>,
    ) -> io::Result<Packet> {
        let idle = self.idle.lock().take();
        let socket = idle.map_or_else(|| self.connect(), Ok)?;
        let answer = exchange(&socket, code, body, fd)?;
        *self.idle.lock() = Some(socket);
        Ok(answer)
    }

    /// Requests another connection.
    ///
    /// # Errors
    /// As many images as possible are being opened, because their storage hangs.
    fn connect(&self) -> io::Result<OwnedFd> {
        let packet = exchange(&self.first.lock(), requests::CONNECT, "", None)?;
        if packet.code == requests::REFUSED {
            return Err(io::Error::other(
                "the supervisor opens as many images as it can, and their storage does not answer: \
                 see `ctl disk ls`, repair that storage, and try again",
            ));
        }
        parse_answer(packet)?.fd().ok_or_else(|| Errno::MFILE.into())
    }

    fn identify(&self, named: BorrowedFd<'_>, access: Access) -> io::Result<NamespaceFacts> {
        let answer = self.request(requests::IDENTIFY, requests::access(access), Some(named))?;
        Ok(serde_json::from_slice(&parse_answer(answer)?.body)?)
    }

    fn name(&self, path: &Path) -> io::Result<OwnedFd> {
        if path.as_os_str().as_bytes().len() >= protocol::MAX_PACKET {
            return Err(io::ErrorKind::InvalidFilename.into());
        }
        self.send_request(requests::NAME, path, None)
    }

    fn open(&self, named: BorrowedFd<'_>, access: Access) -> io::Result<File> {
        self.send_request(requests::OPEN, requests::access(access), Some(named.as_fd()))
            .map(File::from)
    }
}

/// Sends a request, and returns its answer.
fn exchange(
    socket: &OwnedFd,
    code: u8,
    body: impl AsRef<OsStr>,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<Packet> {
    protocol::send(socket, code, body, fd)?;
    answer_on(socket)
}

fn answer_on(socket: &OwnedFd) -> io::Result<Packet> {
    let packet = protocol::receive(socket, false)?;
    packet.ok_or_else(|| io::Error::other("the supervisor has ended"))
}

fn unexpected_answer() -> io::Error {
    io::Error::other("unexpected answer of the supervisor")
}

/// Converts a refusal to an error.
fn parse_answer(packet: Packet) -> io::Result<Packet> {
    match packet.code {
        requests::OPENED => Ok(packet),
        requests::ERRNO => Err(packet
            .text()
            .parse()
            .map_or_else(|_| unexpected_answer(), io::Error::from_raw_os_error)),
        requests::REFUSED => Err(io::Error::new(io::ErrorKind::PermissionDenied, packet.text())),
        _ => Err(unexpected_answer()),
    }
}

impl Opener for BySupervisor {
    fn name(&self, path: &Path) -> io::Result<OwnedFd> {
        self.0.name(path)
    }

    fn open(&self, named: BorrowedFd<'_>, access: Access) -> io::Result<File> {
        self.0.open(named, access)
    }

    fn identify(&self, named: BorrowedFd<'_>, written: bool) -> io::Result<NamespaceFacts> {
        self.0.identify(named, if written { Access::Write } else { Access::Read })
    }

    fn end_use(&self, named: BorrowedFd<'_>) {
        // If the socket is full, the image stays held until the end of this process.
        let _ = protocol::send_bytes(&self.1, to_supervisor::FORGET, &[], &[named], true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_understood() {
        let packet = |code, body: &str| Packet { code, body: body.into(), fds: Vec::new() };
        let error = |code, body| parse_answer(packet(code, body)).unwrap_err();
        assert_eq!(error(requests::ERRNO, "30").raw_os_error(), Some(30));
        let refused = error(requests::REFUSED, "because");
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(refused.to_string(), "because");
        for (code, body) in [(requests::ERRNO, "x"), (b'?', "")] {
            assert!(error(code, body).to_string().contains("unexpected answer"));
        }
        for access in [Access::Read, Access::Write, Access::WriteExclusive] {
            assert_eq!(requests::parse_access(requests::access(access).as_bytes()), Some(access));
        }
        assert_eq!(requests::parse_access(b""), None);
    }

    /// An image on hung storage would block all opens if it were opened over the first connection.
    #[test]
    fn an_open_beyond_the_maximum_fails_and_is_not_sent_over_the_first_connection() {
        let (ours, theirs) = protocol::pair().unwrap();
        let opening = Opening::over(ours);
        std::thread::scope(|scope| {
            let supervisor = scope.spawn(|| {
                let request = protocol::receive(&theirs, false).unwrap().unwrap();
                assert_eq!(request.code, requests::CONNECT);
                protocol::send(&theirs, requests::REFUSED, "too many", None).unwrap();
            });
            let error = opening.name(Path::new("/image")).unwrap_err();
            assert!(error.to_string().contains("does not answer"), "{error}");
            supervisor.join().unwrap();
            let next = protocol::receive(&theirs, true);
            assert_eq!(next.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        });
    }
}
