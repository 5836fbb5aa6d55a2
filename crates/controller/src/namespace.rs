//! A namespace of a controller: a disk with an identifier, and names for ever.

use crate::config::{Config, MAX_NAMESPACES, NamespaceConfig};
use crate::pool::PoolState;
use crate::subsystem::Member;
use crate::unserved::{placeholder, unserved};
use shadowbell_backend::{Disk, DiskInfo};
use shadowbell_spec::identify::csi;
use shadowbell_spec::status::Status;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The IEEE OUI of the identifiers that are made here, big-endian: with the bit set that says
/// "locally administered", so it is nobody's.
pub(crate) const IEEE_OUI: [u8; 3] = [0x02, 0x53, 0x42];

/// How a command for an inactive NSID ends (Base 2.1, 3.2.1.5). One that is under way when its
/// namespace goes ends as if it had been given afterwards (Base 2.1, 8.1.15).
pub(crate) const INACTIVE: Status = Status::INVALID_FIELD.with_dnr();

/// What one Copy command copies at most (MCL, MSSRL), in bytes: as much as the shortest transfer
/// limit that a controller may have, because a worker keeps that much in a buffer.
pub(crate) const COPY_BYTES: usize = 1 << 20;
/// How many source ranges it may have (MSRC): as many as a page holds.
pub(crate) const COPY_RANGES: usize = 128;

/// What Identify Controller says of all namespaces. A host reads that once, and relies on it for
/// namespaces that are added later, too: so it holds for as long as the controller exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Promises {
    /// VWC: there is a volatile write cache. Without one, no host flushes anything.
    pub(crate) volatile_cache: bool,
    /// WZSL: the longest Write Zeroes, in bytes.
    pub(crate) zeroes: u64,
}

/// Blocks of a Write Zeroes command, at most: a limit of the command itself.
const ZEROES_BLOCKS: u64 = 1 << 16;

impl Promises {
    /// For a controller that begins with these namespaces.
    fn of(config: &Config) -> Self {
        let infos = || config.namespaces.iter().map(|namespace| namespace.disk.info());
        // Of the smallest blocks, because a host reckons with one limit for all namespaces.
        let pool = config.pool.as_ref().map(|_| 512);
        let smallest = infos().map(|info| info.block_size).chain(pool).min().unwrap_or(512);
        Self {
            // What comes from a pool may have one.
            volatile_cache: config.pool.is_some() || infos().any(|info| info.volatile_cache),
            zeroes: ZEROES_BLOCKS * u64::from(smallest),
        }
    }
}

/// The namespaces of a controller as of a moment, by NSID.
#[derive(Clone, Debug, Default)]
pub(crate) struct Namespaces {
    active: BTreeMap<u32, Namespace>,
    /// Those that are there for the host, and that nobody serves for now: how commands for them
    /// end.
    barred: BTreeMap<u32, Status>,
    /// NN: the highest NSID that there has been.
    highest: u32,
    pub(crate) promises: Promises,
    /// The controller is one of several that have them.
    member: Option<Arc<Member>>,
}

impl Namespaces {
    /// Those of a configuration that was found valid.
    pub(crate) fn new(config: &Config) -> Self {
        Self::going_on(config, Promises::of(config), 0)
    }

    /// As above, for a host that was told more than the configuration says: `promises`, and that
    /// NSIDs go up to `highest`.
    pub(crate) fn going_on(config: &Config, promises: Promises, highest: u32) -> Self {
        // A host may give any number that there is to what it makes.
        let highest = if config.pool.is_some() { MAX_NAMESPACES as u32 } else { highest };
        let (active, barred) = (BTreeMap::new(), BTreeMap::new());
        let member = config.member.clone();
        let mut namespaces = Self { active, barred, highest, promises, member };
        for (nsid, namespace) in config.numbered() {
            namespaces.put(nsid, Some(Namespace::new(nsid, namespace, &promises)));
        }
        namespaces
    }

    /// As these, with those of the pool that a sanitize operation keeps out of reach: they are
    /// there for the host.
    pub(crate) fn with_barred(&self, state: &PoolState) -> (Self, Self) {
        let (mut serving, mut identified) = (self.clone(), self.clone());
        if let Some(status) = state.sanitize.barrier() {
            let attached = state.namespaces.iter().filter(|namespace| namespace.attached);
            for own in attached.filter(|own| self.get(own.nsid).is_none()) {
                serving.barred.insert(own.nsid, status);
                let namespace = Namespace::new(own.nsid, &placeholder(own), &self.promises);
                identified.put(own.nsid, Some(namespace));
            }
        }
        (serving, identified)
    }

    /// As these, with one that is not to be served until further notice, and is there for the host
    /// all the same; or without that.
    pub(crate) fn barring(&self, nsid: u32, status: Option<Status>) -> Arc<Self> {
        let mut changed = self.clone();
        match status {
            Some(status) => changed.barred.insert(nsid, status),
            None => changed.barred.remove(&nsid),
        };
        Arc::new(changed)
    }

    /// Those that are barred.
    pub(crate) fn barred(&self) -> impl Iterator<Item = u32> + '_ {
        self.barred.keys().copied()
    }

    /// How a command for a namespace ends that is not served.
    pub(crate) fn absence(&self, nsid: u32) -> Status {
        self.barred.get(&nsid).copied().unwrap_or(INACTIVE)
    }

    /// Those that a host sees that has selected all I/O command sets, or the NVM command set alone.
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

    /// As these, with another namespace `nsid`, or without it.
    pub(crate) fn with(&self, nsid: u32, namespace: Option<Namespace>) -> Arc<Self> {
        let mut changed = self.clone();
        changed.put(nsid, namespace);
        Arc::new(changed)
    }

    /// In ascending order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Namespace> {
        self.active.values()
    }

    pub(crate) fn get(&self, nsid: u32) -> Option<&Namespace> {
        self.active.get(&nsid)
    }

    /// The highest NSID that is valid (Identify Controller, NN). One at which there is no namespace
    /// (any more) is inactive.
    pub(crate) fn highest(&self) -> u32 {
        self.highest
    }
}

/// A namespace, as the control plane and the workers know it.
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
    /// The namespace `nsid` of a configuration that was found valid. A disk with a volatile cache
    /// is used without it, if the host was told that there is none.
    pub(crate) fn new(nsid: u32, config: &NamespaceConfig, promises: &Promises) -> Self {
        let NamespaceConfig { disk, uuid } = config;
        let mut info = disk.info();
        let write_through = info.volatile_cache && !promises.volatile_cache;
        info.volatile_cache &= promises.volatile_cache;
        let disk = Arc::clone(disk);
        Self { nsid, disk, info, uuid: *uuid, write_through, member: None }
    }

    /// The same, to be told of, and not served.
    pub(crate) fn unserved(&self) -> Self {
        Self { disk: unserved(self.info.clone()), ..self.clone() }
    }

    /// What it was made from.
    pub(crate) fn config(&self) -> NamespaceConfig {
        NamespaceConfig { disk: Arc::clone(&self.disk), uuid: self.uuid }
    }

    /// What the controller is in the subsystem, if others have the namespace, too.
    pub(crate) fn member(&self) -> Option<&Arc<Member>> {
        self.member.as_ref()
    }

    /// Every write has to be on the medium when it ends.
    pub(crate) fn write_through(&self) -> bool {
        self.write_through
    }

    /// Its identifier, from 1.
    pub(crate) fn nsid(&self) -> u32 {
        self.nsid
    }

    /// Where it keeps its bytes.
    pub(crate) fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    /// What the disk was when the namespace was made.
    pub(crate) fn info(&self) -> &DiskInfo {
        &self.info
    }

    /// Its size in logical blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.info.blocks
    }

    /// Its I/O command set.
    pub(crate) fn csi(&self) -> u8 {
        if self.info.zoned.is_some() { csi::ZONED } else { csi::NVM }
    }

    /// The size of a logical block as a power of two: 9 or 12.
    pub(crate) fn block_shift(&self) -> u32 {
        self.info.block_size.trailing_zeros()
    }

    /// Whether writes are refused with Namespace is Write Protected.
    pub(crate) fn read_only(&self) -> bool {
        self.info.read_only
    }

    /// UUID, big-endian.
    pub(crate) fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Namespace Globally Unique Identifier, big-endian. Base 2.1, "Namespace Globally Unique
    /// Identifier": bytes 8 to 10 are the OUI, the rest is for its owner to make unique.
    pub(crate) fn nguid(&self) -> [u8; 16] {
        let mut nguid = self.uuid;
        nguid[8..11].copy_from_slice(&IEEE_OUI);
        nguid
    }

    /// IEEE Extended Unique Identifier, big-endian: three bytes of OUI and five for its owner.
    /// These are of a hash of the UUID (64-bit FNV-1a, folded), because any five bytes of the
    /// UUID itself may be the same in all of them.
    pub(crate) fn eui64(&self) -> [u8; 8] {
        let hash = self.uuid.iter().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| {
            (h ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let mut eui64 = (hash ^ hash >> 40).to_be_bytes();
        eui64[..3].copy_from_slice(&IEEE_OUI);
        eui64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::uuid_from;
    use crate::test_disk::TestDisk;
    use std::collections::HashSet;

    const CACHED: Promises = Promises { volatile_cache: true, zeroes: 0 };

    #[test]
    fn what_the_disk_says() {
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
        // UUIDs that differ in one place only, whichever it is; then such as we make.
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
        // Three bytes of the UUID give way to the OUI.
        let nguids: HashSet<_> = namespaces[16 * 255..].iter().map(Namespace::nguid).collect();
        assert_eq!(nguids.len(), 20_000);
        assert_eq!(IEEE_OUI[0] & 0b11, 0b10, "locally administered, not a group");
    }
}
