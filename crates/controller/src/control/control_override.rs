//! Hook that changes the behavior of registers and admin commands. Used by fault injection.

use super::admin::Executed;
use super::registers::RegisterImage;
use crate::notice::Condition;
use crate::worker::queue_set::QueueOverride;
use shadowbell_spec::Sqe;
use shadowbell_spec::regs::Cc;
use std::any::Any;

/// Reaction to a condition of the whole controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "faults"), expect(dead_code, reason = "for fault injection only"))]
pub(crate) enum Response {
    Nothing,
    /// Enter a fatal state (CSTS.CFS), for this reason.
    Fail(&'static str),
    /// Reset, and restore the registers' power-on values.
    Reset,
}

/// Override of a controller's behavior.
pub(crate) trait ControlOverride: Any + Send {
    /// Changes the register values that a host reads.
    fn read(&self, image: &mut RegisterImage);

    /// Handles a host's write of `value` to the register at `offset`; `cc` is CC before the write.
    /// Returns true if the write is ignored.
    fn write(&mut self, offset: u64, value: u32, cc: Cc) -> bool;

    /// Returns the result of an admin command, or `None` to execute it normally.
    fn admin(&mut self, sqe: &Sqe) -> Option<Executed>;

    /// Override of the controller's queues on an I/O thread.
    fn queues(&self) -> Box<dyn QueueOverride>;

    /// Handles a condition that an I/O thread detected. `ready` is true if the controller is ready.
    fn condition(&mut self, condition: Condition, ready: bool) -> Response;

    /// Handles a function level reset.
    fn function_reset(&mut self);

    /// Handles the end of a reset.
    fn reset_ended(&mut self);
}
