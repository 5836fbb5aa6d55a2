//! The suite `null`: cost of queues and doorbells, measured with a disk that completes every
//! request at once.

use anyhow::Result;
use serde_json::{Value, json};

use crate::figures::{count, per_io, percent, size, time};
use crate::load::Load;
use crate::samples::{Rounds, Samples};
use crate::settings::{QUEUE_DEPTHS, Settings};
use crate::table::Table;
use crate::{machine, syscalls, wire};

/// One condition, and its results.
struct Case {
    bs: u32,
    depth: u32,
    measured: Rounds,
    wire: Samples,
    /// IOPS in percent of the wire limit, in each round.
    share: Samples,
}

pub(crate) fn run(settings: &Settings) -> Result<Vec<Table>> {
    let case = |bs, depth| Case {
        bs,
        depth,
        measured: Rounds::default(),
        wire: Samples::default(),
        share: Samples::default(),
    };
    let mut cases: Vec<Case> =
        settings.some(&QUEUE_DEPTHS).into_iter().map(|d| case(4096, d)).collect();
    cases.push(case(512, 32));
    for _ in 0..settings.rounds {
        for case in &mut cases {
            let (limit, _) = wire::best(settings.cpus, case.depth, settings.time / 4)?;
            let row = case.load().measure(settings)?;
            let iops = row.get("iops").and_then(Value::as_f64).unwrap_or_default();
            case.wire.push(limit);
            case.share.push(iops / limit * 100.0);
            case.measured.push(row);
        }
    }
    let mut table = Table {
        title: "Null disk, random read, both sides polling".into(),
        head: vec![
            "bs",
            "iodepth",
            "IOPS",
            "min",
            "max",
            "of the wire",
            "p50",
            "p99",
            "p99.9",
            "driver/IO",
            "controller/IO",
            "MMIO/IO",
            "interrupts/IO",
            "syscalls/IO",
        ],
        ..Table::default()
    };
    let counts = machine::need("strace", "strace", !settings.quick);
    if let Err(why) = &counts {
        table.notes.push(format!("System calls were not counted: {why}."));
    }
    for case in &cases {
        let calls = match counts {
            Ok(()) => Some(syscalls::count(settings, &case.load())?),
            Err(_) => None,
        };
        let [min, median, max] = case.measured.samples("iops").point();
        let mut row = case.measured.row("null");
        if let Some(fields) = row.as_object_mut() {
            fields.insert("wire_iops".into(), json!(case.wire.median()));
            fields.insert("wire_percent".into(), json!(case.share.median()));
            fields.insert("syscalls_per_io".into(), json!(calls.map(|c| c.driver)));
            fields.insert("controller_syscalls_per_io".into(), json!(calls.map(|c| c.controller)));
        }
        let figure = |name: &str| case.measured.median(name);
        table.rows.push(vec![
            size(case.bs),
            case.depth.to_string(),
            count(median),
            count(min),
            count(max),
            percent(case.share.median()),
            time(figure("latency_ns/p50")),
            time(figure("latency_ns/p99")),
            time(figure("latency_ns/p999")),
            time(figure("cpu_ns_per_io")),
            time(figure("controller_cpu_ns_per_io")),
            per_io(row.get("mmio_per_io").and_then(Value::as_f64).unwrap_or_default()),
            per_io(figure("interrupts_per_io")),
            calls
                .map_or("-".into(), |c| format!("{} + {}", per_io(c.driver), per_io(c.controller))),
        ]);
        table.json.push(row);
    }
    Ok(vec![table])
}

impl Case {
    fn load(&self) -> Load<'static> {
        Load { bs: self.bs, depth: self.depth, ..Load::default() }
    }
}
