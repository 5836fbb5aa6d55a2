//! The suite `null`: what queues and doorbells cost when the disk costs nothing.

use anyhow::Result;
use serde_json::{Value, json};

use super::format::{count, per_io, percent, size, time};
use super::ours::Load;
use super::plot::{Line, Plot};
use super::samples::{Rounds, Samples};
use super::wire_suite::DEPTHS;
use super::{Bench, Table, machine, syscalls, wire};

/// One condition, and what was found.
struct Case {
    bs: u32,
    depth: u32,
    ours: Rounds,
    wire: Samples,
    /// Ours in percent of the wire, in each round.
    share: Samples,
}

pub(super) fn run(bench: &Bench) -> Result<Vec<Table>> {
    let case = |bs, depth| Case {
        bs,
        depth,
        ours: Rounds::default(),
        wire: Samples::default(),
        share: Samples::default(),
    };
    let mut cases: Vec<Case> = bench.some(&DEPTHS).into_iter().map(|d| case(4096, d)).collect();
    cases.push(case(512, 32));
    for _ in 0..bench.rounds {
        for case in &mut cases {
            let (limit, _) = wire::best(bench.cpus, case.depth, bench.time / 4)?;
            let row = case.load().measure(bench)?;
            let iops = row.get("iops").and_then(Value::as_f64).unwrap_or_default();
            case.wire.push(limit);
            case.share.push(iops / limit * 100.0);
            case.ours.push(row);
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
    let counts = machine::need("strace", "strace", !bench.quick);
    if let Err(why) = &counts {
        table.notes.push(format!("System calls were not counted: {why}."));
    }
    for case in &cases {
        let calls = match counts {
            Ok(()) => Some(syscalls::count(bench, &case.load())?),
            Err(_) => None,
        };
        let [min, median, max] = case.ours.samples("iops").point();
        let mut row = case.ours.row("null");
        if let Some(fields) = row.as_object_mut() {
            fields.insert("wire_iops".into(), json!(case.wire.median()));
            fields.insert("wire_percent".into(), json!(case.share.median()));
            fields.insert("syscalls_per_io".into(), json!(calls.map(|c| c.driver)));
            fields.insert("controller_syscalls_per_io".into(), json!(calls.map(|c| c.controller)));
        }
        let figure = |name: &str| case.ours.median(name);
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
    table.plots.push(plot(&cases));
    Ok(vec![table])
}

impl Case {
    fn load(&self) -> Load<'static> {
        Load { bs: self.bs, depth: self.depth, ..Load::default() }
    }
}

fn plot(cases: &[Case]) -> Plot {
    let pages = || cases.iter().filter(|case| case.bs == 4096);
    let line = |name: &str, of: &dyn Fn(&Case) -> Samples| Line {
        name: name.to_owned(),
        points: pages().map(|case| Some(of(case).point())).collect(),
    };
    Plot {
        name: "null".into(),
        title: "Null disk, 4 KiB random read, both sides polling".into(),
        x: "iodepth".into(),
        y: "IOPS".into(),
        ticks: pages().map(|case| case.depth.to_string()).collect(),
        lines: vec![
            line("the wire limit", &|case| case.wire.clone()),
            line("shadowbell", &|case| case.ours.samples("iops")),
        ],
    }
}
