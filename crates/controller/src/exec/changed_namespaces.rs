//! Attach, detach and change of namespaces while commands are in flight.

use super::engine::{Engine, take_turns, want_hints};
use super::in_flight::Owner;
use super::namespace::NamespaceQueue;
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::status::Status;

impl Engine {
    /// Replaces the namespace at `index` by `new`, or removes it. Returns the place of the old
    /// queue, if there was one, for [`take_drained`](Self::take_drained).
    ///
    /// Requests in flight continue on the old disk; requests that a command has not submitted yet
    /// go to the new disk. On removal, all commands of this namespace end with the status `absence`
    /// as soon as the disk has released their requests.
    pub(crate) fn change_namespace(
        &mut self,
        index: usize,
        new: Option<NamespaceQueue>,
        absence: Status,
    ) -> Option<usize> {
        let room = self.namespaces.len().max(index + 1);
        self.namespaces.resize_with(room, NamespaceQueue::none);
        let is_removed = new.is_none();
        let new = new.unwrap_or_else(|| NamespaceQueue::absent(absence));
        let old = std::mem::replace(&mut self.namespaces[index], new);
        self.wants_hints = want_hints(&self.namespaces);
        self.takes_turns = take_turns(&self.namespaces);
        self.review_marks();
        self.review_restrictions();
        if old.is_none() {
            return None;
        }
        let place = self.draining.push(old);
        self.in_flight.for_each_mut(|_, entry| {
            if entry.is_request && entry.namespace == index {
                entry.namespace = place;
            }
        });
        if is_removed {
            self.cancel_namespace(index, place);
        }
        Some(place)
    }

    /// Aborts the commands of the removed namespace `index`, whose old queue is at `place`.
    fn cancel_namespace(&mut self, index: usize, place: usize) {
        let Self { in_flight, copies, multi_step, draining, .. } = self;
        // A Flush of all namespaces continues with the remaining ones.
        let is_of_all = |nsid: Option<u32>| nsid == Some(NSID_ALL);
        let mut over =
            multi_step.remove_namespace(index, |parent| is_of_all(in_flight.nsid(parent)));
        copies.cancel(|copy| {
            let is_there = copy.uses(index);
            over.extend(is_there.then_some(copy.parent));
            is_there
        });
        let mut dropped = Vec::new();
        in_flight.for_each(|tag, entry| {
            if !entry.is_request || entry.namespace != place {
                return;
            }
            match entry.owner {
                Owner::Command { .. } | Owner::Exclusive { .. } => over.push(tag),
                Owner::Part { parent } if is_of_all(in_flight.nsid(parent)) => dropped.push(tag),
                Owner::Part { parent } => over.push(parent),
                Owner::Dropped { .. } | Owner::Range { .. } | Owner::Internal => {}
            }
            if let Some(draining) = draining.get_mut(place) {
                draining.queue.cancel(tag);
            }
        });
        let absence = self.namespaces[index].absence;
        over.into_iter().for_each(|tag| in_flight.fail(tag, absence));
        for tag in dropped {
            if let Some(entry) = in_flight.get_mut(tag)
                && let Owner::Part { parent } = entry.owner
            {
                entry.owner = Owner::Dropped { parent };
            }
        }
    }

    /// Drops all disk queues. The caller ensures that no request is in flight.
    pub(crate) fn forget_namespaces(&mut self) {
        self.namespaces.clear();
    }

    /// Takes the drained queue at `place`, if its disk has no request in flight.
    pub(crate) fn take_drained(&mut self, place: usize) -> Option<NamespaceQueue> {
        self.draining.take_idle(place)
    }
}
