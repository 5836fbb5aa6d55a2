//! What was measured, for machines and for people: rows, lines of JSON, tables.

use serde::Serialize;
use std::fmt;
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
    /// The same for each I/O.
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
    /// The same in percent of one processor.
    pub cpu_percent: f64,
    /// Processor time of the process that serves, for each I/O, where it is known which that is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller_cpu_ns_per_io: Option<f64>,
    /// The same in percent of one processor.
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

/// A distribution of latencies, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Latency {
    /// The mean.
    pub mean: f64,
    /// The median.
    pub p50: u64,
    /// 99 of 100 are not above it.
    pub p99: u64,
    /// 999 of 1000 are not above it.
    pub p999: u64,
    /// The largest.
    pub max: u64,
    /// How many I/Os were timed.
    pub samples: u64,
}

/// Writes the rows as one line of JSON: the last thing that a measuring verb prints with `--json`.
///
/// # Errors
/// Those of `out`.
pub fn write_json(out: &mut impl Write, rows: &[Row]) -> io::Result<()> {
    #[derive(Serialize)]
    struct Report<'a> {
        rows: &'a [Row],
    }
    serde_json::to_writer(&mut *out, &Report { rows })?;
    writeln!(out)
}

/// Columns of text, as wide as what is in them. Columns of figures are set to the right, but never
/// the first.
#[derive(Clone, Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings.
    pub fn new<S: Into<String>>(headings: impl IntoIterator<Item = S>) -> Self {
        Self { rows: vec![headings.into_iter().map(Into::into).collect()] }
    }

    /// Adds a line.
    pub fn line<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let is_figure =
            |cell: &String| cell.starts_with(|c: char| c.is_ascii_digit() || "<-".contains(c));
        let cells = |column: usize| self.rows.iter().skip(1).filter_map(move |row| row.get(column));
        let figures: Vec<bool> = (0..columns).map(|n| n > 0 && cells(n).all(is_figure)).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (n, ((cell, width), right)) in row.iter().zip(&widths).zip(&figures).enumerate() {
                let padding = " ".repeat(width.saturating_sub(cell.chars().count()));
                let gap = if n == 0 { "" } else { "  " };
                let [before, after] = if *right { [&padding, ""] } else { ["", &padding] };
                line.extend([gap, before, cell, after]);
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// A number of things in a second or of things at all, short: `987`, `43.9 K`, `1.24 M`.
#[must_use]
pub fn count(value: f64) -> String {
    let units = [(1e9, " G"), (1e6, " M"), (1e3, " K")];
    for (unit, name) in units {
        if value >= unit {
            return format!("{}{name}", significant(value / unit));
        }
    }
    format!("{value:.0}")
}

/// Bytes a second: `171 MiB/s`.
#[must_use]
pub fn bandwidth(bytes: f64) -> String {
    let units = [(30, "GiB/s"), (20, "MiB/s"), (10, "KiB/s")];
    for (shift, name) in units {
        let unit = (1u64 << shift) as f64;
        if bytes >= unit {
            return format!("{} {name}", significant(bytes / unit));
        }
    }
    format!("{bytes:.0} B/s")
}

/// A time in nanoseconds, for people: `740 ns`, `12.3 us`.
#[must_use]
pub fn nanoseconds(ns: f64) -> String {
    let units = [(1e9, "s"), (1e6, "ms"), (1e3, "us")];
    for (unit, name) in units {
        if ns >= unit {
            return format!("{} {name}", significant(ns / unit));
        }
    }
    format!("{ns:.0} ns")
}

/// Events for each I/O: to a hundredth, and to more if that were zero but is not.
#[must_use]
pub fn per_io(value: f64) -> String {
    if value == 0.0 {
        "0".to_owned()
    } else if value >= 0.01 {
        format!("{value:.2}")
    } else if value >= 0.000_05 {
        format!("{value:.4}")
    } else {
        "<0.0001".to_owned()
    }
}

/// Three digits, of a value from 1 up.
fn significant(value: f64) -> String {
    let digits = if value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    format!("{value:.digits$}")
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

    #[test]
    fn a_table_lines_up() {
        let mut table = Table::new(["iodepth", "IOPS"]);
        table.line(["1", "25.1 K"]);
        table.line(["32", "9"]);
        assert_eq!(table.to_string(), "iodepth    IOPS\n1        25.1 K\n32            9\n");
        let mut table = Table::new(["Target", "Serial", "Namespace"]);
        table.line(["a", "SB1", "10"]);
        assert_eq!(table.to_string(), "Target  Serial  Namespace\na       SB1            10\n");
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (999.0, "999"),
            (43_900.0, "43.9 K"),
            (184_200.0, "184 K"),
            (1.239e6, "1.24 M"),
        ] {
            assert_eq!(count(value), text);
        }
        assert_eq!(bandwidth(1000.0), "1000 B/s");
        assert_eq!(bandwidth(179_306_496.0), "171 MiB/s");
        assert_eq!(nanoseconds(740.0), "740 ns");
        assert_eq!(nanoseconds(12_300.0), "12.3 us");
        assert_eq!(nanoseconds(99_960.0), "100 us");
        for (value, text) in
            [(0.0, "0"), (1.99, "1.99"), (0.0012, "0.0012"), (0.000_001, "<0.0001"), (0.3, "0.30")]
        {
            assert_eq!(per_io(value), text);
        }
    }
}
