//! `cargo xtask soak`: what takes minutes, and ends by itself.

mod attackers;
mod honest;
mod neighbours;
mod tally;

use anyhow::Result;

use crate::report::Report;

pub(crate) const EXAMPLES: &str = "\
Examples:
  cargo xtask soak neighbours                   400 controllers for ten minutes
  cargo xtask soak neighbours --minutes 0.5 --controllers 40";

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Controllers of one server: one in eight is attacked without end, the others verify what they
    /// wrote.
    ///
    /// Fails if a command of an honest one fails or takes 30 s, if a block is not what was written,
    /// if the server does not answer at the end or grows without bound, or if SIGTERM, under
    /// attack, does not end it within 5 s.
    Neighbours(neighbours::Arguments),
}

pub(crate) fn run(report: &mut Report, arguments: Arguments) -> Result<()> {
    match arguments.what {
        What::Neighbours(arguments) => neighbours::run(report, &arguments),
    }
}
