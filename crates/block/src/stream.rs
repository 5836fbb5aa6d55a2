//! A range of blocks as commands: as many as it takes, several of them under way at once.

use crate::device::BlockDevice;
use crate::error::BlockError;
use crate::flight::Flight;
use crate::locks::RangeGuard;
use shadowbell_driver::{Buffer, Command, Namespace, RequestError};
use std::collections::VecDeque;
use std::sync::Arc;

/// The most blocks that a command without data names here, below the 65536 that it could: a
/// controller that has a lot to do with them gets it in parts.
pub(crate) const MAX_BLOCKS: u64 = 1 << 15;

/// What is done with each part of a range that moves data.
pub(crate) trait Parts {
    /// The command for `blocks` blocks from `lba` on.
    fn command(
        &self,
        namespace: &Namespace,
        lba: u64,
        blocks: u32,
    ) -> Result<Command, RequestError>;

    /// Puts the data for the bytes from `at` on into the buffer; `len` is how many the command
    /// moves.
    fn fill(&mut self, at: u64, len: usize, buffer: &mut Buffer) -> Result<(), BlockError>;

    /// Takes the data of the bytes from `at` on out of the buffer.
    fn drain(&mut self, at: u64, len: usize, buffer: &Buffer) -> Result<(), BlockError>;
}

impl BlockDevice {
    /// Runs commands over the bytes from `start` to `end`, which are whole blocks.
    ///
    /// Whatever fails, it returns when nothing is under way any more.
    pub(crate) async fn stream(
        &self,
        start: u64,
        end: u64,
        guard: Option<&Arc<RangeGuard>>,
        parts: &mut impl Parts,
    ) -> Result<(), BlockError> {
        let lane = self.lane()?;
        let total = end.saturating_sub(start);
        let pool = if total <= lane.small.size() as u64 { &lane.small } else { &lane.large };
        let step = pool.size() as u64;
        if total <= step {
            // The usual case takes no memory but the buffer.
            if total == 0 {
                return Ok(());
            }
            let lease = self.launch(start, end, pool.take().await?, guard, parts)?.await?;
            let buffer = lease.as_ref().and_then(|lease| lease.buffer.as_ref());
            return parts.drain(start, total as usize, buffer.ok_or(BlockError::Buffer)?);
        }
        let mut window: VecDeque<(u64, Flight)> = VecDeque::with_capacity(self.inner().window);
        let (mut at, mut outcome) = (start, Ok(()));
        loop {
            while outcome.is_ok() && at < end && window.len() < self.inner().window {
                // Whoever holds buffers does not wait for another one: two who did could wait for
                // each other.
                let lease = match (pool.try_take(), window.is_empty()) {
                    (Some(lease), _) => lease,
                    (None, true) => pool.take().await?,
                    (None, false) => break,
                };
                let next = end.min(at + step);
                match self.launch(at, next, lease, guard, parts) {
                    Ok(mut flight) => {
                        flight.submit().await;
                        window.push_back((at, flight));
                    }
                    Err(error) => outcome = Err(error),
                }
                at = next;
            }
            let Some((at, flight)) = window.pop_front() else { break };
            let landed = flight.await.and_then(|lease| {
                let buffer = lease.as_ref().and_then(|lease| lease.buffer.as_ref());
                let len = (end.min(at + step) - at) as usize;
                parts.drain(at, len, buffer.ok_or(BlockError::Buffer)?)
            });
            outcome = outcome.and(landed);
        }
        outcome
    }

    fn launch(
        &self,
        at: u64,
        end: u64,
        mut lease: crate::buffers::Lease,
        guard: Option<&Arc<RangeGuard>>,
        parts: &mut impl Parts,
    ) -> Result<Flight, BlockError> {
        let lane = self.lane()?;
        let namespace = lane.disk.namespace();
        let (lba, blocks) = blocks_of(namespace, at, end)?;
        let command = parts.command(namespace, lba, blocks)?;
        let buffer = lease.buffer.as_mut().ok_or(BlockError::Buffer)?;
        parts.fill(at, (end - at) as usize, buffer)?;
        let orphans = &self.inner().orphans;
        Ok(Flight::new(lane.disk.queue(), command, Some(lease), guard.cloned(), orphans))
    }

    /// Runs commands without data over the bytes from `start` to `end`, which are whole blocks.
    /// As [`stream`](Self::stream), it returns when nothing is under way any more.
    pub(crate) async fn sweep(
        &self,
        start: u64,
        end: u64,
        guard: &Arc<RangeGuard>,
        command: impl Fn(&Namespace, u64, u32) -> Result<Command, RequestError>,
    ) -> Result<(), BlockError> {
        let lane = self.lane()?;
        let namespace = lane.disk.namespace();
        let step = MAX_BLOCKS * u64::from(namespace.block_size());
        let mut window: VecDeque<Flight> = VecDeque::with_capacity(self.inner().window);
        let (mut at, mut outcome) = (start, Ok(()));
        loop {
            while outcome.is_ok() && at < end && window.len() < self.inner().window {
                let next = end.min(at.saturating_add(step));
                let made = blocks_of(namespace, at, next)
                    .and_then(|(lba, blocks)| Ok(command(namespace, lba, blocks)?));
                match made {
                    Ok(command) => {
                        let orphans = &self.inner().orphans;
                        let guard = Some(Arc::clone(guard));
                        let mut flight =
                            Flight::new(lane.disk.queue(), command, None, guard, orphans);
                        flight.submit().await;
                        window.push_back(flight);
                    }
                    Err(error) => outcome = Err(error),
                }
                at = next;
            }
            let Some(flight) = window.pop_front() else { break };
            outcome = outcome.and(flight.await.map(drop));
        }
        outcome
    }

    /// A command on its own.
    pub(crate) async fn single(
        &self,
        command: Command,
        lease: Option<crate::buffers::Lease>,
        guard: Option<Arc<RangeGuard>>,
    ) -> Result<Option<crate::buffers::Lease>, BlockError> {
        let orphans = &self.inner().orphans;
        Flight::new(self.lane()?.disk.queue(), command, lease, guard, orphans).await
    }
}

/// The first block and the number of blocks of a range of bytes.
fn blocks_of(namespace: &Namespace, at: u64, end: u64) -> Result<(u64, u32), BlockError> {
    let lba = namespace.blocks_in(at)?;
    let blocks = namespace.blocks_in(end.saturating_sub(at))?;
    let count = u32::try_from(blocks).map_err(|_| RequestError::Blocks { blocks })?;
    Ok((lba, count))
}
