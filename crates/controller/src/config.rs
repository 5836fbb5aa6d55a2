//! Configuration of a controller: limits, identity and namespaces.

use crate::exec::Quota;
use crate::pool::NamespacePool;
use crate::subsystem::Member;
use shadowbell_disk::Disk;
use std::sync::Arc;

/// PCI vendor and subsystem vendor identifier, in Identify Controller and in configuration space.
/// The value belongs to no hardware vendor, so that no driver applies the quirks of a vendor's
/// devices.
pub const PCI_VENDOR_ID: u16 = 0x5342;

/// Maximum number of namespaces of a controller.
pub const MAX_NAMESPACES: usize = 256;
/// Valid values of [`Config::mdts`]. The lower limit is 1 MiB, so that a large request of the host
/// fits into one command. The upper limit is 16 MiB, which bounds the work per command. It is also
/// the most that an SGL with the maximum number of descriptors can describe, if each describes a
/// page of 4 KiB.
pub const MDTS_RANGE: std::ops::RangeInclusive<u8> = 8..=12;

/// Configuration of one namespace.
#[derive(Clone, Debug)]
pub struct NamespaceConfig {
    /// Disk that stores the namespace's blocks.
    pub disk: Arc<dyn Disk>,
    /// UUID of the namespace (RFC 9562, big-endian bytes), from which NGUID and EUI-64 are derived.
    /// [`uuid_from`] derives a UUID that is the same after a restart.
    pub uuid: [u8; 16],
}

/// Configuration of a controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// Serial number: printable ASCII, at most 20 characters. The NQN of the subsystem contains
    /// it, so two controllers of one guest must not have the same serial number.
    pub serial: String,
    /// Model number: printable ASCII, at most 40 characters.
    pub model: String,
    /// Namespaces of the controller; at least one, unless a [pool](Config::pool) is set.
    pub namespaces: Vec<NamespaceConfig>,
    /// NSIDs of `namespaces`, in ascending order, 1 to 256. If empty, the NSIDs are 1, 2, 3 and so
    /// on. A host identifies a namespace by its NSID, so a namespace must keep its NSID when
    /// another one is removed.
    pub nsids: Vec<u32>,
    /// Maximum number of I/O queue pairs, 1 to 64.
    pub io_queues: u16,
    /// Maximum number of entries of a queue, 2 to 4096 (CAP.MQES + 1).
    pub max_queue_entries: u32,
    /// MDTS: the largest transfer is 2^mdts pages of 4096 bytes, for example 1 MiB for 8.
    pub mdts: u8,
    /// True if Doorbell Buffer Config is supported.
    pub shadow_doorbells: bool,
    /// Membership in a [`Subsystem`](crate::Subsystem) of several controllers, which share
    /// namespaces, NSIDs, serial number and model number.
    pub member: Option<Arc<Member>>,
    /// Limit of commands in flight on each I/O thread. Commands beyond the limit wait in their
    /// queue.
    pub quota: Quota,
    /// Pool from which the host creates namespaces (Namespace Management). Attached namespaces of
    /// the pool are also in `namespaces`, unless a sanitize operation
    /// [blocks](crate::SanitizeStatus::barrier) access to them. With a pool, `namespaces` may be
    /// empty.
    pub pool: Option<Arc<dyn NamespacePool>>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            serial: "SHADOWBELL0".into(),
            model: "Shadowbell NVMe Controller".into(),
            namespaces: Vec::new(),
            nsids: Vec::new(),
            io_queues: 64,
            max_queue_entries: 4096,
            mdts: 8,
            shadow_doorbells: true,
            member: None,
            quota: Quota::default(),
            pool: None,
        }
    }
}

/// Error in a [`Config`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A text field is empty, too long, or has characters that the field cannot hold.
    #[error(
        "the {field} {value:?} is not 1 to {max} characters of printable ASCII without a space at \
         either end"
    )]
    Text {
        /// Name of the field: "serial number" or "model number".
        field: &'static str,
        /// Rejected value.
        value: String,
        /// Maximum number of characters.
        max: usize,
    },
    /// The number of I/O queue pairs is out of range.
    #[error("{0} I/O queues: a controller has 1 to 64")]
    IoQueues(u16),
    /// The maximum number of queue entries is out of range.
    #[error("{0} queue entries: a queue has 2 to 4096")]
    QueueEntries(u32),
    /// MDTS is out of range.
    #[error(
        "MDTS {0}: the largest transfer is 2^MDTS pages of 4096 bytes, and MDTS is {min} to {max}",
        min = MDTS_RANGE.start(),
        max = MDTS_RANGE.end()
    )]
    Mdts(u8),
    /// The number of namespaces is out of range.
    #[error("{0} namespaces: a controller has 1 to {MAX_NAMESPACES}")]
    Namespaces(usize),
    /// The NSIDs are out of range or not ascending, or their number is not that of the namespaces.
    #[error(
        "the NSIDs {0:?}: each of the namespaces has one, 1 to {MAX_NAMESPACES}, in ascending order"
    )]
    Nsids(Vec<u32>),
    /// The disk has no blocks.
    #[error("namespace {nsid}: the disk {disk} is empty")]
    EmptyDisk {
        /// NSID of the namespace.
        nsid: u32,
        /// Name of the disk.
        disk: String,
    },
    /// The disk's size in bytes does not fit into 64 bits.
    #[error("namespace {nsid}: the disk {disk} has {blocks} blocks, more than can be addressed")]
    HugeDisk {
        /// NSID of the namespace.
        nsid: u32,
        /// Name of the disk.
        disk: String,
        /// Size in logical blocks.
        blocks: u64,
    },
    /// The block size is neither 512 nor 4096.
    #[error("namespace {nsid}: the disk {disk} has blocks of {block_size} bytes, not 512 or 4096")]
    BlockSize {
        /// NSID of the namespace.
        nsid: u32,
        /// Name of the disk.
        disk: String,
        /// Block size in bytes.
        block_size: u32,
    },
    /// The UUID is all zeroes, which means "no UUID".
    #[error("namespace {0}: its UUID is all zeroes")]
    NilUuid(u32),
    /// Two namespaces have the same UUID. A host would treat them as two paths to the same data.
    #[error("namespaces {first} and {second} have the same UUID")]
    SameUuid {
        /// Lower NSID of the two.
        first: u32,
        /// Higher NSID of the two.
        second: u32,
    },
}

impl Config {
    /// Checks the configuration.
    ///
    /// # Errors
    /// [`ConfigError`] for the first invalid value.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.validate_from(usize::from(self.pool.is_none()))
    }

    /// Checks the configuration with a minimum number of namespaces. The minimum is 0 for a
    /// running controller, whose last namespace may have been removed.
    pub(crate) fn validate_from(&self, namespaces: usize) -> Result<(), ConfigError> {
        text("serial number", &self.serial, 20)?;
        text("model number", &self.model, 40)?;
        if !(1..=64).contains(&self.io_queues) {
            return Err(ConfigError::IoQueues(self.io_queues));
        }
        if !(2..=4096).contains(&self.max_queue_entries) {
            return Err(ConfigError::QueueEntries(self.max_queue_entries));
        }
        if !MDTS_RANGE.contains(&self.mdts) {
            return Err(ConfigError::Mdts(self.mdts));
        }
        if !(namespaces..=MAX_NAMESPACES).contains(&self.namespaces.len()) {
            return Err(ConfigError::Namespaces(self.namespaces.len()));
        }
        if !self.has_possible_nsids() {
            return Err(ConfigError::Nsids(self.nsids.clone()));
        }
        for (nsid, namespace) in self.numbered() {
            namespace.validate(nsid)?;
            let mut others = self.numbered().filter(|(_, other)| other.uuid == namespace.uuid);
            if let Some((first, _)) = others.find(|(other, _)| *other < nsid) {
                return Err(ConfigError::SameUuid { first, second: nsid });
            }
        }
        Ok(())
    }

    fn has_possible_nsids(&self) -> bool {
        let nsids = &self.nsids;
        let is_possible = |nsid: &u32| (1..=MAX_NAMESPACES as u32).contains(nsid);
        nsids.is_empty()
            || nsids.len() == self.namespaces.len()
                && nsids.iter().all(is_possible)
                && nsids.is_sorted_by(|a, b| a < b)
    }

    /// Namespaces with their NSIDs.
    pub(crate) fn numbered(&self) -> impl Iterator<Item = (u32, &NamespaceConfig)> {
        let counted = self.nsids.is_empty().then_some(1..).into_iter().flatten();
        self.nsids.iter().copied().chain(counted).zip(&self.namespaces)
    }
}

impl NamespaceConfig {
    /// Checks the namespace as namespace `nsid` of a controller.
    pub(crate) fn validate(&self, nsid: u32) -> Result<(), ConfigError> {
        let info = self.disk.info();
        let disk = || self.disk.name();
        if !matches!(info.block_size, 512 | 4096) {
            let block_size = info.block_size;
            return Err(ConfigError::BlockSize { nsid, disk: disk(), block_size });
        }
        if info.blocks == 0 {
            return Err(ConfigError::EmptyDisk { nsid, disk: disk() });
        }
        if info.blocks.checked_mul(u64::from(info.block_size)).is_none() {
            return Err(ConfigError::HugeDisk { nsid, disk: disk(), blocks: info.blocks });
        }
        if self.uuid == [0; 16] {
            return Err(ConfigError::NilUuid(nsid));
        }
        Ok(())
    }
}

fn text(field: &'static str, value: &str, max: usize) -> Result<(), ConfigError> {
    let printable = value.bytes().all(|b| matches!(b, b' '..=b'~'));
    let spaced = value.starts_with(' ') || value.ends_with(' ');
    if value.is_empty() || value.len() > max || !printable || spaced {
        return Err(ConfigError::Text { field, value: value.into(), max });
    }
    Ok(())
}

/// Derives a UUID from a text, for example from the serial number and the name of a disk. The UUID
/// stays the same after a restart, so a guest finds its disk again. Different texts give different
/// UUIDs.
///
/// The UUID has version 8 (RFC 9562, 5.8, "custom") and contains 122 bits of an FNV-1a hash. A
/// cryptographic hash is not needed: an author of disk names who wants two equal UUIDs can also set
/// them directly.
#[must_use]
pub fn uuid_from(text: &str) -> [u8; 16] {
    const OFFSET_BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    // 16 zero bytes at the end let the last characters affect all bits of the hash.
    let bytes = text.bytes().chain([0; 16]);
    let hash = bytes.fold(OFFSET_BASIS, |h, b| (h ^ u128::from(b)).wrapping_mul(PRIME));
    let mut uuid = hash.to_be_bytes();
    uuid[6] = uuid[6] & 0x0f | 0x80; // version 8
    uuid[8] = uuid[8] & 0x3f | 0x80; // the variant of RFC 9562
    uuid
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_disk::TestDisk;
    use std::collections::HashSet;

    fn config(disks: usize) -> Config {
        let namespaces = (0..disks)
            .map(|n| NamespaceConfig {
                disk: TestDisk::shared(1000, 512),
                uuid: uuid_from(&n.to_string()),
            })
            .collect();
        Config { namespaces, ..Config::default() }
    }

    fn with_disk(disk: TestDisk) -> Config {
        let disk = Arc::new(disk);
        Config {
            namespaces: vec![NamespaceConfig { disk, uuid: uuid_from("a") }],
            ..Config::default()
        }
    }

    #[test]
    fn the_default_with_a_disk_is_valid() {
        config(1).validate().unwrap();
        config(MAX_NAMESPACES).validate().unwrap();
        let smallest =
            Config { io_queues: 1, max_queue_entries: 2, mdts: *MDTS_RANGE.end(), ..config(1) };
        smallest.validate().unwrap();
        let longest = Config { serial: "S".repeat(20), model: "M".repeat(40), ..config(1) };
        longest.validate().unwrap();
    }

    #[test]
    fn each_value_out_of_range_is_named() {
        let refused = |config: Config, words: &[&str]| {
            let error = config.validate().unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        };
        for serial in ["", &"S".repeat(21), "tab\t", "ä", " x", "x ", " "] {
            refused(Config { serial: serial.into(), ..config(1) }, &["serial number", "20"]);
        }
        refused(Config { model: "M".repeat(41), ..config(1) }, &["model number", "40"]);
        refused(Config { io_queues: 0, ..config(1) }, &["0 I/O queues", "64"]);
        refused(Config { io_queues: 65, ..config(1) }, &["65 I/O queues"]);
        refused(Config { max_queue_entries: 1, ..config(1) }, &["1 queue entries"]);
        refused(Config { max_queue_entries: 4097, ..config(1) }, &["4097 queue entries"]);
        refused(Config { mdts: 7, ..config(1) }, &["MDTS 7", "8 to 12"]);
        refused(Config { mdts: 13, ..config(1) }, &["MDTS 13"]);
        refused(config(0), &["0 namespaces", "256"]);
        refused(config(MAX_NAMESPACES + 1), &["257 namespaces"]);
        Config { nsids: vec![2, 256], ..config(2) }.validate().unwrap();
        for nsids in [vec![1], vec![1, 1], vec![2, 1], vec![0, 1], vec![1, 257], vec![1, 2, 3]] {
            refused(Config { nsids, ..config(2) }, &["the NSIDs", "ascending"]);
        }
    }

    #[test]
    fn bad_disks_are_named() {
        let refused = |config: Config| config.validate().unwrap_err();
        let name = || TestDisk::NAME.to_owned();
        let empty = with_disk(TestDisk::new(0, 512));
        assert_eq!(refused(empty), ConfigError::EmptyDisk { nsid: 1, disk: name() });
        for block_size in [0, 1, 511, 520, 1024, 8192] {
            let error = refused(with_disk(TestDisk::new(1, block_size)));
            assert_eq!(error, ConfigError::BlockSize { nsid: 1, disk: name(), block_size });
        }
        let blocks = u64::MAX / 512 + 1;
        let error = refused(with_disk(TestDisk::new(blocks, 512)));
        assert_eq!(error, ConfigError::HugeDisk { nsid: 1, disk: name(), blocks });
        with_disk(TestDisk::new(blocks - 1, 512)).validate().unwrap();

        let mut two = config(3);
        two.namespaces[2].uuid = two.namespaces[0].uuid;
        assert_eq!(refused(two), ConfigError::SameUuid { first: 1, second: 3 });
        let mut nil = config(2);
        nil.namespaces[1].uuid = [0; 16];
        assert_eq!(refused(nil), ConfigError::NilUuid(2));
        let mut two = Config { nsids: vec![4, 5, 9], ..config(3) };
        two.namespaces[2].uuid = two.namespaces[0].uuid;
        assert_eq!(refused(two), ConfigError::SameUuid { first: 4, second: 9 });
    }

    #[test]
    fn a_uuid_stays_the_same_for_ever() {
        // A guest's /etc/fstab may contain the UUID, so the function must never change.
        let uuid = u128::from_be_bytes(uuid_from("SHADOWBELL0/disk.img"));
        assert_eq!(uuid, 0xb090_3256_1d0b_8af2_874a_27a4_6401_4069);
        for uuid in [uuid_from(""), uuid_from("a"), uuid_from(&"long".repeat(1000))] {
            assert_eq!((uuid[6] >> 4, uuid[8] >> 6), (8, 0b10));
        }
        let many: HashSet<_> = (0..100_000).map(|n| uuid_from(&format!("disk{n}"))).collect();
        assert_eq!(many.len(), 100_000);
    }
}
