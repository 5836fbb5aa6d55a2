//! Command line: verbs and global options.

use crate::{ctl, export, manual, top, upgrade};
use clap::error::ErrorKind;
use clap::{Parser, Subcommand};
use shadowbell_nvme_tools::{
    attach_many, bench, bind, demo, inspect, manage, trace, transfer, verify,
};
use shadowbell_process::error_text::plain;
use shadowbell_process::{exit, logging};
use std::io::{self, IsTerminal};
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

/// Verbs in the order of the help. Most have their help text and options in their own modules.
#[derive(Debug, Subcommand)]
enum Verb {
    Serve(Box<shadowbell_server::Args>),
    Demo(demo::Args),
    Bench(bench::Args),
    Verify(verify::Args),
    List(inspect::ListArgs),
    /// Show the Identify Controller data of a controller
    IdCtrl(inspect::Args),
    /// Show the Identify Namespace data of a namespace
    IdNs(inspect::Args),
    /// Show the SMART / health log of a controller
    SmartLog(inspect::Args),
    ErrorLog(inspect::ErrorLogArgs),
    GetFeature(inspect::FeatureArgs),
    DeviceSelfTest(inspect::SelfTestArgs),
    /// Show the self-test results of a controller
    SelfTestLog(inspect::Args),
    TelemetryLog(inspect::TelemetryArgs),
    /// Show the persistent event log of a controller
    PersistentEventLog(inspect::Args),
    CreateNs(manage::CreateArgs),
    DeleteNs(manage::DeleteArgs),
    /// Attach a namespace of a pool to controllers
    AttachNs(manage::AttachArgs),
    /// Detach a namespace of a pool from controllers
    DetachNs(manage::AttachArgs),
    Format(manage::FormatArgs),
    Sanitize(manage::SanitizeArgs),
    /// Show the progress or result of a sanitize operation
    SanitizeLog(inspect::Args),
    /// Show the ANA log of a controller (Asymmetric Namespace Access)
    AnaLog(inspect::Args),
    WriteUncor(manage::UncorrectableArgs),
    Read(transfer::ReadArgs),
    Write(transfer::WriteArgs),
    Copy(transfer::CopyArgs),
    Export(export::Args),
    Bind(bind::BindArgs),
    Unbind(bind::UnbindArgs),
    Ctl(ctl::Args),
    Upgrade(upgrade::Args),
    Top(top::Args),
    Trace(trace::Args),
    AttachMany(attach_many::Args),
    #[command(hide = true)]
    Manual(manual::Args),
}

impl Verb {
    /// True for verbs that run until they are stopped, so that their log lines need timestamps.
    fn is_service(&self) -> bool {
        matches!(self, Self::Serve(_) | Self::Export(_))
    }

    fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Serve(args) => shadowbell_server::run(*args),
            Self::Demo(args) => demo::run(&args),
            Self::Bench(args) => bench::run(&args),
            Self::Verify(args) => verify::run(&args),
            Self::List(args) => inspect::list(&args),
            Self::IdCtrl(args) => inspect::id_ctrl(&args),
            Self::IdNs(args) => inspect::id_ns(&args),
            Self::SmartLog(args) => inspect::smart_log(&args),
            Self::ErrorLog(args) => inspect::error_log(&args),
            Self::GetFeature(args) => inspect::get_feature(&args),
            Self::DeviceSelfTest(args) => inspect::device_self_test(&args),
            Self::SelfTestLog(args) => inspect::self_test_log(&args),
            Self::TelemetryLog(args) => inspect::telemetry_log(&args),
            Self::PersistentEventLog(args) => inspect::persistent_event_log(&args),
            Self::CreateNs(args) => manage::create(&args),
            Self::DeleteNs(args) => manage::delete(&args),
            Self::AttachNs(args) => manage::attach(&args, true),
            Self::DetachNs(args) => manage::attach(&args, false),
            Self::Format(args) => manage::format(&args),
            Self::Sanitize(args) => manage::sanitize(&args),
            Self::SanitizeLog(args) => inspect::sanitize_log(&args),
            Self::AnaLog(args) => inspect::ana_log(&args),
            Self::WriteUncor(args) => manage::write_uncorrectable(&args),
            Self::Read(args) => transfer::read(&args),
            Self::Write(args) => transfer::write(&args),
            Self::Copy(args) => transfer::copy(&args),
            Self::Export(args) => export::run(&args),
            Self::Bind(args) => bind::bind(&args),
            Self::Unbind(args) => bind::unbind(&args),
            Self::Ctl(args) => ctl::run(&args),
            Self::Upgrade(args) => upgrade::run(&args),
            Self::Top(args) => top::run(&args),
            Self::Trace(args) => trace::run(args),
            Self::AttachMany(args) => attach_many::run(&args),
            Self::Manual(args) => manual::run(&args, <Cli as clap::CommandFactory>::command()),
        }
    }
}

/// Runs the program: parses the command line, runs the verb and reports errors.
#[must_use]
pub fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    if shadowbell_supervisor::is_asked_for(&arguments) {
        // Before any other initialization, to keep the memory use of the supervisor low.
        return shadowbell_supervisor::run(arguments);
    }
    if arguments.len() == 2 && arguments[1] == shadowbell_supervisor::CHECK {
        return shadowbell_supervisor::check();
    }
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    logging::start(&cli.logging, cli.verb.is_service());
    // `serve` starts the logging thread itself, because it must be single-threaded before that.
    if !matches!(cli.verb, Verb::Serve(_)) {
        logging::begin();
    }
    let status = cli.verb.run().unwrap_or_else(|error| exit::report(&error));
    logging::finish();
    status
}

/// Prints an error of the command line, or the requested help, and ends the program.
fn refuse(error: &clap::Error) -> ExitCode {
    if error.kind() != ErrorKind::ValueValidation {
        error.exit();
    }
    let text = error.render();
    let text = if io::stderr().is_terminal() { text.ansi().to_string() } else { text.to_string() };
    logging::final_message(&plain(&text));
    ExitCode::from(exit::BAD_INPUT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }
}
