//! I/O commands, as small as they can be until they are written into their queue.

use shadowbell_spec::Sqe;
use shadowbell_spec::nvm::{DatasetManagement, DsmRange, RwFields};
use shadowbell_spec::opcode::{DataTransfer, NvmOpcode, data_transfer};

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
    /// Bytes that the command moves; 0 if it has no data.
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
            transfer,
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
        self.transfer
    }

    /// Whether the device writes into the command's buffer.
    #[must_use]
    pub const fn writes_buffer(&self) -> bool {
        matches!(data_transfer(self.opcode), DataTransfer::ToHost | DataTransfer::Bidirectional)
    }

    /// The fields of a command of the Read and Write frame.
    #[must_use]
    pub const fn fields(&self) -> RwFields {
        RwFields::decode(&self.sqe(0))
    }

    /// The entry of a submission queue, without identifier and data pointer, as eight words: there
    /// the fields are side by side, and this way they need not meet on the stack first.
    #[inline]
    pub(crate) const fn words(&self) -> [u64; 8] {
        let first = self.opcode as u64 | (self.nsid as u64) << 32;
        let cdw12_13 = self.cdw12 as u64 | (self.cdw13 as u64) << 32;
        [first, 0, 0, 0, 0, self.cdw10_11, cdw12_13, 0]
    }

    /// The entry of a submission queue, without data pointer: for where speed does not matter.
    pub(crate) const fn sqe(&self, cid: u16) -> Sqe {
        let sqe: Sqe = zerocopy::transmute!(self.words());
        sqe.with_cid(cid)
    }
}
