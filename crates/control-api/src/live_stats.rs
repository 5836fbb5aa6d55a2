//! Statistics that `shadowbell top` reads from a running server: a [`Snapshot`] as JSON.

use serde::{Deserialize, Serialize};
use shadowbell_controller::latency_stats::{Distribution, NamespaceLatency};
use shadowbell_controller::{Controller, Stats};
use utoipa::ToSchema;

use crate::api::Export;

/// Statistics of all controllers and exports at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Snapshot {
    /// Time in nanoseconds since the server began.
    pub at_ns: u64,
    /// Controllers in the order of the configuration.
    pub controllers: Vec<Row>,
    /// Exports by id.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exports: Vec<Export>,
}

/// Statistics of a controller's I/O queues since the server began, across resets and guests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Row {
    /// `id` of the controller.
    #[serde(default)]
    pub id: String,
    /// Path of the controller's socket.
    pub socket: String,
    /// Number of I/O submission queues at present.
    pub queues: usize,
    /// Numbers of the I/O threads that serve these queues.
    pub workers: Vec<usize>,
    /// True if all of these I/O threads have parked the controller: they do not poll its queues
    /// until a doorbell is written.
    pub parked: bool,
    /// True if a disk of the controller is stalled.
    #[serde(default)]
    pub stalled: bool,
    /// True if a disk of the controller is stopped by an error of its storage.
    #[serde(default)]
    pub stopped: bool,
    /// True if the controller is not served after a restart of the server process, because it
    /// waits for its disks.
    #[serde(default)]
    pub waiting: bool,
    /// Commands fetched.
    pub commands: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written or copied.
    pub bytes_written: u64,
    /// New doorbell values found, by any mechanism.
    pub updates: u64,
    /// Doorbell writes that trapped or were signalled by an eventfd.
    pub rings: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// Commands that ended with an error.
    pub errors: u64,
    /// Times for which commands have waited, by cause. They grow while a reader of snapshots or
    /// explanations is there, and for some seconds after.
    #[serde(default)]
    pub waits: Waits,
    /// Statistics of the namespaces, if latency is or was measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub namespaces: Vec<NamespaceRow>,
}

/// Sampled time by the cause for which a controller's commands waited, in nanoseconds. Several
/// times per second, the time since the last sample is divided among the causes in proportion to
/// the commands that wait for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Waits {
    /// The storage of a disk.
    pub disk_ns: u64,
    /// The rate limits of a disk.
    pub limit_ns: u64,
    /// A full completion queue, or an in-flight quota of the controller.
    pub queue_full_ns: u64,
    /// A busy I/O thread, or one without a CPU.
    pub processor_ns: u64,
    /// A page of guest memory.
    pub memory_ns: u64,
    /// No command was outstanding.
    pub nothing_ns: u64,
}

/// Statistics of a namespace since this process began, while the measurement was on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NamespaceRow {
    /// Namespace identifier.
    pub nsid: u32,
    /// Disk that stores the namespace.
    pub disk: String,
    /// Commands completed.
    pub commands: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Commands that ended with an error.
    pub errors: u64,
    /// Latency histogram: counts of commands in buckets, eight for each doubling of the latency
    /// from 1.024 us on.
    pub latency: Vec<u64>,
}

impl NamespaceRow {
    fn of(measured: &NamespaceLatency, disk: String, block_size: u32) -> Self {
        let NamespaceLatency { nsid, reads, writes, others } = measured;
        let mut latency = Distribution::default();
        [reads, writes, others].iter().for_each(|kind| latency.merge(&kind.latency));
        let bytes = |blocks: u64| blocks.saturating_mul(block_size.into());
        Self {
            nsid: *nsid,
            disk,
            commands: latency.count(),
            bytes_read: bytes(reads.blocks),
            bytes_written: bytes(writes.blocks),
            errors: [reads, writes, others].iter().fold(0, |sum, kind| sum + kind.errors),
            latency: latency.counts,
        }
    }
}

impl Row {
    /// Current statistics of the controller at `socket`. The fields `id`, `waits` and those about
    /// disks are empty.
    pub fn of(socket: &str, controller: &Controller) -> Self {
        let stats = controller.stats();
        let mut row = Self::of_stats(socket, &stats);
        if !stats.measured.is_empty() {
            // Removed namespaces have no row.
            row.namespaces = controller
                .namespaces()
                .into_iter()
                .map(|(nsid, namespace)| {
                    let empty = NamespaceLatency { nsid, ..NamespaceLatency::default() };
                    let measured = stats.measured.iter().find(|measured| measured.nsid == nsid);
                    let block_size = namespace.disk.info().block_size;
                    NamespaceRow::of(measured.unwrap_or(&empty), namespace.disk.name(), block_size)
                })
                .collect();
        }
        row
    }

    fn of_stats(socket: &str, stats: &Stats) -> Self {
        let (sq, cq) = stats.io_queues();
        let trapped = sq.doorbell.mmio_writes.saturating_add(cq.doorbell.mmio_writes);
        let mut workers: Vec<usize> = stats.workers.iter().map(|sleep| sleep.worker).collect();
        workers.sort_unstable();
        Self {
            id: String::new(),
            socket: socket.to_owned(),
            queues: stats.submission_queues.iter().filter(|queue| queue.qid != 0).count(),
            parked: !workers.is_empty() && stats.workers.iter().all(|sleep| sleep.parked),
            workers,
            stalled: false,
            stopped: false,
            waiting: false,
            commands: sq.commands,
            bytes_read: stats.io.bytes_read,
            bytes_written: stats.io.bytes_written.saturating_add(stats.io.bytes_copied),
            updates: sq.doorbell.found_new.saturating_add(cq.doorbell.found_new),
            rings: trapped.saturating_add(stats.doorbell_events),
            interrupts: cq.interrupts,
            errors: stats.io.errors,
            waits: Waits::default(),
            namespaces: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_controller::stats::{CqStats, DoorbellCounts, SleepStats, SqStats};

    #[test]
    fn a_row_sums_io_queues_and_is_parked_if_all_workers_are() {
        let doorbell = |found_new, mmio_writes| DoorbellCounts {
            found_new,
            mmio_writes,
            ..Default::default()
        };
        let sq =
            |qid| SqStats { qid, commands: 10, doorbell: doorbell(5, 1), ..Default::default() };
        let worker = |worker, parked| SleepStats { worker, parked, ..Default::default() };
        let mut stats = Stats {
            submission_queues: vec![sq(0), sq(1), sq(2)],
            completion_queues: vec![CqStats { qid: 1, interrupts: 3, ..Default::default() }],
            retired_sq: sq(0),
            doorbell_events: 4,
            workers: vec![worker(1, true), worker(0, false)],
            ..Stats::default()
        };
        let row = Row::of_stats("a", &stats);
        assert_eq!((row.queues, row.commands, row.updates, row.rings), (2, 30, 15, 7));
        assert_eq!((row.interrupts, row.parked, &row.workers[..]), (3, false, &[0, 1][..]));
        stats.workers = vec![worker(1, true)];
        assert!(Row::of_stats("a", &stats).parked);
        stats.workers.clear();
        assert!(
            !Row::of_stats("a", &stats).parked,
            "a controller without I/O threads is not parked"
        );
    }
}
