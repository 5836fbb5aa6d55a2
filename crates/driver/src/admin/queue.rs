//! The admin queue: commands that wait for their completion, and the asynchronous events.

use crate::command::Command;
use crate::completion::{Completion, Token};
use crate::device::Device;
use crate::dma::Buffer;
use crate::error::{CommandError, QueueError, admin_name};
use crate::queue::{Core, QueueStats, ShadowCells};
use parking_lot::{Mutex, MutexGuard};
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::{Sqe, Status};
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// Events that are kept for a program that does not ask for them; the oldest go first.
const MAX_EVENTS: usize = 256;
/// How often a command that takes long has the controller's health looked at.
const HEALTH_INTERVAL: Duration = Duration::from_millis(100);

/// In the completion of a command that the driver has ended: of no slot.
const NO_TOKEN: Token = Token { cid: u16::MAX, slot: u16::MAX };

/// Whose a slot's command is.
#[derive(Clone, Copy)]
enum Owner {
    /// That of a thread in [`AdminQueue::execute`], with this ticket. Not the slot: that is free,
    /// and may be the next command's, before the thread has come to take its completion.
    Ticket(u64),
    /// It is an Asynchronous Event Request.
    Event,
    /// Nobody waits for it.
    Nobody,
}

struct AdminQueueState {
    core: Core,
    /// By slot.
    owners: Box<[Owner]>,
    /// What is waited for, by ticket, and what has come of it. Who gave up has no entry.
    tickets: BTreeMap<u64, Option<Completion>>,
    next_ticket: u64,
    events: VecDeque<AsyncEvent>,
    /// Events that were dropped because nobody took them.
    lost: u64,
    /// An event said that namespaces changed.
    namespaces_changed: bool,
    /// The most bytes that a command moves.
    limit: u64,
}

/// The admin submission and completion queue, shared by threads.
///
/// The lock is held to submit and to look for completions, not while a command is on its way, so
/// commands of several threads overlap.
pub(crate) struct AdminQueue {
    state: Mutex<AdminQueueState>,
}

impl AdminQueue {
    pub(crate) fn new(core: Core) -> Self {
        Self {
            state: Mutex::new(AdminQueueState {
                owners: vec![Owner::Event; core.capacity()].into(),
                limit: core.max_transfer(),
                core,
                tickets: BTreeMap::new(),
                next_ticket: 0,
                events: VecDeque::new(),
                lost: 0,
                namespaces_changed: false,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, AdminQueueState> {
        self.state.lock()
    }

    /// The most bytes that a command moves.
    pub(crate) fn max_transfer(&self) -> u64 {
        self.lock().limit
    }

    pub(crate) fn limit_transfer(&self, max: u64) {
        let mut state = self.lock();
        state.limit = state.limit.min(max);
        let limit = state.limit;
        state.core.limit_transfer(limit);
    }

    /// See [`shadowbell_doorbell::HostDoorbell::mirror`].
    pub(crate) fn mirror(&self, sq: ShadowCells, cq: ShadowCells) {
        let mut state = self.lock();
        state.core.sq_doorbell.mirror(sq);
        state.core.cq_doorbell.mirror(cq);
    }

    /// See [`shadowbell_doorbell::HostDoorbell::forget`].
    pub(crate) fn forget_shadow(&self) {
        let mut state = self.lock();
        state.core.sq_doorbell.forget();
        state.core.cq_doorbell.forget();
    }

    pub(crate) fn stats(&self) -> QueueStats {
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
        let refused = |source| CommandError::not_submitted(sqe.opcode, source);
        let timed_out = || CommandError::Timeout {
            device: device.name().to_owned(),
            command: admin_name(sqe.opcode),
            waited: began.elapsed(),
        };
        let mut backoff = PollBackoff::default();
        let mut buffer = buffer;
        let ticket = loop {
            let mut state = self.lock();
            state.reap();
            match state.core.submit(zerocopy::transmute!(sqe), buffer, Command::admin(transfer)) {
                Ok(token) => {
                    state.core.ring().map_err(refused)?;
                    break state.own(token);
                }
                Err(full) if matches!(full.reason, QueueError::Full { .. }) => {
                    drop(state);
                    buffer = full.buffer;
                    if began.elapsed() >= limit {
                        return Err(timed_out());
                    }
                    backoff.pause(limit.saturating_sub(began.elapsed()));
                }
                Err(other) => return Err(refused(other.reason)),
            }
        };
        let mut health = HEALTH_INTERVAL;
        let mut backoff = PollBackoff::default();
        loop {
            // The clock first: if this thread was not run for long, the controller still gets a
            // last look.
            let waited = began.elapsed();
            if let Some(completion) = self.take(ticket) {
                return Ok(completion);
            }
            if waited >= limit {
                return self.give_up(ticket).ok_or_else(timed_out);
            }
            if waited >= health {
                health = waited + HEALTH_INTERVAL;
                if let Some(why) = device.broken() {
                    let source = QueueError::Failed { qid: 0, why: why.into() };
                    return self.give_up(ticket).ok_or_else(|| refused(source));
                }
            }
            backoff.pause(limit - waited);
        }
    }

    fn take(&self, ticket: u64) -> Option<Completion> {
        let mut state = self.lock();
        state.reap();
        let completion = state.tickets.get_mut(&ticket)?.take()?;
        state.tickets.remove(&ticket);
        Some(completion)
    }

    /// Waits no more, unless the completion has come in this moment.
    fn give_up(&self, ticket: u64) -> Option<Completion> {
        self.lock().tickets.remove(&ticket)?
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

    /// Publishes the completion queue head, so that the controller interrupts for the next
    /// completion.
    pub(crate) fn ring_cq_doorbell(&self) {
        // If it fails, so does the next command.
        let _ = self.lock().core.ring_cq_doorbell();
    }

    /// Sends a command of which nobody waits for the end. Whether it was sent.
    pub(crate) fn send(&self, sqe: Sqe) -> bool {
        let mut state = self.lock();
        state.reap();
        let Ok(token) = state.submit(sqe) else { return false };
        if let Some(owner) = state.owners.get_mut(token.index()) {
            *owner = Owner::Nobody;
        }
        state.core.ring().is_ok()
    }

    /// Takes completions. Whether an event has said since the last call that namespaces changed.
    pub(crate) fn poll_namespaces_changed(&self) -> bool {
        let mut state = self.lock();
        state.reap();
        std::mem::take(&mut state.namespaces_changed)
    }

    /// Ends every command that a thread waits for.
    pub(crate) fn fail_all(&self) {
        self.lock().fail_all();
    }

    /// Begins again with another core: the controller is disabled, and touches nothing that the old
    /// one had.
    pub(crate) fn restart(&self, core: Core) {
        let mut state = self.lock();
        state.fail_all();
        let limit = state.limit;
        state.core = core;
        state.core.limit_transfer(limit);
    }

    /// Takes the buffers of commands that never completed.
    pub(crate) fn take_buffers(&self) -> Vec<Buffer> {
        self.lock().core.take_buffers()
    }
}

impl AdminQueueState {
    fn fail_all(&mut self) {
        for outcome in self.tickets.values_mut().filter(|outcome| outcome.is_none()) {
            *outcome = Some(Completion::aborted_by_host(NO_TOKEN, None));
        }
    }

    /// The command just submitted is waited for, with the ticket that this returns.
    fn own(&mut self, token: Token) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        if let Some(owner) = self.owners.get_mut(token.index()) {
            *owner = Owner::Ticket(ticket);
        }
        self.tickets.insert(ticket, None);
        ticket
    }

    /// Sorts the completions that are there, at most as many as the queue holds.
    fn reap(&mut self) {
        let mut ring = false;
        for _ in 0..self.core.capacity() {
            let Some(completion) = self.core.pop() else { break };
            match self.owners.get(completion.token.index()).copied() {
                Some(Owner::Ticket(ticket)) => {
                    if let Some(outcome) = self.tickets.get_mut(&ticket) {
                        *outcome = Some(completion);
                    }
                }
                Some(Owner::Event) => ring |= self.event(&completion),
                Some(Owner::Nobody) | None => {}
            }
        }
        // If it fails, so does the next command.
        let _ = if ring { self.core.ring() } else { self.core.ring_cq_doorbell_if_needed() };
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
        let event = AsyncEvent::from_dw0(completion.dw0);
        self.namespaces_changed |= event == AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED;
        self.events.push_back(event);
        self.request_event().is_ok()
    }

    fn submit(&mut self, sqe: Sqe) -> Result<Token, QueueError> {
        let words = zerocopy::transmute!(sqe);
        self.core.submit(words, None, Command::admin(0)).map_err(|refused| refused.reason)
    }

    fn request_event(&mut self) -> Result<(), QueueError> {
        let token = self.submit(Sqe::async_event_request(0))?;
        if let Some(owner) = self.owners.get_mut(token.index()) {
            *owner = Owner::Event;
        }
        Ok(())
    }
}

/// How to wait for a completion that comes within microseconds, usually.
#[derive(Default)]
struct PollBackoff(u32);

impl PollBackoff {
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
