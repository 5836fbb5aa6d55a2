//! Upgrade: planned replacement of the server process.
//!
//! While the old process serves, the next process is started, parses the command line, starts its
//! threads, and checks the old process's checkpoint: it decodes all of it and maps the memory of
//! all clients. Only then does the old process quiesce and release its locks. It is killed, and the
//! next process recovers from the checkpoint, as after a crash.
//!
//! If a client does not quiesce in time, the old process is killed, and the next one recovers after
//! the fence, as after a crash. So no client can refuse an upgrade.
//!
//! Until the old process is asked to quiesce, it continues after any failure. If the next process
//! fails after that (it crashes, for example), a process of the program that this supervisor runs
//! recovers from the same checkpoint, and the requester of the upgrade receives the reason.

use super::grants::{GRANTS, Permitted};
use super::log::log_line;
use super::pending_exec::PendingExec;
use super::state::Supervisor;
use super::upgrade_progress::{
    Replacement, STEP, Step, Upgrade, add_warnings, answer_to, send_outcome,
};
use super::worker::{Left, MESSAGES, Worker, how};
use crate::protocol::{RECOVER, answer, to_worker};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

/// Time limit for the quiesce, after which the old process is killed. Guests wait meanwhile. The
/// old process itself has a far shorter limit for its clients.
const QUIESCES: Duration = Duration::from_secs(2);
/// Time limit for recovery by the next process. It includes the wait of that process for its disks.
/// Guests wait meanwhile.
const RECOVERS: Duration = Duration::from_secs(30);
/// Path of this process's executable, valid even if the file was replaced.
const OWN_EXECUTABLE: &str = "/proc/self/exe";

impl Supervisor {
    /// Starts the next server process for an upgrade, or only for a check of one (`is_check`).
    /// `permitted`: permissions and configuration of the next process. They take effect when the
    /// running process has ended.
    pub(super) fn begin_upgrade(
        &mut self,
        program: Option<PathBuf>,
        asker: Option<OwnedFd>,
        is_check: bool,
        permitted: Option<Permitted>,
    ) {
        let refusal = match &self.worker {
            _ if self.ended != 0 => Some("the server is to end"),
            _ if self.upgrade.is_some() => Some("another upgrade is running"),
            Some(worker) if worker.serves_since.is_some() => None,
            _ => Some("the server does not serve yet; try again in a moment"),
        };
        if let Some(why) = refusal {
            return match asker {
                // The refusal is not logged, because a server process may repeat the request
                // without end.
                Some(asker) => answer_to(asker, answer::NO, why),
                None => send_outcome(None, Err(why)),
            };
        }
        let program = program.unwrap_or_else(|| self.program.clone());
        match Worker::start(&program, &self.arguments, RECOVER, permitted.as_ref()) {
            Ok(new) => {
                self.upgrade = Some(Upgrade { asker, is_check, ..Upgrade::new(new, permitted) });
                self.write_snapshot();
            }
            Err(error) => {
                let program = program.display();
                send_outcome(asker, Err(&format!("cannot start {program}: {error}")));
            }
        }
    }

    /// Sends the running process's checkpoint to the next process, for a check. The next process
    /// has started its threads.
    pub(super) fn check_checkpoint(&mut self) {
        let (Some(upgrade), Some(worker)) = (&mut self.upgrade, &self.worker) else { return };
        let Some(checked) = worker.copy_of_checkpoint() else {
            // The log of the running process has the reason.
            if upgrade.is_check {
                return self.upgrade_failed(
                    "the supervisor has no complete checkpoint of the running process, so an \
                     upgrade would be refused; its log has the reason",
                );
            }
            return self.quiesce();
        };
        upgrade.step = Step::Checking;
        upgrade.until = Instant::now() + STEP;
        upgrade.new.send(to_worker::CHECK, "", None);
        upgrade.new.send_checkpoint(&checked);
    }

    /// Handles the result of the check: `lost` names the clients that cannot be recovered, one per
    /// line.
    pub(super) fn checked(&mut self, lost: &str) {
        let Some(upgrade) = &mut self.upgrade else { return };
        add_warnings(&mut upgrade.warnings, lost);
        if !upgrade.is_check {
            return self.quiesce();
        }
        let Some(Upgrade { new, asker, warnings, .. }) = self.upgrade.take() else { return };
        self.kill(new);
        let (code, text) = match &warnings[..] {
            [] => (answer::YES, "the next process can recover all clients".to_owned()),
            warnings => (answer::NO, warnings.join("\n")),
        };
        asker.into_iter().for_each(|asker| answer_to(asker, code, &text));
        if self.ended != 0 {
            self.send_to_worker(to_worker::END);
        }
    }

    /// Lets the running process quiesce, since the next one can recover from its checkpoint.
    fn quiesce(&mut self) {
        let Some(upgrade) = &mut self.upgrade else { return };
        if matches!(upgrade.step, Step::Quiescing | Step::Ending) {
            return;
        }
        upgrade.step = Step::Quiescing;
        upgrade.until = Instant::now() + QUIESCES;
        self.send_to_worker(to_worker::QUIESCE);
    }

    /// Ends the old server process after it has answered the request to quiesce. `unfinished` names
    /// the clients that did not quiesce, one per line. If it is empty, no request is in flight at a
    /// disk, and the locks are released.
    pub(super) fn has_quiesced(&mut self, unfinished: &str) {
        if !unfinished.is_empty() {
            return self.end_old(unfinished);
        }
        let Some(mut old) = self.worker.take() else { return };
        let mut left = old.take_checkpoint(None);
        left.iter_mut().for_each(|left| left.death.is_quiesced = true);
        let pid = old.pid();
        log_line(&format!("process {pid} has quiesced; another process recovers its clients"));
        // The next process need not wait for the exit of the old one, because the old one has
        // released its locks.
        self.kill(old);
        self.replace(left);
    }

    /// Kills the old process, some of whose clients did not quiesce. `why`: the reasons, one per
    /// line. `reap_children` handles its exit, and before that the checkpoint changes that the
    /// process has sent.
    fn end_old(&mut self, why: &str) {
        if let Some(upgrade) = &mut self.upgrade {
            why.lines().for_each(|line| log_line(&format!("warning: upgrade: {line}")));
            add_warnings(&mut upgrade.warnings, why);
            upgrade.step = Step::Ending;
            // The exit of a killed process may take longer: `upgrade_is_late` then extends this
            // time.
            upgrade.until = Instant::now() + STEP;
        }
        if let Some(worker) = &self.worker {
            worker.kill();
        }
    }

    /// Lets the next process recover the clients of the old process. The old process has ended or
    /// is ending.
    pub(super) fn replace(&mut self, left: Option<Left>) {
        self.sockets.clear();
        self.died = Some(Instant::now());
        self.left = left;
        let Some(upgrade) = self.upgrade.take() else {
            return self.start_again(Path::new(OWN_EXECUTABLE));
        };
        let Upgrade { mut new, began, asker, why, warnings, permitted, .. } = upgrade;
        let replacement = Replacement {
            program: new.program.clone(),
            asker,
            began,
            until: Instant::now() + RECOVERS,
            warnings,
        };
        if let Some(why) = why {
            return self.fall_back(replacement, &why);
        }
        let Some(left) = &self.left else {
            self.kill(new);
            return self
                .fall_back(replacement, "the checkpoint of the running process is incomplete");
        };
        permitted.into_iter().for_each(|permitted| GRANTS.lock().permit(permitted));
        new.recovers_from(left, self.deaths.failed);
        self.worker = Some(new);
        self.replacement = Some(replacement);
        // The snapshot must be written before `run` sends the checkpoint to the new process.
        self.write_snapshot();
    }

    /// Handles the exit of the next process before the old one has quiesced.
    pub(super) fn replacement_exited(&mut self, status: ExitStatus) {
        let Some(upgrade) = &mut self.upgrade else { return };
        let pid = upgrade.new.pid();
        let said = upgrade.new.why.take();
        let why = upgrade.why.get_or_insert_with(|| {
            said.unwrap_or_else(|| {
                format!("the new process {pid} {} before it could recover", how(status))
            })
        });
        // After the quiesce has begun, the failure is handled elsewhere: the old process resumes,
        // or a process of the previous program recovers.
        if !matches!(upgrade.step, Step::Quiescing | Step::Ending) {
            let why = why.clone();
            self.upgrade_failed(&why);
        }
    }

    /// Handles an exceeded time limit of an upgrade.
    pub(super) fn upgrade_is_late(&mut self, now: Instant) {
        let Some(upgrade) = self.upgrade.as_mut().filter(|upgrade| upgrade.until <= now) else {
            return;
        };
        let limit = STEP.as_secs();
        match upgrade.step {
            Step::Starting => {
                self.upgrade_failed(&format!("the new process was not ready within {limit} s"));
            }
            Step::Checking => self.upgrade_failed(&format!(
                "the new process did not check the checkpoint within {limit} s"
            )),
            Step::Quiescing => {
                let limit = QUIESCES.as_secs();
                self.end_old(&format!(
                    "the running process did not quiesce within {limit} s, and was killed"
                ));
            }
            Step::Ending => upgrade.until = now + STEP,
        }
    }

    /// Kills the new process and reports the failure. The old process continues.
    pub(super) fn upgrade_failed(&mut self, why: &str) {
        let Some(mut upgrade) = self.upgrade.take() else { return };
        // The reason that the new process sent is more specific than its exit status.
        let mut receive = || upgrade.new.receive(self.fd_store.as_mut());
        (0..MESSAGES).map_while(|_| receive()).for_each(drop);
        let reason = upgrade.new.why.take().or(upgrade.why);
        self.kill(upgrade.new);
        send_outcome(upgrade.asker, Err(reason.as_deref().unwrap_or(why)));
        if self.ended != 0 {
            self.send_to_worker(to_worker::END);
        }
    }

    /// Sets the new program for later restarts. The new process has recovered and writes its own
    /// checkpoint, and the old program may be unable to read this checkpoint.
    pub(super) fn replacement_recovered(&mut self) {
        if let Some(replacement) = &self.replacement {
            self.program.clone_from(&replacement.program);
        }
    }

    /// Ends an upgrade when the new process serves. Schedules the supervisor's own exec of the new
    /// program, after which the requester receives the result.
    pub(super) fn replacement_serves(&mut self) {
        if self.ended != 0 {
            // The signal to end the service came while no server process could receive `END`.
            self.send_to_worker(to_worker::END);
        }
        let Some(replacement) = self.replacement.take() else { return };
        let Some(worker) = &self.worker else { return };
        let mut text = format!(
            "process {} serves ({}), {} ms after it was started",
            worker.pid(),
            self.program.display(),
            replacement.began.elapsed().as_millis()
        );
        for warning in &replacement.warnings {
            text += &format!("\nwarning: {warning}");
        }
        let pending_exec = PendingExec::new(self.program.clone(), replacement.asker, text);
        if let Some(before) = self.pending_exec.replace(pending_exec) {
            before.ends(None);
        }
    }

    /// Falls back to the old program if a replacement has ended before it recovered.
    ///
    /// Returns true if the ended process was a replacement and the old program was started.
    pub(super) fn is_replaced(&mut self, worker: &mut Worker, status: ExitStatus) -> bool {
        if worker.has_recovered() || self.ended != 0 {
            return false;
        }
        let Some(replacement) = self.replacement.take() else { return false };
        let why = worker.why.take();
        let why = why.unwrap_or_else(|| format!("process {} {}", worker.pid(), how(status)));
        self.fall_back(replacement, &why);
        true
    }

    /// Reports the failed upgrade and recovers with the program that served before.
    fn fall_back(&mut self, replacement: Replacement, why: &str) {
        let why = format!("{why}; the previous program recovers the clients");
        send_outcome(replacement.asker, Err(&why));
        self.start_again(Path::new(OWN_EXECUTABLE));
    }

    /// Kills a replacement that has not recovered within its time limit.
    pub(super) fn replacement_is_late(&mut self) {
        let Some(replacement) = &mut self.replacement else { return };
        replacement.until += RECOVERS;
        // A replacement that has sent `RECOVERED` is not killed: the old checkpoint is obsolete, so
        // the old program could not recover.
        let Some(worker) = self.worker.as_mut().filter(|worker| !worker.has_recovered()) else {
            return;
        };
        worker.why.get_or_insert_with(|| {
            let limit = RECOVERS.as_secs();
            format!("the new process did not recover within {limit} s")
        });
        // `reap_children` handles the exit, and falls back to the old program.
        worker.kill();
    }
}
