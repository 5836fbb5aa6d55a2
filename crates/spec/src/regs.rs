//! Controller properties ("registers") and doorbells: offsets in BAR0 and bit fields.
//!
//! Base 2.1, 3.1.4 "Controller Properties"; PCIe 1.1, "Memory Mapped registers" for the doorbells.

use bitfield_struct::bitfield;

/// Controller Capabilities, 8 bytes, read only.
pub const CAP: u64 = 0x00;
/// Version, 4 bytes, read only.
pub const VS: u64 = 0x08;
/// Interrupt Mask Set, 4 bytes. Pin and MSI interrupts only, not MSI-X.
pub const INTMS: u64 = 0x0c;
/// Interrupt Mask Clear, 4 bytes. Pin and MSI interrupts only, not MSI-X.
pub const INTMC: u64 = 0x10;
/// Controller Configuration, 4 bytes.
pub const CC: u64 = 0x14;
/// Controller Status, 4 bytes.
pub const CSTS: u64 = 0x1c;
/// NVM Subsystem Reset, 4 bytes; see [`NSSR_MAGIC`].
pub const NSSR: u64 = 0x20;
/// Admin Queue Attributes, 4 bytes.
pub const AQA: u64 = 0x24;
/// Admin Submission Queue Base Address, 8 bytes, page aligned.
pub const ASQ: u64 = 0x28;
/// Admin Completion Queue Base Address, 8 bytes, page aligned.
pub const ACQ: u64 = 0x30;
/// Controller Memory Buffer Location, 4 bytes.
pub const CMBLOC: u64 = 0x38;
/// Controller Memory Buffer Size, 4 bytes.
pub const CMBSZ: u64 = 0x3c;
/// Boot Partition Information, 4 bytes.
pub const BPINFO: u64 = 0x40;
/// Boot Partition Read Select, 4 bytes.
pub const BPRSEL: u64 = 0x44;
/// Boot Partition Memory Buffer Location, 8 bytes.
pub const BPMBL: u64 = 0x48;
/// Controller Memory Buffer Memory Space Control, 8 bytes.
pub const CMBMSC: u64 = 0x50;
/// Controller Memory Buffer Status, 4 bytes.
pub const CMBSTS: u64 = 0x58;
/// Controller Memory Buffer Elasticity Buffer Size, 4 bytes.
pub const CMBEBS: u64 = 0x5c;
/// Controller Memory Buffer Sustained Write Throughput, 4 bytes.
pub const CMBSWTP: u64 = 0x60;
/// NVM Subsystem Shutdown, 4 bytes.
pub const NSSD: u64 = 0x64;
/// Controller Ready Timeouts, 4 bytes.
pub const CRTO: u64 = 0x68;
/// Persistent Memory Region Capabilities, 4 bytes.
pub const PMRCAP: u64 = 0xe00;
/// Persistent Memory Region Control, 4 bytes.
pub const PMRCTL: u64 = 0xe04;
/// Persistent Memory Region Status, 4 bytes.
pub const PMRSTS: u64 = 0xe08;
/// Persistent Memory Region Elasticity Buffer Size, 4 bytes.
pub const PMREBS: u64 = 0xe0c;
/// Persistent Memory Region Sustained Write Throughput, 4 bytes.
pub const PMRSWTP: u64 = 0xe10;
/// Persistent Memory Region Memory Space Control, lower half, 4 bytes.
pub const PMRMSCL: u64 = 0xe14;
/// Persistent Memory Region Memory Space Control, upper half, 4 bytes.
pub const PMRMSCU: u64 = 0xe18;
/// First doorbell: submission queue 0 tail. PCIe 1.1, "Submission Queue y Tail Doorbell".
pub const DOORBELLS: u64 = 0x1000;

/// Value that a host writes to [`NSSR`] to reset the NVM subsystem: "NVMe" in ASCII. Base 2.1,
/// 3.1.4.7.
pub const NSSR_MAGIC: u32 = 0x4e56_4d65;

/// Controller Capabilities. Base 2.1, 3.1.4.1.
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct Cap {
    /// Maximum Queue Entries Supported, 0's based: 15 means queues of at most 16 entries.
    pub mqes: u16,
    /// Contiguous Queues Required.
    pub cqr: bool,
    /// Arbitration Mechanism Supported: weighted round robin with urgent priority class.
    pub ams_wrr: bool,
    /// Arbitration Mechanism Supported: vendor specific.
    pub ams_vendor: bool,
    #[bits(5)]
    __: u8,
    /// Timeout, in units of 500 ms: maximum time for CSTS.RDY to follow CC.EN.
    pub to: u8,
    /// Doorbell Stride: doorbells are `4 << dstrd` bytes apart.
    #[bits(4)]
    pub dstrd: u8,
    /// NVM Subsystem Reset Supported.
    pub nssrs: bool,
    /// Command Sets Supported: bit 0 the NVM command set, bit 6 one or more I/O command sets
    /// (listed by Identify), bit 7 no I/O command set. See [`CAP_CSS_NVM`].
    pub css: u8,
    /// Boot Partition Support.
    pub bps: bool,
    /// Controller Power Scope.
    #[bits(2)]
    pub cps: u8,
    /// Memory Page Size Minimum: `1 << (12 + mpsmin)` bytes.
    #[bits(4)]
    pub mpsmin: u8,
    /// Memory Page Size Maximum: `1 << (12 + mpsmax)` bytes.
    #[bits(4)]
    pub mpsmax: u8,
    /// Persistent Memory Region Supported.
    pub pmrs: bool,
    /// Controller Memory Buffer Supported.
    pub cmbs: bool,
    /// NVM Subsystem Shutdown Supported.
    pub nsss: bool,
    /// Controller Ready With Media Supported: mandatory as of NVMe 2.0.
    pub crwms: bool,
    /// Controller Ready Independent of Media Supported.
    pub crims: bool,
    /// NVM Subsystem Shutdown Enhancements Supported.
    pub nsses: bool,
    #[bits(2)]
    __: u8,
}

/// [`Cap::css`] bit: the NVM command set.
pub const CAP_CSS_NVM: u8 = 1 << 0;
/// [`Cap::css`] bit: one or more I/O command sets, listed by Identify (CNS 1Ch).
pub const CAP_CSS_IO_COMMAND_SETS: u8 = 1 << 6;
/// [`Cap::css`] bit: no I/O command set, only the admin queue.
pub const CAP_CSS_NO_IO: u8 = 1 << 7;

/// Version. Base 2.1, 3.1.4.2.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Vs {
    /// Tertiary version.
    pub ter: u8,
    /// Minor version.
    pub mnr: u8,
    /// Major version.
    pub mjr: u16,
}

impl Vs {
    /// Version 1.3, the first with Doorbell Buffer Config.
    pub const V1_3: Self = Self::of(1, 3, 0);
    /// Version 1.4.
    pub const V1_4: Self = Self::of(1, 4, 0);
    /// Version 2.0.
    pub const V2_0: Self = Self::of(2, 0, 0);
    /// Version 2.1.
    pub const V2_1: Self = Self::of(2, 1, 0);

    /// Creates the version `major.minor.tertiary`.
    pub const fn of(major: u16, minor: u8, tertiary: u8) -> Self {
        Self::new().with_mjr(major).with_mnr(minor).with_ter(tertiary)
    }
}

/// Controller Configuration. Base 2.1, 3.1.4.5.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Cc {
    /// Enable. A change from one to zero is a Controller Level Reset.
    pub en: bool,
    #[bits(3)]
    __: u8,
    /// I/O Command Set Selected; see [`CC_CSS_NVM`].
    #[bits(3)]
    pub css: u8,
    /// Memory Page Size: `1 << (12 + mps)` bytes.
    #[bits(4)]
    pub mps: u8,
    /// Arbitration Mechanism Selected: 0 round robin, 1 weighted round robin, 7 vendor.
    #[bits(3)]
    pub ams: u8,
    /// Shutdown Notification; see [`SHN_NORMAL`].
    #[bits(2)]
    pub shn: u8,
    /// I/O Submission Queue Entry Size as a power of two: 6 for 64 bytes.
    #[bits(4)]
    pub iosqes: u8,
    /// I/O Completion Queue Entry Size as a power of two: 4 for 16 bytes.
    #[bits(4)]
    pub iocqes: u8,
    /// Controller Ready Independent of Media Enable.
    pub crime: bool,
    #[bits(7)]
    __: u8,
}

/// [`Cc::css`]: the NVM command set.
pub const CC_CSS_NVM: u8 = 0b000;
/// [`Cc::css`]: all supported I/O command sets.
pub const CC_CSS_ALL: u8 = 0b110;
/// [`Cc::css`]: admin command set only.
pub const CC_CSS_ADMIN_ONLY: u8 = 0b111;
/// [`Cc::shn`]: no shutdown.
pub const SHN_NONE: u8 = 0b00;
/// [`Cc::shn`]: normal shutdown.
pub const SHN_NORMAL: u8 = 0b01;
/// [`Cc::shn`]: abrupt shutdown.
pub const SHN_ABRUPT: u8 = 0b10;

/// Controller Status. Base 2.1, 3.1.4.6.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Csts {
    /// Ready.
    pub rdy: bool,
    /// Controller Fatal Status.
    pub cfs: bool,
    /// Shutdown Status; see [`SHST_COMPLETE`].
    #[bits(2)]
    pub shst: u8,
    /// NVM Subsystem Reset Occurred; write 1 to clear.
    pub nssro: bool,
    /// Processing Paused.
    pub pp: bool,
    /// Shutdown Type: 0 controller, 1 NVM subsystem.
    pub st: bool,
    #[bits(25)]
    __: u32,
}

/// [`Csts::shst`]: no shutdown was requested.
pub const SHST_NORMAL: u8 = 0b00;
/// [`Csts::shst`]: shutdown in progress.
pub const SHST_OCCURRING: u8 = 0b01;
/// [`Csts::shst`]: shutdown complete.
pub const SHST_COMPLETE: u8 = 0b10;

/// Admin Queue Attributes. Base 2.1, 3.1.4.8. Sizes are 0's based; 1 (two entries) is the minimum.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Aqa {
    /// Admin Submission Queue Size in entries, 0's based.
    #[bits(12)]
    pub asqs: u16,
    #[bits(4)]
    __: u8,
    /// Admin Completion Queue Size in entries, 0's based.
    #[bits(12)]
    pub acqs: u16,
    #[bits(4)]
    __: u8,
}

/// Controller Ready Timeouts, both in units of 500 ms. Base 2.1, 3.1.4.21.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Crto {
    /// Controller Ready With Media Timeout.
    pub crwmt: u16,
    /// Controller Ready Independent of Media Timeout.
    pub crimt: u16,
}

/// Type of a doorbell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DoorbellKind {
    /// Submission queue tail.
    Sq,
    /// Completion queue head.
    Cq,
}

/// Doorbell of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Doorbell {
    /// Queue identifier; 0 is the admin queue.
    pub qid: u16,
    /// Submission queue tail or completion queue head.
    pub kind: DoorbellKind,
}

/// Distance between two doorbells in bytes: `4 << dstrd`. Only the low four bits of `dstrd` are
/// used, as in [`Cap::dstrd`].
pub const fn doorbell_stride(dstrd: u8) -> u64 {
    4 << (dstrd & 0xf)
}

/// BAR0 offset of the tail doorbell of submission queue `qid`.
pub const fn sq_doorbell_offset(qid: u16, dstrd: u8) -> u64 {
    DOORBELLS + 2 * qid as u64 * doorbell_stride(dstrd)
}

/// BAR0 offset of the head doorbell of completion queue `qid`.
pub const fn cq_doorbell_offset(qid: u16, dstrd: u8) -> u64 {
    DOORBELLS + (2 * qid as u64 + 1) * doorbell_stride(dstrd)
}

/// Doorbell at offset `offset` of BAR0. `None` if no doorbell starts at this offset: it is below
/// [`DOORBELLS`], between two doorbells, or beyond those of queue 65535.
pub const fn decode_doorbell(offset: u64, dstrd: u8) -> Option<Doorbell> {
    let Some(from_first) = offset.checked_sub(DOORBELLS) else { return None };
    let stride = doorbell_stride(dstrd);
    if from_first & (stride - 1) != 0 {
        return None;
    }
    let index = from_first / stride;
    if index / 2 > u16::MAX as u64 {
        return None;
    }
    let kind = if index.is_multiple_of(2) { DoorbellKind::Sq } else { DoorbellKind::Cq };
    Some(Doorbell { qid: (index / 2) as u16, kind })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn register_bits() {
        assert_eq!(Cap::new().with_mqes(0xffff).into_bits(), 0xffff);
        assert_eq!(Cap::new().with_cqr(true).into_bits(), 1 << 16);
        assert_eq!(Cap::new().with_ams_wrr(true).into_bits(), 1 << 17);
        assert_eq!(Cap::new().with_ams_vendor(true).into_bits(), 1 << 18);
        assert_eq!(Cap::new().with_to(0xff).into_bits(), 0xff << 24);
        assert_eq!(Cap::new().with_dstrd(0xf).into_bits(), 0xf << 32);
        assert_eq!(Cap::new().with_nssrs(true).into_bits(), 1 << 36);
        assert_eq!(Cap::new().with_css(CAP_CSS_NVM).into_bits(), 1 << 37);
        assert_eq!(Cap::new().with_css(CAP_CSS_IO_COMMAND_SETS).into_bits(), 1 << 43);
        assert_eq!(Cap::new().with_css(CAP_CSS_NO_IO).into_bits(), 1 << 44);
        assert_eq!(Cap::new().with_bps(true).into_bits(), 1 << 45);
        assert_eq!(Cap::new().with_cps(3).into_bits(), 3 << 46);
        assert_eq!(Cap::new().with_mpsmin(0xf).into_bits(), 0xf << 48);
        assert_eq!(Cap::new().with_mpsmax(0xf).into_bits(), 0xf << 52);
        assert_eq!(Cap::new().with_pmrs(true).into_bits(), 1 << 56);
        assert_eq!(Cap::new().with_cmbs(true).into_bits(), 1 << 57);
        assert_eq!(Cap::new().with_nsss(true).into_bits(), 1 << 58);
        assert_eq!(Cap::new().with_crwms(true).into_bits(), 1 << 59);
        assert_eq!(Cap::new().with_crims(true).into_bits(), 1 << 60);
        assert_eq!(Cap::new().with_nsses(true).into_bits(), 1 << 61);

        assert_eq!(Vs::V1_3.into_bits(), 0x0001_0300);
        assert_eq!(Vs::of(1, 2, 1).into_bits(), 0x0001_0201);

        assert_eq!(Cc::new().with_en(true).into_bits(), 1);
        assert_eq!(Cc::new().with_css(7).into_bits(), 7 << 4);
        assert_eq!(Cc::new().with_mps(0xf).into_bits(), 0xf << 7);
        assert_eq!(Cc::new().with_ams(7).into_bits(), 7 << 11);
        assert_eq!(Cc::new().with_shn(3).into_bits(), 3 << 14);
        assert_eq!(Cc::new().with_iosqes(0xf).into_bits(), 0xf << 16);
        assert_eq!(Cc::new().with_iocqes(0xf).into_bits(), 0xf << 20);
        assert_eq!(Cc::new().with_crime(true).into_bits(), 1 << 24);

        assert_eq!(Csts::new().with_rdy(true).into_bits(), 1);
        assert_eq!(Csts::new().with_cfs(true).into_bits(), 1 << 1);
        assert_eq!(Csts::new().with_shst(3).into_bits(), 3 << 2);
        assert_eq!(Csts::new().with_nssro(true).into_bits(), 1 << 4);
        assert_eq!(Csts::new().with_pp(true).into_bits(), 1 << 5);
        assert_eq!(Csts::new().with_st(true).into_bits(), 1 << 6);

        assert_eq!(Aqa::new().with_asqs(0xfff).into_bits(), 0xfff);
        assert_eq!(Aqa::new().with_acqs(0xfff).into_bits(), 0xfff << 16);
        assert_eq!(Crto::new().with_crwmt(0xffff).into_bits(), 0xffff);
        assert_eq!(Crto::new().with_crimt(0xffff).into_bits(), 0xffff << 16);
        assert_eq!(NSSR_MAGIC.to_be_bytes(), *b"NVMe");
    }

    #[test]
    fn doorbell_offsets() {
        assert_eq!(sq_doorbell_offset(0, 0), 0x1000);
        assert_eq!(cq_doorbell_offset(0, 0), 0x1004);
        assert_eq!(sq_doorbell_offset(1, 0), 0x1008);
        assert_eq!(cq_doorbell_offset(1, 0), 0x100c);
        assert_eq!(sq_doorbell_offset(3, 4), 0x1000 + 6 * 64);
        assert_eq!(cq_doorbell_offset(3, 4), 0x1000 + 7 * 64);
    }

    #[test]
    fn offsets_outside_of_the_doorbells_are_refused() {
        assert_eq!(decode_doorbell(0xffc, 0), None);
        assert_eq!(decode_doorbell(0x1002, 0), None);
        assert_eq!(decode_doorbell(0x1004, 1), None);
        assert_eq!(decode_doorbell(cq_doorbell_offset(u16::MAX, 0) + 4, 0), None);
        assert_eq!(decode_doorbell(u64::MAX, 15), None);
    }

    proptest! {
        #[test]
        fn doorbells_invert(qid: u16, dstrd in 0u8..16) {
            prop_assert_eq!(
                decode_doorbell(sq_doorbell_offset(qid, dstrd), dstrd),
                Some(Doorbell { qid, kind: DoorbellKind::Sq })
            );
            prop_assert_eq!(
                decode_doorbell(cq_doorbell_offset(qid, dstrd), dstrd),
                Some(Doorbell { qid, kind: DoorbellKind::Cq })
            );
        }

        #[test]
        fn any_offset_decodes(offset: u64, dstrd: u8) {
            if let Some(doorbell) = decode_doorbell(offset, dstrd) {
                let back = match doorbell.kind {
                    DoorbellKind::Sq => sq_doorbell_offset(doorbell.qid, dstrd),
                    DoorbellKind::Cq => cq_doorbell_offset(doorbell.qid, dstrd),
                };
                prop_assert_eq!(back, offset);
            }
        }
    }
}
