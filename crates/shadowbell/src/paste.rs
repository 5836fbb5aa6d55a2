//! Output of commands to paste, by a program that serves.

use std::io::Write;

/// Prints `text` on standard output from a separate thread, because the reader of the output may
/// block and the calling thread has to wait for signals.
pub(crate) fn print(text: String) {
    // Errors are ignored: if standard output is closed, the program serves all the same.
    let print = move || drop(std::io::stdout().lock().write_all(text.as_bytes()));
    // Likewise if no thread can be started.
    let _ = std::thread::Builder::new().name("sb-paste".into()).spawn(print);
}
