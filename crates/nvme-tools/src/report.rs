//! Results of measurements as JSON.

use crate::latency::Latency;
use serde::Serialize;
use std::io::{self, Write};

/// Result of a measurement. Scripts rely on the names of the fields: later versions only add some.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Row {
    /// Name of the table: `S0`, `S1`, `S3`; `bench` outside of `demo`.
    pub table: String,
    /// Device: `shadowbell`, or the model number of another controller.
    pub device: String,
    /// Doorbell mode: `shadow`, `mmio` or `mapped`.
    pub doorbells: String,
    /// Completion mode: `poll`, `interrupt` or `adaptive`.
    pub completion: String,
    /// Workload in fio's terms: `randread`.
    pub rw: String,
    /// Bytes per I/O.
    pub bs: u32,
    /// I/Os in flight per job.
    pub iodepth: u32,
    /// Number of jobs, each with its own queue pair.
    pub numjobs: u32,
    /// Number of threads. The jobs are distributed over the threads.
    pub threads: u32,
    /// Largest number of I/Os per doorbell write; 0 for no limit; absent if the driver chose.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iodepth_batch: Option<u32>,
    /// I/Os per second.
    pub iops: f64,
    /// Bytes per second.
    pub bandwidth_bytes: f64,
    /// Latency from submission to completion, or from the due time with a fixed rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_ns: Option<Latency>,
    /// I/O commands completed during the measurement.
    pub commands: u64,
    /// Doorbell register writes of the driver for I/O queues. Each is a message or a trap.
    pub doorbell_mmio_writes: u64,
    /// Doorbell register writes of the driver per I/O.
    pub mmio_per_io: f64,
    /// Doorbell writes that the controller received between creation and deletion of the queues, if
    /// its counters are accessible.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller_mmio_writes: Option<u64>,
    /// Doorbell writes that the driver counted in the same period. Both counts must agree.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver_mmio_writes: Option<u64>,
    /// Interrupts that woke a job, per I/O.
    pub interrupts_per_io: f64,
    /// CPU time of the driver's threads per I/O, including load generation, but without the time in
    /// which a paced job spins until its next I/O is due.
    pub cpu_ns_per_io: f64,
    /// CPU time of the driver's threads, in percent of one CPU.
    pub cpu_percent: f64,
    /// CPU time of the server process per I/O, if the process is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller_cpu_ns_per_io: Option<f64>,
    /// CPU time of the server process, in percent of one CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller_cpu_percent: Option<f64>,
    /// Requested I/Os per second and job, if a rate was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_iops: Option<u64>,
    /// System calls of the driver's threads per I/O, if they could be counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub syscalls_per_io: Option<f64>,
    /// Blocks whose content was verified, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verified_blocks: Option<u64>,
    /// Blocks with wrong content, if verified.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verify_errors: Option<u64>,
    /// Duration of the measurement.
    pub seconds: f64,
}

/// Writes the rows as one line of JSON, the last output of a measuring verb with `--json`.
///
/// # Errors
/// `out` cannot be written.
pub(crate) fn write_json(out: &mut impl Write, rows: &[Row]) -> io::Result<()> {
    #[derive(Serialize)]
    struct Report<'a> {
        rows: &'a [Row],
    }
    serde_json::to_writer(&mut *out, &Report { rows })?;
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn a_report_is_one_line_with_the_agreed_names() {
        let row = Row {
            table: "S3".into(),
            device: "shadowbell".into(),
            doorbells: "shadow".into(),
            iodepth: 4,
            numjobs: 1,
            bs: 4096,
            iops: 99_800.5,
            latency_ns: Some(Latency {
                mean: 40.5,
                p50: 39,
                p99: 80,
                p999: 95,
                max: 99,
                samples: 7,
            }),
            ..Row::default()
        };
        let mut out = Vec::new();
        write_json(&mut out, &[row]).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.starts_with("{\"rows\":[{") && text.ends_with("}]}\n"), "{text}");
        assert_eq!(text.lines().count(), 1);
        let value: Value = serde_json::from_str(&text).unwrap();
        let row = &value["rows"][0];
        for name in [
            "table",
            "device",
            "doorbells",
            "iodepth",
            "numjobs",
            "bs",
            "iops",
            "bandwidth_bytes",
            "latency_ns",
            "commands",
            "doorbell_mmio_writes",
            "mmio_per_io",
            "interrupts_per_io",
            "cpu_ns_per_io",
            "seconds",
        ] {
            assert!(row.get(name).is_some(), "{name}: {row}");
        }
        for name in ["mean", "p50", "p99", "p999"] {
            assert!(row["latency_ns"][name].is_number(), "{name}: {row}");
        }
        // Fields without a value are absent.
        for name in ["syscalls_per_io", "controller_mmio_writes", "verify_errors"] {
            assert!(row.get(name).is_none(), "{name}: {row}");
        }
        assert_eq!(row["iops"], 99_800.5);
    }

    #[test]
    fn a_report_may_have_no_rows() {
        let mut out = Vec::new();
        write_json(&mut out, &[]).unwrap();
        assert_eq!(out, b"{\"rows\":[]}\n");
    }
}
