//! Command abort: Abort, deletion of queues, controller reset.

use super::draining::Draining;
use super::engine::Engine;
use super::in_flight::InFlight;
use super::namespace::NamespaceQueue;
use crate::notice::Latch;

impl Engine {
    /// Asks the disks to cancel the command (`sq`, `cid`). `latch` is released when the command has
    /// ended; its status is Command Abort Requested if the command was aborted.
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
        // A reset: the control plane will not send the end of exclusive execution any more.
        self.exclusive.is_reset |= of.is_none();
        let which = |_, sq| of.is_none_or(|queue| sq == queue);
        self.exclusive.cancel(which, &mut self.in_flight);
    }
}

/// Asks the disk of a request to cancel it, if the entry is a request.
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
