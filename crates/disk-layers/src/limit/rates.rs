//! Rate limits and their text form.

use serde::{Deserialize, Serialize};
use shadowbell_disk::{format_size, parse_size};
use std::fmt;

/// Rate limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rate {
    /// Requests or bytes per second, at least 1.
    pub per_second: u64,
    /// Number of requests or bytes that may start at once after a time with a load below the rate.
    /// Default: as many as the rate permits in 10 ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<u64>,
}

/// Rate limits of a disk. Reads are Read, Compare and Verify. Writes are all requests that change
/// the disk; requests without data do not count as bytes. Flush is not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
#[non_exhaustive]
pub struct Limits {
    /// Requests of any kind per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<Rate>,
    /// Reads per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_iops: Option<Rate>,
    /// Writes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_iops: Option<Rate>,
    /// Bytes per second, in both directions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Rate>,
    /// Bytes read per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bandwidth: Option<Rate>,
    /// Bytes written per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_bandwidth: Option<Rate>,
}

impl Limits {
    /// Names of the limits, in the order of the struct's fields.
    pub const NAMES: [&'static str; 6] =
        ["iops", "read-iops", "write-iops", "bandwidth", "read-bandwidth", "write-bandwidth"];

    /// Limits in the order of their names.
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

    /// True if nothing is limited.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Sets the limit of this name from text: a rate in requests or bytes, and optionally a burst
    /// after a colon (`1000`, `1000:5000`, `100MiB:1GiB`); `none` removes the limit. Returns false
    /// if no limit has that name.
    ///
    /// # Errors
    /// A sentence that names the mistake.
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
                    "the limit `{name}` is a number of requests per second, or RATE:BURST, as in \
                     `1000` or `1000:5000`, not `{text}`"
                )),
            },
        };
        let (rate, burst) = text.split_once(':').map_or((text, None), |(r, b)| (r, Some(b)));
        let (per_second, burst) = (number(rate)?, burst.map(number).transpose()?);
        *field = Some(Rate { per_second, burst });
        Ok(true)
    }

    /// Limits as names and texts, in the form that [`set`](Self::set) accepts.
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
        let mut parsed = Limits::default();
        limits.texts().for_each(|(name, text)| assert_eq!(parsed.set(name, &text), Ok(true)));
        assert_eq!(parsed, limits);
        assert_eq!(limits.to_string(), "iops=1000:5000, read-iops=7, write-bandwidth=100MiB");
        assert_eq!(limits.set("iops", "none"), Ok(true));
        assert_eq!((limits.iops, limits.set("speed", "1")), (None, Ok(false)));
        for text in ["", "0", "-1", "many", "1:", "1:0", ":1", "1:2:3", "1MiB"] {
            assert!(limits.set("iops", text).unwrap_err().contains("`iops`"), "{text}");
        }
        assert!(limits.set("bandwidth", "0").unwrap_err().contains("`bandwidth`"));
    }
}
