//! One measurement of the program: a server on one CPU, a load on another.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::server::{Server, child, output};
use crate::settings::Settings;

/// Waiting mode of driver and controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waiting {
    /// Driver and controller poll.
    Polling,
    /// Driver and controller poll for an adaptive time, then sleep.
    Adaptive,
    /// Driver and controller sleep immediately.
    Sleeping,
}

impl Waiting {
    /// Value of `serve --poll`.
    pub(crate) fn poll(self) -> &'static str {
        match self {
            Self::Polling => "always",
            Self::Adaptive => "adaptive",
            Self::Sleeping => "never",
        }
    }

    /// Value of `bench --completion`.
    pub(crate) fn completion(self) -> &'static str {
        match self {
            Self::Polling => "poll",
            Self::Adaptive => "adaptive",
            Self::Sleeping => "interrupt",
        }
    }

    /// Name in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Polling => "polling",
            Self::Adaptive => "adaptive",
            Self::Sleeping => "sleeping",
        }
    }
}

/// Parameters of a measurement.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load<'a> {
    /// Disk string for `serve`.
    pub(crate) disk: &'a str,
    pub(crate) rw: &'a str,
    pub(crate) bs: u32,
    pub(crate) depth: u32,
    pub(crate) waiting: Waiting,
    pub(crate) jobs: u16,
    pub(crate) workers: u16,
    /// Number of I/Os that are submitted per second. `None`: as many as possible.
    pub(crate) rate: Option<u64>,
    /// True if the whole disk is written before the measurement, so that reads find allocated
    /// blocks.
    pub(crate) fill: bool,
    pub(crate) doorbells: &'a str,
    /// Maximum poll time of driver and controller in microseconds; `None`: the default.
    pub(crate) poll_max: Option<u32>,
    /// True if the server has a supervisor.
    pub(crate) supervisor: bool,
}

impl Default for Load<'_> {
    /// Random reads of 4 KiB from a null disk, with one in flight, and with polling.
    fn default() -> Self {
        Self {
            disk: "null:1TiB",
            rw: "randread",
            bs: 4096,
            depth: 1,
            waiting: Waiting::Polling,
            jobs: 1,
            workers: 1,
            rate: None,
            fill: false,
            doorbells: "shadow",
            poll_max: None,
            supervisor: false,
        }
    }
}

impl Load<'_> {
    /// Options of `serve`.
    fn serve_options(&self, settings: &Settings) -> Vec<String> {
        let workers = self.workers.to_string();
        let mut options: Vec<String> =
            ["--workers", &workers, "--poll", self.waiting.poll()].map(str::to_owned).to_vec();
        if settings.pinned {
            let pin = settings.cpus.iter().take(self.workers.into()).map(ToString::to_string);
            options.push(format!("--pin={}", pin.collect::<Vec<_>>().join(",")));
        }
        if self.doorbells != "shadow" {
            options.extend(["--doorbells".to_owned(), self.doorbells.to_owned()]);
        }
        options.extend(self.longest_poll());
        options
    }

    /// Option `--poll-max`, which `shadowbell serve` and `shadowbell bench` have in common.
    fn longest_poll(&self) -> Option<String> {
        self.poll_max.map(|micros| format!("--poll-max={micros}"))
    }

    /// Options of `shadowbell bench TARGET`, without those of the duration.
    fn bench_options(&self, settings: &Settings) -> Vec<String> {
        let mut options: Vec<String> = [
            ("rw", self.rw.to_owned()),
            ("bs", self.bs.to_string()),
            ("iodepth", self.depth.to_string()),
            ("numjobs", self.jobs.to_string()),
            ("completion", self.waiting.completion().to_owned()),
            ("doorbells", self.doorbells.to_owned()),
        ]
        .into_iter()
        .map(|(name, value)| format!("--{name}={value}"))
        .collect();
        options.extend(settings.pinned.then(|| format!("--pin={}", settings.cpus[1])));
        options.extend(self.longest_poll());
        if self.waiting == Waiting::Polling {
            // All jobs run on one CPU, so polling jobs share a thread. Each sleeping job has its
            // own thread and queue pair.
            options.push("--threads=1".to_owned());
        }
        options.extend(self.rate.map(|rate| format!("--rate-iops={rate}")));
        // --force omits the check for existing data. The reads of this check would be counted.
        options.extend(["--force".to_owned(), "--json".to_owned()]);
        options
    }

    /// Starts a server for this load.
    pub(crate) fn serve(&self, settings: &Settings) -> Result<Server> {
        let start = if self.supervisor { Server::start_supervised } else { Server::start };
        let server = start(&settings.binary, &[self.disk], &self.serve_options(settings))?;
        if self.fill {
            let mut command = child(&settings.binary);
            command.args(["bench", &server.target(0), "--rw=write", "--bs=1m", "--iodepth=4"]);
            let ios = (disk_bytes(self.disk)? >> 20).max(1);
            command.args(["--force", "--json", &format!("--number-ios={ios}")]);
            let limit = Duration::from_secs(120);
            output("shadowbell bench (filling the disk)", command, limit)?;
        }
        Ok(server)
    }

    /// Runs the driver on a controller of another program. Returns the row of `bench`.
    pub(crate) fn measure_at(&self, settings: &Settings, target: &str) -> Result<Value> {
        self.drive(settings, target, None)
    }

    fn drive(&self, settings: &Settings, target: &str, server: Option<u32>) -> Result<Value> {
        let mut command = child(&settings.binary);
        command.args(["bench", target]).args(self.bench_options(settings));
        if settings.quick {
            // A run of a fixed number of I/Os, because a run of fixed duration might complete none
            // on a busy machine.
            command.arg(format!("--number-ios={}", self.few()));
        } else {
            command.arg(format!("--runtime={}ms", settings.time.as_millis()));
            command.arg(format!("--ramp_time={}ms", settings.ramp.as_millis()));
        }
        command.args(server.map(|id| format!("--server-pid={id}")));
        let limit = settings.time + settings.ramp + Duration::from_secs(60);
        row(&output("shadowbell bench", command, limit)?)
    }

    /// Runs one round. Returns the row of `bench`, with counters of the server.
    pub(crate) fn measure(&self, settings: &Settings) -> Result<Value> {
        let server = self.serve(settings)?;
        let mut row = self.drive(settings, &server.target(0), Some(server.id()))?;
        let counted = server.stop()?;
        // The counters also include the start and the end of the run. They are divided by the
        // number of all commands that the server has counted.
        let number = |name: &str| counted.get(name).and_then(Value::as_u64);
        let commands = number("commands").context("the server counted no commands")?;
        let interrupts = number("interrupts").context("the server counted no interrupts")?;
        let raised = interrupts as f64 / commands.max(1) as f64;
        if let Some(fields) = row.as_object_mut() {
            let woken = fields.insert("interrupts_per_io".into(), json!(raised));
            fields.insert("wakeups_per_io".into(), woken.unwrap_or_default());
            let writes = number("doorbell_mmio_writes");
            fields.insert("controller_mmio_writes".into(), json!(writes));
            fields.insert("poll".into(), self.waiting.poll().into());
            fields.insert("workers".into(), self.workers.into());
        }
        Ok(row)
    }

    /// Number of I/Os per job for a short run: together they take some tens of milliseconds.
    fn few(&self) -> u64 {
        let ios = (64 << 20) / u64::from(self.bs.max(1)) / u64::from(self.jobs.max(1));
        self.rate.map_or(ios, |rate| ios.min(rate / 20)).clamp(64, 2000)
    }

    /// Command that executes `ios` I/Os on `server`, for callers that count events.
    pub(crate) fn count(&self, settings: &Settings, server: &Server, ios: u64) -> Vec<String> {
        let program = settings.binary.display().to_string();
        let head = [program, "bench".to_owned(), server.target(0)];
        let tail = [format!("--number-ios={ios}"), "--latency-sample=1000000".to_owned()];
        head.into_iter().chain(self.bench_options(settings)).chain(tail).collect()
    }
}

/// Row in the output of `shadowbell bench --json`.
fn row(text: &str) -> Result<Value> {
    let line = text.lines().last().context("shadowbell bench printed nothing")?;
    let report: Value = serde_json::from_str(line).context("the output of shadowbell bench")?;
    report.pointer("/rows/0").cloned().context("shadowbell bench printed no row")
}

/// Size in bytes of `mem:256MiB`, or of an image.
fn disk_bytes(disk: &str) -> Result<u64> {
    let name = disk.split('?').next().unwrap_or_default();
    if let Some((_, size)) = name.split_once(':') {
        let mebibytes = size.strip_suffix("MiB").context("a size that is not in MiB")?;
        return Ok(mebibytes.parse::<u64>()? << 20);
    }
    Ok(std::fs::metadata(Path::new(name)).with_context(|| name.to_owned())?.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_row_is_the_last_line() {
        let row = row("something\n{\"rows\":[{\"iops\":5}]}\n").unwrap();
        assert_eq!(row, json!({ "iops": 5 }));
        for text in ["", "{}", "{\"rows\":[]}", "nonsense"] {
            assert!(super::row(text).is_err(), "{text}");
        }
    }

    #[test]
    fn disks_have_sizes() {
        assert_eq!(disk_bytes("mem:16MiB").unwrap(), 16 << 20);
        assert_eq!(disk_bytes("mem:1MiB?block-size=4096").unwrap(), 1 << 20);
        assert!(disk_bytes("/nowhere").is_err());
    }
}
