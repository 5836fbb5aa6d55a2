//! I/O commands in a compact form, which is converted to a submission queue entry on submission,
//! and their completions.

use crate::dma::Buffer;
use shadowbell_spec::nvm::{DatasetManagement, DsmRange, PRINFO_REFTAG, RwFields};
use shadowbell_spec::opcode::{DataTransfer, NvmOpcode, data_transfer};
use shadowbell_spec::protection::GuardKind;
use shadowbell_spec::{Sqe, Status};

/// Upper limit of the bytes that one command transfers, even if the controller accepts more.
pub(crate) const MAX_BYTES: u64 = 1 << 29;
/// The bits of [`Command::transfer`] that count bytes. The upper two bits mark an entry with tags
/// ([`TagSource`]). If a mark is set, `transfer` exceeds every transfer limit, so the fast path
/// refuses the command. Only refused commands are examined for marks, so commands without tags cost
/// nothing extra.
const BYTES: u32 = (1 << 30) - 1;
/// Mark: the reference tag is the LBA of the first block.
const LBA_TAG: u32 = 1 << 31;
/// Mark: with `LBA_TAG`, a 48-bit reference tag (CRC-64 guard) instead of a 32-bit one; without
/// `LBA_TAG`, the queue stores dwords 2, 3, 14 and 15 of the entry.
const TAG_VARIANT: u32 = 1 << 30;

/// Position of PRINFO in CDW12.
const PRINFO_SHIFT: u32 = 26;

/// Tag dwords of a submission queue entry beyond the dwords of its [`Command`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TagSource {
    /// No tag dwords.
    Nothing,
    /// A reference tag that is the LBA of the first block, in the width of this guard type.
    LbaTag(GuardKind),
    /// Tag dwords that the queue stores separately from the command.
    Given,
}

/// An I/O command without its buffer: a few words that fit into registers.
///
/// Created by the methods of [`Namespace`](crate::Namespace), which convert blocks to bytes, or by
/// [`Command::raw`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    pub(crate) opcode: u8,
    pub(crate) nsid: u32,
    pub(crate) cdw10_11: u64,
    pub(crate) cdw12: u32,
    pub(crate) cdw13: u32,
    /// Bytes that the command transfers (0 without data), and in the two highest bits the marks for
    /// its tag dwords ([`TagSource`]).
    pub(crate) transfer: u32,
    /// Offset of the data in the buffer.
    pub(crate) offset: u32,
    /// True if the driver must not submit the command a second time after its outcome became
    /// unknown.
    pub(crate) once: bool,
}

impl Command {
    /// Placeholder of a slot without a command.
    pub(crate) const NONE: Self = Self::raw(0, 0, [0; 4], 0);

    /// Command in the slot of an admin command. Recovery never submits it again.
    pub(crate) const fn admin(transfer: u32) -> Self {
        Self::raw(0, 0, [0; 4], transfer).once()
    }

    /// Creates a command from its dwords 10 to 13, with `transfer` bytes of data (0 for none).
    /// Dwords 2, 3, 14 and 15 are zero.
    ///
    /// The device transfers as many bytes as the dwords describe, whatever `transfer` is. If the
    /// dwords describe more bytes than the buffer has, the device accesses memory beyond the shared
    /// buffer.
    #[must_use]
    pub const fn raw(opcode: u8, nsid: u32, cdw10_to_13: [u32; 4], transfer: u32) -> Self {
        let [cdw10, cdw11, cdw12, cdw13] = cdw10_to_13;
        Self {
            opcode,
            nsid,
            cdw10_11: cdw10 as u64 | (cdw11 as u64) << 32,
            cdw12,
            cdw13,
            // A larger value would set marks, so it is replaced by `BYTES`. This value exceeds
            // every transfer limit as well, so the submission is refused as too long.
            transfer: if transfer > BYTES { BYTES } else { transfer },
            offset: 0,
            // The effect of a Copy depends on the ranges in its buffer, which are unknown here. So
            // the driver never submits it a second time.
            once: opcode == NvmOpcode::Copy as u8,
        }
    }

    #[inline]
    pub(crate) const fn rw(
        opcode: NvmOpcode,
        nsid: u32,
        lba: u64,
        blocks: u16,
        transfer: u32,
    ) -> Self {
        Self {
            opcode: opcode as u8,
            nsid,
            cdw10_11: lba,
            cdw12: blocks as u32,
            cdw13: 0,
            transfer,
            offset: 0,
            once: false,
        }
    }

    pub(crate) const fn flush(nsid: u32) -> Self {
        Self::raw(NvmOpcode::Flush as u8, nsid, [0; 4], 0)
    }

    /// Dataset Management, Deallocate. `ranges` is 0's based. The buffer begins with the ranges.
    pub(crate) const fn deallocate(nsid: u32, ranges: u8) -> Self {
        let fields = DatasetManagement { nr0: ranges, idr: false, idw: false, ad: true };
        let sqe = Sqe::dsm(nsid, fields, 0);
        let transfer = (ranges as u32 + 1) * size_of::<DsmRange>() as u32;
        Self::raw(sqe.opcode, nsid, [sqe.cdw10, sqe.cdw11, 0, 0], transfer)
    }

    /// Sets Force Unit Access: a write is durable when it completes, a read comes from the medium.
    /// Applies to commands with the fields of Read and Write (NVM 1.1, "Write command").
    #[must_use]
    pub const fn with_fua(mut self) -> Self {
        self.cdw12 |= 1 << 30;
        self
    }

    /// Sets the first block, for commands with the fields of Read and Write. The block is not
    /// checked against the namespace's size.
    #[inline]
    #[must_use]
    pub const fn from_block(mut self, lba: u64) -> Self {
        self.cdw10_11 = lba;
        self
    }

    /// Sets the offset of the data in the buffer, a multiple of 4.
    #[must_use]
    pub const fn at(mut self, offset: u32) -> Self {
        self.offset = offset;
        self
    }

    /// Forbids the driver to submit the command a second time. If the outcome is unknown, the
    /// command fails with Command Aborted By Host. Used for commands that must be executed at most
    /// once, or that must not be executed after a later command of another queue.
    #[must_use]
    pub const fn once(mut self) -> Self {
        self.once = true;
        self
    }

    /// True if the driver may submit the command again after its completion was lost. The second
    /// execution has the same effect as the first, unless another command was submitted in between.
    /// True for Flush, Read, Write, Compare, Verify, Write Zeroes, Write Uncorrectable and Dataset
    /// Management, unless [`once`](Self::once) forbids it, and for a Copy that was created by
    /// [`Namespace::copy`](crate::Namespace::copy) with a destination that overlaps no source.
    #[must_use]
    pub const fn is_repeatable(&self) -> bool {
        const FLUSH: u8 = NvmOpcode::Flush as u8;
        const READ: u8 = NvmOpcode::Read as u8;
        const WRITE: u8 = NvmOpcode::Write as u8;
        const COMPARE: u8 = NvmOpcode::Compare as u8;
        const VERIFY: u8 = NvmOpcode::Verify as u8;
        const ZEROES: u8 = NvmOpcode::WriteZeroes as u8;
        const UNCORRECTABLE: u8 = NvmOpcode::WriteUncorrectable as u8;
        const COPY: u8 = NvmOpcode::Copy as u8;
        const DSM: u8 = NvmOpcode::DatasetManagement as u8;
        !self.once
            && matches!(
                self.opcode,
                FLUSH | READ | WRITE | COMPARE | VERIFY | ZEROES | UNCORRECTABLE | DSM | COPY
            )
    }

    /// The number of bytes that the command transfers.
    #[must_use]
    pub const fn transfer_bytes(&self) -> u32 {
        self.transfer & BYTES
    }

    /// Decodes the marks of `transfer`: the tag dwords of the entry.
    pub(crate) const fn tag_source(&self) -> TagSource {
        match (self.transfer & LBA_TAG != 0, self.transfer & TAG_VARIANT != 0) {
            (false, false) => TagSource::Nothing,
            (true, false) => TagSource::LbaTag(GuardKind::Crc16),
            (true, true) => TagSource::LbaTag(GuardKind::Crc64),
            (false, true) => TagSource::Given,
        }
    }

    /// Sets PRINFO bits (CDW12 29:26).
    pub(crate) const fn with_prinfo(mut self, prinfo: u8) -> Self {
        self.cdw12 |= (prinfo as u32 & 0xf) << PRINFO_SHIFT;
        self
    }

    /// Sets the LBA of the first block as reference tag. Takes effect only if PRINFO requests the
    /// check or the insertion of the reference tag.
    pub(crate) const fn with_lba_tag(mut self, guard: GuardKind) -> Self {
        let wide = matches!(guard, GuardKind::Crc64);
        self.transfer |= LBA_TAG | if wide { TAG_VARIANT } else { 0 };
        self
    }

    /// Marks that the queue stores the tag dwords of this command.
    pub(crate) const fn with_given_tags(mut self) -> Self {
        self.transfer = self.transfer & BYTES | TAG_VARIANT;
        self
    }

    /// Sets the number of transferred bytes. The caller ensures that it is below [`MAX_BYTES`]. The
    /// marks of the tag dwords in the two highest bits are retained.
    pub(crate) const fn set_transfer(&mut self, bytes: u32) {
        self.transfer = self.transfer & !BYTES | bytes & BYTES;
    }

    /// The reference tag that is derived from the first block; 0 if PRINFO does not check it.
    pub(crate) const fn lba_tag(&self, guard: GuardKind) -> u64 {
        if self.cdw12 >> PRINFO_SHIFT & PRINFO_REFTAG as u32 == 0 {
            return 0;
        }
        self.cdw10_11 & guard.ref_mask()
    }

    /// True if the device writes to the command's buffer.
    #[must_use]
    pub const fn writes_buffer(&self) -> bool {
        matches!(data_transfer(self.opcode), DataTransfer::ToHost | DataTransfer::Bidirectional)
    }

    /// Decodes the fields of a command with the layout of Read and Write.
    #[must_use]
    pub const fn fields(&self) -> RwFields {
        let mut sqe = self.sqe(0);
        if let TagSource::LbaTag(guard) = self.tag_source() {
            sqe.cdw14 = self.lba_tag(guard) as u32;
        }
        RwFields::decode(&sqe)
    }

    /// The submission queue entry without command identifier and data pointer, as eight words. The
    /// words are stored to the queue directly, so the entry is not assembled on the stack first.
    #[inline]
    pub(crate) const fn words(&self) -> [u64; 8] {
        let first = self.opcode as u64 | (self.nsid as u64) << 32;
        let cdw12_13 = self.cdw12 as u64 | (self.cdw13 as u64) << 32;
        [first, 0, 0, 0, 0, self.cdw10_11, cdw12_13, 0]
    }

    /// All fields in four words, which a call outside of the fast path can take in registers.
    #[inline(always)]
    pub(crate) const fn parts(&self) -> [u64; 4] {
        let first = self.opcode as u64 | (self.once as u64) << 8 | (self.nsid as u64) << 32;
        let cdw12_13 = self.cdw12 as u64 | (self.cdw13 as u64) << 32;
        let data = self.transfer as u64 | (self.offset as u64) << 32;
        [first, self.cdw10_11, cdw12_13, data]
    }

    /// Restores a command from its [`parts`](Self::parts).
    pub(crate) const fn from_parts([first, cdw10_11, cdw12_13, data]: [u64; 4]) -> Self {
        Self {
            opcode: first as u8,
            nsid: (first >> 32) as u32,
            cdw10_11,
            cdw12: cdw12_13 as u32,
            cdw13: (cdw12_13 >> 32) as u32,
            transfer: data as u32,
            offset: (data >> 32) as u32,
            once: first >> 8 & 1 != 0,
        }
    }

    /// The submission queue entry without data pointer, for code outside of the fast path.
    pub(crate) const fn sqe(&self, cid: u16) -> Sqe {
        let sqe: Sqe = zerocopy::transmute!(self.words());
        sqe.with_cid(cid)
    }
}

/// Identifies a submitted command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token {
    pub(crate) cid: u16,
    pub(crate) slot: u16,
}

impl Token {
    /// The command's slot: an index below [`QueuePair::capacity`](crate::QueuePair::capacity) that
    /// is unique among the outstanding commands of a queue. Programs can use the slot to index
    /// per-command state.
    #[inline]
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.slot)
    }

    /// The command identifier (CID) in the queue, for the Abort command.
    #[must_use]
    pub fn cid(self) -> u16 {
        self.cid
    }
}

/// A completed command.
#[derive(Debug)]
pub struct Completion {
    /// Token of the command, as returned by its submission.
    pub token: Token,
    /// Status of the completion queue entry.
    pub status: Status,
    /// Command specific result, dword 0.
    pub dw0: u32,
    /// Command specific result, dword 1.
    pub dw1: u32,
    /// The buffer of the command. The device no longer uses it.
    pub buffer: Option<Buffer>,
}

impl Completion {
    /// Completion of a command that the driver itself has ended: Command Aborted By Host.
    pub(crate) fn aborted_by_host(token: Token, buffer: Option<Buffer>) -> Self {
        Self { token, status: Status::ABORTED_BY_HOST, dw0: 0, dw1: 0, buffer }
    }
}
