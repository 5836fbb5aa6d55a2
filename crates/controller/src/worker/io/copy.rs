//! Copy: blocks of a namespace to another place in it. NVM 1.1, "Copy command".
//!
//! A copy is carried out in two strides: all of its sources are read into a buffer, then all of the
//! destination is written. So the destination gets what the sources held before, however they
//! overlap, and nothing is written if a source can not be read. What MCL says bounds the buffer, of
//! which a worker has a few; a copy that finds none waits for one, in order.
//!
//! A copy is never carried out where its entry is fetched: a stride is taken between two passes over
//! the queues, and together they move about as much at a time as one long write. On a disk that
//! answers at once, others' commands get their turn meanwhile; on one that does not, the requests of
//! a stride are under way at the same time.

use super::in_flight::{Owner, Slot};
use super::{Ended, Engine, Kind, resolve_flagged, status_of};
use crate::namespace::{COPY_BYTES, COPY_RANGES};
use shadowbell_backend::{Op, Request, Submitted};
use shadowbell_memory::{Mapping, Segments, SharedBytes};
use shadowbell_spec::nvm::{CopyFields, CopyRange};
use shadowbell_spec::sqe::Sqe;
use shadowbell_spec::status::Status;
use zerocopy::FromBytes;

/// Buffers that a worker has for one controller, at most: copies that are under way at once.
const BUFFERS: usize = 4;

/// A source range, in bytes of the disk.
#[derive(Clone, Copy, Debug)]
struct Source {
    offset: u64,
    len: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stride {
    /// Nothing is done yet.
    Waiting,
    /// The sources are being read.
    Reading,
    /// The destination is being written.
    Writing,
}

/// A Copy command.
#[derive(Debug)]
pub(super) struct Copy {
    /// The command's slot.
    pub(super) parent: u32,
    /// Its submission queue.
    pub(super) sq: usize,
    space: usize,
    sources: Box<[Source]>,
    /// Where the destination begins, in bytes of the disk.
    to: u64,
    fua: bool,
    buffer: Option<SharedBytes>,
    stride: Stride,
    /// Requests of this stride that the disk has in hand.
    left: u32,
    /// The lowest source range that failed in this stride, and how.
    failed: Option<(u32, Status)>,
    /// It is not wanted any more.
    cancelled: bool,
}

impl Copy {
    fn fail(&mut self, range: u32, status: Status) {
        if self.failed.is_none_or(|(lowest, _)| range < lowest) {
            self.failed = Some((range, status));
        }
    }

    /// Whether there is nothing more to be done, if nothing is under way.
    fn is_over(&self) -> bool {
        self.failed.is_some() || self.cancelled || self.stride == Stride::Writing
    }

    /// The status, and dword 0 of the completion: the lowest source range that was not copied, or 0 if
    /// nothing was written.
    fn outcome(&self) -> (Status, u32) {
        match (self.stride, self.failed) {
            (Stride::Writing, None) => (Status::SUCCESS, 0),
            (Stride::Writing, Some((range, status))) => (status, range),
            (_, Some((_, status))) => (status, 0),
            (_, None) => (Status::ABORT_REQUESTED, 0),
        }
    }
}

/// The copies of one engine.
#[derive(Debug, Default)]
pub(super) struct Copies {
    /// In the order in which they came.
    list: Vec<Copy>,
    buffers: Vec<SharedBytes>,
    buffers_made: usize,
}

impl Copies {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// A request of a copy has ended.
    pub(super) fn range_ended(&mut self, parent: u32, range: u32, status: Status) {
        let Some(copy) = self.list.iter_mut().find(|copy| copy.parent == parent) else { return };
        copy.left = copy.left.saturating_sub(1);
        if !status.is_success() {
            copy.fail(range, status);
        }
    }

    /// Nothing more of these is to be begun. What the disk has in hand of them is the disk's.
    pub(super) fn cancel(&mut self, which: impl Fn(&Copy) -> bool) {
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
        let buffer = Mapping::anonymous(COPY_BYTES as u64).ok()?.bytes();
        self.buffers_made += 1;
        Some(buffer)
    }

    /// Whether something can be done for this copy without waiting for anybody.
    fn can_advance(&self, copy: &Copy) -> bool {
        copy.left == 0 && (copy.is_over() || copy.buffer.is_some() || self.has_buffer())
    }
}

impl Engine {
    /// Takes a Copy command on.
    ///
    /// # Errors
    /// It has ended, with this status, and nothing was copied.
    pub(super) fn copy(&mut self, sqe: &Sqe, sq: usize) -> Result<(), Status> {
        let index = self.space(sqe.nsid)?;
        let fields = CopyFields::decode(sqe);
        if fields.desfmt != 0 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let count = fields.ranges();
        if count > COPY_RANGES {
            return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED.with_dnr());
        }
        let mut raw = [0; COPY_RANGES * size_of::<CopyRange>()];
        let raw = raw.get_mut(..count * size_of::<CopyRange>()).ok_or(Status::INTERNAL)?;
        let data = &mut self.scratch;
        resolve_flagged(&self.view, sqe, raw.len(), self.page_size, false, data)?;
        let copied = self.scratch.read_into(0, raw);
        self.scratch.clear();
        copied.ok_or(Status::INTERNAL)?;

        let space = &self.spaces[index];
        let most = (COPY_BYTES >> space.block_shift) as u64;
        let (mut total, mut outside) = (0, false);
        let mut sources = Vec::with_capacity(count);
        for entry in raw.chunks_exact(size_of::<CopyRange>()) {
            let range = CopyRange::read_from_bytes(entry).map_err(|_| Status::INTERNAL)?;
            let blocks = u64::from(range.nlb0) + 1;
            total += blocks;
            // MSSRL and MCL are the same, so this is about both.
            if total > most {
                return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED.with_dnr());
            }
            let end = range.slba.checked_add(blocks);
            if end.is_none_or(|end| end > space.blocks) {
                outside = true;
                continue;
            }
            let (offset, len) = (range.slba << space.block_shift, blocks << space.block_shift);
            sources.push(Source { offset, len });
        }
        let end = fields.sdlba.checked_add(total);
        if outside || end.is_none_or(|end| end > space.blocks) {
            return Err(Status::LBA_OUT_OF_RANGE.with_dnr());
        }
        if space.read_only {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
        }
        let (to, bytes) = (fields.sdlba << space.block_shift, total << space.block_shift);
        let parent = self.next_tag();
        self.occupy(
            parent,
            Slot {
                owner: Owner::Command { sq, cid: sqe.cid },
                space: index,
                left: 1, // ourselves, until the last stride
                status: Status::SUCCESS,
                kind: Kind::Copy(bytes),
                nsid: sqe.nsid,
                lba: fields.sdlba,
                abort: None,
                latch: None,
            },
        );
        self.copies.list.push(Copy {
            parent,
            sq,
            space: index,
            sources: sources.into(),
            to,
            fua: fields.fua || self.write_through,
            buffer: None,
            stride: Stride::Waiting,
            left: 0,
            failed: None,
            cancelled: false,
        });
        Ok(())
    }

    /// Takes the next strides, about [`COPY_BYTES`] of them, and ends the copies that are over.
    /// Whether there are more to be taken at once.
    #[cold]
    pub(super) fn advance_copies(&mut self, ended: &mut impl FnMut(Ended)) -> bool {
        let mut list = std::mem::take(&mut self.copies.list);
        let mut moved = 0;
        list.retain_mut(|copy| {
            if moved >= COPY_BYTES as u64 || !self.copies.can_advance(copy) {
                return true;
            }
            if !copy.is_over() {
                moved += self.stride(copy);
                return true;
            }
            self.copies.buffers.extend(copy.buffer.take());
            let (status, dw0) = copy.outcome();
            if !status.is_success() {
                self.fail(copy.parent, status);
            }
            if let Some(end) = self.end(copy.parent, Ok(())) {
                ended(Ended { dw0, ..end });
            }
            false
        });
        self.copies.list = list;
        self.can_advance_copies()
    }

    /// Whether a stride can be taken without waiting for anybody.
    pub(crate) fn can_advance_copies(&self) -> bool {
        self.copies.list.iter().any(|copy| self.copies.can_advance(copy))
    }

    /// Submits the requests of the copy's next stride. How many bytes were moved at once.
    fn stride(&mut self, copy: &mut Copy) -> u64 {
        if copy.buffer.is_none() {
            copy.buffer = self.copies.buffer();
        }
        let Some(buffer) = copy.buffer.clone() else {
            copy.fail(0, Status::INTERNAL);
            return 0;
        };
        copy.stride = match copy.stride {
            Stride::Waiting => Stride::Reading,
            Stride::Reading | Stride::Writing => Stride::Writing,
        };
        let reading = copy.stride == Stride::Reading;
        let (mut at, mut moved) = (0, 0);
        for range in 0..copy.sources.len() {
            let Source { offset, len } = copy.sources[range];
            let (request, kind) = if reading {
                (Request { op: Op::Read, offset, len }, Kind::Read(len))
            } else {
                let op = Op::Write { fua: copy.fua };
                (Request { op, offset: copy.to + at, len }, Kind::Write(len))
            };
            // The sum of all ranges was checked against the size of the buffer.
            let place = buffer.slice(at as usize, len as usize);
            at += len;
            let range = range as u32;
            let Some(place) = place else {
                copy.fail(range, Status::INTERNAL);
                break;
            };
            let mut data = Segments::from_bytes(&place);
            let tag = self.next_tag();
            match self.spaces[copy.space].queue.submit(tag, &request, &mut data) {
                Submitted::Done(Ok(())) => moved += len,
                Submitted::Done(Err(error)) => {
                    copy.fail(range, status_of(error, reading));
                    break;
                }
                Submitted::Pending => {
                    // It comes back among those that are kept for their room.
                    drop(self.spare.pop());
                    copy.left += 1;
                    let owner = Owner::Range { copy: copy.parent, range };
                    self.occupy(
                        tag,
                        Slot {
                            owner,
                            space: copy.space,
                            left: 1,
                            status: Status::SUCCESS,
                            kind,
                            nsid: 0,
                            lba: 0,
                            abort: None,
                            latch: None,
                        },
                    );
                }
            }
        }
        moved
    }
}
