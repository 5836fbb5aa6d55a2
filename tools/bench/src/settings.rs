//! What all suites measure by.

use std::path::PathBuf;
use std::time::Duration;

/// The depths that the suites about queues go through.
pub(crate) const QUEUE_DEPTHS: [u32; 6] = [1, 2, 4, 8, 32, 128];

/// The program, the processors and the times of one run of the benchmarks.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// The built program.
    pub(crate) binary: PathBuf,
    /// The controller's processor and the driver's.
    pub(crate) cpus: [usize; 2],
    /// Each side stays on its processor. Else they are where the system puts them.
    pub(crate) pinned: bool,
    pub(crate) rounds: u32,
    /// How long one measurement takes.
    pub(crate) time: Duration,
    /// How long it runs before it is measured.
    pub(crate) ramp: Duration,
    /// One short round of a few conditions, to see that everything works.
    pub(crate) quick: bool,
    /// Where large files go.
    pub(crate) directory: PathBuf,
}

impl Settings {
    /// Conditions: all of them, or in a quick run the first and the last.
    pub(crate) fn some<T: Copy>(&self, all: &[T]) -> Vec<T> {
        match all {
            [first, .., last] if self.quick => vec![*first, *last],
            all => all.to_vec(),
        }
    }
}
