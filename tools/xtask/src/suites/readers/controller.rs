//! The controllers of the S4 suite.

/// Bytes of each disk.
pub(crate) const SIZE: u64 = 512 << 20;

/// One of the two controllers.
pub(crate) struct Controller {
    pub(crate) name: &'static str,
    pub(crate) address: String,
    /// Its block device, while the kernel has it.
    pub(crate) disk: String,
}

impl Controller {
    pub(crate) fn target(&self) -> String {
        format!("nvme://{}", self.address)
    }
}
