//! Adoption of a killed supervisor's state from the fd store, and the writes to the store for the
//! next supervisor: see [`fd_store`](super::fd_store).

use super::fd_store::{self, FdStore, Found};
use super::grants::GRANTS;
use super::log::log_line;
use super::state::Supervisor;
use crate::checkpoint::Checkpoint;
use rustix::process::Signal;
use shadowbell_state::StateError;
use std::time::Instant;

/// Maximum memory of a checkpoint in the fd store, in bytes. During a recovery there are two. The
/// supervisor's thread writes a snapshot of them within some tens of milliseconds, and handles no
/// signal meanwhile.
const MAX_STORED: usize = 4 << 20;

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
        let record = if self.state_bytes() > MAX_STORED {
            let limit = MAX_STORED >> 20;
            Err(std::io::Error::other(format!("the state needs more than {limit} MiB of memory")))
        } else {
            self.snapshot(&images, None).map_err(std::io::Error::other)
        };
        match record.and_then(|record| fd_store.append_snapshot(&record, opened)) {
            Ok(()) => self.fd_store = Some(fd_store),
            Err(error) => {
                lost(&error);
                fd_store.end();
            }
        }
    }

    /// Estimated memory of the parts of the state that a server process determines, in bytes.
    fn state_bytes(&self) -> usize {
        let left = self.left.iter().map(|left| &left.items);
        let items = self.workers().map(|worker| &worker.items).chain(left);
        let sockets = self.sockets.iter().map(|path| path.as_os_str().len());
        largest(items) + sockets.sum::<usize>()
    }

    /// Requires a snapshot if `is_changed`: a message has changed state that only snapshots store.
    pub(super) fn want_snapshot(&mut self, is_changed: bool) {
        if let Some(fd_store) = &mut self.fd_store {
            fd_store.is_wanted |= is_changed;
        }
    }

    /// Writes a snapshot if one is due. Returns true if there was one to write.
    pub(super) fn update_fd_store(&mut self, now: Instant) -> bool {
        let is_due =
            |store: &FdStore| store.needs_snapshot() || store.due.is_some_and(|due| due <= now);
        let is_due = self.fd_store.as_ref().is_some_and(is_due);
        if is_due {
            self.write_snapshot();
        }
        is_due
    }
}

/// Estimated memory of the largest checkpoint. During a recovery, the process that recovers has a
/// copy of the dead process's checkpoint, so the sum would exceed the limit by a recovery.
fn largest<'a>(checkpoints: impl Iterator<Item = &'a Checkpoint>) -> usize {
    checkpoints.map(Checkpoint::memory).max().unwrap_or(0)
}

fn lost(error: &dyn std::fmt::Display) {
    log_line(&format!(
        "error: cannot store the supervisor's state in the service manager's fd store: {error}. If \
         the supervisor is killed, the clients lose their controllers"
    ));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{Change, packets};

    #[test]
    fn a_recovery_does_not_exceed_the_limit() {
        let mut left = Checkpoint::default();
        let body = [7; 4096];
        for number in 0..MAX_STORED * 5 / 8 / body.len() {
            let key = format!("item/{number}");
            let mut memory = Vec::new();
            let changes = [Change::Put { key: &key, body: &body, fds: &[] }];
            for packet in packets(&changes, &mut memory).unwrap() {
                left.take(&packet.bytes, Vec::new()).unwrap();
            }
        }
        // The process that recovers starts with a copy.
        let recovering = left.clone();
        let bytes = largest([&left, &recovering].into_iter());
        assert!((MAX_STORED / 2..MAX_STORED).contains(&bytes), "{bytes}");
    }
}
