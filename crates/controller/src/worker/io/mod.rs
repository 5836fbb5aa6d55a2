//! I/O commands: from a fetched entry to requests of a disk, and back to a status.

mod copy;
mod in_flight;

use crate::namespace::Namespace;
use crate::stats::IoStats;
use copy::Copies;
use in_flight::{Owner, Slot};
use shadowbell_backend::{DiskError, Op, Queue, Request, Submitted};
use shadowbell_memory::{Ring, Segments, View};
use shadowbell_spec::Sqe;
use shadowbell_spec::nvm::{DSM_MAX_RANGES, DatasetManagement, RwFields};
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::sqe::{Fuse, NSID_ALL, Psdt};
use shadowbell_spec::status::Status;
use std::io;
use std::os::fd::BorrowedFd;

const READ: u8 = NvmOpcode::Read as u8;
const WRITE: u8 = NvmOpcode::Write as u8;

/// One worker's part of a namespace.
pub(crate) struct Space {
    blocks: u64,
    block_shift: u32,
    read_only: bool,
    queue: Box<dyn Queue>,
}

impl Space {
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
    fn range(&self, rw: &RwFields) -> Result<(u64, u64), Status> {
        match rw.end() {
            Some(end) if end <= self.blocks => {}
            _ => return Err(Status::LBA_OUT_OF_RANGE.with_dnr()),
        }
        Ok((rw.slba << self.block_shift, u64::from(rw.blocks()) << self.block_shift))
    }

    pub(crate) fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.wake_fd()
    }

    pub(crate) fn wakes_by_edges(&self) -> bool {
        self.queue.wakes_by_edges()
    }
}

/// A command that ended: which one, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    /// Index of the submission queue in the tenant's list.
    pub(crate) sq: usize,
    pub(crate) cid: u16,
    pub(crate) status: Status,
    pub(crate) nsid: u32,
    pub(crate) lba: u64,
    /// Command specific result, dword 0.
    pub(crate) dw0: u32,
}

/// What kind of command a slot belongs to, for the statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read(u64),
    Write(u64),
    Copy(u64),
    /// Reads for the disk alone: no command that a host reads with.
    Verify(u64),
    Other,
}

impl Kind {
    /// Whether an error of the medium is one of reading.
    fn is_reading(self) -> bool {
        matches!(self, Self::Read(_) | Self::Verify(_))
    }
}

/// Everything that executing I/O commands for one controller takes, on one worker.
pub(crate) struct Engine {
    view: View,
    pub(crate) page_size: usize,
    pub(crate) max_transfer: usize,
    write_through: bool,
    /// Whether a disk wants to be told of requests before they come.
    wants_hints: bool,
    spaces: Vec<Space>,
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    /// Commands that were under way and have ended.
    ended: u64,
    scratch: Segments,
    /// Emptied buffers, kept for their room.
    spare: Vec<Segments>,
    copies: Copies,
    pub(crate) stats: IoStats,
}

/// Medium errors and full storage, as the specification names them.
fn status_of(error: DiskError, reading: bool) -> Status {
    match error {
        DiskError::OutOfRange => Status::LBA_OUT_OF_RANGE.with_dnr(),
        DiskError::ReadOnly => Status::NAMESPACE_WRITE_PROTECTED.with_dnr(),
        DiskError::NoSpace => Status::CAPACITY_EXCEEDED.with_dnr(),
        DiskError::CompareFailed => Status::COMPARE_FAILURE.with_dnr(),
        DiskError::BadBuffer => Status::INTERNAL,
        DiskError::Unsupported => Status::INVALID_OPCODE.with_dnr(),
        DiskError::Cancelled => Status::ABORT_REQUESTED,
        DiskError::Device(bits) => Status::from_bits(bits),
        DiskError::Io(_) if reading => Status::UNRECOVERED_READ,
        DiskError::Io(_) => Status::WRITE_FAULT,
        _ => Status::INTERNAL,
    }
}

fn is_media_error(status: Status) -> bool {
    let code = status.code();
    code == Status::UNRECOVERED_READ || code == Status::WRITE_FAULT
}

/// Resolves the data pointer of a command, `len` bytes, whatever its flags say that it is.
#[inline(never)]
fn resolve_flagged(
    view: &View,
    sqe: &Sqe,
    len: usize,
    page: usize,
    write: bool,
    into: &mut Segments,
) -> Result<(), Status> {
    if sqe.fuse() != Fuse::Normal {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    match sqe.psdt() {
        Psdt::Prp => view.resolve_prps(sqe.prp1(), sqe.prp2(), len, page, write, into),
        Psdt::SglContiguousMetadata | Psdt::SglSegmentMetadata => {
            view.resolve_sgl(&sqe.dptr, len, write, into)
        }
        Psdt::Reserved => return Err(Status::INVALID_FIELD.with_dnr()),
    }
    .map_err(|e| e.status())
}

impl Engine {
    pub(crate) fn new(
        view: View,
        page_size: usize,
        max_transfer: usize,
        spaces: Vec<Space>,
    ) -> Self {
        let wants_hints = spaces.iter().any(|space| space.queue.wants_prefetch_hints());
        Self {
            wants_hints,
            view,
            page_size,
            max_transfer,
            write_through: false,
            spaces,
            slots: Vec::new(),
            free: Vec::new(),
            ended: 0,
            scratch: Segments::new(),
            spare: Vec::new(),
            copies: Copies::default(),
            stats: IoStats::default(),
        }
    }

    pub(crate) fn view(&self) -> &View {
        &self.view
    }

    pub(crate) fn spaces(&self) -> &[Space] {
        &self.spaces
    }

    /// How many requests the disks have in hand.
    pub(crate) fn pending(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// How many commands that were under way have ended.
    pub(crate) fn ended(&self) -> u64 {
        self.ended
    }

    /// Commands that are started from now on go through `view`. The view until now is given back;
    /// commands in flight have it still.
    pub(crate) fn change_view(&mut self, view: View) -> View {
        self.scratch.clear();
        self.spaces.iter_mut().for_each(|space| space.queue.memory_changed(view.table()));
        std::mem::replace(&mut self.view, view)
    }

    /// With `write_through`, every write that is started from now on is forced to the medium.
    #[inline]
    pub(crate) fn set_write_through(&mut self, write_through: bool) {
        self.write_through = write_through;
    }

    /// Whether [`tell`](Self::prefetch_hint) is of use.
    #[inline]
    pub(crate) fn wants_prefetch_hints(&self) -> bool {
        self.wants_hints
    }

    /// Tells a disk of the command in entry `index`, which is to be started after `ahead - 1` others
    /// (and read again then), if there is one: nothing about it is known to be right yet.
    #[inline]
    pub(crate) fn prefetch_hint(&self, ring: &Ring<{ Sqe::SIZE }>, index: u32, ahead: u32) {
        let op = match ring.peek::<u8>(index, 0) {
            Some(READ) => Op::Read,
            Some(WRITE) => Op::Write { fua: false },
            _ => return,
        };
        let Some(nsid) = ring.peek::<u32>(index, 4) else { return };
        let Some(slba) = ring.peek::<u64>(index, 40) else { return };
        let Some(nlb) = ring.peek::<u16>(index, 48) else { return };
        if let Some(space) = self.spaces.get((nsid as usize).wrapping_sub(1))
            && slba < space.blocks
        {
            let len = (usize::from(nlb) + 1) << space.block_shift;
            space.queue.prefetch_hint(op, slba << space.block_shift, len, ahead);
        }
    }

    /// Starts a command. Whether it has succeeded already; if not, [`reap`](Self::reap) says when
    /// and how it ends.
    ///
    /// # Errors
    /// It has ended, with this status.
    #[inline(always)]
    pub(crate) fn start(&mut self, sqe: &Sqe, sq: usize) -> Result<bool, Status> {
        match sqe.opcode {
            READ => self.transfer(NvmOpcode::Read, sqe, sq),
            WRITE => self.transfer(NvmOpcode::Write, sqe, sq),
            _ => self.less_common(sqe, sq).and_then(|ended| match ended {
                Some(status) if !status.is_success() => Err(status),
                ended => Ok(ended.is_some()),
            }),
        }
    }

    #[cold]
    pub(crate) fn count_error(&mut self, status: Status) {
        self.stats.errors += 1;
        self.stats.media_errors += u64::from(is_media_error(status));
    }

    #[inline]
    fn count(&mut self, kind: Kind) {
        match kind {
            Kind::Read(bytes) => {
                self.stats.reads += 1;
                self.stats.bytes_read += bytes;
            }
            Kind::Write(bytes) => {
                self.stats.writes += 1;
                self.stats.bytes_written += bytes;
            }
            Kind::Copy(bytes) => {
                self.stats.copies += 1;
                self.stats.bytes_copied += bytes;
            }
            Kind::Verify(bytes) => {
                self.stats.others += 1;
                self.stats.bytes_read += bytes;
            }
            Kind::Other => self.stats.others += 1,
        }
    }

    #[inline]
    fn space(&self, nsid: u32) -> Result<usize, Status> {
        // NSIDs are 1, 2, 3, ... without holes.
        let index = (nsid as usize).wrapping_sub(1);
        if index < self.spaces.len() {
            Ok(index)
        } else {
            Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr())
        }
    }

    /// Read, Write and Compare: one request with data. The way that nearly all commands go, so what
    /// it needs is looked up once and errors are made elsewhere.
    #[inline(always)]
    fn transfer(&mut self, op: NvmOpcode, sqe: &Sqe, sq: usize) -> Result<bool, Status> {
        let tag = self.next_tag();
        let index = (sqe.nsid as usize).wrapping_sub(1);
        let Some(space) = self.spaces.get_mut(index) else {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr());
        };
        let rw = RwFields::decode(sqe);
        let (offset, len) = space.range(&rw)?;
        if len > self.max_transfer as u64 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let (op, kind) = match op {
            NvmOpcode::Read => (Op::Read, Kind::Read(len)),
            NvmOpcode::Write if space.read_only => {
                return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
            }
            NvmOpcode::Write => (Op::Write { fua: rw.fua || self.write_through }, Kind::Write(len)),
            _ => (Op::Compare, Kind::Read(len)),
        };
        let (view, data) = (&self.view, &mut self.scratch);
        let (bytes, write) = (len as usize, matches!(op, Op::Read));
        // No flags: PRPs, and not fused.
        if sqe.flags == 0 {
            view.resolve_prps(sqe.prp1(), sqe.prp2(), bytes, self.page_size, write, data)
                .map_err(|e| e.status())?;
        } else {
            resolve_flagged(view, sqe, bytes, self.page_size, write, data)?;
        }
        match space.queue.submit(tag, &Request { op, offset, len }, data) {
            Submitted::Done(Ok(())) => {
                // The view is kept: the next command comes through the same, most likely.
                self.scratch.rewind();
                self.count(kind);
                Ok(true)
            }
            Submitted::Done(Err(error)) => {
                self.scratch.rewind();
                Err(status_of(error, kind.is_reading()))
            }
            Submitted::Pending => {
                self.keep(tag, index, sqe, sq, kind);
                Ok(false)
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn less_common(&mut self, sqe: &Sqe, sq: usize) -> Result<Option<Status>, Status> {
        let op = NvmOpcode::try_from(sqe.opcode).map_err(|_| Status::INVALID_OPCODE.with_dnr())?;
        if !matches!(sqe.fuse(), Fuse::Normal) {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        match op {
            NvmOpcode::Compare => Ok(self.transfer(op, sqe, sq)?.then_some(Status::SUCCESS)),
            NvmOpcode::Flush => self.flush(sqe, sq),
            NvmOpcode::DatasetManagement => self.dataset_management(sqe, sq),
            NvmOpcode::Copy => self.copy(sqe, sq).map(|()| None),
            NvmOpcode::WriteZeroes | NvmOpcode::Verify => {
                let index = self.space(sqe.nsid)?;
                let rw = RwFields::decode(sqe);
                let (offset, len) = self.spaces[index].range(&rw)?;
                let (op, kind) = if op == NvmOpcode::Verify {
                    (Op::Verify, Kind::Verify(len))
                } else if self.spaces[index].read_only {
                    return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
                } else {
                    (
                        Op::WriteZeroes { deallocate: rw.deac, fua: rw.fua || self.write_through },
                        Kind::Other,
                    )
                };
                Ok(self.submit(index, Request { op, offset, len }, sqe, sq, kind))
            }
            _ => Err(Status::INVALID_OPCODE.with_dnr()),
        }
    }

    /// A Flush of one namespace, or of all of them (Identify Controller, VWC: broadcast NSID).
    fn flush(&mut self, sqe: &Sqe, sq: usize) -> Result<Option<Status>, Status> {
        let request = Request { op: Op::Flush, offset: 0, len: 0 };
        if sqe.nsid != NSID_ALL {
            let index = self.space(sqe.nsid)?;
            return Ok(self.submit(index, request, sqe, sq, Kind::Other));
        }
        let parts = (0..self.spaces.len()).map(|index| (index, request)).collect();
        Ok(self.submit_parts(parts, Owner::Command { sq, cid: sqe.cid }, sqe.nsid, None))
    }

    fn dataset_management(&mut self, sqe: &Sqe, sq: usize) -> Result<Option<Status>, Status> {
        let index = self.space(sqe.nsid)?;
        let dsm = DatasetManagement::decode(sqe);
        let count = dsm.ranges().min(DSM_MAX_RANGES);
        let (view, data) = (&self.view, &mut self.scratch);
        resolve_flagged(view, sqe, count * 16, self.page_size, false, data)?;
        let mut raw = [0u8; DSM_MAX_RANGES * 16];
        let copied = self.scratch.read_into(0, &mut raw[..count * 16]);
        self.scratch.clear();
        copied.ok_or(Status::INTERNAL)?;
        let space = &self.spaces[index];
        let mut parts = Vec::with_capacity(count);
        for range in raw[..count * 16].chunks_exact(16) {
            let (_, rest) = range.split_at(4);
            let (blocks, slba) = rest.split_at(4);
            let blocks = u64::from(u32::from_le_bytes(blocks.try_into().unwrap_or_default()));
            let slba = u64::from_le_bytes(slba.try_into().unwrap_or_default());
            match slba.checked_add(blocks) {
                Some(end) if end <= space.blocks => {}
                _ => return Err(Status::LBA_OUT_OF_RANGE.with_dnr()),
            }
            if blocks != 0 {
                let (offset, len) = (slba << space.block_shift, blocks << space.block_shift);
                parts.push((index, Request { op: Op::Discard, offset, len }));
            }
        }
        // The other attributes are hints about access patterns, which we have no use for.
        if !dsm.ad {
            self.count(Kind::Other);
            return Ok(Some(Status::SUCCESS));
        }
        if space.read_only {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
        }
        Ok(self.submit_parts(parts, Owner::Command { sq, cid: sqe.cid }, sqe.nsid, None))
    }

    /// Hands one request without data to a disk.
    fn submit(
        &mut self,
        index: usize,
        request: Request,
        sqe: &Sqe,
        sq: usize,
        kind: Kind,
    ) -> Option<Status> {
        let tag = self.next_tag();
        match self.spaces[index].queue.submit(tag, &request, &mut self.scratch) {
            Submitted::Done(Ok(())) => {
                self.count(kind);
                Some(Status::SUCCESS)
            }
            Submitted::Done(Err(error)) => Some(status_of(error, kind.is_reading())),
            Submitted::Pending => {
                self.keep(tag, index, sqe, sq, kind);
                None
            }
        }
    }

    /// Takes note of a command that a disk has in hand now, with its data.
    fn keep(&mut self, tag: u32, space: usize, sqe: &Sqe, sq: usize, kind: Kind) {
        self.scratch = self.spare.pop().unwrap_or_default();
        self.occupy(
            tag,
            Slot {
                owner: Owner::Command { sq, cid: sqe.cid },
                space,
                left: 1,
                status: Status::SUCCESS,
                kind,
                nsid: sqe.nsid,
                lba: sqe.cdw10_11(),
                abort: None,
                latch: None,
            },
        );
    }

    /// A command of several requests: it ends with the last of them, in the first error.
    fn submit_parts(
        &mut self,
        parts: Vec<(usize, Request)>,
        owner: Owner,
        nsid: u32,
        latch: Option<crate::latch::Latch>,
    ) -> Option<Status> {
        let parent = self.next_tag();
        self.occupy(
            parent,
            Slot {
                owner,
                space: 0,
                left: 1, // ourselves, so that it does not end while parts are added
                status: Status::SUCCESS,
                kind: Kind::Other,
                nsid,
                lba: 0,
                abort: None,
                latch,
            },
        );
        for (index, request) in parts {
            let tag = self.next_tag();
            let outcome = self.spaces[index].queue.submit(tag, &request, &mut self.scratch);
            match outcome {
                Submitted::Done(Ok(())) => {}
                Submitted::Done(Err(error)) => self.fail(parent, status_of(error, false)),
                Submitted::Pending => {
                    if let Some(slot) = self.slot(parent) {
                        slot.left += 1;
                    }
                    self.scratch = self.spare.pop().unwrap_or_default();
                    self.occupy(
                        tag,
                        Slot {
                            owner: Owner::Part { parent },
                            space: index,
                            left: 1,
                            status: Status::SUCCESS,
                            kind: Kind::Other,
                            nsid,
                            lba: 0,
                            abort: None,
                            latch: None,
                        },
                    );
                }
            }
        }
        let slot = self.slot(parent)?;
        slot.left -= 1;
        if slot.left > 0 {
            return None;
        }
        let slot = self.release(parent)?;
        if slot.status.is_success() {
            self.count(Kind::Other);
        }
        Some(slot.status)
    }

    /// Flushes every namespace, for a shutdown; `latch` is dropped when that is done.
    pub(crate) fn flush_all(&mut self, latch: crate::latch::Latch) {
        let request = Request { op: Op::Flush, offset: 0, len: 0 };
        let parts = (0..self.spaces.len())
            .filter(|index| !self.spaces[*index].read_only)
            .map(|index| (index, request))
            .collect();
        if let Some(status) = self.submit_parts(parts, Owner::Internal, NSID_ALL, Some(latch))
            && !status.is_success()
        {
            tracing::warn!(%status, "flush at shutdown failed");
        }
    }
}
