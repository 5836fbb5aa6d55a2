//! Text fields of Identify structures. They have a fixed size and padding, and are untrusted if
//! they were received.

use core::fmt::{self, Write};

/// Encodes `text` as a field of `N` bytes: left justified and padded with spaces, like serial
/// number, model number and firmware revision. Excess characters are cut off. Characters outside
/// 20h to 7Eh are invalid, and become `?`. Base 2.1, "ASCII strings".
pub fn ascii_field<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [b' '; N];
    for (byte, c) in field.iter_mut().zip(text.chars()) {
        *byte = if matches!(c, ' '..='~') { c as u8 } else { b'?' };
    }
    field
}

/// Encodes `nqn` as the SUBNQN field, padded with zeroes; `None` if it has more than 223 bytes (the
/// maximum of a qualified name), or contains a NUL. Base 2.1, 4.7 "NVMe Qualified Names".
pub fn nqn_field(nqn: &str) -> Option<[u8; 256]> {
    if nqn.len() > 223 || nqn.contains('\0') {
        return None;
    }
    let mut field = [0; 256];
    field.get_mut(..nqn.len())?.copy_from_slice(nqn.as_bytes());
    Some(field)
}

/// Text field for display: the text up to the first NUL, without trailing spaces. Non-printable
/// bytes are shown as `?`.
#[derive(Clone, Copy)]
pub struct Text<'a>(&'a [u8]);

impl<'a> Text<'a> {
    /// Wraps the bytes of a field.
    pub fn new(field: &'a [u8]) -> Self {
        let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
        Self(field.get(..end).unwrap_or(field).trim_ascii_end())
    }

    /// True if the field is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|&byte| {
            f.write_char(if matches!(byte, b' '..=b'~') { byte as char } else { '?' })
        })
    }
}

impl fmt::Debug for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn padding_and_cutting() {
        assert_eq!(&ascii_field::<8>("SN 1"), b"SN 1    ");
        assert_eq!(&ascii_field::<4>("longer"), b"long");
        assert_eq!(&ascii_field::<6>("a\tb\u{e9}c"), b"a?b?c ");
        assert_eq!(Text::new(b"SN 1    ").to_string(), "SN 1");
        assert_eq!(Text::new(b"nqn.x\0garbage").to_string(), "nqn.x");
        assert_eq!(Text::new(b"\x1b[2J\xff  ").to_string(), "?[2J?");
        assert!(Text::new(&[b' '; 20]).is_empty());
        assert!(Text::new(&[]).is_empty());
    }

    #[test]
    fn qualified_names() {
        let field = nqn_field("nqn.2014-08.org.example:x").unwrap();
        assert_eq!(field[25..], [0; 231]);
        assert_eq!(Text::new(&field).to_string(), "nqn.2014-08.org.example:x");
        assert!(nqn_field(&"n".repeat(223)).is_some());
        assert!(nqn_field(&"n".repeat(224)).is_none());
        assert!(nqn_field("n\0n").is_none());
    }

    proptest! {
        #[test]
        fn any_bytes_print_as_ascii(bytes: Vec<u8>) {
            let text = Text::new(&bytes).to_string();
            prop_assert!(text.bytes().all(|byte| matches!(byte, b' '..=b'~')));
        }

        #[test]
        fn any_text_becomes_an_ascii_field(text: String) {
            let field = ascii_field::<40>(&text);
            prop_assert!(field.iter().all(|byte| matches!(byte, b' '..=b'~')));
        }
    }
}
