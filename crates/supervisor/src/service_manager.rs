//! Requests of the service manager: configuration reload and watchdog.

use super::config_read::{Config, ConfigRead, HUNG, MAX_READS, Purpose, read_config};
use super::grants::GRANTS;
use super::log::log_line;
use super::state::{Reading, Supervisor};
use super::upgrade_progress::{Step, send_outcome};
use super::watchdog::Due;
use super::worker::Worker;
use crate::checkpoint::memory_of;
use crate::protocol::to_worker;
use anyhow::anyhow;
use shadowbell_process::{exit, notify};
use std::os::fd::AsFd;
use std::sync::mpsc::TryRecvError;
use std::time::Instant;

impl Supervisor {
    /// Records a reload request (SIGHUP).
    pub(super) fn reload_requested(&mut self) {
        if self.ended == 0 && self.reading.replace(Reading::Wanted).is_none() {
            notify::send(&notify::reloading());
        }
        for read in &mut self.config_reads {
            if let Some(Purpose::Reload { is_outdated }) = &mut read.purpose {
                *is_outdated = true;
            }
        }
    }

    /// Reads the configuration file at the start, and permits the paths and addresses that it
    /// names. Blocks, because no server process runs yet.
    pub(super) fn install_config(&self) {
        // An invalid file is ignored here, because the server process reports the error.
        let permitted = read_config(&self.arguments, self.permit).and_then(|(_, its)| its);
        permitted.into_iter().for_each(|permitted| GRANTS.lock().permit(permitted));
    }

    /// Reads the configuration file for a pending reload request, if a server process serves and no
    /// upgrade runs. If a server process ends before it has reloaded, the next one receives the
    /// request.
    pub(super) fn request_reload(&mut self) {
        let told = self.reloads().map(|pid| Some(Reading::Told(pid)));
        let is_read = |read: &ConfigRead| matches!(read.purpose, Some(Purpose::Reload { .. }));
        let is_wanted = self.reading.is_some() && told.is_some_and(|told| told != self.reading);
        if is_wanted && !self.config_reads.iter().any(is_read) {
            self.read_config_for(Purpose::Reload { is_outdated: false });
        }
    }

    /// Process id of the server process, if it can reload the configuration.
    fn reloads(&self) -> Option<u32> {
        let worker = self.worker.as_ref().filter(|worker| worker.serves_since.is_some())?;
        self.upgrade.is_none().then(|| worker.pid())
    }

    /// Starts to read the configuration file.
    pub(super) fn read_config_for(&mut self, purpose: Purpose) {
        let begun = match self.config_reads.len() {
            MAX_READS.. => Err(anyhow!(HUNG)),
            _ => ConfigRead::begin(&self.arguments, self.permit),
        };
        match begun {
            Ok(mut read) => {
                read.purpose = Some(purpose);
                self.config_reads.push(read);
            }
            Err(why) => self.has_read_config(purpose, Err(why)),
        }
    }

    /// Handles reads of the configuration file that have ended or have exceeded their time limit.
    pub(super) fn take_configs(&mut self, now: Instant) {
        for mut read in std::mem::take(&mut self.config_reads) {
            let outcome = match read.result.try_recv() {
                Ok(outcome) => outcome,
                Err(TryRecvError::Disconnected) => Err(anyhow!("its parser has failed")),
                Err(TryRecvError::Empty) => {
                    let is_late = read.until <= now;
                    let late = read.purpose.take_if(|_| is_late);
                    self.config_reads.push(read);
                    late.into_iter()
                        .for_each(|late| self.has_read_config(late, Err(anyhow!(HUNG))));
                    continue;
                }
            };
            if let Some(purpose) = read.purpose {
                self.has_read_config(purpose, outcome);
            }
        }
    }

    fn has_read_config(&mut self, purpose: Purpose, outcome: anyhow::Result<Config>) {
        match purpose {
            // The request is still pending, so `request_reload` begins another read.
            Purpose::Reload { is_outdated: true } => {}
            Purpose::Reload { is_outdated: false } => self.apply_config(outcome),
            Purpose::Upgrade { program, asker, is_check } => {
                match outcome.and_then(|(_, permitted)| permitted) {
                    Ok(permitted) => self.begin_upgrade(program, asker, is_check, Some(permitted)),
                    Err(why) => send_outcome(asker, Err(&exit::line(&why))),
                }
            }
        }
    }

    /// Adds the permissions of a configuration, and sends the configuration to the server process.
    /// If no server process can reload it, the file is read again later.
    fn apply_config(&mut self, outcome: anyhow::Result<Config>) {
        let Some(pid) = self.reloads() else { return };
        let (text, why) = match outcome {
            Ok((text, permitted)) => {
                permitted.into_iter().for_each(|permitted| GRANTS.lock().permit(permitted));
                (text.and_then(|text| memory_of(text.as_bytes()).ok()), String::new())
            }
            Err(error) => (None, exit::line(&error)),
        };
        if let Some(worker) = &self.worker {
            worker.send(to_worker::READ, &why, text.as_ref().map(AsFd::as_fd));
        }
        self.reading = Some(Reading::Told(pid));
    }

    /// Reports the result of a reload to the service manager.
    pub(super) fn reload_done(&mut self, outcome: &str) {
        // A SIGHUP during the reload has set `Reading::Wanted` again, so another reload is pending.
        let told = |reading: &mut Reading| matches!(reading, Reading::Told(_));
        if self.reading.take_if(told).is_some() {
            notify::send(&notify::ready(outcome));
        }
    }

    /// Notifies the service manager's watchdog, and aborts a server process that hangs. A server
    /// process is not checked while the service ends, which has a time limit of its own.
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

    /// Notifies the service manager's watchdog after the server process's answer to a liveness
    /// check.
    pub(super) fn is_alive(&mut self, status: &str) {
        let pid = self.worker.as_ref().map(Worker::pid);
        if let (Some(watchdog), Some(pid)) = (&mut self.watchdog, pid)
            && watchdog.answered(pid)
        {
            notify::send(&format!("{}\n{}", notify::WATCHDOG, notify::status(status)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::permissions::Permissions;
    use crate::process::Process;
    use crate::protocol;
    use parking_lot::Mutex;
    use std::ffi::OsString;
    use std::io::Read;
    use std::path::Path;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Lock that makes reads of the configuration slow.
    static SLOW: Mutex<()> = Mutex::new(());
    /// Number of reads that have begun.
    static BEGUN: AtomicUsize = AtomicUsize::new(0);

    fn permit(_: &[OsString], _: Option<&str>) -> anyhow::Result<Permissions> {
        BEGUN.fetch_add(1, Ordering::Relaxed);
        drop(SLOW.lock());
        Ok(Permissions::default())
    }

    #[test]
    fn requests_during_a_read_lead_to_one_further_read() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("vms.toml");
        std::fs::write(&file, "old").unwrap();
        let arguments =
            ["shadowbell".into(), "serve".into(), "--config".into(), file.clone().into()];
        let mut supervisor = Supervisor::new(arguments.to_vec(), permit).unwrap();
        let (ours, theirs) = protocol::pair().unwrap();
        let process = Process::from_saved(rustix::process::getpid(), None, false);
        let mut worker = Worker::new(process, Some(ours), Path::new(""));
        worker.serves_since = Some(Instant::now());
        supervisor.worker = Some(worker);
        let slow = SLOW.lock();
        for request in 0..6 {
            supervisor.reload_requested();
            supervisor.take_configs(Instant::now());
            supervisor.request_reload();
            assert_eq!(supervisor.config_reads.len(), 1, "{request}");
        }
        while BEGUN.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        // The first read has read the file, so only a further read gets the new content.
        std::fs::write(&file, "new").unwrap();
        drop(slow);
        let packet = loop {
            let mut ready = &supervisor.config_reads[0].ready;
            // The end of the pipe shows that the read has ended.
            assert_eq!(ready.read(&mut [0]).unwrap(), 0);
            supervisor.take_configs(Instant::now());
            supervisor.request_reload();
            if let Ok(Some(packet)) = protocol::receive(&theirs, true) {
                break packet;
            }
        };
        assert_eq!((packet.code, packet.text()), (to_worker::READ, String::new()));
        let text = crate::checkpoint::content_of(packet.fd().unwrap()).unwrap();
        assert_eq!((&text[..], BEGUN.load(Ordering::Relaxed)), (&b"new"[..], 2));
        supervisor.reload_done("reloaded");
        supervisor.request_reload();
        assert!(supervisor.config_reads.is_empty() && supervisor.reading.is_none());
    }
}
