//! `shadowbell ctl trace`: controls the doorbell trace of a running server.

use anyhow::{Context, anyhow};
use bytesize::ByteSize;
use clap::Subcommand;
use hyper::Method;
use serde::Serialize;
use shadowbell_control_api::api::{Trace, TraceChange};
use shadowbell_control_api::client::Client;
use shadowbell_process::atomic_file::replace;
use shadowbell_process::exit::bad_input;
use shadowbell_process::output::show;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum TraceVerb {
    /// Start recording into the server's memory
    On {
        /// Records of 32 bytes to keep per I/O thread; newer ones replace older ones [default:
        /// 262144]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1024..=1 << 24))]
        records: Option<u32>,
    },
    /// Stop recording; the recorded data are kept until the next start
    Off,
    /// Write the recording to a file, for `shadowbell trace FILE`
    Save {
        /// File to create or replace; `-` for standard output
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

/// Result of `save`.
#[derive(Serialize)]
struct Saved<'a> {
    file: &'a Path,
    bytes: u64,
}

/// Runs the verb; without one, shows the state of the trace.
///
/// # Errors
/// The server refuses the request, or the file cannot be written.
pub(crate) fn trace(client: &Client, verb: Option<&TraceVerb>, json: bool) -> anyhow::Result<()> {
    let change = |on, records| client.send(&Method::PUT, "/v1/trace", &TraceChange { on, records });
    let now: Trace = match verb {
        None => client.get("/v1/trace")?,
        Some(TraceVerb::On { records }) => change(true, *records)?,
        Some(TraceVerb::Off) => change(false, None)?,
        Some(TraceVerb::Save { file }) => return save(client, file, json),
    };
    show(&now, json, line)
}

fn line(out: &mut dyn Write, now: &Trace) -> io::Result<()> {
    match (now.on, now.records, now.bytes) {
        (true, Some(records), Some(bytes)) => writeln!(
            out,
            "on: the last {records} records per I/O thread, {} in total",
            ByteSize(bytes).display().iec()
        ),
        (true, ..) => writeln!(out, "on"),
        (false, Some(_), _) => {
            writeln!(out, "off; save the recording with `shadowbell ctl trace save FILE`")
        }
        (false, ..) => writeln!(out, "off; no recording"),
    }
}

fn save(client: &Client, file: &Path, json: bool) -> anyhow::Result<()> {
    let get = |to: &mut dyn Write| client.save("/v1/trace/records", to);
    let is_device = std::fs::metadata(file)
        .is_ok_and(|about| about.file_type().is_char_device() || about.file_type().is_fifo());
    let bytes = match file {
        _ if file == Path::new("-") => {
            let mut out = io::stdout().lock();
            if out.is_terminal() {
                let why = "not writing a trace to a terminal; name a file, or redirect the output";
                return Err(bad_input(anyhow!(why)));
            }
            get(&mut out)?;
            return Ok(out.flush()?);
        }
        _ if is_device => {
            let device = File::options().write(true).open(file);
            get(&mut device.with_context(|| file.display().to_string()).map_err(bad_input)?)?
        }
        _ => replace(file, |new| get(new))?,
    };
    show(&Saved { file, bytes }, json, |out, saved| {
        let size = ByteSize(saved.bytes).display().iec();
        writeln!(
            out,
            "trace written to {}, {size}; show it with `shadowbell trace {0}`",
            file.display()
        )
    })
}
