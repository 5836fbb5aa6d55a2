//! Fields that another release has added to a state.

use crate::error::StateError;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use std::io::{self, Read};

/// First character of the name of a field that a reader may skip if it does not know the field.
const SKIPPABLE: char = '?';

/// Reads a value with the fields that this program knows.
///
/// A release adds a field under a name that begins with `?` (`#[serde(rename = "?name", default)]`)
/// if the state has its full meaning without the field: the previous release skips it then. Any
/// other unknown field changes what the state means, so it is an error. Types with flattened fields
/// or untagged variants hide unknown fields, so no saved type has them.
///
/// # Errors
///
/// [`StateError::Section`] if the bytes do not have the form of a `T`, and
/// [`StateError::UnknownField`] for an unknown field that must not be skipped. `name` is the name
/// of the section in the error.
pub fn read_fields<'de, T, D>(name: &str, json: D) -> Result<T, StateError>
where
    T: Deserialize<'de>,
    D: Deserializer<'de, Error = serde_json::Error>,
{
    let mut unknown = None;
    let value = serde_ignored::deserialize(json, |path| {
        let path = path.to_string();
        let field = path.rsplit('.').next().unwrap_or(&path);
        if !field.starts_with(SKIPPABLE) {
            unknown.get_or_insert(path);
        }
    });
    let value = value.map_err(|source| StateError::Section { name: name.to_owned(), source })?;
    match unknown {
        None => Ok(value),
        Some(field) => Err(StateError::UnknownField { name: name.to_owned(), field }),
    }
}

/// Reads a value from the bytes of a JSON text, as [`read_fields`] does.
///
/// # Errors
/// Those of [`read_fields`], and bytes after the value.
pub fn read_json<T: DeserializeOwned>(name: &str, json: &[u8]) -> Result<T, StateError> {
    let mut json = serde_json::Deserializer::from_slice(json);
    let value = read_fields(name, &mut json)?;
    json.end().map_err(|source| StateError::Section { name: name.to_owned(), source })?;
    Ok(value)
}

/// Number of bytes of a state that [`Pieces`] supplies at once.
const PIECE: usize = 64 << 10;

/// Reader that supplies a state to a parser, and calls `pause` after each 64 KiB. The callback can
/// let other work run while a long state is parsed.
pub(crate) struct Pieces<'a> {
    bytes: &'a [u8],
    /// Number of bytes until the next call of `pause`.
    left: usize,
    pause: &'a mut dyn FnMut(),
}

impl<'a> Pieces<'a> {
    pub(crate) fn of(bytes: &'a [u8], pause: &'a mut dyn FnMut()) -> Self {
        Self { bytes, left: PIECE, pause }
    }
}

impl Read for Pieces<'_> {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 && !self.bytes.is_empty() {
            (self.pause)();
            self.left = PIECE;
        }
        let most = room.len().min(self.left);
        let len = self.bytes.read(&mut room[..most])?;
        self.left -= len;
        Ok(len)
    }
}

/// Reads a value as [`read_json`] does, in pieces of at most 64 KiB. `pause` is called between two
/// of them.
///
/// # Errors
/// Those of [`read_json`].
pub(crate) fn read_json_in_pieces<T: DeserializeOwned>(
    name: &str,
    json: &[u8],
    pause: &mut dyn FnMut(),
) -> Result<T, StateError> {
    let mut json = serde_json::Deserializer::from_reader(Pieces::of(json, pause));
    let value = read_fields(name, &mut json)?;
    json.end().map_err(|source| StateError::Section { name: name.to_owned(), source })?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Serialize;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Queue {
        head: u32,
    }

    /// State of a release.
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Saved {
        queues: Vec<Queue>,
    }

    /// State of a later release. That release adds a field that may be skipped, and removes a field
    /// that had a default.
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Later {
        queues: Vec<Queue>,
        #[serde(rename = "?hint", default)]
        hint: Option<u32>,
    }

    fn read<T: DeserializeOwned>(json: &str) -> Result<T, String> {
        read_json("controller", json.as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_skippable_field_is_skipped_by_an_older_program_and_missing_for_a_newer_one() {
        let later = Later { queues: vec![Queue { head: 3 }], hint: Some(7) };
        let json = serde_json::to_string(&later).unwrap();
        assert_eq!(read::<Later>(&json).unwrap(), later);
        let saved = read::<Saved>(&json).unwrap();
        assert_eq!(saved, Saved { queues: vec![Queue { head: 3 }] });
        let json = serde_json::to_string(&saved).unwrap();
        assert_eq!(read::<Later>(&json).unwrap(), Later { hint: None, ..later });
    }

    #[test]
    fn another_unknown_field_is_refused_wherever_it_is() {
        for json in [r#"{"queues":[],"size":1}"#, r#"{"queues":[{"head":1,"size":1}]}"#] {
            let error = read::<Saved>(json).unwrap_err();
            assert!(error.contains("field") && error.contains("size"), "{error}");
            assert!(error.contains("newer"), "{error}");
        }
        let error = read::<Saved>("{\"queues\":[]} x").unwrap_err();
        assert!(error.contains("section controller"), "{error}");
    }
}
