//! The command line: the verbs, and the options that all of them have.

use crate::{bench, exit, logging, serve, trace};
use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// NVMe for virtual machines and user-space programs, with doorbells that almost never ring.
#[derive(Debug, Parser)]
#[command(name = "shadowbell", version, after_help = exit::HELP, max_term_width = 100)]
#[command(propagate_version = true, subcommand_required = true, arg_required_else_help = true)]
struct Cli {
    #[command(flatten)]
    logging: logging::Args,
    #[command(subcommand)]
    verb: Verb,
}

/// One line each, in the order of the help; what a verb takes and does is in its module.
#[derive(Debug, Subcommand)]
enum Verb {
    Serve(serve::Args),
    Bench(bench::Args),
    Trace(trace::Args),
}

impl Verb {
    fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Serve(args) => serve::run(args),
            Self::Bench(args) => bench::run(&args),
            Self::Trace(args) => trace::run(args),
        }
    }
}

/// The program: reads the command line, does what it says and reports what went wrong.
#[must_use]
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    logging::start(&cli.logging);
    cli.verb.run().unwrap_or_else(|error| exit::report(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }
}
