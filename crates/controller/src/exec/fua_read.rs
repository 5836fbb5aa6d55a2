//! Reads with Force Unit Access: Read, Compare and Verify of data on the medium.
//!
//! On a disk with a volatile write cache, such a command first commits the cached data and then
//! reads (NVM 1.1, "Read command"; likewise Compare and Verify). So it consists of two requests in
//! sequence: a flush of the whole disk, and the request of the command.

use super::in_flight::{InFlight, InFlightTable, Kind, Owner};
use super::metadata::submit_any;
use super::multi_step::FLUSH;
use super::namespace::NamespaceQueue;
use super::quota::cost;
use super::status::status_of;
use shadowbell_backend::{Metadata, Op, Request, Submitted};
use shadowbell_memory::Segments;
use shadowbell_spec::status::Status;

/// Progress of a forced read.
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

/// Submits a request of the command in entry `parent`. `Some` if the request is in flight.
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
            // `Kind::Verify` selects read errors; the bytes are counted by the command's entry.
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

/// Forced reads of one engine.
#[derive(Debug, Default)]
pub(super) struct FuaReads(Vec<FuaRead>);

impl FuaReads {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Submits the flush of a command, which then continues in [`advance`](Self::advance).
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
            let is_over = command.stage == Stage::Over;
            over.extend(is_over.then_some(command.parent));
            !is_over
        });
        over
    }

    /// Cancels these commands: requests that are not submitted yet are dropped.
    pub(super) fn cancel(&mut self, which: impl Fn(&FuaRead) -> bool) {
        self.0
            .iter_mut()
            .filter(|command| which(command))
            .for_each(|command| command.cancelled = true);
    }
}
