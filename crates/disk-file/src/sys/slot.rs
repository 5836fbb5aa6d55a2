//! Slot of a ring: one call, and the memory that the call uses.

use super::call::{HOLE, Kind, NVME_STATUS};
use shadowbell_memory::{Segments, SharedBytes};

/// Maximum number of `iovec`s per call (UIO_MAXIOV). If the data have more segments, the call
/// transfers only the first ones, and further calls follow.
const MAX_IOVECS: usize = 1024;
/// Maximum number of bytes per call. It fits in the kernel's 32-bit length, and is a multiple of
/// the page size.
const MAX_BYTES: u64 = 1 << 30;

/// Operation on the file. The range of the file is passed separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// Reads from the file into memory.
    Read(Memory),
    /// Writes from memory to the file. With `dsync`, the data are on stable storage afterwards.
    /// With `atomic`, the write is atomic across a loss of power.
    Write { from: Memory, dsync: bool, atomic: bool },
    /// Punches a hole in the file.
    Punch,
    /// Zeroes the range and keeps its blocks.
    ZeroRange,
    /// Deallocates a range of a namespace.
    Deallocate,
}

/// Buffer that a call uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// The command's data.
    Data,
    /// Buffer that the queue has assigned to the slot: a bounce buffer, or the shared buffer of
    /// zeroes.
    Own,
}

/// State of a call, with the memory that it uses.
pub(super) struct Slot<T> {
    pub(super) generation: u32,
    /// True if the kernel may be using the memory of this slot.
    pub(super) busy: bool,
    pub(super) task: Option<T>,
    pub(super) data: Segments,
    pub(super) own: Option<SharedBytes>,
    pub(super) iovecs: Vec<libc::iovec>,
    /// Parameters of the call. They are stored, because another thread repeats the call if io_uring
    /// returns it unexecuted.
    pub(super) kind: Kind,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) nowait: bool,
}

impl<T> Slot<T> {
    /// Fills `iovecs` with the memory of `call`, from byte `skip` of its buffer on. Returns the
    /// kind of the call.
    pub(super) fn gather_for(&mut self, call: Call, skip: usize, len: u64) -> Kind {
        match call {
            Call::Read(memory) => {
                self.gather(memory, skip, len, true);
                return Kind::Read;
            }
            Call::Write { from, dsync, atomic } => {
                self.gather(from, skip, len, false);
                let dsync = if dsync { libc::RWF_DSYNC } else { 0 };
                let atomic = if atomic { libc::RWF_ATOMIC } else { 0 };
                return Kind::Write { flags: dsync | atomic };
            }
            _ => self.iovecs.clear(),
        }
        match call {
            Call::Deallocate => Kind::Deallocate,
            Call::ZeroRange => {
                Kind::Allocate { mode: libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE }
            }
            _ => Kind::Allocate { mode: HOLE },
        }
    }

    /// Converts the result of an NVMe command (0 or a status) to the result of a call.
    pub(super) fn of_command(&self, result: i32) -> i32 {
        match result {
            0 => i32::try_from(self.len).unwrap_or(i32::MAX),
            status if status > 0 => -(NVME_STATUS + status),
            result => result,
        }
    }

    /// Fills `iovecs` with at most `len` bytes of a buffer, from byte `skip` on. `iovecs` stays
    /// empty if the buffer does not exist, or if the call `write`s to memory and the buffer is
    /// read-only.
    fn gather(&mut self, memory: Memory, skip: usize, len: u64, write: bool) {
        self.iovecs.clear();
        let mut left = len.min(MAX_BYTES) as usize;
        let mut skip = skip;
        let mut add = |address: usize, len: usize| {
            if skip >= len {
                skip -= len;
            } else if left > 0 && self.iovecs.len() < MAX_IOVECS {
                let n = (len - skip).min(left);
                let iov_base = std::ptr::with_exposed_provenance_mut(address + skip);
                self.iovecs.push(libc::iovec { iov_base, iov_len: n });
                skip = 0;
                left -= n;
            }
        };
        match memory {
            Memory::Data if !write || self.data.is_writable() => {
                for piece in self.data.pieces() {
                    add(piece.address(), piece.len());
                }
            }
            Memory::Own => {
                if let Some(own) = self.own.as_ref().filter(|o| !write || o.is_writable()) {
                    add(own.address(), own.len());
                }
            }
            Memory::Data => {}
        }
    }
}
