//! Errors of opening an NBD export.

use crate::negotiate::NegotiationError;
use std::io;

/// Error of opening an NBD export. Each message says what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The specification cannot be parsed.
    #[error("`{spec}` names no disk: {why}")]
    Spec {
        /// The specification as given.
        spec: String,
        /// Cause of the error.
        why: String,
    },
    /// The server is unreachable.
    #[error("{disk}: the server is unreachable: {source}; start it, or correct the address")]
    Connect {
        /// Specification of the export.
        disk: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The peer is not an NBD server, or refuses the export.
    #[error("{disk}: {why}")]
    Negotiation {
        /// Specification of the export.
        disk: String,
        /// The error of the handshake.
        why: NegotiationError,
    },
    /// The certificates are missing or invalid.
    #[error("{disk}: {why}")]
    Certificates {
        /// Specification of the export.
        disk: String,
        /// The error of the certificates.
        why: shadowbell_tls::CertificateError,
    },
    /// The size of the export is not valid for a disk.
    #[error(
        "{disk}: the size of the export, {size} bytes, is not valid with blocks of {block_size} \
         bytes: it must be a multiple of that, and at least one block; resize it at the server"
    )]
    Size {
        /// Specification of the export.
        disk: String,
        /// Size of the export in bytes.
        size: u64,
        /// Block size in bytes.
        block_size: u32,
    },
    /// The server's minimum request is larger than a block.
    #[error(
        "{disk}: the minimum request of the server is {min_block} bytes, and the block size is \
         {block_size}; {}",
        if *.min_block <= 4096 { "use `block-size=4096`" } else { "a disk supports at most 4096" }
    )]
    BlockSize {
        /// Specification of the export.
        disk: String,
        /// Minimum request size of the server in bytes.
        min_block: u32,
        /// Block size in bytes.
        block_size: u32,
    },
    /// The disk of a dead process cannot be recovered.
    #[error("{disk} cannot be recovered: {why}")]
    NotThatDisk {
        /// Specification of the export.
        disk: String,
        /// Cause of the failure.
        why: String,
    },
    /// No thread or file descriptor is available.
    #[error("{disk}: no thread or file descriptor is available for the connection: {source}")]
    System {
        /// Specification of the export.
        disk: String,
        /// The system's error.
        source: io::Error,
    },
}

impl OpenError {
    /// True if the error is typical for a server that is shutting down: no server accepts
    /// connections at the address, or it closes a new connection at once. False for errors with
    /// other causes, such as a full table of open files in this process.
    pub(crate) fn is_absence(&self) -> bool {
        use io::ErrorKind::{ConnectionRefused, ConnectionReset, NotFound, UnexpectedEof};
        match self {
            Self::Connect { source, .. } => {
                matches!(source.kind(), ConnectionRefused | NotFound)
            }
            Self::Negotiation { why: NegotiationError::Io(error), .. } => {
                matches!(error.kind(), UnexpectedEof | ConnectionReset)
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_connection_is_an_absent_server_and_other_errors_are_not() {
        let connect = |error: i32| OpenError::Connect {
            disk: String::new(),
            source: io::Error::from_raw_os_error(error),
        };
        assert!(
            [libc::ECONNREFUSED, libc::ENOENT].iter().all(|error| connect(*error).is_absence())
        );
        let others = [libc::EMFILE, libc::EAGAIN, libc::ETIMEDOUT, libc::EHOSTUNREACH];
        assert!(!others.iter().any(|error| connect(*error).is_absence()));
        let handshake = |kind: io::ErrorKind| OpenError::Negotiation {
            disk: String::new(),
            why: NegotiationError::Io(kind.into()),
        };
        assert!(handshake(io::ErrorKind::UnexpectedEof).is_absence());
        assert!(!handshake(io::ErrorKind::TimedOut).is_absence());
    }
}
