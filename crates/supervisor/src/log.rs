//! Log lines of the supervisor.

use shadowbell_process::{logging, signals};
use std::sync::{Once, OnceLock};

/// True if the log goes to the systemd journal, which adds timestamps.
static IS_JOURNAL: OnceLock<bool> = OnceLock::new();
/// Start of the log thread.
static START: Once = Once::new();

/// Writes a line to the log. Another thread writes it, because the reader of stderr may hang, and
/// the server process can fill the pipe to it.
pub(super) fn log_line(line: &str) {
    let is_journal = *IS_JOURNAL.get_or_init(logging::is_journal);
    let time = if is_journal { String::new() } else { format!("{} ", logging::now()) };
    logging::write_line(&format!("{time}{line}\n"));
    START.call_once(|| {
        // An exec of this process would lose a signal that the log thread handles.
        let _blocked = signals::block();
        logging::start_thread();
    });
}
