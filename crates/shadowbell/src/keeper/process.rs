//! A process that a keeper has started, or that another one has before it.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, pidfd_send_signal, waitpid,
};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};

/// A process.
pub(super) struct Process {
    pid: Pid,
    /// It names the process for whoever is not its parent.
    fd: Option<OwnedFd>,
    /// How it ends is told to this process.
    is_child: bool,
    ended: Option<ExitStatus>,
}

impl From<Child> for Process {
    fn from(child: Child) -> Self {
        let pid = Pid::from_child(&child);
        Self { pid, fd: pidfd_open(pid, PidfdFlags::empty()).ok(), is_child: true, ended: None }
    }
}

impl Process {
    /// A child of this process, which has another program by now.
    pub(super) fn of_before(pid: Pid, fd: Option<OwnedFd>) -> Self {
        Self { pid, fd, is_child: true, ended: None }
    }

    /// A child of another process, which has ended.
    pub(super) fn of_another(pid: Pid, fd: Option<OwnedFd>) -> Self {
        Self { pid, fd, is_child: false, ended: None }
    }

    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    /// What names it.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// What shows its end, if no signal does.
    pub(super) fn shows_end(&self) -> Option<BorrowedFd<'_>> {
        self.fd().filter(|_| !self.is_child && self.ended.is_none())
    }

    /// How it has ended, if it has.
    pub(super) fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.look(WaitOptions::NOHANG);
        }
        self.ended
    }

    fn look(&self, how: WaitOptions) -> Option<ExitStatus> {
        // Nobody is told how the child of another one has ended.
        let killed = || ExitStatus::from_raw(Signal::KILL.as_raw());
        if self.is_child {
            return match rustix::io::retry_on_intr(|| waitpid(Some(self.pid), how)) {
                Ok(ended) => ended.map(|(_, status)| ExitStatus::from_raw(status.as_raw())),
                Err(_) => Some(killed()),
            };
        }
        let Some(fd) = self.fd() else { return Some(killed()) };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let timeout = Some(&now).filter(|_| how.contains(WaitOptions::NOHANG));
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        match poll(&mut fds, timeout) {
            Ok(0) | Err(Errno::INTR) => None,
            _ => Some(killed()),
        }
    }

    /// Sends it a signal, in vain if it has ended.
    pub(super) fn signal(&self, signal: Signal) {
        if self.ended.is_some() {
            return;
        }
        // The number of a child is its own until its end was looked at.
        let _ = match &self.fd {
            Some(fd) => pidfd_send_signal(fd, signal),
            None if self.is_child => kill_process(self.pid, signal),
            None => Ok(()),
        };
    }

    /// Ends it at once, and waits until it has.
    pub(super) fn kill(&mut self) {
        self.signal(Signal::KILL);
        while self.ended.is_none() {
            self.ended = self.look(WaitOptions::empty());
        }
    }
}
