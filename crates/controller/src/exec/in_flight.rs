//! What the disks have in hand: commands, and the requests that a command is made of.

use crate::latch::Latch;
use crate::queue::Permit;
use shadowbell_spec::status::Status;

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
    /// Command specific result, dword 0.
    pub(crate) dw0: u32,
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

/// All that is under way. An entry's number is the tag of its request.
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
    /// Bytes of data of those that are under way, and the pieces of host memory that these lie in.
    bytes: u64,
    pieces: usize,
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
        match self.entries.get_mut(tag as usize) {
            Some(place) => *place = Some(entry),
            None => self.entries.push(Some(entry)),
        }
        self.next = self.free.pop().unwrap_or(self.entries.len() as u32);
    }

    pub(super) fn get_mut(&mut self, tag: u32) -> Option<&mut InFlight> {
        self.entries.get_mut(tag as usize)?.as_mut()
    }

    pub(super) fn remove(&mut self, tag: u32) -> Option<InFlight> {
        let entry = self.entries.get_mut(tag as usize)?.take()?;
        let next = std::mem::replace(&mut self.next, tag);
        if self.is_there(next) {
            self.free.push(next);
        }
        self.bytes -= entry.kind.bytes();
        self.pieces -= entry.pieces;
        self.ended = self.ended.wrapping_add(1);
        Some(entry)
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

    /// The tag of a command.
    pub(super) fn find(&self, sq: usize, cid: u16) -> Option<u32> {
        let is_it = |entry: &Option<InFlight>| {
            matches!(entry, Some(InFlight { owner: Owner::Command { sq: s, cid: c, .. }, .. })
                if (*s, *c) == (sq, cid))
        };
        self.entries.iter().position(is_it).map(|tag| tag as u32)
    }

    /// Whether the entry `tag` is a command of submission queue `sq`.
    pub(super) fn is_command_of(&self, tag: u32, sq: usize) -> bool {
        matches!(self.entries.get(tag as usize),
            Some(Some(InFlight { owner: Owner::Command { sq: of, .. }, .. })) if *of == sq)
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
