//! Submission tokens and completions.

use crate::dma::Buffer;
use shadowbell_spec::Status;

/// Identifies a submitted command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token {
    pub(crate) cid: u16,
    pub(crate) slot: u16,
}

impl Token {
    /// The command's slot: an index below [`QueuePair::capacity`](crate::QueuePair::capacity) that
    /// is unique among the outstanding commands of a queue. Programs can use the slot to index
    /// per-command state.
    #[inline]
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.slot)
    }

    /// The command identifier (CID) in the queue, for the Abort command.
    #[must_use]
    pub fn cid(self) -> u16 {
        self.cid
    }
}

/// A completed command.
#[derive(Debug)]
pub struct Completion {
    /// Token of the command, as returned by its submission.
    pub token: Token,
    /// Status of the completion queue entry.
    pub status: Status,
    /// Command specific result, dword 0.
    pub dw0: u32,
    /// Command specific result, dword 1.
    pub dw1: u32,
    /// The buffer of the command. The device no longer uses it.
    pub buffer: Option<Buffer>,
}

impl Completion {
    /// Completion of a command that the driver itself has ended: Command Aborted By Host.
    pub(crate) fn aborted_by_host(token: Token, buffer: Option<Buffer>) -> Self {
        Self { token, status: Status::ABORTED_BY_HOST, dw0: 0, dw1: 0, buffer }
    }
}
