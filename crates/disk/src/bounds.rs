//! Range, write-protection and buffer checks that every disk applies to a request.

use crate::info::DiskInfo;
use crate::request::{DiskError, Op, Request};
use shadowbell_memory::Segments;

/// Limits of a disk against which its requests are checked. Each queue computes them once.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    bytes: u64,
    /// Mask of the bits that must be zero in offsets and lengths.
    unaligned: u64,
    read_only: bool,
}

impl DiskInfo {
    /// Computes the limits for requests to this disk.
    #[must_use]
    pub fn bounds(&self) -> Bounds {
        let unaligned = u64::from(self.block_size) - 1;
        Bounds { bytes: self.bytes(), unaligned, read_only: self.read_only }
    }
}

impl Request {
    /// Checks the request against the limits of its disk and against its buffer. The range must lie
    /// inside the disk on block boundaries. If the request writes, the disk must be writable. The
    /// buffer must be long enough and have the right direction. The buffer may be longer than the
    /// request.
    ///
    /// # Errors
    /// [`DiskError::OutOfRange`], [`DiskError::ReadOnly`] or [`DiskError::BadBuffer`].
    #[inline]
    pub fn check(&self, bounds: &Bounds, data: &Segments) -> Result<(), DiskError> {
        let inside = self.offset.checked_add(self.len).is_some_and(|end| end <= bounds.bytes)
            && (self.offset | self.len) & bounds.unaligned == 0;
        // Fast path: nearly all requests are valid reads.
        if matches!(self.op, Op::Read)
            && inside
            && data.len() as u64 >= self.len
            && data.is_writable()
        {
            return Ok(());
        }
        self.check_any(inside, bounds, data)
    }

    #[inline(never)]
    fn check_any(&self, inside: bool, bounds: &Bounds, data: &Segments) -> Result<(), DiskError> {
        let short = (data.len() as u64) < self.len;
        match self.op {
            Op::Flush => Ok(()),
            _ if !inside => Err(DiskError::OutOfRange),
            Op::Read if short || !data.is_writable() => Err(DiskError::BadBuffer),
            Op::Compare if short => Err(DiskError::BadBuffer),
            Op::Write { .. }
            | Op::CompareAndWrite { .. }
            | Op::WriteZeroes { .. }
            | Op::Discard
            | Op::Append { .. }
            | Op::Zone { .. }
                if bounds.read_only =>
            {
                Err(DiskError::ReadOnly)
            }
            Op::Write { .. } | Op::Append { .. } if short => Err(DiskError::BadBuffer),
            // The length of one block is `unaligned + 1`, because the block size is a power of two.
            Op::CompareAndWrite { .. } if self.len != bounds.unaligned + 1 => {
                Err(DiskError::OutOfRange)
            }
            Op::CompareAndWrite { .. } if ((data.len() / 2) as u64) < self.len => {
                Err(DiskError::BadBuffer)
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_memory::Mapping;

    fn info(read_only: bool) -> DiskInfo {
        DiskInfo {
            block_size: 4096,
            blocks: 16,
            read_only,
            volatile_cache: false,
            discard: true,
            granularity: 1,
            metadata: None,
            zoned: None,
        }
    }

    fn check(
        info: &DiskInfo,
        op: Op,
        offset: u64,
        len: u64,
        data: &Segments,
    ) -> Result<(), DiskError> {
        Request { op, offset, len }.check(&info.bounds(), data)
    }

    #[test]
    fn ranges_lie_inside_on_block_boundaries() {
        let data = Segments::from_bytes(&Mapping::anonymous(16 * 4096).unwrap().bytes());
        let info = info(false);
        for op in [Op::Read, Op::Compare, Op::Verify, Op::Discard, Op::Write { fua: false }] {
            for (offset, len, fits) in [
                (0, 16 * 4096, true),
                (16 * 4096, 0, true),
                (15 * 4096, 4096, true),
                (15 * 4096, 8192, false),
                (17 * 4096, 0, false),
                (512, 4096, false),
                (0, 512, false),
                (u64::MAX - 4095, 4096, false),
                (0, u64::MAX - 4095, false),
            ] {
                let expected = if fits { Ok(()) } else { Err(DiskError::OutOfRange) };
                assert_eq!(check(&info, op, offset, len, &data), expected, "{op:?} {offset}+{len}");
            }
        }
        assert_eq!(check(&info, Op::Flush, u64::MAX, 1, &Segments::new()), Ok(()));
    }

    #[test]
    fn a_compare_and_write_is_of_one_block_with_data_for_both() {
        let data = Segments::from_bytes(&Mapping::anonymous(3 * 4096).unwrap().bytes());
        let short = Segments::from_bytes(&Mapping::anonymous(4096).unwrap().bytes());
        let op = Op::CompareAndWrite { fua: false };
        let ours = info(false);
        assert_eq!(check(&ours, op, 8192, 4096, &data), Ok(()));
        assert_eq!(check(&ours, op, 8192, 4096, &short), Err(DiskError::BadBuffer));
        for len in [0, 8192] {
            assert_eq!(check(&ours, op, 0, len, &data), Err(DiskError::OutOfRange), "{len}");
        }
        assert_eq!(check(&ours, op, 16 * 4096, 4096, &data), Err(DiskError::OutOfRange));
        assert_eq!(check(&info(true), op, 0, 4096, &data), Err(DiskError::ReadOnly));
    }

    #[test]
    fn read_only_disks_refuse_writes() {
        let data = Segments::from_bytes(&Mapping::anonymous(4096).unwrap().bytes());
        let zeroes = Op::WriteZeroes { deallocate: true, fua: true };
        for op in [Op::Write { fua: true }, zeroes, Op::Discard] {
            assert_eq!(check(&info(true), op, 0, 4096, &data), Err(DiskError::ReadOnly));
            assert_eq!(check(&info(false), op, 0, 4096, &data), Ok(()));
        }
        for op in [Op::Read, Op::Compare, Op::Verify, Op::Flush] {
            assert_eq!(check(&info(true), op, 0, 4096, &data), Ok(()));
        }
    }

    #[test]
    fn buffers_fit_the_request() {
        let data = Segments::from_bytes(&Mapping::anonymous(4096).unwrap().bytes());
        for op in [Op::Read, Op::Compare, Op::Write { fua: false }] {
            assert_eq!(check(&info(false), op, 0, 4096, &data), Ok(()));
            assert_eq!(check(&info(false), op, 0, 8192, &data), Err(DiskError::BadBuffer));
        }
        let owner = Mapping::shared("ro", 4096).unwrap();
        let fd = owner.fd().unwrap();
        let ro = Mapping::from_fd(fd, 0, 4096, shadowbell_memory::Protection::Read).unwrap();
        let ro = Segments::from_bytes(&ro.bytes());
        assert_eq!(check(&info(false), Op::Read, 0, 4096, &ro), Err(DiskError::BadBuffer));
        assert_eq!(check(&info(false), Op::Compare, 0, 4096, &ro), Ok(()));
        assert_eq!(check(&info(false), Op::Verify, 0, 8192, &Segments::new()), Ok(()));
    }
}
