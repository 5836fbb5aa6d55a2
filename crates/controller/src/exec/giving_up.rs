//! Command abort: Abort, deletion of queues, controller reset.

use super::engine::Engine;
use super::in_flight::InFlight;
use super::namespace::NamespaceQueue;
use super::retired::Retired;
use crate::latch::Latch;

impl Engine {
    /// Asks the disks to cancel the command (`sq`, `cid`). `latch` is released when the command has
    /// ended; its status is Command Abort Requested if the command was aborted.
    pub(crate) fn abort(&mut self, sq: usize, cid: u16, latch: Latch) {
        let Some(found) = self.in_flight.find(sq, cid) else { return };
        self.give_up_command(found);
        if let Some(entry) = self.in_flight.get_mut(found) {
            entry.waiting = Some(latch);
        }
    }

    /// Asks the disks to cancel the command in entry `found` and its requests.
    pub(super) fn give_up_command(&mut self, found: u32) {
        let Self { in_flight, namespaces, retired, .. } = self;
        let itself = in_flight.get(found).map(|entry| (found, entry));
        for (tag, entry) in itself.into_iter().chain(in_flight.requests_of(found)) {
            cancel_request(namespaces, retired, tag, entry);
        }
        self.copies.cancel(|copy| copy.parent == found);
        self.long.cancel(found);
        self.forced.cancel(|command| command.parent == found);
        self.alone.cancel(|tag, _| tag == found, &mut self.in_flight);
    }

    /// Asks the disks to cancel all commands of submission queue `sq`, or of all queues.
    pub(crate) fn cancel_all(&mut self, of: Option<usize>) {
        let Self { in_flight, namespaces, retired, .. } = self;
        match of {
            None => in_flight.for_each(|tag, entry| {
                cancel_request(namespaces, retired, tag, entry);
            }),
            Some(queue) => in_flight.of_queue(queue).for_each(|(tag, entry)| {
                cancel_request(namespaces, retired, tag, entry);
            }),
        }
        self.copies.cancel(|copy| of.is_none_or(|queue| copy.sq == queue));
        self.forced.cancel(|command| of.is_none_or(|queue| command.sq == queue));
        self.long.cancel_all(of);
        // A reset: the control plane will not send the end of exclusive execution any more.
        self.alone.is_given_up |= of.is_none();
        let which = |_, sq| of.is_none_or(|queue| sq == queue);
        self.alone.cancel(which, &mut self.in_flight);
    }
}

/// Asks the disk of a request to cancel it, if the entry is a request.
fn cancel_request(
    namespaces: &mut [NamespaceQueue],
    retired: &mut Retired,
    tag: u32,
    entry: &InFlight,
) {
    let at = entry.namespace;
    if entry.is_request
        && let Some(namespace) = namespaces.get_mut(at).or_else(|| retired.get_mut(at))
    {
        namespace.queue.cancel(tag);
    }
}
