//! Commands that a disk has in hand: where they are kept, and how they end.

use super::{Ended, Engine, Kind, status_of};
use crate::worker::message::AbortReply;
use shadowbell_backend::DiskError;
use shadowbell_spec::status::Status;

#[derive(Debug)]
pub(super) enum Owner {
    /// The slot is a command of submission queue `sq`.
    Command { sq: usize, cid: u16 },
    /// The slot is one of several requests of the command in another slot.
    Part { parent: u32 },
    /// The slot reads or writes source range `range` of the Copy command in another slot.
    Range { copy: u32, range: u32 },
    /// The slot is a flush that the controller wants for itself.
    Internal,
}

/// A command or a part of one that is under way.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) owner: Owner,
    pub(super) space: usize,
    /// Requests that have not ended yet.
    pub(super) left: u32,
    pub(super) status: Status,
    pub(super) kind: Kind,
    pub(super) nsid: u32,
    pub(super) lba: u64,
    pub(super) abort: Option<AbortReply>,
    /// Held until an internal request is done.
    #[allow(dead_code, reason = "dropped with the slot")]
    pub(super) latch: Option<crate::latch::Latch>,
}

impl Engine {
    /// The tag of the next request: of a slot that is free.
    #[inline]
    pub(super) fn next_tag(&mut self) -> u32 {
        match self.free.last() {
            Some(tag) => *tag,
            None => self.add_slot(),
        }
    }

    #[cold]
    #[inline(never)]
    fn add_slot(&mut self) -> u32 {
        let tag = self.slots.len() as u32;
        self.slots.push(None);
        self.free.push(tag);
        tag
    }

    pub(super) fn occupy(&mut self, tag: u32, slot: Slot) {
        // `next_tag` left it at the end of the free list.
        debug_assert_eq!(self.free.last(), Some(&tag));
        self.free.pop();
        if let Some(place) = self.slots.get_mut(tag as usize) {
            *place = Some(slot);
        }
    }

    pub(super) fn slot(&mut self, tag: u32) -> Option<&mut Slot> {
        self.slots.get_mut(tag as usize)?.as_mut()
    }

    pub(super) fn release(&mut self, tag: u32) -> Option<Slot> {
        let slot = self.slots.get_mut(tag as usize)?.take()?;
        self.free.push(tag);
        self.ended = self.ended.wrapping_add(1);
        Some(slot)
    }

    pub(super) fn fail(&mut self, tag: u32, status: Status) {
        if let Some(slot) = self.slot(tag)
            && slot.status.is_success()
        {
            slot.status = status;
        }
    }

    /// Hands all that was submitted to the system.
    #[inline]
    pub(crate) fn commit(&mut self) {
        if self.pending() != 0 {
            self.spaces.iter_mut().for_each(|space| space.queue.commit());
        }
    }

    /// Calls `ended` for every command that has ended. Whether there is more to do at once, which no
    /// disk announces.
    pub(crate) fn reap(&mut self, mut ended: impl FnMut(Ended)) -> bool {
        let mut spaces = std::mem::take(&mut self.spaces);
        for space in &mut spaces {
            if space.queue.pending() == 0 {
                continue;
            }
            space.queue.reap(&mut |tag, outcome, mut data| {
                data.clear();
                self.spare.push(data);
                if let Some(command) = self.end(tag, outcome) {
                    ended(command);
                }
            });
        }
        self.spaces = spaces;
        !self.copies.is_empty() && self.advance_copies(&mut ended)
    }

    pub(super) fn end(&mut self, tag: u32, outcome: Result<(), DiskError>) -> Option<Ended> {
        if let Err(error) = outcome {
            let reading = self.slot(tag)?.kind.is_reading();
            self.fail(tag, status_of(error, reading));
        }
        let slot = self.slot(tag)?;
        slot.left = slot.left.saturating_sub(1);
        if slot.left > 0 {
            return None;
        }
        let slot = self.release(tag)?;
        if let Some(reply) = slot.abort {
            reply.answer(slot.status.code() == Status::ABORT_REQUESTED);
        }
        match slot.owner {
            Owner::Part { parent } => {
                if !slot.status.is_success() {
                    self.fail(parent, slot.status);
                }
                // The parent's own end, which has no outcome of its own.
                self.end(parent, Ok(()))
            }
            Owner::Range { copy, range } => {
                self.copies.range_ended(copy, range, slot.status);
                None
            }
            Owner::Internal => None,
            Owner::Command { sq, cid } => {
                if slot.status.is_success() {
                    self.count(slot.kind);
                } else {
                    self.count_error(slot.status);
                }
                let Slot { status, nsid, lba, .. } = slot;
                Some(Ended { sq, cid, status, nsid, lba, dw0: 0 })
            }
        }
    }

    /// Asks the disks to give up the command (`sq`, `cid`) soon; `reply` hears whether it was
    /// aborted.
    pub(crate) fn abort(&mut self, sq: usize, cid: u16, reply: AbortReply) {
        let found = self.slots.iter().position(|slot| {
            matches!(slot, Some(Slot { owner: Owner::Command { sq: s, cid: c }, .. })
                if (*s, *c) == (sq, cid))
        });
        let Some(found) = found else { return reply.answer(false) };
        self.cancel(|tag, slot| {
            tag == found
                || matches!(slot.owner, Owner::Part { parent: of } | Owner::Range { copy: of, .. }
                    if of as usize == found)
        });
        self.copies.cancel(|copy| copy.parent as usize == found);
        if let Some(slot) = self.slot(found as u32) {
            slot.abort = Some(reply);
        }
    }

    /// Asks the disks to give up every command of submission queue `sq`, or of all queues.
    pub(crate) fn cancel_all(&mut self, of: Option<usize>) {
        match of {
            None => self.cancel(|_, _| true),
            Some(queue) => {
                let parents: Vec<bool> = self
                    .slots
                    .iter()
                    .map(|slot| {
                        matches!(slot, Some(Slot { owner: Owner::Command { sq, .. }, .. })
                            if *sq == queue)
                    })
                    .collect();
                self.cancel(|_, slot| match slot.owner {
                    Owner::Command { sq, .. } => sq == queue,
                    Owner::Part { parent: of } | Owner::Range { copy: of, .. } => {
                        parents.get(of as usize).copied().unwrap_or(false)
                    }
                    Owner::Internal => false,
                });
            }
        }
        self.copies.cancel(|copy| of.is_none_or(|queue| copy.sq == queue));
    }

    fn cancel(&mut self, which: impl Fn(usize, &Slot) -> bool) {
        for (tag, slot) in self.slots.iter().enumerate() {
            if let Some(slot) = slot
                && which(tag, slot)
            {
                self.spaces[slot.space].queue.cancel(tag as u32);
            }
        }
    }
}
