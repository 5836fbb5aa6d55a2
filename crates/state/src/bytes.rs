//! Byte strings in a state.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
use std::borrow::Cow;

/// Byte string that is serialized as base64. A list of numbers would be several times larger.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bytes(pub Vec<u8>);

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD_NO_PAD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        STANDARD_NO_PAD.decode(text.as_bytes()).map(Self).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_deserialized_as_serialized() {
        for len in 0..70_u8 {
            let bytes = Bytes((0..len).map(|n| n.wrapping_mul(37)).collect());
            let text = serde_json::to_string(&bytes).unwrap();
            assert_eq!(serde_json::from_str::<Bytes>(&text).unwrap(), bytes);
            let value = serde_json::to_value(&bytes).unwrap();
            assert_eq!(serde_json::from_value::<Bytes>(value).unwrap(), bytes);
        }
        assert!(serde_json::from_str::<Bytes>("\"?\"").is_err());
    }
}
