//! Protocol of the path broker: a sandboxed server process asks its supervisor to create sockets
//! and files.
//!
//! The supervisor acts with the credentials of the server process, and only within the
//! [permissions](crate::permissions).

use serde::{Deserialize, Serialize};
use shadowbell_state::Bytes;

/// Request: create a listening socket ([`Kind`] and [`Bytes`] of the path). The answer has
/// [`Made`].
pub const LISTEN: u8 = b'l';
/// Request: remove the file of a socket that is not served any more ([`Made`]).
pub const REMOVE: u8 = b'r';
/// Request: remove the file of a socket as [`REMOVE`] does, without an answer.
pub const REMOVE_UNANSWERED: u8 = b'q';
/// Request: remove the directory of a control socket (path), if it is empty.
pub const REMOVE_DIRECTORY: u8 = b'd';
/// Request: create a trace file. With [`KEEP`], the previous file is renamed and kept.
pub const TRACE: u8 = b't';
/// Body of a [`TRACE`] request that keeps the previous trace file.
pub const KEEP: &str = "k";
/// Request: create a TCP socket at a permitted address. The answer has the address of the socket.
pub const TCP: u8 = b'm';
/// Request: create a connected pair of packet sockets.
pub const PAIR: u8 = b's';

/// Answer: done.
pub const DONE: u8 = b'y';
/// Answer: error number of the system.
pub const ERRNO: u8 = b'e';
/// Answer: not permitted, with the reason.
pub const REFUSED: u8 = b'n';
/// Answer: the socket cannot be created
/// ([`BindError`](shadowbell_vfio_user::server::BindError)).
pub const NO_SOCKET: u8 = b'b';

/// Access rights of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Controller socket: the configured mode and group.
    Controller,
    /// Other socket, whose mode is the default of the system (umask).
    Plain,
    /// Control socket, which only its user can access.
    Private,
}

/// Socket that was created, or is to be removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
    /// Absolute path of the socket file.
    pub path: Bytes,
    /// Device and inode number of the socket file, if they are known.
    pub file: Option<(u64, u64)>,
}
