//! Namespace of a controller: a disk, an NSID and the permanent identifiers. Also placeholder
//! disks, for namespaces that Identify reports and no I/O thread serves.

use crate::config::{Config, MAX_NAMESPACES, NamespaceConfig};
use crate::pool::{PoolNamespace, PoolState};
use crate::subsystem::Member;
use shadowbell_disk::{Disk, DiskInfo, Queue};
use shadowbell_spec::identify::csi;
use shadowbell_spec::status::Status;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

/// IEEE OUI of the generated identifiers, big-endian. It belongs to no vendor, because the "locally
/// administered" bit is set.
pub(crate) const IEEE_OUI: [u8; 3] = [0x02, 0x53, 0x42];

/// Status of a command for an inactive NSID (Base 2.1, 3.2.1.5). If a namespace is removed,
/// commands in flight end with the same status (Base 2.1, 8.1.15).
pub(crate) const INACTIVE: Status = Status::INVALID_FIELD.with_dnr();

/// Maximum size of a Copy command in bytes (MCL, MSSRL). An I/O thread buffers the data of a whole
/// command, so the size equals the smallest MDTS that a controller may have.
pub(crate) const COPY_BYTES: usize = 1 << 20;
/// Maximum number of source ranges of a Copy command (MSRC): the number that fits into a page.
pub(crate) const COPY_RANGES: usize = 128;

/// Common properties of all namespaces in Identify Controller. A host reads them once and applies
/// them to namespaces that are added later, so they stay constant for the lifetime of the
/// controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Guarantees {
    /// VWC: a volatile write cache is present. Without it, hosts never send Flush.
    pub(crate) volatile_cache: bool,
    /// WZSL: the largest Write Zeroes in bytes.
    pub(crate) zeroes: u64,
}

/// Maximum number of blocks of a Write Zeroes command: NLB has 16 bits, 0's based.
const ZEROES_BLOCKS: u64 = 1 << 16;

impl Guarantees {
    /// Properties for a controller that starts with the namespaces of `config`.
    fn of(config: &Config) -> Self {
        let infos = || config.namespaces.iter().map(|namespace| namespace.disk.info());
        // WZSL limits all namespaces to the same number of bytes. The maximum NLB covers the fewest
        // bytes on the namespace with the smallest blocks, so this namespace determines WZSL.
        let pool = config.pool.as_ref().map(|_| 512);
        let smallest = infos().map(|info| info.block_size).chain(pool).min().unwrap_or(512);
        Self {
            // A namespace that the host creates later from a pool may have a volatile write cache.
            volatile_cache: config.pool.is_some() || infos().any(|info| info.volatile_cache),
            zeroes: ZEROES_BLOCKS * u64::from(smallest),
        }
    }
}

/// Snapshot of a controller's namespaces, by NSID.
#[derive(Clone, Debug, Default)]
pub(crate) struct Namespaces {
    active: BTreeMap<u32, Namespace>,
    /// Namespaces that the host sees as active but that are temporarily not served. The value is
    /// the status of commands for them.
    barred: BTreeMap<u32, Status>,
    /// NN: the highest NSID so far.
    highest: u32,
    pub(crate) guarantees: Guarantees,
    /// Membership in a subsystem, if its controllers share the namespaces.
    member: Option<Arc<Member>>,
}

impl Namespaces {
    /// Namespaces of a valid configuration.
    pub(crate) fn new(config: &Config) -> Self {
        Self::resuming(config, Guarantees::of(config), 0)
    }

    /// Namespaces for a host that has already read `guarantees` and `highest` (NN) from a previous
    /// process. These values may exceed those of the current configuration.
    pub(crate) fn resuming(config: &Config, guarantees: Guarantees, highest: u32) -> Self {
        // With a pool, a namespace that the host creates may get any NSID.
        let highest = if config.pool.is_some() { MAX_NAMESPACES as u32 } else { highest };
        let (active, barred) = (BTreeMap::new(), BTreeMap::new());
        let member = config.member.clone();
        let mut namespaces = Self { active, barred, highest, guarantees, member };
        for (nsid, namespace) in config.numbered() {
            namespaces.put(nsid, Some(Namespace::new(nsid, namespace, &guarantees)));
        }
        namespaces
    }

    /// Adds the pool's namespaces that a sanitize operation blocks. They are barred (not served) in
    /// the first returned set. In the second set, which is for Identify, they are placeholders.
    pub(crate) fn with_barred(&self, state: &PoolState) -> (Self, Self) {
        let (mut serving, mut identified) = (self.clone(), self.clone());
        if let Some(status) = state.sanitize.barrier() {
            let attached = state.namespaces.iter().filter(|namespace| namespace.attached);
            for own in attached.filter(|own| self.get(own.nsid).is_none()) {
                serving.barred.insert(own.nsid, status);
                let namespace = Namespace::new(own.nsid, &placeholder(own), &self.guarantees);
                identified.put(own.nsid, Some(namespace));
            }
        }
        (serving, identified)
    }

    /// Creates a copy in which namespace `nsid` is barred: it is not served, its commands end with
    /// `status`, and the host continues to see it. With `None`, it is no longer barred.
    pub(crate) fn barring(&self, nsid: u32, status: Option<Status>) -> Arc<Self> {
        let mut changed = self.clone();
        match status {
            Some(status) => changed.barred.insert(nsid, status),
            None => changed.barred.remove(&nsid),
        };
        Arc::new(changed)
    }

    /// NSIDs of barred namespaces. Identify reports them to the host, but they are not served.
    pub(crate) fn barred(&self) -> impl Iterator<Item = u32> + '_ {
        self.barred.keys().copied()
    }

    /// Status of a command for a namespace that is not served.
    pub(crate) fn absence(&self, nsid: u32) -> Status {
        self.barred.get(&nsid).copied().unwrap_or(INACTIVE)
    }

    /// Namespaces that the host sees: all of them if it selected all I/O command sets, otherwise
    /// only those of the NVM command set.
    pub(crate) fn visible(self: &Arc<Self>, to_all: bool) -> Arc<Self> {
        let is_hidden = |namespace: &Namespace| namespace.csi() != csi::NVM;
        if to_all || !self.active.values().any(is_hidden) {
            return Arc::clone(self);
        }
        let mut visible = Self::clone(self);
        visible.active.retain(|_, namespace| !is_hidden(namespace));
        Arc::new(visible)
    }

    fn put(&mut self, nsid: u32, namespace: Option<Namespace>) {
        match namespace {
            Some(namespace) => {
                self.barred.remove(&nsid);
                let member = self.member.clone();
                self.active.insert(nsid, Namespace { member, ..namespace })
            }
            None => self.active.remove(&nsid),
        };
        self.highest = self.highest.max(nsid);
    }

    /// Copy with `namespace` as NSID `nsid`, or without namespace `nsid`.
    pub(crate) fn with(&self, nsid: u32, namespace: Option<Namespace>) -> Arc<Self> {
        let mut changed = self.clone();
        changed.put(nsid, namespace);
        Arc::new(changed)
    }

    /// Served namespaces in ascending order of NSID.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Namespace> {
        self.active.values()
    }

    pub(crate) fn get(&self, nsid: u32) -> Option<&Namespace> {
        self.active.get(&nsid)
    }

    /// Highest valid NSID (Identify Controller, NN). A valid NSID without a namespace is inactive.
    pub(crate) fn highest(&self) -> u32 {
        self.highest
    }
}

/// Namespace as the control plane and the I/O threads see it.
#[derive(Clone, Debug)]
pub(crate) struct Namespace {
    nsid: u32,
    disk: Arc<dyn Disk>,
    info: DiskInfo,
    uuid: [u8; 16],
    write_through: bool,
    member: Option<Arc<Member>>,
}

impl Namespace {
    /// Namespace `nsid` of a valid configuration. If Identify has reported no volatile write cache
    /// to the host, a disk with a volatile cache is used in write-through mode.
    pub(crate) fn new(nsid: u32, config: &NamespaceConfig, guarantees: &Guarantees) -> Self {
        let NamespaceConfig { disk, uuid } = config;
        let mut info = disk.info();
        let write_through = info.volatile_cache && !guarantees.volatile_cache;
        info.volatile_cache &= guarantees.volatile_cache;
        let disk = Arc::clone(disk);
        Self { nsid, disk, info, uuid: *uuid, write_through, member: None }
    }

    /// Copy for Identify only, with a placeholder instead of the disk.
    pub(crate) fn without_disk(&self) -> Self {
        Self { disk: placeholder_disk(self.info.clone()), ..self.clone() }
    }

    /// Configuration of the namespace.
    pub(crate) fn config(&self) -> NamespaceConfig {
        NamespaceConfig { disk: Arc::clone(&self.disk), uuid: self.uuid }
    }

    /// Membership of the controller in a subsystem that shares the namespace.
    pub(crate) fn member(&self) -> Option<&Arc<Member>> {
        self.member.as_ref()
    }

    /// True if every write has to be on the medium before its completion.
    pub(crate) fn write_through(&self) -> bool {
        self.write_through
    }

    /// NSID, from 1.
    pub(crate) fn nsid(&self) -> u32 {
        self.nsid
    }

    /// Disk that stores the namespace's blocks.
    pub(crate) fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    /// Properties of the disk at the time when the namespace was created.
    pub(crate) fn info(&self) -> &DiskInfo {
        &self.info
    }

    /// Size in logical blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.info.blocks
    }

    /// I/O command set identifier (CSI).
    pub(crate) fn csi(&self) -> u8 {
        if self.info.zoned.is_some() { csi::ZONED } else { csi::NVM }
    }

    /// Size of a logical block as a power of two: 9 or 12.
    pub(crate) fn block_shift(&self) -> u32 {
        self.info.block_size.trailing_zeros()
    }

    /// True if writes are refused with Namespace is Write Protected.
    pub(crate) fn read_only(&self) -> bool {
        self.info.read_only
    }

    /// UUID, big-endian.
    pub(crate) fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Namespace Globally Unique Identifier, big-endian. Bytes 8 to 10 are the OUI; the owner of
    /// the OUI assigns the other bytes (Base 2.1, "Namespace Globally Unique Identifier").
    pub(crate) fn nguid(&self) -> [u8; 16] {
        let mut nguid = self.uuid;
        nguid[8..11].copy_from_slice(&IEEE_OUI);
        nguid
    }

    /// IEEE Extended Unique Identifier, big-endian: three bytes of OUI and five vendor-assigned
    /// bytes. The five bytes come from a hash of the UUID (64-bit FNV-1a, folded), because five
    /// bytes of the UUID itself may be equal in all namespaces.
    pub(crate) fn eui64(&self) -> [u8; 8] {
        let hash = self.uuid.iter().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| {
            (h ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let mut eui64 = (hash ^ hash >> 40).to_be_bytes();
        eui64[..3].copy_from_slice(&IEEE_OUI);
        eui64
    }
}

/// Disk that has properties, but no queues.
#[derive(Debug)]
struct Placeholder(DiskInfo);

impl Disk for Placeholder {
    fn info(&self) -> DiskInfo {
        self.0.clone()
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        Err(io::Error::other("the namespace is not served"))
    }

    fn name(&self) -> String {
        "a namespace that is not served".to_owned()
    }
}

/// Configuration of a namespace for Identify only.
pub(crate) fn placeholder(namespace: &PoolNamespace) -> NamespaceConfig {
    let mut info = DiskInfo::new(namespace.block_size, namespace.blocks);
    (info.volatile_cache, info.discard) = (true, true);
    info.metadata = namespace.metadata;
    NamespaceConfig { disk: placeholder_disk(info), uuid: namespace.uuid }
}

/// Placeholder disk with the given properties.
fn placeholder_disk(info: DiskInfo) -> Arc<dyn Disk> {
    Arc::new(Placeholder(info))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::uuid_from;
    use crate::test_disk::TestDisk;
    use std::collections::HashSet;

    const CACHED: Guarantees = Guarantees { volatile_cache: true, zeroes: 0 };

    #[test]
    fn namespace_properties_are_those_of_the_disk() {
        let disk = TestDisk::new(101, 4096);
        let uuid = uuid_from("a");
        let namespace = Namespace::new(2, &NamespaceConfig { disk: Arc::new(disk), uuid }, &CACHED);
        assert_eq!((namespace.nsid(), namespace.blocks(), namespace.block_shift()), (2, 101, 12));
        assert_eq!(namespace.uuid(), uuid);
        assert!(!namespace.read_only());
        let mut disk = TestDisk::new(7, 512);
        disk.0.read_only = true;
        let namespace = Namespace::new(1, &NamespaceConfig { disk: Arc::new(disk), uuid }, &CACHED);
        assert_eq!((namespace.block_shift(), namespace.read_only()), (9, true));
        assert_eq!(namespace.info(), &namespace.disk().info());
    }

    #[test]
    fn names_differ_and_carry_the_oui() {
        // The first UUIDs differ in one byte only; the others come from `uuid_from`.
        let mut uuids: Vec<[u8; 16]> = Vec::new();
        for byte in 0..16 {
            for value in 1..=255 {
                let mut uuid = [0x11; 16];
                uuid[byte] ^= value;
                uuids.push(uuid);
            }
        }
        uuids.extend((0..20_000).map(|n| uuid_from(&n.to_string())));
        let disk = TestDisk::shared(1, 512);
        let config = |uuid| NamespaceConfig { disk: Arc::clone(&disk), uuid };
        let named = |uuid| Namespace::new(1, &config(uuid), &CACHED);
        let namespaces: Vec<_> = uuids.iter().copied().map(named).collect();
        assert!(namespaces.iter().all(|namespace| namespace.nguid()[8..11] == IEEE_OUI));
        assert!(namespaces.iter().all(|namespace| namespace.eui64()[..3] == IEEE_OUI));
        let eui64s: HashSet<_> = namespaces.iter().map(Namespace::eui64).collect();
        assert_eq!(eui64s.len(), uuids.len());
        // The OUI replaces three bytes of the UUID. So NGUIDs are unique only for UUIDs of
        // `uuid_from`.
        let nguids: HashSet<_> = namespaces[16 * 255..].iter().map(Namespace::nguid).collect();
        assert_eq!(nguids.len(), 20_000);
        assert_eq!(IEEE_OUI[0] & 0b11, 0b10, "locally administered, not a group");
    }
}
