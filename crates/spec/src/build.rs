//! Complete commands, for the host side: `Sqe::read`, `Sqe::create_io_cq` and so on.
//!
//! The data pointer is not set, unless it is a field of the command. Add it with [`Sqe::with_prps`]
//! or [`Sqe::with_sgl`]. Sizes and counts whose names end in `0` are 0's based, as in the
//! specification.

use crate::Sqe;
use crate::admin::{
    Abort, CreateIoCq, CreateIoSq, DeleteIoQueue, DoorbellBufferConfig, FormatNvm, GetFeatures,
    GetLbaStatus, GetLogPage, Identify, NamespaceAttachment, NamespaceManagement, Sanitize,
    SetFeatures,
};
use crate::nvm::{CopyFields, DatasetManagement, RwFields};
use crate::opcode::{AdminOpcode, NvmOpcode};

impl Sqe {
    const fn admin(opcode: AdminOpcode, cid: u16, nsid: u32) -> Self {
        Self::new(opcode as u8, cid, nsid)
    }

    const fn rw(opcode: NvmOpcode, cid: u16, nsid: u32, slba: u64, nlb0: u16) -> Self {
        let mut sqe = Self::new(opcode as u8, cid, nsid);
        sqe.cdw10 = slba as u32;
        sqe.cdw11 = (slba >> 32) as u32;
        sqe.cdw12 = nlb0 as u32;
        sqe
    }

    /// Reads `nlb0 + 1` logical blocks from `slba`. NVM 1.1, "Read command".
    pub const fn read(nsid: u32, slba: u64, nlb0: u16, cid: u16) -> Self {
        Self::rw(NvmOpcode::Read, cid, nsid, slba, nlb0)
    }

    /// Writes `nlb0 + 1` logical blocks from `slba`. NVM 1.1, "Write command".
    pub const fn write(nsid: u32, slba: u64, nlb0: u16, cid: u16) -> Self {
        Self::rw(NvmOpcode::Write, cid, nsid, slba, nlb0)
    }

    /// Compares `nlb0 + 1` logical blocks from `slba` with the data. NVM 1.1, "Compare command".
    pub const fn compare(nsid: u32, slba: u64, nlb0: u16, cid: u16) -> Self {
        Self::rw(NvmOpcode::Compare, cid, nsid, slba, nlb0)
    }

    /// Reads `nlb0 + 1` logical blocks from `slba` without a data transfer. NVM 1.1, "Verify
    /// command".
    pub const fn verify(nsid: u32, slba: u64, nlb0: u16, cid: u16) -> Self {
        Self::rw(NvmOpcode::Verify, cid, nsid, slba, nlb0)
    }

    /// Zeroes `nlb0 + 1` logical blocks from `slba`, and deallocates them if `deac` is true. NVM
    /// 1.1, "Write Zeroes command".
    pub const fn write_zeroes(nsid: u32, slba: u64, nlb0: u16, deac: bool, cid: u16) -> Self {
        let mut sqe = Self::rw(NvmOpcode::WriteZeroes, cid, nsid, slba, nlb0);
        sqe.cdw12 |= (deac as u32) << 25;
        sqe
    }

    /// Makes `nlb0 + 1` logical blocks from `slba` unreadable until they are written. NVM 1.1,
    /// "Write Uncorrectable command".
    pub const fn write_uncorrectable(nsid: u32, slba: u64, nlb0: u16, cid: u16) -> Self {
        Self::rw(NvmOpcode::WriteUncorrectable, cid, nsid, slba, nlb0)
    }

    /// Creates any command with the layout of Read and Write, with all its fields.
    pub const fn with_rw(opcode: NvmOpcode, nsid: u32, fields: RwFields, cid: u16) -> Self {
        fields.encode(Self::new(opcode as u8, cid, nsid))
    }

    /// Sets Force Unit Access, for commands with the layout of Read and Write, and for Copy.
    #[must_use]
    pub const fn with_fua(mut self) -> Self {
        self.cdw12 |= 1 << 30;
        self
    }

    /// Flush. Base 2.1, 7.2 "Flush command".
    pub const fn flush(nsid: u32, cid: u16) -> Self {
        Self::new(NvmOpcode::Flush as u8, cid, nsid)
    }

    /// Dataset Management; the data are `fields.nr0 + 1` [`DsmRange`](crate::nvm::DsmRange)s.
    pub const fn dsm(nsid: u32, fields: DatasetManagement, cid: u16) -> Self {
        fields.encode(Self::new(NvmOpcode::DatasetManagement as u8, cid, nsid))
    }

    /// Copy; the data are `fields.nr0 + 1` source range entries.
    pub const fn copy(nsid: u32, fields: CopyFields, cid: u16) -> Self {
        fields.encode(Self::new(NvmOpcode::Copy as u8, cid, nsid))
    }

    /// Identify; the data are 4096 bytes.
    pub const fn identify(nsid: u32, fields: Identify, cid: u16) -> Self {
        fields.encode(Self::admin(AdminOpcode::Identify, cid, nsid))
    }

    /// Create I/O Completion Queue at `prp1`.
    pub const fn create_io_cq(fields: CreateIoCq, prp1: u64, cid: u16) -> Self {
        fields.encode(Self::admin(AdminOpcode::CreateIoCq, cid, 0)).with_prps(prp1, 0)
    }

    /// Create I/O Submission Queue at `prp1`.
    pub const fn create_io_sq(fields: CreateIoSq, prp1: u64, cid: u16) -> Self {
        fields.encode(Self::admin(AdminOpcode::CreateIoSq, cid, 0)).with_prps(prp1, 0)
    }

    /// Delete I/O Submission Queue.
    pub const fn delete_io_sq(qid: u16, cid: u16) -> Self {
        DeleteIoQueue { qid }.encode(Self::admin(AdminOpcode::DeleteIoSq, cid, 0))
    }

    /// Delete I/O Completion Queue.
    pub const fn delete_io_cq(qid: u16, cid: u16) -> Self {
        DeleteIoQueue { qid }.encode(Self::admin(AdminOpcode::DeleteIoCq, cid, 0))
    }

    /// Get Features.
    pub const fn get_features(nsid: u32, fields: GetFeatures, cid: u16) -> Self {
        fields.encode(Self::admin(AdminOpcode::GetFeatures, cid, nsid))
    }

    /// Set Features.
    pub const fn set_features(nsid: u32, fields: SetFeatures, cid: u16) -> Self {
        fields.encode(Self::admin(AdminOpcode::SetFeatures, cid, nsid))
    }

    /// Get Log Page; the data are `fields.length()` bytes.
    pub const fn get_log_page(nsid: u32, fields: GetLogPage, cid: u16) -> Self {
        fields.encode(Self::admin(AdminOpcode::GetLogPage, cid, nsid))
    }

    /// Get LBA Status; the data are `fields.length()` bytes.
    pub const fn get_lba_status(nsid: u32, fields: GetLbaStatus, cid: u16) -> Self {
        fields.encode(Self::admin(AdminOpcode::GetLbaStatus, cid, nsid))
    }

    /// Abort.
    pub const fn abort(fields: Abort, cid: u16) -> Self {
        fields.encode(Self::admin(AdminOpcode::Abort, cid, 0))
    }

    /// Asynchronous Event Request. Base 2.1, 5.1.2.
    pub const fn async_event_request(cid: u16) -> Self {
        Self::admin(AdminOpcode::AsyncEventRequest, cid, 0)
    }

    /// Keep Alive. Base 2.1, 5.1.14 "Keep Alive command".
    pub const fn keep_alive(cid: u16) -> Self {
        Self::admin(AdminOpcode::KeepAlive, cid, 0)
    }

    /// Doorbell Buffer Config with both buffers.
    pub const fn dbbuf_config(fields: DoorbellBufferConfig, cid: u16) -> Self {
        fields.encode(Self::admin(AdminOpcode::DoorbellBufferConfig, cid, 0))
    }

    /// Format NVM.
    pub const fn format_nvm(nsid: u32, fields: FormatNvm, cid: u16) -> Self {
        fields.encode(Self::admin(AdminOpcode::FormatNvm, cid, nsid))
    }

    /// Namespace Management.
    pub const fn namespace_management(nsid: u32, fields: NamespaceManagement, cid: u16) -> Self {
        fields.encode(Self::admin(AdminOpcode::NamespaceManagement, cid, nsid))
    }

    /// Namespace Attachment.
    pub const fn namespace_attachment(nsid: u32, fields: NamespaceAttachment, cid: u16) -> Self {
        fields.encode(Self::admin(AdminOpcode::NamespaceAttachment, cid, nsid))
    }

    /// Sanitize.
    pub const fn sanitize(fields: Sanitize, cid: u16) -> Self {
        fields.encode(Self::admin(AdminOpcode::Sanitize, cid, 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    #[test]
    fn a_read_byte_for_byte() {
        let sqe = Sqe::read(1, 0x1122_3344_5566_7788, 7, 0xabcd).with_prps(0x1000, 0x2000);
        let mut expected = [0u8; 64];
        expected[0] = 0x02;
        expected[2..4].copy_from_slice(&[0xcd, 0xab]);
        expected[4] = 1;
        expected[25] = 0x10;
        expected[33] = 0x20;
        expected[40..48].copy_from_slice(&[0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
        expected[48] = 7;
        assert_eq!(sqe.as_bytes(), expected);
    }

    #[test]
    fn io_commands() {
        for (sqe, opcode) in [
            (Sqe::read(5, 9, 3, 7), 0x02),
            (Sqe::write(5, 9, 3, 7), 0x01),
            (Sqe::compare(5, 9, 3, 7), 0x05),
            (Sqe::verify(5, 9, 3, 7), 0x0c),
            (Sqe::write_zeroes(5, 9, 3, false, 7), 0x08),
            (Sqe::write_uncorrectable(5, 9, 3, 7), 0x04),
        ] {
            assert_eq!((sqe.opcode, sqe.cid, sqe.nsid), (opcode, 7, 5));
            let fields = RwFields { slba: 9, nlb0: 3, ..RwFields::default() };
            assert_eq!(RwFields::decode(&sqe), fields);
        }
        assert!(RwFields::decode(&Sqe::write_zeroes(1, 0, 0, true, 0)).deac);
        assert!(RwFields::decode(&Sqe::write(1, 0, 0, 0).with_fua()).fua);
        let fields = RwFields { slba: 1 << 40, fua: true, prinfo: 0xf, ..RwFields::default() };
        let sqe = Sqe::with_rw(NvmOpcode::Read, 2, fields, 3);
        assert_eq!((sqe.opcode, RwFields::decode(&sqe)), (0x02, fields));
        assert_eq!(Sqe::flush(4, 8), Sqe::new(0x00, 8, 4));
        let fields = DatasetManagement { nr0: 2, ad: true, idr: false, idw: true };
        let sqe = Sqe::dsm(1, fields, 2);
        assert_eq!((sqe.opcode, DatasetManagement::decode(&sqe)), (0x09, fields));
        let fields = CopyFields { sdlba: 77, nr0: 3, fua: true, ..CopyFields::default() };
        let sqe = Sqe::copy(1, fields, 2);
        assert_eq!((sqe.opcode, CopyFields::decode(&sqe)), (0x19, fields));
    }

    #[test]
    fn admin_commands() {
        let fields = CreateIoCq { qid: 1, qsize0: 63, pc: true, ien: true, iv: 1 };
        let sqe = Sqe::create_io_cq(fields, 0x8000, 1);
        assert_eq!((sqe.opcode, sqe.prp1(), CreateIoCq::decode(&sqe)), (0x05, 0x8000, fields));
        let fields = CreateIoSq { qid: 1, qsize0: 63, pc: true, cqid: 1, ..Default::default() };
        let sqe = Sqe::create_io_sq(fields, 0x9000, 1);
        assert_eq!((sqe.opcode, sqe.prp1(), CreateIoSq::decode(&sqe)), (0x01, 0x9000, fields));
        let sqe = Sqe::delete_io_sq(6, 1);
        assert_eq!((sqe.opcode, DeleteIoQueue::decode(&sqe).qid), (0x00, 6));
        let sqe = Sqe::delete_io_cq(6, 1);
        assert_eq!((sqe.opcode, DeleteIoQueue::decode(&sqe).qid), (0x04, 6));
        let fields = Identify { cns: 1, ..Identify::default() };
        let sqe = Sqe::identify(0, fields, 1);
        assert_eq!((sqe.opcode, Identify::decode(&sqe)), (0x06, fields));
        let fields = GetFeatures { fid: 7, sel: 3, ..GetFeatures::default() };
        let sqe = Sqe::get_features(0, fields, 1);
        assert_eq!((sqe.opcode, GetFeatures::decode(&sqe)), (0x0a, fields));
        let fields = SetFeatures { fid: 7, cdw11: 0x3_0003, ..SetFeatures::default() };
        let sqe = Sqe::set_features(0, fields, 1);
        assert_eq!((sqe.opcode, SetFeatures::decode(&sqe)), (0x09, fields));
        let fields = GetLogPage { lid: 2, numd0: 127, ..GetLogPage::default() };
        let sqe = Sqe::get_log_page(crate::sqe::NSID_ALL, fields, 1);
        assert_eq!((sqe.opcode, GetLogPage::decode(&sqe)), (0x02, fields));
        let fields = GetLbaStatus { slba: 7, mndw0: 1023, rl: 8, atype: 2 };
        let sqe = Sqe::get_lba_status(1, fields, 1);
        assert_eq!((sqe.opcode, GetLbaStatus::decode(&sqe)), (0x86, fields));
        let fields = Abort { sqid: 1, cid: 9 };
        let sqe = Sqe::abort(fields, 1);
        assert_eq!((sqe.opcode, Abort::decode(&sqe)), (0x08, fields));
        let fields = DoorbellBufferConfig { shadow: 0x1000, event_idx: 0x2000 };
        let sqe = Sqe::dbbuf_config(fields, 1);
        assert_eq!((sqe.opcode, DoorbellBufferConfig::decode(&sqe)), (0x7c, fields));
        let fields = FormatNvm { lbaf: 1, ses: 1, ..FormatNvm::default() };
        let sqe = Sqe::format_nvm(1, fields, 1);
        assert_eq!((sqe.opcode, FormatNvm::decode(&sqe)), (0x80, fields));
        assert_eq!(Sqe::async_event_request(3), Sqe::new(0x0c, 3, 0));
        assert_eq!(Sqe::keep_alive(3), Sqe::new(0x18, 3, 0));
    }
}
