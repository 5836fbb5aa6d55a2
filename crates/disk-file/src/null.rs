//! Null disk: discards writes and completes immediately.

use shadowbell_disk::{
    Bounds, CheckpointError, Disk, DiskError, DiskInfo, Extent, Op, Queue, ReportExtent, Request,
    ResizeError, Submitted, format_size,
};
use shadowbell_memory::Segments;
use shadowbell_state::Descriptors;
use std::io;
use std::sync::Arc;

/// Disk of any size that stores nothing and completes each request immediately. A benchmark on it
/// measures everything except the storage.
///
/// A read leaves the data buffer unchanged. This leaks nothing, because the buffer is memory of the
/// host itself. Compare and Verify succeed. With `read_zeroes`, a read fills the buffer with
/// zeroes, and Compare succeeds only against zeroes.
#[derive(Clone, Debug)]
pub struct NullDisk {
    info: DiskInfo,
    read_zeroes: bool,
}

impl NullDisk {
    /// Creates a disk of `blocks` logical blocks of `block_size` bytes (512 or 4096).
    #[must_use]
    pub fn new(blocks: u64, block_size: u32) -> Self {
        Self {
            info: DiskInfo {
                block_size,
                blocks,
                read_only: false,
                volatile_cache: false,
                discard: true,
                granularity: 1,
                metadata: None,
                zoned: None,
            },
            read_zeroes: false,
        }
    }

    /// Sets whether reads fill the buffer with zeroes instead of leaving it unchanged.
    #[must_use]
    pub fn with_read_zeroes(mut self, read_zeroes: bool) -> Self {
        self.read_zeroes = read_zeroes;
        self
    }

    /// Sets whether the disk refuses writes.
    #[must_use]
    pub fn with_read_only(mut self, read_only: bool) -> Self {
        self.info.read_only = read_only;
        self
    }
}

impl Disk for NullDisk {
    fn info(&self) -> DiskInfo {
        self.info.clone()
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(NullQueue { bounds: self.info.bounds(), read_zeroes: self.read_zeroes }))
    }

    fn name(&self) -> String {
        format!("null:{}", format_size(self.info.bytes()))
    }

    fn extents(&self, _: u64, len: u64, report: &mut ReportExtent<'_>) {
        // Without `read_zeroes`, a read returns the old content of the buffer. So the range must
        // not be reported as zeroes.
        if len != 0 {
            report(Extent { len, allocated: !self.read_zeroes });
        }
    }

    fn with_writes(&self, accepted: bool) -> Result<Arc<dyn Disk>, ResizeError> {
        Ok(Arc::new(self.clone().with_read_only(!accepted)))
    }

    fn resized(&self, bytes: Option<u64>) -> Result<Arc<dyn Disk>, ResizeError> {
        let bytes = bytes.unwrap_or(self.info.bytes());
        let info = self.info.with_bytes(bytes).ok_or_else(|| ResizeError::Size {
            disk: self.name(),
            bytes,
            block_size: self.info.block_size,
        })?;
        Ok(Arc::new(Self { info, read_zeroes: self.read_zeroes }))
    }

    fn checkpoint(&self, _: &mut Descriptors) -> Result<serde_json::Value, CheckpointError> {
        Ok(serde_json::Value::Null)
    }
}

/// One thread's queue on a null disk. It validates requests, and fills read buffers if
/// `read_zeroes` is true.
struct NullQueue {
    bounds: Bounds,
    read_zeroes: bool,
}

impl Queue for NullQueue {
    #[inline]
    fn submit(&mut self, _tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        if let Err(error) = request.check(&self.bounds, data) {
            return Submitted::Done(Err(error));
        }
        if self.read_zeroes {
            return Submitted::Done(zeroes(request, data));
        }
        Submitted::Done(Ok(()))
    }
}

#[inline(never)]
fn zeroes(request: &Request, data: &Segments) -> Result<(), DiskError> {
    let len = usize::try_from(request.len).map_err(|_| DiskError::BadBuffer)?;
    match request.op {
        Op::Read => data.fill(0, len, 0).ok_or(DiskError::BadBuffer),
        Op::Compare => {
            let mut piece = [0; 4096];
            let mut done = 0;
            while done < len {
                let n = (len - done).min(piece.len());
                data.read_into(done, &mut piece[..n]).ok_or(DiskError::BadBuffer)?;
                if piece[..n].iter().any(|b| *b != 0) {
                    return Err(DiskError::CompareFailed);
                }
                done += n;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_memory::Mapping;

    fn run(disk: &NullDisk, op: Op, data: &mut Segments) -> Result<(), DiskError> {
        let mut queue = disk.queue().unwrap();
        match queue.submit(0, &Request { op, offset: 4096, len: 4096 }, data) {
            Submitted::Done(result) => result,
            Submitted::Pending => panic!("a null disk leaves nothing pending"),
        }
    }

    #[test]
    fn null_disk_reads_change_the_buffer_only_with_read_zeroes() {
        let bytes = Mapping::anonymous(4096).unwrap().bytes();
        bytes.fill(0, 4096, 7).unwrap();
        let mut data = Segments::from_bytes(&bytes);
        let disk = NullDisk::new(1 << 31, 512);
        assert_eq!(disk.name(), "null:1TiB");
        assert_eq!(run(&disk, Op::Read, &mut data), Ok(()));
        assert_eq!(run(&disk, Op::Compare, &mut data), Ok(()));
        assert_eq!(bytes.read::<u8>(4095), Some(7));
        let disk = disk.with_read_zeroes(true);
        assert_eq!(run(&disk, Op::Compare, &mut data), Err(DiskError::CompareFailed));
        assert_eq!(run(&disk, Op::Write { fua: true }, &mut data), Ok(()));
        assert_eq!(run(&disk, Op::Read, &mut data), Ok(()));
        assert_eq!(bytes.read::<u8>(4095), Some(0));
        assert_eq!(run(&disk, Op::Compare, &mut data), Ok(()));
        bytes.write(4095, &1u8).unwrap();
        assert_eq!(run(&disk, Op::Compare, &mut data), Err(DiskError::CompareFailed));
    }

    #[test]
    fn another_size_is_another_disk() {
        let disk = NullDisk::new(2, 4096).with_read_zeroes(true).with_read_only(true);
        let info = disk.resized(Some(12_288)).unwrap().info();
        assert_eq!((info.blocks, info.block_size, info.read_only), (3, 4096, true));
        assert_eq!(disk.resized(None).unwrap().info(), disk.info());
        for bytes in [0, 512, 4097] {
            assert!(matches!(disk.resized(Some(bytes)), Err(ResizeError::Size { .. })), "{bytes}");
        }
    }

    #[test]
    fn every_operation_is_checked() {
        let disk = NullDisk::new(1, 4096);
        let mut data = Segments::from_bytes(&Mapping::anonymous(4096).unwrap().bytes());
        assert_eq!(run(&disk, Op::Read, &mut data), Err(DiskError::OutOfRange));
        let disk = NullDisk::new(2, 4096);
        assert_eq!(run(&disk, Op::Read, &mut data), Ok(()));
        assert_eq!(run(&disk, Op::Read, &mut Segments::new()), Err(DiskError::BadBuffer));
        assert_eq!(run(&disk, Op::Flush, &mut Segments::new()), Ok(()));
        let disk = disk.with_read_only(true);
        assert_eq!(run(&disk, Op::Discard, &mut data), Err(DiskError::ReadOnly));
    }
}
