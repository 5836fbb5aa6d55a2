//! Reservations of a namespace: commands, data structures, and the log page of notifications.
//! Base 2.1, 7.5 to 7.8 and 8.1.22.

use crate::Sqe;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Reservation Capabilities (RESCAP): all types, Persist Through Power Loss (bit 0), and Ignore
/// Existing Key as of revision 1.3 (bit 7).
pub const RESCAP_ALL: u8 = 0xff;
/// Reservation Capabilities: Persist Through Power Loss.
pub const RESCAP_PTPL: u8 = 1 << 0;

/// Reservation Type: the access that a reservation restricts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReservationType {
    /// Only the holder may write.
    WriteExclusive = 1,
    /// Only the holder may read and write.
    ExclusiveAccess = 2,
    /// Only registrants may write; one registrant is the holder.
    WriteExclusiveRegistrantsOnly = 3,
    /// Only registrants may read and write; one registrant is the holder.
    ExclusiveAccessRegistrantsOnly = 4,
    /// Only registrants may write; all registrants are holders.
    WriteExclusiveAllRegistrants = 5,
    /// Only registrants may read and write; all registrants are holders.
    ExclusiveAccessAllRegistrants = 6,
}

impl ReservationType {
    /// All types.
    pub const ALL: [Self; 6] = [
        Self::WriteExclusive,
        Self::ExclusiveAccess,
        Self::WriteExclusiveRegistrantsOnly,
        Self::ExclusiveAccessRegistrantsOnly,
        Self::WriteExclusiveAllRegistrants,
        Self::ExclusiveAccessAllRegistrants,
    ];

    /// Decodes RTYPE; `None` for a reserved value.
    pub fn from_bits(rtype: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == rtype)
    }

    /// True if all registrants are holders.
    pub fn is_of_all_registrants(self) -> bool {
        matches!(self, Self::WriteExclusiveAllRegistrants | Self::ExclusiveAccessAllRegistrants)
    }

    /// True if the type restricts all hosts except the holder, including other registrants.
    pub fn is_of_the_holder_alone(self) -> bool {
        matches!(self, Self::WriteExclusive | Self::ExclusiveAccess)
    }

    /// True if the type restricts reads as well as writes.
    pub fn is_exclusive_access(self) -> bool {
        (self as u8).is_multiple_of(2)
    }
}

/// Reservation Register, dword 10.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationRegister {
    /// Reservation Register Action.
    pub rrega: u8,
    /// Ignore Existing Key.
    pub iekey: bool,
    /// Change Persist Through Power Loss State: 0 no change, 2 clear, 3 set.
    pub cptpl: u8,
}

impl ReservationRegister {
    /// RREGA: register a key.
    pub const REGISTER: u8 = 0;
    /// RREGA: unregister.
    pub const UNREGISTER: u8 = 1;
    /// RREGA: replace the key.
    pub const REPLACE: u8 = 2;

    /// Decodes the command's dwords.
    pub fn decode(sqe: &Sqe) -> Self {
        let dword = sqe.cdw10;
        Self { rrega: dword as u8 & 7, iekey: dword & 1 << 3 != 0, cptpl: (dword >> 30) as u8 }
    }
}

/// Reservation Acquire and Reservation Release, dword 10.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationAction {
    /// RACQA (Acquire) or RRELA (Release).
    pub action: u8,
    /// Ignore Existing Key.
    pub iekey: bool,
    /// Reservation Type.
    pub rtype: u8,
}

impl ReservationAction {
    /// RACQA: acquire.
    pub const ACQUIRE: u8 = 0;
    /// RACQA: preempt.
    pub const PREEMPT: u8 = 1;
    /// RACQA: preempt, and abort commands in flight.
    pub const PREEMPT_AND_ABORT: u8 = 2;
    /// RRELA: release.
    pub const RELEASE: u8 = 0;
    /// RRELA: clear.
    pub const CLEAR: u8 = 1;

    /// Decodes the command's dwords.
    pub fn decode(sqe: &Sqe) -> Self {
        let dword = sqe.cdw10;
        Self { action: dword as u8 & 7, iekey: dword & 1 << 3 != 0, rtype: (dword >> 8) as u8 }
    }
}

/// Reservation Report, dwords 10 and 11.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationReport {
    /// Number of Dwords, 0's based.
    pub numd: u32,
    /// Extended Data Structure: host identifiers have 128 bits.
    pub eds: bool,
}

impl ReservationReport {
    /// Decodes the command's dwords.
    pub fn decode(sqe: &Sqe) -> Self {
        Self { numd: sqe.cdw10, eds: sqe.cdw11 & 1 != 0 }
    }

    /// Size of the host's buffer in bytes.
    pub fn length(&self) -> u64 {
        (u64::from(self.numd) + 1) * 4
    }
}

/// Head of the Reservation Status data structure. In the extended structure, 40 reserved bytes
/// follow.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct ReservationStatus {
    /// Generation.
    pub generation: [u8; 4],
    /// Reservation Type; 0 for none.
    pub rtype: u8,
    /// Number of Registered Controllers, little-endian.
    pub regctl: [u8; 2],
    /// Reserved.
    pub reserved7: [u8; 2],
    /// Persist Through Power Loss State.
    pub ptpls: u8,
    /// Reserved.
    pub reserved10: [u8; 14],
}

/// Offset in bytes of the first Registered Controller Extended data structure in the extended
/// Reservation Status data structure.
pub const EXTENDED_STATUS_HEAD: usize = 64;

/// Registered Controller data structure.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct RegisteredController {
    /// Controller Identifier; [`Self::UNKNOWN`] if the host currently has no controller.
    pub cntlid: u16,
    /// Reservation Status: bit 0 is set if the host holds the reservation.
    pub rcsts: u8,
    /// Reserved.
    pub reserved3: [u8; 5],
    /// Host Identifier.
    pub hostid: u64,
    /// Reservation Key.
    pub rkey: u64,
}

impl RegisteredController {
    /// Value of CNTLID if the registrant, a host, currently has no controller.
    pub const UNKNOWN: u16 = 0xffff;
}

/// Registered Controller Extended data structure.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct RegisteredControllerExtended {
    /// Controller Identifier, as in [`RegisteredController`].
    pub cntlid: u16,
    /// Reservation Status, as in [`RegisteredController`].
    pub rcsts: u8,
    /// Reserved.
    pub reserved3: [u8; 5],
    /// Reservation Key.
    pub rkey: u64,
    /// Host Identifier.
    pub hostid: [u8; 16],
    /// Reserved.
    pub reserved32: [u8; 32],
}

/// Log page Reservation Notification, 80h.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ReservationNotification {
    /// Log Page Count; 0 if there is no notification.
    pub lpcount: u64,
    /// Reservation Notification Log Page Type.
    pub kind: u8,
    /// Number of Available Log Pages: 255 for 255 or more.
    pub available: u8,
    /// Reserved.
    pub reserved10: [u8; 2],
    /// Namespace Identifier.
    pub nsid: u32,
    /// Reserved.
    pub reserved16: [u8; 48],
}

impl ReservationNotification {
    /// Type: empty log page.
    pub const EMPTY: u8 = 0;
    /// Type: the host's registration was preempted.
    pub const REGISTRATION_PREEMPTED: u8 = 1;
    /// Type: the reservation was released.
    pub const RESERVATION_RELEASED: u8 = 2;
    /// Type: the reservation was preempted with all registrations.
    pub const RESERVATION_PREEMPTED: u8 = 3;
}

crate::layout::zero_default!(RegisteredControllerExtended, ReservationNotification);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::assert_layout;

    #[test]
    fn layout() {
        assert_layout!(ReservationStatus, 24, {
            generation: 0, rtype: 4, regctl: 5, reserved7: 7, ptpls: 9, reserved10: 10,
        });
        assert_layout!(RegisteredController, 24, {
            cntlid: 0, rcsts: 2, reserved3: 3, hostid: 8, rkey: 16,
        });
        assert_layout!(RegisteredControllerExtended, 64, {
            cntlid: 0, rcsts: 2, reserved3: 3, rkey: 8, hostid: 16, reserved32: 32,
        });
        assert_layout!(ReservationNotification, 64, {
            lpcount: 0, kind: 8, available: 9, reserved10: 10, nsid: 12, reserved16: 16,
        });
    }

    #[test]
    fn fields_of_the_commands() {
        let sqe = Sqe { cdw10: 3 << 30 | 1 << 3 | 2, ..Sqe::default() };
        let register = ReservationRegister { rrega: 2, iekey: true, cptpl: 3 };
        assert_eq!(ReservationRegister::decode(&sqe), register);
        let sqe = Sqe { cdw10: 6 << 8 | 1, ..Sqe::default() };
        let action = ReservationAction { action: 1, iekey: false, rtype: 6 };
        assert_eq!(ReservationAction::decode(&sqe), action);
        let sqe = Sqe { cdw10: u32::MAX, cdw11: 1, ..Sqe::default() };
        let report = ReservationReport::decode(&sqe);
        assert!(report.eds && report.length() == 1 << 34);
    }

    #[test]
    fn types() {
        let kinds: Vec<_> = (0..=255).filter_map(ReservationType::from_bits).collect();
        assert_eq!(kinds, ReservationType::ALL);
        let bits = |is: fn(ReservationType) -> bool| {
            kinds.iter().filter(|kind| is(**kind)).map(|kind| *kind as u8).collect::<Vec<_>>()
        };
        assert_eq!(bits(ReservationType::is_of_all_registrants), [5, 6]);
        assert_eq!(bits(ReservationType::is_of_the_holder_alone), [1, 2]);
        assert_eq!(bits(ReservationType::is_exclusive_access), [2, 4, 6]);
    }
}
