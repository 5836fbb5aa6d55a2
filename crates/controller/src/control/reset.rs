//! Lifecycle state of a controller: enabled, disabled or resetting.

use super::deferred::Callback;
use std::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// CSTS.RDY is 0.
    Disabled,
    /// CSTS.RDY is 1.
    Ready,
    /// CC.EN was cleared, and commands in flight are ending.
    Resetting,
}

/// State of a shutdown's flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ShutdownFlush {
    None,
    UnderWay,
    /// A flush is running, and the host has requested another shutdown since.
    Again,
}

/// Waiter for the end of a reset.
pub(super) enum Waiter {
    /// Callback of a reset request.
    Reset(Callback),
    /// Callback of a disconnect, called after memory maps and interrupts are dropped as well.
    Disconnect(Callback),
}

/// Lifecycle state of a controller.
pub(super) struct Lifecycle {
    pub(super) phase: Phase,
    /// Number of resets. Operations from before a reset are ignored.
    pub(super) generation: u64,
    /// Waiters for the end of the reset in progress.
    pub(super) waiting: Vec<Waiter>,
    /// True if the registers get their power-on values at the end of the reset in progress.
    pub(super) full_reset: bool,
    pub(super) flush: ShutdownFlush,
    pub(super) power_cycles: u64,
    pub(super) unsafe_shutdowns: u64,
    pub(super) since: Instant,
    /// Time of the last reset.
    pub(super) reset_at: Instant,
}

impl Lifecycle {
    /// State at power on.
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

    /// True if no reset or shutdown is in progress.
    pub(super) fn is_quiet(&self) -> bool {
        self.phase != Phase::Resetting
            && self.flush == ShutdownFlush::None
            && self.waiting.is_empty()
    }
}
