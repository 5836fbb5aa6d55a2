//! Client of the supervisor: finds the supervisor of a server and sends it requests.

use crate::protocol::{self, Packet, answer, question};
use anyhow::{Context, anyhow, bail};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use shadowbell_config::server_config::canonical_path;
use shadowbell_process::exit::{bad_input, not_found};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Connection to a supervisor.
pub struct SupervisorClient(OwnedFd);

/// Time limits of the search for a supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SearchLimits {
    /// Limit for connecting to a supervisor, and for each answer except that of an upgrade.
    answer: Duration,
    /// Limit of the whole search.
    search: Duration,
}

/// Time limits that the threat model promises.
const LIMITS: SearchLimits =
    SearchLimits { answer: Duration::from_secs(10), search: Duration::from_secs(30) };
/// Time limit for an upgrade. It exceeds the limits of all of its steps together.
const UPGRADES: Duration = Duration::from_secs(300);

/// Error text if the supervisor closes the connection.
const GONE: &str = "the supervisor has ended";

impl SupervisorClient {
    /// Creates a client of the supervisor at the other end of this socket.
    pub fn from_socket(socket: OwnedFd) -> Self {
        Self(socket)
    }

    /// Permits the server process to open `file` as the image at the absolute path `image`. The
    /// server process may read or write it if the descriptor `file` is open for reading or writing.
    /// Returns false if the supervisor refuses.
    pub fn grant(&self, image: &Path, file: BorrowedFd<'_>) -> bool {
        let answer = ask(&self.0, question::GRANT, image, Some(file));
        answer.is_ok_and(|packet| packet.code == answer::YES)
    }

    /// Permits the server process to create a socket at the absolute path `socket`. Returns false
    /// if the supervisor refuses.
    pub fn grant_socket(&self, socket: &Path) -> bool {
        let answer = ask(&self.0, question::GRANT_SOCKET, socket, None);
        answer.is_ok_and(|packet| packet.code == answer::YES)
    }

    /// Permits the server process to have connections to an NBD server: a TCP address, or the
    /// absolute path of a UNIX socket. Returns false if the supervisor refuses.
    pub fn grant_server(&self, server: &OsStr) -> bool {
        let answer = ask(&self.0, question::GRANT_SERVER, server, None);
        answer.is_ok_and(|packet| packet.code == answer::YES)
    }

    /// Finds the supervisor of a server: by the process id of the supervisor or of the server
    /// process, or by the path of a socket at which the server serves. A supervisor must run as
    /// root, as our user, or as the owner of that process or socket.
    ///
    /// # Errors
    /// No supervisor answers for this server.
    pub fn find(server: &Path) -> anyhow::Result<Self> {
        let process = pid_of(server).map(|pid| PathBuf::from(format!("/proc/{pid}")));
        Self::find_as(server, owner_of(process.as_deref().unwrap_or(server)), LIMITS)
    }

    /// Finds the supervisor whose process id a server has reported at its control socket. The
    /// server may be compromised, so the supervisor must run as root, as our user, or as the owner
    /// of the control socket. That owner is trusted, because our caller has chosen the path of the
    /// socket.
    ///
    /// # Errors
    /// No supervisor answers for this server.
    pub fn find_reported(pid: u32, control: &Path) -> anyhow::Result<Self> {
        Self::find_as(Path::new(&pid.to_string()), owner_of(control), LIMITS)
    }

    fn find_as(server: &Path, owner: Option<u32>, limits: SearchLimits) -> anyhow::Result<Self> {
        let (code, what) = match pid_of(server) {
            Some(pid) => (question::IS_YOURS, pid.to_string().into()),
            None => (question::SERVES, canonical_path(server).into_os_string()),
        };
        // If `server` is a supervisor's process id, that supervisor is asked first, so that the
        // others need not wake up.
        let own = format!("{}{}/", protocol::NAME, server.display());
        let (until, mut bad) = (Instant::now() + limits.search, BTreeSet::new());
        let mut others = 0;
        // The search is repeated, because a supervisor that was just started does not yet have the
        // list of its server process's sockets.
        for wait in [0, 50, 100, 200] {
            std::thread::sleep(Duration::from_millis(wait));
            let mut names = names()?;
            names.retain(|name| !bad.contains(name));
            names.sort_by_key(|name| !name.starts_with(&own));
            let mut asked = 0;
            others = 0;
            for name in names {
                if Instant::now() >= until {
                    let seconds = limits.search.as_secs();
                    bail!("{}: no answer of a supervisor in {seconds} s", server.display());
                }
                match connect_to(&name, owner, limits.answer) {
                    Ok(Some(supervisor)) => {
                        match ask(&supervisor, code, &what, None) {
                            Ok(packet) if packet.code == answer::YES => {
                                return Ok(Self(supervisor));
                            }
                            Ok(_) => {}
                            // A supervisor closes connections of other users.
                            Err(_) => others += 1,
                        }
                        asked += 1;
                    }
                    Ok(None) => others += 1,
                    Err(why) => {
                        tracing::warn!("skipped the socket @{name}: {why}");
                        bad.insert(name);
                    }
                }
            }
            if asked == 0 || (code == question::SERVES && !server.exists()) {
                break;
            }
        }
        let hint = match (others, rustix::process::geteuid().is_root()) {
            (0, _) => "start it with `shadowbell serve`, and without `--no-supervisor`",
            (_, true) => {
                "name its supervisor's process ID or one of its sockets, or start it with \
                 `shadowbell serve` and without `--no-supervisor`"
            }
            (_, false) => {
                "supervisors of other users cannot be asked, so ask as root or as the server's own \
                 user; without one, start it with `shadowbell serve` and without `--no-supervisor`"
            }
        };
        Err(not_found(anyhow!("{}: no server with a supervisor found; {hint}", server.display())))
    }

    /// Working directory of the supervisor, from which the server's relative paths start. `None` if
    /// the supervisor runs neither as root nor as our user: another user could have chosen the
    /// directory.
    pub fn working_directory(&self) -> Option<PathBuf> {
        let pid = socket_peercred(&self.0).ok()?.pid.as_raw_pid();
        let directory = PathBuf::from(format!("/proc/{pid}/cwd")).read_link().ok()?;
        protocol::is_ours(&self.0).then_some(directory)
    }

    /// Upgrades the server to `program`, or restarts the current program. Returns a sentence that
    /// names the new process.
    ///
    /// # Errors
    /// The upgrade has failed, and the old process continues.
    pub fn upgrade(&self, program: Option<&Path>) -> anyhow::Result<String> {
        self.request(question::UPGRADE, program)
    }

    /// Checks an upgrade without carrying it out: a next process is prepared, checks the
    /// checkpoint of the running one, and ends.
    ///
    /// # Errors
    /// The clients that an upgrade would disconnect, one per line; or the reason why an upgrade
    /// would fail.
    pub fn check_upgrade(&self, program: Option<&Path>) -> anyhow::Result<String> {
        self.request(question::CHECK, program)
    }

    fn request(&self, code: u8, program: Option<&Path>) -> anyhow::Result<String> {
        let program = program.map_or(OsStr::new(""), Path::as_os_str);
        protocol::send(&self.0, code, program, None).context(GONE)?;
        self.outcome()
    }

    /// Receives the result of a requested upgrade, as [`upgrade`](Self::upgrade) returns it.
    pub fn outcome(&self) -> anyhow::Result<String> {
        set_socket_timeout(&self.0, Timeout::Recv, Some(UPGRADES))?;
        let packet = protocol::receive(&self.0, false).map_err(unresponsive)?.context(GONE)?;
        match packet.code {
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
    // Names may occur several times, because each accepted connection is listed with the name of
    // its listening socket.
    names.sort();
    names.dedup();
    Ok(names)
}

/// Parses the name of a server as a process id. `None` if it is a path.
fn pid_of(server: &Path) -> Option<u32> {
    server.to_str()?.parse().ok()
}

/// User that owns a file or, by its directory in `/proc`, a process.
fn owner_of(path: &Path) -> Option<u32> {
    std::fs::metadata(path).ok().map(|file| file.uid())
}

/// Connects to the supervisor with this name. `None` if it runs neither as root nor as our user nor
/// as `owner`.
///
/// Any process may listen at the name, so the peer must be the process that the name contains, and
/// has to answer within `limit`.
fn connect_to(name: &str, owner: Option<u32>, limit: Duration) -> anyhow::Result<Option<OwnedFd>> {
    let named = name.strip_prefix(protocol::NAME).and_then(|rest| rest.split_once('/'));
    let (named, _) = named.context("the name has no process ID")?;
    let is_allowed =
        |uid: u32| uid == 0 || uid == rustix::process::geteuid().as_raw() || Some(uid) == owner;
    // No connection is made to the process of an unknown user, because that process may never
    // answer.
    if !owner_of(Path::new(&format!("/proc/{named}"))).is_some_and(is_allowed) {
        return Ok(None);
    }
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    for direction in [Timeout::Send, Timeout::Recv] {
        set_socket_timeout(&socket, direction, Some(limit))?;
    }
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    connect(&socket, &address).map_err(|errno| unresponsive(errno.into()))?;
    let peer = socket_peercred(&socket)?;
    let pid = peer.pid.as_raw_pid();
    if *named != pid.to_string() {
        return Err(anyhow!("process {pid} listens there"));
    }
    Ok(is_allowed(peer.uid.as_raw()).then_some(socket))
}

/// Error of a peer that has ended, or does not answer.
fn unresponsive(error: io::Error) -> anyhow::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => anyhow!("the supervisor does not answer"),
        _ => anyhow::Error::from(error).context(GONE),
    }
}

fn ask(
    supervisor: &OwnedFd,
    code: u8,
    what: impl AsRef<OsStr>,
    fd: Option<BorrowedFd<'_>>,
) -> anyhow::Result<Packet> {
    protocol::send(supervisor, code, what, fd).map_err(unresponsive)?;
    protocol::receive(supervisor, false).map_err(unresponsive)?.context(GONE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{bind, listen};
    use shadowbell_testing::process_group::ProcessGroup;
    use shadowbell_testing::programs::skipped;
    use shadowbell_testing::wait::until;
    use std::process::Command;

    /// Creates a listening socket with this name, as any process can.
    fn listener(name: &str) -> OwnedFd {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
        listen(&socket, 8).unwrap();
        socket
    }

    #[test]
    fn a_socket_with_the_name_of_another_process_is_skipped() {
        // The name contains process id 1, but the socket belongs to the test process.
        let name = format!("{}1/test-{}", protocol::NAME, std::process::id());
        let _listener = listener(&name);
        let why = connect_to(&name, None, LIMITS.answer).unwrap_err().to_string();
        assert!(why.contains("listens there"), "{why}");
    }

    #[test]
    fn a_supervisor_that_does_not_answer_is_given_up() {
        let pid = std::process::id().cast_signed();
        let name = format!("{}/silent", protocol::name(pid, 99));
        let _listener = listener(&name);
        // No thread answers at the socket, so the time limit expires.
        let limit = Duration::from_millis(50);
        let supervisor = connect_to(&name, None, limit).unwrap().unwrap();
        let why = ask(&supervisor, question::SERVES, "/x", None).unwrap_err().to_string();
        assert!(why.contains("does not answer"), "{why}");
    }

    /// A process that listens at many names of its own delays the search only up to its limit, and
    /// each socket only up to the limit of an answer.
    #[test]
    fn the_search_ends_although_no_supervisor_answers() {
        assert_eq!((LIMITS.answer.as_secs(), LIMITS.search.as_secs()), (10, 30));
        let pid = std::process::id().cast_signed();
        let silent: Vec<_> = (0..8)
            .map(|nth| listener(&format!("{}/mute-{nth}", protocol::name(pid, 97))))
            .collect();
        // No socket answers, so each limit expires. All sockets together would take eight limits;
        // the search ends after two.
        let limit = Duration::from_millis(100);
        let limits = SearchLimits { answer: limit, search: 2 * limit };
        let why = SupervisorClient::find_as(Path::new("/no/server"), None, limits);
        let why = why.err().unwrap().to_string();
        assert!(why.contains("no answer of a supervisor"), "{why}");
        drop(silent);
    }

    /// Root connects to a supervisor of another user only if its caller has named that user's
    /// process or socket. A process id that a server has reported is not enough.
    #[test]
    fn a_supervisor_of_another_user_needs_an_owner() {
        const OTHER: u32 = 65_534;
        if !rustix::process::geteuid().is_root() {
            return skipped("it needs root");
        }
        // A socket belongs to the user of the thread that creates it.
        let name = protocol::name(std::process::id().cast_signed(), 98) + "/other";
        let as_other = name.clone();
        let listening = std::thread::spawn(move || {
            let other = rustix::process::Uid::from_raw(OTHER);
            rustix::thread::set_thread_res_uid(None, other, None).unwrap();
            listener(&as_other)
        });
        let _listening = listening.join().unwrap();
        assert!(connect_to(&name, None, LIMITS.answer).unwrap().is_none());
        assert!(connect_to(&name, Some(OTHER + 1), LIMITS.answer).unwrap().is_none());
        let supervisor = connect_to(&name, Some(OTHER), LIMITS.answer).unwrap().unwrap();
        // The working directory of the other user's supervisor is not used, because that user could
        // have chosen it to redirect relative paths.
        assert_eq!(SupervisorClient(supervisor).working_directory(), None);

        // A process of another user is refused by its `/proc` owner, without a connection: no
        // socket has this name.
        let mut sleeper = Command::new("setpriv");
        sleeper.args(["--reuid", "65534", "--clear-groups", "sleep", "infinity"]);
        let Ok(sleeper) = ProcessGroup::spawn(&mut sleeper) else {
            return skipped("its second part needs setpriv");
        };
        let process = PathBuf::from(format!("/proc/{}", sleeper.id()));
        until("the process has its user", || owner_of(&process) == Some(OTHER));
        let name = format!("{}{}/0", protocol::NAME, sleeper.id());
        assert!(connect_to(&name, None, LIMITS.answer).unwrap().is_none());
    }
}
