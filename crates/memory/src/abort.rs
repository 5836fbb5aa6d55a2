//! What becomes of a process when a thread that serves others panics.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::time::Duration;

/// How long the end waits until its reason is printed: whoever reads it may stand still.
const PRINTED: Duration = Duration::from_secs(1);

thread_local! {
    /// This thread is in [`contain_panic`].
    static IS_CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// What `f` returns, or the text of the panic that ended it: for a library's code over what may be
/// damaged on purpose, where a panic is an error like another. What `f` has worked on must not be
/// used after it has panicked.
///
/// A panic hook that ends the process asks [`is_panic_contained`] first.
///
/// # Errors
/// The panic's text.
pub fn contain_panic<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    let before = IS_CONTAINED.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(f));
    IS_CONTAINED.set(before);
    outcome.map_err(|payload| {
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
        text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default()
    })
}

/// Whether a panic of this thread ends in [`contain_panic`].
#[must_use]
pub fn is_panic_contained() -> bool {
    IS_CONTAINED.get()
}

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
