//! The signals that end the program: the first in order, the second at once.

use crate::exit;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tracing::debug;

/// A flag that SIGINT and SIGTERM set, for a run that looks at it now and then. The second of them
/// ends the program at once.
pub(crate) fn stop_flag() -> io::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        set_or_exit(signal, &stop)?;
    }
    Ok(stop)
}

/// Registers `flag`: the signal sets it; if it is set already, the signal ends the program.
fn set_or_exit(signal: i32, flag: &Arc<AtomicBool>) -> io::Result<()> {
    let status = i32::from(exit::FAILED);
    signal_hook::flag::register_conditional_shutdown(signal, status, Arc::clone(flag))?;
    signal_hook::flag::register(signal, Arc::clone(flag))?;
    Ok(())
}

/// Signals that are caught, to be waited for beside other things: readable when there are some.
///
/// By a flag for each and one pipe, and not by the crate's iterator, which has a socket: a process
/// in a sandbox has no system call for it.
pub(crate) struct Caught {
    flags: Vec<(i32, Arc<AtomicBool>)>,
    read: PipeReader,
    close: Close,
}

/// Says that no more signals are waited for.
#[derive(Clone)]
pub(crate) struct Close {
    is_closed: Arc<AtomicBool>,
    write: Arc<PipeWriter>,
}

impl Close {
    /// Whoever waits wakes up, and no more waits.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        // A pipe that is full wakes, too.
        let _ = rustix::io::write(&*self.write, b"X");
    }

    fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }
}

impl Caught {
    /// From now on these signals are caught.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn catch(signals: &[i32]) -> io::Result<Self> {
        let (read, write) = io::pipe()?;
        for end in [read.as_fd(), write.as_fd()] {
            rustix::io::ioctl_fionbio(end, true)?;
        }
        let flags = signals.iter().map(|signal| {
            let flag = Arc::new(AtomicBool::new(false));
            // In this order: whoever the pipe wakes finds the flag.
            signal_hook::flag::register(*signal, Arc::clone(&flag))?;
            signal_hook::low_level::pipe::register(*signal, write.try_clone()?)?;
            Ok((*signal, flag))
        });
        let flags = flags.collect::<io::Result<_>>()?;
        let close = Close { is_closed: Arc::default(), write: Arc::new(write) };
        Ok(Self { flags, read, close })
    }

    /// One that has come. Does not wait.
    pub(crate) fn next(&mut self) -> Option<i32> {
        while matches!(rustix::io::read(&self.read, &mut [0; 64]), Ok(1..) | Err(Errno::INTR)) {}
        let mut flags = self.flags.iter();
        flags.find(|(_, flag)| flag.swap(false, Ordering::AcqRel)).map(|(signal, _)| *signal)
    }
}

impl AsFd for Caught {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.read.as_fd()
    }
}

/// What a service does for signals, but those that whoever started us has set to be ignored.
#[derive(Clone, Debug)]
pub(crate) struct Meanings {
    /// They end it.
    pub(crate) ends: Vec<i32>,
    /// They are something else to it.
    pub(crate) others: Vec<i32>,
}

impl Meanings {
    /// SIGINT, SIGTERM and SIGHUP end it, unless they are among `others`.
    pub(crate) fn new(others: &[i32]) -> Self {
        let is_taken = |signal: &i32| !is_ignored(*signal);
        let ends = [SIGINT, SIGTERM, SIGHUP].into_iter();
        let ends = ends.filter(|signal| !others.contains(signal)).filter(is_taken).collect();
        Self { ends, others: others.iter().copied().filter(is_taken).collect() }
    }

    /// All of them.
    pub(crate) fn all(&self) -> Vec<i32> {
        [&self.ends[..], &self.others[..]].concat()
    }
}

/// What a service waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// A signal that ends it, or its [`handle`](EndSignals::handle) was closed.
    End,
    /// Another signal.
    Signal(i32),
    /// The descriptor that was given is readable.
    Readable,
    /// The time has come.
    Time,
}

/// Waits for a signal that ends a service, and for others on the way ([`Meanings`]).
pub(crate) struct EndSignals {
    signals: Caught,
    ends: Vec<i32>,
    ending: Arc<AtomicBool>,
}

impl EndSignals {
    /// From now on the signals that end a service are caught, and so are those of `others`. A
    /// signal that whoever started us has set to be ignored stays ignored.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn catch(others: &[i32]) -> io::Result<Self> {
        let meanings = Meanings::new(others);
        let signals = Caught::catch(&meanings.all())?;
        let ends = meanings.ends;
        let ending = Arc::new(AtomicBool::new(false));
        for signal in &ends {
            set_or_exit(*signal, &ending)?;
        }
        // A limit on the size of files (`ulimit -f`) is a full disk to the guest, no reason to end.
        signal_hook::flag::register(SIGXFSZ, Arc::default())?;
        Ok(Self { signals, ends, ending })
    }

    /// Closing it ends the wait, too.
    pub(crate) fn handle(&self) -> Close {
        self.signals.close.clone()
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn wait(&mut self) -> io::Result<()> {
        while self.wait_beside(None, None)? != Wake::End {}
        Ok(())
    }

    /// Waits for the end, for one of `others`, the argument of [`catch`](Self::catch), for
    /// `beside`, and for a time.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn wait_beside(
        &mut self,
        beside: Option<BorrowedFd<'_>>,
        until: Option<Instant>,
    ) -> io::Result<Wake> {
        loop {
            if self.signals.close.is_closed() {
                self.ending.store(true, Ordering::Relaxed);
                return Ok(Wake::End);
            }
            match self.signals.next() {
                Some(signal) if self.ends.contains(&signal) => {
                    // Its handler has set `ending`, or will: it may still run, on another thread.
                    debug!(signal, "ending");
                    return Ok(Wake::End);
                }
                Some(signal) => return Ok(Wake::Signal(signal)),
                None => {}
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(Wake::Time);
            }
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let ready = {
                let fds = beside.into_iter().chain([self.signals.as_fd()]);
                let mut fds: Vec<_> =
                    fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
                match poll(&mut fds, left.as_ref()) {
                    Ok(_) => beside.is_some() && !fds[0].revents().is_empty(),
                    Err(Errno::INTR) => false,
                    Err(errno) => return Err(errno.into()),
                }
            };
            if ready {
                return Ok(Wake::Readable);
            }
        }
    }
}

/// Whether whoever started us has set this signal to be ignored (`nohup`, a job in the background
/// of a script).
fn is_ignored(signal: i32) -> bool {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return false };
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use signal_hook::low_level::raise;
    use std::process::{Command, Stdio};

    const CHILD: &str = "SIGNALS_TEST_CHILD";

    /// The thread that takes the signal is not the one that waits for it, which goes on while the
    /// signal's handler still runs. That handler took the end for one that was asked for already,
    /// and ended the process without a word.
    #[test]
    fn one_signal_is_not_taken_for_two() {
        if std::env::var_os(CHILD).is_some() {
            let mut signals = EndSignals::catch(&[]).unwrap();
            let other = std::thread::spawn(|| raise(SIGTERM));
            signals.wait().unwrap();
            other.join().unwrap().unwrap();
            return;
        }
        for attempt in 0..200 {
            let status = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "signals::tests::one_signal_is_not_taken_for_two"])
                .env(CHILD, "1")
                .stdout(Stdio::null())
                .status()
                .unwrap();
            assert!(status.success(), "attempt {attempt}: {status}");
        }
    }
}
