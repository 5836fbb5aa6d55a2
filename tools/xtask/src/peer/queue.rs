//! A queue pair, as a host has it.

use anyhow::{Context, Result, bail};
use shadowbell_memory::SharedBytes;
use shadowbell_spec::{Cqe, Sqe, regs};

use super::connection::{Connection, posted_write};

/// BAR0 of the controller, where registers and doorbells are.
pub(crate) const BAR0: u32 = 0;

/// A submission queue and its completion queue of as many entries, one beside the other in the
/// guest's memory.
#[derive(Debug, Clone)]
pub(crate) struct Queue {
    pub(crate) qid: u16,
    pub(crate) entries: u16,
    sq: SharedBytes,
    cq: SharedBytes,
    tail: u16,
    head: u16,
    phase: bool,
    /// Pushed and not popped.
    outstanding: u16,
    cid: u16,
}

impl Queue {
    /// Both rings are zero.
    pub(crate) fn new(qid: u16, entries: u16, sq: SharedBytes, cq: SharedBytes) -> Self {
        Self { qid, entries, sq, cq, tail: 0, head: 0, phase: true, outstanding: 0, cid: 0 }
    }

    /// Empties both rings, as a reset or a deletion leaves them to whoever begins again.
    pub(crate) fn clear(&mut self) {
        let _ = self.sq.fill(0, self.sq.len(), 0);
        let _ = self.cq.fill(0, self.cq.len(), 0);
        *self = Self::new(self.qid, self.entries, self.sq.clone(), self.cq.clone());
    }

    /// Where the two rings are in this process.
    pub(crate) fn addresses(&self) -> (usize, usize) {
        (self.sq.address(), self.cq.address())
    }

    /// How many commands have no completion yet.
    pub(crate) fn outstanding(&self) -> u16 {
        self.outstanding
    }

    /// How many more can be pushed.
    pub(crate) fn room(&self) -> u16 {
        (self.entries - 1).saturating_sub(self.outstanding)
    }

    /// The doorbell's place in BAR0.
    pub(crate) fn tail_offset(&self) -> u64 {
        regs::sq_doorbell_offset(self.qid, 0)
    }

    /// Puts a command into the ring; its identifier.
    pub(crate) fn push(&mut self, mut sqe: Sqe) -> Result<u16> {
        if self.room() == 0 {
            bail!("queue {} is full", self.qid);
        }
        sqe.cid = self.cid;
        // One of them must not be used.
        self.cid = (self.cid + 1) % 0x8000;
        self.sq.write(usize::from(self.tail) * Sqe::SIZE, &sqe).context("the submission queue")?;
        self.tail = (self.tail + 1) % self.entries;
        self.outstanding += 1;
        Ok(sqe.cid)
    }

    /// What rings for what was pushed.
    pub(crate) fn bell(&self) -> Vec<u8> {
        posted_write(BAR0, self.tail_offset(), &u32::from(self.tail).to_le_bytes())
    }

    /// Rings for what was pushed.
    pub(crate) fn ring(&self, link: &Connection) -> Result<()> {
        link.send(&self.bell(), &[])
    }

    /// A completion, if there is one.
    pub(crate) fn pop(&mut self) -> Option<Cqe> {
        let at = usize::from(self.head) * Cqe::SIZE;
        let word = self.cq.load_u32_acquire(at + 12)?;
        if (word >> 16 & 1 != 0) != self.phase {
            return None;
        }
        let cqe = self.cq.read(at)?;
        self.head = (self.head + 1) % self.entries;
        self.phase ^= self.head == 0;
        self.outstanding = self.outstanding.saturating_sub(1);
        Some(cqe)
    }

    /// What says which completions were consumed.
    pub(crate) fn head_bell(&self) -> Vec<u8> {
        let head = u32::from(self.head).to_le_bytes();
        posted_write(BAR0, self.tail_offset() + 4, &head)
    }

    /// Says which completions were consumed.
    pub(crate) fn consumed(&self, link: &Connection) -> Result<()> {
        link.send(&self.head_bell(), &[])
    }
}
