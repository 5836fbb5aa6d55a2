//! Handling of termination signals. The first signal ends the program in order, and the second ends
//! it at once.

use crate::exit;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use shadowbell_memory::process::BlockedSignals;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXFSZ};
use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tracing::debug;

/// Starts a thread that handles none of the signals that a main thread catches. If this thread
/// handles none of them either, that stays so.
///
/// # Errors
/// The thread cannot be started.
pub fn start_thread(
    name: &str,
    stack: usize,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let _blocked = block()?;
    let thread = std::thread::Builder::new().name(name.into()).stack_size(stack);
    thread.spawn(run).map(drop)
}

/// Blocks the signals that a main thread catches, in this thread and in those that it starts, until
/// the value is dropped.
///
/// # Errors
/// The error of the system call.
pub fn block() -> io::Result<BlockedSignals> {
    BlockedSignals::new(&[SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGCHLD])
}

/// Makes a write beyond `ulimit -f` fail, as on a full disk, instead of ending the process.
///
/// # Errors
/// The signal cannot be handled.
pub fn survive_file_size_limit() -> io::Result<()> {
    signal_hook::flag::register(SIGXFSZ, Arc::default())?;
    Ok(())
}

/// Returns a flag that SIGINT and SIGTERM set, for loops that check it. A second signal exits the
/// process immediately.
pub fn stop_flag() -> io::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        set_or_exit(signal, &stop)?;
    }
    Ok(stop)
}

/// Registers `flag` for a signal. The signal sets the flag, or exits the process if the flag is
/// already set.
fn set_or_exit(signal: i32, flag: &Arc<AtomicBool>) -> io::Result<()> {
    let status = i32::from(exit::FAILED);
    signal_hook::flag::register_conditional_shutdown(signal, status, Arc::clone(flag))?;
    signal_hook::flag::register(signal, Arc::clone(flag))?;
    Ok(())
}

/// Caught signals, with a descriptor that is readable if a signal has arrived. The descriptor can
/// be polled together with others.
///
/// Implemented by a flag per signal and one pipe. The iterator of `signal-hook` uses a socket,
/// whose system calls the sandbox forbids.
pub struct Caught {
    flags: Vec<(i32, Arc<AtomicBool>)>,
    read: PipeReader,
    close: Close,
}

/// Handle that ends the wait for signals.
#[derive(Clone)]
pub struct Close {
    is_closed: Arc<AtomicBool>,
    write: Arc<PipeWriter>,
}

impl Close {
    /// Wakes the waiting thread and ends its wait.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        // If the pipe is full, the write fails, but then the thread has been woken already.
        let _ = rustix::io::write(&*self.write, b"X");
    }

    fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }
}

impl Caught {
    /// Catches these signals from now on.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn catch(signals: &[i32]) -> io::Result<Self> {
        let (read, write) = io::pipe()?;
        for end in [read.as_fd(), write.as_fd()] {
            rustix::io::ioctl_fionbio(end, true)?;
        }
        let flags = signals.iter().map(|signal| {
            let flag = Arc::new(AtomicBool::new(false));
            // The flag is registered before the pipe, because the pipe wakes the thread that reads
            // the flag.
            signal_hook::flag::register(*signal, Arc::clone(&flag))?;
            signal_hook::low_level::pipe::register(*signal, write.try_clone()?)?;
            Ok((*signal, flag))
        });
        let flags = flags.collect::<io::Result<_>>()?;
        let close = Close { is_closed: Arc::default(), write: Arc::new(write) };
        Ok(Self { flags, read, close })
    }

    /// Returns a signal that has arrived, or `None`. Does not wait.
    #[expect(clippy::should_implement_trait, reason = "`None` does not end the sequence")]
    pub fn next(&mut self) -> Option<i32> {
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

/// Signals that a service handles, by their meaning. Signals that were ignored at start-up are left
/// out.
#[derive(Clone, Debug)]
pub struct Meanings {
    /// Signals that end the service.
    pub ends: Vec<i32>,
    /// Signals that have another meaning than the end of the service.
    pub others: Vec<i32>,
}

impl Meanings {
    /// Creates the meanings: SIGINT, SIGTERM and SIGHUP end the service, unless they are among
    /// `others`.
    pub fn new(others: &[i32]) -> Self {
        let is_taken = |signal: &i32| !is_ignored(*signal);
        let ends = [SIGINT, SIGTERM, SIGHUP].into_iter();
        let ends = ends.filter(|signal| !others.contains(signal)).filter(is_taken).collect();
        Self { ends, others: others.iter().copied().filter(is_taken).collect() }
    }

    /// All signals.
    pub fn all(&self) -> Vec<i32> {
        [&self.ends[..], &self.others[..]].concat()
    }
}

/// Reason of a wake-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// A signal that ends the service, or its [`handle`](EndSignals::handle) was closed.
    End,
    /// Another signal.
    Signal(i32),
    /// The additional descriptor is readable.
    Readable,
    /// The deadline has passed.
    Time,
}

/// Handler of the signals that end a service, and of other signals ([`Meanings`]).
pub struct EndSignals {
    signals: Caught,
    ends: Vec<i32>,
    ending: Arc<AtomicBool>,
}

impl EndSignals {
    /// Catches the signals that end a service, and `others`. Signals that were ignored at start-up
    /// stay ignored.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn catch(others: &[i32]) -> io::Result<Self> {
        let meanings = Meanings::new(others);
        let signals = Caught::catch(&meanings.all())?;
        let ends = meanings.ends;
        let ending = Arc::new(AtomicBool::new(false));
        for signal in &ends {
            set_or_exit(*signal, &ending)?;
        }
        survive_file_size_limit()?;
        Ok(Self { signals, ends, ending })
    }

    /// Returns a handle that also ends the wait.
    pub fn handle(&self) -> Close {
        self.signals.close.clone()
    }

    /// Waits until the service has to end.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn wait(&mut self) -> io::Result<()> {
        while self.wait_or_readable(None, None)? != Wake::End {}
        Ok(())
    }

    /// Waits until the service has to end, one of the `others` of [`catch`](Self::catch) arrives,
    /// the descriptor `extra_fd` is readable, or the deadline has passed.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn wait_or_readable(
        &mut self,
        extra_fd: Option<BorrowedFd<'_>>,
        deadline: Option<Instant>,
    ) -> io::Result<Wake> {
        loop {
            if self.signals.close.is_closed() {
                self.ending.store(true, Ordering::Relaxed);
                return Ok(Wake::End);
            }
            match self.signals.next() {
                Some(signal) if self.ends.contains(&signal) => {
                    // `ending` is not set here: the signal handler sets it. The handler may run on
                    // another thread, and later than this code.
                    debug!(signal, "ending");
                    return Ok(Wake::End);
                }
                Some(signal) => return Ok(Wake::Signal(signal)),
                None => {}
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(Wake::Time);
            }
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let ready = {
                let fds = extra_fd.into_iter().chain([self.signals.as_fd()]);
                let mut fds: Vec<_> =
                    fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
                match poll(&mut fds, left.as_ref()) {
                    Ok(_) => extra_fd.is_some() && !fds[0].revents().is_empty(),
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

/// True if the signal was ignored at start-up, as by `nohup`, or by a shell for background jobs of
/// a script.
#[must_use]
pub fn is_ignored(signal: i32) -> bool {
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

    /// A signal that such a thread handled during the supervisor's exec would be lost.
    #[test]
    fn a_thread_that_starts_another_one_handles_no_signal_afterwards() {
        let (sender, result) = std::sync::mpsc::channel();
        start_thread("outer", 64 << 10, move || {
            start_thread("inner", 64 << 10, || {}).unwrap();
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            sender.send(status).unwrap();
        })
        .unwrap();
        let status = result.recv().unwrap();
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
        let mask = u64::from_str_radix(blocked.trim(), 16).unwrap();
        assert_eq!(mask >> (SIGTERM - 1) & 1, 1, "SIGTERM is blocked in {blocked}");
    }

    /// The handler of a signal may run after the waiting thread has already reacted to the signal
    /// by a shutdown. The handler must not mistake this signal for a second signal, because a
    /// second signal exits the process at once.
    #[test]
    fn one_signal_does_not_count_twice() {
        if std::env::var_os(CHILD).is_some() {
            let mut signals = EndSignals::catch(&[]).unwrap();
            let other = std::thread::spawn(|| raise(SIGTERM));
            signals.wait().unwrap();
            other.join().unwrap().unwrap();
            return;
        }
        for attempt in 0..200 {
            let status = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "signals::tests::one_signal_does_not_count_twice"])
                .env(CHILD, "1")
                .stdout(Stdio::null())
                .status()
                .unwrap();
            assert!(status.success(), "attempt {attempt}: {status}");
        }
    }
}
