//! The end of a process whose keeper has ended, while it does not look at its keeper yet.

use super::worker_link::WorkerLink;
use crate::exit;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often it is looked whether this is over.
const LOOK: Duration = Duration::from_millis(100);

/// Ends the process if its keeper ends, whatever the process waits for: a disk may be somewhere
/// else, and what answers for it may say nothing. Until this is dropped.
pub(super) struct KeeperWatch(Arc<AtomicBool>);

impl KeeperWatch {
    /// # Errors
    /// The system's.
    pub(super) fn start(link: &WorkerLink) -> anyhow::Result<Self> {
        let link = link.as_fd().try_clone_to_owned()?;
        let is_over = Arc::new(AtomicBool::new(false));
        let its = Arc::clone(&is_over);
        let watch = move || {
            let timeout = Timespec::try_from(LOOK).ok();
            while !its.load(Ordering::Acquire) {
                // Nothing is read here: only its end is looked for.
                let mut fds = [PollFd::from_borrowed_fd(link.as_fd(), PollFlags::empty())];
                let seen = poll(&mut fds, timeout.as_ref());
                let has_ended = fds.iter().any(|fd| fd.revents().contains(PollFlags::HUP));
                if seen.is_ok() && has_ended && !its.load(Ordering::Acquire) {
                    std::process::exit(i32::from(exit::FAILED));
                }
            }
        };
        std::thread::Builder::new().name("sb-keeper-end".into()).spawn(watch)?;
        Ok(Self(is_over))
    }
}

impl Drop for KeeperWatch {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}
