//! What is known of a controller once it was identified.

use crate::options::Doorbells;
use crate::queue::{QueueMemory, ShadowPages};
use shadowbell_doorbell::RingSize;
use shadowbell_spec::identify::IdentifyController;
use std::time::Duration;

/// What Identify Controller, Number of Queues and Doorbell Buffer Config have settled.
pub(crate) struct ControllerInfo {
    pub(crate) identity: Box<IdentifyController>,
    /// How the doorbells are rung: not [`Doorbells::Auto`].
    pub(crate) doorbells: Doorbells,
    /// The buffers of Doorbell Buffer Config, if the controller has them.
    pub(crate) shadow: Option<ShadowPages>,
    /// The most bytes that an I/O command moves.
    pub(crate) max_transfer: u64,
    /// Memory for as many queue pairs as there may be.
    pub(crate) io_memory: QueueMemory,
    /// Queue pairs that there may be, identifiers 1 to this.
    pub(crate) granted: u16,
    /// The most entries of an I/O submission queue.
    pub(crate) largest: RingSize,
    /// Whether the controller interrupts.
    pub(crate) interrupts: bool,
}

impl ControllerInfo {
    /// How long a shutdown may take: as the controller says (RTD3E), and `least`.
    pub(crate) fn shutdown_limit(&self, least: Duration) -> Duration {
        // A controller that asks for more than a minute is not believed.
        let asked = Duration::from_micros(self.identity.rtd3e.into());
        least.max(asked.min(Duration::from_secs(60)))
    }
}
