//! What is allowed, and how it is written.

use crate::size::{format_size, parse_size};
use serde::{Deserialize, Serialize};
use std::fmt;

/// So much a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rate {
    /// Requests or bytes a second, 1 at least.
    pub per_second: u64,
    /// How much of it may come at once after a while with less: as much as 10 ms have, if nothing
    /// is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<u64>,
}

/// What a disk takes. Reads are reads, compares and verifies; writes are all that changes the disk,
/// and have bytes if they bring data. What orders writes (a flush) is not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
#[non_exhaustive]
pub struct Limits {
    /// Requests, of any kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<Rate>,
    /// Reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_iops: Option<Rate>,
    /// Writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_iops: Option<Rate>,
    /// Bytes, either way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Rate>,
    /// Bytes that are read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bandwidth: Option<Rate>,
    /// Bytes that are written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_bandwidth: Option<Rate>,
}

impl Limits {
    /// The names of the limits, in the order of the fields.
    pub const NAMES: [&'static str; 6] =
        ["iops", "read-iops", "write-iops", "bandwidth", "read-bandwidth", "write-bandwidth"];

    /// The limits in the order of their names.
    #[must_use]
    pub fn rates(&self) -> [Option<Rate>; 6] {
        [
            self.iops,
            self.read_iops,
            self.write_iops,
            self.bandwidth,
            self.read_bandwidth,
            self.write_bandwidth,
        ]
    }

    /// Whether nothing is limited.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Sets the limit of this name by what a person writes: a number of requests or a size, and
    /// after a colon how much may come at once (`1000`, `1000:5000`, `100MiB:1GiB`); `none` for no
    /// limit. False if there is no limit of that name.
    ///
    /// # Errors
    /// What is wrong with the text, in a sentence.
    pub fn set(&mut self, name: &str, text: &str) -> Result<bool, String> {
        let field = match name {
            "iops" => &mut self.iops,
            "read-iops" => &mut self.read_iops,
            "write-iops" => &mut self.write_iops,
            "bandwidth" => &mut self.bandwidth,
            "read-bandwidth" => &mut self.read_bandwidth,
            "write-bandwidth" => &mut self.write_bandwidth,
            _ => return Ok(false),
        };
        if text == "none" {
            *field = None;
            return Ok(true);
        }
        let is_bytes = name.ends_with("bandwidth");
        let number = |text: &str| match is_bytes {
            true => parse_size(text).map_err(|why| format!("the limit `{name}`: {why}")),
            false => match text.parse() {
                Ok(number @ 1..) => Ok(number),
                _ => Err(format!(
                    "the limit `{name}` is a number of requests a second, as in `1000`, and after \
                     a colon how many may come at once, not `{text}`"
                )),
            },
        };
        let (rate, burst) = text.split_once(':').map_or((text, None), |(r, b)| (r, Some(b)));
        let (per_second, burst) = (number(rate)?, burst.map(number).transpose()?);
        *field = Some(Rate { per_second, burst });
        Ok(true)
    }

    /// The limits by their names, as [`set`](Self::set) takes them.
    pub fn texts(&self) -> impl Iterator<Item = (&'static str, String)> {
        Self::NAMES.into_iter().zip(self.rates()).filter_map(|(name, rate)| {
            let Rate { per_second, burst } = rate?;
            let is_bytes = name.ends_with("bandwidth");
            let number = |n: u64| if is_bytes { format_size(n) } else { n.to_string() };
            let burst = burst.map(|burst| format!(":{}", number(burst))).unwrap_or_default();
            Some((name, format!("{}{burst}", number(per_second))))
        })
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<_> = self.texts().map(|(name, text)| format!("{name}={text}")).collect();
        f.write_str(&if all.is_empty() { "none".to_owned() } else { all.join(", ") })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_written_and_read() {
        let mut limits = Limits::default();
        assert!(limits.is_none() && limits.to_string() == "none");
        for (name, text) in
            [("iops", "1000:5000"), ("write-bandwidth", "100MiB"), ("read-iops", "7")]
        {
            assert_eq!(limits.set(name, text), Ok(true));
        }
        assert_eq!(limits.iops, Some(Rate { per_second: 1000, burst: Some(5000) }));
        assert_eq!(limits.write_bandwidth, Some(Rate { per_second: 100 << 20, burst: None }));
        let mut again = Limits::default();
        limits.texts().for_each(|(name, text)| assert_eq!(again.set(name, &text), Ok(true)));
        assert_eq!(again, limits);
        assert_eq!(limits.to_string(), "iops=1000:5000, read-iops=7, write-bandwidth=100MiB");
        assert_eq!(limits.set("iops", "none"), Ok(true));
        assert_eq!((limits.iops, limits.set("speed", "1")), (None, Ok(false)));
        for text in ["", "0", "-1", "many", "1:", "1:0", ":1", "1:2:3", "1MiB"] {
            assert!(limits.set("iops", text).unwrap_err().contains("`iops`"), "{text}");
        }
        assert!(limits.set("bandwidth", "0").unwrap_err().contains("`bandwidth`"));
    }
}
