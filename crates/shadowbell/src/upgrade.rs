//! `shadowbell upgrade`: restarts a running server for an upgrade, by a request to its supervisor.

use crate::grant::supervisor_of;
use anyhow::Context;
use shadowbell_control_api::discovery;
use shadowbell_process::exit;
use shadowbell_process::output::show;
use shadowbell_supervisor::client::{self, SupervisorClient};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Replace the process of a running server, without interruption for its clients
///
/// The server must run under a supervisor (without `--no-supervisor`). The supervisor starts and
/// prepares a new process. Then the old process quiesces, passes its clients, disks and state on,
/// and ends. No socket is closed; guests see a pause of some milliseconds. If the new process
/// cannot be prepared, the old one continues, and the error is shown. A client that cannot be
/// recovered is disconnected, and a warning names it; `--check` shows such clients before. Finally
/// the supervisor replaces its own program, too, with the same process ID.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = exit::help(AFTER_HELP))]
pub(crate) struct Args {
    /// Server: its name, its process ID, its control socket, or the socket of a controller
    #[arg(value_name = "SERVER")]
    server: PathBuf,

    /// New program [default: the one that is now at the path of the running program]
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,

    /// Prepare a new process, report the clients that it could not recover, and end it; the server
    /// is not changed
    #[arg(long)]
    check: bool,
}

const AFTER_HELP: &str = "\
SIGUSR2 to the supervisor has the same effect, with the program at the path of the running one; the \
result is in the server's log. See also `shadowbell serve --help` and docs/guides/upgrade.md.";

/// Runs the verb.
///
/// # Errors
/// There is no such server, or the upgrade has failed.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let program = args.binary.as_deref();
    let program = program.map(|path| client::program("--binary", path)).transpose()?;
    let (supervisor, server) = (supervisor(&args.server)?, args.server.display());
    if args.check {
        let outcome = supervisor.check_upgrade(program.as_deref());
        print(&outcome.with_context(|| format!("an upgrade of {server}"))?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let outcome = supervisor.upgrade(program.as_deref());
    print(&outcome.with_context(|| format!("cannot upgrade {server}"))?)?;
    Ok(ExitCode::SUCCESS)
}

fn print(outcome: &str) -> anyhow::Result<()> {
    show(&outcome, false, |out, outcome| writeln!(out, "{outcome}"))
}

/// Finds the supervisor of a server. A supervisor can be found by the sockets of its command line;
/// for a socket that was added later, the running servers are queried.
fn supervisor(server: &Path) -> anyhow::Result<SupervisorClient> {
    let reported = || {
        let client = discovery::server(Some(&server.to_string_lossy()))?;
        supervisor_of(&client)
    };
    // A server of this name takes precedence over a file of this name in the working directory.
    let is_name =
        server.to_str().is_some_and(|name| !name.contains('/') && name.parse::<u32>().is_err());
    match is_name.then(reported) {
        Some(Ok(Some(supervisor))) => Ok(supervisor),
        // The error of the other commands, which names the servers that only root may query.
        Some(Err(error)) if !server.exists() => Err(error),
        _ => SupervisorClient::find(server).or_else(|error| reported().ok().flatten().ok_or(error)),
    }
}
