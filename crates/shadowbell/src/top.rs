//! `shadowbell top`: what the controllers of running servers do, as it happens.

mod rates;
mod screen;

use crate::control::client::Client;
use crate::control::find;
use crate::exit::{self, bad_input};
use crate::live_stats::{Snapshot, VERSION};
use crate::output::Output;
use crate::parse;
use crate::table::Table;
use anyhow::{Context, anyhow};
use rates::{HEADINGS, Rates, between};
use screen::{Asked, Screen};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, ErrorKind, IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

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
/// interrupts for each command; commands that failed. While commands are measured (`shadowbell ctl
/// measure on`, `serve --measure`), each namespace has a line, and there are latencies: what half
/// of the commands did not exceed, and 99 in 100. On a terminal the picture is renewed: `q` ends it,
/// the arrows move in it, `d` shows the doorbells. Elsewhere lines are added.
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

/// Shows it on a terminal, until a key ends it.
fn watch(
    args: &Args,
    mut source: Source,
    mut draw: impl FnMut(&mut Screen) -> io::Result<()>,
) -> anyhow::Result<()> {
    let mut screen = Screen::default();
    let (mut before, mut shown) = (source.look()?, 0);
    screen.set(all_between(&before, &before));
    while args.count.is_none_or(|count| shown < count) {
        let until = Instant::now() + args.interval;
        if screen.wait(until, &mut draw).context("the terminal")? == Asked::End {
            break;
        }
        let now = source.look().context("the server has ended")?;
        screen.set(all_between(&before, &now));
        before = now;
        shown += 1;
    }
    Ok(())
}

/// Adds lines.
fn print(args: &Args, mut source: Source) -> anyhow::Result<ExitCode> {
    let mut before = source.look()?;
    let mut shown = 0;
    while args.count.is_none_or(|count| shown < count) {
        std::thread::sleep(args.interval);
        let now = source.look().context("the server has ended")?;
        let rates = all_between(&before, &now);
        let mut out = io::stdout().lock();
        if args.output.is_json() {
            let rates: Vec<_> = rates.iter().map(Rates::to_json).collect();
            let at_ns = now.values().map(|now| now.at_ns).max();
            writeln!(out, "{}", json!({ "at_ns": at_ns, "controllers": rates }))?;
        } else {
            let mut table = Table::new(HEADINGS);
            rates.iter().flat_map(Rates::lines).for_each(|line| table.line(line));
            let text = table.to_string();
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

/// What all controllers did between two looks.
fn all_between(before: &Looks, now: &Looks) -> Vec<Rates> {
    now.iter().flat_map(|(name, now)| between(before.get(name), now)).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_neither_too_short_nor_for_ever() {
        assert_eq!(parse_interval("500ms"), Ok(Duration::from_millis(500)));
        for text in ["0", "1ms", "25h", "soon"] {
            assert!(parse_interval(text).is_err(), "{text}");
        }
    }
}
