//! Controllers of the suite `driver`, by PCI address.

use shadowbell_guest::config;

/// PCI functions that share an IOMMU group.
pub(crate) const TOGETHER: [&str; 2] = ["0000:00:10.0", "0000:00:10.1"];

/// Target string of the controller with this index, for the driver.
pub(crate) fn target(index: usize) -> String {
    format!("nvme://{}", config::pci_address(index))
}
