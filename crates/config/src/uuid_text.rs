//! Text form of UUIDs.

/// Formats a UUID in five groups (RFC 9562, section 4).
#[must_use]
pub fn uuid_text(bytes: &[u8; 16]) -> String {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let groups = [0..8, 8..12, 12..16, 16..20, 20..32];
    groups.map(|group| digits.get(group).unwrap_or_default()).join("-")
}

/// Parses a UUID of 32 hexadecimal digits in groups of 8, 4, 4, 4 and 12 (RFC 9562, section 4). The
/// nil UUID is refused.
pub fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let groups: Vec<_> = text.split('-').collect();
    if groups.iter().map(|group| group.len()).ne([8, 4, 4, 4, 12])
        || !text.bytes().all(|b| b == b'-' || b.is_ascii_hexdigit())
    {
        return None;
    }
    let value = u128::from_str_radix(&groups.concat(), 16).ok()?;
    (value != 0).then(|| value.to_be_bytes())
}

/// Error text for an invalid UUID.
#[must_use]
pub fn invalid_uuid_text(text: &str) -> String {
    format!(
        "`{text}` is no UUID; write one like 0190163d-8694-739b-aea5-966c26f8ad91 (`uuidgen` makes \
         them)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_formatted_in_groups() {
        let bytes = std::array::from_fn(|n| n as u8 * 17);
        assert_eq!(uuid_text(&bytes), "00112233-4455-6677-8899-aabbccddeeff");
    }
}
