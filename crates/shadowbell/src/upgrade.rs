//! `shadowbell upgrade`: has a running server go on in a new process, without its clients losing
//! anything. The server's supervisor does it; this finds the supervisor and asks.

use crate::control::api::Status;
use crate::control::find;
use crate::supervisor::client::{self, SupervisorClient};
use anyhow::Context;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Have a running server go on in a new process, by another program if that was replaced
///
/// The server has to run under a supervisor, as it does without `--no-keeper`. The new process is
/// started and prepared, the old one comes to rest and hands over its clients, disks and state, and
/// ends. No socket closes; a guest sees a pause of some milliseconds. If anything fails on the way,
/// the old process goes on, and this says why. Then the supervisor becomes that program, too, as
/// the same process; or this says why it does not.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// The server: the process number of its supervisor or of its worker, or the path of a socket
    /// at which it serves
    #[arg(value_name = "PID|SOCKET")]
    server: PathBuf,

    /// The program of the new process [default: what is now at the path of the running one]
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,
}

const AFTER_HELP: &str = "\
SIGUSR2 to the supervisor does the same with the program at the path of the running one, and says what \
came of it in the server's log. `shadowbell serve --help` and docs/upgrades.md say more.

Exit status:
  0  the new process serves
  1  it does not; the old one goes on, if the sentence does not say otherwise
  2  there is no such server, or no such program";

/// Runs the verb.
///
/// # Errors
/// No such server, or why the upgrade has failed.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let program = args.binary.as_deref();
    let program = program.map(|path| client::program("--binary", path)).transpose()?;
    let outcome = supervisor(&args.server)?.upgrade(program.as_deref());
    let server = args.server.display();
    println!("{}", outcome.with_context(|| format!("{server} is not upgraded"))?);
    Ok(ExitCode::SUCCESS)
}

/// The supervisor of the server that is named. It knows the sockets with which that began; of
/// others the server is asked.
fn supervisor(server: &Path) -> anyhow::Result<SupervisorClient> {
    SupervisorClient::find(server).or_else(|error| {
        let asked = find::owner(server).and_then(|(client, _)| {
            let status = client.get::<Status>("/v1/status").ok()?;
            SupervisorClient::find(Path::new(&status.keeper_pid?.to_string())).ok()
        });
        asked.ok_or(error)
    })
}
