//! What was measured, for machines: rows, and the line of JSON that they make.

use crate::latency::Latency;
use serde::Serialize;
use std::io::{self, Write};

/// One measurement. The names of the fields are what scripts rely on: they only ever grow.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Row {
    /// Which table it belongs to: `S0`, `S1`, `S3`, or `bench` for one of its own.
    pub table: String,
    /// What was measured: `shadowbell`, or the model number of somebody else's controller.
    pub device: String,
    /// How the doorbells were rung: `shadow`, `mmio` or `mapped`.
    pub doorbells: String,
    /// How completions were found: `poll`, `interrupt` or `adaptive`.
    pub completion: String,
    /// What was done, in fio's words: `randread`.
    pub rw: String,
    /// Bytes that each I/O moved.
    pub bs: u32,
    /// I/Os that each job had in flight.
    pub iodepth: u32,
    /// Jobs, each with a queue pair of its own.
    pub numjobs: u32,
    /// Threads that the jobs were spread over.
    pub threads: u32,
    /// I/Os for which a doorbell was rung at once, at most; 0 if as many as there were, and nothing
    /// if the driver chose.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iodepth_batch: Option<u32>,
    /// I/Os a second.
    pub iops: f64,
    /// Bytes a second.
    pub bandwidth_bytes: f64,
    /// From submission to completion.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_ns: Option<Latency>,
    /// I/O commands completed in the time that was measured.
    pub commands: u64,
    /// Doorbell registers that the driver wrote, of I/O queues: each is a message or a trap.
    pub doorbell_mmio_writes: u64,
    /// Doorbell registers that the driver wrote, for each I/O.
    pub mmio_per_io: f64,
    /// Doorbell writes that the controller received from attaching the queues to deleting them,
    /// where the controller's own counters are within reach.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller_mmio_writes: Option<u64>,
    /// Doorbell writes that the driver counted in the same time: the two must agree.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver_mmio_writes: Option<u64>,
    /// Interrupts that woke a job, for each I/O.
    pub interrupts_per_io: f64,
    /// Processor time of the driver's threads for each I/O, the generating of the load included;
    /// but not what a paced load that sleeps spends on waiting for the time of its next I/O.
    pub cpu_ns_per_io: f64,
    /// Processor time of the driver's threads, in percent of one processor.
    pub cpu_percent: f64,
    /// Processor time of the process that serves, for each I/O, where it is known which that is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller_cpu_ns_per_io: Option<f64>,
    /// Processor time of the process that serves, in percent of one processor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller_cpu_percent: Option<f64>,
    /// I/Os that each job was to start in a second, if that was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_iops: Option<u64>,
    /// System calls of the driver's threads for each I/O, where they could be counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub syscalls_per_io: Option<f64>,
    /// Blocks whose content was checked, if it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verified_blocks: Option<u64>,
    /// Blocks that did not hold what they had to, if it was checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verify_errors: Option<u64>,
    /// How long it was measured.
    pub seconds: f64,
}

/// Writes the rows as one line of JSON: the last thing that a measuring verb prints with `--json`.
///
/// # Errors
/// Those of `out`.
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
        // What was not measured is left out, not made up.
        for name in ["syscalls_per_io", "controller_mmio_writes", "verify_errors"] {
            assert!(row.get(name).is_none(), "{name}: {row}");
        }
        assert_eq!(row["iops"], 99_800.5);
    }

    #[test]
    fn no_rows_are_still_a_report() {
        let mut out = Vec::new();
        write_json(&mut out, &[]).unwrap();
        assert_eq!(out, b"{\"rows\":[]}\n");
    }
}
