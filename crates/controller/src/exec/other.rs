//! All commands except Read, Write and Compare: zones, reservations, and requests of the controller
//! itself (flush at shutdown, self-test).
//!
//! # Zoned Namespace Command Set
//!
//! ZNS 1.1.
//!
//! The disk owns the zones (`shadowbell_disk::Zones`). The disk checks Read, Write and other
//! commands against the zones when they are submitted. This module decodes the three zone commands.
//! If a command consists of several requests, this module checks all zones of the command before it
//! submits the first request.
//!
//! # Reservations
//!
//! Checks for reservation conflicts, and execution of the reservation commands.
//!
//! While a controller has full access to all of its namespaces, reads and writes are not checked.
//! If access to a namespace is restricted, all of the namespace's commands take the slow path,
//! which checks them. Commands that change reservations are sent to the
//! [subsystem](crate::subsystem), which reports their end.

use super::copy::{ALWAYS_ENABLED, ParsedCopy, parse_copy};
use super::data_pointer::{read_list, resolve_flagged};
use super::engine::{Engine, MAX_LOCATIONS, Started};
use super::exclusive_state::Marked;
use super::in_flight::{Appending, InFlight, Kind, Owner};
use super::multi_step::{FLUSH, MultiStepCommand, Part, piece};
use super::namespace::{SharedNamespace, index_of, status_of};
use super::quota::cost;
use crate::admin::self_test::Piece;
use crate::namespace::INACTIVE;
use crate::notice::{Latch, Notice};
use crate::queue::Permit;
use crate::reservations::{Access, Action};
use crate::subsystem::{Command, Job};
use shadowbell_disk::{DiskError, Metadata, Op, Request, Submitted, ZoneReport, Zones, submit_any};
use shadowbell_memory::Segments;
use shadowbell_spec::Sqe;
use shadowbell_spec::nvm::{DSM_MAX_RANGES, DatasetManagement, RwFields};
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::reservation::{
    ReservationAction, ReservationRegister, ReservationReport, ReservationType,
};
use shadowbell_spec::sqe::{Fuse, NSID_ALL};
use shadowbell_spec::status::Status;
use shadowbell_spec::zns::{ZoneAction, ZoneManagementReceive, ZoneManagementSend};
use std::sync::atomic::{AtomicU64, Ordering};

/// Disk requests of a command.
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
            self.touch(MAX_LOCATIONS);
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
            // Write Uncorrectable is not supported in zones, which require sequential writes.
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

    /// Request of Write Zeroes or Verify, which transfer no data.
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
                parts.push((slba << shift, (slba + blocks) << shift));
            }
        }
        // A file frees only whole blocks of its file system, so adjacent ranges are joined to one
        // request.
        parts.sort_unstable();
        parts.dedup_by(|&mut (from, to), last| {
            let joins = from <= last.1;
            if joins {
                last.1 = to.max(last.1);
            }
            joins
        });
        // The other attributes (integral dataset for reads and writes) are hints, which are
        // ignored.
        if !dsm.ad {
            parts.clear();
        } else if namespace.is_read_only() {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
        }
        let discard = |(offset, end)| Request { op: Op::Discard, offset, len: end - offset };
        Ok(Requests::Several(parts.into_iter().map(|part| (index, discard(part))).collect()))
    }

    /// Starts a Copy command. Its requests are submitted between passes over the queues.
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
            self.check_marks(op, index, (from >> shift, to >> shift))
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
                self.finish_long(request.len, permit)
            }
            Submitted::Done(Err(error)) => {
                self.budget -= cost::of_command(0);
                Started::Failed(permit, status_of(error, kind.is_reading()))
            }
            Submitted::Pending => {
                let owner = Owner::Command { sq, cid: sqe.cid, permit };
                self.register_in_flight(
                    tag,
                    0,
                    InFlight::new(owner, index, kind).at(sqe.nsid, sqe.cdw10_11()),
                );
                Started::Pending
            }
        }
    }

    /// Starts a command that consists of several requests. The command ends when its last request
    /// has ended. If requests fail, the first error becomes the status of the command and is
    /// reported for block `lba`.
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

const INVALID: Status = Status::INVALID_FIELD.with_dnr();

/// Zoned Namespace Command Set.
impl Engine {
    /// Zones of a namespace; `None` if it does not exist or is not zoned.
    fn zones_of(&self, nsid: u32) -> Option<&dyn Zones> {
        let index = (nsid as usize).checked_sub(1)?;
        let namespace = self.namespaces.get(index).filter(|namespace| namespace.is_zoned())?;
        namespace.queue.zones()
    }

    /// Checks a Write Zeroes or Verify against the zones. The command may consist of several
    /// requests.
    fn check_zones(&self, op: NvmOpcode, sqe: &Sqe) -> Result<(), Status> {
        let Some(zones) = self.zones_of(sqe.nsid) else { return Ok(()) };
        let index = index_of(&self.namespaces, sqe.nsid)?;
        let (offset, len) = self.namespaces[index].range(&RwFields::decode(sqe))?;
        match op {
            NvmOpcode::Verify => zones.check_read(offset, len),
            _ if self.namespaces[index].is_read_only() => Err(DiskError::ReadOnly),
            _ => zones.check_write(offset, len),
        }
        .map_err(|error| status_of(error, op == NvmOpcode::Verify))
    }

    /// Checks the sources and the destination of a copy against the zones.
    fn check_copied_zones(&self, copy: &ParsedCopy) -> Result<(), Status> {
        let zones = |index: usize| {
            let namespace = self.namespaces.get(index).filter(|namespace| namespace.is_zoned())?;
            namespace.queue.zones()
        };
        for (index, from, to) in copy.sources() {
            if let Some(zones) = zones(index) {
                zones.check_read(from, to - from).map_err(|error| status_of(error, true))?;
            }
        }
        let (index, from, to) = copy.destination();
        match zones(index) {
            Some(zones) => zones.check_write(from, to - from),
            None => Ok(()),
        }
        .map_err(|error| status_of(error, false))
    }

    /// Executes Zone Management Send, Zone Management Receive or Zone Append.
    #[cold]
    pub(super) fn zoned(&mut self, op: NvmOpcode, sqe: &Sqe, sq: usize, permit: Permit) -> Started {
        let index = match index_of(&self.namespaces, sqe.nsid) {
            Ok(index) if self.namespaces[index].is_zoned() => index,
            Ok(_) => return Started::Failed(permit, Status::INVALID_OPCODE.with_dnr()),
            Err(status) => return Started::Failed(permit, status),
        };
        let request = match op {
            NvmOpcode::ZoneManagementReceive => match self.zone_report(index, sqe) {
                Ok(len) => {
                    self.count(Kind::Other);
                    return self.finish_long(len, permit);
                }
                Err(status) => return Started::Failed(permit, status),
            },
            NvmOpcode::ZoneManagementSend => self.zone_management_send(index, sqe),
            _ => self.zone_append(index, sqe),
        };
        match request {
            Err(status) => Started::Failed(permit, status),
            Ok(request) if op == NvmOpcode::ZoneAppend => {
                self.append(index, &request, sqe, sq, permit)
            }
            Ok(request) => self.change_zones(index, &request, sqe, sq, permit),
        }
    }

    /// Executes Zone Management Receive. Returns its cost: transferred bytes plus examined zones.
    fn zone_report(&mut self, index: usize, sqe: &Sqe) -> Result<u64, Status> {
        let command = ZoneManagementReceive::decode(sqe);
        let namespace = &self.namespaces[index];
        let len = usize::try_from(command.length()).unwrap_or(usize::MAX);
        let is_known = command.zra <= ZoneManagementReceive::EXTENDED_REPORT;
        if len > self.limits.max_transfer || !is_known {
            return Err(INVALID);
        }
        let which = command.which().ok_or(INVALID)?;
        if command.slba >= namespace.blocks {
            return Err(Status::LBA_OUT_OF_RANGE.with_dnr());
        }
        let report = ZoneReport {
            from: command.slba << namespace.block_shift,
            which,
            partial: command.partial,
            extended: command.zra == ZoneManagementReceive::EXTENDED_REPORT,
            len,
        };
        let zones = namespace.queue.zones().ok_or(Status::INTERNAL)?;
        let bytes = zones.report(&report).map_err(|error| status_of(error, true))?;
        let (page, scratch) = (self.limits.page_size, &mut self.scratch);
        resolve_flagged(&self.view, sqe, len, page, true, scratch)?;
        scratch.write_from(0, &bytes).ok_or(Status::INTERNAL)?;
        scratch.rewind();
        // All zones from the first one on were examined for the report, so each adds to the cost.
        Ok(len as u64 + zones.count())
    }

    /// Builds the request of a Zone Management Send; its data, if any, are in `scratch`.
    fn zone_management_send(&mut self, index: usize, sqe: &Sqe) -> Result<Request, Status> {
        let command = ZoneManagementSend::decode(sqe);
        let namespace = &self.namespaces[index];
        let action = ZoneAction::from_bits(command.zsa).ok_or(INVALID)?;
        // ZSASO of Open Zone selects a Zone Random Write Area, which is not supported.
        if action == ZoneAction::Open && command.zsaso {
            return Err(INVALID);
        }
        if !command.all && command.slba >= namespace.blocks {
            return Err(Status::LBA_OUT_OF_RANGE.with_dnr());
        }
        let slba = if command.all { 0 } else { command.slba };
        let offset = slba << namespace.block_shift;
        self.scratch.rewind();
        if action == ZoneAction::SetExtension {
            let zones = namespace.queue.zones().ok_or(Status::INTERNAL)?;
            let len = zones.format().extension_bytes();
            if len == 0 || command.all {
                return Err(INVALID);
            }
            let (page, scratch) = (self.limits.page_size, &mut self.scratch);
            resolve_flagged(&self.view, sqe, len, page, false, scratch)?;
        }
        Ok(Request { op: Op::Zone { action, all: command.all }, offset, len: 0 })
    }

    /// Builds the request of a Zone Append; its data are in `scratch`.
    fn zone_append(&mut self, index: usize, sqe: &Sqe) -> Result<Request, Status> {
        let rw = RwFields::decode(sqe);
        let namespace = &self.namespaces[index];
        let (offset, len) = namespace.range(&rw)?;
        let zones = namespace.queue.zones().ok_or(Status::INTERNAL)?;
        let limit = match zones.format().append_limit {
            0 => self.limits.max_transfer as u64,
            limit => limit.min(self.limits.max_transfer as u64),
        };
        if len > limit {
            return Err(INVALID);
        }
        if namespace.is_read_only() {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
        }
        let (page, scratch) = (self.limits.page_size, &mut self.scratch);
        resolve_flagged(&self.view, sqe, len as usize, page, false, scratch)?;
        Ok(Request { op: Op::Append { fua: rw.fua || self.write_through }, offset, len })
    }

    /// Submits a request that changes zones.
    fn change_zones(
        &mut self,
        index: usize,
        request: &Request,
        sqe: &Sqe,
        sq: usize,
        permit: Permit,
    ) -> Started {
        let tag = self.in_flight.next_tag();
        match self.namespaces[index].queue.submit(tag, request, &mut self.scratch) {
            Submitted::Done(Ok(())) => {
                self.count(Kind::Other);
                self.finish_long(4096, permit)
            }
            Submitted::Done(Err(error)) => {
                self.scratch.rewind();
                Started::Failed(permit, status_of(error, false))
            }
            Submitted::Pending => {
                let owner = Owner::Command { sq, cid: sqe.cid, permit };
                let entry = InFlight::new(owner, index, Kind::Other);
                self.register_in_flight(tag, 0, entry.at(sqe.nsid, sqe.cdw10_11()));
                Started::Pending
            }
        }
    }

    /// Submits a Zone Append. The result is always [`Started::Pending`], even if the disk has
    /// completed the request: a later pass completes the command, and adds the written LBA.
    fn append(
        &mut self,
        index: usize,
        request: &Request,
        sqe: &Sqe,
        sq: usize,
        permit: Permit,
    ) -> Started {
        let parent = self.in_flight.next_tag();
        let owner = Owner::Command { sq, cid: sqe.cid, permit };
        let entry = InFlight::new(owner, index, Kind::Write(request.len));
        self.in_flight.insert(parent, entry.at(sqe.nsid, sqe.cdw10_11()).of_requests());
        let tag = self.in_flight.next_tag();
        let queue = &mut self.namespaces[index].queue;
        let submitted = queue.submit(tag, request, &mut self.scratch);
        let place = queue.appended(tag);
        self.appends.begin(parent, Appending { place, tag: (index, tag) });
        match submitted {
            Submitted::Pending => {
                let pieces = self.scratch.pieces().len().max((request.len >> 12) as usize + 2);
                let part = InFlight::new(Owner::Part { parent }, index, Kind::Other);
                self.register_in_flight(tag, request.len, part.in_pieces(pieces));
            }
            Submitted::Done(outcome) => {
                self.scratch.rewind();
                self.budget -= cost::of_command(request.len);
                if let Err(error) = outcome {
                    self.in_flight.fail(parent, status_of(error, false));
                }
                self.appends.ended(parent);
                self.review_quota();
            }
        }
        self.last_tag = parent;
        Started::Pending
    }
}

/// Next ticket: process-wide number of a reservation command in flight.
static NEXT_TICKET: AtomicU64 = AtomicU64::new(1);

/// True if a command needs an access right that the controller does not have.
fn lacks(op: NvmOpcode, access: Access) -> bool {
    match op {
        NvmOpcode::Read
        | NvmOpcode::Compare
        | NvmOpcode::Verify
        | NvmOpcode::ZoneManagementReceive => !access.read,
        NvmOpcode::Flush
        | NvmOpcode::Write
        | NvmOpcode::WriteUncorrectable
        | NvmOpcode::WriteZeroes
        | NvmOpcode::DatasetManagement
        | NvmOpcode::ZoneManagementSend
        | NvmOpcode::ZoneAppend => !access.write,
        // A Copy involves several namespaces (see `copy_refusal`). Reservation commands check their
        // rights when they are executed.
        _ => false,
    }
}

/// Status of a refused command. A refusal by ANA state has precedence over a reservation conflict:
/// a controller without access to the namespace must not learn about its reservations.
fn refused(op: NvmOpcode, access: Access) -> Option<Status> {
    let conflict = || lacks(op, access).then_some(Status::RESERVATION_CONFLICT.with_dnr());
    access.ana.refusal().or_else(conflict)
}

/// Reservations: conflict checks and commands.
impl Engine {
    /// Status of a command that is refused because of a reservation or the ANA state.
    #[inline]
    pub(super) fn refusal(&self, op: NvmOpcode, sqe: &Sqe) -> Option<Status> {
        if self.reservations.is_restricted { self.check_refused(op, sqe) } else { None }
    }

    #[cold]
    fn check_refused(&self, op: NvmOpcode, sqe: &Sqe) -> Option<Status> {
        // A Flush of all namespaces is refused if one of the namespaces refuses it.
        if op == NvmOpcode::Flush && sqe.nsid == NSID_ALL {
            return self.namespaces.iter().find_map(|namespace| refused(op, namespace.access()));
        }
        let namespace = (sqe.nsid as usize).checked_sub(1).and_then(|at| self.namespaces.get(at));
        namespace.and_then(|namespace| refused(op, namespace.access()))
    }

    /// Status of a Copy that is refused because of a reservation or the ANA state.
    fn copy_refusal(&self, copy: &ParsedCopy) -> Option<Status> {
        if !self.reservations.is_restricted {
            return None;
        }
        let refused = |op, at: usize| refused(op, self.namespaces[at].access());
        refused(NvmOpcode::Write, copy.namespace)
            .or_else(|| copy.sources().find_map(|(at, ..)| refused(NvmOpcode::Read, at)))
    }

    /// Recomputes whether access to any namespace is restricted.
    pub(super) fn review_restrictions(&mut self) {
        let mut all = self.namespaces.iter().map(|namespace| namespace.access());
        self.reservations.is_restricted = all.any(Access::restricts);
    }

    /// Applies a change of the controller's access to a namespace. The latch is released when the
    /// commands in flight on that namespace have ended. If `aborts` is true, these commands are
    /// aborted.
    pub(crate) fn review_access(&mut self, uuid: &[u8; 16], aborts: bool, latch: &Latch) {
        let of = |shared: &SharedNamespace| shared.uuid == *uuid;
        let found = self.namespaces.iter().position(|ns| ns.shared().is_some_and(of));
        let Some(index) = found else { return };
        self.namespaces[index].review_access();
        self.review_restrictions();
        let nsid = index as u32 + 1;
        let (copies, reservations) = (&self.copies, &self.reservations);
        let mut concerned = Vec::new();
        self.in_flight.for_each(|tag, entry| {
            let is_command = matches!(entry.owner, Owner::Command { .. } | Owner::Exclusive { .. });
            let has_entry = entry.nsid == nsid || entry.nsid == NSID_ALL || copies.uses(tag, index);
            // Reservation commands are excluded. Otherwise two of them could wait for each other
            // forever.
            if is_command && has_entry && !reservations.is_one(tag) {
                concerned.push(tag);
            }
        });
        for tag in concerned {
            if aborts {
                self.cancel_command(tag);
            }
            self.in_flight.wait_for(tag, latch);
        }
    }

    /// Executes Reservation Register, Acquire, Release or Report.
    #[cold]
    pub(super) fn reservation(
        &mut self,
        op: NvmOpcode,
        sqe: &Sqe,
        sq: usize,
        permit: Permit,
    ) -> Started {
        let shared = index_of(&self.namespaces, sqe.nsid).and_then(|index| {
            let shared = self.namespaces[index].shared().cloned();
            Ok((index, shared.ok_or(Status::INVALID_OPCODE.with_dnr())?))
        });
        let (index, shared) = match shared {
            Ok(found) => found,
            Err(status) => return Started::Failed(permit, status),
        };
        self.budget -= cost::of_command(4096);
        if op == NvmOpcode::ReservationReport {
            return match self.report(sqe, &shared) {
                Ok(()) => {
                    self.count(Kind::Other);
                    Started::DoneLong(permit)
                }
                Err(status) => Started::Failed(permit, status),
            };
        }
        let Some((control, _)) = &self.exclusive.with else {
            return Started::Failed(permit, Status::INTERNAL);
        };
        let control = control.clone();
        let command = match self.reservation_command(op, sqe, &shared) {
            Ok(command) => command,
            Err(status) => return Started::Failed(permit, status),
        };
        let ticket = NEXT_TICKET.fetch_add(1, Ordering::Relaxed);
        let tag = self.in_flight.next_tag();
        let owner = Owner::Command { sq, cid: sqe.cid, permit };
        let entry = InFlight::new(owner, index, Kind::Other).at(sqe.nsid, 0);
        self.in_flight.insert(tag, entry.of_requests());
        self.last_tag = tag;
        self.reservations.begin(ticket, tag);
        let ended = Notice::ReservationEnded { ticket, status: Status::SUCCESS };
        let latch = Latch::new(control, ended);
        shared.member.submit(Job::Act { uuid: shared.uuid, command, latch });
        self.review_quota();
        Started::Pending
    }

    /// Decodes a reservation command and reads its keys from the host's memory.
    fn reservation_command(
        &mut self,
        op: NvmOpcode,
        sqe: &Sqe,
        shared: &SharedNamespace,
    ) -> Result<Command, Status> {
        let host = shared.member.host().ok_or(Status::HOST_ID_NOT_INITIALIZED.with_dnr())?;
        let mut keys = [0u8; 16];
        let len = if op == NvmOpcode::ReservationRelease { 8 } else { 16 };
        let list = &mut keys[..len];
        read_list(&self.view, sqe, self.limits.page_size, &mut self.scratch, list)?;
        let (key, other) = keys.split_at(8);
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap_or_default());
        let (key, other) = (number(key), number(other));
        let (mut persistent, mut aborts) = (None, false);
        let action = if op == NvmOpcode::ReservationRegister {
            let command = ReservationRegister::decode(sqe);
            persistent = match command.cptpl {
                0 => None,
                2 => Some(false),
                3 => Some(true),
                _ => return Err(INVALID),
            };
            let present = (!command.iekey).then_some(key);
            match command.rrega {
                ReservationRegister::REGISTER => Action::Register { key: other },
                ReservationRegister::UNREGISTER => Action::Unregister { key: present },
                ReservationRegister::REPLACE => Action::Replace { key: present, new: other },
                _ => return Err(INVALID),
            }
        } else {
            let command = ReservationAction::decode(sqe);
            // Base 2.1: IEKEY is not supported for Acquire and Release.
            if command.iekey {
                return Err(INVALID);
            }
            if op == NvmOpcode::ReservationRelease {
                match command.action {
                    ReservationAction::RELEASE => Action::Release { key, kind: command.rtype },
                    ReservationAction::CLEAR => Action::Clear { key },
                    _ => return Err(INVALID),
                }
            } else {
                let kind = ReservationType::from_bits(command.rtype).ok_or(INVALID)?;
                aborts = command.action == ReservationAction::PREEMPT_AND_ABORT;
                match command.action {
                    ReservationAction::ACQUIRE => Action::Acquire { key, kind },
                    ReservationAction::PREEMPT | ReservationAction::PREEMPT_AND_ABORT => {
                        Action::Preempt { key, of: other, kind }
                    }
                    _ => return Err(INVALID),
                }
            }
        };
        Ok(Command { host, action, persistent, aborts })
    }

    /// Executes Reservation Report. Bytes of the host's buffer beyond the report are not written.
    fn report(&mut self, sqe: &Sqe, shared: &SharedNamespace) -> Result<(), Status> {
        let command = ReservationReport::decode(sqe);
        let len = usize::try_from(command.length()).unwrap_or(usize::MAX);
        if len > self.limits.max_transfer {
            return Err(INVALID);
        }
        let report = shared.member.report(&shared.uuid, command.eds)?;
        let mut data = Segments::new();
        resolve_flagged(&self.view, sqe, len, self.limits.page_size, true, &mut data)?;
        data.write_from(0, &report[..report.len().min(len)]).ok_or(Status::INTERNAL)
    }

    /// Marks the reservation command with number `ticket` as ended: the subsystem has executed it.
    /// The next call of [`reap`](Self::reap) completes the command, with `status` if that is an
    /// error.
    pub(crate) fn reservation_ended(&mut self, ticket: u64, status: Status) {
        if let Some(tag) = self.reservations.end(ticket)
            && !status.is_success()
        {
            self.in_flight.fail(tag, status);
        }
    }
}

/// Requests of the controller itself, not of a host command: flush at shutdown, self-test.
impl Engine {
    /// Flushes every writable namespace. `latch` is released when the flushes have ended.
    pub(crate) fn flush_all(&mut self, latch: Latch) {
        let writable = (0..self.namespaces.len()).filter(|ns| !self.namespaces[*ns].is_read_only());
        let parts = writable.map(|index| (index, FLUSH)).collect();
        self.begin_internal(parts, latch);
    }

    /// Verifies a part of a namespace for the self-test. `latch` is released at the end; it gets
    /// the status if there is an error.
    pub(crate) fn verify(&mut self, piece: Piece, latch: Latch) {
        let Piece { nsid, offset, len } = piece;
        let index = index_of(&self.namespaces, nsid);
        let end = |index: usize| {
            let namespace = &self.namespaces[index];
            namespace.blocks << namespace.block_shift
        };
        match index {
            Ok(index) if offset.checked_add(len).is_some_and(|to| to <= end(index)) => {
                self.begin_internal(vec![(index, Request { op: Op::Verify, offset, len })], latch);
            }
            Ok(_) => latch.set_status(INACTIVE),
            Err(status) => latch.set_status(status),
        }
    }

    fn begin_internal(&mut self, parts: Vec<Part>, latch: Latch) {
        let tag = self.in_flight.next_tag();
        let mut entry =
            InFlight::new(Owner::Internal, 0, Kind::Other).at(NSID_ALL, 0).of_requests();
        entry.waiting = Some(latch);
        self.in_flight.insert(tag, entry);
        let Self { multi_step, namespaces, in_flight, budget, .. } = self;
        if multi_step.begin(MultiStepCommand::new(tag, None, parts), namespaces, in_flight, budget)
        {
            self.end(tag);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_that_commands_need() {
        let none = Access { read: false, write: false, ..Access::ALL };
        let reads = Access { read: true, write: false, ..Access::ALL };
        let writes = Access { read: false, write: true, ..Access::ALL };
        let needs = |access| {
            let all = NvmOpcode::ALL.iter().copied();
            all.filter(|op| lacks(*op, access)).map(u8::from).collect::<Vec<u8>>()
        };
        assert!(needs(Access::ALL).is_empty());
        assert_eq!(needs(writes), [0x02, 0x05, 0x0c, 0x7a]);
        assert_eq!(needs(reads), [0x00, 0x01, 0x04, 0x08, 0x09, 0x79, 0x7d]);
        assert_eq!(needs(none).len(), 11);
    }
}
