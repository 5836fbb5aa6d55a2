//! `shadowbell top`: what the controllers of running servers do, as it happens.

use crate::control::client::Client;
use crate::control::find;
use crate::exit::{self, bad_input};
use crate::live_stats::{Row, Snapshot, VERSION};
use crate::output::Output;
use crate::parse;
use crate::table::Table;
use crate::units::{bandwidth, count, per_io};
use anyhow::{Context, anyhow};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, ErrorKind, IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// The longest answer that is read: of more controllers than a process can have.
const MAX_ANSWER: u64 = 64 << 20;
/// What a control socket is asked.
const SNAPSHOT: &str = "/v1/snapshot";
/// What is asked: a line. Long enough to be nonsense at once to a server of something else.
const QUESTION: &[u8] = b"shadowbell top asks\n";
/// How long a server may take for its answer: a second for each controller that it has to wait for.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Show what the controllers of running servers do, and go on showing it
///
/// A line for each controller: whether its guest is busy, idle, or so quiet that the workers leave
/// it out (parked); the workers that serve it and its I/O queues; commands and bytes a second;
/// doorbells that rang for each command; of the new doorbell values, how many came without ringing;
/// interrupts for each command; commands that failed. On a terminal the picture is renewed,
/// elsewhere lines are added.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// A server: its name, a socket at which it serves, its control socket, or that of `shadowbell
    /// serve --stats-socket` [default: all that have their control socket in the usual directory]
    #[arg(value_name = "SERVER")]
    pub server: Option<String>,
    /// The time between two looks: 1, 500ms
    #[arg(long, default_value = "1", value_parser = parse_interval, value_name = "TIME")]
    pub interval: Duration,
    /// End after so many [default: when the server ends]
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
        Err("it is from 50ms to a day".into())
    }
}

/// Runs the verb.
///
/// # Errors
/// There is no such socket, or the server has ended.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut source = Source::open(args.server.as_deref())?;
    let mut before = source.look()?;
    let is_terminal = io::stdout().is_terminal();
    let mut shown = 0;
    while args.count.is_none_or(|count| shown < count) {
        std::thread::sleep(args.interval);
        let now = source.look().context("the server has ended")?;
        let rates = || now.iter().flat_map(|(name, now)| between(before.get(name), now));
        let mut out = io::stdout().lock();
        if args.output.is_json() {
            let rates: Vec<_> = rates().map(|rates| rates.to_json()).collect();
            let at_ns = now.values().map(|now| now.at_ns).max();
            writeln!(out, "{}", json!({ "at_ns": at_ns, "controllers": rates }))?;
        } else {
            let mut table = Table::new(HEADINGS);
            rates().for_each(|rates| table.line(rates.cells()));
            let text = table.to_string();
            match (is_terminal, text.split_once('\n')) {
                // To the upper left, and nothing below what is written there.
                (true, _) => write!(out, "\x1b[H\x1b[J{text}")?,
                (false, Some((_, lines))) if shown != 0 => write!(out, "{lines}")?,
                _ => write!(out, "{text}")?,
            }
        }
        out.flush()?;
        shown += 1;
        before = now;
    }
    Ok(ExitCode::SUCCESS)
}

/// What each server says, by its name.
type Looks = BTreeMap<String, Snapshot>;

/// Who is asked.
enum Source {
    /// A socket of counters.
    Counters(Server),
    /// A control socket.
    Control(Client),
    /// Each server of the directory.
    Directory(PathBuf),
}

impl Source {
    fn open(server: Option<&str>) -> anyhow::Result<Self> {
        let Some(server) = server else { return Ok(Self::Directory(find::directory()?)) };
        let path = Path::new(server);
        if !server.contains('/') && !path.exists() {
            return Ok(Self::Control(find::server(Some(server))?));
        }
        if let Some((client, _)) = find::owner(path) {
            return Ok(Self::Control(client));
        }
        let mut server = Server::connect(path)?;
        let error = match server.ask() {
            Ok(_) => return Ok(Self::Counters(server)),
            Err(error) => error,
        };
        let control = Client::new(path);
        if control.get::<Snapshot>(SNAPSHOT).is_ok() {
            return Ok(Self::Control(control));
        }
        Err(bad_input(error.context(format!(
            "{}: it is no socket of counters, as `shadowbell serve` has",
            path.display()
        ))))
    }

    fn look(&mut self) -> anyhow::Result<Looks> {
        match self {
            Self::Counters(server) => Ok(Looks::from([(String::new(), server.ask()?)])),
            Self::Control(client) => Ok(Looks::from([(String::new(), client.get(SNAPSHOT)?)])),
            Self::Directory(directory) => {
                let servers = find::running(directory).into_iter();
                // One may have ended since it was found.
                let looks: Looks = servers
                    .filter_map(|(name, socket)| {
                        Some((name, Client::new(&socket).get(SNAPSHOT).ok()?))
                    })
                    .collect();
                if looks.is_empty() {
                    return Err(exit::not_there(anyhow!(
                        "no server runs that has its control socket in {}",
                        directory.display()
                    )));
                }
                Ok(looks)
            }
        }
    }
}

/// What the controllers of a server did between two looks.
fn between(before: Option<&Snapshot>, now: &Snapshot) -> Vec<Rates> {
    // One that was not there before has done nothing that could be said.
    let start = |now: &Row| {
        let mut rows = before.iter().flat_map(|before| &before.controllers);
        rows.find(|before| before.socket == now.socket).unwrap_or(now).clone()
    };
    let since = before.map_or(now.at_ns, |before| before.at_ns);
    let seconds = now.at_ns.saturating_sub(since) as f64 / 1e9;
    now.controllers.iter().map(|now| Rates::between(&start(now), now, seconds)).collect()
}

struct Server(BufReader<UnixStream>);

impl Server {
    fn connect(path: &Path) -> anyhow::Result<Self> {
        let stream = UnixStream::connect(path).map_err(|error| {
            let why = match error.kind() {
                ErrorKind::NotFound => format!(
                    "there is no such socket; `shadowbell serve ... --stats-socket {}` makes one",
                    path.display()
                ),
                ErrorKind::ConnectionRefused => "nobody listens there (any more)".into(),
                _ => error.to_string(),
            };
            bad_input(anyhow!("{}: {why}", path.display()))
        })?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
        Ok(Self(BufReader::new(stream)))
    }

    fn ask(&mut self) -> anyhow::Result<Snapshot> {
        // As a sentence: a pipe that breaks here is not that of our own output (see `exit`).
        let line = self.exchange().map_err(|error| anyhow!("{error}"))?;
        let snapshot: Snapshot = serde_json::from_str(&line)?;
        if snapshot.version != VERSION {
            return Err(anyhow!("the server is of another version"));
        }
        Ok(snapshot)
    }

    fn exchange(&mut self) -> io::Result<String> {
        self.0.get_mut().write_all(QUESTION)?;
        let mut line = String::new();
        match self.0.by_ref().take(MAX_ANSWER).read_line(&mut line)? {
            0 => Err(io::Error::other("it has hung up")),
            _ => Ok(line),
        }
    }
}

const HEADINGS: [&str; 11] = [
    "Controller",
    "State",
    "Workers",
    "Queues",
    "IOPS",
    "Read",
    "Written",
    "Rings/IO",
    "Saved",
    "Interrupts/IO",
    "Errors",
];

/// What a controller did in some time.
#[derive(Clone, Debug, PartialEq)]
struct Rates {
    socket: String,
    state: &'static str,
    workers: Vec<usize>,
    queues: usize,
    iops: f64,
    read: f64,
    written: f64,
    /// For each command, where there were any.
    rings: Option<f64>,
    interrupts: Option<f64>,
    /// The part of the new doorbell values that came without ringing, where there were any.
    saved: Option<f64>,
    errors: u64,
}

impl Rates {
    fn between(before: &Row, now: &Row, seconds: f64) -> Self {
        let grown = |of: fn(&Row) -> u64| of(now).saturating_sub(of(before));
        let rate = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        let part = |count: u64, of: u64| (of != 0).then(|| count as f64 / of as f64);
        let (commands, rings) = (grown(|row| row.commands), grown(|row| row.rings));
        let updates = grown(|row| row.updates);
        Self {
            socket: now.socket.clone(),
            state: match now {
                _ if commands != 0 => "busy",
                Row { queues: 0, .. } => "off",
                Row { parked: true, .. } => "parked",
                _ => "idle",
            },
            workers: now.workers.clone(),
            queues: now.queues,
            iops: rate(commands),
            read: rate(grown(|row| row.bytes_read)),
            written: rate(grown(|row| row.bytes_written)),
            rings: part(rings, commands),
            interrupts: part(grown(|row| row.interrupts), commands),
            saved: part(updates.saturating_sub(rings), updates),
            errors: grown(|row| row.errors),
        }
    }

    fn cells(&self) -> [String; 11] {
        let or_none = |value: Option<String>| value.unwrap_or_else(|| "-".into());
        let workers: Vec<_> = self.workers.iter().map(ToString::to_string).collect();
        [
            self.socket.clone(),
            self.state.into(),
            or_none((!workers.is_empty()).then(|| workers.join(","))),
            self.queues.to_string(),
            count(self.iops),
            bandwidth(self.read),
            bandwidth(self.written),
            or_none(self.rings.map(per_io)),
            or_none(self.saved.map(|part| format!("{:.1} %", part * 100.0))),
            or_none(self.interrupts.map(per_io)),
            self.errors.to_string(),
        ]
    }

    fn to_json(&self) -> serde_json::Value {
        json!({
            "socket": self.socket,
            "state": self.state,
            "workers": self.workers,
            "queues": self.queues,
            "iops": self.iops,
            "read_bytes_per_second": self.read,
            "written_bytes_per_second": self.written,
            "rings_per_io": self.rings,
            "doorbells_saved": self.saved,
            "interrupts_per_io": self.interrupts,
            "errors": self.errors,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_the_time_between_two_looks() {
        let before = Row { socket: "a".into(), queues: 2, commands: 100, ..Row::default() };
        let now = Row {
            commands: 300,
            bytes_read: 8192,
            updates: 50,
            rings: 5,
            interrupts: 20,
            ..before.clone()
        };
        let rates = Rates::between(&before, &now, 2.0);
        assert_eq!((rates.state, rates.iops, rates.read), ("busy", 100.0, 4096.0));
        assert_eq!((rates.rings, rates.interrupts), (Some(0.025), Some(0.1)));
        assert_eq!(rates.saved, Some(0.9));
        // Nothing happened, or less than before, or in no time.
        for (before, now, seconds) in [(&now, &now, 1.0), (&now, &before, 1.0), (&now, &now, 0.0)] {
            let rates = Rates::between(before, now, seconds);
            assert_eq!((rates.state, rates.iops, rates.rings), ("idle", 0.0, None));
            assert_eq!(rates.cells()[8], "-");
        }
        let state = |row: Row| Rates::between(&row, &row, 1.0).state;
        assert_eq!(state(Row { parked: true, ..now }), "parked");
        assert_eq!(state(Row::default()), "off");
    }

    #[test]
    fn an_interval_is_neither_too_short_nor_for_ever() {
        assert_eq!(parse_interval("500ms"), Ok(Duration::from_millis(500)));
        for text in ["0", "1ms", "25h", "soon"] {
            assert!(parse_interval(text).is_err(), "{text}");
        }
    }
}
