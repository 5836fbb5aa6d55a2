//! Zoned Namespace command set: command dwords, Identify structures and zone reports.
//!
//! *ZNS* is the NVM Express Zoned Namespace Command Set Specification 1.1.

use crate::layout::zero_default;
use crate::opcode::NvmOpcode;
use crate::sqe::Sqe;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Zone State, as encoded in bits 7:4 of a zone descriptor's ZS byte. ZNS, "Zone State Machine".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ZoneState {
    /// Empty: no block of the zone was written since the zone's last reset.
    Empty = 0x1,
    /// Implicitly Opened: a write has opened the zone.
    ImplicitlyOpen = 0x2,
    /// Explicitly Opened: an Open Zone command has opened the zone.
    ExplicitlyOpen = 0x3,
    /// Closed: the zone is active but not open. It need not contain data: Set Zone Descriptor
    /// Extension also changes an empty zone to this state.
    Closed = 0x4,
    /// Read only: the zone can be read, but neither written nor reset.
    ReadOnly = 0xd,
    /// Full: the zone cannot be written before a reset.
    Full = 0xe,
    /// Offline: the zone can be neither read nor written.
    Offline = 0xf,
}

impl ZoneState {
    /// All states, in ascending order.
    pub const ALL: [Self; 7] = [
        Self::Empty,
        Self::ImplicitlyOpen,
        Self::ExplicitlyOpen,
        Self::Closed,
        Self::ReadOnly,
        Self::Full,
        Self::Offline,
    ];

    /// Decodes the field; `None` for a reserved value.
    pub fn from_bits(bits: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|state| *state as u8 == bits)
    }

    /// True if the zone counts for Maximum Open Resources.
    pub const fn is_open(self) -> bool {
        matches!(self, Self::ImplicitlyOpen | Self::ExplicitlyOpen)
    }

    /// True if the zone counts for Maximum Active Resources.
    pub const fn is_active(self) -> bool {
        self.is_open() || matches!(self, Self::Closed)
    }

    /// True if the write pointer is valid.
    pub const fn has_write_pointer(self) -> bool {
        self.is_active() || matches!(self, Self::Empty)
    }

    /// Name in nvme-cli.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Empty => "EMPTY",
            Self::ImplicitlyOpen => "IMP_OPENED",
            Self::ExplicitlyOpen => "EXP_OPENED",
            Self::Closed => "CLOSED",
            Self::ReadOnly => "READONLY",
            Self::Full => "FULL",
            Self::Offline => "OFFLINE",
        }
    }
}

/// Zone Send Action. ZNS, "Zone Management Send command".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ZoneAction {
    /// Close Zone.
    Close = 0x01,
    /// Finish Zone.
    Finish = 0x02,
    /// Open Zone.
    Open = 0x03,
    /// Reset Zone.
    Reset = 0x04,
    /// Offline Zone.
    Offline = 0x05,
    /// Set Zone Descriptor Extension.
    SetExtension = 0x10,
}

impl ZoneAction {
    /// All actions.
    pub const ALL: [Self; 6] =
        [Self::Close, Self::Finish, Self::Open, Self::Reset, Self::Offline, Self::SetExtension];

    /// Decodes the field; `None` for a reserved value.
    pub fn from_bits(bits: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|action| *action as u8 == bits)
    }
}

/// Zone Management Send. ZNS, "Zone Management Send command".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZoneManagementSend {
    /// Starting LBA of the zone, CDW11 and CDW10.
    pub slba: u64,
    /// Zone Send Action, CDW13 7:0; see [`ZoneAction`].
    pub zsa: u8,
    /// Select All, CDW13 bit 8.
    pub all: bool,
    /// Zone Send Action Specific Option, CDW13 bit 9.
    pub zsaso: bool,
}

impl ZoneManagementSend {
    /// Decodes the command's dwords.
    pub const fn decode(sqe: &Sqe) -> Self {
        Self {
            slba: sqe.cdw10_11(),
            zsa: sqe.cdw13 as u8,
            all: sqe.cdw13 & 1 << 8 != 0,
            zsaso: sqe.cdw13 & 1 << 9 != 0,
        }
    }

    /// Encodes the fields into a command.
    pub const fn encode(self, nsid: u32, cid: u16) -> Sqe {
        let mut sqe = Sqe::new(NvmOpcode::ZoneManagementSend as u8, cid, nsid);
        sqe.cdw10 = self.slba as u32;
        sqe.cdw11 = (self.slba >> 32) as u32;
        sqe.cdw13 = self.zsa as u32 | (self.all as u32) << 8 | (self.zsaso as u32) << 9;
        sqe
    }
}

/// Zone Management Receive. ZNS, "Zone Management Receive command".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZoneManagementReceive {
    /// An LBA in the first zone of the report, CDW11 and CDW10.
    pub slba: u64,
    /// Number of dwords, 0's based, CDW12.
    pub nd0: u32,
    /// Zone Receive Action, CDW13 7:0.
    pub zra: u8,
    /// Zone Receive Action Specific Field, CDW13 15:8, which selects the reported zones.
    pub zrasf: u8,
    /// Partial Report, CDW13 bit 16.
    pub partial: bool,
}

impl ZoneManagementReceive {
    /// [`zra`](Self::zra): Report Zones.
    pub const REPORT: u8 = 0;
    /// [`zra`](Self::zra): Extended Report Zones.
    pub const EXTENDED_REPORT: u8 = 1;

    /// Decodes the command's dwords.
    pub const fn decode(sqe: &Sqe) -> Self {
        Self {
            slba: sqe.cdw10_11(),
            nd0: sqe.cdw12,
            zra: sqe.cdw13 as u8,
            zrasf: (sqe.cdw13 >> 8) as u8,
            partial: sqe.cdw13 & 1 << 16 != 0,
        }
    }

    /// Encodes the fields into a command.
    pub const fn encode(self, nsid: u32, cid: u16) -> Sqe {
        let mut sqe = Sqe::new(NvmOpcode::ZoneManagementReceive as u8, cid, nsid);
        sqe.cdw10 = self.slba as u32;
        sqe.cdw11 = (self.slba >> 32) as u32;
        sqe.cdw12 = self.nd0;
        sqe.cdw13 = self.zra as u32 | (self.zrasf as u32) << 8 | (self.partial as u32) << 16;
        sqe
    }

    /// Length of the data in bytes.
    pub const fn length(&self) -> u64 {
        (self.nd0 as u64 + 1) * 4
    }

    /// State of the zones to report. `Some(None)` means all zones; `None` means that the field has
    /// a reserved value.
    pub const fn which(&self) -> Option<Option<ZoneState>> {
        Some(match self.zrasf {
            0 => None,
            1 => Some(ZoneState::Empty),
            2 => Some(ZoneState::ImplicitlyOpen),
            3 => Some(ZoneState::ExplicitlyOpen),
            4 => Some(ZoneState::Closed),
            5 => Some(ZoneState::Full),
            6 => Some(ZoneState::ReadOnly),
            7 => Some(ZoneState::Offline),
            _ => return None,
        })
    }
}

/// Head of a zone report. ZNS, "Report Zones Data Structure".
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ZoneReportHeader {
    /// Number of Zones.
    pub zones: u64,
    /// Reserved.
    pub reserved8: [u8; 56],
}

/// Zone Descriptor. ZNS, "Zone Descriptor Data Structure".
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ZoneDescriptor {
    /// Zone Type, in bits 3:0: 2 for Sequential Write Required.
    pub zt: u8,
    /// Zone State, in bits 7:4; see [`ZoneState`].
    pub zs: u8,
    /// Zone Attributes; see [`ZoneDescriptor::EXTENSION_VALID`].
    pub za: u8,
    /// Zone Attributes Information.
    pub zai: u8,
    /// Reserved.
    pub reserved4: [u8; 4],
    /// Zone Capacity in logical blocks.
    pub zcap: u64,
    /// Zone Start Logical Block Address.
    pub zslba: u64,
    /// Write Pointer.
    pub wp: u64,
    /// Reserved.
    pub reserved32: [u8; 32],
}

impl ZoneDescriptor {
    /// [`zt`](Self::zt): Sequential Write Required.
    pub const SEQUENTIAL_WRITE_REQUIRED: u8 = 2;
    /// [`za`](Self::za): Zone Descriptor Extension Valid.
    pub const EXTENSION_VALID: u8 = 1 << 7;
}

/// Extended LBA format of a zoned namespace. ZNS, "LBA Format Extension Data Structure".
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct ZonedLbaFormat {
    /// Zone Size in logical blocks.
    pub zsze: u64,
    /// Zone Descriptor Extension Size in units of 64 bytes.
    pub zdes: u8,
    /// Reserved.
    pub reserved9: [u8; 7],
}

/// Identify Namespace of the Zoned Namespace command set. ZNS, "I/O Command Set Specific Identify
/// Namespace Data Structure".
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct IdentifyZonedNamespace {
    /// Zone Operation Characteristics.
    pub zoc: u16,
    /// Optional Zoned Command Support; see [`IdentifyZonedNamespace::READ_ACROSS`].
    pub ozcs: u16,
    /// Maximum Active Resources, 0's based; FFFFFFFFh for no limit.
    pub mar: u32,
    /// Maximum Open Resources, 0's based; FFFFFFFFh for no limit.
    pub mor: u32,
    /// Reset Recommended Limit.
    pub rrl: u32,
    /// Finish Recommended Limit.
    pub frl: u32,
    /// Reset Recommended Limits 1 to 3.
    pub rrl123: [u32; 3],
    /// Finish Recommended Limits 1 to 3.
    pub frl123: [u32; 3],
    /// Number of Zone Random Write Area Resources.
    pub numzrwa: u32,
    /// Zone Random Write Area Flush Granularity.
    pub zrwafg: u16,
    /// Zone Random Write Area Size.
    pub zrwasz: u16,
    /// Zone Random Write Area Capability.
    pub zrwacap: u8,
    /// Reserved.
    pub reserved53: [u8; 2763],
    /// LBA Format Extensions, one per LBA format.
    pub lbafe: [ZonedLbaFormat; 64],
    /// Vendor specific.
    pub vendor: [u8; 256],
}

impl IdentifyZonedNamespace {
    /// [`ozcs`](Self::ozcs) bit: Read Across Zone Boundaries.
    pub const READ_ACROSS: u16 = 1 << 0;
}

/// Identify Controller of the Zoned Namespace command set. ZNS, "I/O Command Set Specific Identify
/// Controller Data Structure".
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct IdentifyZonedController {
    /// Zone Append Size Limit: `1 << zasl` pages of CAP.MPSMIN; 0 if MDTS is the limit.
    pub zasl: u8,
    /// Reserved.
    pub reserved1: [u8; 4095],
}

zero_default!(ZoneReportHeader, ZoneDescriptor, IdentifyZonedNamespace, IdentifyZonedController);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::assert_layout;
    use proptest::prelude::*;

    #[test]
    fn layout() {
        assert_layout!(ZoneReportHeader, 64, { zones: 0, reserved8: 8 });
        assert_layout!(ZoneDescriptor, 64, {
            zt: 0, zs: 1, za: 2, zai: 3, reserved4: 4, zcap: 8, zslba: 16, wp: 24, reserved32: 32,
        });
        assert_layout!(ZonedLbaFormat, 16, { zsze: 0, zdes: 8, reserved9: 9 });
        assert_layout!(IdentifyZonedNamespace, 4096, {
            zoc: 0, ozcs: 2, mar: 4, mor: 8, rrl: 12, frl: 16, rrl123: 20, frl123: 32,
            numzrwa: 44, zrwafg: 48, zrwasz: 50, zrwacap: 52, reserved53: 53, lbafe: 2816,
            vendor: 3840,
        });
        assert_layout!(IdentifyZonedController, 4096, { zasl: 0, reserved1: 1 });
    }

    #[test]
    fn fields_have_the_positions_of_the_specification() {
        let send = ZoneManagementSend { slba: 0x1_0000_0002, zsa: 4, all: true, zsaso: true };
        let sqe = send.encode(7, 9);
        assert_eq!((sqe.opcode, sqe.nsid, sqe.cid), (0x79, 7, 9));
        assert_eq!((sqe.cdw10, sqe.cdw11, sqe.cdw13), (2, 1, 0x304));
        let receive = ZoneManagementReceive { slba: 3, nd0: 1023, zra: 1, zrasf: 5, partial: true };
        let sqe = receive.encode(7, 9);
        assert_eq!((sqe.opcode, sqe.cdw12, sqe.cdw13), (0x7a, 1023, 0x1_0501));
        assert_eq!((receive.length(), receive.which()), (4096, Some(Some(ZoneState::Full))));
        assert_eq!(ZoneManagementReceive { nd0: u32::MAX, ..receive }.length(), 4 << 32);
        assert_eq!(ZoneManagementReceive { zrasf: 8, ..receive }.which(), None);
    }

    #[test]
    fn states_and_actions_have_their_numbers() {
        let numbers = ZoneState::ALL.map(|state| state as u8);
        assert_eq!(numbers, [1, 2, 3, 4, 13, 14, 15]);
        for bits in 0..=255 {
            let state = ZoneState::from_bits(bits);
            assert_eq!(state.is_some(), numbers.contains(&bits));
            assert_eq!(state.map_or(bits, |state| state as u8), bits);
            let action = ZoneAction::from_bits(bits);
            assert_eq!(action.is_some(), matches!(bits, 1..=5 | 0x10));
        }
        let counts = |which: fn(ZoneState) -> bool| ZoneState::ALL.map(which);
        assert_eq!(counts(ZoneState::is_open), [false, true, true, false, false, false, false]);
        assert_eq!(counts(ZoneState::is_active), [false, true, true, true, false, false, false]);
    }

    proptest! {
        #[test]
        fn any_zoned_command_is_decoded_as_encoded(slba: u64, zsa: u8, all: bool, zsaso: bool, nd0: u32) {
            let send = ZoneManagementSend { slba, zsa, all, zsaso };
            prop_assert_eq!(ZoneManagementSend::decode(&send.encode(1, 2)), send);
            let receive =
                ZoneManagementReceive { slba, nd0, zra: zsa, zrasf: !zsa, partial: all };
            prop_assert_eq!(ZoneManagementReceive::decode(&receive.encode(1, 2)), receive);
        }
    }
}
