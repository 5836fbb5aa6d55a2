//! PCI function in sysfs.

use super::address::PciAddress;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Mount point of sysfs.
pub const SYSFS: &str = "/sys";

/// Snapshot of a PCI function in sysfs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciFunction {
    /// Address of the function.
    pub address: PciAddress,
    /// Class code: class, subclass and programming interface; `010802h` for an NVMe I/O controller.
    pub class: u32,
    /// Kernel driver that the function is bound to.
    pub driver: Option<String>,
    /// Number of the IOMMU group; `None` without an IOMMU.
    pub group: Option<u32>,
    /// Name of the VFIO character device (`vfio0`); `None` if the kernel does not support VFIO
    /// character devices.
    pub cdev: Option<String>,
    directory: PathBuf,
    sysfs: PathBuf,
}

impl PciFunction {
    /// Reads the function at `address` from `sysfs` (normally [`SYSFS`]). `None` if it does not
    /// exist.
    ///
    /// # Errors
    /// The error of the system, if the function exists and cannot be read.
    pub fn find(sysfs: &Path, address: PciAddress) -> io::Result<Option<Self>> {
        let directory = sysfs.join("bus/pci/devices").join(address.to_string());
        let class = match fs::read_to_string(directory.join("class")) {
            Ok(text) => parse_class(&text)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        Ok(Some(Self {
            address,
            class,
            driver: link_name(&directory.join("driver"))?,
            group: link_name(&directory.join("iommu_group"))?.and_then(|name| name.parse().ok()),
            cdev: Self::names_in(&directory.join("vfio-dev"))?.into_iter().next(),
            directory,
            sysfs: sysfs.to_owned(),
        }))
    }

    /// Sorted names of the entries of a sysfs directory; empty if the directory does not exist.
    ///
    /// # Errors
    /// The error of the system.
    pub fn names_in(directory: &Path) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut names = Vec::new();
        for entry in entries {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }

    /// The function's sysfs directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// True if the function is an NVMe I/O controller.
    #[must_use]
    pub fn is_nvme(&self) -> bool {
        self.class == shadowbell_spec::pci::CLASS_CODE
    }

    /// True if the function is bound to a VFIO driver, so that programs can use it.
    #[must_use]
    pub fn is_for_programs(&self) -> bool {
        self.driver.as_deref().is_some_and(is_vfio)
    }

    /// Other functions of the IOMMU group whose drivers prevent the use of the group by a program,
    /// as pairs of address and driver.
    ///
    /// # Errors
    ///
    /// The error of the system.
    pub fn blocking_devices(&self) -> io::Result<Vec<(String, String)>> {
        let Some(group) = self.group else { return Ok(Vec::new()) };
        let members = self.sysfs.join(format!("kernel/iommu_groups/{group}/devices"));
        let mut found = Vec::new();
        for name in Self::names_in(&members)? {
            if name == self.address.to_string() {
                continue;
            }
            // Bridge drivers and pci-stub do not prevent the use of the group: the kernel permits
            // them.
            if let Some(driver) = link_name(&members.join(&name).join("driver"))?
                && !is_vfio(&driver)
                && !["pcieport", "pci-stub"].contains(&driver.as_str())
            {
                found.push((name, driver));
            }
        }
        Ok(found)
    }
}

/// True if a kernel driver is `vfio-pci` or a device-specific variant. By convention, the name of a
/// variant ends with `vfio-pci` or `vfio_pci`: `mlx5_vfio_pci`, `nvgrace-gpu-vfio-pci`.
fn is_vfio(driver: &str) -> bool {
    driver.replace('_', "-").ends_with("vfio-pci")
}

fn parse_class(text: &str) -> io::Result<u32> {
    let digits = text.trim();
    u32::from_str_radix(digits.strip_prefix("0x").unwrap_or(digits), 16)
        .map_err(|_| io::Error::other(format!("`{digits}` is no class code")))
}

/// Last path component of a symbolic link's target; `None` if the link does not exist.
fn link_name(link: &Path) -> io::Result<Option<String>> {
    match fs::read_link(link) {
        Ok(target) => Ok(target.file_name().map(|name| name.to_string_lossy().into_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// Creates a function in a fake sysfs.
    pub(crate) fn add(
        sysfs: &Path,
        address: &str,
        class: &str,
        driver: Option<&str>,
        group: Option<u32>,
    ) {
        let directory = sysfs.join("bus/pci/devices").join(address);
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("class"), format!("{class}\n")).unwrap();
        if let Some(driver) = driver {
            let driver = sysfs.join("bus/pci/drivers").join(driver);
            fs::create_dir_all(&driver).unwrap();
            symlink(&driver, directory.join("driver")).unwrap();
        }
        if let Some(group) = group {
            let group = sysfs.join(format!("kernel/iommu_groups/{group}"));
            fs::create_dir_all(group.join("devices")).unwrap();
            symlink(&group, directory.join("iommu_group")).unwrap();
            symlink(&directory, group.join("devices").join(address)).unwrap();
        }
    }

    fn find(sysfs: &Path, address: &str) -> Option<PciFunction> {
        PciFunction::find(sysfs, address.parse().unwrap()).unwrap()
    }

    #[test]
    fn a_function_is_read_from_sysfs() {
        let sysfs = tempfile::tempdir().unwrap();
        add(sysfs.path(), "0000:01:00.0", "0x010802", Some("nvme"), Some(7));
        let function = find(sysfs.path(), "0000:01:00.0").unwrap();
        assert!(function.is_nvme() && !function.is_for_programs());
        assert_eq!((function.driver.as_deref(), function.group), (Some("nvme"), Some(7)));
        assert_eq!(function.cdev, None);
        fs::create_dir_all(function.directory().join("vfio-dev/vfio3")).unwrap();
        assert_eq!(find(sysfs.path(), "01:00.0").unwrap().cdev.as_deref(), Some("vfio3"));
        assert_eq!(find(sysfs.path(), "0000:02:00.0"), None);
    }

    #[test]
    fn a_function_without_iommu_or_driver_has_neither() {
        let sysfs = tempfile::tempdir().unwrap();
        add(sysfs.path(), "0000:01:00.0", "0x060100", None, None);
        let function = find(sysfs.path(), "0000:01:00.0").unwrap();
        assert!(!function.is_nvme() && !function.is_for_programs());
        assert_eq!((function.driver.as_ref(), function.group), (None, None));
        assert!(function.blocking_devices().unwrap().is_empty());
    }

    #[test]
    fn only_blocking_devices_of_a_group_are_named() {
        let sysfs = tempfile::tempdir().unwrap();
        let add = |address, driver| add(sysfs.path(), address, "0x010802", driver, Some(4));
        add("0000:01:00.0", Some("vfio-pci"));
        add("0000:01:00.1", Some("ahci"));
        add("0000:01:00.2", Some("pcieport"));
        add("0000:01:00.3", Some("mlx5_vfio_pci"));
        add("0000:01:00.4", None);
        let function = find(sysfs.path(), "0000:01:00.0").unwrap();
        assert!(function.is_for_programs());
        assert_eq!(function.blocking_devices().unwrap(), [("0000:01:00.1".into(), "ahci".into())]);
    }

    #[test]
    fn an_invalid_class_code_is_an_error() {
        let sysfs = tempfile::tempdir().unwrap();
        add(sysfs.path(), "0000:01:00.0", "disk", None, None);
        assert!(PciFunction::find(sysfs.path(), "01:00.0".parse().unwrap()).is_err());
    }
}
