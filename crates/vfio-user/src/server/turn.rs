//! Context of a request, and time slice of a client.

use super::inbox::{self, Inbox, PortId};
use super::limits::Limits;
use crate::device::Completer;
use crate::exchange::Exchange;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Context in which a request is handled.
pub(super) struct Context<'a> {
    pub(super) inbox: &'a Arc<Inbox>,
    pub(super) port: PortId,
    pub(super) limits: &'a Limits,
    /// Number of [`Completer`]s that were created for this device. Outdated completions are
    /// detected by their number.
    pub(super) sequence: &'a mut u64,
    /// Time slice of the client's turn.
    pub(super) slice: Slice,
    /// True if checkpoints of the device and its client are stored.
    pub(super) is_recorded: bool,
    /// Ring that sends replies if checkpoints are stored.
    pub(super) exchange: Option<&'a mut Exchange>,
}

/// Maximum duration of a client's turn. It is checked between two requests, and between two writes
/// of a REGION_WRITE_MULTI.
const SLICE: Duration = Duration::from_micros(100);

/// Time slice of a client's turn.
pub(super) struct Slice(Instant);

impl Slice {
    pub(super) fn begin() -> Self {
        Self(Instant::now() + SLICE)
    }

    pub(super) fn is_over(&self) -> bool {
        Instant::now() >= self.0
    }
}

impl Context<'_> {
    /// Creates a [`Completer`]. Returns its number too, which identifies the completion.
    pub(super) fn done(&mut self) -> (u64, Completer) {
        *self.sequence += 1;
        (*self.sequence, inbox::done(self.inbox, self.port, *self.sequence))
    }
}
