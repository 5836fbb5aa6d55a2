//! Table of a client's memory ranges in shared memory, for checkpoints with many ranges.
//!
//! A checkpoint of a device contains few ranges directly. If it contained all ranges of a client
//! that has many, each added range would cost time in proportion to all earlier ones, on the
//! reactor's thread. So many ranges are stored in a memfd that both server processes can map. The
//! checkpoint then contains only a sequence number, its *moment*. A range is valid at a moment if
//! it was added at or before that moment, and not removed by then. The next server process ignores
//! changes after the last checkpoint, because the client's message that made the change is still in
//! the socket and will be handled again.
//!
//! The files of the ranges are lasting descriptors: the supervisor keeps them until a later
//! checkpoint removes them.

use super::files::RetainedFile;
use serde::{Deserialize, Serialize};
use shadowbell_memory::{Mapping, Protection, SharedBytes};
use shadowbell_state::{Descriptors, FdRef, LastingChange};
use shadowbell_vfio_user::{RestoreError, SaveError};
use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Bytes of one slot. A slot stores one range.
const SLOT: usize = 64;
/// Offsets of the words in a slot: moment at which the range was added, moment at which it was
/// removed (0 for never), IOVA, length, number of the file plus 1 (0 for no file), offset in the
/// file, and 1 if the range is writable.
const ADDED: usize = 0;
const REMOVED: usize = 8;
const IOVA: usize = 16;
const LEN: usize = 24;
const FILE: usize = 32;
const OFFSET: usize = 40;
const WRITABLE: usize = 48;

/// Range in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WrittenRange {
    pub(super) iova: u64,
    pub(super) len: u64,
    /// Number of the lasting descriptor of the range's file.
    pub(super) file: Option<u64>,
    pub(super) offset: u64,
    pub(super) writable: bool,
}

/// Reference to the table in a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SavedRanges {
    memory: FdRef,
    sequence: u64,
    /// Number of slots that were ever used.
    slots: u32,
}

struct File {
    number: u64,
    /// Number of ranges that are in this file.
    ranges: u32,
    /// Reference that keeps the address of the `RetainedFile` in use, because the address
    /// identifies the file.
    _file: Arc<RetainedFile>,
}

/// Table of all ranges of a client, in shared memory.
pub(super) struct WrittenRanges {
    memory: SharedBytes,
    /// Moment of the last checkpoint.
    sequence: u64,
    slots: HashMap<u64, u32>,
    /// Number of slots that were ever used.
    unused_slot: u32,
    free: Vec<u32>,
    /// Slots of removed ranges that the last checkpoint still needs. They become free with the next
    /// checkpoint.
    removed_slots: Vec<u32>,
    /// Files by the address of their `RetainedFile`, which is unique while the entry exists.
    files: HashMap<usize, File>,
    /// Lasting descriptors that the next checkpoint adds (`Some`) or removes (`None`), by the
    /// number of the descriptor.
    changes: BTreeMap<u64, Option<Arc<RetainedFile>>>,
    /// Number of the next lasting descriptor.
    next: u64,
    /// Number of mapped ranges whose file has no open descriptor.
    without_file: u32,
}

impl WrittenRanges {
    /// Creates an empty table for up to `most` ranges. Files are numbered from `first` on.
    ///
    /// # Errors
    /// The system has no memory.
    pub(super) fn new(most: u32, first: u64) -> Result<Self, SaveError> {
        // The table has twice as many slots as `most`, because a removed range keeps its slot until
        // the next checkpoint.
        let memory = Mapping::shared("client-ranges", u64::from(most) * 2 * SLOT as u64);
        Ok(Self {
            memory: memory.map_err(std::io::Error::other)?.bytes(),
            sequence: 0,
            slots: HashMap::new(),
            unused_slot: 0,
            free: Vec::new(),
            removed_slots: Vec::new(),
            files: HashMap::new(),
            changes: BTreeMap::new(),
            next: first,
            without_file: 0,
        })
    }

    /// Adds a range with its file. If the range `is_mapped` but its file has no open descriptor,
    /// checkpoints become impossible, because the next server process could not map the range.
    pub(super) fn add(
        &mut self,
        (iova, len): (u64, u64),
        (file, offset): (Option<&Arc<RetainedFile>>, u64),
        is_mapped: bool,
        protection: Protection,
    ) {
        let file = file.map(|retained| self.number_of(retained));
        self.without_file += u32::from(is_mapped && file.is_none());
        let slot = self.free.pop().unwrap_or_else(|| {
            self.unused_slot += 1;
            self.unused_slot - 1
        });
        // The word `ADDED` is written first, with the moment of the next checkpoint. From then on,
        // a reader of the last checkpoint ignores the slot, so the other words need not be valid
        // yet.
        self.write(slot, ADDED, self.sequence + 1);
        self.write(slot, REMOVED, 0);
        self.write(slot, IOVA, iova);
        self.write(slot, LEN, len);
        // The word is 0 for a range without a file. If the range is mapped nevertheless,
        // `without_file` prevents checkpoints.
        self.write(slot, FILE, file.map_or(0, |number| number + 1));
        self.write(slot, OFFSET, offset);
        self.write(slot, WRITABLE, u64::from(protection == Protection::ReadWrite));
        self.slots.insert(iova, slot);
    }

    /// Removes a range.
    pub(super) fn remove(&mut self, iova: u64, file: Option<&Arc<RetainedFile>>, is_mapped: bool) {
        let Some(slot) = self.slots.remove(&iova) else { return };
        let is_recorded = self.memory.load_u64_acquire(slot as usize * SLOT) <= Some(self.sequence);
        self.write(slot, REMOVED, self.sequence + 1);
        // The last checkpoint does not need a range that was added after it, so the slot of that
        // range is free immediately.
        if is_recorded { &mut self.removed_slots } else { &mut self.free }.push(slot);
        self.without_file -= u32::from(is_mapped && file.is_none());
        let Some(place) = file.map(|retained| Arc::as_ptr(retained) as usize) else { return };
        let Some(known) = self.files.get_mut(&place) else { return };
        known.ranges -= 1;
        if known.ranges == 0
            && let Some(File { number, .. }) = self.files.remove(&place)
            // If no checkpoint has added the file, no checkpoint needs to remove it.
            && self.changes.remove(&number).is_none()
        {
            self.changes.insert(number, None);
        }
    }

    fn number_of(&mut self, retained: &Arc<RetainedFile>) -> u64 {
        let place = Arc::as_ptr(retained) as usize;
        let known = self.files.entry(place).or_insert_with(|| {
            let number = self.next;
            self.next += 1;
            self.changes.insert(number, Some(Arc::clone(retained)));
            File { number, ranges: 0, _file: Arc::clone(retained) }
        });
        known.ranges += 1;
        known.number
    }

    fn write(&self, slot: u32, word: usize, value: u64) {
        // The store has release order, because the next server process may read the table after a
        // crash.
        let stored = self.memory.store_u64_release(slot as usize * SLOT + word, value);
        debug_assert!(stored.is_some(), "there is no slot {slot}");
    }

    /// Begins a new checkpoint: advances the moment (the sequence number), and adds the changes of
    /// lasting descriptors to `fds`.
    ///
    /// # Errors
    /// The file of a mapped range has no open descriptor, or the system has no descriptors.
    pub(super) fn record(&mut self, fds: &mut Descriptors) -> Result<SavedRanges, SaveError> {
        if self.without_file > 0 {
            return Err(too_many_files());
        }
        let memory = self.memory.mapping().fd().ok_or(SaveError::Device)?;
        let memory = memory.try_clone_to_owned()?;
        let put = self.changes.iter().map(|(number, retained)| {
            let fd = retained
                .as_ref()
                .map(|retained| retained.fd.as_fd().try_clone_to_owned())
                .transpose()?;
            Ok((*number, fd))
        });
        // Either all changes are passed on or none. After a failure, the next checkpoint contains
        // all of them again.
        let put: Vec<(u64, Option<OwnedFd>)> = put.collect::<std::io::Result<_>>()?;
        self.changes.clear();
        for (number, fd) in put {
            match fd {
                Some(fd) => fds.add_lasting(number, fd),
                None => fds.remove_lasting(number),
            }
        }
        self.sequence += 1;
        self.free.append(&mut self.removed_slots);
        let memory = fds.add(memory);
        Ok(SavedRanges { memory, sequence: self.sequence, slots: self.unused_slot })
    }

    /// Ends the use of the table. Returns the numbers of all lasting descriptors of earlier
    /// checkpoints, and the next number.
    pub(super) fn end(self) -> (Vec<u64>, u64) {
        let Self { files, changes, next, .. } = self;
        let is_given = |number: &u64| !changes.contains_key(number);
        let mut numbers: Vec<u64> =
            files.values().map(|file| file.number).filter(is_given).collect();
        numbers.extend(
            changes.iter().filter(|(_, retained)| retained.is_none()).map(|(number, _)| *number),
        );
        (numbers, next)
    }
}

/// Reads the ranges of a checkpoint and their files, in the next server process.
///
/// # Errors
/// The error of the system, or an invalid table.
pub(super) fn read(
    saved: &SavedRanges,
    fds: &mut Descriptors,
) -> Result<(Vec<WrittenRange>, HashMap<u64, OwnedFd>), RestoreError> {
    let other = || RestoreError::Client("the table of its memory ranges is invalid".to_owned());
    let fd = fds.take(saved.memory)?;
    let len = u64::from(saved.slots) * SLOT as u64;
    let mut ranges = Vec::new();
    if len > 0 {
        let mapping = Mapping::from_fd(&fd, 0, len, Protection::Read).map_err(|_| other())?;
        let bytes = mapping.bytes();
        for at in (0..saved.slots as usize).map(|slot| slot * SLOT) {
            let word = |word: usize| bytes.load_u64_acquire(at + word).ok_or_else(other);
            let (added, removed) = (word(ADDED)?, word(REMOVED)?);
            if added == 0 || added > saved.sequence || (1..=saved.sequence).contains(&removed) {
                continue;
            }
            ranges.push(WrittenRange {
                iova: word(IOVA)?,
                len: word(LEN)?,
                file: word(FILE)?.checked_sub(1),
                offset: word(OFFSET)?,
                writable: word(WRITABLE)? != 0,
            });
        }
    }
    let mut files = HashMap::new();
    for change in fds.take_changes() {
        match change {
            LastingChange::Put(number, fd) => drop(files.insert(number, fd)),
            LastingChange::Remove(number) => drop(files.remove(&number)),
        }
    }
    Ok((ranges, files))
}

pub(super) fn too_many_files() -> SaveError {
    SaveError::Client(
        "its memory is in more files than the descriptor limit of one client: raise the limit of \
         open files (`ulimit -n`, or LimitNOFILE= of systemd)"
            .into(),
    )
}

#[cfg(test)]
mod tests;
