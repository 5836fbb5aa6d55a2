//! `shadowbell upgrade`: has a running server go on in a new process, without its clients losing
//! anything. The server's keeper does it; this finds the keeper and asks.

use crate::control::api::Status;
use crate::control::find;
use crate::keeper_query::{self, Keeper};
use anyhow::Context;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Have a running server go on in a new process, by another program if that was replaced
///
/// The server has to run under a keeper, as it does without `--no-keeper`. The new process is started
/// and prepared, the old one comes to rest and hands over its clients, disks and state, and ends.
/// No socket closes; a guest sees a pause of some milliseconds. If anything fails on the way, the
/// old process goes on, and this says why. Then the keeper becomes that program, too, as the same
/// process; or this says why it does not.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// The server: the process number of its keeper or of its worker, or the path of a socket at
    /// which it serves
    #[arg(value_name = "PID|SOCKET")]
    server: PathBuf,

    /// The program of the new process [default: what is now at the path of the running one]
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,
}

const AFTER_HELP: &str = "\
SIGUSR2 to the keeper does the same with the program at the path of the running one, and says what \
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
    let program = program.map(|path| keeper_query::program("--binary", path)).transpose()?;
    let outcome = keeper(&args.server)?.upgrade(program.as_deref());
    let server = args.server.display();
    println!("{}", outcome.with_context(|| format!("{server} is not upgraded"))?);
    Ok(ExitCode::SUCCESS)
}

/// The keeper of the server that is named. It knows the sockets with which that began; of others
/// the server is asked.
fn keeper(server: &Path) -> anyhow::Result<Keeper> {
    Keeper::find(server).or_else(|error| {
        let asked = find::owner(server).and_then(|(client, _)| {
            let status = client.get::<Status>("/v1/status").ok()?;
            Keeper::find(Path::new(&status.keeper_pid?.to_string())).ok()
        });
        asked.ok_or(error)
    })
}
