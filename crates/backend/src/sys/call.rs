//! What an engine is given, and what it gives back.

/// What is to be done with the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    /// With flags as `pwritev2` has them.
    Write {
        flags: i32,
    },
    /// What was written onto stable storage, with what it takes to find it again.
    Sync,
    /// With a mode as `fallocate` has it.
    Allocate {
        mode: i32,
    },
    /// What is there is not needed any more. Of a namespace; of a file it is a hole.
    Deallocate,
}

/// A call: `len` bytes of the file from `offset`; or of the pieces, where there are any.
pub(super) struct Prepared<'a> {
    /// Names it in its completion.
    pub(super) id: u64,
    pub(super) kind: Kind,
    pub(super) iovecs: &'a [libc::iovec],
    pub(super) offset: u64,
    pub(super) len: u64,
    /// It ends with `EAGAIN` or `EOPNOTSUPP` rather than wait.
    pub(super) nowait: bool,
}

/// The completion of a call without a slot (a cancellation, a wake-up).
pub(super) const NO_SLOT: u64 = u64::MAX;

/// A hole, as `fallocate` has it.
pub(super) const HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;

/// Where the numbers of errors begin that are the status of an NVMe device: above the system's own.
pub(crate) const NVME_STATUS: i32 = 1 << 16;

/// There is no way left to learn when calls have ended.
#[derive(Debug)]
pub(super) struct Stuck;
