//! What a keeper says.

use std::io::{self, Write};

/// A line of the log. Whoever reads it may stand still: that holds up the keeper, and no guest.
pub(super) fn say(line: &str) {
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}
