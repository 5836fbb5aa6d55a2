//! Text to paste, printed by a program that serves.

use std::io::Write;

/// Prints `text` on standard output, by a thread of its own: whoever reads that may stand still,
/// and this thread has signals to wait for.
pub(crate) fn print(text: String) {
    // Whoever closed our output does not want it, which is no reason not to serve.
    let print = move || drop(std::io::stdout().lock().write_all(text.as_bytes()));
    // Nor is it one that there is no thread for it.
    let _ = std::thread::Builder::new().name("sb-paste".into()).spawn(print);
}
