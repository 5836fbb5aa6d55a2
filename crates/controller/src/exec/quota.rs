//! How much one controller may have under way on one worker.
//!
//! What a guest has under way costs this process memory, and the end of it costs a worker time. So
//! there is a bound to it, and not one that the guest chooses. A controller that has reached one
//! has nothing more fetched until something ends: its commands wait in their queues, where they
//! cost nothing. That is no error, and the guest need not know.

/// How much a controller may have under way on each worker. The defaults are more than an honest
/// guest has: more than keeps any storage busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quota {
    /// Requests that its disks have in hand. A command is one or more of them.
    pub requests: usize,
    /// Bytes of data of these.
    pub bytes: u64,
    /// Pieces of host memory that these data lie in.
    pub pieces: usize,
    /// Commands that are carried out in several steps (Copy; Dataset Management and others of many
    /// ranges; reads with Force Unit Access of a disk with a cache), of each kind.
    pub long_commands: usize,
}

impl Default for Quota {
    fn default() -> Self {
        Self { requests: 2048, bytes: 1 << 30, pieces: 1 << 17, long_commands: 64 }
    }
}

/// What a controller may not exceed, by name, for a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exceeded {
    Requests,
    Bytes,
    Pieces,
    LongCommands,
}

impl std::fmt::Display for Exceeded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Requests => "requests",
            Self::Bytes => "bytes of data",
            Self::Pieces => "pieces of host memory",
            Self::LongCommands => "Copy or Dataset Management commands",
        })
    }
}

/// What work costs: an estimate, in nanoseconds of a worker. It decides how much of a
/// controller's work is done before others get their turn; what is really spent is measured
/// afterwards, where there are others.
pub(super) mod cost {
    /// A command that a disk carries out at once, without its data.
    const COMMAND: i64 = 64;
    /// A request that a disk takes in hand, with its end.
    const REQUEST: i64 = 1500;
    /// Bytes that are moved in a nanosecond, as a power of two.
    const BYTES_SHIFT: u32 = 4;

    /// A descriptor of an SGL, with a piece of memory.
    const PIECE: i64 = 24;

    /// A command that ends in an error: what it took to find that out is not known, and it is
    /// written down.
    pub(crate) const FAILURE: i64 = 5000;

    /// To find so many pieces of memory.
    pub(crate) fn of_pieces(pieces: usize) -> i64 {
        pieces as i64 * PIECE
    }

    /// A read or write of [`SHORT_BYTES`] at most that a disk carries out at once: less than that,
    /// and counted without a look at each.
    pub(crate) const SHORT: i64 = 300;
    /// The longest of these, in bytes.
    pub(crate) const SHORT_BYTES: u64 = 8192;

    /// What was done at once, with so many bytes.
    #[inline(always)]
    pub(crate) fn of_command(bytes: u64) -> i64 {
        (bytes >> BYTES_SHIFT) as i64 + COMMAND
    }

    /// What a disk has in hand now: handing it over may move its bytes.
    pub(crate) fn of_request(bytes: u64) -> i64 {
        (bytes >> BYTES_SHIFT) as i64 + REQUEST
    }
}
