//! The futures of I/O commands.

use super::AsyncQueue;
use super::state::{Freed, OpState};
use crate::command::Command;
use crate::dma::Buffer;
use crate::error::{IoError, IoErrorKind, QueueError};
use crate::queue::Completion;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// What an I/O command came to.
#[derive(Debug)]
pub struct Done {
    /// Command specific result, dword 0.
    pub dw0: u32,
    /// The buffer that it was submitted with.
    pub buffer: Option<Buffer>,
}

/// An I/O command under way. Made by [`AsyncQueue::submit`].
///
/// # Panics
/// If it is polled again after it was ready.
#[must_use = "nothing is submitted until the future is polled"]
pub struct Io {
    queue: AsyncQueue,
    stage: Stage,
}

enum Stage {
    /// Not polled yet, or waiting for a place with this ticket.
    New {
        command: Command,
        buffer: Option<Buffer>,
        ticket: Option<u64>,
    },
    /// In this place.
    InPlace(u32),
    /// It never had a chance.
    Refused(IoError),
    Over,
}

impl Io {
    pub(super) fn new(queue: AsyncQueue, command: Command, buffer: Option<Buffer>) -> Self {
        Self { queue, stage: Stage::New { command, buffer, ticket: None } }
    }

    /// Another command for the same queue.
    pub fn another(&self, command: Command, buffer: Option<Buffer>) -> Self {
        Self::new(self.queue.clone(), command, buffer)
    }

    pub(super) fn refused(queue: AsyncQueue, error: IoError) -> Self {
        Self { queue, stage: Stage::Refused(error) }
    }

    /// Finds a place and goes to the inbox, or waits for a place.
    fn enter(
        &mut self,
        command: Command,
        buffer: Option<Buffer>,
        ticket: Option<u64>,
        context: &Context<'_>,
    ) -> Poll<Result<Done, IoError>> {
        let inner = self.queue.inner();
        let waker = context.waker().clone();
        let mut state = inner.lock();
        if let Some(reason) = state.failed.clone() {
            // Everybody who waits hears of it, one after the other.
            let freed = state.leave(ticket);
            drop(state);
            freed.pass_on();
            return Poll::Ready(Err(IoError { kind: IoErrorKind::Queue(reason), buffer }));
        }
        let first = state.waiters.front().map(|waiter| waiter.ticket);
        let place = if first.is_none() || first == ticket { state.free.pop() } else { None };
        let Some(place) = place else {
            if state.is_late(ticket) {
                // Not with the controller: the buffer is ours to give back.
                let freed = state.leave(ticket);
                drop(state);
                freed.pass_on();
                return Poll::Ready(Err(inner.no_place(command.opcode, buffer)));
            }
            let (ticket, stale) = state.wait(ticket, waker, inner.timeout);
            let is_first = stale.is_none() && state.waiters.len() == 1;
            drop(state);
            drop(stale);
            if is_first {
                inner.announce();
            }
            self.stage = Stage::New { command, buffer, ticket: Some(ticket) };
            return Poll::Pending;
        };
        let freed = state.leave(ticket);
        if let Some(op) = state.op(place) {
            op.opcode = command.opcode;
            op.state = OpState::Queued(command, buffer);
            // A free place has no waker that this could drop.
            op.waker = Some(waker);
        }
        state.inbox.push_back(place);
        drop(state);
        self.stage = Stage::InPlace(place);
        self.queue.inner().announce();
        freed.pass_on();
        Poll::Pending
    }

    /// Looks for the completion.
    fn look(&mut self, place: u32, context: &Context<'_>) -> Poll<Result<Done, IoError>> {
        let inner = self.queue.inner();
        let waker = context.waker().clone();
        let mut state = inner.lock();
        let failed = state.failed.clone();
        let Some(op) = state.op(place) else { return Poll::Pending };
        let opcode = op.opcode;
        let outcome = match std::mem::replace(&mut op.state, OpState::Free) {
            OpState::Done(outcome) => outcome,
            OpState::Expired => {
                // The place stays taken until the completion.
                op.state = OpState::Abandoned;
                drop(state);
                self.stage = Stage::Over;
                return Poll::Ready(Err(inner.timed_out(opcode)));
            }
            OpState::Queued(_, buffer) if failed.is_some() => {
                Err(IoError { kind: queue_failed(failed, inner.qid), buffer })
            }
            OpState::Submitted if failed.is_some() => {
                Err(IoError { kind: queue_failed(failed, inner.qid), buffer: None })
            }
            pending => {
                op.state = pending;
                let stale = op.waker.replace(waker);
                drop(state);
                drop(stale);
                self.stage = Stage::InPlace(place);
                return Poll::Pending;
            }
        };
        let freed = state.release(place);
        drop(state);
        self.stage = Stage::Over;
        freed.pass_on();
        Poll::Ready(outcome.and_then(|completion| finish(opcode, completion)))
    }
}

impl Io {
    /// Nobody waits for the command in this place any more.
    fn abandon(&self, place: u32) {
        let mut state = self.queue.inner().lock();
        let Some(op) = state.op(place) else { return };
        let stale = op.waker.take();
        let (unsent, done, freed) = match std::mem::replace(&mut op.state, OpState::Abandoned) {
            OpState::Queued(_, buffer) => {
                // The thread has not seen it yet, and frees the place when it does.
                op.state = OpState::Cancelled;
                (buffer, None, None)
            }
            OpState::Done(outcome) => (None, Some(outcome), Some(state.release(place))),
            // The completion frees the place, and the buffer with it.
            _ => (None, None, None),
        };
        drop(state);
        drop((stale, unsent, done));
        freed.into_iter().for_each(Freed::pass_on);
    }
}

fn queue_failed(failed: Option<QueueError>, qid: u16) -> IoErrorKind {
    IoErrorKind::Queue(failed.unwrap_or(QueueError::Detached { qid }))
}

fn finish(opcode: u8, completion: Completion) -> Result<Done, IoError> {
    let Completion { status, dw0, buffer, .. } = completion;
    match status.into_result() {
        Ok(()) => Ok(Done { dw0, buffer }),
        Err(status) => Err(IoError { kind: IoErrorKind::Status { opcode, status, dw0 }, buffer }),
    }
}

impl Future for Io {
    type Output = Result<Done, IoError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::New { command, buffer, ticket } => self.enter(command, buffer, ticket, context),
            Stage::InPlace(place) => self.look(place, context),
            Stage::Refused(error) => Poll::Ready(Err(error)),
            Stage::Over => panic!("an I/O future was polled after it was ready"),
        }
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::New { ticket: ticket @ Some(_), .. } => {
                // The place that was for us is for the next.
                let mut state = self.queue.inner().lock();
                let freed = state.leave(ticket);
                drop(state);
                freed.pass_on();
            }
            Stage::InPlace(place) => self.abandon(place),
            Stage::New { ticket: None, .. } | Stage::Refused(_) | Stage::Over => {}
        }
    }
}

impl std::fmt::Debug for Io {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stage = match self.stage {
            Stage::New { ticket: None, .. } => "new",
            Stage::New { .. } => "waiting for a place",
            Stage::InPlace(_) => "under way",
            Stage::Refused(_) => "refused",
            Stage::Over => "over",
        };
        f.debug_struct("Io").field("stage", &stage).finish_non_exhaustive()
    }
}

/// An I/O command that moves data: gives its buffer back.
#[derive(Debug)]
#[must_use = "nothing is submitted until the future is polled"]
pub struct Transfer(pub(super) Io);

impl Future for Transfer {
    type Output = Result<Buffer, IoError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map(|outcome| {
            let buffer = outcome?.buffer;
            // A command that was submitted with a buffer completes with it.
            buffer.ok_or(IoError { kind: IoErrorKind::NoBuffer, buffer: None })
        })
    }
}

/// An I/O command of which only the success matters.
#[derive(Debug)]
#[must_use = "nothing is submitted until the future is polled"]
pub struct Unit(pub(super) Io);

impl Future for Unit {
    type Output = Result<(), IoError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map(|outcome| outcome.map(drop))
    }
}
