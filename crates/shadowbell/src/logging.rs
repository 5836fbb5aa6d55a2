//! The log: lines on standard error, for a person.

use std::fmt;
use std::io::IsTerminal;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// How much is logged.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// Tell more: -v what happens on the control plane, -vv everything
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    verbose: u8,
    /// Tell less: -q warnings and errors only, -qq errors only
    #[arg(short, long, action = clap::ArgAction::Count, global = true, conflicts_with = "verbose")]
    quiet: u8,
}

impl Args {
    fn level(self) -> &'static str {
        match (self.quiet, self.verbose) {
            (0, 0) => "info",
            (0, 1) => "debug",
            (0, _) => "trace",
            (1, _) => "warn",
            _ => "error",
        }
    }
}

/// Whether the log says what goes well: without `--quiet`.
#[must_use]
pub(crate) fn is_talkative() -> bool {
    tracing::enabled!(Level::INFO)
}

/// Starts logging. `RUST_LOG` says what is logged, if it is set; it takes what
/// [`EnvFilter`] takes, such as `shadowbell_vfio_user=trace`.
pub(crate) fn start(args: &Args) {
    let filter = match std::env::var("RUST_LOG") {
        Ok(directives) if !directives.is_empty() => EnvFilter::builder().parse_lossy(directives),
        _ => EnvFilter::new(args.level()),
    };
    let format = Lines { detailed: args.verbose > 0 };
    // Fails only where a subscriber is there already: in a test, which wants its own.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .event_format(format)
        .try_init();
}

/// `warning: what happened key=value`; with -v, the time and the module in front.
struct Lines {
    detailed: bool,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut out: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let about = event.metadata();
        if self.detailed {
            SystemTime.format_time(&mut out)?;
            write!(out, " {:5} {}: ", about.level(), about.target())?;
        } else {
            let (word, colour) = match *about.level() {
                Level::ERROR => ("error: ", 31),
                Level::WARN => ("warning: ", 33),
                Level::INFO => ("", 0),
                _ => ("debug: ", 2),
            };
            if out.has_ansi_escapes() && !word.is_empty() {
                write!(out, "\x1b[{colour}m{word}\x1b[0m")?;
            } else {
                out.write_str(word)?;
            }
        }
        context.format_fields(out.by_ref(), event)?;
        writeln!(out)
    }
}
