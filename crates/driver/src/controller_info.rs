//! Static properties of an identified controller.

use crate::options::Doorbells;
use crate::queue::{QueueMemory, ShadowPages};
use shadowbell_doorbell::RingSize;
use shadowbell_spec::identify::IdentifyController;
use std::time::Duration;

/// Results of Identify Controller, Number of Queues and Doorbell Buffer Config.
pub(crate) struct ControllerInfo {
    pub(crate) identity: Box<IdentifyController>,
    /// Doorbell mode in use, never [`Doorbells::Auto`].
    pub(crate) doorbells: Doorbells,
    /// Shadow Doorbell and EventIdx buffers, if Doorbell Buffer Config succeeded.
    pub(crate) shadow: Option<ShadowPages>,
    /// Maximum number of bytes that one I/O command transfers.
    pub(crate) max_transfer: u64,
    /// Memory for all granted I/O queue pairs.
    pub(crate) io_memory: QueueMemory,
    /// Number of granted queue pairs; their identifiers are 1 to `granted`.
    pub(crate) granted: u16,
    /// Maximum number of entries of an I/O submission queue.
    pub(crate) largest: RingSize,
    /// True if the controller raises interrupts.
    pub(crate) interrupts: bool,
}

impl ControllerInfo {
    /// Timeout of a shutdown: RTD3E of the controller, at least `least`.
    pub(crate) fn shutdown_limit(&self, least: Duration) -> Duration {
        // RTD3E is capped at one minute: a larger value is not trusted.
        let asked = Duration::from_micros(self.identity.rtd3e.into());
        least.max(asked.min(Duration::from_secs(60)))
    }
}
