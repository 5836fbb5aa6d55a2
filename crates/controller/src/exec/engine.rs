//! I/O command execution of one controller on one I/O thread.

use super::appends::Appends;
use super::copy::Copies;
use super::draining::Draining;
use super::exclusive_state::Exclusive;
use super::fua_read::FuaReads;
use super::in_flight::{InFlightTable, Kind};
use super::multi_step::MultiStepCommands;
use super::namespace::NamespaceQueue;
use super::quota::{Exceeded, Quota, cost};
use super::reservation_commands::ReservationCommands;
use super::status::is_media_error;
use super::touched::TouchedSpans;
use crate::queue::Permit;
use crate::stats::{PartCounters, TransferStats};
use shadowbell_memory::{Segments, View, page_tables};
use shadowbell_spec::Sqe;
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::status::Status;
use std::sync::Arc;
use std::sync::atomic::AtomicU16;

/// Reason for which the engine starts no new commands: a bit of [`Engine`]'s `closed` mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closed {
    /// The queues are about to move to another I/O thread.
    Leaves = 1,
    /// Page tables of the host's memory are being reclaimed.
    PageTables = 2,
    /// A command requires exclusive execution.
    Exclusive = 4,
}

/// Upper bound of memory locations that a short command touches: its PRP list and three data pages.
const PLACES: u64 = 4;
/// Upper bound of memory locations that a command's PRP or SGL list occupies, also if it is
/// refused.
pub(super) const MAX_PLACES: usize = shadowbell_memory::MAX_SGL_DESCRIPTORS;
/// Limit of in-flight memory pieces whose page table did not exist before. In-flight requests can
/// create their page tables even after a reclaim, so their number has to be bounded.
const FRESH_IN_FLIGHT: usize = 4096;

const READ: u8 = NvmOpcode::Read as u8;
const WRITE: u8 = NvmOpcode::Write as u8;

/// Outcome of starting a command.
#[derive(Debug)]
pub(crate) enum Started {
    /// Success, of a short command: the caller charges its cost ([`Engine::charge`]).
    Done(Permit),
    /// Success, of a long command, whose cost is charged already: the caller rechecks the budget.
    DoneLong(Permit),
    /// In flight: [`Engine::reap`] reports the end and the status.
    Pending,
    /// Failure with this status.
    Failed(Permit, Status),
    /// Not started, because FUSE marks the command as half of a fused operation.
    Fused(Permit),
}

/// Executes the I/O commands of one controller on one I/O thread.
pub(crate) struct Engine {
    pub(super) view: View,
    pub(super) limits: Limits,
    pub(super) quota: Quota,
    /// Quota weight of a memory piece whose page table does not exist yet.
    pub(super) fresh_weight: usize,
    /// Remaining budget of this pass, in units of [`cost`]; negative if the last command cost more
    /// than the remainder.
    pub(super) budget: i64,
    /// Bit mask of [`Closed`] reasons. If it is not 0, no new command is started.
    pub(super) closed: u8,
    /// Memory locations of the host touched since the last check (upper bound), and their limit.
    pub(super) touched: u64,
    pub(super) may_touch: u64,
    /// Memory spans touched recently, if touches are counted.
    pub(super) spans: TouchedSpans,
    pub(super) write_through: bool,
    /// True if a disk wants prefetch hints.
    pub(super) wants_hints: bool,
    /// True if a disk wants to know the submission queue of each request.
    pub(super) takes_turns: bool,
    /// Namespaces by NSID - 1.
    pub(super) namespaces: Vec<NamespaceQueue>,
    pub(super) draining: Draining,
    pub(super) in_flight: InFlightTable,
    /// Tag of the last command that was [pending](Started::Pending).
    pub(super) last_tag: u32,
    pub(super) scratch: Segments,
    /// Emptied segment lists, pooled for their allocation.
    pub(super) spare: Vec<Segments>,
    pub(super) copies: Copies,
    /// Copy descriptor formats that the host has enabled: bit n for format n.
    pub(super) copy_formats: Arc<AtomicU16>,
    pub(super) multi_step: MultiStepCommands,
    pub(super) fua_reads: FuaReads,
    pub(super) exclusive: Exclusive,
    pub(super) reservations: ReservationCommands,
    pub(super) appends: Appends,
    /// I/O counters, read by other threads.
    pub(crate) counters: Arc<PartCounters>,
    pub(super) transfers: TransferStats,
}

/// Data transfer limits of a command.
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
            draining: Draining::default(),
            in_flight: InFlightTable::default(),
            last_tag: 0,
            scratch: Segments::new(),
            spare: Vec::new(),
            copies: Copies::default(),
            copy_formats: Arc::default(),
            multi_step: MultiStepCommands::default(),
            fua_reads: FuaReads::default(),
            exclusive: Exclusive::default(),
            reservations: ReservationCommands::default(),
            appends: Appends::default(),
            transfers: counters.io.transfers(),
            counters,
        };
        engine.measure_memory();
        engine.review_restrictions();
        engine
    }

    /// Sets the shared mask of Copy descriptor formats that the host has enabled.
    pub(crate) fn set_copy_formats(&mut self, formats: &Arc<AtomicU16>) {
        self.copy_formats = Arc::clone(formats);
    }

    /// Updates the memory touch counting after a change of the host's memory map.
    fn measure_memory(&mut self) {
        let bytes = self.view.table().sparse_bytes();
        self.may_touch = if bytes != 0 { page_tables::SPEND } else { u64::MAX };
        self.spans.resize(bytes);
    }

    /// True if touches of the host's memory are counted, because the host shares a lot of it.
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

    /// All disk queues, including draining ones.
    pub(crate) fn queues(&self) -> impl Iterator<Item = &NamespaceQueue> {
        self.namespaces.iter().chain(self.draining.iter())
    }

    /// Publishes the transfer counters. Called before completions are posted, so that the counters
    /// include every command whose completion the host has seen.
    #[inline]
    pub(crate) fn publish(&self) {
        self.counters.io.publish(&self.transfers);
    }

    /// Sets the budget in nanoseconds (estimated).
    #[inline]
    pub(crate) fn set_budget(&mut self, budget: i64) {
        self.budget = budget;
    }

    /// Charges the cost of `commands` short commands.
    #[inline]
    pub(crate) fn charge(&mut self, commands: u32) {
        self.budget -= i64::from(commands) * cost::SHORT;
        self.touched += u64::from(commands) * PLACES;
    }

    /// True if there is budget left for another command.
    #[inline(always)]
    pub(crate) fn has_budget(&self) -> bool {
        self.budget > 0
    }

    /// True if the engine is closed or a quota is reached: no command is fetched until a command
    /// ends.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.closed != 0 || self.exceeded().is_some()
    }

    /// [`is_full`](Self::is_full) for commands that a dead process had fetched. They are executed
    /// even if the queues are about to move to another thread or if a command waits for exclusive
    /// execution.
    pub(crate) fn is_full_for_replays(&self) -> bool {
        let passed = Closed::Leaves as u8 | Closed::Exclusive as u8;
        self.closed & !passed != 0 || self.exceeded().is_some()
    }

    /// Stops fetching for this reason.
    pub(crate) fn close(&mut self, why: Closed) {
        self.closed |= why as u8;
    }

    /// Removes this reason; fetching continues if no other reason is set.
    pub(crate) fn open(&mut self, why: Closed) {
        self.closed &= !(why as u8);
    }

    /// True if fetching is stopped for this reason.
    pub(super) fn is_closed(&self, why: Closed) -> bool {
        self.closed & why as u8 != 0
    }

    /// True if the touched memory locations reach the limit. The caller then asks
    /// [`page_tables`] whether page tables have to be reclaimed.
    pub(crate) fn has_spent(&self) -> bool {
        self.touched >= self.may_touch
    }

    /// Resets the count of touched locations after the check of the page tables.
    pub(crate) fn may_touch_more(&mut self) {
        self.touched = 0;
    }

    /// The quota that is reached, if any.
    #[inline]
    pub(crate) fn exceeded(&self) -> Option<Exceeded> {
        let Self { quota, in_flight, copies, multi_step, fua_reads, exclusive, .. } = self;
        if in_flight.len() == 0 {
            None
        } else if in_flight.len() >= quota.requests {
            Some(Exceeded::Requests)
        } else if in_flight.bytes() >= quota.bytes {
            Some(Exceeded::Bytes)
        } else if in_flight.pieces() >= quota.pieces {
            Some(Exceeded::Pieces)
        } else if copies.len().max(multi_step.len()).max(fua_reads.len()).max(exclusive.len())
            >= quota.long_commands
        {
            Some(Exceeded::MultiStepCommands)
        } else {
            None
        }
    }

    /// Ends the budget of this pass if the engine is full.
    pub(super) fn review_quota(&mut self) {
        if self.is_full() {
            self.budget = self.budget.min(0);
        }
    }

    /// Tag of the last command that was [pending](Started::Pending). Its [end](CompletedCommand)
    /// carries the same tag.
    #[inline]
    pub(crate) fn last_tag(&self) -> u32 {
        self.last_tag
    }

    /// Number of in-flight requests and commands.
    #[inline]
    pub(crate) fn pending(&self) -> usize {
        self.in_flight.len()
    }

    /// [`start`](Self::start) for a command that a dead process may have executed in part.
    #[cold]
    pub(crate) fn start_again(&mut self, sqe: &Sqe, sq: usize, permit: Permit) -> Started {
        self.namespaces.iter_mut().for_each(|ns| ns.queue.set_replays(true));
        let started = self.start(sqe, sq, permit);
        self.namespaces.iter_mut().for_each(|ns| ns.queue.set_replays(false));
        started
    }

    /// Number of requests and commands that have ended so far.
    pub(crate) fn ended(&self) -> u64 {
        self.in_flight.ended()
    }

    /// Replaces the memory view for commands that are started from now on. Returns the old view;
    /// in-flight commands still use it.
    pub(crate) fn change_view(&mut self, view: View) -> View {
        self.scratch.clear();
        let queues = self.namespaces.iter_mut().chain(self.draining.iter_mut());
        queues.for_each(|ns| ns.queue.memory_changed(view.table()));
        let old = std::mem::replace(&mut self.view, view);
        self.measure_memory();
        old
    }

    /// Sets write-through mode: every write that is started from now on has Force Unit Access.
    #[inline]
    pub(crate) fn set_write_through(&mut self, write_through: bool) {
        self.write_through = write_through;
    }

    /// True if a disk uses [`begin_turn`](Self::begin_turn).
    #[inline]
    pub(crate) fn takes_turns(&self) -> bool {
        self.takes_turns
    }

    /// Tells the disks that the following requests belong to submission queue `sq`.
    #[cold]
    pub(crate) fn begin_turn(&mut self, sq: usize) {
        self.namespaces.iter_mut().for_each(|ns| ns.queue.begin_turn(sq as u32));
    }

    /// True if a disk uses the hints of [`Prefetch`](super::prefetch::Prefetch).
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
            _ => self.start_other(sqe, sq, permit),
        }
    }

    #[cold]
    pub(crate) fn count_error(&mut self, status: Status) {
        self.budget -= cost::FAILURE;
        self.touch(MAX_PLACES);
        // The command may have touched any part of its data before it failed.
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

    /// Counts touched memory locations (upper bound); ends the budget of this pass at the limit.
    pub(super) fn touch(&mut self, places: usize) {
        self.touched += places as u64;
        if self.has_spent() {
            self.budget = self.budget.min(0);
        }
    }
}

/// True if a disk wants to know the submission queue of each request.
pub(super) fn take_turns(namespaces: &[NamespaceQueue]) -> bool {
    namespaces.iter().any(|namespace| namespace.queue.takes_turns())
}

/// True if a disk wants prefetch hints.
pub(super) fn want_hints(namespaces: &[NamespaceQueue]) -> bool {
    namespaces.iter().any(|namespace| namespace.queue.wants_prefetch_hints())
}
