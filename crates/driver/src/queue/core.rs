//! Rings and command slots of a queue pair, shared by the admin queue and the I/O queues.

use super::doorbell::Doorbell;
use super::stats::QueueStats;
use crate::command::{Command, Completion, Token};
use crate::dma::Buffer;
use crate::error::{QueueError, Refused};
use crate::metadata::Tags;
use crate::prp::PrpLists;
use crate::transport::TransportError;
use shadowbell_doorbell::RingSize;
use shadowbell_memory::{Ring, SqeBatch};
use shadowbell_spec::{Cqe, Sqe, Status};
use std::sync::Arc;

/// Divisor of the number of published outstanding commands. The tail is published as soon as the
/// number of unpublished commands reaches the quotient.
const UNPUBLISHED_DIVISOR: u32 = 2;
/// Number of unpublished commands at which the tail is always published.
const MAX_UNPUBLISHED: u32 = 16;

/// Bits of the command identifier (CDW0 31:16) in the first word of an entry.
const CID: u64 = 0xffff_0000;
/// Bits of PSDT (CDW0 15:14) in the first word of an entry; 0 selects PRPs.
const PSDT: u64 = 0xc000;

/// State of one outstanding command, in one cache line.
///
/// The order of the fields keeps `cid` and `ticks` apart: `cid` is read right after `ticks` is
/// written. If the fields were adjacent, the compiler would read both in one load. A load that is
/// wider than a preceding store has to wait until the store has reached the cache: see
/// [`SqeBatch`].
#[repr(C, align(64))]
pub(super) struct Slot {
    pub(super) buffer: Option<Buffer>,
    /// Identifier of the slot's command, or of its next command if the slot is free.
    pub(super) cid: u16,
    /// The submitted command, for a possible second submission.
    pub(super) command: Command,
    /// 0 if the slot is free, or if its command is late and tracked by the
    /// [`RetryTable`](super::retry::RetryTable). Otherwise 1 plus the number of watchdog ticks
    /// since the submission.
    pub(super) ticks: u8,
}

/// Components of a [`Core`].
pub(crate) struct CoreConfig {
    pub(crate) qid: u16,
    pub(crate) sq: Ring<{ Sqe::SIZE }>,
    pub(crate) sq_size: RingSize,
    pub(crate) cq: Ring<{ Cqe::SIZE }>,
    pub(crate) cq_size: RingSize,
    pub(crate) sq_doorbell: Doorbell,
    pub(crate) cq_doorbell: Doorbell,
    pub(crate) lists: PrpLists,
    pub(crate) max_transfer: u64,
}

/// Rings, doorbells and slots of a queue pair.
///
/// The low bits of a command identifier are the slot, the other bits count the uses of the slot.
/// Therefore a duplicate completion does not match the slot's next command.
pub(crate) struct Core {
    pub(super) qid: u16,
    pub(super) sq: Ring<{ Sqe::SIZE }>,
    pub(super) sq_size: RingSize,
    /// Index after the last entry that was added. New entries are in the batch until
    /// [`flush`](Core::flush) writes them to the queue.
    pub(super) sq_tail: u16,
    pub(super) sq_published: u16,
    sqe_batch: SqeBatch,
    /// Submission queue head as of the last plausible SQHD.
    pub(super) sq_head: u16,
    /// SQHD of the last completion, to be checked once for each batch.
    pub(super) reported_sq_head: u16,
    pub(super) cq: Ring<{ Cqe::SIZE }>,
    pub(super) cq_size: RingSize,
    pub(super) cq_head: u16,
    pub(super) phase: bool,
    /// Number of consumed completion queue entries since the head was published.
    pub(super) cq_unpublished: u32,
    cq_publish_at: u32,
    pub(crate) sq_doorbell: Doorbell,
    pub(crate) cq_doorbell: Doorbell,
    pub(super) slots: Box<[Slot]>,
    pub(super) free: Vec<u16>,
    pub(super) slot_mask: u16,
    pub(super) generation: u16,
    lists: PrpLists,
    max_transfer: u64,
    pub(super) stats: QueueStats,
    pub(super) failed: Option<Arc<str>>,
    /// Tag dwords by slot, for commands with [`TagSource::Given`](crate::command::TagSource). Empty
    /// until the first command of this kind.
    pub(super) tags: Box<[Tags]>,
}

impl Core {
    pub(crate) fn new(parts: CoreConfig) -> Self {
        // One submission queue entry always remains empty, and the number of outstanding commands
        // is below the completion queue's length. So neither queue overflows, even if the device
        // misbehaves.
        let capacity = parts.sq_size.entries().min(parts.cq_size.entries()) - 1;
        let capacity = u16::try_from(capacity).unwrap_or(u16::MAX);
        // FFFFh is not a valid command identifier (Base 2.1, 3.3.3.1). No identifier is FFFFh,
        // because the slot bits are never all ones.
        let bits = u16::BITS - capacity.leading_zeros();
        let slot_mask = 1u16.checked_shl(bits).map_or(u16::MAX, |bit| bit - 1);
        let slots = (0..capacity)
            .map(|cid| Slot { buffer: None, command: Command::NONE, cid, ticks: 0 })
            .collect();
        Self {
            qid: parts.qid,
            sq: parts.sq,
            sq_size: parts.sq_size,
            sq_tail: 0,
            sq_published: 0,
            sqe_batch: SqeBatch::new(),
            sq_head: 0,
            reported_sq_head: 0,
            cq: parts.cq,
            cq_size: parts.cq_size,
            cq_head: 0,
            phase: true,
            cq_unpublished: 0,
            cq_publish_at: (parts.cq_size.entries() / 4).max(1),
            sq_doorbell: parts.sq_doorbell,
            cq_doorbell: parts.cq_doorbell,
            slots,
            free: (0..capacity).rev().collect(),
            slot_mask,
            generation: slot_mask.wrapping_add(1),
            lists: parts.lists,
            max_transfer: parts.max_transfer,
            stats: QueueStats::default(),
            failed: None,
            tags: Box::default(),
        }
    }

    pub(crate) fn qid(&self) -> u16 {
        self.qid
    }

    pub(crate) fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Transfer limit of one command in bytes.
    pub(crate) fn max_transfer(&self) -> u64 {
        self.max_transfer
    }

    /// Lowers the transfer limit of one command.
    pub(crate) fn limit_transfer(&mut self, max: u64) {
        self.max_transfer = self.max_transfer.min(max);
    }

    #[inline]
    pub(crate) fn outstanding(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(crate) fn stats(&self) -> QueueStats {
        QueueStats {
            // `self.stats` holds the counts of the doorbells before the last restart of the queue.
            sq_doorbell_mmio_writes: self.stats.sq_doorbell_mmio_writes + self.sq_doorbell.trapped,
            cq_doorbell_mmio_writes: self.stats.cq_doorbell_mmio_writes + self.cq_doorbell.trapped,
            mmio_saved: self.stats.mmio_saved + self.sq_doorbell.saved() + self.cq_doorbell.saved(),
            polls: self.stats.completed + self.stats.empty_polls,
            ..self.stats
        }
    }

    pub(crate) fn stats_mut(&mut self) -> &mut QueueStats {
        &mut self.stats
    }

    /// The number of completions taken so far.
    pub(crate) fn completed(&self) -> u64 {
        self.stats.completed
    }

    /// Writes a submission queue entry of eight words, with its command identifier and data
    /// pointer. The slot stores `command`, which describes the data, for a possible second
    /// submission. The controller is notified by [`ring`](Self::ring).
    #[inline(always)]
    pub(crate) fn submit(
        &mut self,
        mut words: [u64; 8],
        buffer: Option<Buffer>,
        command: Command,
    ) -> Result<Token, Refused> {
        let Command { offset, transfer, .. } = command;
        let Some(slot) = self.free.pop() else {
            return Err(self.refuse_full(buffer));
        };
        let prps = if transfer == 0 {
            if self.failed.is_some() {
                return Err(self.refuse(slot, None, buffer));
            }
            None
        } else {
            // A failed queue refuses the command here, because `set_failed` sets the transfer limit
            // to 0.
            match self.prps(slot, buffer.as_ref(), offset, transfer) {
                Ok(prps) => Some(prps),
                // Performance: `command` is passed as words, because a reference would force
                // `command` into memory on the fast path as well. The result is boxed: a result in
                // the caller's memory would also force the token of the fast path into memory.
                Err(reason) => {
                    let parts = command.parts();
                    let outcome = self.submit_refused_by_fast_path(slot, reason, buffer, parts);
                    return outcome.map_err(|refused| *refused);
                }
            }
        };
        // The look-up cannot fail: `slot` is from the list of free slots.
        let Some(entry) = self.slots.get_mut(usize::from(slot)) else {
            return Err(self.refuse_full(buffer));
        };
        let cid = entry.cid;
        entry.ticks = 1;
        entry.command = command;
        // A free slot has no buffer, so the replaced value needs no drop.
        std::mem::forget(std::mem::replace(&mut entry.buffer, buffer));
        words[0] = words[0] & !CID | u64::from(cid) << CID.trailing_zeros();
        if let Some((prp1, prp2)) = prps {
            words[0] &= !PSDT;
            (words[3], words[4]) = (prp1, prp2);
        }
        self.push(words);
        self.stats.submitted += 1;
        Ok(Token { cid, slot })
    }

    /// Adds the command of a slot at the tail, like [`submit`](Self::submit), for code that is less
    /// performance critical.
    pub(super) fn push_slot(
        &mut self,
        slot: u16,
        mut words: [u64; 8],
        buffer: Option<Buffer>,
        command: Command,
    ) -> Token {
        let mut cid = 0;
        if let Some(entry) = self.slots.get_mut(usize::from(slot)) {
            cid = entry.cid;
            (entry.ticks, entry.command, entry.buffer) = (1, command, buffer);
        }
        words[0] |= u64::from(cid) << CID.trailing_zeros();
        self.push(words);
        self.stats.submitted += 1;
        Token { cid, slot }
    }

    /// Adds an entry at the tail of the submission queue, in the batch.
    #[inline(always)]
    pub(super) fn push(&mut self, words: [u64; 8]) {
        if self.sqe_batch.is_full() {
            self.flush();
        }
        self.sqe_batch.push(words);
        self.sq_tail = self.sq_size.next(self.sq_tail);
    }

    /// Writes the batch to the submission queue.
    #[inline]
    pub(super) fn flush(&mut self) {
        let staged = self.sqe_batch.staged() as u32;
        if staged != 0 {
            self.sqe_batch.flush(&self.sq, u32::from(self.sq_size.back(self.sq_tail, staged)));
        }
    }

    #[inline]
    pub(super) fn prps(
        &mut self,
        slot: u16,
        buffer: Option<&Buffer>,
        offset: u32,
        transfer: u32,
    ) -> Result<(u64, u64), QueueError> {
        let len = buffer.map_or(0, Buffer::len);
        let (start, bytes) = (u64::from(offset), u64::from(transfer));
        let Some(buffer) = buffer.filter(|_| start + bytes <= len as u64) else {
            return Err(QueueError::BufferTooShort { needed: transfer, offset, len });
        };
        if bytes > self.max_transfer {
            return Err(QueueError::TooLong { bytes, max: self.max_transfer });
        }
        if !offset.is_multiple_of(4) {
            return Err(QueueError::Misaligned { offset });
        }
        self.lists
            .prps(usize::from(slot), buffer.iova() + start, bytes)
            .ok_or(QueueError::TooLong { bytes, max: self.max_transfer })
    }

    /// Frees the slot of a refused command, and creates the error.
    #[cold]
    pub(super) fn refuse(
        &mut self,
        slot: u16,
        reason: Option<QueueError>,
        buffer: Option<Buffer>,
    ) -> Refused {
        self.free.push(slot);
        let reason = reason.filter(|_| self.failed.is_none());
        Refused { reason: reason.unwrap_or_else(|| self.failure()), buffer }
    }

    #[cold]
    pub(super) fn refuse_full(&self, buffer: Option<Buffer>) -> Refused {
        let reason = if self.failed.is_some() {
            self.failure()
        } else {
            QueueError::Full { qid: self.qid, outstanding: self.outstanding() as u32 }
        };
        Refused { reason, buffer }
    }

    /// Publishes the submission queue tail, and writes the register if the controller has requested
    /// it.
    #[inline]
    pub(crate) fn ring(&mut self) -> Result<(), QueueError> {
        self.check_sq_head();
        let outcome = if self.sq_tail != self.sq_published {
            self.flush();
            self.sq_published = self.sq_tail;
            self.stats.batches += 1;
            self.sq_doorbell.publish(self.sq_tail)
        } else {
            self.sq_doorbell.notify_if_needed()
        };
        if let Err(error) = outcome {
            return Err(self.fail(&error));
        }
        self.return_entries_if_short()
    }

    /// Publishes the tail in the shadow entry only, for a controller that has enough commands to
    /// keep polling. A later submission, or [`ring`](Self::ring), decides about the register write.
    #[inline]
    fn publish_deferred(&mut self) -> Result<(), QueueError> {
        self.check_sq_head();
        self.flush();
        self.sq_published = self.sq_tail;
        self.stats.batches += 1;
        if let Err(error) = self.sq_doorbell.publish_deferred(self.sq_tail) {
            return Err(self.fail(&error));
        }
        self.return_entries_if_short()
    }

    /// Publishes the tail if the controller has few published commands, or if enough unpublished
    /// commands have accumulated. Returns true if no later [`ring`](Self::ring) is needed.
    #[inline(always)]
    pub(crate) fn ring_in_time(&mut self) -> Result<bool, QueueError> {
        let unpublished = self.sq_size.distance(self.sq_published, self.sq_tail);
        let published = self.outstanding() as u32 - unpublished.min(self.outstanding() as u32);
        let due = unpublished >= (published / UNPUBLISHED_DIVISOR).min(MAX_UNPUBLISHED)
            && unpublished != 0;
        // The three calls are separate, so that each result is returned in a register and not
        // stored to memory. For the cost of a store to memory at this point, see
        // `shadowbell_memory::SqeBatch`.
        if !due {
            self.ring_cq_doorbell_if_short()?;
        } else if published >= MAX_UNPUBLISHED {
            self.publish_deferred()?;
        } else {
            self.ring()?;
        }
        Ok((due || unpublished == 0) && !self.sq_doorbell.has_deferred())
    }

    /// Publishes the completion queue head.
    pub(crate) fn ring_cq_doorbell(&mut self) -> Result<(), QueueError> {
        if self.cq_unpublished != 0 {
            self.cq_unpublished = 0;
            if let Err(error) = self.cq_doorbell.publish(self.cq_head) {
                return Err(self.fail(&error));
            }
        }
        Ok(())
    }

    /// Publishes the completion queue head if the controller could otherwise run out of free
    /// entries. Without interrupts, the controller uses the head for nothing else.
    #[inline(always)]
    fn ring_cq_doorbell_if_short(&mut self) -> Result<(), QueueError> {
        self.check_sq_head();
        self.return_entries_if_short()
    }

    #[inline(always)]
    fn return_entries_if_short(&mut self) -> Result<(), QueueError> {
        let room = self.cq_size.entries() - 1;
        let short = self.cq_unpublished + self.outstanding() as u32 > room;
        if short || self.cq_unpublished >= self.cq_publish_at {
            self.ring_cq_doorbell()
        } else {
            Ok(())
        }
    }

    /// The word with the phase tag, of the completion queue entry at the head. The load has acquire
    /// ordering: earlier writes of the controller are visible afterwards.
    #[inline]
    fn second_word(&self) -> u64 {
        self.cq.second_word(u32::from(self.cq_head))
    }

    #[inline]
    fn is_new(&self, word: u64) -> bool {
        (word >> 48 & 1 != 0) == self.phase
    }

    /// True if the completion queue has a new entry.
    #[inline]
    pub(crate) fn is_ready(&self) -> bool {
        self.is_new(self.second_word())
    }

    /// Takes the next completion. Skips entries without an outstanding command, at most as many as
    /// the queue has entries. Used for the admin queue, which does not retry commands; I/O queues
    /// use [`RetryTable::pop`](super::retry::RetryTable::pop).
    pub(crate) fn pop(&mut self) -> Option<Completion> {
        for _ in 0..self.cq_size.entries() {
            let Some(word) = self.pop_word() else { break };
            let completion = self.consume(word);
            if completion.is_some() {
                return completion;
            }
            self.advance();
            self.unknown_completion((word >> 32) as u16);
        }
        self.stats.empty_polls += 1;
        None
    }

    /// The second word of the entry at the head; `None` if the completion queue is empty.
    #[inline(always)]
    pub(crate) fn pop_word(&self) -> Option<u64> {
        let word = self.second_word();
        self.is_new(word).then_some(word)
    }

    /// Consumes the entry at the head, whose second word is `word`, if it completes the command of
    /// its slot.
    ///
    /// The completion is constructed in one place from registers, and remains in registers where
    /// this function is inlined: see [`SqeBatch`].
    #[inline(always)]
    pub(crate) fn consume(&mut self, word: u64) -> Option<Completion> {
        let cid = (word >> 32) as u16;
        let slot = cid & self.slot_mask;
        let entry = self.slots.get_mut(usize::from(slot));
        let entry = entry.filter(|entry| entry.cid == cid && entry.ticks != 0)?;
        entry.ticks = 0;
        entry.cid = cid.wrapping_add(self.generation);
        let buffer = entry.buffer.take();
        let first = self.advance();
        self.free.push(slot);
        self.stats.completed += 1;
        self.reported_sq_head = word as u16;
        if (word >> 16) as u16 != self.qid {
            self.record_bad_sq_head(word as u16, (word >> 16) as u16);
        }
        Some(Completion {
            token: Token { cid, slot },
            status: Status::from_bits((word >> 49) as u16),
            dw0: first as u32,
            dw1: (first >> 32) as u32,
            buffer,
        })
    }

    /// Advances the head by one entry. Returns the entry's first word.
    #[inline(always)]
    pub(super) fn advance(&mut self) -> u64 {
        let first = self.cq.read(u32::from(self.cq_head));
        self.cq_head = self.cq_size.next(self.cq_head);
        self.phase ^= self.cq_head == 0;
        self.cq_unpublished += 1;
        first
    }

    /// Publishes the completion queue head if completions were taken and the controller could run
    /// out of free entries.
    #[inline]
    pub(crate) fn ring_cq_doorbell_if_needed(&mut self) -> Result<(), QueueError> {
        if self.cq_unpublished == 0 { Ok(()) } else { self.ring_cq_doorbell_if_short() }
    }

    /// Checks SQHD of the last completion. The driver does not use SQHD, but a wrong SQHD indicates
    /// a misbehaving device. Called before the published tail advances: SQHD must be between the
    /// known head and the published tail. Indices wrap around, but the comparison is unambiguous,
    /// because the published tail is less than a queue length ahead of the known head.
    #[inline]
    fn check_sq_head(&mut self) {
        let head = self.reported_sq_head;
        if head == self.sq_head {
            return;
        }
        let moved = self.sq_size.distance(self.sq_head, head);
        let submitted = self.sq_size.distance(self.sq_head, self.sq_published);
        if u32::from(head) < self.sq_size.entries() && moved <= submitted {
            self.sq_head = head;
        } else {
            self.reported_sq_head = self.sq_head;
            self.record_bad_sq_head(head, self.qid);
        }
    }

    #[cold]
    fn record_bad_sq_head(&mut self, head: u16, sq_id: u16) {
        if self.stats.bad_sq_heads == 0 {
            tracing::warn!(
                qid = self.qid,
                head,
                sq_id,
                "the controller reports an impossible submission queue head or identifier; \
                 ignored, and not logged again"
            );
        }
        self.stats.bad_sq_heads += 1;
    }

    #[cold]
    pub(super) fn unknown_completion(&mut self, cid: u16) {
        if self.stats.unknown_completions == 0 {
            tracing::warn!(
                qid = self.qid,
                cid,
                "the controller completed a command that is not outstanding; ignored, and not \
                 logged again"
            );
        }
        self.stats.unknown_completions += 1;
    }

    #[cold]
    fn fail(&mut self, error: &TransportError) -> QueueError {
        self.set_failed(|| error.to_string().into());
        self.failure()
    }

    /// Marks the queue as failed. Later commands are refused: commands with data because the
    /// transfer limit is set to 0, and commands without data because `failed` is set.
    pub(super) fn set_failed(&mut self, why: impl FnOnce() -> Arc<str>) {
        self.failed.get_or_insert_with(why);
        self.max_transfer = 0;
    }

    #[cold]
    pub(crate) fn failure(&self) -> QueueError {
        let why = self.failed.clone().unwrap_or_else(|| "it was closed".into());
        QueueError::Failed { qid: self.qid, why }
    }

    /// Zeroes the rings and replaces the doorbells. The slots remain unchanged.
    pub(super) fn reset_rings(&mut self, doorbells: [Doorbell; 2]) {
        let [sq_doorbell, cq_doorbell] = doorbells;
        self.stats.sq_doorbell_mmio_writes += self.sq_doorbell.trapped;
        self.stats.cq_doorbell_mmio_writes += self.cq_doorbell.trapped;
        self.stats.mmio_saved += self.sq_doorbell.saved() + self.cq_doorbell.saved();
        (self.sq_doorbell, self.cq_doorbell) = (sq_doorbell, cq_doorbell);
        (0..self.sq_size.entries()).for_each(|at| self.sq.write(at, &[0u8; Sqe::SIZE]));
        (0..self.cq_size.entries()).for_each(|at| self.cq.write(at, &[0u8; Cqe::SIZE]));
        (self.sq_tail, self.sq_published, self.sq_head, self.reported_sq_head) = (0, 0, 0, 0);
        (self.cq_head, self.phase, self.cq_unpublished) = (0, true, 0);
    }

    /// Takes the buffers of all outstanding commands. If the device may still use the buffers, the
    /// caller must leak them.
    pub(crate) fn take_buffers(&mut self) -> Vec<Buffer> {
        self.slots.iter_mut().filter_map(|slot| slot.buffer.take()).collect()
    }
}
