//! I/O commands: from a fetched entry to requests of a disk, and back to a status.

use crate::namespace::Namespace;
use crate::stats::IoStats;
use crate::worker::message::AbortReply;
use disk::{DiskError, Op, Queue, Request, Submitted};
use memory::{Segments, View};
use spec::Sqe;
use spec::nvm::{DSM_MAX_RANGES, DatasetManagement, RwFields};
use spec::opcode::NvmOpcode;
use spec::sqe::{Fuse, NSID_ALL, Psdt};
use spec::status::Status;
use std::io;
use std::os::fd::BorrowedFd;

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

    pub(crate) fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.wake_fd()
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
}

/// What kind of command a slot belongs to, for the statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read(u64),
    Write(u64),
    Other,
}

#[derive(Debug)]
enum Owner {
    /// The slot is a command of submission queue `sq`.
    Command { sq: usize, cid: u16 },
    /// The slot is one of several requests of the command in another slot.
    Part { parent: u32 },
    /// The slot is a flush that the controller wants for itself.
    Internal,
}

/// A command or a part of one that is under way.
#[derive(Debug)]
struct Slot {
    owner: Owner,
    space: usize,
    /// Requests that have not ended yet.
    left: u32,
    status: Status,
    kind: Kind,
    nsid: u32,
    lba: u64,
    abort: Option<AbortReply>,
    /// Held until an internal request is done.
    #[allow(dead_code, reason = "dropped with the slot")]
    latch: Option<crate::latch::Latch>,
}

/// Everything that executing I/O commands for one controller takes, on one worker.
pub(crate) struct Engine {
    pub(crate) view: View,
    pub(crate) page_size: usize,
    pub(crate) max_transfer: usize,
    write_through: bool,
    spaces: Vec<Space>,
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    scratch: Segments,
    /// Emptied buffers, kept for their room.
    spare: Vec<Segments>,
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
        DiskError::Io(_) if reading => Status::UNRECOVERED_READ,
        DiskError::Io(_) => Status::WRITE_FAULT,
    }
}

fn is_media_error(status: Status) -> bool {
    let code = status.code();
    code == Status::UNRECOVERED_READ || code == Status::WRITE_FAULT
}

impl Engine {
    pub(crate) fn new(
        view: View,
        page_size: usize,
        max_transfer: usize,
        spaces: Vec<Space>,
    ) -> Self {
        Self {
            view,
            page_size,
            max_transfer,
            write_through: false,
            spaces,
            slots: Vec::new(),
            free: Vec::new(),
            scratch: Segments::new(),
            spare: Vec::new(),
            stats: IoStats::default(),
        }
    }

    pub(crate) fn spaces(&self) -> &[Space] {
        &self.spaces
    }

    /// How many requests the disks have in hand.
    pub(crate) fn pending(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Starts a command; with `write_through` every write is forced to the medium. `Some` if it has ended already; otherwise [`reap`](Self::reap) says when.
    #[inline]
    pub(crate) fn start(&mut self, sqe: &Sqe, sq: usize, write_through: bool) -> Option<Ended> {
        self.write_through = write_through;
        let outcome = match NvmOpcode::try_from(sqe.opcode) {
            Ok(op @ (NvmOpcode::Read | NvmOpcode::Write)) => self.transfer(op, sqe, sq),
            Ok(op) => self.less_common(op, sqe, sq),
            Err(_) => Err(Status::INVALID_OPCODE.with_dnr()),
        };
        let status = match outcome {
            Ok(None) => return None,
            Ok(Some(status)) | Err(status) => status,
        };
        if !status.is_success() {
            self.count_error(status);
        }
        Some(Ended { sq, cid: sqe.cid, status, nsid: sqe.nsid, lba: sqe.cdw10_11() })
    }

    #[cold]
    fn count_error(&mut self, status: Status) {
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

    /// The byte range of the disk that `rw` names.
    #[inline]
    fn range(&self, index: usize, rw: &RwFields) -> Result<(u64, u64), Status> {
        let space = &self.spaces[index];
        match rw.end() {
            Some(end) if end <= space.blocks => {}
            _ => return Err(Status::LBA_OUT_OF_RANGE.with_dnr()),
        }
        Ok((rw.slba << space.block_shift, u64::from(rw.blocks()) << space.block_shift))
    }

    /// Resolves the data pointer of `sqe`, `len` bytes, into the scratch buffer.
    #[inline]
    fn resolve(&mut self, sqe: &Sqe, len: usize, write: bool) -> Result<(), Status> {
        match sqe.psdt() {
            Psdt::Prp => self.view.resolve_prps(
                sqe.prp1(),
                sqe.prp2(),
                len,
                self.page_size,
                write,
                &mut self.scratch,
            ),
            Psdt::SglContiguousMetadata | Psdt::SglSegmentMetadata => {
                self.view.resolve_sgl(&sqe.dptr, len, write, &mut self.scratch)
            }
            Psdt::Reserved => return Err(Status::INVALID_FIELD.with_dnr()),
        }
        .map_err(|e| e.status())
    }

    /// Read, Write and Compare: one request with data.
    #[inline]
    fn transfer(&mut self, op: NvmOpcode, sqe: &Sqe, sq: usize) -> Result<Option<Status>, Status> {
        let index = self.space(sqe.nsid)?;
        if sqe.fuse() != Fuse::Normal {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let rw = RwFields::decode(sqe);
        let (offset, len) = self.range(index, &rw)?;
        if len > self.max_transfer as u64 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let (op, kind) = match op {
            NvmOpcode::Read => (Op::Read, Kind::Read(len)),
            NvmOpcode::Write if self.spaces[index].read_only => {
                return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
            }
            NvmOpcode::Write => (Op::Write { fua: rw.fua || self.write_through }, Kind::Write(len)),
            _ => (Op::Compare, Kind::Read(len)),
        };
        self.resolve(sqe, len as usize, op == Op::Read)?;
        let outcome = self.submit(index, Request { op, offset, len }, sqe, sq, kind);
        self.scratch.clear();
        Ok(outcome)
    }

    fn less_common(
        &mut self,
        op: NvmOpcode,
        sqe: &Sqe,
        sq: usize,
    ) -> Result<Option<Status>, Status> {
        if sqe.fuse() != Fuse::Normal {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        match op {
            NvmOpcode::Compare => self.transfer(op, sqe, sq),
            NvmOpcode::Flush => self.flush(sqe, sq),
            NvmOpcode::DatasetManagement => self.dataset_management(sqe, sq),
            NvmOpcode::WriteZeroes | NvmOpcode::Verify => {
                let index = self.space(sqe.nsid)?;
                let rw = RwFields::decode(sqe);
                let (offset, len) = self.range(index, &rw)?;
                let (op, kind) = if op == NvmOpcode::Verify {
                    (Op::Verify, Kind::Read(len))
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
        self.resolve(sqe, count * 16, false)?;
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

    /// Hands one request to a disk, with the scratch buffer as its data.
    #[inline]
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
            Submitted::Done(Err(error)) => {
                Some(status_of(error, !matches!(kind, Kind::Write(_) | Kind::Other)))
            }
            Submitted::Pending => {
                self.scratch = self.spare.pop().unwrap_or_default();
                self.occupy(
                    tag,
                    Slot {
                        owner: Owner::Command { sq, cid: sqe.cid },
                        space: index,
                        left: 1,
                        status: Status::SUCCESS,
                        kind,
                        nsid: sqe.nsid,
                        lba: sqe.cdw10_11(),
                        abort: None,
                        latch: None,
                    },
                );
                None
            }
        }
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

    fn next_tag(&mut self) -> u32 {
        match self.free.last() {
            Some(tag) => *tag,
            None => {
                let tag = self.slots.len() as u32;
                self.slots.push(None);
                self.free.push(tag);
                tag
            }
        }
    }

    fn occupy(&mut self, tag: u32, slot: Slot) {
        // `next_tag` left it at the end of the free list.
        debug_assert_eq!(self.free.last(), Some(&tag));
        self.free.pop();
        if let Some(place) = self.slots.get_mut(tag as usize) {
            *place = Some(slot);
        }
    }

    fn slot(&mut self, tag: u32) -> Option<&mut Slot> {
        self.slots.get_mut(tag as usize)?.as_mut()
    }

    fn release(&mut self, tag: u32) -> Option<Slot> {
        let slot = self.slots.get_mut(tag as usize)?.take()?;
        self.free.push(tag);
        Some(slot)
    }

    fn fail(&mut self, tag: u32, status: Status) {
        if let Some(slot) = self.slot(tag)
            && slot.status.is_success()
        {
            slot.status = status;
        }
    }

    /// Hands all that was submitted to the system.
    #[inline]
    pub(crate) fn commit(&mut self) {
        if self.pending() != 0 {
            self.spaces.iter_mut().for_each(|space| space.queue.commit());
        }
    }

    /// Calls `ended` for every command that has ended.
    pub(crate) fn reap(&mut self, mut ended: impl FnMut(Ended)) {
        let mut spaces = std::mem::take(&mut self.spaces);
        for space in &mut spaces {
            if space.queue.pending() == 0 {
                continue;
            }
            space.queue.reap(&mut |tag, outcome, mut data| {
                data.clear();
                self.spare.push(data);
                if let Some(command) = self.end(tag, outcome) {
                    ended(command);
                }
            });
        }
        self.spaces = spaces;
    }

    fn end(&mut self, tag: u32, outcome: Result<(), DiskError>) -> Option<Ended> {
        if let Err(error) = outcome {
            let reading = matches!(self.slot(tag)?.kind, Kind::Read(_));
            self.fail(tag, status_of(error, reading));
        }
        let slot = self.slot(tag)?;
        slot.left = slot.left.saturating_sub(1);
        if slot.left > 0 {
            return None;
        }
        let slot = self.release(tag)?;
        if let Some(reply) = slot.abort {
            reply.answer(slot.status.code() == Status::ABORT_REQUESTED);
        }
        match slot.owner {
            Owner::Part { parent } => {
                if !slot.status.is_success() {
                    self.fail(parent, slot.status);
                }
                // The parent's own end, which has no outcome of its own.
                self.end(parent, Ok(()))
            }
            Owner::Internal => None,
            Owner::Command { sq, cid } => {
                if slot.status.is_success() {
                    self.count(slot.kind);
                } else {
                    self.count_error(slot.status);
                }
                Some(Ended { sq, cid, status: slot.status, nsid: slot.nsid, lba: slot.lba })
            }
        }
    }

    /// Asks the disks to give up the command (`sq`, `cid`) soon; `reply` hears whether it was
    /// aborted.
    pub(crate) fn abort(&mut self, sq: usize, cid: u16, reply: AbortReply) {
        let found = self.slots.iter().position(|slot| {
            matches!(slot, Some(Slot { owner: Owner::Command { sq: s, cid: c }, .. })
                if (*s, *c) == (sq, cid))
        });
        let Some(found) = found else { return reply.answer(false) };
        self.cancel(|tag, slot| {
            tag == found || matches!(slot.owner, Owner::Part { parent } if parent as usize == found)
        });
        if let Some(slot) = self.slot(found as u32) {
            slot.abort = Some(reply);
        }
    }

    /// Asks the disks to give up every command of submission queue `sq`, or of all queues.
    pub(crate) fn cancel_all(&mut self, of: Option<usize>) {
        match of {
            None => self.cancel(|_, _| true),
            Some(queue) => {
                let parents: Vec<bool> = self
                    .slots
                    .iter()
                    .map(|slot| {
                        matches!(slot, Some(Slot { owner: Owner::Command { sq, .. }, .. })
                            if *sq == queue)
                    })
                    .collect();
                self.cancel(|_, slot| match slot.owner {
                    Owner::Command { sq, .. } => sq == queue,
                    Owner::Part { parent } => {
                        parents.get(parent as usize).copied().unwrap_or(false)
                    }
                    Owner::Internal => false,
                });
            }
        }
    }

    fn cancel(&mut self, which: impl Fn(usize, &Slot) -> bool) {
        for (tag, slot) in self.slots.iter().enumerate() {
            if let Some(slot) = slot
                && which(tag, slot)
            {
                self.spaces[slot.space].queue.cancel(tag as u32);
            }
        }
    }
}
