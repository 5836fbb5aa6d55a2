//! Client of the supervisor: finds the supervisor of a server and sends it requests.

use crate::protocol::{self, Packet, answer, question};
use anyhow::{Context, anyhow};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use shadowbell_config::server_config::canonical_path;
use shadowbell_process::exit::bad_input;
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Connection to a supervisor.
pub struct SupervisorClient(OwnedFd);

/// Error text if the supervisor closes the connection.
const GONE: &str = "the supervisor has ended";

impl SupervisorClient {
    /// Creates a client of the supervisor at the other end of this socket.
    pub fn over(socket: OwnedFd) -> Self {
        Self(socket)
    }

    /// Permits the server process to open the image at this path, which contains no symbolic
    /// links. Returns false if the supervisor refuses.
    pub fn grant(&self, image: &Path) -> bool {
        ask(&self.0, question::GRANT, image).is_ok_and(|packet| packet.letter == answer::YES)
    }

    /// Finds the supervisor of a server: by the process id of the supervisor or of the server
    /// process, or by the path of a socket at which the server serves.
    ///
    /// # Errors
    /// No supervisor answers for this server.
    pub fn find(server: &Path) -> anyhow::Result<Self> {
        let (letter, what) = match server.to_str().and_then(|text| text.parse::<u32>().ok()) {
            Some(pid) => (question::IS_YOURS, pid.to_string().into()),
            None => (question::SERVES, canonical_path(server).into_os_string()),
        };
        // The supervisor with this process id is asked first, so that others need not wake up.
        let own = format!("{}{}/", protocol::NAME, server.display());
        let mut others = 0;
        // A supervisor that was just started does not know the sockets yet, so the search is
        // repeated.
        for wait in [0, 50, 100, 200] {
            std::thread::sleep(Duration::from_millis(wait));
            let mut names = names()?;
            names.sort_by_key(|name| !name.starts_with(&own));
            let (mut asked, mut refused) = (0, 0);
            for name in names {
                match connect_to(&name) {
                    Ok(supervisor) => {
                        let said = ask(&supervisor, letter, &what);
                        if said.is_ok_and(|packet| packet.letter == answer::YES) {
                            return Ok(Self(supervisor));
                        }
                        asked += 1;
                    }
                    Err(_) => refused += 1,
                }
            }
            others = refused;
            if asked == 0 || (letter == question::SERVES && !server.exists()) {
                break;
            }
        }
        let hint = match others {
            0 => "start it with `shadowbell serve`, and without `--no-keeper`",
            _ => {
                "start it with `shadowbell serve` and without `--no-keeper`, or ask as its own user \
                 or as root"
            }
        };
        Err(bad_input(anyhow!("{}: no server with a supervisor found; {hint}", server.display())))
    }

    /// Upgrades the server to `program`, or restarts the current program. Returns a sentence that
    /// names the new process.
    ///
    /// # Errors
    /// The upgrade has failed, and the old process continues.
    pub fn upgrade(&self, program: Option<&Path>) -> anyhow::Result<String> {
        let program = program.map_or(OsStr::new(""), Path::as_os_str);
        protocol::send(&self.0, question::UPGRADE, program, None).context(GONE)?;
        self.outcome()
    }

    /// Checks an upgrade without carrying it out: a next process is prepared, checks the
    /// checkpoint of the running one, and ends.
    ///
    /// # Errors
    /// The clients that an upgrade would disconnect, one a line; or the reason why an upgrade
    /// would fail.
    pub fn check_upgrade(&self, program: Option<&Path>) -> anyhow::Result<String> {
        let program = program.map_or(OsStr::new(""), Path::as_os_str);
        protocol::send(&self.0, question::CHECK, program, None).context(GONE)?;
        self.outcome()
    }

    /// Receives the result of a requested upgrade, as [`upgrade`](Self::upgrade) returns it.
    pub fn outcome(&self) -> anyhow::Result<String> {
        let packet = protocol::receive(&self.0, false).context(GONE)?.context(GONE)?;
        match packet.letter {
            answer::YES => Ok(packet.text()),
            _ => Err(anyhow!(packet.text())),
        }
    }
}

/// Canonical path of an executable that the option `option` names.
///
/// # Errors
/// The file does not exist or is not executable.
pub fn program(option: &str, path: &Path) -> anyhow::Result<PathBuf> {
    let full = std::fs::canonicalize(path)
        .with_context(|| format!("{option} {}", path.display()))
        .map_err(bad_input)?;
    let about = std::fs::metadata(&full)?;
    if !about.is_file() || about.permissions().mode() & 0o111 == 0 {
        let why = anyhow!("{option} {}: not an executable file", path.display());
        return Err(bad_input(why));
    }
    Ok(full)
}

/// Names of the abstract sockets of all supervisors in this network namespace.
fn names() -> io::Result<Vec<String>> {
    let list = std::fs::read_to_string("/proc/net/unix")?;
    let names = list.lines().filter_map(|line| line.rsplit_once(" @").map(|(_, name)| name));
    let mut names: Vec<_> =
        names.filter(|name| name.starts_with(protocol::NAME)).map(str::to_owned).collect();
    // Accepted connections are listed with the same name.
    names.sort();
    names.dedup();
    Ok(names)
}

/// Connects to the supervisor with this name, if it runs as our user, or we run as root.
fn connect_to(name: &str) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    if !protocol::is_ours(&socket) && !rustix::process::geteuid().is_root() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(socket)
}

fn ask(supervisor: &OwnedFd, letter: u8, what: impl AsRef<OsStr>) -> anyhow::Result<Packet> {
    protocol::send(supervisor, letter, what, None).context(GONE)?;
    protocol::receive(supervisor, false).context(GONE)?.context(GONE)
}
