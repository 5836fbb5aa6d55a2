//! Limits of a server on its clients.

use std::time::Duration;

/// Limits of a server on its clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of bytes per data transfer; announced to clients.
    pub max_data_xfer_size: u32,
    /// Maximum time from connect to a complete VERSION message.
    pub negotiation: Duration,
    /// Maximum time from the first byte of a message to its last byte.
    pub message: Duration,
    /// Maximum time for which a client may leave replies unread when the socket is full.
    pub unread_replies: Duration,
    /// Maximum time that devices have to release their clients after
    /// [`Handle::stop`](super::Handle::stop).
    pub stop: Duration,
    /// True if the reactor's thread closes clients' descriptors itself. A client can then block the
    /// whole server. This is for fuzzing, which needs deterministic runs and sends only harmless
    /// descriptors.
    pub close_at_once: bool,
}

impl Limits {
    /// Returns these limits for a client with or without checkpoints. With checkpoints, messages
    /// stay in the socket until they are executed, so each message has to fit into the socket.
    pub(super) fn of_recorded(&self, is_recorded: bool) -> Self {
        let most = if is_recorded { RECORDED_XFER } else { u32::MAX };
        Self { max_data_xfer_size: self.max_data_xfer_size.min(most), ..*self }
    }
}

/// Maximum data of a message that fits completely into any socket, in bytes.
const RECORDED_XFER: u32 = 64 << 10;

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_data_xfer_size: 1 << 20,
            negotiation: Duration::from_secs(10),
            message: Duration::from_secs(10),
            unread_replies: Duration::from_secs(10),
            stop: Duration::from_secs(5),
            close_at_once: false,
        }
    }
}

/// Maximum number of descriptors per message. It is announced to clients, and requests with more
/// are refused. QEMU splits larger sets of eventfds into messages of at most this many, and refuses
/// a server that announces more than 16.
pub const MAX_MSG_FDS: u32 = 16;
