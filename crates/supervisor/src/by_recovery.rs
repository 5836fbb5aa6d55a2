//! Upgrade of a server whose disks cannot be handed over to another process: the old server
//! process quiesces for good and is killed, and a process of the new program recovers as after a
//! crash.
//!
//! Before the kill, the new program has shown that it starts and accepts the same configuration.
//! If it cannot recover all the same (it cannot open a disk, for example), a process of the
//! program that this supervisor runs recovers from the same checkpoint, and the requester of the
//! upgrade receives the reason.

use super::log::log_line;
use super::pending_exec::PendingExec;
use super::state::Replacement;
use super::state::Supervisor;
use super::upgrade::{Step, tell_outcome};
use super::worker::{Worker, how};
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

/// Time limit for recovery by the new program. Includes its wait for disks; guests wait
/// meanwhile.
const GOES_ON: Duration = Duration::from_secs(30);
/// Executable of this process, even if the file at its path was replaced.
const OURSELVES: &str = "/proc/self/exe";

impl Supervisor {
    /// Kills the quiesced server process and starts its replacement from the checkpoint.
    pub(super) fn worker_rests(&mut self) {
        let is_asked =
            self.upgrade.as_ref().is_some_and(|upgrade| upgrade.step == Step::HandingOver);
        if !is_asked || self.ended != 0 {
            // A server process that is not killed after `RESTS` resumes by itself.
            return;
        }
        let left = self.worker.as_mut().and_then(|worker| worker.leaves(None));
        let (Some(left), Some(mut upgrade), Some(mut worker)) =
            (left, self.upgrade.take(), self.worker.take())
        else {
            return self.upgrade_failed("the checkpoint for the next process is incomplete");
        };
        upgrade.new.kill();
        let pid = worker.pid();
        worker.kill();
        self.left = Some(left);
        self.sockets.clear();
        self.died = Some(Instant::now());
        log_line(&format!("process {pid} has quiesced; another process recovers its clients"));
        let replacement = Replacement {
            program: upgrade.new.program.clone(),
            asker: upgrade.asker.take(),
            began: upgrade.began,
            until: Instant::now() + GOES_ON,
        };
        let program = replacement.program.clone();
        self.replacement = Some(replacement);
        self.start_instead(&program);
    }

    /// Starts a server process of `program` from the last one's checkpoint.
    fn start_instead(&mut self, program: &Path) {
        let Some(left) = &self.left else { return };
        match Worker::start_to_recover(program, &self.arguments, left) {
            Ok(worker) => {
                self.worker = Some(worker);
                self.write_snapshot();
            }
            Err(error) => {
                let why = format!("cannot start {}: {error}", program.display());
                match self.replacement.take() {
                    Some(replacement) => self.go_back(replacement, &why),
                    None => self.worker_has_died(&why, None, false),
                }
            }
        }
    }

    /// Makes the new program the one for later restarts: the new process has recovered, so only a
    /// program that reads its checkpoint can continue.
    pub(super) fn replacement_has_taken(&mut self) {
        if let Some(replacement) = &self.replacement {
            self.program.clone_from(&replacement.program);
        }
    }

    /// Reports the upgrade as done and schedules the supervisor's own exec of the new program.
    pub(super) fn replacement_serves(&mut self) {
        let Some(replacement) = self.replacement.take() else { return };
        let Some(worker) = &self.worker else { return };
        let text = format!(
            "process {} serves ({}), {} ms after the upgrade began; its disks were reopened",
            worker.pid(),
            self.program.display(),
            replacement.began.elapsed().as_millis()
        );
        let pending_exec = PendingExec::new(self.program.clone(), replacement.asker, text);
        if let Some(before) = self.pending_exec.replace(pending_exec) {
            before.ends(None);
        }
    }

    /// Falls back to the old program if a replacement has ended before it recovered.
    ///
    /// Returns true if the ended process was a replacement and the old program was started.
    pub(super) fn is_replaced(&mut self, worker: &mut Worker, status: ExitStatus) -> bool {
        if worker.has_begun() || self.ended != 0 {
            return false;
        }
        let Some(replacement) = self.replacement.take() else { return false };
        let why = worker.why.take();
        let why = why.unwrap_or_else(|| format!("process {} {}", worker.pid(), how(status)));
        self.go_back(replacement, &why);
        true
    }

    /// Reports the failed upgrade and recovers with the program that served before.
    fn go_back(&mut self, replacement: Replacement, why: &str) {
        let why = format!("{why}; the previous program recovers the clients");
        tell_outcome(replacement.asker, Err(&why));
        self.start_instead(Path::new(OURSELVES));
        if let Some(worker) = &mut self.worker {
            worker.program.clone_from(&self.program);
        }
    }

    /// Kills a replacement that has not recovered within its time limit.
    pub(super) fn replacement_is_late(&mut self) {
        let Some(replacement) = &mut self.replacement else { return };
        replacement.until += GOES_ON;
        // After `TAKEN` only the replacement's own checkpoint is valid, so it is not killed.
        let Some(worker) = self.worker.as_mut().filter(|worker| !worker.has_begun()) else {
            return;
        };
        worker.why.get_or_insert_with(|| {
            let limit = GOES_ON.as_secs();
            format!("the new process did not recover within {limit} s")
        });
        // `look_for_ends` sees the exit and falls back.
        worker.kill();
    }
}
