//! Read, Write and Compare: commands of one request with data, and all commands on blocks with
//! metadata.
//!
//! # Blocks with metadata
//!
//! This part decodes commands with metadata and protection information. The disk transfers,
//! inserts, strips and checks them (`Queue::submit_with_metadata`). All of these commands take the
//! slow path.

use super::data_pointer::{fields, resolve_flagged, uses_extended, weigh_pieces};
use super::engine::{Engine, Limits, Started};
use super::exclusive_state::{Marked, blocks_of};
use super::in_flight::{InFlight, Kind, Owner};
use super::multi_step::FuaRead;
use super::namespace::{NamespaceQueue, status_of};
use super::quota::cost;
use crate::admin::features::EXTENDED_FORMATS;
use crate::queue::Permit;
use shadowbell_disk::{Metadata, MetadataBuffer, MetadataFormat, Op, Request, Submitted};
use shadowbell_memory::{DataPointerError, Segments, View};
use shadowbell_spec::Sqe;
use shadowbell_spec::nvm::{PRINFO_PRACT, RwFields};
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::sqe::{Fuse, Psdt};
use shadowbell_spec::status::Status;
use std::sync::atomic::Ordering;

/// Builds the request of a Read, Write or Compare; resolves its data into `data`.
#[inline(always)]
fn prepare<const SLOW: bool>(
    op: NvmOpcode,
    sqe: &Sqe,
    namespace: &NamespaceQueue,
    (view, limits, write_through): (&View, Limits, bool),
    data: &mut Segments,
) -> Result<(Request, Kind), Status> {
    let rw = RwFields::decode(sqe);
    let (offset, len) = namespace.range(&rw)?;
    // A short transfer (not `SLOW`) is below every possible MDTS.
    if SLOW && len > limits.max_transfer as u64 {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    let (op, kind) = match op {
        NvmOpcode::Read => (Op::Read, Kind::Read(len)),
        NvmOpcode::Write if namespace.is_read_only() => {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
        }
        NvmOpcode::Write => (Op::Write { fua: rw.fua || write_through }, Kind::Write(len)),
        _ => (Op::Compare, Kind::Read(len)),
    };
    let (bytes, write) = (len as usize, matches!(op, Op::Read));
    // A fast-path command has no flags, so it has PRPs and is not fused.
    if !SLOW {
        view.resolve_prps(sqe.prp1(), sqe.prp2(), bytes, limits.page_size, write, data)
            .map_err(|e| e.status())?;
    } else {
        resolve_flagged(view, sqe, bytes, limits.page_size, write, data)?;
    }
    Ok((Request { op, offset, len }, kind))
}

impl Engine {
    /// Executes Read, Write or Compare. Nearly all commands take this path, so each lookup is done
    /// only once, and errors are built out of line.
    #[inline(always)]
    pub(super) fn transfer<const SLOW: bool>(
        &mut self,
        op: NvmOpcode,
        sqe: &Sqe,
        sq: usize,
        permit: Permit,
    ) -> Started {
        // Flags may select an SGL or a fused operation, or be invalid.
        if !SLOW && sqe.flags != 0 {
            return self.slow_transfer(op, sqe, sq, permit);
        }
        let index = (sqe.nsid as usize).wrapping_sub(1);
        let Some(namespace) = self.namespaces.get_mut(index) else {
            return Started::Failed(permit, Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr());
        };
        if !SLOW && namespace.is_long(sqe) {
            return self.slow_transfer(op, sqe, sq, permit);
        }
        let with = (&self.view, self.limits, self.write_through);
        let (request, kind) = match prepare::<SLOW>(op, sqe, namespace, with, &mut self.scratch) {
            Ok(prepared) => prepared,
            Err(status) => return Started::Failed(permit, status),
        };
        // PRPs are whole pages, but an SGL may consist of many short pieces, so the weight of SGL
        // pieces is computed.
        let (mut pieces, mut places) = (0, 0);
        if SLOW {
            let Self { scratch, spans, budget, .. } = self;
            let weight = (self.may_touch != u64::MAX).then_some(self.new_span_weight);
            (pieces, places) = weigh_pieces(scratch, spans, budget, weight, sqe);
        }
        if SLOW && Self::is_fua_read(namespace, &request, sqe, self.write_through) {
            self.touch(places);
            return self.begin_fua_read(index, (request, None), (kind, pieces), sqe, sq, permit);
        }
        let tag = self.in_flight.next_tag();
        let submitted = namespace.queue.submit(tag, &request, &mut self.scratch);
        if SLOW {
            self.touch(places);
        }
        match submitted {
            Submitted::Done(Ok(())) => {
                // The segments are not cleared: most likely, the next command uses the same view of
                // the host's memory, so the view's reference count does not change.
                self.count(kind);
                if SLOW { self.finish_long(request.len, permit) } else { Started::Done(permit) }
            }
            Submitted::Done(Err(error)) => {
                self.scratch.rewind();
                Started::Failed(permit, status_of(error, kind.is_reading()))
            }
            Submitted::Pending => {
                let owner = Owner::Command { sq, cid: sqe.cid, permit };
                let entry = InFlight::new(owner, index, kind).at(sqe.nsid, sqe.cdw10_11());
                if !SLOW {
                    pieces = (request.len >> 12) as usize + 2;
                    if self.may_touch != u64::MAX {
                        pieces += self.touch_short(sqe, request.len) * (self.new_span_weight - 1);
                    }
                }
                self.register_in_flight(tag, request.len, entry.in_pieces(pieces));
                Started::Pending
            }
        }
    }

    /// Upper bound of the memory spans that a short command's PRPs touch for the first time.
    #[cold]
    #[inline(never)]
    fn touch_short(&mut self, sqe: &Sqe, len: u64) -> usize {
        let (view, page) = (&self.view, self.limits.page_size as u64);
        let first = page - (sqe.prp1() & (page - 1));
        let (second, listed) = match len.saturating_sub(first) {
            0 => (None, 0),
            left if left <= page => (Some(sqe.prp2()), 0),
            // The addresses of the further pages are in a PRP list. The list is not read again, so
            // each page counts as new.
            left => (Some(sqe.prp2()), left.div_ceil(page) as usize),
        };
        let places = std::iter::once(sqe.prp1()).chain(second);
        self.spans.touch(places.filter_map(|iova| Some((view.address(iova)?, 1)))) + listed
    }

    /// Slow path of [`transfer`](Self::transfer): commands that need further checks or are long.
    #[inline(never)]
    fn slow_transfer(&mut self, op: NvmOpcode, sqe: &Sqe, sq: usize, permit: Permit) -> Started {
        if sqe.fuse() != Fuse::Normal {
            return Started::Fused(permit);
        }
        if let Some(status) = self.refusal(op, sqe) {
            return Started::Failed(permit, status);
        }
        match self.marks_of(op, sqe) {
            Marked::No => match self.format_of(sqe) {
                None => self.transfer::<true>(op, sqe, sq, permit),
                Some((index, format)) => {
                    self.transfer_with_metadata(op, (index, &format), sqe, sq, permit)
                }
            },
            Marked::Park => self.park(sqe, sq, permit),
            Marked::Fails => Started::Failed(permit, Status::UNRECOVERED_READ),
        }
    }

    /// Consequence of uncorrectable blocks for a command.
    pub(super) fn marks_of(&mut self, op: NvmOpcode, sqe: &Sqe) -> Marked {
        match blocks_of(&self.namespaces, sqe) {
            Some((index, blocks)) if self.namespaces[index].is_marked() => {
                self.check_marks(op, index, blocks)
            }
            _ => Marked::No,
        }
    }

    /// True if a request reads with Force Unit Access and the disk may have uncommitted data.
    pub(super) fn is_fua_read(
        namespace: &NamespaceQueue,
        request: &Request,
        sqe: &Sqe,
        write_through: bool,
    ) -> bool {
        matches!(request.op, Op::Read | Op::Compare | Op::Verify)
            && namespace.has_volatile_cache()
            && !write_through
            && RwFields::decode(sqe).fua
    }

    /// Starts a read with Force Unit Access: first a flush, then the read itself. The read's data,
    /// in `pieces` pieces, are in `scratch`.
    pub(super) fn begin_fua_read(
        &mut self,
        index: usize,
        request: (Request, Option<Metadata>),
        (kind, pieces): (Kind, usize),
        sqe: &Sqe,
        sq: usize,
        permit: Permit,
    ) -> Started {
        let tag = self.in_flight.next_tag();
        let owner = Owner::Command { sq, cid: sqe.cid, permit };
        let entry = InFlight::new(owner, index, kind).at(sqe.nsid, sqe.cdw10_11());
        self.in_flight.insert(tag, entry.in_pieces(pieces).of_requests());
        self.last_tag = tag;
        let data =
            std::mem::replace(&mut self.scratch, self.pooled_lists.pop().unwrap_or_default());
        let Self { fua_reads, namespaces, in_flight, .. } = self;
        let command = FuaRead::new((tag, sq), index, request, data);
        fua_reads.begin(command, namespaces, in_flight);
        self.budget -= cost::of_request(0);
        self.review_quota();
        Started::Pending
    }

    /// Charges the cost of a long command that has succeeded, and returns its outcome.
    #[inline(never)]
    pub(super) fn finish_long(&mut self, bytes: u64, permit: Permit) -> Started {
        self.budget -= cost::of_command(bytes);
        Started::DoneLong(permit)
    }

    /// Registers a request of `bytes` bytes as in flight on a disk.
    pub(super) fn register_in_flight(&mut self, tag: u32, bytes: u64, entry: InFlight) {
        self.scratch = self.pooled_lists.pop().unwrap_or_default();
        self.last_tag = tag;
        self.in_flight.insert(tag, entry);
        self.budget -= cost::of_request(bytes);
        self.review_quota();
    }
}

/// Commands on blocks with metadata.
impl Engine {
    /// Index and metadata format of a command's namespace, if it exists and has metadata.
    pub(super) fn format_of(&self, sqe: &Sqe) -> Option<(usize, MetadataFormat)> {
        let index = (sqe.nsid as usize).checked_sub(1)?;
        Some((index, *self.namespaces.get(index)?.metadata()?))
    }

    /// Checks that the host has enabled this format (Base 2.1, "Host Behavior Support", LBAFEE).
    fn check_format(&self, format: &MetadataFormat) -> Result<(), Status> {
        let knows = self.copy_formats.load(Ordering::Relaxed) & EXTENDED_FORMATS != 0;
        if uses_extended(format) && !knows {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr());
        }
        Ok(())
    }

    /// Metadata parameters of a Write Zeroes or Verify; `None` if the blocks have no metadata.
    pub(super) fn metadata_without_data(
        &self,
        op: NvmOpcode,
        sqe: &Sqe,
    ) -> Result<Option<Metadata>, Status> {
        let Some((index, format)) = self.format_of(sqe) else { return Ok(None) };
        self.check_format(&format)?;
        let rw = RwFields::decode(sqe);
        self.namespaces[index].range(&rw)?;
        let prinfo = match op {
            // Write Zeroes checks no protection information.
            NvmOpcode::WriteZeroes => rw.prinfo & PRINFO_PRACT,
            _ => rw.prinfo,
        };
        let fields = fields(&format, sqe, (prinfo, rw.slba))?;
        if op == NvmOpcode::Verify && fields.prinfo & PRINFO_PRACT != 0 {
            return Err(Status::INVALID_PROTECTION_INFORMATION.with_dnr());
        }
        Ok(Some(Metadata { fields, buffer: MetadataBuffer::None }))
    }

    /// Builds the request of a Read, Write or Compare; resolves data and metadata into `scratch`.
    fn prepare_with_metadata(
        &mut self,
        op: NvmOpcode,
        (index, format): (usize, &MetadataFormat),
        sqe: &Sqe,
    ) -> Result<(Request, Kind, Metadata), Status> {
        self.check_format(format)?;
        let namespace = &self.namespaces[index];
        let rw = RwFields::decode(sqe);
        let (offset, len) = namespace.range(&rw)?;
        let fields = fields(format, sqe, (rw.prinfo, rw.slba))?;
        let makes = fields.prinfo & PRINFO_PRACT != 0;
        if op == NvmOpcode::Compare && makes {
            return Err(Status::INVALID_PROTECTION_INFORMATION.with_dnr());
        }
        // With PRACT, the controller inserts or strips the protection information. If the metadata
        // consist only of protection information, no metadata are transferred.
        let buffer = match makes && format.protection_size() == usize::from(format.size) {
            true => MetadataBuffer::None,
            false if format.extended => MetadataBuffer::Extended,
            false => MetadataBuffer::Behind,
        };
        let metadata_len = u64::from(rw.blocks()) * u64::from(format.size);
        let in_data = if buffer == MetadataBuffer::Extended { metadata_len } else { 0 };
        let bytes = len + in_data;
        if bytes > self.limits.max_transfer as u64 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let (request_op, kind) = match op {
            NvmOpcode::Read => (Op::Read, Kind::Read(len)),
            NvmOpcode::Write if namespace.is_read_only() => {
                return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
            }
            NvmOpcode::Write => (Op::Write { fua: rw.fua || self.write_through }, Kind::Write(len)),
            _ => (Op::Compare, Kind::Read(len)),
        };
        let (page, writes) = (self.limits.page_size, request_op == Op::Read);
        resolve_flagged(&self.view, sqe, bytes as usize, page, writes, &mut self.scratch)?;
        if buffer == MetadataBuffer::Behind {
            let is_wrong = match sqe.psdt() {
                Psdt::Prp => sqe.mptr & 3 != 0,
                Psdt::SglContiguousMetadata => false,
                // An SGL segment at MPTR is not supported: SGLS (Identify Controller) does not
                // announce it.
                Psdt::SglSegmentMetadata | Psdt::Reserved => true,
            };
            if is_wrong {
                return Err(Status::INVALID_FIELD.with_dnr());
            }
            // An SGL may be longer than the data. The excess is ignored.
            self.scratch.truncate(len as usize);
            let extended = self.scratch.extend(&self.view, sqe.mptr, metadata_len as usize);
            extended.map_err(|fault| DataPointerError::from(fault).status())?;
        }
        let request = Request { op: request_op, offset, len };
        Ok((request, kind, Metadata { fields, buffer }))
    }

    /// Executes Read, Write or Compare on blocks with metadata.
    #[cold]
    #[inline(never)]
    fn transfer_with_metadata(
        &mut self,
        op: NvmOpcode,
        (index, format): (usize, &MetadataFormat),
        sqe: &Sqe,
        sq: usize,
        permit: Permit,
    ) -> Started {
        let prepared = self.prepare_with_metadata(op, (index, format), sqe);
        let (request, kind, metadata) = match prepared {
            Ok(prepared) => prepared,
            Err(status) => return Started::Failed(permit, status),
        };
        let Self { scratch, spans, budget, .. } = self;
        let weight = (self.may_touch != u64::MAX).then_some(self.new_span_weight);
        let (pieces, places) = weigh_pieces(scratch, spans, budget, weight, sqe);
        let namespace: &NamespaceQueue = &self.namespaces[index];
        if Self::is_fua_read(namespace, &request, sqe, self.write_through) {
            self.touch(places);
            let request = (request, Some(metadata));
            return self.begin_fua_read(index, request, (kind, pieces), sqe, sq, permit);
        }
        let tag = self.in_flight.next_tag();
        let queue = &mut self.namespaces[index].queue;
        let submitted = queue.submit_with_metadata(tag, &request, &metadata, &mut self.scratch);
        self.touch(places);
        match submitted {
            Submitted::Done(Ok(())) => {
                self.count(kind);
                self.finish_long(request.len, permit)
            }
            Submitted::Done(Err(error)) => {
                self.scratch.rewind();
                Started::Failed(permit, status_of(error, kind.is_reading()))
            }
            Submitted::Pending => {
                let owner = Owner::Command { sq, cid: sqe.cid, permit };
                let entry = InFlight::new(owner, index, kind).at(sqe.nsid, sqe.cdw10_11());
                self.register_in_flight(tag, request.len, entry.in_pieces(pieces));
                Started::Pending
            }
        }
    }
}
