//! An upgrade: another worker is started and prepared, and the one that serves hands over to it, or
//! goes on. Who dies on the way is seen by its end.

use super::renewal::Renewal;
use super::say::say;
use super::worker::{Left, Worker, how, is_killed};
use super::{HAND_OVER, Keeper, LEAVE, PREPARE};
use crate::keeper_link::{self, SUCCESSOR, answer, to_keeper, to_worker};
use crate::notify;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Step {
    /// The new one prepares.
    Preparing,
    /// The old one hands over, or not.
    HandingOver,
    /// The old one can not go on any more.
    Committed,
}

/// An upgrade that is under way.
pub(super) struct Upgrade {
    pub(super) new: Worker,
    /// The old worker's end of the socket between the two, until it is given to it.
    pub(super) transfer: Option<UnixStream>,
    /// The other end, until the new one has it.
    pub(super) its: Option<UnixStream>,
    pub(super) step: Step,
    pub(super) began: Instant,
    pub(super) until: Instant,
    /// Who waits for the outcome.
    pub(super) asker: Option<OwnedFd>,
    /// Why the new one was ended.
    pub(super) why: Option<String>,
    /// What the old one has left, if it has ended; until the new one has taken over.
    pub(super) left: Option<Left>,
}

impl Keeper {
    /// Starts the worker that is to take over.
    pub(super) fn begin_upgrade(&mut self, program: Option<PathBuf>, asker: Option<OwnedFd>) {
        let refusal = match &self.worker {
            _ if self.ended != 0 => Some("the server is to end"),
            _ if self.upgrade.is_some() => Some("another upgrade is under way"),
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
                self.write_record();
                if let (Some(upgrade), Some(its)) = (&self.upgrade, its) {
                    upgrade.new.say(to_worker::TAKE_OVER, "", Some(its.as_fd()));
                }
            }
            Err(error) => {
                let program = program.display();
                tell_outcome(asker, Err(&format!("{program} can not be started: {error}")));
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
            left: None,
        })
    }

    /// The new worker is prepared, and reads these state versions.
    pub(super) fn hand_over(&mut self, versions: &str) {
        let Some(upgrade) = &mut self.upgrade else { return };
        let (Some(worker), Some(transfer)) = (&self.worker, upgrade.transfer.take()) else {
            return;
        };
        upgrade.step = Step::HandingOver;
        upgrade.until = Instant::now() + HAND_OVER;
        worker.say(to_worker::HAND_OVER, versions, Some(transfer.as_fd()));
    }

    /// The new worker has ended before it served.
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
            // The old one says what it comes to: it may have committed a moment ago.
            Step::HandingOver => upgrade.why = Some(why),
            Step::Committed => self.new_has_died(&why, status),
        }
    }

    /// The new worker has ended, and the old one can not go on any more.
    pub(super) fn new_has_died(&mut self, why: &str, status: ExitStatus) {
        let Some(Upgrade { mut new, asker, mut left, .. }) = self.upgrade.take() else { return };
        if let Some(mut old) = self.worker.take() {
            old.kill();
            left = left.or_else(|| old.leaves(None));
        }
        self.left = if new.has_taken { new.leaves(Some(status)) } else { left };
        tell_outcome(asker, Err(why));
        let what = format!("process {}, which was to serve, {}", new.pid(), how(status));
        self.worker_has_died(&what, None, is_killed(status));
    }

    /// The worker goes on.
    pub(super) fn upgrade_failed(&mut self, why: &str) {
        let Some(mut upgrade) = self.upgrade.take() else { return };
        // What the new one says of itself is nearer to the reason than that it is gone.
        while let Some(packet) = upgrade.new.hear(self.journal.as_mut()) {
            if packet.letter == to_keeper::FAILED {
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

    /// The new worker serves.
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
        let renewal = Renewal::new(self.program.clone(), upgrade.asker, text);
        if let Some(before) = self.renewal.replace(renewal) {
            before.ends(None);
        }
        if self.ended != 0 {
            self.tell_worker(to_worker::END);
        }
    }
}

/// Tells who asked for an upgrade what came of it; the log, if nobody did.
pub(super) fn tell_outcome(asker: Option<OwnedFd>, outcome: Result<&str, &str>) {
    let (letter, text) = match outcome {
        Ok(text) => (answer::YES, text),
        Err(why) => {
            say(&format!("warning: no upgrade: {why}"));
            (answer::NO, why)
        }
    };
    if let Some(asker) = asker {
        let _ = keeper_link::send(asker, letter, text, None);
    }
}
