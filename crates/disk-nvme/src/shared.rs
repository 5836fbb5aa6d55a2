//! State shared by all queues of a disk.

use crate::disconnect::DisconnectMonitor;
use crate::dma_share::DmaShares;
use crate::queue::PairState;
use crate::transfer_stats::DiskTransferStats;
use parking_lot::Mutex;
use shadowbell_disk::{DiskInfo, Orphans};
use shadowbell_driver::{Controller, Namespace};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// Interval at which answers to commands of closed queues are taken.
const LATE_INTERVAL: Duration = Duration::from_millis(10);

pub(crate) struct NvmeDiskShared {
    pub(crate) namespace: Namespace,
    pub(crate) info: DiskInfo,
    /// Memory that the SSD can access directly. `None` if all data are copied.
    pub(crate) shares: Option<Arc<DmaShares>>,
    pub(crate) name: String,
    pub(crate) transfers: DiskTransferStats,
    pub(crate) disconnect: DisconnectMonitor,
    /// Entries per queue pair.
    pub(crate) depth: u32,
    /// Cached result of the query if the SSD can report which blocks are allocated.
    pub(crate) reports_allocated: OnceLock<bool>,
    /// Cancelled writes that the SSD may still execute.
    pub(crate) orphans: Arc<Orphans>,
    /// Queue pairs of closed queues, with commands in flight for which no request waits.
    pub(crate) closed: Mutex<ClosedPairs>,
    pub(crate) controller: Arc<Mutex<Controller>>,
}

/// Queue pairs of closed queues.
#[derive(Default)]
pub(crate) struct ClosedPairs {
    pairs: Vec<PairState>,
    /// True while a thread takes the answers to their commands.
    is_attended: bool,
}

impl ClosedPairs {
    /// Takes a queue pair for a new queue.
    pub(crate) fn take(&mut self) -> Option<PairState> {
        self.pairs.pop()
    }
}

impl NvmeDiskShared {
    /// Keeps a queue pair until its commands have ended, or until another queue takes it.
    pub(crate) fn keep(this: &Arc<Self>, state: PairState) {
        let mut closed = this.closed.lock();
        closed.pairs.push(state);
        if !closed.is_attended {
            let shared = Arc::downgrade(this);
            let thread = std::thread::Builder::new().name("nvme-late".into());
            match thread.spawn(move || take_late_answers(&shared)) {
                Ok(_) => closed.is_attended = true,
                Err(error) => {
                    tracing::warn!("{}: no thread takes late answers: {error}", this.name);
                }
            }
        }
    }
}

/// Main function of the thread that takes the answers to the commands of closed queues.
fn take_late_answers(shared: &Weak<NvmeDiskShared>) {
    loop {
        let Some(shared) = shared.upgrade() else { return };
        let mut closed = shared.closed.lock();
        let ended: Vec<_> = closed.pairs.extract_if(.., PairState::take_late_answers).collect();
        closed.is_attended = !closed.pairs.is_empty();
        let is_last = !closed.is_attended;
        drop(closed);
        // The drop of a queue pair deletes it at the SSD, which takes a while.
        drop(ended);
        if is_last {
            return;
        }
        drop(shared);
        std::thread::sleep(LATE_INTERVAL);
    }
}
