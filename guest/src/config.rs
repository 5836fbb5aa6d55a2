//! Configuration of a guest, and its QEMU command line.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde_json::json;

/// Path inside QEMU's chroot of [`RunDir::files`](crate::rundir::RunDir::files).
pub(crate) const FILES: &str = "/run/shadowbell/files";
/// Path inside QEMU's chroot of [`RunDir::sockets`](crate::rundir::RunDir::sockets).
pub const SOCKETS: &str = "/run/shadowbell/sockets";

/// Kernel of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// Kernel of Debian 12.
    V6_1,
    /// Kernel of Debian 13's backports: 7.2 at first, later the current version
    /// ([`Roots::release`](crate::Roots::release)).
    V7_2,
}

impl Kernel {
    /// All kernels with which the guest test suites have to pass.
    pub const ALL: [Self; 2] = [Self::V6_1, Self::V7_2];
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V6_1 => "6.1",
            Self::V7_2 => "7.2",
        })
    }
}

impl FromStr for Kernel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|kernel| kernel.to_string() == text)
            .ok_or_else(|| format!("no guest kernel {text}: 6.1 or 7.2"))
    }
}

/// Storage of an NVMe controller that QEMU itself emulates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Drive {
    /// A raw image in the run's directory of files.
    Image(String),
    /// A raw image with O_DIRECT and io_uring, the fastest access that QEMU has.
    Direct(String),
    /// A disk of this many bytes that reads as zeroes and discards writes (`null-co`).
    Null(u64),
}

/// NVMe controller of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Device {
    /// A vfio-user device.
    VfioUser {
        /// Name of the socket in the run's directory of sockets.
        socket: String,
    },
    /// QEMU's own controller.
    QemuNvme {
        /// Storage of the controller.
        drive: Drive,
        /// True if the controller supports Doorbell Buffer Config.
        dbcs: bool,
    },
}

/// Boot method of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Firmware {
    /// QEMU loads kernel and initramfs (direct boot).
    Direct {
        /// Additional kernel parameters.
        append: String,
    },
    /// OVMF boots from the first device, which has the kernel and the initramfs.
    Uefi,
}

/// Configuration of a guest.
#[derive(Debug, Clone)]
pub struct Config {
    /// Kernel, unless it is booted from a disk.
    pub kernel: Kernel,
    /// Memory size in MiB.
    pub memory_mib: u64,
    /// True if other processes can map the memory, which vfio-user servers need.
    pub share: bool,
    /// Number of virtual CPUs.
    pub cpus: u32,
    /// NVMe controllers, in the order of their PCI addresses (see [`pci_address`]).
    pub devices: Vec<Device>,
    /// Boot method.
    pub firmware: Firmware,
    /// True if the guest has an IOMMU (Intel's, without interrupt remapping), so that programs in
    /// the guest can use VFIO.
    pub iommu: bool,
    /// Additional arguments of QEMU, for other devices.
    pub more: Vec<String>,
}

impl Config {
    /// Configuration of a guest with 2 CPUs, 1 GiB of memory and the controllers `devices`.
    pub fn new(kernel: Kernel, devices: Vec<Device>) -> Self {
        let firmware = Firmware::Direct { append: String::new() };
        let (iommu, more) = (false, Vec::new());
        Self { kernel, memory_mib: 1024, share: true, cpus: 2, devices, firmware, iommu, more }
    }
}

/// PCI slot of the first controller.
const FIRST_SLOT: usize = 4;

/// PCI address of the controller with this index.
pub fn pci_address(index: usize) -> String {
    format!("0000:00:{:02x}.0", FIRST_SLOT + index)
}

/// Kernel parameters of every guest. Without `tsc=reliable`, the kernel may reject the TSC under
/// emulation, and then read a slow clock millions of times. CPU mitigations are off, because they
/// only make a test slower. After a panic the kernel reboots immediately, and the connection to the
/// agent detects the reboot.
pub const KERNEL_WORDS: &str =
    "console=ttyS0 rdinit=/init quiet panic=-1 tsc=reliable mitigations=off";

/// Paths inside QEMU's chroot of the files that QEMU opens.
#[derive(Debug, Clone)]
pub(crate) struct Inside {
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
    pub(crate) uefi_variables: PathBuf,
}

/// Arguments of QEMU for a guest.
pub(crate) fn arguments(config: &Config, inside: &Inside) -> Vec<String> {
    let memory = config.memory_mib;
    let share = if config.share { "on" } else { "off" };
    let mut arguments: Vec<String> = Vec::new();
    let mut add = |words: &[&str]| arguments.extend(words.iter().map(|&w| w.to_owned()));
    add(&["-nodefaults", "-no-user-config", "-display", "none"]);
    add(&["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", &config.cpus.to_string()]);
    add(&["-m", &format!("{memory}M")]);
    // A vfio-user server maps the guest's memory by its file descriptor, so the memory must be a
    // memfd.
    add(&["-object", &format!("memory-backend-memfd,id=ram,size={memory}M,share={share}")]);
    add(&["-machine", "q35,memory-backend=ram"]);
    if config.iommu {
        // In caching mode, QEMU detects every new mapping of the IOMMU, and passes the mapping to
        // vfio-user servers.
        add(&["-device", "intel-iommu,intremap=off,caching-mode=on"]);
    }
    // Port 0 is the console, port 1 is for the agent, port 2 is for acknowledged writes.
    add(&["-chardev", &format!("file,id=console,path={FILES}/console.log,append=on")]);
    add(&["-serial", "chardev:console"]);
    add(&["-chardev", &format!("socket,id=agent,path={SOCKETS}/agent")]);
    add(&["-serial", "chardev:agent"]);
    add(&["-chardev", &format!("file,id=ack,path={FILES}/ack.log,append=on")]);
    add(&["-serial", "chardev:ack"]);
    add(&["-chardev", &format!("socket,id=qmp,path={SOCKETS}/qmp")]);
    add(&["-mon", "chardev=qmp,mode=control"]);
    add(&["-D", &format!("{FILES}/qemu-trace.log")]);
    match &config.firmware {
        Firmware::Direct { append } => {
            add(&["-kernel", &inside.kernel.display().to_string()]);
            add(&["-initrd", &inside.initramfs.display().to_string()]);
            add(&["-append", format!("{KERNEL_WORDS} {append}").trim_end()]);
        }
        Firmware::Uefi => {
            let code = "/usr/share/OVMF/OVMF_CODE_4M.fd";
            let variables = inside.uefi_variables.display();
            add(&["-drive", &format!("if=pflash,format=raw,unit=0,readonly=on,file={code}")]);
            add(&["-drive", &format!("if=pflash,format=raw,unit=1,file={variables}")]);
        }
    }
    for (index, device) in config.devices.iter().enumerate() {
        let slot = format!("{:02x}.0", FIRST_SLOT + index);
        let mut device = match device {
            Device::VfioUser { socket } => json!({
                "driver": "vfio-user-pci",
                "socket": { "type": "unix", "path": format!("{SOCKETS}/{socket}") },
            }),
            Device::QemuNvme { drive, dbcs } => {
                let node = format!("disk{index}");
                let backend = match drive {
                    Drive::Image(name) => json!({
                        "driver": "raw", "node-name": node, "discard": "unmap",
                        "file": { "driver": "file", "filename": format!("{FILES}/{name}") },
                    }),
                    Drive::Direct(name) => json!({
                        "driver": "raw", "node-name": node, "discard": "unmap",
                        "cache": { "direct": true },
                        "file": {
                            "driver": "file", "filename": format!("{FILES}/{name}"),
                            "aio": "io_uring", "cache": { "direct": true },
                        },
                    }),
                    Drive::Null(size) => json!({
                        "driver": "null-co", "node-name": node, "size": size, "read-zeroes": true,
                    }),
                };
                add(&["-blockdev", &backend.to_string()]);
                json!({
                    "driver": "nvme", "drive": node, "dbcs": dbcs,
                    "serial": format!("qemu{index}"),
                })
            }
        };
        if let Some(object) = device.as_object_mut() {
            object.insert("id".into(), format!("dut{index}").into());
            object.insert("addr".into(), slot.into());
            if matches!(config.firmware, Firmware::Uefi) {
                object.insert("bootindex".into(), index.into());
            }
        }
        add(&["-device", &device.to_string()]);
    }
    arguments.extend(config.more.iter().cloned());
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inside() -> Inside {
        Inside { kernel: "/k".into(), initramfs: "/i".into(), uefi_variables: "/v".into() }
    }

    #[test]
    fn devices_have_the_addresses_of_pci_address() {
        let devices = vec![
            Device::VfioUser { socket: "a".into() },
            Device::QemuNvme { drive: Drive::Null(1 << 30), dbcs: false },
        ];
        let arguments = arguments(&Config::new(Kernel::V7_2, devices), &inside());
        let devices: Vec<serde_json::Value> = arguments
            .windows(2)
            .filter(|pair| pair[0] == "-device")
            .map(|pair| serde_json::from_str(&pair[1]).unwrap())
            .collect();
        assert_eq!(devices[0]["driver"], "vfio-user-pci");
        assert_eq!(devices[0]["socket"]["path"], "/run/shadowbell/sockets/a");
        assert_eq!(devices[1]["dbcs"], false);
        for (index, device) in devices.iter().enumerate() {
            let slot = device["addr"].as_str().unwrap();
            assert_eq!(pci_address(index), format!("0000:00:{slot}"));
        }
    }

    #[test]
    fn uefi_brings_its_own_kernel() {
        let mut config = Config::new(Kernel::V6_1, vec![Device::VfioUser { socket: "a".into() }]);
        config.firmware = Firmware::Uefi;
        let arguments = arguments(&config, &inside());
        assert!(!arguments.contains(&"-kernel".to_owned()));
        assert!(arguments.last().unwrap().contains("\"bootindex\":0"));
    }

    #[test]
    fn kernel_names_are_parsed_as_printed() {
        for kernel in Kernel::ALL {
            assert_eq!(kernel.to_string().parse(), Ok(kernel));
        }
        assert!("5.0".parse::<Kernel>().is_err());
    }
}
