//! SPDK's client: `spdk_nvme_perf`.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::huge_pages::HugePages;
use super::tree::NQN;
use crate::server::{child, output};
use crate::settings::Settings;

/// MiB of huge pages for the queues and buffers of `spdk_nvme_perf`.
const MEMORY: u32 = 256;

/// Random reads of the controller with the socket `cntrl` in `directory`, on the driver's CPU.
/// Returns a row with the field names of `shadowbell bench`.
pub(crate) fn run(
    settings: &Settings,
    program: &Path,
    pages: &HugePages,
    directory: &Path,
    bs: u32,
    depth: u32,
) -> Result<Value> {
    // The duration is passed to the program in whole seconds.
    let seconds = settings.time.as_millis().div_ceil(1000).max(1);
    let warmup = u64::from(!settings.quick);
    let mut command = child(program);
    command.args(["-w", "randread", "-g", "-o", &bs.to_string(), "-q", &depth.to_string()]);
    command.args(["-s", &MEMORY.to_string(), "-t", &seconds.to_string()]);
    command.args(["-a", &warmup.to_string(), "-c", &format!("[{}]", settings.cpus[1])]);
    // Without an NQN, the program treats the target as a discovery controller.
    let id = format!("trtype:VFIOUSER traddr:{} subnqn:{NQN}", directory.display());
    // A directory of its own for the program's memory files: if the program fails, it does not
    // remove them, and they would continue to occupy huge pages.
    let files = tempfile::tempdir_in(pages.mount_dir()).context("a directory for huge pages")?;
    let huge = format!("--env-context=--huge-dir={}", files.path().display());
    command.args(["-r", &id, &huge]);
    let limit = settings.time + Duration::from_secs(60);
    let text = output("spdk_nvme_perf", command, limit)?;
    parse(&text, bs, depth).with_context(|| format!("spdk_nvme_perf's output: {text:.1000}"))
}

/// Parses the line `Total: IOPS MiB/s average min max`, whose latencies are in microseconds.
fn parse(text: &str, bs: u32, depth: u32) -> Result<Value> {
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix("Total"));
    let line = line.context("no line `Total`")?;
    let (_, figures) = line.split_once(':').context("no figures in the line `Total`")?;
    let figures: Vec<f64> = figures
        .split_whitespace()
        .map(|word| word.parse().with_context(|| format!("`{word}` is no figure")))
        .collect::<Result<_>>()?;
    let &[iops, _, average, _, _] = figures.as_slice() else {
        anyhow::bail!("{} figures in the line `Total`", figures.len());
    };
    Ok(json!({
        "device": "spdk_nvme_perf", "rw": "randread", "bs": bs, "iodepth": depth, "numjobs": 1,
        "iops": iops, "bandwidth_bytes": iops * f64::from(bs),
        "latency_ns": { "mean": average * 1000.0 },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = "\
Initializing NVMe Controllers
Attached to NVMe over Fabrics controller at /tmp/x:: [4e58:0001]
Initialization complete. Launching workers.
========================================================
                                                        Latency(us)
Device Information                   :       IOPS      MiB/s    Average        min        max
VFIOUSER (/tmp/x) NSID 1 from core  1:  250000.50     976.56      31.25       2.10    9000.00
========================================================
Total                                :  250000.50     976.56      31.25       2.10    9000.00

";

    #[test]
    fn the_total_is_parsed() {
        let row = parse(PRINTED, 4096, 8).unwrap();
        assert_eq!(row["iops"], 250_000.5);
        assert_eq!(row["bandwidth_bytes"], 250_000.5 * 4096.0);
        assert_eq!(row["latency_ns"]["mean"], 31_250.0);
        assert_eq!((&row["bs"], &row["iodepth"]), (&json!(4096), &json!(8)));
    }

    #[test]
    fn other_output_is_an_error() {
        for (text, words) in [
            ("", "no line"),
            ("Total 1 2 3", "no figures"),
            ("Total : 1 2 3", "3 figures"),
            ("Total : 1 2 3 4 x", "`x`"),
        ] {
            let error = parse(text, 512, 1).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
        let cut = PRINTED.replace("Total ", "Total?");
        assert!(parse(&cut.replace(':', " "), 512, 1).is_err());
    }
}
