//! Submission and completion queues.

pub(crate) mod admin;
mod cq;
mod layout;
mod sq;

pub(crate) use cq::{Cq, Permit, Permits};
pub(crate) use layout::{QueueLayout, ShadowCells};
pub(crate) use sq::{PrefetchCursor, Sq};
