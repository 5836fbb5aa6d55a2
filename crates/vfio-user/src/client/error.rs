//! Why a request fails.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::Errno;
use crate::wire::command;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// Nobody serves at that path.
    #[error("cannot connect to {}: {source}", path.display())]
    Connect {
        /// The path of the socket.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The server said no. The connection goes on.
    #[error("the server refused {}: {errno}", command::name(*.command))]
    Refused {
        /// The command.
        command: u16,
        /// The server's reason.
        errno: Errno,
    },
    /// The request exceeds what was agreed, or makes no sense. Nothing was sent.
    #[error("{} cannot be sent: {why}", command::name(*.command))]
    Unsendable {
        /// The command.
        command: u16,
        /// What is wrong with it.
        why: &'static str,
    },
    /// So many ranges of memory are shared already, and more the server does not take. Nothing was
    /// sent.
    #[error("the server takes {max} ranges of memory at once, and so many are shared already")]
    TooManyMaps {
        /// How many it takes.
        max: u32,
    },
    /// No reply came in time. The connection has ended.
    #[error("no reply to {} within {limit:?}", command::name(*.command))]
    Timeout {
        /// The command.
        command: u16,
        /// How long was waited.
        limit: Duration,
    },
    /// The server's answer makes no sense. The connection has ended.
    #[error("the server's reply to {} makes no sense: {why}", command::name(*.command))]
    BadReply {
        /// The command.
        command: u16,
        /// What is wrong with it.
        why: String,
    },
    /// The server is gone, or the socket failed. The connection has ended.
    #[error("the connection failed: {0}")]
    Socket(#[from] io::Error),
    /// The connection had ended before.
    #[error("the connection has ended after an earlier failure")]
    Broken,
}
