//! Everything that executing I/O commands for one controller takes, on one worker.

use super::alone::Alone;
use super::appends::Appends;
use super::copy::Copies;
use super::forced::ForcedReads;
use super::in_flight::{InFlightTable, Kind};
use super::long::LongCommands;
use super::namespace::NamespaceQueue;
use super::quota::{Exceeded, Quota, cost};
use super::reservation_commands::ReservationCommands;
use super::retired::Retired;
use super::spans::TouchedSpans;
use super::status::is_media_error;
use crate::queue::Permit;
use crate::stats::{PartCounters, TransferStats};
use shadowbell_memory::{Segments, View, page_tables};
use shadowbell_spec::Sqe;
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::status::Status;
use std::sync::Arc;
use std::sync::atomic::AtomicU16;

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
pub(super) const MAX_PLACES: usize = shadowbell_memory::MAX_SGL_DESCRIPTORS;
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

/// Everything that executing I/O commands for one controller takes, on one worker.
pub(crate) struct Engine {
    pub(super) view: View,
    pub(super) limits: Limits,
    pub(super) quota: Quota,
    /// As how many a piece counts whose page table is not there yet.
    pub(super) fresh_weight: usize,
    /// What may still be spent in this pass, by the measure of [`cost`]; below 0 if the last
    /// command took more than there was.
    pub(super) budget: i64,
    /// Nothing more is started, for each reason that has its bit here.
    pub(super) closed: u8,
    /// Places of the host's memory that were touched, at most, and how many may be in this pass.
    pub(super) touched: u64,
    pub(super) may_touch: u64,
    /// What was touched of it, if that is counted.
    pub(super) spans: TouchedSpans,
    pub(super) write_through: bool,
    /// Whether a disk wants hints of requests before they come.
    pub(super) wants_hints: bool,
    /// Whether a disk wants to know whose requests come.
    pub(super) takes_turns: bool,
    /// By NSID - 1.
    pub(super) namespaces: Vec<NamespaceQueue>,
    pub(super) retired: Retired,
    pub(super) in_flight: InFlightTable,
    /// Tag of the command that was last found to be [pending](Started::Pending).
    pub(super) last_tag: u32,
    pub(super) scratch: Segments,
    /// Emptied buffers, kept for their room.
    pub(super) spare: Vec<Segments>,
    pub(super) copies: Copies,
    /// The descriptor formats of Copy that the host has enabled: bit n for format n.
    pub(super) copy_formats: Arc<AtomicU16>,
    pub(super) long: LongCommands,
    pub(super) forced: ForcedReads,
    pub(super) alone: Alone,
    pub(super) reservations: ReservationCommands,
    pub(super) appends: Appends,
    /// What was done, for others to read.
    pub(crate) counters: Arc<PartCounters>,
    pub(super) transfers: TransferStats,
}

/// What a command's data has to keep to.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// CC.MPS in bytes.
    pub(super) page_size: usize,
    /// MDTS in bytes.
    pub(super) max_transfer: usize,
    /// WZSL in bytes.
    pub(super) max_zeroes: u64,
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
            appends: Appends::default(),
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

    /// As [`start`](Self::start), a command that a process that is dead may have begun.
    #[cold]
    pub(crate) fn start_again(&mut self, sqe: &Sqe, sq: usize, permit: Permit) -> Started {
        self.namespaces.iter_mut().for_each(|ns| ns.queue.set_replays(true));
        let started = self.start(sqe, sq, permit);
        self.namespaces.iter_mut().for_each(|ns| ns.queue.set_replays(false));
        started
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

    /// So many places of the host's memory were touched, at most.
    pub(super) fn touch(&mut self, places: usize) {
        self.touched += places as u64;
        if self.has_spent() {
            self.budget = self.budget.min(0);
        }
    }
}

/// Whether one of the disks wants to know whose requests come.
pub(super) fn take_turns(namespaces: &[NamespaceQueue]) -> bool {
    namespaces.iter().any(|namespace| namespace.queue.takes_turns())
}

/// Whether one of the disks wants hints of requests before they come.
pub(super) fn want_hints(namespaces: &[NamespaceQueue]) -> bool {
    namespaces.iter().any(|namespace| namespace.queue.wants_prefetch_hints())
}
