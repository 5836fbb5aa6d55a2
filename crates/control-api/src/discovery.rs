//! Discovery of running servers by name, control socket, or socket of a controller.

use super::api::{Controller, Status};
use super::client::Client;
use anyhow::anyhow;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use shadowbell_config::server_config::canonical_path;
use shadowbell_config::socket_path;
use shadowbell_process::exit;
use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// Server that `wanted` names: by its name, its process ID or that of its supervisor, its control
/// socket, or the socket of one of its controllers. Without `wanted`, the only running server. A
/// name takes precedence over a file of that name in the working directory.
///
/// # Errors
/// No server is found, or several are.
pub fn server(wanted: Option<&str>) -> anyhow::Result<Client> {
    server_in(socket_path::directory(), wanted)
}

fn server_in(directory: Option<PathBuf>, wanted: Option<&str>) -> anyhow::Result<Client> {
    let Some(wanted) = wanted else { return only(directory.as_deref()) };
    if !wanted.contains('/') {
        let Some(directory) = directory else {
            let is_there = Path::new(wanted).exists();
            return if is_there { Ok(at(Path::new(wanted))) } else { Err(no_directory()) };
        };
        let socket = socket_path::socket(&directory, wanted);
        if !socket.exists() {
            if let Some(client) = with_process(&directory, wanted) {
                return Ok(client);
            }
            if Path::new(wanted).exists() {
                return Ok(at(Path::new(wanted)));
            }
            let others = names(&directory, &running(&directory));
            return Err(exit::not_found(anyhow!(
                "there is no server `{wanted}` in {}{others}",
                directory.display()
            )));
        }
        return Ok(Client::new(&socket));
    }
    Ok(at(Path::new(wanted)))
}

/// Server with the controller's socket, or the control socket, at this path.
fn at(path: &Path) -> Client {
    owner(path).map_or_else(|| Client::new(path), |(client, _)| client)
}

/// Server whose server process or supervisor has this process ID.
fn with_process(directory: &Path, pid: &str) -> Option<Client> {
    let pid: u32 = pid.parse().ok()?;
    let sockets = running(directory).into_iter().map(|(_, socket)| socket);
    let is_of = |socket: &PathBuf| listening_process(socket).is_some_and(|of| is_part(of, pid));
    sockets.filter(is_of).map(|socket| Client::new(&socket)).find(|client| {
        let status = client.get::<Status>("/v1/status").ok();
        status.is_some_and(|status| status.pid == pid || status.supervisor_pid == Some(pid))
    })
}

/// Process that listens at a socket: the supervisor, or the server process if there is none. The
/// process ID comes from the kernel, because a compromised server may report a wrong one.
fn listening_process(socket: &Path) -> Option<u32> {
    // Without waiting for a server that accepts no connections.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
    connect(&stream, &SocketAddrUnix::new(socket).ok()?).ok()?;
    let pid = socket_peercred(&stream).ok()?.pid.as_raw_pid();
    u32::try_from(pid).ok()
}

/// True if the process `pid` is `listening`, or one is the child of the other. Also true if the
/// process `listening` has ended: it has passed its socket to another process, so `pid` cannot be
/// checked.
fn is_part(listening: u32, pid: u32) -> bool {
    let is_child = |child: Option<&str>, of| child.and_then(parent) == Some(of);
    let status = process_status(listening);
    listening == pid
        || status.is_none()
        || is_child(status.as_deref(), pid)
        || is_child(process_status(pid).as_deref(), listening)
}

/// True if the process `pid`, which a server has reported as its supervisor, can be the one:
/// it or its child listens at the server's control socket. Also true if the process that listened
/// has ended.
#[must_use]
pub fn is_supervisor(control: &Path, pid: u32) -> bool {
    listening_process(control).is_some_and(|listening| is_part(listening, pid))
}

/// Text of `/proc/PID/stat`. `None` if there is no such process.
fn process_status(pid: u32) -> Option<String> {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()
}

/// Parent in a [`process_status`].
fn parent(status: &str) -> Option<u32> {
    // The name in parentheses may contain spaces. The state and the parent follow.
    status.rsplit_once(')')?.1.split(' ').nth(2)?.parse().ok()
}

/// Server that serves `socket`, and the server's description of the controller on this socket. Only
/// servers with a control socket in the usual directory are found.
pub fn owner(socket: &Path) -> Option<(Client, Controller)> {
    let socket = canonical_path(&std::path::absolute(socket).ok()?);
    let socket = socket.to_str()?;
    for (_, control) in running(&socket_path::directory()?) {
        let client = Client::new(&control);
        let Ok(controllers) = client.get::<Vec<Controller>>("/v1/controllers") else { continue };
        if let Some(controller) = controllers.into_iter().find(|c| c.socket == socket) {
            return Some((client, controller));
        }
    }
    None
}

/// Usual directory of control sockets.
///
/// # Errors
/// This user has no such directory.
pub fn directory() -> anyhow::Result<PathBuf> {
    socket_path::directory().ok_or_else(no_directory)
}

/// Servers in `directory` that accept connections.
pub fn running(directory: &Path) -> Vec<(String, PathBuf)> {
    let mut servers = socket_path::servers(directory);
    servers.retain(|(_, socket)| UnixStream::connect(socket).is_ok());
    servers
}

fn only(directory: Option<&Path>) -> anyhow::Result<Client> {
    let directory = directory.ok_or_else(no_directory)?;
    let servers = running(directory);
    match &servers[..] {
        [(_, socket)] => Ok(Client::new(socket)),
        [] => Err(exit::not_found(anyhow!(
            "no running server has its control socket in {}{}; name one with `--server PATH`",
            directory.display(),
            of_others(directory)
        ))),
        _ => Err(exit::bad_input(anyhow!(
            "several servers are running; choose one with `--server NAME`{}",
            names(directory, &servers)
        ))),
    }
}

fn no_directory() -> anyhow::Error {
    exit::not_found(anyhow!(
        "XDG_RUNTIME_DIR is not set, so there is no default directory of control sockets; name a \
         socket with `--server PATH`"
    ))
}

fn names(directory: &Path, servers: &[(String, PathBuf)]) -> String {
    let others = of_others(directory);
    if servers.is_empty() {
        return if others.is_empty() { "; no server is running there".to_owned() } else { others };
    }
    let names: Vec<_> = servers.iter().map(|(name, _)| name.as_str()).collect();
    format!("; running servers: {}{others}", names.join(", "))
}

/// Names of servers in `directory` that this user may not query, for an error message. Empty if
/// there are none.
pub fn of_others(directory: &Path) -> String {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let is_denied = |socket: PathBuf| {
        let error = UnixStream::connect(socket).err();
        error.is_some_and(|error| error.kind() == ErrorKind::PermissionDenied)
    };
    let mut names: Vec<_> =
        names.filter(|name| is_denied(socket_path::socket(directory, name))).collect();
    names.sort();
    if names.is_empty() {
        return String::new();
    }
    format!("; servers of other users, which only root and they may query: {}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_socket_in_the_working_directory_needs_no_usual_directory() {
        let client = server_in(None, Some("Cargo.toml")).unwrap();
        assert_eq!(client.socket(), Path::new("Cargo.toml"));
        for wanted in [Some("no-such-server"), None] {
            assert_eq!(exit::status(&server_in(None, wanted).unwrap_err()), exit::NOT_FOUND);
        }
    }

    /// A server that reports an unrelated process as its supervisor is not found by the ID of that
    /// process.
    #[test]
    fn a_server_is_not_believed_about_its_processes() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("vm")).unwrap();
        let listener = UnixListener::bind(socket_path::socket(directory.path(), "vm")).unwrap();
        let (own, other) = (std::process::id(), 1);
        let body = format!(
            "{{\"name\":\"vm\",\"version\":\"1\",\"pid\":{own},\"supervisor_pid\":{other},\
             \"uptime_seconds\":1,\"workers\":1,\"controllers\":0,\"clients\":0,\
             \"log_filter\":\"info\",\"upgrade_error\":null}}"
        );
        std::thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                if stream.read(&mut [0; 4096]).is_ok_and(|count| count > 0) {
                    let length = body.len();
                    let answer =
                        format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}");
                    let _ = stream.write_all(answer.as_bytes());
                }
            }
        });
        let control = socket_path::socket(directory.path(), "vm");
        let own_parent = process_status(own).as_deref().and_then(parent).unwrap();
        for (pid, expected) in [(own, true), (own_parent, true), (other, own_parent == other)] {
            assert_eq!(is_supervisor(&control, pid), expected, "{pid}");
        }
        assert!(with_process(directory.path(), &other.to_string()).is_none());
        assert!(with_process(directory.path(), &own.to_string()).is_some());
    }
}
