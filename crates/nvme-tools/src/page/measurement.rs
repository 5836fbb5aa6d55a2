//! HTML of one measurement, and of several measurements in comparison.

use super::chart::{self, BLUE, GREEN, Group, Line, ORANGE};
use super::html::{Card, cards, escape, figure, table};
use crate::latency::Latency;
use crate::load::{Doorbells, Interval, QueueSum, Timeline};
use crate::report::Row;
use shadowbell_process::units;

/// Measurement: its results and its time line.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    pub(crate) row: Row,
    pub(crate) timeline: Timeline,
}

fn nanoseconds(latency: Option<Latency>, which: fn(&Latency) -> u64) -> String {
    latency.map_or_else(|| "-".to_owned(), |latency| units::nanoseconds(which(&latency) as f64))
}

fn percent(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        // Values that would round to 100 % are shown as less than 100 %.
        Some(value) if value < 100.0 && value > 99.99 => ">99.99 %".to_owned(),
        Some(value) => format!("{value:.2} %"),
    }
}

/// HTML of a measurement: cards, diagrams, and a table of its queues.
///
/// # Errors
/// A diagram cannot be drawn.
pub(crate) fn measurement(measured: &Measured) -> anyhow::Result<String> {
    let Measured { row, timeline } = measured;
    let Timeline { intervals, queues } = timeline;
    let mut doorbells = Doorbells::default();
    queues.iter().for_each(|queue| doorbells.add(queue.doorbells));
    let latency = row.latency_ns;
    let mut html = cards(&[
        Card {
            name: "I/Os per second",
            figure: units::count(row.iops),
            note: units::bandwidth(row.bandwidth_bytes),
        },
        Card {
            name: "Latency, median",
            figure: nanoseconds(latency, |latency| latency.p50),
            note: latency.map_or_else(String::new, |latency| {
                format!("mean {}", units::nanoseconds(latency.mean))
            }),
        },
        Card {
            name: "Latency, p99",
            figure: nanoseconds(latency, |latency| latency.p99),
            note: format!("p99.9 {}", nanoseconds(latency, |latency| latency.p999)),
        },
        Card {
            name: "Doorbells saved",
            figure: percent(doorbells.percent_saved()),
            note: format!(
                "{} saved, {} rung",
                units::count(doorbells.saved as f64),
                units::count(doorbells.rung as f64)
            ),
        },
        Card {
            name: "MMIO per I/O",
            figure: units::per_io(row.mmio_per_io),
            note: format!("interrupts per I/O {}", units::per_io(row.interrupts_per_io)),
        },
        Card {
            name: "CPU time per I/O",
            figure: units::nanoseconds(row.cpu_ns_per_io),
            note: row.controller_cpu_ns_per_io.map_or_else(
                || "of the driver".to_owned(),
                |server| format!("driver; server {}", units::nanoseconds(server)),
            ),
        },
    ]);
    html += "<div class=\"figures\">\n";
    html += &figures(intervals)?;
    if queues.len() > 1 {
        let group = |queue: &QueueSum| Group {
            name: vec![queue.qid.to_string()],
            values: vec![queue.iops],
        };
        let groups: Vec<_> = queues.iter().map(group).collect();
        let title = "I/Os per second of each queue";
        let axes = ("queue", "I/Os per second");
        let svg = chart::bars(title, axes, &[BLUE], &groups, &units::count)?;
        html += &figure(title, &[], &svg);
    }
    html += "</div>\n";
    html += &queue_table(timeline);
    Ok(html)
}

/// Diagrams over time.
fn figures(intervals: &[Interval]) -> anyhow::Result<String> {
    let latency = |which: fn(&Latency) -> u64| {
        move |interval: &Interval| interval.latency.as_ref().map(|latency| which(latency) as f64)
    };
    let iops = |interval: &Interval| Some(interval.iops);
    let svg = chart::lines(
        "I/Os per second over time",
        intervals,
        "I/Os per second",
        &[Line { color: BLUE, value: &iops }],
    )?;
    let mut html = figure("I/Os per second", &[], &svg);
    let (p50, p99, p999) = (latency(|l| l.p50), latency(|l| l.p99), latency(|l| l.p999));
    let svg = chart::latency_lines(
        "Latency percentiles over time",
        intervals,
        &[
            Line { color: ORANGE, value: &p999 },
            Line { color: GREEN, value: &p99 },
            Line { color: BLUE, value: &p50 },
        ],
    )?;
    html += &figure("Latency", &[("p50", BLUE), ("p99", GREEN), ("p99.9", ORANGE)], &svg);
    let svg = chart::distribution("Distribution of latencies", intervals)?;
    html += &figure("Latency of all measured I/Os", &[], &svg);
    let svg = chart::heat("Distribution of latencies over time", intervals)?;
    html += &figure("Latency over time: the darker, the more I/Os", &[("many", BLUE)], &svg);
    let rate = |count: u64, interval: &Interval| Some(count as f64 / interval.seconds);
    let rung = |interval: &Interval| rate(interval.doorbells.rung, interval);
    let saved = |interval: &Interval| rate(interval.doorbells.saved, interval);
    let svg = chart::lines(
        "Doorbells per second over time",
        intervals,
        "doorbells per second",
        &[Line { color: GREEN, value: &saved }, Line { color: ORANGE, value: &rung }],
    )?;
    let keys = [("saved by the shadow entry", GREEN), ("rung by MMIO", ORANGE)];
    html += &figure("Doorbells", &keys, &svg);
    Ok(html)
}

fn queue_table(timeline: &Timeline) -> String {
    let headings = [
        "Queue",
        "I/Os",
        "I/Os per second",
        "p50",
        "p99",
        "p99.9",
        "max",
        "doorbells rung",
        "saved",
        "saved, %",
        "interrupts",
    ];
    let row = |queue: &QueueSum| {
        vec![
            queue.qid.to_string(),
            queue.commands.to_string(),
            units::count(queue.iops),
            nanoseconds(queue.latency, |latency| latency.p50),
            nanoseconds(queue.latency, |latency| latency.p99),
            nanoseconds(queue.latency, |latency| latency.p999),
            nanoseconds(queue.latency, |latency| latency.max),
            queue.doorbells.rung.to_string(),
            queue.doorbells.saved.to_string(),
            percent(queue.doorbells.percent_saved()),
            queue.interrupts.to_string(),
        ]
    };
    table(&headings, &timeline.queues.iter().map(row).collect::<Vec<_>>())
}

/// HTML of measurements in pairs, without shadow doorbells and with: diagrams that compare each
/// pair, then each measurement in full.
///
/// # Errors
/// A diagram cannot be drawn.
pub(crate) fn overview(pairs: &[[Measured; 2]]) -> anyhow::Result<String> {
    let keys = [("trapped (MMIO)", ORANGE), ("shadow doorbells", BLUE)];
    let colors = [ORANGE, BLUE];
    let groups = |value: &dyn Fn(&Row) -> f64| -> Vec<Group> {
        let group = |[without, with]: &[Measured; 2]| Group {
            name: vec![without.row.table.clone(), format!("iodepth {}", without.row.iodepth)],
            values: vec![value(&without.row), value(&with.row)],
        };
        pairs.iter().map(group).collect()
    };
    let p50 = |row: &Row| row.latency_ns.map_or(0.0, |latency| latency.p50 as f64);
    let mut html = String::from("<div class=\"figures\">\n");
    for (title, unit, value, format) in [
        (
            "I/Os per second",
            "I/Os per second",
            &(|row: &Row| row.iops) as &dyn Fn(&Row) -> f64,
            &units::count as &dyn Fn(f64) -> String,
        ),
        ("MMIO writes per I/O", "writes per I/O", &|row| row.mmio_per_io, &units::per_io),
        ("Median latency", "latency", &p50, &units::nanoseconds),
        (
            "CPU time of the driver per I/O",
            "time per I/O",
            &|row| row.cpu_ns_per_io,
            &units::nanoseconds,
        ),
    ] {
        let svg = chart::bars(title, ("", unit), &colors, &groups(value), format)?;
        html += &figure(title, &keys, &svg);
    }
    html += "</div>\n";
    let row = |[without, with]: &[Measured; 2]| {
        let (without, with) = (&without.row, &with.row);
        vec![
            format!("{}, iodepth {}, {} job(s)", without.table, without.iodepth, without.numjobs),
            units::count(without.iops),
            units::count(with.iops),
            format!("{:.1}x", with.iops / without.iops),
            units::per_io(without.mmio_per_io),
            units::per_io(with.mmio_per_io),
            nanoseconds(without.latency_ns, |latency| latency.p50),
            nanoseconds(with.latency_ns, |latency| latency.p50),
            nanoseconds(without.latency_ns, |latency| latency.p99),
            nanoseconds(with.latency_ns, |latency| latency.p99),
        ]
    };
    html += &table(
        &[
            "Measurement",
            "IOPS: trapped",
            "shadow",
            "gain",
            "MMIO per I/O: trapped",
            "shadow",
            "p50: trapped",
            "shadow",
            "p99: trapped",
            "shadow",
        ],
        &pairs.iter().map(row).collect::<Vec<_>>(),
    );
    html += "<h2>Each measurement</h2>\n";
    for measured in pairs.iter().flatten() {
        let Row { table, iodepth, doorbells, iops, .. } = &measured.row;
        let name = format!(
            "{table}, iodepth {iodepth}, {doorbells} doorbells: {} I/Os per second",
            units::count(*iops)
        );
        let body = measurement(measured)?;
        html += &format!("<details><summary>{}</summary>\n{body}</details>\n", escape(&name));
    }
    Ok(html)
}
