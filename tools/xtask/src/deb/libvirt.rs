//! `cargo xtask libvirt`: a domain of a real libvirtd uses a disk as `docs/guides/libvirt.md`
//! describes it.
//!
//! The configuration, the hook, the domain and the commands are those of the page, and the output
//! is compared with that of the page. The domain gets a kernel, and the emulator instead of KVM.

use shadowbell_testing::wait as time_limit;
use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use shadowbell_bench::workspace::{build_shadowbell, root};
use shadowbell_guest::initramfs::{self, Extra, MINIMAL};
use shadowbell_guest::{Kernel, Roots};
use shadowbell_harness::Report;

use super::boot::{self, Debian, Machine};
use super::guest::{expect_output, wait, write};
use super::tools::{directory, need};
use super::tree;

const PAGE: &str = "docs/guides/libvirt.md";
/// Debian with a QEMU that has vfio-user devices.
const DEBIAN: Debian = Debian {
    name: "libvirt",
    suite: "trixie",
    backports: Some("trixie-backports"),
    packages: ",libvirt-daemon-system,libvirt-clients,libvirt-daemon-driver-qemu,qemu-system-x86,\
               seabios",
};
const KERNEL: Kernel = Kernel::V6_1;
/// Modules of the power button, by which libvirt shuts a guest down.
const MODULES: [&str; 2] = ["button", "evdev"];
const CONSOLE: &str = "/var/log/libvirt/qemu/vm0-console.log";
const UNIT: &str = "shadowbell@vm0";

/// First process of the guest: counts its boots on the disk, and powers off by the power button.
const INIT: &str = r#"#!/usr/bin/busybox sh
busybox mount -t proc proc /proc
busybox mount -t sysfs sysfs /sys
busybox mount -t devtmpfs devtmpfs /dev
busybox mkdir -p /opt/busybox
busybox --install -s /opt/busybox
export PATH=/opt/busybox
for module in /usr/lib/shadowbell/modules/*; do insmod $module; done
disk=/dev/nvme0n1
until [ -b $disk ]; do sleep 0.1; done
boots=$(($(head -c 1 $disk | tr -dc 0-9) + 1))
printf $boots | dd of=$disk conv=fsync 2>/dev/null
echo "@DISK $(cat /sys/block/nvme0n1/device/serial) boot $boots" >/dev/ttyS0
for button in /dev/input/event*; do (head -c 1 $button >/dev/null && poweroff -f) & done
while :; do sleep 60; done
"#;

/// Elements of the domain that the page does not show.
const MACHINE: &str = "
  <name>vm0</name>
  <memory unit='MiB'>512</memory>
  <features><acpi/></features>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>/shared/vmlinuz</kernel>
    <initrd>/shared/initramfs</initrd>
    <cmdline>console=ttyS0 rdinit=/init quiet panic=-1</cmdline>
  </os>
  <devices><serial type='file'><source path='/var/log/libvirt/qemu/vm0-console.log'/></serial></devices>";

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Path of a built shadowbell program; without it, one is built
    #[arg(long, value_name = "PATH")]
    shadowbell: Option<PathBuf>,
}

/// Boots a Debian with libvirt, and runs the page.
pub(crate) fn run(report: &mut Report, arguments: &Arguments) -> Result<()> {
    report.begin("libvirt");
    let page = Blocks::read()?;
    let machine = report.check("a Debian with libvirt boots", |_| boot(arguments));
    if let Some(machine) = machine {
        let versions = machine.run("virsh version")?;
        print!("{versions}");
        report.check("a domain starts, is stopped, and starts again with its data", |_| {
            domain(&machine, &page).with_context(|| {
                let logs = "journalctl --no-pager --lines 30; tail /var/log/libvirt/qemu/*";
                machine.run(logs).unwrap_or_default()
            })
        });
    }
    report.summary();
    Ok(())
}

fn boot(arguments: &Arguments) -> Result<Machine> {
    need("dpkg-shlibdeps", "dpkg-dev")?;
    let program = match &arguments.shadowbell {
        Some(path) => path.canonicalize().with_context(|| path.display().to_string())?,
        None => build_shadowbell()?,
    };
    let package = tree::build(&program, env!("CARGO_PKG_VERSION"), &directory())?;
    let roots = Roots::fetch(&root(), &[KERNEL])?;
    let modules = roots.modules(KERNEL, &MODULES);
    let extra = Extra { init: Some(INIT), modules: &modules, ..Extra::default() };
    let debian = boot::root(&directory(), &DEBIAN)?;
    let shared = directory().join("libvirt-shared");
    fs::create_dir_all(&shared)?;
    fs::copy(package, shared.join("shadowbell.deb"))?;
    fs::copy(roots.kernel(KERNEL)?, shared.join("vmlinuz"))?;
    fs::write(shared.join("initramfs"), initramfs::pack(&roots, MINIMAL, extra)?)?;
    Machine::boot(&debian, &shared)
}

fn domain(machine: &Machine, page: &Blocks) -> Result<()> {
    machine.run("dpkg --install /shared/shadowbell.deb")?;
    // In the container, libvirt cannot create control groups of the first version.
    machine.run("echo 'cgroup_controllers = []' >>/etc/libvirt/qemu.conf")?;
    machine.run(&write("/etc/shadowbell/vm0.toml", page.first::<1>("toml")?[0]))?;
    machine.run("mkdir --parents /etc/libvirt/hooks")?;
    machine.run(&write("/etc/libvirt/hooks/qemu", page.first::<1>("bash")?[0]))?;
    let domain = page.first::<1>("xml")?[0].replace("type='kvm'", "type='qemu'");
    let domain = domain.replacen("'>", &format!("'>{MACHINE}"), 1);
    machine.run(&write("/vm0.xml", &domain))?;
    let [install, start, check, stop] = page.first("sh,no-run")?;
    let [started, client, stopped] = page.first("output,libvirt")?;
    machine.run(install)?;
    compare(&machine.run(start)?, started)?;
    wait(machine, &format!("grep '@DISK VM0 .*boot 1' {CONSOLE}"))?;
    compare(&machine.run(check)?, client)?;
    stop_domain(machine, stop, stopped)?;
    machine.run("virsh start vm0")?;
    wait(machine, &format!("grep '@DISK VM0 .*boot 2' {CONSOLE}"))?;
    expect_output(machine, &format!("systemctl is-active {UNIT}"), "active")?;
    // A second start is a restart of the unit, because the hook has stopped it.
    expect_output(machine, &format!("systemctl show --property NRestarts {UNIT}"), "=0")?;
    machine.run("virsh destroy vm0")?;
    wait(machine, &format!("systemctl is-active {UNIT} | grep '^inactive'"))
}

/// Shuts the domain down, and waits until the hook has stopped the unit.
fn stop_domain(machine: &Machine, commands: &str, shown: &str) -> Result<()> {
    compare(&machine.run(commands)?, shown)?;
    wait(machine, "virsh domstate vm0 | grep 'shut off'")?;
    let deadline = time_limit::deadline();
    loop {
        let state = machine.run(&format!("systemctl is-active {UNIT} || true"))?;
        if state.trim() == "inactive" {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the unit is {state}");
        time_limit::pause();
    }
}

/// Compares an output with the one of the page, except for spaces.
fn compare(actual: &str, shown: &str) -> Result<()> {
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    ensure!(words(actual) == words(shown), "{PAGE} shows:\n{shown}\nthe output is:\n{actual}");
    Ok(())
}

/// Code blocks of the page: info string, and text.
struct Blocks(Vec<(String, String)>);

impl Blocks {
    fn read() -> Result<Self> {
        let text = fs::read_to_string(root().join(PAGE)).context(PAGE)?;
        Ok(Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let mut blocks = Vec::new();
        // A fence ends a block, and so every second part between fences is a block.
        for block in text.split("\n```").skip(1).step_by(2) {
            let (info, text) = block.split_once('\n').unwrap_or((block, ""));
            blocks.push((info.to_owned(), format!("{text}\n")));
        }
        Self(blocks)
    }

    /// First blocks with this info string.
    fn first<const N: usize>(&self, info: &str) -> Result<[&str; N]> {
        let found = self.0.iter().filter(|(of, _)| of == info).take(N);
        let found: Vec<_> = found.map(|(_, text)| text.as_str()).collect();
        let found = found.try_into().ok();
        found.with_context(|| format!("{PAGE} has fewer than {N} blocks `{info}`"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found() {
        let blocks = Blocks::parse("a\n```toml\nb = 1\n```\n\nc\n\n```sh,no-run\nd\ne\n```\n");
        assert_eq!(blocks.first("toml").unwrap(), ["b = 1\n"]);
        assert_eq!(blocks.first("sh,no-run").unwrap(), ["d\ne\n"]);
        assert!(blocks.first::<2>("toml").is_err());
    }

    #[test]
    fn outputs_are_compared_without_spaces() {
        compare("a  b\n\nc", "a b\nc\n").unwrap();
        assert!(compare("a", "b").is_err());
    }

    #[test]
    fn the_page_has_what_the_chore_needs() {
        let page = Blocks::read().unwrap();
        for info in ["toml", "bash", "xml"] {
            page.first::<1>(info).unwrap();
        }
        page.first::<4>("sh,no-run").unwrap();
        page.first::<3>("output,libvirt").unwrap();
    }
}
