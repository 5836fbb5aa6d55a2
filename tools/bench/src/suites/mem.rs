//! The suite `mem`: bandwidth of a memory disk, next to that of memory.

use anyhow::Result;
use serde_json::{Value, json};

use crate::figures::{bandwidth, count, percent, size, time};
use crate::load::Load;
use crate::memcpy::Memory;
use crate::samples::{Rounds, Samples};
use crate::settings::Settings;
use crate::table::Table;

const SIZES: [u32; 4] = [4 << 10, 64 << 10, 128 << 10, 1 << 20];
const DEPTHS: [u32; 2] = [1, 32];

/// One condition, and its results.
struct Case {
    bs: u32,
    depth: u32,
    write: bool,
    measured: Rounds,
    memcpy: Samples,
    /// Bandwidth in percent of memcpy's, in each round.
    share: Samples,
}

pub(crate) fn run(settings: &Settings) -> Result<Vec<Table>> {
    // The disk is several times as large as the caches, except in a quick run.
    let mebibytes: usize = if settings.quick { 64 } else { 256 };
    let disk = format!("mem:{mebibytes}MiB");
    let memory = Memory::new(mebibytes << 20)?;
    let mut cases = Vec::new();
    for write in [false, true] {
        for depth in DEPTHS {
            for bs in settings.some(&SIZES) {
                let (measured, memcpy, share) = Default::default();
                cases.push(Case { bs, depth, write, measured, memcpy, share });
            }
        }
    }
    for _ in 0..settings.rounds {
        for case in &mut cases {
            let (block, buffers) = (case.bs as usize, case.depth as usize);
            let copied =
                memory.copy(settings.cpus[0], block, buffers, case.write, settings.time / 2)?;
            let row = case.load(&disk).measure(settings)?;
            let moved = row.get("bandwidth_bytes").and_then(Value::as_f64).unwrap_or_default();
            case.memcpy.push(copied);
            case.share.push(moved / copied * 100.0);
            case.measured.push(row);
        }
    }
    let mut table = Table {
        title: format!("Memory disk of {mebibytes} MiB, both sides polling, next to memcpy"),
        head: vec!["rw", "bs", "iodepth", "bandwidth", "memcpy", "of memcpy", "IOPS", "p50", "p99"],
        ..Table::default()
    };
    for case in &cases {
        let [copied_min, copied, copied_max] = case.memcpy.point();
        let mut row = case.measured.row("mem");
        if let Some(fields) = row.as_object_mut() {
            fields.insert("memcpy_bytes".into(), json!(copied));
            fields.insert("memcpy_percent".into(), json!(case.share.median()));
        }
        let block = f64::from(case.bs);
        table.json.push(row);
        table.json.push(json!({
            "table": "mem", "device": "memcpy", "rw": case.rw(), "bs": case.bs,
            "iodepth": case.depth, "numjobs": 1, "iops": copied / block,
            "iops_min": copied_min / block, "iops_max": copied_max / block,
            "bandwidth_bytes": copied, "rounds": settings.rounds,
        }));
        table.rows.push(vec![
            case.rw().into(),
            size(case.bs),
            case.depth.to_string(),
            bandwidth(case.measured.median("bandwidth_bytes")),
            bandwidth(copied),
            percent(case.share.median()),
            count(case.measured.median("iops")),
            time(case.measured.median("latency_ns/p50")),
            time(case.measured.median("latency_ns/p99")),
        ]);
    }
    Ok(vec![table])
}

impl Case {
    fn rw(&self) -> &'static str {
        if self.write { "randwrite" } else { "randread" }
    }

    fn load<'a>(&self, disk: &'a str) -> Load<'a> {
        Load { disk, rw: self.rw(), bs: self.bs, depth: self.depth, fill: true, ..Load::default() }
    }
}
