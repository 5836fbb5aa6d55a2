//! Ranges of a client's memory, written down where the next process finds them should this one die.
//!
//! A record of a device has few ranges in itself. If it had many, each message that shares one more
//! would be as dear as all before it together, for the thread that serves all clients. So many are
//! in a memory file, which both processes have, and a record says only of which *moment* it is: a
//! range counts if it came at that moment or before, and did not go by then. What was changed since
//! the last record has not happened for the next process, which finds the message in its socket
//! still.
//!
//! Their files are lasting descriptors of the records.

use super::files::Kept;
use serde::{Deserialize, Serialize};
use shadowbell_memory::{Mapping, Protection, SharedBytes};
use shadowbell_state::{Descriptors, FdRef, LastingChange};
use shadowbell_vfio_user::{RestoreError, SaveError};
use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// The bytes of a range in the file.
const SLOT: usize = 64;
/// Where in it each word is: the moments at which the range came and went (0: it has not), where it
/// is for the client, its bytes, the number of its file and 1 (0: it has none), the offset in that,
/// and whether it may be written.
const CAME: usize = 0;
const WENT: usize = 8;
const IOVA: usize = 16;
const LEN: usize = 24;
const FILE: usize = 32;
const OFFSET: usize = 40;
const WRITABLE: usize = 48;

/// A range, as it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WrittenRange {
    pub(super) iova: u64,
    pub(super) len: u64,
    /// The number of its file.
    pub(super) file: Option<u64>,
    pub(super) offset: u64,
    pub(super) writable: bool,
}

/// What a record says of them.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SavedRanges {
    memory: FdRef,
    moment: u64,
    /// Places behind these were never used.
    slots: u32,
}

struct File {
    number: u64,
    /// Ranges that are in it.
    ranges: u32,
    /// So that no other comes to be there.
    _kept: Arc<Kept>,
}

/// All ranges of a client.
pub(super) struct WrittenRanges {
    memory: SharedBytes,
    /// That of the last record.
    moment: u64,
    slots: HashMap<u64, u32>,
    /// Places from here on were never used.
    fresh: u32,
    free: Vec<u32>,
    /// To be free with the next record.
    going: Vec<u32>,
    /// By where they are in memory: that is theirs for as long as they are here.
    files: HashMap<usize, File>,
    /// Those that come or go with the next record, by their numbers.
    changes: BTreeMap<u64, Option<Arc<Kept>>>,
    /// The number of the next one.
    next: u64,
    /// How many ranges there are of which no file is kept.
    without_file: u32,
}

impl WrittenRanges {
    /// None yet, and room for `most`. Files are numbered from `first` on.
    ///
    /// # Errors
    /// The system has no memory.
    pub(super) fn new(most: u32, first: u64) -> Result<Self, SaveError> {
        // Those of the last record that have gone since keep their places.
        let memory = Mapping::shared("client-ranges", u64::from(most) * 2 * SLOT as u64);
        Ok(Self {
            memory: memory.map_err(std::io::Error::other)?.bytes(),
            moment: 0,
            slots: HashMap::new(),
            fresh: 0,
            free: Vec::new(),
            going: Vec::new(),
            files: HashMap::new(),
            changes: BTreeMap::new(),
            next: first,
            without_file: 0,
        })
    }

    /// One more, with its file. `is_mapped`: it has one, and without it the next process could not
    /// go on.
    pub(super) fn add(
        &mut self,
        (iova, len): (u64, u64),
        (file, offset): (Option<&Arc<Kept>>, u64),
        is_mapped: bool,
        protection: Protection,
    ) {
        let file = file.map(|kept| self.number_of(kept));
        self.without_file += u32::from(is_mapped && file.is_none());
        let slot = self.free.pop().unwrap_or_else(|| {
            self.fresh += 1;
            self.fresh - 1
        });
        // It came in the future as far as the last record goes, whatever else is here.
        self.write(slot, CAME, self.moment + 1);
        self.write(slot, WENT, 0);
        self.write(slot, IOVA, iova);
        self.write(slot, LEN, len);
        // What has no file and is mapped is told by the missing number: there is no record then.
        self.write(slot, FILE, file.map_or(0, |number| number + 1));
        self.write(slot, OFFSET, offset);
        self.write(slot, WRITABLE, u64::from(protection == Protection::ReadWrite));
        self.slots.insert(iova, slot);
    }

    /// One less.
    pub(super) fn remove(&mut self, iova: u64, file: Option<&Arc<Kept>>, is_mapped: bool) {
        let Some(slot) = self.slots.remove(&iova) else { return };
        let is_recorded = self.memory.load_u64_acquire(slot as usize * SLOT) <= Some(self.moment);
        self.write(slot, WENT, self.moment + 1);
        // The last record has no use for what came after it.
        if is_recorded { &mut self.going } else { &mut self.free }.push(slot);
        self.without_file -= u32::from(is_mapped && file.is_none());
        let Some(place) = file.map(|kept| Arc::as_ptr(kept) as usize) else { return };
        let Some(known) = self.files.get_mut(&place) else { return };
        known.ranges -= 1;
        if known.ranges == 0
            && let Some(File { number, .. }) = self.files.remove(&place)
            // Nobody may have been given it.
            && self.changes.remove(&number).is_none()
        {
            self.changes.insert(number, None);
        }
    }

    fn number_of(&mut self, kept: &Arc<Kept>) -> u64 {
        let place = Arc::as_ptr(kept) as usize;
        let known = self.files.entry(place).or_insert_with(|| {
            let number = self.next;
            self.next += 1;
            self.changes.insert(number, Some(Arc::clone(kept)));
            File { number, ranges: 0, _kept: Arc::clone(kept) }
        });
        known.ranges += 1;
        known.number
    }

    fn write(&self, slot: u32, word: usize, value: u64) {
        // In this order for whoever finds it after a death.
        let stored = self.memory.store_u64_release(slot as usize * SLOT + word, value);
        debug_assert!(stored.is_some(), "there is no slot {slot}");
    }

    /// For a record: what is there now is of its moment. Its lasting descriptors go to `fds`.
    ///
    /// # Errors
    /// A range is in a file of which nothing is kept; or the system has no descriptors.
    pub(super) fn record(&mut self, fds: &mut Descriptors) -> Result<SavedRanges, SaveError> {
        if self.without_file > 0 {
            return Err(too_many_files());
        }
        let memory = self.memory.mapping().fd().ok_or(SaveError::Device)?;
        let memory = memory.try_clone_to_owned()?;
        let put = self.changes.iter().map(|(number, kept)| {
            let fd = kept.as_ref().map(|kept| kept.fd.as_fd().try_clone_to_owned()).transpose()?;
            Ok((*number, fd))
        });
        // All of them, or none: what was not recorded is tried again.
        let put: Vec<(u64, Option<OwnedFd>)> = put.collect::<std::io::Result<_>>()?;
        self.changes.clear();
        for (number, fd) in put {
            match fd {
                Some(fd) => fds.put_lasting(number, fd),
                None => fds.remove_lasting(number),
            }
        }
        self.moment += 1;
        self.free.append(&mut self.going);
        let memory = fds.add(memory);
        Ok(SavedRanges { memory, moment: self.moment, slots: self.fresh })
    }

    /// All files that are among the lasting descriptors, and the number of the next one: for who
    /// does without this from now on.
    pub(super) fn end(self) -> (Vec<u64>, u64) {
        let Self { files, changes, next, .. } = self;
        let is_given = |number: &u64| !changes.contains_key(number);
        let mut numbers: Vec<u64> =
            files.values().map(|file| file.number).filter(is_given).collect();
        numbers
            .extend(changes.iter().filter(|(_, kept)| kept.is_none()).map(|(number, _)| *number));
        (numbers, next)
    }
}

/// The ranges of the record, in the next process, and the files that are there.
///
/// # Errors
/// The system's; or it is no record of ranges.
pub(super) fn read(
    saved: &SavedRanges,
    fds: &mut Descriptors,
) -> Result<(Vec<WrittenRange>, HashMap<u64, OwnedFd>), RestoreError> {
    let other = || RestoreError::Client("its ranges are not where they should be".to_owned());
    let fd = fds.take(saved.memory)?;
    let len = u64::from(saved.slots) * SLOT as u64;
    let mut ranges = Vec::new();
    if len > 0 {
        let mapping = Mapping::from_fd(&fd, 0, len, Protection::Read).map_err(|_| other())?;
        let bytes = mapping.bytes();
        for at in (0..saved.slots as usize).map(|slot| slot * SLOT) {
            let word = |word: usize| bytes.load_u64_acquire(at + word).ok_or_else(other);
            let (came, went) = (word(CAME)?, word(WENT)?);
            if came == 0 || came > saved.moment || (1..=saved.moment).contains(&went) {
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
        "its memory is in more files than descriptors are kept of one client: let this process \
         have more files open (`ulimit -n`, or LimitNOFILE= of systemd)"
            .into(),
    )
}

#[cfg(test)]
mod tests;
