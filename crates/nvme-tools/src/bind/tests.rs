//! Tests of `bind` and `unbind` with a copy of the sysfs tree, and a fake kernel that reacts to
//! writes.

use super::*;
use std::cell::RefCell;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use tempfile::TempDir;

const ADDRESS: &str = "0000:01:00.0";

/// Fake machine with an NVMe controller that has one namespace with two partitions.
struct Machine {
    _directory: TempDir,
    paths: KernelPaths,
    /// Writes to sysfs, and loaded modules, in order.
    log: RefCell<Vec<String>>,
    /// True if vfio-pci ignores the request to bind the function.
    refuses_binding: bool,
}

impl Kernel for Machine {
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        let name = path.strip_prefix(&self.paths.sys).unwrap().display().to_string();
        self.log.borrow_mut().push(format!("{name}={}", text.trim()));
        if name.ends_with("/unbind") {
            fs::remove_file(self.function().join("driver"))
        } else if name.ends_with("drivers_probe") {
            let wanted = fs::read_to_string(self.function().join("driver_override"))?;
            let driver = if wanted.trim().is_empty() { "nvme" } else { wanted.trim() };
            if driver == VFIO && self.refuses_binding { Ok(()) } else { self.attach(driver) }
        } else {
            fs::write(path, text)
        }
    }

    fn load(&self, module: &str) -> io::Result<()> {
        self.log.borrow_mut().push(format!("load {module}"));
        fs::create_dir_all(self.paths.driver(module))
    }
}

impl Machine {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let paths = KernelPaths { sys: at("sys"), proc: at("proc"), dev: at("dev") };
        let machine =
            Self { _directory: directory, paths, log: RefCell::default(), refuses_binding: false };
        let function = machine.function();
        let nvme = function.join("nvme/nvme0");
        for (path, text) in [
            (function.join("class"), "0x010802\n"),
            (function.join("driver_override"), "(null)\n"),
            (nvme.join("nvme0n1/size"), "8\n"),
            (machine.paths.sys.join("bus/pci/drivers_probe"), ""),
            (machine.paths.proc.join("self/mountinfo"), "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"),
            (machine.paths.proc.join("swaps"), "Filename Type\n/dev/sda2 partition\n"),
        ] {
            machine.file(&path, text);
        }
        for (disk, numbers) in
            [("nvme0n1", "259:0"), ("nvme0n1p1", "259:1"), ("nvme0n1p2", "259:2")]
        {
            machine.file(&machine.paths.block(disk).join("dev"), &format!("{numbers}\n"));
            fs::create_dir_all(machine.paths.block(disk).join("holders")).unwrap();
            machine.file(&machine.paths.dev.join(disk), "");
        }
        for partition in ["nvme0n1p1", "nvme0n1p2"] {
            for inside in
                [machine.paths.block("nvme0n1").join(partition), machine.paths.block(partition)]
            {
                machine.file(&inside.join("partition"), "1\n");
            }
        }
        let group = machine.paths.sys.join("kernel/iommu_groups/5");
        fs::create_dir_all(group.join("devices")).unwrap();
        symlink(&group, function.join("iommu_group")).unwrap();
        symlink(&function, group.join("devices").join(ADDRESS)).unwrap();
        machine.attach("nvme").unwrap();
        machine
    }

    fn file(&self, path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn function(&self) -> PathBuf {
        self.paths.sys.join("bus/pci/devices").join(ADDRESS)
    }

    fn attach(&self, driver: &str) -> io::Result<()> {
        fs::create_dir_all(self.paths.driver(driver))?;
        symlink(self.paths.driver(driver), self.function().join("driver"))
    }

    fn driver(&self) -> Option<String> {
        self.paths.find(address()).unwrap().driver
    }

    fn run(
        &self,
        act: impl Fn(&KernelPaths, &dyn Kernel, PciAddress, &mut dyn Write) -> anyhow::Result<()>,
    ) -> anyhow::Result<String> {
        let mut out = Vec::new();
        act(&self.paths, self, address(), &mut out)?;
        Ok(String::from_utf8(out).unwrap())
    }

    fn refusal(&self) -> String {
        let error = self.run(bind_to_vfio).unwrap_err();
        assert_eq!(exit::status(&error), exit::BAD_INPUT, "{error:#}");
        assert_eq!(self.driver().as_deref(), Some("nvme"), "nothing was changed");
        assert!(self.log.borrow().is_empty(), "nothing was written: {:?}", self.log.borrow());
        format!("{error:#}")
    }
}

fn address() -> PciAddress {
    ADDRESS.parse().unwrap()
}

#[test]
fn a_controller_is_bound_to_vfio_and_back() {
    let machine = Machine::new();
    let output = machine.run(bind_to_vfio).unwrap();
    assert!(
        output.contains("unbound from nvme, with unused nvme0n1, nvme0n1p1, nvme0n1p2"),
        "{output}"
    );
    assert!(output.contains("nvme://0000:01:00.0") && output.contains("/dev/vfio/5"), "{output}");
    assert_eq!(machine.driver().as_deref(), Some(VFIO));
    assert_eq!(
        machine.log.take(),
        [
            "load vfio-pci",
            "bus/pci/devices/0000:01:00.0/driver_override=vfio-pci",
            "bus/pci/drivers/nvme/unbind=0000:01:00.0",
            "bus/pci/drivers_probe=0000:01:00.0",
        ]
    );
    let output = machine.run(bind_to_vfio).unwrap();
    assert!(output.contains("already"), "{output}");
    assert!(machine.log.borrow().is_empty());

    let output = machine.run(return_to_kernel).unwrap();
    assert!(output.contains("bound to nvme"), "{output}");
    assert_eq!(machine.driver().as_deref(), Some("nvme"));
    assert_eq!(fs::read_to_string(machine.function().join("driver_override")).unwrap(), "\n");
    machine.log.take();
    let output = machine.run(return_to_kernel).unwrap();
    assert!(output.contains("already bound to nvme; nothing to do"), "{output}");
    assert!(machine.log.borrow().is_empty());
}

#[test]
fn a_controller_without_a_driver_is_bound() {
    let machine = Machine::new();
    fs::remove_file(machine.function().join("driver")).unwrap();
    let output = machine.run(bind_to_vfio).unwrap();
    assert!(output.contains("had no driver"), "{output}");
    fs::remove_file(machine.function().join("driver")).unwrap();
    machine.run(return_to_kernel).unwrap();
    assert_eq!(machine.driver().as_deref(), Some("nvme"));
}

#[test]
fn a_mounted_file_system_prevents_the_bind() {
    for line in [
        "30 1 259:1 / /home rw - ext4 /dev/disk/by-uuid/1234 rw\n",
        // btrfs reports anonymous device numbers instead of those of the block device.
        "30 1 0:44 /@ /home rw - btrfs /dev/nvme0n1p1 rw\n",
    ] {
        let machine = Machine::new();
        machine.file(&machine.paths.proc.join("self/mountinfo"), line);
        let refusal = machine.refusal();
        assert!(refusal.contains("nvme0n1p1 is mounted at /home"), "{refusal}");
    }
}

#[test]
fn active_swap_prevents_the_bind() {
    let machine = Machine::new();
    let swaps = "Filename Type\n/dev/nvme0n1p2 partition 1 0 -2\n";
    machine.file(&machine.paths.proc.join("swaps"), swaps);
    let refusal = machine.refusal();
    assert!(refusal.contains("nvme0n1p2 is active swap space"), "{refusal}");
}

#[test]
fn a_device_on_a_namespace_prevents_the_bind() {
    let machine = Machine::new();
    machine.file(&machine.paths.block("nvme0n1p2").join("holders/dm-0"), "");
    machine.file(&machine.paths.block("dm-0").join("dm/name"), "vg-root\n");
    machine.file(&machine.paths.block("nvme0n1").join("holders/md127"), "");
    let refusal = machine.refusal();
    assert!(refusal.contains("nvme0n1p2 is part of dm-0 (vg-root)"), "{refusal}");
    assert!(refusal.contains("nvme0n1 is part of md127"), "{refusal}");
}

#[test]
fn a_path_of_a_multipath_namespace_counts_as_the_namespace() {
    let machine = Machine::new();
    let nvme = machine.function().join("nvme/nvme0");
    fs::rename(nvme.join("nvme0n1"), nvme.join("nvme0c3n1")).unwrap();
    let line = "30 1 259:0 / /data rw - xfs /dev/nvme0n1 rw\n";
    machine.file(&machine.paths.proc.join("self/mountinfo"), line);
    let refusal = machine.refusal();
    assert!(refusal.contains("nvme0n1 is mounted at /data"), "{refusal}");
}

#[test]
fn a_device_that_is_no_controller_is_refused() {
    let machine = Machine::new();
    machine.file(&machine.function().join("class"), "0x060400\n");
    let refusal = machine.refusal();
    assert!(refusal.contains("060400h"), "{refusal}");
    let nowhere: PciAddress = "0000:09:00.0".parse().unwrap();
    let error = bind_to_vfio(&machine.paths, &machine, nowhere, &mut io::sink()).unwrap_err();
    assert_eq!(exit::status(&error), exit::BAD_INPUT);
}

#[test]
fn a_failed_bind_restores_the_kernel_driver() {
    let machine = Machine { refuses_binding: true, ..Machine::new() };
    let error = machine.run(bind_to_vfio).unwrap_err();
    assert!(error.to_string().contains("was not bound"), "{error:#}");
    assert_eq!(machine.driver().as_deref(), Some("nvme"));
}

#[test]
fn other_devices_of_the_iommu_group_are_named() {
    let machine = Machine::new();
    let other = machine.paths.sys.join("bus/pci/devices/0000:01:00.1");
    machine.file(&other.join("class"), "0x010601\n");
    fs::create_dir_all(machine.paths.driver("ahci")).unwrap();
    symlink(machine.paths.driver("ahci"), other.join("driver")).unwrap();
    let group = machine.paths.sys.join("kernel/iommu_groups/5/devices");
    symlink(&other, group.join("0000:01:00.1")).unwrap();
    let output = machine.run(bind_to_vfio).unwrap();
    assert!(output.contains("0000:01:00.1 of the same IOMMU group is bound to ahci"), "{output}");
}

#[test]
fn a_target_is_accepted_as_an_address() {
    for text in ["01:00.0", ADDRESS, "nvme://0000:01:00.0", "nvme://0000:01:00.0/1"] {
        assert_eq!(parse_address(text).unwrap(), address(), "{text}");
    }
    assert!(parse_address("/dev/nvme0").is_err());
}
