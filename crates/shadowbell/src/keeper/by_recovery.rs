//! An upgrade of a server with disks that can not be handed over: its worker comes to rest for good
//! and is ended, and one of the new program goes on as after a death.
//!
//! The new program has shown before that it begins, and that it would serve the same. If it can not
//! go on all the same (it can not open a disk, say), one of the program that this keeper is goes on
//! with what the first one has left, and who asked hears why.

use super::renewal::Renewal;
use super::replacement::Replacement;
use super::say::say;
use super::state::Keeper;
use super::upgrade::{Step, tell_outcome};
use super::worker::{Worker, how};
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

/// How long the new program may take to go on. It waits for disks, and guests wait for it.
const GOES_ON: Duration = Duration::from_secs(30);
/// The program of this process, whatever is at its path by now.
const OURSELVES: &str = "/proc/self/exe";

impl Keeper {
    /// The worker rests for good, so that another one goes on for it.
    pub(super) fn worker_rests(&mut self) {
        let is_asked =
            self.upgrade.as_ref().is_some_and(|upgrade| upgrade.step == Step::HandingOver);
        if !is_asked || self.ended != 0 {
            // It goes on when nobody ends it.
            return;
        }
        let left = self.worker.as_mut().and_then(|worker| worker.leaves(None));
        let (Some(left), Some(mut upgrade), Some(mut worker)) =
            (left, self.upgrade.take(), self.worker.take())
        else {
            return self.upgrade_failed("what the next process needs could not be kept");
        };
        upgrade.new.kill();
        let pid = worker.pid();
        worker.kill();
        self.left = Some(left);
        self.sockets.clear();
        self.died = Some(Instant::now());
        say(&format!("process {pid} rests, and another one goes on with its clients"));
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

    /// Starts a worker of `program` with what the last one has left.
    fn start_instead(&mut self, program: &Path) {
        let Some(left) = &self.left else { return };
        match Worker::start_to_recover(program, &self.arguments, left) {
            Ok(worker) => {
                self.worker = Some(worker);
                self.write_record();
            }
            Err(error) => {
                let why = format!("{} can not be started: {error}", program.display());
                match self.replacement.take() {
                    Some(replacement) => self.go_back(replacement, &why),
                    None => self.worker_has_died(&why, None, false),
                }
            }
        }
    }

    /// The new worker goes on, and what it has left counts: of a program that reads that.
    pub(super) fn replacement_has_taken(&mut self) {
        if let Some(replacement) = &self.replacement {
            self.program.clone_from(&replacement.program);
        }
    }

    /// It serves.
    pub(super) fn replacement_serves(&mut self) {
        let Some(replacement) = self.replacement.take() else { return };
        let Some(worker) = &self.worker else { return };
        let text = format!(
            "process {} serves ({}), {} ms after the upgrade began; its disks were opened anew",
            worker.pid(),
            self.program.display(),
            replacement.began.elapsed().as_millis()
        );
        let renewal = Renewal::new(self.program.clone(), replacement.asker, text);
        if let Some(before) = self.renewal.replace(renewal) {
            before.ends(None);
        }
    }

    /// A worker has ended before it went on. Whether it was such a one, and another one is started.
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

    /// The program that served before goes on.
    fn go_back(&mut self, replacement: Replacement, why: &str) {
        let why = format!("{why}; the program that served before goes on with the clients");
        tell_outcome(replacement.asker, Err(&why));
        self.start_instead(Path::new(OURSELVES));
        if let Some(worker) = &mut self.worker {
            worker.program.clone_from(&self.program);
        }
    }

    /// It has had all the time that there is.
    pub(super) fn replacement_is_late(&mut self) {
        let Some(replacement) = &mut self.replacement else { return };
        replacement.until += GOES_ON;
        // One that has taken it is the only one that can go on.
        let Some(worker) = self.worker.as_mut().filter(|worker| !worker.has_begun()) else {
            return;
        };
        worker.why.get_or_insert_with(|| {
            let limit = GOES_ON.as_secs();
            format!("the new process did not go on within {limit} s")
        });
        // Its end is seen elsewhere.
        worker.kill();
    }
}
