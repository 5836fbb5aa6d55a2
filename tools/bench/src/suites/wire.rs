//! The suite `wire`: see [`crate::wire`].

use anyhow::Result;
use serde_json::json;

use crate::figures::{count, time};
use crate::samples::Samples;
use crate::settings::{QUEUE_DEPTHS, Settings};
use crate::table::Table;
use crate::wire::{self, TailUpdate};

/// Number of times that a word is sent back and forth, to measure the transfer time between the
/// CPUs.
const PASSES: u32 = 200_000;
/// Minimum transfer time of a word between CPUs without a common cache, in nanoseconds.
const SHARED_NS: f64 = 120.0;

pub(crate) fn run(settings: &Settings) -> Result<Vec<Table>> {
    let depths = settings.some(&QUEUE_DEPTHS);
    let mut found: Vec<[Samples; 3]> = depths.iter().map(|_| Default::default()).collect();
    let mut line = Samples::default();
    for _ in 0..settings.rounds {
        line.push(wire::line_time(settings.cpus, if settings.quick { 1000 } else { PASSES })?);
        for (depth, ways) in depths.iter().zip(&mut found) {
            for (update, samples) in TailUpdate::ALL.into_iter().zip(ways) {
                samples.push(wire::limit(settings.cpus, *depth, update, settings.time / 3)?);
            }
        }
    }
    let mut table = Table {
        title:
            "The wire limit: 64 bytes to the other CPU and 16 bytes back, without any other work"
                .into(),
        head: vec![
            "iodepth",
            "entries/s",
            "min",
            "max",
            "time each",
            "tail for each",
            "for a batch",
            "for 16 at most",
        ],
        ..Table::default()
    };
    for (&depth, ways) in depths.iter().zip(&found) {
        let [each, batch, few] = ways;
        let by_rate = |a: &(TailUpdate, &Samples), b: &(TailUpdate, &Samples)| {
            a.1.median().total_cmp(&b.1.median())
        };
        let Some((update, best)) = TailUpdate::ALL.into_iter().zip(ways).max_by(by_rate) else {
            continue;
        };
        let [min, median, max] = best.point();
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
            "wire_iops": median, "bandwidth_bytes": median * 80.0, "tail_update": update.name(),
            "latency_ns": { "mean": f64::from(depth) / median * 1e9 }, "rounds": settings.rounds,
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
    Ok(vec![table])
}
