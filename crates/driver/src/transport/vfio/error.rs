//! VFIO errors, with instructions for the operator.

use super::address::PciAddress;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Failure to open a PCI device through VFIO.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VfioError {
    /// The PCI function does not exist.
    #[error("there is no PCI device {address}; `lspci -d ::0108` lists the NVMe controllers")]
    Absent {
        /// Requested address.
        address: PciAddress,
    },
    /// The function is not an NVMe controller.
    #[error("{address} is not an NVMe controller: its class code is {class:06x}h and not 010802h")]
    NotNvme {
        /// Address of the function.
        address: PciAddress,
        /// Class code of the function.
        class: u32,
    },
    /// The function is bound to a kernel driver that is not a VFIO driver.
    #[error(
        "{address} belongs to the kernel driver {driver}; take it over with \
         `shadowbell bind {address}`"
    )]
    Bound {
        /// Address of the function.
        address: PciAddress,
        /// Name of the driver.
        driver: String,
    },
    /// The function is bound to no driver.
    #[error("{address} is not bound to vfio-pci; bind it with `shadowbell bind {address}`")]
    Unbound {
        /// Address of the function.
        address: PciAddress,
    },
    /// The function is not behind an IOMMU.
    #[error(
        "{address} is behind no IOMMU, without which a device could reach all memory; switch it on \
         in the firmware (VT-d, AMD-Vi) and boot the kernel with intel_iommu=on or amd_iommu=on"
    )]
    NoIommu {
        /// Address of the function.
        address: PciAddress,
    },
    /// Other functions of the IOMMU group are bound to kernel drivers.
    #[error(
        "{address} shares IOMMU group {group} with {}; bind all of the group to vfio-pci, or \
         unbind what is not needed",
        device_list(others)
    )]
    NotViable {
        /// Address of the function.
        address: PciAddress,
        /// Number of the IOMMU group.
        group: u32,
        /// Addresses of the other functions, with their drivers.
        others: Vec<(String, String)>,
    },
    /// The user lacks permission to open the VFIO files.
    #[error(
        "{address} cannot be opened: no permission for {}; run as root, or change the owner with \
         `chown $USER {}`",
        path.display(),
        path.display()
    )]
    Permission {
        /// Address of the function.
        address: PciAddress,
        /// File that could not be opened.
        path: PathBuf,
    },
    /// The VFIO files do not exist.
    #[error("{address} cannot be opened, because there is no {}; load VFIO with `modprobe vfio-pci`",
        path.display())]
    NoVfio {
        /// Address of the function.
        address: PciAddress,
        /// Missing file.
        path: PathBuf,
    },
    /// This or another program has the device open.
    #[error("{address} is in use: another program has {} open; end that one first", path.display())]
    Busy {
        /// Address of the function.
        address: PciAddress,
        /// File in use.
        path: PathBuf,
    },
    /// The platform cannot remap interrupts. Therefore the kernel does not let programs use the
    /// device.
    #[error(
        "the kernel refuses {address} to programs because this machine cannot remap interrupts; \
         switch interrupt remapping on in the firmware, or if the device is trusted, \
         `echo 1 >/sys/module/{module}/parameters/allow_unsafe_interrupts`"
    )]
    UnsafeInterrupts {
        /// Address of the function.
        address: PciAddress,
        /// Kernel module that refuses the device.
        module: &'static str,
    },
    /// The device or the VFIO interface lacks a feature that this driver needs.
    #[error("{address} is not supported: {what}")]
    Unsupported {
        /// Address of the function.
        address: PciAddress,
        /// Description of the missing feature.
        what: String,
    },
    /// A system call failed.
    #[error("{address} cannot be opened: {operation}: {source}")]
    System {
        /// Address of the function.
        address: PciAddress,
        /// Failed operation.
        operation: &'static str,
        /// Error of the system.
        source: io::Error,
    },
}

/// Formats `0000:01:00.1 (ahci) and 0000:01:00.2 (xhci_hcd)`.
fn device_list(others: &[(String, String)]) -> String {
    let words: Vec<_> =
        others.iter().map(|(address, driver)| format!("{address} ({driver})")).collect();
    match words.split_last() {
        None => "devices that are bound to kernel drivers".to_owned(),
        Some((last, [])) => last.clone(),
        Some((last, rest)) => format!("{} and {last}", rest.join(", ")),
    }
}

/// Replaces an error of a DMA map request by a more helpful one, if there is one.
pub(super) fn explain_map(error: io::Error, len: u64, limit: Option<u64>) -> io::Error {
    let why = match error.raw_os_error() {
        Some(libc::ENOMEM) => match limit {
            Some(limit) => format!(
                "{len} bytes cannot be locked in memory, of which this user may lock {limit} in \
                 all; raise the limit (`ulimit -l unlimited`, LimitMEMLOCK=infinity) or run as root"
            ),
            None => format!("{len} bytes cannot be locked in memory: there is not enough memory"),
        },
        Some(libc::ENOSPC) => "the kernel has reached its limit of DMA mappings; raise \
                               /sys/module/vfio_iommu_type1/parameters/dma_entry_limit"
            .to_owned(),
        _ => return error,
    };
    io::Error::new(error.kind(), why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_devices_are_listed_in_a_sentence() {
        let other = |n: u32| (format!("0000:01:00.{n}"), "ahci".to_owned());
        assert_eq!(device_list(&[other(1)]), "0000:01:00.1 (ahci)");
        assert_eq!(
            device_list(&[other(1), other(2), other(3)]),
            "0000:01:00.1 (ahci), 0000:01:00.2 (ahci) and 0000:01:00.3 (ahci)"
        );
        assert!(device_list(&[]).contains("kernel driver"));
    }

    #[test]
    fn locked_memory_is_explained() {
        let explain =
            |code, limit| explain_map(io::Error::from_raw_os_error(code), 4096, limit).to_string();
        assert!(explain(libc::ENOMEM, Some(65_536)).contains("65536"));
        assert!(explain(libc::ENOMEM, None).contains("not enough"));
        assert!(explain(libc::ENOSPC, None).contains("dma_entry_limit"));
        assert!(!explain(libc::EFAULT, Some(1)).contains("ulimit"));
    }
}
