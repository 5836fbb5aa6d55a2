//! Log lines of the supervisor.

use shadowbell_process::logging;
use std::io::{self, Write};
use std::sync::OnceLock;

/// True if the log goes to the systemd journal, which adds timestamps.
static IS_JOURNAL: OnceLock<bool> = OnceLock::new();

/// Writes a line to the log. If the reader of stderr hangs, only the supervisor blocks. Guests' I/O
/// continues in the server process.
pub(super) fn log_line(line: &str) {
    let is_journal = *IS_JOURNAL.get_or_init(logging::is_journal);
    let time = if is_journal { String::new() } else { format!("{} ", logging::now()) };
    let _ = io::stderr().write_all(format!("{time}{line}\n").as_bytes());
}
