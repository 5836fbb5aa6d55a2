//! Log setup: lines on standard error for users.

use crate::error_text::without_numbers;
use crate::log_thread::{Limits, LogThread, RateLimit};
use parking_lot::Mutex;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::panic::PanicHookInfo;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::{LookupSpan, Registry};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, reload};

/// Rate limit: at most 96 KiB in a second, for any behaviour of guests. In normal operation, the
/// log has a few hundred bytes per connecting guest.
const RATE_LIMIT: RateLimit = RateLimit { per_second: 64 << 10, burst: 32 << 10 };
/// Size of the queue in bytes. A server with a thousand controllers logs less at start-up.
const QUEUE_BYTES: usize = 256 << 10;
/// Size of the queue in bytes with `-v`, which has no rate limit.
const QUEUE_BYTES_VERBOSE: usize = 16 << 20;
/// Maximum time for which the end of the program waits for the reader of the log.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);

/// True after the log thread was started.
static IS_STARTED: AtomicBool = AtomicBool::new(false);
/// Log of this process, set by [`start`].
static LOG: OnceLock<LogThread> = OnceLock::new();
/// Filter of this process, set by [`start`].
static FILTER: OnceLock<Filter> = OnceLock::new();

/// Current filter, and the function that replaces it.
struct Filter {
    /// Text of the filter. The flag is true if [`set_filter`] has set it.
    now: Mutex<(String, bool)>,
    replace: Box<dyn Fn(Targets) -> Result<(), String> + Send + Sync>,
}

/// Current filter, set by [`start`] or [`set_filter`].
#[must_use]
pub fn filter() -> String {
    FILTER.get().map(|filter| filter.now.lock().0.clone()).unwrap_or_default()
}

/// Current filter, if [`set_filter`] has set it; otherwise `None`.
#[must_use]
pub fn changed_filter() -> Option<String> {
    let now = FILTER.get()?.now.lock();
    now.1.then(|| now.0.clone())
}

/// Sets the filter: a level for all targets, a list of targets with levels (`TARGET=LEVEL`), or
/// both. Errors are always logged. The rate limit is not changed.
///
/// # Errors
/// A sentence about invalid directives.
pub fn set_filter(directives: &str) -> Result<(), String> {
    let new = parse(directives)?;
    let Some(filter) = FILTER.get() else { return Err("this process has no log".to_owned()) };
    let mut now = filter.now.lock();
    (filter.replace)(new)?;
    *now = (directives.to_owned(), true);
    Ok(())
}

/// Crates with log messages, as targets of a filter.
const TARGETS: [&str; 30] = [
    "shadowbell",
    "shadowbell_block",
    "shadowbell_config",
    "shadowbell_control_api",
    "shadowbell_controller",
    "shadowbell_disk",
    "shadowbell_disk_file",
    "shadowbell_disk_layers",
    "shadowbell_disk_nbd",
    "shadowbell_disk_nvme",
    "shadowbell_disk_qcow2",
    "shadowbell_disk_rbd",
    "shadowbell_doorbell",
    "shadowbell_driver",
    "shadowbell_export",
    "shadowbell_frontend",
    "shadowbell_memory",
    "shadowbell_nbd",
    "shadowbell_nvme_tools",
    "shadowbell_process",
    "shadowbell_server",
    "shadowbell_signature",
    "shadowbell_spec",
    "shadowbell_state",
    "shadowbell_storage",
    "shadowbell_supervisor",
    "shadowbell_testing",
    "shadowbell_tls",
    "shadowbell_uring",
    "shadowbell_vfio_user",
];

/// Parses a filter: a level for all targets, targets with levels, or both. Errors are always
/// logged.
fn parse(directives: &str) -> Result<Targets, String> {
    let wrong = |part: &str| {
        format!(
            "`{part}` is not a log filter: use error, warn, info, debug or trace, or a list such as \
             `info,shadowbell_vfio_user=debug` with the crates of this program"
        )
    };
    let mut filter = Targets::new().with_default(Level::ERROR);
    for part in directives.split(',').map(str::trim) {
        let (target, level) = part
            .split_once('=')
            .map_or((None, part), |(target, level)| (Some(target.trim()), level.trim()));
        let level = level.parse::<Level>().map_err(|_| wrong(part))?;
        filter = match target {
            None => filter.with_default(level),
            Some(target) if is_target(target) => filter.with_target(target, level),
            Some(_) => return Err(wrong(part)),
        };
    }
    Ok(filter)
}

/// True if the target is a crate of this program, or a module of one.
fn is_target(target: &str) -> bool {
    let name = target.split("::").next().unwrap_or_default();
    TARGETS.contains(&name)
}

/// Help heading for options that many verbs share. It separates them from the verb's own options.
pub const COMMON: &str = "Common options";

/// Verbosity options.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct Args {
    /// Log more: -v control-plane events, -vv everything
    #[arg(short, long, action = clap::ArgAction::Count, global = true, help_heading = COMMON)]
    verbose: u8,
    /// Log less: -q warnings and errors only, -qq errors only
    #[arg(short, long, action = clap::ArgAction::Count, global = true, help_heading = COMMON)]
    #[arg(conflicts_with = "verbose")]
    quiet: u8,
}

impl Args {
    fn level(self) -> Level {
        match (self.quiet, self.verbose) {
            (0, 0) => Level::INFO,
            (0, 1) => Level::DEBUG,
            (0, _) => Level::TRACE,
            (1, _) => Level::WARN,
            _ => Level::ERROR,
        }
    }
}

/// True if informational messages are logged, that is, without `--quiet`.
#[must_use]
pub fn is_informational() -> bool {
    tracing::enabled!(Level::INFO)
}

/// Sets up the log. Lines are queued, and are written from [`start_thread`] on. The environment
/// variable `RUST_LOG` (`shadowbell_vfio_user=trace`) overrides the verbosity options. With
/// `timed`, lines have timestamps, which services need.
///
/// # Errors
/// `RUST_LOG` is invalid. The log then follows the verbosity options.
pub fn start(args: &Args, timed: bool) -> Result<(), String> {
    let asked = std::env::var("RUST_LOG").ok().filter(|directives| !directives.is_empty());
    let asked = asked.map(|text| parse(&text).map(|filter| (text, filter))).transpose();
    let (asked, outcome) = match asked {
        Ok(asked) => (asked, Ok(())),
        Err(why) => (None, Err(format!("RUST_LOG: {why}"))),
    };
    let (text, filter) = asked.unwrap_or_else(|| {
        (args.level().to_string().to_lowercase(), Targets::new().with_default(args.level()))
    });
    let format = Lines { detailed: args.verbose > 0, timed: timed && !is_journal() };
    let highest = <Targets as Layer<Registry>>::max_level_hint(&filter);
    let all = highest.is_none_or(|level| level > Level::INFO);
    let limits = if all {
        Limits { waiting: QUEUE_BYTES_VERBOSE, rate_limit: None }
    } else {
        Limits { waiting: QUEUE_BYTES, rate_limit: Some(RATE_LIMIT) }
    };
    let log = LogThread::new(limits);
    let writer = log.clone();
    // The call fails only if a subscriber is set already, which happens in tests.
    let (filter, handle) = reload::Layer::new(filter);
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(move || WithoutErrorNumbers(writer.clone()))
        .with_ansi(std::io::stderr().is_terminal())
        .event_format(format);
    let started = tracing_subscriber::registry().with(filter).with(lines).try_init();
    let replace = move |new| handle.reload(new).map_err(|error| error.to_string());
    let now = Mutex::new((text, false));
    let _ = FILTER.set(Filter { now, replace: Box::new(replace) });
    if started.is_ok() && LOG.set(log).is_ok() {
        std::panic::set_hook(Box::new(abort_on_panic));
    }
    outcome
}

/// Starts the log thread. It also writes the lines that were queued before.
pub fn start_thread() {
    if let Some(log) = LOG.get()
        && !IS_STARTED.swap(true, Ordering::Relaxed)
    {
        // If this thread cannot be started, the threads of a server cannot be started either, and
        // that error is reported.
        let _ = log.start(std::io::stderr());
    }
}

/// Queues a line of a process without `tracing`, such as the supervisor, for the log thread. Never
/// waits for the reader of the log.
pub fn write_line(line: &str) {
    let limits = Limits { waiting: QUEUE_BYTES, rate_limit: Some(RATE_LIMIT) };
    LOG.get_or_init(|| LogThread::new(limits)).line(line.as_bytes());
}

/// Writes a message on standard error after all queued lines. A blocked reader delays this for
/// two seconds at most.
pub fn final_message(text: &str) {
    match LOG.get() {
        Some(log) => {
            log.final_message(text.as_bytes());
            finish();
        }
        // Errors are ignored, because there is no other place to report them.
        None => drop(io::stderr().write_all(text.as_bytes())),
    }
}

/// Waits until all queued lines are written, for two seconds at most.
pub fn finish() {
    finish_within(FINISH_TIMEOUT);
}

/// Waits until all queued lines are written, for at most `timeout`.
pub fn finish_within(timeout: Duration) {
    start_thread();
    if let Some(log) = LOG.get() {
        let _ = log.finish(timeout);
    }
}

/// Panic hook: aborts the process. Threads that depend on the panicked thread would wait for ever.
/// A supervisor or the service manager can restart the process.
fn abort_on_panic(panic: &PanicHookInfo<'_>) {
    if shadowbell_memory::is_panic_contained() {
        return;
    }
    let thread = std::thread::current();
    let (name, trace) = (thread.name().unwrap_or("?"), Backtrace::capture());
    let trace = match trace.status() {
        BacktraceStatus::Captured => format!("{trace}"),
        _ => String::from("set RUST_BACKTRACE=1 for a backtrace\n"),
    };
    let why = panic.payload_as_str().unwrap_or("with a payload that is not text");
    let place = panic.location().map_or_else(|| "?".into(), ToString::to_string);
    final_message(&format!(
        "shadowbell: thread {name} has panicked at {place}: {why}; this is an internal error, and the \
         program is aborted (SIGABRT), so that it can be restarted\n{trace}"
    ));
    std::process::abort();
}

/// Log writer that removes error numbers from texts of libraries.
struct WithoutErrorNumbers(LogThread);

impl Write for WithoutErrorNumbers {
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

/// Format of a log line: `warning: message key=value`. For services, the line starts with the time.
/// With `-v`, it contains the time and the module.
struct Lines {
    detailed: bool,
    timed: bool,
}

/// Current time in the format of log lines, in UTC.
#[must_use]
pub fn now() -> String {
    let mut text = String::new();
    // Cannot fail, because it writes to a string.
    let _ = SystemTime.format_time(&mut Writer::new(&mut text));
    text
}

/// True if standard error is connected to systemd's journal, which adds timestamps itself.
#[must_use]
pub fn is_journal() -> bool {
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

    #[test]
    fn a_filter_has_known_levels_and_targets_and_keeps_errors() {
        for wrong in [
            "warnig",
            "chatty",
            "",
            "off",
            "info,",
            "info,foo=bar",
            "foo=info",
            "shadowbell_nbd",
            "shadowbell_nbd=off",
            "info,shadowbel=debug",
        ] {
            assert!(parse(wrong).unwrap_err().contains("is not a log filter"), "{wrong}");
        }
        for (text, target, level) in [
            ("warn", "shadowbell_server", Level::WARN),
            ("INFO, shadowbell_nbd=debug", "shadowbell_nbd::sys", Level::DEBUG),
            ("shadowbell_nbd::x=trace", "shadowbell_server", Level::ERROR),
            ("error,shadowbell_nbd=error", "shadowbell_nbd", Level::ERROR),
        ] {
            let filter = parse(text).unwrap();
            assert!(filter.would_enable(target, &level), "{text}");
            assert!(filter.would_enable(target, &Level::ERROR), "{text}");
        }
    }

    #[test]
    fn the_targets_are_the_crates() {
        let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let all = std::fs::read_dir(crates).unwrap().map(|entry| entry.unwrap().file_name());
        let names = all.map(|name| match name.to_str().unwrap() {
            "shadowbell" => "shadowbell".to_owned(),
            name => format!("shadowbell_{}", name.replace('-', "_")),
        });
        let mut names: Vec<_> = names.collect();
        names.sort();
        assert_eq!(names, TARGETS);
    }

    /// Runs a child process in which a thread panics, with its log in `log`. Returns the exit
    /// status of the child.
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

    /// Creates a pipe and fills it.
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
            start(&Args::default(), false).unwrap();
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
        let mut printed = String::new();
        reader.read_to_string(&mut printed).unwrap();
        let (before, why) = printed.split_once("shadowbell: ").expect("a message with the cause");
        assert!(before.contains("all is well"), "{printed}");
        assert!(why.starts_with("thread sb-reactor has panicked at crates/"), "{printed}");
        assert!(why.contains("there is no such queue; "), "{printed}");

        // The process ends even if nothing reads its log.
        let (_reader, writer) = full_pipe();
        let status = panics(writer);
        assert_eq!(status.signal(), Some(6), "{status:?}");
    }
}
