//! CPU assignment: the CPUs of this process are divided between driver threads and server.

use anyhow::Context;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// CPUs of this process, divided between driver and server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CpuSplit {
    /// CPUs to which driver threads are pinned; empty if driver and server share a single CPU.
    pub(super) driver: Vec<usize>,
    /// CPUs of the server.
    pub(super) server: Vec<usize>,
}

impl CpuSplit {
    /// Divides the CPUs that this process may use.
    pub(super) fn divide() -> anyhow::Result<Self> {
        let set = sched_getaffinity(None).context("reading the CPU affinity")?;
        Ok(Self::of((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()))
    }

    fn of(all: Vec<usize>) -> Self {
        let (driver, server) = all.split_at(all.len() / 2);
        Self { driver: driver.to_vec(), server: server.to_vec() }
    }

    /// True if driver and server each have a CPU to poll on.
    pub(super) fn have_separate_cpus(&self) -> bool {
        !self.driver.is_empty()
    }

    /// Number of driver threads for `jobs` jobs: at most one per CPU, because polling threads
    /// that share a CPU delay each other.
    pub(super) fn driver_threads(&self, jobs: u16) -> u16 {
        u16::try_from(self.driver.len()).unwrap_or(u16::MAX).clamp(1, jobs)
    }

    /// Calls `start` with the thread's affinity set to the server's CPUs, for children to inherit.
    pub(super) fn for_server<T>(
        &self,
        start: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        if !self.have_separate_cpus() {
            return start();
        }
        let before = sched_getaffinity(None).context("reading the CPU affinity")?;
        let mut set = CpuSet::new();
        self.server.iter().for_each(|cpu| set.set(*cpu));
        // A child process inherits the affinity of the thread that creates it.
        sched_setaffinity(None, &set).context("setting the CPU affinity of the server")?;
        let started = start();
        sched_setaffinity(None, &before).context("setting the CPU affinity of the driver")?;
        started
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_and_server_get_separate_cpus() {
        let two = CpuSplit::of(vec![3, 7]);
        assert_eq!((&two.driver[..], &two.server[..]), (&[3][..], &[7][..]));
        assert!(two.have_separate_cpus());
        assert_eq!(two.driver_threads(4), 1);
        assert_eq!(CpuSplit::of((0..16).collect()).driver_threads(4), 4);
        let one = CpuSplit::of(vec![5]);
        assert!(!one.have_separate_cpus() && one.server == [5]);
        assert_eq!(one.driver_threads(4), 1);
    }

    #[test]
    fn the_affinity_of_this_process_is_restored() {
        let before = sched_getaffinity(None).unwrap();
        let split = CpuSplit::divide().unwrap();
        let inside = split.for_server(|| Ok(sched_getaffinity(None)?)).unwrap();
        assert_eq!(inside.count() as usize, split.server.len());
        assert!(sched_getaffinity(None).unwrap() == before);
    }
}
