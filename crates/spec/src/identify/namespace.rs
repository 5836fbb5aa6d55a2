//! Identify Namespace data structures.

use crate::layout::zero_default;
use bitfield_struct::bitfield;
use zerocopy::little_endian::U128;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Namespace Features.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Nsfeat {
    /// Thin Provisioning: `ncap` may be less than `nsze`.
    pub thinp: bool,
    /// Namespace Atomic Parameters: `nawun`, `nawupf` and `nacwu` are valid.
    pub nsabp: bool,
    /// Deallocated or Unwritten Logical Block Error is supported.
    pub dae: bool,
    /// UID Reuse: `nguid` and `eui64` are never reused.
    pub uidreuse: bool,
    /// Optimal Performance: with 01b, `npwg`, `npwa`, `npdg`, `npda` and `nows` are valid; with
    /// 10b, the large deallocate fields are valid instead of `npdg` and `npda`; with 11b, all of
    /// these fields are valid. (Before NVM 1.1, the field had only bit 4.)
    #[bits(2)]
    pub optperf: u8,
    /// Multiple Atomicity Mode.
    pub mam: bool,
    /// Optional Read Performance: `nprg`, `npra` and `nors` are valid.
    pub optrperf: bool,
}

/// Formatted LBA Size.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Flbas {
    /// Format Index, bits 3:0.
    #[bits(4)]
    pub low: u8,
    /// Metadata is at the end of each logical block, instead of in a separate buffer.
    pub extended: bool,
    /// Format Index, bits 5:4.
    #[bits(2)]
    pub high: u8,
    #[bits(1)]
    __: u8,
}

impl Flbas {
    /// Index of the current format, 0 to 63.
    pub const fn index(&self) -> u8 {
        self.low() | self.high() << 4
    }
}

/// Metadata Capabilities.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Mc {
    /// Metadata may be part of an extended logical block.
    pub extended: bool,
    /// Metadata may be in a separate buffer.
    pub separate: bool,
    #[bits(6)]
    __: u8,
}

/// End-to-end Data Protection Capabilities.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Dpc {
    /// Protection information of type 1 is supported.
    pub type1: bool,
    /// Protection information of type 2 is supported.
    pub type2: bool,
    /// Protection information of type 3 is supported.
    pub type3: bool,
    /// Protection information may be the first bytes of the metadata.
    pub first: bool,
    /// Protection information may be the last bytes of the metadata.
    pub last: bool,
    #[bits(3)]
    __: u8,
}

/// End-to-end Data Protection Type Settings.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Dps {
    /// Protection Information Type: 0 none, 1 to 3 the type.
    #[bits(3)]
    pub pit: u8,
    /// Protection Information Position: true for the first bytes of the metadata, false for the
    /// last.
    pub pip: bool,
    #[bits(4)]
    __: u8,
}

/// Namespace Multi-path I/O and Namespace Sharing Capabilities.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Nmic {
    /// Shared Namespace: attachable to several controllers.
    pub shrns: bool,
    /// Dispersed Namespace.
    pub disns: bool,
    #[bits(6)]
    __: u8,
}

/// Deallocate Logical Block Features.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Dlfeat {
    /// Content of a deallocated block: 0 not reported, 1 zeroes, 2 bytes of FFh.
    #[bits(3)]
    pub drb: u8,
    /// The Deallocate bit of Write Zeroes is supported.
    pub wzds: bool,
    /// The guard of a deallocated block is the CRC of its content, not FFFFh.
    pub gds: bool,
    #[bits(3)]
    __: u8,
}

/// LBA format: 4 bytes. NVM 1.1, "LBA Format Data Structure, NVM Command Set Specific".
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct LbaFormat {
    /// Metadata Size in bytes.
    pub ms: u16,
    /// LBA Data Size as a power of two, 9 or more; 0 if the format is not available.
    pub lbads: u8,
    /// Relative Performance in bits 1:0: 0 best, 3 degraded.
    pub rp: u8,
}

impl LbaFormat {
    /// Data size of a logical block in bytes. `None` for an unavailable format: the size is less
    /// than 512, or does not fit into 64 bits.
    pub const fn block_size(&self) -> Option<u64> {
        if self.lbads >= 9 && self.lbads < 64 { Some(1 << self.lbads) } else { None }
    }
}

/// Identify Namespace data structure of the NVM command set, CNS 00h and 11h. NVM 1.1, "NVM Command
/// Set Identify Namespace Data Structure (CNS 00h)". All zeroes for an inactive namespace.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct IdentifyNamespace {
    /// Namespace Size in logical blocks: LBAs 0 to `nsze - 1`.
    pub nsze: u64,
    /// Namespace Capacity in logical blocks: maximum number of allocated blocks.
    pub ncap: u64,
    /// Namespace Utilization in logical blocks.
    pub nuse: u64,
    /// Namespace Features.
    pub nsfeat: Nsfeat,
    /// Number of LBA Formats, 0's based.
    pub nlbaf: u8,
    /// Formatted LBA Size: the current format.
    pub flbas: Flbas,
    /// Metadata Capabilities.
    pub mc: Mc,
    /// End-to-end Data Protection Capabilities.
    pub dpc: Dpc,
    /// End-to-end Data Protection Type Settings.
    pub dps: Dps,
    /// Namespace Multi-path I/O and Namespace Sharing Capabilities.
    pub nmic: Nmic,
    /// Reservation Capabilities.
    pub rescap: u8,
    /// Format Progress Indicator: bit 7 supported, bits 6:0 remaining percentage.
    pub fpi: u8,
    /// Deallocate Logical Block Features.
    pub dlfeat: Dlfeat,
    /// Namespace Atomic Write Unit Normal in logical blocks, 0's based.
    pub nawun: u16,
    /// Namespace Atomic Write Unit Power Fail in logical blocks, 0's based.
    pub nawupf: u16,
    /// Namespace Atomic Compare and Write Unit in logical blocks, 0's based.
    pub nacwu: u16,
    /// Namespace Atomic Boundary Size Normal in logical blocks, 0's based.
    pub nabsn: u16,
    /// Namespace Atomic Boundary Offset: the LBA of the first boundary.
    pub nabo: u16,
    /// Namespace Atomic Boundary Size Power Fail in logical blocks, 0's based.
    pub nabspf: u16,
    /// Namespace Optimal I/O Boundary in logical blocks; 0 if not reported.
    pub noiob: u16,
    /// NVM Capacity in bytes.
    pub nvmcap: U128,
    /// Namespace Preferred Write Granularity in logical blocks, 0's based.
    pub npwg: u16,
    /// Namespace Preferred Write Alignment in logical blocks, 0's based.
    pub npwa: u16,
    /// Namespace Preferred Deallocate Granularity in logical blocks, 0's based.
    pub npdg: u16,
    /// Namespace Preferred Deallocate Alignment in logical blocks, 0's based.
    pub npda: u16,
    /// Namespace Optimal Write Size in logical blocks, 0's based.
    pub nows: u16,
    /// Maximum Single Source Range Length of Copy, in logical blocks.
    pub mssrl: u16,
    /// Maximum Copy Length in logical blocks.
    pub mcl: u32,
    /// Maximum Source Range Count of Copy, 0's based.
    pub msrc: u8,
    /// Key Per I/O Status.
    pub kpios: u8,
    /// Number of Unique Attribute LBA Formats.
    pub nulbaf: u8,
    /// Reserved.
    pub reserved83: u8,
    /// Key Per I/O Data Access Alignment and Granularity.
    pub kpiodaag: u32,
    /// Reserved.
    pub reserved88: [u8; 4],
    /// ANA Group Identifier.
    pub anagrpid: u32,
    /// Reserved.
    pub reserved96: [u8; 3],
    /// Namespace Attributes: bit 0 currently write protected.
    pub nsattr: u8,
    /// NVM Set Identifier.
    pub nvmsetid: u16,
    /// Endurance Group Identifier.
    pub endgid: u16,
    /// Namespace Globally Unique Identifier, big-endian; 0 if there is none.
    pub nguid: [u8; 16],
    /// IEEE Extended Unique Identifier, big-endian; 0 if there is none.
    pub eui64: [u8; 8],
    /// LBA formats; the first `nlbaf + 1` are valid.
    pub lbaf: [LbaFormat; 64],
    /// Vendor Specific.
    pub vs: [u8; 3712],
}

/// I/O command set independent Identify Namespace data structure, CNS 08h. Base 2.1, 5.1.13.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct IdentifyIndependentNamespace {
    /// Common Namespace Features: the bits of [`Nsfeat`] that are common to all command sets.
    pub nsfeat: u8,
    /// Namespace Multi-path I/O and Namespace Sharing Capabilities.
    pub nmic: Nmic,
    /// Reservation Capabilities.
    pub rescap: u8,
    /// Format Progress Indicator: bit 7 supported, bits 6:0 remaining percentage.
    pub fpi: u8,
    /// ANA Group Identifier.
    pub anagrpid: u32,
    /// Namespace Attributes: bit 0 currently write protected.
    pub nsattr: u8,
    /// Reserved.
    pub reserved9: u8,
    /// NVM Set Identifier.
    pub nvmsetid: u16,
    /// Endurance Group Identifier.
    pub endgid: u16,
    /// Namespace Status; see [`Self::NSTAT_READY`].
    pub nstat: u8,
    /// Key Per I/O Status.
    pub kpios: u8,
    /// Maximum Key Tag.
    pub maxkt: u16,
    /// Reserved.
    pub reserved18: [u8; 2],
    /// Reachability Group Identifier.
    pub rgrpid: u32,
    /// Reserved.
    pub reserved24: [u8; 4072],
}

/// I/O command set specific Identify Namespace data structure of the NVM command set, CNS 05h. NVM
/// 1.1, "I/O Command Set Specific Identify Namespace Data Structure (CNS 05h, CSI 00h)".
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct IdentifyNvmNamespace {
    /// Logical Block Storage Tag Mask.
    pub lbstm: u64,
    /// Protection Information Capabilities.
    pub pic: u8,
    /// Protection Information Format Attribute.
    pub pifa: u8,
    /// Reserved.
    pub reserved10: [u8; 2],
    /// Extended LBA formats: storage tag size in bits 6:0, protection information format in bits
    /// 8:7.
    pub elbaf: [u32; 64],
    /// Namespace Preferred Deallocate Granularity Large in logical blocks, 0's based.
    pub npdgl: u32,
    /// Namespace Preferred Read Granularity in logical blocks, 0's based.
    pub nprg: u32,
    /// Namespace Preferred Read Alignment in logical blocks, 0's based.
    pub npra: u32,
    /// Namespace Optimal Read Size in logical blocks, 0's based.
    pub nors: u32,
    /// Namespace Preferred Deallocate Alignment Large in logical blocks, 0's based.
    pub npdal: u32,
    /// LBA Format Placement Shard Size.
    pub lbapss: u32,
    /// Tracked LBA Allocation Granularity.
    pub tlbaag: u32,
    /// Reserved.
    pub reserved296: [u8; 3800],
}

zero_default!(IdentifyNamespace, IdentifyIndependentNamespace, IdentifyNvmNamespace);

impl IdentifyNamespace {
    /// Current format. `None` if its index exceeds the last format.
    pub fn format(&self) -> Option<LbaFormat> {
        let index = self.flbas.index();
        // The list has NULBAF formats in addition. The sum is at most 510, so it does not overflow,
        // and `get` checks the index again.
        let last = u16::from(self.nlbaf) + u16::from(self.nulbaf);
        if u16::from(index) > last {
            return None;
        }
        self.lbaf.get(usize::from(index)).copied()
    }
}

impl IdentifyIndependentNamespace {
    /// [`nstat`](Self::nstat) bit: Namespace Ready.
    pub const NSTAT_READY: u8 = 1;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::assert_layout;

    #[test]
    fn layout() {
        assert_layout!(LbaFormat, 4, {
            ms: 0, lbads: 2, rp: 3,
        });
        assert_layout!(IdentifyNamespace, 4096, {
            nsze: 0, ncap: 8, nuse: 16, nsfeat: 24, nlbaf: 25, flbas: 26, mc: 27, dpc: 28,
            dps: 29, nmic: 30, rescap: 31, fpi: 32, dlfeat: 33, nawun: 34, nawupf: 36, nacwu: 38,
            nabsn: 40, nabo: 42, nabspf: 44, noiob: 46, nvmcap: 48, npwg: 64, npwa: 66, npdg: 68,
            npda: 70, nows: 72, mssrl: 74, mcl: 76, msrc: 80, kpios: 81, nulbaf: 82,
            reserved83: 83, kpiodaag: 84, reserved88: 88, anagrpid: 92, reserved96: 96,
            nsattr: 99, nvmsetid: 100, endgid: 102, nguid: 104, eui64: 120, lbaf: 128, vs: 384,
        });
        assert_layout!(IdentifyIndependentNamespace, 4096, {
            nsfeat: 0, nmic: 1, rescap: 2, fpi: 3, anagrpid: 4, nsattr: 8, reserved9: 9,
            nvmsetid: 10, endgid: 12, nstat: 14, kpios: 15, maxkt: 16, reserved18: 18, rgrpid: 20,
            reserved24: 24,
        });
        assert_layout!(IdentifyNvmNamespace, 4096, {
            lbstm: 0, pic: 8, pifa: 9, reserved10: 10, elbaf: 12, npdgl: 268, nprg: 272,
            npra: 276, nors: 280, npdal: 284, lbapss: 288, tlbaag: 292, reserved296: 296,
        });
    }

    #[test]
    fn bits() {
        assert_eq!(Nsfeat::new().with_thinp(true).into_bits(), 1 << 0);
        assert_eq!(Nsfeat::new().with_nsabp(true).into_bits(), 1 << 1);
        assert_eq!(Nsfeat::new().with_dae(true).into_bits(), 1 << 2);
        assert_eq!(Nsfeat::new().with_uidreuse(true).into_bits(), 1 << 3);
        assert_eq!(Nsfeat::new().with_optperf(3).into_bits(), 3 << 4);
        assert_eq!(Nsfeat::new().with_mam(true).into_bits(), 1 << 6);
        assert_eq!(Nsfeat::new().with_optrperf(true).into_bits(), 1 << 7);
        assert_eq!(Flbas::from_bits(0b0101_0011).index(), 0b10_0011);
        assert!(Flbas::from_bits(0b0001_0000).extended());
        assert_eq!(Mc::new().with_extended(true).into_bits(), 1 << 0);
        assert_eq!(Mc::new().with_separate(true).into_bits(), 1 << 1);
        assert_eq!(Dpc::new().with_type1(true).into_bits(), 1 << 0);
        assert_eq!(Dpc::new().with_type2(true).into_bits(), 1 << 1);
        assert_eq!(Dpc::new().with_type3(true).into_bits(), 1 << 2);
        assert_eq!(Dpc::new().with_first(true).into_bits(), 1 << 3);
        assert_eq!(Dpc::new().with_last(true).into_bits(), 1 << 4);
        assert_eq!(Dps::new().with_pit(7).with_pip(true).into_bits(), 0b1111);
        assert_eq!(Nmic::new().with_shrns(true).into_bits(), 1 << 0);
        assert_eq!(Nmic::new().with_disns(true).into_bits(), 1 << 1);
        assert_eq!(Dlfeat::new().with_drb(7).into_bits(), 7);
        assert_eq!(Dlfeat::new().with_wzds(true).into_bits(), 1 << 3);
        assert_eq!(Dlfeat::new().with_gds(true).into_bits(), 1 << 4);
    }

    #[test]
    fn formats() {
        let mut identify = IdentifyNamespace { nlbaf: 1, ..Default::default() };
        identify.lbaf[0].lbads = 9;
        identify.lbaf[1].lbads = 12;
        assert_eq!(identify.format().and_then(|format| format.block_size()), Some(512));
        identify.flbas = Flbas::new().with_low(1);
        assert_eq!(identify.format().and_then(|format| format.block_size()), Some(4096));
        identify.flbas = Flbas::new().with_low(2);
        assert_eq!(identify.format(), None);
        identify.nulbaf = 1;
        assert_eq!(identify.format().and_then(|format| format.block_size()), None);
        let worst = IdentifyNamespace {
            nlbaf: 255,
            nulbaf: 255,
            flbas: Flbas::from_bits(255),
            lbaf: [LbaFormat { lbads: 255, ..LbaFormat::default() }; 64],
            ..Default::default()
        };
        assert_eq!(worst.format().map(|format| format.block_size()), Some(None));
    }
}
