//! Commands on blocks with metadata: transfer of metadata, and protection information that is
//! inserted, stripped or checked.
//!
//! All of these commands take the slow path. The disk does the work
//! (`Queue::submit_with_metadata`); this module decodes the command.

use super::engine::{Engine, Started};
use super::in_flight::{InFlight, Kind, Owner};
use super::metadata::{fields, uses_extended, weigh_pieces};
use super::namespace::NamespaceQueue;
use super::resolve::resolve_flagged;
use super::status::status_of;
use crate::admin::features::EXTENDED_FORMATS;
use crate::queue::Permit;
use shadowbell_backend::{Metadata, MetadataBuffer, MetadataFormat, Op, Request, Submitted};
use shadowbell_memory::DataPointerError;
use shadowbell_spec::Sqe;
use shadowbell_spec::nvm::{PRINFO_PRACT, RwFields};
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::sqe::Psdt;
use shadowbell_spec::status::Status;
use std::sync::atomic::Ordering;

impl Engine {
    /// Index and metadata format of a command's namespace, if it exists and has metadata.
    pub(super) fn format_of(&self, sqe: &Sqe) -> Option<(usize, MetadataFormat)> {
        let index = (sqe.nsid as usize).checked_sub(1)?;
        Some((index, *self.namespaces.get(index)?.metadata()?))
    }

    /// Checks that the host has enabled this format (Base 2.1, "Host Behavior Support", LBAFEE).
    pub(super) fn check_format(&self, format: &MetadataFormat) -> Result<(), Status> {
        let knows = self.copy_formats.load(Ordering::Relaxed) & EXTENDED_FORMATS != 0;
        if uses_extended(format) && !knows {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr());
        }
        Ok(())
    }

    /// Metadata parameters of a Write Zeroes or Verify, if its blocks have metadata.
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
        // consist of nothing else, no metadata are transferred.
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
                // SGLS does not announce an SGL segment at MPTR.
                Psdt::SglSegmentMetadata | Psdt::Reserved => true,
            };
            if is_wrong {
                return Err(Status::INVALID_FIELD.with_dnr());
            }
            // An SGL may be longer than the data; the excess is not used.
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
    pub(super) fn transfer_with_metadata(
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
        let weight = (self.may_touch != u64::MAX).then_some(self.fresh_weight);
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
                self.long_done(request.len, permit)
            }
            Submitted::Done(Err(error)) => {
                self.scratch.rewind();
                Started::Failed(permit, status_of(error, kind.is_reading()))
            }
            Submitted::Pending => {
                let owner = Owner::Command { sq, cid: sqe.cid, permit };
                let entry = InFlight::new(owner, index, kind).at(sqe.nsid, sqe.cdw10_11());
                self.keep(tag, request.len, entry.in_pieces(pieces));
                Started::Pending
            }
        }
    }
}
