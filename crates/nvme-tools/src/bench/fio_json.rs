//! Output of `bench` in the format of fio's JSON, for programs that parse it.
//!
//! All jobs are reported as one, as with fio's `--group_reporting`. The field `N` of each latency
//! object is the number of samples (`--latency-sample`). A latency is the time from submission to
//! completion, or with `--rate-iops` from the time at which the I/O was due. Submission latency is
//! not measured: `slat_ns` is empty and `lat_ns` has the statistics of `clat_ns`, as with a fio
//! engine that has no submission latency. Fields of fio without a counterpart are left out. The row
//! of `--json` is added under `shadowbell`.

use crate::load::{Direction, Directions, Usage};
use crate::report::Row;
use hdrhistogram::Histogram;
use serde_json::{Map, Value, json};
use std::io::{self, Write};
use std::time::{Duration, SystemTime};

/// Default percentiles of fio.
const PERCENTILES: [f64; 17] = [
    1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95,
    99.99,
];

/// Writes the report as one line of JSON.
pub(super) fn write(
    out: &mut impl Write,
    target: &str,
    row: &Row,
    directions: &Directions<Direction>,
    usage: Usage,
) -> io::Result<()> {
    let now = SystemTime::now();
    writeln!(out, "{}", report(target, row, directions, usage, now))
}

fn report(
    target: &str,
    row: &Row,
    directions: &Directions<Direction>,
    usage: Usage,
    now: SystemTime,
) -> Value {
    let since_epoch = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let millis = (row.seconds * 1000.0).round() as u64;
    json!({
        "shadowbell version": env!("CARGO_PKG_VERSION"),
        "timestamp": since_epoch.as_secs(),
        "timestamp_ms": since_epoch.as_millis() as u64,
        "time": httpdate::fmt_http_date(now),
        "jobs": [{
            "jobname": "bench",
            "groupid": 0,
            "error": 0,
            "elapsed": row.seconds.ceil() as u64,
            "job options": options(target, row),
            "read": direction(&directions.read, row, millis),
            "write": direction(&directions.write, row, millis),
            "trim": direction(&Direction::default(), row, millis),
            "job_runtime": millis,
            "usr_cpu": usage.user_percent,
            "sys_cpu": usage.system_percent,
            "ctx": usage.switches,
        }],
        "shadowbell": row,
    })
}

/// Options of the job as strings, which fio's JSON repeats under `job options`.
fn options(target: &str, row: &Row) -> Map<String, Value> {
    let mut options = vec![
        ("filename", target.to_owned()),
        ("rw", row.rw.clone()),
        ("bs", row.bs.to_string()),
        ("iodepth", row.iodepth.to_string()),
        ("numjobs", row.numjobs.to_string()),
    ];
    options.extend(row.rate_iops.map(|rate| ("rate_iops", rate.to_string())));
    options.into_iter().map(|(name, value)| (name.to_owned(), json!(value))).collect()
}

fn direction(direction: &Direction, row: &Row, millis: u64) -> Value {
    let Direction { commands, iops, latencies } = direction;
    let bytes = commands * u64::from(row.bs);
    let bandwidth = iops * f64::from(row.bs);
    let runtime = if *commands == 0 { 0 } else { millis };
    let latencies = latencies.as_ref();
    json!({
        "io_bytes": bytes,
        "io_kbytes": bytes >> 10,
        "bw_bytes": bandwidth as u64,
        "bw": (bandwidth / 1024.0) as u64,
        "iops": iops,
        "runtime": runtime,
        "total_ios": commands,
        // Always 0: a command transfers all of its blocks, or its failure ends the run.
        "short_ios": 0,
        "drop_ios": 0,
        "slat_ns": summary(None),
        "clat_ns": with_percentiles(latencies),
        "lat_ns": summary(latencies),
    })
}

fn summary(latencies: Option<&Histogram<u64>>) -> Map<String, Value> {
    let latencies = latencies.filter(|latencies| !latencies.is_empty());
    let number = |of: fn(&Histogram<u64>) -> u64| json!(latencies.map_or(0, of));
    let real = |of: fn(&Histogram<u64>) -> f64| json!(latencies.map_or(0.0, of));
    [
        ("min", number(Histogram::min)),
        ("max", number(Histogram::max)),
        ("mean", real(Histogram::mean)),
        ("stddev", real(Histogram::stdev)),
        ("N", number(Histogram::len)),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
    .collect()
}

fn with_percentiles(latencies: Option<&Histogram<u64>>) -> Map<String, Value> {
    let mut object = summary(latencies);
    if let Some(latencies) = latencies.filter(|latencies| !latencies.is_empty()) {
        let value = |percent: f64| json!(latencies.value_at_percentile(percent));
        let percentiles: Map<_, _> =
            PERCENTILES.iter().map(|percent| (format!("{percent:.6}"), value(*percent))).collect();
        object.insert("percentile".to_owned(), percentiles.into());
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_writes_are_separate_in_units_of_fio() {
        let mut latencies = crate::latency::histogram().unwrap();
        for ns in [1000, 2000, 3000] {
            latencies.record(ns).unwrap();
        }
        let row = Row { bs: 4096, seconds: 2.0004, rw: "read".into(), ..Row::default() };
        let read = Direction { commands: 500, iops: 250.5, latencies: Some(latencies) };
        let directions = Directions { read, write: Direction::default() };
        let usage = Usage { user_percent: 12.5, ..Usage::default() };
        let now = SystemTime::UNIX_EPOCH + Duration::from_millis(5500);
        let report = report("local:mem:1MiB", &row, &directions, usage, now);
        assert_eq!((&report["timestamp"], &report["timestamp_ms"]), (&5.into(), &5500.into()));
        let job = &report["jobs"][0];
        assert_eq!((&job["job_runtime"], &job["usr_cpu"]), (&2000.into(), &12.5.into()));
        assert_eq!(job["job options"]["bs"], "4096");
        let read = &job["read"];
        for (name, value) in [
            ("io_bytes", 2_048_000),
            ("io_kbytes", 2000),
            ("bw_bytes", 1_026_048),
            ("bw", 1002),
            ("runtime", 2000),
            ("total_ios", 500),
        ] {
            assert_eq!(read[name], value, "{name}");
        }
        assert_eq!(read["iops"], 250.5);
        assert_eq!((&read["clat_ns"]["N"], &read["slat_ns"]["N"]), (&3.into(), &0.into()));
        let median = read["clat_ns"]["percentile"]["50.000000"].as_u64().unwrap();
        assert!((1999..=2001).contains(&median), "{median}");
        assert!(read["clat_ns"]["percentile"].get("99.990000").is_some());
        assert!(read["lat_ns"].get("percentile").is_none());
        assert_eq!((&job["write"]["total_ios"], &job["write"]["runtime"]), (&0.into(), &0.into()));
        assert!(job["write"]["clat_ns"].get("percentile").is_none());
        assert_eq!(report["shadowbell"]["bs"], 4096);
    }
}
