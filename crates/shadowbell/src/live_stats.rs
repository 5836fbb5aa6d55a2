//! What a running server and `shadowbell top` say to each other: a line asks, and a line of JSON, a
//! [`Snapshot`], answers.

use serde::{Deserialize, Serialize};
use shadowbell_controller::latency_stats::{Distribution, NamespaceLatency};
use shadowbell_controller::{Controller, Stats};
use utoipa::ToSchema;

/// The version of the form of a snapshot.
pub(crate) const VERSION: u32 = 1;
/// All controllers at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Snapshot {
    /// [`VERSION`].
    pub version: u32,
    /// When: nanoseconds since the server began.
    pub at_ns: u64,
    /// In the order in which they were asked for.
    pub controllers: Vec<Row>,
}

/// A controller's counters, of its I/O queues: since the server began, over resets and guests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Row {
    /// The path of its socket.
    pub socket: String,
    /// I/O submission queues that its guest has now.
    pub queues: usize,
    /// The workers that serve them.
    pub workers: Vec<usize>,
    /// Whether all of them leave it out until it rings.
    pub parked: bool,
    /// Commands fetched.
    pub commands: u64,
    /// Bytes that were read.
    pub bytes_read: u64,
    /// Bytes that were written or copied.
    pub bytes_written: u64,
    /// New doorbell values that were found, however they came.
    pub updates: u64,
    /// Doorbell writes that trapped, and doorbells rung by a descriptor.
    pub rings: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// Commands that ended in an error.
    pub errors: u64,
    /// Its namespaces, if commands are measured or were.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub namespaces: Vec<NamespaceRow>,
}

/// What was measured of a namespace since this process began, while that was on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct NamespaceRow {
    /// Its number.
    pub nsid: u32,
    /// What it keeps its bytes in.
    pub disk: String,
    /// Commands that ended.
    pub commands: u64,
    /// Bytes that were read.
    pub bytes_read: u64,
    /// Bytes that were written.
    pub bytes_written: u64,
    /// Commands that ended in an error.
    pub errors: u64,
    /// How many commands took how long: eight counts for each doubling of a time, from 1.024 us on.
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
    /// The row of a controller that is served at `socket`, as it is now.
    pub(crate) fn of(socket: &str, controller: &Controller) -> Self {
        let stats = controller.stats();
        let mut row = Self::of_stats(socket, &stats);
        if !stats.measured.is_empty() {
            // What is not there any more has no line.
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
            socket: socket.to_owned(),
            queues: stats.submission_queues.iter().filter(|queue| queue.qid != 0).count(),
            parked: !workers.is_empty() && stats.workers.iter().all(|sleep| sleep.parked),
            workers,
            commands: sq.commands,
            bytes_read: stats.io.bytes_read,
            bytes_written: stats.io.bytes_written.saturating_add(stats.io.bytes_copied),
            updates: sq.doorbell.found_new.saturating_add(cq.doorbell.found_new),
            rings: trapped.saturating_add(stats.doorbell_events),
            interrupts: cq.interrupts,
            errors: stats.io.errors,
            namespaces: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_controller::stats::{CqStats, DoorbellCounts, SleepStats, SqStats};

    #[test]
    fn a_row_is_of_all_io_queues_and_parked_only_by_all_workers() {
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
        assert!(!Row::of_stats("a", &stats).parked, "there is nobody who could");
    }
}
