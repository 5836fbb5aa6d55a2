//! What was measured as a page for a browser: one file with everything in it, which asks nobody for
//! anything more.

mod chart;
mod html;
mod measurement;
mod write;

pub(crate) use measurement::{Measured, measurement, overview};
pub(crate) use write::{check, write};
