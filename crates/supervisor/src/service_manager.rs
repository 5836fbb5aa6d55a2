//! Requests of the service manager: configuration reload and watchdog.

use super::command_line;
use super::grants::{GRANTS, Permitted};
use super::log::log_line;
use super::state::{Reading, Supervisor};
use super::upgrade_progress::Step;
use super::watchdog::Due;
use super::worker::Worker;
use crate::checkpoint::memory_of;
use crate::protocol::to_worker;
use shadowbell_config::config_file;
use shadowbell_process::{exit, notify};
use std::os::fd::AsFd;
use std::time::Instant;

impl Supervisor {
    /// Records a reload request (SIGHUP).
    pub(super) fn reload_requested(&mut self) {
        if self.ended == 0 && self.reading.replace(Reading::Wanted).is_none() {
            notify::send(&notify::reloading());
        }
    }

    /// Reads the configuration file. Returns its text, and the permissions unless it is invalid.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn read_config(
        &self,
    ) -> anyhow::Result<(Option<String>, anyhow::Result<Permitted>)> {
        let file = command_line::config_file(&self.arguments);
        let config = file.map(|file| config_file::read_text(&file)).transpose()?;
        let permissions = (self.permit)(&self.arguments, config.as_deref());
        let text = config.clone();
        Ok((text, permissions.map(|permissions| Permitted { permissions, config })))
    }

    /// Reads the configuration file and permits what it names, in addition to what was permitted
    /// before. Returns its text.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn install_config(&self) -> anyhow::Result<Option<String>> {
        let (text, permitted) = self.read_config()?;
        // The server process reports that the file is invalid.
        let _ = permitted.map(|permitted| GRANTS.lock().permit(permitted));
        Ok(text)
    }

    /// Sends a pending reload request to the server process, if one serves and no upgrade runs.
    /// If a server process ends before it has reloaded, the next one receives the request.
    pub(super) fn request_reload(&mut self) {
        let (Some(reading), None) = (self.reading, &self.upgrade) else { return };
        let Some(worker) = self.worker.as_ref().filter(|worker| worker.serves_since.is_some())
        else {
            return;
        };
        if reading == Reading::Told(worker.pid()) {
            return;
        }
        let pid = worker.pid();
        let (text, why) = match self.install_config() {
            Ok(text) => (text.and_then(|text| memory_of(text.as_bytes()).ok()), String::new()),
            Err(error) => (None, exit::line(&error)),
        };
        let text = text.as_ref().map(AsFd::as_fd);
        if let Some(worker) = &self.worker {
            worker.send(to_worker::READ, &why, text);
        }
        self.reading = Some(Reading::Told(pid));
    }

    /// Reports the result of a reload to the service manager.
    pub(super) fn reload_done(&mut self, outcome: &str) {
        // A signal that came during the reload has set `Reading::Wanted` again, which stays.
        let told = |reading: &mut Reading| matches!(reading, Reading::Told(_));
        if self.reading.take_if(told).is_some() {
            notify::send(&notify::ready(outcome));
        }
    }

    /// Feeds the service manager's watchdog, and aborts a server process that hangs. The end of the
    /// service has a time limit of its own, so a server process that ends is not checked.
    pub(super) fn run_watchdog(&mut self, now: Instant) {
        let Some(watchdog) = &mut self.watchdog else { return };
        let is_quiescing =
            self.upgrade.as_ref().is_some_and(|upgrade| upgrade.step == Step::Quiescing);
        let worker = self.worker.as_ref();
        let is_checked = self.ended == 0 && !is_quiescing;
        let worker = worker.filter(|worker| worker.serves_since.is_some() && is_checked);
        match watchdog.due(now, worker.map(Worker::pid)) {
            Due::Nothing => return,
            Due::Check => return self.send_to_worker(to_worker::LIVENESS_CHECK),
            Due::Alive => {}
            Due::Hangs => {
                if let Some(worker) = worker {
                    let pid = worker.pid();
                    log_line(&format!(
                        "error: process {pid} hangs: a thread failed its liveness check; the \
                         process is aborted"
                    ));
                    worker.abort();
                }
            }
            Due::Lost => return log_line("error: the hung process did not end after SIGABRT"),
        }
        notify::send(notify::WATCHDOG);
    }

    /// Feeds the watchdog after the server process's answer to a liveness check.
    pub(super) fn is_alive(&mut self, status: &str) {
        let pid = self.worker.as_ref().map(Worker::pid);
        if let (Some(watchdog), Some(pid)) = (&mut self.watchdog, pid)
            && watchdog.answered(pid)
        {
            notify::send(&format!("{}\n{}", notify::WATCHDOG, notify::status(status)));
        }
    }
}
