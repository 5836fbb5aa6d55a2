//! fio on the host, the reference for files and exports.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::peers::NbdServer;
use crate::server::{child, output};
use crate::settings::Settings;

/// Target of a fio job.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Source<'a> {
    /// A file, accessed with io_uring and O_DIRECT.
    File(&'a Path),
    /// An export of an NBD server.
    Nbd(&'a NbdServer),
    /// The image `rbd/NAME` of a Ceph cluster.
    Rbd {
        /// Configuration file of the cluster.
        conf: &'a Path,
        name: &'a str,
    },
}

impl Source<'_> {
    fn engine(self) -> &'static str {
        match self {
            Self::File(_) => "io_uring",
            Self::Nbd(_) => "nbd",
            Self::Rbd { .. } => "rbd",
        }
    }

    fn options(self) -> Vec<String> {
        match self {
            Self::File(path) => vec![format!("--filename={}", path.display()), "--direct=1".into()],
            Self::Nbd(server) => {
                vec![format!("--uri={}", server.uri()), "--verify_state_save=0".into()]
            }
            Self::Rbd { name, .. } => {
                let image = format!("--rbdname={name}");
                vec!["--clientname=admin".into(), "--pool=rbd".into(), image]
            }
        }
    }
}

/// Parameters of a fio job.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job<'a> {
    pub(crate) source: Source<'a>,
    pub(crate) rw: &'a str,
    pub(crate) bs: u32,
    pub(crate) depth: u32,
}

/// Command for fio. With TLS, fio runs in a user namespace as another user than root, with its own
/// home directory: for root, libnbd takes certificates only from `/etc`.
fn program(source: Source<'_>) -> Command {
    if let Source::Rbd { conf, .. } = source {
        let mut command = child(Path::new("fio"));
        command.env("CEPH_CONF", conf);
        return command;
    }
    let Source::Nbd(server) = source else { return child(Path::new("fio")) };
    let Some(home) = server.home() else { return child(Path::new("fio")) };
    let mut command = child(Path::new("unshare"));
    command.args(["--user", "fio"]).env("HOME", home);
    command
}

/// Writes the whole export once.
pub(crate) fn run_once(settings: &Settings, server: &NbdServer) -> Result<()> {
    let mut command = program(Source::Nbd(server));
    command.args(["--name=fill", "--ioengine=nbd", "--rw=write", "--bs=1m", "--iodepth=4"]);
    command.args(Source::Nbd(server).options());
    output("fio", command, settings.time + Duration::from_secs(120)).map(drop)
}

/// Writes the whole file once.
pub(crate) fn fill(settings: &Settings, path: &Path) -> Result<()> {
    let mut command = program(Source::File(path));
    command.args(["--name=fill", "--ioengine=io_uring", "--rw=write", "--bs=1m", "--iodepth=4"]);
    command.args(Source::File(path).options());
    output("fio", command, settings.time + Duration::from_secs(120)).map(drop)
}

/// Runs a job on the driver's CPU. Returns a row with the field names of `shadowbell bench`.
pub(crate) fn run(settings: &Settings, job: &Job<'_>) -> Result<Value> {
    let mut command = program(job.source);
    // Options of an engine are valid only after the name of the engine.
    command.args(["--name=bench".to_owned(), format!("--ioengine={}", job.source.engine())]);
    command.args(job.source.options());
    command.args([
        format!("--rw={}", job.rw),
        format!("--bs={}", job.bs),
        format!("--iodepth={}", job.depth),
        format!("--runtime={}ms", settings.time.as_millis()),
        format!("--ramp_time={}ms", settings.ramp.as_millis()),
    ]);
    command.args(settings.pinned.then(|| format!("--cpus_allowed={}", settings.cpus[1])));
    command.args([
        "--numjobs=1",
        "--thread",
        "--norandommap",
        "--randrepeat=0",
        "--time_based",
        "--output-format=json",
    ]);
    let limit = settings.time + settings.ramp + Duration::from_secs(60);
    let text = output("fio", command, limit)?;
    parse(&text, job).with_context(|| format!("fio's output: {text:.400}"))
}

fn parse(text: &str, job: &Job<'_>) -> Result<Value> {
    // Warnings precede the JSON.
    let start = text.find('{').context("no JSON")?;
    let json: Value = serde_json::from_str(text.get(start..).unwrap_or_default())?;
    let side = if job.rw.contains("write") { "write" } else { "read" };
    let figure = |path: String| {
        json.pointer(&path).and_then(Value::as_f64).with_context(|| format!("no {path}"))
    };
    let of_side = |name: &str| figure(format!("/jobs/0/{side}/{name}"));
    let of_job = |name: &str| figure(format!("/jobs/0/{name}"));
    let iops = of_side("iops")?;
    // CPU utilization of fio's job in user and kernel mode together, in percent of the job's
    // duration.
    let percent = of_job("usr_cpu")? + of_job("sys_cpu")?;
    Ok(json!({
        "device": job.source.engine(), "rw": job.rw, "bs": job.bs, "iodepth": job.depth, "numjobs": 1,
        "iops": iops, "bandwidth_bytes": of_side("bw_bytes")?,
        "latency_ns": {
            "mean": of_side("clat_ns/mean")?,
            "p50": of_side("clat_ns/percentile/50.000000")?,
            "p99": of_side("clat_ns/percentile/99.000000")?,
            "p999": of_side("clat_ns/percentile/99.900000")?,
        },
        "commands": of_side("total_ios")?, "cpu_percent": percent,
        "cpu_ns_per_io": if iops > 0.0 { percent / 100.0 / iops * 1e9 } else { 0.0 },
        "seconds": of_side("runtime")? / 1000.0,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_parsed_and_missing_ones_are_errors() {
        let text = r#"fio: a warning
            {"jobs": [{"usr_cpu": 10.0, "sys_cpu": 30.0, "write": {"iops": 400.0,
             "bw_bytes": 1638400, "total_ios": 800, "runtime": 2000, "clat_ns": {"mean": 1.5,
             "percentile": {"50.000000": 2, "99.000000": 3, "99.900000": 4}}}}]}"#;
        let job = Job { source: Source::File(Path::new("x")), rw: "randwrite", bs: 4096, depth: 8 };
        let row = parse(text, &job).unwrap();
        assert_eq!(row["iops"], 400.0);
        assert_eq!(row["latency_ns"]["p999"], 4.0);
        assert_eq!(row["cpu_ns_per_io"], 1e6);
        assert_eq!((&row["seconds"], &row["device"]), (&json!(2.0), &json!("io_uring")));
        assert!(parse(text, &Job { rw: "randread", ..job }).is_err());
        assert!(parse("fio: no such file", &job).is_err());
    }
}
