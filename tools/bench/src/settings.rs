//! Parameters of all suites.

use std::path::PathBuf;
use std::time::Duration;

/// Queue depths of the suites about queues.
pub(crate) const QUEUE_DEPTHS: [u32; 6] = [1, 2, 4, 8, 32, 128];

/// Program, CPUs and durations of one run of the benchmarks.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// Path of the program.
    pub(crate) binary: PathBuf,
    /// CPUs of the controller and of the driver.
    pub(crate) cpus: [usize; 2],
    /// True if driver and controller are pinned to their CPUs. Otherwise the scheduler chooses.
    pub(crate) pinned: bool,
    pub(crate) rounds: u32,
    /// Duration of one measurement.
    pub(crate) time: Duration,
    /// Duration of the warm-up before the measurement.
    pub(crate) ramp: Duration,
    /// True if the run is a functional test: one short round of a few conditions.
    pub(crate) quick: bool,
    /// Directory for large files.
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
