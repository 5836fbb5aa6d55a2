//! `shadowbell upgrade`: has a running server go on in a new process, without its clients losing
//! anything. The server's keeper does it; this finds the keeper and asks.

use crate::exit::bad_input;
use crate::keeper_link::{self, Packet, answer, question};
use anyhow::{Context, anyhow, bail};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Have a running server go on in a new process, by another program if that was replaced
///
/// The server has to run under a keeper (`shadowbell serve --keeper`). The new process is started
/// and prepared, the old one comes to rest and hands over its clients, disks and state, and ends.
/// No socket closes; a guest sees a pause of some milliseconds. If anything fails on the way, the
/// old process goes on, and this says why.
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
    let program = args.binary.as_deref().map(checked).transpose()?;
    let keeper = find(&args.server)?;
    let program = program.as_deref().map_or(OsStr::new(""), Path::as_os_str);
    let packet = ask(&keeper, question::UPGRADE, program)?;
    if packet.letter != answer::YES {
        bail!("{} is not upgraded: {}", args.server.display(), packet.text());
    }
    println!("{}", packet.text());
    Ok(ExitCode::SUCCESS)
}

/// The path from the root of a program that can be started.
fn checked(path: &Path) -> anyhow::Result<PathBuf> {
    let full = std::fs::canonicalize(path)
        .with_context(|| format!("--binary {}", path.display()))
        .map_err(bad_input)?;
    let about = std::fs::metadata(&full)?;
    if !about.is_file() || about.permissions().mode() & 0o111 == 0 {
        let why = anyhow!("--binary {}: it is no program that can be started", path.display());
        return Err(bad_input(why));
    }
    Ok(full)
}

/// The keeper of this server.
fn find(server: &Path) -> anyhow::Result<OwnedFd> {
    let (letter, what) = match server.to_str().and_then(|text| text.parse::<u32>().ok()) {
        Some(pid) => (question::IS_YOURS, pid.to_string().into()),
        None => (question::SERVES, keeper_link::known_path(server).into_os_string()),
    };
    let mut names = names()?;
    // The one that has the number, if one has: then nobody else is woken.
    let own = format!("{}{}/", keeper_link::NAME, server.display());
    names.sort_by_key(|name| !name.starts_with(&own));
    let mut others = 0;
    for name in names {
        match connect_to(&name) {
            Ok(keeper) => {
                if ask(&keeper, letter, &what).is_ok_and(|packet| packet.letter == answer::YES) {
                    return Ok(keeper);
                }
            }
            Err(_) => others += 1,
        }
    }
    let hint = match others {
        0 => "start it with `shadowbell serve --keeper`",
        _ => "start it with `shadowbell serve --keeper`, or ask as its own user or as root",
    };
    Err(bad_input(anyhow!("{}: no server with a keeper is there; {hint}", server.display())))
}

/// The names of all keepers that listen here.
fn names() -> io::Result<Vec<String>> {
    let list = std::fs::read_to_string("/proc/net/unix")?;
    let names = list.lines().filter_map(|line| line.rsplit_once(" @").map(|(_, name)| name));
    let mut names: Vec<_> =
        names.filter(|name| name.starts_with(keeper_link::NAME)).map(str::to_owned).collect();
    // Connections to it have the same name.
    names.sort();
    names.dedup();
    Ok(names)
}

/// A socket to the keeper of this name, if it is our user's, or we are root.
fn connect_to(name: &str) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    if !keeper_link::is_ours(&socket) && !rustix::process::geteuid().is_root() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(socket)
}

fn ask(keeper: &OwnedFd, letter: u8, what: impl AsRef<OsStr>) -> anyhow::Result<Packet> {
    let gone = "the keeper has ended";
    keeper_link::send(keeper, letter, what, None).context(gone)?;
    keeper_link::receive(keeper, false).context(gone)?.context(gone)
}
