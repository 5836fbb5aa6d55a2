//! Confirmation before a disk with content is overwritten.

use crate::session::Session;
use anyhow::{anyhow, bail};
use shadowbell_config::target::Target;
use shadowbell_driver::{AttachOptions, Buffer, Namespace, QueuePair};
use shadowbell_process::exit::bad_input;
use shadowbell_signature::{Found, SPAN, find};
use std::time::{Duration, Instant};

/// Time limit for reading a block. On timeout, the check is skipped with a warning.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// Confirmation option of verbs that overwrite their target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::Args)]
pub(crate) struct Overwrite {
    /// Overwrite the target even if it holds a file system or a partition table
    #[arg(long)]
    pub(crate) force: bool,
}

impl Overwrite {
    /// Refuses a target with a file system or a partition table, unless `--force` is given. Uses a
    /// session of its own, which ends before the verb attaches.
    ///
    /// # Errors
    /// With exit status [`BAD_INPUT`] if the target has content; errors of [`Session::attach`].
    ///
    /// [`BAD_INPUT`]: shadowbell_process::exit::BAD_INPUT
    pub(crate) fn check(self, target: &Target) -> anyhow::Result<()> {
        // New disks in memory are empty.
        let is_new = |disk: &str| ["mem:", "null:"].iter().any(|kind| disk.starts_with(kind));
        if self.force || matches!(target, Target::Local { disk } if is_new(disk)) {
            return Ok(());
        }
        let options = AttachOptions { queue_pairs: 1, queue_depth: 2, ..AttachOptions::default() };
        let mut session = Session::attach(target, &options)?;
        let found = detect_content(&mut session);
        session.detach()?;
        match found {
            Ok(None) => Ok(()),
            Ok(Some(found)) => Err(bad_input(anyhow!(
                "{target} holds {found}, which would be overwritten; name another target, or \
                 confirm with `--force`"
            ))),
            Err(error) => {
                tracing::warn!("{target}: cannot check for existing content: {error:#}");
                Ok(())
            }
        }
    }
}

/// Detects a file system or partition table in the namespace.
fn detect_content(session: &mut Session) -> anyhow::Result<Option<Found>> {
    let namespace = session.namespace()?.clone();
    let Some(queue) = session.controller.take_queue_pair() else {
        bail!("the controller grants no queue pair");
    };
    let (bytes, block) = (namespace.bytes(), u64::from(namespace.block_size()));
    let span = bytes.min((SPAN as u64).next_multiple_of(block));
    let chunk = namespace.max_transfer_bytes().min(128 << 10) / block * block;
    let pool = session.controller.buffers(1, usize::try_from(chunk.max(block))?)?;
    let mut reader = Reader { namespace, queue, buffer: pool.take(), chunk: chunk.max(block) };
    let first = reader.read(0, span)?;
    let last = reader.read(bytes - span, span)?;
    Ok(find(bytes, &first, &last)?)
}

struct Reader {
    namespace: Namespace,
    queue: QueuePair,
    buffer: Option<Buffer>,
    chunk: u64,
}

impl Reader {
    /// Reads `len` bytes from byte `offset` on, both multiples of the block size.
    fn read(&mut self, mut offset: u64, len: u64) -> anyhow::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let end = offset + len;
        while offset < end {
            let len = self.chunk.min(end - offset);
            let lba = self.namespace.blocks_in(offset)?;
            let blocks = u32::try_from(self.namespace.blocks_in(len)?)?;
            let command = self.namespace.read(lba, blocks)?;
            let buffer = self.buffer.take();
            self.queue.submit(command, buffer).map_err(|error| anyhow!(error.reason))?;
            self.queue.ring()?;
            let deadline = Instant::now() + READ_TIMEOUT;
            let done = loop {
                if let Some(done) = self.queue.pop() {
                    break done;
                }
                if !self.queue.wait(Some(deadline))? && Instant::now() >= deadline {
                    bail!("a read timed out");
                }
            };
            if !done.status.is_success() {
                bail!("at byte {offset}: {}", done.status);
            }
            self.queue.ring_cq_doorbell_if_needed()?;
            let Some(buffer) = done.buffer else { bail!("a buffer was lost") };
            bytes.extend(buffer.to_vec(usize::try_from(len)?));
            self.buffer = Some(buffer);
            offset += len;
        }
        Ok(bytes)
    }
}
