//! Where a controller is between enabled and disabled, and who waits for that.

use super::deferred::Callback;
use std::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// CSTS.RDY is 0.
    Disabled,
    /// CSTS.RDY is 1.
    Ready,
    /// CC.EN was cleared and commands in flight are coming to their end.
    Resetting,
}

/// The flush of a shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ShutdownFlush {
    None,
    UnderWay,
    /// One is under way, and the host has asked for another since.
    Again,
}

/// Who waits for the end of a reset.
pub(super) enum Waiter {
    /// Somebody outside.
    Reset(Callback),
    /// The host is gone: its memory and its interrupts are forgotten too, and then this is called.
    Disconnect(Callback),
}

/// Where a controller is between enabled and disabled.
pub(super) struct Lifecycle {
    pub(super) phase: Phase,
    /// Counts resets: what began before one concerns nobody.
    pub(super) generation: u64,
    /// Who waits for the reset under way.
    pub(super) waiting: Vec<Waiter>,
    /// Registers have to go to their power-on values when the reset under way is over.
    pub(super) full_reset: bool,
    pub(super) flush: ShutdownFlush,
    pub(super) power_cycles: u64,
    pub(super) unsafe_shutdowns: u64,
    pub(super) since: Instant,
    /// When the last reset was.
    pub(super) reset_at: Instant,
}

impl Lifecycle {
    /// At power on.
    pub(super) fn new() -> Self {
        Self {
            phase: Phase::Disabled,
            generation: 0,
            waiting: Vec::new(),
            full_reset: false,
            flush: ShutdownFlush::None,
            power_cycles: 1,
            unsafe_shutdowns: 0,
            since: Instant::now(),
            reset_at: Instant::now(),
        }
    }

    /// Whether nobody waits for anything.
    pub(super) fn is_quiet(&self) -> bool {
        self.phase != Phase::Resetting
            && self.flush == ShutdownFlush::None
            && self.waiting.is_empty()
    }
}
