//! Submission and completion queues.

pub(crate) mod admin;
mod cq;
mod layout;
mod saved_doorbell;
mod shadow;
mod sq;

pub(crate) use cq::{Cq, Permit, Permits};
pub(crate) use layout::QueueLayout;
pub(crate) use shadow::ShadowCells;
pub(crate) use sq::{PrefetchCursor, Sq};
