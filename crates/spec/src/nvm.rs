//! Dwords of the I/O commands of the NVM command set. NVM 1.1, 3.3 "NVM Command Set Commands".
//!
//! As in [`crate::admin`]: every `decode` accepts any entry, and `encode` drops bits that do not
//! fit.

use crate::Sqe;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Fields of Read, Write, Compare, Verify, Write Zeroes and Write Uncorrectable, which have the
/// same layout. The clause of each command defines the fields that it uses; the others are
/// reserved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RwFields {
    /// Starting LBA, CDW11 and CDW10.
    pub slba: u64,
    /// Number of Logical Blocks, 0's based, CDW12 15:0.
    pub nlb0: u16,
    /// Directive Type, CDW12 23:20 (Write). In Write Zeroes, bit 23 is Namespace Zeroes.
    pub dtype: u8,
    /// Storage Tag Check, CDW12 bit 24.
    pub stc: bool,
    /// Deallocate, CDW12 bit 25 (Write Zeroes).
    pub deac: bool,
    /// Protection Information: PRCHK in bits 2:0 and PRACT in bit 3, CDW12 29:26.
    pub prinfo: u8,
    /// Force Unit Access, CDW12 bit 30.
    pub fua: bool,
    /// Limited Retry, CDW12 bit 31.
    pub lr: bool,
    /// Dataset Management hints, CDW13 7:0 (Read and Write).
    pub dsm: u8,
    /// Directive Specific, CDW13 31:16 (Write).
    pub dspec: u16,
    /// Expected or Initial Logical Block Reference Tag, CDW14.
    pub reftag: u32,
    /// Expected or Logical Block Application Tag, CDW15 15:0.
    pub apptag: u16,
    /// Mask of the application tag, CDW15 31:16.
    pub apptag_mask: u16,
}

impl RwFields {
    /// Decodes the command's dwords.
    #[inline]
    pub const fn decode(sqe: &Sqe) -> Self {
        Self {
            slba: sqe.cdw10_11(),
            nlb0: sqe.cdw12 as u16,
            dtype: (sqe.cdw12 >> 20 & 0xf) as u8,
            stc: sqe.cdw12 & 1 << 24 != 0,
            deac: sqe.cdw12 & 1 << 25 != 0,
            prinfo: (sqe.cdw12 >> 26 & 0xf) as u8,
            fua: sqe.cdw12 & 1 << 30 != 0,
            lr: sqe.cdw12 & 1 << 31 != 0,
            dsm: sqe.cdw13 as u8,
            dspec: (sqe.cdw13 >> 16) as u16,
            reftag: sqe.cdw14,
            apptag: sqe.cdw15 as u16,
            apptag_mask: (sqe.cdw15 >> 16) as u16,
        }
    }

    /// Encodes the fields into the dwords of `sqe`.
    #[must_use]
    pub const fn encode(self, mut sqe: Sqe) -> Sqe {
        sqe.cdw10 = self.slba as u32;
        sqe.cdw11 = (self.slba >> 32) as u32;
        sqe.cdw12 = self.nlb0 as u32
            | (self.dtype as u32 & 0xf) << 20
            | (self.stc as u32) << 24
            | (self.deac as u32) << 25
            | (self.prinfo as u32 & 0xf) << 26
            | (self.fua as u32) << 30
            | (self.lr as u32) << 31;
        sqe.cdw13 = self.dsm as u32 | (self.dspec as u32) << 16;
        sqe.cdw14 = self.reftag;
        sqe.cdw15 = self.apptag as u32 | (self.apptag_mask as u32) << 16;
        sqe
    }

    /// Number of logical blocks: 1 to 65536.
    #[inline]
    pub const fn blocks(&self) -> u32 {
        self.nlb0 as u32 + 1
    }

    /// LBA after the last block. `None` if it exceeds 64 bits (LBA Out of Range).
    #[inline]
    pub const fn end(&self) -> Option<u64> {
        self.slba.checked_add(self.blocks() as u64)
    }
}

/// [`RwFields::prinfo`] bit: the controller inserts or strips protection information (PRACT).
pub const PRINFO_PRACT: u8 = 1 << 3;
/// [`RwFields::prinfo`] bit: check the guard.
pub const PRINFO_GUARD: u8 = 1 << 2;
/// [`RwFields::prinfo`] bit: check the application tag.
pub const PRINFO_APPTAG: u8 = 1 << 1;
/// [`RwFields::prinfo`] bit: check the reference tag.
pub const PRINFO_REFTAG: u8 = 1 << 0;

/// Dataset Management. NVM 1.1, "Dataset Management command".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatasetManagement {
    /// Number of Ranges, 0's based, CDW10 7:0: the data are `nr0 + 1` [`DsmRange`]s.
    pub nr0: u8,
    /// Attribute Integral Dataset for Read, CDW11 bit 0.
    pub idr: bool,
    /// Attribute Integral Dataset for Write, CDW11 bit 1.
    pub idw: bool,
    /// Attribute Deallocate, CDW11 bit 2: discard (trim, unmap).
    pub ad: bool,
}

impl DatasetManagement {
    /// Decodes the command's dwords.
    #[inline]
    pub const fn decode(sqe: &Sqe) -> Self {
        Self {
            nr0: sqe.cdw10 as u8,
            idr: sqe.cdw11 & 1 << 0 != 0,
            idw: sqe.cdw11 & 1 << 1 != 0,
            ad: sqe.cdw11 & 1 << 2 != 0,
        }
    }

    /// Encodes the fields into the dwords of `sqe`.
    #[must_use]
    pub const fn encode(self, mut sqe: Sqe) -> Sqe {
        sqe.cdw10 = self.nr0 as u32;
        sqe.cdw11 = self.idr as u32 | (self.idw as u32) << 1 | (self.ad as u32) << 2;
        sqe
    }

    /// Number of ranges: 1 to 256.
    pub const fn ranges(&self) -> usize {
        self.nr0 as usize + 1
    }
}

/// Maximum number of ranges of a Dataset Management command.
pub const DSM_MAX_RANGES: usize = 256;

/// Range of a Dataset Management command: 16 bytes. NVM 1.1, "Dataset Management - Range
/// Definition".
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct DsmRange {
    /// Context attributes: hints.
    pub attributes: u32,
    /// Length in logical blocks. It is not 0's based: 0 stands for an empty range.
    pub blocks: u32,
    /// Starting LBA.
    pub slba: u64,
}

/// Copy. NVM 1.1, "Copy command".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyFields {
    /// Starting Destination LBA, CDW11 and CDW10.
    pub sdlba: u64,
    /// Number of Ranges, 0's based, CDW12 7:0.
    pub nr0: u8,
    /// Descriptor Format, CDW12 11:8: 0 and 2 are [`CopyRange`]s, 1 and 3 [`LongCopyRange`]s.
    pub desfmt: u8,
    /// Protection Information for the reads, CDW12 15:12.
    pub prinfor: u8,
    /// Directive Type, CDW12 23:20.
    pub dtype: u8,
    /// Storage Tag Check of the writes, CDW12 bit 24.
    pub stcw: bool,
    /// Storage Tag Check of the reads, CDW12 bit 25.
    pub stcr: bool,
    /// Protection Information for the writes, CDW12 29:26.
    pub prinfow: u8,
    /// Force Unit Access for the writes, CDW12 bit 30.
    pub fua: bool,
    /// Limited Retry, CDW12 bit 31.
    pub lr: bool,
    /// Directive Specific, CDW13 31:16.
    pub dspec: u16,
    /// Initial Logical Block Reference Tag of the writes, CDW14.
    pub reftag: u32,
    /// Logical Block Application Tag of the writes, CDW15 15:0.
    pub apptag: u16,
    /// Mask of the application tag, CDW15 31:16.
    pub apptag_mask: u16,
}

impl CopyFields {
    /// Decodes the command's dwords.
    #[inline]
    pub const fn decode(sqe: &Sqe) -> Self {
        Self {
            sdlba: sqe.cdw10_11(),
            nr0: sqe.cdw12 as u8,
            desfmt: (sqe.cdw12 >> 8 & 0xf) as u8,
            prinfor: (sqe.cdw12 >> 12 & 0xf) as u8,
            dtype: (sqe.cdw12 >> 20 & 0xf) as u8,
            stcw: sqe.cdw12 & 1 << 24 != 0,
            stcr: sqe.cdw12 & 1 << 25 != 0,
            prinfow: (sqe.cdw12 >> 26 & 0xf) as u8,
            fua: sqe.cdw12 & 1 << 30 != 0,
            lr: sqe.cdw12 & 1 << 31 != 0,
            dspec: (sqe.cdw13 >> 16) as u16,
            reftag: sqe.cdw14,
            apptag: sqe.cdw15 as u16,
            apptag_mask: (sqe.cdw15 >> 16) as u16,
        }
    }

    /// Encodes the fields into the dwords of `sqe`.
    #[must_use]
    pub const fn encode(self, mut sqe: Sqe) -> Sqe {
        sqe.cdw10 = self.sdlba as u32;
        sqe.cdw11 = (self.sdlba >> 32) as u32;
        sqe.cdw12 = self.nr0 as u32
            | (self.desfmt as u32 & 0xf) << 8
            | (self.prinfor as u32 & 0xf) << 12
            | (self.dtype as u32 & 0xf) << 20
            | (self.stcw as u32) << 24
            | (self.stcr as u32) << 25
            | (self.prinfow as u32 & 0xf) << 26
            | (self.fua as u32) << 30
            | (self.lr as u32) << 31;
        sqe.cdw13 = (self.dspec as u32) << 16;
        sqe.cdw14 = self.reftag;
        sqe.cdw15 = self.apptag as u32 | (self.apptag_mask as u32) << 16;
        sqe
    }

    /// Number of source ranges: 1 to 256.
    pub const fn ranges(&self) -> usize {
        self.nr0 as usize + 1
    }
}

/// Source range of a Copy command, descriptor formats 1h and 3h: 40 bytes. NVM 1.1, "Copy - Source
/// Range Entries Copy Descriptor Format 1h and Format 3h".
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct LongCopyRange {
    /// Source Namespace Identifier, in format 3h; reserved in 1h.
    pub snsid: u32,
    /// Reserved.
    pub reserved4: u32,
    /// Starting LBA.
    pub slba: u64,
    /// Number of Logical Blocks, 0's based.
    pub nlb0: u16,
    /// Reserved.
    pub reserved18: [u8; 4],
    /// Source Options, in format 3h: bit 15 Fast Copy Only; reserved in 1h.
    pub sopt: u16,
    /// Reserved.
    pub reserved24: [u8; 2],
    /// Expected Logical Block Tags, big-endian.
    pub elbt: [u8; 10],
    /// Expected Logical Block Application Tag.
    pub apptag: u16,
    /// Mask of the application tag.
    pub apptag_mask: u16,
}

/// Source range of a Copy command, descriptor formats 0h and 2h: 32 bytes. NVM 1.1, "Copy - Source
/// Range Entries Copy Descriptor Format 0h and Format 2h".
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct CopyRange {
    /// Source Namespace Identifier, in format 2h; reserved in 0h.
    pub snsid: u32,
    /// Reserved.
    pub reserved4: u32,
    /// Starting LBA.
    pub slba: u64,
    /// Number of Logical Blocks, 0's based.
    pub nlb0: u16,
    /// Reserved.
    pub reserved18: [u8; 4],
    /// Source Options, in format 2h: bit 15 Fast Copy Only; reserved in 0h.
    pub sopt: u16,
    /// Expected Initial Logical Block Reference Tag.
    pub reftag: u32,
    /// Expected Logical Block Application Tag.
    pub apptag: u16,
    /// Mask of the application tag.
    pub apptag_mask: u16,
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::{offset_of, size_of};
    use proptest::prelude::*;

    #[test]
    fn layout() {
        assert_eq!(size_of::<DsmRange>(), 16);
        assert_eq!(offset_of!(DsmRange, attributes), 0);
        assert_eq!(offset_of!(DsmRange, blocks), 4);
        assert_eq!(offset_of!(DsmRange, slba), 8);
        assert_eq!(size_of::<CopyRange>(), 32);
        assert_eq!(offset_of!(CopyRange, sopt), 22);
        assert_eq!(size_of::<LongCopyRange>(), 40);
        assert_eq!(offset_of!(LongCopyRange, nlb0), 16);
        assert_eq!(offset_of!(LongCopyRange, sopt), 22);
        assert_eq!(offset_of!(LongCopyRange, elbt), 26);
        assert_eq!(offset_of!(LongCopyRange, apptag), 36);
        assert_eq!(offset_of!(CopyRange, slba), 8);
        assert_eq!(offset_of!(CopyRange, nlb0), 16);
        assert_eq!(offset_of!(CopyRange, reftag), 24);
        assert_eq!(offset_of!(CopyRange, apptag), 28);
        assert_eq!(offset_of!(CopyRange, apptag_mask), 30);
    }

    #[test]
    fn fields_have_the_positions_of_the_specification() {
        let empty = Sqe::default();
        let rw = RwFields::default();
        assert_eq!(RwFields { slba: 0x1_0000_0002, ..rw }.encode(empty).cdw10, 2);
        assert_eq!(RwFields { slba: 0x1_0000_0002, ..rw }.encode(empty).cdw11, 1);
        assert_eq!(RwFields { nlb0: 0xffff, ..rw }.encode(empty).cdw12, 0xffff);
        assert_eq!(RwFields { dtype: 1, ..rw }.encode(empty).cdw12, 1 << 20);
        assert_eq!(RwFields { stc: true, ..rw }.encode(empty).cdw12, 1 << 24);
        assert_eq!(RwFields { deac: true, ..rw }.encode(empty).cdw12, 1 << 25);
        assert_eq!(RwFields { prinfo: PRINFO_REFTAG, ..rw }.encode(empty).cdw12, 1 << 26);
        assert_eq!(RwFields { prinfo: PRINFO_APPTAG, ..rw }.encode(empty).cdw12, 1 << 27);
        assert_eq!(RwFields { prinfo: PRINFO_GUARD, ..rw }.encode(empty).cdw12, 1 << 28);
        assert_eq!(RwFields { prinfo: PRINFO_PRACT, ..rw }.encode(empty).cdw12, 1 << 29);
        assert_eq!(RwFields { fua: true, ..rw }.encode(empty).cdw12, 1 << 30);
        assert_eq!(RwFields { lr: true, ..rw }.encode(empty).cdw12, 1 << 31);
        assert_eq!(RwFields { dsm: 0xff, dspec: 1, ..rw }.encode(empty).cdw13, 0x1_00ff);
        assert_eq!(RwFields { reftag: 9, ..rw }.encode(empty).cdw14, 9);
        assert_eq!(RwFields { apptag: 2, apptag_mask: 1, ..rw }.encode(empty).cdw15, 0x1_0002);

        let dsm = DatasetManagement { nr0: 255, ad: true, ..Default::default() };
        assert_eq!((dsm.encode(empty).cdw10, dsm.encode(empty).cdw11), (255, 4));
        assert_eq!(dsm.ranges(), DSM_MAX_RANGES);

        let sqe = Sqe { cdw12: 0xd7a3_4107, ..empty };
        let copy = CopyFields::decode(&sqe);
        assert_eq!((copy.nr0, copy.desfmt, copy.prinfor, copy.dtype), (7, 1, 4, 0xa));
        assert_eq!((copy.stcw, copy.stcr, copy.prinfow), (true, true, 5));
        assert_eq!((copy.fua, copy.lr), (true, true));
    }

    #[test]
    fn the_end_may_not_exist() {
        let rw = RwFields { slba: u64::MAX - 7, nlb0: 6, ..RwFields::default() };
        assert_eq!(rw.end(), Some(u64::MAX));
        assert_eq!(RwFields { nlb0: 7, ..rw }.end(), None);
        assert_eq!(RwFields { slba: 8, nlb0: u16::MAX, ..rw }.end(), Some(8 + 65536));
    }

    proptest! {
        #[test]
        fn any_entry_is_decoded_and_encoded_again(bytes: [[u8; 16]; 4]) {
            let Ok(sqe) = Sqe::read_from_bytes(bytes.as_flattened()) else { unreachable!() };
            let rw = RwFields::decode(&sqe);
            prop_assert_eq!(RwFields::decode(&rw.encode(Sqe::default())), rw);
            let dsm = DatasetManagement::decode(&sqe);
            prop_assert_eq!(DatasetManagement::decode(&dsm.encode(Sqe::default())), dsm);
            let copy = CopyFields::decode(&sqe);
            prop_assert_eq!(CopyFields::decode(&copy.encode(Sqe::default())), copy);
        }
    }
}
