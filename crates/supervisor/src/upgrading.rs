//! Upgrade of the server process: a new process is started and prepared, and the old one hands
//! over to it or resumes. The death of either process is seen at its exit.

use super::pending_exec::PendingExec;
use super::state::{HAND_OVER, LEAVE, PREPARE, REHEARSE, Supervisor};
use super::upgrade::{Step, Upgrade, tell_outcome};
use super::worker::{Left, Worker, how, is_killed};
use crate::protocol::{SUCCESSOR, to_supervisor, to_worker};
use shadowbell_process::notify;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Instant;

impl Supervisor {
    /// Starts the new server process of an upgrade.
    pub(super) fn begin_upgrade(&mut self, program: Option<PathBuf>, asker: Option<OwnedFd>) {
        let refusal = match &self.worker {
            _ if self.ended != 0 => Some("the server is to end"),
            _ if self.upgrade.is_some() => Some("another upgrade is running"),
            Some(worker) if worker.serves_since.is_some() => None,
            _ => Some("the server does not serve yet; try again in a moment"),
        };
        if let Some(why) = refusal {
            return tell_outcome(asker, Err(why));
        }
        let program = program.unwrap_or_else(|| self.program.clone());
        match self.start_successor(program.clone()) {
            Ok(mut upgrade) => {
                upgrade.asker = asker;
                let its = upgrade.its.take();
                self.upgrade = Some(upgrade);
                self.write_snapshot();
                if let (Some(upgrade), Some(its)) = (&self.upgrade, its) {
                    upgrade.new.say(to_worker::TAKE_OVER, "", Some(its.as_fd()));
                }
            }
            Err(error) => {
                let program = program.display();
                tell_outcome(asker, Err(&format!("cannot start {program}: {error}")));
            }
        }
    }

    pub(super) fn start_successor(&self, program: PathBuf) -> io::Result<Upgrade> {
        let (old_end, new_end) = UnixStream::pair()?;
        let new = Worker::start(&program, &self.arguments, SUCCESSOR)?;
        let began = Instant::now();
        Ok(Upgrade {
            new,
            transfer: Some(old_end),
            its: Some(new_end),
            step: Step::Preparing,
            began,
            until: began + PREPARE,
            asker: None,
            why: None,
            is_shared: false,
            left: None,
        })
    }

    /// Asks the old process to hand over: the new one is prepared and reads these state versions.
    pub(super) fn hand_over(&mut self, versions: &str) {
        let Some(upgrade) = &mut self.upgrade else { return };
        let (Some(worker), Some(transfer)) = (&self.worker, upgrade.transfer.take()) else {
            return;
        };
        upgrade.step = Step::HandingOver;
        // A process that does not support per-controller moves receives the request that every
        // release supports.
        let moves = worker.moves && upgrade.new.moves;
        let (letter, most) = match moves {
            true if worker.can_rest => (to_worker::REPLACE, REHEARSE),
            true => (to_worker::MOVE, REHEARSE),
            false => (to_worker::HAND_OVER, HAND_OVER),
        };
        upgrade.until = Instant::now() + most;
        worker.say(letter, versions, Some(transfer.as_fd()));
    }

    /// Handles the exit of a new process before it served.
    pub(super) fn new_has_ended(&mut self, status: ExitStatus) {
        let Some(upgrade) = &mut self.upgrade else { return };
        let why = upgrade.why.take().or_else(|| upgrade.new.why.take()).unwrap_or_else(|| {
            format!(
                "the new process {} {} before it could take over",
                upgrade.new.pid(),
                how(status)
            )
        });
        match upgrade.step {
            Step::Preparing => self.upgrade_failed(&why),
            // The old process decides: it may have committed a moment ago.
            Step::HandingOver => upgrade.why = Some(why),
            Step::Moving => {
                let what = format!(
                    "process {}, which serves a part of the controllers, {}",
                    upgrade.new.pid(),
                    how(status)
                );
                upgrade.why = Some(why);
                self.both_end(&what, is_killed(status));
            }
            Step::Committed => self.new_has_died(&why, status),
        }
    }

    /// Recovers after the exit of the new process, if the old one has committed.
    pub(super) fn new_has_died(&mut self, why: &str, status: ExitStatus) {
        let Some(Upgrade { mut new, asker, mut left, is_shared, .. }) = self.upgrade.take() else {
            return;
        };
        if let Some(mut old) = self.worker.take() {
            old.kill();
            left = left.or_else(|| old.leaves(None));
        }
        self.left = self.left_by_both(&mut new, left, is_shared);
        tell_outcome(asker, Err(why));
        let what = format!("process {}, which was to serve, {}", new.pid(), how(status));
        self.worker_has_died(&what, None, is_killed(status));
    }

    /// Ends both processes of a per-controller move after one of them has died or hangs (`what`).
    /// A third process recovers the controllers of both.
    pub(super) fn both_end(&mut self, what: &str, is_killed: bool) {
        if let Some(old) = &mut self.worker {
            old.kill();
        }
        if let Some(upgrade) = &mut self.upgrade {
            upgrade.new.kill();
        }
        // Messages that were sent after the last read. If the new process has reported that it
        // serves all controllers, it is the current process now, and its exit is handled as
        // usual.
        self.hear_workers();
        let Some(Upgrade { mut new, asker, why, left, is_shared, .. }) = self.upgrade.take() else {
            return;
        };
        let old = self.worker.take();
        let served = old.as_ref().and_then(Worker::has_served);
        let (mut old_left, mut old_why) = (left, None);
        if let Some(mut old) = old {
            old_why = old.why.take();
            let ended = old.ended();
            old_left = old_left.or_else(|| old.leaves(ended));
        }
        let why = old_why.or_else(|| new.why.take()).or(why);
        tell_outcome(asker, Err(why.as_deref().unwrap_or(what)));
        self.left = self.left_by_both(&mut new, old_left, is_shared);
        self.worker_has_died(what, served, is_killed);
    }

    /// Selects or merges the checkpoints of the new and the old process.
    fn left_by_both(
        &mut self,
        new: &mut Worker,
        old: Option<Left>,
        is_shared: bool,
    ) -> Option<Left> {
        if new.has_taken {
            let ended = new.ended();
            return new.leaves(ended);
        }
        if !is_shared {
            return old;
        }
        // The newer program reads the checkpoints of both.
        self.program.clone_from(&new.program);
        new.leaves_with(old)
    }

    /// Kills the new process and reports the failure. The old process continues.
    pub(super) fn upgrade_failed(&mut self, why: &str) {
        let Some(mut upgrade) = self.upgrade.take() else { return };
        // The reason that the new process sent is more specific than its exit status.
        while let Some(packet) = upgrade.new.hear(self.fd_store.as_mut()) {
            if packet.letter == to_supervisor::FAILED {
                upgrade.new.why = Some(packet.text());
            }
        }
        upgrade.new.kill();
        let reason = upgrade.why.take().or_else(|| upgrade.new.why.take());
        tell_outcome(upgrade.asker.take(), Err(reason.as_deref().unwrap_or(why)));
        if self.ended != 0 {
            self.tell_worker(to_worker::END);
        }
    }

    /// Makes the new process the current one: it serves.
    pub(super) fn upgraded(&mut self, status: &str) {
        let Some(mut upgrade) = self.upgrade.take() else { return };
        let old = self.worker.take();
        upgrade.new.serves_since = Some(Instant::now());
        upgrade.new.answers = !status.is_empty();
        notify::tell(&notify::status(status));
        self.program.clone_from(&upgrade.new.program);
        let text = format!(
            "process {} serves ({}), {} ms after it was started",
            upgrade.new.pid(),
            self.program.display(),
            upgrade.began.elapsed().as_millis()
        );
        self.worker = Some(upgrade.new);
        self.leaving.extend(old.map(|old| (old, Instant::now() + LEAVE)));
        let pending_exec = PendingExec::new(self.program.clone(), upgrade.asker, text);
        if let Some(before) = self.pending_exec.replace(pending_exec) {
            before.ends(None);
        }
        if self.ended != 0 {
            self.tell_worker(to_worker::END);
        }
    }
}
