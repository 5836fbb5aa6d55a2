//! In-flight table: commands, and the disk requests that a command consists of.
//!
//! The module also contains the tables of reservation commands and of Zone Append commands in
//! flight. The table of Zone Append commands stores the written LBA for the completion.

use crate::notice::Latch;
use crate::queue::Permit;
use shadowbell_disk::Lists;
use shadowbell_spec::status::Status;
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};

/// Command that has ended, with its completion data.
#[derive(Debug)]
pub(crate) struct CompletedCommand {
    /// Index of the submission queue in the queue set.
    pub(crate) sq: usize,
    pub(crate) cid: u16,
    /// Tag of the command while it was in flight.
    pub(crate) tag: u32,
    /// Reserved slot of the completion queue.
    pub(crate) permit: Permit,
    pub(crate) status: Status,
    pub(crate) nsid: u32,
    pub(crate) lba: u64,
    /// Command specific result: completion dwords 0 and 1.
    pub(crate) dw0: u32,
    pub(crate) dw1: u32,
}

/// Command class and bytes, for the statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read(u64),
    Write(u64),
    Copy(u64),
    /// Bytes that the disk reads and checks, but does not transfer to the host.
    Verify(u64),
    Other,
}

impl Kind {
    /// Bytes transferred to or from the host.
    fn bytes(self) -> u64 {
        match self {
            Self::Read(bytes) | Self::Write(bytes) => bytes,
            Self::Copy(_) | Self::Verify(_) | Self::Other => 0,
        }
    }

    /// True if a media error of this command is reported as Unrecovered Read Error.
    pub(super) fn is_reading(self) -> bool {
        matches!(self, Self::Read(_) | Self::Verify(_))
    }
}

/// Owner of an entry: the command or Copy range that handles the entry's result.
#[derive(Debug)]
pub(super) enum Owner {
    /// The entry is a command of submission queue `sq`.
    Command { sq: usize, cid: u16, permit: Permit },
    /// The entry is a command of submission queue `sq` in [exclusive](super::exclusive_state)
    /// execution.
    Exclusive { sq: usize, cid: u16, permit: Permit },
    /// The entry is one of the requests of the command in entry `parent`.
    Part { parent: u32 },
    /// The entry is a request of the command in entry `parent`. The status of the request is
    /// ignored, because the namespace was removed.
    Dropped { parent: u32 },
    /// The entry reads or writes source range `range` of the Copy command in entry `copy`.
    Range { copy: u32, range: u32 },
    /// The entry is a request of the controller itself (flush, verify), not of the host.
    Internal,
}

/// In-flight command or disk request.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) owner: Owner,
    /// Index of the namespace, or of a draining queue (see `Draining`).
    pub(super) namespace: usize,
    pub(super) status: Status,
    pub(super) kind: Kind,
    /// Quota weight: number of pieces of host memory that contain the data.
    pieces: usize,
    /// True if a disk executes the entry. False for a command whose disk requests have entries of
    /// their own.
    pub(super) is_request: bool,
    pub(super) nsid: u32,
    pub(super) lba: u64,
    /// Latch of an Abort command or of a flush at shutdown. It is released when the entry ends.
    pub(super) waiting: Option<Latch>,
}

impl InFlight {
    /// Creates the entry of a request without data.
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

    /// Sets the namespace and LBA for error reports.
    pub(super) fn at(self, nsid: u32, lba: u64) -> Self {
        Self { nsid, lba, ..self }
    }

    /// Marks a command whose disk requests have entries of their own.
    pub(super) fn of_requests(self) -> Self {
        Self { is_request: false, ..self }
    }

    /// Sets the number of pieces of host memory that contain the data.
    pub(super) fn in_pieces(self, pieces: usize) -> Self {
        Self { pieces, ..self }
    }
}

/// Random multiplier of the identifier hash, one per table. Without it, a host could choose command
/// identifiers that all hash to one list.
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

/// Table of all in-flight entries. The index of an entry is the tag of its request.
///
/// The host determines how many entries are in flight and which commands are aborted. So each
/// operation takes constant time per entry found. Linked lists connect an identifier with its
/// commands, a command with its requests, and a submission queue with all of its entries.
#[derive(Debug, Default)]
pub(super) struct InFlightTable {
    entries: Vec<Option<InFlight>>,
    /// Index of the next entry: a free entry, or the length of the table. It is computed in
    /// advance, because most requests need only this tag: they complete inside `submit`, and get no
    /// entry.
    next: u32,
    /// Indexes of the free entries other than `next`.
    free: Vec<u32>,
    /// Number of entries that have ended.
    ended: u64,
    /// Commands by the hash of submission queue and command identifier.
    by_identifier: Lists,
    /// Number of hash lists - 1.
    mask: u32,
    seed: Seed,
    /// Requests by the entry of their command.
    by_command: Lists,
    /// Commands and requests by submission queue.
    by_queue: Lists,
    /// Bytes of data in flight, and the number of pieces of host memory that contain them.
    bytes: u64,
    pieces: usize,
    /// Latches that are released at the end of an entry, in addition to the entry's own.
    waiting: HashMap<u32, Vec<Latch>>,
}

impl InFlightTable {
    /// Number of entries in flight.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len() - usize::from(self.has_entry(self.next))
    }

    /// True if the table has an entry of this index, in use or free.
    fn has_entry(&self, tag: u32) -> bool {
        (tag as usize) < self.entries.len()
    }

    /// Bytes of data in flight.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of pieces of host memory that contain in-flight data.
    pub(super) fn pieces(&self) -> usize {
        self.pieces
    }

    /// Number of entries that have ended so far.
    pub(super) fn ended(&self) -> u64 {
        self.ended
    }

    /// Tag of the next request: the index of a free entry.
    #[inline]
    pub(super) fn next_tag(&self) -> u32 {
        self.next
    }

    /// Inserts an entry at `tag`, which must be the [`next_tag`](Self::next_tag).
    pub(super) fn insert(&mut self, tag: u32, entry: InFlight) {
        debug_assert_eq!(self.next, tag);
        self.bytes += entry.kind.bytes();
        self.pieces += entry.pieces;
        let of = match entry.owner {
            Owner::Command { sq, cid, .. } | Owner::Exclusive { sq, cid, .. } => {
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

    /// Hash list of a command identifier.
    fn bucket(&self, sq: usize, cid: u16) -> u32 {
        self.seed.hash((sq as u32) << 16 | u32::from(cid)) & self.mask
    }

    /// Resizes the hash to at least four lists per entry.
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

    /// Submission queue and command identifier, if the entry is a command.
    fn identifier(&self, tag: u32) -> Option<(usize, u16)> {
        match self.entries.get(tag as usize)?.as_ref()?.owner {
            Owner::Command { sq, cid, .. } | Owner::Exclusive { sq, cid, .. } => Some((sq, cid)),
            _ => None,
        }
    }

    /// Marks the command in this entry as in exclusive execution.
    pub(super) fn set_exclusive(&mut self, tag: u32) {
        let Some(place) = self.entries.get_mut(tag as usize) else { return };
        *place = place.take().map(|entry| match entry.owner {
            Owner::Command { sq, cid, permit } => {
                InFlight { owner: Owner::Exclusive { sq, cid, permit }, ..entry }
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
        if self.has_entry(next) {
            self.free.push(next);
        }
        self.bytes -= entry.kind.bytes();
        self.pieces -= entry.pieces;
        self.ended = self.ended.wrapping_add(1);
        if !self.waiting.is_empty() {
            self.release(tag);
        }
        Some(entry)
    }

    /// Registers a latch that is released when this entry has ended.
    pub(super) fn wait_for(&mut self, tag: u32, latch: &Latch) {
        self.waiting.entry(tag).or_default().push(latch.clone());
    }

    #[cold]
    fn release(&mut self, tag: u32) {
        drop(self.waiting.remove(&tag));
    }

    /// Sets the status of an entry, unless an earlier error has set it.
    pub(super) fn fail(&mut self, tag: u32, status: Status) {
        if let Some(entry) = self.get_mut(tag)
            && entry.status.is_success()
        {
            entry.status = status;
        }
    }

    /// True if an entry does not exist or has failed.
    pub(super) fn has_failed(&mut self, tag: u32) -> bool {
        self.get_mut(tag).is_none_or(|entry| !entry.status.is_success())
    }

    /// Finds a command by identifier. If the host has several commands with this identifier in
    /// flight, the newest one is found.
    pub(super) fn find(&self, sq: usize, cid: u16) -> Option<u32> {
        let mut list = self.by_identifier.iter(self.bucket(sq, cid));
        list.find(|tag| self.identifier(*tag) == Some((sq, cid)))
    }

    /// Requests of the command in entry `tag`.
    pub(super) fn requests_of(&self, tag: u32) -> impl Iterator<Item = (u32, &InFlight)> {
        self.with_entries(self.by_command.iter(tag))
    }

    /// Commands of submission queue `sq`, and their requests.
    pub(super) fn of_queue(&self, sq: usize) -> impl Iterator<Item = (u32, &InFlight)> {
        self.with_entries(self.by_queue.iter(sq as u32))
    }

    fn with_entries(
        &self,
        tags: impl Iterator<Item = u32>,
    ) -> impl Iterator<Item = (u32, &InFlight)> {
        tags.filter_map(|tag| Some((tag, self.get(tag)?)))
    }

    /// The entry of this tag.
    pub(super) fn get(&self, tag: u32) -> Option<&InFlight> {
        self.entries.get(tag as usize)?.as_ref()
    }

    /// Calls `with` for every entry and its tag.
    pub(super) fn for_each_mut(&mut self, mut with: impl FnMut(u32, &mut InFlight)) {
        for (tag, entry) in (0..).zip(&mut self.entries) {
            if let Some(entry) = entry {
                with(tag, entry);
            }
        }
    }

    /// NSID of an entry.
    pub(super) fn nsid(&self, tag: u32) -> Option<u32> {
        self.entries.get(tag as usize)?.as_ref().map(|entry| entry.nsid)
    }

    /// Calls `with` for every entry and its tag, without write access.
    pub(super) fn for_each(&self, mut with: impl FnMut(u32, &InFlight)) {
        for (tag, entry) in (0..).zip(&self.entries) {
            if let Some(entry) = entry {
                with(tag, entry);
            }
        }
    }
}

/// Zone Append command in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Appending {
    /// Byte offset on the disk where the data are appended; `None` until the disk has returned it.
    pub(super) place: Option<u64>,
    /// Namespace index and tag of the disk request.
    pub(super) tag: (usize, u32),
}

/// Zone Append commands of one engine, by in-flight entry.
#[derive(Debug, Default)]
pub(super) struct Appends {
    list: HashMap<u32, Appending>,
    finished: Vec<u32>,
}

impl Appends {
    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    pub(super) fn begin(&mut self, parent: u32, appending: Appending) {
        self.list.insert(parent, appending);
    }

    /// Records the end of a disk request, if its command is a Zone Append.
    pub(super) fn ended(&mut self, parent: u32) {
        if !self.list.is_empty() && self.list.contains_key(&parent) {
            self.finished.push(parent);
        }
    }

    /// True if a command has ended and was not [taken](Self::take) yet.
    pub(super) fn has_ended(&self) -> bool {
        !self.finished.is_empty()
    }

    /// Takes the ended commands, with their entries.
    pub(super) fn take(&mut self) -> Vec<(u32, Appending)> {
        let finished = std::mem::take(&mut self.finished);
        finished.into_iter().filter_map(|tag| Some((tag, self.list.remove(&tag)?))).collect()
    }
}

/// Reservation commands of one engine, in hash tables, because the host determines their number.
#[derive(Debug, Default)]
pub(super) struct ReservationCommands {
    /// True if access to a namespace is restricted.
    pub(super) is_restricted: bool,
    /// In-flight entries of the commands that the subsystem has not executed yet, by ticket number.
    waiting: HashMap<u64, u32>,
    /// In-flight entries of waiting and of ended commands.
    entries: HashSet<u32>,
    /// In-flight entries of commands that the subsystem has executed.
    ended: Vec<u32>,
}

impl ReservationCommands {
    /// Number of commands, waiting or ended.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if an entry is a reservation command.
    pub(super) fn is_one(&self, tag: u32) -> bool {
        self.entries.contains(&tag)
    }

    /// Registers a command that was sent to the subsystem.
    pub(super) fn begin(&mut self, ticket: u64, tag: u32) {
        self.waiting.insert(ticket, tag);
        self.entries.insert(tag);
    }

    /// Marks the command of this ticket as ended and returns its entry, if it exists.
    pub(super) fn end(&mut self, ticket: u64) -> Option<u32> {
        let tag = self.waiting.remove(&ticket)?;
        self.ended.push(tag);
        Some(tag)
    }

    /// True if a command has ended and was not [taken](Self::take_ended) yet.
    pub(super) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Takes the entries of the ended commands.
    pub(super) fn take_ended(&mut self) -> Vec<u32> {
        let ended = std::mem::take(&mut self.ended);
        ended.iter().for_each(|tag| {
            self.entries.remove(tag);
        });
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(table: &mut InFlightTable, sq: usize, cid: u16) -> u32 {
        let owner = Owner::Command { sq, cid, permit: Permit::detached() };
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
        // Two commands have the same identifier: the newer one is found first, then the older one.
        let again = command(&mut table, 2, 7);
        assert_eq!(table.find(2, 7), Some(again));
        table.remove(again).unwrap();
        assert_eq!(table.find(2, 7), Some(other));
        table.remove(other).unwrap();
        assert_eq!((table.find(2, 7), tags(table.of_queue(2))), (None, vec![]));
    }

    /// Lookup of 100,000 commands: with quadratic cost, this test would take minutes.
    #[test]
    fn a_hundred_thousand_commands_are_found_at_once() {
        let mut table = InFlightTable::default();
        // Three queues use every identifier once; in the fourth, all commands have the same
        // identifier.
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
        // Removal of the oldest command first, which is the worst order for a linear search.
        same.iter().for_each(|tag| assert!(table.remove(*tag).is_some()));
        assert_eq!((table.len(), table.find(3, 5)), (0, None));
    }
}
