//! Whether all threads still answer, for a service manager that wants to know (`WatchdogSec=`).
//!
//! A keeper is asked by the service manager, and asks its worker. A process without a keeper is
//! asked itself. Nobody is woken more often than that takes.

use super::server::Server;
use super::worker_link::WorkerLink;
use crate::keeper_link::to_keeper;
use crate::notify;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a process without a keeper says that it is alive.
pub(super) struct Pulse {
    /// None: nobody wants to know.
    every: Option<Duration>,
    next: Option<Instant>,
}

impl Pulse {
    /// What the service manager wants. Who has a keeper is asked by that.
    pub(super) fn wanted(link: Option<&WorkerLink>) -> Self {
        let every = if link.is_some() { None } else { notify::watchdog() };
        Self { every, next: every.map(|every| Instant::now() + every) }
    }

    /// When it is to be said next.
    pub(super) fn next(&self) -> Option<Instant> {
        self.next
    }

    /// The time has come: it is said when all threads have answered, and not if one hangs.
    pub(super) fn look(&mut self, server: &Server) {
        self.next = self.every.map(|every| Instant::now() + every);
        let registry = Arc::clone(server.registry());
        server.visit(move || {
            let status = notify::status(&registry.summary());
            notify::tell_now(&format!("{}\n{status}", notify::WATCHDOG));
        });
    }
}

impl WorkerLink {
    /// Tells the keeper when all threads have answered.
    pub(super) fn visit(&self, server: &Server) {
        let link = self.clone();
        let registry = Arc::clone(server.registry());
        server.visit(move || link.say_now(to_keeper::ALIVE, &registry.summary()));
    }
}
