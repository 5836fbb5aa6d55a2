//! Client of the supervisor: finds the supervisor of a server and sends it requests.

use crate::protocol::{self, Packet, answer, question};
use anyhow::{Context, anyhow};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use shadowbell_config::server_config::canonical_path;
use shadowbell_process::exit::bad_input;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Connection to a supervisor.
pub struct SupervisorClient(OwnedFd);

/// Time limit for a connection and for an answer.
const ANSWERS: Duration = Duration::from_secs(10);
/// Time limit for an upgrade. It exceeds the limits of all of its steps together.
const UPGRADES: Duration = Duration::from_secs(300);

/// Error text if the supervisor closes the connection.
const GONE: &str = "the supervisor has ended";

impl SupervisorClient {
    /// Creates a client of the supervisor at the other end of this socket.
    pub fn over(socket: OwnedFd) -> Self {
        Self(socket)
    }

    /// Permits the server process to open this file as the image at this absolute path, with the
    /// access of the descriptor. Returns false if the supervisor refuses.
    pub fn grant(&self, image: &Path, file: BorrowedFd<'_>) -> bool {
        let answer = ask(&self.0, question::GRANT, image, Some(file));
        answer.is_ok_and(|packet| packet.letter == answer::YES)
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
        let owner = std::fs::metadata(server).ok().map(|file| file.uid());
        let mut others = 0;
        // A supervisor that was just started does not know the sockets yet, so the search is
        // repeated.
        for wait in [0, 50, 100, 200] {
            std::thread::sleep(Duration::from_millis(wait));
            let mut names = names()?;
            names.sort_by_key(|name| !name.starts_with(&own));
            let (mut asked, mut refused) = (0, 0);
            for name in names {
                // The caller has chosen the process itself, or the user who owns the socket.
                let is_named = letter == question::IS_YOURS && name.starts_with(&own);
                match connect_to(&name, owner, is_named) {
                    Ok(supervisor) => {
                        let said = ask(&supervisor, letter, &what, None);
                        if said.is_ok_and(|packet| packet.letter == answer::YES) {
                            return Ok(Self(supervisor));
                        }
                        asked += 1;
                    }
                    Err(why) => {
                        tracing::warn!("skipped the socket @{name}: {why}");
                        refused += 1;
                    }
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
        set_socket_timeout(&self.0, Timeout::Recv, Some(UPGRADES))?;
        let packet = protocol::receive(&self.0, false).map_err(late)?.context(GONE)?;
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

/// Connects to the supervisor with this name.
///
/// Any process may listen at the name. So the peer must be the process that the name contains, and
/// run as root, as our user or as `owner`, unless the caller has named the process; and it has to
/// answer in time.
fn connect_to(name: &str, owner: Option<u32>, is_named: bool) -> anyhow::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    for direction in [Timeout::Send, Timeout::Recv] {
        set_socket_timeout(&socket, direction, Some(ANSWERS))?;
    }
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    connect(&socket, &address).map_err(|errno| late(errno.into()))?;
    let peer = socket_peercred(&socket)?;
    let pid = peer.pid.as_raw_pid();
    let named = name.strip_prefix(protocol::NAME).and_then(|rest| rest.split_once('/'));
    if named.is_none_or(|(named, _)| *named != pid.to_string()) {
        return Err(anyhow!("process {pid} listens there"));
    }
    if !is_named && owner != Some(peer.uid.as_raw()) && !protocol::is_ours(&socket) {
        return Err(anyhow!("process {pid} runs as another user"));
    }
    Ok(socket)
}

/// Error of a peer that has ended, or does not answer.
fn late(error: io::Error) -> anyhow::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => anyhow!("the supervisor does not answer"),
        _ => anyhow::Error::from(error).context(GONE),
    }
}

fn ask(
    supervisor: &OwnedFd,
    letter: u8,
    what: impl AsRef<OsStr>,
    fd: Option<BorrowedFd<'_>>,
) -> anyhow::Result<Packet> {
    protocol::send(supervisor, letter, what, fd).map_err(late)?;
    protocol::receive(supervisor, false).map_err(late)?.context(GONE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{bind, listen};
    use std::time::Instant;

    /// Listens at the name as any process can.
    fn listener(name: &str) -> OwnedFd {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
        listen(&socket, 1).unwrap();
        socket
    }

    #[test]
    fn a_socket_with_the_name_of_another_process_is_skipped() {
        // A name of process 1, which is not this one.
        let name = format!("{}1/test-{}", protocol::NAME, std::process::id());
        let _listener = listener(&name);
        let why = connect_to(&name, None, false).unwrap_err().to_string();
        assert!(why.contains("listens there"), "{why}");
    }

    #[test]
    fn a_supervisor_that_does_not_answer_is_given_up() {
        let pid = std::process::id().cast_signed();
        let name = format!("{}/silent", protocol::name(pid, 99));
        let _listener = listener(&name);
        let supervisor = connect_to(&name, None, false).unwrap();
        let began = Instant::now();
        let why = ask(&supervisor, question::SERVES, "/x", None).unwrap_err().to_string();
        assert!(why.contains("does not answer"), "{why}");
        // A lower bound: an answer is waited for.
        assert!(began.elapsed() >= ANSWERS);
    }
}
