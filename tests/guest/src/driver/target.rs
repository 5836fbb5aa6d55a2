//! Controllers of the suite `driver`, by PCI address.

use std::time::Duration;

use shadowbell_guest::config;

/// PCI functions that share an IOMMU group.
pub(crate) const TOGETHER: [&str; 2] = ["0000:00:10.0", "0000:00:10.1"];

/// Time limit of a measurement in addition to the measured time.
pub(crate) const SLACK: Duration = Duration::from_secs(120);

/// Target string of the controller with this index, for the driver.
pub(crate) fn target(index: usize) -> String {
    format!("nvme://{}", config::pci_address(index))
}
