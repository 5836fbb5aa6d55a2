//! Interrupts: vector table, coalescing and moderation.

mod coalescing;
mod moderation;
mod policy;
mod table;

pub(crate) use coalescing::Coalescing;
pub(crate) use moderation::HoldLimit;
pub(crate) use policy::{Decision, InterruptPolicy};
pub(crate) use table::{IrqLine, IrqTable};
