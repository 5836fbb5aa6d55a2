//! Requests of the kernel for the only file of the file system.

use super::wire::{Attributes, Extent, Fields, Reply, Request, change, opcode, open};
use rustix::fs::OFlags;
use rustix::io::Errno;
use shadowbell_block::{Geometry, Zeroes};
use std::time::SystemTime;

/// Time in seconds for which the kernel may cache the file's attributes. It is short because the
/// file's size changes when the disk is resized.
const REMEMBER: u64 = 1;
/// Maximum number of bytes of one `copy_file_range(2)` call, which cannot be interrupted. The
/// program calls again for the rest.
const MAX_COPY: u64 = 64 << 20;
/// File type bits of a regular file.
const REGULAR: u32 = 0o100_000;

/// Mode bits of `fallocate(2)`.
mod mode {
    pub(super) const KEEP_SIZE: u32 = 0x01;
    pub(super) const PUNCH_HOLE: u32 = 0x02;
    pub(super) const ZERO_RANGE: u32 = 0x10;
}

/// Values of `whence` for `lseek(2)`.
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

/// Disk operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Read(Extent),
    /// Write, whose data came with the request.
    Write(Extent),
    Flush,
    WriteZeroes {
        offset: u64,
        len: u64,
        how: Zeroes,
    },
    Copy {
        from: u64,
        to: u64,
        len: u32,
    },
    /// Search from `offset` to `end` for data or for a hole.
    Seek {
        offset: u64,
        end: u64,
        is_hole: bool,
    },
}

/// Next step for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The request is answered at once.
    Reply(Reply),
    /// The kernel expects no answer.
    Nothing,
    /// The request is answered after the disk operation.
    Do(Action),
}

/// File that represents a disk. Requests cannot change its size, and the kernel does not cache it.
pub(super) struct DiskFile {
    geometry: Geometry,
    attributes: Attributes,
}

impl DiskFile {
    /// Creates the file. `owner` is its user and group, by default those of the process.
    pub(super) fn new(geometry: Geometry, owner: Option<(u32, u32)>) -> Self {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (uid, gid) = owner.unwrap_or_else(|| {
            (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw())
        });
        let attributes = Attributes {
            size: geometry.bytes,
            time: (since.as_secs(), since.subsec_nanos()),
            mode: REGULAR | if geometry.read_only { 0o400 } else { 0o600 },
            uid,
            gid,
            block_size: geometry.block_size.max(4096),
        };
        Self { geometry, attributes }
    }

    fn size(&self) -> u64 {
        self.geometry.bytes
    }

    /// Next step for `request`. `data` is the number of data bytes that came with a write.
    pub(super) fn ask(&self, request: &Request<'_>, data: usize) -> Step {
        let Request { opcode, unique, fields } = *request;
        let outcome = match opcode {
            opcode::READ => Extent::decode(fields).map(|extent| self.read(unique, extent)),
            opcode::WRITE => Extent::decode(fields)
                .filter(|extent| extent.len as usize <= data)
                .map(|extent| self.write(unique, extent)),
            opcode::INIT => Some(Step::Reply(Reply::init(unique, fields))),
            opcode::GETATTR => Some(self.about(unique)),
            opcode::SETATTR => self.set_attributes(unique, fields),
            opcode::OPEN => self.open(unique, fields),
            opcode::FSYNC => Some(Step::Do(Action::Flush)),
            opcode::FALLOCATE => self.allocate(unique, fields),
            opcode::LSEEK => self.seek(unique, fields),
            opcode::COPY_FILE_RANGE => self.copy(unique, fields),
            // The close of a file does not flush, because `close(2)` does not guarantee durability.
            opcode::FLUSH | opcode::RELEASE | opcode::DESTROY => {
                Some(Step::Reply(Reply::done(unique)))
            }
            opcode::STATFS => {
                let block = self.attributes.block_size;
                let blocks = self.size() / u64::from(block);
                Some(Step::Reply(Reply::file_system(unique, blocks, block)))
            }
            // The root is a regular file, which has no entries.
            opcode::LOOKUP => Some(refused(unique, Errno::NOTDIR)),
            opcode::FORGET | opcode::BATCH_FORGET => Some(Step::Nothing),
            // After ENOSYS, the kernel does not send the operation again. This includes INTERRUPT,
            // so a request in flight is never interrupted.
            _ => Some(refused(unique, Errno::NOSYS)),
        };
        outcome.unwrap_or_else(|| refused(unique, Errno::IO))
    }

    /// Returns how many of the `len` bytes from `offset` are inside the file.
    fn clip(&self, offset: u64, len: u64) -> u64 {
        len.min(self.size().saturating_sub(offset))
    }

    fn clipped(&self, Extent { offset, len }: Extent) -> Extent {
        let there = self.clip(offset, len.into());
        Extent { offset, len: u32::try_from(there).unwrap_or(len) }
    }

    fn read(&self, unique: u64, extent: Extent) -> Step {
        match self.clipped(extent) {
            Extent { len: 0, .. } => Step::Reply(Reply::done(unique)),
            extent => Step::Do(Action::Read(extent)),
        }
    }

    fn write(&self, unique: u64, extent: Extent) -> Step {
        match self.clipped(extent) {
            Extent { len: 0, .. } => refused(unique, Errno::NOSPC),
            extent => Step::Do(Action::Write(extent)),
        }
    }

    fn about(&self, unique: u64) -> Step {
        Step::Reply(Reply::attributes(unique, &self.attributes, REMEMBER))
    }

    fn set_attributes(&self, unique: u64, mut fields: Fields<'_>) -> Option<Step> {
        let (wanted, _padding, _handle) = (fields.u32()?, fields.u32()?, fields.u64()?);
        let size = fields.u64()?;
        let is_owned = wanted & (change::MODE | change::UID | change::GID) == 0;
        let is_kept = wanted & change::SIZE == 0 || size == self.size();
        // Changes of the times are accepted and ignored.
        Some(if is_owned && is_kept { self.about(unique) } else { refused(unique, Errno::PERM) })
    }

    fn open(&self, unique: u64, mut fields: Fields<'_>) -> Option<Step> {
        let flags = OFlags::from_bits_retain(fields.u32()?);
        // RWMODE contains the bits of O_WRONLY and O_RDWR; O_RDONLY has no bit.
        if self.geometry.read_only && flags.intersects(OFlags::RWMODE) {
            return Some(refused(unique, Errno::ROFS));
        }
        let flags = open::DIRECT_IO | open::PARALLEL_DIRECT_WRITES;
        Some(Step::Reply(Reply::opened(unique, flags)))
    }

    fn allocate(&self, unique: u64, mut fields: Fields<'_>) -> Option<Step> {
        let (_handle, offset, length) = (fields.u64()?, fields.u64()?, fields.u64()?);
        let mode = fields.u32()?;
        let end = offset.saturating_add(length);
        let grows = mode & mode::KEEP_SIZE == 0 && end > self.size();
        let len = self.clip(offset, length);
        let zeroes = |deallocate| {
            let how = Zeroes { deallocate, ..Zeroes::default() };
            Step::Do(Action::WriteZeroes { offset, len, how })
        };
        const PUNCH: u32 = mode::PUNCH_HOLE | mode::KEEP_SIZE;
        const ZERO: u32 = mode::ZERO_RANGE;
        const ZERO_KEEP: u32 = mode::ZERO_RANGE | mode::KEEP_SIZE;
        Some(match mode {
            _ if grows => refused(unique, Errno::NOSPC),
            PUNCH => zeroes(true),
            ZERO | ZERO_KEEP => zeroes(false),
            // An allocation request has no effect, because the disk allocates space itself.
            0 | mode::KEEP_SIZE => Step::Reply(Reply::done(unique)),
            _ => refused(unique, Errno::OPNOTSUPP),
        })
    }

    fn seek(&self, unique: u64, mut fields: Fields<'_>) -> Option<Step> {
        let (_handle, offset, whence) = (fields.u64()?, fields.u64()?, fields.u32()?);
        Some(match whence {
            SEEK_DATA | SEEK_HOLE if offset >= self.size() => refused(unique, Errno::NXIO),
            SEEK_DATA | SEEK_HOLE => {
                let (end, is_hole) = (self.size(), whence == SEEK_HOLE);
                Step::Do(Action::Seek { offset, end, is_hole })
            }
            _ => refused(unique, Errno::INVAL),
        })
    }

    fn copy(&self, unique: u64, mut fields: Fields<'_>) -> Option<Step> {
        let (_handle, from, _file) = (fields.u64()?, fields.u64()?, fields.u64()?);
        let (_handle, to, len) = (fields.u64()?, fields.u64()?, fields.u64()?);
        // Source and target are always this file. Both ranges are cut at the end of the file.
        let there = self.clip(from, len);
        let len = self.clip(to, there).min(MAX_COPY);
        Some(match u32::try_from(len).unwrap_or(u32::MAX) {
            0 if there == 0 => Step::Reply(Reply::written(unique, 0)),
            0 => refused(unique, Errno::NOSPC),
            len => Step::Do(Action::Copy { from, to, len }),
        })
    }
}

fn refused(unique: u64, errno: Errno) -> Step {
    Step::Reply(Reply::error(unique, errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 1 << 20;

    fn file() -> DiskFile {
        let geometry = Geometry {
            bytes: SIZE,
            block_size: 512,
            read_only: false,
            volatile_cache: true,
            write_zeroes: true,
            discard: true,
        };
        DiskFile::new(geometry, None)
    }

    fn ask(opcode: u32, fields: &[u8], data: usize) -> Step {
        file().ask(&Request { opcode, unique: 5, fields: Fields(fields) }, data)
    }

    fn transfer(offset: u64, len: u32) -> Vec<u8> {
        [&0u64.to_ne_bytes()[..], &offset.to_ne_bytes(), &len.to_ne_bytes(), &[0; 20]].concat()
    }

    #[test]
    fn transfers_are_shortened_at_the_end_of_the_file() {
        let extent = |offset, len| Extent { offset, len };
        let read = |offset, len| ask(opcode::READ, &transfer(offset, len), 0);
        let write = |offset, len| ask(opcode::WRITE, &transfer(offset, len), len as usize);
        assert_eq!(read(4, 8), Step::Do(Action::Read(extent(4, 8))));
        assert_eq!(read(SIZE - 3, 8), Step::Do(Action::Read(extent(SIZE - 3, 3))));
        assert_eq!(read(SIZE, 8), Step::Reply(Reply::done(5)));
        assert_eq!(read(u64::MAX, 8), Step::Reply(Reply::done(5)));
        assert_eq!(write(SIZE - 3, 8), Step::Do(Action::Write(extent(SIZE - 3, 3))));
        assert_eq!(write(SIZE, 8), refused(5, Errno::NOSPC));
    }

    #[test]
    fn a_request_that_is_not_whole_is_an_error() {
        let bad = refused(5, Errno::IO);
        for opcode in [
            opcode::READ,
            opcode::WRITE,
            opcode::SETATTR,
            opcode::OPEN,
            opcode::FALLOCATE,
            opcode::LSEEK,
            opcode::COPY_FILE_RANGE,
        ] {
            assert_eq!(ask(opcode, &[0; 3], 4096), bad, "{opcode}");
        }
        // The request has fewer data bytes than its header announces.
        assert_eq!(ask(opcode::WRITE, &transfer(0, 4096), 4095), bad);
    }

    #[test]
    fn unknown_operations_return_enosys_and_forget_gets_no_reply() {
        const INTERRUPT: u32 = 36;
        for opcode in [INTERRUPT, 9999] {
            assert_eq!(ask(opcode, &[], 0), refused(5, Errno::NOSYS));
        }
        for opcode in [opcode::FORGET, opcode::BATCH_FORGET] {
            assert_eq!(ask(opcode, &[], 0), Step::Nothing);
        }
    }
}
