//! Queues to disks that are not a namespace any more, or not in this form: as long as the disk has
//! requests in hand.

use super::namespace::NamespaceQueue;

/// Above the index of any namespace: where an entry in flight has its request, if it is retired.
const FIRST: usize = 1 << 31;

/// Queues that no new request comes to.
#[derive(Default)]
pub(super) struct Retired(Vec<Option<NamespaceQueue>>);

impl Retired {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Keeps a queue. Its place.
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

    /// The queue at this place, if its disk has nothing in hand. Then it is not here any more.
    pub(super) fn take_idle(&mut self, place: usize) -> Option<NamespaceQueue> {
        let kept = self.0.get_mut(place.checked_sub(FIRST)?)?;
        let queue = kept.take_if(|queue| queue.queue.pending() == 0);
        // The places of the others are in use.
        if self.0.iter().all(Option::is_none) {
            self.0.clear();
        }
        queue
    }
}
