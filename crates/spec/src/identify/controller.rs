//! Identify Controller data structures.

use super::{
    Cmic, Ctratt, EntrySizes, Fna, Frmw, Lpa, Oacs, Oaes, Oncs, PowerState, Sanicap, Sgls, Text,
    Vwc,
};
use crate::layout::zero_default;
use zerocopy::little_endian::U128;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Identify Controller data structure, CNS 01h. Base 2.1, 5.1.13.2.1.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct IdentifyController {
    /// PCI Vendor ID.
    pub vid: u16,
    /// PCI Subsystem Vendor ID.
    pub ssvid: u16,
    /// Serial Number, ASCII.
    pub sn: [u8; 20],
    /// Model Number, ASCII.
    pub mn: [u8; 40],
    /// Firmware Revision, ASCII.
    pub fr: [u8; 8],
    /// Recommended Arbitration Burst: `1 << rab` commands.
    pub rab: u8,
    /// IEEE OUI Identifier, least significant byte first.
    pub ieee: [u8; 3],
    /// Controller Multi-Path I/O and Namespace Sharing Capabilities.
    pub cmic: Cmic,
    /// Maximum Data Transfer Size: `1 << mdts` pages of CAP.MPSMIN; 0 for no limit.
    pub mdts: u8,
    /// Controller ID.
    pub cntlid: u16,
    /// Version, as in the VS property ([`crate::regs::Vs`]).
    pub ver: u32,
    /// RTD3 Resume Latency in microseconds; 0 if not reported.
    pub rtd3r: u32,
    /// RTD3 Entry Latency in microseconds: maximum time of a normal shutdown; 0 if not reported.
    pub rtd3e: u32,
    /// Optional Asynchronous Events Supported.
    pub oaes: Oaes,
    /// Controller Attributes.
    pub ctratt: Ctratt,
    /// Read Recovery Levels Supported.
    pub rrls: u16,
    /// Boot Partition Capabilities.
    pub bpcap: u8,
    /// Reserved.
    pub reserved103: u8,
    /// NVM Subsystem Shutdown Latency in microseconds; 0 if not reported.
    pub nssl: u32,
    /// Reserved.
    pub reserved108: [u8; 2],
    /// Power Loss Signaling Information.
    pub plsi: u8,
    /// Controller Type; see [`ControllerType`](super::ControllerType).
    pub cntrltype: u8,
    /// FRU Globally Unique Identifier, big-endian; 0 if there is none.
    pub fguid: [u8; 16],
    /// Command Retry Delay Time 1, in units of 100 ms.
    pub crdt1: u16,
    /// Command Retry Delay Time 2, in units of 100 ms.
    pub crdt2: u16,
    /// Command Retry Delay Time 3, in units of 100 ms.
    pub crdt3: u16,
    /// Controller Reachability Capabilities.
    pub crcap: u8,
    /// Reserved.
    pub reserved135: [u8; 118],
    /// NVM Subsystem Report: bit 0 storage device, bit 1 enclosure (NVMe-MI).
    pub nvmsr: u8,
    /// VPD Write Cycle Information (NVMe-MI).
    pub vwci: u8,
    /// Management Endpoint Capabilities (NVMe-MI).
    pub mec: u8,
    /// Optional Admin Command Support.
    pub oacs: Oacs,
    /// Abort Command Limit, 0's based.
    pub acl: u8,
    /// Asynchronous Event Request Limit, 0's based.
    pub aerl: u8,
    /// Firmware Updates.
    pub frmw: Frmw,
    /// Log Page Attributes.
    pub lpa: Lpa,
    /// Error Log Page Entries, 0's based.
    pub elpe: u8,
    /// Number of Power States Support, 0's based.
    pub npss: u8,
    /// Admin Vendor Specific Command Configuration.
    pub avscc: u8,
    /// Autonomous Power State Transition Attributes.
    pub apsta: u8,
    /// Warning Composite Temperature Threshold in kelvins; 0 if not reported.
    pub wctemp: u16,
    /// Critical Composite Temperature Threshold in kelvins; 0 if not reported.
    pub cctemp: u16,
    /// Maximum Time for Firmware Activation, in units of 100 ms; 0 if not reported.
    pub mtfa: u16,
    /// Host Memory Buffer Preferred Size, in units of 4 KiB; 0 if the controller uses no such
    /// buffer.
    pub hmpre: u32,
    /// Host Memory Buffer Minimum Size, in units of 4 KiB.
    pub hmmin: u32,
    /// Total NVM Capacity in bytes.
    pub tnvmcap: U128,
    /// Unallocated NVM Capacity in bytes.
    pub unvmcap: U128,
    /// Replay Protected Memory Block Support.
    pub rpmbs: u32,
    /// Extended Device Self-test Time in minutes.
    pub edstt: u16,
    /// Device Self-test Options.
    pub dsto: u8,
    /// Firmware Update Granularity, in units of 4 KiB; 0 if not reported, FFh for no restriction.
    pub fwug: u8,
    /// Keep Alive Support: granularity in units of 100 ms; 0 for no keep alive.
    pub kas: u16,
    /// Host Controlled Thermal Management Attributes.
    pub hctma: u16,
    /// Minimum Thermal Management Temperature in kelvins.
    pub mntmt: u16,
    /// Maximum Thermal Management Temperature in kelvins.
    pub mxtmt: u16,
    /// Sanitize Capabilities.
    pub sanicap: Sanicap,
    /// Host Memory Buffer Minimum Descriptor Entry Size, in units of 4 KiB.
    pub hmminds: u32,
    /// Host Memory Maximum Descriptors Entries.
    pub hmmaxd: u16,
    /// NVM Set Identifier Maximum.
    pub nsetidmax: u16,
    /// Endurance Group Identifier Maximum.
    pub endgidmax: u16,
    /// ANA Transition Time in seconds.
    pub anatt: u8,
    /// Asymmetric Namespace Access Capabilities.
    pub anacap: u8,
    /// ANA Group Identifier Maximum.
    pub anagrpmax: u32,
    /// Number of ANA Group Identifiers.
    pub nanagrpid: u32,
    /// Persistent Event Log Size, in units of 64 KiB.
    pub pels: u32,
    /// Domain Identifier.
    pub domainid: u16,
    /// Key Per I/O Capabilities.
    pub kpioc: u8,
    /// Reserved.
    pub reserved359: u8,
    /// Maximum Processing Time for Firmware Activation Without Reset, in units of 100 ms.
    pub mptfawr: u16,
    /// Reserved.
    pub reserved362: [u8; 6],
    /// Max Endurance Group Capacity in bytes.
    pub megcap: U128,
    /// Temperature Threshold Hysteresis Attributes.
    pub tmpthha: u8,
    /// Reserved.
    pub reserved385: u8,
    /// Command Quiesce Time in milliseconds.
    pub cqt: u16,
    /// Reserved.
    pub reserved388: [u8; 124],
    /// Submission Queue Entry Size.
    pub sqes: EntrySizes,
    /// Completion Queue Entry Size.
    pub cqes: EntrySizes,
    /// Maximum Outstanding Commands per queue; 0 if not reported.
    pub maxcmd: u16,
    /// Number of Namespaces: the greatest valid namespace identifier.
    pub nn: u32,
    /// Optional NVM Command Support.
    pub oncs: Oncs,
    /// Fused Operation Support: bit 0 Compare and Write.
    pub fuses: u16,
    /// Format NVM Attributes.
    pub fna: Fna,
    /// Volatile Write Cache.
    pub vwc: Vwc,
    /// Atomic Write Unit Normal in logical blocks, 0's based.
    pub awun: u16,
    /// Atomic Write Unit Power Fail in logical blocks, 0's based.
    pub awupf: u16,
    /// I/O Command Set Vendor Specific Command Configuration.
    pub icsvscc: u8,
    /// Namespace Write Protection Capabilities: bit 0 write protect, bit 1 until power cycle, bit 2
    /// permanent.
    pub nwpc: u8,
    /// Atomic Compare and Write Unit in logical blocks, 0's based.
    pub acwu: u16,
    /// Optional Copy Formats Supported: bit n for copy descriptor format n.
    pub ocfs: u16,
    /// SGL Support.
    pub sgls: Sgls,
    /// Maximum Number of Allowed Namespaces; 0 for the value of `nn`.
    pub mnan: u32,
    /// Maximum Domain Namespace Attachments; 0 if not reported.
    pub maxdna: U128,
    /// Maximum I/O Controller Namespace Attachments; 0 if not reported.
    pub maxcna: u32,
    /// Optimal Aggregated Queue Depth; 0 if not reported.
    pub oaqd: u32,
    /// Recommended Host-Initiated Refresh Interval.
    pub rhiri: u8,
    /// Host-Initiated Refresh Time.
    pub hirt: u8,
    /// Controller Maximum Memory Range Tracking Descriptors.
    pub cmmrtd: u16,
    /// NVM Subsystem Maximum Memory Range Tracking Descriptors.
    pub nmmrtd: u16,
    /// Minimum Memory Range Tracking Granularity.
    pub minmrtg: u8,
    /// Maximum Memory Range Tracking Granularity.
    pub maxmrtg: u8,
    /// Tracking Attributes.
    pub trattr: u8,
    /// Reserved.
    pub reserved577: u8,
    /// Maximum Controller User Data Migration Queues.
    pub mcudmq: u16,
    /// Maximum NVM Subsystem User Data Migration Queues.
    pub mnsudmq: u16,
    /// Maximum CDQ Memory Ranges.
    pub mcmr: u16,
    /// NVM Subsystem Maximum CDQ Memory Ranges.
    pub nmcmr: u16,
    /// Maximum Controller Data Queue PRP Count.
    pub mcdqpc: u16,
    /// Reserved.
    pub reserved588: [u8; 180],
    /// NVM Subsystem NVMe Qualified Name, UTF-8, padded with zeroes.
    pub subnqn: [u8; 256],
    /// Reserved.
    pub reserved1024: [u8; 768],
    /// I/O Queue Command Capsule Supported Size (fabrics).
    pub ioccsz: u32,
    /// I/O Queue Response Capsule Supported Size (fabrics).
    pub iorcsz: u32,
    /// In Capsule Data Offset (fabrics).
    pub icdoff: u16,
    /// Fabrics Controller Attributes.
    pub fcatt: u8,
    /// Maximum SGL Data Block Descriptors (fabrics).
    pub msdbd: u8,
    /// Optional Fabrics Commands Support.
    pub ofcs: u16,
    /// Discovery Controller Type.
    pub dctype: u8,
    /// Reserved.
    pub reserved1807: [u8; 241],
    /// Power State Descriptors; the first `npss + 1` are valid.
    pub psd: [PowerState; 32],
    /// Vendor Specific.
    pub vs: [u8; 1024],
}

/// I/O command set specific Identify Controller data structure of the NVM command set, CNS 06h.
/// NVM 1.1, "Identify Controller Data Structure, NVM Command Set Specific (CNS 06h, CSI 00h)".
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct IdentifyNvmController {
    /// Verify Size Limit: `1 << vsl` pages of CAP.MPSMIN; 0 for no limit.
    pub vsl: u8,
    /// Write Zeroes Size Limit: `1 << wzsl` pages of CAP.MPSMIN; 0 for no limit.
    pub wzsl: u8,
    /// Write Uncorrectable Size Limit: `1 << wusl` pages of CAP.MPSMIN; 0 for no limit.
    pub wusl: u8,
    /// Dataset Management Ranges Limit: maximum number of ranges per command; 0 for no limit.
    pub dmrl: u8,
    /// Dataset Management Range Size Limit in logical blocks; 0 for no limit.
    pub dmrsl: u32,
    /// Dataset Management Size Limit in logical blocks, of all ranges together; 0 for no limit.
    pub dmsl: u64,
    /// Key Per I/O Capabilities.
    pub kpiocap: u8,
    /// Write Zeroes With Deallocate Size Limit: `1 << wzdsl` pages of CAP.MPSMIN.
    pub wzdsl: u8,
    /// Admin Optional Command Support.
    pub aocs: u16,
    /// Version of the NVM Command Set Specification.
    pub ver: u32,
    /// LBA Migration Queue Format.
    pub lbamqf: u8,
    /// Reserved.
    pub reserved25: [u8; 4071],
}

zero_default!(IdentifyController, IdentifyNvmController);

impl IdentifyNvmController {
    /// AOCS, Reporting Allocated LBA Supported: Get LBA Status reports allocated blocks.
    pub const REPORTS_ALLOCATED: u16 = 1 << 0;
}

impl IdentifyController {
    /// Serial Number as text.
    pub fn serial(&self) -> Text<'_> {
        Text::new(&self.sn)
    }

    /// Model Number as text.
    pub fn model(&self) -> Text<'_> {
        Text::new(&self.mn)
    }

    /// Firmware Revision as text.
    pub fn firmware(&self) -> Text<'_> {
        Text::new(&self.fr)
    }

    /// NVM Subsystem NVMe Qualified Name as text.
    pub fn qualified_name(&self) -> Text<'_> {
        Text::new(&self.subnqn)
    }

    /// Maximum data transfer of a command in bytes, if the minimum page size is `1 << (12 +
    /// mpsmin)` bytes. `None` if there is no limit, or if the limit exceeds 64 bits.
    pub fn max_transfer(&self, mpsmin: u8) -> Option<u64> {
        if self.mdts == 0 {
            return None;
        }
        let shift = 12 + u32::from(mpsmin) + u32::from(self.mdts);
        if shift < u64::BITS { Some(1 << shift) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::assert_layout;

    #[test]
    fn layout() {
        assert_layout!(IdentifyController, 4096, {
            vid: 0, ssvid: 2, sn: 4, mn: 24, fr: 64, rab: 72, ieee: 73, cmic: 76, mdts: 77,
            cntlid: 78, ver: 80, rtd3r: 84, rtd3e: 88, oaes: 92, ctratt: 96, rrls: 100,
            bpcap: 102, reserved103: 103, nssl: 104, reserved108: 108, plsi: 110, cntrltype: 111,
            fguid: 112, crdt1: 128, crdt2: 130, crdt3: 132, crcap: 134, reserved135: 135,
            nvmsr: 253, vwci: 254, mec: 255, oacs: 256, acl: 258, aerl: 259, frmw: 260, lpa: 261,
            elpe: 262, npss: 263, avscc: 264, apsta: 265, wctemp: 266, cctemp: 268, mtfa: 270,
            hmpre: 272, hmmin: 276, tnvmcap: 280, unvmcap: 296, rpmbs: 312, edstt: 316, dsto: 318,
            fwug: 319, kas: 320, hctma: 322, mntmt: 324, mxtmt: 326, sanicap: 328, hmminds: 332,
            hmmaxd: 336, nsetidmax: 338, endgidmax: 340, anatt: 342, anacap: 343, anagrpmax: 344,
            nanagrpid: 348, pels: 352, domainid: 356, kpioc: 358, reserved359: 359, mptfawr: 360,
            reserved362: 362, megcap: 368, tmpthha: 384, reserved385: 385, cqt: 386,
            reserved388: 388, sqes: 512, cqes: 513, maxcmd: 514, nn: 516, oncs: 520, fuses: 522,
            fna: 524, vwc: 525, awun: 526, awupf: 528, icsvscc: 530, nwpc: 531, acwu: 532,
            ocfs: 534, sgls: 536, mnan: 540, maxdna: 544, maxcna: 560, oaqd: 564, rhiri: 568,
            hirt: 569, cmmrtd: 570, nmmrtd: 572, minmrtg: 574, maxmrtg: 575, trattr: 576,
            reserved577: 577, mcudmq: 578, mnsudmq: 580, mcmr: 582, nmcmr: 584, mcdqpc: 586,
            reserved588: 588, subnqn: 768, reserved1024: 1024, ioccsz: 1792, iorcsz: 1796,
            icdoff: 1800, fcatt: 1802, msdbd: 1803, ofcs: 1804, dctype: 1806, reserved1807: 1807,
            psd: 2048, vs: 3072,
        });
        assert_layout!(IdentifyNvmController, 4096, {
            vsl: 0, wzsl: 1, wusl: 2, dmrl: 3, dmrsl: 4, dmsl: 8, kpiocap: 16, wzdsl: 17,
            aocs: 18, ver: 20, lbamqf: 24, reserved25: 25,
        });
    }

    #[test]
    fn transfers() {
        let identify = |mdts| IdentifyController { mdts, ..Default::default() };
        assert_eq!(identify(0).max_transfer(0), None);
        assert_eq!(identify(5).max_transfer(0), Some(128 << 10));
        assert_eq!(identify(5).max_transfer(4), Some(2 << 20));
        assert_eq!(identify(51).max_transfer(0), Some(1 << 63));
        assert_eq!(identify(52).max_transfer(0), None);
        assert_eq!(identify(255).max_transfer(255), None);
    }

    #[test]
    fn text() {
        let identify = IdentifyController {
            sn: super::super::ascii_field("0001"),
            mn: super::super::ascii_field("A Model"),
            fr: super::super::ascii_field("1.0"),
            ..Default::default()
        };
        assert_eq!(identify.serial().to_string(), "0001");
        assert_eq!(identify.model().to_string(), "A Model");
        assert_eq!(identify.firmware().to_string(), "1.0");
        assert!(identify.qualified_name().is_empty());
    }
}
