//! Progress and end of commands in flight.

use super::appends::Appending;
use super::copy::CopyEnd;
use super::engine::Engine;
use super::in_flight::{CompletedCommand, InFlight, Owner};
use super::namespace::NamespaceQueue;
use super::status::status_of;
use shadowbell_backend::DiskError;
use shadowbell_memory::Segments;
use shadowbell_spec::status::Status;

/// Maximum capacity, in pieces, of an emptied buffer that is kept for reuse, and the maximum
/// number of kept buffers: enough for the commands of common hosts. Larger buffers are freed, so a
/// guest that once used many pieces does not occupy memory for ever.
const SPARE_ROOM: usize = 512;
const SPARE: usize = 256;

impl Engine {
    /// Submits everything queued in the disks to the operating system.
    #[inline]
    pub(crate) fn commit(&mut self) {
        if self.pending() != 0 {
            self.namespaces.iter_mut().for_each(|ns| ns.queue.commit());
            self.draining.iter_mut().for_each(|ns| ns.queue.commit());
        }
    }

    /// Calls `ended` for every command that has ended. True if further work is possible at once,
    /// which no disk will signal.
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

    /// Keeps an emptied buffer for reuse, within the limits.
    fn recycle(&mut self, mut data: Segments) {
        if data.room() <= SPARE_ROOM && self.spare.len() < SPARE {
            data.clear();
            self.spare.push(data);
        }
    }

    /// Advances commands of many requests. True if further work is possible at once.
    #[cold]
    fn advance(&mut self, ended: &mut impl FnMut(CompletedCommand)) -> bool {
        let Self { copies, multi_step, fua_reads, namespaces, in_flight, .. } = self;
        // Half of the budget; the other half is for the queues.
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

    /// True if further work is possible at once, which no disk will signal.
    pub(crate) fn can_advance(&self) -> bool {
        self.copies.can_advance()
            || self.multi_step.can_advance()
            || self.fua_reads.can_advance()
            || self.exclusive.can_advance()
            || self.reservations.has_ended()
            || self.appends.has_ended()
    }

    /// Handles the end of a request. Returns the command if it has ended, too.
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

    /// Ends an entry. Returns the command if it has ended and its completion can be posted.
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
                    tracing::warn!(%status, "an internal request of the controller has failed");
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
