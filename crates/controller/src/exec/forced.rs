//! Reads of what is on the medium: Read, Compare and Verify with Force Unit Access.
//!
//! On a disk with a volatile cache they have it commit what it holds first, and read then (NVM 1.1,
//! "Read command"; Compare and Verify say the same). That is two requests, one after the other: a
//! flush, which is of the whole disk, and the command's own.

use super::in_flight::{InFlight, InFlightTable, Kind, Owner};
use super::long::FLUSH;
use super::namespace::NamespaceQueue;
use super::quota::cost;
use super::status::status_of;
use super::with_metadata::submit_any;
use shadowbell_backend::{Metadata, Op, Request, Submitted};
use shadowbell_memory::Segments;
use shadowbell_spec::status::Status;

/// How far a command is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The disk has the flush in hand.
    Flushing,
    /// The flush is done.
    Flushed,
    /// The disk has the command's own request in hand.
    Reading,
    Over,
}

/// A command.
#[derive(Debug)]
pub(super) struct ForcedRead {
    /// Its entry.
    pub(super) parent: u32,
    /// Its submission queue.
    pub(super) sq: usize,
    /// Index of the namespace.
    pub(super) namespace: usize,
    /// What it asks for, once what the cache holds is committed.
    pub(super) request: Request,
    /// And what that has to do with metadata.
    metadata: Option<Metadata>,
    pub(super) data: Segments,
    stage: Stage,
    cancelled: bool,
}

impl ForcedRead {
    pub(super) fn new(
        (parent, sq): (u32, usize),
        namespace: usize,
        (request, metadata): (Request, Option<Metadata>),
        data: Segments,
    ) -> Self {
        let stage = Stage::Flushed;
        Self { parent, sq, namespace, request, metadata, data, stage, cancelled: false }
    }

    /// Gives the disk the next request, if it is its turn.
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
        // One that has failed, by its flush or because its namespace is gone, reads nothing.
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

/// Gives a disk a request of the command in entry `parent`: whether it has it in hand.
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
            // For the sake of its errors: its bytes are the command's.
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

/// The commands of one engine.
#[derive(Debug, Default)]
pub(super) struct ForcedReads(Vec<ForcedRead>);

impl ForcedReads {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Begins a command. It goes on with [`advance`](Self::advance).
    pub(super) fn begin(
        &mut self,
        mut command: ForcedRead,
        namespaces: &mut [NamespaceQueue],
        in_flight: &mut InFlightTable,
    ) {
        let to = (command.parent, command.namespace);
        if submit(namespaces, in_flight, to, (&FLUSH, None), &mut Segments::new()).is_some() {
            command.stage = Stage::Flushing;
        }
        self.0.push(command);
    }

    /// A request of the command in entry `parent` has ended.
    pub(super) fn part_ended(&mut self, parent: u32) {
        if let Some(command) = self.0.iter_mut().find(|command| command.parent == parent) {
            command.stage = match command.stage {
                Stage::Flushing => Stage::Flushed,
                _ => Stage::Over,
            };
        }
    }

    /// Whether something can be done without waiting for anybody.
    pub(super) fn can_advance(&self) -> bool {
        self.0.iter().any(|command| matches!(command.stage, Stage::Flushed | Stage::Over))
    }

    /// Goes on, as far as the budget goes. The entries of those commands that are over.
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

    /// These commands are not wanted any more: what is left of them is not begun.
    pub(super) fn cancel(&mut self, which: impl Fn(&ForcedRead) -> bool) {
        self.0
            .iter_mut()
            .filter(|command| which(command))
            .for_each(|command| command.cancelled = true);
    }
}
