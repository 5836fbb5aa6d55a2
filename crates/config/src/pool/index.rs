//! Index of a pool's namespaces: one small file of two slots ([`AbSlots`]).
//!
//! A new state overwrites the slot of the older one. Both slots are allocated when the pool is
//! created. An update therefore succeeds on a full file system. It creates and renames no file,
//! because the sandbox would forbid that.

use serde::{Deserialize, Serialize};
use shadowbell_controller::{PoolNamespace, PoolState, SanitizePhase, SanitizeStatus};
use shadowbell_disk::MetadataFormat;
use shadowbell_spec::admin::Sanitize;
use shadowbell_state::{AbSlots, HeadOrder};
use std::fs::File;
use std::io;

/// Largest number of namespaces of a pool. Each has a file, which is created with the pool.
pub const MAX_NAMESPACES: u32 = 64;
/// Length of the file of an unused namespace ID. It is not 0, because an empty file is no valid
/// image.
pub(super) const VACANT: u64 = 4096;
/// Size of a slot in bytes: enough for a state with [`MAX_NAMESPACES`] namespaces.
const SLOT_BYTES: u64 = 32 << 10;
const SLOTS: AbSlots = AbSlots {
    magic: b"shadowbell-pool1",
    order: HeadOrder::ChecksumFirst,
    place: SLOT_BYTES,
    is_padded: true,
};

/// Stored state of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index {
    /// Namespaces of the pool.
    pub namespaces: Vec<Entry>,
    /// NSID of the namespace that is being formatted, and its new block size.
    #[serde(default)]
    pub formatting: Option<(u32, u32)>,
    /// New metadata format of the namespace that is being formatted.
    #[serde(default)]
    pub formatting_metadata: Option<MetadataFormat>,
    /// Most recent sanitize operation.
    #[serde(default)]
    pub sanitize: SavedSanitize,
}

/// Namespace of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// NSID.
    pub nsid: u32,
    /// UUID.
    pub uuid: [u8; 16],
    /// Size in logical blocks.
    pub blocks: u64,
    /// Size of a logical block in bytes, without metadata.
    pub block_size: u32,
    /// Metadata of each block.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<MetadataFormat>,
    /// True if the namespace is attached to the controllers.
    pub attached: bool,
}

impl Entry {
    /// Length of the namespace's file.
    pub fn bytes(&self) -> u64 {
        self.checked_bytes().unwrap_or(u64::MAX)
    }

    fn checked_bytes(&self) -> Option<u64> {
        match &self.metadata {
            None => self.blocks.checked_mul(self.block_size.into()),
            Some(format) => format.bytes_for(self.blocks, self.block_size),
        }
    }

    /// Returns the namespace with another format, and with as many blocks as its file can hold.
    pub fn reformatted(&self, block_size: u32, metadata: Option<MetadataFormat>) -> Option<Self> {
        let each = u64::from(block_size) + metadata.map_or(0, |own| own.size.into());
        let mut new = Self { blocks: self.bytes() / each, block_size, metadata, ..self.clone() };
        while new.blocks != 0 && new.bytes() > self.bytes() {
            new.blocks -= 1;
        }
        (new.blocks != 0).then_some(new)
    }
}

/// Most recent sanitize operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedSanitize {
    /// Phase of the operation.
    pub phase: Phase,
    /// Command Dwords 10 and 11 of the Sanitize command.
    pub command: (u32, u32),
    /// Completed passes of an overwrite.
    pub passes: u8,
    /// NSID of the last namespace that the current pass has overwritten, in ascending order; 0 if
    /// none.
    pub nsid: u32,
}

/// Phase of a sanitize operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// No operation was ever started.
    #[default]
    Never,
    /// The operation runs.
    InProgress,
    /// The operation has succeeded.
    Successful,
    /// The operation has failed.
    Failed,
    /// A sanitize operation failed, and the host has ended the failure state by Exit Failure Mode.
    FailureModeExited,
}

impl Index {
    /// Finds the namespace with this NSID.
    pub fn find(&self, nsid: u32) -> Option<&Entry> {
        self.namespaces.iter().find(|entry| entry.nsid == nsid)
    }

    /// Finds the namespace with this NSID, for a change.
    pub fn find_mut(&mut self, nsid: u32) -> Option<&mut Entry> {
        self.namespaces.iter_mut().find(|entry| entry.nsid == nsid)
    }

    /// State of the pool for the controller. `parts` is the progress of a sanitize operation in
    /// 65536ths, as measured by this process. If the stored progress of an earlier process is
    /// higher, it is reported instead.
    pub fn state(&self, capacity: u64, parts: u16) -> PoolState {
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
                    Phase::FailureModeExited => SanitizePhase::FailureModeExited,
                },
                command: Sanitize::from_dwords(dword10, dword11),
                passes,
            },
        }
    }

    /// Stored progress of an overwrite, in 65536ths.
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

    /// Validates a state that was read from the file: another program may have modified the file.
    fn is_valid(&self) -> bool {
        let is_format = |block_size: u32, metadata: Option<MetadataFormat>| {
            matches!(block_size, 512 | 4096) && metadata.is_none_or(|own| own.is_possible())
        };
        let is_valid = |entry: &Entry| {
            (1..=MAX_NAMESPACES).contains(&entry.nsid)
                && is_format(entry.block_size, entry.metadata)
                && entry.blocks != 0
                && entry.checked_bytes().is_some()
                && entry.uuid != [0; 16]
        };
        // The namespace of `formatting` may be missing, because it can be deleted after a failed
        // format.
        self.formatting.is_none_or(|(_, size)| is_format(size, self.formatting_metadata))
            && self.namespaces.iter().all(is_valid)
            && self.namespaces.is_sorted_by(|a, b| a.nsid < b.nsid)
    }
}

/// Reads the newest state of the file and its sequence number.
///
/// # Errors
/// The file cannot be read, or has no valid state.
pub(super) fn read(file: &File) -> io::Result<(u64, Index)> {
    let newest = SLOTS.read(file, |body| {
        let index: Index = serde_json::from_slice(body).ok()?;
        index.is_valid().then_some(index)
    });
    let newest = newest.map(|newest| (newest.number, newest.value));
    newest.ok_or_else(|| io::Error::other("no valid pool state"))
}

/// Writes the state with sequence number `number` to stable storage.
///
/// # Errors
/// Errors of the file system. After an error, either the old or the new state may be the newest
/// valid one, until the file is read again.
pub(super) fn write(file: &File, number: u64, index: &Index) -> io::Result<()> {
    SLOTS.write(file, number % 2, number, &serde_json::to_vec(index)?)
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
    fn a_torn_write_leaves_the_older_state() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * SLOT_BYTES).unwrap();
        assert!(read(&file).is_err());
        for number in 1..=5 {
            write(&file, number, &index(number as u32)).unwrap();
            assert_eq!(read(&file).unwrap(), (number, index(number as u32)));
        }
        // A slot has room for a state with the maximum number of namespaces.
        write(&file, 6, &index(MAX_NAMESPACES)).unwrap();
        assert_eq!(read(&file).unwrap().0, 6);
        // After a torn write of the newest state, the older one is read.
        for at in [0, 20, 30, 39, 100, 5000] {
            write(&file, 6, &index(MAX_NAMESPACES)).unwrap();
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
            assert_eq!(read(&file).unwrap().0, 5, "{at}");
        }
    }

    #[test]
    fn a_file_of_an_earlier_version_is_read() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * SLOT_BYTES).unwrap();
        let mut as_before = b"shadowbell-pool1\x02\0\0\0\0\0\0\0".to_vec();
        as_before.extend_from_slice(&0xeed5d1b0f6e78945_u64.to_le_bytes());
        as_before.extend_from_slice(b"\x11\0\0\0\0\0\0\0{\"namespaces\":[]}");
        file.write_all_at(&as_before, 0).unwrap();
        assert_eq!(read(&file).unwrap(), (2, Index::default()));
    }

    #[test]
    fn impossible_states_are_refused() {
        let change = |change: &dyn Fn(&mut Index)| {
            let mut of = index(2);
            change(&mut of);
            of.is_valid()
        };
        assert!(change(&|_| ()));
        assert!(!change(&|of| of.namespaces[1].nsid = MAX_NAMESPACES + 1));
        assert!(!change(&|of| of.namespaces[1].nsid = 1));
        assert!(!change(&|of| of.namespaces[0].block_size = 1000));
        assert!(!change(&|of| of.namespaces[0].block_size = 4096));
        assert!(!change(&|of| of.namespaces[0].blocks = 0));
        assert!(!change(&|of| of.namespaces[0].uuid = [0; 16]));
        // A state during a format is valid.
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
