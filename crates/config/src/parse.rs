//! Parsers of sizes and times in options.

use std::ops::RangeInclusive;
use std::time::Duration;

/// Parses a size in bytes above zero. Units are binary as in fio: `1k` is 1024 bytes.
pub fn size(text: &str) -> Result<u64, String> {
    shadowbell_disk::parse_size(text)
}

/// Parses a number of bytes that may be zero, such as an offset.
pub fn offset(text: &str) -> Result<u64, String> {
    if text.bytes().all(|b| b == b'0') && !text.is_empty() { Ok(0) } else { size(text) }
}

/// Parses a time in seconds, or with a unit.
pub fn time(text: &str) -> Result<Duration, String> {
    let bad = || format!("`{text}` is no time; write for example `10`, `500ms` or `2m`");
    let unit = text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    let value = text.strip_suffix(unit).unwrap_or(text);
    let factor = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(bad()),
    };
    let seconds = value.parse::<f64>().map_err(|_| bad())? * factor;
    Duration::try_from_secs_f64(seconds).map_err(|_| bad())
}

/// Parser of a time in whole seconds within a range, without a unit or with one: `30`, `30s`, `2m`.
pub fn seconds(range: RangeInclusive<u64>) -> impl Fn(&str) -> Result<u64, String> + Clone {
    move |text| {
        let time = time(text)?;
        let whole = Some(time.as_secs()).filter(|_| time.subsec_nanos() == 0);
        whole
            .filter(|seconds| range.contains(seconds))
            .ok_or_else(|| format!("it is {} to {} whole seconds", range.start(), range.end()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        for (text, millis) in [("10", 10_000), ("1.5", 1500), ("20ms", 20), ("2m", 120_000)] {
            assert_eq!(time(text).unwrap().as_millis(), millis, "{text}");
        }
        for text in ["", "s", "1e3", "1..2", "ms"] {
            assert!(time(text).is_err(), "{text}");
        }
    }

    #[test]
    fn seconds_are_whole_and_in_their_range() {
        let parse = seconds(1..=3600);
        for (text, value) in [("30", 30), ("30s", 30), ("2m", 120), ("1000ms", 1), ("1h", 3600)] {
            assert_eq!(parse(text), Ok(value), "{text}");
        }
        for text in ["0", "1500ms", "2h", "soon"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_offset_may_be_zero_and_a_size_may_not() {
        assert_eq!((offset("0"), offset("4k")), (Ok(0), Ok(4096)));
        assert!(size("0").is_err() && offset("").is_err());
    }
}
