//! HTML reports of measurements: one self-contained file that loads nothing from elsewhere.

mod chart;
mod html;
mod measurement;
mod write;

pub(crate) use measurement::{Measured, measurement, overview};
pub(crate) use write::{check, write};
