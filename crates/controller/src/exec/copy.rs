//! Copy command: copies blocks within a namespace or from other namespaces. NVM 1.1, "Copy
//! command".
//!
//! A copy has two phases ([`Stride`]): the controller reads all source ranges into a buffer, then
//! it writes the whole destination. Therefore overlapping ranges are copied correctly, and nothing
//! is written if a source cannot be read. The Maximum Copy Length (MCL) bounds the size of the
//! buffer. An I/O thread has a few buffers per controller; if all are in use, further copies wait
//! for a buffer in order of arrival.
//!
//! The start of a Copy command only appends the command to a list. The requests of the command are
//! submitted between two passes over the queues, range by range, and are charged to the
//! controller's share of the I/O thread's time. On a disk that completes requests inline, other
//! commands are executed between the ranges. On an asynchronous disk, several requests of a phase
//! are in flight at a time.

use super::data_pointer::{Protection, read_list};
use super::in_flight::{InFlight, InFlightTable, Kind, Owner};
use super::multi_step::MAX_IN_FLIGHT;
use super::namespace::{NamespaceQueue, index_of, status_of};
use super::quota::cost;
use crate::namespace::{COPY_BYTES, COPY_RANGES};
use shadowbell_disk::{Metadata, Op, Request, Submitted, submit_any};
use shadowbell_memory::{Mapping, Segments, SharedBytes, View};
use shadowbell_spec::nvm::{CopyFields, CopyRange, LongCopyRange};
use shadowbell_spec::sqe::Sqe;
use shadowbell_spec::status::Status;
use zerocopy::FromBytes;

/// Maximum number of buffers per controller and I/O thread. Each active copy uses one.
const BUFFERS: usize = 4;

/// Bytes per buffer: the data, and metadata of up to 64 bytes per block of 512 bytes.
const BUFFER: usize = COPY_BYTES + COPY_BYTES / 8;

/// Copy descriptor formats that the host need not enable: 0h and 1h (without a source NSID). Bit n
/// stands for format n.
pub(super) const ALWAYS_ENABLED: u16 = 1 << 0 | 1 << 1;

/// Source range, in bytes of the disk.
#[derive(Clone, Copy, Debug)]
struct Source {
    /// Index of the namespace.
    namespace: usize,
    offset: u64,
    len: u64,
    /// Number of bytes of the range's metadata, and the protection checks for reading it.
    metadata_len: u64,
    metadata: Option<Metadata>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stride {
    /// Before the first phase: the copy waits for a buffer.
    Waiting,
    /// The sources are being read.
    Reading,
    /// The destination is being written.
    Writing,
}

/// Copy command in flight.
#[derive(Debug)]
pub(super) struct Copy {
    /// In-flight entry of the command.
    pub(super) parent: u32,
    /// Index of the submission queue.
    pub(super) sq: usize,
    pub(super) namespace: usize,
    sources: Box<[Source]>,
    /// Byte offset of the destination on the disk.
    to: u64,
    fua: bool,
    /// Metadata parameters for writing the first block.
    metadata: Option<Metadata>,
    buffer: Option<SharedBytes>,
    stride: Stride,
    /// Next source range of this phase, and the offset of its data in the buffer.
    next: usize,
    at: u64,
    /// Bytes of metadata before `at`. In the buffer, the metadata of each range follow its data.
    metadata_at: u64,
    /// Number of requests of this phase in flight.
    remaining: u32,
    /// Lowest source range that failed in this phase, and its status.
    failed: Option<(u32, Status)>,
    /// True if the command is aborted, or a namespace of the copy was removed.
    cancelled: bool,
}

impl Copy {
    /// True if the copy reads from or writes to the namespace with this index.
    pub(super) fn uses(&self, index: usize) -> bool {
        self.namespace == index || self.sources.iter().any(|source| source.namespace == index)
    }

    fn fail(&mut self, range: u32, status: Status) {
        if self.failed.is_none_or(|(lowest, _)| range < lowest) {
            self.failed = Some((range, status));
        }
    }

    /// True if this phase has requests to submit.
    fn has_more(&self) -> bool {
        !self.has_ended_early() && self.stride != Stride::Waiting && self.next < self.sources.len()
    }

    fn has_ended_early(&self) -> bool {
        self.failed.is_some() || self.cancelled
    }

    /// True if the copy ends once no request is in flight.
    fn is_finished(&self) -> bool {
        self.has_ended_early() || self.stride == Stride::Writing && !self.has_more()
    }

    /// Status and completion dword 0: the lowest source range that was not copied, or 0 if nothing
    /// was written.
    fn outcome(&self) -> (Status, u32) {
        match (self.stride, self.failed) {
            (Stride::Writing, None) => (Status::SUCCESS, 0),
            (Stride::Writing, Some((range, status))) => (status, range),
            (_, Some((_, status))) => (status, 0),
            (_, None) => (Status::ABORT_REQUESTED, 0),
        }
    }
}

/// Checked parameters of a Copy command.
pub(super) struct ParsedCopy {
    /// Index of the namespace.
    pub(super) namespace: usize,
    sources: Box<[Source]>,
    to: u64,
    fua: bool,
    metadata: Option<Metadata>,
}

impl ParsedCopy {
    /// Source ranges: index of the namespace, first byte, byte after the last.
    pub(super) fn sources(&self) -> impl Iterator<Item = (usize, u64, u64)> {
        let range = |from: &Source| (from.namespace, from.offset, from.offset + from.len);
        self.sources.iter().map(range)
    }

    /// Destination range: index of the namespace, first byte, byte after the last.
    pub(super) fn destination(&self) -> (usize, u64, u64) {
        let len: u64 = self.sources.iter().map(|source| source.len).sum();
        (self.namespace, self.to, self.to + len)
    }
}

/// Ended copy.
pub(super) struct CopyEnd {
    /// In-flight entry of the command.
    pub(super) parent: u32,
    pub(super) status: Status,
    pub(super) dw0: u32,
}

/// Copy commands of one engine.
#[derive(Debug, Default)]
pub(super) struct Copies {
    /// Copies in order of arrival.
    list: Vec<Copy>,
    buffers: Vec<SharedBytes>,
    buffers_made: usize,
}

impl Copies {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    /// Records the end of a copy's request.
    pub(super) fn range_ended(&mut self, parent: u32, range: u32, status: Status) {
        let Some(copy) = self.list.iter_mut().find(|copy| copy.parent == parent) else { return };
        copy.remaining = copy.remaining.saturating_sub(1);
        if !status.is_success() {
            copy.fail(range, status);
        }
    }

    /// Cancels copies: no further requests are submitted. Requests in flight are not affected.
    pub(super) fn cancel(&mut self, mut which: impl FnMut(&Copy) -> bool) {
        let unwanted = self.list.iter_mut().filter(|copy| which(copy));
        unwanted.for_each(|copy| copy.cancelled = true);
    }

    fn has_buffer(&self) -> bool {
        !self.buffers.is_empty() || self.buffers_made < BUFFERS
    }

    fn buffer(&mut self) -> Option<SharedBytes> {
        if let Some(buffer) = self.buffers.pop() {
            return Some(buffer);
        }
        let buffer = Mapping::anonymous(BUFFER as u64).ok()?.bytes();
        self.buffers_made += 1;
        Some(buffer)
    }

    /// True if the command in entry `parent` is a copy that uses the namespace with this index.
    pub(super) fn uses(&self, parent: u32, index: usize) -> bool {
        self.list.iter().any(|copy| copy.parent == parent && copy.uses(index))
    }

    /// True if this copy has a step that is possible without waiting.
    fn is_ready(&self, copy: &Copy) -> bool {
        let next_stride = copy.is_finished() || copy.buffer.is_some() || self.has_buffer();
        copy.has_more() || copy.remaining == 0 && next_stride
    }
}

/// Decodes and checks a Copy command, and reads its source ranges from the host. `formats` are
/// the enabled descriptor formats.
///
/// # Errors
/// The status with which the command ends; nothing was copied.
pub(super) fn parse_copy(
    sqe: &Sqe,
    namespaces: &[NamespaceQueue],
    formats: u16,
    (view, page_size): (&View, usize),
    scratch: &mut Segments,
) -> Result<(ParsedCopy, Kind), Status> {
    let index = index_of(namespaces, sqe.nsid)?;
    let fields = CopyFields::decode(sqe);
    if formats & 1 << fields.desfmt == 0 {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    let count = fields.ranges();
    if count > COPY_RANGES {
        return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED.with_dnr());
    }
    let entry = match fields.desfmt {
        0 | 2 => size_of::<CopyRange>(),
        _ => size_of::<LongCopyRange>(),
    };
    let mut raw = [0; COPY_RANGES * size_of::<LongCopyRange>()];
    let raw = raw.get_mut(..count * entry).ok_or(Status::INTERNAL)?;
    read_list(view, sqe, page_size, scratch, raw)?;

    let namespace = &namespaces[index];
    let protection = Protection::of_copy(namespace, sqe, &fields, formats)?;
    let shift = namespace.block_shift;
    let most = (COPY_BYTES >> shift) as u64;
    let (mut total, mut outside) = (0, false);
    let mut sources = Vec::with_capacity(count);
    for entry in raw.chunks_exact(entry) {
        // Both entry types begin with the same fields; the rest is protection information. SOPT
        // (fast copies only) needs no check: the data stay in the controller, so every copy is
        // fast.
        let (range, _) = CopyRange::read_from_prefix(entry).map_err(|_| Status::INTERNAL)?;
        let from = match fields.desfmt {
            0 | 1 => index,
            _ => index_of(namespaces, range.snsid)?,
        };
        let source = &namespaces[from];
        if source.block_shift != shift || source.metadata() != namespace.metadata() {
            return Err(Status::INCOMPATIBLE_NAMESPACE_OR_FORMAT.with_dnr());
        }
        let blocks = u64::from(range.nlb0) + 1;
        total += blocks;
        // MSSRL (limit of a single range) equals MCL (limit of the sum), so this check covers both.
        if total > most {
            return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED.with_dnr());
        }
        let end = range.slba.checked_add(blocks);
        if end.is_none_or(|end| end > source.blocks) {
            outside = true;
            continue;
        }
        let (offset, len) = (range.slba << shift, blocks << shift);
        let metadata = protection.as_ref().map(|own| own.source(entry, &range)).transpose()?;
        let metadata_len = protection.as_ref().map_or(0, |own| own.len(blocks));
        sources.push(Source { namespace: from, offset, len, metadata_len, metadata });
    }
    let end = fields.sdlba.checked_add(total);
    if outside || end.is_none_or(|end| end > namespace.blocks) {
        return Err(Status::LBA_OUT_OF_RANGE.with_dnr());
    }
    let (to, total) = (fields.sdlba << shift, total << shift);
    // Formats 0h and 1h permit overlapping ranges.
    let overlaps = |source: &Source| {
        source.namespace == index
            && source.offset.max(to) < (source.offset + source.len).min(to + total)
    };
    if fields.desfmt >= 2 && sources.iter().any(overlaps) {
        return Err(Status::OVERLAPPING_IO_RANGE.with_dnr());
    }
    if namespace.is_read_only() {
        return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
    }
    let metadata = protection.map(|own| own.destination());
    let sources = sources.into();
    let copy = ParsedCopy { namespace: index, sources, to, fua: fields.fua, metadata };
    Ok((copy, Kind::Copy(total)))
}

impl Copies {
    /// Appends a copy for the command in entry `parent` of submission queue `sq`.
    pub(super) fn push(&mut self, copy: ParsedCopy, parent: u32, sq: usize, write_through: bool) {
        let ParsedCopy { namespace, sources, to, fua, metadata } = copy;
        self.list.push(Copy {
            parent,
            sq,
            namespace,
            sources,
            to,
            fua: fua || write_through,
            metadata,
            buffer: None,
            stride: Stride::Waiting,
            next: 0,
            at: 0,
            metadata_at: 0,
            remaining: 0,
            failed: None,
            cancelled: false,
        });
    }

    /// Number of further requests that may be submitted now.
    fn room(&self) -> u32 {
        MAX_IN_FLIGHT.saturating_sub(self.list.iter().map(|copy| copy.remaining).sum())
    }

    /// True if a step of a copy is possible without waiting.
    pub(super) fn can_advance(&self) -> bool {
        let has_room = self.room() != 0;
        let ends = |copy: &Copy| copy.remaining == 0 && copy.is_finished();
        self.list.iter().any(|copy| ends(copy) || has_room && self.is_ready(copy))
    }

    /// Advances copies within the budget. Returns the ended copies.
    pub(super) fn advance(
        &mut self,
        namespaces: &mut [NamespaceQueue],
        in_flight: &mut InFlightTable,
        budget: &mut i64,
    ) -> Vec<CopyEnd> {
        let mut room = self.room();
        let mut list = std::mem::take(&mut self.list);
        let mut over = Vec::new();
        list.retain_mut(|copy| {
            while *budget > 0 && room > 0 && !copy.is_finished() && self.is_ready(copy) {
                if copy.buffer.is_none() {
                    copy.buffer = self.buffer();
                }
                copy.advance(namespaces, in_flight, budget, &mut room);
            }
            if copy.remaining != 0 || !copy.is_finished() {
                return true;
            }
            self.buffers.extend(copy.buffer.take());
            let (status, dw0) = copy.outcome();
            over.push(CopyEnd { parent: copy.parent, status, dw0 });
            false
        });
        self.list = list;
        over
    }
}

impl Copy {
    /// Submits requests of this phase, or of the next phase if this phase has ended.
    fn advance(
        &mut self,
        namespaces: &mut [NamespaceQueue],
        in_flight: &mut InFlightTable,
        budget: &mut i64,
        room: &mut u32,
    ) {
        let Some(buffer) = self.buffer.clone() else {
            return self.fail(0, Status::INTERNAL);
        };
        if !self.has_more() {
            self.stride = match self.stride {
                Stride::Waiting => Stride::Reading,
                Stride::Reading | Stride::Writing => Stride::Writing,
            };
            (self.next, self.at, self.metadata_at) = (0, 0, 0);
        }
        let reading = self.stride == Stride::Reading;
        while *budget > 0 && *room > 0 && self.has_more() {
            let range = self.next as u32;
            let source = self.sources[self.next];
            let Source { namespace: from, offset, len, metadata_len, .. } = source;
            let (index, request, kind) = if reading {
                (from, Request { op: Op::Read, offset, len }, Kind::Read(len))
            } else {
                let op = Op::Write { fua: self.fua };
                let request = Request { op, offset: self.to + self.at, len };
                (self.namespace, request, Kind::Write(len))
            };
            // `parse_copy` has checked the sum of all ranges against the size of the buffer.
            let place = (self.at + self.metadata_at) as usize;
            let place = buffer.slice(place, (len + metadata_len) as usize);
            let metadata = if reading { source.metadata } else { self.part(&namespaces[index]) };
            self.at += len;
            self.metadata_at += metadata_len;
            self.next += 1;
            let Some(place) = place else {
                return self.fail(range, Status::INTERNAL);
            };
            let mut data = Segments::from_bytes(&place);
            let tag = in_flight.next_tag();
            let queue = &mut *namespaces[index].queue;
            match submit_any(queue, tag, &request, metadata.as_ref(), &mut data) {
                Submitted::Done(Ok(())) => *budget -= cost::of_command(len),
                Submitted::Done(Err(error)) => {
                    *budget -= cost::of_command(0);
                    self.fail(range, status_of(error, reading));
                }
                Submitted::Pending => {
                    *budget -= cost::of_request(len);
                    *room -= 1;
                    self.remaining += 1;
                    let owner = Owner::Range { copy: self.parent, range };
                    in_flight.insert(tag, InFlight::new(owner, index, kind));
                }
            }
        }
    }

    /// Metadata parameters for writing the next range of the destination.
    fn part(&self, namespace: &NamespaceQueue) -> Option<Metadata> {
        let format = namespace.metadata()?;
        Some(self.metadata?.after(self.at >> namespace.block_shift, format))
    }
}
