//! Layer that holds requests which fail because of the storage.

use super::policy::ErrorPolicy;
use super::queue::HoldingQueue;
use super::stop_state::StopState;
use shadowbell_disk::{Disk, DiskInfo, Queue, ResizeError, Stopped};
use shadowbell_memory::SharedBytes;
use std::io;
use std::sync::Arc;

/// Disk that holds requests which fail because of the storage.
#[derive(Clone, Debug)]
pub struct HoldingDisk {
    inner: Arc<dyn Disk>,
    policy: ErrorPolicy,
    state: Arc<StopState>,
}

impl HoldingDisk {
    /// Applies `policy` to `disk`. Returns `disk` itself if the policy holds no requests.
    pub fn wrap(disk: Arc<dyn Disk>, policy: ErrorPolicy) -> Arc<dyn Disk> {
        match policy {
            ErrorPolicy::Report => disk,
            _ => Arc::new(Self { inner: disk, policy, state: Arc::default() }),
        }
    }

    fn around(&self, inner: Arc<dyn Disk>) -> Arc<dyn Disk> {
        Arc::new(Self { inner, ..self.clone() })
    }
}

impl Disk for HoldingDisk {
    fn info(&self) -> DiskInfo {
        self.inner.info()
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        let (inner, disk) = (self.inner.queue()?, Arc::clone(&self.inner));
        let state = Arc::clone(&self.state);
        Ok(Box::new(HoldingQueue::new(inner, disk, self.policy, state)?))
    }

    fn inner(&self) -> Option<&Arc<dyn Disk>> {
        Some(&self.inner)
    }

    fn queue_files(&self) -> u64 {
        // This layer adds an eventfd, and an epoll descriptor that merges it with the inner
        // queue's.
        self.inner.queue_files() + 2
    }

    fn name(&self) -> String {
        self.inner.name()
    }

    fn suspend_error_policy(&self, suspended: bool) {
        self.state.suspend(suspended);
    }

    fn stopped(&self) -> Option<Stopped> {
        self.state.stopped()
    }

    fn resume(&self) -> bool {
        self.state.resume()
    }

    fn resumes(&self) -> u64 {
        self.state.resumes()
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
