//! Exit of this process when its supervisor dies while the main loop does not poll the supervisor.

use super::worker_link::WorkerLink;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shadowbell_process::exit;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Interval at which the thread checks whether its [`ParentWatch`] was dropped.
const POLL: Duration = Duration::from_millis(100);

/// Time within which the process may end by itself after the death of its supervisor. The kill
/// after that loses no data: with a supervisor, completed writes survive a kill of this process.
pub(super) const GRACE: Duration = Duration::from_secs(5);

/// Thread that ends the process when the supervisor dies. A drop ends the thread. The main thread
/// cannot do this itself at the start and at the end of the process, because it may wait for a
/// remote disk that does not answer.
pub(super) struct ParentWatch(Arc<AtomicBool>);

impl ParentWatch {
    /// Starts the thread. It ends the process when `grace` has passed after the death of the
    /// supervisor.
    ///
    /// # Errors
    /// The thread cannot be started, or the descriptor limit is reached.
    pub(super) fn start(link: &WorkerLink, grace: Duration) -> anyhow::Result<Self> {
        let link = link.as_fd().try_clone_to_owned()?;
        let is_over = Arc::new(AtomicBool::new(false));
        let shared_flag = Arc::clone(&is_over);
        let watch = move || {
            let timeout = Timespec::try_from(POLL).ok();
            while !shared_flag.load(Ordering::Acquire) {
                // Only the end of the connection is polled; messages are not read.
                let mut fds = [PollFd::from_borrowed_fd(link.as_fd(), PollFlags::empty())];
                let seen = poll(&mut fds, timeout.as_ref());
                let has_ended = fds.iter().any(|fd| fd.revents().contains(PollFlags::HUP));
                if seen.is_ok() && has_ended {
                    std::thread::sleep(grace);
                    if shared_flag.load(Ordering::Acquire) {
                        return;
                    }
                    std::process::exit(i32::from(exit::FAILED));
                }
            }
        };
        std::thread::Builder::new().name("sb-parent-watch".into()).spawn(watch)?;
        Ok(Self(is_over))
    }
}

impl Drop for ParentWatch {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}
