//! Shell commands for users to paste: quoting and output.

use std::io::Write;

/// `text` as one shell word, quoted if necessary.
pub fn quote(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/:._-+=@,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Prints commands on standard output from a separate thread, because the reader of the output may
/// block and the calling thread has to wait for signals.
pub fn print_commands(text: String) {
    // Errors are ignored: if standard output is closed, the program serves all the same.
    let print = move || drop(std::io::stdout().lock().write_all(text.as_bytes()));
    // Likewise if no thread can be started.
    let _ = std::thread::Builder::new().name("sb-paste".into()).spawn(print);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_quoted_if_it_has_to_be() {
        assert_eq!(quote("socket=/run/vm0.sock"), "socket=/run/vm0.sock");
        assert_eq!(quote("my disk.img"), "'my disk.img'");
        assert_eq!(quote("it's"), r"'it'\''s'");
        assert_eq!(quote(""), "''");
    }
}
