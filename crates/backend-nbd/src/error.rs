//! Why an export can not be a disk, in sentences for the person who named it.

use crate::negotiate::NegotiationError;
use std::io;

/// Why an export can not be a disk. Each message says what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The specification makes no sense.
    #[error("`{spec}` names no disk: {why}")]
    Spec {
        /// What was written.
        spec: String,
        /// What is wrong with it.
        why: String,
    },
    /// There is no way to the server.
    #[error("{disk}: the server can not be reached: {source}; start it, or correct the address")]
    Connect {
        /// The export.
        disk: String,
        /// The system's reason.
        source: io::Error,
    },
    /// The server is not one of these, or refuses the export.
    #[error("{disk}: {why}")]
    Negotiation {
        /// The export.
        disk: String,
        /// What went wrong.
        why: NegotiationError,
    },
    /// There are no certificates that can be used.
    #[error("{disk}: {why}")]
    Certificates {
        /// The export.
        disk: String,
        /// What is wrong with them.
        why: shadowbell_tls::CertificateError,
    },
    /// The export's size is none that a disk can have.
    #[error(
        "{disk}: the {size} bytes of the export are no size of a disk with blocks of {block_size} \
         bytes: it has to be a multiple of that, and at least one block; resize it at the server"
    )]
    Size {
        /// The export.
        disk: String,
        /// Bytes of the export.
        size: u64,
        /// Bytes of a block.
        block_size: u32,
    },
    /// The server takes only requests that are larger than the blocks.
    #[error(
        "{disk}: the server takes no requests below {least} bytes, and the blocks have \
         {block_size}; {}",
        if *.least <= 4096 { "say `block-size=4096`" } else { "a disk has at most 4096" }
    )]
    BlockSize {
        /// The export.
        disk: String,
        /// Bytes of the server's shortest request.
        least: u32,
        /// Bytes of a block.
        block_size: u32,
    },
    /// The disk of a process that has died can not be gone on with.
    #[error("{disk} can not be taken over: {why}")]
    NotThatDisk {
        /// The export.
        disk: String,
        /// Why not.
        why: String,
    },
    /// The system has no thread or descriptor.
    #[error("{disk}: there is no thread or descriptor for the connection: {source}")]
    System {
        /// The export.
        disk: String,
        /// The reason.
        source: io::Error,
    },
}
