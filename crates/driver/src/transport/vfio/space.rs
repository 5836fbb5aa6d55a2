//! I/O address space of one device, through either of the kernel's interfaces.
//!
//! * *Group*: `/dev/vfio/GROUP` is added to a container, `/dev/vfio/vfio`, whose type 1 IOMMU maps
//!   memory; the device descriptor is obtained from the group.
//! * *Character device*: `/dev/vfio/devices/vfioN` is bound to an iommufd, `/dev/iommu`, which maps
//!   memory. Preferred if the kernel has it and this user may open it, because the kernel develops
//!   only this interface further.

use super::error::VfioError;
use super::function::PciFunction;
use super::info::IommuInfo;
use super::iova::{CLASSIC, IovaSpace};
use super::sys;
use rustix::fs::{Mode, OFlags};
use shadowbell_memory::Mapping;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use vfio_bindings::bindings::vfio;

/// Directory of device files.
const DEV: &str = "/dev";

/// Kernel object that maps memory for the device.
#[derive(Debug)]
pub(super) enum Space {
    /// A container with a type 1 IOMMU, and the IOMMU group in it.
    Type1 { container: OwnedFd, _group: OwnedFd },
    /// An I/O address space of an iommufd.
    Iommufd { iommufd: OwnedFd, ioas: u32 },
}

/// An opened device.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) device: OwnedFd,
    pub(super) space: Space,
    pub(super) iova: IovaSpace,
    /// Human-readable name of the kernel interface.
    pub(super) through: String,
}

impl Space {
    pub(super) fn map(&self, mapping: &Mapping, iova: u64) -> io::Result<()> {
        match self {
            Self::Type1 { container, .. } => sys::map_dma(container.as_fd(), mapping, iova),
            Self::Iommufd { iommufd, ioas } => sys::ioas_map(iommufd.as_fd(), *ioas, mapping, iova),
        }
    }

    /// Unmaps a range. Returns the number of unmapped bytes.
    pub(super) fn unmap(&self, iova: u64, len: u64) -> io::Result<u64> {
        match self {
            Self::Type1 { container, .. } => sys::unmap_dma(container.as_fd(), iova, len),
            Self::Iommufd { iommufd, ioas } => sys::ioas_unmap(iommufd.as_fd(), *ioas, iova, len),
        }
    }
}

/// Opens a function that is bound to a VFIO driver.
pub(super) fn open(function: &PciFunction) -> Result<Opened, VfioError> {
    open_below(Path::new(DEV), function)
}

fn open_below(dev: &Path, function: &PciFunction) -> Result<Opened, VfioError> {
    if function.group.is_none() {
        return Err(VfioError::NoIommu { address: function.address });
    }
    if let Some(cdev) = &function.cdev {
        let device = dev.join("vfio/devices").join(cdev);
        match (open_file(&device), open_file(&dev.join("iommu"))) {
            (Ok(file), Ok(iommufd)) => return by_character_device(function, device, file, iommufd),
            (file, iommufd) => {
                let why = file.err().or(iommufd.err());
                tracing::debug!(
                    "{}: opening the IOMMU group, because the character device failed: {}",
                    function.address,
                    why.map(|why| why.to_string()).unwrap_or_default()
                );
            }
        }
    }
    by_group(dev, function)
}

fn open_file(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}

fn by_character_device(
    function: &PciFunction,
    path: PathBuf,
    device: OwnedFd,
    iommufd: OwnedFd,
) -> Result<Opened, VfioError> {
    let address = function.address;
    let failed = |operation| move |source| VfioError::System { address, operation, source };
    sys::bind_iommufd(device.as_fd(), iommufd.as_fd()).map_err(|source| {
        match source.raw_os_error() {
            Some(libc::EPERM) => VfioError::UnsafeInterrupts { address, module: "iommufd" },
            // The device or its group is in use by another program or by the kernel.
            Some(libc::EBUSY | libc::EINVAL) => not_viable(function)
                .unwrap_or_else(|| VfioError::Busy { address, path: path.clone() }),
            _ => VfioError::System { address, operation: "binding it to an iommufd", source },
        }
    })?;
    let ioas = sys::ioas_alloc(iommufd.as_fd()).map_err(failed("making an address space"))?;
    sys::attach_ioas(device.as_fd(), ioas).map_err(failed("entering an address space"))?;
    let (ranges, granule) = sys::ioas_ranges(iommufd.as_fd(), ioas)
        .map_err(failed("asking which addresses are usable"))?;
    let iova = IovaSpace::new(ranges.into_iter().map(|[first, last]| first..=last), granule);
    let through = format!("{} and iommufd", path.display());
    Ok(Opened { device, space: Space::Iommufd { iommufd, ioas }, iova, through })
}

fn by_group(dev: &Path, function: &PciFunction) -> Result<Opened, VfioError> {
    let address = function.address;
    let failed = |operation| move |source| VfioError::System { address, operation, source };
    let number = function.group.ok_or(VfioError::NoIommu { address })?;
    let open = |path: &Path| {
        open_file(path).map_err(|source| match source.raw_os_error() {
            Some(libc::EACCES | libc::EPERM) => {
                VfioError::Permission { address, path: path.to_owned() }
            }
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => {
                VfioError::NoVfio { address, path: path.to_owned() }
            }
            Some(libc::EBUSY) => VfioError::Busy { address, path: path.to_owned() },
            _ => VfioError::System { address, operation: "opening its group", source },
        })
    };
    let path = dev.join(format!("vfio/{number}"));
    let group = open(&path)?;
    if !sys::group_is_viable(group.as_fd()).map_err(failed("asking about its group"))? {
        let others = function.blocking_devices().unwrap_or_default();
        return Err(VfioError::NotViable { address, group: number, others });
    }
    let container = open(&dev.join("vfio/vfio"))?;
    let unsupported = |what: String| VfioError::Unsupported { address, what };
    let version = sys::api_version(container.as_fd()).map_err(failed("asking for a version"))?;
    if version != vfio::VFIO_API_VERSION {
        return Err(unsupported(format!(
            "VFIO has version {version} and not {}",
            vfio::VFIO_API_VERSION
        )));
    }
    let kind = vfio::VFIO_TYPE1v2_IOMMU;
    let known = sys::has_extension(container.as_fd(), kind);
    if !known.map_err(failed("asking for the IOMMU's type"))? {
        return Err(unsupported(
            "the kernel has no type 1 IOMMU for VFIO; `modprobe vfio_iommu_type1`".into(),
        ));
    }
    sys::set_container(group.as_fd(), container.as_fd()).map_err(failed("taking its group"))?;
    sys::set_iommu(container.as_fd(), kind).map_err(|source| match source.raw_os_error() {
        Some(libc::EPERM) => VfioError::UnsafeInterrupts { address, module: "vfio_iommu_type1" },
        _ => VfioError::System { address, operation: "switching its IOMMU on", source },
    })?;
    let answer = sys::iommu_info(container.as_fd());
    let info = IommuInfo::parse(&answer.map_err(failed("asking about its IOMMU"))?)
        .ok_or_else(|| unsupported("the kernel returned no IOMMU description".into()))?;
    let ranges = info.ranges.unwrap_or_else(|| CLASSIC.to_vec());
    let iova = IovaSpace::new(ranges, info.granule);
    let name = CString::new(address.to_string())
        .map_err(|_| unsupported("its address has no name".into()))?;
    let device = sys::group_device(group.as_fd(), &name).map_err(failed("opening the device"))?;
    let space = Space::Type1 { container, _group: group };
    Ok(Opened { device, space, iova, through: format!("{} (type 1 IOMMU)", path.display()) })
}

/// The error that names the other functions of the group, if their drivers prevent the use of the
/// group.
fn not_viable(function: &PciFunction) -> Option<VfioError> {
    let others = function.blocking_devices().ok().filter(|others| !others.is_empty())?;
    Some(VfioError::NotViable { address: function.address, group: function.group?, others })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::vfio::function::tests::add;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn function(sysfs: &Path, group: Option<u32>) -> PciFunction {
        add(sysfs, "0000:01:00.0", "0x010802", Some("vfio-pci"), group);
        PciFunction::find(sysfs, "01:00.0".parse().unwrap()).unwrap().unwrap()
    }

    #[test]
    fn a_missing_iommu_or_vfio_is_reported_with_the_remedy() {
        let place = tempfile::tempdir().unwrap();
        let alone = function(&place.path().join("a"), None);
        let error = open_below(place.path(), &alone).unwrap_err().to_string();
        assert!(error.contains("intel_iommu=on"), "{error}");
        let grouped = function(&place.path().join("b"), Some(9));
        let error = open_below(place.path(), &grouped).unwrap_err().to_string();
        assert!(error.contains("vfio/9;") && error.contains("modprobe vfio-pci"), "{error}");
    }

    #[test]
    fn a_group_without_permission_is_reported() {
        let place = tempfile::tempdir().unwrap();
        let grouped = function(place.path(), Some(9));
        let path = place.path().join("vfio/9");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
        let error = open_below(place.path(), &grouped).unwrap_err();
        if rustix::process::geteuid().is_root() {
            // Root may open the file. But the file is not a VFIO group, so the first ioctl fails.
            assert!(matches!(error, VfioError::System { .. }), "{error}");
        } else {
            assert!(error.to_string().contains("chown"), "{error}");
        }
    }

    #[test]
    fn a_missing_character_device_falls_back_to_the_group() {
        let place = tempfile::tempdir().unwrap();
        let plain = function(place.path(), Some(9));
        fs::create_dir_all(plain.directory().join("vfio-dev/vfio0")).unwrap();
        let function = PciFunction::find(place.path(), plain.address).unwrap().unwrap();
        assert_eq!(function.cdev.as_deref(), Some("vfio0"));
        let error = open_below(place.path(), &function).unwrap_err().to_string();
        assert!(error.contains("vfio/9;"), "{error}");
        // If the group file and the character device exist, the character device is used.
        fs::create_dir_all(place.path().join("vfio/devices")).unwrap();
        fs::write(place.path().join("vfio/devices/vfio0"), "").unwrap();
        fs::write(place.path().join("iommu"), "").unwrap();
        let error = open_below(place.path(), &function).unwrap_err().to_string();
        assert!(error.contains("iommufd"), "{error}");
    }
}
