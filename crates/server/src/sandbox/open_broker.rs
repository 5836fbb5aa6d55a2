//! Images, opened by the open broker of the supervisor.

use crate::worker_link::WorkerLink;
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use shadowbell_disk_file::{Access, NamespaceFacts, Opener, open_images_by};
use shadowbell_supervisor::protocol::{self, Packet, open_broker as requests, to_supervisor};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

/// Time limit for the supervisor's first answer. An earlier release does not answer.
const ANSWERS: Duration = Duration::from_secs(5);

/// Connection to the open broker, locked during a request and its answer.
struct Opening(Mutex<OwnedFd>);

static OPENING: OnceLock<Opening> = OnceLock::new();

/// Opener of images that uses [`OPENING`].
struct BySupervisor(&'static Opening);

/// Opens the configuration file for reading.
///
/// # Errors
/// The file cannot be opened.
pub(crate) fn open_config(path: &Path) -> io::Result<File> {
    match OPENING.get() {
        Some(opening) => opening.open(opening.name(path)?.as_fd(), Access::Read),
        None => File::open(path),
    }
}

/// Permitted paths.
#[derive(Debug, Default)]
pub(super) struct Allowed {
    /// Files and devices.
    pub(super) files: Vec<PathBuf>,
    /// Directories, with all files below.
    pub(super) directories: Vec<PathBuf>,
    /// Configuration file; the images that it names when it is reloaded are permitted too.
    pub(super) config: Option<PathBuf>,
}

/// Makes the supervisor open images from now on, and registers the permitted paths.
///
/// # Errors
/// The supervisor has no open broker or refuses.
pub(super) fn begin(link: &WorkerLink, allowed: &Allowed) -> Result<(), String> {
    let begin = || -> io::Result<bool> {
        let (ours, theirs) = protocol::pair()?;
        link.give(to_supervisor::OPEN_BROKER, theirs)?;
        let config: Vec<_> = allowed.config.iter().cloned().collect();
        for (letter, paths) in [
            (requests::FILE, &allowed.files),
            (requests::DIRECTORY, &allowed.directories),
            (requests::CONFIG, &config),
        ] {
            for path in paths.iter().filter_map(|path| path.canonicalize().ok()) {
                protocol::send(&ours, letter, path, None)?;
            }
        }
        protocol::send(&ours, requests::COMPLETE, "", None)?;
        set_socket_timeout(&ours, Timeout::Recv, Some(ANSWERS))?;
        let packet = protocol::receive(&ours, false)?;
        set_socket_timeout(&ours, Timeout::Recv, None)?;
        let answers = packet.is_some_and(|packet| packet.letter == requests::OPENED);
        if answers {
            let opening = OPENING.get_or_init(|| Opening(Mutex::new(ours)));
            open_images_by(Box::new(BySupervisor(opening)));
        }
        Ok(answers)
    };
    match begin() {
        Ok(true) => Ok(()),
        Ok(false) => {
            Err("the supervisor is of an earlier release, which opens no images".to_owned())
        }
        Err(error) => Err(format!("the supervisor cannot open images ({error})")),
    }
}

impl Opening {
    fn ask(
        &self,
        letter: u8,
        body: impl AsRef<OsStr>,
        fd: Option<BorrowedFd<'_>>,
    ) -> io::Result<OwnedFd> {
        // The kernel drops a descriptor beyond this process's limit.
        understand(self.say(letter, body, fd)?)?.fd().ok_or_else(|| Errno::MFILE.into())
    }

    fn say(
        &self,
        letter: u8,
        body: impl AsRef<OsStr>,
        fd: Option<BorrowedFd<'_>>,
    ) -> io::Result<Packet> {
        let socket = self.0.lock();
        protocol::send(&*socket, letter, body, fd)?;
        let packet = protocol::receive(&*socket, false)?;
        packet.ok_or_else(|| io::Error::other("the supervisor has ended"))
    }

    fn identify(&self, named: BorrowedFd<'_>, access: Access) -> io::Result<NamespaceFacts> {
        let answer = self.say(requests::IDENTIFY, requests::access(access), Some(named))?;
        Ok(serde_json::from_slice(&understand(answer)?.body)?)
    }

    fn name(&self, path: &Path) -> io::Result<OwnedFd> {
        if path.as_os_str().as_bytes().len() >= protocol::MOST {
            return Err(io::ErrorKind::InvalidFilename.into());
        }
        self.ask(requests::NAME, path, None)
    }

    fn open(&self, named: BorrowedFd<'_>, access: Access) -> io::Result<File> {
        self.ask(requests::OPEN, requests::access(access), Some(named.as_fd())).map(File::from)
    }
}

/// Converts a refusal to an error.
fn understand(packet: Packet) -> io::Result<Packet> {
    let nonsense = || io::Error::other("unexpected answer of the supervisor");
    match packet.letter {
        requests::OPENED => Ok(packet),
        requests::ERRNO => {
            Err(packet.text().parse().map_or_else(|_| nonsense(), io::Error::from_raw_os_error))
        }
        requests::REFUSED => Err(io::Error::new(io::ErrorKind::PermissionDenied, packet.text())),
        _ => Err(nonsense()),
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_understood() {
        let packet = |letter, body: &str| Packet { letter, body: body.into(), fds: Vec::new() };
        let error = |letter, body| understand(packet(letter, body)).unwrap_err();
        assert_eq!(error(requests::ERRNO, "30").raw_os_error(), Some(30));
        let refused = error(requests::REFUSED, "because");
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(refused.to_string(), "because");
        for (letter, body) in [(requests::ERRNO, "x"), (b'?', "")] {
            assert!(error(letter, body).to_string().contains("unexpected answer"));
        }
        for access in [Access::Read, Access::Write, Access::WriteExclusive] {
            assert_eq!(requests::parse_access(requests::access(access).as_bytes()), Some(access));
        }
        assert_eq!(requests::parse_access(b""), None);
    }
}
