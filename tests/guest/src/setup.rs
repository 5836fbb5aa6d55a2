//! Setup of the suites: fetched programs, the controller under test, and the guest's boot.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::ValueEnum;
use shadowbell_bench::workspace;
use shadowbell_guest::initramfs::{self, Extra};
use shadowbell_guest::{
    Config, Device, Drive, Guest, Kernel, Roots, RunDir, Serve, Server, Small, config, tool,
};

use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

/// Type of the controller under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ControllerKind {
    /// Shadowbell's controller, served over vfio-user.
    Shadowbell,
    /// QEMU's own `-device nvme`, for comparison.
    QemuNvme,
}

/// File names of the guests' archives under `target/guest`.
const FULL: &str = "initramfs-full.cpio";
pub(crate) const MINIMAL: &str = "initramfs-minimal.cpio";

/// Programs and options of all suites.
pub struct Setup {
    pub controller: ControllerKind,
    pub roots: Roots,
    /// The shadowbell program; `None` if only QEMU's controller is under test.
    pub shadowbell: Option<PathBuf>,
    /// Number of rounds of a speed measurement. The median round is the result.
    pub rounds: usize,
    /// Minimum number of upgrades or kills.
    pub events: u32,
    /// Cloud Hypervisor's program, if there is one.
    pub cloud_hypervisor: Option<PathBuf>,
}

impl Setup {
    /// Downloads and builds the files that the suites need. `shadowbell` is the program. If it is
    /// needed and not given, it is built.
    pub fn new(
        controller: ControllerKind,
        shadowbell: Option<PathBuf>,
        kernels: &[Kernel],
    ) -> Result<Self> {
        let root = workspace::root();
        let roots = Roots::fetch(&root, kernels)?;
        let tool = tool::build(&root, roots.directory())?;
        for (name, programs, tools) in
            [(FULL, initramfs::FULL, &[tool.as_path()][..]), (MINIMAL, initramfs::MINIMAL, &[])]
        {
            let extra = Extra { programs: tools, ..Extra::default() };
            let archive = initramfs::pack(&roots, programs, extra)?;
            // A concurrent run may read the file with this name. Therefore the file is replaced by
            // a rename, and not overwritten.
            let partial = roots.directory().join(format!("{name}.{}", std::process::id()));
            std::fs::write(&partial, archive).context("the initramfs")?;
            std::fs::rename(&partial, roots.directory().join(name)).context("the initramfs")?;
        }
        let shadowbell = match (controller, shadowbell) {
            (_, Some(path)) => {
                Some(path.canonicalize().with_context(|| path.display().to_string())?)
            }
            (ControllerKind::Shadowbell, None) => Some(workspace::build_shadowbell()?),
            (ControllerKind::QemuNvme, None) => None,
        };
        Ok(Self { controller, roots, shadowbell, rounds: 3, events: 0, cloud_hypervisor: None })
    }

    /// A program whose `serve` supports fault injection. This is the program under test if it
    /// supports it, and otherwise a program that is built for tests.
    pub fn faulty(&self) -> Result<PathBuf> {
        if let Some(program) = &self.shadowbell {
            let help = Command::new(program).args(["serve", "--help"]).output();
            let help = help.with_context(|| program.display().to_string())?;
            if String::from_utf8_lossy(&help.stdout).contains("--faults") {
                return Ok(program.clone());
            }
        }
        workspace::build_for_tests()
    }

    /// Directory for the files that later runs use again.
    pub fn directory(&self) -> &Path {
        self.roots.directory()
    }

    /// Boots a guest with these controllers. `adjust` changes its configuration.
    pub fn boot(
        &self,
        run: &RunDir,
        kernel: Kernel,
        devices: Vec<Device>,
        adjust: impl FnOnce(&mut Config),
    ) -> Result<Guest> {
        let mut config = Config::new(kernel, devices);
        adjust(&mut config);
        let inside = run.file(FULL);
        if !inside.exists() {
            std::fs::hard_link(self.roots.directory().join(FULL), &inside)
                .context("the initramfs")?;
        }
        Guest::boot(&self.roots, run, &config, FULL)
    }

    /// Starts the controller under test on an image of the run.
    pub fn disk(&self, run: &RunDir, image: &Path) -> Result<Disk> {
        let name = image.file_name().context("an image without a name")?.to_string_lossy();
        Ok(match self.controller {
            ControllerKind::QemuNvme => Disk {
                server: None,
                device: Device::QemuNvme { drive: Drive::Image(name.into_owned()), dbcs: true },
            },
            ControllerKind::Shadowbell => {
                let disks = [image.display().to_string()];
                self.serve(run, "dut", &disks, &[], None)?
            }
        })
    }

    /// Serves a shadowbell controller on the socket `name`.
    pub fn serve(
        &self,
        run: &RunDir,
        name: &str,
        disks: &[String],
        options: &[&str],
        small: Option<Small<'_>>,
    ) -> Result<Disk> {
        let binary = self.shadowbell.as_deref().context("this needs the shadowbell program")?;
        let server = Server::start(run, &Serve { binary, name, disks, options, small })?;
        let device = Device::VfioUser { socket: name.to_owned() };
        Ok(Disk { server: Some(server), device })
    }
}

/// The controller under test: a device of the guest and, for shadowbell, its server.
pub struct Disk {
    pub server: Option<Server>,
    pub device: Device,
}

impl Disk {
    /// Fails if the server has ended.
    pub fn check(&mut self) -> Result<()> {
        self.server.as_mut().map_or(Ok(()), Server::check)
    }

    /// Ends the server with SIGTERM; its exit status must be 0.
    pub fn stop(self) -> Result<()> {
        self.server.map_or(Ok(()), Server::stop)
    }
}

/// Waits for the controller at this index and its first namespace. Returns their names in the
/// guest (`nvme0`, `nvme0n1`).
pub(crate) fn names(guest: &mut Guest, index: usize) -> Result<(String, String)> {
    let address = config::pci_address(index);
    // With multipath, sysfs has the hidden path device (nvme0c0n1) below the controller. Its name
    // without the controller part (c0) is the name of the disk.
    let script = format!(
        "for try in $(seq 600); do \
            for path in /sys/bus/pci/devices/{address}/nvme/nvme*/nvme*n1; do \
                disk=$(basename $path | sed 's/c[0-9]*n/n/'); \
                [ -b /dev/$disk ] && echo $(basename $(dirname $path)) $disk && exit 0; \
            done; sleep 0.1; \
        done; echo no NVMe disk at {address}; dmesg | grep -i nvme; exit 1"
    );
    let text = guest.sh(&script, LIMIT)?;
    let (controller, disk) = text.trim().split_once(' ').context("no names")?;
    Ok((controller.to_owned(), disk.to_owned()))
}

/// Waits for the character device of the first namespace of the controller at this index. Returns
/// its path.
pub(crate) fn character_device(guest: &mut Guest, index: usize) -> Result<String> {
    let address = config::pci_address(index);
    let text = guest.sh(
        &format!(
            "for try in $(seq 600); do \
                for path in /sys/bus/pci/devices/{address}/nvme/nvme*; do \
                    device=/dev/ng$(basename $path | sed s/nvme//)n1; \
                    [ -c $device ] && echo $device && exit 0; \
                done; sleep 0.1; \
            done; ls /dev; dmesg | grep -i nvme; exit 1"
        ),
        LIMIT,
    )?;
    Ok(text.trim().to_owned())
}

/// Powers the guest off and stops the server. Both must succeed.
pub(crate) fn finish(report: &mut Report, guest: Guest, disk: Disk) {
    report.check("the guest powers off", |_| guest.power_off(LIMIT));
    report.check("the server ends without an error", |_| disk.stop());
}
