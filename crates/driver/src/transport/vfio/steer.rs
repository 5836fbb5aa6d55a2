//! Interrupt affinity of a VFIO function.

use super::address::PciAddress;
use crate::queue_map::{QueueMap, list};
use std::io;
use std::path::{Path, PathBuf};

/// Result of [`steer_interrupts`].
#[derive(Debug)]
pub enum Steered {
    /// The affinity of this number of interrupts was set.
    All(usize),
    /// A file could not be accessed; the affinity of some or all interrupts is unchanged.
    Refused {
        /// File that could not be read or written.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
}

/// Sets the affinity of a VFIO function's interrupts to the processors that use their queue pairs:
/// vector N belongs to queue pair N. Vector 0, of the admin queue, is not changed. Needs write
/// access to `/proc/irq`. An irqbalance daemon may change the affinity again later.
#[must_use]
pub fn steer_interrupts(address: PciAddress, map: &QueueMap) -> Steered {
    steer(Path::new("/proc"), address, map)
}

fn steer(proc: &Path, address: PciAddress, map: &QueueMap) -> Steered {
    let path = proc.join("interrupts");
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(source) => return Steered::Refused { path, source },
    };
    let mut moved = 0;
    for (irq, vector) in vectors(&text, address) {
        let processors = u16::try_from(vector).map(|queue| map.processors_of(queue));
        let processors = processors.unwrap_or_default();
        if vector == 0 || processors.is_empty() {
            continue;
        }
        let path = proc.join(format!("irq/{irq}/smp_affinity_list"));
        match std::fs::write(&path, list(&processors)) {
            Ok(()) => moved += 1,
            Err(source) => return Steered::Refused { path, source },
        }
    }
    Steered::All(moved)
}

/// Finds the interrupts of a VFIO function in `/proc/interrupts`: interrupt number and vector. VFIO
/// names them `vfio-msix[2](0000:00:04.0)`.
fn vectors(interrupts: &str, address: PciAddress) -> Vec<(u32, u32)> {
    let end = format!("]({address})");
    let parse = |line: &str| {
        let (irq, rest) = line.trim_start().split_once(':')?;
        let name = rest.split_whitespace().last()?.strip_suffix(&end)?;
        let vector = name.strip_prefix("vfio-msix[")?;
        Some((irq.parse().ok()?, vector.parse().ok()?))
    };
    interrupts.lines().filter_map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERRUPTS: &str = "            CPU0       CPU1       \n\
        \x20  9:          0          0  IO-APIC   9-fasteoi   acpi\n\
        \x20 24:          3          0  PCI-MSIX-0000:00:04.0   0-edge      vfio-msix[0](0000:00:04.0)\n\
        \x20 25:          7          0  PCI-MSIX-0000:00:04.0   1-edge      vfio-msix[1](0000:00:04.0)\n\
        \x20 31:          7          0  PCI-MSIX-0000:00:04.0   2-edge      vfio-msix[2](0000:00:04.0)\n\
        \x20 26:          7          0  PCI-MSIX-0000:00:05.0   1-edge      vfio-msix[1](0000:00:05.0)\n\
        \x20 27:          7          0  PCI-MSIX-0000:00:06.0   1-edge      nvme0q1\n\
        NMI:          0          0   Non-maskable interrupts\n";

    #[test]
    fn interrupts_go_to_the_processors_of_their_queues() {
        let address: PciAddress = "0000:00:04.0".parse().unwrap();
        assert_eq!(vectors(INTERRUPTS, address), [(24, 0), (25, 1), (31, 2)]);
        let proc = tempfile::tempdir().unwrap();
        std::fs::write(proc.path().join("interrupts"), INTERRUPTS).unwrap();
        for irq in [24, 25, 31] {
            std::fs::create_dir_all(proc.path().join(format!("irq/{irq}"))).unwrap();
        }
        let map = QueueMap::new(0..4, 2);
        assert!(matches!(steer(proc.path(), address, &map), Steered::All(2)));
        let at =
            |irq| std::fs::read_to_string(proc.path().join(format!("irq/{irq}/smp_affinity_list")));
        assert_eq!((at(25).unwrap(), at(31).unwrap()), ("0-1".into(), "2-3".into()));
        assert!(at(24).is_err(), "the control plane's interrupt stays");
        // A missing permission or file is reported as `Steered::Refused`.
        std::fs::remove_dir_all(proc.path().join("irq/31")).unwrap();
        let refused = steer(proc.path(), address, &map);
        assert!(
            matches!(&refused, Steered::Refused { path, .. } if path.ends_with("31/smp_affinity_list"))
        );
        std::fs::remove_file(proc.path().join("interrupts")).unwrap();
        assert!(matches!(steer(proc.path(), address, &map), Steered::Refused { .. }));
    }
}
