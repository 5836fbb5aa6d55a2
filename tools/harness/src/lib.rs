//! Harness of suites and chores: reports of checks, steps that run other programs, and detection of
//! processes that a step leaves behind.
#![forbid(unsafe_code)]

mod processes;
mod report;
pub mod run_alone;
mod step;

pub use report::Report;
pub use step::{Job, Output, side_by_side, step};
