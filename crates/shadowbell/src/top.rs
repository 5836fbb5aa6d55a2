//! `shadowbell top`: live statistics of the controllers and exports of running servers.

mod rates;
mod screen;

use anyhow::{Context, anyhow};
use rates::{HEADINGS, Rates, between};
use screen::{KeyAction, Screen};
use serde_json::json;
use shadowbell_config::parse;
use shadowbell_control_api::client::Client;
use shadowbell_control_api::discovery;
use shadowbell_control_api::live_stats::Snapshot;
use shadowbell_process::exit;
use shadowbell_process::output::{Output, without_control};
use shadowbell_process::table::Table;
use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Path of the statistics on a control socket.
const SNAPSHOT: &str = "/v1/snapshot";

/// Show live statistics of the controllers and exports of running servers
///
/// Each controller has a line: its id; its state (busy; idle; stalled: storage does not answer;
/// waiting: not served yet after a restart of the server process; parked: so quiet that the I/O
/// threads no longer poll it; off: no I/O queues); the cause for which its commands waited most,
/// with its share of the interval (disk: the storage; limit: rate limits; queue: a full queue or a
/// quota; CPU: the I/O thread; mem: guest memory; `shadowbell explain` tells more); its I/O threads
/// (workers) and I/O queues, commands and bytes per second, doorbell writes per command, the share
/// of new doorbell values that needed no doorbell write, interrupts per command, and failed
/// commands. While latency is measured (`shadowbell ctl measure on`, `serve --measure`), each
/// namespace has a line, and the median and 99th percentile of the latency are shown. Each export
/// has a line with its requests to the disk; its queues are the open queues of the disk, one for
/// each NBD client or virtio queue. On a terminal, the display is updated in place: `q` quits, the
/// arrow keys scroll, `d` shows doorbells and errors. Otherwise, lines are appended.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Server: its name, its process ID, its control socket, or the socket of a controller
    /// [default: all servers with a control socket in the usual directory]
    #[arg(value_name = "SERVER")]
    pub server: Option<String>,
    /// Update interval: 1, 500ms
    #[arg(long, default_value = "1", value_parser = parse_interval, value_name = "TIME")]
    pub interval: Duration,
    /// Number of updates [default: until the server ends]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    #[command(flatten)]
    pub output: Output,
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = parse::time(text)?;
    if (Duration::from_millis(50)..=Duration::from_secs(24 * 3600)).contains(&interval) {
        Ok(interval)
    } else {
        Err("the interval must be from 50ms to 24h".into())
    }
}

/// Runs the verb.
///
/// # Errors
/// There is no such socket, or the server has ended.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let source = Source::open(args.server.as_deref())?;
    let is_terminal = io::stdout().is_terminal() && io::stdin().is_terminal();
    if is_terminal && !args.output.is_json() {
        let mut terminal = ratatui::try_init().context("the terminal")?;
        let outcome =
            watch(args, source, |screen| terminal.draw(|frame| screen.draw(frame)).map(|_| ()));
        ratatui::restore();
        return outcome.map(|()| ExitCode::SUCCESS);
    }
    print(args, source)
}

/// Updates the display on a terminal until a key ends it.
fn watch(
    args: &Args,
    mut source: Source,
    mut draw: impl FnMut(&mut Screen) -> io::Result<()>,
) -> anyhow::Result<()> {
    let mut screen = Screen::default();
    let (mut before, mut shown) = (source.snapshots()?, 0);
    screen.set(all_between(&before, &before));
    while args.count.is_none_or(|count| shown < count) {
        let until = Instant::now() + args.interval;
        if screen.wait(until, &mut draw).context("the terminal")? == KeyAction::End {
            break;
        }
        let now = source.snapshots().context("the server has ended")?;
        screen.set(all_between(&before, &now));
        before = now;
        shown += 1;
    }
    Ok(())
}

/// Appends lines to standard output.
fn print(args: &Args, mut source: Source) -> anyhow::Result<ExitCode> {
    let mut before = source.snapshots()?;
    let mut shown = 0;
    while args.count.is_none_or(|count| shown < count) {
        std::thread::sleep(args.interval);
        let now = source.snapshots().context("the server has ended")?;
        let rates = all_between(&before, &now);
        let mut out = io::stdout().lock();
        if args.output.is_json() {
            let (exports, controllers): (Vec<_>, Vec<_>) =
                rates.iter().partition(|rates| rates.exported.is_some());
            let rows = |all: Vec<&Rates>| all.into_iter().map(Rates::to_json).collect::<Vec<_>>();
            let at_ns = now.values().map(|now| now.at_ns).max();
            let (controllers, exports) = (rows(controllers), rows(exports));
            let all = json!({ "at_ns": at_ns, "controllers": controllers, "exports": exports });
            writeln!(out, "{}", without_control(&all.to_string()))?;
        } else {
            let mut table = Table::new(HEADINGS);
            rates.iter().flat_map(Rates::lines).for_each(|line| table.line(line));
            let text = table.to_string();
            let text = without_control(&text);
            match text.split_once('\n') {
                Some((_, lines)) if shown != 0 => write!(out, "{lines}")?,
                _ => write!(out, "{text}")?,
            }
        }
        out.flush()?;
        shown += 1;
        before = now;
    }
    Ok(ExitCode::SUCCESS)
}

/// Rates of all controllers and exports between two snapshots of each server.
fn all_between(before: &Snapshots, now: &Snapshots) -> Vec<Rates> {
    now.iter().flat_map(|(name, now)| between(before.get(name), now)).collect()
}

/// Snapshot of each server, by server name.
type Snapshots = BTreeMap<String, Snapshot>;

/// Source of snapshots.
enum Source {
    /// Control socket.
    Control(Client),
    /// Control sockets of all servers in a directory.
    Directory(PathBuf),
}

impl Source {
    fn open(server: Option<&str>) -> anyhow::Result<Self> {
        let Some(server) = server else { return Ok(Self::Directory(discovery::directory()?)) };
        let client = discovery::server(Some(server))?;
        client.get::<Snapshot>(SNAPSHOT).map_err(|error| {
            let socket = client.socket().display();
            let text = format!("{socket}: not a control socket of `shadowbell serve`");
            exit::not_found(error.context(text))
        })?;
        Ok(Self::Control(client))
    }

    fn snapshots(&mut self) -> anyhow::Result<Snapshots> {
        match self {
            Self::Control(client) => Ok(Snapshots::from([(String::new(), client.get(SNAPSHOT)?)])),
            Self::Directory(directory) => {
                let servers = discovery::running(directory).into_iter();
                // A server that has ended since the directory was read is skipped.
                let snapshots: Snapshots = servers
                    .filter_map(|(name, socket)| {
                        Some((name, Client::new(&socket).get(SNAPSHOT).ok()?))
                    })
                    .collect();
                if snapshots.is_empty() {
                    return Err(exit::not_found(anyhow!(
                        "no running server has its control socket in {}",
                        directory.display()
                    )));
                }
                Ok(snapshots)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_is_bounded() {
        assert_eq!(parse_interval("500ms"), Ok(Duration::from_millis(500)));
        for text in ["0", "1ms", "25h", "soon"] {
            assert!(parse_interval(text).is_err(), "{text}");
        }
    }
}
