//! Liveness check of all threads, for the watchdog of a service manager (`WatchdogSec=`).
//!
//! With a supervisor, the supervisor notifies the watchdog and requests checks of the server
//! process. Without one, the server process does both itself.

use super::server::Server;
use super::worker_link::WorkerLink;
use shadowbell_process::notify;
use shadowbell_supervisor::protocol::to_supervisor;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Watchdog timer of a process without a supervisor.
pub(super) struct Liveness {
    /// Interval of the checks. `None` if there is no watchdog.
    every: Option<Duration>,
    next: Option<Instant>,
}

impl Liveness {
    /// Creates the timer that the service manager requests. With a supervisor there is none.
    pub(super) fn wanted(link: Option<&WorkerLink>) -> Self {
        let every = if link.is_some() { None } else { notify::watchdog() };
        Self { every, next: every.map(|every| Instant::now() + every) }
    }

    /// Time of the next check.
    pub(super) fn next(&self) -> Option<Instant> {
        self.next
    }

    /// Starts a check. The watchdog is notified when all threads have answered, and so not if a
    /// thread hangs.
    pub(super) fn check(&mut self, server: &Server) {
        self.next = self.every.map(|every| Instant::now() + every);
        let registry = Arc::clone(server.registry());
        server.check_liveness(move || {
            let status = notify::status(&registry.summary());
            notify::try_send(&format!("{}\n{status}", notify::WATCHDOG));
        });
    }
}

impl WorkerLink {
    /// Starts a check, and reports to the supervisor once all threads have answered.
    pub(super) fn check_liveness(&self, server: &Server) {
        let link = self.clone();
        let registry = Arc::clone(server.registry());
        server.check_liveness(move || link.try_send(to_supervisor::ALIVE, &registry.summary()));
    }
}
