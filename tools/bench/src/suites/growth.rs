//! The suite `growth`: many queue pairs, and many controllers in one process.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::attachments::IdleClients;
use crate::figures::{bytes, count, per_io, percent, time};
use crate::load::{Load, Waiting};
use crate::process::{Memory, memory, used};
use crate::samples::{Rounds, Samples};
use crate::server::Server;
use crate::settings::Settings;
use crate::table::Table;

const QUEUES: [u16; 6] = [1, 2, 4, 8, 16, 32];
const CONTROLLERS: [usize; 4] = [1, 8, 64, 256];
/// Numbers of idle controllers beside a busy one.
const NEIGHBOURS: [usize; 3] = [0, 63, 255];
/// Queue depth of each queue pair.
const DEPTH: u32 = 4;
/// Number of queue pairs of the controller on which the memory per queue pair is measured.
const MANY_QUEUES: u16 = 32;
/// Reads per second from each controller under a light load.
const LIGHT: u64 = 10;

pub(crate) fn run(settings: &Settings) -> Result<Vec<Table>> {
    Ok(vec![queues(settings)?, controllers(settings)?, neighbours(settings)?])
}

/// Measures many queue pairs, with one I/O thread that polls, and with two I/O threads that sleep
/// when idle, because they share the CPUs with the driver.
fn queues(settings: &Settings) -> Result<Table> {
    let jobs = settings.some(&QUEUES);
    let mut cases: Vec<(u16, u16, Rounds)> = Vec::new();
    for workers in [1, 2] {
        cases.extend(jobs.iter().map(|jobs| (workers, *jobs, Rounds::default())));
    }
    for _ in 0..settings.rounds {
        for (workers, jobs, rounds) in &mut cases {
            let waiting = if *workers == 1 { Waiting::Polling } else { Waiting::Adaptive };
            let (workers, jobs) = (*workers, *jobs);
            let load = Load { depth: DEPTH, jobs, workers, waiting, ..Load::default() };
            rounds.push(load.measure(settings)?);
        }
    }
    let mut table = Table {
        title: format!("Queue pairs with {DEPTH} I/Os each, null disk, 4 KiB random read"),
        head: vec![
            "workers",
            "queue pairs",
            "IOPS",
            "p50",
            "p99",
            "MMIO/IO",
            "interrupts/IO",
            "driver/IO",
            "controller/IO",
        ],
        ..Table::default()
    };
    for (workers, jobs, rounds) in &cases {
        let row = rounds.row("growth-queues");
        table.rows.push(vec![
            workers.to_string(),
            jobs.to_string(),
            count(rounds.median("iops")),
            time(rounds.median("latency_ns/p50")),
            time(rounds.median("latency_ns/p99")),
            per_io(row.get("mmio_per_io").and_then(Value::as_f64).unwrap_or_default()),
            per_io(rounds.median("interrupts_per_io")),
            time(rounds.median("cpu_ns_per_io")),
            time(rounds.median("controller_cpu_ns_per_io")),
        ]);
        table.json.push(row);
    }
    table.notes.push(
        "A single worker has a processor for itself, and polls. Two workers share two processors \
         with the driver, and sleep when they are idle: their counts are meaningful, their speed is \
         not."
            .into(),
    );
    Ok(table)
}

/// Results of the measurements with a given number of controllers.
#[derive(Debug, Clone, Default)]
struct Found {
    served: Memory,
    attached: Memory,
    attach_ns: Samples,
    slowest_ns: Samples,
    idle_percent: Samples,
    idle_wakeups: Samples,
    light_percent: Samples,
    light_p50: Samples,
    light_p99: Samples,
}

fn controllers(settings: &Settings) -> Result<Table> {
    let counts = if settings.quick { vec![1, 8] } else { CONTROLLERS.to_vec() };
    let mut found = vec![Found::default(); counts.len()];
    for _ in 0..settings.rounds {
        for (count, found) in counts.iter().zip(&mut found) {
            idle(settings, *count, 1, found)?;
            light(settings, *count, found)?;
        }
    }
    let mut wide = Found::default();
    idle(settings, 1, MANY_QUEUES, &mut wide)?;
    let mut table = Table {
        title: "Controllers in one process, each attached with one queue pair".into(),
        head: vec![
            "controllers",
            "memory",
            "each",
            "shared each",
            "attach",
            "slowest",
            "idle CPU",
            "idle wakeups/s",
            "CPU at light load",
            "p50",
            "p99",
        ],
        ..Table::default()
    };
    let first = found.first().cloned().unwrap_or_default();
    for (&count, found) in counts.iter().zip(&found) {
        // Memory that each controller after the first one needs.
        let each = |of: fn(&Memory) -> u64| {
            let more = of(&found.attached) as f64 - of(&first.attached) as f64;
            (count > 1).then(|| more / (count - 1) as f64)
        };
        let (own, shared) = (each(|m| m.anonymous), each(|m| m.shared));
        let shown = |value: Option<f64>| value.map_or("-".into(), bytes);
        table.rows.push(vec![
            count.to_string(),
            bytes(found.attached.anonymous as f64),
            shown(own),
            shown(shared),
            time(found.attach_ns.median()),
            time(found.slowest_ns.median()),
            percent(found.idle_percent.median()),
            format!("{:.1}", found.idle_wakeups.median()),
            percent(found.light_percent.median()),
            time(found.light_p50.median()),
            time(found.light_p99.median()),
        ]);
        table.json.push(json!({
            "table": "growth-controllers", "device": "shadowbell", "doorbells": "shadow",
            "controllers": count, "numjobs": 1, "iodepth": 1, "bs": 512,
            "memory_bytes": found.attached.anonymous, "memory_bytes_served": found.served.anonymous,
            "memory_bytes_per_controller": own, "shared_bytes_per_controller": shared,
            "attach_ns": { "p50": found.attach_ns.median(), "max": found.slowest_ns.median() },
            "idle_cpu_percent": found.idle_percent.median(),
            "idle_wakeups_per_second": found.idle_wakeups.median(),
            "light_iops": LIGHT * count as u64,
            "controller_cpu_percent": found.light_percent.median(),
            "latency_ns": { "p50": found.light_p50.median(), "p99": found.light_p99.median() },
            "rounds": settings.rounds,
        }));
    }
    let more = wide.attached.anonymous as f64 - first.attached.anonymous as f64;
    let per_queue = more / f64::from(MANY_QUEUES - 1);
    let pages = wide.attached.shared as f64 - first.attached.shared as f64;
    table.notes.push(format!(
        "An additional queue pair takes {} of the server's memory. While it is idle, the server \
         touches {} of the client's memory for it. Light load: {LIGHT} reads a second from each \
         controller.",
        bytes(per_queue),
        bytes(pages / f64::from(MANY_QUEUES - 1)),
    ));
    table.json.push(json!({
        "table": "growth-queue-memory", "device": "shadowbell", "controllers": 1,
        "numjobs": MANY_QUEUES, "memory_bytes_per_queue": per_queue,
    }));
    Ok(table)
}

/// One busy controller, and `NEIGHBOURS` attached idle controllers, on one I/O thread.
fn neighbours(settings: &Settings) -> Result<Table> {
    let idle = if settings.quick { vec![0, 7] } else { NEIGHBOURS.to_vec() };
    let mut cases: Vec<(Waiting, u32, usize, Rounds)> = Vec::new();
    for waiting in [Waiting::Polling, Waiting::Adaptive] {
        for depth in [1, 32] {
            cases.extend(idle.iter().map(|idle| (waiting, depth, *idle, Rounds::default())));
        }
    }
    for _ in 0..settings.rounds {
        for (waiting, depth, idle, rounds) in &mut cases {
            let server = serve_with(settings, *idle + 1, waiting.poll())?;
            // Controller 0 is the busy one.
            let mut attachments = match *idle {
                0 => None,
                _ => Some(IdleClients::start(settings, &server, 1..*idle + 1, &[])?),
            };
            if let Some(attachments) = &mut attachments {
                attachments.line(0)?;
                // Wait until the work caused by attaching has ended.
                sleep(Duration::from_millis(if settings.quick { 10 } else { 500 }));
            }
            let load = Load { depth: *depth, waiting: *waiting, ..Load::default() };
            rounds.push(load.measure_at(settings, &server.target(0))?);
            attachments.map_or(Ok(()), IdleClients::end)?;
            server.stop()?;
        }
    }
    let mut table = Table {
        title: "One busy controller next to idle ones, null disk, 4 KiB random read".into(),
        head: vec!["waiting", "iodepth", "idle controllers", "IOPS", "p50", "p99", "MMIO/IO"],
        ..Table::default()
    };
    for (waiting, depth, idle, rounds) in &cases {
        let mut row = rounds.row("growth-neighbours");
        table.rows.push(vec![
            waiting.name().into(),
            depth.to_string(),
            idle.to_string(),
            count(rounds.median("iops")),
            time(rounds.median("latency_ns/p50")),
            time(rounds.median("latency_ns/p99")),
            per_io(row.get("mmio_per_io").and_then(Value::as_f64).unwrap_or_default()),
        ]);
        if let Some(fields) = row.as_object_mut() {
            fields.insert("poll".into(), waiting.poll().into());
            fields.insert("idle_controllers".into(), json!(idle));
        }
        table.json.push(row);
    }
    Ok(table)
}

fn serve(settings: &Settings, count: usize) -> Result<Server> {
    serve_with(settings, count, "adaptive")
}

fn serve_with(settings: &Settings, count: usize, poll: &str) -> Result<Server> {
    let head = format!("workers = 1\npin = [{}]\npoll = {poll:?}", settings.cpus[0]);
    Server::start_many(&settings.binary, "null:1GiB", count, &head)
}

/// Attaches to `count` controllers without a load.
fn idle(settings: &Settings, count: usize, queues: u16, found: &mut Found) -> Result<()> {
    let server = serve(settings, count)?;
    found.served = memory(server.id())?;
    let mut attachments =
        IdleClients::start(settings, &server, 0..count, &[format!("--queues={queues}")])?;
    let attached = attachments.line(0)?;
    let figure = |name: &str| attached.pointer(name).and_then(Value::as_f64).context("attach_ns");
    found.attach_ns.push(figure("/attach_ns/p50")?);
    found.slowest_ns.push(figure("/attach_ns/max")?);
    // Wait until the work caused by attaching has ended.
    sleep(Duration::from_millis(if settings.quick { 100 } else { 1000 }));
    found.attached = memory(server.id())?;
    let (began, before) = (Instant::now(), used(server.id())?);
    sleep(settings.time.max(Duration::from_millis(200)));
    let (seconds, after) = (began.elapsed().as_secs_f64(), used(server.id())?);
    let busy = after.time.saturating_sub(before.time).as_secs_f64();
    found.idle_percent.push(busy / seconds * 100.0);
    found.idle_wakeups.push(after.slices.saturating_sub(before.slices) as f64 / seconds);
    attachments.end()?;
    server.stop()?;
    Ok(())
}

/// Attaches to `count` controllers with a light load.
fn light(settings: &Settings, count: usize, found: &mut Found) -> Result<()> {
    let server = serve(settings, count)?;
    let ios = (settings.time.as_secs_f64() * (LIGHT * count as u64) as f64).ceil().max(5.0) as u64;
    let options = [format!("--rate-iops={LIGHT}"), format!("--ios={ios}")];
    let mut attachments = IdleClients::start(settings, &server, 0..count, &options)?;
    attachments.line(0)?;
    let before = used(server.id())?;
    let loaded = attachments.line(1)?;
    let after = used(server.id())?;
    let figure =
        |name: &str| loaded.pointer(name).and_then(Value::as_f64).context("the light load");
    let busy = after.time.saturating_sub(before.time).as_secs_f64();
    found.light_percent.push(busy / figure("/seconds")? * 100.0);
    found.light_p50.push(figure("/latency_ns/p50")?);
    found.light_p99.push(figure("/latency_ns/p99")?);
    attachments.end()?;
    server.stop()?;
    Ok(())
}
