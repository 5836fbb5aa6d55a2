//! I/O command execution of one controller on one I/O thread: start, progress, completion and abort
//! of commands, and namespace changes while commands are in flight.

use super::copy::{Copies, CopyEnd};
use super::exclusive_state::Exclusive;
use super::in_flight::{
    Appending, Appends, CompletedCommand, InFlight, InFlightTable, Kind, Owner, ReservationCommands,
};
use super::multi_step::{FuaReads, MultiStepCommands};
use super::namespace::{Draining, NamespaceQueue, is_media_error, status_of};
use super::quota::{Exceeded, Quota, TouchedSpans, cost};
use crate::notice::Latch;
use crate::queue::Permit;
use crate::stats::{PartCounters, TransferStats};
use shadowbell_disk::DiskError;
use shadowbell_memory::{Segments, View, page_tables};
use shadowbell_spec::Sqe;
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::sqe::NSID_ALL;
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
const SHORT_LOCATIONS: u64 = 4;
/// Upper bound of memory locations that a command's PRP or SGL list occupies. It also applies to
/// commands that fail.
pub(super) const MAX_LOCATIONS: usize = shadowbell_memory::MAX_SGL_DESCRIPTORS;
/// Limit of in-flight memory pieces that had no page table when they were submitted. An access to
/// such a piece creates a page table, even after a reclaim has freed excess page tables. So the
/// number of these pieces is bounded.
const MAX_NEW_SPANS: usize = 4096;

const READ: u8 = NvmOpcode::Read as u8;
const WRITE: u8 = NvmOpcode::Write as u8;

/// Outcome of starting a command.
#[derive(Debug)]
pub(crate) enum Started {
    /// Success of a short command. The caller charges its cost ([`Engine::charge`]).
    Done(Permit),
    /// Success of a long command. Its cost is charged already, so the caller rechecks the budget.
    DoneLong(Permit),
    /// In flight: [`Engine::reap`] reports the end and the status.
    Pending,
    /// Failure with this status.
    Failed(Permit, Status),
    /// Not started, because the FUSE field of the command marks it as half of a fused operation.
    Fused(Permit),
}

/// Executes the I/O commands of one controller on one I/O thread.
pub(crate) struct Engine {
    pub(super) view: View,
    pub(super) limits: Limits,
    pub(super) quota: Quota,
    /// Quota weight of a memory piece whose page table does not exist yet.
    pub(super) new_span_weight: usize,
    /// Remaining budget of this pass, in units of [`cost`]. It is negative if the last command cost
    /// more than was left.
    pub(super) budget: i64,
    /// Bit mask of [`Closed`] reasons. If it is not 0, no new command is started.
    closed: u8,
    /// Upper bound of the number of host memory locations touched since the last page-table check,
    /// and the limit of that number.
    pub(super) touched: u64,
    pub(super) may_touch: u64,
    /// Memory spans touched recently, if touches are counted.
    pub(super) spans: TouchedSpans,
    pub(super) write_through: bool,
    /// True if a disk uses prefetch hints.
    uses_hints: bool,
    /// True if a disk schedules requests by their submission queue.
    pub(super) schedules_sources: bool,
    /// Namespaces by NSID - 1.
    pub(super) namespaces: Vec<NamespaceQueue>,
    pub(super) draining: Draining,
    pub(super) in_flight: InFlightTable,
    /// Tag of the last command that was [pending](Started::Pending).
    pub(super) last_tag: u32,
    pub(super) scratch: Segments,
    /// Empty segment lists, for reuse of their allocations.
    pub(super) pooled_lists: Vec<Segments>,
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
            uses_hints: use_hints(&namespaces),
            schedules_sources: schedule_sources(&namespaces),
            view,
            limits: Limits { page_size, max_transfer, max_zeroes },
            quota,
            new_span_weight: (quota.pieces / MAX_NEW_SPANS).max(1),
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
            pooled_lists: Vec::new(),
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
        self.may_touch = if bytes != 0 { page_tables::TOUCHES_PER_CHECK } else { u64::MAX };
        self.spans.resize(bytes);
    }

    /// True if the host's memory map has sparse ranges. Then accesses are counted, and page tables
    /// are reclaimed when the count reaches a limit.
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

    /// Publishes the transfer counters. Called before completions are posted: the counters then
    /// include every command whose completion the host can see.
    #[inline]
    pub(crate) fn publish(&self) {
        self.counters.io.publish(&self.transfers);
    }

    /// Sets the budget of the pass, in nanoseconds of estimated cost.
    #[inline]
    pub(crate) fn set_budget(&mut self, budget: i64) {
        self.budget = budget;
    }

    /// Charges the cost of `commands` short commands.
    #[inline]
    pub(crate) fn charge(&mut self, commands: u32) {
        self.budget -= i64::from(commands) * cost::SHORT_COST;
        self.touched += u64::from(commands) * SHORT_LOCATIONS;
    }

    /// True if there is budget left for another command.
    #[inline(always)]
    pub(crate) fn has_budget(&self) -> bool {
        self.budget > 0
    }

    /// True if the engine is closed or a quota is reached, so that no command is fetched.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.closed != 0 || self.exceeded().is_some()
    }

    /// Variant of [`is_full`](Self::is_full) for replayed commands, which a dead process had
    /// fetched. They are executed even if the queues are about to move to another thread or another
    /// command waits for exclusive execution.
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

    /// True if the number of touched memory locations has reached its limit. The caller then checks
    /// with [`page_tables`] if page tables have to be reclaimed.
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
    pub(crate) fn restart(&mut self, sqe: &Sqe, sq: usize, permit: Permit) -> Started {
        self.namespaces.iter_mut().for_each(|ns| ns.queue.set_replays(true));
        let started = self.start(sqe, sq, permit);
        self.namespaces.iter_mut().for_each(|ns| ns.queue.set_replays(false));
        started
    }

    /// Number of requests and commands that have ended so far.
    pub(crate) fn ended(&self) -> u64 {
        self.in_flight.ended()
    }

    /// Replaces the memory view for commands that are started later. Returns the old view, which
    /// commands in flight still use.
    pub(crate) fn change_view(&mut self, view: View) -> View {
        self.scratch.clear();
        let queues = self.namespaces.iter_mut().chain(self.draining.iter_mut());
        queues.for_each(|ns| ns.queue.memory_changed(&view));
        self.fua_reads.memory_changed(&view, &mut self.in_flight);
        let old = std::mem::replace(&mut self.view, view);
        self.measure_memory();
        old
    }

    /// Sets write-through mode: every write that is started later has Force Unit Access.
    #[inline]
    pub(crate) fn set_write_through(&mut self, write_through: bool) {
        self.write_through = write_through;
    }

    /// True if a disk uses [`begin_turn`](Self::begin_turn).
    #[inline]
    pub(crate) fn schedules_sources(&self) -> bool {
        self.schedules_sources
    }

    /// Announces to the disks that the following requests belong to submission queue `sq`.
    #[cold]
    pub(crate) fn begin_turn(&mut self, sq: usize) {
        self.namespaces.iter_mut().for_each(|ns| ns.queue.begin_turn(sq as u32));
    }

    /// True if a disk uses the hints of [`Prefetch`](super::prefetch::Prefetch).
    #[inline]
    pub(crate) fn uses_prefetch_hints(&self) -> bool {
        self.uses_hints
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
        self.touch(MAX_LOCATIONS);
        // The command may have touched any part of its data before it failed.
        self.spans.clear();
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

/// True if a disk schedules requests by their submission queue.
pub(super) fn schedule_sources(namespaces: &[NamespaceQueue]) -> bool {
    namespaces.iter().any(|namespace| namespace.queue.schedules_sources())
}

/// True if a disk uses prefetch hints.
fn use_hints(namespaces: &[NamespaceQueue]) -> bool {
    namespaces.iter().any(|namespace| namespace.queue.uses_prefetch_hints())
}

/// Limits of the pool of segment lists: capacity of a list in pieces, and number of lists. They
/// suffice for the commands of common hosts. Larger lists are freed, so that a guest's single large
/// command does not occupy memory permanently.
const POOLED_CAPACITY: usize = 512;
const MAX_POOLED: usize = 256;

/// Progress and end of commands in flight.
impl Engine {
    /// Submits everything queued in the disks to the operating system.
    #[inline]
    pub(crate) fn commit(&mut self) {
        if self.pending() != 0 {
            self.namespaces.iter_mut().for_each(|ns| ns.queue.commit());
            self.draining.iter_mut().for_each(|ns| ns.queue.commit());
        }
    }

    /// Calls `ended` for every command that has ended. Returns true if more work can be done at
    /// once; the caller must call again, because no disk event will signal it.
    pub(crate) fn reap(&mut self, mut ended: impl FnMut(CompletedCommand)) -> bool {
        let mut namespaces = std::mem::take(&mut self.namespaces);
        self.reap_queues(namespaces.iter_mut(), &mut ended);
        self.namespaces = namespaces;
        if !self.draining.is_empty() {
            let mut draining = std::mem::take(&mut self.draining);
            self.reap_queues(draining.iter_mut(), &mut ended);
            self.draining = draining;
        }
        let several = self.multi_step.len() + self.fua_reads.len() + self.exclusive.len();
        let others = self.reservations.len() + self.appends.len();
        if self.copies.is_empty() && several + others == 0 {
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

    /// Empties a segment list and stores it for reuse, unless it is large or enough lists are
    /// stored.
    fn recycle(&mut self, mut data: Segments) {
        if data.room() <= POOLED_CAPACITY && self.pooled_lists.len() < MAX_POOLED {
            data.clear();
            self.pooled_lists.push(data);
        }
    }

    /// Advances commands of many requests. Returns true if more work can be done at once.
    #[cold]
    fn advance(&mut self, ended: &mut impl FnMut(CompletedCommand)) -> bool {
        let Self { copies, multi_step, fua_reads, namespaces, in_flight, .. } = self;
        // Half of the budget is for these commands, the other half for new commands from the
        // queues.
        let half = (self.budget + 1) / 2;
        let mut left = half;
        let copied = copies.advance(namespaces, in_flight, &mut left);
        let mut over = multi_step.advance(namespaces, in_flight, &mut left);
        over.extend(fua_reads.advance(namespaces, in_flight, &mut left));
        over.extend(self.reservations.take_ended());
        self.budget -= half - left;
        for CopyEnd { parent, status, dw0 } in copied {
            if !status.is_success() {
                self.in_flight.fail(parent, status);
            }
            self.exclusive.dw0 = dw0;
            if let Some(end) = self.end(parent) {
                ended(CompletedCommand { dw0, ..end });
            }
        }
        for parent in over {
            if let Some(end) = self.end(parent) {
                ended(end);
            }
        }
        for (parent, Appending { place, tag: (index, tag) }) in self.appends.take() {
            let namespace = &mut self.namespaces[index];
            let place = place.or_else(|| namespace.queue.appended(tag)).unwrap_or(0);
            let lba = place >> namespace.block_shift;
            if let Some(end) = self.end(parent) {
                let lba = if end.status.is_success() { lba } else { 0 };
                ended(CompletedCommand { dw0: lba as u32, dw1: (lba >> 32) as u32, ..end });
            }
        }
        if self.exclusive.len() != 0 {
            self.advance_exclusive(ended);
        }
        self.can_advance()
    }

    /// True if more work can be done at once, which no disk event will signal.
    pub(crate) fn can_advance(&self) -> bool {
        self.copies.can_advance()
            || self.multi_step.can_advance()
            || self.fua_reads.can_advance()
            || self.exclusive.can_advance()
            || self.reservations.has_ended()
            || self.appends.has_ended()
    }

    /// Handles the end of a request. Returns the command if this was its last request.
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

    /// Ends an entry. Returns its command if the command's completion can be posted now.
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
                self.multi_step.part_ended(parent);
                self.fua_reads.part_ended(parent);
                self.appends.ended(parent);
                None
            }
            Owner::Dropped { parent } => {
                self.multi_step.part_ended(parent);
                None
            }
            Owner::Range { copy, range } => {
                self.copies.range_ended(copy, range, status);
                None
            }
            Owner::Internal => {
                if !status.is_success() {
                    tracing::warn!(
                        %status, "a flush or self-test of the controller has failed"
                    );
                    if let Some(latch) = &waiting {
                        latch.set_status(status);
                    }
                }
                None
            }
            Owner::Exclusive { sq, cid, permit } => {
                if status.is_success() {
                    self.count(kind);
                } else {
                    self.count_error(status);
                }
                self.exclusive_ended((sq, cid), permit, status);
                None
            }
            Owner::Command { sq, cid, permit } => {
                if status.is_success() {
                    self.count(kind);
                } else {
                    self.count_error(status);
                }
                Some(CompletedCommand { sq, cid, tag, permit, status, nsid, lba, dw0: 0, dw1: 0 })
            }
        }
    }
}

/// Command abort: Abort, deletion of queues, controller reset.
impl Engine {
    /// Asks the disks to cancel the command (`sq`, `cid`). `latch` is released when the command has
    /// ended. If the command was aborted, the latch gets the status Command Abort Requested.
    pub(crate) fn abort(&mut self, sq: usize, cid: u16, latch: Latch) {
        let Some(found) = self.in_flight.find(sq, cid) else { return };
        self.cancel_command(found);
        if let Some(entry) = self.in_flight.get_mut(found) {
            entry.waiting = Some(latch);
        }
    }

    /// Asks the disks to cancel the command in entry `found` and its requests.
    pub(super) fn cancel_command(&mut self, found: u32) {
        let Self { in_flight, namespaces, draining, .. } = self;
        let itself = in_flight.get(found).map(|entry| (found, entry));
        for (tag, entry) in itself.into_iter().chain(in_flight.requests_of(found)) {
            cancel_request(namespaces, draining, tag, entry);
        }
        self.copies.cancel(|copy| copy.parent == found);
        self.multi_step.cancel(found);
        self.fua_reads.cancel(|command| command.parent == found);
        self.exclusive.cancel(|tag, _| tag == found, &mut self.in_flight);
    }

    /// Asks the disks to cancel all commands of submission queue `sq`, or of all queues.
    pub(crate) fn cancel_all(&mut self, of: Option<usize>) {
        let Self { in_flight, namespaces, draining, .. } = self;
        match of {
            None => in_flight.for_each(|tag, entry| {
                cancel_request(namespaces, draining, tag, entry);
            }),
            Some(queue) => in_flight.of_queue(queue).for_each(|(tag, entry)| {
                cancel_request(namespaces, draining, tag, entry);
            }),
        }
        self.copies.cancel(|copy| of.is_none_or(|queue| copy.sq == queue));
        self.fua_reads.cancel(|command| of.is_none_or(|queue| command.sq == queue));
        self.multi_step.cancel_all(of);
        // `None` means a controller reset, after which the control plane does not send
        // `end_exclusive`: held completions are then posted at once.
        self.exclusive.is_reset |= of.is_none();
        let which = |_, sq| of.is_none_or(|queue| sq == queue);
        self.exclusive.cancel(which, &mut self.in_flight);
    }
}

/// Cancels the disk request of an in-flight entry. Does nothing for entries without a disk request.
fn cancel_request(
    namespaces: &mut [NamespaceQueue],
    draining: &mut Draining,
    tag: u32,
    entry: &InFlight,
) {
    let at = entry.namespace;
    if entry.is_request
        && let Some(namespace) = namespaces.get_mut(at).or_else(|| draining.get_mut(at))
    {
        namespace.queue.cancel(tag);
    }
}

/// Attach, detach and change of namespaces while commands are in flight.
impl Engine {
    /// Replaces the namespace at `index` by `new`, or removes it. If there was a namespace, its
    /// disk queue moves to the list of draining queues. Returns the queue's index in this list, for
    /// [`take_drained`](Self::take_drained).
    ///
    /// Requests in flight continue on the old disk. Requests that were not submitted yet go to the
    /// new disk, even if they belong to a command in flight. After a removal, all commands of the
    /// namespace end with the status `absence` as soon as the disk has released their requests.
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
        self.uses_hints = use_hints(&self.namespaces);
        self.schedules_sources = schedule_sources(&self.namespaces);
        self.review_marks();
        self.review_restrictions();
        if old.is_none() {
            return None;
        }
        let place = self.draining.push(old);
        self.in_flight.for_each_mut(|_, entry| {
            if entry.is_request && entry.namespace == index {
                entry.namespace = place;
            }
        });
        if is_removed {
            self.cancel_namespace(index, place);
        }
        Some(place)
    }

    /// Aborts the commands of the removed namespace `index`, whose disk queue is now the draining
    /// queue at `place`.
    fn cancel_namespace(&mut self, index: usize, place: usize) {
        let Self { in_flight, copies, multi_step, draining, .. } = self;
        // A Flush of all namespaces continues with the remaining namespaces.
        let is_of_all = |nsid: Option<u32>| nsid == Some(NSID_ALL);
        let mut over =
            multi_step.remove_namespace(index, |parent| is_of_all(in_flight.nsid(parent)));
        copies.cancel(|copy| {
            let has_entry = copy.uses(index);
            over.extend(has_entry.then_some(copy.parent));
            has_entry
        });
        let mut dropped = Vec::new();
        in_flight.for_each(|tag, entry| {
            if !entry.is_request || entry.namespace != place {
                return;
            }
            match entry.owner {
                Owner::Command { .. } | Owner::Exclusive { .. } => over.push(tag),
                Owner::Part { parent } if is_of_all(in_flight.nsid(parent)) => dropped.push(tag),
                Owner::Part { parent } => over.push(parent),
                Owner::Dropped { .. } | Owner::Range { .. } | Owner::Internal => {}
            }
            if let Some(draining) = draining.get_mut(place) {
                draining.queue.cancel(tag);
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

    /// Drops all disk queues. The caller ensures that no request is in flight.
    pub(crate) fn drop_namespaces(&mut self) {
        self.namespaces.clear();
    }

    /// Takes the draining queue at `place`, if it has no more requests in flight.
    pub(crate) fn take_drained(&mut self, place: usize) -> Option<NamespaceQueue> {
        self.draining.take_idle(place)
    }
}
