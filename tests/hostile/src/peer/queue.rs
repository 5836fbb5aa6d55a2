//! Queue pair of a host.

use anyhow::{Context, Result, bail};
use shadowbell_memory::SharedBytes;
use shadowbell_spec::{Cqe, Sqe, regs};

use super::connection::{Connection, posted_write};

/// Region index of BAR0, which has the registers and doorbells.
pub const BAR0: u32 = 0;

/// A submission queue and its completion queue with the same number of entries, adjacent in the
/// guest's memory.
#[derive(Debug, Clone)]
pub struct Queue {
    pub qid: u16,
    pub entries: u16,
    sq: SharedBytes,
    cq: SharedBytes,
    tail: u16,
    head: u16,
    phase: bool,
    /// Number of submitted commands without a completion.
    outstanding: u16,
    cid: u16,
}

impl Queue {
    /// Creates a queue pair whose rings are zeroed.
    pub fn new(qid: u16, entries: u16, sq: SharedBytes, cq: SharedBytes) -> Self {
        Self { qid, entries, sq, cq, tail: 0, head: 0, phase: true, outstanding: 0, cid: 0 }
    }

    /// Clears both rings, for a queue that is created again after a reset or a deletion.
    pub fn clear(&mut self) {
        let _ = self.sq.fill(0, self.sq.len(), 0);
        let _ = self.cq.fill(0, self.cq.len(), 0);
        *self = Self::new(self.qid, self.entries, self.sq.clone(), self.cq.clone());
    }

    /// Addresses of the two rings in this process.
    pub fn addresses(&self) -> (usize, usize) {
        (self.sq.address(), self.cq.address())
    }

    /// Number of submitted commands without a completion.
    pub fn outstanding(&self) -> u16 {
        self.outstanding
    }

    /// Number of free submission queue entries.
    pub fn room(&self) -> u16 {
        (self.entries - 1).saturating_sub(self.outstanding)
    }

    /// Offset of the submission queue tail doorbell in BAR0.
    pub fn tail_offset(&self) -> u64 {
        regs::sq_doorbell_offset(self.qid, 0)
    }

    /// Writes a command into the ring. Returns its command identifier.
    pub fn push(&mut self, mut sqe: Sqe) -> Result<u16> {
        if self.room() == 0 {
            bail!("queue {} is full", self.qid);
        }
        sqe.cid = self.cid;
        // Identifiers below 8000h, because FFFFh is reserved.
        self.cid = (self.cid + 1) % 0x8000;
        self.sq.write(usize::from(self.tail) * Sqe::SIZE, &sqe).context("the submission queue")?;
        self.tail = (self.tail + 1) % self.entries;
        self.outstanding += 1;
        Ok(sqe.cid)
    }

    /// Message that writes the tail doorbell.
    pub fn bell(&self) -> Vec<u8> {
        posted_write(BAR0, self.tail_offset(), &u32::from(self.tail).to_le_bytes())
    }

    /// Writes the tail doorbell.
    pub fn ring(&self, link: &Connection) -> Result<()> {
        link.send(&self.bell(), &[])
    }

    /// Takes a completion, if there is one.
    pub fn pop(&mut self) -> Option<Cqe> {
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

    /// Message that writes the head doorbell.
    pub fn head_bell(&self) -> Vec<u8> {
        let head = u32::from(self.head).to_le_bytes();
        posted_write(BAR0, self.tail_offset() + 4, &head)
    }

    /// Writes the head doorbell.
    pub fn consumed(&self, link: &Connection) -> Result<()> {
        link.send(&self.head_bell(), &[])
    }
}
