//! I/O commands, as small as they can be until they are written into their queue.

use shadowbell_spec::Sqe;
use shadowbell_spec::nvm::{DatasetManagement, DsmRange, PRINFO_REFTAG, RwFields};
use shadowbell_spec::opcode::{DataTransfer, NvmOpcode, data_transfer};
use shadowbell_spec::protection::GuardKind;

/// The most bytes that a command of this driver moves, whatever the controller takes.
pub(crate) const MOST_BYTES: u64 = 1 << 29;
/// The bits of [`Command::transfer`] that count bytes. The others say what its entry has beside
/// dwords 10 to 13, and with one of them it is more than any command moves: so only a command that
/// the way of plain ones refuses is looked at once more, and plain ones pay nothing.
const BYTES: u32 = (1 << 30) - 1;
/// A reference tag that is the number of the first block.
const LBA_TAG: u32 = 1 << 31;
/// With `LBA_TAG`, one of 48 bits and not of 32; without, the queue has dwords 2, 3, 14 and 15.
const WIDE_OR_GIVEN: u32 = 1 << 30;

/// PRINFO, in CDW12.
const PRINFO_SHIFT: u32 = 26;

/// What an entry has beside the dwords of its [`Command`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beside {
    /// Nothing.
    Nothing,
    /// A reference tag that is the number of the first block, for such guards.
    LbaTag(GuardKind),
    /// What the queue keeps beside the command.
    Given,
}

/// An I/O command without its buffer: a few words that fit into registers.
///
/// Made by [`Namespace`](crate::Namespace), which knows how many bytes a block has, or with
/// [`Command::raw`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    pub(crate) opcode: u8,
    pub(crate) nsid: u32,
    pub(crate) cdw10_11: u64,
    pub(crate) cdw12: u32,
    pub(crate) cdw13: u32,
    /// Bytes that the command moves, 0 if it has no data, and in the highest bits what its entry
    /// has [`Beside`].
    pub(crate) transfer: u32,
    /// Where in its buffer they begin.
    pub(crate) offset: u32,
    /// Never to be submitted again by the driver.
    pub(crate) once: bool,
}

impl Command {
    /// What a slot without a command has.
    pub(crate) const NONE: Self = Self::raw(0, 0, [0; 4], 0);

    /// What is kept of a command of the control plane, which nobody submits again by itself.
    pub(crate) const fn admin(transfer: u32) -> Self {
        Self::raw(0, 0, [0; 4], transfer).once()
    }

    /// A command with its dwords 10 to 13 as they are, which moves `transfer` bytes (0 for a
    /// command without data). Dwords 2, 3, 14 and 15 are zero.
    ///
    /// The device believes the dwords and not `transfer`: a command that makes it move more than
    /// that reaches past the buffer, into other memory that was shared with the device.
    #[must_use]
    pub const fn raw(opcode: u8, nsid: u32, cdw10_to_13: [u32; 4], transfer: u32) -> Self {
        let [cdw10, cdw11, cdw12, cdw13] = cdw10_to_13;
        Self {
            opcode,
            nsid,
            cdw10_11: cdw10 as u64 | (cdw11 as u64) << 32,
            cdw12,
            cdw13,
            // What does not fit is too long in any case.
            transfer: if transfer > BYTES { BYTES } else { transfer },
            offset: 0,
            // What it does depends on what its buffer says.
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

    /// Deallocate the `ranges` (1 to 256) that the buffer begins with.
    pub(crate) const fn deallocate(nsid: u32, ranges: u8) -> Self {
        let fields = DatasetManagement { nr0: ranges, idr: false, idw: false, ad: true };
        let sqe = Sqe::dsm(nsid, fields, 0);
        let transfer = (ranges as u32 + 1) * size_of::<DsmRange>() as u32;
        Self::raw(sqe.opcode, nsid, [sqe.cdw10, sqe.cdw11, 0, 0], transfer)
    }

    /// This command with Force Unit Access: a write is durable when it completes, a read comes
    /// from the medium. For commands of the Read and Write frame (NVM 1.1, "Write command").
    #[must_use]
    pub const fn with_fua(mut self) -> Self {
        self.cdw12 |= 1 << 30;
        self
    }

    /// This command of the Read and Write frame from another block on. Nobody has checked whether
    /// that is there.
    #[inline]
    #[must_use]
    pub const fn from_block(mut self, lba: u64) -> Self {
        self.cdw10_11 = lba;
        self
    }

    /// This command with its data `offset` bytes into the buffer, a multiple of 4.
    #[must_use]
    pub const fn at(mut self, offset: u32) -> Self {
        self.offset = offset;
        self
    }

    /// This command, never to be submitted a second time by the driver: if it is not known how
    /// it ended, it fails with Command Aborted By Host. For what must happen once at most, and for
    /// what must not happen after something that another queue does.
    #[must_use]
    pub const fn once(mut self) -> Self {
        self.once = true;
        self
    }

    /// Whether the driver may submit the command again when its completion was lost: whether it
    /// does the same if it has been carried out already, and nothing else was submitted after it
    /// completed. That is so for Flush, Read, Write, Compare, Verify, Write Zeroes, Write
    /// Uncorrectable and Dataset Management, unless [`once`](Self::once) forbids it, and for a Copy
    /// of [`Namespace::copy`](crate::Namespace::copy) whose destination overlaps none of its
    /// sources.
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

    /// How many bytes the command moves.
    #[must_use]
    pub const fn transfer_bytes(&self) -> u32 {
        self.transfer & BYTES
    }

    /// What its entry has beside dwords 10 to 13.
    pub(crate) const fn beside(&self) -> Beside {
        match (self.transfer & LBA_TAG != 0, self.transfer & WIDE_OR_GIVEN != 0) {
            (false, false) => Beside::Nothing,
            (true, false) => Beside::LbaTag(GuardKind::Crc16),
            (true, true) => Beside::LbaTag(GuardKind::Crc64),
            (false, true) => Beside::Given,
        }
    }

    /// This command with these bits of PRINFO (CDW12 29:26).
    pub(crate) const fn with_prinfo(mut self, prinfo: u8) -> Self {
        self.cdw12 |= (prinfo as u32 & 0xf) << PRINFO_SHIFT;
        self
    }

    /// This command with the number of its first block as reference tag, if it says that one is
    /// checked or inserted.
    pub(crate) const fn with_lba_tag(mut self, guard: GuardKind) -> Self {
        let wide = matches!(guard, GuardKind::Crc64);
        self.transfer |= LBA_TAG | if wide { WIDE_OR_GIVEN } else { 0 };
        self
    }

    /// This command with dwords that are given to the queue.
    pub(crate) const fn with_given_tags(mut self) -> Self {
        self.transfer = self.transfer & BYTES | WIDE_OR_GIVEN;
        self
    }

    /// This command, which moves so many bytes, fewer than [`MOST_BYTES`].
    pub(crate) const fn set_transfer(&mut self, bytes: u32) {
        self.transfer = self.transfer & !BYTES | bytes & BYTES;
    }

    /// The reference tag that follows from its first block.
    pub(crate) const fn lba_tag(&self, guard: GuardKind) -> u64 {
        if self.cdw12 >> PRINFO_SHIFT & PRINFO_REFTAG as u32 == 0 {
            return 0;
        }
        self.cdw10_11 & guard.ref_mask()
    }

    /// Whether the device writes into the command's buffer.
    #[must_use]
    pub const fn writes_buffer(&self) -> bool {
        matches!(data_transfer(self.opcode), DataTransfer::ToHost | DataTransfer::Bidirectional)
    }

    /// The fields of a command of the Read and Write frame.
    #[must_use]
    pub const fn fields(&self) -> RwFields {
        let mut sqe = self.sqe(0);
        if let Beside::LbaTag(guard) = self.beside() {
            sqe.cdw14 = self.lba_tag(guard) as u32;
        }
        RwFields::decode(&sqe)
    }

    /// The entry of a submission queue, without identifier and data pointer, as eight words: there
    /// the fields are side by side, and this way they need not meet on the stack first.
    #[inline]
    pub(crate) const fn words(&self) -> [u64; 8] {
        let first = self.opcode as u64 | (self.nsid as u64) << 32;
        let cdw12_13 = self.cdw12 as u64 | (self.cdw13 as u64) << 32;
        [first, 0, 0, 0, 0, self.cdw10_11, cdw12_13, 0]
    }

    /// All of it, for a call that is not usual.
    #[inline(always)]
    pub(crate) const fn parts(&self) -> [u64; 4] {
        let first = self.opcode as u64 | (self.once as u64) << 8 | (self.nsid as u64) << 32;
        let cdw12_13 = self.cdw12 as u64 | (self.cdw13 as u64) << 32;
        let data = self.transfer as u64 | (self.offset as u64) << 32;
        [first, self.cdw10_11, cdw12_13, data]
    }

    /// The command of these [`parts`](Self::parts).
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

    /// The entry of a submission queue, without data pointer: for where speed does not matter.
    pub(crate) const fn sqe(&self, cid: u16) -> Sqe {
        let sqe: Sqe = zerocopy::transmute!(self.words());
        sqe.with_cid(cid)
    }
}
