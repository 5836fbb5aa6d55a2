//! Draining disk queues: queues of a removed or changed namespace that still have requests in
//! flight.

use super::namespace::NamespaceQueue;

/// First place number: above the index of any namespace, so that an in-flight entry can hold both.
const FIRST: usize = 1 << 31;

/// Disk queues without new requests.
#[derive(Default)]
pub(super) struct Draining(Vec<Option<NamespaceQueue>>);

impl Draining {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a queue and returns its place.
    pub(super) fn push(&mut self, queue: NamespaceQueue) -> usize {
        self.0.push(Some(queue));
        FIRST + self.0.len() - 1
    }

    pub(super) fn get_mut(&mut self, place: usize) -> Option<&mut NamespaceQueue> {
        self.0.get_mut(place.checked_sub(FIRST)?)?.as_mut()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &NamespaceQueue> {
        self.0.iter().flatten()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut NamespaceQueue> {
        self.0.iter_mut().flatten()
    }

    /// Removes and returns the queue at this place, if its disk has no request in flight.
    pub(super) fn take_idle(&mut self, place: usize) -> Option<NamespaceQueue> {
        let kept = self.0.get_mut(place.checked_sub(FIRST)?)?;
        let queue = kept.take_if(|queue| queue.queue.pending() == 0);
        // Places of the other queues are referenced by in-flight entries, so they never shift.
        if self.0.iter().all(Option::is_none) {
            self.0.clear();
        }
        queue
    }
}
