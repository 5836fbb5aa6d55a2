//! Log lines of the supervisor.

use shadowbell_process::logging;
use std::io::{self, Write};
use std::sync::OnceLock;

/// True if the log goes to the systemd fd_store, which adds timestamps.
static IS_JOURNAL: OnceLock<bool> = OnceLock::new();

/// Writes a line to the log. A reader of stderr that hangs blocks the supervisor, and no guest.
pub(super) fn log_line(line: &str) {
    let is_journal = *IS_JOURNAL.get_or_init(logging::is_journal);
    let time = if is_journal { String::new() } else { format!("{} ", logging::now()) };
    let _ = io::stderr().write_all(format!("{time}{line}\n").as_bytes());
}
