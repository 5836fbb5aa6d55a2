//! SPDK's `bdevperf` as a client of vhost-user-blk, by its polling virtio initiator.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::super::contest::Row;
use super::super::spdk::HugePages;
use crate::server::{child, output};
use crate::settings::Settings;

/// MiB of huge pages for the queues and buffers of `bdevperf`.
const MEMORY: u32 = 256;

/// Runs a load on the device behind a socket, on the driver's CPU. Returns a row with the field
/// names of `shadowbell bench`.
pub(crate) fn run(
    settings: &Settings,
    program: &Path,
    pages: &HugePages,
    socket: &Path,
    row: Row,
) -> Result<Value> {
    let (rw, bs, depth) = row;
    // The duration is passed to the program in whole seconds.
    let seconds = settings.time.as_millis().div_ceil(1000).max(1);
    let directory = tempfile::tempdir()?;
    let config = directory.path().join("config.json");
    std::fs::write(&config, configuration(socket).to_string())?;
    let files = tempfile::tempdir_in(pages.mount_dir()).context("a directory for huge pages")?;
    let mut command = child(program);
    command.args(["-w", rw, "-g", "-o", &bs.to_string(), "-q", &depth.to_string()]);
    command.args(["-s", &MEMORY.to_string(), "-t", &seconds.to_string()]);
    command.args(["-m", &format!("[{}]", settings.cpus[1]), "--disable-cpumask-locks"]);
    command.arg(format!("--huge-dir={}", files.path().display()));
    command.arg("-r").arg(directory.path().join("rpc.sock")).arg("-c").arg(config);
    let text = output("bdevperf", command, settings.time + Duration::from_secs(60))?;
    parse(&text, row).with_context(|| format!("bdevperf's output: {text:.1000}"))
}

fn configuration(socket: &Path) -> Value {
    json!({ "subsystems": [{ "subsystem": "bdev", "config": [
        { "method": "bdev_virtio_attach_controller", "params": {
            "name": "V0", "trtype": "user", "traddr": socket.display().to_string(),
            "vq_count": 1, "vq_size": 128, "dev_type": "blk",
        } },
        { "method": "bdev_wait_for_examine" },
    ] }] })
}

/// Parses the line `V0 : runtime IOPS MiB/s Fail/s TO/s average min max`, whose latencies are in
/// microseconds.
fn parse(text: &str, (rw, bs, depth): Row) -> Result<Value> {
    let mut lines = text.lines().filter_map(|line| line.trim_start().strip_prefix("V0"));
    let (_, figures) = lines
        .find_map(|line| line.split_once(':').filter(|(name, _)| name.trim().is_empty()))
        .context("no line `V0`")?;
    let figures: Vec<f64> = figures
        .split_whitespace()
        .map(|word| word.parse().with_context(|| format!("`{word}` is no figure")))
        .collect::<Result<_>>()?;
    let &[seconds, iops, _, failed, _, average, ..] = figures.as_slice() else {
        anyhow::bail!("{} figures in the line `V0`", figures.len());
    };
    anyhow::ensure!(failed == 0.0, "{failed} I/Os a second have failed");
    Ok(json!({
        "rw": rw, "bs": bs, "iodepth": depth, "numjobs": 1, "iops": iops,
        "bandwidth_bytes": iops * f64::from(bs), "latency_ns": { "mean": average * 1000.0 },
        "commands": iops * seconds, "seconds": seconds,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_the_device_is_parsed() {
        let text = "Job: V0 (Core Mask 0x2, workload: randread, depth: 1, IO size: 4096)\n\
                    \t V0                  :       2.00    9223.50      36.03       0.00     0.00     \
                    108.17       4.91   40188.48\n";
        let row = parse(text, ("randread", 4096, 1)).unwrap();
        assert_eq!((&row["iops"], &row["commands"]), (&json!(9223.5), &json!(18447.0)));
        assert_eq!(row["latency_ns"]["mean"], 108_170.0);
        assert!(parse("Job: V0 (\n", ("randread", 4096, 1)).is_err());
        let failed = text.replace("0.00     0.00     ", "3.00     0.00     ");
        assert!(parse(&failed, ("randread", 4096, 1)).is_err());
    }
}
