//! NVMe namespace behind a generic character device (`/dev/ng0n1`), as a disk.
//!
//! The kernel passes commands to the device unchanged ([`crate::sys`]), without block layer and
//! page cache. For other disks, a file system or the block layer reports the properties; here,
//! Identify data of the device contain them.

use crate::sys;
use serde::{Deserialize, Serialize};
use shadowbell_spec::identify::{NamespaceId, csi};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Maximum number of bytes per command, even if the device supports more, because the kernel limits
/// the number of pages of one passthrough command.
const MAX_TRANSFER: u64 = 128 << 10;
/// Assumed unit of MDTS (CAP.MPSMIN) in bytes: the smallest page size that a controller can have.
const PAGE: u64 = 4096;

/// Properties of a namespace, decoded from its Identify data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NamespaceFacts {
    /// Namespace identifier.
    pub nsid: u32,
    /// Logical block size in bytes: 512 or 4096.
    pub block_size: u32,
    /// Capacity in logical blocks.
    pub blocks: u64,
    /// Maximum number of bytes per command, a multiple of the block size.
    pub max_transfer: u32,
    /// True if the namespace is write-protected.
    pub is_protected: bool,
    /// True if the controller has a volatile write cache.
    pub has_cache: bool,
    /// True if Dataset Management deallocates blocks and these then read as zeroes.
    pub deallocates: bool,
    /// True if Write Zeroes is supported.
    pub writes_zeroes: bool,
    /// True if Write Zeroes may deallocate blocks.
    pub zeroes_deallocate: bool,
    /// Number of bytes that are written atomically across a loss of power.
    pub atom: u64,
    /// Preferred alignment of deallocations in bytes; at least one block.
    pub granularity: u64,
}

impl NamespaceFacts {
    /// Converts Identify data. The error is the reason why the namespace cannot be a disk.
    fn of(identity: &sys::Identity) -> Result<Self, String> {
        let sys::Identity { nsid, namespace, controller, ids } = identity;
        let set = ids.as_ref().and_then(|ids| {
            ids.iter().find_map(|id| if let NamespaceId::Csi(set) = id { Some(set) } else { None })
        });
        match set {
            None | Some(csi::NVM) => {}
            Some(csi::ZONED) => {
                return Err("it is a zoned namespace, which is not supported; `zoned=` creates \
                            zones in a raw image"
                    .to_owned());
            }
            Some(other) => {
                return Err(format!("its command set is {other:02X}h, not NVM (00h)"));
            }
        }
        let format = namespace.lbaf.get(usize::from(namespace.flbas.index()));
        let format = format.ok_or("it reports no LBA format")?;
        if format.ms != 0 {
            return Err(format!(
                "its blocks have {} bytes of metadata, which are not supported; format it \
                 without (`nvme format --lbaf`)",
                format.ms
            ));
        }
        let block_size = match format.block_size() {
            Some(size @ (512 | 4096)) => size,
            Some(size) => return Err(format!("its blocks have {size} bytes, not 512 or 4096")),
            None => return Err("it reports no block size".to_owned()),
        };
        let mdts = u32::from(controller.mdts);
        let max_transfer = if mdts == 0 {
            MAX_TRANSFER
        } else {
            PAGE.checked_shl(mdts).map_or(MAX_TRANSFER, |n| n.min(MAX_TRANSFER))
        };
        let has = controller.oncs;
        let zeroed = namespace.dlfeat.drb() == 1;
        let has_own_atomicity = namespace.nsfeat.nsabp();
        let atom = if has_own_atomicity { namespace.nawupf } else { controller.awupf };
        // A write is not atomic if it crosses an atomic boundary (NABSPF). So if the namespace has
        // boundaries, only a write of one block is taken as atomic.
        let atom = if namespace.nabspf == 0 { u64::from(atom) + 1 } else { 1 };
        let granule = if namespace.nsfeat.optperf() & 1 == 1 { namespace.npdg } else { 0 };
        Ok(Self {
            nsid: *nsid,
            block_size: block_size as u32,
            blocks: namespace.nsze,
            max_transfer: max_transfer as u32,
            is_protected: namespace.nsattr & 1 != 0,
            has_cache: controller.vwc.vwcp(),
            deallocates: has.dataset_management() && zeroed,
            writes_zeroes: has.write_zeroes(),
            zeroes_deallocate: has.write_zeroes() && namespace.dlfeat.wzds(),
            atom: atom * block_size,
            granularity: (u64::from(granule) + 1) * block_size,
        })
    }

    /// Capacity in bytes; 0 if it overflows 64 bits.
    pub(super) fn bytes(&self) -> u64 {
        self.blocks.checked_mul(self.block_size.into()).unwrap_or(0)
    }

    /// Parameters for building commands.
    pub(super) fn commands(&self) -> sys::Namespace {
        sys::Namespace {
            nsid: self.nsid,
            block_shift: self.block_size.trailing_zeros(),
            max_transfer: self.max_transfer,
        }
    }

    /// True if a discard can deallocate blocks, which then read as zeroes.
    pub(super) fn discards(&self) -> bool {
        self.deallocates || self.zeroes_deallocate
    }
}

/// True if the character device with this number is an NVMe generic character device.
#[must_use]
pub fn is_namespace(device: u64) -> bool {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let subsystem = std::fs::read_link(format!("/sys/dev/char/{major}:{minor}/subsystem"));
    subsystem.is_ok_and(|path| path.ends_with("nvme-generic"))
}

/// Reads the Identify data of the namespace behind the character device at `path`. If the disk is
/// to be `written`, fails with `EBUSY` while the block device of the namespace is mounted or part
/// of another device.
///
/// # Errors
/// The system's error; an error without an error number if the namespace cannot be a disk.
pub fn identify_namespace(path: &Path, written: bool) -> io::Result<NamespaceFacts> {
    let file = File::open(path)?;
    if written {
        is_free(&file)?;
    }
    let facts = NamespaceFacts::of(&sys::identify(&file)?);
    facts.map_err(|why| io::Error::new(io::ErrorKind::Unsupported, why))
}

/// Fails with `EBUSY` if another user has opened the block device of the namespace exclusively.
fn is_free(file: &File) -> io::Result<()> {
    let device = file.metadata()?.rdev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let Ok(at) = std::fs::canonicalize(format!("/sys/dev/char/{major}:{minor}")) else {
        return Ok(());
    };
    let name =
        at.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix("ng"));
    let Some(name) = name.map(|number| format!("nvme{number}")) else { return Ok(()) };
    if !Path::new("/sys/class/block").join(&name).exists() {
        return Ok(());
    }
    let exclusive =
        OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(format!("/dev/{name}"));
    match exclusive {
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_spec::identify::{
        IdentifyController, IdentifyNamespace, LbaFormat, NamespaceIds,
    };

    fn identity() -> sys::Identity {
        let mut namespace = IdentifyNamespace { nsze: 1 << 20, ..Default::default() };
        namespace.lbaf[0] = LbaFormat { ms: 0, lbads: 9, rp: 0 };
        namespace.lbaf[1] = LbaFormat { ms: 0, lbads: 12, rp: 0 };
        namespace.lbaf[2] = LbaFormat { ms: 8, lbads: 12, rp: 0 };
        namespace.lbaf[3] = LbaFormat { ms: 0, lbads: 14, rp: 0 };
        namespace.dlfeat.set_drb(1);
        let mut controller = IdentifyController { awupf: 3, ..Default::default() };
        controller.oncs.set_dataset_management(true);
        controller.oncs.set_write_zeroes(true);
        sys::Identity { nsid: 7, namespace, controller, ids: None }
    }

    #[test]
    fn identify_data_determine_the_disk_properties() {
        let mut identity = identity();
        let facts = NamespaceFacts::of(&identity).unwrap();
        assert_eq!((facts.nsid, facts.block_size, facts.bytes()), (7, 512, 512 << 20));
        assert_eq!((facts.max_transfer, facts.atom, facts.granularity), (128 << 10, 2048, 512));
        assert!(facts.deallocates && facts.writes_zeroes && !facts.zeroes_deallocate);
        assert!(!facts.has_cache && !facts.is_protected && facts.discards());
        identity.namespace.flbas.set_low(1);
        identity.controller.mdts = 2;
        identity.controller.vwc.set_vwcp(true);
        identity.namespace.nsfeat.set_nsabp(true);
        identity.namespace.nsfeat.set_optperf(1);
        identity.namespace.npdg = 15;
        identity.namespace.dlfeat.set_drb(0);
        identity.namespace.dlfeat.set_wzds(true);
        identity.namespace.nsattr = 1;
        let facts = NamespaceFacts::of(&identity).unwrap();
        assert_eq!((facts.block_size, facts.max_transfer), (4096, 16 << 10));
        assert_eq!((facts.atom, facts.granularity), (4096, 64 << 10));
        assert!(!facts.deallocates && facts.zeroes_deallocate && facts.discards());
        assert!(facts.has_cache && facts.is_protected);
        // The device may report implausible values. They must cause neither a panic by a shift nor
        // an overflow of a size.
        identity.controller.mdts = 255;
        identity.namespace.nsze = u64::MAX;
        identity.namespace.nabspf = 7;
        identity.controller.awupf = u16::MAX;
        let facts = NamespaceFacts::of(&identity).unwrap();
        assert_eq!((facts.max_transfer, facts.bytes(), facts.atom), (128 << 10, 0, 4096));
    }

    #[test]
    fn a_format_that_is_no_disk_is_refused() {
        type Change<'a> = &'a dyn Fn(&mut sys::Identity);
        let refused = |change: Change<'_>| {
            let mut identity = identity();
            change(&mut identity);
            NamespaceFacts::of(&identity).unwrap_err()
        };
        let with_csi = |set| NamespaceIds::new([NamespaceId::Csi(set)]);
        let cases: [(Change<'_>, &str); 5] = [
            (&|it| it.namespace.flbas.set_low(2), "metadata"),
            (&|it| it.namespace.flbas.set_low(3), "16384 bytes"),
            (&|it| it.namespace.flbas.set_low(9), "no block size"),
            (&|it| it.ids = Some(with_csi(csi::ZONED)), "zoned namespace"),
            (&|it| it.ids = Some(with_csi(1)), "command set is 01h"),
        ];
        for (change, why) in cases {
            let message = refused(change);
            assert!(message.contains(why), "{message}");
        }
        let mut nvm = identity();
        nvm.ids = Some(with_csi(csi::NVM));
        assert!(NamespaceFacts::of(&nvm).is_ok());
    }

    #[test]
    fn other_character_devices_are_no_namespaces() {
        let null = std::fs::metadata("/dev/null").unwrap();
        assert!(!is_namespace(null.rdev()));
        let error = identify_namespace(Path::new("/dev/null"), true).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }
}
