//! Wait of the threads that open disks until all I/O of a dead process has ended.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shadowbell_state::{WrongOrder, is_wrong};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Intervals at which a locked disk is tried again: during the first [`SLOW_AFTER`], and later.
const POLL: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(20)];
/// Duration of a wait after which the disk is tried less often.
const SLOW_AFTER: Duration = Duration::from_secs(1);

/// Fence of a dead process, and the flag that cancels all waits for the fence.
pub(super) struct FenceWait {
    /// Read ends of pipes that hang up when the dead process and all its io_urings have ended.
    ends: Vec<OwnedFd>,
    is_cancelled: AtomicBool,
}

impl FenceWait {
    pub(super) fn new(ends: Vec<OwnedFd>) -> Self {
        Self { ends, is_cancelled: AtomicBool::new(false) }
    }

    /// Descriptors of the fence, for the checkpoint of this process.
    pub(super) fn ends(&self) -> &[OwnedFd] {
        &self.ends
    }

    /// Ends all waits, because the service ends.
    pub(super) fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Release);
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Acquire)
    }

    /// Waits until the dead process and all its io_urings have ended. Calls `waits` repeatedly
    /// meanwhile. Returns false if the wait is cancelled.
    pub(super) fn wait_for_end(&self, mut waits: impl FnMut()) -> bool {
        let timeout = Timespec::try_from(POLL[1]).ok();
        for end in &self.ends {
            while !is_wrong(WrongOrder::NoFence) {
                if self.is_cancelled() {
                    return false;
                }
                let mut fds = [PollFd::from_borrowed_fd(end.as_fd(), PollFlags::IN)];
                let seen = poll(&mut fds, timeout.as_ref());
                if seen.is_ok() && fds.iter().any(|fd| !fd.revents().is_empty()) {
                    break;
                }
                waits();
            }
        }
        true
    }

    /// True if the dead process and all its io_urings have ended, so that none of its I/O is in
    /// flight.
    pub(super) fn has_ended(&self) -> bool {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        self.ends.iter().all(|end| {
            let mut fds = [PollFd::from_borrowed_fd(end.as_fd(), PollFlags::IN)];
            poll(&mut fds, Some(&zero)).is_ok_and(|ready| ready != 0)
        })
    }

    /// Sleeps before the next attempt to lock a disk. `since`: time of the first attempt. Returns
    /// false if the wait is cancelled.
    pub(super) fn wait_for_lock(&self, since: Instant) -> bool {
        std::thread::sleep(POLL[usize::from(since.elapsed() > SLOW_AFTER)]);
        !self.is_cancelled()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::sync::Arc;

    #[test]
    fn a_wait_ends_with_the_last_end_or_when_it_is_cancelled() {
        let pipes = [io::pipe().unwrap(), io::pipe().unwrap()];
        let ends = pipes.iter().map(|(read, _)| OwnedFd::from(read.try_clone().unwrap()));
        let fence = Arc::new(FenceWait::new(ends.collect()));
        let waits = |fence: &Arc<FenceWait>| {
            let fence = Arc::clone(fence);
            let (begins, begun) = std::sync::mpsc::channel();
            let wait = move || fence.wait_for_end(|| begins.send(()).unwrap_or_default());
            (std::thread::spawn(wait), begun)
        };
        let (wait, begun) = waits(&fence);
        let [(_, first), (_, second)] = pipes;
        drop(first);
        begun.recv().unwrap();
        assert!(!wait.is_finished() && !fence.has_ended());
        drop(second);
        assert!(wait.join().unwrap());
        assert!(fence.has_ended());
        assert!(fence.wait_for_lock(Instant::now()));

        let (read, _write) = io::pipe().unwrap();
        let fence = Arc::new(FenceWait::new(vec![read.into()]));
        let (wait, begun) = waits(&fence);
        begun.recv().unwrap();
        fence.cancel();
        assert!(!wait.join().unwrap());
        assert!(!fence.wait_for_lock(Instant::now()));
    }
}
