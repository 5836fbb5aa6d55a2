//! Quoting of shell words in commands that users paste.

/// `text` as one shell word, quoted if necessary.
pub(crate) fn word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/:._-+=@,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_quoted_if_it_has_to_be() {
        assert_eq!(word("socket=/run/vm0.sock"), "socket=/run/vm0.sock");
        assert_eq!(word("my disk.img"), "'my disk.img'");
        assert_eq!(word("it's"), r"'it'\''s'");
        assert_eq!(word(""), "''");
    }
}
