//! The controllers that the S2 suite drives, by their addresses.

use std::time::Duration;

use shadowbell_guest::config;

/// The functions that share an IOMMU group.
pub(crate) const TOGETHER: [&str; 2] = ["0000:00:10.0", "0000:00:10.1"];

/// What a measurement may take beyond the time that it is asked to measure for.
pub(crate) const SLACK: Duration = Duration::from_secs(120);

/// The controller of this index, for the driver.
pub(crate) fn target(index: usize) -> String {
    format!("nvme://{}", config::pci_address(index))
}
