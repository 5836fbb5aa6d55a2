//! Admin command dwords: decoded from an SQE, and encoded into one.
//!
//! Every `decode` accepts any entry: it extracts the fields even if the opcode does not match or
//! values are invalid. The controller has to validate them. `encode` writes the command's own
//! dwords (10 to 15) and leaves the rest of the entry unchanged; bits that do not fit a field are
//! dropped.

use crate::Sqe;
pub use crate::admin_namespaces::{NamespaceAttachment, NamespaceManagement, Sanitize};
use crate::layout::bits;

/// Create I/O Completion Queue. Base 2.1, 5.2.1 "Create I/O Completion Queue command".
///
/// PRP1 is the address of the queue. If `pc` is clear, PRP1 is the address of a PRP list of the
/// queue's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CreateIoCq {
    /// Queue Identifier, CDW10 15:0.
    pub qid: u16,
    /// Queue Size in entries, 0's based, CDW10 31:16.
    pub qsize0: u16,
    /// Physically Contiguous, CDW11 bit 0.
    pub pc: bool,
    /// Interrupts Enabled, CDW11 bit 1.
    pub ien: bool,
    /// Interrupt Vector, CDW11 31:16.
    pub iv: u16,
}

impl CreateIoCq {
    /// Decodes the command's dwords.
    pub const fn decode(sqe: &Sqe) -> Self {
        Self {
            qid: sqe.cdw10 as u16,
            qsize0: (sqe.cdw10 >> 16) as u16,
            pc: sqe.cdw11 & 1 != 0,
            ien: sqe.cdw11 & 2 != 0,
            iv: (sqe.cdw11 >> 16) as u16,
        }
    }

    /// Encodes the fields into the dwords of `sqe`.
    #[must_use]
    pub const fn encode(self, mut sqe: Sqe) -> Sqe {
        sqe.cdw10 = self.qid as u32 | (self.qsize0 as u32) << 16;
        sqe.cdw11 = self.pc as u32 | (self.ien as u32) << 1 | (self.iv as u32) << 16;
        sqe
    }
}

/// Create I/O Submission Queue. Base 2.1, 5.2.2 "Create I/O Submission Queue command".
///
/// PRP1 is the address of the queue. If `pc` is clear, PRP1 is the address of a PRP list of the
/// queue's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CreateIoSq {
    /// Queue Identifier, CDW10 15:0.
    pub qid: u16,
    /// Queue Size in entries, 0's based, CDW10 31:16.
    pub qsize0: u16,
    /// Physically Contiguous, CDW11 bit 0.
    pub pc: bool,
    /// Queue Priority, CDW11 2:1: 0 urgent, 1 high, 2 medium, 3 low.
    pub qprio: u8,
    /// Completion Queue Identifier, CDW11 31:16.
    pub cqid: u16,
    /// NVM Set Identifier, CDW12 15:0.
    pub nvmsetid: u16,
}

impl CreateIoSq {
    /// Decodes the command's dwords.
    pub const fn decode(sqe: &Sqe) -> Self {
        Self {
            qid: sqe.cdw10 as u16,
            qsize0: (sqe.cdw10 >> 16) as u16,
            pc: sqe.cdw11 & 1 != 0,
            qprio: bits(sqe.cdw11, 2, 1) as u8,
            cqid: (sqe.cdw11 >> 16) as u16,
            nvmsetid: sqe.cdw12 as u16,
        }
    }

    /// Encodes the fields into the dwords of `sqe`.
    #[must_use]
    pub const fn encode(self, mut sqe: Sqe) -> Sqe {
        sqe.cdw10 = self.qid as u32 | (self.qsize0 as u32) << 16;
        sqe.cdw11 = self.pc as u32 | (self.qprio as u32 & 3) << 1 | (self.cqid as u32) << 16;
        sqe.cdw12 = self.nvmsetid as u32;
        sqe
    }
}

/// Delete I/O Submission Queue and Delete I/O Completion Queue. Base 2.1, 5.2.4 and 5.2.3.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeleteIoQueue {
    /// Queue Identifier, CDW10 15:0.
    pub qid: u16,
}

impl DeleteIoQueue {
    /// Decodes the command's dwords.
    pub const fn decode(sqe: &Sqe) -> Self {
        Self { qid: sqe.cdw10 as u16 }
    }

    /// Encodes the fields into the dwords of `sqe`.
    #[must_use]
    pub const fn encode(self, mut sqe: Sqe) -> Sqe {
        sqe.cdw10 = self.qid as u32;
        sqe
    }
}

/// Abort. Base 2.1, 5.1.1 "Abort command". If bit 0 of dword 0 of the completion is set, the
/// command was not aborted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Abort {
    /// Submission Queue Identifier of the command to abort, CDW10 15:0.
    pub sqid: u16,
    /// Command Identifier of the command to abort, CDW10 31:16.
    pub cid: u16,
}

impl Abort {
    /// Dword 0 of the completion: the command was not aborted.
    pub const NOT_ABORTED: u32 = 1;

    /// Decodes the command's dwords.
    pub const fn decode(sqe: &Sqe) -> Self {
        Self { sqid: sqe.cdw10 as u16, cid: (sqe.cdw10 >> 16) as u16 }
    }

    /// Encodes the fields into the dwords of `sqe`.
    #[must_use]
    pub const fn encode(self, mut sqe: Sqe) -> Sqe {
        sqe.cdw10 = self.sqid as u32 | (self.cid as u32) << 16;
        sqe
    }
}

/// Get Log Page. Base 2.1, 5.1.12 "Get Log Page command".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GetLogPage {
    /// Log Page Identifier, CDW10 7:0; see [`crate::log`].
    pub lid: u8,
    /// Log Specific Parameter, CDW10 14:8.
    pub lsp: u8,
    /// Retain Asynchronous Event, CDW10 bit 15.
    pub rae: bool,
    /// Number of Dwords, 0's based: CDW11 15:0 and CDW10 31:16.
    pub numd0: u32,
    /// Log Specific Identifier, CDW11 31:16.
    pub lsi: u16,
    /// Log Page Offset, CDW13 and CDW12: bytes (a multiple of 4), or an index if `ot` is set.
    pub lpo: u64,
    /// Offset Type, CDW14 bit 23: `lpo` is an index.
    pub ot: bool,
    /// Command Set Identifier, CDW14 31:24.
    pub csi: u8,
    /// UUID Index, CDW14 6:0.
    pub uuid: u8,
}

impl GetLogPage {
    /// Decodes the command's dwords.
    pub const fn decode(sqe: &Sqe) -> Self {
        Self {
            lid: sqe.cdw10 as u8,
            lsp: bits(sqe.cdw10, 14, 8) as u8,
            rae: sqe.cdw10 & 1 << 15 != 0,
            numd0: sqe.cdw10 >> 16 | sqe.cdw11 << 16,
            lsi: (sqe.cdw11 >> 16) as u16,
            lpo: sqe.cdw12 as u64 | (sqe.cdw13 as u64) << 32,
            ot: sqe.cdw14 & 1 << 23 != 0,
            csi: (sqe.cdw14 >> 24) as u8,
            uuid: bits(sqe.cdw14, 6, 0) as u8,
        }
    }

    /// Encodes the fields into the dwords of `sqe`.
    #[must_use]
    pub const fn encode(self, mut sqe: Sqe) -> Sqe {
        sqe.cdw10 = self.lid as u32
            | (self.lsp as u32 & 0x7f) << 8
            | (self.rae as u32) << 15
            | self.numd0 << 16;
        sqe.cdw11 = self.numd0 >> 16 | (self.lsi as u32) << 16;
        sqe.cdw12 = self.lpo as u32;
        sqe.cdw13 = (self.lpo >> 32) as u32;
        sqe.cdw14 = self.uuid as u32 & 0x7f | (self.ot as u32) << 23 | (self.csi as u32) << 24;
        sqe
    }

    /// Number of bytes that the host requests: 4 bytes to 16 GiB.
    pub const fn length(&self) -> u64 {
        (self.numd0 as u64 + 1) * 4
    }
}

/// Identify. Base 2.1, 5.1.13 "Identify command".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identify {
    /// Controller or Namespace Structure, CDW10 7:0; see [`crate::identify::cns`].
    pub cns: u8,
    /// Controller Identifier, CDW10 31:16.
    pub cntid: u16,
    /// CNS Specific Identifier (such as an NVM Set Identifier), CDW11 15:0.
    pub cnssid: u16,
    /// Command Set Identifier, CDW11 31:24; see [`crate::identify::csi`].
    pub csi: u8,
    /// UUID Index, CDW14 6:0.
    pub uuid: u8,
}

impl Identify {
    /// Decodes the command's dwords.
    pub const fn decode(sqe: &Sqe) -> Self {
        Self {
            cns: sqe.cdw10 as u8,
            cntid: (sqe.cdw10 >> 16) as u16,
            cnssid: sqe.cdw11 as u16,
            csi: (sqe.cdw11 >> 24) as u8,
            uuid: bits(sqe.cdw14, 6, 0) as u8,
        }
    }

    /// Encodes the fields into the dwords of `sqe`.
    #[must_use]
    pub const fn encode(self, mut sqe: Sqe) -> Sqe {
        sqe.cdw10 = self.cns as u32 | (self.cntid as u32) << 16;
        sqe.cdw11 = self.cnssid as u32 | (self.csi as u32) << 24;
        sqe.cdw14 = self.uuid as u32 & 0x7f;
        sqe
    }
}

/// Get Features. Base 2.1, 5.1.11 "Get Features command".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GetFeatures {
    /// Feature Identifier, CDW10 7:0; see [`crate::feature::fid`].
    pub fid: u8,
    /// Select, CDW10 10:8; see [`crate::feature::Select`].
    pub sel: u8,
    /// CDW11, whose content depends on the feature.
    pub cdw11: u32,
    /// UUID Index, CDW14 6:0.
    pub uuid: u8,
}

impl GetFeatures {
    /// Decodes the command's dwords.
    pub const fn decode(sqe: &Sqe) -> Self {
        Self {
            fid: sqe.cdw10 as u8,
            sel: bits(sqe.cdw10, 10, 8) as u8,
            cdw11: sqe.cdw11,
            uuid: bits(sqe.cdw14, 6, 0) as u8,
        }
    }

    /// Encodes the fields into the dwords of `sqe`.
    #[must_use]
    pub const fn encode(self, mut sqe: Sqe) -> Sqe {
        sqe.cdw10 = self.fid as u32 | (self.sel as u32 & 7) << 8;
        sqe.cdw11 = self.cdw11;
        sqe.cdw14 = self.uuid as u32 & 0x7f;
        sqe
    }
}

/// Set Features. Base 2.1, 5.1.25 "Set Features command".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetFeatures {
    /// Feature Identifier, CDW10 7:0; see [`crate::feature::fid`].
    pub fid: u8,
    /// Save, CDW10 bit 31.
    pub sv: bool,
    /// CDW11, whose content depends on the feature: the value of most features.
    pub cdw11: u32,
    /// CDW12, whose content depends on the feature.
    pub cdw12: u32,
    /// CDW13, whose content depends on the feature.
    pub cdw13: u32,
    /// UUID Index, CDW14 6:0.
    pub uuid: u8,
    /// CDW15, whose content depends on the feature.
    pub cdw15: u32,
}

impl SetFeatures {
    /// Decodes the command's dwords.
    pub const fn decode(sqe: &Sqe) -> Self {
        Self {
            fid: sqe.cdw10 as u8,
            sv: sqe.cdw10 & 1 << 31 != 0,
            cdw11: sqe.cdw11,
            cdw12: sqe.cdw12,
            cdw13: sqe.cdw13,
            uuid: bits(sqe.cdw14, 6, 0) as u8,
            cdw15: sqe.cdw15,
        }
    }

    /// Encodes the fields into the dwords of `sqe`.
    #[must_use]
    pub const fn encode(self, mut sqe: Sqe) -> Sqe {
        sqe.cdw10 = self.fid as u32 | (self.sv as u32) << 31;
        sqe.cdw11 = self.cdw11;
        sqe.cdw12 = self.cdw12;
        sqe.cdw13 = self.cdw13;
        sqe.cdw14 = self.uuid as u32 & 0x7f;
        sqe.cdw15 = self.cdw15;
        sqe
    }
}

/// Device Self-test. Base 2.1, 5.1.5 "Device Self-test command". NSID selects the tested
/// namespaces: 0 for none (only the controller is tested), FFFFFFFFh for all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceSelfTest {
    /// Self-test Code, CDW10 3:0; see [`crate::log::stc`].
    pub stc: u8,
}

impl DeviceSelfTest {
    /// Decodes the command's dwords.
    pub const fn decode(sqe: &Sqe) -> Self {
        Self { stc: bits(sqe.cdw10, 3, 0) as u8 }
    }

    /// Encodes the fields into the dwords of `sqe`.
    #[must_use]
    pub const fn encode(self, mut sqe: Sqe) -> Sqe {
        sqe.cdw10 = self.stc as u32 & 0xf;
        sqe
    }
}

/// Get LBA Status. NVM 1.1, 4.2.1 "Get LBA Status command". See [`crate::lba_status`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GetLbaStatus {
    /// Starting LBA, CDW10 and CDW11.
    pub slba: u64,
    /// Maximum Number of Dwords to return, 0's based, CDW12.
    pub mndw0: u32,
    /// Range Length in logical blocks, CDW13 15:0; 0 for all up to the end of the namespace.
    pub rl: u16,
    /// Action Type, CDW13 31:24; see [`crate::lba_status::atype`].
    pub atype: u8,
}

impl GetLbaStatus {
    /// Decodes the command's dwords.
    pub const fn decode(sqe: &Sqe) -> Self {
        Self {
            slba: sqe.cdw10 as u64 | (sqe.cdw11 as u64) << 32,
            mndw0: sqe.cdw12,
            rl: sqe.cdw13 as u16,
            atype: (sqe.cdw13 >> 24) as u8,
        }
    }

    /// Encodes the fields into the dwords of `sqe`.
    #[must_use]
    pub const fn encode(self, mut sqe: Sqe) -> Sqe {
        sqe.cdw10 = self.slba as u32;
        sqe.cdw11 = (self.slba >> 32) as u32;
        sqe.cdw12 = self.mndw0;
        sqe.cdw13 = self.rl as u32 | (self.atype as u32) << 24;
        sqe
    }

    /// Size of the host's buffer: 4 bytes to 16 GiB.
    pub const fn length(&self) -> u64 {
        (self.mndw0 as u64 + 1) * 4
    }
}

/// Doorbell Buffer Config: both buffers have the size and alignment of a memory page. Base 2.1,
/// 5.2.5 "Doorbell Buffer Config command". See [`crate::dbbuf`] for their layout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DoorbellBufferConfig {
    /// PRP1: Shadow Doorbell buffer, which the host writes.
    pub shadow: u64,
    /// PRP2: EventIdx buffer, which the controller writes.
    pub event_idx: u64,
}

impl DoorbellBufferConfig {
    /// Decodes the command's data pointer.
    pub const fn decode(sqe: &Sqe) -> Self {
        Self { shadow: sqe.prp1(), event_idx: sqe.prp2() }
    }

    /// Encodes the fields into the data pointer of `sqe`.
    #[must_use]
    pub const fn encode(self, sqe: Sqe) -> Sqe {
        sqe.with_prps(self.shadow, self.event_idx)
    }
}

/// Format NVM. Base 2.1, 5.1.10 "Format NVM command".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FormatNvm {
    /// LBA (User Data) Format index, 0 to 63: CDW10 13:12 and 3:0.
    pub lbaf: u8,
    /// Metadata Settings, CDW10 bit 4: true if metadata is part of an extended logical block.
    pub mset: bool,
    /// Protection Information, CDW10 7:5: 0 none, 1 to 3 the type.
    pub pi: u8,
    /// Protection Information Location, CDW10 bit 8: true for the first bytes of the metadata,
    /// false for the last.
    pub pil: bool,
    /// Secure Erase Settings, CDW10 11:9: 0 none, 1 user data erase, 2 cryptographic erase.
    pub ses: u8,
}

impl FormatNvm {
    /// Decodes the command's dwords.
    pub const fn decode(sqe: &Sqe) -> Self {
        Self {
            lbaf: (bits(sqe.cdw10, 3, 0) | bits(sqe.cdw10, 13, 12) << 4) as u8,
            mset: sqe.cdw10 & 1 << 4 != 0,
            pi: bits(sqe.cdw10, 7, 5) as u8,
            pil: sqe.cdw10 & 1 << 8 != 0,
            ses: bits(sqe.cdw10, 11, 9) as u8,
        }
    }

    /// Encodes the fields into the dwords of `sqe`.
    #[must_use]
    pub const fn encode(self, mut sqe: Sqe) -> Sqe {
        sqe.cdw10 = self.lbaf as u32 & 0xf
            | (self.mset as u32) << 4
            | (self.pi as u32 & 7) << 5
            | (self.pil as u32) << 8
            | (self.ses as u32 & 7) << 9
            | (self.lbaf as u32 >> 4 & 3) << 12;
        sqe
    }
}

/// Firmware Commit. Base 2.1, 5.1.8 "Firmware Commit command".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FirmwareCommit {
    /// Firmware Slot, CDW10 2:0: 1 to 7, or 0 to let the controller choose.
    pub fs: u8,
    /// Commit Action, CDW10 5:3.
    pub ca: u8,
    /// Boot Partition ID, CDW10 bit 31.
    pub bpid: bool,
}

impl FirmwareCommit {
    /// Decodes the command's dwords.
    pub const fn decode(sqe: &Sqe) -> Self {
        Self {
            fs: bits(sqe.cdw10, 2, 0) as u8,
            ca: bits(sqe.cdw10, 5, 3) as u8,
            bpid: sqe.cdw10 & 1 << 31 != 0,
        }
    }

    /// Encodes the fields into the dwords of `sqe`.
    #[must_use]
    pub const fn encode(self, mut sqe: Sqe) -> Sqe {
        sqe.cdw10 = self.fs as u32 & 7 | (self.ca as u32 & 7) << 3 | (self.bpid as u32) << 31;
        sqe
    }
}

/// Firmware Image Download. Base 2.1, 5.1.9 "Firmware Image Download command".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FirmwareImageDownload {
    /// Number of Dwords, 0's based, CDW10.
    pub numd0: u32,
    /// Offset in dwords, CDW11.
    pub ofst: u32,
}

impl FirmwareImageDownload {
    /// Decodes the command's dwords.
    pub const fn decode(sqe: &Sqe) -> Self {
        Self { numd0: sqe.cdw10, ofst: sqe.cdw11 }
    }

    /// Encodes the fields into the dwords of `sqe`.
    #[must_use]
    pub const fn encode(self, mut sqe: Sqe) -> Sqe {
        sqe.cdw10 = self.numd0;
        sqe.cdw11 = self.ofst;
        sqe
    }

    /// Length of this part of the image in bytes.
    pub const fn length(&self) -> u64 {
        (self.numd0 as u64 + 1) * 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::opcode::AdminOpcode;
    use proptest::prelude::*;
    use zerocopy::FromBytes;

    #[test]
    fn fields_have_the_positions_of_the_specification() {
        let sqe = Sqe { cdw10: 0x00ff_0003, cdw11: 0x0005_0003, ..Sqe::default() };
        let cq = CreateIoCq { qid: 3, qsize0: 0xff, pc: true, ien: true, iv: 5 };
        assert_eq!(CreateIoCq::decode(&sqe), cq);
        let sqe = Sqe { cdw10: 0x00ff_0003, cdw11: 0x0002_0005, cdw12: 9, ..Sqe::default() };
        let sq = CreateIoSq { qid: 3, qsize0: 0xff, pc: true, qprio: 2, cqid: 2, nvmsetid: 9 };
        assert_eq!(CreateIoSq::decode(&sqe), sq);
        let sqe = Sqe { cdw10: 0x1234_0002, ..Sqe::default() };
        assert_eq!(Abort::decode(&sqe), Abort { sqid: 2, cid: 0x1234 });
        assert_eq!(DeleteIoQueue::decode(&sqe), DeleteIoQueue { qid: 2 });

        let sqe = Sqe {
            cdw10: 0x03ff_8102,
            cdw11: 0x0007_0001,
            cdw12: 0x0000_1000,
            cdw13: 0x0000_0002,
            cdw14: 0x0380_0011,
            ..Sqe::default()
        };
        let log = GetLogPage {
            lid: 2,
            lsp: 1,
            rae: true,
            numd0: 0x1_03ff,
            lsi: 7,
            lpo: 0x2_0000_1000,
            ot: true,
            csi: 3,
            uuid: 0x11,
        };
        assert_eq!(GetLogPage::decode(&sqe), log);
        assert_eq!(log.length(), 0x1_0400 * 4);

        let sqe =
            Sqe { cdw10: 0x0009_0013, cdw11: 0x0200_0004, cdw14: 0x0000_0005, ..Sqe::default() };
        let identify = Identify { cns: 0x13, cntid: 9, cnssid: 4, csi: 2, uuid: 5 };
        assert_eq!(Identify::decode(&sqe), identify);

        let sqe = Sqe { cdw10: 0x8000_0307, cdw11: 0x000f_000f, ..Sqe::default() };
        assert_eq!(
            GetFeatures::decode(&sqe),
            GetFeatures { fid: 7, sel: 3, cdw11: 0x000f_000f, uuid: 0 }
        );
        let set = SetFeatures { fid: 7, sv: true, cdw11: 0x000f_000f, ..SetFeatures::default() };
        assert_eq!(SetFeatures::decode(&sqe), set);

        let (cdw10, cdw11, cdw13) = (0x89ab_cdef, 0x0123_4567, 0x0200_0042);
        let sqe = Sqe { cdw10, cdw11, cdw12: 1023, cdw13, ..Sqe::default() };
        let status = GetLbaStatus { slba: 0x0123_4567_89ab_cdef, mndw0: 1023, rl: 0x42, atype: 2 };
        assert_eq!((GetLbaStatus::decode(&sqe), status.length()), (status, 4096));

        let sqe = Sqe { cdw10: 0x3575, ..Sqe::default() };
        let format = FormatNvm { lbaf: 0x35, mset: true, pi: 3, pil: true, ses: 2 };
        assert_eq!(FormatNvm::decode(&sqe), format);
        let sqe = Sqe { cdw10: 0x8000_001a, ..Sqe::default() };
        assert_eq!(FirmwareCommit::decode(&sqe), FirmwareCommit { fs: 2, ca: 3, bpid: true });
    }

    #[test]
    fn longest_transfers_do_not_overflow() {
        let sqe = Sqe { cdw10: u32::MAX, cdw11: u32::MAX, ..Sqe::default() };
        assert_eq!(GetLogPage::decode(&sqe).length(), 1 << 34);
        assert_eq!(FirmwareImageDownload::decode(&sqe).length(), 1 << 34);
    }

    /// Checks that a decoded command is the same after it was encoded into an empty entry and
    /// decoded again.
    macro_rules! inverts {
        ($sqe:expr, $($command:ident)*) => {$({
            let command = $command::decode(&$sqe);
            let again = command.encode(Sqe::new(AdminOpcode::Identify as u8, 0, 0));
            prop_assert_eq!($command::decode(&again), command);
        })*};
    }

    proptest! {
        #[test]
        fn any_entry_is_decoded_and_encoded_again(bytes: [[u8; 16]; 4]) {
            let Ok(sqe) = Sqe::read_from_bytes(bytes.as_flattened()) else { unreachable!() };
            inverts!(
                sqe,
                CreateIoCq CreateIoSq DeleteIoQueue Abort GetLogPage Identify GetFeatures
                SetFeatures GetLbaStatus DoorbellBufferConfig FormatNvm FirmwareCommit
                FirmwareImageDownload DeviceSelfTest
            );
        }
    }
}
