//! Admin queue: synchronous commands, and asynchronous events.

use crate::command::{Command, Completion, Token};
use crate::device::Device;
use crate::dma::Buffer;
use crate::error::{CommandError, QueueError, admin_name};
use crate::queue::{Core, QueueStats, ShadowCells};
use parking_lot::{Mutex, MutexGuard};
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::{Sqe, Status};
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// Limit of stored events that the program has not taken; the oldest are dropped first.
const MAX_EVENTS: usize = 256;
/// Interval between status checks (CSTS) while a command is outstanding.
const HEALTH_INTERVAL: Duration = Duration::from_millis(100);

/// Token in completions of commands that the driver itself has ended.
const NO_TOKEN: Token = Token { cid: u16::MAX, slot: u16::MAX };

/// Owner of the command in a slot.
#[derive(Clone, Copy)]
enum Owner {
    /// A thread in [`AdminQueue::execute`], identified by a ticket. The slot number cannot identify
    /// the thread, because the slot may already hold another command when the thread takes its
    /// completion.
    Ticket(u64),
    /// An Asynchronous Event Request.
    Event,
    /// No owner: the completion is discarded.
    Discarded,
}

struct AdminQueueState {
    core: Core,
    /// Owners, indexed by slot.
    owners: Box<[Owner]>,
    /// Expected completions by ticket: `None` until the completion arrives. After a timeout, the
    /// ticket has no entry.
    tickets: BTreeMap<u64, Option<Completion>>,
    next_ticket: u64,
    events: VecDeque<AsyncEvent>,
    /// Number of events that were dropped because the program did not take them in time.
    lost: u64,
    /// True if a namespace change event has arrived.
    namespaces_changed: bool,
    /// Transfer limit of one command in bytes.
    limit: u64,
}

/// Admin submission and completion queue, shared by threads.
///
/// A thread holds the lock while it submits or looks for completions, but not while its command is
/// outstanding. So commands of several threads can be in flight together.
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

    /// The transfer limit of one command in bytes.
    pub(crate) fn max_transfer(&self) -> u64 {
        self.lock().limit
    }

    pub(crate) fn limit_transfer(&self, max: u64) {
        let mut state = self.lock();
        state.limit = state.limit.min(max);
        let limit = state.limit;
        state.core.limit_transfer(limit);
    }

    /// Adds shadow entries to both admin doorbells: see
    /// [`shadowbell_doorbell::HostDoorbell::attach_shadow`].
    pub(crate) fn attach_shadow(&self, sq: ShadowCells, cq: ShadowCells) {
        let mut state = self.lock();
        state.core.sq_doorbell.attach_shadow(sq);
        state.core.cq_doorbell.attach_shadow(cq);
    }

    /// Removes the shadow entries of both admin doorbells: see
    /// [`shadowbell_doorbell::HostDoorbell::detach_shadow`].
    pub(crate) fn detach_shadow(&self) {
        let mut state = self.lock();
        state.core.sq_doorbell.detach_shadow();
        state.core.cq_doorbell.detach_shadow();
    }

    pub(crate) fn stats(&self) -> QueueStats {
        self.lock().core.stats()
    }

    /// Executes one command and waits at most `limit` for its completion.
    ///
    /// The buffer is returned with the completion. After a timeout, the queue keeps the buffer
    /// until the controller completes the command or is disabled.
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
                    break state.register_wait(token);
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
            // The clock is read before the completion queue. If this thread was not scheduled for a
            // long time, the queue is still read once before the timeout is reported.
            let waited = began.elapsed();
            if let Some(completion) = self.take(ticket) {
                return Ok(completion);
            }
            if waited >= limit {
                return self.withdraw(ticket).ok_or_else(timed_out);
            }
            if waited >= health {
                health = waited + HEALTH_INTERVAL;
                if let Some(why) = device.broken() {
                    let source = QueueError::Failed { qid: 0, why: why.into() };
                    return self.withdraw(ticket).ok_or_else(|| refused(source));
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

    /// Ends the wait for a completion. Returns the completion if it has arrived since the last
    /// check.
    fn withdraw(&self, ticket: u64) -> Option<Completion> {
        self.lock().tickets.remove(&ticket)?
    }

    /// Submits `count` Asynchronous Event Requests. Base 2.1, 5.1.2.
    pub(crate) fn request_events(&self, count: u8) -> Result<(), QueueError> {
        let mut state = self.lock();
        for _ in 0..count {
            state.request_event()?;
        }
        state.core.ring()
    }

    /// Takes the events since the last call, and the number of lost events.
    pub(crate) fn take_events(&self) -> (Vec<AsyncEvent>, u64) {
        let mut state = self.lock();
        state.reap();
        let lost = std::mem::take(&mut state.lost);
        (state.events.drain(..).collect(), lost)
    }

    /// Publishes the completion queue head, so that the controller interrupts for the next
    /// completion.
    pub(crate) fn ring_cq_doorbell(&self) {
        // A failure of the register write is ignored here: the next command reports it.
        let _ = self.lock().core.ring_cq_doorbell();
    }

    /// Submits a command whose completion is discarded. Returns true if it was submitted.
    pub(crate) fn send(&self, sqe: Sqe) -> bool {
        let mut state = self.lock();
        state.reap();
        let Ok(token) = state.submit(sqe) else { return false };
        if let Some(owner) = state.owners.get_mut(token.index()) {
            *owner = Owner::Discarded;
        }
        state.core.ring().is_ok()
    }

    /// Reaps completions. Returns true if a namespace change event arrived since the last call.
    pub(crate) fn poll_namespaces_changed(&self) -> bool {
        let mut state = self.lock();
        state.reap();
        std::mem::take(&mut state.namespaces_changed)
    }

    /// Fails all commands that threads wait for.
    pub(crate) fn fail_all(&self) {
        self.lock().fail_all();
    }

    /// Replaces the core, and fails all commands of the old one. The caller has disabled the
    /// controller, so the controller no longer accesses the memory of the old core.
    pub(crate) fn restart(&self, core: Core) {
        let mut state = self.lock();
        state.fail_all();
        let limit = state.limit;
        state.core = core;
        state.core.limit_transfer(limit);
    }

    /// Takes the buffers of the commands that have not completed.
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

    /// Registers a wait for the submitted command. Returns its ticket.
    fn register_wait(&mut self, token: Token) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        if let Some(owner) = self.owners.get_mut(token.index()) {
            *owner = Owner::Ticket(ticket);
        }
        self.tickets.insert(ticket, None);
        ticket
    }

    /// Dispatches available completions, at most as many as the queue has slots.
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
                Some(Owner::Discarded) | None => {}
            }
        }
        // A failure of the register write is ignored here: the next command reports it.
        let _ = if ring { self.core.ring() } else { self.core.ring_cq_doorbell_if_needed() };
    }

    /// Stores an event, and submits a new Asynchronous Event Request. Returns true if the request
    /// was submitted.
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

/// Backoff of a polling wait for a completion that usually arrives within microseconds.
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

/// The data of an admin command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminData<'a> {
    /// No data.
    None,
    /// Bytes to transfer to the controller.
    ToController(&'a [u8]),
    /// Number of bytes to transfer from the controller.
    FromController(usize),
}

/// Result of an admin command.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdminResult {
    /// Status of the completion.
    pub status: Status,
    /// Command specific result, dword 0.
    pub dw0: u32,
    /// Command specific result, dword 1.
    pub dw1: u32,
    /// Bytes from the controller, for [`AdminData::FromController`].
    pub data: Vec<u8>,
}
