//! Who runs where: the driver's threads and the server share the processors that there are.

use anyhow::Context;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The processors of this process, divided between the two ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CpuSplit {
    /// Those that the driver's threads are pinned to; none if there is one for both.
    pub(super) driver: Vec<usize>,
    /// Those that the server has.
    pub(super) server: Vec<usize>,
}

impl CpuSplit {
    /// Divides the processors that this process may use.
    pub(super) fn divide() -> anyhow::Result<Self> {
        let set = sched_getaffinity(None).context("the processors of this process")?;
        Ok(Self::of((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()))
    }

    fn of(all: Vec<usize>) -> Self {
        let (driver, server) = all.split_at(all.len() / 2);
        Self { driver: driver.to_vec(), server: server.to_vec() }
    }

    /// Whether both ends have a processor to poll on.
    pub(super) fn are_enough(&self) -> bool {
        !self.driver.is_empty()
    }

    /// Threads for `jobs` jobs of the driver: more that poll than there are processors would only
    /// be in each other's way.
    pub(super) fn driver_threads(&self, jobs: u16) -> u16 {
        u16::try_from(self.driver.len()).unwrap_or(u16::MAX).clamp(1, jobs)
    }

    /// Calls `start`, and whatever it starts has the server's processors only.
    pub(super) fn for_server<T>(
        &self,
        start: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        if !self.are_enough() {
            return start();
        }
        let before = sched_getaffinity(None).context("the processors of this process")?;
        let mut set = CpuSet::new();
        self.server.iter().for_each(|cpu| set.set(*cpu));
        // A child begins with those of the thread that it comes from.
        sched_setaffinity(None, &set).context("the server can not have its processors")?;
        let started = start();
        sched_setaffinity(None, &before).context("the driver can not have its processors")?;
        started
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_get_their_part() {
        let two = CpuSplit::of(vec![3, 7]);
        assert_eq!((&two.driver[..], &two.server[..]), (&[3][..], &[7][..]));
        assert!(two.are_enough());
        assert_eq!(two.driver_threads(4), 1);
        assert_eq!(CpuSplit::of((0..16).collect()).driver_threads(4), 4);
        let one = CpuSplit::of(vec![5]);
        assert!(!one.are_enough() && one.server == [5]);
        assert_eq!(one.driver_threads(4), 1);
    }

    #[test]
    fn this_process_has_its_processors_back_afterwards() {
        let before = sched_getaffinity(None).unwrap();
        let split = CpuSplit::divide().unwrap();
        let inside = split.for_server(|| Ok(sched_getaffinity(None)?)).unwrap();
        assert_eq!(inside.count() as usize, split.server.len());
        assert!(sched_getaffinity(None).unwrap() == before);
    }
}
