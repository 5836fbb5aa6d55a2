//! A place of a ring for one call at a time, with the memory that the call works on.

use super::call::{HOLE, Kind, NVME_STATUS};
use shadowbell_memory::{Segments, SharedBytes};

/// The most pieces that the kernel takes in one call (UIO_MAXIOV). A transfer of more ends short,
/// and is continued.
const MAX_IOVECS: usize = 1024;
/// The most bytes in one call: what the kernel's 32-bit length holds, in whole pages.
const MAX_BYTES: u64 = 1 << 30;

/// What the kernel is to do with the file, at an offset that comes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// File to memory.
    Read(Memory),
    /// Memory to file; with `dsync`, onto stable storage; with `whole`, all or nothing of it,
    /// should the power go.
    Write { from: Memory, dsync: bool, whole: bool },
    /// Takes the range's blocks out of the file.
    Punch,
    /// Makes the range zeroes and keeps its blocks.
    ZeroRange,
    /// Tells the device that the range's content is not needed: of a namespace.
    Deallocate,
}

/// Which of a slot's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// The command's data.
    Data,
    /// The queue's own buffer, which the slot has for now.
    Own,
}

/// What a ring remembers of a call, and has of it.
pub(super) struct Slot<T> {
    pub(super) generation: u32,
    /// The kernel may be using what is in here.
    pub(super) busy: bool,
    pub(super) task: Option<T>,
    pub(super) data: Segments,
    pub(super) own: Option<SharedBytes>,
    pub(super) iovecs: Vec<libc::iovec>,
    /// The call, for threads to make it if the kernel would have to wait.
    pub(super) kind: Kind,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) nowait: bool,
}

impl<T> Slot<T> {
    /// Lists the pieces that `call` works on, and says what it is to the system.
    pub(super) fn gather_for(&mut self, call: Call, skip: usize, len: u64) -> Kind {
        match call {
            Call::Read(memory) => {
                self.gather(memory, skip, len, true);
                return Kind::Read;
            }
            Call::Write { from, dsync, whole } => {
                self.gather(from, skip, len, false);
                let dsync = if dsync { libc::RWF_DSYNC } else { 0 };
                let whole = if whole { libc::RWF_ATOMIC } else { 0 };
                return Kind::Write { flags: dsync | whole };
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

    /// What a command has come to, as calls have it: io_uring says 0 or a status.
    pub(super) fn of_command(&self, result: i32) -> i32 {
        match result {
            0 => i32::try_from(self.len).unwrap_or(i32::MAX),
            status if status > 0 => -(NVME_STATUS + status),
            result => result,
        }
    }

    /// Lists the pieces of the buffer from `skip`, `len` bytes at most. A buffer that the kernel
    /// is to write and may not, or that is missing, has none.
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
