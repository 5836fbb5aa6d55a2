//! Refusals of the driver and of `bind`, and their error messages.

use anyhow::{Result, ensure};
use shadowbell_guest::{Guest, config};

use super::target::{TOGETHER, target};
use crate::setup::names;
use crate::vfio::shadowbell;
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

/// Checks a refusal: exit status 2, and one line that contains all of `words`.
fn refused(guest: &mut Guest, arguments: &str, words: &[&str]) -> Result<()> {
    let output = shadowbell(guest, arguments)?;
    ensure!(output.code == 2, "`{arguments}` ended with {}: {}", output.code, output.text);
    let line = output.text.trim();
    ensure!(line.lines().count() == 1, "more than a sentence: {line}");
    for word in words {
        ensure!(line.contains(word), "`{arguments}` does not say `{word}`: {line}");
    }
    Ok(())
}

/// Executes `change` as root, and checks that the command `then` of another user is refused with a
/// message that contains `words`.
fn refused_to_others(guest: &mut Guest, change: &str, then: &str, words: &[&str]) -> Result<()> {
    guest.sh(change, LIMIT)?;
    let output = guest.run(&format!("su other -c '{then}'"), LIMIT)?;
    ensure!(output.code != 0, "it is not refused: {}", output.text);
    for word in words {
        ensure!(output.text.contains(word), "`{then}` does not say `{word}`: {}", output.text);
    }
    Ok(())
}

/// Refusals while the controllers are bound to the kernel's driver.
pub(crate) fn while_bound_to_the_kernel(report: &mut Report, guest: &mut Guest) {
    let address = config::pci_address(0);
    report.check(
        "a controller of the kernel's driver is refused with the command to bind it",
        |_| {
            let words = ["kernel driver nvme", &format!("`shadowbell bind {address}`")];
            refused(guest, &format!("list {}", target(0)), &words)
        },
    );
    report.check(
        "a device that is no NVMe controller, or is missing, is refused with the reason",
        |_| {
            refused(guest, "list nvme://00:00.0", &["not an NVMe controller", "060000h"])?;
            refused(guest, "bind 00:00.0", &["not an NVMe controller", "060000h"])?;
            refused(guest, "list nvme://00:1e.0", &["no PCI device 0000:00:1e.0"])?;
            refused(guest, "bind 00:1e.0", &["no such PCI device"])
        },
    );
    report.check("bind refuses a controller with a mounted file system", |_| {
        let disk = names(guest, 0)?.1;
        guest.sh(&format!("mkfs.ext4 -q -F /dev/{disk} && mount /dev/{disk} /mnt"), LIMIT)?;
        let words = [format!("{disk} is mounted at /mnt")];
        refused(guest, &format!("bind {address}"), &[&words[0]])?;
        guest.sh("touch /mnt/still-there && umount /mnt", LIMIT)?;
        // Mounts the disk in another mount namespace. The program cannot see this mount, so it has
        // to detect that the disk is in use by opening it exclusively.
        guest.sh(
            &format!(
                "unshare -m sh -c 'mount /dev/{disk} /mnt && touch /tmp/hidden && exec sleep 1000' & \
                 echo $! >/tmp/hidden.pid; for i in $(seq 600); do \
                 [ -e /tmp/hidden ] && exit 0; sleep 0.1; done; exit 1"
            ),
            LIMIT,
        )?;
        let hidden = refused(guest, &format!("bind {address}"), &[&disk, "opened exclusively"]);
        // The kernel completes the unmount asynchronously. Until then blkdiscard, which opens the
        // disk exclusively, may fail.
        guest.sh(
            &format!(
                "kill $(cat /tmp/hidden.pid); for i in $(seq 600); do \
                 blkdiscard -l 4096 /dev/{disk} && exit 0; sleep 0.1; done; exit 1"
            ),
            LIMIT,
        )?;
        hidden
    });
    report.check("bind refuses a controller with active swap", |_| {
        let disk = names(guest, 1)?.1;
        guest.sh(&format!("mkswap /dev/{disk} && swapon /dev/{disk}"), LIMIT)?;
        let words = format!("{disk} is active swap space");
        let swapped = refused(guest, &format!("bind {}", config::pci_address(1)), &[&words]);
        guest.sh(&format!("swapoff /dev/{disk}"), LIMIT)?;
        swapped
    });
}

/// Refusals while VFIO rejects devices without interrupt remapping.
pub(crate) fn while_distrusted(report: &mut Report, guest: &mut Guest) {
    report.check("a machine without interrupt remapping is refused with the workaround", |_| {
        refused(guest, &format!("list {}", target(0)), &["allow_unsafe_interrupts"])
    });
}

/// Refusals after the controllers are bound to vfio-pci.
pub(crate) fn while_bound_to_vfio(report: &mut Report, guest: &mut Guest) {
    report.check("a shared IOMMU group is refused with the names of its devices", |_| {
        let [one, other] = TOGETHER;
        let taken = shadowbell(guest, &format!("bind {one}"))?.success()?;
        ensure!(taken.contains(other), "bind does not name the other: {taken}");
        let words = ["shares IOMMU group", &format!("{other} (nvme)")];
        refused(guest, &format!("list nvme://{one}"), &words)?;
        shadowbell(guest, &format!("bind {other}"))?.success()?;
        shadowbell(guest, &format!("list nvme://{one}"))?.success()?;
        shadowbell(guest, &format!("unbind {one} {other}"))?.success()?;
        Ok(())
    });
    report.check("a controller in use is neither opened nor given back", |_| {
        let (address, target) = (config::pci_address(2), target(2));
        guest.sh(
            &format!(
                "shadowbell bench {target} --runtime 60 >/tmp/using 2>&1 & echo $! >/tmp/using.pid; \
                 for i in $(seq 600); do grep -q NVMe /tmp/using && exit 0; sleep 0.1; done; \
                 cat /tmp/using; exit 1"
            ),
            LIMIT,
        )?;
        let opened = refused(guest, &format!("list {target}"), &["is in use"]);
        let given = refused(guest, &format!("unbind {address}"), &["in use by a program"]);
        guest.sh("kill -INT $(cat /tmp/using.pid); wait; sleep 1; cat /tmp/using", LIMIT)?;
        opened.and(given)
    });
    report.check(
        "a user without the right, or with too little memory to lock, is refused with the reason",
        |_| {
            guest.sh("echo 'other:x:1000:1000::/:/bin/sh' >>/etc/passwd", LIMIT)?;
            let list = format!("shadowbell list {}", target(0));
            let group = format!(
                "/dev/vfio/$(basename $(readlink /sys/bus/pci/devices/{}/iommu_group))",
                config::pci_address(0)
            );
            refused_to_others(guest, "true", &list, &["no permission for", "chown"])?;
            let limited = format!("ulimit -l 64; {list}");
            refused_to_others(guest, &format!("chown other {group}"), &limited, &["ulimit -l"])?;
            // A user other than root may drive the controller if its memlock limit is sufficient.
            guest.sh(&format!("ulimit -l 1000000; su other -c '{list}'"), LIMIT)?;
            guest.sh(&format!("chown root {group}"), LIMIT)
        },
    );
}
