//! Interrupts: the vectors of a controller, and when a completion queue raises its own.

mod coalescing;
mod moderation;
mod policy;
mod table;

pub(crate) use coalescing::Coalescing;
pub(crate) use moderation::HoldLimit;
pub(crate) use policy::{Decision, InterruptPolicy};
pub(crate) use table::{IrqLine, IrqTable};
