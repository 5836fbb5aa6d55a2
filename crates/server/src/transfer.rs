//! Protocol of a handover between two server processes: one state, and three one-byte messages.
//!
//! For a per-controller handover there are several states: first the list of what is served; then
//! each controller with the three messages and [`DONE`] ([`HAVE`] and [`COMMIT`] only for the
//! first one, after which the old process cannot resume); then the management endpoints.

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use shadowbell_config::controller_config::ControllerConfig;
use shadowbell_config::server_config::{ServerConfig, SocketConfig};
use std::io;
use std::os::unix::net::UnixStream;

/// New process: the state is restored, but not served yet.
pub(super) const HAVE: u8 = b'h';
/// Old process: it will not resume.
pub(super) const COMMIT: u8 = b'c';
/// Old process: it accesses no disk or guest any more.
pub(super) const GONE: u8 = b'g';
/// New process: it serves the controller.
pub(super) const DONE: u8 = b'd';

/// Section with the number of controllers, of a per-controller handover.
pub(super) const MOVES: &str = "moves";
/// Section with the index of a controller, of a per-controller handover.
pub(super) const MOVED: &str = "moved";
/// Section with the list of what is served, which must match in both processes.
pub(super) const SERVED: &str = "serve";
/// Section with the controllers' configuration, if it differs from the configuration file.
pub(super) const ASKED: &str = "asked";
/// Section with the limits of groups, which accompanies [`ASKED`].
pub(super) const GROUPS: &str = "limit-groups";
/// Section of the control socket.
pub(super) const CONTROL: &str = "control-socket";

pub(super) fn controller(index: usize) -> String {
    format!("controller/{index}")
}

pub(super) fn port(index: usize) -> String {
    format!("port/{index}")
}

/// Key prefix of a client's memory files, if they are stored apart from the port.
pub(super) fn client_files(index: usize) -> String {
    format!("file/{index}.")
}

pub(super) fn client_file(index: usize, number: u64) -> String {
    format!("file/{index}.{number}")
}

pub(super) fn client_file_number(key: &str) -> Option<u64> {
    key.rsplit_once('.')?.1.parse().ok()
}

pub(super) fn disk(controller: usize, index: usize) -> String {
    format!("disk/{controller}.{index}")
}

/// Properties of a controller that must be the same in the old and the new server process.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Served {
    socket: String,
    disks: Vec<String>,
    read_only: bool,
}

/// Properties of all configured controllers, in their order.
pub(super) fn served(config: &ServerConfig) -> Vec<Served> {
    served_of(config.controllers.iter())
}

/// Properties of these controllers.
pub(super) fn served_of<'a>(asked: impl Iterator<Item = &'a SocketConfig>) -> Vec<Served> {
    let all = asked.map(|served| {
        let ControllerConfig { disks, read_only, .. } = &served.controller;
        Served {
            socket: served.absolute_socket().to_string_lossy().into_owned(),
            disks: disks.iter().map(|disk| disk.disk.clone()).collect(),
            read_only: *read_only,
        }
    });
    all.collect()
}

/// Explains why the new process cannot continue for the old one, if the lists differ.
pub(super) fn difference(old: &[Served], new: &[Served]) -> Option<String> {
    if old.len() != new.len() {
        return Some(format!(
            "the new process is to serve {} controllers, and the running one serves {}; change \
             the configuration back, or stop the server and start it again",
            new.len(),
            old.len()
        ));
    }
    let (old, new) = old.iter().zip(new).find(|(old, new)| old != new)?;
    Some(format!(
        "the new process is to serve {} at {}, and the running one serves {} at {}; change the \
         configuration back, or stop the server and start it again",
        new.disks.join(", "),
        new.socket,
        old.disks.join(", "),
        old.socket
    ))
}

pub(super) fn say(transfer: &UnixStream, letter: u8) -> io::Result<()> {
    Ok(rustix::io::retry_on_intr(|| rustix::io::write(transfer, &[letter])).map(drop)?)
}

/// Receives a message; `None` after the end of the connection.
pub(super) fn hear(transfer: &UnixStream) -> io::Result<Option<u8>> {
    let mut letter = [0];
    match rustix::io::retry_on_intr(|| rustix::io::read(transfer, &mut letter)) {
        Ok(0) | Err(Errno::CONNRESET) => Ok(None),
        Ok(_) => Ok(Some(letter[0])),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_said() {
        let served = |socket: &str, disk: &str| Served {
            socket: socket.into(),
            disks: vec![disk.into()],
            read_only: false,
        };
        assert_eq!(difference(&[served("a", "x")], &[served("a", "x")]), None);
        let text = difference(&[served("a", "x")], &[served("a", "y")]).unwrap();
        assert!(text.contains("serve y at a, and the running one serves x at a"), "{text}");
        let text = difference(&[], &[served("a", "x")]).unwrap();
        assert!(text.contains("1 controllers, and the running one serves 0"), "{text}");
    }
}
