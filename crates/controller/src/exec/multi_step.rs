//! Commands of many requests without data, and reads with Force Unit Access.
//!
//! Commands of many requests are Dataset Management with many ranges, a Flush of all namespaces,
//! and a long Write Zeroes on a disk that executes it inline.
//!
//! The host determines the number and length of ranges, so a command's requests are not submitted
//! all at once. A few of them are in flight at a time. Further ones are submitted between two
//! passes over the queues, and are charged to the controller's share of the I/O thread's time.
//!
//! # Force Unit Access
//!
//! A Read, Compare or Verify with Force Unit Access accesses the data on the medium.
//!
//! If the disk has a volatile write cache, the cached data must be committed before the read (NVM
//! 1.1, "Read command"; likewise Compare and Verify). So the command consists of two requests in
//! sequence: a flush of the whole disk, and the read itself.

use super::in_flight::{InFlight, InFlightTable, Kind, Owner};
use super::namespace::{NamespaceQueue, status_of};
use super::quota::cost;
use shadowbell_disk::{Metadata, Op, Request, Submitted, submit_any};
use shadowbell_memory::{AfterChange, Segments, View, ViewChange};
use shadowbell_spec::status::Status;
use std::collections::VecDeque;

/// Disk flush request.
pub(super) const FLUSH: Request = Request { op: Op::Flush, offset: 0, len: 0 };

/// Maximum number of in-flight requests of all multi-step commands of a controller. A separate
/// limit of the same size applies to its copies.
pub(super) const MAX_IN_FLIGHT: u32 = 32;

/// Request of a multi-step command, with the index of its namespace.
pub(super) type Part = (usize, Request);

/// Command of many requests.
#[derive(Debug)]
pub(super) struct MultiStepCommand {
    /// In-flight entry of the command.
    parent: u32,
    /// Index of the submission queue; `None` for a command of the controller itself.
    sq: Option<usize>,
    parts: Box<[Part]>,
    /// Metadata parameters, if the command has a single part.
    metadata: Option<Metadata>,
    /// Index of the next part, and the number of this part's bytes that were submitted already.
    next: usize,
    within: u64,
    /// Number of requests in flight.
    left: u32,
    /// True if no further requests are to be submitted.
    cancelled: bool,
}

impl MultiStepCommand {
    /// Creates a multi-step command for the entry `parent`.
    pub(super) fn new(parent: u32, sq: Option<usize>, parts: Vec<Part>) -> Self {
        let parts = parts.into();
        Self { parent, sq, parts, metadata: None, next: 0, within: 0, left: 0, cancelled: false }
    }

    /// Sets the metadata parameters of a command with a single part.
    pub(super) fn with(self, metadata: Option<Metadata>) -> Self {
        Self { metadata, ..self }
    }

    fn has_more(&self) -> bool {
        !self.cancelled && self.next < self.parts.len()
    }

    /// True if no request is in flight or left to be submitted.
    fn is_finished(&self) -> bool {
        self.left == 0 && !self.has_more()
    }

    /// Submits the next requests while there is budget and `room` for requests in flight.
    fn advance(
        &mut self,
        namespaces: &mut [NamespaceQueue],
        in_flight: &mut InFlightTable,
        budget: &mut i64,
        room: &mut u32,
    ) {
        while *budget > 0 && *room > 0 && self.has_more() {
            let (index, whole) = self.parts[self.next];
            let namespace = &mut namespaces[index];
            let metadata = match (self.metadata, namespace.metadata()) {
                (Some(all), Some(format)) => {
                    Some(all.after(self.within >> namespace.block_shift, format))
                }
                _ => None,
            };
            let queue = &mut namespace.queue;
            let len = (whole.len - self.within).min(piece(&whole, queue.longest_inline()));
            let request = Request { op: whole.op, offset: whole.offset + self.within, len };
            self.within += len;
            if self.within == whole.len {
                (self.next, self.within) = (self.next + 1, 0);
            }
            let tag = in_flight.next_tag();
            let reading = request.op == Op::Verify;
            let data = &mut Segments::new();
            match submit_any(&mut **queue, tag, &request, metadata.as_ref(), data) {
                Submitted::Done(outcome) => {
                    *budget -= cost::of_command(len);
                    if let Err(error) = outcome {
                        in_flight.fail(self.parent, status_of(error, reading));
                    }
                }
                Submitted::Pending => {
                    *budget -= cost::of_request(0);
                    *room -= 1;
                    self.left += 1;
                    let owner = Owner::Part { parent: self.parent };
                    // `Kind::Verify` makes a disk error a read error. Its byte count is 0, because
                    // the bytes are counted in the entry of the command.
                    let kind = if reading { Kind::Verify(0) } else { Kind::Other };
                    in_flight.insert(tag, InFlight::new(owner, index, kind));
                }
            }
        }
    }
}

/// Number of bytes of a request to submit at once, at most `longest` for operations that may be
/// split.
pub(super) fn piece(request: &Request, longest: u64) -> u64 {
    match request.op {
        Op::WriteZeroes { .. } | Op::Discard | Op::Verify => request.len.min(longest.max(1)),
        _ => request.len,
    }
}

/// Multi-step commands of one engine.
#[derive(Debug, Default)]
pub(super) struct MultiStepCommands {
    /// Commands in order of arrival.
    list: VecDeque<MultiStepCommand>,
    /// Number of requests in flight.
    requests: u32,
}

impl MultiStepCommands {
    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    /// Begins a command. Returns true if it has ended already; then the caller ends its entry.
    pub(super) fn begin(
        &mut self,
        mut command: MultiStepCommand,
        namespaces: &mut [NamespaceQueue],
        in_flight: &mut InFlightTable,
        budget: &mut i64,
    ) -> bool {
        // Earlier commands have precedence, so the command starts now only if there are none.
        if self.list.is_empty() {
            let mut room = MAX_IN_FLIGHT.saturating_sub(self.requests);
            command.advance(namespaces, in_flight, budget, &mut room);
            self.requests += command.left;
            if command.is_finished() {
                return true;
            }
        }
        self.list.push_back(command);
        false
    }

    /// Records the end of a request of the command in entry `parent`.
    pub(super) fn part_ended(&mut self, parent: u32) {
        if let Some(command) = self.list.iter_mut().find(|command| command.parent == parent) {
            command.left -= 1;
            self.requests -= 1;
        }
    }

    /// True if a step is possible without waiting.
    pub(super) fn can_advance(&self) -> bool {
        let has_room = self.requests < MAX_IN_FLIGHT;
        self.list.iter().any(|command| command.is_finished() || has_room && command.has_more())
    }

    /// Advances commands within the budget. Returns the entries of the ended commands.
    pub(super) fn advance(
        &mut self,
        namespaces: &mut [NamespaceQueue],
        in_flight: &mut InFlightTable,
        budget: &mut i64,
    ) -> Vec<u32> {
        let mut over = Vec::new();
        let mut room = MAX_IN_FLIGHT.saturating_sub(self.requests);
        self.list.retain_mut(|command| {
            command.advance(namespaces, in_flight, budget, &mut room);
            if command.is_finished() {
                if command.has_unsubmitted() {
                    in_flight.fail(command.parent, Status::ABORT_REQUESTED);
                }
                over.push(command.parent);
            }
            !command.is_finished()
        });
        self.requests = MAX_IN_FLIGHT - room;
        over
    }

    /// Cancels the command in entry `parent`: no further requests are submitted.
    pub(super) fn cancel(&mut self, parent: u32) {
        self.list
            .iter_mut()
            .filter(|command| command.parent == parent)
            .for_each(|command| command.cancelled = true);
    }

    /// Drops the unsubmitted parts for the removed namespace `index`. Returns the entries of the
    /// commands that lost parts. Commands in `except` are not returned: they address all namespaces
    /// and continue with the remaining ones.
    pub(super) fn remove_namespace(
        &mut self,
        index: usize,
        except: impl Fn(u32) -> bool,
    ) -> Vec<u32> {
        let mut ended = Vec::new();
        for command in &mut self.list {
            let (done, left) = command.parts.split_at(command.next);
            if left.iter().all(|(of, _)| *of != index) {
                continue;
            }
            let others = left.iter().filter(|(of, _)| *of != index);
            command.parts = done.iter().chain(others).copied().collect();
            command.within = 0;
            if !except(command.parent) {
                ended.push(command.parent);
            }
        }
        ended
    }

    /// Cancels all commands, or those of one submission queue.
    pub(super) fn cancel_all(&mut self, of: Option<usize>) {
        self.list
            .iter_mut()
            .filter(|command| of.is_none() || command.sq == of)
            .for_each(|command| command.cancelled = true);
    }
}

impl MultiStepCommand {
    fn has_unsubmitted(&self) -> bool {
        self.next < self.parts.len()
    }
}

/// Progress of a read with Force Unit Access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The flush is in flight.
    Flushing,
    /// The flush has ended.
    Flushed,
    /// The request of the command is in flight.
    Reading,
    Over,
}

/// Read, Compare or Verify with Force Unit Access.
#[derive(Debug)]
pub(super) struct FuaRead {
    /// In-flight entry of the command.
    pub(super) parent: u32,
    /// Index of the submission queue.
    pub(super) sq: usize,
    /// Index of the namespace.
    pub(super) namespace: usize,
    /// Request that is submitted after the flush.
    pub(super) request: Request,
    /// Metadata parameters of that request.
    metadata: Option<Metadata>,
    pub(super) data: Segments,
    stage: Stage,
    cancelled: bool,
}

impl FuaRead {
    pub(super) fn new(
        (parent, sq): (u32, usize),
        namespace: usize,
        (request, metadata): (Request, Option<Metadata>),
        data: Segments,
    ) -> Self {
        let stage = Stage::Flushed;
        Self { parent, sq, namespace, request, metadata, data, stage, cancelled: false }
    }

    /// Submits the command's request if the flush has ended.
    fn advance(
        &mut self,
        namespaces: &mut [NamespaceQueue],
        in_flight: &mut InFlightTable,
        budget: &mut i64,
    ) {
        if self.stage != Stage::Flushed {
            return;
        }
        if self.cancelled {
            in_flight.fail(self.parent, Status::ABORT_REQUESTED);
        }
        // Nothing is read if the flush has failed or the namespace was removed.
        if in_flight.has_failed(self.parent) {
            self.stage = Stage::Over;
            return;
        }
        let Self { request, metadata, data, .. } = self;
        *budget -= cost::of_request(request.len);
        let to = (self.parent, self.namespace);
        self.stage = submit(namespaces, in_flight, to, (request, metadata.as_ref()), data)
            .map_or(Stage::Over, |()| Stage::Reading);
    }
}

/// Submits a request of the command in entry `parent`. Returns `Some` if the request is in flight.
fn submit(
    namespaces: &mut [NamespaceQueue],
    in_flight: &mut InFlightTable,
    (parent, namespace): (u32, usize),
    (request, metadata): (&Request, Option<&Metadata>),
    data: &mut Segments,
) -> Option<()> {
    if namespaces[namespace].is_none() {
        in_flight.fail(parent, namespaces[namespace].absence);
        return None;
    }
    let tag = in_flight.next_tag();
    let reading = request.op != Op::Flush;
    match submit_any(&mut *namespaces[namespace].queue, tag, request, metadata, data) {
        Submitted::Pending => {
            // `Kind::Verify` makes a disk error a read error. Its byte count is 0, because the
            // bytes are counted in the entry of the command.
            let kind = if reading { Kind::Verify(0) } else { Kind::Other };
            in_flight.insert(tag, InFlight::new(Owner::Part { parent }, namespace, kind));
            Some(())
        }
        Submitted::Done(outcome) => {
            if let Err(error) = outcome {
                in_flight.fail(parent, status_of(error, reading));
            }
            None
        }
    }
}

/// Reads with Force Unit Access of one engine.
#[derive(Debug, Default)]
pub(super) struct FuaReads(Vec<FuaRead>);

impl FuaReads {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Starts a read with Force Unit Access by a flush. When the flush has ended,
    /// [`advance`](Self::advance) submits the read.
    pub(super) fn begin(
        &mut self,
        mut command: FuaRead,
        namespaces: &mut [NamespaceQueue],
        in_flight: &mut InFlightTable,
    ) {
        let to = (command.parent, command.namespace);
        if submit(namespaces, in_flight, to, (&FLUSH, None), &mut Segments::new()).is_some() {
            command.stage = Stage::Flushing;
        }
        self.0.push(command);
    }

    /// Records the end of a request of the command in entry `parent`.
    pub(super) fn part_ended(&mut self, parent: u32) {
        if let Some(command) = self.0.iter_mut().find(|command| command.parent == parent) {
            command.stage = match command.stage {
                Stage::Flushing => Stage::Flushed,
                _ => Stage::Over,
            };
        }
    }

    /// True if a step is possible without waiting.
    pub(super) fn can_advance(&self) -> bool {
        self.0.iter().any(|command| matches!(command.stage, Stage::Flushed | Stage::Over))
    }

    /// Advances commands within the budget. Returns the entries of the ended commands.
    pub(super) fn advance(
        &mut self,
        namespaces: &mut [NamespaceQueue],
        in_flight: &mut InFlightTable,
        budget: &mut i64,
    ) -> Vec<u32> {
        let mut over = Vec::new();
        self.0.retain_mut(|command| {
            if *budget > 0 {
                command.advance(namespaces, in_flight, budget);
            }
            let is_finished = command.stage == Stage::Over;
            over.extend(is_finished.then_some(command.parent));
            !is_finished
        });
        over
    }

    /// Applies a change of the host memory map to commands whose read is not submitted yet. A
    /// command fails if its data buffer is no longer mapped.
    pub(super) fn memory_changed(&mut self, view: &View, in_flight: &mut InFlightTable) {
        let mut change = ViewChange::new(view);
        for command in &mut self.0 {
            if command.data.move_to(&mut change) == AfterChange::Unmapped {
                in_flight.fail(command.parent, Status::DATA_XFER_ERROR);
            }
        }
    }

    /// Cancels the commands for which `which` is true: their unsubmitted requests are dropped.
    pub(super) fn cancel(&mut self, which: impl Fn(&FuaRead) -> bool) {
        self.0
            .iter_mut()
            .filter(|command| which(command))
            .for_each(|command| command.cancelled = true);
    }
}
