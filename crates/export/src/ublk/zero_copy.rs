//! Zero-copy requests, whose data is transferred directly between the image's file and the block
//! layer's memory.
//!
//! The kernel registers the memory of a request with the queue's ring before the thread sees the
//! request. So the thread itself makes the calls on the file, by that ring, without a copy. The
//! disk's [`RawFile`] interprets the results of the calls, as it does for the disk's own queues.

use super::request::Action;
use rustix::io::Errno;
use shadowbell_block::Geometry;
use shadowbell_disk::{DiskError, Op, Request};
use shadowbell_disk_file::{RawCall, RawFile, RawStep, RawTransfer};
use std::time::{Duration, Instant};

/// File of the disk, and the requests in flight on it.
pub(super) struct ZeroCopy {
    file: RawFile,
    timeout: Duration,
    read_only: bool,
    /// Requests in flight, by tag.
    moving: Vec<Option<Moving>>,
    pending: usize,
}

struct Moving {
    transfer: RawTransfer,
    action: Action,
    offset: u64,
    since: Instant,
}

/// Next step for a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Make this call on the file.
    Call(RawCall),
    /// Answer the request with the number of bytes transferred, or with the error.
    Reply(Result<usize, DiskError>),
    /// Execute the request on a queue of the disk, with a copy.
    Disk(Action, u64),
}

/// Request to the disk for an action that transfers data. `None` for other actions.
pub(super) fn request(action: Action, offset: u64) -> Option<Request> {
    let (op, len) = match action {
        Action::Read { len } => (Op::Read, len),
        Action::Write { len, fua } => (Op::Write { fua }, len),
        _ => return None,
    };
    Some(Request { op, offset, len: len as u64 })
}

impl ZeroCopy {
    /// Creates the state for `depth` requests to a disk that consists of `file`. A request that
    /// takes longer than `timeout` is cancelled.
    pub(super) fn new(file: RawFile, geometry: &Geometry, timeout: Duration, depth: usize) -> Self {
        let moving = (0..depth).map(|_| None).collect();
        Self { file, timeout, read_only: geometry.read_only, moving, pending: 0 }
    }

    /// File of the disk. The queue's thread reads and writes it.
    pub(super) fn file(&self) -> &RawFile {
        &self.file
    }

    /// Number of requests in flight.
    pub(super) fn pending(&self) -> usize {
        self.pending
    }

    /// Starts a request.
    pub(super) fn begin(&mut self, tag: u16, action: Action, offset: u64) -> Next {
        let request = request(action, offset);
        let request = request.filter(|request| request.op == Op::Read || !self.read_only);
        let Some(request) = request else { return Next::Disk(action, offset) };
        let Some(place @ None) = self.moving.get_mut(usize::from(tag)) else {
            return Next::Disk(action, offset);
        };
        let transfer = match self.file.begin(&request) {
            Ok(transfer) => transfer,
            Err(outcome) => return Next::Reply(outcome.map(|()| action.moves())),
        };
        let Some(call) = transfer.call() else { return Next::Disk(action, offset) };
        *place = Some(Moving { transfer, action, offset, since: Instant::now() });
        self.pending += 1;
        Next::Call(call)
    }

    /// Processes the end of a call. `result` is the number of bytes or a negative error number.
    /// Returns `None` if the tag has no request in flight.
    pub(super) fn ended(&mut self, tag: u16, result: i32) -> Option<Next> {
        let place = self.moving.get_mut(usize::from(tag))?;
        let moving = place.as_mut()?;
        let (action, offset) = (moving.action, moving.offset);
        let next = match moving.transfer.ended(result, &self.file) {
            RawStep::Call => match moving.transfer.call() {
                Some(call) => return Some(Next::Call(call)),
                None => Next::Disk(action, offset),
            },
            RawStep::End(outcome) => Next::Reply(outcome.map(|()| action.moves())),
            RawStep::Refused => Next::Disk(action, offset),
        };
        *place = None;
        self.pending -= 1;
        Some(next)
    }

    /// Cancels the requests that take too long, and returns their tags.
    pub(super) fn cancel_late(&mut self, now: Instant) -> impl Iterator<Item = u16> + '_ {
        let timeout = self.timeout;
        (0..).zip(&mut self.moving).filter_map(move |(tag, moving)| {
            let moving = moving.as_mut()?;
            if now.saturating_duration_since(moving.since) <= timeout {
                return None;
            }
            moving.transfer.cancel();
            Some(tag)
        })
    }
}

/// Error number for the answer, as in [`shadowbell_block::BlockError::errno`].
pub(super) fn errno(error: &DiskError) -> Errno {
    match error {
        DiskError::ReadOnly => Errno::PERM,
        DiskError::NoSpace => Errno::NOSPC,
        _ => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_disk_file::{Aio, Direct, FileDisk, FileOptions};
    use std::fs::File;

    const GEOMETRY: Geometry = Geometry {
        bytes: 1 << 20,
        block_size: 512,
        read_only: false,
        volatile_cache: true,
        write_zeroes: true,
        discard: true,
    };
    const READ: Action = Action::Read { len: 4096 };
    const WRITE: Action = Action::Write { len: 4096, fua: true };

    /// Creates the state for a temporary file. Returns `None` if the file system does not support
    /// direct I/O.
    fn zero_copy(geometry: &Geometry) -> Option<(tempfile::NamedTempFile, ZeroCopy)> {
        let image = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        File::options().write(true).open(image.path()).unwrap().set_len(1 << 20).unwrap();
        let mut options = FileOptions::default();
        (options.direct, options.aio) = (Direct::Auto, Aio::Auto);
        let file = RawFile::of(&FileDisk::open(image.path(), &options).unwrap());
        if file.is_none() {
            shadowbell_testing::programs::skipped("there is no direct I/O here");
        }
        // No test waits for the timeout: the tests pass the current time to `cancel_late`.
        Some((image, ZeroCopy::new(file?, geometry, Duration::from_secs(1), 4)))
    }

    #[test]
    fn only_reads_and_writes_use_zero_copy() {
        let Some((_image, mut zero_copy)) = zero_copy(&GEOMETRY) else { return };
        for action in [Action::Flush, Action::Discard { len: 4096 }] {
            assert_eq!(zero_copy.begin(0, action, 0), Next::Disk(action, 0));
        }
        let call = RawCall { writes: true, dsync: true, skip: 0, offset: 8192, len: 4096 };
        assert_eq!(zero_copy.begin(3, WRITE, 8192), Next::Call(call));
        assert_eq!(zero_copy.pending(), 1);
        // A tag that has a request in flight, and a tag beyond the number of tags, use the disk's
        // queue.
        assert_eq!(zero_copy.begin(3, READ, 0), Next::Disk(READ, 0));
        assert_eq!(zero_copy.begin(4, READ, 0), Next::Disk(READ, 0));
        assert_eq!(zero_copy.ended(3, 4096), Some(Next::Reply(Ok(4096))));
        assert_eq!((zero_copy.ended(3, 4096), zero_copy.pending()), (None, 0));
        // For a request beyond the end of the disk, no call is made.
        let beyond = Next::Reply(Err(DiskError::OutOfRange));
        assert_eq!(zero_copy.begin(0, READ, 1 << 20), beyond);
        assert_eq!(zero_copy.pending(), 0);
    }

    #[test]
    fn memory_refused_by_the_storage_falls_back_to_the_disk() {
        let Some((_image, mut zero_copy)) = zero_copy(&GEOMETRY) else { return };
        assert!(matches!(zero_copy.begin(1, READ, 512), Next::Call(_)));
        assert_eq!(zero_copy.ended(1, -libc::EINVAL), Some(Next::Disk(READ, 512)));
        assert_eq!(zero_copy.pending(), 0);
        assert!(matches!(zero_copy.begin(1, READ, 512), Next::Call(_)));
        let failed = Next::Reply(Err(DiskError::Io(libc::EIO)));
        assert_eq!(zero_copy.ended(1, -libc::EIO), Some(failed));
        let read_only = Geometry { read_only: true, ..GEOMETRY };
        zero_copy.read_only = read_only.read_only;
        assert_eq!(zero_copy.begin(0, WRITE, 0), Next::Disk(WRITE, 0), "which says that it is");
    }

    #[test]
    fn late_zero_copy_calls_are_cancelled() {
        let Some((_image, mut zero_copy)) = zero_copy(&GEOMETRY) else { return };
        assert!(matches!(zero_copy.begin(2, READ, 0), Next::Call(_)));
        let now = Instant::now();
        assert_eq!(zero_copy.cancel_late(now).count(), 0);
        let late: Vec<u16> = zero_copy.cancel_late(now + Duration::from_secs(3)).collect();
        assert_eq!(late, [2]);
        let cancelled = Some(Next::Reply(Err(DiskError::Cancelled)));
        assert_eq!(zero_copy.ended(2, -libc::ECANCELED), cancelled);
    }

    #[test]
    fn zero_copy_errors_equal_those_of_the_disk_path() {
        assert_eq!(errno(&DiskError::ReadOnly), Errno::PERM);
        assert_eq!(errno(&DiskError::NoSpace), Errno::NOSPC);
        for error in [DiskError::OutOfRange, DiskError::Cancelled, DiskError::Io(libc::EINVAL)] {
            assert_eq!(errno(&error), Errno::IO, "{error}");
        }
    }
}
