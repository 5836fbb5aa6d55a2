//! State machine of a request: the next call, and the interpretation of its result.

use super::shared::{FileShared, is_passing};
use super::write_atomicity::WriteAtomicity;
use crate::sys::{Call, Memory, NVME_STATUS};
use shadowbell_disk::{DiskError, Op, Request};
use shadowbell_memory::Segments;
use shadowbell_spec::Status;
use std::sync::atomic::Ordering;

/// Size of a bounce buffer in bytes, and so maximum length of a call that uses one.
pub(super) const BOUNCE: usize = 256 * 1024;

/// Maximum number of consecutive retries of a call that fails with a temporary error (such as
/// `EAGAIN`).
const RETRIES: u8 = 64;

/// Current stage of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Transfer directly to or from the command's memory.
    Straight,
    /// Transfer of the next `piece` bytes of the range through the bounce buffer. `moved` of them
    /// have already been transferred between the file and the buffer.
    Bounced { piece: usize, moved: usize },
    /// Dataset Management command that deallocates the range.
    Deallocate,
    /// Punching a hole.
    Punch,
    /// Zeroing by the file system.
    ZeroRange,
    /// Zeroing by writes.
    Zeroes,
    /// Sync of the written data.
    Sync,
}

/// Next step of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The caller has to make the system call that [`Task::call`] describes.
    Call,
    /// The part in the bounce buffer is complete. The caller has to copy it to the data or compare
    /// it with them, and then to call [`Task::finish_piece`].
    Piece,
    /// The request has ended.
    End(Result<(), DiskError>),
}

#[derive(Debug)]
pub(super) struct Task {
    pub(super) tag: u32,
    pub(super) stage: Stage,
    /// True if the host has aborted the command.
    pub(super) cancelled: bool,
    /// True if the request waits for overlapping requests.
    pub(super) is_waiting: bool,
    request: Request,
    /// Number of bytes of the range that were transferred, compared, zeroed or deallocated.
    done: u64,
    retries: u8,
    /// True if the write must be atomic across a loss of power (`RWF_ATOMIC`).
    atomic: bool,
    /// True if a sync has to follow a FUA write. Otherwise the write call itself is durable.
    syncs_after: bool,
}

/// Call of a task. It uses the buffer from `skip` on, and the file from `offset` on.
pub(super) struct NextCall {
    pub(super) call: Call,
    pub(super) skip: usize,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Task {
    /// Creates the task of a checked request, or returns its result if there is nothing to do.
    pub(super) fn new(
        tag: u32,
        request: &Request,
        data: &Segments,
        shared: &FileShared,
    ) -> Result<Self, Result<(), DiskError>> {
        let stage = match request.op {
            Op::Flush if shared.info.read_only => return Err(Ok(())),
            // Without a volatile cache, completed writes are durable already.
            Op::Flush if shared.namespace.as_ref().is_some_and(|it| !it.has_cache) => {
                return Err(Ok(()));
            }
            Op::Flush => match shared.unsynced() {
                None => Stage::Sync,
                Some(error) => return Err(Err(error)),
            },
            _ if request.len == 0 => return Err(Ok(())),
            _ if !shared.reaches(request.offset + request.len) => {
                return Err(Err(DiskError::OutOfRange));
            }
            Op::Read | Op::Write { .. } if straight(data, request.len, shared) => Stage::Straight,
            Op::Read | Op::Write { .. } | Op::Compare | Op::Verify => {
                Stage::Bounced { piece: 0, moved: 0 }
            }
            Op::Discard if !shared.info.discard => return Err(Ok(())),
            Op::Discard if shared.namespace.as_ref().is_some_and(|it| it.deallocates) => {
                Stage::Deallocate
            }
            Op::Discard => zeroing(true, shared),
            Op::WriteZeroes { deallocate, .. } => zeroing(deallocate, shared),
            Op::CompareAndWrite { .. } | Op::Append { .. } | Op::Zone { .. } => {
                return Err(Err(DiskError::Unsupported));
            }
        };
        let syncs_after = match request.op {
            Op::WriteZeroes { fua, .. } => fua,
            // A sync by the flusher has to follow. The write call itself must not sync
            // (`RWF_DSYNC`), because the kernel reports a failed write-back only once, and the
            // flusher must see it.
            Op::Write { fua } => fua && shared.direct.is_none(),
            _ => false,
        };
        let mut task = Self {
            tag,
            stage,
            cancelled: false,
            is_waiting: false,
            request: *request,
            done: 0,
            retries: 0,
            atomic: shared.atom == WriteAtomicity::Requested
                && request.len == u64::from(shared.info.block_size),
            syncs_after,
        };
        if matches!(stage, Stage::Bounced { .. }) {
            task.next_piece();
        }
        Ok(task)
    }

    pub(super) fn request(&self) -> &Request {
        &self.request
    }

    pub(super) fn op(&self) -> Op {
        self.request.op
    }

    /// True if the task may need a bounce buffer.
    pub(super) fn may_bounce(&self) -> bool {
        matches!(self.request.op, Op::Read | Op::Write { .. } | Op::Compare | Op::Verify)
    }

    /// Offset in the request's data, and length, of the part that is in the bounce buffer.
    pub(super) fn piece(&self) -> (usize, usize) {
        match self.stage {
            Stage::Bounced { piece, .. } => (self.done as usize, piece),
            _ => (0, 0),
        }
    }

    fn left(&self) -> u64 {
        self.request.len - self.done
    }

    fn next_piece(&mut self) {
        let piece = self.left().min(BOUNCE as u64) as usize;
        self.stage = Stage::Bounced { piece, moved: 0 };
    }

    /// Next call of the task. `None` for a sync, which the flusher executes.
    pub(super) fn call(&self) -> Option<NextCall> {
        let offset = self.request.offset + self.done;
        let rest = |call| NextCall { call, skip: 0, offset, len: self.left() };
        let transfer = |memory| match self.request.op {
            Op::Write { fua } => {
                let dsync = fua && !self.syncs_after;
                Call::Write { from: memory, dsync, atomic: self.atomic }
            }
            _ => Call::Read(memory),
        };
        Some(match self.stage {
            // The data in memory are as long as the range, so `done` fits in a `usize`.
            Stage::Straight => {
                NextCall { skip: self.done as usize, ..rest(transfer(Memory::Data)) }
            }
            Stage::Bounced { piece, moved } => NextCall {
                call: transfer(Memory::Own),
                skip: moved,
                offset: offset + moved as u64,
                len: (piece - moved) as u64,
            },
            Stage::Deallocate => rest(Call::Deallocate),
            Stage::Punch => rest(Call::Punch),
            Stage::ZeroRange => rest(Call::ZeroRange),
            Stage::Zeroes => rest(Call::Write { from: Memory::Own, dsync: false, atomic: false }),
            Stage::Sync => return None,
        })
    }

    /// Processes the result of a call: the number of transferred bytes, or a negative error number.
    pub(super) fn outcome(&mut self, result: i32, shared: &FileShared) -> Step {
        match u32::try_from(result) {
            Ok(moved) => self.moved(u64::from(moved), shared),
            Err(_) => self.failed(-result, shared),
        }
    }

    fn failed(&mut self, errno: i32, shared: &FileShared) -> Step {
        match (errno, self.stage) {
            (libc::ECANCELED, _) if self.cancelled => return Step::End(Err(DiskError::Cancelled)),
            _ if is_passing(errno) && self.cancelled => {
                return Step::End(Err(DiskError::Cancelled));
            }
            _ if is_passing(errno) && self.retries < RETRIES => {
                self.retries += 1;
                return Step::Call;
            }
            (libc::EOPNOTSUPP | libc::ENOSYS, Stage::Punch) => {
                shared.no_punch.store(true, Ordering::Relaxed);
                self.stage = zeroing(true, shared);
            }
            (libc::EOPNOTSUPP | libc::ENOSYS, Stage::ZeroRange) => {
                shared.no_zero_range.store(true, Ordering::Relaxed);
                self.stage = Stage::Zeroes;
            }
            (_, Stage::Deallocate) if refuses(errno) => self.stage = zeroing(true, shared),
            (_, Stage::Punch | Stage::ZeroRange) if refuses(errno) => {
                self.stage = Stage::Zeroes;
            }
            // A block device refuses a range that is not a multiple of its own blocks, so zeroes
            // are written instead.
            (libc::EINVAL, Stage::Punch | Stage::ZeroRange) => self.stage = Stage::Zeroes,
            // The device requires a stricter alignment than the kernel reports, so a bounce buffer
            // is used.
            (libc::EINVAL, Stage::Straight) if shared.direct.is_some() => self.next_piece(),
            _ => return Step::End(Err(shared.error(errno))),
        }
        self.unless_cancelled(Step::Call)
    }

    fn moved(&mut self, moved: u64, shared: &FileShared) -> Step {
        let (progress, wanted) = match self.stage {
            Stage::Straight | Stage::Zeroes => {
                let progress = aligned_progress(moved, self.left(), shared);
                self.done += progress;
                (progress, self.left() + progress)
            }
            Stage::Bounced { piece, moved: before } => {
                let wanted = (piece - before) as u64;
                let progress = aligned_progress(moved, wanted, shared);
                let now = before + progress as usize;
                self.stage = Stage::Bounced { piece, moved: now };
                if now == piece {
                    return Step::Piece;
                }
                (progress, wanted)
            }
            // The result of an NVMe command is the length of the range that it covered. `fallocate`
            // covers the whole range, and its result is 0.
            Stage::Deallocate | Stage::Punch | Stage::ZeroRange if moved != 0 => {
                self.done += moved.min(self.left());
                (moved, self.left() + moved)
            }
            Stage::Deallocate | Stage::Punch | Stage::ZeroRange => {
                self.done = self.request.len;
                (self.request.len, self.request.len)
            }
            // The image was truncated, so the flush cannot promise that all data are durable.
            Stage::Sync if shared.record_size(shared.flusher.len()) => {
                return Step::End(Err(DiskError::Io(libc::EIO)));
            }
            Stage::Sync => return Step::End(Ok(())),
        };
        if progress == wanted {
            return self.finish_range();
        }
        if progress > 0 {
            self.retries = 0;
            return self.unless_cancelled(Step::Call);
        }
        // The call has succeeded without any usable progress: a read at the end of the file, or a
        // write that the kernel did not execute.
        let reads = matches!(self.request.op, Op::Read | Op::Compare | Op::Verify);
        Step::End(Err(if reads && shared.has_shrunk() {
            DiskError::OutOfRange
        } else {
            DiskError::Io(libc::EIO)
        }))
    }

    /// Continues after the part in the bounce buffer was copied or compared: with the next part, or
    /// with the end of the request.
    pub(super) fn finish_piece(&mut self) -> Step {
        if let Stage::Bounced { piece, .. } = self.stage {
            self.done += piece as u64;
            self.retries = 0;
        }
        if self.left() == 0 {
            return self.finish_range();
        }
        self.next_piece();
        self.unless_cancelled(Step::Call)
    }

    fn finish_range(&mut self) -> Step {
        if self.syncs_after {
            self.stage = Stage::Sync;
            return self.unless_cancelled(Step::Call);
        }
        Step::End(Ok(()))
    }

    /// Returns `step`, unless the host has aborted the command.
    fn unless_cancelled(&self, step: Step) -> Step {
        if self.cancelled { Step::End(Err(DiskError::Cancelled)) } else { step }
    }
}

/// True if the device does not support the command, or does not support it for this range.
fn refuses(errno: i32) -> bool {
    let status = u16::try_from(errno - NVME_STATUS).map_or(Status::SUCCESS, Status::from_bits);
    matches!(status.code(), Status::INVALID_OPCODE | Status::INVALID_FIELD)
}

/// True if no bounce buffer is needed: the first `len` bytes of the data have the alignment that
/// direct I/O requires, or the page cache is used.
fn straight(data: &Segments, len: u64, shared: &FileShared) -> bool {
    let Some(align) = shared.direct else {
        return true;
    };
    let mut left = len as usize;
    data.pieces().iter().all(|piece| {
        let used = piece.len().min(left);
        left -= used;
        used == 0 || (piece.address() & (align.memory - 1) | used & (align.offset - 1)) == 0
    })
}

/// Selects the best way to zero a range.
fn zeroing(deallocate: bool, shared: &FileShared) -> Stage {
    if deallocate && !shared.no_punch.load(Ordering::Relaxed) {
        Stage::Punch
    } else if !shared.no_zero_range.load(Ordering::Relaxed) {
        Stage::ZeroRange
    } else {
        Stage::Zeroes
    }
}

/// Returns how many of the `moved` bytes of a transfer of `wanted` bytes count. With direct I/O, a
/// short transfer counts only up to the last aligned offset, because the next call has to start at
/// one.
fn aligned_progress(moved: u64, wanted: u64, shared: &FileShared) -> u64 {
    match shared.direct {
        Some(align) if moved < wanted => moved & !(align.offset as u64 - 1),
        _ => moved.min(wanted),
    }
}
