//! Everything that executing I/O commands for one controller takes, on one worker.

use super::alone::{Alone, Marked, blocks_of};
use super::copy::{ALWAYS_ENABLED, Copies, CopyEnd, ParsedCopy, parse_copy};
use super::forced::{ForcedRead, ForcedReads};
use super::in_flight::{CompletedCommand, InFlight, InFlightTable, Kind, Owner};
use super::long::{LongCommand, LongCommands, Part, piece};
use super::namespace::{NamespaceQueue, index_of};
use super::quota::{Exceeded, Quota, cost};
use super::reservation_commands::ReservationCommands;
use super::resolve::{read_list, resolve_flagged};
use super::retired::Retired;
use super::spans::TouchedSpans;
use super::status::{is_media_error, status_of};
use crate::admin::self_test::Piece;
use crate::latch::Latch;
use crate::namespace::INACTIVE;
use crate::queue::Permit;
use crate::stats::{PartCounters, TransferStats};
use shadowbell_backend::{DiskError, Op, Request, Submitted};
use shadowbell_memory::{Segments, View, page_tables};
use shadowbell_spec::Sqe;
use shadowbell_spec::nvm::{DSM_MAX_RANGES, DatasetManagement, RwFields};
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::sqe::{Fuse, NSID_ALL};
use shadowbell_spec::status::Status;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

/// Why nothing more is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closed {
    /// The queues are about to leave for another worker.
    Leaves = 1,
    /// Page tables are thrown away.
    PageTables = 2,
    /// A command is to be alone.
    Alone = 4,
}

/// Places of the host's memory that a short command may touch: its entry's list, and three pages.
const PLACES: u64 = 4;
/// Places that the list of a command may have, one that is refused for it included.
const MAX_PLACES: usize = shadowbell_memory::MAX_SGL_DESCRIPTORS;
/// Pieces of memory whose page tables were not there before, that the disks may have in hand: they
/// can be made after others were thrown away.
const FRESH_IN_FLIGHT: usize = 4096;

const READ: u8 = NvmOpcode::Read as u8;
const WRITE: u8 = NvmOpcode::Write as u8;

/// What became of a command that was started.
#[derive(Debug)]
pub(crate) enum Started {
    /// It has succeeded.
    Done(Permit),
    /// It has succeeded, and was long: the budget is to be looked at.
    DoneLong(Permit),
    /// [`Engine::reap`] says when and how it ends.
    Pending,
    /// It has ended, with this status.
    Failed(Permit, Status),
    /// It is part of a fused operation, or says so: nothing was done.
    Fused(Permit),
}

/// The most room for pieces that an emptied buffer is kept with, and how many are kept: what the
/// commands of common hosts need. A guest that had more pieces once gives the memory back.
const SPARE_ROOM: usize = 512;
const SPARE: usize = 256;

/// Everything that executing I/O commands for one controller takes, on one worker.
pub(crate) struct Engine {
    pub(super) view: View,
    pub(super) limits: Limits,
    quota: Quota,
    /// As how many a piece counts whose page table is not there yet.
    fresh_weight: usize,
    /// What may still be spent in this pass, by the measure of [`cost`]; below 0 if the last
    /// command took more than there was.
    pub(super) budget: i64,
    /// Nothing more is started, for each reason that has its bit here.
    closed: u8,
    /// Places of the host's memory that were touched, at most, and how many may be in this pass.
    touched: u64,
    may_touch: u64,
    /// What was touched of it, if that is counted.
    spans: TouchedSpans,
    write_through: bool,
    /// Whether a disk wants hints of requests before they come.
    wants_hints: bool,
    /// Whether a disk wants to know whose requests come.
    takes_turns: bool,
    /// By NSID - 1.
    pub(super) namespaces: Vec<NamespaceQueue>,
    retired: Retired,
    pub(super) in_flight: InFlightTable,
    /// Tag of the command that was last found to be [pending](Started::Pending).
    pub(super) last_tag: u32,
    pub(super) scratch: Segments,
    /// Emptied buffers, kept for their room.
    spare: Vec<Segments>,
    pub(super) copies: Copies,
    /// The descriptor formats of Copy that the host has enabled: bit n for format n.
    copy_formats: Arc<AtomicU16>,
    long: LongCommands,
    forced: ForcedReads,
    pub(super) alone: Alone,
    pub(super) reservations: ReservationCommands,
    /// What was done, for others to read.
    pub(crate) counters: Arc<PartCounters>,
    transfers: TransferStats,
}

/// What a command's data has to keep to.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// CC.MPS in bytes.
    pub(super) page_size: usize,
    /// MDTS in bytes.
    pub(super) max_transfer: usize,
    /// WZSL in bytes.
    max_zeroes: u64,
}

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
    pub(crate) fn new(
        view: View,
        (page_size, max_transfer, max_zeroes): (usize, usize, u64),
        quota: Quota,
        namespaces: Vec<NamespaceQueue>,
        counters: Arc<PartCounters>,
    ) -> Self {
        let mut engine = Self {
            wants_hints: want_hints(&namespaces),
            takes_turns: take_turns(&namespaces),
            view,
            limits: Limits { page_size, max_transfer, max_zeroes },
            quota,
            fresh_weight: (quota.pieces / FRESH_IN_FLIGHT).max(1),
            budget: 0,
            closed: 0,
            touched: 0,
            may_touch: u64::MAX,
            spans: TouchedSpans::default(),
            write_through: false,
            namespaces,
            retired: Retired::default(),
            in_flight: InFlightTable::default(),
            last_tag: 0,
            scratch: Segments::new(),
            spare: Vec::new(),
            copies: Copies::default(),
            copy_formats: Arc::default(),
            long: LongCommands::default(),
            forced: ForcedReads::default(),
            alone: Alone::default(),
            reservations: ReservationCommands::default(),
            transfers: counters.io.transfers(),
            counters,
        };
        engine.measure_memory();
        engine.review_restrictions();
        engine
    }

    /// Where the descriptor formats of Copy are that the host has enabled.
    pub(crate) fn set_copy_formats(&mut self, formats: &Arc<AtomicU16>) {
        self.copy_formats = Arc::clone(formats);
    }

    /// What is known of the host's memory has changed: whether touches of it are counted.
    fn measure_memory(&mut self) {
        let bytes = self.view.table().sparse_bytes();
        self.may_touch = if bytes != 0 { page_tables::SPEND } else { u64::MAX };
        self.spans.resize(bytes);
    }

    /// Whether touches of the host's memory are counted, because there is so much of it.
    #[inline]
    pub(crate) fn is_sparse(&self) -> bool {
        self.may_touch != u64::MAX
    }

    pub(crate) fn view(&self) -> &View {
        &self.view
    }

    pub(crate) fn namespaces(&self) -> &[NamespaceQueue] {
        &self.namespaces
    }

    /// All queues, with those that are on their way out.
    pub(crate) fn queues(&self) -> impl Iterator<Item = &NamespaceQueue> {
        self.namespaces.iter().chain(self.retired.iter())
    }

    /// From here on `new` is the namespace at `index`, or nothing is. Where the queue is that was
    /// there, if there was one, until [`take_retired`](Self::take_retired).
    ///
    /// What is under way goes on with the disk that it was begun on, and what a command has not
    /// begun yet with the new one. If there is no new one, all commands that are about the
    /// namespace alone end, as soon as the disk has let go of them.
    /// `absence` is how they end then.
    pub(crate) fn change_namespace(
        &mut self,
        index: usize,
        new: Option<NamespaceQueue>,
        absence: Status,
    ) -> Option<usize> {
        let room = self.namespaces.len().max(index + 1);
        self.namespaces.resize_with(room, NamespaceQueue::none);
        let is_removed = new.is_none();
        let new = new.unwrap_or_else(|| NamespaceQueue::absent(absence));
        let old = std::mem::replace(&mut self.namespaces[index], new);
        self.wants_hints = want_hints(&self.namespaces);
        self.takes_turns = take_turns(&self.namespaces);
        self.review_marks();
        self.review_restrictions();
        if old.is_none() {
            return None;
        }
        let place = self.retired.push(old);
        self.in_flight.for_each_mut(|_, entry| {
            if entry.is_request && entry.namespace == index {
                entry.namespace = place;
            }
        });
        if is_removed {
            self.give_up(index, place);
        }
        Some(place)
    }

    /// The namespace at `index` is gone, and its queue at `place`.
    fn give_up(&mut self, index: usize, place: usize) {
        let Self { in_flight, copies, long, retired, .. } = self;
        // A Flush of all namespaces is one of those that are left.
        let is_of_all = |nsid: Option<u32>| nsid == Some(NSID_ALL);
        let mut over = long.remove_namespace(index, |parent| is_of_all(in_flight.nsid(parent)));
        copies.cancel(|copy| {
            let is_there = copy.uses(index);
            over.extend(is_there.then_some(copy.parent));
            is_there
        });
        let mut dropped = Vec::new();
        in_flight.for_each(|tag, entry| {
            if !entry.is_request || entry.namespace != place {
                return;
            }
            match entry.owner {
                Owner::Command { .. } | Owner::Alone { .. } => over.push(tag),
                Owner::Part { parent } if is_of_all(in_flight.nsid(parent)) => dropped.push(tag),
                Owner::Part { parent } => over.push(parent),
                Owner::Dropped { .. } | Owner::Range { .. } | Owner::Internal => {}
            }
            if let Some(retired) = retired.get_mut(place) {
                retired.queue.cancel(tag);
            }
        });
        let absence = self.namespaces[index].absence;
        over.into_iter().for_each(|tag| in_flight.fail(tag, absence));
        for tag in dropped {
            if let Some(entry) = in_flight.get_mut(tag)
                && let Owner::Part { parent } = entry.owner
            {
                entry.owner = Owner::Dropped { parent };
            }
        }
    }

    /// Lets go of all disks, which have nothing in hand.
    pub(crate) fn forget_namespaces(&mut self) {
        self.namespaces.clear();
    }

    /// The queue that is retired at `place`, if its disk has nothing in hand any more.
    pub(crate) fn take_retired(&mut self, place: usize) -> Option<NamespaceQueue> {
        self.retired.take_idle(place)
    }

    /// Shows others what was counted so far. To be called before completions are posted, so that a
    /// host finds in the counters what it knows to be done.
    #[inline]
    pub(crate) fn publish(&self) {
        self.counters.io.publish(&self.transfers);
    }

    /// What may be spent from here on, in nanoseconds by estimate.
    #[inline]
    pub(crate) fn set_budget(&mut self, budget: i64) {
        self.budget = budget;
    }

    /// So many short commands were started: what they took.
    #[inline]
    pub(crate) fn charge(&mut self, commands: u32) {
        self.budget -= i64::from(commands) * cost::SHORT;
        self.touched += u64::from(commands) * PLACES;
    }

    /// Whether another command may be started: there is budget left.
    #[inline(always)]
    pub(crate) fn has_budget(&self) -> bool {
        self.budget > 0
    }

    /// Whether as much is under way as may be: nothing is to be fetched until something has ended.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.closed != 0 || self.exceeded().is_some()
    }

    /// As [`is_full`](Self::is_full), for commands that a dead process had fetched: they are
    /// carried out before the queues leave.
    pub(crate) fn is_full_for_replays(&self) -> bool {
        let passed = Closed::Leaves as u8 | Closed::Alone as u8;
        self.closed & !passed != 0 || self.exceeded().is_some()
    }

    /// Has nothing more fetched from here on, for this reason.
    pub(crate) fn close(&mut self, why: Closed) {
        self.closed |= why as u8;
    }

    /// Has commands fetched again, as far as this reason goes.
    pub(crate) fn open(&mut self, why: Closed) {
        self.closed &= !(why as u8);
    }

    /// Whether nothing is fetched for this reason.
    pub(super) fn is_closed(&self, why: Closed) -> bool {
        self.closed & why as u8 != 0
    }

    /// Whether so many places of the host's memory were touched that it is to be asked whether that
    /// was too much.
    pub(crate) fn has_spent(&self) -> bool {
        self.touched >= self.may_touch
    }

    /// It was asked, and was not too much.
    pub(crate) fn may_touch_more(&mut self) {
        self.touched = 0;
    }

    /// Of what there is as much under way as may be.
    #[inline]
    pub(crate) fn exceeded(&self) -> Option<Exceeded> {
        let Self { quota, in_flight, copies, long, forced, alone, .. } = self;
        if in_flight.len() == 0 {
            None
        } else if in_flight.len() >= quota.requests {
            Some(Exceeded::Requests)
        } else if in_flight.bytes() >= quota.bytes {
            Some(Exceeded::Bytes)
        } else if in_flight.pieces() >= quota.pieces {
            Some(Exceeded::Pieces)
        } else if copies.len().max(long.len()).max(forced.len()).max(alone.len())
            >= quota.long_commands
        {
            Some(Exceeded::LongCommands)
        } else {
            None
        }
    }

    /// Nothing more is started in this pass if that was too much.
    pub(super) fn review_quota(&mut self) {
        if self.is_full() {
            self.budget = self.budget.min(0);
        }
    }

    /// The tag of the command that was last found to be [pending](Started::Pending), by which its
    /// [end](CompletedCommand) names it.
    #[inline]
    pub(crate) fn last_tag(&self) -> u32 {
        self.last_tag
    }

    /// How many requests the disks have in hand.
    #[inline]
    pub(crate) fn pending(&self) -> usize {
        self.in_flight.len()
    }

    /// How many requests and commands that were under way have ended.
    pub(crate) fn ended(&self) -> u64 {
        self.in_flight.ended()
    }

    /// Commands that are started from now on go through `view`. The view until now is given back;
    /// commands in flight have it still.
    pub(crate) fn change_view(&mut self, view: View) -> View {
        self.scratch.clear();
        let queues = self.namespaces.iter_mut().chain(self.retired.iter_mut());
        queues.for_each(|ns| ns.queue.memory_changed(view.table()));
        let old = std::mem::replace(&mut self.view, view);
        self.measure_memory();
        old
    }

    /// With `write_through`, every write that is started from now on is forced to the medium.
    #[inline]
    pub(crate) fn set_write_through(&mut self, write_through: bool) {
        self.write_through = write_through;
    }

    /// Whether [`begin_turn`](Self::begin_turn) is of use.
    #[inline]
    pub(crate) fn takes_turns(&self) -> bool {
        self.takes_turns
    }

    /// The commands that come from here on are of submission queue `sq`.
    #[cold]
    pub(crate) fn begin_turn(&mut self, sq: usize) {
        self.namespaces.iter_mut().for_each(|ns| ns.queue.begin_turn(sq as u32));
    }

    /// Whether [`Prefetch`](super::prefetch::Prefetch) is of use.
    #[inline]
    pub(crate) fn wants_prefetch_hints(&self) -> bool {
        self.wants_hints
    }

    /// Starts a command of submission queue `sq`.
    #[inline(always)]
    pub(crate) fn start(&mut self, sqe: &Sqe, sq: usize, permit: Permit) -> Started {
        match sqe.opcode {
            READ => self.transfer::<false>(NvmOpcode::Read, sqe, sq, permit),
            WRITE => self.transfer::<false>(NvmOpcode::Write, sqe, sq, permit),
            _ => self.less_common(sqe, sq, permit),
        }
    }

    #[cold]
    pub(crate) fn count_error(&mut self, status: Status) {
        self.budget -= cost::FAILURE;
        self.touch(MAX_PLACES);
        // Who knows how far it came.
        self.spans.forget();
        self.counters.io.errors.add(1);
        self.counters.io.media_errors.add(u64::from(is_media_error(status)));
    }

    #[inline]
    pub(super) fn count(&mut self, kind: Kind) {
        match kind {
            Kind::Read(bytes) => {
                self.transfers.reads += 1;
                self.transfers.bytes_read += bytes;
            }
            Kind::Write(bytes) => {
                self.transfers.writes += 1;
                self.transfers.bytes_written += bytes;
            }
            Kind::Copy(bytes) => {
                self.counters.io.copies.add(1);
                self.counters.io.bytes_copied.add(bytes);
            }
            Kind::Verify(bytes) => {
                self.counters.io.others.add(1);
                self.transfers.bytes_read += bytes;
            }
            Kind::Other => self.counters.io.others.add(1),
        }
    }

    /// Read, Write and Compare: one request with data. The way that nearly all commands go, so what
    /// it needs is looked up once and errors are made elsewhere.
    #[inline(always)]
    fn transfer<const SLOW: bool>(
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
        let (mut pieces, mut places) = (if SLOW { self.scratch.pieces().len() } else { 0 }, 0);
        if SLOW {
            self.budget -= cost::of_pieces(pieces);
            if self.may_touch != u64::MAX {
                let all = self.scratch.pieces().iter();
                let fresh = self.spans.touch(all.map(|piece| (piece.address(), piece.len())));
                places = fresh + if sqe.flags == 0 { 0 } else { self.scratch.lists() };
                pieces += fresh * (self.fresh_weight - 1);
            }
        }
        if SLOW && Self::is_forced(namespace, &request, sqe, self.write_through) {
            self.touch(places);
            return self.force(index, request, (kind, pieces), sqe, sq, permit);
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

    /// Whether a request reads, and has to find what it reads on the medium, where it may not be
    /// yet.
    fn is_forced(
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
    fn force(
        &mut self,
        index: usize,
        request: Request,
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

    /// So many places of the host's memory were touched, at most.
    fn touch(&mut self, places: usize) {
        self.touched += places as u64;
        if self.has_spent() {
            self.budget = self.budget.min(0);
        }
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
            Marked::No => self.transfer::<true>(op, sqe, sq, permit),
            Marked::Park => self.park(sqe, sq, permit),
            Marked::Fails => Started::Failed(permit, Status::UNRECOVERED_READ),
        }
    }

    /// What blocks that are marked as uncorrectable have to do with a command.
    fn marks_of(&mut self, op: NvmOpcode, sqe: &Sqe) -> Marked {
        match blocks_of(&self.namespaces, sqe) {
            Some((index, blocks)) if self.namespaces[index].is_marked() => {
                self.look_at_marks(op, index, blocks)
            }
            _ => Marked::No,
        }
    }

    /// A long command has succeeded: what that took is counted at once.
    #[inline(never)]
    fn long_done(&mut self, bytes: u64, permit: Permit) -> Started {
        self.budget -= cost::of_command(bytes);
        Started::DoneLong(permit)
    }

    #[cold]
    #[inline(never)]
    fn less_common(&mut self, sqe: &Sqe, sq: usize, permit: Permit) -> Started {
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
        let requests = match op {
            NvmOpcode::WriteUncorrectable => return self.write_uncorrectable(sqe, sq, permit),
            NvmOpcode::Compare => return self.transfer::<false>(op, sqe, sq, permit),
            NvmOpcode::Copy => return self.copy(sqe, sq, permit),
            NvmOpcode::Flush => self.flush(sqe),
            NvmOpcode::DatasetManagement => self.dataset_management(sqe),
            NvmOpcode::WriteZeroes | NvmOpcode::Verify => self.without_data(op, sqe),
            NvmOpcode::ReservationRegister
            | NvmOpcode::ReservationReport
            | NvmOpcode::ReservationAcquire
            | NvmOpcode::ReservationRelease => return self.reservation(op, sqe, sq, permit),
            _ => Err(Status::INVALID_OPCODE.with_dnr()),
        };
        match requests {
            Err(status) => Started::Failed(permit, status),
            Ok(Requests::One(index, request, kind))
                if Self::is_forced(&self.namespaces[index], &request, sqe, self.write_through) =>
            {
                self.scratch.rewind();
                self.force(index, request, (kind, 0), sqe, sq, permit)
            }
            Ok(Requests::One(index, request, kind)) => {
                let longest = self.namespaces[index].queue.longest_inline();
                if piece(&request, longest) == request.len {
                    self.submit(index, &request, kind, sqe, sq, permit)
                } else {
                    let lba = sqe.cdw10_11();
                    self.begin(vec![(index, request)], (kind, lba), sqe, sq, permit)
                }
            }
            Ok(Requests::Several(parts)) => self.begin(parts, (Kind::Other, 0), sqe, sq, permit),
        }
    }

    /// Write Zeroes and Verify: one request without data.
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

    /// A Flush of one namespace, or of all of them (Identify Controller, VWC: broadcast NSID).
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
        // The other attributes are hints about access patterns, which we have no use for.
        if !dsm.ad {
            parts.clear();
        } else if namespace.is_read_only() {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
        }
        Ok(Requests::Several(parts))
    }

    /// Takes a Copy command on: it is carried out between two passes over the queues.
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

    /// What blocks that are marked as uncorrectable have to do with a copy.
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

    /// Hands one request without data to a disk.
    fn submit(
        &mut self,
        index: usize,
        request: &Request,
        kind: Kind,
        sqe: &Sqe,
        sq: usize,
        permit: Permit,
    ) -> Started {
        let tag = self.in_flight.next_tag();
        self.scratch.rewind();
        match self.namespaces[index].queue.submit(tag, request, &mut self.scratch) {
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

    /// Takes note of a request that a disk has in hand now, with `bytes` of data.
    fn keep(&mut self, tag: u32, bytes: u64, entry: InFlight) {
        self.scratch = self.spare.pop().unwrap_or_default();
        self.last_tag = tag;
        self.in_flight.insert(tag, entry);
        self.budget -= cost::of_request(bytes);
        self.review_quota();
    }

    /// A command of several requests: it ends with the last of them, in the first error, which is
    /// about block `lba`.
    fn begin(
        &mut self,
        parts: Vec<Part>,
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
        let Self { long, namespaces, in_flight, budget, .. } = self;
        let command = LongCommand::new(tag, Some(sq), parts);
        if !long.begin(command, namespaces, in_flight, budget) {
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
            _ => unreachable!("the entry is the one that was put in"),
        }
    }

    /// Flushes every namespace, for the controller itself; `latch` is dropped when that is done.
    pub(crate) fn flush_all(&mut self, latch: Latch) {
        let writable = (0..self.namespaces.len()).filter(|ns| !self.namespaces[*ns].is_read_only());
        let parts = writable.map(|index| (index, FLUSH)).collect();
        self.begin_own(parts, latch);
    }

    /// Verifies a piece of a namespace, for the controller itself; `latch` is dropped when that is
    /// done, and has the status of an error.
    pub(crate) fn verify(&mut self, piece: Piece, latch: Latch) {
        let Piece { nsid, offset, len } = piece;
        let index = index_of(&self.namespaces, nsid);
        let end = |index: usize| {
            let namespace = &self.namespaces[index];
            namespace.blocks << namespace.block_shift
        };
        match index {
            Ok(index) if offset.checked_add(len).is_some_and(|to| to <= end(index)) => {
                self.begin_own(vec![(index, Request { op: Op::Verify, offset, len })], latch);
            }
            Ok(_) => latch.set_status(INACTIVE),
            Err(status) => latch.set_status(status),
        }
    }

    fn begin_own(&mut self, parts: Vec<Part>, latch: Latch) {
        let tag = self.in_flight.next_tag();
        let mut entry =
            InFlight::new(Owner::Internal, 0, Kind::Other).at(NSID_ALL, 0).of_requests();
        entry.waiting = Some(latch);
        self.in_flight.insert(tag, entry);
        let Self { long, namespaces, in_flight, budget, .. } = self;
        if long.begin(LongCommand::new(tag, None, parts), namespaces, in_flight, budget) {
            self.end(tag);
        }
    }

    /// Hands all that was submitted to the system.
    #[inline]
    pub(crate) fn commit(&mut self) {
        if self.pending() != 0 {
            self.namespaces.iter_mut().for_each(|ns| ns.queue.commit());
            self.retired.iter_mut().for_each(|ns| ns.queue.commit());
        }
    }

    /// Calls `ended` for every command that has ended. Whether there is more to do at once, which
    /// no disk announces.
    pub(crate) fn reap(&mut self, mut ended: impl FnMut(CompletedCommand)) -> bool {
        let mut namespaces = std::mem::take(&mut self.namespaces);
        self.reap_queues(namespaces.iter_mut(), &mut ended);
        self.namespaces = namespaces;
        if !self.retired.is_empty() {
            let mut retired = std::mem::take(&mut self.retired);
            self.reap_queues(retired.iter_mut(), &mut ended);
            self.retired = retired;
        }
        let several = self.long.len() + self.forced.len() + self.alone.len();
        if self.copies.is_empty() && several + self.reservations.len() == 0 {
            return false;
        }
        self.advance(&mut ended)
    }

    #[inline]
    fn reap_queues<'a>(
        &mut self,
        queues: impl Iterator<Item = &'a mut NamespaceQueue>,
        ended: &mut impl FnMut(CompletedCommand),
    ) {
        for namespace in queues {
            if namespace.queue.pending() == 0 {
                continue;
            }
            namespace.queue.reap(&mut |tag, outcome, data| {
                self.recycle(data);
                if let Some(command) = self.request_ended(tag, outcome) {
                    ended(command);
                }
            });
        }
    }

    /// Keeps the room of a buffer that is not needed any more, if it is not too much.
    fn recycle(&mut self, mut data: Segments) {
        if data.room() <= SPARE_ROOM && self.spare.len() < SPARE {
            data.clear();
            self.spare.push(data);
        }
    }

    /// Goes on with the commands that are many requests. Whether there is more to do at once.
    #[cold]
    fn advance(&mut self, ended: &mut impl FnMut(CompletedCommand)) -> bool {
        let Self { copies, long, forced, namespaces, in_flight, .. } = self;
        // Half of what there is: the queues are to have the rest.
        let half = (self.budget + 1) / 2;
        let mut left = half;
        let copied = copies.advance(namespaces, in_flight, &mut left);
        let mut over = long.advance(namespaces, in_flight, &mut left);
        over.extend(forced.advance(namespaces, in_flight, &mut left));
        over.append(&mut self.reservations.ended);
        self.budget -= half - left;
        for CopyEnd { parent, status, dw0 } in copied {
            if !status.is_success() {
                self.in_flight.fail(parent, status);
            }
            self.alone.dw0 = dw0;
            if let Some(end) = self.end(parent) {
                ended(CompletedCommand { dw0, ..end });
            }
        }
        for parent in over {
            if let Some(end) = self.end(parent) {
                ended(end);
            }
        }
        if self.alone.len() != 0 {
            self.advance_alone(ended);
        }
        self.can_advance()
    }

    /// Whether there is more to do at once, which no disk announces.
    pub(crate) fn can_advance(&self) -> bool {
        self.copies.can_advance()
            || self.long.can_advance()
            || self.forced.can_advance()
            || self.alone.can_advance()
            || !self.reservations.ended.is_empty()
    }

    /// A request has ended: the command that has ended with it, if there is one.
    fn request_ended(
        &mut self,
        tag: u32,
        outcome: Result<(), DiskError>,
    ) -> Option<CompletedCommand> {
        if let Err(error) = outcome {
            let reading = self.in_flight.get_mut(tag)?.kind.is_reading();
            self.in_flight.fail(tag, status_of(error, reading));
        }
        self.end(tag)
    }

    /// An entry has come to its end: the command that has ended with it, if there is one.
    pub(super) fn end(&mut self, tag: u32) -> Option<CompletedCommand> {
        let InFlight { owner, status, kind, nsid, lba, waiting, .. } =
            self.in_flight.remove(tag)?;
        if let (Some(latch), Status::ABORT_REQUESTED) = (&waiting, status.code()) {
            latch.set_status(Status::ABORT_REQUESTED);
        }
        match owner {
            Owner::Part { parent } => {
                if !status.is_success() {
                    self.in_flight.fail(parent, status);
                }
                self.long.part_ended(parent);
                self.forced.part_ended(parent);
                None
            }
            Owner::Dropped { parent } => {
                self.long.part_ended(parent);
                None
            }
            Owner::Range { copy, range } => {
                self.copies.range_ended(copy, range, status);
                None
            }
            Owner::Internal => {
                if !status.is_success() {
                    tracing::warn!(%status, "what the controller wanted for itself has failed");
                    if let Some(latch) = &waiting {
                        latch.set_status(status);
                    }
                }
                None
            }
            Owner::Alone { sq, cid, permit } => {
                if status.is_success() {
                    self.count(kind);
                } else {
                    self.count_error(status);
                }
                self.alone_ended((sq, cid), permit, status);
                None
            }
            Owner::Command { sq, cid, permit } => {
                if status.is_success() {
                    self.count(kind);
                } else {
                    self.count_error(status);
                }
                Some(CompletedCommand { sq, cid, tag, permit, status, nsid, lba, dw0: 0 })
            }
        }
    }

    /// Asks the disks to give up the command (`sq`, `cid`) soon. `latch` is dropped when it has
    /// ended, and has the status Command Abort Requested if that is how.
    pub(crate) fn abort(&mut self, sq: usize, cid: u16, latch: Latch) {
        let Some(found) = self.in_flight.find(sq, cid) else { return };
        self.give_up_command(found);
        if let Some(entry) = self.in_flight.get_mut(found) {
            entry.waiting = Some(latch);
        }
    }

    /// Asks the disks to give up a command soon.
    pub(super) fn give_up_command(&mut self, found: u32) {
        let Self { in_flight, namespaces, retired, .. } = self;
        let itself = in_flight.get(found).map(|entry| (found, entry));
        for (tag, entry) in itself.into_iter().chain(in_flight.requests_of(found)) {
            cancel_request(namespaces, retired, tag, entry);
        }
        self.copies.cancel(|copy| copy.parent == found);
        self.long.cancel(found);
        self.forced.cancel(|command| command.parent == found);
        self.alone.cancel(|tag, _| tag == found, &mut self.in_flight);
    }

    /// Asks the disks to give up every command of submission queue `sq`, or of all queues.
    pub(crate) fn cancel_all(&mut self, of: Option<usize>) {
        let Self { in_flight, namespaces, retired, .. } = self;
        match of {
            None => in_flight.for_each(|tag, entry| {
                cancel_request(namespaces, retired, tag, entry);
            }),
            Some(queue) => in_flight.of_queue(queue).for_each(|(tag, entry)| {
                cancel_request(namespaces, retired, tag, entry);
            }),
        }
        self.copies.cancel(|copy| of.is_none_or(|queue| copy.sq == queue));
        self.forced.cancel(|command| of.is_none_or(|queue| command.sq == queue));
        self.long.cancel_all(of);
        // All of them: the controller is reset, and nobody says when others go on.
        self.alone.is_given_up |= of.is_none();
        let which = |_, sq| of.is_none_or(|queue| sq == queue);
        self.alone.cancel(which, &mut self.in_flight);
    }
}

/// Has the disk that has a request give it up, if the entry is one.
fn cancel_request(
    namespaces: &mut [NamespaceQueue],
    retired: &mut Retired,
    tag: u32,
    entry: &InFlight,
) {
    let at = entry.namespace;
    if entry.is_request
        && let Some(namespace) = namespaces.get_mut(at).or_else(|| retired.get_mut(at))
    {
        namespace.queue.cancel(tag);
    }
}

fn take_turns(namespaces: &[NamespaceQueue]) -> bool {
    namespaces.iter().any(|namespace| namespace.queue.takes_turns())
}

fn want_hints(namespaces: &[NamespaceQueue]) -> bool {
    namespaces.iter().any(|namespace| namespace.queue.wants_prefetch_hints())
}

const FLUSH: Request = Request { op: Op::Flush, offset: 0, len: 0 };

/// What a less common command asks of the disks, by the index of the namespace.
enum Requests {
    One(usize, Request, Kind),
    /// Each without data; the command ends with the last.
    Several(Vec<Part>),
}
