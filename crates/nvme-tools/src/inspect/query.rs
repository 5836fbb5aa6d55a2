//! Options and output that the verbs share.

use super::fields::Fields;
use serde_json::{Map, Value};
use shadowbell_config::target::{self, Target};
use shadowbell_process::output::Output;
use std::io::{self, Write};

/// Options of the verbs that query one target.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct Args {
    /// Controller or namespace to query
    #[arg(value_name = "TARGET")]
    pub target: Target,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Prints fields: below a heading, or as one line of JSON.
pub(super) fn show(heading: &str, fields: &Fields, json: bool) -> io::Result<()> {
    if json { show_json(fields.to_json()) } else { write!(io::stdout(), "{heading}\n{fields}") }
}

pub(super) fn show_json(object: Map<String, Value>) -> io::Result<()> {
    writeln!(io::stdout(), "{}", Value::Object(object))
}
