//! What keeps a program from a PCI device, in sentences that say what to do.

use super::address::PciAddress;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Why a PCI device could not be opened through VFIO.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VfioError {
    /// There is no such function.
    #[error("there is no PCI device {address}; `lspci -d ::0108` lists the NVMe controllers")]
    Absent {
        /// Where it was looked for.
        address: PciAddress,
    },
    /// It is something else.
    #[error("{address} is not an NVMe controller: its class code is {class:06x}h and not 010802h")]
    NotNvme {
        /// The function.
        address: PciAddress,
        /// Its class code.
        class: u32,
    },
    /// A kernel driver has it.
    #[error(
        "{address} belongs to the kernel driver {driver}; take it over with \
         `shadowbell bind {address}`"
    )]
    Bound {
        /// The function.
        address: PciAddress,
        /// The driver.
        driver: String,
    },
    /// No driver has it.
    #[error(
        "{address} is not bound to vfio-pci; hand it to programs with `shadowbell bind {address}`"
    )]
    Unbound {
        /// The function.
        address: PciAddress,
    },
    /// There is no IOMMU.
    #[error(
        "{address} is behind no IOMMU, without which a device could reach all memory; switch it on \
         in the firmware (VT-d, AMD-Vi) and boot the kernel with intel_iommu=on or amd_iommu=on"
    )]
    NoIommu {
        /// The function.
        address: PciAddress,
    },
    /// Other functions of the group are in use by the kernel.
    #[error(
        "{address} shares IOMMU group {group} with {}; bind all of the group to vfio-pci, or \
         unbind what is not needed",
        in_words(others)
    )]
    NotViable {
        /// The function.
        address: PciAddress,
        /// Its group.
        group: u32,
        /// The other functions, with their drivers.
        others: Vec<(String, String)>,
    },
    /// The files of VFIO are not for this user.
    #[error(
        "{address} can not be opened, because {} is not for this user; run as root, or give it \
         away with `chown $USER {}`",
        path.display(),
        path.display()
    )]
    Permission {
        /// The function.
        address: PciAddress,
        /// The file.
        path: PathBuf,
    },
    /// The files of VFIO are not there.
    #[error("{address} can not be opened, because there is no {}; load VFIO with `modprobe vfio-pci`",
        path.display())]
    NoVfio {
        /// The function.
        address: PciAddress,
        /// The file.
        path: PathBuf,
    },
    /// Another program, or this one, has it open.
    #[error("{address} is in use: another program has {} open; end that one first", path.display())]
    Busy {
        /// The function.
        address: PciAddress,
        /// The file.
        path: PathBuf,
    },
    /// The kernel does not trust the platform with a device in a program's hands.
    #[error(
        "the kernel refuses {address} to programs because this machine can not remap interrupts; \
         switch interrupt remapping on in the firmware, or if the device is trusted, \
         `echo 1 >/sys/module/{module}/parameters/allow_unsafe_interrupts`"
    )]
    UnsafeInterrupts {
        /// The function.
        address: PciAddress,
        /// The kernel module that refuses.
        module: &'static str,
    },
    /// VFIO is of a kind that this driver does not know.
    #[error("{address} can not be driven: {what}")]
    Unsupported {
        /// The function.
        address: PciAddress,
        /// What is wrong with it.
        what: String,
    },
    /// The system refused something.
    #[error("{address} can not be opened: {doing}: {source}")]
    System {
        /// The function.
        address: PciAddress,
        /// What was being done.
        doing: &'static str,
        /// The system's reason.
        source: io::Error,
    },
}

/// `0000:01:00.1 (ahci) and 0000:01:00.2 (xhci_hcd)`.
fn in_words(others: &[(String, String)]) -> String {
    let words: Vec<_> =
        others.iter().map(|(address, driver)| format!("{address} ({driver})")).collect();
    match words.split_last() {
        None => "devices that a kernel driver has".to_owned(),
        Some((last, [])) => last.clone(),
        Some((last, rest)) => format!("{} and {last}", rest.join(", ")),
    }
}

/// Why memory was not mapped, where the system's own word says too little.
pub(super) fn explain_map(error: io::Error, len: u64, limit: Option<u64>) -> io::Error {
    let why = match error.raw_os_error() {
        Some(libc::ENOMEM) => match limit {
            Some(limit) => format!(
                "{len} bytes can not be locked in memory, of which this user may lock {limit} in \
                 all; raise the limit (`ulimit -l unlimited`, LimitMEMLOCK=infinity) or run as root"
            ),
            None => format!("{len} bytes can not be locked in memory: there is not enough of it"),
        },
        Some(libc::ENOSPC) => "the kernel maps no more pieces for one program; raise \
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
    fn others_are_listed_as_people_do() {
        let other = |n: u32| (format!("0000:01:00.{n}"), "ahci".to_owned());
        assert_eq!(in_words(&[other(1)]), "0000:01:00.1 (ahci)");
        assert_eq!(
            in_words(&[other(1), other(2), other(3)]),
            "0000:01:00.1 (ahci), 0000:01:00.2 (ahci) and 0000:01:00.3 (ahci)"
        );
        assert!(in_words(&[]).contains("kernel driver"));
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
