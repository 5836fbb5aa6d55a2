//! `/metrics`: counters of the server in the text format OpenMetrics 1.0.
//!
//! The values are the counters of [`Stats`], which are read in place, without a message to an I/O
//! thread.
//!
//! The counters of a deleted queue are added to `queue="deleted"`, so that sums over all queues
//! never decrease while the process runs.
//!
//! The format is simple, so no library is used. A server with 256 controllers has thirty thousand
//! samples, so labels that many samples share are formatted once.

use super::state::{ServerState, namespaces_of};
use crate::registry::ServedController;
use shadowbell_control_api::api::{Disk, Export, Namespace};
use shadowbell_controller::Stats;
use shadowbell_controller::latency_stats::{BUCKETS, Distribution, NamespaceLatency, bucket_end};
use shadowbell_controller::stats::{CqStats, DoorbellCounts, SleepStats, SqStats};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;

pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Type of a metric family.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
    Info,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
            Self::Info => "info",
        }
    }

    /// Suffix that a sample's name has in addition to the family's name.
    fn suffix(self) -> &'static str {
        match self {
            Self::Counter => "_total",
            // `distribution` adds the suffixes of a histogram's samples.
            Self::Gauge | Self::Histogram => "",
            Self::Info => "_info",
        }
    }
}

/// Formats labels without the closing brace, so that a caller can append more. Labels that many
/// samples share are formatted once.
fn labels(labels: &[(&'static str, &str)]) -> String {
    let mut text = String::with_capacity(96);
    for (n, (name, value)) in labels.iter().enumerate() {
        for part in [if n == 0 { "{" } else { "," }, name, "=\""] {
            text.push_str(part);
        }
        let mut stop = *value;
        while let Some((plain, special)) = stop.find(['\\', '"', '\n']).map(|at| stop.split_at(at))
        {
            text.push_str(plain);
            let mut chars = special.chars();
            text.push_str(match chars.next() {
                Some('\n') => "\\n",
                Some('"') => "\\\"",
                _ => "\\\\",
            });
            stop = chars.as_str();
        }
        text.push_str(stop);
        text.push('"');
    }
    text
}

/// Output text, written family by family.
struct Text(String);

impl Text {
    /// Begins a metric family. If its name ends in a unit, the unit is declared.
    fn family(&mut self, kind: Kind, name: &'static str, help: &str) -> Family<'_> {
        // Errors are ignored, because writing to a string cannot fail.
        let _ = writeln!(self.0, "# TYPE {name} {}", kind.name());
        if let Some(unit) = ["bytes", "seconds"].iter().find(|unit| name.ends_with(*unit)) {
            let _ = writeln!(self.0, "# UNIT {name} {unit}");
        }
        let _ = writeln!(self.0, "# HELP {name} {help}");
        Family { text: &mut self.0, kind, name }
    }

    /// Writes a metric family with one sample for each of `all`, which are labels and subjects.
    fn samples<'a, S: 'a>(
        &mut self,
        kind: Kind,
        (name, help): (&'static str, &str),
        all: impl IntoIterator<Item = (&'a String, S)>,
        value: fn(S) -> u64,
    ) {
        let mut family = self.family(kind, name, help);
        for (labels, subject) in all {
            family.sample(labels, value(subject));
        }
    }
}

struct Family<'a> {
    text: &'a mut String,
    kind: Kind,
    name: &'static str,
}

impl Family<'_> {
    /// Writes a sample. `labels`: text of [`labels`].
    fn sample(&mut self, labels: &str, value: u64) {
        self.sample_of(labels, if labels.is_empty() { "" } else { "}" }, value);
    }

    /// Writes a sample, with further labels and the closing brace in `end`.
    fn sample_of(&mut self, labels: &str, end: &str, value: u64) {
        let mut digits = itoa::Buffer::new();
        let value = digits.format(value);
        let text = &mut *self.text;
        text.reserve(self.name.len() + labels.len() + end.len() + value.len() + 16);
        for part in [self.name, self.kind.suffix(), labels, end, " ", value, "\n"] {
            text.push_str(part);
        }
    }

    /// Writes a histogram with a bucket for each power of two of nanoseconds.
    fn distribution(&mut self, labels: &str, latency: &Distribution) {
        let mut below = 0_u64;
        // Errors are ignored, because writing to a string cannot fail.
        for (bucket, count) in latency.counts.iter().enumerate() {
            below = below.saturating_add(*count);
            let end = bucket_end(bucket);
            // The last bucket has no upper bound.
            if end.is_power_of_two() && bucket + 1 < BUCKETS {
                let le = end as f64 / 1e9;
                let _ = writeln!(self.text, "{}_bucket{labels},le=\"{le}\"}} {below}", self.name);
            }
        }
        let _ = writeln!(self.text, "{}_bucket{labels},le=\"+Inf\"}} {below}", self.name);
        let _ = writeln!(self.text, "{}_count{labels}}} {below}", self.name);
        let seconds = latency.total_ns as f64 / 1e9;
        let _ = writeln!(self.text, "{}_sum{labels}}} {seconds}", self.name);
    }

    /// Writes a sample with a fractional value.
    fn real(&mut self, labels: &str, value: f64) {
        // Errors are ignored, because writing to a string cannot fail.
        let end = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.text, "{}{}{labels}{end} {value}", self.name, self.kind.suffix());
    }
}

/// A controller and its counters.
struct Counted {
    served: Arc<ServedController>,
    stats: Stats,
    labels: String,
    sqs: Vec<Queue<SqStats>>,
    cqs: Vec<Queue<CqStats>>,
}

/// A queue and its counters.
struct Queue<S> {
    labels: String,
    stats: S,
}

impl<S> Queue<S> {
    fn new(controller: &str, queue: &str, stats: S) -> Self {
        Self { labels: [controller, ",queue=\"", queue, "\""].concat(), stats }
    }
}

impl Counted {
    fn now(served: Arc<ServedController>) -> Self {
        let stats = served.controller.stats();
        let labels = labels(&[("controller", &served.id)]);
        let sqs = stats.submission_queues.iter().map(|sq| (sq.qid.to_string(), sq));
        let cqs = stats.completion_queues.iter().map(|cq| (cq.qid.to_string(), cq));
        let deleted = || "deleted".to_owned();
        let sqs = sqs.chain([(deleted(), &stats.retired_sq)]);
        let cqs = cqs.chain([(deleted(), &stats.retired_cq)]);
        Self {
            sqs: sqs.map(|(qid, sq)| Queue::new(&labels, &qid, sq.clone())).collect(),
            cqs: cqs.map(|(qid, cq)| Queue::new(&labels, &qid, cq.clone())).collect(),
            labels,
            served,
            stats,
        }
    }

    /// Estimated size of the controller's text, in bytes.
    fn text_bytes(&self) -> usize {
        // Number of lines (9 for each queue, and 32 others) times their average length.
        ((self.sqs.len() + self.cqs.len()) * 9 + 32) * 104
    }

    fn id(&self) -> &str {
        &self.served.id
    }
}

/// Returns all metrics of the server.
pub(super) fn text(state: &ServerState) -> String {
    let counted: Vec<_> = state.controllers.all().into_iter().map(Counted::now).collect();
    let mut text =
        Text(String::with_capacity(8192 + counted.iter().map(Counted::text_bytes).sum::<usize>()));
    server(&mut text, state);
    controllers(&mut text, &counted);
    waiting(&mut text, state, &counted);
    submission_queues(&mut text, &counted);
    completion_queues(&mut text, &counted);
    doorbells(&mut text, &counted);
    namespaces(&mut text, &counted);
    disks(&mut text, state);
    exports(&mut text, state);
    measured(&mut text, &counted);
    workers(&mut text, &counted);
    text.0.push_str("# EOF\n");
    text.0
}

fn server(text: &mut Text, state: &ServerState) {
    let labels = labels(&[("name", state.name.as_str()), ("version", env!("CARGO_PKG_VERSION"))]);
    text.family(Kind::Info, "shadowbell_server", "The server.").sample(&labels, 1);
    let uptime = state.serves_since.elapsed().as_secs_f64();
    text.family(
        Kind::Gauge,
        "shadowbell_uptime_seconds",
        "Seconds since this process began to serve.",
    )
    .real("", uptime);
    text.family(Kind::Gauge, "shadowbell_workers", "Number of I/O threads.")
        .sample("", state.workers as u64);
}

fn controllers(text: &mut Text, all: &[Counted]) {
    let mut info = text.family(Kind::Info, "shadowbell_controller", "A controller.");
    for counted in all {
        let config = counted.served.controller.config();
        let labels = labels(&[
            ("controller", counted.id()),
            ("serial", config.serial.as_str()),
            ("model", config.model.as_str()),
        ]);
        info.sample(&labels, 1);
    }
    let labelled = || all.iter().map(|counted| (&counted.labels, counted));
    let client = ("shadowbell_client_connected", "1 if a client is connected.");
    text.samples(Kind::Gauge, client, labelled(), |counted| counted.served.has_client().into());
    let parked = (
        "shadowbell_parked",
        "1 if the I/O threads do not poll the idle controller until a doorbell rings.",
    );
    text.samples(Kind::Gauge, parked, labelled(), |Counted { stats, .. }| {
        u64::from(!stats.workers.is_empty() && stats.workers.iter().all(|worker| worker.parked))
    });
    let mut commands = text.family(
        Kind::Counter,
        "shadowbell_io_commands",
        "I/O commands completed. Compare counts as read; other commands transfer no data.",
    );
    for Counted { labels, stats, .. } in all {
        let io = &stats.io;
        for (kind, count) in [
            (",kind=\"read\"}", io.reads),
            (",kind=\"write\"}", io.writes),
            (",kind=\"copy\"}", io.copies),
            (",kind=\"other\"}", io.others),
        ] {
            commands.sample_of(labels, kind, count);
        }
    }
    let mut bytes =
        text.family(Kind::Counter, "shadowbell_io_bytes", "Bytes transferred by I/O commands.");
    for Counted { labels, stats, .. } in all {
        let io = &stats.io;
        for (kind, count) in [
            (",kind=\"read\"}", io.bytes_read),
            (",kind=\"write\"}", io.bytes_written),
            (",kind=\"copy\"}", io.bytes_copied),
        ] {
            bytes.sample_of(labels, kind, count);
        }
    }
    let labelled = || all.iter().map(|counted| (&counted.labels, &counted.stats));
    let mut counter = |name, help, value: fn(&Stats) -> u64| {
        text.samples(Kind::Counter, (name, help), labelled(), value);
    };
    counter("shadowbell_io_errors", "I/O commands that ended in an error.", |s| s.io.errors);
    counter("shadowbell_media_errors", "I/O commands that ended in a media error.", |s| {
        s.io.media_errors
    });
    counter(
        "shadowbell_recoveries",
        "Recoveries of the controller after the death of its server process.",
        |s| s.recoveries,
    );
    counter(
        "shadowbell_doorbell_events",
        "Doorbells rung by an eventfd instead of a register write.",
        |s| s.doorbell_events,
    );
}

/// Writes for each controller whether it waits for its disks. A waiting controller has no other
/// samples.
fn waiting(text: &mut Text, state: &ServerState, all: &[Counted]) {
    let mut family = text.family(
        Kind::Gauge,
        "shadowbell_controller_waiting",
        "1 if the controller is not served after a restart of the server process, because it waits \
         for its disks.",
    );
    for counted in all {
        family.sample(&counted.labels, 0);
    }
    for one in state.controllers.waiting() {
        family.sample(&labels(&[("controller", &one.requested.id())]), 1);
    }
}

fn submission_queues(text: &mut Text, all: &[Counted]) {
    let queues = || all.iter().flat_map(|counted| &counted.sqs);
    let mut counter = |name, help, value: fn(&SqStats) -> u64| {
        let queues = queues().map(|queue| (&queue.labels, &queue.stats));
        text.samples(Kind::Counter, (name, help), queues, value);
    };
    counter(
        "shadowbell_queue_commands",
        "Commands fetched from a submission queue. Queue 0 is the admin queue.",
        |sq| sq.commands,
    );
    counter("shadowbell_queue_batches", "Batches of commands fetched.", |sq| sq.batches);
    counter(
        "shadowbell_queue_blocked",
        "Times that fetching stopped because the completion queue was full.",
        |sq| sq.blocked,
    );
}

fn completion_queues(text: &mut Text, all: &[Counted]) {
    let queues = || all.iter().flat_map(|counted| &counted.cqs);
    let mut counter = |name, help, value: fn(&CqStats) -> u64| {
        let queues = queues().map(|queue| (&queue.labels, &queue.stats));
        text.samples(Kind::Counter, (name, help), queues, value);
    };
    counter("shadowbell_queue_completions", "Completions posted to a completion queue.", |cq| {
        cq.completions
    });
    counter("shadowbell_queue_interrupts", "Interrupts raised.", |cq| cq.interrupts);
    counter(
        "shadowbell_queue_interrupts_suppressed",
        "Batches of completions without an interrupt.",
        |cq| cq.interrupts_suppressed,
    );
}

fn doorbells(text: &mut Text, all: &[Counted]) {
    let mut counter = |name, help, of: fn(&DoorbellCounts) -> u64| {
        let mut family = text.family(Kind::Counter, name, help);
        for counted in all {
            for sq in &counted.sqs {
                family.sample_of(&sq.labels, ",side=\"sq\"}", of(&sq.stats.doorbell));
            }
            for cq in &counted.cqs {
                family.sample_of(&cq.labels, ",side=\"cq\"}", of(&cq.stats.doorbell));
            }
        }
    };
    counter("shadowbell_doorbell_mmio_writes", "Doorbell writes that trapped.", |doorbell| {
        doorbell.mmio_writes
    });
    counter(
        "shadowbell_doorbell_updates",
        "New doorbell values found, from any source.",
        |doorbell| doorbell.found_new,
    );
    counter("shadowbell_doorbell_polls", "Reads of a doorbell value while polling.", |doorbell| {
        doorbell.polls
    });
    counter(
        "shadowbell_doorbell_armed",
        "Times that EventIdx was set so that the next update rings.",
        |doorbell| doorbell.event_idx_armed,
    );
    counter(
        "shadowbell_doorbell_rechecks_found",
        "Updates found by the second read after EventIdx was set, each of which would have been a \
         lost wakeup.",
        |doorbell| doorbell.rechecks_found,
    );
    counter("shadowbell_doorbell_invalid", "Invalid doorbell values.", |doorbell| doorbell.invalid);
}

fn namespaces(text: &mut Text, all: &[Counted]) {
    let all = all.iter().flat_map(|counted| namespaces_of(&counted.served));
    let of = |ns: &Namespace| {
        labels(&[("controller", &ns.controller[..]), ("nsid", &ns.nsid.to_string())])
    };
    let all: Vec<_> = all.map(|ns| (of(&ns), ns)).collect();
    let mut info = text.family(Kind::Info, "shadowbell_namespace", "A namespace.");
    for (_, ns) in &all {
        let labels = labels(&[
            ("controller", &ns.controller[..]),
            ("nsid", &ns.nsid.to_string()),
            ("disk", &ns.disk_id),
            ("source", &ns.disk),
            ("uuid", &ns.uuid),
        ]);
        info.sample(&labels, 1);
    }
    let mut gauge = |name, help, value: fn(&Namespace) -> u64| {
        text.samples(Kind::Gauge, (name, help), all.iter().map(|(labels, ns)| (labels, ns)), value);
    };
    gauge("shadowbell_namespace_size_bytes", "Namespace capacity in bytes.", |ns| ns.bytes);
    gauge("shadowbell_namespace_read_only", "1 if the namespace is read-only.", |ns| {
        ns.read_only.into()
    });
}

fn disks(text: &mut Text, state: &ServerState) {
    let all = super::disks::disks(state);
    let all: Vec<_> = all.iter().map(|disk| (labels(&[("disk", &disk.id)]), disk)).collect();
    let mut info = text.family(Kind::Info, "shadowbell_disk", "A disk.");
    for (_, disk) in &all {
        info.sample(&labels(&[("disk", &disk.id), ("source", &disk.source)]), 1);
    }
    let mut gauge = |name, help, value: fn(&Disk) -> u64| {
        text.samples(
            Kind::Gauge,
            (name, help),
            all.iter().map(|(labels, disk)| (labels, *disk)),
            value,
        );
    };
    gauge("shadowbell_disk_size_bytes", "Disk capacity in bytes.", |disk| disk.bytes);
    gauge(
        "shadowbell_disk_stalled_writes",
        "Cancelled writes that the storage has not answered.",
        |disk| disk.stalled_writes,
    );
    gauge(
        "shadowbell_disk_requests_in_flight",
        "Requests of controllers that the storage of a disk has not answered.",
        |disk| disk.in_flight,
    );
    gauge(
        "shadowbell_disk_oldest_request_seconds",
        "Age of the oldest request that the storage of a disk has not answered.",
        |disk| disk.oldest_ms / 1000,
    );
    gauge(
        "shadowbell_disk_stalled",
        "1 if the storage of a disk has not answered a request for a long time.",
        |disk| disk.stalled.into(),
    );
    gauge(
        "shadowbell_disk_stopped",
        "1 if a disk is stopped by an error of its storage.",
        |disk| disk.stopped.is_some().into(),
    );
    gauge(
        "shadowbell_disk_requests_held",
        "Requests that a stopped disk holds until it is resumed.",
        |disk| disk.held,
    );
    let mut events = text.family(
        Kind::Counter,
        "shadowbell_disk_events",
        "Internal events of a disk. The event names depend on the disk type.",
    );
    for (_, disk) in &all {
        for (event, count) in &disk.counters {
            events.sample(&labels(&[("disk", &disk.id), ("event", event)]), *count);
        }
    }
}

fn exports(text: &mut Text, state: &ServerState) {
    let all = super::exports::exports(state);
    let all: Vec<_> =
        all.iter().map(|export| (labels(&[("export", &export.id)]), export)).collect();
    let mut info = text.family(Kind::Info, "shadowbell_export", "An export of a disk.");
    for (_, export) in &all {
        let all = [("nbd", &export.nbd), ("vhost-user-blk", &export.vhost_user_blk)];
        let all = all.into_iter().chain([("fuse", &export.fuse), ("ublk", &export.ublk)]);
        let mut all = all.filter_map(|(protocol, address)| Some((protocol, address.as_ref()?)));
        let (protocol, address) = all.next().map_or(("", ""), |(name, address)| (name, address));
        let labels = labels(&[
            ("export", &export.id[..]),
            ("disk", &export.disk),
            ("protocol", protocol),
            ("address", address),
        ]);
        info.sample(&labels, 1);
    }
    let mut samples = |kind, name, help, value: fn(&Export) -> u64| {
        let all = all.iter().map(|(labels, export)| (labels, *export));
        text.samples(kind, (name, help), all, value);
    };
    samples(
        Kind::Gauge,
        "shadowbell_export_queues",
        "Open queues of the disk: one for each NBD client or virtio queue.",
        |export| export.queues as u64,
    );
    samples(
        Kind::Counter,
        "shadowbell_export_requests",
        "Requests of an export to its disk.",
        |export| export.requests,
    );
    samples(
        Kind::Counter,
        "shadowbell_export_errors",
        "Requests that failed because of the disk.",
        |export| export.failures,
    );
    let mut bytes = text.family(
        Kind::Counter,
        "shadowbell_export_bytes",
        "Bytes transferred between an export and its disk.",
    );
    for (labels, export) in &all {
        bytes.sample_of(labels, ",kind=\"read\"}", export.bytes_read);
        bytes.sample_of(labels, ",kind=\"write\"}", export.bytes_written);
    }
}

/// Writes the measured latencies of existing namespaces, even if the measurement was turned off
/// since.
fn measured(text: &mut Text, all: &[Counted]) {
    let mut kinds = Vec::new();
    for Counted { served, stats, labels: of_controller, .. } in all {
        if stats.measured.is_empty() {
            continue;
        }
        for (nsid, namespace) in served.controller.namespaces() {
            let Some(measured) = stats.measured.iter().find(|measured| measured.nsid == nsid)
            else {
                continue;
            };
            let block_size = u64::from(namespace.disk.info().block_size);
            let NamespaceLatency { reads, writes, others, .. } = measured;
            for (kind, measured) in [("read", reads), ("write", writes), ("other", others)] {
                let labels = format!("{of_controller},nsid=\"{nsid}\",kind=\"{kind}\"");
                kinds.push((labels, block_size, measured));
            }
        }
    }
    if kinds.is_empty() {
        return;
    }
    let mut latency = text.family(
        Kind::Histogram,
        "shadowbell_namespace_latency_seconds",
        "Command latency, from the time that the command was seen in its queue to its completion.",
    );
    for (labels, _, measured) in &kinds {
        latency.distribution(labels, &measured.latency);
    }
    let mut bytes = text.family(
        Kind::Counter,
        "shadowbell_namespace_bytes",
        "Bytes transferred by measured commands.",
    );
    for (labels, block_size, measured) in &kinds {
        bytes.sample_of(labels, "}", measured.blocks.saturating_mul(*block_size));
    }
    let mut errors = text.family(
        Kind::Counter,
        "shadowbell_namespace_errors",
        "Measured commands that ended in an error.",
    );
    for (labels, _, measured) in &kinds {
        errors.sample_of(labels, "}", measured.errors);
    }
}

fn workers(text: &mut Text, all: &[Counted]) {
    // Several controllers may list the same I/O thread, so duplicates are removed.
    let workers = all.iter().flat_map(|counted| counted.stats.workers.iter());
    let workers: BTreeMap<usize, &SleepStats> = workers.map(|w| (w.worker, w)).collect();
    let of = |n: usize| labels(&[("worker", &n.to_string())]);
    let workers: Vec<_> = workers.into_iter().map(|(n, stats)| (of(n), stats)).collect();
    let mut awake = text.family(
        Kind::Counter,
        "shadowbell_worker_awake_seconds",
        "Seconds that the I/O thread spent awake.",
    );
    for (worker, stats) in &workers {
        awake.real(worker, stats.awake_ns as f64 / 1e9);
    }
    let mut counter = |name, help, value: fn(&SleepStats) -> u64| {
        let workers = workers.iter().map(|(labels, stats)| (labels, *stats));
        text.samples(Kind::Counter, (name, help), workers, value);
    };
    counter("shadowbell_worker_sleeps", "Sleeps of the I/O thread.", |w| w.sleeps);
    counter(
        "shadowbell_worker_stayed_awake",
        "Times that a second check for work prevented a sleep.",
        |w| w.stayed_awake,
    );
    counter("shadowbell_worker_spurious_wakes", "Sleeps that ended without work.", |w| {
        w.spurious_wakes
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped_and_names_have_their_endings() {
        let mut text = Text(String::new());
        text.family(Kind::Counter, "a_bytes", "What.").sample(&labels(&[("x", "a\"\\\nb")]), 7);
        text.family(Kind::Info, "b", "Which.").sample(&labels(&[("x", "1"), ("y", "2")]), 1);
        text.family(Kind::Gauge, "c", "How much.").real("", 0.5);
        let expected = "\
# TYPE a_bytes counter
# UNIT a_bytes bytes
# HELP a_bytes What.
a_bytes_total{x=\"a\\\"\\\\\\nb\"} 7
# TYPE b info
# HELP b Which.
b_info{x=\"1\",y=\"2\"} 1
# TYPE c gauge
# HELP c How much.
c 0.5
";
        assert_eq!(text.0, expected);
    }
}
