//! Discovery of running servers by name, control socket, or socket of a controller.

use super::api::{Controller, Status};
use super::client::Client;
use anyhow::anyhow;
use shadowbell_config::server_config::canonical_path;
use shadowbell_config::socket_path;
use shadowbell_process::exit;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// Server that `wanted` names: by its name, its process ID or that of its supervisor, its control
/// socket, or the socket of one of its controllers. Without `wanted`, the only running server. A
/// name takes precedence over a file of that name in the working directory.
///
/// # Errors
/// No server is found, or several are.
pub fn server(wanted: Option<&str>) -> anyhow::Result<Client> {
    let directory = socket_path::directory();
    let Some(wanted) = wanted else { return only(directory.as_deref()) };
    if !wanted.contains('/') {
        let Some(directory) = directory else { return Err(no_directory()) };
        let socket = socket_path::socket(&directory, wanted);
        if !socket.exists() {
            if let Some(client) = with_process(&directory, wanted) {
                return Ok(client);
            }
            if Path::new(wanted).exists() {
                return Ok(at(Path::new(wanted)));
            }
            let others = names(&running(&directory));
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
    let clients = running(directory).into_iter().map(|(_, socket)| Client::new(&socket));
    clients.into_iter().find(|client| {
        let status = client.get::<Status>("/v1/status").ok();
        status.is_some_and(|status| status.pid == pid || status.supervisor_pid == Some(pid))
    })
}

/// Server that serves `socket`, and its description of the controller there. Only servers with a
/// control socket in the usual directory are found.
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
            "no running server has its control socket in {}; name one with `--server PATH`",
            directory.display()
        ))),
        _ => Err(exit::bad_input(anyhow!(
            "several servers are running; choose one with `--server NAME`{}",
            names(&servers)
        ))),
    }
}

fn no_directory() -> anyhow::Error {
    exit::not_found(anyhow!(
        "XDG_RUNTIME_DIR is not set, so there is no default directory of control sockets; name a \
         socket with `--server PATH`"
    ))
}

fn names(servers: &[(String, PathBuf)]) -> String {
    if servers.is_empty() {
        return "; no server is running there".to_owned();
    }
    let names: Vec<_> = servers.iter().map(|(name, _)| name.as_str()).collect();
    format!("; running servers: {}", names.join(", "))
}
