//! Process abort and panic containment for threads on which other threads depend.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::time::Duration;

/// Maximum time that the abort waits for the output of its message, because the reader of stderr
/// may be stopped.
const PRINTED: Duration = Duration::from_secs(1);

thread_local! {
    /// True while this thread runs a closure of [`contain_panic`].
    static IS_CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` and turns a panic into an error.
///
/// For library code that parses untrusted data: a panic in this code is an ordinary error. The
/// values that `f` has modified must not be used after a panic.
///
/// A panic hook that ends the process has to check [`is_panic_contained`] first.
///
/// # Errors
/// The panic's message.
pub fn contain_panic<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    let before = IS_CONTAINED.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(f));
    IS_CONTAINED.set(before);
    outcome.map_err(|payload| {
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
        text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default()
    })
}

/// True if a panic of the calling thread ends in [`contain_panic`].
#[must_use]
pub fn is_panic_contained() -> bool {
    IS_CONTAINED.get()
}

/// Guard that aborts the process (`SIGABRT`) if the thread that owns it panics.
///
/// A thread that serves guests or a device does not return after a panic: its clients would wait
/// forever, without an error message. The end of a process is noticed, and the process can be
/// restarted. Therefore each serving thread of these crates creates this guard when it starts. A
/// panic hook of the program runs before the abort.
#[derive(Debug)]
#[must_use = "the guard works until it is dropped"]
pub struct AbortOnPanic(());

impl AbortOnPanic {
    /// Creates the guard of the calling thread.
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
                "thread {name} has panicked: the process aborts, so that it can be restarted"
            );
            let _ = printed.send(());
        };
        if std::thread::Builder::new().spawn(print).is_ok() {
            let _ = outcome.recv_timeout(PRINTED);
        }
        std::process::abort();
    }
}
