//! What a keeper says.

use crate::logging;
use std::io::{self, Write};
use std::sync::OnceLock;

/// Whether somebody else keeps the time of each line.
static IS_JOURNAL: OnceLock<bool> = OnceLock::new();

/// A line of the log. Whoever reads it may stand still: that holds up the keeper, and no guest.
pub(super) fn say(line: &str) {
    let is_journal = *IS_JOURNAL.get_or_init(logging::is_journal);
    let time = if is_journal { String::new() } else { format!("{} ", logging::now()) };
    let _ = io::stderr().write_all(format!("{time}{line}\n").as_bytes());
}
