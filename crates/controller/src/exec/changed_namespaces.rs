//! Namespaces that come, go and change while commands are under way.

use super::engine::{Engine, take_turns, want_hints};
use super::in_flight::Owner;
use super::namespace::NamespaceQueue;
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::status::Status;

impl Engine {
    /// From here on `new` is the namespace at `index`, or nothing is. Where the queue is that was
    /// there, if there was one, until [`take_retired`](Self::take_retired).
    ///
    /// What is under way goes on with the disk that it was begun on, and what a command has not
    /// begun yet with the new one. If there is no new one, all commands that are about the
    /// namespace alone end, as soon as the disk has let go of them.
    /// `absence` is how they end then.
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
        let place = self.retired.push(old);
        self.in_flight.for_each_mut(|_, entry| {
            if entry.is_request && entry.namespace == index {
                entry.namespace = place;
            }
        });
        if is_removed {
            self.give_up(index, place);
        }
        Some(place)
    }

    /// The namespace at `index` is gone, and its queue at `place`.
    fn give_up(&mut self, index: usize, place: usize) {
        let Self { in_flight, copies, long, retired, .. } = self;
        // A Flush of all namespaces is one of those that are left.
        let is_of_all = |nsid: Option<u32>| nsid == Some(NSID_ALL);
        let mut over = long.remove_namespace(index, |parent| is_of_all(in_flight.nsid(parent)));
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
                Owner::Command { .. } | Owner::Alone { .. } => over.push(tag),
                Owner::Part { parent } if is_of_all(in_flight.nsid(parent)) => dropped.push(tag),
                Owner::Part { parent } => over.push(parent),
                Owner::Dropped { .. } | Owner::Range { .. } | Owner::Internal => {}
            }
            if let Some(retired) = retired.get_mut(place) {
                retired.queue.cancel(tag);
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

    /// Lets go of all disks, which have nothing in hand.
    pub(crate) fn forget_namespaces(&mut self) {
        self.namespaces.clear();
    }

    /// The queue that is retired at `place`, if its disk has nothing in hand any more.
    pub(crate) fn take_retired(&mut self, place: usize) -> Option<NamespaceQueue> {
        self.retired.take_idle(place)
    }
}
