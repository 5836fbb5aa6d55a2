//! The admin queue: commands that wait for their completion, and the asynchronous events.

use crate::device::Device;
use crate::dma::Buffer;
use crate::error::{CommandError, QueueError};
use crate::queue::{Completion, Core, Shadow};
use spec::event::AsyncEvent;
use spec::opcode::AdminOpcode;
use spec::{Sqe, Status};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Events that are kept for a program that does not ask for them; the oldest go first.
const MAX_EVENTS: usize = 256;
/// How often a command that takes long has the controller's health looked at.
const HEALTH_INTERVAL: Duration = Duration::from_millis(100);

/// What a slot's completion is waited for by.
enum Waiting {
    /// The slot is free.
    Nobody,
    /// A thread in [`AdminQueue::execute`].
    Someone,
    /// The same, who will find this.
    Done(Completion),
    /// Nobody any more: the thread gave up.
    GaveUp,
    /// It is an Asynchronous Event Request.
    Event,
}

struct State {
    core: Core,
    waiting: Box<[Waiting]>,
    events: VecDeque<AsyncEvent>,
    /// Events that were dropped for want of somebody to take them.
    lost: u64,
}

/// The admin submission and completion queue, shared by whoever has a [`Shared`].
///
/// The lock is held to submit and to look for completions, not while a command is on its way, so
/// commands of several threads overlap.
///
/// [`Shared`]: crate::shared::Shared
pub(crate) struct AdminQueue {
    state: Mutex<State>,
}

impl AdminQueue {
    pub(crate) fn new(core: Core) -> Self {
        let waiting = (0..core.capacity()).map(|_| Waiting::Nobody).collect();
        let state = State { core, waiting, events: VecDeque::new(), lost: 0 };
        Self { state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The most bytes that a command moves.
    pub(crate) fn max_transfer(&self) -> u64 {
        self.lock().core.max_transfer()
    }

    pub(crate) fn limit_transfer(&self, max: u64) {
        self.lock().core.limit_transfer(max);
    }

    /// See [`doorbell::HostDoorbell::mirror`].
    pub(crate) fn mirror(&self, sq: Shadow, cq: Shadow) {
        let mut state = self.lock();
        state.core.sq_bell.mirror(sq);
        state.core.cq_bell.mirror(cq);
    }

    /// See [`doorbell::HostDoorbell::trust`] and [`doorbell::HostDoorbell::forget`].
    pub(crate) fn trust(&self, trusted: bool) {
        let mut state = self.lock();
        let State { core, .. } = &mut *state;
        for bell in [&mut core.sq_bell, &mut core.cq_bell] {
            if trusted {
                bell.trust();
            } else {
                bell.forget();
            }
        }
    }

    pub(crate) fn stats(&self) -> crate::QueueStats {
        self.lock().core.stats()
    }

    /// Runs one command to its end, at the latest until `limit` has passed.
    ///
    /// The buffer comes back with the completion. After a timeout it stays with the queue until
    /// the controller completes the command after all, or is disabled.
    pub(crate) fn execute(
        &self,
        device: &Device,
        sqe: Sqe,
        buffer: Option<Buffer>,
        transfer: u32,
        limit: Duration,
    ) -> Result<Completion, CommandError> {
        let began = Instant::now();
        let refused = |source| CommandError::Queue { command: admin_name(sqe.opcode), source };
        let late = || CommandError::Timeout {
            device: device.name().to_owned(),
            command: admin_name(sqe.opcode),
            waited: began.elapsed(),
        };
        let mut patience = Patience::default();
        let mut buffer = buffer;
        let slot = loop {
            let mut state = self.lock();
            state.reap();
            match state.core.submit(sqe, buffer, 0, transfer) {
                Ok(token) => {
                    if let Some(waiting) = state.waiting.get_mut(token.index()) {
                        *waiting = Waiting::Someone;
                    }
                    state.core.ring().map_err(refused)?;
                    break token.index();
                }
                Err(full) if matches!(full.reason, QueueError::Full { .. }) => {
                    drop(state);
                    buffer = full.buffer;
                    if began.elapsed() >= limit {
                        return Err(late());
                    }
                    patience.pause(limit.saturating_sub(began.elapsed()));
                }
                Err(other) => return Err(refused(other.reason)),
            }
        };
        let mut health = HEALTH_INTERVAL;
        let mut patience = Patience::default();
        loop {
            // The clock first: if this thread was not run for long, the controller still gets a
            // last look.
            let waited = began.elapsed();
            if let Some(completion) = self.take(slot) {
                return Ok(completion);
            }
            if waited >= limit {
                return self.give_up(slot).ok_or_else(late);
            }
            if waited >= health {
                health = waited + HEALTH_INTERVAL;
                if let Some(why) = device.ailment() {
                    let source = QueueError::Failed { qid: 0, why: why.into() };
                    return self.give_up(slot).ok_or_else(|| refused(source));
                }
            }
            patience.pause(limit - waited);
        }
    }

    fn take(&self, slot: usize) -> Option<Completion> {
        let mut state = self.lock();
        state.reap();
        let waiting = state.waiting.get_mut(slot)?;
        match std::mem::replace(waiting, Waiting::Nobody) {
            Waiting::Done(completion) => Some(completion),
            other => {
                *waiting = other;
                None
            }
        }
    }

    /// Leaves the slot to its completion, if that has not come in this moment.
    fn give_up(&self, slot: usize) -> Option<Completion> {
        let mut state = self.lock();
        let waiting = state.waiting.get_mut(slot)?;
        match std::mem::replace(waiting, Waiting::GaveUp) {
            Waiting::Done(completion) => {
                *waiting = Waiting::Nobody;
                Some(completion)
            }
            _ => None,
        }
    }

    /// Has `count` Asynchronous Event Requests outstanding. Base 2.1, 5.1.2.
    pub(crate) fn request_events(&self, count: u8) -> Result<(), QueueError> {
        let mut state = self.lock();
        for _ in 0..count {
            state.request_event()?;
        }
        state.core.ring()
    }

    /// The events that came since the last call, and how many more were lost.
    pub(crate) fn take_events(&self) -> (Vec<AsyncEvent>, u64) {
        let mut state = self.lock();
        state.reap();
        let lost = std::mem::take(&mut state.lost);
        (state.events.drain(..).collect(), lost)
    }

    /// Gives the completion queue entries that were consumed back, so that the controller
    /// interrupts for the next.
    pub(crate) fn release(&self) {
        // A queue that does not work any more says so to the next command.
        let _ = self.lock().core.release();
    }

    /// Takes the buffers of commands that never completed.
    pub(crate) fn take_buffers(&self) -> Vec<Buffer> {
        self.lock().core.take_buffers()
    }
}

impl State {
    /// Sorts the completions that are there, at most as many as the queue holds.
    fn reap(&mut self) {
        let mut ring = false;
        for _ in 0..self.core.capacity() {
            let Some(completion) = self.core.pop() else { break };
            let slot = completion.token.index();
            let Some(waiting) = self.waiting.get_mut(slot) else { continue };
            match std::mem::replace(waiting, Waiting::Nobody) {
                Waiting::Someone => *waiting = Waiting::Done(completion),
                Waiting::Event => ring |= self.event(&completion),
                Waiting::GaveUp | Waiting::Nobody | Waiting::Done(_) => {}
            }
        }
        // Both say so again to the next command if they fail.
        let _ = if ring { self.core.ring() } else { self.core.settle() };
    }

    /// Keeps an event, and asks for the next.
    fn event(&mut self, completion: &Completion) -> bool {
        if !completion.status.is_success() {
            if completion.status.code() != Status::ABORTED_SQ_DELETION {
                tracing::debug!("an Asynchronous Event Request ended with {}", completion.status);
            }
            return false;
        }
        if self.events.len() >= MAX_EVENTS {
            self.events.pop_front();
            self.lost += 1;
        }
        self.events.push_back(AsyncEvent::from_dw0(completion.dw0));
        self.request_event().is_ok()
    }

    fn request_event(&mut self) -> Result<(), QueueError> {
        let token =
            self.core.submit(Sqe::async_event_request(0), None, 0, 0).map_err(|r| r.reason)?;
        if let Some(waiting) = self.waiting.get_mut(token.index()) {
            *waiting = Waiting::Event;
        }
        Ok(())
    }
}

/// How to wait for a completion that comes within microseconds, usually.
#[derive(Default)]
struct Patience(u32);

impl Patience {
    fn pause(&mut self, at_most: Duration) {
        self.0 = self.0.saturating_add(1);
        match self.0 {
            0..32 => std::hint::spin_loop(),
            32..64 => std::thread::yield_now(),
            n => {
                let micros = 20u64 << ((n - 64) / 16).min(6);
                std::thread::sleep(Duration::from_micros(micros).min(at_most));
            }
        }
    }
}

/// What the specification calls the admin command.
pub(crate) fn admin_name(opcode: u8) -> String {
    AdminOpcode::try_from(opcode)
        .map_or_else(|unknown| unknown.to_string(), |opcode| opcode.name().to_owned())
}
