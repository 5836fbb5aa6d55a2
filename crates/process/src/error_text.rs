//! Error texts of libraries, without terms of Rust.

use std::borrow::Cow;

/// Phrases of the standard library, clap and serde, and their replacements.
const PHRASES: [(&str, &str); 17] = [
    ("invalid digit found in string", "it is no whole number"),
    ("cannot parse integer from empty string", "it is no number"),
    ("number too large to fit in target type", "the number is too large"),
    ("number too small to fit in target type", "the number is too small"),
    ("invalid socket address syntax", "it is no ADDR:PORT, as in 127.0.0.1:9477"),
    ("is not in ", "is not in the range "),
    ("..=", " to "),
    ("expected u16", "expected a whole number up to 65535"),
    ("expected u32", "expected a whole number up to 4294967295"),
    ("expected usize", "expected a whole number from 0 on"),
    ("expected path string", "expected a path in quotes"),
    ("expected a string", "expected a text in quotes"),
    ("expected a sequence", "expected a list, as in [1, 2]"),
    ("invalid type: floating point", "it is a number with a point,"),
    ("invalid type: integer", "it is a number,"),
    ("invalid type: string", "it is a text,"),
    ("invalid value: integer", "it is"),
];

/// Replaces phrases of Rust libraries in `text`.
#[must_use]
pub fn without_rust_terms(text: &str) -> String {
    let mut plain = text.to_owned();
    for (rust, words) in PHRASES {
        if plain.contains(rust) {
            plain = plain.replace(rust, words);
        }
    }
    plain
}

/// Removes the error numbers that Rust appends to error texts of the system: ` (os error 13)`.
#[must_use]
pub fn without_numbers(text: &str) -> Cow<'_, str> {
    const PREFIX: &str = " (os error ";
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(PREFIX) {
        let end = after.find(|c: char| !c.is_ascii_digit() && c != '-').unwrap_or(after.len());
        plain.push_str(before);
        rest = match after[end..].strip_prefix(')').filter(|_| end > 0) {
            Some(rest) => rest,
            None => {
                plain.push_str(PREFIX);
                after
            }
        };
    }
    if plain.is_empty() && rest.len() == text.len() {
        return Cow::Borrowed(text);
    }
    Cow::Owned(plain + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_numbers_are_removed() {
        let error = |number| std::io::Error::from_raw_os_error(number).to_string();
        assert_eq!(without_numbers(&error(13)), "Permission denied");
        let two = format!("a: {}; b: {}.", error(2), error(24));
        let plain = "a: No such file or directory; b: Too many open files.";
        assert_eq!(without_numbers(&two), plain);
        for text in ["", "all is well", "x (os error )", "x (os error 7", "x (os error 7 y)"] {
            assert_eq!(without_numbers(text), text);
        }
    }

    #[test]
    fn rust_terms_are_replaced() {
        for (rust, words) in [
            (
                "invalid value: integer `99999`, expected u16",
                "it is `99999`, expected a whole number up to 65535",
            ),
            (
                "invalid type: string \"x\", expected u16",
                "it is a text, \"x\", expected a whole number up to 65535",
            ),
            ("99 is not in 1..=64", "99 is not in the range 1 to 64"),
            ("`x` is no size", "`x` is no size"),
        ] {
            assert_eq!(without_rust_terms(rust), words);
        }
    }
}
