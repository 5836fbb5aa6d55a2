//! Validation and execution of a ublk request.

use super::wire::{Descriptor, SECTOR, operation};
use rustix::io::Errno;
use shadowbell_block::{BlockError, BlockQueue, Geometry, Zeroes};

/// Disk operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Read { len: usize },
    Write { len: usize, fua: bool },
    Flush,
    Discard { len: u64 },
    WriteZeroes { len: u64, how: Zeroes },
}

impl Action {
    /// Number of data bytes that the operation reads or writes.
    pub(super) fn moves(self) -> usize {
        match self {
            Self::Read { len } | Self::Write { len, .. } => len,
            _ => 0,
        }
    }
}

/// Validated request with its data buffer.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) action: Action,
    /// Offset in bytes.
    pub(super) offset: u64,
    pub(super) buffer: Vec<u8>,
}

/// Result of a job.
#[derive(Debug)]
pub(super) struct Completed {
    /// Number of bytes transferred, or a negative error number, for the driver.
    pub(super) result: i32,
    /// Error of the disk, if it caused the failure.
    pub(super) error: Option<BlockError>,
    pub(super) buffer: Vec<u8>,
    /// Number of bytes that were read into the buffer.
    pub(super) read: usize,
}

/// Validates a request against the disk and the length of the buffer. Returns operation and offset.
///
/// # Errors
/// The error number for the answer.
pub(super) fn parse(
    descriptor: &Descriptor,
    geometry: &Geometry,
    room: usize,
) -> Result<(Action, u64), Errno> {
    let operation = descriptor.op_flags as u8;
    if operation == operation::FLUSH {
        // A flush has no range; the sectors of its descriptor are undefined.
        return Ok((Action::Flush, 0));
    }
    let bytes = u64::from(descriptor.sectors) * SECTOR;
    let offset = descriptor.start.checked_mul(SECTOR).ok_or(Errno::INVAL)?;
    let fits = || offset.checked_add(bytes).is_some_and(|end| end <= geometry.bytes);
    let data = || match usize::try_from(bytes) {
        Ok(len) if fits() && len <= room => Ok(len),
        _ => Err(Errno::INVAL),
    };
    let has = |flag| descriptor.op_flags & flag != 0;
    let fua = has(operation::FUA);
    let action = match operation {
        operation::READ => Action::Read { len: data()? },
        operation::WRITE => Action::Write { len: data()?, fua },
        operation::DISCARD if fits() => Action::Discard { len: bytes },
        operation::WRITE_ZEROES if fits() => {
            let deallocate = !has(operation::NO_UNMAP);
            let how = Zeroes { deallocate, fua, fast_only: false };
            Action::WriteZeroes { len: bytes, how }
        }
        operation::DISCARD | operation::WRITE_ZEROES => return Err(Errno::INVAL),
        _ => return Err(Errno::OPNOTSUPP),
    };
    Ok((action, offset))
}

/// Executes a job.
pub(super) async fn execute(disk: BlockQueue, job: Job) -> Completed {
    let Job { action, offset, mut buffer } = job;
    let outcome = match action {
        Action::Read { len } => disk.read(offset, buffer.get_mut(..len).unwrap_or_default()).await,
        Action::Write { len, fua } => {
            disk.write(offset, buffer.get(..len).unwrap_or_default(), fua).await
        }
        Action::Flush => disk.flush().await,
        Action::Discard { len } => disk.discard(offset, len).await,
        Action::WriteZeroes { len, how } => disk.write_zeroes(offset, len, how).await,
    };
    let (result, error) = match outcome {
        Ok(()) => (i32::try_from(action.moves()).unwrap_or(i32::MAX), None),
        Err(error) => (-error.errno().raw_os_error(), Some(error)),
    };
    let read = match action {
        Action::Read { len } if error.is_none() => len,
        _ => 0,
    };
    Completed { result, error, buffer, read }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry {
        bytes: 1 << 20,
        block_size: 512,
        read_only: false,
        volatile_cache: true,
        write_zeroes: true,
        discard: true,
    };

    fn request(op_flags: u32, start: u64, sectors: u32) -> Result<(Action, u64), Errno> {
        parse(&Descriptor { op_flags, sectors, start, addr: 0 }, &GEOMETRY, 65_536)
    }

    #[test]
    fn ublk_requests_are_decoded() {
        assert_eq!(request(0, 3, 8), Ok((Action::Read { len: 4096 }, 1536)));
        assert_eq!(request(1, 0, 1), Ok((Action::Write { len: 512, fua: false }, 0)));
        assert_eq!(request(1 | 1 << 13, 0, 1), Ok((Action::Write { len: 512, fua: true }, 0)));
        // The kernel sends a flush with undefined sectors.
        assert_eq!(request(2 | 1 << 11, u64::MAX, 0), Ok((Action::Flush, 0)));
        assert_eq!(request(3, 8, 2040), Ok((Action::Discard { len: 2040 * 512 }, 4096)));
        let how = |deallocate| Zeroes { deallocate, fua: false, fast_only: false };
        let zeroes = |deallocate| Ok((Action::WriteZeroes { len: 512, how: how(deallocate) }, 512));
        assert_eq!(request(5, 1, 1), zeroes(true));
        assert_eq!(request(5 | 1 << 15, 1, 1), zeroes(false));
        // Flags that are hints are ignored.
        assert_eq!(request(1 << 8 | 1 << 11, 0, 1), Ok((Action::Read { len: 512 }, 0)));
    }

    #[test]
    fn invalid_ublk_requests_are_refused() {
        for (op, start, sectors) in [
            (0, 2048, 1),
            (1, 2047, 2),
            (0, u64::MAX, 1),
            (1, u64::MAX / 512, 8),
            (3, 2048, 1),
            (5, 0, 2049),
            // The requests have more data than the buffer.
            (0, 0, 129),
            (1, 0, u32::MAX),
        ] {
            assert_eq!(request(op, start, sectors), Err(Errno::INVAL), "{op} {start} {sectors}");
        }
        for op in [4, 6, 13, 18, 255] {
            assert_eq!(request(op, 0, 1), Err(Errno::OPNOTSUPP), "{op}");
        }
    }
}
