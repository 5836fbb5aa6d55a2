//! Adoption of a killed supervisor's state from the fd store, and the writes to the store for the
//! next supervisor: see [`fd_store`](super::fd_store).

use super::fd_store::{self, FdStore, Found};
use super::grants::GRANTS;
use super::log::log_line;
use super::state::Supervisor;
use crate::protocol::to_supervisor;
use rustix::process::Signal;
use shadowbell_state::StateError;
use std::time::Instant;

impl Supervisor {
    /// Adopts the state of a killed supervisor, if the fd store contains one. Returns true if this
    /// supervisor has adopted the state: a server process then runs or is about to be started.
    pub(super) fn resume(&mut self) -> bool {
        if !fd_store::is_wanted() {
            return false;
        }
        let begun = FdStore::begin().inspect_err(|error| lost(error));
        let Ok((fd_store, found)) = begun else { return false };
        self.fd_store = Some(fd_store);
        let Some(found) = found else { return false };
        if let Err(why) = self.adopt(found) {
            (self.worker, self.upgrade, self.left, self.restart) = (None, None, None, None);
            log_line(&format!(
                "error: the supervisor was killed, and its state in the fd store is unusable: \
                 {why}. The clients have lost their controllers"
            ));
            return false;
        }
        log_line("error: the supervisor was killed; this one continues from the fd store");
        true
    }

    fn adopt(&mut self, found: Found) -> Result<(), StateError> {
        let Found { record, changes } = found;
        self.restore(record.read()?, false)?;
        let new = self.upgrade.as_mut().map(|upgrade| &mut upgrade.new);
        let mut all: Vec<_> = self.worker.iter_mut().chain(new).collect();
        for (pid, packet) in changes {
            if let Some(worker) = all.iter_mut().find(|worker| worker.pid() == pid) {
                worker.keep(&packet.body, packet.fds);
            }
        }
        // The service manager may have killed the processes already. Their queued messages and
        // their exits are handled as usual.
        all.iter().for_each(|worker| worker.process.signal(Signal::KILL));
        if self.worker.is_none() && self.restart.is_none() && self.upgrade.is_none() {
            self.restart = Some(Instant::now());
        }
        Ok(())
    }

    /// Writes a snapshot to the fd store, if there is one.
    pub(super) fn write_snapshot(&mut self) {
        let Some(mut fd_store) = self.fd_store.take() else { return };
        let opened = GRANTS.lock().changes;
        let images = GRANTS.lock().images();
        let record = self.snapshot(&images, None).map_err(std::io::Error::other);
        match record.and_then(|record| fd_store.append_snapshot(&record, opened)) {
            Ok(()) => self.fd_store = Some(fd_store),
            Err(error) => {
                lost(&error);
                fd_store.end();
            }
        }
    }

    /// Writes a snapshot after the message `code` of a server process, if the message changed
    /// state that only a snapshot stores.
    pub(super) fn record_message(&mut self, code: u8) {
        let is_noted = matches!(
            code,
            to_supervisor::SERVING
                | to_supervisor::RECOVERED
                | to_supervisor::RESUMES
                | to_supervisor::FAILED
        );
        if is_noted || self.fd_store.as_ref().is_some_and(FdStore::needs_snapshot) {
            self.write_snapshot();
        }
    }

    /// Writes a snapshot if one is due.
    pub(super) fn update_fd_store(&mut self, now: Instant) {
        let Some(fd_store) = &self.fd_store else { return };
        if fd_store.needs_snapshot() || fd_store.due.is_some_and(|due| due <= now) {
            self.write_snapshot();
        }
    }
}

fn lost(error: &dyn std::fmt::Display) {
    log_line(&format!(
        "error: cannot store the supervisor's state in the service manager's fd store: {error}. If \
         the supervisor is killed, the clients lose their controllers"
    ));
}
