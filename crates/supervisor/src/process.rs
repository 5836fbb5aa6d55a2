//! Server process handle: a child of this process, or of an earlier supervisor.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, pidfd_send_signal, waitpid,
};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};

/// A process, by its id and a pidfd.
pub(super) struct Process {
    pid: Pid,
    /// Pidfd, which identifies the process also for a supervisor that is not its parent.
    fd: Option<OwnedFd>,
    /// True if the process is a child of this process, so that its exit status can be read.
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
    /// Restores a child that this process started before exec (`is_child`), or a child of a
    /// supervisor that has died.
    pub(super) fn from_saved(pid: Pid, fd: Option<OwnedFd>, is_child: bool) -> Self {
        Self { pid, fd, is_child, ended: None }
    }

    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    /// The pidfd, if there is one.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// Descriptor to poll for the exit. `None` for a child, whose exit is reported by SIGCHLD.
    pub(super) fn shows_end(&self) -> Option<BorrowedFd<'_>> {
        self.fd().filter(|_| !self.is_child && self.ended.is_none())
    }

    /// True if the exit of the process was noticed.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Returns the exit status if the process has ended.
    pub(super) fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.poll_exit();
        }
        self.ended
    }

    fn poll_exit(&self) -> Option<ExitStatus> {
        // The exit status of another process's child is unknown, so the process counts as killed.
        let killed = || ExitStatus::from_raw(Signal::KILL.as_raw());
        if self.is_child {
            let wait = || waitpid(Some(self.pid), WaitOptions::NOHANG);
            return match rustix::io::retry_on_intr(wait) {
                Ok(ended) => ended.map(|(_, status)| ExitStatus::from_raw(status.as_raw())),
                Err(_) => Some(killed()),
            };
        }
        let Some(fd) = self.fd() else { return Some(killed()) };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        match poll(&mut fds, Some(&now)) {
            Ok(0) | Err(Errno::INTR) => None,
            _ => Some(killed()),
        }
    }

    /// Sends a signal. Does nothing if the exit status was read.
    pub(super) fn signal(&self, signal: Signal) {
        if self.ended.is_some() {
            return;
        }
        // A child's pid is not reused before `waitpid`, so `kill` is safe without a pidfd.
        let _ = match &self.fd {
            Some(fd) => pidfd_send_signal(fd, signal),
            None if self.is_child => kill_process(self.pid, signal),
            None => Ok(()),
        };
    }
}
