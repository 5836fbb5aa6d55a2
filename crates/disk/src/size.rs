//! Parsing and formatting of sizes such as `10GiB`.

use bytesize::ByteSize;

/// Parses a size with a unit: `512MiB`, `1.5TiB`, `1G` (binary), `1GB` (decimal), `4096`.
///
/// # Errors
/// A sentence for the operator, if the text is not a size, or the size is zero or more than 8 EiB
/// less one byte.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let invalid = || format!("`{text}` is no size; write for example `512MiB`, `10GiB` or `1TiB`");
    let unit = text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.').trim();
    let binary = matches!(unit, "k" | "K" | "m" | "M" | "g" | "G" | "t" | "T" | "p" | "P");
    let parsed =
        if binary { format!("{text}iB").parse::<ByteSize>() } else { text.parse::<ByteSize>() };
    let bytes = parsed.map_err(|_| invalid())?.as_u64();
    if bytes == 0 {
        return Err("its size is zero".to_owned());
    }
    if i64::try_from(bytes).is_err() {
        return Err(format!("the size `{text}` exceeds the maximum of a disk"));
    }
    Ok(bytes)
}

/// Formats a size exactly, with the largest binary unit that divides it: `1TiB`, `1536MiB`,
/// `1000B`.
pub fn format_size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let (mut value, mut unit) = (bytes, 0);
    while value != 0 && value.is_multiple_of(1024) && unit + 1 < units.len() {
        value /= 1024;
        unit += 1;
    }
    format!("{value}{}", units.get(unit).copied().unwrap_or("B"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_with_units() {
        for (text, bytes) in [
            ("4096", 4096),
            ("1K", 1024),
            ("1k", 1024),
            ("10G", 10 << 30),
            ("10GiB", 10 << 30),
            ("10 GiB", 10 << 30),
            ("1GB", 1_000_000_000),
            ("0.5TiB", 1 << 39),
            ("2P", 2 << 50),
            ("9007199254740993B", 9_007_199_254_740_993),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for bytes in [1, 512, 1 << 20, 3 << 29, 1000, 1 << 60, 7 << 60, u64::MAX] {
            let text = format_size(bytes);
            assert_eq!(text.parse::<ByteSize>().unwrap().as_u64(), bytes, "{text}");
        }
        assert_eq!(format_size(1 << 40), "1TiB");
    }
}
