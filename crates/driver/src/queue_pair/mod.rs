//! An I/O queue pair: the poll API, below the asynchronous one.

mod interrupt_wait;
mod recoverable;

use self::interrupt_wait::InterruptWait;
use self::recoverable::RecoverableQueue;
use crate::admin::AdminCommands;
use crate::attached::AttachedController;
use crate::command::Command;
use crate::completion::{Completion, Token};
use crate::dma::Buffer;
use crate::error::{AttachError, CommandError, QueueError, Refused};
use crate::io_queues::IoQueuePair;
use crate::metadata::MetadataCommand;
use crate::queue::{QueueStats, SpinPolicy, SpinWindow};
use crate::recovery::went_away;
use shadowbell_doorbell::RingSize;
use shadowbell_memory::{Edge, EventFd};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::{Duration, Instant};

/// Spins between two looks at the clock.
const SPINS_PER_LOOK: u32 = 64;

/// An I/O submission queue and its completion queue, for one thread.
///
/// ```text
/// queue.submit(namespace.read(lba, 8)?, Some(buffer))?;   // any number of these
/// queue.ring()?;                                          // then one doorbell, or none
/// while let Some(completion) = queue.pop() { ... }        // submit again from in here
/// queue.ring_cq_doorbell_if_needed()?;
/// ```
///
/// Between a submission and its completion there is no lock, no allocation and no look-up in a
/// map. A buffer that was submitted belongs to the queue until its completion.
///
/// # Dropping it
///
/// Dropping a queue pair deletes both queues at the controller, which ends what is outstanding
/// there (Base 2.1, 3.3.1.3: no command of a deleted queue is completed or moves data afterwards),
/// and then gives the buffers back to their pools. If the controller does not confirm the deletion,
/// the buffers are kept for as long as the process lives, because the device may still write to
/// them.
pub struct QueuePair {
    queue: RecoverableQueue,
    controller: Arc<AttachedController>,
    interrupt: InterruptWait,
    spin: SpinWindow,
    /// Whether the watchdog shall signal the event; made when it is needed first.
    wants_wakeup: Option<Arc<AtomicBool>>,
}

impl QueuePair {
    /// Creates a queue pair of `size` entries at most.
    pub(crate) fn create(
        controller: &Arc<AttachedController>,
        size: RingSize,
        spin: SpinPolicy,
    ) -> Result<Self, AttachError> {
        let state = controller.state();
        let mut io_queues = controller.enabled.io_queues();
        state.usable(0).map_err(|source| AttachError::Command {
            step: "creating an I/O queue pair",
            source: CommandError::Queue { command: "Create I/O Completion Queue".into(), source },
        })?;
        let generation = state.generation();
        let created = io_queues.create(controller.plane(), &controller.info, size)?;
        drop(io_queues);
        let IoQueuePair { core, layout, event } = created;
        Ok(Self {
            queue: RecoverableQueue::new(core, layout, event, generation, controller),
            controller: Arc::clone(controller),
            interrupt: InterruptWait::default(),
            spin: SpinWindow::new(spin),
            wants_wakeup: None,
        })
    }

    /// The identifier of both queues.
    #[must_use]
    pub fn qid(&self) -> u16 {
        self.queue.core.qid()
    }

    /// How many commands may be outstanding at once: one less than the entries of the submission
    /// queue.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.queue.core.capacity()
    }

    /// How many commands are outstanding.
    #[inline]
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.queue.core.outstanding()
    }

    /// Whether the controller interrupts for this queue: [`wait`](Self::wait) sleeps then.
    #[must_use]
    pub fn has_interrupt(&self) -> bool {
        self.queue.layout.interrupts
    }

    /// What the queue did so far.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        self.queue.core.stats()
    }

    /// Writes a command into the submission queue. The controller is notified of it by the next
    /// [`ring`](Self::ring).
    ///
    /// # Errors
    /// [`Refused`], with the buffer: the queue is full, or the buffer does not fit the command.
    #[inline(always)]
    pub fn submit(&mut self, command: Command, buffer: Option<Buffer>) -> Result<Token, Refused> {
        self.queue.core.submit(command.words(), buffer, command)
    }

    /// Writes a command with metadata into the submission queue, as [`submit`](Self::submit) does.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub fn submit_with_metadata(
        &mut self,
        command: &MetadataCommand,
        buffer: Option<Buffer>,
    ) -> Result<Token, Refused> {
        self.queue.core.submit_given(command, buffer)
    }

    /// Publishes everything submitted so far to the controller, with one doorbell or with none.
    ///
    /// # Errors
    /// [`QueueError`], when the controller can not be reached any more, or was detached.
    #[inline]
    pub fn ring(&mut self) -> Result<(), QueueError> {
        if self.controller.state().epoch() != self.queue.handled_epoch {
            self.handle_state_change()?;
        }
        self.queue.core.ring()
    }

    /// Publishes what was submitted so far, if it is time: at once as long as the controller has
    /// little to do, and several commands at a time while it has enough. Whether all are published
    /// and no wakeup is due; if not, [`ring`](Self::ring) has to be called before the program turns
    /// to something else, or when there are no completions left to take.
    ///
    /// What a doorbell costs, even one that is only a store to memory that the controller looks at,
    /// is the same for one command and for sixteen. A short queue can not wait for the next command
    /// and a long one does not have to: the controller always has two thirds of it to work on.
    ///
    /// # Errors
    /// As [`ring`](Self::ring).
    #[inline(always)]
    pub fn ring_in_time(&mut self) -> Result<bool, QueueError> {
        if self.controller.state().epoch() != self.queue.handled_epoch {
            self.handle_state_change()?;
        }
        self.queue.core.ring_in_time()
    }

    /// The next completion, if there is one. After the last, call [`ring`](Self::ring) or
    /// [`ring_cq_doorbell_if_needed`](Self::ring_cq_doorbell_if_needed): the controller might wait
    /// for room.
    // Inlined, and the usual completion made in one place, so that it need not go through memory:
    // see `shadowbell_memory::SqeBatch`.
    #[inline(always)]
    pub fn pop(&mut self) -> Option<Completion> {
        if let Some(word) = self.queue.core.pop_word()
            && let Some(completion) = self.queue.core.consume(word)
        {
            return Some(completion);
        }
        self.pop_otherwise().map(|completion| *completion)
    }

    /// The controller has completed nothing more, or nothing that is outstanding. Boxed, because
    /// what is returned in the caller's memory would keep the usual completion there as well.
    #[inline(never)]
    fn pop_otherwise(&mut self) -> Option<Box<Completion>> {
        if let Some(completion) = self.queue.pop() {
            return Some(Box::new(completion));
        }
        if self.controller.state().epoch() == self.queue.handled_epoch {
            None
        } else {
            self.interrupt.forget_wakeup();
            self.queue.pop_ended(&self.controller).map(Box::new)
        }
    }

    /// Hands every completion that is there to `each` (at most as many as the queue can hold), and
    /// publishes the completion queue head if needed. Returns how many there were.
    ///
    /// # Errors
    /// As [`ring`](Self::ring); the completions were handed out.
    #[inline]
    pub fn poll(&mut self, mut each: impl FnMut(Completion)) -> Result<usize, QueueError> {
        let mut count = 0;
        while count < self.queue.core.capacity()
            && let Some(completion) = self.pop()
        {
            each(completion);
            count += 1;
        }
        self.ring_cq_doorbell_if_needed()?;
        Ok(count)
    }

    /// Publishes the completion queue head, if the controller might need the entries of the
    /// completions that were taken.
    ///
    /// # Errors
    /// As [`ring`](Self::ring).
    #[inline]
    pub fn ring_cq_doorbell_if_needed(&mut self) -> Result<(), QueueError> {
        self.queue.core.ring_cq_doorbell_if_needed()
    }

    /// Whether a completion is there to be taken.
    #[inline]
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.queue.core.is_ready() || self.queue.has_ended()
    }

    /// Waits for a completion: polls for as long as the [`SpinPolicy`] says, then sleeps until the
    /// interrupt. `false` if `deadline` passed, or another thread signalled [`waker`](Self::waker),
    /// with none there. Rings for what was submitted and not rung for yet.
    ///
    /// A queue without interrupt polls until the deadline, and leaves the processor to others in
    /// between.
    ///
    /// # Errors
    /// As [`ring`](Self::ring).
    pub fn wait(&mut self, deadline: Option<Instant>) -> Result<bool, QueueError> {
        self.ring()?;
        if self.is_ready() {
            return Ok(true);
        }
        let began = Instant::now();
        let window = self.spin.window();
        let mut looks: u32 = 0;
        loop {
            for _ in 0..SPINS_PER_LOOK {
                if self.queue.core.is_ready() {
                    self.spin.waited(began.elapsed());
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(false);
            }
            if now - began >= window {
                if self.has_interrupt() {
                    break;
                }
                if self.queue.event.drain() != 0 {
                    return Ok(self.is_ready());
                }
                if self.handle_new_state()? {
                    return Ok(true);
                }
                looks = looks.saturating_add(1);
                idle(looks);
            } else {
                self.spin.give_way(now - began);
            }
        }
        loop {
            self.publish_all()?;
            self.consume_signals();
            // Armed: whatever comes from here on signals the event. What came before is seen by
            // looking once more, the fence keeping the look behind the head that was published.
            fence(Ordering::SeqCst);
            let slept = if self.is_ready() { true } else { self.sleep(deadline)? };
            if self.handle_new_state()? || slept {
                break;
            }
            // The sleep ended only to count a tick.
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                break;
            }
        }
        self.spin.waited(began.elapsed());
        Ok(self.is_ready())
    }

    #[cold]
    fn handle_state_change(&mut self) -> Result<(), QueueError> {
        // The queues may be created again, and then nothing is known of the event.
        self.interrupt.forget_wakeup();
        self.queue.handle_state_change(&self.controller)
    }

    /// Handles a change of the controller's state, if there is one. Whether there is a completion
    /// to be taken.
    fn handle_new_state(&mut self) -> Result<bool, QueueError> {
        if self.controller.state().epoch() != self.queue.handled_epoch {
            self.handle_state_change()?;
        }
        Ok(self.is_ready())
    }

    /// Publishes both doorbells, so that the controller interrupts for what completes from now on:
    /// for those who sleep on [`waker`](Self::waker) by themselves. After this, and a full fence,
    /// the completion queue has to be looked at once more ([`is_ready`](Self::is_ready)). A signal
    /// of the past may end the sleep at once.
    ///
    /// # Errors
    /// As [`ring`](Self::ring).
    pub fn prepare_sleep(&mut self) -> Result<(), QueueError> {
        self.publish_all()?;
        // A thread that sleeps by itself has no timer for the ticks of commands: the watchdog wakes
        // it.
        if self.queue.core.outstanding() != 0 && self.controller.recovery.enabled {
            self.request_wakeup();
        }
        Ok(())
    }

    /// Has the watchdog signal the queue's event once, at its next tick.
    fn request_wakeup(&mut self) {
        let Self { wants_wakeup, controller, queue, .. } = self;
        if wants_wakeup.is_none() {
            // Without a descriptor a tick is counted when something else wakes the queue.
            let event = queue.event.try_clone().ok();
            *wants_wakeup = event.map(|event| controller.add_sleeper(event));
        }
        if let Some(wants_wakeup) = wants_wakeup {
            wants_wakeup.store(true, Ordering::Relaxed);
        }
    }

    fn publish_all(&mut self) -> Result<(), QueueError> {
        self.ring()?;
        // The controller may hold an interrupt back for as long as we have not consumed what the
        // last one was for.
        self.queue.core.ring_cq_doorbell()
    }

    /// When a sleep has to end at the latest, so that a tick is counted for the commands.
    fn next_tick(&self) -> Option<Instant> {
        if self.outstanding() == 0 || !self.controller.recovery.enabled {
            return None;
        }
        Instant::now().checked_add(self.controller.ticks.tick)
    }

    /// Within this time every command ends, one way or another.
    pub(crate) fn longest_command(&self) -> Duration {
        self.controller.ticks.longest
    }

    fn open_interrupt(&mut self) {
        let transport = &*self.controller.plane().device.transport;
        self.interrupt.open(&self.queue.event, transport);
    }

    fn consume_signals(&mut self) {
        self.open_interrupt();
        self.interrupt.consume_signals(&self.queue.event, self.queue.core.completed());
    }

    /// Sleeps until the interrupt, a signal or the deadline; whether it was one of these, or else
    /// time to count a tick.
    fn sleep(&mut self, deadline: Option<Instant>) -> Result<bool, QueueError> {
        let signalled = self.sleep_until_edge(deadline)?;
        if self.queue.core.is_ready() {
            self.interrupt.note_wakeup(self.queue.core.completed());
        }
        Ok(signalled)
    }

    /// Sleeps until the interrupt, a signal or the deadline, or until it is time to count a tick,
    /// which this does.
    pub(crate) fn block(&mut self, deadline: Option<Instant>) -> Result<(), QueueError> {
        self.open_interrupt();
        self.sleep_until_edge(deadline)?;
        self.handle_new_state().map(drop)
    }

    fn sleep_until_edge(&mut self, deadline: Option<Instant>) -> Result<bool, QueueError> {
        let until = match (deadline, self.next_tick()) {
            (Some(deadline), Some(tick)) => Some(deadline.min(tick)),
            (deadline, tick) => deadline.or(tick),
        };
        let outcome = self.interrupt.sleep(&self.queue.event, until);
        self.queue.core.stats_mut().sleeps += 1;
        match outcome {
            Ok(Edge::Signal) => self.queue.core.stats_mut().wakeups += 1,
            Ok(Edge::Timeout) => return Ok(false),
            Ok(Edge::HungUp) => {
                // What has completed before is still there to be taken.
                if !self.is_ready() {
                    let device = self.controller.name();
                    let why = format!("{device} went away; attach again when it is back");
                    went_away(&self.controller, &why);
                    self.handle_state_change()?;
                }
            }
            Err(error) => {
                tracing::warn!(qid = self.qid(), "waiting for an interrupt failed: {error}");
                idle(u32::MAX);
            }
        }
        Ok(true)
    }

    /// A descriptor whose signal ends a [`wait`](Self::wait), from any thread. It is the one that
    /// the queue's interrupt signals too, so it can be polled together with others.
    ///
    /// # Errors
    /// The system's, when the process is out of file descriptors.
    pub fn waker(&self) -> io::Result<EventFd> {
        self.queue.event.try_clone()
    }

    /// How long [`wait`](Self::wait) polls before it sleeps, from now on.
    pub fn set_spin(&mut self, policy: SpinPolicy) {
        self.spin = SpinWindow::new(policy);
    }

    pub(crate) fn spin_mut(&mut self) -> &mut SpinWindow {
        &mut self.spin
    }

    pub(crate) fn controller(&self) -> &Arc<AttachedController> {
        &self.controller
    }
}

/// Leaves the processor to others, the longer the more often.
fn idle(looks: u32) {
    if looks < 64 {
        std::thread::yield_now();
    } else {
        std::thread::sleep(Duration::from_micros(50));
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        if let Some(wants_wakeup) = &self.wants_wakeup {
            self.controller.remove_sleeper(wants_wakeup);
        }
        let buffers = self.queue.take_buffers();
        let qid = self.qid();
        if self.controller.enabled.delete_io_queues(qid) {
            drop(buffers);
        } else if !buffers.is_empty() {
            tracing::warn!(
                qid,
                buffers = buffers.len(),
                "{} may still write to the buffers of a queue that it did not delete, so they are \
                 kept",
                self.controller.name()
            );
            std::mem::forget(buffers);
        }
        AttachedController::shut_down_if_last(&self.controller);
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair")
            .field("qid", &self.qid())
            .field("capacity", &self.capacity())
            .field("outstanding", &self.outstanding())
            .finish_non_exhaustive()
    }
}
