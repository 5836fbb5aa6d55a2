//! Commands that are to end soon: Abort, queues that are deleted, resets.

use super::engine::Engine;
use super::in_flight::InFlight;
use super::namespace::NamespaceQueue;
use super::retired::Retired;
use crate::latch::Latch;

impl Engine {
    /// Asks the disks to give up the command (`sq`, `cid`) soon. `latch` is dropped when it has
    /// ended, and has the status Command Abort Requested if that is how.
    pub(crate) fn abort(&mut self, sq: usize, cid: u16, latch: Latch) {
        let Some(found) = self.in_flight.find(sq, cid) else { return };
        self.give_up_command(found);
        if let Some(entry) = self.in_flight.get_mut(found) {
            entry.waiting = Some(latch);
        }
    }

    /// Asks the disks to give up a command soon.
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

    /// Asks the disks to give up every command of submission queue `sq`, or of all queues.
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
        // All of them: the controller is reset, and nobody says when others go on.
        self.alone.is_given_up |= of.is_none();
        let which = |_, sq| of.is_none_or(|queue| sq == queue);
        self.alone.cancel(which, &mut self.in_flight);
    }
}

/// Has the disk that has a request give it up, if the entry is one.
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
