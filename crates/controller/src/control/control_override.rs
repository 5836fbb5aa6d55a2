//! A seam: what may make the registers and the admin commands of a controller answer otherwise.
//!
//! Fault injection is what fills it.

use super::admin::Executed;
use super::registers::RegisterImage;
use crate::notice::Condition;
use crate::worker::queue_override::QueueOverride;
use shadowbell_spec::Sqe;
use shadowbell_spec::regs::Cc;
use std::any::Any;

/// What a condition of the whole controller asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "faults"), expect(dead_code, reason = "for fault injection only"))]
pub(crate) enum Response {
    Nothing,
    /// Controller Fatal Status, and why.
    Fail(&'static str),
    /// A reset, after which the registers have their power-on values.
    Reset,
}

/// Answers for a controller instead.
pub(crate) trait ControlOverride: Any + Send {
    /// Changes what a host reads.
    fn read(&self, image: &mut RegisterImage);

    /// A host writes `value` to the register at `offset`, where CC has been `cc`. Whether the write
    /// is ignored.
    fn write(&mut self, offset: u64, value: u32, cc: Cc) -> bool;

    /// What becomes of an admin command, if it is not what should.
    fn admin(&mut self, sqe: &Sqe) -> Option<Executed>;

    /// What serves the queues of this controller on a worker.
    fn queues(&self) -> Box<dyn QueueOverride>;

    /// A worker met a condition of the whole controller, which is `ready` or not.
    fn condition(&mut self, condition: Condition, ready: bool) -> Response;

    /// The function was reset from outside.
    fn function_reset(&mut self);

    /// A reset is over.
    fn reset_ended(&mut self);
}
