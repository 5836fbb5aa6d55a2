//! The signals that end the program: the first in order, the second at once.

use crate::exit;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::{Handle, Signals};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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

/// Waits for a signal that ends a service (SIGINT, SIGTERM, SIGHUP), and for others on the way.
pub(crate) struct EndSignals {
    signals: Signals,
    ending: Arc<AtomicBool>,
}

impl EndSignals {
    /// From now on these signals are caught, and so are those of `others`. A signal that whoever
    /// started us has set to be ignored stays ignored.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn catch(others: &[i32]) -> io::Result<Self> {
        let ends: Vec<_> =
            [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|s| !is_ignored(*s)).collect();
        let signals = Signals::new(ends.iter().chain(others))?;
        let ending = Arc::new(AtomicBool::new(false));
        for signal in ends {
            set_or_exit(signal, &ending)?;
        }
        // A limit on the size of files (`ulimit -f`) is a full disk to the guest, no reason to end.
        signal_hook::flag::register(SIGXFSZ, Arc::default())?;
        Ok(Self { signals, ending })
    }

    /// Closing it ends the wait, too.
    pub(crate) fn handle(&self) -> Handle {
        self.signals.handle()
    }

    /// Waits for the end. Calls `other` for each signal of `others`, the argument of
    /// [`catch`](Self::catch).
    pub(crate) fn wait(&mut self, others: &[i32], mut other: impl FnMut(i32)) {
        for signal in self.signals.forever() {
            if others.contains(&signal) {
                other(signal);
            } else {
                // Its handler has set `ending`, or will: it may still run, on another thread.
                debug!(signal, "ending");
                return;
            }
        }
        self.ending.store(true, Ordering::Relaxed);
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
            signals.wait(&[], |_| {});
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
