//! What the verbs have in common: their options, and how answers are shown.

use super::fields::Fields;
use crate::output::Output;
use crate::target::{self, Target};
use serde_json::{Map, Value};
use std::io::{self, Write};

/// What the verbs that look at one target take.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub(crate) struct Args {
    /// What to look at
    #[arg(value_name = "TARGET")]
    pub target: Target,
    #[command(flatten)]
    pub output: Output,
}

/// Prints a structure: under a heading, or as one line of JSON.
pub(super) fn show(heading: &str, fields: &Fields, json: bool) -> io::Result<()> {
    if json { show_json(fields.to_json()) } else { write!(io::stdout(), "{heading}\n{fields}") }
}

pub(super) fn show_json(object: Map<String, Value>) -> io::Result<()> {
    writeln!(io::stdout(), "{}", Value::Object(object))
}
