//! Keys of a checkpoint's items, and the list of what is served.

use serde::{Deserialize, Serialize};
use shadowbell_config::controller_config::ControllerConfig;
use shadowbell_config::server_config::{ServerConfig, SocketConfig};

/// Key of the item with the management endpoints. The item exists only while the server quiesces
/// for an upgrade.
pub(super) const ENDPOINTS: &str = "endpoints";

/// Key of the item that names the controllers that have quiesced for an upgrade.
pub(super) const QUIESCED: &str = "quiesced";

/// Indices of the controllers that have quiesced, the busiest first. None of their commands was in
/// flight when the item was sent, and they start none, so this is true even if the process has
/// crashed since.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Quiesced {
    pub(super) controllers: Vec<usize>,
}

pub(super) fn controller(index: usize) -> String {
    format!("controller/{index}")
}

/// Key of the item with an export's descriptor of `/dev/fuse`.
pub(super) fn fuse_device(export: &str) -> String {
    format!("fuse/{export}")
}

pub(super) fn port(index: usize) -> String {
    format!("port/{index}")
}

/// Key prefix of the items with the memory files of a controller's client. If the files are few,
/// they are part of the item of the socket ([`port`]), and no item has this prefix.
pub(super) fn client_files(index: usize) -> String {
    format!("file/{index}.")
}

pub(super) fn client_file(index: usize, number: u64) -> String {
    format!("file/{index}.{number}")
}

/// Returns the number at the end of the key of a file or a disk.
pub(super) fn number(key: &str) -> Option<u64> {
    key.rsplit_once('.')?.1.parse().ok()
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
pub(super) fn served_of<'a>(requested: impl Iterator<Item = &'a SocketConfig>) -> Vec<Served> {
    let all = requested.map(|served| {
        let ControllerConfig { disks, read_only, .. } = &served.controller;
        Served {
            socket: served.absolute_socket().to_string_lossy().into_owned(),
            disks: disks.iter().map(|disk| disk.disk.clone()).collect(),
            read_only: *read_only,
        }
    });
    all.collect()
}

/// Returns an error text with the first difference between the controllers of the old and of the
/// new process. `None` if the lists are equal.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_from_the_checkpoint_are_described() {
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
