//! Commands of the Zoned Namespace Command Set. ZNS 1.1.
//!
//! The disk owns the zones (`shadowbell_backend::Zones`), so zone errors of Read, Write and others
//! are found at submission. This module decodes the three zone commands, and checks commands that
//! consist of several requests before they begin.

use super::appends::Appending;
use super::copy::ParsedCopy;
use super::engine::{Engine, Started};
use super::in_flight::{InFlight, Kind, Owner};
use super::namespace::index_of;
use super::quota::cost;
use super::resolve::resolve_flagged;
use super::status::status_of;
use crate::queue::Permit;
use shadowbell_backend::{DiskError, Op, Request, Submitted, ZoneReport, Zones};
use shadowbell_spec::Sqe;
use shadowbell_spec::nvm::RwFields;
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::status::Status;
use shadowbell_spec::zns::{ZoneAction, ZoneManagementReceive, ZoneManagementSend};

const INVALID: Status = Status::INVALID_FIELD.with_dnr();

impl Engine {
    /// Zones of a namespace, if it exists and is zoned.
    pub(super) fn zones_of(&self, nsid: u32) -> Option<&Zones> {
        let index = (nsid as usize).checked_sub(1)?;
        let namespace = self.namespaces.get(index).filter(|namespace| namespace.is_zoned())?;
        namespace.queue.zones()
    }

    /// Checks a Write Zeroes or Verify, which may be several requests, against the zones.
    pub(super) fn check_zones(&self, op: NvmOpcode, sqe: &Sqe) -> Result<(), Status> {
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
    pub(super) fn check_copied_zones(&self, copy: &ParsedCopy) -> Result<(), Status> {
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
                    return self.long_done(len, permit);
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

    /// Executes Zone Management Receive. Returns the bytes transferred, as the cost.
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
        // The report was built from all following zones, so each adds to the cost.
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
                self.long_done(4096, permit)
            }
            Submitted::Done(Err(error)) => {
                self.scratch.rewind();
                Started::Failed(permit, status_of(error, false))
            }
            Submitted::Pending => {
                let owner = Owner::Command { sq, cid: sqe.cid, permit };
                let entry = InFlight::new(owner, index, Kind::Other);
                self.keep(tag, 0, entry.at(sqe.nsid, sqe.cdw10_11()));
                Started::Pending
            }
        }
    }

    /// Submits an append. The command always ends later, because its result includes the LBA.
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
                self.keep(tag, request.len, part.in_pieces(pieces));
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
