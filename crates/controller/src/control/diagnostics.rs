//! Diagnostic data for support engineers: self-tests, telemetry and persistent events.

use super::lifecycle_state::Lifecycle;
use crate::admin::logs::ErrorLog;
use crate::admin::persistent_events::EventLog;
use crate::admin::self_test::{Medium, SelfTest};
use crate::admin::telemetry::{Areas, Telemetry};
use crate::config::Config;
use crate::context::Context;
use crate::saved::SavedDiagnostics;
use crate::stats::{CqStats, SqStats, Stats};
use shadowbell_spec::log::ErrorLogEntry;
use shadowbell_spec::status::Status;
use std::fmt::Write;

/// Diagnostic data of a controller.
#[derive(Debug, Default)]
pub(super) struct Diagnostics {
    pub(super) self_test: SelfTest,
    pub(super) telemetry: Telemetry,
    pub(super) events: EventLog,
}

impl Diagnostics {
    pub(super) fn save(&self) -> SavedDiagnostics {
        SavedDiagnostics {
            self_test: self.self_test.save(),
            telemetry: self.telemetry.save(),
            events: self.events.save(),
        }
    }

    pub(super) fn restore(saved: &SavedDiagnostics) -> Self {
        Self {
            self_test: SelfTest::restore(&saved.self_test),
            telemetry: Telemetry::restore(&saved.telemetry),
            events: EventLog::restore(&saved.events),
        }
    }
}

/// Power-on time in hours.
pub(super) fn hours(lifecycle: &Lifecycle) -> u64 {
    lifecycle.since.elapsed().as_secs() / 3600
}

/// Namespaces for a self-test.
pub(super) fn media(cx: &Context) -> Vec<Medium> {
    let serving = cx.serving();
    let medium = |nsid, blocks, block_shift| Medium { nsid, blocks, block_shift };
    serving.iter().map(|ns| medium(ns.nsid(), ns.blocks(), ns.block_shift())).collect()
}

/// The three telemetry data areas.
pub(super) fn areas(cx: &Context, lifecycle: &Lifecycle, log: &ErrorLog, events: usize) -> Areas {
    let stats = cx.shared.stats(|_| None);
    let areas = [summary(&cx.config, lifecycle, log, &stats, events), queues(&stats), errors(log)];
    areas.map(Result::unwrap_or_default)
}

pub(super) type Text = Result<String, std::fmt::Error>;

/// Telemetry data area 1: summary.
pub(super) fn summary(
    config: &Config,
    lifecycle: &Lifecycle,
    errors: &ErrorLog,
    stats: &Stats,
    events: usize,
) -> Text {
    let mut text = String::from("shadowbell-telemetry 1\n");
    let out = &mut text;
    writeln!(out, "version {}", env!("CARGO_PKG_VERSION"))?;
    writeln!(out, "serial {}", config.serial)?;
    writeln!(out, "model {}", config.model)?;
    writeln!(out, "powered-seconds {}", lifecycle.since.elapsed().as_secs())?;
    writeln!(out, "power-cycles {}", lifecycle.power_cycles)?;
    writeln!(out, "unsafe-shutdowns {}", lifecycle.unsafe_shutdowns)?;
    writeln!(out, "resets {}", lifecycle.generation)?;
    writeln!(out, "recoveries {}", stats.recoveries)?;
    writeln!(out, "events {events}")?;
    writeln!(out, "errors {}", errors.count())?;
    for (status, count) in errors.kinds() {
        let name = status.name().unwrap_or("unknown");
        writeln!(out, "error {:x}.{:02x} {count} {name}", status.sct(), status.sc())?;
    }
    let io = &stats.io;
    for (name, count) in [
        ("reads", io.reads),
        ("writes", io.writes),
        ("copies", io.copies),
        ("others", io.others),
        ("bytes-read", io.bytes_read),
        ("bytes-written", io.bytes_written),
        ("bytes-copied", io.bytes_copied),
        ("failed", io.errors),
        ("media-errors", io.media_errors),
        ("doorbell-events", stats.doorbell_events),
    ] {
        writeln!(out, "{name} {count}")?;
    }
    Ok(text)
}

/// Telemetry data area 2: counters of each queue.
fn queues(stats: &Stats) -> Text {
    let mut text = String::new();
    let sq = |out: &mut String, name: &str, sq: &SqStats| {
        let SqStats { commands, batches, largest_batch, blocked, .. } = sq;
        writeln!(
            out,
            "{name} commands={commands} batches={batches} largest-batch={largest_batch} \
             blocked={blocked}"
        )
    };
    let cq = |out: &mut String, name: &str, cq: &CqStats| {
        let CqStats { completions, interrupts, interrupts_suppressed, .. } = cq;
        writeln!(
            out,
            "{name} completions={completions} interrupts={interrupts} \
             suppressed={interrupts_suppressed}"
        )
    };
    for queue in &stats.submission_queues {
        sq(&mut text, &format!("sq {}", queue.qid), queue)?;
    }
    for queue in &stats.completion_queues {
        cq(&mut text, &format!("cq {}", queue.qid), queue)?;
    }
    sq(&mut text, "sq deleted", &stats.retired_sq)?;
    cq(&mut text, "cq deleted", &stats.retired_cq)?;
    Ok(text)
}

/// Telemetry data area 3: error log, newest entry first.
fn errors(errors: &ErrorLog) -> Text {
    let mut text = String::new();
    for entry in errors.entries() {
        let ErrorLogEntry { error_count, sqid, cid, status, nsid, lba, .. } = entry;
        let status = Status::from_bits(status >> 1);
        let (sct, sc) = (status.sct(), status.sc());
        writeln!(
            &mut text,
            "error-entry {error_count} sqid={sqid} cid={cid} status={sct:x}.{sc:02x} nsid={nsid} \
             lba={lba}"
        )?;
    }
    Ok(text)
}
