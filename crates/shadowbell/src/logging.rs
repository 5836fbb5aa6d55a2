//! The log: lines on standard error, for a person.

use crate::log_thread::{Limits, LogThread, Pace};
use crate::plain_words::without_numbers;
use parking_lot::Mutex;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::panic::PanicHookInfo;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// A second of the log has 96 KiB at most, whatever guests do. An honest server says some hundred
/// bytes for each guest that comes.
const PACE: Pace = Pace { per_second: 64 << 10, burst: 32 << 10 };
/// What may wait to be written: more than a server with a thousand controllers says at its start.
const WAITING: usize = 256 << 10;
/// As much, for whoever asks for everything (-v): there is no pace then.
const WAITING_VERBOSE: usize = 16 << 20;
/// How long the end of the program waits for whoever reads the log.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Whether the thread was started.
static HAS_BEGUN: AtomicBool = AtomicBool::new(false);
/// What is to be written, from [`start`] on.
static LOG: OnceLock<LogThread> = OnceLock::new();
/// What is logged, from [`start`] on.
static FILTER: OnceLock<Filter> = OnceLock::new();

/// What is logged, and how to change it.
struct Filter {
    /// As it was written, and whether it was changed.
    now: Mutex<(String, bool)>,
    replace: Box<dyn Fn(EnvFilter) -> Result<(), String> + Send + Sync>,
}

/// What is logged, as [`start`] or [`set_filter`] was told.
#[must_use]
pub(crate) fn filter() -> String {
    FILTER.get().map(|filter| filter.now.lock().0.clone()).unwrap_or_default()
}

/// The same, if [`set_filter`] was told.
#[must_use]
pub(crate) fn changed_filter() -> Option<String> {
    let now = FILTER.get()?.now.lock();
    now.1.then(|| now.0.clone())
}

/// Changes what is logged: a level, or directives as `RUST_LOG` takes them. The pace of the log
/// stays what it was.
///
/// # Errors
/// A sentence that says what is wrong with them.
pub(crate) fn set_filter(directives: &str) -> Result<(), String> {
    let is_empty = directives.trim().is_empty();
    let new = EnvFilter::builder().parse(directives);
    let new = new.ok().filter(|_| !is_empty && directives.is_ascii()).ok_or_else(|| {
        format!(
            "`{directives}` says nothing of what to log: it is error, warn, info, debug or trace, \
             or a list such as `info,shadowbell_vfio_user=debug`"
        )
    })?;
    let Some(filter) = FILTER.get() else { return Err("this process has no log".to_owned()) };
    let mut now = filter.now.lock();
    (filter.replace)(new)?;
    *now = (directives.to_owned(), true);
    Ok(())
}

/// Where the help has options that many verbs share: between those of a verb they would hide them.
pub(crate) const COMMON: &str = "Common options";

/// How much is logged.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// Tell more: -v what happens on the control plane, -vv everything
    #[arg(short, long, action = clap::ArgAction::Count, global = true, help_heading = COMMON)]
    verbose: u8,
    /// Tell less: -q warnings and errors only, -qq errors only
    #[arg(short, long, action = clap::ArgAction::Count, global = true, help_heading = COMMON)]
    #[arg(conflicts_with = "verbose")]
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

/// Takes what is logged, which is written from [`begin`] on. `RUST_LOG` says what that is, if it is
/// set; it takes what [`EnvFilter`] takes, such as `shadowbell_vfio_user=trace`. `timed`: lines
/// begin with the time, as those of a service have to.
pub(crate) fn start(args: &Args, timed: bool) {
    let (text, filter) = match std::env::var("RUST_LOG") {
        Ok(directives) if !directives.is_empty() => {
            let filter = EnvFilter::builder().parse_lossy(&directives);
            (directives, filter)
        }
        _ => (args.level().to_owned(), EnvFilter::new(args.level())),
    };
    let format = Lines { detailed: args.verbose > 0, timed: timed && !is_journal() };
    let all = filter.max_level_hint().is_none_or(|level| level > Level::INFO);
    let limits = if all {
        Limits { waiting: WAITING_VERBOSE, pace: None }
    } else {
        Limits { waiting: WAITING, pace: Some(PACE) }
    };
    let log = LogThread::new(limits);
    let writer = log.clone();
    // Fails only where a subscriber is there already: in a test, which wants its own.
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(move || Plain(writer.clone()))
        .with_ansi(std::io::stderr().is_terminal())
        .event_format(format)
        .with_filter_reloading();
    let handle = subscriber.reload_handle();
    let started = subscriber.try_init();
    let replace = move |new| handle.reload(new).map_err(|error| error.to_string());
    let now = Mutex::new((text, false));
    let _ = FILTER.set(Filter { now, replace: Box::new(replace) });
    if started.is_ok() && LOG.set(log).is_ok() {
        std::panic::set_hook(Box::new(die));
    }
}

/// Starts to write what is logged, and what was logged before. Until then this has no thread.
pub(crate) fn begin() {
    if let Some(log) = LOG.get()
        && !HAS_BEGUN.swap(true, Ordering::Relaxed)
    {
        // Without a thread there is none to serve with either, and that will be said.
        let _ = log.start(std::io::stderr());
    }
}

/// Says something of the program's own on standard error, after what was logged before. Whoever
/// reads it may stand still: that holds up the end of the program for a moment, and nothing else.
pub(crate) fn last_words(text: &str) {
    match LOG.get() {
        Some(log) => {
            log.last_words(text.as_bytes());
            finish();
        }
        // Nothing can be done if this fails.
        None => drop(io::stderr().write_all(text.as_bytes())),
    }
}

/// Waits until what was logged is written, for a moment at most.
pub(crate) fn finish() {
    begin();
    if let Some(log) = LOG.get() {
        let _ = log.finish(LAST_WORDS);
    }
}

/// A thread has panicked. What it served is served by nobody then, and whoever waits for it would
/// wait for ever. So the process ends, and whoever started it can start it again.
fn die(panic: &PanicHookInfo<'_>) {
    if shadowbell_memory::is_panic_contained() {
        return;
    }
    let thread = std::thread::current();
    let (name, trace) = (thread.name().unwrap_or("?"), Backtrace::capture());
    let trace = match trace.status() {
        BacktraceStatus::Captured => format!("{trace}"),
        _ => String::from("RUST_BACKTRACE=1 shows the way there\n"),
    };
    let why = panic.payload_as_str().unwrap_or("for a reason that is no text");
    let place = panic.location().map_or_else(|| "?".into(), ToString::to_string);
    last_words(&format!(
        "shadowbell: thread {name} has panicked at {place}: {why}; this is a fault of the program, \
         which ends now (SIGABRT), so that it can be started again\n{trace}"
    ));
    std::process::abort();
}

/// The log, for lines of which libraries have written a part.
struct Plain(LogThread);

impl Write for Plain {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match std::str::from_utf8(bytes) {
            Ok(text) => self.0.write_all(without_numbers(text).as_bytes())?,
            Err(_) => self.0.write_all(bytes)?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// `warning: what happened key=value`, of a service with the time in front; with -v, the time and
/// the module.
struct Lines {
    detailed: bool,
    timed: bool,
}

/// The time now, as lines of the log begin with it, in UTC.
#[must_use]
pub(crate) fn now() -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut text));
    text
}

/// Whether standard error goes to systemd's journal, which has the time itself.
#[must_use]
pub(crate) fn is_journal() -> bool {
    let journal = std::env::var("JOURNAL_STREAM").ok();
    let about = rustix::fs::fstat(std::io::stderr()).ok();
    let about = about.map(|about| format!("{}:{}", about.st_dev, about.st_ino));
    journal.is_some() && journal == about
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
            if self.timed {
                SystemTime.format_time(&mut out)?;
                out.write_char(' ')?;
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    use std::io::{PipeReader, PipeWriter, Read};
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, ExitStatus};

    use shadowbell_testing::process_group::ProcessGroup;

    const CHILD: &str = "LOGGING_TEST_CHILD";

    /// A program that logs to `log`, one of whose threads panics: how it ends.
    fn panics(log: PipeWriter) -> ExitStatus {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child
            .args(["--exact", "logging::tests::a_thread_that_panics_ends_the_process"])
            .args(["--nocapture", "--test-threads=1"])
            .env(CHILD, "1")
            .stdout(std::process::Stdio::null())
            .stderr(log);
        ProcessGroup::spawn(&mut child).unwrap().wait()
    }

    /// A pipe that takes nothing any more.
    fn full_pipe() -> (PipeReader, PipeWriter) {
        let (reader, writer) = io::pipe().unwrap();
        let flags = fcntl_getfl(&writer).unwrap();
        fcntl_setfl(&writer, flags | OFlags::NONBLOCK).unwrap();
        while rustix::io::write(&writer, &[b'x'; 512]).is_ok() {}
        fcntl_setfl(&writer, flags).unwrap();
        (reader, writer)
    }

    #[test]
    fn a_thread_that_panics_ends_the_process() {
        if std::env::var_os(CHILD).is_some() {
            start(&Args::default(), false);
            tracing::info!("all is well");
            let serve = || panic!("there is no such queue");
            let _ = std::thread::Builder::new().name("sb-reactor".into()).spawn(serve);
            loop {
                std::thread::park();
            }
        }
        let (mut reader, writer) = io::pipe().unwrap();
        let status = panics(writer);
        assert_eq!(status.signal(), Some(6), "{status:?}");
        let mut said = String::new();
        reader.read_to_string(&mut said).unwrap();
        let (before, why) = said.split_once("shadowbell: ").expect("it says why");
        assert!(before.contains("all is well"), "{said}");
        assert!(why.starts_with("thread sb-reactor has panicked at crates/"), "{said}");
        assert!(why.contains("there is no such queue; "), "{said}");

        // Nobody reads what it says: it ends all the same.
        let (_reader, writer) = full_pipe();
        let status = panics(writer);
        assert_eq!(status.signal(), Some(6), "{status:?}");
    }
}
