//! Server process's connection to its supervisor.

use super::checkpoint_store::CheckpointStore;
use super::path_broker;
use anyhow::{Context, anyhow, bail};
use parking_lot::Mutex;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use shadowbell_config::server_config::canonical_path;
use shadowbell_controller::CauseOfDeath;
use shadowbell_process::exit::bad_input;
use shadowbell_supervisor::checkpoint::Checkpoint;
use shadowbell_supervisor::client::SupervisorClient;
use shadowbell_supervisor::protocol::{self, Packet, to_supervisor, to_worker};
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Send timeout. The supervisor's main thread always reads, so the timeout is only exceeded if the
/// supervisor has a fault.
const LISTENS: Duration = Duration::from_secs(2);

/// Start mode of a server process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Role {
    /// Serve at once.
    Start,
    /// Recover after the death of a process, planned or not.
    Recover,
}

/// A received checkpoint.
pub(super) struct Received {
    pub(super) items: Checkpoint,
    /// Cause of death of the process that sent the checkpoint. `None` if that process still serves,
    /// and the checkpoint is only to be checked.
    pub(super) death: Option<CauseOfDeath>,
    /// True if the last process that wrote the checkpoint, or was to recover from it, died by a
    /// fault.
    pub(super) by_fault: bool,
    /// Number of recent deaths by the supervisor's count.
    pub(super) deaths: u8,
}

/// Connection to the supervisor. It is closed when the supervisor dies.
#[derive(Clone)]
pub(super) struct WorkerLink(Arc<OwnedFd>, Arc<Mutex<Option<(OwnedFd, OwnedFd)>>>);

impl WorkerLink {
    /// Takes the connection from standard input.
    ///
    /// # Errors
    /// Standard input is no connection to a supervisor.
    pub(super) fn take() -> anyhow::Result<Self> {
        let link = io::stdin().as_fd().try_clone_to_owned()?;
        let kind = rustix::net::sockopt::socket_type(&link);
        if kind != Ok(rustix::net::SocketType::SEQPACKET) {
            let option = protocol::AS_WORKER;
            return Err(bad_input(anyhow!(
                "{option} is an internal option of the supervisor; leave it out"
            )));
        }
        let null = std::fs::File::open("/dev/null").context("cannot open /dev/null")?;
        rustix::stdio::dup2_stdin(null)?;
        set_socket_timeout(&link, Timeout::Send, Some(LISTENS))?;
        Ok(Self(Arc::new(link), Arc::default()))
    }

    #[cfg(test)]
    pub(super) fn from_socket(link: OwnedFd) -> Self {
        Self(Arc::new(link), Arc::default())
    }

    /// Receives the first message: the sockets of the brokers, and the text of the configuration
    /// file.
    ///
    /// # Errors
    /// The supervisor has died, or the message is invalid.
    pub(super) fn begin(&self) -> anyhow::Result<Option<String>> {
        let packet = protocol::receive(&self.0, false)?.context("the supervisor has ended")?;
        let mut fds = packet.fds.into_iter();
        let (Some(images), Some(paths)) = (fds.next(), fds.next()) else {
            bail!("unexpected first message of the supervisor");
        };
        *self.1.lock() = Some((images, paths));
        fds.next().map(text_of).transpose()
    }

    /// Takes the sockets of the open broker and of the path broker.
    pub(super) fn brokers(&self) -> Option<(OwnedFd, OwnedFd)> {
        self.1.lock().take()
    }

    /// Creates a sender of checkpoint changes.
    ///
    /// # Errors
    /// The descriptor limit is reached.
    pub(super) fn store(&self) -> io::Result<CheckpointStore> {
        CheckpointStore::new(self.0.try_clone()?)
    }

    /// Receives a checkpoint. `None` if the supervisor ends the service instead.
    ///
    /// # Errors
    /// The supervisor has died, or a packet is invalid.
    pub(super) fn checkpoint(&self) -> anyhow::Result<Option<Received>> {
        let mut items = Checkpoint::default();
        let mut death = Some(CauseOfDeath::Killed);
        let (mut by_fault, mut deaths) = (false, 0);
        while let Some(packet) = protocol::receive(&self.0, false)? {
            match packet.code {
                to_worker::CHECKPOINT => {
                    let is_whole = items.take(&packet.body, packet.fds)?;
                    if is_whole {
                        return Ok(Some(Received { items, death, by_fault, deaths }));
                    }
                }
                to_worker::END => return Ok(None),
                to_worker::CHECK => death = None,
                to_worker::FAULT => death = Some(CauseOfDeath::Fault),
                to_worker::LAST_BY_FAULT => by_fault = true,
                to_worker::DEATHS => deaths = packet.text().parse().unwrap_or(u8::MAX),
                to_worker::QUIESCED => death = Some(CauseOfDeath::Planned),
                _ => {}
            }
        }
        bail!("the supervisor has ended")
    }

    /// Creates a requester of upgrades.
    ///
    /// # Errors
    /// The descriptor limit is reached.
    pub(super) fn upgrade_requester(&self) -> io::Result<UpgradeRequester> {
        Ok(UpgradeRequester(Arc::new(Self(Arc::new(self.0.try_clone()?), Arc::default()))))
    }

    /// Sends a message. Ignores an error, because the main loop detects the supervisor's death.
    pub(super) fn send(&self, code: u8, body: &str) {
        let _ = protocol::send(&self.0, code, body, None);
    }

    /// Sends a message without blocking. The message is lost if the socket is full.
    pub(super) fn try_send(&self, code: u8, body: &str) {
        let _ = protocol::send_bytes(&self.0, code, body.as_bytes(), &[], true);
    }

    /// Sends a message with a descriptor.
    ///
    /// # Errors
    /// The supervisor has died.
    pub(super) fn send_fd(&self, code: u8, fd: OwnedFd) -> io::Result<()> {
        protocol::send(&self.0, code, "", Some(fd.as_fd()))
    }

    /// Reports the paths of the sockets, and that this process serves them. `what`: a short status.
    pub(super) fn report_serving<'a>(&self, sockets: impl Iterator<Item = &'a Path>, what: &str) {
        for socket in sockets {
            let known = canonical_path(socket);
            let _ = protocol::send(&self.0, to_supervisor::SOCKET, known, None);
        }
        self.send(to_supervisor::SERVING, what);
    }

    /// Receives the next message; `None` after the supervisor's death.
    pub(super) fn receive(&self) -> Option<Packet> {
        protocol::receive(&self.0, false).ok().flatten()
    }
}

/// Requester of upgrades, for a sandboxed process that cannot connect to the supervisor.
#[derive(Clone)]
pub(super) struct UpgradeRequester(Arc<WorkerLink>);

impl UpgradeRequester {
    /// Requests an upgrade, and returns a client that receives the result.
    ///
    /// # Errors
    /// The descriptor limit is reached, or the supervisor has died.
    pub(super) fn upgrade(&self) -> io::Result<SupervisorClient> {
        let (ours, theirs) = path_broker::pair()?;
        self.0.send_fd(to_supervisor::UPGRADE, theirs)?;
        Ok(SupervisorClient::from_socket(ours))
    }
}

/// Reads the text in a memfd of the supervisor.
///
/// # Errors
/// The text cannot be read.
pub(super) fn text_of(memory: OwnedFd) -> anyhow::Result<String> {
    let mut file = File::from(memory);
    let mut text = String::new();
    file.rewind()?;
    file.read_to_string(&mut text)?;
    Ok(text)
}

impl AsFd for WorkerLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_supervisor::checkpoint::{Change, packets};

    /// If a process that was to recover was killed, the fault of the process before it does not
    /// count.
    #[test]
    fn only_the_last_process_counts_as_dead_by_a_fault() {
        for (letters, death, by_fault) in [
            (&[][..], CauseOfDeath::Killed, false),
            (&[to_worker::FAULT], CauseOfDeath::Fault, false),
            (&[to_worker::LAST_BY_FAULT], CauseOfDeath::Killed, true),
            (&[to_worker::FAULT, to_worker::LAST_BY_FAULT], CauseOfDeath::Fault, true),
        ] {
            let (ours, theirs) = protocol::pair().unwrap();
            for code in letters {
                protocol::send(&theirs, *code, "", None).unwrap();
            }
            let changes = [Change::Put { key: "fence", body: b"", fds: &[] }];
            let mut memory = Vec::new();
            for packet in packets(&changes, &mut memory).unwrap() {
                let (bytes, fds) = (&packet.bytes, &packet.fds);
                protocol::send_bytes(&theirs, to_worker::CHECKPOINT, bytes, fds, true).unwrap();
            }
            let link = WorkerLink::from_socket(ours);
            let received = link.checkpoint().unwrap().unwrap();
            assert_eq!((received.death, received.by_fault), (Some(death), by_fault), "{letters:?}");
        }
    }
}
