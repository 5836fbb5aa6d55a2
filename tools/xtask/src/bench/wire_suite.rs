//! The suite `wire`: see [`wire`].

use anyhow::Result;
use serde_json::json;

use super::format::{count, time};
use super::plot::{Line, Plot};
use super::samples::Samples;
use super::wire::{self, Tell};
use super::{Bench, Table};

/// The depths that all suites about queues go through.
pub(super) const DEPTHS: [u32; 6] = [1, 2, 4, 8, 32, 128];
/// Words passed to and fro, to see how far apart the processors are.
const PASSES: u32 = 200_000;
/// A word takes longer than this between processors that share no cache.
const SHARED_NS: f64 = 120.0;

pub(super) fn run(bench: &Bench) -> Result<Vec<Table>> {
    let depths = bench.some(&DEPTHS);
    let mut found: Vec<[Samples; 3]> = depths.iter().map(|_| Default::default()).collect();
    let mut line = Samples::default();
    for _ in 0..bench.rounds {
        line.push(wire::line_time(bench.cpus, if bench.quick { 1000 } else { PASSES })?);
        for (depth, ways) in depths.iter().zip(&mut found) {
            for (tell, samples) in Tell::ALL.into_iter().zip(ways) {
                samples.push(wire::limit(bench.cpus, *depth, tell, bench.time / 3)?);
            }
        }
    }
    let mut table = Table {
        title: "The wire limit: 64 bytes there, 16 bytes back, and nothing else".into(),
        head: vec![
            "iodepth",
            "entries/s",
            "min",
            "max",
            "time each",
            "told of each",
            "of batches",
            "of 16 at most",
        ],
        ..Table::default()
    };
    let mut points = Vec::new();
    for (&depth, ways) in depths.iter().zip(&found) {
        let [each, batch, few] = ways;
        let by_rate =
            |a: &(Tell, &Samples), b: &(Tell, &Samples)| a.1.median().total_cmp(&b.1.median());
        let Some((told, best)) = Tell::ALL.into_iter().zip(ways).max_by(by_rate) else { continue };
        let [min, median, max] = best.point();
        points.push(Some([min, median, max]));
        table.rows.push(vec![
            depth.to_string(),
            count(median),
            count(min),
            count(max),
            time(1e9 / median),
            count(each.median()),
            count(batch.median()),
            count(few.median()),
        ]);
        table.json.push(json!({
            "table": "wire", "device": "wire", "doorbells": "shadow", "iodepth": depth,
            "numjobs": 1, "bs": 64, "iops": median, "iops_min": min, "iops_max": max,
            "wire_iops": median, "bandwidth_bytes": median * 80.0, "told": told.name(),
            "latency_ns": { "mean": f64::from(depth) / median * 1e9 }, "rounds": bench.rounds,
            "line_ns": line.median(),
        }));
    }
    let [min, median, max] = line.point();
    table.notes.push(format!(
        "A cache line takes {} from processor to processor ({} to {}): {}.",
        time(median),
        time(min),
        time(max),
        if median > SHARED_NS { "they share no cache" } else { "they share a cache" },
    ));
    table.plots.push(Plot {
        name: "wire".into(),
        title: "The wire limit".into(),
        x: "iodepth".into(),
        y: "entries a second".into(),
        ticks: depths.iter().map(ToString::to_string).collect(),
        lines: vec![Line { name: "wire".into(), points }],
    });
    Ok(vec![table])
}
