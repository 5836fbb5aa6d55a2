//! Counts of doorbells and interrupts of QEMU's NVMe controller, from QEMU's trace.
//!
//! QMP enables the events only during a measurement, because each log line takes time. The events
//! between two marks in the log are counted.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::json;

use crate::machine::Guest;

/// Trace events that are counted.
const EVENTS: [&str; 3] =
    ["pci_nvme_mmio_doorbell_sq", "pci_nvme_mmio_doorbell_cq", "pci_nvme_irq_msix"];

/// Events of I/O queues between two marks in the log. Events of the admin queue are not included.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Trapped writes of submission queue tail doorbells.
    pub sq_doorbells: u64,
    /// Trapped writes of completion queue head doorbells.
    pub cq_doorbells: u64,
    /// MSI-X messages of all vectors except vector 0, which the admin queue uses.
    pub interrupts: u64,
}

/// Measurement in progress, for which QEMU logs the trace events.
#[derive(Debug)]
pub struct Stretch {
    start: u64,
}

impl Stretch {
    /// Starts a measurement: enables the trace events.
    pub fn begin(guest: &mut Guest) -> Result<Self> {
        switch(guest, true)?;
        let start = length(guest.trace_log());
        Ok(Self { start })
    }

    /// Ends the measurement: disables the trace events, and counts those that were logged.
    pub fn end(self, guest: &mut Guest) -> Result<Counts> {
        switch(guest, false)?;
        let path = guest.trace_log();
        let mut file = File::open(path).with_context(|| path.display().to_string())?;
        file.seek(SeekFrom::Start(self.start))?;
        let mut text = Vec::new();
        file.read_to_end(&mut text).context("QEMU's trace")?;
        Ok(count(&String::from_utf8_lossy(&text)))
    }
}

fn length(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |metadata| metadata.len())
}

fn switch(guest: &mut Guest, enable: bool) -> Result<()> {
    for event in EVENTS {
        guest.qmp("trace-event-set-state", json!({ "name": event, "enable": enable }))?;
    }
    Ok(())
}

/// Counts events in lines such as `pci_nvme_mmio_doorbell_sq sqid 1 new_tail 12`, with or without
/// a prefix.
pub fn count(text: &str) -> Counts {
    let mut counts = Counts::default();
    for line in text.lines() {
        let words: Vec<_> = line.split_whitespace().collect();
        let Some(at) = words.iter().position(|word| EVENTS.contains(word)) else { continue };
        let value_after = |name: &str| {
            let place = words.iter().position(|word| *word == name)?;
            words.get(place + 1)?.parse::<u64>().ok()
        };
        let (counter, queue) = match words.get(at) {
            Some(&"pci_nvme_mmio_doorbell_sq") => (&mut counts.sq_doorbells, value_after("sqid")),
            Some(&"pci_nvme_mmio_doorbell_cq") => (&mut counts.cq_doorbells, value_after("cqid")),
            _ => (&mut counts.interrupts, value_after("vector")),
        };
        // Queue 0 is the admin queue, and vector 0 is its interrupt vector.
        if queue.is_some_and(|queue| queue != 0) {
            *counter += 1;
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn io_queues_are_counted_and_the_admin_queue_is_not() {
        let text = "pci_nvme_mmio_doorbell_sq sqid 1 new_tail 12\n\
                    pci_nvme_mmio_doorbell_sq sqid 0 new_tail 3\n\
                    17@1700000000.5:pci_nvme_mmio_doorbell_cq cqid 2 new_head 9\n\
                    17@1700000000.5 pci_nvme_mmio_doorbell_cq cqid 2 new_head 9\n\
                    pci_nvme_irq_msix raising MSI-X IRQ vector 2\n\
                    pci_nvme_irq_msix raising MSI-X IRQ vector 0\n\
                    pci_nvme_io_cmd cid 4 nsid 0x1 sqid 1 opc 0x2\n\
                    pci_nvme_mmio_doorbell_sq sqid";
        let want = Counts { sq_doorbells: 1, cq_doorbells: 1, interrupts: 1 };
        assert_eq!(count(text), want);
        assert_eq!(count(""), Counts::default());
    }
}
