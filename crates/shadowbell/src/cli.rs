//! Command line: verbs and global options.

use crate::examples::with_examples;
use crate::{config, ctl, ls, manual, top, upgrade};
use clap::error::ErrorKind;
use clap::{FromArgMatches, Parser, Subcommand};
use shadowbell_nvme_tools::{
    attach_many, bench, bind, demo, inspect, manage, trace, transfer, verify,
};
use shadowbell_process::error_text::without_rust_terms;
use shadowbell_process::{exit, logging, signals};
use shadowbell_supervisor::permissions::Permissions;
use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

/// File name of the program for `serve` and `export`, in the directory of this program.
const SERVE: &str = "shadowbell-serve";

/// NVMe for virtual machines and user-space programs, with doorbells that almost never ring.
#[derive(Debug, Parser)]
#[command(name = "shadowbell", version, after_help = exit::help(""), max_term_width = 100)]
#[command(propagate_version = true)]
struct Cli {
    #[command(flatten)]
    logging: logging::Args,
    #[command(subcommand)]
    verb: Option<Verb>,
}

/// Verbs in the order of the help. Most have their help text and options in their own modules.
#[derive(Debug, Subcommand)]
enum Verb {
    Serve(Box<shadowbell_server::Args>),
    Demo(demo::Args),
    Bench(bench::Args),
    Verify(verify::Args),
    Read(transfer::ReadArgs),
    Write(transfer::WriteArgs),
    Copy(transfer::CopyArgs),
    Export(Box<shadowbell_server::ExportArgs>),
    Bind(bind::BindArgs),
    Unbind(bind::UnbindArgs),
    #[command(visible_aliases = ["ps", "info"])]
    Ls(ls::Args),
    Status(ctl::StatusArgs),
    Stop(ctl::StopArgs),
    Explain(ctl::ExplainArgs),
    Ctl(ctl::Args),
    Config(config::Args),
    Upgrade(upgrade::Args),
    Top(top::Args),
    Trace(trace::Args),
    AttachMany(attach_many::Args),
    #[command(visible_alias = "completion")]
    Completions(manual::CompletionArgs),
    #[command(visible_alias = "man")]
    Manual(manual::Args),
    /// Query and change NVMe controllers and namespaces, with the verbs of nvme-cli
    #[command(subcommand)]
    Nvme(NvmeVerb),
    /// The same verbs without the group.
    #[command(flatten)]
    Ungrouped(NvmeVerb),
}

/// Verbs of nvme-cli.
#[derive(Debug, Subcommand)]
enum NvmeVerb {
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
}

impl NvmeVerb {
    fn run(self) -> anyhow::Result<ExitCode> {
        match self {
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
        }
    }
}

/// Command line. The verbs of the group `nvme` are hidden outside of it, except `list`.
pub(crate) fn command() -> clap::Command {
    let grouped = NvmeVerb::augment_subcommands(clap::Command::new("nvme"));
    let names = grouped.get_subcommands().map(|verb| verb.get_name().to_owned());
    let hidden = names.filter(|name| name != "list");
    let all = hidden.fold(<Cli as clap::CommandFactory>::command(), |command, name| {
        command.mut_subcommand(name, |verb| verb.hide(true))
    });
    with_examples(all)
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
            Self::Read(args) => transfer::read(&args),
            Self::Write(args) => transfer::write(&args),
            Self::Copy(args) => transfer::copy(&args),
            Self::Export(args) => shadowbell_server::run_export(*args),
            Self::Bind(args) => bind::bind(&args),
            Self::Unbind(args) => bind::unbind(&args),
            Self::Ls(args) => ls::run(&args),
            Self::Status(args) => ctl::status(&args),
            Self::Stop(args) => ctl::stop(&args),
            Self::Explain(args) => ctl::explain_controller(&args),
            Self::Ctl(args) => ctl::run(&args),
            Self::Config(args) => config::run(&args),
            Self::Upgrade(args) => upgrade::run(&args),
            Self::Top(args) => top::run(&args),
            Self::Trace(args) => trace::run(args),
            Self::AttachMany(args) => attach_many::run(&args),
            Self::Completions(args) => manual::completions(&args, command()),
            Self::Manual(args) => manual::run(&args, command()),
            Self::Nvme(verb) | Self::Ungrouped(verb) => verb.run(),
        }
    }
}

/// Command line of the program `shadowbell-serve`.
#[derive(Debug, Parser)]
#[command(name = "shadowbell", version, after_help = exit::help(""), max_term_width = 100)]
#[command(propagate_version = true, subcommand_required = true, arg_required_else_help = true)]
struct ServeCli {
    #[command(flatten)]
    logging: logging::Args,
    #[command(subcommand)]
    verb: ServeVerb,
}

/// Command line of the program `shadowbell-serve`, with examples.
fn serve_command() -> clap::Command {
    with_examples(<ServeCli as clap::CommandFactory>::command())
}

/// Verbs of the program `shadowbell-serve`.
#[derive(Debug, Subcommand)]
enum ServeVerb {
    Serve(Box<shadowbell_server::Args>),
    Export(Box<shadowbell_server::ExportArgs>),
}

/// Runs the program `shadowbell`: parses the command line, runs the verb and reports errors.
#[must_use]
pub fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    if shadowbell_supervisor::is_service(&arguments) {
        exec_serve(&arguments);
    }
    if let Some(status) = supervise(&arguments) {
        return status;
    }
    let matches = command().try_get_matches_from(arguments);
    let cli = match matches.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    let verb = cli.verb.unwrap_or_else(|| Verb::Ls(ls::Args::default()));
    let started = logging::start(&cli.logging, verb.is_service());
    // `serve` and `export` start the logging thread themselves: they must be single-threaded until
    // then.
    if !verb.is_service() {
        logging::start_thread();
        // Without the handler, a write beyond `ulimit -f` ends the process. That is no reason to
        // refuse a verb, so an error is ignored.
        let _ = signals::survive_file_size_limit();
    }
    warn_of_filter(started);
    finish(verb.run())
}

/// Runs the program `shadowbell-serve`: `serve` and `export` without the code of the other verbs,
/// such as plots, the terminal interface and the load generator, which a process that faces guests
/// does not need.
#[must_use]
pub fn serve_main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    if let Some(status) = supervise(&arguments) {
        return status;
    }
    let matches = serve_command().try_get_matches_from(arguments);
    let cli = match matches.and_then(|matches| ServeCli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    warn_of_filter(logging::start(&cli.logging, true));
    finish(match cli.verb {
        ServeVerb::Serve(args) => shadowbell_server::run(*args),
        ServeVerb::Export(args) => shadowbell_server::run_export(*args),
    })
}

/// Warns of an unusable `RUST_LOG`, and does not refuse the command: the variable may be meant for
/// other programs, and an upgrade inherits it.
fn warn_of_filter(started: Result<(), String>) {
    if let Err(why) = started {
        tracing::warn!("{why}; it is ignored");
    }
}

/// Executes the program `shadowbell-serve` in the directory of this program, with the same command
/// line. Returns if this program does not exist: the verb is then executed by this process.
fn exec_serve(arguments: &[OsString]) {
    let Ok(program) = std::env::current_exe().map(|path| path.with_file_name(SERVE)) else {
        return;
    };
    let (name, arguments) = arguments.split_first().unzip();
    let Some((name, arguments)) = name.zip(arguments) else { return };
    // The error is not reported, because serving continues in this process.
    let _ = Command::new(program).arg0(name).args(arguments).exec();
}

/// Runs the supervisor if the command line starts one, before any other initialization, to keep
/// the supervisor's memory use low.
fn supervise(arguments: &[OsString]) -> Option<ExitCode> {
    if shadowbell_supervisor::is_asked_for(arguments) {
        return Some(shadowbell_supervisor::run(arguments.to_vec(), permissions));
    }
    let is_check = arguments.len() == 2 && arguments[1] == shadowbell_supervisor::CHECK;
    is_check.then(shadowbell_supervisor::check)
}

/// Reports the error of a verb, if any, and writes the rest of the log.
fn finish(outcome: anyhow::Result<ExitCode>) -> ExitCode {
    let status = outcome.unwrap_or_else(|error| exit::report(&error));
    logging::finish();
    status
}

/// Permissions of a server process with these arguments and this configuration file.
fn permissions(arguments: &[OsString], config: Option<&str>) -> anyhow::Result<Permissions> {
    match ServeCli::try_parse_from(arguments)?.verb {
        ServeVerb::Serve(args) => args.permissions(config),
        ServeVerb::Export(args) => args.permissions(),
    }
}

/// Prints an error of the command line, or the requested help, and ends the program.
fn refuse(error: &clap::Error) -> ExitCode {
    if error.kind() != ErrorKind::ValueValidation {
        error.exit();
    }
    let text = error.render();
    let text = if io::stderr().is_terminal() { text.ansi().to_string() } else { text.to_string() };
    logging::final_message(&without_rust_terms(&text));
    ExitCode::from(exit::BAD_INPUT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
        serve_command().debug_assert();
    }
}
