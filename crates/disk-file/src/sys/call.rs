//! Calls passed to an engine, and their results.

/// Kind of a call on the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    /// Write with `pwritev2` flags.
    Write {
        flags: i32,
    },
    /// `fdatasync`.
    Sync,
    /// `fallocate` with this mode.
    Allocate {
        mode: i32,
    },
    /// Dataset Management (deallocate) on a namespace; punches a hole in a file.
    Deallocate,
}

/// Prepared call: `len` bytes of the file from `offset`, or the total of `iovecs` if there are any.
pub(super) struct Prepared<'a> {
    /// Identifies the call in its completion.
    pub(super) id: u64,
    pub(super) kind: Kind,
    pub(super) iovecs: &'a [libc::iovec],
    pub(super) offset: u64,
    pub(super) len: u64,
    /// The call fails with `EAGAIN` or `EOPNOTSUPP` instead of blocking (`RWF_NOWAIT`).
    pub(super) nowait: bool,
}

/// Completion of a call without a slot (a cancellation, a wake-up).
pub(super) const NO_SLOT: u64 = u64::MAX;

/// `fallocate` mode for punching a hole.
pub(super) const HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;

/// Base of error numbers that encode an NVMe status; above all error numbers of the system.
pub(crate) const NVME_STATUS: i32 = 1 << 16;

/// Error: no means is left to learn when calls end.
#[derive(Debug)]
pub(super) struct Stuck;
