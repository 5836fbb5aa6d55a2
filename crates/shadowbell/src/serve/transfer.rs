//! What a server and its successor say to each other: a state, and three letters.
//!
//! Or several states, if both know how: first what is served; then one controller after the other,
//! each with the three letters ([`HAVE`] and [`COMMIT`] only with the first one, after which there is
//! no way back) and [`DONE`]; and then the rest.

use super::server_config::{ServerConfig, SocketConfig};
use crate::controller_config::ControllerConfig;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::unix::net::UnixStream;

/// The new one has taken the state in, and touches nothing yet.
pub(super) const HAVE: u8 = b'h';
/// The old one will not go on.
pub(super) const COMMIT: u8 = b'c';
/// The old one touches nothing any more.
pub(super) const GONE: u8 = b'g';
/// The new one serves this controller.
pub(super) const DONE: u8 = b'd';

/// Controllers come one by one: how many.
pub(super) const MOVES: &str = "moves";
/// This one does: its place among them.
pub(super) const MOVED: &str = "moved";
/// What is served: has to be the same in both.
pub(super) const SERVED: &str = "serve";
/// The controllers as they were asked for, if that is not what the configuration says.
pub(super) const ASKED: &str = "asked";
/// The limits of groups, with that.
pub(super) const GROUPS: &str = "limit-groups";
/// The socket for `top`.
pub(super) const STATS: &str = "stats-socket";
/// The control socket.
pub(super) const CONTROL: &str = "control-socket";

pub(super) fn controller(index: usize) -> String {
    format!("controller/{index}")
}

pub(super) fn port(index: usize) -> String {
    format!("port/{index}")
}

/// What the files of a client's memory begin with, if they are apart from the port.
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

/// A controller, as far as it has to be the same in both.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Served {
    socket: String,
    disks: Vec<String>,
    read_only: bool,
}

/// All of them, in their order.
pub(super) fn served(config: &ServerConfig) -> Vec<Served> {
    served_of(config.controllers.iter())
}

/// The same of these.
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

/// Why the new one can not go on with what the old one served, if it can not.
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

/// The next letter; `None` if the other one is gone.
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
