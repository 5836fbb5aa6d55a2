//! UUIDs as people write them.

/// A UUID in its five groups (RFC 9562, 4).
#[must_use]
pub(crate) fn uuid_text(bytes: &[u8; 16]) -> String {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let groups = [0..8, 8..12, 12..16, 16..20, 20..32];
    groups.map(|group| digits.get(group).unwrap_or_default()).join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_in_groups() {
        let bytes = std::array::from_fn(|n| n as u8 * 17);
        assert_eq!(uuid_text(&bytes), "00112233-4455-6677-8899-aabbccddeeff");
    }
}
