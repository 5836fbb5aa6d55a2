//! Shell commands that users can paste: quoting and output.

use std::io::Write;

/// Returns `text` as one word for a shell, quoted if necessary.
pub fn quote(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/:._-+=@,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Prints commands on standard output. A separate thread prints them: the reader of the output may
/// block, and the calling thread has to wait for signals.
pub fn print_commands(text: String) {
    // Errors are ignored. If standard output is closed, the program works without this output.
    let print = move || drop(std::io::stdout().lock().write_all(text.as_bytes()));
    // If no thread can be started, the program works without this output too.
    let _ = std::thread::Builder::new().name("sb-paste".into()).spawn(print);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_if_necessary() {
        assert_eq!(quote("socket=/run/vm0.sock"), "socket=/run/vm0.sock");
        assert_eq!(quote("my disk.img"), "'my disk.img'");
        assert_eq!(quote("it's"), r"'it'\''s'");
        assert_eq!(quote(""), "''");
    }
}
