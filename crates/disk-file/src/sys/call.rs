//! Calls that are passed to an engine, and their results.

/// Kind of a call on the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    /// Write with `pwritev2` flags.
    Write {
        flags: i32,
    },
    /// `fallocate` with this mode.
    Allocate {
        mode: i32,
    },
    /// Deallocates a range of a namespace by Dataset Management, or punches a hole in a file.
    Deallocate,
}

/// Prepared call: a range of the file, from `offset` on. Its length is `len`, or the total length
/// of `iovecs` if there are any.
pub(super) struct Prepared<'a> {
    /// Identifies the call in its completion.
    pub(super) id: u64,
    pub(super) kind: Kind,
    pub(super) iovecs: &'a [libc::iovec],
    pub(super) offset: u64,
    pub(super) len: u64,
    /// True if the system call must fail with `EAGAIN` or `EOPNOTSUPP` instead of blocking
    /// (`RWF_NOWAIT`).
    pub(super) nowait: bool,
}

/// Width in bits of the slot number, the lowest field of a call's id.
pub(super) const INDEX_BITS: u32 = 28;
/// Width in bits of the second field of a call's id, directly above the slot number. An engine can
/// store a number of its own in this field; otherwise the field is zero. The highest field is the
/// slot's generation.
pub(super) const QUEUE_BITS: u32 = 16;

/// Id of a wake-up. A wake-up has no slot.
pub(super) const WAKE: u64 = (1 << INDEX_BITS) - 1;

/// `fallocate` mode for punching a hole.
pub(super) const HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;

/// Base of the error numbers that encode an NVMe status: the error number is the base plus the
/// status. The base is larger than all error numbers of the system.
pub(crate) const NVME_STATUS: i32 = 1 << 16;

/// Error: completions of calls cannot be collected any more.
#[derive(Debug)]
pub(super) struct Stuck;
