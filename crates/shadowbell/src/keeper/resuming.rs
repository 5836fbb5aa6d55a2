//! Adoption of a killed supervisor's state from the fd store, and the writes to the store for the
//! next supervisor: see [`journal`](super::journal).

use super::journal::{self, Found, Journal};
use super::opener;
use super::say::say;
use super::state::Keeper;
use crate::keeper_link::to_keeper;
use rustix::process::Signal;
use shadowbell_state::StateError;
use std::time::Instant;

impl Keeper {
    /// Adopts the state of a killed supervisor, if there is one. Returns true if it was adopted:
    /// a server process then exists or is going to be started.
    pub(super) fn resume(&mut self) -> bool {
        if !journal::is_wanted() {
            return false;
        }
        let found = match Journal::begin() {
            Ok((journal, found)) => {
                self.journal = Some(journal);
                found
            }
            Err(error) => {
                lost(&error);
                None
            }
        };
        let Some(found) = found else { return false };
        if let Err(why) = self.take_in(found) {
            (self.worker, self.upgrade, self.left, self.restart) = (None, None, None, None);
            self.leaving.clear();
            say(&format!(
                "error: the supervisor was killed, and its state in the fd store is unusable: \
                 {why}. The clients have lost their controllers"
            ));
            return false;
        }
        say("error: the supervisor was killed; this one continues from the fd store");
        true
    }

    fn take_in(&mut self, found: Found) -> Result<(), StateError> {
        let Found { record, changes } = found;
        self.restore(record.read()?, false)?;
        let new = self.upgrade.as_mut().map(|upgrade| &mut upgrade.new);
        let leaving = self.leaving.iter_mut().map(|(worker, _)| worker);
        let mut all: Vec<_> = self.worker.iter_mut().chain(new).chain(leaving).collect();
        for (pid, packet) in changes {
            if let Some(worker) = all.iter_mut().find(|worker| worker.pid() == pid) {
                worker.keep(&packet.body, packet.fds);
            }
        }
        // The service manager may have killed the processes already. Their queued messages and
        // their exit are handled as usual.
        all.iter().for_each(|worker| worker.process.signal(Signal::KILL));
        if self.worker.is_none() && self.restart.is_none() && self.upgrade.is_none() {
            self.restart = Some(Instant::now());
        }
        Ok(())
    }

    /// Writes a snapshot to the fd store, if there is one.
    pub(super) fn write_record(&mut self) {
        if self.journal.is_none() {
            return;
        }
        let opened = opener::changes();
        let Some(mut journal) = self.journal.take() else { return };
        let record = self.record(None).map_err(std::io::Error::other);
        match record.and_then(|record| journal.record(&record, opened)) {
            Ok(()) => self.journal = Some(journal),
            Err(error) => {
                lost(&error);
                journal.end();
            }
        }
    }

    /// Writes a snapshot after the message `letter` of a server process, if the message changed
    /// state that only a snapshot stores.
    pub(super) fn has_heard(&mut self, letter: u8) {
        let is_noted = matches!(
            letter,
            to_keeper::SERVING
                | to_keeper::TAKEN
                | to_keeper::PREPARED
                | to_keeper::MOVING
                | to_keeper::SHARED
                | to_keeper::HANDED_OVER
                | to_keeper::GOES_ON
                | to_keeper::FAILED
        );
        if is_noted || self.journal.as_ref().is_some_and(Journal::needs_record) {
            self.write_record();
        }
    }

    /// Writes a snapshot if one is due.
    pub(super) fn bring_journal_up_to_date(&mut self, now: Instant) {
        let Some(journal) = &self.journal else { return };
        if journal.needs_record() || journal.deadline().is_some_and(|due| due <= now) {
            self.write_record();
        }
    }
}

fn lost(error: &dyn std::fmt::Display) {
    say(&format!(
        "error: cannot store the supervisor's state in the service manager's fd store: {error}. If \
         the supervisor is killed, the clients lose their controllers"
    ));
}
