//! What the disks have in hand: commands, and the requests that a command is made of.

use crate::latch::Latch;
use crate::queue::Permit;
use shadowbell_backend::Lists;
use shadowbell_spec::status::Status;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

/// A command that ended: which one, and how.
#[derive(Debug)]
pub(crate) struct CompletedCommand {
    /// Index of the submission queue in its owner's list.
    pub(crate) sq: usize,
    pub(crate) cid: u16,
    /// What it was under way as.
    pub(crate) tag: u32,
    /// Its place in the completion queue.
    pub(crate) permit: Permit,
    pub(crate) status: Status,
    pub(crate) nsid: u32,
    pub(crate) lba: u64,
    /// Command specific result, dwords 0 and 1.
    pub(crate) dw0: u32,
    pub(crate) dw1: u32,
}

/// What kind of command it is, for the statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read(u64),
    Write(u64),
    Copy(u64),
    /// Reads for the disk alone: no command that a host reads with.
    Verify(u64),
    Other,
}

impl Kind {
    /// The length of its data in bytes.
    fn bytes(self) -> u64 {
        match self {
            Self::Read(bytes) | Self::Write(bytes) => bytes,
            Self::Copy(_) | Self::Verify(_) | Self::Other => 0,
        }
    }

    /// Whether an error of the medium is one of reading.
    pub(super) fn is_reading(self) -> bool {
        matches!(self, Self::Read(_) | Self::Verify(_))
    }
}

/// Whom the end of an entry concerns.
#[derive(Debug)]
pub(super) enum Owner {
    /// The entry is a command of submission queue `sq`.
    Command { sq: usize, cid: u16, permit: Permit },
    /// As above, and it is carried out [alone](super::alone).
    Alone { sq: usize, cid: u16, permit: Permit },
    /// The entry is one of several requests of the command in another entry.
    Part { parent: u32 },
    /// As above, and how it ends does not matter any more: its namespace is gone.
    Dropped { parent: u32 },
    /// The entry reads or writes source range `range` of the Copy command in another entry.
    Range { copy: u32, range: u32 },
    /// The entry is a flush that the controller wants for itself.
    Internal,
}

/// A command or a part of one that is under way.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) owner: Owner,
    /// Index of the namespace, or of one that is retired (see `exec/retired.rs`).
    pub(super) namespace: usize,
    pub(super) status: Status,
    pub(super) kind: Kind,
    /// Pieces of host memory that the data lie in.
    pieces: usize,
    /// A disk has it in hand: it is not a command of which other entries are the requests.
    pub(super) is_request: bool,
    pub(super) nsid: u32,
    pub(super) lba: u64,
    /// Who waits for its end: an Abort command, or a flush for a shutdown.
    pub(super) waiting: Option<Latch>,
}

impl InFlight {
    /// A request without data.
    pub(super) fn new(owner: Owner, namespace: usize, kind: Kind) -> Self {
        Self {
            owner,
            namespace,
            status: Status::SUCCESS,
            kind,
            pieces: 0,
            is_request: true,
            nsid: 0,
            lba: 0,
            waiting: None,
        }
    }

    /// Which part of the namespace an error is about.
    pub(super) fn at(self, nsid: u32, lba: u64) -> Self {
        Self { nsid, lba, ..self }
    }

    /// A command of which other entries are the requests.
    pub(super) fn of_requests(self) -> Self {
        Self { is_request: false, ..self }
    }

    /// With data in so many pieces of host memory.
    pub(super) fn in_pieces(self, pieces: usize) -> Self {
        Self { pieces, ..self }
    }
}

/// What a hash is made with: another number in each table. A host does not know it, and can not have
/// all of its commands in one list.
#[derive(Debug)]
struct Seed(u64);

impl Default for Seed {
    fn default() -> Self {
        Self(RandomState::new().hash_one(0) | 1)
    }
}

impl Seed {
    fn hash(&self, key: u32) -> u32 {
        (self.0.wrapping_mul(key.into()) >> 32) as u32
    }
}

/// All that is under way. An entry's number is the tag of its request.
///
/// A host chooses how much is under way, and which of it is given up. So an entry is in lists, by
/// which a command is found by its identifier, its requests by the command, and all of a submission
/// queue by that: nothing is searched.
#[derive(Debug, Default)]
pub(super) struct InFlightTable {
    entries: Vec<Option<InFlight>>,
    /// The entry that is taken next: a free one, or the one after the last. Known before it is
    /// wanted, because most requests end at once and only need a number.
    next: u32,
    /// Other free ones.
    free: Vec<u32>,
    /// Entries that were under way and have ended.
    ended: u64,
    /// Commands by a hash of their submission queue and identifier.
    by_identifier: Lists,
    /// As many lists as that has, less one.
    mask: u32,
    seed: Seed,
    /// The requests of a command, by its entry.
    by_command: Lists,
    /// Commands and their requests, by submission queue.
    by_queue: Lists,
    /// Bytes of data of those that are under way, and the pieces of host memory that these lie in.
    bytes: u64,
    pieces: usize,
    /// Who waits for the end of an entry, beside those that the entries have.
    waiting: HashMap<u32, Vec<Latch>>,
}

impl InFlightTable {
    /// How many entries are under way.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len() - usize::from(self.is_there(self.next))
    }

    /// Whether there is an entry of that number, in use or free.
    fn is_there(&self, tag: u32) -> bool {
        (tag as usize) < self.entries.len()
    }

    /// Bytes of data that are under way.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Pieces of host memory that these lie in.
    pub(super) fn pieces(&self) -> usize {
        self.pieces
    }

    /// How many have ended, ever.
    pub(super) fn ended(&self) -> u64 {
        self.ended
    }

    /// The tag of the next request: of an entry that is free.
    #[inline]
    pub(super) fn next_tag(&self) -> u32 {
        self.next
    }

    /// Puts an entry where `tag`, the [`next_tag`](Self::next_tag), says.
    pub(super) fn insert(&mut self, tag: u32, entry: InFlight) {
        debug_assert_eq!(self.next, tag);
        self.bytes += entry.kind.bytes();
        self.pieces += entry.pieces;
        let of = match entry.owner {
            Owner::Command { sq, cid, .. } | Owner::Alone { sq, cid, .. } => {
                self.by_identifier.push_front(self.bucket(sq, cid), tag);
                Some(sq as u32)
            }
            Owner::Part { parent } | Owner::Dropped { parent } => {
                self.by_command.push_back(parent, tag);
                self.by_queue.list_of(parent)
            }
            Owner::Range { copy, .. } => {
                self.by_command.push_back(copy, tag);
                self.by_queue.list_of(copy)
            }
            Owner::Internal => None,
        };
        if let Some(sq) = of {
            self.by_queue.push_back(sq, tag);
        }
        match self.entries.get_mut(tag as usize) {
            Some(place) => *place = Some(entry),
            None => self.entries.push(Some(entry)),
        }
        self.next = self.free.pop().unwrap_or(self.entries.len() as u32);
        if self.entries.len() > self.mask as usize {
            self.rehash();
        }
    }

    /// The list of a command among those by identifier.
    fn bucket(&self, sq: usize, cid: u16) -> u32 {
        self.seed.hash((sq as u32) << 16 | u32::from(cid)) & self.mask
    }

    /// Makes so many lists that each is short: twice as many as there are entries.
    #[cold]
    fn rehash(&mut self) {
        self.mask = (4 * self.entries.len()).next_power_of_two() as u32 - 1;
        self.by_identifier.clear();
        for tag in 0..self.entries.len() as u32 {
            if let Some((sq, cid)) = self.identifier(tag) {
                self.by_identifier.push_front(self.bucket(sq, cid), tag);
            }
        }
    }

    /// Submission queue and identifier, if the entry is a command.
    fn identifier(&self, tag: u32) -> Option<(usize, u16)> {
        match self.entries.get(tag as usize)?.as_ref()?.owner {
            Owner::Command { sq, cid, .. } | Owner::Alone { sq, cid, .. } => Some((sq, cid)),
            _ => None,
        }
    }

    /// The command in this entry is carried out alone.
    pub(super) fn set_alone(&mut self, tag: u32) {
        let Some(place) = self.entries.get_mut(tag as usize) else { return };
        *place = place.take().map(|entry| match entry.owner {
            Owner::Command { sq, cid, permit } => {
                InFlight { owner: Owner::Alone { sq, cid, permit }, ..entry }
            }
            _ => entry,
        });
    }

    pub(super) fn get_mut(&mut self, tag: u32) -> Option<&mut InFlight> {
        self.entries.get_mut(tag as usize)?.as_mut()
    }

    pub(super) fn remove(&mut self, tag: u32) -> Option<InFlight> {
        let entry = self.entries.get_mut(tag as usize)?.take()?;
        self.by_identifier.remove(tag);
        self.by_command.remove(tag);
        self.by_queue.remove(tag);
        let next = std::mem::replace(&mut self.next, tag);
        if self.is_there(next) {
            self.free.push(next);
        }
        self.bytes -= entry.kind.bytes();
        self.pieces -= entry.pieces;
        self.ended = self.ended.wrapping_add(1);
        if !self.waiting.is_empty() {
            self.let_go(tag);
        }
        Some(entry)
    }

    /// The latch is let go of when this entry has ended.
    pub(super) fn wait_for(&mut self, tag: u32, latch: &Latch) {
        self.waiting.entry(tag).or_default().push(latch.clone());
    }

    #[cold]
    fn let_go(&mut self, tag: u32) {
        drop(self.waiting.remove(&tag));
    }

    /// The first error of an entry's requests is the command's.
    pub(super) fn fail(&mut self, tag: u32, status: Status) {
        if let Some(entry) = self.get_mut(tag)
            && entry.status.is_success()
        {
            entry.status = status;
        }
    }

    /// Whether an entry is there no more, or has failed.
    pub(super) fn has_failed(&mut self, tag: u32) -> bool {
        self.get_mut(tag).is_none_or(|entry| !entry.status.is_success())
    }

    /// The tag of a command: of the one that came last, if the host has given several the same
    /// identifier.
    pub(super) fn find(&self, sq: usize, cid: u16) -> Option<u32> {
        let mut list = self.by_identifier.iter(self.bucket(sq, cid));
        list.find(|tag| self.identifier(*tag) == Some((sq, cid)))
    }

    /// The requests that the command in entry `tag` is made of.
    pub(super) fn requests_of(&self, tag: u32) -> impl Iterator<Item = (u32, &InFlight)> {
        self.with_entries(self.by_command.iter(tag))
    }

    /// All commands of submission queue `sq`, and the requests that they are made of.
    pub(super) fn of_queue(&self, sq: usize) -> impl Iterator<Item = (u32, &InFlight)> {
        self.with_entries(self.by_queue.iter(sq as u32))
    }

    fn with_entries(
        &self,
        tags: impl Iterator<Item = u32>,
    ) -> impl Iterator<Item = (u32, &InFlight)> {
        tags.filter_map(|tag| Some((tag, self.get(tag)?)))
    }

    /// An entry.
    pub(super) fn get(&self, tag: u32) -> Option<&InFlight> {
        self.entries.get(tag as usize)?.as_ref()
    }

    /// Calls `with` for every entry, with its tag.
    pub(super) fn for_each_mut(&mut self, mut with: impl FnMut(u32, &mut InFlight)) {
        for (tag, entry) in (0..).zip(&mut self.entries) {
            if let Some(entry) = entry {
                with(tag, entry);
            }
        }
    }

    /// The NSID of an entry.
    pub(super) fn nsid(&self, tag: u32) -> Option<u32> {
        self.entries.get(tag as usize)?.as_ref().map(|entry| entry.nsid)
    }

    /// As [`for_each_mut`](Self::for_each_mut).
    pub(super) fn for_each(&self, mut with: impl FnMut(u32, &InFlight)) {
        for (tag, entry) in (0..).zip(&self.entries) {
            if let Some(entry) = entry {
                with(tag, entry);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(table: &mut InFlightTable, sq: usize, cid: u16) -> u32 {
        let owner = Owner::Command { sq, cid, permit: Permit::of_nothing() };
        insert(table, owner)
    }

    fn insert(table: &mut InFlightTable, owner: Owner) -> u32 {
        let tag = table.next_tag();
        table.insert(tag, InFlight::new(owner, 0, Kind::Other));
        tag
    }

    fn tags<'a>(entries: impl Iterator<Item = (u32, &'a InFlight)>) -> Vec<u32> {
        entries.map(|(tag, _)| tag).collect()
    }

    #[test]
    fn a_command_is_found_with_its_requests_and_in_its_queue() {
        let mut table = InFlightTable::default();
        let first = command(&mut table, 1, 7);
        let other = command(&mut table, 2, 7);
        let part = insert(&mut table, Owner::Part { parent: first });
        let range = insert(&mut table, Owner::Range { copy: first, range: 0 });
        let own = insert(&mut table, Owner::Internal);
        assert_eq!((table.find(1, 7), table.find(2, 7)), (Some(first), Some(other)));
        assert_eq!((table.find(1, 8), table.find(3, 7)), (None, None));
        assert_eq!(tags(table.requests_of(first)), [part, range]);
        assert!(tags(table.requests_of(other)).is_empty());
        assert_eq!(tags(table.of_queue(1)), [first, part, range]);
        assert_eq!(tags(table.of_queue(2)), [other]);
        table.remove(part).unwrap();
        table.remove(own).unwrap();
        assert_eq!((tags(table.requests_of(first)), table.len()), (vec![range], 3));
        // The newer one of two with the same identifier, and then the older one.
        let again = command(&mut table, 2, 7);
        assert_eq!(table.find(2, 7), Some(again));
        table.remove(again).unwrap();
        assert_eq!(table.find(2, 7), Some(other));
        table.remove(other).unwrap();
        assert_eq!((table.find(2, 7), tags(table.of_queue(2))), (None, vec![]));
    }

    /// A step for each, and not one for each pair: with these many it would take minutes.
    #[test]
    fn a_hundred_thousand_commands_are_found_at_once() {
        let mut table = InFlightTable::default();
        // Every identifier of three queues; those of a fourth are all the same.
        let all = || (0..3).flat_map(|sq| (0..=u16::MAX).map(move |cid| (sq, cid)));
        let tags: Vec<u32> = all().map(|(sq, cid)| command(&mut table, sq, cid)).collect();
        let same: Vec<u32> = (0..=u16::MAX).map(|_| command(&mut table, 3, 5)).collect();
        for ((sq, cid), tag) in all().zip(&tags).collect::<Vec<_>>().into_iter().rev() {
            assert_eq!(table.find(sq, cid), Some(*tag));
        }
        assert_eq!(table.of_queue(3).count(), same.len());
        for ((sq, cid), tag) in all().zip(&tags).collect::<Vec<_>>().into_iter().rev() {
            table.remove(*tag).unwrap();
            assert_eq!((table.find(sq, cid), table.find(3, 5)), (None, same.last().copied()));
        }
        // The oldest first, which is the worst order for a search from the front.
        same.iter().for_each(|tag| assert!(table.remove(*tag).is_some()));
        assert_eq!((table.len(), table.find(3, 5)), (0, None));
    }
}
