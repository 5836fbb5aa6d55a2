//! Splitting of a range of blocks into commands, several of them in flight.

use crate::buffers::{Buffers, Lease};
use crate::error::BlockError;
use crate::in_flight::InFlight;
use crate::locks::RangeGuard;
use crate::shared::Handle;
use shadowbell_driver::{Buffer, Command, Namespace, RequestError};
use std::collections::VecDeque;
use std::sync::Arc;

/// Maximum number of blocks of a command without data. Below the 65536 that a command permits, so
/// that a controller for which each block is work gets the range in parts.
pub(crate) const MAX_BLOCKS: u64 = 1 << 15;

/// Commands and data of the parts of a range.
pub(crate) trait Parts {
    /// Creates the command for `blocks` blocks from `lba` on.
    fn command(
        &self,
        namespace: &Namespace,
        lba: u64,
        blocks: u32,
    ) -> Result<Command, RequestError>;

    /// Copies the `len` bytes at `at` into the buffer, before the command.
    fn fill(&mut self, at: u64, len: usize, buffer: &mut Buffer) -> Result<(), BlockError>;

    /// Copies the `len` bytes at `at` from the buffer, after the command.
    fn drain(&mut self, at: u64, len: usize, buffer: &Buffer) -> Result<(), BlockError>;
}

/// In-flight commands of one long request, oldest first. After a failure no further command starts,
/// but the commands in flight are waited for.
pub(crate) struct Window {
    commands: VecDeque<(u64, InFlight)>,
    limit: usize,
    /// First failure.
    pub(crate) outcome: Result<(), BlockError>,
}

impl Window {
    pub(crate) fn new(limit: usize) -> Self {
        Self { commands: VecDeque::with_capacity(limit), limit, outcome: Ok(()) }
    }

    /// True if another command may start.
    pub(crate) fn has_room(&self) -> bool {
        self.outcome.is_ok() && self.commands.len() < self.limit
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }

    /// Submits a command. `at` identifies it.
    pub(crate) async fn begin(&mut self, at: u64, command: Result<InFlight, BlockError>) {
        match command {
            Ok(mut command) => {
                command.submit().await;
                self.commands.push_back((at, command));
            }
            Err(error) => self.record(Err(error)),
        }
    }

    /// Waits for the oldest command; `None` if no command is in flight.
    pub(crate) async fn oldest(&mut self) -> Option<(u64, Result<Option<Lease>, BlockError>)> {
        let (at, command) = self.commands.pop_front()?;
        Some((at, command.await))
    }

    /// Records the outcome, unless an earlier one was a failure.
    pub(crate) fn record(&mut self, outcome: Result<(), BlockError>) {
        if self.outcome.is_ok() {
            self.outcome = outcome;
        }
    }
}

/// Takes a buffer for a command. Waits for one only if the request has no command in flight
/// (`first`): two requests that hold buffers and wait for more could deadlock.
pub(crate) async fn take_buffer(
    pool: &Arc<Buffers>,
    first: bool,
) -> Result<Option<Lease>, BlockError> {
    match pool.try_take() {
        None if first => pool.take().await.map(Some),
        lease => Ok(lease),
    }
}

/// Executes commands with data for the bytes from `start` to `end`, which are whole blocks.
///
/// Returns when no command is in flight, also after a failure.
pub(crate) async fn transfer(
    handle: &Handle,
    start: u64,
    end: u64,
    guard: Option<&Arc<RangeGuard>>,
    parts: &mut impl Parts,
) -> Result<(), BlockError> {
    let queue = handle.queue()?;
    let total = end.saturating_sub(start);
    let pool = if total <= queue.small.size() as u64 { &queue.small } else { &queue.large };
    let step = pool.size() as u64;
    if total <= step {
        // Fast path: one command, no allocation other than the buffer.
        if total == 0 {
            return Ok(());
        }
        let lease = prepare(handle, start, end, pool.take().await?, guard, parts)?.await?;
        let buffer = lease.as_ref().and_then(|lease| lease.buffer.as_ref());
        return parts.drain(start, total as usize, buffer.ok_or(BlockError::Buffer)?);
    }
    let mut window = Window::new(handle.shared.window);
    let mut next = start;
    loop {
        while window.has_room() && next < end {
            let Some(lease) = take_buffer(pool, window.is_empty()).await? else { break };
            let at = next;
            next = end.min(at + step);
            window.begin(at, prepare(handle, at, next, lease, guard, parts)).await;
        }
        let Some((at, outcome)) = window.oldest().await else { break };
        window.record(outcome.and_then(|lease| {
            let buffer = lease.as_ref().and_then(|lease| lease.buffer.as_ref());
            let len = (end.min(at + step) - at) as usize;
            parts.drain(at, len, buffer.ok_or(BlockError::Buffer)?)
        }));
    }
    window.outcome
}

/// Creates the command for the bytes from `at` to `end`, and fills its buffer.
fn prepare(
    handle: &Handle,
    at: u64,
    end: u64,
    mut lease: Lease,
    guard: Option<&Arc<RangeGuard>>,
    parts: &mut impl Parts,
) -> Result<InFlight, BlockError> {
    let namespace = handle.namespace()?;
    let (lba, blocks) = blocks_of(namespace, at, end)?;
    let command = parts.command(namespace, lba, blocks)?;
    let buffer = lease.buffer.as_mut().ok_or(BlockError::Buffer)?;
    parts.fill(at, (end - at) as usize, buffer)?;
    handle.command(command, Some(lease), guard.cloned())
}

/// Executes commands without data for the bytes from `start` to `end`, which are whole blocks.
///
/// Returns when no command is in flight, also after a failure.
pub(crate) async fn run_without_data(
    handle: &Handle,
    start: u64,
    end: u64,
    guard: &Arc<RangeGuard>,
    command: impl Fn(&Namespace, u64, u32) -> Result<Command, RequestError>,
) -> Result<(), BlockError> {
    let namespace = handle.namespace()?;
    let step = MAX_BLOCKS * u64::from(namespace.block_size());
    let mut window = Window::new(handle.shared.window);
    let mut next = start;
    loop {
        while window.has_room() && next < end {
            let at = next;
            next = end.min(at.saturating_add(step));
            let made = blocks_of(namespace, at, next)
                .and_then(|(lba, blocks)| Ok(command(namespace, lba, blocks)?))
                .and_then(|command| handle.command(command, None, Some(Arc::clone(guard))));
            window.begin(at, made).await;
        }
        let Some((_, outcome)) = window.oldest().await else { break };
        window.record(outcome.map(drop));
    }
    window.outcome
}

/// First block and number of blocks of a byte range.
fn blocks_of(namespace: &Namespace, at: u64, end: u64) -> Result<(u64, u32), BlockError> {
    let lba = namespace.blocks_in(at)?;
    let blocks = namespace.blocks_in(end.saturating_sub(at))?;
    let count = u32::try_from(blocks).map_err(|_| RequestError::Blocks { blocks })?;
    Ok((lba, count))
}
