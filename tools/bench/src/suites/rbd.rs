//! A disk `rbd:` behind the controller next to fio's rbd engine on the same image, in turn. For
//! `cargo xtask ceph`, which has a cluster.

use std::path::Path;

use anyhow::Result;
use serde_json::{Value, json};

use super::contest::Row;
use crate::figures::{count, size, time};
use crate::fio::{self, Job, Source};
use crate::load::{Load, Waiting};
use crate::machine;
use crate::samples::{Rounds, Samples};
use crate::settings::Settings;
use crate::table::Table;

const ROWS: [Row; 4] = [
    ("randread", 4096, 1),
    ("randread", 4096, 32),
    ("randwrite", 4096, 1),
    ("randwrite", 4096, 32),
];

/// Of the image `rbd/NAME` of a cluster.
pub(crate) fn table(settings: &Settings, conf: &Path, name: &str) -> Result<Table> {
    machine::need("fio", "fio", !settings.quick).map_err(anyhow::Error::msg)?;
    let disk = format!("rbd:rbd/{name}?conf={}", conf.display());
    let mut found: Vec<[Rounds; 2]> = vec![Default::default(); ROWS.len()];
    let mut ratios = vec![Samples::default(); ROWS.len()];
    for _ in 0..settings.rounds {
        for ((&(rw, bs, depth), pair), ratio) in ROWS.iter().zip(&mut found).zip(&mut ratios) {
            let waiting = Waiting::Adaptive;
            let load = Load { disk: &disk, rw, bs, depth, waiting, ..Load::default() };
            let ours = load.measure(settings)?;
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
    let head = ["rw", "bs", "iodepth", "contestant", "IOPS", "ratio", "p50", "p99"];
    let mut table = Table::new(title, &head);
    for ((&(rw, bs, depth), pair), ratio) in ROWS.iter().zip(&found).zip(&ratios) {
        for (rounds, who) in pair.iter().zip(["shadowbell", "fio"]) {
            let mut row = rounds.row("rbd");
            if let Some(fields) = row.as_object_mut() {
                fields.insert("device".into(), who.into());
                fields.insert("ratio".into(), json!(ratio.median()));
            }
            let ratio = if who == "fio" { "-".into() } else { format!("{:.2}", ratio.median()) };
            table.push(
                vec![
                    rw.into(),
                    size(bs),
                    depth.to_string(),
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
