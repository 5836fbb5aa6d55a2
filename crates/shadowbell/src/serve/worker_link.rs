//! What a worker and its keeper say to each other, from the worker's side.

use super::places;
use super::store::Store;
use crate::exit::bad_input;
use crate::items::Items;
use crate::keeper_link::{self, Packet, to_keeper, to_worker};
use crate::keeper_query::Keeper;
use anyhow::{Context, anyhow, bail};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use shadowbell_controller::Death;
use shadowbell_state::is_as_before;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How long a keeper may take to listen. It is one thread that always does.
const LISTENS: Duration = Duration::from_secs(2);

/// How a worker begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Role {
    /// It serves at once.
    Start,
    /// It takes over from another.
    Successor,
    /// It goes on for another that has died.
    Recover,
}

/// Why a worker need not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// The service is to end.
    End,
    /// The keeper is gone.
    Gone,
}

/// The way to the keeper, which ends with it.
#[derive(Clone)]
pub(super) struct WorkerLink(Arc<OwnedFd>);

impl WorkerLink {
    /// The keeper is at the other end of the standard input.
    ///
    /// # Errors
    /// Nobody is.
    pub(super) fn take() -> anyhow::Result<Self> {
        let link = io::stdin().as_fd().try_clone_to_owned()?;
        let kind = rustix::net::sockopt::socket_type(&link);
        if kind != Ok(rustix::net::SocketType::SEQPACKET) {
            let option = keeper_link::AS_WORKER;
            return Err(bad_input(anyhow!(
                "{option} is how a keeper starts its worker; leave it out"
            )));
        }
        let null = std::fs::File::open("/dev/null").context("/dev/null can not be opened")?;
        rustix::stdio::dup2_stdin(null)?;
        set_socket_timeout(&link, Timeout::Send, Some(LISTENS))?;
        let link = Self(Arc::new(link));
        if !is_as_before() {
            link.say(to_keeper::MOVES, "");
            link.say(to_keeper::CAN_REST, "");
        }
        Ok(link)
    }

    /// What the keeper holds for the time after this process's death.
    ///
    /// # Errors
    /// The system has no more descriptors.
    pub(super) fn store(&self) -> io::Result<Store> {
        Store::new(self.0.try_clone()?)
    }

    /// What the process before has left, and how it has died. `None`: the service is to end.
    ///
    /// # Errors
    /// It does not arrive.
    pub(super) fn items(&self) -> anyhow::Result<Option<(Items, Death)>> {
        let mut items = Items::default();
        // A keeper of an earlier release does not say it.
        let mut death = Death::Killed;
        loop {
            match keeper_link::receive(&self.0, false)? {
                Some(packet) if packet.letter == to_worker::ITEMS => {
                    if items.take(&packet.body, packet.fds)? {
                        return Ok(Some((items, death)));
                    }
                }
                Some(packet) if packet.letter == to_worker::END => return Ok(None),
                Some(packet) if packet.letter == to_worker::FAULT => death = Death::Fault,
                Some(_) => {}
                None => bail!("the keeper has ended"),
            }
        }
    }

    /// Who asks the keeper for an upgrade.
    ///
    /// # Errors
    /// The system has no more descriptors.
    pub(super) fn asker(&self) -> io::Result<Asker> {
        Ok(Asker(Arc::new(Self(Arc::new(self.0.try_clone()?)))))
    }

    /// Says something; in vain if the keeper is gone, which is noticed elsewhere.
    pub(super) fn say(&self, letter: u8, body: &str) {
        let _ = keeper_link::send(&self.0, letter, body, None);
    }

    /// The same, from a thread that waits for nobody: a keeper that does not listen misses it.
    pub(super) fn say_now(&self, letter: u8, body: &str) {
        let _ = keeper_link::send_bytes(&self.0, letter, body.as_bytes(), &[], true);
    }

    /// Gives the keeper a descriptor.
    ///
    /// # Errors
    /// The keeper is gone.
    pub(super) fn give(&self, letter: u8, fd: OwnedFd) -> io::Result<()> {
        keeper_link::send(&self.0, letter, "", Some(fd.as_fd()))
    }

    /// These are the sockets, and they are served: what, in a few words.
    pub(super) fn serves<'a>(&self, sockets: impl Iterator<Item = &'a Path>, what: &str) {
        for socket in sockets {
            let known = keeper_link::known_path(socket);
            let _ = keeper_link::send(&self.0, to_keeper::SOCKET, known, None);
        }
        self.say(to_keeper::SERVING, what);
    }

    /// Whether there is no more reason to begin. Takes what the keeper has said, and does not wait.
    pub(super) fn told(&self) -> Option<Told> {
        loop {
            match keeper_link::receive(&self.0, true) {
                Ok(Some(packet)) if packet.letter == to_worker::END => return Some(Told::End),
                Ok(Some(_)) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
                Ok(None) | Err(_) => return Some(Told::Gone),
            }
        }
    }

    /// What the keeper says next; `None` if it is gone.
    pub(super) fn hear(&self) -> Option<Packet> {
        keeper_link::receive(&self.0, false).ok().flatten()
    }
}

/// Asks the keeper for an upgrade, where nothing else can be asked of it.
#[derive(Clone)]
pub(super) struct Asker(Arc<WorkerLink>);

impl Asker {
    /// Asks for one. The keeper, for its answer.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn upgrade(&self) -> io::Result<Keeper> {
        let (ours, theirs) = places::pair()?;
        self.0.give(to_keeper::UPGRADE, theirs)?;
        Ok(Keeper::over(ours))
    }
}

impl AsFd for WorkerLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
