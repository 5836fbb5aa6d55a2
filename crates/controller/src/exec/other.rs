//! All commands except Read and Write.

use super::copy::{ALWAYS_ENABLED, ParsedCopy, parse_copy};
use super::engine::{Engine, MAX_PLACES, Started};
use super::exclusive_state::Marked;
use super::in_flight::{InFlight, Kind, Owner};
use super::metadata::submit_any;
use super::multi_step::{FLUSH, MultiStepCommand, Part, piece};
use super::namespace::index_of;
use super::quota::cost;
use super::resolve::read_list;
use super::status::status_of;
use crate::queue::Permit;
use shadowbell_backend::{Metadata, Op, Request, Submitted};
use shadowbell_spec::Sqe;
use shadowbell_spec::nvm::{DSM_MAX_RANGES, DatasetManagement, RwFields};
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::sqe::{Fuse, NSID_ALL};
use shadowbell_spec::status::Status;
use std::sync::atomic::Ordering;

/// Disk requests of a command, with the index of the namespace.
enum Requests {
    One(usize, Request, Kind),
    /// Requests without data; the command ends with the last of them.
    Several(Vec<Part>),
}

impl Engine {
    #[cold]
    #[inline(never)]
    pub(super) fn start_other(&mut self, sqe: &Sqe, sq: usize, permit: Permit) -> Started {
        let Ok(op) = NvmOpcode::try_from(sqe.opcode) else {
            return Started::Failed(permit, Status::INVALID_OPCODE.with_dnr());
        };
        if !matches!(sqe.fuse(), Fuse::Normal) {
            return Started::Fused(permit);
        }
        if sqe.flags != 0 {
            self.touch(MAX_PLACES);
        }
        if let Some(status) = self.refusal(op, sqe) {
            return Started::Failed(permit, status);
        }
        if matches!(op, NvmOpcode::WriteZeroes | NvmOpcode::Verify) {
            match self.marks_of(op, sqe) {
                Marked::No => {}
                Marked::Park => return self.park(sqe, sq, permit),
                Marked::Fails => return Started::Failed(permit, Status::UNRECOVERED_READ),
            }
        }
        let metadata = match op {
            NvmOpcode::WriteZeroes | NvmOpcode::Verify => self.metadata_without_data(op, sqe),
            _ => Ok(None),
        };
        let metadata = match metadata {
            Ok(metadata) => metadata,
            Err(status) => return Started::Failed(permit, status),
        };
        let requests = match op {
            // Zones require sequential writes, so marking blocks inside of a zone is not supported.
            NvmOpcode::WriteUncorrectable if self.zones_of(sqe.nsid).is_some() => {
                Err(Status::INVALID_OPCODE.with_dnr())
            }
            NvmOpcode::ZoneManagementSend
            | NvmOpcode::ZoneManagementReceive
            | NvmOpcode::ZoneAppend => return self.zoned(op, sqe, sq, permit),
            NvmOpcode::WriteUncorrectable => return self.write_uncorrectable(sqe, sq, permit),
            NvmOpcode::Compare => return self.transfer::<false>(op, sqe, sq, permit),
            NvmOpcode::Copy => return self.copy(sqe, sq, permit),
            NvmOpcode::Flush => self.flush(sqe),
            NvmOpcode::DatasetManagement => self.dataset_management(sqe),
            NvmOpcode::WriteZeroes | NvmOpcode::Verify => {
                self.check_zones(op, sqe).and_then(|()| self.without_data(op, sqe))
            }
            NvmOpcode::ReservationRegister
            | NvmOpcode::ReservationReport
            | NvmOpcode::ReservationAcquire
            | NvmOpcode::ReservationRelease => return self.reservation(op, sqe, sq, permit),
            _ => Err(Status::INVALID_OPCODE.with_dnr()),
        };
        match requests {
            Err(status) => Started::Failed(permit, status),
            Ok(Requests::One(index, request, kind))
                if Self::is_fua_read(
                    &self.namespaces[index],
                    &request,
                    sqe,
                    self.write_through,
                ) =>
            {
                self.scratch.rewind();
                self.begin_fua_read(index, (request, metadata), (kind, 0), sqe, sq, permit)
            }
            Ok(Requests::One(index, request, kind)) => {
                let longest = self.namespaces[index].queue.longest_inline();
                if piece(&request, longest) == request.len {
                    self.submit(index, (&request, metadata), kind, sqe, sq, permit)
                } else {
                    let lba = sqe.cdw10_11();
                    self.begin((vec![(index, request)], metadata), (kind, lba), sqe, sq, permit)
                }
            }
            Ok(Requests::Several(parts)) => {
                self.begin((parts, None), (Kind::Other, 0), sqe, sq, permit)
            }
        }
    }

    /// Request of Write Zeroes or Verify, which have no data.
    fn without_data(&self, op: NvmOpcode, sqe: &Sqe) -> Result<Requests, Status> {
        let index = index_of(&self.namespaces, sqe.nsid)?;
        let namespace = &self.namespaces[index];
        let rw = RwFields::decode(sqe);
        let (offset, len) = namespace.range(&rw)?;
        if op == NvmOpcode::Verify {
            let request = Request { op: Op::Verify, offset, len };
            return Ok(Requests::One(index, request, Kind::Verify(len)));
        }
        if namespace.is_read_only() {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
        }
        if len > self.limits.max_zeroes {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let op = Op::WriteZeroes { deallocate: rw.deac, fua: rw.fua || self.write_through };
        Ok(Requests::One(index, Request { op, offset, len }, Kind::Other))
    }

    /// Requests of a Flush of one namespace, or of all (Identify Controller, VWC: broadcast NSID).
    fn flush(&self, sqe: &Sqe) -> Result<Requests, Status> {
        if sqe.nsid != NSID_ALL {
            let index = index_of(&self.namespaces, sqe.nsid)?;
            return Ok(Requests::One(index, FLUSH, Kind::Other));
        }
        let there = (0..self.namespaces.len()).filter(|index| !self.namespaces[*index].is_none());
        Ok(Requests::Several(there.map(|index| (index, FLUSH)).collect()))
    }

    fn dataset_management(&mut self, sqe: &Sqe) -> Result<Requests, Status> {
        let index = index_of(&self.namespaces, sqe.nsid)?;
        let dsm = DatasetManagement::decode(sqe);
        let count = dsm.ranges().min(DSM_MAX_RANGES);
        let mut raw = [0u8; DSM_MAX_RANGES * 16];
        let raw = &mut raw[..count * 16];
        read_list(&self.view, sqe, self.limits.page_size, &mut self.scratch, raw)?;
        let namespace = &self.namespaces[index];
        let mut parts = Vec::with_capacity(count);
        for range in raw.chunks_exact(16) {
            let (_, rest) = range.split_at(4);
            let (blocks, slba) = rest.split_at(4);
            let blocks = u64::from(u32::from_le_bytes(blocks.try_into().unwrap_or_default()));
            let slba = u64::from_le_bytes(slba.try_into().unwrap_or_default());
            match slba.checked_add(blocks) {
                Some(end) if end <= namespace.blocks => {}
                _ => return Err(Status::LBA_OUT_OF_RANGE.with_dnr()),
            }
            if blocks != 0 {
                let shift = namespace.block_shift;
                let (offset, len) = (slba << shift, blocks << shift);
                parts.push((index, Request { op: Op::Discard, offset, len }));
            }
        }
        // The other attributes are access pattern hints, which are ignored.
        if !dsm.ad {
            parts.clear();
        } else if namespace.is_read_only() {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
        }
        Ok(Requests::Several(parts))
    }

    /// Starts a Copy command, which is executed between passes over the queues.
    fn copy(&mut self, sqe: &Sqe, sq: usize, permit: Permit) -> Started {
        let Self { view, limits, scratch, namespaces, copy_formats, .. } = self;
        let formats = ALWAYS_ENABLED | copy_formats.load(Ordering::Relaxed);
        let parsed = parse_copy(sqe, namespaces, formats, (view, limits.page_size), scratch);
        let (copy, kind) = match parsed {
            Ok(parsed) => parsed,
            Err(status) => return Started::Failed(permit, status),
        };
        if let Some(status) = self.copy_refusal(&copy) {
            return Started::Failed(permit, status);
        }
        if let Err(status) = self.check_copied_zones(&copy) {
            return Started::Failed(permit, status);
        }
        match self.marks_of_copy(&copy) {
            Marked::No => {}
            Marked::Park => return self.park(sqe, sq, permit),
            Marked::Fails => return Started::Failed(permit, Status::UNRECOVERED_READ),
        }
        let tag = self.in_flight.next_tag();
        let owner = Owner::Command { sq, cid: sqe.cid, permit };
        let entry = InFlight::new(owner, copy.namespace, kind).at(sqe.nsid, sqe.cdw10_11());
        self.in_flight.insert(tag, entry.of_requests());
        self.last_tag = tag;
        self.copies.push(copy, tag, sq, self.write_through);
        self.budget -= cost::of_request(0);
        self.review_quota();
        Started::Pending
    }

    /// Consequence of uncorrectable blocks for a copy.
    fn marks_of_copy(&mut self, copy: &ParsedCopy) -> Marked {
        let mut look = |op, (index, from, to): (usize, u64, u64)| {
            let shift = self.namespaces[index].block_shift;
            self.look_at_marks(op, index, (from >> shift, to >> shift))
        };
        for source in copy.sources() {
            if let Marked::Fails = look(NvmOpcode::Read, source) {
                return Marked::Fails;
            }
        }
        look(NvmOpcode::Copy, copy.destination())
    }

    /// Submits one request without data.
    fn submit(
        &mut self,
        index: usize,
        (request, metadata): (&Request, Option<Metadata>),
        kind: Kind,
        sqe: &Sqe,
        sq: usize,
        permit: Permit,
    ) -> Started {
        let tag = self.in_flight.next_tag();
        self.scratch.rewind();
        let queue = &mut *self.namespaces[index].queue;
        match submit_any(queue, tag, request, metadata.as_ref(), &mut self.scratch) {
            Submitted::Done(Ok(())) => {
                self.count(kind);
                self.long_done(request.len, permit)
            }
            Submitted::Done(Err(error)) => {
                self.budget -= cost::of_command(0);
                Started::Failed(permit, status_of(error, kind.is_reading()))
            }
            Submitted::Pending => {
                let owner = Owner::Command { sq, cid: sqe.cid, permit };
                self.keep(tag, 0, InFlight::new(owner, index, kind).at(sqe.nsid, sqe.cdw10_11()));
                Started::Pending
            }
        }
    }

    /// Starts a command of several requests. It ends with the last request; its status is the first
    /// error, reported for block `lba`.
    fn begin(
        &mut self,
        (parts, metadata): (Vec<Part>, Option<Metadata>),
        (kind, lba): (Kind, u64),
        sqe: &Sqe,
        sq: usize,
        permit: Permit,
    ) -> Started {
        let tag = self.in_flight.next_tag();
        let owner = Owner::Command { sq, cid: sqe.cid, permit };
        let entry = InFlight::new(owner, 0, kind).at(sqe.nsid, lba).of_requests();
        self.in_flight.insert(tag, entry);
        self.budget -= cost::of_command(0);
        let Self { multi_step, namespaces, in_flight, budget, .. } = self;
        let command = MultiStepCommand::new(tag, Some(sq), parts).with(metadata);
        if !multi_step.begin(command, namespaces, in_flight, budget) {
            self.review_quota();
            self.last_tag = tag;
            return Started::Pending;
        }
        match self.in_flight.remove(tag) {
            Some(InFlight { owner: Owner::Command { permit, .. }, status, .. }) => {
                if status.is_success() {
                    self.count(kind);
                    Started::DoneLong(permit)
                } else {
                    Started::Failed(permit, status)
                }
            }
            _ => unreachable!("the entry was inserted by this function"),
        }
    }
}
