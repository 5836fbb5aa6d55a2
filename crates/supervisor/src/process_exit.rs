//! Exit of a server process: restart, recovery or end of the service.

use super::RELEASE;
use super::grants::GRANTS;
use super::log::log_line;
use super::restart_policy::Next;
use super::state::Supervisor;
use super::upgrade_progress::Step;
use super::worker::{Worker, how, is_fault, is_killed};
use crate::protocol::{RECOVER, START};
use shadowbell_process::{exit, notify};
use std::path::Path;
use std::time::{Duration, Instant};

impl Supervisor {
    pub(super) fn reap_children(&mut self) {
        self.leaving.retain_mut(|worker| worker.process.ended().is_none());
        let new = self.upgrade.as_mut().and_then(|upgrade| upgrade.new.ended());
        if let Some(status) = new {
            self.replacement_exited(status);
        }
        // When the service ends, further messages have no effect.
        let is_end = self.ended != 0 && self.upgrade.is_none();
        let ended = |worker: &mut Worker| match is_end {
            true => worker.process.ended(),
            false => worker.ended(),
        };
        let Some(status) = self.worker.as_mut().and_then(ended) else { return };
        let Some(mut worker) = self.worker.take() else { return };
        let pid = worker.pid();
        if self.upgrade.as_ref().is_some_and(|upgrade| upgrade.step == Step::Ending) {
            log_line(&format!("process {pid} was ended; another process recovers its clients"));
            let left = worker.take_checkpoint(None);
            return self.replace(left);
        }
        if self.upgrade.is_some() {
            self.upgrade_failed(&format!("the running process {pid} {}", how(status)));
        }
        if !worker.has_recovered()
            && let Some(left) = &mut self.left
        {
            left.death.last_by_fault = is_fault(status);
        }
        let served = if worker.has_recovered() { "served" } else { "was to serve" };
        let what = format!("process {pid}, which {served}, {}", how(status));
        if self.is_replaced(&mut worker, status) {
            return;
        }
        match status.code() {
            None => {
                // A process that was started without a checkpoint may have clients (of an export)
                // before it reports that it serves.
                if worker.has_recovered() || self.left.is_none() {
                    self.left = worker.take_checkpoint(Some(status));
                }
                let served = worker.serves_since.map(|since| since.elapsed());
                self.worker_has_died(&what, served, is_killed(status));
            }
            // The service ends with the server process if the process had served, if no earlier
            // process has died (`died`), or if the service was ending anyway (`ended`). The process
            // has logged its error, if there was one. A process that failed to start after a death
            // is instead replaced by another one, because I/O of the dead process may still hold
            // locks of a disk.
            Some(code)
                if worker.serves_since.is_some() || self.died.is_none() || self.ended != 0 =>
            {
                self.exit_code = Some(u8::try_from(code).unwrap_or(exit::FAILED));
            }
            Some(_) => {
                // The process has reported why it cannot recover, so the next one starts without
                // the checkpoint.
                self.left = None;
                self.worker_has_died(&what, None, false);
            }
        }
    }

    /// Schedules the start of the next server process after the death of the only one, or ends the
    /// service. `served` is the time of service, if the process served.
    pub(super) fn worker_has_died(
        &mut self,
        what: &str,
        served: Option<Duration>,
        is_killed: bool,
    ) {
        self.sockets.clear();
        if self.ended != 0 {
            log_line(&format!("error: {what} during shutdown"));
            self.exit_code = Some(exit::FAILED);
            return;
        }
        let now = Instant::now();
        self.died.get_or_insert(now);
        notify::send(&notify::status(
            "the server process has died; another one is about to recover",
        ));
        match self.deaths.add(now, served, is_killed, self.left.is_some()) {
            Next::Recover(wait) => {
                let ms = wait.as_millis();
                let when = if ms == 0 { String::new() } else { format!(" in {ms} ms") };
                log_line(&format!("error: {what}; another process recovers its clients{when}"));
                self.restart = Some(now + wait);
            }
            Next::Start(wait) => {
                self.left = None;
                log_line(&format!(
                    "error: {what}; it is restarted in {} ms without a checkpoint, so its clients \
                     have lost their controllers",
                    wait.as_millis()
                ));
                self.restart = Some(now + wait);
            }
            Next::GiveUp => {
                log_line(&format!(
                    "error: {what}; after {} deaths within a minute it is not restarted",
                    self.deaths.times.len()
                ));
                self.exit_code = Some(exit::FAILED);
            }
        }
    }

    /// Starts a server process of `program` after the end of the previous one. The new process
    /// recovers from the previous one's checkpoint, if there is one.
    pub(super) fn start_again(&mut self, program: &Path) {
        let how = if self.left.is_some() { RECOVER } else { START };
        GRANTS.lock().end_uses();
        self.release = Some(Instant::now() + RELEASE);
        match Worker::start(program, &self.arguments, how, None) {
            Ok(mut worker) => {
                if let Some(left) = &self.left {
                    worker.recovers_from(left, self.deaths.failed);
                }
                worker.program.clone_from(&self.program);
                self.worker = Some(worker);
                // The process must be in the fd store before the supervisor sends it anything.
                self.write_snapshot();
            }
            Err(error) => {
                let what = format!("cannot start {}: {error}", program.display());
                self.worker_has_died(&what, None, false);
            }
        }
    }
}
