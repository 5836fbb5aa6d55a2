//! Statistics as a JSON file (`--stats-json`).

use super::path_broker;
use super::registry::ServedController;
use anyhow::bail;
use serde::Serialize;
use shadowbell_controller::{Controller, Stats};
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

/// Sums over the I/O queues of all controllers, deleted ones included, and the counters of each.
#[derive(Debug, Default, Serialize)]
pub(super) struct Report {
    /// Commands fetched.
    pub commands: u64,
    /// Completions posted.
    pub completions: u64,
    /// Trapped doorbell writes, of SQs and CQs.
    pub doorbell_mmio_writes: u64,
    /// Doorbells rung by an eventfd.
    pub doorbell_events: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// Batches of completions without an interrupt.
    pub interrupts_suppressed: u64,
    /// Updates of EventIdx that make the host ring, of SQs and CQs.
    pub event_idx_armed: u64,
    /// Batches of fetched commands.
    pub batches: u64,
    /// Counters by controller.
    pub controllers: Vec<ControllerReport>,
}

/// Counters of a controller.
#[derive(Debug, Serialize)]
pub(super) struct ControllerReport {
    /// Path of the socket.
    pub socket: String,
    /// Serial number.
    pub serial: String,
    /// Counters of disks that have some.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskReport>,
    /// All counters of the controller.
    #[serde(flatten)]
    pub stats: Stats,
}

/// Counters of a disk.
#[derive(Debug, Serialize)]
pub(super) struct DiskReport {
    /// Name of the disk.
    pub disk: String,
    /// Counters by name.
    #[serde(flatten)]
    pub counters: BTreeMap<&'static str, u64>,
}

/// Reports of a controller's disks that have counters.
fn disks(controller: &Controller) -> Vec<DiskReport> {
    let reports = controller.namespaces().into_iter().map(|(_, namespace)| {
        let disk = namespace.disk;
        DiskReport { disk: disk.name(), counters: disk.counters().into_iter().collect() }
    });
    reports.filter(|report| !report.counters.is_empty()).collect()
}

impl Report {
    pub(super) fn of(served: &[Arc<ServedController>]) -> Self {
        let mut report = Self::default();
        for served in served {
            let ServedController { name, controller, .. } = &**served;
            let serial = &controller.config().serial;
            report.add(name, serial, controller.stats(), disks(controller));
        }
        report
    }

    fn add(&mut self, socket: &str, serial: &str, stats: Stats, disks: Vec<DiskReport>) {
        let (sq, cq) = stats.io_queues();
        self.commands += sq.commands;
        self.batches += sq.batches;
        self.completions += cq.completions;
        self.interrupts += cq.interrupts;
        self.interrupts_suppressed += cq.interrupts_suppressed;
        self.doorbell_events = self.doorbell_events.saturating_add(stats.doorbell_events);
        for doorbell in [&sq.doorbell, &cq.doorbell] {
            self.doorbell_mmio_writes += doorbell.mmio_writes;
            self.event_idx_armed += doorbell.event_idx_armed;
        }
        let (socket, serial) = (socket.to_owned(), serial.to_owned());
        self.controllers.push(ControllerReport { socket, serial, disks, stats });
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} I/O commands, {} doorbell writes trapped, {} interrupts raised and {} suppressed",
            self.commands, self.doorbell_mmio_writes, self.interrupts, self.interrupts_suppressed
        )
    }
}

/// Writes a report atomically: a reader of `path` finds either the old or the new one.
///
/// # Errors
/// A system call fails. An existing file is unchanged then.
pub(super) fn write(path: &Path, report: &Report) -> io::Result<()> {
    let mut json = serde_json::to_vec_pretty(report)?;
    json.push(b'\n');
    path_broker::write_counters(path, &json)
}

/// Checks that a report may replace the file at `path`: it is missing, empty or a JSON object.
/// Without the check, a disk's path that was given here by mistake would be overwritten.
///
/// # Errors
/// The file has other content.
pub(super) fn check(path: &Path) -> anyhow::Result<()> {
    let mut first = [0];
    if path.is_file() && std::fs::File::open(path)?.read(&mut first)? != 0 && first != *b"{" {
        bail!("{} exists and is no statistics file; choose another path", path.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_controller::stats::{CqStats, DoorbellCounts, SqStats};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn totals_are_of_io_queues_present_and_past() {
        let doorbell = |mmio_writes| DoorbellCounts { mmio_writes, ..DoorbellCounts::default() };
        let sq =
            |qid, commands| SqStats { qid, commands, doorbell: doorbell(1), ..Default::default() };
        let cq = |qid, completions| CqStats {
            qid,
            completions,
            interrupts: 2,
            doorbell: doorbell(10),
            ..Default::default()
        };
        let stats = || Stats {
            submission_queues: vec![sq(0, 1000), sq(1, 5), sq(2, 6)],
            completion_queues: vec![cq(0, 1000), cq(1, 11)],
            retired_sq: sq(0, 100),
            retired_cq: cq(0, 100),
            ..Stats::default()
        };
        let mut report = Report::default();
        report.add("a", "A", stats(), Vec::new());
        report.add("b", "B", stats(), Vec::new());
        assert_eq!((report.commands, report.completions), (222, 222));
        assert_eq!(report.doorbell_mmio_writes, 2 * (3 + 20));
        assert_eq!(report.interrupts, 8);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["controllers"][1]["socket"], "b");
        assert_eq!(json["controllers"][0]["submission_queues"][1]["commands"], 5);
    }

    #[test]
    fn a_report_replaces_the_one_before_as_a_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("stats.json");
        write(&path, &Report::default()).unwrap();
        write(&path, &Report { commands: 7, ..Report::default() }).unwrap();
        let json: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(json["commands"], 7);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "no draft is left");
        assert!(write(&directory.path().join("no/stats.json"), &Report::default()).is_err());
    }

    #[test]
    fn a_link_where_the_draft_used_to_be_is_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let [path, victim] = ["stats.json", "victim"].map(|name| directory.path().join(name));
        std::fs::write(&victim, "a disk").unwrap();
        let draft = format!("stats.json.{}.tmp", std::process::id());
        std::os::unix::fs::symlink(&victim, directory.path().join(draft)).unwrap();
        write(&path, &Report::default()).unwrap();
        assert_eq!(std::fs::read(&victim).unwrap(), b"a disk");
        assert!(std::fs::symlink_metadata(&path).unwrap().is_file());
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o600, 0o600, "and others may read it, as the umask has it");
    }

    #[test]
    fn what_is_no_file_is_written_to_and_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let [file, link, fifo] = ["file", "link", "fifo"].map(|name| directory.path().join(name));
        std::fs::write(&file, "{ a longer report }".repeat(9999)).unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write(&link, &Report::default()).unwrap();
        assert!(link.is_symlink());
        serde_json::from_slice::<serde_json::Value>(&std::fs::read(&file).unwrap()).unwrap();
        let mode = rustix::fs::Mode::RWXU;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        // Without a reader, a blocking open of the FIFO would wait.
        write(&fifo, &Report::default()).unwrap_err();
        assert!(!std::fs::symlink_metadata(&fifo).unwrap().is_file());
    }
}
