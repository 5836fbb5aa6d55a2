//! The suite `scrape`: duration of `/metrics` with many controllers, and the effect of one scrape
//! per second on a load of one of them.

use shadowbell_testing::wait::LIMIT;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::attachments::IdleClients;
use crate::figures::{bytes, count, time};
use crate::load::{Load, Waiting};
use crate::process::used;
use crate::samples::Samples;
use crate::server::Server;
use crate::settings::Settings;
use crate::table::Table;

const CONTROLLERS: usize = 256;
/// Number of I/O queue pairs of each controller. The controller with the load always has one.
const QUEUES: [u16; 2] = [1, 4];
/// Reads per second of the load.
const RATE: u64 = 10_000;
/// Interval of scrapes under load, the shortest one that Prometheus users choose.
const INTERVAL: Duration = Duration::from_secs(1);
/// Number of consecutive scrapes of a server without a load.
const IN_A_ROW: usize = 20;
/// Duration of a load with some scrapes.
const LOAD_TIME: Duration = Duration::from_secs(5);

/// Results for a number of queues.
#[derive(Debug, Clone, Default)]
struct Found {
    lines: usize,
    text: usize,
    /// Duration of each scrape from the connection to the last byte, and the server's CPU time for
    /// a scrape, in nanoseconds.
    times: Samples,
    cpu: Samples,
    /// Durations of scrapes under load.
    loaded: Samples,
    alone: Latencies,
    scraped: Latencies,
    /// Ratio of the p99 latency of the load with scrapes to that without scrapes, in each round.
    ratios: Samples,
}

/// Latencies of the load in nanoseconds.
#[derive(Debug, Clone, Default)]
struct Latencies {
    p50: Samples,
    p99: Samples,
}

impl Latencies {
    fn push(&mut self, row: &Value) -> Result<f64> {
        let figure = |name: &str| row.pointer(name).and_then(Value::as_f64).context("a latency");
        self.p50.push(figure("/latency_ns/p50")?);
        let p99 = figure("/latency_ns/p99")?;
        self.p99.push(p99);
        Ok(p99)
    }
}

pub(crate) fn run(settings: &Settings) -> Result<Vec<Table>> {
    let controllers = if settings.quick { 8 } else { CONTROLLERS };
    let queues = settings.some(&QUEUES);
    let mut found = vec![Found::default(); queues.len()];
    for round in 0..settings.rounds {
        for (&queues, found) in queues.iter().zip(&mut found) {
            measure(settings, controllers, queues, round, found)?;
        }
    }
    let mut table = Table {
        title: format!(
            "/metrics of {controllers} controllers, and a load of {RATE} reads a second"
        ),
        head: vec![
            "queue pairs each",
            "lines",
            "text",
            "median",
            "slowest",
            "CPU",
            "under load",
            "slowest",
            "p99 alone",
            "p99 scraped",
            "ratio",
        ],
        ..Table::default()
    };
    for (queues, found) in queues.iter().zip(&found) {
        table.rows.push(vec![
            queues.to_string(),
            count(found.lines as f64),
            bytes(found.text as f64),
            time(found.times.median()),
            time(found.times.max()),
            time(found.cpu.median()),
            time(found.loaded.median()),
            time(found.loaded.max()),
            time(found.alone.p99.median()),
            time(found.scraped.p99.median()),
            format!("{:.2}", found.ratios.median()),
        ]);
        let latency = |of: &Latencies| json!({ "p50": of.p50.median(), "p99": of.p99.median() });
        table.json.push(json!({
            "table": "scrape", "device": "shadowbell", "doorbells": "shadow",
            "controllers": controllers, "numjobs": queues, "rate_iops": RATE,
            "lines": found.lines, "text_bytes": found.text,
            "scrapes": found.times.len() + found.loaded.len(),
            "scrape_ns": { "p50": found.times.median(), "max": found.times.max() },
            "scrape_cpu_ns": found.cpu.median(),
            "loaded_scrape_ns": { "p50": found.loaded.median(), "max": found.loaded.max() },
            "latency_ns": latency(&found.scraped), "latency_alone_ns": latency(&found.alone),
            "p99_ratio": found.ratios.median(), "p99_ratios": found.ratios.point(),
            "rounds": settings.rounds,
        }));
    }
    table.notes.push(format!(
        "Time from connecting to the last byte: {IN_A_ROW} scrapes in a row of an idle server, and \
         one a second under the load. The ratio is the median of those of paired runs, with and \
         without scrapes."
    ));
    Ok(vec![table])
}

fn measure(
    settings: &Settings,
    controllers: usize,
    queues: u16,
    round: u32,
    found: &mut Found,
) -> Result<()> {
    let pin = settings.cpus[0];
    let head = format!("workers = 1\npin = [{pin}]\npoll = \"adaptive\"");
    let server = Server::start_many(&settings.binary, "null:1GiB", controllers, &head)?;
    let socket = server.control();
    let options = [format!("--queues={queues}")];
    let mut attachments = IdleClients::start(settings, &server, 1..controllers, &options)?;
    attachments.line(0)?;
    // Wait until the work caused by attaching has ended.
    sleep(Duration::from_millis(if settings.quick { 10 } else { 500 }));
    let before = used(server.id())?;
    let in_a_row = if settings.quick { 3 } else { IN_A_ROW };
    for _ in 0..in_a_row {
        let began = Instant::now();
        let text = scrape(&socket)?;
        found.times.push(began.elapsed().as_nanos() as f64);
        (found.lines, found.text) = (text.lines().count(), text.len());
    }
    let spent = used(server.id())?.time.saturating_sub(before.time);
    found.cpu.push(spent.as_nanos() as f64 / in_a_row as f64);

    let long = if settings.quick { settings.time } else { settings.time.max(LOAD_TIME) };
    let settings = Settings { time: long, ..settings.clone() };
    let waiting = Waiting::Adaptive;
    let load = Load { rate: Some(RATE), waiting, ..Load::default() };
    let victim = || load.measure_at(&settings, &server.target(0));
    // The order of the two runs alternates.
    let (mut alone, mut scraped) = (0.0, 0.0);
    let first = round.is_multiple_of(2);
    for with in [first, !first] {
        if with {
            let (row, times) = while_scraping(&socket, victim)?;
            scraped = found.scraped.push(&row)?;
            times.into_iter().for_each(|time| found.loaded.push(time));
        } else {
            alone = found.alone.push(&victim()?)?;
        }
    }
    found.ratios.push(scraped / f64::max(alone, 1.0));
    attachments.end()?;
    server.stop()?;
    Ok(())
}

/// Runs `what` with one scrape per second. Returns the durations of the scrapes in nanoseconds.
fn while_scraping<T>(socket: &Path, what: impl FnOnce() -> Result<T>) -> Result<(T, Vec<f64>)> {
    let (end, ended) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let scraper = scope.spawn(move || -> Result<Vec<f64>> {
            let mut times = Vec::new();
            loop {
                let began = Instant::now();
                scrape(socket)?;
                times.push(began.elapsed().as_nanos() as f64);
                if ended.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout) {
                    return Ok(times);
                }
            }
        });
        let outcome = what();
        drop(end);
        let times = match scraper.join() {
            Ok(times) => times?,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        Ok((outcome?, times))
    })
}

/// Requests all metrics over a new connection.
fn scrape(socket: &Path) -> Result<String> {
    let mut stream = UnixStream::connect(socket).context("the control socket")?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::with_capacity(4 << 20);
    stream.read_to_end(&mut answer).context("/metrics")?;
    let answer = String::from_utf8(answer).context("/metrics")?;
    let Some((head, text)) = answer.split_once("\r\n\r\n") else { bail!("no answer: {answer}") };
    ensure!(head.starts_with("HTTP/1.1 200 "), "/metrics: {head}");
    ensure!(text.ends_with("# EOF\n"), "/metrics has no end");
    Ok(text.to_owned())
}
