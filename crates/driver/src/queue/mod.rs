//! An I/O queue pair: the poll API, below the asynchronous one.

mod bell;
mod core;
mod ladder;
mod memory;
mod rescue;
mod spin;
mod stats;

pub(crate) use self::bell::{Bell, Register, Shadow};
pub(crate) use self::core::Core;
pub use self::core::{Completion, Token};
pub(crate) use self::memory::{Pair, PairShape, QueueMemory};
pub use self::spin::SpinPolicy;
pub(crate) use self::spin::SpinWindow;
pub use self::stats::QueueStats;

use crate::command::Command;
use crate::dma::Buffer;
use crate::error::{QueueError, Refused};
use crate::recovery::Place;
use crate::shared::Shared;
use ::shadowbell_memory::{Edge, Edges, EventFd};
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
/// queue.settle()?;
/// ```
///
/// Between a submission and its completion there is no lock, no allocation and no look-up in a
/// map. A buffer that was submitted belongs to the queue until its completion.
///
/// # Dropping it
///
/// deletes both queues at the controller, which ends what is outstanding there (Base 2.1, 3.3.1.3:
/// no command of a deleted queue is completed or moves data afterwards), and then gives the buffers
/// back to their pools. If the controller does not confirm the deletion, the buffers are kept for
/// as long as the process lives, because the device may still write to them.
pub struct QueuePair {
    core: Core,
    shared: Arc<Shared>,
    event: EventFd,
    /// To sleep on `event`; made when it is needed first.
    edges: Option<Edges>,
    /// How many completions had been taken when an interrupt ended a sleep.
    heard: Option<u64>,
    /// The device's other end has hung up.
    gone: bool,
    place: Place,
    spin: SpinWindow,
    /// The controller's word as it was when this queue looked last: another says that there is
    /// something to be looked at.
    seen: u32,
    /// The word as it was when the ages of the commands were looked at.
    looked: u32,
    /// How often the controller had been reset when the queues were created.
    generation: u32,
    /// Whether the keeper shall signal `event`; made when it is needed first.
    drowsy: Option<Arc<AtomicBool>>,
    /// Buffers of commands that were ended while the controller might still write to them.
    kept: Vec<Buffer>,
}

impl QueuePair {
    pub(crate) fn new(
        core: Core,
        shared: Arc<Shared>,
        place: Place,
        generation: u32,
        event: EventFd,
        spin: SpinPolicy,
    ) -> Self {
        Self {
            core,
            event,
            edges: None,
            heard: None,
            gone: false,
            place,
            spin: SpinWindow::new(spin),
            seen: shared.word(),
            looked: shared.word(),
            generation,
            drowsy: None,
            kept: Vec::new(),
            shared,
        }
    }

    /// The identifier of both queues.
    #[must_use]
    pub fn qid(&self) -> u16 {
        self.core.qid()
    }

    /// How many commands may be outstanding at once: one less than the entries of the submission
    /// queue.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.core.capacity()
    }

    /// How many commands are outstanding.
    #[inline]
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.core.outstanding()
    }

    /// Whether the controller interrupts for this queue: [`wait`](Self::wait) sleeps then.
    #[must_use]
    pub fn has_interrupt(&self) -> bool {
        self.place.interrupts
    }

    /// What the queue did so far.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        self.core.stats()
    }

    /// Writes a command into the submission queue. The controller hears of it with the next
    /// [`ring`](Self::ring).
    ///
    /// # Errors
    /// [`Refused`], with the buffer: the queue is full, or the buffer does not fit the command.
    #[inline(always)]
    pub fn submit(&mut self, command: Command, buffer: Option<Buffer>) -> Result<Token, Refused> {
        self.core.submit(command.words(), buffer, command)
    }

    /// Tells the controller of everything submitted so far, with one doorbell or with none.
    ///
    /// # Errors
    /// [`QueueError`], when the controller can not be reached any more, or was detached.
    #[inline]
    pub fn ring(&mut self) -> Result<(), QueueError> {
        if self.shared.word() != self.seen {
            self.attend()?;
        }
        self.core.ring()
    }

    /// Tells the controller of what was submitted so far, if it is time: at once as long as it has
    /// little to do, and of several commands at a time while it has enough. Whether it knows of all
    /// now, and needs no wakeup; if not, [`ring`](Self::ring) has to be called before the program
    /// turns to something else, or when there are no completions left to take.
    ///
    /// What a doorbell costs, even one that is only a store to memory that the controller looks at,
    /// is the same for one command and for sixteen. A short queue can not wait for the next command
    /// and a long one does not have to: the controller always has two thirds of it to work on.
    ///
    /// # Errors
    /// As [`ring`](Self::ring).
    #[inline(always)]
    pub fn ring_in_time(&mut self) -> Result<bool, QueueError> {
        if self.shared.word() != self.seen {
            self.attend()?;
        }
        self.core.ring_in_time()
    }

    /// The next completion, if there is one. After the last, call [`ring`](Self::ring) or
    /// [`settle`](Self::settle): the controller might wait for room.
    // Inlined, and the usual completion made in one place, so that it need not go through memory: see
    // `shadowbell_memory::SqeBatch`.
    #[inline(always)]
    pub fn pop(&mut self) -> Option<Completion> {
        if let Some(word) = self.core.pop_word()
            && let Some(completion) = self.core.consume(word)
        {
            return Some(completion);
        }
        self.pop_otherwise().map(|completion| *completion)
    }

    /// The controller has completed nothing more, or nothing that is outstanding. Boxed, because what
    /// is returned in the caller's memory would keep the usual completion there as well.
    #[inline(never)]
    fn pop_otherwise(&mut self) -> Option<Box<Completion>> {
        if let Some(completion) = self.core.pop() {
            return Some(Box::new(completion));
        }
        if self.shared.word() == self.seen { None } else { self.pop_ended().map(Box::new) }
    }

    /// Hands every completion that is there to `each` (at most as many as the queue can hold), and
    /// gives their places back. Returns how many there were.
    ///
    /// # Errors
    /// As [`ring`](Self::ring); the completions were handed out.
    #[inline]
    pub fn poll(&mut self, mut each: impl FnMut(Completion)) -> Result<usize, QueueError> {
        let mut count = 0;
        while count < self.core.capacity()
            && let Some(completion) = self.pop()
        {
            each(completion);
            count += 1;
        }
        self.settle()?;
        Ok(count)
    }

    /// Gives the places of the completions that were taken back to the controller, if it might
    /// need them.
    ///
    /// # Errors
    /// As [`ring`](Self::ring).
    #[inline]
    pub fn settle(&mut self) -> Result<(), QueueError> {
        self.core.settle()
    }

    /// Whether a completion is there to be taken.
    #[inline]
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.core.is_ready() || self.core.has_ended()
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
                if self.core.is_ready() {
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
                if self.event.drain() != 0 {
                    return Ok(self.is_ready());
                }
                if self.attend_news()? {
                    return Ok(true);
                }
                looks = looks.saturating_add(1);
                idle(looks);
            }
        }
        loop {
            self.publish_all()?;
            self.forget_marks();
            // Armed: whatever comes from here on leaves a mark on the event. What came before is
            // seen by looking once more, the fence keeping the look behind the head that was
            // published.
            fence(Ordering::SeqCst);
            let slept = if self.is_ready() { true } else { self.sleep(deadline)? };
            if self.attend_news()? || slept {
                break;
            }
            // Only to see how old commands are.
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                break;
            }
        }
        self.spin.waited(began.elapsed());
        Ok(self.is_ready())
    }

    /// Looks at what is new, if there is anything. Whether there is a completion to be taken.
    fn attend_news(&mut self) -> Result<bool, QueueError> {
        if self.shared.word() != self.seen {
            self.attend()?;
        }
        Ok(self.is_ready())
    }

    /// Tells the controller everything that it has to know to interrupt for what completes from now
    /// on: for those who sleep on [`waker`](Self::waker) by themselves. After this, and a full fence,
    /// the completion queue has to be looked at once more ([`is_ready`](Self::is_ready)). A mark of
    /// the past may end the sleep at once.
    ///
    /// # Errors
    /// As [`ring`](Self::ring).
    pub fn prepare_sleep(&mut self) -> Result<(), QueueError> {
        self.publish_all()?;
        // Whoever sleeps by itself has no timer for the ages of commands: the keeper wakes it.
        if self.core.outstanding() != 0 && self.shared.recovery.enabled {
            self.expects_keeper(true);
        }
        Ok(())
    }

    fn publish_all(&mut self) -> Result<(), QueueError> {
        self.ring()?;
        // The controller may hold an interrupt back for as long as we have not consumed what the
        // last one was for.
        self.core.release()
    }

    /// When a sleep has to end at the latest, so that the ages of commands are looked at.
    fn next_look(&self) -> Option<Instant> {
        if self.outstanding() == 0 || !self.shared.recovery.enabled {
            return None;
        }
        Instant::now().checked_add(self.shared.pace.tick)
    }

    /// Within this time every command ends, one way or another.
    pub(crate) fn patience(&self) -> Duration {
        self.shared.pace.patience
    }

    /// Takes marks of the past off the event, if there can be any: interrupts whose completions were
    /// found without them.
    fn forget_marks(&mut self) {
        self.watch();
        // An interrupt ended the last sleep, and one completion was taken since: there is none left
        // that has no completion to be seen. This is what saves whoever waits for one command at a
        // time a system call.
        let heard = self.heard.take();
        if heard.is_some_and(|completed| self.core.completed() == completed + 1) {
            return;
        }
        match &self.edges {
            // A device that has gone is told once, so that must not get lost here.
            Some(edges) => {
                self.gone |= matches!(edges.wait(Some(Duration::ZERO)), Ok(Edge::HungUp))
            }
            None => drop(self.event.drain()),
        }
    }

    /// Has something to sleep on.
    fn watch(&mut self) {
        if self.edges.is_none() {
            self.edges = Edges::new(&self.event, self.shared.device.transport.hang_up()).ok();
        }
    }

    /// Sleeps until the interrupt, a signal or the deadline; whether it was one of these, or else
    /// time to look at the ages of commands.
    fn sleep(&mut self, deadline: Option<Instant>) -> Result<bool, QueueError> {
        let signalled = self.sleep_and_see(deadline)?;
        if self.core.is_ready() {
            self.heard = Some(self.core.completed());
        }
        Ok(signalled)
    }

    /// Sleeps until the interrupt, a signal or the deadline, or until it is time to look at the ages
    /// of commands, which this does.
    pub(crate) fn block(&mut self, deadline: Option<Instant>) -> Result<(), QueueError> {
        self.watch();
        self.sleep_and_see(deadline)?;
        self.attend_news().map(drop)
    }

    fn sleep_and_see(&mut self, deadline: Option<Instant>) -> Result<bool, QueueError> {
        let until = match (deadline, self.next_look()) {
            (Some(deadline), Some(look)) => Some(deadline.min(look)),
            (deadline, look) => deadline.or(look),
        };
        let outcome = match &self.edges {
            _ if self.gone => Ok(Edge::HungUp),
            Some(edges) => edges.wait(left(until)),
            None => self.event.wait(left(until)).map(|woken| match woken {
                true => Edge::Signal,
                false => Edge::Timeout,
            }),
        };
        self.core.stats_mut().sleeps += 1;
        match outcome {
            Ok(Edge::Signal) => self.core.stats_mut().wakeups += 1,
            Ok(Edge::Timeout) => return Ok(false),
            Ok(Edge::HungUp) => {
                self.gone = true;
                // What has completed before is still there to be taken.
                if !self.is_ready() {
                    let device = self.shared.name();
                    let why = format!("{device} went away; attach again when it is back");
                    self.shared.went_away(&why);
                    self.attend()?;
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
        self.event.try_clone()
    }

    /// How long [`wait`](Self::wait) polls before it sleeps, from now on.
    pub fn set_spin(&mut self, policy: SpinPolicy) {
        self.spin = SpinWindow::new(policy);
    }

    pub(crate) fn spin_mut(&mut self) -> &mut SpinWindow {
        &mut self.spin
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

/// The time until `deadline`.
fn left(deadline: Option<Instant>) -> Option<Duration> {
    deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
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
        if let Some(drowsy) = &self.drowsy {
            self.shared.forget_sleeper(drowsy);
        }
        let mut buffers = self.core.take_buffers();
        buffers.append(&mut self.kept);
        let qid = self.qid();
        if self.shared.delete_queue_pair(qid) {
            drop(buffers);
        } else if !buffers.is_empty() {
            tracing::warn!(
                qid,
                buffers = buffers.len(),
                "{} may still write to the buffers of a queue that it did not delete, so they are \
                 kept",
                self.shared.name()
            );
            std::mem::forget(buffers);
        }
        self.shared.let_go();
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
