//! In-flight limits of one controller on one I/O thread.
//!
//! In-flight commands cost memory of the server process, and their completion costs I/O thread
//! time. So the server limits them, independently of the guest's queue sizes. At a limit, nothing
//! more is fetched from the controller's queues until a command ends: further commands wait in
//! guest memory, where they cost nothing. This is no error, and the guest sees only latency.

/// In-flight limits of a controller on each I/O thread. The defaults exceed the needs of ordinary
/// guests: they keep any storage busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quota {
    /// Disk requests in flight. A command is one or more requests.
    pub requests: usize,
    /// Bytes of data of in-flight requests.
    pub bytes: u64,
    /// Pieces of host memory that the data of in-flight requests lie in.
    pub pieces: usize,
    /// In-flight commands of several steps, for each type: Copy; commands of many requests, such as
    /// Dataset Management; reads with Force Unit Access on a disk with a volatile cache; commands
    /// that require exclusive execution.
    pub long_commands: usize,
}

impl Default for Quota {
    fn default() -> Self {
        Self { requests: 2048, bytes: 1 << 30, pieces: 1 << 17, long_commands: 64 }
    }
}

/// Quota that is reached, with its name for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exceeded {
    Requests,
    Bytes,
    Pieces,
    MultiStepCommands,
}

impl std::fmt::Display for Exceeded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Requests => "requests",
            Self::Bytes => "bytes of data",
            Self::Pieces => "pieces of host memory",
            Self::MultiStepCommands => "Copy or Dataset Management commands",
        })
    }
}

/// Cost estimates of work, in nanoseconds of I/O thread time. They decide how much work of a
/// controller is done before other controllers get their turn. With several controllers, the real
/// cost is measured afterwards.
pub(super) mod cost {
    /// Command that a disk completes inline, without its data.
    const COMMAND: i64 = 64;
    /// Request that a disk executes asynchronously, including its completion.
    const REQUEST: i64 = 1500;
    /// Bytes copied per nanosecond, as a power of two.
    const BYTES_SHIFT: u32 = 4;

    /// SGL descriptor and its piece of memory.
    const PIECE: i64 = 24;

    /// Command that ends in an error. The work before the error is unknown, and the error is
    /// written to the Error Information log.
    pub(crate) const FAILURE: i64 = 5000;

    /// Cost to resolve `pieces` pieces of memory.
    pub(crate) fn of_pieces(pieces: usize) -> i64 {
        pieces as i64 * PIECE
    }

    /// Read or write of up to [`SHORT_BYTES`] that a disk completes inline. This is an upper bound,
    /// charged per command without a look at its size.
    pub(crate) const SHORT: i64 = 300;
    /// Maximum size of a short read or write, in bytes.
    pub(crate) const SHORT_BYTES: u64 = 8192;

    /// Cost of a command of `bytes` bytes that a disk completed inline.
    #[inline(always)]
    pub(crate) fn of_command(bytes: u64) -> i64 {
        (bytes >> BYTES_SHIFT) as i64 + COMMAND
    }

    /// Cost of a request of `bytes` bytes that is in flight; its submission may copy the data.
    pub(crate) fn of_request(bytes: u64) -> i64 {
        (bytes >> BYTES_SHIFT) as i64 + REQUEST
    }
}
