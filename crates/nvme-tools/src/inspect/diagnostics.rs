//! `device-self-test`, `self-test-log`, `telemetry-log` and `persistent-event-log`: diagnostics for
//! support engineers.

use super::fields::{Args, Fields, show_json};
use super::subject::{Subject, attach};
use anyhow::{Context, anyhow};
use clap::ValueEnum;
use serde_json::{Map, Value};
use shadowbell_config::target::{self, Target};
use shadowbell_driver::Telemetry;
use shadowbell_process::exit;
use shadowbell_process::output::Output;
use shadowbell_spec::Status;
use shadowbell_spec::feature::Timestamp;
use shadowbell_spec::log::persistent_event::{
    PersistentEvent, PersistentEventLog, ResetInformation, SanitizeCompletion, SanitizeStart,
    TimestampChange, VendorEvent, event_type,
};
use shadowbell_spec::log::{
    SanitizeState, SelfTestLog, SelfTestResult, self_test_result, sos, stc,
};
use shadowbell_spec::sqe::NSID_ALL;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use zerocopy::FromBytes;

/// Start or abort a self-test of a controller and its namespaces
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct SelfTestArgs {
    /// Controller to test
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// Namespace to test; 0 for the controller alone [default: all]
    #[arg(short, long, value_name = "NSID")]
    pub namespace_id: Option<u32>,
    /// Self-test operation
    #[arg(short, long, value_enum, default_value_t = Code::Short, value_name = "CODE")]
    pub self_test_code: Code,
    /// Accepted for compatibility with nvme-cli. The verb always waits for the end of the test,
    /// because detaching resets the controller
    #[arg(short, long)]
    pub wait: bool,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Self-test code of the Device Self-test command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Code {
    /// Short self-test, a minute or two
    #[value(alias = "1", alias = "0x1")]
    Short,
    /// Extended self-test
    #[value(alias = "2", alias = "0x2")]
    Extended,
    /// Abort the self-test in progress
    #[value(alias = "15", alias = "0xf")]
    Abort,
}

/// Write the telemetry log page of a controller to a file
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct TelemetryArgs {
    /// Controller to read from
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// File for the log page
    #[arg(short = 'O', long, value_name = "FILE")]
    pub output_file: PathBuf,
    /// Read the Controller-Initiated log: data that the controller captured after an event
    #[arg(short, long)]
    pub controller_init: bool,
    /// Create new Host-Initiated data (1), or read the data that was created before (0)
    #[arg(short = 'g', long, default_value_t = 1, value_name = "0|1")]
    pub host_generate: u8,
    /// Last data area to read
    #[arg(short, long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=3))]
    pub data_area: u8,
}

/// Runs `device-self-test`.
///
/// # Errors
/// Errors of the driver.
pub fn device_self_test(args: &SelfTestArgs) -> anyhow::Result<ExitCode> {
    let session = attach(&args.target)?;
    let admin = session.controller.admin();
    let code = match args.self_test_code {
        Code::Short => stc::SHORT,
        Code::Extended => stc::EXTENDED,
        Code::Abort => stc::ABORT,
    };
    let nsid = args.namespace_id.unwrap_or(NSID_ALL);
    admin.device_self_test(nsid, code).map_err(|error| {
        let is_refused = error.status().is_some();
        let error = anyhow!("{}: {error}", args.target);
        if is_refused { exit::bad_input(error) } else { error }
    })?;
    let mut log = admin.self_test_log()?;
    while code != stc::ABORT && log.operation != stc::NONE {
        std::thread::sleep(Duration::from_millis(50));
        log = admin.self_test_log()?;
    }
    session.detach()?;
    show_self_tests(&log, args.output.is_json())?;
    let newest = log.results[0].result();
    let has_failed = code != stc::ABORT && newest != self_test_result::PASSED;
    Ok(if has_failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Runs `self-test-log`.
///
/// # Errors
/// Errors of the driver.
pub fn self_test_log(args: &Args) -> anyhow::Result<ExitCode> {
    let subject = Subject::open(&args.target)?;
    let log = subject.self_test_log()?;
    subject.finish()?;
    show_self_tests(&log, args.output.is_json())?;
    Ok(ExitCode::SUCCESS)
}

fn show_self_tests(log: &SelfTestLog, json: bool) -> io::Result<()> {
    let mut head = Fields::default();
    head.number("Current Device Self-Test Operation", log.operation);
    head.meaning(match log.operation {
        stc::NONE => "none",
        stc::SHORT => "short",
        stc::EXTENDED => "extended",
        _ => "vendor specific",
    });
    head.number("Current Device Self-Test Completion", log.completion).meaning("percent");
    let is_there = |result: &&SelfTestResult| result.result() != self_test_result::UNUSED;
    let results: Vec<Fields> = log.results.iter().filter(is_there).map(self_test).collect();
    if json {
        let mut all = head.to_json();
        let results = results.iter().map(|result| Value::Object(result.to_json()));
        all.insert("List of Valid Reports".to_owned(), Value::Array(results.collect()));
        return show_json(all);
    }
    let mut out = io::stdout().lock();
    write!(out, "Device Self-test of the controller:\n{head}")?;
    for (n, result) in results.iter().enumerate() {
        write!(out, "Self Test Result[{n}]:\n{result}")?;
    }
    Ok(())
}

fn self_test(result: &SelfTestResult) -> Fields {
    let mut f = Fields::default();
    f.number("Self test result", result.result());
    f.meaning(self_test_result::name(result.result()).unwrap_or("unknown"));
    f.number("Self test code", result.code());
    f.number("Segment number", result.segment);
    f.bits("Valid Diagnostic Information", result.valid.into_bits());
    f.number("Power on hours", result.poh.get());
    if result.valid.nsid() {
        f.bits("Namespace Identifier", result.nsid.get());
    }
    if result.valid.flba() {
        f.number("Failing LBA", result.flba.get());
    }
    if result.valid.sct() && result.valid.sc() {
        let status = Status::new(result.sct, result.sc);
        f.bits("Status Code Type", result.sct).bits("Status Code", result.sc).meaning(status);
    }
    f
}

/// Runs `telemetry-log`.
///
/// # Errors
/// Errors of the driver, or the file cannot be written.
pub fn telemetry_log(args: &TelemetryArgs) -> anyhow::Result<ExitCode> {
    let session = attach(&args.target)?;
    let which = match (args.controller_init, args.host_generate) {
        (true, _) => Telemetry::OfController,
        (_, 0) => Telemetry::Previous,
        _ => Telemetry::New,
    };
    let page = session.controller.admin().telemetry(which, args.data_area)?;
    session.detach()?;
    let path = &args.output_file;
    std::fs::write(path, &page).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Runs `persistent-event-log`.
///
/// # Errors
/// Errors of the driver, or the log page is malformed.
pub fn persistent_event_log(args: &Args) -> anyhow::Result<ExitCode> {
    let session = attach(&args.target)?;
    let page = session.controller.admin().persistent_events()?;
    session.detach()?;
    let (head, events) = PersistentEventLog::read_from_prefix(&page)
        .map_err(|_| anyhow!("the controller's log page has no header"))?;
    let head_fields = head_of(&head);
    let events = events_of(events);
    if args.output.is_json() {
        let mut all = head_fields.to_json();
        let events = events.iter().map(|event| Value::Object(event.to_json())).collect();
        all.insert("list_of_event_entries".to_owned(), Value::Array(events));
        show_json(Map::from_iter(all))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut out = io::stdout().lock();
    write!(out, "Persistent Event log of the controller:\n{head_fields}")?;
    for (n, event) in events.iter().enumerate() {
        write!(out, "Event Number: {n}\n{event}")?;
    }
    Ok(ExitCode::SUCCESS)
}

fn head_of(head: &PersistentEventLog) -> Fields {
    let mut f = Fields::default();
    f.number("log_id", head.lid).number("total_num_of_events", head.tnev.get());
    f.number("total_log_len", head.tll.get()).number("log_revision", head.lrev);
    f.number("log_header_len", head.lhl.get());
    f.number("timestamp", head.timestamp.get()).meaning(time(head.timestamp.get()));
    f.number("power_on_hours", head.poh.get()).number("power_cycle_count", head.pcc.get());
    f.number("generation_number", head.generation.get());
    f
}

/// Formats `timestamp`, which has the format of the Timestamp feature, as text.
fn time(timestamp: u64) -> String {
    let timestamp = Timestamp::from_bits(timestamp);
    let seconds = timestamp.millis() / 1000;
    match timestamp.origin() {
        0 => format!("{seconds} seconds after a reset"),
        _ => humantime(seconds),
    }
}

fn humantime(seconds: u64) -> String {
    let at = std::time::UNIX_EPOCH + Duration::from_secs(seconds);
    httpdate::fmt_http_date(at)
}

/// Decodes the events of a log page, up to the first truncated one.
fn events_of(mut rest: &[u8]) -> Vec<Fields> {
    let mut all = Vec::new();
    while let Ok((head, more)) = PersistentEvent::read_from_prefix(rest) {
        // EHL is the header's length minus 3. It includes bytes that later revisions append to the
        // header.
        let more_of_head = (usize::from(head.ehl) + 3).saturating_sub(size_of::<PersistentEvent>());
        let begin = more_of_head + usize::from(head.vsil.get());
        let end = more_of_head + usize::from(head.el.get());
        let Some(data) = more.get(begin..end) else { break };
        all.push(event_of(&head, data));
        rest = &more[end..];
    }
    all
}

fn event_of(head: &PersistentEvent, data: &[u8]) -> Fields {
    let mut f = Fields::default();
    f.bits("event_type", head.event).meaning(event_type::name(head.event).unwrap_or("unknown"));
    f.number("event_type_rev", head.revision).number("ctrl_id", head.cntlid.get());
    f.number("event_time_stamp", head.timestamp.get()).meaning(time(head.timestamp.get()));
    f.number("event_len", head.el.get());
    match head.event {
        event_type::POWER_ON_OR_RESET => {
            if let Some((revision, rest)) = data.split_at_checked(8) {
                f.text("firmware_revision", String::from_utf8_lossy(revision).trim_end());
                if let Ok((reset, _)) = ResetInformation::read_from_prefix(rest) {
                    f.number("ctrl_power_cycle", reset.power_cycle.get());
                    f.number("power_on_milliseconds", reset.power_on_ms.get());
                }
            }
        }
        event_type::TIMESTAMP_CHANGE => {
            if let Ok((change, _)) = TimestampChange::read_from_prefix(data) {
                f.number("prev_timestamp", change.previous.get());
                f.number("milliseconds_since_reset", change.since_reset_ms.get());
            }
        }
        event_type::SANITIZE_START => {
            if let Ok((start, _)) = SanitizeStart::read_from_prefix(data) {
                f.bits("sanicap", start.sanicap.get());
                f.bits("cdw10", start.cdw10.get()).bits("cdw11", start.cdw11.get());
            }
        }
        event_type::SANITIZE_COMPLETION => {
            if let Ok((end, _)) = SanitizeCompletion::read_from_prefix(data) {
                let state = SanitizeState::from_bits(end.sstat.get());
                f.number("sanitize_prog", end.sprog.get());
                f.bits("sanitize_status", end.sstat.get());
                f.meaning(sos::name(state.sos()).unwrap_or("unknown"));
                f.number("completion_info", end.information.get());
            }
        }
        event_type::VENDOR => {
            let mut rest = data;
            while let Ok((head, more)) = VendorEvent::read_from_prefix(rest) {
                let Some((data, next)) = more.split_at_checked(head.len.get().into()) else {
                    break;
                };
                match head.data_type {
                    VendorEvent::NAME => f.text("event_name", printable(data)),
                    VendorEvent::ASCII => f.text("event_text", printable(data)),
                    _ => f.bytes("event_data", data),
                };
                rest = next;
            }
        }
        _ => {}
    }
    f
}

/// Text from the device, with control characters replaced so that it cannot control a terminal.
fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().map(|c| if c.is_control() { '.' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    #[test]
    fn complete_events_are_printed() {
        let event = |event, data: &[u8], claimed: u16| {
            let head = PersistentEvent {
                event,
                ehl: PersistentEvent::EHL,
                el: claimed.into(),
                ..PersistentEvent::default()
            };
            [head.as_bytes(), data].concat()
        };
        let name =
            VendorEvent { data_type: VendorEvent::NAME, len: 4.into(), ..VendorEvent::default() };
        let own = [name.as_bytes(), b"a\x1bbc"].concat();
        let page = [event(0xde, &own, own.len() as u16), event(4, b"short", 5), event(3, b"", 99)];
        let shown = events_of(&page.concat());
        assert_eq!(shown.len(), 2);
        let json = shown[0].to_json();
        assert_eq!((&json["event_name"], &json["event_type"]), (&"a.bc".into(), &0xde.into()));
        assert!(shown[1].to_string().contains("Power-on or Reset"));
        assert!(events_of(&[0xff; 100]).is_empty());
    }

    #[test]
    fn a_self_test_result_names_the_failure() {
        let mut result = SelfTestResult { dsts: 0x27, ..SelfTestResult::UNUSED };
        assert!(!self_test(&result).to_string().contains("Failing LBA"));
        result.valid = result.valid.with_flba(true).with_sct(true).with_sc(true);
        (result.sct, result.sc, result.flba) = (2, 0x81, 77.into());
        let text = self_test(&result).to_string();
        for words in ["(failed)", "Failing LBA", ": 77", "Unrecovered Read Error"] {
            assert!(text.contains(words), "{words}: {text}");
        }
    }
}
