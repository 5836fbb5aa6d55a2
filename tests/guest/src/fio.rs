//! Runs fio in the guest and parses its results.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;
use shadowbell_guest::Guest;
use shadowbell_testing::wait::LIMIT;

/// fio's results for reads.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Measured {
    /// I/Os per second.
    pub(crate) iops: f64,
    /// Bytes per second.
    pub(crate) bandwidth: f64,
    /// Number of I/Os of the run. Each I/O fits into one command, so it is also the number of
    /// commands.
    pub(crate) total: u64,
    /// Completion latency in nanoseconds: mean, median, 99th and 99.9th percentile.
    pub(crate) latency: [f64; 4],
}

/// Size of each read of [`random_reads`] in bytes.
pub(crate) const BLOCK: u32 = 4096;

/// Random reads of [`BLOCK`] bytes by one job for the duration `time`.
pub(crate) fn random_reads(
    guest: &mut Guest,
    disk: &str,
    depth: u32,
    time: Duration,
) -> Result<Measured> {
    let command = format!(
        "fio --name=doorbells --filename=/dev/{disk} --rw=randread --bs={BLOCK} --iodepth={depth} --numjobs=1 \
         --direct=1 --ioengine=libaio --norandommap --randrepeat=0 --time_based \
         --runtime={}ms --output-format=json",
        time.as_millis()
    );
    let text = guest.sh(&command, time + Duration::from_secs(60))?;
    parse(&text).with_context(|| format!("fio's output: {text:.400}"))
}

/// Runs fio with the arguments `words`, for about the duration `time`. The job names are the last
/// arguments. fio adds the results of several jobs.
pub(crate) fn run(guest: &mut Guest, rw: &str, words: &str, time: Duration) -> Result<Measured> {
    let command = format!("fio --rw={rw} --thread --group_reporting --output-format=json {words}");
    let text = guest.sh(&command, time + LIMIT)?;
    parse(&text).with_context(|| format!("fio's output: {text:.400}"))
}

/// Parses fio's JSON. Lines before it are warnings and are ignored.
fn parse(text: &str) -> Result<Measured> {
    let start = text.find('{').context("no JSON")?;
    let json: Value = serde_json::from_str(text.get(start..).unwrap_or_default())?;
    let read = json.pointer("/jobs/0/read").context("no reads")?;
    let figure = |path: &str| {
        read.pointer(path).and_then(Value::as_f64).with_context(|| format!("no {path}"))
    };
    Ok(Measured {
        iops: figure("/iops")?,
        bandwidth: figure("/bw_bytes")?,
        total: read.get("total_ios").and_then(Value::as_u64).context("no total_ios")?,
        latency: [
            figure("/clat_ns/mean")?,
            figure("/clat_ns/percentile/50.000000")?,
            figure("/clat_ns/percentile/99.000000")?,
            figure("/clat_ns/percentile/99.900000")?,
        ],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_parsed_and_missing_ones_are_errors() {
        let json = r#"fio: a warning
            {"jobs": [{"read": {"iops": 24.5, "bw_bytes": 4096, "total_ios": 49, "clat_ns":
             {"mean": 1.0, "percentile": {"50.000000": 2, "99.000000": 3, "99.900000": 4}}}}]}"#;
        let want =
            Measured { iops: 24.5, bandwidth: 4096.0, total: 49, latency: [1.0, 2.0, 3.0, 4.0] };
        assert_eq!(parse(json).unwrap(), want);
        assert!(parse(&json.replace("total_ios", "other")).is_err());
        assert!(parse("fio: no such file").is_err());
        assert!(parse("{\"jobs\": [").is_err());
    }
}
