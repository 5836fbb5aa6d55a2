//! `shadowbell config`: checks a configuration file.

use clap::Subcommand;
use std::path::PathBuf;
use std::process::ExitCode;

/// Check a configuration file of `serve --config`
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Clone, Debug, Subcommand)]
enum Verb {
    /// Check a configuration file without opening disks and sockets
    ///
    /// Every error has the line of its key. A missing image is a warning. `serve --check FILE` does
    /// the same.
    Check {
        /// Configuration file, as for `serve --config`
        file: PathBuf,
    },
}

/// Runs the verb.
///
/// # Errors
/// All errors of the file, one per line.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.verb {
        Verb::Check { file } => shadowbell_server::check_config(file),
    }
}
