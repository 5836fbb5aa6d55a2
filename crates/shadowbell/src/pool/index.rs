//! What a pool has written down of its namespaces: one small file, in which there are two places.
//!
//! A state goes to the place of the older one, with a number and a checksum, and is synchronised:
//! until that has ended the other place counts. So nothing has to be made or renamed while the
//! server runs, which its sandbox would not let it, and a full file system is no reason to fail.

use serde::{Deserialize, Serialize};
use shadowbell_controller::{PoolNamespace, PoolState, SanitizePhase, SanitizeStatus};
use shadowbell_spec::admin::Sanitize;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};

/// Namespaces that a pool may have: each has a file, which is there from the beginning.
pub(crate) const MOST: u32 = 64;
/// How long the file is at which there is no namespace: an empty one is no image.
pub(super) const VACANT: u64 = 4096;
/// How long a place is; with [`MOST`] namespaces a state is shorter.
const PLACE: u64 = 32 << 10;
/// How a place begins.
const MAGIC: &[u8; 16] = b"shadowbell-pool1";
/// What comes before the state: the magic, the number, the checksum, the length.
const HEAD: usize = 16 + 8 + 8 + 8;

/// What is written down.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Index {
    pub(crate) namespaces: Vec<Entry>,
    /// The namespace that is being formatted, and the block size that it gets.
    #[serde(default)]
    pub(crate) formatting: Option<(u32, u32)>,
    #[serde(default)]
    pub(crate) sanitize: SavedSanitize,
}

/// A namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) nsid: u32,
    pub(crate) uuid: [u8; 16],
    pub(crate) blocks: u64,
    pub(crate) block_size: u32,
    pub(crate) attached: bool,
}

impl Entry {
    pub(crate) fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(self.block_size.into())
    }
}

/// The most recent sanitize operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedSanitize {
    pub(crate) phase: Phase,
    /// Dwords 10 and 11 of the command.
    pub(crate) command: (u32, u32),
    /// Passes of an overwrite that are complete.
    pub(crate) passes: u8,
    /// The namespaces below this number are done in the pass that is under way.
    pub(crate) nsid: u32,
}

/// How far that is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Phase {
    #[default]
    Never,
    InProgress,
    Successful,
    Failed,
    FailureLeft,
}

impl Index {
    pub(crate) fn find(&self, nsid: u32) -> Option<&Entry> {
        self.namespaces.iter().find(|entry| entry.nsid == nsid)
    }

    pub(crate) fn find_mut(&mut self, nsid: u32) -> Option<&mut Entry> {
        self.namespaces.iter_mut().find(|entry| entry.nsid == nsid)
    }

    /// For the controller. `parts` is how far a sanitize operation is.
    pub(crate) fn state(&self, capacity: u64, parts: u16) -> PoolState {
        let namespace = |entry: &Entry| PoolNamespace {
            nsid: entry.nsid,
            uuid: entry.uuid,
            blocks: entry.blocks,
            block_size: entry.block_size,
            attached: entry.attached,
        };
        let SavedSanitize { phase, command: (dword10, dword11), passes, .. } = self.sanitize;
        PoolState {
            capacity,
            namespaces: self.namespaces.iter().map(namespace).collect(),
            sanitize: SanitizeStatus {
                phase: match phase {
                    Phase::Never => SanitizePhase::Never,
                    Phase::InProgress => SanitizePhase::InProgress(parts),
                    Phase::Successful => SanitizePhase::Successful,
                    Phase::Failed => SanitizePhase::Failed,
                    Phase::FailureLeft => SanitizePhase::FailureLeft,
                },
                command: Sanitize::from_dwords(dword10, dword11),
                passes,
            },
        }
    }

    /// Whether it can be what a pool was: it comes from a file, which somebody may have changed.
    fn is_possible(&self) -> bool {
        let is_possible = |entry: &Entry| {
            (1..=MOST).contains(&entry.nsid)
                && matches!(entry.block_size, 512 | 4096)
                && entry.blocks != 0
                && entry.blocks.checked_mul(entry.block_size.into()).is_some()
                && entry.uuid != [0; 16]
        };
        self.namespaces.iter().all(is_possible)
            && self.namespaces.is_sorted_by(|a, b| a.nsid < b.nsid)
    }
}

/// A hash that tells a state which was written as a whole from one that was not (64-bit FNV-1a).
fn checksum(number: u64, body: &[u8]) -> u64 {
    number.to_le_bytes().iter().chain(body).fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The newest state of the file, and its number.
///
/// # Errors
/// It can not be read; or there is none.
pub(super) fn read(mut file: &File) -> io::Result<(u64, Index)> {
    let mut newest: Option<(u64, Index)> = None;
    for nth in 0..2 {
        let mut place = vec![0; PLACE as usize];
        file.seek(SeekFrom::Start(nth * PLACE))?;
        if file.read_exact(&mut place).is_ok()
            && let Some((number, index)) = understand(&place)
            && newest.as_ref().is_none_or(|(newest, _)| *newest < number)
        {
            newest = Some((number, index));
        }
    }
    newest.ok_or_else(|| io::Error::other("there is no state of a pool in it"))
}

fn understand(place: &[u8]) -> Option<(u64, Index)> {
    let (head, rest) = place.split_at_checked(HEAD)?;
    let word = |at: usize| Some(u64::from_le_bytes(head.get(at..at + 8)?.try_into().ok()?));
    let (number, sum, len) = (word(16)?, word(24)?, word(32)?);
    let body = rest.get(..usize::try_from(len).ok()?)?;
    if !head.starts_with(MAGIC) || checksum(number, body) != sum {
        return None;
    }
    let index: Index = serde_json::from_slice(body).ok()?;
    index.is_possible().then_some((number, index))
}

/// Writes the state of this number, and has it on stable storage.
///
/// # Errors
/// The system's: which of the two states counts is not known then, until it is read again.
pub(super) fn write(mut file: &File, number: u64, index: &Index) -> io::Result<()> {
    let body = serde_json::to_vec(index)?;
    let mut place = Vec::with_capacity(PLACE as usize);
    place.extend_from_slice(MAGIC);
    for word in [number, checksum(number, &body), body.len() as u64] {
        place.extend_from_slice(&word.to_le_bytes());
    }
    place.extend_from_slice(&body);
    if place.len() as u64 > PLACE {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    place.resize(PLACE as usize, 0);
    file.seek(SeekFrom::Start(number % 2 * PLACE))?;
    file.write_all(&place)?;
    Ok(rustix::fs::fdatasync(file)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    fn index(count: u32) -> Index {
        let entry = |nsid| Entry {
            nsid,
            uuid: [0xff; 16],
            blocks: u64::MAX / 512,
            block_size: 512,
            attached: true,
        };
        Index { namespaces: (1..=count).map(entry).collect(), ..Index::default() }
    }

    #[test]
    fn what_was_written_as_a_whole_counts() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * PLACE).unwrap();
        assert!(read(&file).is_err());
        for number in 1..=5 {
            write(&file, number, &index(number as u32)).unwrap();
            assert_eq!(read(&file).unwrap(), (number, index(number as u32)));
        }
        // As many as there may be have room.
        write(&file, 6, &index(MOST)).unwrap();
        assert_eq!(read(&file).unwrap().0, 6);
        // A state that was not written to its end.
        for at in [0, 20, 30, 39, 100, 5000] {
            write(&file, 6, &index(MOST)).unwrap();
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
            assert_eq!(read(&file).unwrap().0, 5, "{at}");
        }
    }

    #[test]
    fn what_no_pool_can_be_is_not_taken_for_one() {
        let change = |change: &dyn Fn(&mut Index)| {
            let mut of = index(2);
            change(&mut of);
            of.is_possible()
        };
        assert!(change(&|_| ()));
        assert!(!change(&|of| of.namespaces[1].nsid = MOST + 1));
        assert!(!change(&|of| of.namespaces[1].nsid = 1));
        assert!(!change(&|of| of.namespaces[0].block_size = 1000));
        assert!(!change(&|of| of.namespaces[0].block_size = 4096));
        assert!(!change(&|of| of.namespaces[0].blocks = 0));
        assert!(!change(&|of| of.namespaces[0].uuid = [0; 16]));
    }
}
