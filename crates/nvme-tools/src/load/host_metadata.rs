//! I/Os with PRACT cleared: this program generates and checks the protection information, and the
//! controller neither inserts nor strips it.

use super::io_source::{CheckSummary, IoSource};
use super::pattern::Io;
use crate::block_pattern::{BadBlock, Fault};
use anyhow::{Context, anyhow};
use shadowbell_driver::{
    Buffer, Command, MetadataCommand, Namespace, ProtectionError, QueuePair, Refused, Token,
};
use shadowbell_spec::Status;
use shadowbell_spec::nvm::{PRINFO_APPTAG, PRINFO_GUARD, PRINFO_REFTAG};
use shadowbell_spec::protection::ProtectionFields;

/// Application tag of every block; not 0, so that its check is effective.
const APP_TAG: u16 = 0x5bd0;
/// Largest number of bad blocks that are described; all are counted.
const DESCRIBED: usize = 8;

/// Wrapper that adds host-generated protection information to the I/Os of `inner`.
pub(super) struct HostMetadata<L> {
    inner: L,
    namespace: Namespace,
    blocks: u32,
    /// Reads in flight, by slot of the queue.
    reads: Box<[Option<MetadataCommand>]>,
    /// Data of one I/O, without metadata.
    scratch: Box<[u8]>,
    found: CheckSummary,
}

impl<L> HostMetadata<L> {
    /// Source for I/Os of `bs` bytes.
    ///
    /// # Errors
    /// The namespace has no protection information, or a command cannot transfer `bs` bytes with
    /// metadata.
    pub(super) fn new(inner: L, namespace: &Namespace, bs: u32) -> anyhow::Result<Self> {
        let blocks = bs / namespace.block_size();
        bytes(namespace, bs)?;
        Ok(Self {
            inner,
            namespace: namespace.clone(),
            blocks,
            reads: Box::default(),
            scratch: vec![0; bs as usize].into(),
            found: CheckSummary::default(),
        })
    }

    /// Protection fields of an I/O that begins at `lba`. The reference tag of a block is its LBA,
    /// except with protection type 3, which has no reference tag check.
    fn fields(&self, lba: u64) -> ProtectionFields {
        let reference = match self.namespace.metadata().map(|metadata| metadata.protection()) {
            Some(3) | None => 0,
            _ => PRINFO_REFTAG,
        };
        ProtectionFields {
            prinfo: PRINFO_GUARD | PRINFO_APPTAG | reference,
            app_tag: APP_TAG,
            app_mask: u16::MAX,
            ref_tag: lba,
        }
    }

    /// Distance between the starts of consecutive blocks in an I/O's buffer, and block size without
    /// metadata, both in bytes.
    fn steps(&self) -> (usize, usize) {
        let block = self.namespace.block_size() as usize;
        let extended = self.namespace.metadata().filter(|metadata| metadata.is_extended());
        (block + extended.map_or(0, |metadata| usize::from(metadata.size())), block)
    }

    /// Rearranges the data of a write from contiguous blocks to blocks interleaved with metadata.
    fn spread(&mut self, buffer: &mut Buffer) {
        let (step, block) = self.steps();
        if step == block || !buffer.copy_to(0, &mut self.scratch) {
            return;
        }
        for (nth, data) in self.scratch.chunks_exact(block).enumerate() {
            // Cannot fail: the buffer has room for all blocks.
            let _ = buffer.copy_from(nth * step, data);
        }
    }

    /// Rearranges the data of a read from blocks interleaved with metadata to contiguous blocks.
    fn gather(&mut self, buffer: &Buffer) {
        let (step, block) = self.steps();
        if step == block {
            return;
        }
        for (nth, data) in self.scratch.chunks_exact_mut(block).enumerate() {
            let _ = buffer.copy_to(nth * step, data);
        }
        let _ = buffer.bytes().write_from(0, &self.scratch);
    }

    fn bad(&mut self, error: ProtectionError) {
        self.found.bad += 1;
        let (lba, status) = match error {
            ProtectionError::Block { lba, status } => (lba, status),
            _ => (0, Status::GUARD_CHECK),
        };
        let offset = lba.saturating_mul(self.namespace.block_size().into());
        if self.found.described.len() < DESCRIBED {
            self.found.described.push(BadBlock { offset, fault: Fault::Protection(status) });
        }
    }
}

/// Buffer size for an I/O of `bs` bytes with its metadata.
///
/// # Errors
/// As [`HostMetadata::new`].
pub(super) fn bytes(namespace: &Namespace, bs: u32) -> anyhow::Result<usize> {
    let protection = namespace.metadata().map_or(0, |metadata| metadata.protection());
    if protection == 0 {
        return Err(anyhow!("--metadata host: the namespace has no protection information"));
    }
    let blocks = bs / namespace.block_size();
    let fields = ProtectionFields::default();
    let io = namespace.read_with_metadata(0, blocks, fields).context("--metadata host")?;
    Ok(io.buffer_bytes())
}

impl<L: IoSource> IoSource for HostMetadata<L> {
    fn next(&mut self) -> Option<Io> {
        self.inner.next()
    }

    fn fill(&mut self, io: Io, buffer: &mut Buffer) {
        self.inner.fill(io, buffer);
    }

    fn submit(
        &mut self,
        queue: &mut QueuePair,
        (command, io, lba): (Command, Io, u64),
        mut buffer: Buffer,
    ) -> Result<Token, Refused> {
        let (fields, blocks) = (self.fields(lba), self.blocks);
        let made = if io.write {
            self.namespace.write_with_metadata(lba, blocks, fields)
        } else {
            self.namespace.read_with_metadata(lba, blocks, fields)
        };
        // Cannot fail: the job's share was checked to be inside the namespace.
        let Ok(made) = made else { return queue.submit(command, Some(buffer)) };
        if io.write {
            self.spread(&mut buffer);
            // Cannot fail: the buffer has room for data and metadata.
            let _ = made.protect(&mut buffer);
        }
        let token = queue.submit_with_metadata(&made, Some(buffer))?;
        if token.index() >= self.reads.len() {
            let mut grown = std::mem::take(&mut self.reads).into_vec();
            grown.resize(queue.capacity().max(token.index() + 1), None);
            self.reads = grown.into();
        }
        if let Some(read) = self.reads.get_mut(token.index()) {
            *read = (!io.write).then_some(made);
        }
        Ok(token)
    }

    fn submitted(&mut self, slot: usize, io: Io) {
        self.inner.submitted(slot, io);
    }

    fn completed(&mut self, slot: usize, buffer: Option<&Buffer>) {
        let read = self.reads.get_mut(slot).and_then(Option::take);
        if let Some((read, buffer)) = read.zip(buffer) {
            self.found.checked += 1;
            if let Err(error) = read.check(buffer) {
                self.bad(error);
            }
            self.gather(buffer);
        }
        self.inner.completed(slot, buffer);
    }

    fn read_back(&mut self) -> bool {
        self.inner.read_back()
    }

    fn checks(&self) -> Option<CheckSummary> {
        let mut found = self.inner.checks().unwrap_or_default();
        found.add(self.found.clone());
        Some(found)
    }
}
