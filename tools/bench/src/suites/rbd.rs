//! An RBD disk of the controller and fio's rbd engine on the same image, measured in turn, for
//! `cargo xtask ceph`.
//!
//! Both contestants acknowledge a write at the same point: when it is in the Ceph cache of their
//! process, or (with a supervisor) when it is in the cluster.

use std::fs;
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::contest::Row;
use crate::figures::{count, size, time};
use crate::fio::{self, Job, Source};
use crate::load::{Load, Waiting};
use crate::machine;
use crate::samples::{Rounds, Samples};
use crate::settings::Settings;
use crate::table::Table;

/// Conditions, each with true if a write is acknowledged only when it is in the cluster.
const ROWS: [(Row, bool); 6] = [
    (("randread", 4096, 1), false),
    (("randread", 4096, 32), false),
    (("randwrite", 4096, 1), false),
    (("randwrite", 4096, 32), false),
    (("randwrite", 4096, 1), true),
    (("randwrite", 4096, 32), true),
];

/// Measures the image `rbd/NAME` of the cluster.
pub(crate) fn table(settings: &Settings, conf: &Path, name: &str) -> Result<Table> {
    machine::need("fio", "fio", !settings.quick).map_err(anyhow::Error::msg)?;
    let disk = format!("rbd:rbd/{name}?conf={}", conf.display());
    let mut durable = tempfile::NamedTempFile::new().context("a configuration without a cache")?;
    let text = fs::read_to_string(conf).with_context(|| conf.display().to_string())?;
    writeln!(durable, "{text}\nrbd_cache = false").context("a configuration without a cache")?;
    let mut found: Vec<[Rounds; 2]> = vec![Default::default(); ROWS.len()];
    let mut ratios = vec![Samples::default(); ROWS.len()];
    for _ in 0..settings.rounds {
        let rows = ROWS.iter().zip(&mut found).zip(&mut ratios);
        for ((&((rw, bs, depth), supervisor), pair), ratio) in rows {
            let waiting = Waiting::Adaptive;
            let load = Load { disk: &disk, rw, bs, depth, waiting, supervisor, ..Load::default() };
            let ours = load.measure(settings)?;
            let conf = if supervisor { durable.path() } else { conf };
            let source = Source::Rbd { conf, name };
            let fio = fio::run(settings, &Job { source, rw, bs, depth })?;
            let iops = |row: &Value| row.get("iops").and_then(Value::as_f64).unwrap_or_default();
            if iops(&fio) > 0.0 {
                ratio.push(iops(&ours) / iops(&fio));
            }
            pair[0].push(ours);
            pair[1].push(fio);
        }
    }
    let title = "A disk rbd: behind the controller, next to fio's rbd engine, in turn";
    let head =
        ["rw", "bs", "iodepth", "a write is in", "contestant", "IOPS", "ratio", "p50", "p99"];
    let mut table = Table::new(title, &head);
    for ((&((rw, bs, depth), supervisor), pair), ratio) in ROWS.iter().zip(&found).zip(&ratios) {
        let promise = match (rw, supervisor) {
            ("randread", _) => "-",
            (_, false) => "a cache",
            (_, true) => "the cluster",
        };
        for (rounds, who) in pair.iter().zip(["shadowbell", "fio"]) {
            let mut row = rounds.row("rbd");
            if let Some(fields) = row.as_object_mut() {
                fields.insert("device".into(), who.into());
                fields.insert("ratio".into(), json!(ratio.median()));
                fields.insert("is_durable".into(), supervisor.into());
            }
            let ratio = if who == "fio" { "-".into() } else { format!("{:.2}", ratio.median()) };
            table.push(
                vec![
                    rw.into(),
                    size(bs),
                    depth.to_string(),
                    promise.into(),
                    who.into(),
                    count(rounds.median("iops")),
                    ratio,
                    time(rounds.median("latency_ns/p50")),
                    time(rounds.median("latency_ns/p99")),
                ],
                row,
            );
        }
    }
    Ok(table)
}
