//! What a request needs to know of its surroundings, and how long a client's turn is.

use super::inbox::{self, Inbox, PortId};
use super::limits::Limits;
use crate::device::Done;
use crate::exchange::Exchange;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a request needs to know of its surroundings.
pub(super) struct Context<'a> {
    pub(super) inbox: &'a Arc<Inbox>,
    pub(super) port: PortId,
    pub(super) limits: &'a Limits,
    /// Counts the [`Done`]s of this port, so that one that comes late is known as such.
    pub(super) sequence: &'a mut u64,
    /// When others are to have their turn.
    pub(super) slice: Slice,
    /// What a client does is recorded, in case that this process dies.
    pub(super) is_recorded: bool,
    /// Answers those that are recorded.
    pub(super) exchange: Option<&'a mut Exchange>,
}

/// How long the requests of one client are handled before the others get their turn. (It is
/// looked at between two requests, or two of those writes that come as one.)
const SLICE: Duration = Duration::from_micros(100);

/// A client's turn.
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
    /// A handle, and the number under which its completion arrives.
    pub(super) fn done(&mut self) -> (u64, Done) {
        *self.sequence += 1;
        (*self.sequence, inbox::done(self.inbox, self.port, *self.sequence))
    }
}
