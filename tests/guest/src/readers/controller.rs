//! Controllers of the suite `readers`.

/// Size of each disk in bytes.
pub(crate) const SIZE: u64 = 512 << 20;

/// A controller under test.
pub(crate) struct Controller {
    pub(crate) name: &'static str,
    pub(crate) address: String,
    /// Block device of the controller while it is bound to the kernel's driver.
    pub(crate) disk: String,
}

impl Controller {
    pub(crate) fn target(&self) -> String {
        format!("nvme://{}", self.address)
    }
}
