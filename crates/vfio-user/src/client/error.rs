//! Errors of a client's requests.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::Errno;
use crate::wire::command;

/// Error of a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No server listens at the path.
    #[error("cannot connect to {}: {source}", path.display())]
    Connect {
        /// The path of the socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The server has refused the request. The connection remains usable.
    #[error("the server refused {}: {errno}", command::name(*.command))]
    Refused {
        /// Number of the command.
        command: u16,
        /// Error number of the reply.
        errno: Errno,
    },
    /// The request exceeds a negotiated limit, or is invalid. Nothing was sent.
    #[error("{} cannot be sent: {why}", command::name(*.command))]
    Unsendable {
        /// Number of the command.
        command: u16,
        /// Cause of the error.
        why: &'static str,
    },
    /// The server's limit of mapped memory ranges is reached. Nothing was sent.
    #[error("the server allows {max} ranges of mapped memory, and all are in use")]
    TooManyMaps {
        /// Limit of the server.
        max: u32,
    },
    /// No reply was received in time. The connection has ended.
    #[error("no reply to {} within {limit:?}", command::name(*.command))]
    Timeout {
        /// Number of the command.
        command: u16,
        /// Timeout of the client.
        limit: Duration,
    },
    /// The server's reply is invalid. The connection has ended.
    #[error("the server's reply to {} is invalid: {why}", command::name(*.command))]
    BadReply {
        /// Number of the command.
        command: u16,
        /// Cause of the error.
        why: String,
    },
    /// The server has disconnected, or the socket has failed. The connection has ended.
    #[error("the connection failed: {0}")]
    Socket(#[from] io::Error),
    /// An earlier error has ended the connection.
    #[error("the connection has ended after an earlier failure")]
    Broken,
}
