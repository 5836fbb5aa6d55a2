//! What a server allows its clients.

use std::time::Duration;

/// What a server allows its clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes in one data transfer; advertised.
    pub max_data_xfer_size: u32,
    /// Time from connect to a complete VERSION message.
    pub negotiation: Duration,
    /// Time from the first byte of a message to its last.
    pub message: Duration,
    /// Time that a peer may leave replies unread once the socket is full.
    pub unread_replies: Duration,
    /// Time that [`Handle::stop`](super::Handle::stop) gives devices to let go of their clients.
    pub stop: Duration,
    /// Whether what clients bring is closed where it is found, and not by threads of its own. A
    /// client can hold up the whole server then: it is for who runs a reactor by turns, with
    /// clients whose descriptors are known, and wants the same to happen each time.
    pub close_at_once: bool,
}

impl Limits {
    /// Those of a client whose messages stay in the socket until they are carried out: each has to
    /// fit into it.
    pub(super) fn of_recorded(&self, is_recorded: bool) -> Self {
        let most = if is_recorded { RECORDED_XFER } else { u32::MAX };
        Self { max_data_xfer_size: self.max_data_xfer_size.min(most), ..*self }
    }
}

/// The data of a message that fits into any socket whole.
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

/// How many descriptors a client may send with one message; advertised, and a request with more is
/// refused. QEMU splits larger sets of
/// eventfds by it, and refuses a server that says more than 16.
pub const MAX_MSG_FDS: u32 = 16;
