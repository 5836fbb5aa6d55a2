//! What a pool has written down of its namespaces: one small file of [two places](AbSlots).
//!
//! A state goes to the place of the older one, and both are there from the beginning. So nothing
//! has to be made or renamed while the server runs, which its sandbox would not let it, and a full
//! file system is no reason to fail.

use serde::{Deserialize, Serialize};
use shadowbell_backend::{MetadataDisk, MetadataFormat};
use shadowbell_controller::{PoolNamespace, PoolState, SanitizePhase, SanitizeStatus};
use shadowbell_spec::admin::Sanitize;
use shadowbell_state::{AbSlots, HeadOrder};
use std::fs::File;
use std::io;

/// Namespaces that a pool may have: each has a file, which is there from the beginning.
pub(crate) const MOST: u32 = 64;
/// How long the file is at which there is no namespace: an empty one is no image.
pub(super) const VACANT: u64 = 4096;
/// How long a place is; with [`MOST`] namespaces a state is shorter.
const PLACE: u64 = 32 << 10;
const PLACES: AbSlots = AbSlots {
    magic: b"shadowbell-pool1",
    order: HeadOrder::ChecksumFirst,
    place: PLACE,
    is_padded: true,
};

/// What is written down.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Index {
    pub(crate) namespaces: Vec<Entry>,
    /// The namespace that is being formatted, and the block size that it gets.
    #[serde(default)]
    pub(crate) formatting: Option<(u32, u32)>,
    /// And what metadata its blocks get.
    #[serde(default)]
    pub(crate) formatting_metadata: Option<MetadataFormat>,
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
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) metadata: Option<MetadataFormat>,
    pub(crate) attached: bool,
}

impl Entry {
    /// How long its file is.
    pub(crate) fn bytes(&self) -> u64 {
        self.checked_bytes().unwrap_or(u64::MAX)
    }

    fn checked_bytes(&self) -> Option<u64> {
        match &self.metadata {
            None => self.blocks.checked_mul(self.block_size.into()),
            Some(format) => MetadataDisk::bytes_for(self.blocks, self.block_size, format),
        }
    }

    /// As many other blocks as take no more bytes.
    pub(crate) fn reformatted(
        &self,
        block_size: u32,
        metadata: Option<MetadataFormat>,
    ) -> Option<Self> {
        let each = u64::from(block_size) + metadata.map_or(0, |own| own.size.into());
        let mut new = Self { blocks: self.bytes() / each, block_size, metadata, ..self.clone() };
        while new.blocks != 0 && new.bytes() > self.bytes() {
            new.blocks -= 1;
        }
        (new.blocks != 0).then_some(new)
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

    /// For the controller. `parts` is how far a sanitize operation is, as far as this process knows:
    /// it has gone at least as far as the index says.
    pub(crate) fn state(&self, capacity: u64, parts: u16) -> PoolState {
        let namespace = |entry: &Entry| PoolNamespace {
            nsid: entry.nsid,
            uuid: entry.uuid,
            blocks: entry.blocks,
            block_size: entry.block_size,
            metadata: entry.metadata,
            attached: entry.attached,
        };
        let SavedSanitize { phase, command: (dword10, dword11), passes, .. } = self.sanitize;
        PoolState {
            capacity,
            namespaces: self.namespaces.iter().map(namespace).collect(),
            sanitize: SanitizeStatus {
                phase: match phase {
                    Phase::Never => SanitizePhase::Never,
                    Phase::InProgress => SanitizePhase::InProgress(parts.max(self.sanitized())),
                    Phase::Successful => SanitizePhase::Successful,
                    Phase::Failed => SanitizePhase::Failed,
                    Phase::FailureLeft => SanitizePhase::FailureLeft,
                },
                command: Sanitize::from_dwords(dword10, dword11),
                passes,
            },
        }
    }

    /// How far an overwrite is by what is written down of it, in 65536th parts.
    fn sanitized(&self) -> u16 {
        let SavedSanitize { command: (dword10, dword11), passes, nsid, .. } = self.sanitize;
        let command = Sanitize::from_dwords(dword10, dword11);
        if command.sanact != Sanitize::OVERWRITE {
            return 0;
        }
        let sum = |entries: &mut dyn Iterator<Item = &Entry>| {
            entries.map(|entry| u128::from(entry.bytes())).sum::<u128>()
        };
        let all = sum(&mut self.namespaces.iter()).max(1);
        let of_pass = sum(&mut self.namespaces.iter().filter(|entry| entry.nsid <= nsid));
        let done = u128::from(passes) * all + of_pass;
        u16::try_from(done * 65535 / (all * u128::from(command.passes()))).unwrap_or(u16::MAX)
    }

    /// Whether it can be what a pool was: it comes from a file, which somebody may have changed.
    fn is_possible(&self) -> bool {
        let is_format = |block_size: u32, metadata: Option<MetadataFormat>| {
            matches!(block_size, 512 | 4096) && metadata.is_none_or(|own| own.is_possible())
        };
        let is_possible = |entry: &Entry| {
            (1..=MOST).contains(&entry.nsid)
                && is_format(entry.block_size, entry.metadata)
                && entry.blocks != 0
                && entry.checked_bytes().is_some()
                && entry.uuid != [0; 16]
        };
        // The namespace may have been deleted after its format has failed.
        self.formatting.is_none_or(|(_, size)| is_format(size, self.formatting_metadata))
            && self.namespaces.iter().all(is_possible)
            && self.namespaces.is_sorted_by(|a, b| a.nsid < b.nsid)
    }
}

/// The newest state of the file, and its number.
///
/// # Errors
/// It can not be read; or there is none.
pub(super) fn read(file: &File) -> io::Result<(u64, Index)> {
    let newest = PLACES.read(file, |body| {
        let index: Index = serde_json::from_slice(body).ok()?;
        index.is_possible().then_some(index)
    });
    let newest = newest.map(|newest| (newest.number, newest.value));
    newest.ok_or_else(|| io::Error::other("there is no state of a pool in it"))
}

/// Writes the state of this number, and has it on stable storage.
///
/// # Errors
/// The system's: which of the two states counts is not known then, until it is read again.
pub(super) fn write(file: &File, number: u64, index: &Index) -> io::Result<()> {
    PLACES.write(file, number % 2, number, &serde_json::to_vec(index)?)
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
            metadata: None,
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
    fn a_file_of_an_earlier_version_is_read() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * PLACE).unwrap();
        let mut as_before = b"shadowbell-pool1\x02\0\0\0\0\0\0\0".to_vec();
        as_before.extend_from_slice(&0xeed5d1b0f6e78945_u64.to_le_bytes());
        as_before.extend_from_slice(b"\x11\0\0\0\0\0\0\0{\"namespaces\":[]}");
        file.write_all_at(&as_before, 0).unwrap();
        assert_eq!(read(&file).unwrap(), (2, Index::default()));
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
        // What a format makes of one.
        assert!(change(&|of| of.formatting = Some((2, 4096))));
        assert!(change(&|of| of.formatting = Some((3, 4096))));
        assert!(!change(&|of| of.formatting = Some((2, 0))));
        assert!(!change(&|of| {
            of.formatting = Some((2, 512));
            let mut metadata = MetadataFormat::new(8).unwrap();
            metadata.wide_guard = true;
            of.formatting_metadata = Some(metadata);
        }));
    }
}
