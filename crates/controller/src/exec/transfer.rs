//! Read, Write and Compare: one request with data.

use super::alone::{Marked, blocks_of};
use super::engine::{Engine, Limits, Started};
use super::forced::ForcedRead;
use super::in_flight::{InFlight, Kind, Owner};
use super::namespace::NamespaceQueue;
use super::quota::cost;
use super::resolve::resolve_flagged;
use super::status::status_of;
use super::with_metadata::weigh_pieces;
use crate::queue::Permit;
use shadowbell_backend::{Metadata, Op, Request, Submitted};
use shadowbell_memory::{Segments, View};
use shadowbell_spec::Sqe;
use shadowbell_spec::nvm::RwFields;
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::sqe::Fuse;
use shadowbell_spec::status::Status;

/// The request of a Read, Write or Compare; resolves its data into `data`.
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
    // No controller has a limit that a short transfer exceeds.
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
    // No flags: PRPs, and not fused.
    if !SLOW {
        view.resolve_prps(sqe.prp1(), sqe.prp2(), bytes, limits.page_size, write, data)
            .map_err(|e| e.status())?;
    } else {
        resolve_flagged(view, sqe, bytes, limits.page_size, write, data)?;
    }
    Ok((Request { op, offset, len }, kind))
}

impl Engine {
    /// Read, Write and Compare: one request with data. The way that nearly all commands go, so what
    /// it needs is looked up once and errors are made elsewhere.
    #[inline(always)]
    pub(super) fn transfer<const SLOW: bool>(
        &mut self,
        op: NvmOpcode,
        sqe: &Sqe,
        sq: usize,
        permit: Permit,
    ) -> Started {
        // An SGL, or a mistake.
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
        // An SGL can be made of many short pieces; PRPs are of whole pages.
        let (mut pieces, mut places) = (0, 0);
        if SLOW {
            let Self { scratch, spans, budget, .. } = self;
            let weight = (self.may_touch != u64::MAX).then_some(self.fresh_weight);
            (pieces, places) = weigh_pieces(scratch, spans, budget, weight, sqe);
        }
        if SLOW && Self::is_forced(namespace, &request, sqe, self.write_through) {
            self.touch(places);
            return self.force(index, (request, None), (kind, pieces), sqe, sq, permit);
        }
        let tag = self.in_flight.next_tag();
        let submitted = namespace.queue.submit(tag, &request, &mut self.scratch);
        if SLOW {
            self.touch(places);
        }
        match submitted {
            Submitted::Done(Ok(())) => {
                // Neither the data nor the view are let go of: the next command has its data in
                // the same place of the list, and comes through the same view, most likely.
                self.count(kind);
                if SLOW { self.long_done(request.len, permit) } else { Started::Done(permit) }
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
                        pieces += self.touch_short(sqe, request.len) * (self.fresh_weight - 1);
                    }
                }
                self.keep(tag, request.len, entry.in_pieces(pieces));
                Started::Pending
            }
        }
    }

    /// The data of a short command lie where its PRPs say: how many parts of the host's memory are
    /// touched for them that were not before, at most.
    #[cold]
    #[inline(never)]
    fn touch_short(&mut self, sqe: &Sqe, len: u64) -> usize {
        let (view, page) = (&self.view, self.limits.page_size as u64);
        let first = page - (sqe.prp1() & (page - 1));
        let (second, listed) = match len.saturating_sub(first) {
            0 => (None, 0),
            left if left <= page => (Some(sqe.prp2()), 0),
            // They are in a list, which is not read once more.
            left => (Some(sqe.prp2()), left.div_ceil(page) as usize),
        };
        let places = std::iter::once(sqe.prp1()).chain(second);
        self.spans.touch(places.filter_map(|iova| Some((view.address(iova)?, 1)))) + listed
    }

    /// As [`transfer`](Self::transfer), for what takes long anyway.
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

    /// What blocks that are marked as uncorrectable have to do with a command.
    pub(super) fn marks_of(&mut self, op: NvmOpcode, sqe: &Sqe) -> Marked {
        match blocks_of(&self.namespaces, sqe) {
            Some((index, blocks)) if self.namespaces[index].is_marked() => {
                self.look_at_marks(op, index, blocks)
            }
            _ => Marked::No,
        }
    }

    /// Whether a request reads, and has to find what it reads on the medium, where it may not be
    /// yet.
    pub(super) fn is_forced(
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

    /// Takes on a command whose request follows a flush. Its data are in `scratch`, in so many
    /// pieces.
    pub(super) fn force(
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
        let data = std::mem::replace(&mut self.scratch, self.spare.pop().unwrap_or_default());
        let Self { forced, namespaces, in_flight, .. } = self;
        let command = ForcedRead::new((tag, sq), index, request, data);
        forced.begin(command, namespaces, in_flight);
        self.budget -= cost::of_request(0);
        self.review_quota();
        Started::Pending
    }

    /// A long command has succeeded: what that took is counted at once.
    #[inline(never)]
    pub(super) fn long_done(&mut self, bytes: u64, permit: Permit) -> Started {
        self.budget -= cost::of_command(bytes);
        Started::DoneLong(permit)
    }

    /// Takes note of a request that a disk has in hand now, with `bytes` of data.
    pub(super) fn keep(&mut self, tag: u32, bytes: u64, entry: InFlight) {
        self.scratch = self.spare.pop().unwrap_or_default();
        self.last_tag = tag;
        self.in_flight.insert(tag, entry);
        self.budget -= cost::of_request(bytes);
        self.review_quota();
    }
}
