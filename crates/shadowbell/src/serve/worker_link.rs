//! What a worker and its keeper say to each other, from the worker's side.

use crate::exit::bad_input;
use crate::keeper_link::{self, Packet, to_keeper};
use anyhow::{Context, anyhow};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// How a worker begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Role {
    /// It serves at once.
    Start,
    /// It takes over from another.
    Successor,
}

/// The way to the keeper, which ends with it.
pub(super) struct WorkerLink(OwnedFd);

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
        Ok(Self(link))
    }

    /// Says something; in vain if the keeper is gone, which is noticed elsewhere.
    pub(super) fn say(&self, letter: u8, body: &str) {
        let _ = keeper_link::send(&self.0, letter, body, None);
    }

    /// These are the sockets, and they are served.
    pub(super) fn serves<'a>(&self, sockets: impl Iterator<Item = &'a Path>) {
        for socket in sockets {
            let known = keeper_link::known_path(socket);
            let _ = keeper_link::send(&self.0, to_keeper::SOCKET, known, None);
        }
        self.say(to_keeper::SERVING, "");
    }

    /// What the keeper says next; `None` if it is gone.
    pub(super) fn hear(&self) -> Option<Packet> {
        keeper_link::receive(&self.0, false).ok().flatten()
    }
}

impl AsFd for WorkerLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
