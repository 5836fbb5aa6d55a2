//! Futures of I/O commands.

use super::shared::{AsyncState, FreedOp, OpState};
use super::worker::AsyncHandle;
use crate::command::{Command, Completion};
use crate::dma::Buffer;
use crate::error::{IoError, IoErrorKind, QueueError};
use crate::metadata::MetadataCommand;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// Result of a successful I/O command.
#[derive(Debug)]
pub struct Completed {
    /// Command specific result, dword 0.
    pub dw0: u32,
    /// The buffer that the command was submitted with.
    pub buffer: Option<Buffer>,
}

/// Future of an I/O command. Created by [`AsyncQueue::submit`](super::AsyncQueue::submit).
///
/// # Panics
/// If it is polled again after it has returned `Ready`.
#[must_use = "nothing is submitted until the future is polled"]
pub struct Io {
    handle: Arc<AsyncHandle>,
    stage: Stage,
}

enum Stage {
    /// Not polled yet, or waiting for a free `Op`. A waiting future has a `ticket`.
    New {
        command: Command,
        buffer: Option<Buffer>,
        ticket: Option<u64>,
    },
    /// Like `New`, for a command with metadata.
    NewWithMetadata(Box<(MetadataCommand, Option<Buffer>, Option<u64>)>),
    /// Queued or in flight. The shared state of the command is the `Op` with this index.
    Active(u32),
    /// Not submitted, because the request was invalid or its memory was not available.
    Refused(IoError),
    Finished,
}

impl Io {
    pub(super) fn new(handle: Arc<AsyncHandle>, command: Command, buffer: Option<Buffer>) -> Self {
        Self { handle, stage: Stage::New { command, buffer, ticket: None } }
    }

    pub(super) fn with_metadata(
        handle: Arc<AsyncHandle>,
        command: MetadataCommand,
        buffer: Option<Buffer>,
    ) -> Self {
        Self { handle, stage: Stage::NewWithMetadata(Box::new((command, buffer, None))) }
    }

    pub(super) fn refused(handle: Arc<AsyncHandle>, error: IoError) -> Self {
        Self { handle, stage: Stage::Refused(error) }
    }

    /// Enters the queue like [`enter`](Self::enter), for a command with metadata. The metadata part
    /// is stored under the index of the `Op`.
    fn enter_with_metadata(
        &mut self,
        (command, buffer, ticket): (MetadataCommand, Option<Buffer>, Option<u64>),
        context: &Context<'_>,
    ) -> Poll<Result<Completed, IoError>> {
        let store_metadata = |state: &mut AsyncState, index| {
            state.with_metadata.insert(index, command);
        };
        let outcome = self.enter(command.command, buffer, ticket, context, store_metadata);
        self.stage = match std::mem::replace(&mut self.stage, Stage::Finished) {
            Stage::New { buffer, ticket, .. } => {
                Stage::NewWithMetadata(Box::new((command, buffer, ticket)))
            }
            stage => stage,
        };
        outcome
    }

    /// Takes a free `Op` (the shared state of a command) and puts its index into the inbox of the
    /// queue thread, or waits for a free `Op`. For a command with metadata, `store_metadata` stores
    /// the metadata part under the same index.
    fn enter(
        &mut self,
        command: Command,
        buffer: Option<Buffer>,
        ticket: Option<u64>,
        context: &Context<'_>,
        store_metadata: impl FnOnce(&mut AsyncState, u32),
    ) -> Poll<Result<Completed, IoError>> {
        let shared = self.handle.shared();
        let waker = context.waker().clone();
        let mut state = shared.lock();
        if let Some(reason) = state.failed.clone() {
            // The queue has failed: this future fails, and the next waiter is woken to fail as
            // well.
            let freed = state.remove_waiter(ticket);
            drop(state);
            freed.wake_next();
            return Poll::Ready(Err(IoError { kind: IoErrorKind::Queue(reason), buffer }));
        }
        let first = state.waiters.front().map(|waiter| waiter.ticket);
        let index = if first.is_none() || first == ticket { state.free.pop() } else { None };
        let Some(index) = index else {
            if state.has_timed_out(ticket) {
                // The command was never submitted to the controller, so the buffer can be returned.
                let freed = state.remove_waiter(ticket);
                drop(state);
                freed.wake_next();
                return Poll::Ready(Err(shared.queue_full(command.opcode, buffer)));
            }
            let (ticket, stale) = state.wait(ticket, waker, shared.timeout);
            let is_first = stale.is_none() && state.waiters.len() == 1;
            drop(state);
            drop(stale);
            if is_first {
                shared.notify_inbox();
            }
            self.stage = Stage::New { command, buffer, ticket: Some(ticket) };
            return Poll::Pending;
        };
        let freed = state.remove_waiter(ticket);
        store_metadata(&mut state, index);
        if let Some(op) = state.op(index) {
            op.opcode = command.opcode;
            op.state = OpState::Queued(command, buffer);
            // A free `Op` has no waker, so this assignment does not drop a waker while the lock is
            // held.
            op.waker = Some(waker);
        }
        state.inbox.push_back(index);
        drop(state);
        self.stage = Stage::Active(index);
        self.handle.shared().notify_inbox();
        freed.wake_next();
        Poll::Pending
    }

    /// Takes the result of the command, if it has completed.
    fn take_outcome(
        &mut self,
        index: u32,
        context: &Context<'_>,
    ) -> Poll<Result<Completed, IoError>> {
        let shared = self.handle.shared();
        let waker = context.waker().clone();
        let mut state = shared.lock();
        let failed = state.failed.clone();
        let Some(op) = state.op(index) else { return Poll::Pending };
        let opcode = op.opcode;
        let outcome = match std::mem::replace(&mut op.state, OpState::Free) {
            OpState::Completed(outcome) => outcome,
            OpState::Expired => {
                // The `Op` remains in use until the controller completes the command.
                op.state = OpState::Abandoned;
                drop(state);
                self.stage = Stage::Finished;
                return Poll::Ready(Err(shared.timed_out(opcode)));
            }
            OpState::Queued(_, buffer) if failed.is_some() => {
                Err(IoError { kind: queue_failed(failed, shared.qid), buffer })
            }
            OpState::Submitted if failed.is_some() => {
                Err(IoError { kind: queue_failed(failed, shared.qid), buffer: None })
            }
            pending => {
                op.state = pending;
                let stale = op.waker.replace(waker);
                drop(state);
                drop(stale);
                self.stage = Stage::Active(index);
                return Poll::Pending;
            }
        };
        let freed = state.free_op(index);
        drop(state);
        self.stage = Stage::Finished;
        freed.wake_next();
        Poll::Ready(outcome.and_then(|completion| finish(opcode, completion)))
    }

    /// Abandons the command of a dropped future.
    fn abandon(&self, index: u32) {
        let mut state = self.handle.shared().lock();
        let Some(op) = state.op(index) else { return };
        let stale = op.waker.take();
        let (unsent, done, freed) = match std::mem::replace(&mut op.state, OpState::Abandoned) {
            OpState::Queued(_, buffer) => {
                // The command is still in the inbox. The queue thread frees its `Op` when it reads
                // the inbox.
                op.state = OpState::Cancelled;
                (buffer, None, None)
            }
            OpState::Completed(outcome) => (None, Some(outcome), Some(state.free_op(index))),
            // The command is in flight: its completion frees the `Op` and the buffer.
            _ => (None, None, None),
        };
        drop(state);
        drop((stale, unsent, done));
        freed.into_iter().for_each(FreedOp::wake_next);
    }
}

fn queue_failed(failed: Option<QueueError>, qid: u16) -> IoErrorKind {
    IoErrorKind::Queue(failed.unwrap_or(QueueError::Detached { qid }))
}

fn finish(opcode: u8, completion: Completion) -> Result<Completed, IoError> {
    let Completion { status, dw0, buffer, .. } = completion;
    match status.into_result() {
        Ok(()) => Ok(Completed { dw0, buffer }),
        Err(status) => Err(IoError { kind: IoErrorKind::Status { opcode, status, dw0 }, buffer }),
    }
}

impl Future for Io {
    type Output = Result<Completed, IoError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match std::mem::replace(&mut self.stage, Stage::Finished) {
            Stage::New { command, buffer, ticket } => {
                self.enter(command, buffer, ticket, context, |_, _| {})
            }
            Stage::NewWithMetadata(new) => self.enter_with_metadata(*new, context),
            Stage::Active(index) => self.take_outcome(index, context),
            Stage::Refused(error) => Poll::Ready(Err(error)),
            Stage::Finished => panic!("an I/O future was polled after it was ready"),
        }
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        match std::mem::replace(&mut self.stage, Stage::Finished) {
            Stage::New { ticket: ticket @ Some(_), .. } => {
                // If a free `Op` was meant for this future, the next waiter gets it.
                let mut state = self.handle.shared().lock();
                let freed = state.remove_waiter(ticket);
                drop(state);
                freed.wake_next();
            }
            Stage::NewWithMetadata(new) if new.2.is_some() => {
                let mut state = self.handle.shared().lock();
                let freed = state.remove_waiter(new.2);
                drop(state);
                freed.wake_next();
            }
            Stage::Active(index) => self.abandon(index),
            Stage::New { ticket: None, .. }
            | Stage::NewWithMetadata(_)
            | Stage::Refused(_)
            | Stage::Finished => {}
        }
    }
}

impl std::fmt::Debug for Io {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stage = match self.stage {
            Stage::New { ticket: None, .. } => "new",
            Stage::New { .. } => "waiting for a free slot",
            Stage::NewWithMetadata(_) => "new or waiting, with metadata",
            Stage::Active(_) => "queued or in flight",
            Stage::Refused(_) => "refused",
            Stage::Finished => "over",
        };
        f.debug_struct("Io").field("stage", &stage).finish_non_exhaustive()
    }
}

/// Future of an I/O command that transfers data. Its result is the buffer of the command.
#[derive(Debug)]
#[must_use = "nothing is submitted until the future is polled"]
pub struct Transfer(pub(super) Io);

impl Future for Transfer {
    type Output = Result<Buffer, IoError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map(|outcome| {
            let buffer = outcome?.buffer;
            // The buffer cannot be missing: the command was submitted with it, so the completion
            // has it.
            buffer.ok_or(IoError { kind: IoErrorKind::NoBuffer, buffer: None })
        })
    }
}

/// Future of an I/O command without a result.
#[derive(Debug)]
#[must_use = "nothing is submitted until the future is polled"]
pub struct Unit(pub(super) Io);

impl Future for Unit {
    type Output = Result<(), IoError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map(|outcome| outcome.map(drop))
    }
}
