//! Subrequests to the server, and their table. A request to the disk is split into subrequests.

use crate::coverage::Coverage;
use shadowbell_disk::{Lists, Orphan};
use shadowbell_nbd::wire::{self, command};
use std::collections::VecDeque;

/// Owner of a subrequest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    /// Number of the queue on its connection.
    pub(crate) user: u32,
    /// Key of the request in the queue.
    pub(crate) task: u32,
    /// Offset of the subrequest in the data of the request.
    pub(crate) at: u64,
}

/// A subrequest to the server.
#[derive(Debug)]
pub(crate) struct Subrequest {
    pub(crate) command: u16,
    pub(crate) flags: u16,
    pub(crate) offset: u64,
    pub(crate) len: u32,
    /// Data to write, or the data that were read: `len` bytes, or none.
    pub(crate) data: Vec<u8>,
    /// `None` for a cancelled subrequest or an automatic flush.
    pub(crate) owner: Option<Owner>,
    /// Registration of a cancelled write as an orphan. Later flushes wait until it is dropped, when
    /// the reply arrives.
    pub(crate) orphan: Option<Orphan>,
    /// True for the flush that makes unflushed writes durable, without a request to the disk.
    pub(crate) is_automatic: bool,
    /// True if at least a part of the request was sent.
    pub(crate) is_sent: bool,
    /// Received ranges of a read.
    pub(crate) covered: Coverage,
    /// First error of a chunked reply.
    pub(crate) error: Option<u32>,
    /// Number of error chunks of the reply.
    pub(crate) errors: u16,
    /// Number of connections that this process ended because of a protocol violation by the server
    /// while this subrequest was in flight.
    pub(crate) breaks: u32,
    /// For a flush: number of the entry of [`Unflushed`](crate::unflushed::Unflushed) before which
    /// the flush makes all writes durable.
    pub(crate) flushes: u64,
    /// Sequence number, by which subrequests are ordered.
    pub(crate) number: u64,
}

impl Subrequest {
    pub(crate) fn new(command: u16, flags: u16, offset: u64, len: u32, data: Vec<u8>) -> Self {
        Self {
            command,
            flags,
            offset,
            len,
            data,
            owner: None,
            orphan: None,
            is_automatic: false,
            is_sent: false,
            covered: Coverage::default(),
            error: None,
            errors: 0,
            breaks: 0,
            flushes: 0,
            number: 0,
        }
    }

    pub(crate) fn is_read(&self) -> bool {
        self.command == command::READ
    }

    /// True for block status; its data are the raw extents.
    pub(crate) fn is_question(&self) -> bool {
        self.command == command::BLOCK_STATUS
    }

    /// Resets the state of a partial reply.
    pub(crate) fn restart(&mut self) {
        self.is_sent = false;
        self.error = None;
        self.errors = 0;
        self.covered.clear();
        if self.is_question() {
            self.data.clear();
        }
    }

    /// True if the subrequest changes the content of the export.
    pub(crate) fn changes(&self) -> bool {
        matches!(self.command, command::WRITE | command::WRITE_ZEROES | command::TRIM)
    }

    /// Number of data bytes that count towards the limit of the connection.
    pub(crate) fn cost(&self) -> usize {
        // Extents have a separate limit.
        if self.is_question() { 0 } else { self.data.len() }
    }
}

/// Table of a connection's subrequests. The cookie of a subrequest consists of its index in the
/// table and of the number of earlier subrequests with that index.
#[derive(Debug, Default)]
pub(crate) struct Subrequests {
    slots: Vec<(u32, Option<Subrequest>)>,
    free: Vec<u32>,
    next: u64,
    /// Lists of indexes into `slots`, by queue number. Each request of a queue has its own list,
    /// with the request's subrequests.
    owned: Vec<Lists>,
}

impl Subrequests {
    pub(crate) fn insert(&mut self, mut part: Subrequest) -> u32 {
        part.number = self.next;
        self.next += 1;
        let owner = part.owner;
        let slot = self.free.pop().unwrap_or(self.slots.len() as u32);
        match self.slots.get_mut(slot as usize) {
            Some(place) => place.1 = Some(part),
            None => self.slots.push((0, Some(part))),
        }
        if let Some(Owner { user, task, .. }) = owner {
            if user as usize >= self.owned.len() {
                self.owned.resize_with(user as usize + 1, Lists::default);
            }
            if let Some(lists) = self.owned.get_mut(user as usize) {
                lists.push_back(task, slot);
            }
        }
        slot
    }

    pub(crate) fn get(&self, slot: u32) -> Option<&Subrequest> {
        self.slots.get(slot as usize)?.1.as_ref()
    }

    pub(crate) fn get_mut(&mut self, slot: u32) -> Option<&mut Subrequest> {
        self.slots.get_mut(slot as usize)?.1.as_mut()
    }

    pub(crate) fn remove(&mut self, slot: u32) -> Option<Subrequest> {
        let (uses, place) = self.slots.get_mut(slot as usize)?;
        let part = place.take()?;
        *uses = uses.wrapping_add(1);
        self.free.push(slot);
        self.forget(part.owner, slot);
        Some(part)
    }

    /// Removes the owner of a subrequest. Its reply will be discarded.
    pub(crate) fn disown(&mut self, slot: u32) {
        let owner = self.get_mut(slot).and_then(|part| part.owner.take());
        self.forget(owner, slot);
    }

    fn forget(&mut self, owner: Option<Owner>, slot: u32) {
        if let Some(lists) = owner.and_then(|owner| self.owned.get_mut(owner.user as usize)) {
            lists.remove(slot);
        }
    }

    /// Indexes of the subrequests of request `task` of queue `user`.
    pub(crate) fn of(&self, user: u32, task: u32) -> Vec<u32> {
        self.owned.get(user as usize).map_or_else(Vec::new, |lists| lists.iter(task).collect())
    }

    /// Wire form of a subrequest.
    pub(crate) fn request(&self, slot: u32) -> Option<wire::Request> {
        let (uses, part) = self.slots.get(slot as usize)?;
        let part = part.as_ref()?;
        Some(wire::Request {
            flags: part.flags,
            command: part.command,
            cookie: u64::from(*uses) << 32 | u64::from(slot),
            offset: part.offset,
            len: part.len,
        })
    }

    /// Finds the sent subrequest with this cookie.
    pub(crate) fn find(&self, cookie: u64) -> Option<u32> {
        let slot = cookie as u32;
        let (uses, part) = self.slots.get(slot as usize)?;
        let is_it = *uses == (cookie >> 32) as u32 && part.as_ref().is_some_and(|p| p.is_sent);
        is_it.then_some(slot)
    }

    /// True if `holds` returns true for any subrequest.
    pub(crate) fn any(&self, holds: impl Fn(&Subrequest) -> bool) -> bool {
        self.slots.iter().any(|(_, part)| part.as_ref().is_some_and(&holds))
    }

    /// Indexes of all subrequests for which `holds` returns true, in the order of their creation.
    pub(crate) fn all(&self, holds: impl Fn(&Subrequest) -> bool) -> VecDeque<u32> {
        let mut found: Vec<(u64, u32)> = Vec::new();
        for (slot, (_, part)) in self.slots.iter().enumerate() {
            if let Some(part) = part
                && holds(part)
            {
                found.push((part.number, slot as u32));
            }
        }
        found.sort_unstable();
        found.into_iter().map(|(_, slot)| slot).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cookie_is_good_for_one_use_of_a_place() {
        let mut parts = Subrequests::default();
        let read = || Subrequest::new(command::READ, 0, 0, 512, vec![]);
        let slot = parts.insert(read());
        let cookie = parts.request(slot).unwrap().cookie;
        assert_eq!(parts.find(cookie), None, "it was not sent");
        parts.get_mut(slot).unwrap().is_sent = true;
        assert_eq!(parts.find(cookie), Some(slot));
        assert_eq!(parts.find(cookie + 1), None);
        parts.remove(slot).unwrap();
        assert_eq!(parts.find(cookie), None);
        let again = parts.insert(read());
        parts.get_mut(again).unwrap().is_sent = true;
        assert_eq!((again, parts.find(cookie)), (slot, None));
        assert!(parts.find(parts.request(again).unwrap().cookie).is_some());
        let last = parts.insert(read());
        parts.remove(slot).unwrap();
        let newest = parts.insert(read());
        assert_eq!(parts.all(|_| true), [last, newest]);
    }
}
