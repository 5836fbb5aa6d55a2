//! I/Os whose protection information this program makes and checks itself, instead of having the
//! controller insert and strip it.

use super::io_source::{CheckSummary, IoSource};
use super::pattern::Io;
use crate::content::{BadBlock, Fault};
use anyhow::{Context, anyhow};
use shadowbell_driver::{
    Buffer, Command, MetadataCommand, Namespace, ProtectionError, QueuePair, Refused, Token,
};
use shadowbell_spec::Status;
use shadowbell_spec::nvm::{PRINFO_APPTAG, PRINFO_GUARD, PRINFO_REFTAG};
use shadowbell_spec::protection::ProtectionFields;

/// What the application tag of every block is, so that something looks at it.
const APP_TAG: u16 = 0x5bd0;
/// The most bad blocks that are described; all are counted.
const DESCRIBED: usize = 8;

/// What `inner` does, with metadata in this program's hands.
pub(super) struct HostMetadata<L> {
    inner: L,
    namespace: Namespace,
    blocks: u32,
    /// By slot of the queue, a read under way.
    reads: Box<[Option<MetadataCommand>]>,
    /// The data of an I/O, without metadata.
    scratch: Box<[u8]>,
    found: CheckSummary,
}

impl<L> HostMetadata<L> {
    /// For I/Os of `bs` bytes.
    ///
    /// # Errors
    /// If the namespace has no protection information, or one command does not move as much.
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

    /// What is said of an I/O from this block on, with the number of each block as reference tag.
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

    /// Bytes from one block to the next, in an I/O's buffer and without metadata.
    fn steps(&self) -> (usize, usize) {
        let block = self.namespace.block_size() as usize;
        let extended = self.namespace.metadata().filter(|metadata| metadata.is_extended());
        (block + extended.map_or(0, |metadata| usize::from(metadata.size())), block)
    }

    /// Data of a write, from one after the other to where they are transferred.
    fn spread(&mut self, buffer: &mut Buffer) {
        let (step, block) = self.steps();
        if step == block || !buffer.copy_to(0, &mut self.scratch) {
            return;
        }
        for (nth, data) in self.scratch.chunks_exact(block).enumerate() {
            // There is room for all.
            let _ = buffer.copy_from(nth * step, data);
        }
    }

    /// Data of a read, from where they are transferred to one after the other.
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

/// Bytes of a buffer for an I/O of `bs` bytes with its metadata.
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
        // The part of the namespace that is the job's was checked to lie inside of it.
        let Ok(made) = made else { return queue.submit(command, Some(buffer)) };
        if io.write {
            self.spread(&mut buffer);
            // The buffer has room for all of it.
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
