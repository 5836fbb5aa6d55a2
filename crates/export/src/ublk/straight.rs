//! Requests whose data go straight between the image's file and the block layer's own memory.
//!
//! The kernel registers the memory of a request with the queue's ring before the thread sees the
//! request. So the thread makes the calls on the file itself, by that ring, and nobody copies. What
//! a call means is for the disk's [`RawFile`] to say, as it is for the disk's own queues.

use super::request::Action;
use rustix::io::Errno;
use shadowbell_backend::{DiskError, Op, RawCall, RawFile, RawStep, RawTransfer, Request};
use shadowbell_block::Geometry;
use std::time::{Duration, Instant};

/// The disk's file, and the requests that are on their way to or from it.
pub(super) struct Straight {
    file: RawFile,
    timeout: Duration,
    read_only: bool,
    /// By their tags.
    moving: Vec<Option<Moving>>,
    pending: usize,
}

struct Moving {
    transfer: RawTransfer,
    action: Action,
    offset: u64,
    since: Instant,
}

/// What comes next for a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// This call.
    Call(RawCall),
    /// Its answer: how many bytes were moved, or why not.
    Answer(Result<usize, DiskError>),
    /// It goes to the disk as others do.
    Disk(Action, u64),
}

impl Straight {
    /// For `depth` requests to a disk that `file` is all of. Each may take as long as `timeout`.
    pub(super) fn new(file: RawFile, geometry: &Geometry, timeout: Duration, depth: usize) -> Self {
        let moving = (0..depth).map(|_| None).collect();
        Self { file, timeout, read_only: geometry.read_only, moving, pending: 0 }
    }

    /// The file that the calls are made on.
    pub(super) fn file(&self) -> &RawFile {
        &self.file
    }

    /// How many requests are on their way.
    pub(super) fn pending(&self) -> usize {
        self.pending
    }

    /// Begins with a request.
    pub(super) fn begin(&mut self, tag: u16, action: Action, offset: u64) -> Next {
        let (op, len) = match action {
            Action::Read { len } => (Op::Read, len),
            Action::Write { len, fua } if !self.read_only => (Op::Write { fua }, len),
            _ => return Next::Disk(action, offset),
        };
        let Some(place @ None) = self.moving.get_mut(usize::from(tag)) else {
            return Next::Disk(action, offset);
        };
        let transfer = match self.file.begin(&Request { op, offset, len: len as u64 }) {
            Ok(transfer) => transfer,
            Err(outcome) => return Next::Answer(outcome.map(|()| len)),
        };
        let Some(call) = transfer.call() else { return Next::Disk(action, offset) };
        *place = Some(Moving { transfer, action, offset, since: Instant::now() });
        self.pending += 1;
        Next::Call(call)
    }

    /// The call of a request has ended: with so many bytes, or a negative error number. Nothing, if
    /// it is not on its way.
    pub(super) fn ended(&mut self, tag: u16, result: i32) -> Option<Next> {
        let place = self.moving.get_mut(usize::from(tag))?;
        let moving = place.as_mut()?;
        let (action, offset) = (moving.action, moving.offset);
        let next = match moving.transfer.ended(result, &self.file) {
            RawStep::Call => match moving.transfer.call() {
                Some(call) => return Some(Next::Call(call)),
                None => Next::Disk(action, offset),
            },
            RawStep::End(outcome) => Next::Answer(outcome.map(|()| action.moves())),
            RawStep::Refused => Next::Disk(action, offset),
        };
        *place = None;
        self.pending -= 1;
        Some(next)
    }

    /// Gives up on those that take too long: their tags.
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

/// The number to answer for what went wrong: as [`shadowbell_block::BlockError::errno`] has it.
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
    use shadowbell_backend::{Aio, Direct, Disk, FileDisk, FileOptions};
    use std::fs::File;

    const GEOMETRY: Geometry = Geometry {
        bytes: 1 << 20,
        block_size: 512,
        read_only: false,
        volatile_cache: true,
        write_zeroes: true,
        discard: true,
        compare: true,
        copy: true,
    };
    const READ: Action = Action::Read { len: 4096 };
    const WRITE: Action = Action::Write { len: 4096, fua: true };

    /// Nothing, where the file system does not bypass its page cache.
    fn straight(geometry: &Geometry) -> Option<(tempfile::NamedTempFile, Straight)> {
        let image = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        File::options().write(true).open(image.path()).unwrap().set_len(1 << 20).unwrap();
        let mut options = FileOptions::default();
        (options.direct, options.aio) = (Direct::Auto, Aio::Auto);
        let file = FileDisk::open(image.path(), &options).unwrap().raw_file();
        if file.is_none() {
            eprintln!("skipped: there is no direct I/O here");
        }
        // A limit for times that the tests give.
        Some((image, Straight::new(file?, geometry, Duration::from_secs(1), 4)))
    }

    #[test]
    fn reads_and_writes_are_calls_and_the_rest_is_the_disks() {
        let Some((_image, mut straight)) = straight(&GEOMETRY) else { return };
        for action in [Action::Flush, Action::Discard { len: 4096 }] {
            assert_eq!(straight.begin(0, action, 0), Next::Disk(action, 0));
        }
        let call = RawCall { writes: true, dsync: true, skip: 0, offset: 8192, len: 4096 };
        assert_eq!(straight.begin(3, WRITE, 8192), Next::Call(call));
        assert_eq!(straight.pending(), 1);
        // A tag has one request at a time, and there are so many tags.
        assert_eq!(straight.begin(3, READ, 0), Next::Disk(READ, 0));
        assert_eq!(straight.begin(4, READ, 0), Next::Disk(READ, 0));
        assert_eq!(straight.ended(3, 4096), Some(Next::Answer(Ok(4096))));
        assert_eq!((straight.ended(3, 4096), straight.pending()), (None, 0));
        // Beyond the end of the disk nothing is called.
        let beyond = Next::Answer(Err(DiskError::OutOfRange));
        assert_eq!(straight.begin(0, READ, 1 << 20), beyond);
        assert_eq!(straight.pending(), 0);
    }

    #[test]
    fn memory_that_the_storage_refuses_goes_by_the_disk() {
        let Some((_image, mut straight)) = straight(&GEOMETRY) else { return };
        assert!(matches!(straight.begin(1, READ, 512), Next::Call(_)));
        assert_eq!(straight.ended(1, -libc::EINVAL), Some(Next::Disk(READ, 512)));
        assert_eq!(straight.pending(), 0);
        assert!(matches!(straight.begin(1, READ, 512), Next::Call(_)));
        let failed = Next::Answer(Err(DiskError::Io(libc::EIO)));
        assert_eq!(straight.ended(1, -libc::EIO), Some(failed));
        let read_only = Geometry { read_only: true, ..GEOMETRY };
        straight.read_only = read_only.read_only;
        assert_eq!(straight.begin(0, WRITE, 0), Next::Disk(WRITE, 0), "which says that it is");
    }

    #[test]
    fn what_takes_too_long_is_given_up() {
        let Some((_image, mut straight)) = straight(&GEOMETRY) else { return };
        assert!(matches!(straight.begin(2, READ, 0), Next::Call(_)));
        let now = Instant::now();
        assert_eq!(straight.cancel_late(now).count(), 0);
        let late: Vec<u16> = straight.cancel_late(now + Duration::from_secs(3)).collect();
        assert_eq!(late, [2]);
        let cancelled = Some(Next::Answer(Err(DiskError::Cancelled)));
        assert_eq!(straight.ended(2, -libc::ECANCELED), cancelled);
    }

    #[test]
    fn errors_have_the_numbers_that_they_have_by_the_disk() {
        assert_eq!(errno(&DiskError::ReadOnly), Errno::PERM);
        assert_eq!(errno(&DiskError::NoSpace), Errno::NOSPC);
        for error in [DiskError::OutOfRange, DiskError::Cancelled, DiskError::Io(libc::EINVAL)] {
            assert_eq!(errno(&error), Errno::IO, "{error}");
        }
    }
}
