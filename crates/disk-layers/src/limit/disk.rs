//! Layer that limits the rates of a disk.

use super::counts::Counts;
use super::limiter::Limiter;
use super::queue::LimitedQueue;
use shadowbell_disk::{Disk, DiskInfo, Queue, ResizeError};
use shadowbell_memory::SharedBytes;
use std::any::Any;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Disk with rate limits on another disk.
#[derive(Clone, Debug)]
pub struct LimitedDisk {
    inner: Arc<dyn Disk>,
    /// Limiter of the disk, followed by the limiter of its limit group, if it is in one.
    limiters: Arc<[Arc<Limiter>]>,
    counts: Counts,
}

impl LimitedDisk {
    /// Adds the limits `own` to `disk`, and the limits `group`, which other disks share.
    #[must_use]
    pub fn new(disk: Arc<dyn Disk>, own: Arc<Limiter>, group: Option<Arc<Limiter>>) -> Self {
        let limiters = [own].into_iter().chain(group).collect();
        Self { inner: disk, limiters, counts: Counts::default() }
    }

    /// Returns the rate-limit layer of `disk`. If a disk has one, it is the outermost layer.
    #[must_use]
    pub fn of(disk: &dyn Disk) -> Option<&Self> {
        let disk: &dyn Any = disk;
        disk.downcast_ref()
    }

    /// All rate limiters: first the limiter of the disk, then the limiter of its group.
    #[must_use]
    pub fn limiters(&self) -> &[Arc<Limiter>] {
        &self.limiters
    }

    /// Number of requests that wait because of the limits, and are not submitted to the storage
    /// yet.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        self.counts.waiting.load(Ordering::Relaxed)
    }

    /// The disk below the rate limits.
    #[must_use]
    pub fn unlimited(&self) -> &Arc<dyn Disk> {
        &self.inner
    }

    fn around(&self, inner: Arc<dyn Disk>) -> Arc<dyn Disk> {
        Arc::new(Self { inner, ..self.clone() })
    }
}

impl Disk for LimitedDisk {
    fn info(&self) -> DiskInfo {
        self.inner.info()
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        let (limiters, counts) = (Arc::clone(&self.limiters), self.counts.clone());
        Ok(Box::new(LimitedQueue::new(self.inner.queue()?, limiters, counts)?))
    }

    fn inner(&self) -> Option<&Arc<dyn Disk>> {
        Some(&self.inner)
    }

    fn queue_files(&self) -> u64 {
        // This layer adds a timer, and an epoll descriptor that merges it with the timer of the
        // inner queue.
        self.inner.queue_files() + 2
    }

    fn name(&self) -> String {
        self.inner.name()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let mut counters = self.inner.counters();
        counters.push(("delayed", self.counts.delayed.load(Ordering::Relaxed)));
        counters
    }

    fn resized(&self, bytes: Option<u64>) -> Result<Arc<dyn Disk>, ResizeError> {
        self.inner.resized(bytes).map(|inner| self.around(inner))
    }

    fn with_writes(&self, accepted: bool) -> Result<Arc<dyn Disk>, ResizeError> {
        self.inner.with_writes(accepted).map(|inner| self.around(inner))
    }

    fn map(&self, len: u64) -> Option<SharedBytes> {
        self.inner.map(len)
    }
}
