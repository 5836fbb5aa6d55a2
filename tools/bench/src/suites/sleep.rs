//! The suite `sleep`: I/O threads that sleep when they have no work, compared with I/O threads that
//! poll.

use anyhow::Result;
use serde_json::{Value, json};

use crate::figures::{count, per_io, percent, time};
use crate::load::{Load, Waiting};
use crate::samples::Rounds;
use crate::settings::Settings;
use crate::table::Table;
use crate::{machine, syscalls};

const DEPTHS: [u32; 3] = [1, 8, 32];
const RATES: [u64; 3] = [10_000, 50_000, 200_000];
const WAITING: [Waiting; 3] = [Waiting::Polling, Waiting::Adaptive, Waiting::Sleeping];

pub(crate) fn run(settings: &Settings) -> Result<Vec<Table>> {
    Ok(vec![sleeping(settings)?, paced(settings)?])
}

/// Measures a load at full speed in each waiting mode.
fn sleeping(settings: &Settings) -> Result<Table> {
    let mut cases: Vec<(u32, Waiting, Rounds)> = Vec::new();
    for depth in settings.some(&DEPTHS) {
        cases.extend(WAITING.map(|waiting| (depth, waiting, Rounds::default())));
    }
    let load = |depth, waiting| Load { depth, waiting, ..Load::default() };
    for _ in 0..settings.rounds {
        for (depth, waiting, rounds) in &mut cases {
            rounds.push(load(*depth, *waiting).measure(settings)?);
        }
    }
    let mut table = Table {
        title: "Null disk, 4 KiB random read, by how both sides wait".into(),
        head: vec![
            "iodepth",
            "waiting",
            "IOPS",
            "p50",
            "p99",
            "MMIO/IO",
            "interrupts/IO",
            "syscalls/IO",
            "driver",
            "controller",
        ],
        ..Table::default()
    };
    let counts = machine::need("strace", "strace", !settings.quick);
    if let Err(why) = &counts {
        table.notes.push(format!("System calls were not counted: {why}."));
    }
    for (depth, waiting, rounds) in &cases {
        let calls = match counts {
            Ok(()) => Some(syscalls::count(settings, &load(*depth, *waiting))?),
            Err(_) => None,
        };
        let mut row = rounds.row("sleep");
        if let Some(fields) = row.as_object_mut() {
            fields.insert("syscalls_per_io".into(), json!(calls.map(|c| c.driver)));
            fields.insert("controller_syscalls_per_io".into(), json!(calls.map(|c| c.controller)));
        }
        table.rows.push(vec![
            depth.to_string(),
            waiting.name().into(),
            count(rounds.median("iops")),
            time(rounds.median("latency_ns/p50")),
            time(rounds.median("latency_ns/p99")),
            per_io(row.get("mmio_per_io").and_then(Value::as_f64).unwrap_or_default()),
            per_io(rounds.median("interrupts_per_io")),
            calls
                .map_or("-".into(), |c| format!("{} + {}", per_io(c.driver), per_io(c.controller))),
            percent(rounds.median("cpu_percent")),
            percent(rounds.median("controller_cpu_percent")),
        ]);
        table.json.push(row);
    }
    if counts.is_ok() {
        table.notes.push(
            "System calls (driver + controller) are counted in a separate run, which strace slows \
             down. The adaptive mode sleeps more often there than in the timed run."
                .into(),
        );
    }
    Ok(table)
}

/// Measures a load with a fixed rate: CPU time, and latency from the time at which each I/O is due.
fn paced(settings: &Settings) -> Result<Table> {
    let rates = settings.some(&RATES);
    let mut cases: Vec<(u64, [Rounds; 3])> =
        rates.iter().map(|rate| (*rate, Default::default())).collect();
    for _ in 0..settings.rounds {
        for (rate, rounds) in &mut cases {
            for (waiting, rounds) in WAITING.into_iter().zip(rounds) {
                let load = Load { depth: 32, waiting, rate: Some(*rate), ..Load::default() };
                rounds.push(load.measure(settings)?);
            }
        }
    }
    let mut table = Table {
        title: "A paced load of 4 KiB random reads, null disk".into(),
        head: vec![
            "offered",
            "waiting",
            "IOPS",
            "p50",
            "p99",
            "p99.9",
            "driver",
            "controller",
            "benefit",
            "of the CPU",
        ],
        ..Table::default()
    };
    for (rate, rounds) in &cases {
        let [polling, adaptive, sleeping] = rounds.each_ref();
        let (benefit, share) = gain(polling, adaptive, sleeping);
        for (waiting, rounds) in WAITING.into_iter().zip(rounds) {
            let is_adaptive = waiting == Waiting::Adaptive;
            let mut row = rounds.row("paced");
            if let Some(fields) = row.as_object_mut()
                && is_adaptive
            {
                fields.insert("latency_benefit_percent".into(), json!(benefit));
                fields.insert("cpu_of_polling_percent".into(), json!(share));
            }
            let shown = |value: Option<f64>| match value {
                Some(value) if is_adaptive => percent(value),
                _ => "-".into(),
            };
            table.rows.push(vec![
                count(*rate as f64),
                waiting.name().into(),
                count(rounds.median("iops")),
                time(rounds.median("latency_ns/p50")),
                time(rounds.median("latency_ns/p99")),
                time(rounds.median("latency_ns/p999")),
                percent(rounds.median("cpu_percent")),
                percent(rounds.median("controller_cpu_percent")),
                shown(benefit),
                shown(Some(share)),
            ]);
            table.json.push(row);
        }
    }
    table.notes.push(
        "benefit: gain in p50 over sleeping, in percent of polling's gain; of the CPU: CPU time of \
         both sides, in percent of polling's."
            .into(),
    );
    Ok(table)
}

/// Gain of the adaptive mode, as two figures. The first is its reduction of the p50 latency, in
/// percent of the reduction by polling; both reductions are relative to sleeping. It is `None` if
/// polling has no shorter latency than sleeping. The second is the CPU time of the adaptive mode in
/// percent of the CPU time of polling.
fn gain(polling: &Rounds, adaptive: &Rounds, sleeping: &Rounds) -> (Option<f64>, f64) {
    let p50 = |rounds: &Rounds| rounds.median("latency_ns/p50");
    let cpu =
        |rounds: &Rounds| rounds.median("cpu_percent") + rounds.median("controller_cpu_percent");
    let most = p50(sleeping) - p50(polling);
    let benefit = (most > 0.0).then(|| (p50(sleeping) - p50(adaptive)) / most * 100.0);
    (benefit, cpu(adaptive) / cpu(polling) * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_adaptive_gain_is_between_polling_and_sleeping() {
        let rounds = |p50: u64, driver: f64, controller: f64| {
            let mut rounds = Rounds::default();
            rounds.push(json!({
                "latency_ns": { "p50": p50 }, "cpu_percent": driver,
                "controller_cpu_percent": controller,
            }));
            rounds
        };
        let (polling, sleeping) = (rounds(1000, 100.0, 100.0), rounds(21_000, 10.0, 20.0));
        let (benefit, share) = gain(&polling, &rounds(2000, 30.0, 40.0), &sleeping);
        assert_eq!((benefit, share), (Some(95.0), 35.0));
        assert_eq!(gain(&sleeping, &polling, &polling).0, None);
    }
}
