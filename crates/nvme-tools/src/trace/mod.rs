//! `shadowbell trace`: prints a recording of `serve --trace` as text, as JSON Lines, or for
//! Perfetto.

mod json;
mod perfetto;

use anyhow::{Context, anyhow};
use json::option_name;
use shadowbell_controller::trace::{COMPLETION_QUEUE, Kind, Queue, Record, TraceError, read_trace};
use shadowbell_process::exit::bad_input;
use shadowbell_process::output::Output;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Print a recording of `serve --trace FILE`: every decision about a doorbell
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
A trace can be read while it is written, and survives a crash of the server. Times are in seconds \
since the trace began.

Open a time line of --perfetto at https://ui.perfetto.dev or in chrome://tracing; the file stays on \
this machine. It has a track for each I/O thread (worker), queue, doorbell and interrupt vector, and \
arrows from commands to their completions and from doorbell writes to the I/O thread that they woke. \
With --json, each record is an object on its own line: time_ns and kind, then worker, controller, \
and sq or cq if they apply, and the fields of the kind.")]
pub struct Args {
    /// Trace file
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Only records of these queues: 1,2 or 1-4; 0 is the admin queue
    #[arg(long, value_name = "QUEUES", value_parser = queues)]
    queue: Option<Queues>,

    /// Only records of these kinds; `--kind help` lists them
    #[arg(long, value_name = "KIND,...", value_delimiter = ',', value_parser = kind)]
    kind: Vec<Kind>,

    /// Only records of this controller, counted from 1
    #[arg(long, value_name = "N")]
    controller: Option<u16>,

    /// Only records of this I/O thread (worker), counted from 0
    #[arg(long, value_name = "N")]
    worker: Option<u16>,

    /// Only the last N of the selected records
    #[arg(long, value_name = "N")]
    last: Option<usize>,

    /// Only the totals
    #[arg(long, conflicts_with_all = ["json", "output_format", "perfetto"])]
    summary: bool,

    /// Write a time line for Perfetto's viewer to OUT; - for standard output
    #[arg(long, value_name = "OUT", conflicts_with_all = ["json", "output_format"])]
    perfetto: Option<PathBuf>,

    #[command(flatten)]
    output: Output,
}

/// Inclusive ranges of queue identifiers.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Queues(Vec<(u16, u16)>);

fn queues(text: &str) -> Result<Queues, String> {
    let number = |text: &str| {
        let number = text.trim().parse::<u16>().ok().filter(|qid| qid & COMPLETION_QUEUE == 0);
        number.ok_or_else(|| format!("`{text}` is no queue; write for example 1,2 or 1-4"))
    };
    let ranges = text.split(',').map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Ok((number(first)?, number(last)?))
    });
    Ok(Queues(ranges.collect::<Result<_, String>>()?))
}

fn kind(text: &str) -> Result<Kind, String> {
    let found = Kind::ALL.iter().copied().find(|kind| option_name(*kind) == text);
    found.ok_or_else(|| {
        let all: Vec<_> = Kind::ALL.iter().map(|kind| option_name(*kind)).collect();
        format!("unknown kind; the kinds are {}", all.join(", "))
    })
}

impl Args {
    fn selects(&self, record: &Record) -> bool {
        let qid = record.queue().map(|(Queue::Submission(qid) | Queue::Completion(qid))| qid);
        let of = |Queues(ranges): &Queues| {
            qid.is_some_and(|qid| ranges.iter().any(|(first, last)| (first..=last).contains(&&qid)))
        };
        self.queue.as_ref().is_none_or(of)
            && (self.kind.is_empty() || self.kind.contains(&record.kind))
            && self.controller.is_none_or(|controller| record.controller == controller)
            && self.worker.is_none_or(|worker| record.worker == Some(worker))
    }
}

/// Runs the verb.
///
/// # Errors
/// The file is not a readable trace, or the output cannot be written.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let records = read_trace(&args.file).map_err(|error| {
        let name = args.file.display();
        match error {
            TraceError::Io(error) => bad_input(anyhow!("cannot read {name}: {error}")),
            error => bad_input(anyhow!("{name}: {error}")),
        }
    })?;
    let records: Vec<_> = records.filter(|record| args.selects(record)).collect();
    let skip = args.last.map_or(0, |last| records.len().saturating_sub(last));
    let records = records.get(skip..).unwrap_or_default();
    if let Some(path) = &args.perfetto {
        draw(records, path)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut out = BufWriter::new(io::stdout().lock());
    if args.output.is_json() {
        json::write(records, &mut out)?;
        out.flush()?;
        return Ok(ExitCode::SUCCESS);
    }
    if !args.summary {
        for record in records {
            writeln!(out, "{record}")?;
        }
    }
    summarise(records, &mut out)?;
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// Writes a Perfetto time line of `records` to the file at `path`.
fn draw(records: &[Record], path: &Path) -> anyhow::Result<()> {
    if path == Path::new("-") {
        let mut out = BufWriter::new(io::stdout().lock());
        perfetto::write(records, &mut out)?;
        return Ok(out.flush()?);
    }
    let name = path.display();
    let file = File::create(path)
        .map_err(|error| bad_input(anyhow!("cannot write the time line to {name}: {error}")))?;
    let mut out = BufWriter::new(file);
    perfetto::write(records, &mut out)
        .and_then(|()| out.flush())
        .with_context(|| format!("cannot write the time line to {name}"))?;
    tracing::info!(
        "time line of {} records written to {name}; open it at ui.perfetto.dev",
        records.len()
    );
    Ok(())
}

/// Key of the totals: controller number (0: none) and queue.
type QueueKey = (u16, Option<Queue>);

fn summarise(records: &[Record], out: &mut impl Write) -> io::Result<()> {
    let (Some(first), Some(last)) = (records.first(), records.last()) else {
        return writeln!(out, "No matching records.");
    };
    let mut sums: BTreeMap<QueueKey, BTreeMap<u8, (Kind, u64)>> = BTreeMap::new();
    for record in records {
        let kinds = sums.entry((record.controller, record.queue())).or_default();
        kinds.entry(record.kind as u8).or_insert((record.kind, 0)).1 += 1;
    }
    let span = (last.time_ns - first.time_ns) as f64 / 1e9;
    writeln!(out, "\n{} records in {span:.6} s", records.len())?;
    for ((controller, queue), kinds) in sums {
        let whole = match controller {
            0 => "workers".to_owned(),
            controller => format!("controller {controller}"),
        };
        let queue = queue.map(|queue| queue.to_string()).unwrap_or_default();
        writeln!(out, "{whole:<14}  {queue}")?;
        for (kind, count) in kinds.values() {
            writeln!(out, "  {count:>10}  {}", kind.name())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn args(options: &[&str]) -> Result<Args, String> {
        let line = Line::try_parse_from([&["trace", "file"], options].concat());
        line.map(|line| line.args).map_err(|error| error.to_string())
    }

    fn record(kind: Kind, controller: u16, qid: u16) -> Record {
        Record { time_ns: 5, kind, worker: Some(1), controller, qid, value: 1, extra: 2 }
    }

    #[test]
    fn records_are_selected_by_the_options() {
        let armed = record(Kind::EventIdxArmed, 1, 3);
        let head = record(Kind::EventIdxArmed, 1, 3 | COMPLETION_QUEUE);
        let sleep = record(Kind::Sleep, 0, 0);
        for (options, expected) in [
            (&[][..], [true, true, true]),
            (&["--queue", "3"], [true, true, false]),
            (&["--queue", "0,2-4"], [true, true, false]),
            (&["--queue", "0"], [false, false, false]),
            (&["--kind", "sleep,wake"], [false, false, true]),
            (&["--kind", "eventidx-armed"], [true, true, false]),
            (&["--controller", "1"], [true, true, false]),
            (&["--worker", "1"], [true, true, true]),
            (&["--worker", "0"], [false, false, false]),
        ] {
            let args = args(options).unwrap();
            let chosen = [armed, head, sleep].map(|record| args.selects(&record));
            assert_eq!(chosen, expected, "{options:?}");
        }
        assert!(args(&["--kind", "help"]).unwrap_err().contains("spurious-wake"));
        for queue in ["", "x", "1-", "40000", "99999"] {
            assert!(args(&["--queue", queue]).unwrap_err().contains("no queue"), "{queue}");
        }
    }

    #[test]
    fn totals_are_per_queue() {
        let records = [
            record(Kind::Batch, 1, 3),
            record(Kind::Batch, 1, 3),
            record(Kind::InterruptRaised, 1, 3),
            record(Kind::Sleep, 0, 0),
        ];
        let mut out = Vec::new();
        summarise(&records, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("4 records"), "{text}");
        assert!(text.contains("SQ 3\n           2  batch fetched"), "{text}");
        assert!(text.contains("CQ 3\n           1  interrupt raised"), "{text}");
        let mut out = Vec::new();
        summarise(&[], &mut out).unwrap();
        assert_eq!(out, b"No matching records.\n");
    }
}
