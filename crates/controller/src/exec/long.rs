//! Commands that are many requests without data: Dataset Management of many ranges, a Flush of all
//! namespaces, a long Write Zeroes on a disk that does it inline.
//!
//! A guest decides how many ranges there are and how long they are, so neither is done all at once.
//! A few requests of such a command are under way at a time; the next ones follow between two
//! passes over the queues, as far as the controller's share of the turn goes.

use super::in_flight::{InFlight, InFlightTable, Kind, Owner};
use super::namespace::NamespaceQueue;
use super::quota::cost;
use super::status::status_of;
use super::with_metadata::submit_any;
use shadowbell_backend::{Metadata, Op, Request, Submitted};
use shadowbell_memory::Segments;
use shadowbell_spec::status::Status;
use std::collections::VecDeque;

/// A request to flush a disk.
pub(super) const FLUSH: Request = Request { op: Op::Flush, offset: 0, len: 0 };

/// Requests of all long commands of a controller that its disks have in hand, at most; and as many
/// of its copies.
pub(super) const UNDER_WAY: u32 = 32;

/// One request of a long command, by the index of its namespace.
pub(super) type Part = (usize, Request);

/// A command of many requests.
#[derive(Debug)]
pub(super) struct LongCommand {
    /// The command's entry.
    parent: u32,
    /// Its submission queue; `None` for what the controller wants for itself.
    sq: Option<usize>,
    parts: Box<[Part]>,
    /// What its only part has to do with metadata.
    metadata: Option<Metadata>,
    /// The part to be submitted next, and how many bytes of it have been.
    next: usize,
    within: u64,
    /// Requests that the disks have in hand.
    left: u32,
    /// Nothing more of it is wanted.
    cancelled: bool,
}

impl LongCommand {
    /// The command in entry `parent`.
    pub(super) fn new(parent: u32, sq: Option<usize>, parts: Vec<Part>) -> Self {
        let parts = parts.into();
        Self { parent, sq, parts, metadata: None, next: 0, within: 0, left: 0, cancelled: false }
    }

    /// It has one part, which has to do with metadata, if there are any.
    pub(super) fn with(self, metadata: Option<Metadata>) -> Self {
        Self { metadata, ..self }
    }

    fn has_more(&self) -> bool {
        !self.cancelled && self.next < self.parts.len()
    }

    /// Whether nothing is left to be done or to be waited for.
    fn is_over(&self) -> bool {
        self.left == 0 && !self.has_more()
    }

    /// Submits the next requests, as long as there is budget and `room` for requests under way.
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
                    // For the sake of its errors: its bytes are the command's.
                    let kind = if reading { Kind::Verify(0) } else { Kind::Other };
                    in_flight.insert(tag, InFlight::new(owner, index, kind));
                }
            }
        }
    }
}

/// How much of a request is submitted at once: all of it, if the disk has no limit to that.
pub(super) fn piece(request: &Request, longest: u64) -> u64 {
    match request.op {
        Op::WriteZeroes { .. } | Op::Discard | Op::Verify => request.len.min(longest.max(1)),
        _ => request.len,
    }
}

/// The long commands of one engine.
#[derive(Debug, Default)]
pub(super) struct LongCommands {
    /// In the order in which they came.
    list: VecDeque<LongCommand>,
    /// Requests that the disks have in hand.
    under_way: u32,
}

impl LongCommands {
    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    /// Begins a command. Whether it is over already: its entry is the caller's to end.
    pub(super) fn begin(
        &mut self,
        mut command: LongCommand,
        namespaces: &mut [NamespaceQueue],
        in_flight: &mut InFlightTable,
        budget: &mut i64,
    ) -> bool {
        // One that was begun before is first.
        if self.list.is_empty() {
            let mut room = UNDER_WAY.saturating_sub(self.under_way);
            command.advance(namespaces, in_flight, budget, &mut room);
            self.under_way += command.left;
            if command.is_over() {
                return true;
            }
        }
        self.list.push_back(command);
        false
    }

    /// A request of the command in entry `parent` has ended.
    pub(super) fn part_ended(&mut self, parent: u32) {
        if let Some(command) = self.list.iter_mut().find(|command| command.parent == parent) {
            command.left -= 1;
            self.under_way -= 1;
        }
    }

    /// Whether something can be done without waiting for anybody.
    pub(super) fn can_advance(&self) -> bool {
        let has_room = self.under_way < UNDER_WAY;
        self.list.iter().any(|command| command.is_over() || has_room && command.has_more())
    }

    /// Goes on, as far as the budget goes. The entries of those commands that are over.
    pub(super) fn advance(
        &mut self,
        namespaces: &mut [NamespaceQueue],
        in_flight: &mut InFlightTable,
        budget: &mut i64,
    ) -> Vec<u32> {
        let mut over = Vec::new();
        let mut room = UNDER_WAY.saturating_sub(self.under_way);
        self.list.retain_mut(|command| {
            command.advance(namespaces, in_flight, budget, &mut room);
            if command.is_over() {
                if command.has_unsubmitted() {
                    in_flight.fail(command.parent, Status::ABORT_REQUESTED);
                }
                over.push(command.parent);
            }
            !command.is_over()
        });
        self.under_way = UNDER_WAY - room;
        over
    }

    /// Nothing more of the command in entry `parent` is to be begun.
    pub(super) fn cancel(&mut self, parent: u32) {
        self.list
            .iter_mut()
            .filter(|command| command.parent == parent)
            .for_each(|command| command.cancelled = true);
    }

    /// The namespace at `index` is gone. What is left to be done there is not done; the commands in
    /// `except`, which are about all namespaces, go on with the others. The entries of those that
    /// have lost something to do and are no such commands.
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

    /// As above, of all commands, or of those of one submission queue.
    pub(super) fn cancel_all(&mut self, of: Option<usize>) {
        self.list
            .iter_mut()
            .filter(|command| of.is_none() || command.sq == of)
            .for_each(|command| command.cancelled = true);
    }
}

impl LongCommand {
    fn has_unsubmitted(&self) -> bool {
        self.next < self.parts.len()
    }
}
