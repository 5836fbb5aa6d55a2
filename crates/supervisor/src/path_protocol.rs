//! Protocol of the path broker: a sandboxed server process asks its supervisor to create sockets
//! and files.
//!
//! The supervisor acts with the credentials of the server process, and only within the
//! [permissions](crate::permissions).

use crate::permissions::{bytes_of, path_of};
use serde::{Deserialize, Serialize};
use shadowbell_state::Bytes;
use shadowbell_vfio_user::server::BindError;
use std::io;
use std::path::Path;

/// Request: create a listening socket ([`Kind`] and [`Bytes`] of the path). The answer has
/// [`Made`].
pub const LISTEN: u8 = b'l';
/// Request: remove the file of a socket that is no longer served ([`Made`]).
pub const REMOVE: u8 = b'r';
/// Request: as [`REMOVE`], without an answer.
pub const REMOVE_UNANSWERED: u8 = b'q';
/// Request: remove the directory of a control socket (path), if it is empty.
pub const REMOVE_DIRECTORY: u8 = b'd';
/// Request: create a trace file. With [`KEEP`], the previous file is renamed and kept.
pub const TRACE: u8 = b't';
/// Argument of [`TRACE`].
pub const KEEP: &str = "k";
/// Request: create a TCP socket at a registered address. The answer has its address.
pub const TCP: u8 = b'm';
/// Request: create a connected pair of packet sockets.
pub const PAIR: u8 = b's';

/// Answer: done.
pub const DONE: u8 = b'y';
/// Answer: error number of the system.
pub const ERRNO: u8 = b'e';
/// Answer: not permitted, with the reason.
pub const REFUSED: u8 = b'n';
/// Answer: the socket cannot be created ([`NoSocket`]).
pub const NO_SOCKET: u8 = b'b';

/// Access rights of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Controller socket: the configured mode and group.
    Controller,
    /// Default mode of the system (umask).
    Plain,
    /// Private to the user.
    Private,
}

/// Socket that was created, or is to be removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
    /// Absolute path.
    pub path: Bytes,
    /// Device and inode number.
    pub file: Option<(u64, u64)>,
}

/// Reason why a socket cannot be created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NoSocket {
    /// The path is longer than a socket address permits: its length.
    TooLong(usize),
    /// The directory does not exist.
    NoDirectory(Bytes),
    /// A server listens on the socket.
    InUse,
    /// The path exists and is no socket.
    NotASocket,
    /// The path has a socket of another program.
    Foreign,
    /// Operation that failed, and its error number.
    System(String, i32),
}

/// Operations of [`BindError::System`], as static strings for the conversion back.
const STEPS: [&str; 7] = [
    "used",
    "listened on",
    "created",
    "probed",
    "replaced",
    "probed for a server",
    "given its mode or its group",
];

impl NoSocket {
    /// Reason for an error of the listener.
    pub fn of(error: &BindError) -> Self {
        match error {
            BindError::TooLong { len, .. } => Self::TooLong(*len),
            BindError::NoDirectory { directory, .. } => Self::NoDirectory(bytes_of(directory)),
            BindError::InUse { .. } => Self::InUse,
            BindError::NotASocket { .. } => Self::NotASocket,
            BindError::Foreign { .. } => Self::Foreign,
            BindError::System { what, source, .. } => {
                Self::System((*what).to_owned(), source.raw_os_error().unwrap_or_default())
            }
            _ => Self::System(String::new(), 0),
        }
    }

    /// Converts back to a [`BindError`] for `path`.
    pub fn into_error(self, path: &Path) -> BindError {
        let path = path.to_owned();
        match self {
            Self::TooLong(len) => BindError::TooLong { path, len },
            Self::NoDirectory(directory) => {
                BindError::NoDirectory { path, directory: path_of(&directory.0) }
            }
            Self::InUse => BindError::InUse { path },
            Self::NotASocket => BindError::NotASocket { path },
            Self::Foreign => BindError::Foreign { path },
            Self::System(what, errno) => BindError::System {
                path,
                what: STEPS.into_iter().find(|step| *step == what).unwrap_or("made"),
                source: io::Error::from_raw_os_error(errno),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_understood() {
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
            BindError::Foreign { path: path.into() },
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
