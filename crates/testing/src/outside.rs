//! Disks that an outside program provides to the tests, and stalls when a test requests it:
//! character-device namespaces in a guest (`cargo xtask guest chardev`). If no disk is provided,
//! the tests that need one are skipped with a message.

use std::fs::File;
use std::path::PathBuf;

use crate::wait;

/// Environment variable with the paths of the disks, separated by spaces.
const NAMESPACES: &str = "SHADOWBELL_TEST_NAMESPACES";
/// Environment variable with the directory for requests of [`Storage`].
const REQUESTS: &str = "SHADOWBELL_TEST_STORAGE";

/// Disks that the environment variable names.
#[must_use]
pub fn namespaces() -> Vec<String> {
    let named = std::env::var(NAMESPACES).unwrap_or_default();
    let disks: Vec<_> = named.split_whitespace().map(ToOwned::to_owned).collect();
    if disks.is_empty() {
        crate::programs::skipped(format_args!(
            "{NAMESPACES} names no disk; `cargo xtask guest chardev` does"
        ));
    }
    disks
}

/// Storage below the disks of [`namespaces`]. Another program stalls and resumes it on request.
#[derive(Debug)]
pub struct Storage(PathBuf);

impl Storage {
    /// Storage that is controlled by requests in a directory, which an environment variable names.
    ///
    /// # Panics
    ///
    /// If the variable is not set.
    #[must_use]
    pub fn new() -> Self {
        Self(std::env::var_os(REQUESTS).map(PathBuf::from).expect("a directory for requests"))
    }

    /// Stalls the storage: from now on no request completes.
    ///
    /// # Panics
    ///
    /// If the outside program does not answer.
    pub fn stall(&self) {
        self.request("stall");
    }

    /// Resumes the storage: stalled requests complete.
    ///
    /// # Panics
    ///
    /// If the outside program does not answer.
    pub fn resume(&self) {
        self.request("go-on");
    }

    /// Creates a file of this name as a request. The outside program removes the file when the
    /// request is done.
    fn request(&self, what: &str) {
        let path = self.0.join(what);
        File::create(&path).unwrap();
        wait::until(&format!("`{what}` of the storage"), || !path.exists());
    }
}

impl Default for Storage {
    fn default() -> Self {
        Self::new()
    }
}
