//! Requests of the controller itself, not of a host command: flush at shutdown, self-test.

use super::engine::Engine;
use super::in_flight::{InFlight, Kind, Owner};
use super::multi_step::{FLUSH, MultiStepCommand, Part};
use super::namespace::index_of;
use crate::admin::self_test::Piece;
use crate::namespace::INACTIVE;
use crate::notice::Latch;
use shadowbell_backend::{Op, Request};
use shadowbell_spec::sqe::NSID_ALL;

impl Engine {
    /// Flushes every writable namespace; `latch` is released when the flushes have ended.
    pub(crate) fn flush_all(&mut self, latch: Latch) {
        let writable = (0..self.namespaces.len()).filter(|ns| !self.namespaces[*ns].is_read_only());
        let parts = writable.map(|index| (index, FLUSH)).collect();
        self.begin_internal(parts, latch);
    }

    /// Verifies a piece of a namespace for the controller; `latch` is released at the end, with the
    /// status of an error.
    pub(crate) fn verify(&mut self, piece: Piece, latch: Latch) {
        let Piece { nsid, offset, len } = piece;
        let index = index_of(&self.namespaces, nsid);
        let end = |index: usize| {
            let namespace = &self.namespaces[index];
            namespace.blocks << namespace.block_shift
        };
        match index {
            Ok(index) if offset.checked_add(len).is_some_and(|to| to <= end(index)) => {
                self.begin_internal(vec![(index, Request { op: Op::Verify, offset, len })], latch);
            }
            Ok(_) => latch.set_status(INACTIVE),
            Err(status) => latch.set_status(status),
        }
    }

    fn begin_internal(&mut self, parts: Vec<Part>, latch: Latch) {
        let tag = self.in_flight.next_tag();
        let mut entry =
            InFlight::new(Owner::Internal, 0, Kind::Other).at(NSID_ALL, 0).of_requests();
        entry.waiting = Some(latch);
        self.in_flight.insert(tag, entry);
        let Self { multi_step, namespaces, in_flight, budget, .. } = self;
        if multi_step.begin(MultiStepCommand::new(tag, None, parts), namespaces, in_flight, budget)
        {
            self.end(tag);
        }
    }
}
