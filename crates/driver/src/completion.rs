//! What a submission returns, and what comes of it.

use crate::dma::Buffer;
use shadowbell_spec::Status;

/// A command that was submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token {
    pub(crate) cid: u16,
    pub(crate) slot: u16,
}

impl Token {
    /// The command's slot: below the number of commands that the queue takes at once
    /// ([`QueuePair::capacity`](crate::QueuePair::capacity)), and no two outstanding commands of a
    /// queue have the same. For whatever a program keeps per command.
    #[inline]
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.slot)
    }

    /// The command identifier (CID) that the command has in its queue, as Abort wants it.
    #[must_use]
    pub fn cid(self) -> u16 {
        self.cid
    }
}

/// A command that completed.
#[derive(Debug)]
pub struct Completion {
    /// Which command.
    pub token: Token,
    /// How it went.
    pub status: Status,
    /// Command specific result, dword 0.
    pub dw0: u32,
    /// Command specific result, dword 1.
    pub dw1: u32,
    /// The buffer that was submitted with it: the device is done with it.
    pub buffer: Option<Buffer>,
}

impl Completion {
    /// Of a command that the driver has ended: Command Aborted By Host.
    pub(crate) fn aborted_by_host(token: Token, buffer: Option<Buffer>) -> Self {
        Self { token, status: Status::ABORTED_BY_HOST, dw0: 0, dw1: 0, buffer }
    }
}
