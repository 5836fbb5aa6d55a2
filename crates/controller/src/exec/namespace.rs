//! One worker's part of a namespace.

use crate::namespace::Namespace;
use shadowbell_backend::{Op, Queue};
use shadowbell_memory::Ring;
use shadowbell_spec::Sqe;
use shadowbell_spec::nvm::RwFields;
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::status::Status;
use std::io;
use std::os::fd::BorrowedFd;

/// A namespace with this worker's queue to its disk.
pub(crate) struct NamespaceQueue {
    pub(super) blocks: u64,
    pub(super) block_shift: u32,
    pub(super) read_only: bool,
    pub(super) queue: Box<dyn Queue>,
}

impl NamespaceQueue {
    pub(crate) fn open(namespace: &Namespace) -> io::Result<Self> {
        Ok(Self {
            blocks: namespace.blocks(),
            block_shift: namespace.block_shift(),
            read_only: namespace.read_only(),
            queue: namespace.disk().queue()?,
        })
    }

    /// The byte range of the disk that `rw` names.
    #[inline]
    pub(super) fn range(&self, rw: &RwFields) -> Result<(u64, u64), Status> {
        match rw.end() {
            Some(end) if end <= self.blocks => {}
            _ => return Err(Status::LBA_OUT_OF_RANGE.with_dnr()),
        }
        Ok((rw.slba << self.block_shift, u64::from(rw.blocks()) << self.block_shift))
    }

    /// How many bytes of data a read or write has.
    #[inline]
    pub(super) fn length(&self, sqe: &Sqe) -> u64 {
        u64::from(RwFields::decode(sqe).blocks()) << self.block_shift
    }

    pub(crate) fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.wake_fd()
    }

    pub(crate) fn wakes_by_edges(&self) -> bool {
        self.queue.wakes_by_edges()
    }
}

/// The namespace `nsid` in `list`: NSIDs are 1, 2, 3, ... without holes.
#[inline]
pub(super) fn index_of(list: &[NamespaceQueue], nsid: u32) -> Result<usize, Status> {
    let index = (nsid as usize).wrapping_sub(1);
    if index < list.len() { Ok(index) } else { Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr()) }
}

/// Gives a disk a hint of the command in entry `index`, which is to be started after `ahead - 1`
/// others (and read again then), if there is one: nothing about it is known to be right yet.
#[inline]
pub(super) fn prefetch_hint(
    list: &[NamespaceQueue],
    ring: &Ring<{ Sqe::SIZE }>,
    index: u32,
    ahead: u32,
) {
    const READ: u8 = NvmOpcode::Read as u8;
    const WRITE: u8 = NvmOpcode::Write as u8;
    let op = match ring.peek::<u8>(index, 0) {
        Some(READ) => Op::Read,
        Some(WRITE) => Op::Write { fua: false },
        _ => return,
    };
    let Some(nsid) = ring.peek::<u32>(index, 4) else { return };
    let Some(slba) = ring.peek::<u64>(index, 40) else { return };
    let Some(nlb) = ring.peek::<u16>(index, 48) else { return };
    if let Some(namespace) = list.get((nsid as usize).wrapping_sub(1))
        && slba < namespace.blocks
    {
        let len = (usize::from(nlb) + 1) << namespace.block_shift;
        namespace.queue.prefetch_hint(op, slba << namespace.block_shift, len, ahead);
    }
}
