//! Submission queue entry: 64 bytes, with a common frame for all commands.
//!
//! Base 2.1, 4.1.1 "Admin Command and I/O Command Common SQE". The fields of the commands' dwords
//! are in [`crate::admin`] and [`crate::nvm`]; complete commands for the host side are in
//! [`crate::build`].

use crate::sgl::SglDescriptor;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Submission queue entry, in memory layout.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct Sqe {
    /// Opcode: see [`crate::opcode`]. CDW0 bits 7:0.
    pub opcode: u8,
    /// CDW0 bits 15:8: FUSE in bits 1:0, PSDT in bits 7:6.
    pub flags: u8,
    /// Command Identifier, unique among the outstanding commands of its queue. FFFFh should not be
    /// used, because it means "no command" in the Error Information log page.
    pub cid: u16,
    /// Namespace Identifier; [`NSID_ALL`] for all namespaces.
    pub nsid: u32,
    /// Command dword 2.
    pub cdw2: u32,
    /// Command dword 3.
    pub cdw3: u32,
    /// Metadata Pointer.
    pub mptr: u64,
    /// Data Pointer: PRP entries 1 and 2, or one SGL descriptor.
    pub dptr: [u8; 16],
    /// Command dword 10.
    pub cdw10: u32,
    /// Command dword 11.
    pub cdw11: u32,
    /// Command dword 12.
    pub cdw12: u32,
    /// Command dword 13.
    pub cdw13: u32,
    /// Command dword 14.
    pub cdw14: u32,
    /// Command dword 15.
    pub cdw15: u32,
}

/// Namespace identifier of all namespaces (where a command allows it).
pub const NSID_ALL: u32 = 0xffff_ffff;

/// FUSE: position of a command in a fused operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fuse {
    /// 00b: a normal command.
    Normal,
    /// 01b: the first command of a fused operation.
    First,
    /// 10b: the second command of a fused operation.
    Second,
    /// 11b: reserved.
    Reserved,
}

/// PSDT: types of the data and metadata pointers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Psdt {
    /// 00b: PRPs; metadata is one contiguous buffer.
    Prp,
    /// 01b: an SGL; metadata is one contiguous buffer, aligned to a byte.
    SglContiguousMetadata,
    /// 10b: an SGL; the metadata pointer is the address of one SGL descriptor.
    SglSegmentMetadata,
    /// 11b: reserved.
    Reserved,
}

impl Sqe {
    /// Size of an entry in bytes. CC.IOSQES is 6, because `1 << 6` is 64.
    pub const SIZE: usize = 64;

    /// Creates a command with only an opcode, a command identifier and a namespace.
    #[inline]
    pub const fn new(opcode: u8, cid: u16, nsid: u32) -> Self {
        Self {
            opcode,
            flags: 0,
            cid,
            nsid,
            cdw2: 0,
            cdw3: 0,
            mptr: 0,
            dptr: [0; 16],
            cdw10: 0,
            cdw11: 0,
            cdw12: 0,
            cdw13: 0,
            cdw14: 0,
            cdw15: 0,
        }
    }

    /// FUSE, CDW0 bits 9:8.
    #[inline]
    pub const fn fuse(&self) -> Fuse {
        match self.flags & 0b11 {
            0b00 => Fuse::Normal,
            0b01 => Fuse::First,
            0b10 => Fuse::Second,
            _ => Fuse::Reserved,
        }
    }

    /// PSDT, CDW0 bits 15:14.
    #[inline]
    pub const fn psdt(&self) -> Psdt {
        match self.flags >> 6 {
            0b00 => Psdt::Prp,
            0b01 => Psdt::SglContiguousMetadata,
            0b10 => Psdt::SglSegmentMetadata,
            _ => Psdt::Reserved,
        }
    }

    /// PRP Entry 1: DPTR bytes 0 to 7.
    #[inline]
    pub const fn prp1(&self) -> u64 {
        // On a little-endian machine, a u128 load and a shift compile to one move without a panic.
        u128::from_le_bytes(self.dptr) as u64
    }

    /// PRP Entry 2: DPTR bytes 8 to 15.
    #[inline]
    pub const fn prp2(&self) -> u64 {
        (u128::from_le_bytes(self.dptr) >> 64) as u64
    }

    /// SGL Entry 1: all of DPTR.
    pub const fn sgl1(&self) -> SglDescriptor {
        SglDescriptor::from_dptr(self.dptr)
    }

    /// 64-bit value in CDW10 (low half) and CDW11 (high half).
    #[inline]
    pub const fn cdw10_11(&self) -> u64 {
        self.cdw10 as u64 | (self.cdw11 as u64) << 32
    }

    /// Sets the command identifier.
    #[inline]
    #[must_use]
    pub const fn with_cid(mut self, cid: u16) -> Self {
        self.cid = cid;
        self
    }

    /// Sets PRPs as the data pointer.
    #[inline]
    #[must_use]
    pub const fn with_prps(mut self, prp1: u64, prp2: u64) -> Self {
        self.flags &= 0b0011_1111;
        self.dptr = (prp1 as u128 | (prp2 as u128) << 64).to_le_bytes();
        self
    }

    /// Sets an SGL as the data pointer, with a contiguous metadata buffer if any.
    #[must_use]
    pub const fn with_sgl(mut self, sgl1: SglDescriptor) -> Self {
        self.flags = self.flags & 0b0011_1111 | 0b0100_0000;
        self.dptr = sgl1.to_dptr();
        self
    }

    /// Sets FUSE.
    #[must_use]
    pub const fn with_fuse(mut self, fuse: Fuse) -> Self {
        let bits = match fuse {
            Fuse::Normal => 0b00,
            Fuse::First => 0b01,
            Fuse::Second => 0b10,
            Fuse::Reserved => 0b11,
        };
        self.flags = self.flags & !0b11 | bits;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::{offset_of, size_of};
    use proptest::prelude::*;

    #[test]
    fn layout() {
        assert_eq!(size_of::<Sqe>(), 64);
        assert_eq!(offset_of!(Sqe, opcode), 0);
        assert_eq!(offset_of!(Sqe, flags), 1);
        assert_eq!(offset_of!(Sqe, cid), 2);
        assert_eq!(offset_of!(Sqe, nsid), 4);
        assert_eq!(offset_of!(Sqe, cdw2), 8);
        assert_eq!(offset_of!(Sqe, cdw3), 12);
        assert_eq!(offset_of!(Sqe, mptr), 16);
        assert_eq!(offset_of!(Sqe, dptr), 24);
        assert_eq!(offset_of!(Sqe, cdw10), 40);
        assert_eq!(offset_of!(Sqe, cdw11), 44);
        assert_eq!(offset_of!(Sqe, cdw12), 48);
        assert_eq!(offset_of!(Sqe, cdw13), 52);
        assert_eq!(offset_of!(Sqe, cdw14), 56);
        assert_eq!(offset_of!(Sqe, cdw15), 60);
    }

    #[test]
    fn flags() {
        let sqe = |flags| Sqe { flags, ..Sqe::default() };
        assert_eq!(sqe(0b0000_0001).fuse(), Fuse::First);
        assert_eq!(sqe(0b1111_1110).fuse(), Fuse::Second);
        assert_eq!(sqe(0b0000_0011).fuse(), Fuse::Reserved);
        assert_eq!(sqe(0b0011_1111).psdt(), Psdt::Prp);
        assert_eq!(sqe(0b0100_0000).psdt(), Psdt::SglContiguousMetadata);
        assert_eq!(sqe(0b1000_0000).psdt(), Psdt::SglSegmentMetadata);
        assert_eq!(sqe(0b1100_0000).psdt(), Psdt::Reserved);
        for fuse in [Fuse::Normal, Fuse::First, Fuse::Second, Fuse::Reserved] {
            assert_eq!(sqe(0b0100_0010).with_fuse(fuse).fuse(), fuse);
            assert_eq!(sqe(0b0100_0010).with_fuse(fuse).psdt(), Psdt::SglContiguousMetadata);
        }
    }

    #[test]
    fn sgl() {
        let descriptor = SglDescriptor::data_block(0x1234_5678_9abc_def0, 4096);
        let sqe = Sqe { flags: 0b1100_0001, ..Sqe::default() }.with_sgl(descriptor);
        assert_eq!(sqe.psdt(), Psdt::SglContiguousMetadata);
        assert_eq!(sqe.fuse(), Fuse::First);
        assert_eq!(sqe.sgl1(), descriptor);
    }

    proptest! {
        #[test]
        fn prps(prp1: u64, prp2: u64, flags: u8) {
            let sqe = Sqe { flags, ..Sqe::default() }.with_prps(prp1, prp2);
            prop_assert_eq!(sqe.psdt(), Psdt::Prp);
            prop_assert_eq!((sqe.prp1(), sqe.prp2()), (prp1, prp2));
            prop_assert_eq!(&sqe.as_bytes()[24..32], &prp1.to_le_bytes());
            prop_assert_eq!(&sqe.as_bytes()[32..40], &prp2.to_le_bytes());
        }
    }
}
