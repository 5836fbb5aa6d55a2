//! Interrupts: vector table, coalescing and moderation.

mod moderation;
mod policy;
mod table;

pub(crate) use moderation::HoldLimit;
pub(crate) use policy::{Coalescing, Decision, InterruptPolicy};
pub(crate) use table::{IrqLine, IrqTable};
