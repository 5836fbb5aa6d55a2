//! I/O queue pair: the polling API, on which the asynchronous API is built.

mod interrupt_wait;
mod recoverable;

use self::interrupt_wait::InterruptWait;
use self::recoverable::RecoverableQueue;
use crate::admin::AdminCommands;
use crate::attached_controller::AttachedController;
use crate::command::{Command, Completion, Token};
use crate::dma::Buffer;
use crate::error::{AttachError, CommandError, QueueError, Refused};
use crate::io_queues::IoQueuePair;
use crate::metadata::MetadataCommand;
use crate::queue::{QueueStats, SpinPolicy, SpinWindow};
use crate::recovery::handle_removal;
use shadowbell_doorbell::RingSize;
use shadowbell_memory::{Edge, EventFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::{Duration, Instant};
use std::{fmt, io};

/// Number of polls between two readings of the clock.
const POLLS_PER_CLOCK_READ: u32 = 64;

/// An I/O submission queue and its completion queue, for one thread.
///
/// ```text
/// queue.submit(namespace.read(lba, 8)?, Some(buffer))?;   // any number of these
/// queue.ring()?;                                          // then at most one doorbell write
/// while let Some(completion) = queue.pop() { ... }        // may submit further commands
/// queue.ring_cq_doorbell_if_needed()?;
/// ```
///
/// From a submission to its completion, the queue takes no lock, allocates no memory and searches
/// no map. A submitted buffer belongs to the queue until its completion.
///
/// # Dropping
///
/// Dropping a queue pair deletes both queues in the controller, and returns the buffers to their
/// pools. The deletion ends outstanding commands: no command of a deleted queue is completed or
/// transfers data afterwards (Base 2.1, 3.3.1.3). If the controller does not confirm the deletion,
/// the buffers are leaked until the process ends, because the device may still write to them.
pub struct QueuePair {
    queue: RecoverableQueue,
    controller: Arc<AttachedController>,
    interrupt: InterruptWait,
    spin: SpinWindow,
    /// Flag by which the queue requests that the watchdog signals the queue's event. Created on
    /// first use.
    wants_wakeup: Option<Arc<AtomicBool>>,
}

impl QueuePair {
    /// Creates a queue pair of at most `size` entries.
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

    /// The maximum number of outstanding commands: one less than the entries of the submission
    /// queue.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.queue.core.capacity()
    }

    /// The number of outstanding commands.
    #[inline]
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.queue.core.outstanding()
    }

    /// True if the queue has an interrupt, so that [`wait`](Self::wait) can sleep.
    #[must_use]
    pub fn has_interrupt(&self) -> bool {
        self.queue.layout.interrupts
    }

    /// Statistics of the queue.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        self.queue.core.stats()
    }

    /// Writes a command to the submission queue. The next [`ring`](Self::ring) notifies the
    /// controller.
    ///
    /// # Errors
    /// [`Refused`] with the buffer, if the queue is full, the buffer does not match the command, or
    /// the queue has failed.
    #[inline(always)]
    pub fn submit(&mut self, command: Command, buffer: Option<Buffer>) -> Result<Token, Refused> {
        self.queue.core.submit(command.words(), buffer, command)
    }

    /// Writes a command with metadata to the submission queue, like [`submit`](Self::submit).
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub fn submit_with_metadata(
        &mut self,
        command: &MetadataCommand,
        buffer: Option<Buffer>,
    ) -> Result<Token, Refused> {
        self.queue.core.submit_with_tags(command, buffer)
    }

    /// Publishes all submitted commands to the controller, with at most one doorbell write.
    ///
    /// # Errors
    /// [`QueueError`], if the controller is unreachable or was detached.
    #[inline]
    pub fn ring(&mut self) -> Result<(), QueueError> {
        if self.controller.state().epoch() != self.queue.handled_epoch {
            self.handle_state_change()?;
        }
        self.queue.core.ring()
    }

    /// Publishes submitted commands if a doorbell update is worthwhile: immediately while the
    /// controller has few commands, and in groups while it has many. Returns true if all commands
    /// are published and no doorbell write is pending. Otherwise the program must call
    /// [`ring`](Self::ring) before it does other work, and when no completions are left to take.
    ///
    /// A doorbell update costs the same for one command and for sixteen, even if it is only a store
    /// to memory that the controller polls. With few commands in flight, each command is published
    /// at once. With many, at least two thirds of them are always published.
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

    /// Takes the next completion. After the last completion, call [`ring`](Self::ring) or
    /// [`ring_cq_doorbell_if_needed`](Self::ring_cq_doorbell_if_needed), because the controller may
    /// wait for free completion queue entries.
    // The function is inlined and constructs the common completion in one place, so that the
    // completion stays in registers: see `shadowbell_memory::SqeBatch`.
    #[inline(always)]
    pub fn pop(&mut self) -> Option<Completion> {
        if let Some(word) = self.queue.core.pop_word()
            && let Some(completion) = self.queue.core.consume(word)
        {
            return Some(completion);
        }
        self.pop_slow().map(|completion| *completion)
    }

    /// Slow path of `pop`: there is no completion, or it belongs to a late or unknown command. The
    /// result is boxed: a result in the caller's memory would also force the completion of the fast
    /// path into memory.
    #[inline(never)]
    fn pop_slow(&mut self) -> Option<Box<Completion>> {
        if let Some(completion) = self.queue.pop() {
            return Some(Box::new(completion));
        }
        if self.controller.state().epoch() == self.queue.handled_epoch {
            None
        } else {
            self.interrupt.clear_wakeup();
            self.queue.pop_aborted(&self.controller).map(Box::new)
        }
    }

    /// Passes available completions to `each` (at most as many as the queue has slots), and
    /// publishes the completion queue head if needed. Returns the number of completions.
    ///
    /// # Errors
    /// As [`ring`](Self::ring); the completions were passed to `each`.
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

    /// Publishes the completion queue head, if the controller could otherwise run out of free
    /// entries.
    ///
    /// # Errors
    ///
    /// As [`ring`](Self::ring).
    #[inline]
    pub fn ring_cq_doorbell_if_needed(&mut self) -> Result<(), QueueError> {
        self.queue.core.ring_cq_doorbell_if_needed()
    }

    /// True if a completion is available.
    #[inline]
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.queue.core.is_ready() || self.queue.has_ended()
    }

    /// Waits for a completion: polls as long as the [`SpinPolicy`] allows, then sleeps until the
    /// interrupt. Publishes submitted commands first. Returns `false` without a completion if
    /// `deadline` has passed, or if another thread has signalled [`waker`](Self::waker).
    ///
    /// A queue without an interrupt polls until the deadline, and yields the processor in between.
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
        let mut polls: u32 = 0;
        loop {
            for _ in 0..POLLS_PER_CLOCK_READ {
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
                polls = polls.saturating_add(1);
                idle(polls);
            } else {
                self.spin.yield_cpu(now - began);
            }
        }
        loop {
            self.publish_all()?;
            self.consume_signals();
            // A new completion signals the event, because both doorbells are published. Earlier
            // completions are found by one more check of the queue. The fence orders this check
            // after the publication of the head.
            fence(Ordering::SeqCst);
            let slept = if self.is_ready() { true } else { self.sleep(deadline)? };
            if self.handle_new_state()? || slept {
                break;
            }
            // A timeout tick ended the sleep. The loop sleeps again, unless the deadline has
            // passed.
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                break;
            }
        }
        self.spin.waited(began.elapsed());
        Ok(self.is_ready())
    }

    #[cold]
    fn handle_state_change(&mut self) -> Result<(), QueueError> {
        // The queues may be created again here, which can cause further interrupts. So it is
        // unknown whether the interrupt's eventfd has a stale signal.
        self.interrupt.clear_wakeup();
        self.queue.handle_state_change(&self.controller)
    }

    /// Handles a pending change of the controller's state. Returns true if a completion is
    /// available.
    fn handle_new_state(&mut self) -> Result<bool, QueueError> {
        if self.controller.state().epoch() != self.queue.handled_epoch {
            self.handle_state_change()?;
        }
        Ok(self.is_ready())
    }

    /// Publishes both doorbells, so that the controller raises an interrupt for later completions.
    /// Used by event loops that sleep on [`waker`](Self::waker). Afterwards the caller must execute
    /// a full fence and check [`is_ready`](Self::is_ready) once more. A stale signal may end the
    /// sleep immediately.
    ///
    /// # Errors
    /// As [`ring`](Self::ring).
    pub fn prepare_sleep(&mut self) -> Result<(), QueueError> {
        self.publish_all()?;
        // An event loop has no timer for timeout ticks, so the watchdog signals its event.
        if self.queue.core.outstanding() != 0 && self.controller.recovery.enabled {
            self.request_wakeup();
        }
        Ok(())
    }

    /// Requests that the watchdog signals the queue's event once, at its next tick.
    fn request_wakeup(&mut self) {
        let Self { wants_wakeup, controller, queue, .. } = self;
        if wants_wakeup.is_none() {
            // If no descriptor is available, ticks are counted only when another event wakes the
            // queue.
            let event = queue.event.try_clone().ok();
            *wants_wakeup = event.map(|event| controller.add_sleeper(event));
        }
        if let Some(wants_wakeup) = wants_wakeup {
            wants_wakeup.store(true, Ordering::Relaxed);
        }
    }

    fn publish_all(&mut self) -> Result<(), QueueError> {
        self.ring()?;
        // The head must be published, because the controller may hold back interrupts while the
        // entries of the last interrupt are not consumed.
        self.queue.core.ring_cq_doorbell()
    }

    /// Deadline of a sleep: the time of the next timeout tick, because this thread has to count the
    /// tick.
    fn next_tick(&self) -> Option<Instant> {
        if self.outstanding() == 0 || !self.controller.recovery.enabled {
            return None;
        }
        Instant::now().checked_add(self.controller.ticks.tick)
    }

    /// Longest time from the submission of a command until its result: the controller completes the
    /// command, or the driver fails or ends it.
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

    /// Sleeps until an interrupt, a signal, the deadline or the next timeout tick. Returns false if
    /// the time passed without a signal.
    fn sleep(&mut self, deadline: Option<Instant>) -> Result<bool, QueueError> {
        let signalled = self.sleep_until_edge(deadline)?;
        if self.queue.core.is_ready() {
            self.interrupt.note_wakeup(self.queue.core.completed());
        }
        Ok(signalled)
    }

    /// Sleeps until an interrupt, a signal, the deadline or the next timeout tick, and counts the
    /// tick.
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
                // Completions that arrived before the hang-up are taken before the queue fails.
                if !self.is_ready() {
                    let device = self.controller.name();
                    let why = format!("lost the connection to {device}");
                    handle_removal(&self.controller, &why);
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

    /// An eventfd that ends a [`wait`](Self::wait) when any thread signals it. The queue's
    /// interrupt signals the same eventfd. An event loop can poll the eventfd together with other
    /// descriptors.
    ///
    /// # Errors
    ///
    /// The error of the system, if the process is out of file descriptors.
    pub fn waker(&self) -> io::Result<EventFd> {
        self.queue.event.try_clone()
    }

    /// Sets the polling policy of [`wait`](Self::wait).
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

/// Yields the processor, or sleeps after many calls.
fn idle(polls: u32) {
    if polls < 64 {
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
