//! Statistics of the server, for the control socket and the log.

use crate::registry::ServedController;
use serde::Serialize;
use shadowbell_controller::{Controller, Stats};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Sums over the I/O queues of all controllers, including deleted queues, and the counters of each
/// controller.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
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
    /// Batches of completions that raised no interrupt.
    pub interrupts_suppressed: u64,
    /// Updates of EventIdx that request a doorbell write of the host, of SQs and CQs.
    pub event_idx_armed: u64,
    /// Batches of fetched commands.
    pub batches: u64,
    /// Counters by controller.
    pub controllers: Vec<ControllerReport>,
}

/// Counters of a controller.
#[derive(Debug, Serialize)]
pub(crate) struct ControllerReport {
    /// Identifier of the controller.
    pub id: String,
    /// Path of the socket.
    pub socket: String,
    /// Serial number.
    pub serial: String,
    /// Counters of the disks. A disk without counters is left out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskReport>,
    /// All counters of the controller.
    #[serde(flatten)]
    pub stats: Stats,
}

/// Counters of a disk.
#[derive(Debug, Serialize)]
pub(crate) struct DiskReport {
    /// Name of the disk.
    pub disk: String,
    /// Cancelled writes that the storage has not answered.
    pub stalled_writes: usize,
    /// Counters by name.
    #[serde(flatten)]
    pub counters: BTreeMap<&'static str, u64>,
}

/// Reports of a controller's disks that have counters or stalled writes.
fn disks(controller: &Controller) -> Vec<DiskReport> {
    let reports = controller.namespaces().into_iter().map(|(_, namespace)| {
        let disk = namespace.disk;
        let (stalled_writes, counters) = (disk.orphans(), disk.counters().into_iter().collect());
        DiskReport { disk: disk.name(), stalled_writes, counters }
    });
    reports.filter(|report| !report.counters.is_empty() || report.stalled_writes != 0).collect()
}

impl Report {
    pub(crate) fn of(served: &[Arc<ServedController>]) -> Self {
        let mut report = Self::default();
        for served in served {
            let ServedController { id, name, controller, .. } = &**served;
            let serial = &controller.config().serial;
            report.add([id, name, serial], controller.stats(), disks(controller));
        }
        report
    }

    fn add(&mut self, names: [&str; 3], stats: Stats, disks: Vec<DiskReport>) {
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
        let [id, socket, serial] = names.map(str::to_owned);
        self.controllers.push(ControllerReport { id, socket, serial, disks, stats });
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} I/O commands, {} doorbell writes ({} trapped, {} by eventfd), {} interrupts raised \
             and {} suppressed",
            self.commands,
            self.doorbell_mmio_writes.saturating_add(self.doorbell_events),
            self.doorbell_mmio_writes,
            self.doorbell_events,
            self.interrupts,
            self.interrupts_suppressed
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_controller::stats::{CqStats, DoorbellCounts, SqStats};

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
        report.add(["a", "a", "A"], stats(), Vec::new());
        report.add(["b", "b", "B"], stats(), Vec::new());
        assert_eq!((report.commands, report.completions), (222, 222));
        assert_eq!(report.doorbell_mmio_writes, 2 * (3 + 20));
        assert_eq!(report.interrupts, 8);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["controllers"][1]["socket"], "b");
        assert_eq!(json["controllers"][0]["submission_queues"][1]["commands"], 5);
    }
}
