//! What a worker asks its supervisor for that has to do with paths: sockets, the counters, a trace.
//! The supervisor does it as the worker's user, and does what was named before the worker was in
//! its sandbox.

use crate::serve::socket_access::SocketAccess;
use serde::{Deserialize, Serialize};
use shadowbell_state::Bytes;
use shadowbell_vfio_user::server::BindError;
use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// What may be asked for: [`PathPermissions`], in the memory that comes with it.
pub(crate) const PLACES: u8 = b'p';
/// A socket that listens: a [`Kind`] and a path. [`Made`] comes with it.
pub(crate) const LISTEN: u8 = b'l';
/// Remove the file of such a socket, which is not served any more: [`Made`].
pub(crate) const REMOVE: u8 = b'r';
/// The same, without an answer.
pub(crate) const REMOVE_UNANSWERED: u8 = b'q';
/// Remove the directory of a control socket, if it is empty: its path.
pub(crate) const REMOVE_DIRECTORY: u8 = b'd';
/// Write the counters, which are in the memory that comes with it.
pub(crate) const COUNTERS: u8 = b'c';
/// A new file for a trace. With [`KEEP`] the one before is kept beside it.
pub(crate) const TRACE: u8 = b't';
/// See [`TRACE`].
pub(crate) const KEEP: &str = "k";
/// The socket for metrics, by TCP. Its address comes with it.
pub(crate) const METRICS: u8 = b'm';
/// The two ends of a socket for packets.
pub(crate) const PAIR: u8 = b's';

/// It was done.
pub(crate) const DONE: u8 = b'y';
/// An error of the system's, a number.
pub(crate) const ERRNO: u8 = b'e';
/// It is not to be had: why.
pub(crate) const REFUSED: u8 = b'n';
/// There is no such socket to be had: [`NoSocket`].
pub(crate) const NO_SOCKET: u8 = b'b';

/// The most bytes of memory that are read.
pub(crate) const MOST: u64 = 256 << 20;

/// What a worker may ask for.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct PathPermissions {
    /// As whom the supervisor does it: user, group, and further groups.
    pub(crate) user: Option<(u32, u32, Vec<u32>)>,
    /// Sockets come and go in these, and below them. Without symbolic links.
    pub(crate) directories: Vec<Bytes>,
    /// In this one each server has a directory for its control socket. Without symbolic links.
    pub(crate) control: Option<Bytes>,
    /// The sockets of controllers are for these.
    pub(crate) mode: Option<u32>,
    /// See `mode`.
    pub(crate) group: Option<String>,
    pub(crate) counters: Option<Bytes>,
    pub(crate) trace: Option<Bytes>,
    pub(crate) metrics: Option<SocketAddr>,
}

impl PathPermissions {
    pub(crate) fn access(&self) -> SocketAccess {
        SocketAccess { mode: self.mode, group: self.group.clone() }
    }
}

/// For whom a socket is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// For those who may reach a controller, as that was asked for.
    Controller,
    /// As the system makes it.
    Plain,
    /// For its user.
    Private,
}

impl Kind {
    const ALL: [(Self, u8); 3] =
        [(Self::Controller, b'c'), (Self::Plain, b'p'), (Self::Private, b'u')];

    /// A question for a socket.
    pub(crate) fn question(self, path: &Path) -> OsString {
        let letter = Self::ALL.iter().find(|(kind, _)| *kind == self).map(|(_, letter)| *letter);
        let path = path.as_os_str().as_bytes().iter().copied();
        OsString::from_vec(letter.into_iter().chain(path).collect())
    }

    /// The other way round.
    pub(crate) fn parse(question: &[u8]) -> Option<(Self, PathBuf)> {
        let (letter, path) = question.split_first()?;
        let (kind, _) = Self::ALL.iter().find(|(_, other)| other == letter)?;
        Some((*kind, path_of(path)))
    }
}

/// A socket that was made, or is to go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Made {
    /// From the root.
    pub(crate) path: Bytes,
    /// Device and inode number.
    pub(crate) file: Option<(u64, u64)>,
}

/// Why there is no socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum NoSocket {
    TooLong(usize),
    NoDirectory(Bytes),
    InUse,
    NotASocket,
    /// What could not be done with it, and an error of the system's.
    System(String, i32),
}

/// What can not be done with a socket, as [`BindError`] says it.
const STEPS: [&str; 8] = [
    "used",
    "listened on",
    "created",
    "probed",
    "replaced",
    "probed for a server",
    "made private",
    "given its mode or its group",
];

impl NoSocket {
    pub(crate) fn of(error: &BindError) -> Self {
        match error {
            BindError::TooLong { len, .. } => Self::TooLong(*len),
            BindError::NoDirectory { directory, .. } => Self::NoDirectory(bytes_of(directory)),
            BindError::InUse { .. } => Self::InUse,
            BindError::NotASocket { .. } => Self::NotASocket,
            BindError::System { what, source, .. } => {
                Self::System((*what).to_owned(), source.raw_os_error().unwrap_or_default())
            }
            _ => Self::System(String::new(), 0),
        }
    }

    /// The other way round.
    pub(crate) fn into_error(self, path: &Path) -> BindError {
        let path = path.to_owned();
        match self {
            Self::TooLong(len) => BindError::TooLong { path, len },
            Self::NoDirectory(directory) => {
                BindError::NoDirectory { path, directory: path_of(&directory.0) }
            }
            Self::InUse => BindError::InUse { path },
            Self::NotASocket => BindError::NotASocket { path },
            Self::System(what, errno) => BindError::System {
                path,
                what: STEPS.into_iter().find(|step| *step == what).unwrap_or("made"),
                source: io::Error::from_raw_os_error(errno),
            },
        }
    }
}

pub(crate) fn bytes_of(path: &Path) -> Bytes {
    Bytes(path.as_os_str().as_bytes().to_vec())
}

pub(crate) fn path_of(bytes: &[u8]) -> PathBuf {
    OsString::from_vec(bytes.to_vec()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_and_answers_are_understood() {
        for (kind, _) in Kind::ALL {
            let question = kind.question(Path::new("/run/x.sock"));
            assert_eq!(Kind::parse(question.as_bytes()), Some((kind, "/run/x.sock".into())));
        }
        assert_eq!((Kind::parse(b""), Kind::parse(b"?/x")), (None, None));
        let path = Path::new("/x");
        let system = |what| BindError::System {
            path: path.to_owned(),
            what,
            source: io::Error::from_raw_os_error(13),
        };
        for error in [
            BindError::TooLong { path: path.into(), len: 200 },
            BindError::NoDirectory { path: path.into(), directory: "/no".into() },
            BindError::InUse { path: path.into() },
            BindError::NotASocket { path: path.into() },
        ]
        .into_iter()
        .chain(STEPS.map(system))
        {
            let said = serde_json::to_string(&NoSocket::of(&error)).unwrap();
            let heard: NoSocket = serde_json::from_str(&said).unwrap();
            assert_eq!(heard.into_error(path).to_string(), error.to_string());
        }
    }
}
