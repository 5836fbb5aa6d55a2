//! What a queue pair does when its controller's word says that there is something to look at: the
//! ages of its commands, a reset that somebody made, the end. See [`recovery`](crate::recovery).

use super::{Completion, QueuePair};
use crate::attach::{connect, create_at};
use crate::error::QueueError;
use crate::recovery::count;
use crate::shared::{Condition, Control, Shared};
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::Abort;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A word that there never is.
const NEVER: u32 = u32::MAX;
/// How often a queue that can not be created again has its controller reset.
const TRIES: u32 = 6;
/// The most commands that are aborted at a time, where the controller takes as many (ACL).
const ABORTS: usize = 4;

impl QueuePair {
    /// Looks at what is new. When this returns with success, the queue works.
    ///
    /// # Errors
    /// [`QueueError`], if it does not, and never will.
    #[cold]
    pub(super) fn attend(&mut self) -> Result<(), QueueError> {
        let shared = Arc::clone(&self.shared);
        let mut tries = 0;
        let mut why = String::new();
        while tries < TRIES {
            let word = shared.word();
            match shared.condition() {
                Condition::Live => {}
                Condition::Resetting => {
                    // Whoever resets it holds the lock until it is done.
                    drop(shared.control());
                    continue;
                }
                Condition::Detached => return Err(QueueError::Detached { qid: self.qid() }),
                Condition::Over { quiet } => return self.end(&shared.why_over(), quiet),
            }
            let generation = shared.generation();
            let outcome = if generation != self.generation {
                self.restore(&shared, generation)
            } else if word != self.looked {
                self.looked = word;
                self.look_after_commands(&shared)
            } else {
                Ok(true)
            };
            match outcome {
                Ok(true) => {
                    // Who asks for completions has to come here as long as there are such.
                    self.seen = if self.core.has_ended() { NEVER } else { word };
                    return Ok(());
                }
                Ok(false) => {}
                Err(error) => {
                    tries += 1;
                    shared.reset(generation, &error);
                    why = error;
                }
            }
        }
        // The controller works, and may have what it did not confirm to have created.
        self.end(&why, false)
    }

    /// After the last completion: the next command that the driver has ended, if there is one.
    #[cold]
    pub(super) fn pop_ended(&mut self) -> Option<Completion> {
        // Whoever goes on with the queue hears of an error.
        let _ = self.attend();
        self.core.take_ended().or_else(|| self.core.pop())
    }

    /// Has the keeper signal the queue's event once, when it is time to look at the ages of commands.
    pub(super) fn expects_keeper(&mut self, expects: bool) {
        let Self { drowsy, shared, event, .. } = self;
        if drowsy.is_none() {
            // Without a descriptor it is looked after by whatever else wakes it.
            *drowsy = event.try_clone().ok().map(|event| shared.add_sleeper(event));
        }
        if let Some(drowsy) = drowsy {
            drowsy.store(expects, Ordering::Relaxed);
        }
    }

    /// Ends everything that is under way.
    fn end(&mut self, why: &str, quiet: bool) -> Result<(), QueueError> {
        let before = self.core.stats().ended;
        let kept = self.core.end_all(why, quiet);
        self.kept.extend(kept);
        let ended = self.core.stats().ended - before;
        if ended != 0 {
            count(&self.shared.counters.ended, ended);
        }
        Err(self.core.failure())
    }

    /// Lets the commands grow older, and does about those that are late what has to be done. `true`
    /// if the queue works; `false` to look once more.
    ///
    /// # Errors
    /// A sentence that says why the controller has to be reset.
    fn look_after_commands(&mut self, shared: &Shared) -> Result<bool, String> {
        if !shared.recovery.enabled {
            return Ok(true);
        }
        if self.core.outstanding() == 0 {
            return Ok(true);
        }
        let ages = self.core.grow_older(shared.pace.limit, shared.pace.grace);
        if ages.lasting {
            shared.note_waiting();
        }
        if !ages.late.is_empty() {
            count(&shared.counters.late, ages.late.len() as u64);
            let acl = shared.late.get().map_or(0, |late| usize::from(late.identity.acl));
            let most = ages.late.len().min(ABORTS).min(acl + 1);
            tracing::warn!(
                qid = self.qid(),
                "{}: {} commands were not completed within {:?}; aborting {most} of them",
                shared.name(),
                ages.late.len(),
                shared.device.timeouts.io
            );
            let sqid = self.qid();
            for cid in ages.late.into_iter().take(most) {
                if shared.admin.send(Sqe::abort(Abort { sqid, cid }, 0)) {
                    count(&shared.counters.aborts, 1);
                }
            }
        }
        if ages.overdue { self.recreate(shared) } else { Ok(true) }
    }

    /// The second rung.
    fn recreate(&mut self, shared: &Shared) -> Result<bool, String> {
        let qid = self.qid();
        let mut control = shared.control();
        if shared.condition() != Condition::Live || shared.generation() != self.generation {
            return Ok(false);
        }
        tracing::warn!(
            qid,
            "{}: late commands were not aborted; creating the queue pair again",
            shared.name()
        );
        count(&shared.counters.queues_recreated, 1);
        shared.delete_both(&mut control, qid).map_err(|error| error.to_string())?;
        self.start_over(shared, &mut control)?;
        Ok(true)
    }

    /// After the third rung, whoever climbed it.
    fn restore(&mut self, shared: &Shared, generation: u32) -> Result<bool, String> {
        let mut control = shared.control();
        if shared.condition() != Condition::Live || shared.generation() != generation {
            return Ok(false);
        }
        count(&shared.counters.queues_restored, 1);
        self.start_over(shared, &mut control)?;
        self.generation = generation;
        Ok(false)
    }

    /// Creates the queues again that the controller does not have any more, and submits what was
    /// outstanding.
    fn start_over(&mut self, shared: &Shared, control: &mut Control) -> Result<(), String> {
        let qid = self.qid();
        let bells = shared.fresh_bells(qid).ok_or("the controller was not identified")?;
        let rescued = self.core.restart(bells);
        count(&shared.counters.repeated, rescued.repeated);
        count(&shared.counters.ended, rescued.ended);
        if rescued.ended != 0 {
            tracing::warn!(
                qid,
                "{} commands were ended, which may have had their effect or not",
                rescued.ended
            );
        }
        connect(shared, control, self.place, &self.event).map_err(|error| error.to_string())?;
        create_at(shared, control, self.place).map_err(|error| error.to_string())?;
        let [sq, cq] = shared.ringers(qid);
        self.core.sq_bell.ring_by(sq);
        self.core.cq_bell.ring_by(cq);
        self.heard = None;
        // A way to the controller that breaks now is found broken by the next who rings.
        let _ = self.core.ring();
        Ok(())
    }
}
