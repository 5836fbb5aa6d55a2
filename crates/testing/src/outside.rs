//! Disks that somebody outside of the tests has made, and stops on demand: namespaces by their
//! character devices, in a guest (`cargo xtask guest chardev`). Who runs the tests by hand has
//! none, and the tests that need one are skipped with a word.

use std::fs::File;
use std::path::PathBuf;

use crate::wait;

/// The disks, with a space between two.
const NAMESPACES: &str = "SHADOWBELL_TEST_NAMESPACES";
/// The directory by which [`Storage`] asks.
const ASKS: &str = "SHADOWBELL_TEST_STORAGE";

/// The disks that the environment names.
#[must_use]
pub fn namespaces() -> Vec<String> {
    let named = std::env::var(NAMESPACES).unwrap_or_default();
    let disks: Vec<_> = named.split_whitespace().map(ToOwned::to_owned).collect();
    if disks.is_empty() {
        eprintln!("skipped: {NAMESPACES} names no disk; `cargo xtask guest chardev` does");
    }
    disks
}

/// The storage below such a disk, which somebody else stops and lets go on.
#[derive(Debug)]
pub struct Storage(PathBuf);

impl Storage {
    /// What the environment names.
    ///
    /// # Panics
    /// If it names nothing.
    #[must_use]
    pub fn new() -> Self {
        Self(std::env::var_os(ASKS).map(PathBuf::from).expect("a directory to ask by"))
    }

    /// From now on it answers nothing.
    ///
    /// # Panics
    /// If nobody does that.
    pub fn stall(&self) {
        self.ask("stall");
    }

    /// What was asked meanwhile is answered.
    ///
    /// # Panics
    /// If nobody does that.
    pub fn go_on(&self) {
        self.ask("go-on");
    }

    /// Asks by a file of this name, which is removed once it is done.
    fn ask(&self, what: &str) {
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
