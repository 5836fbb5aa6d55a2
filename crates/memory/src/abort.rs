//! What becomes of a process when a thread that serves others panics.

use std::sync::mpsc;
use std::time::Duration;

/// How long the end waits until its reason is printed: whoever reads it may stand still.
const PRINTED: Duration = Duration::from_secs(1);

/// Ends the process (`SIGABRT`) if the thread that has this panics.
///
/// A thread that serves guests or a device does not come back, and whoever waits for it would wait
/// for ever, with no word of why. A process that ends is seen, and can be started again. So each
/// such thread of these crates has one of these from its start. (A program that sets a panic hook
/// is asked first, as always.)
#[derive(Debug)]
#[must_use = "it guards as long as it lives"]
pub struct AbortOnPanic(());

impl AbortOnPanic {
    /// For the thread that calls this.
    pub const fn new() -> Self {
        Self(())
    }
}

impl Default for AbortOnPanic {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let name = std::thread::current().name().unwrap_or("?").to_owned();
        let (printed, outcome) = mpsc::channel();
        let print = move || {
            eprintln!(
                "thread {name}, which serves others, has panicked: the process ends, so that it can be \
                 started again"
            );
            let _ = printed.send(());
        };
        if std::thread::Builder::new().spawn(print).is_ok() {
            let _ = outcome.recv_timeout(PRINTED);
        }
        std::process::abort();
    }
}
