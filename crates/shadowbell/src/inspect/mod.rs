//! What a controller tells of itself: nvme-cli's verbs, under its names.
//!
//! `list`, `id-ctrl`, `id-ns`, `smart-log`, `error-log` and `get-feature` attach the driver, ask over
//! the admin queue, and leave. A controller has one host at a time: while a virtual machine has it,
//! these have to wait, and say so after a while.

mod controller;
mod feature;
mod fields;
mod list;
mod logs;
mod namespace;

pub use controller::id_ctrl;
pub use feature::{FeatureArgs, get_feature};
pub use list::{ListArgs, list};
pub use logs::{ErrorLogArgs, error_log, smart_log};
pub use namespace::id_ns;

use crate::target::{self, Session, Target};
use fields::Fields;
use serde_json::{Map, Value};
use shadowbell_driver::AttachOptions;
use std::io::{self, Write};

/// What the verbs that look at one target take.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct Args {
    /// What to look at
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// One line of JSON, for machines
    #[arg(long)]
    pub json: bool,
}

/// Attaches for nothing but admin commands.
fn attach(target: &Target) -> anyhow::Result<Session> {
    // The driver creates one I/O queue at least; it stays empty and so may be small.
    let options = AttachOptions { queue_depth: 2, interrupts: false, ..AttachOptions::default() };
    target.attach(&options)
}

/// Prints a structure: under a heading, or as one line of JSON.
fn show(heading: &str, fields: &Fields, json: bool) -> io::Result<()> {
    if json { show_json(fields.to_json()) } else { write!(io::stdout(), "{heading}\n{fields}") }
}

fn show_json(object: Map<String, Value>) -> io::Result<()> {
    writeln!(io::stdout(), "{}", Value::Object(object))
}
